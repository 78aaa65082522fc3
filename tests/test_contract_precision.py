"""16-bit parameters train as their exact fp32 masters do, and cost the bytes they should."""

import dataclasses
import gc

import pytest
import torch
import torch.distributed as dist
from models import (
    SHAPES,
    LinearForm,
    Twin,
    assert_ranks_agree,
    assert_same,
    averaged,
    coefficients,
    decay_groups,
    full_gradients,
    letter_batches,
    letters,
    plain_step,
    train,
    weights,
)
from ranks import run

import zeroshard
from zeroshard.errors import ConfigError

stages = pytest.mark.parametrize("stage", [1, 2, 3])
REDUCES = ("auto", "fp32", "wire16", "param")
inf = float("inf")


def assert_rounded(got, exact, what, *, slack):
    """`got` is `exact`, off by at most `slack` of itself before rounding to the 16-bit dtype.

    Rounding is monotone, so the result lies between the roundings of both bounds. This allows
    either direction where `exact` is a tie: a split master rounds ties away from zero.
    """
    for name, value in got.items():
        margin = slack * (exact[name].abs() + 1e-3)
        low = (exact[name] - margin).to(value.dtype)
        high = (exact[name] + margin).to(value.dtype)
        outside = (value < low) | (value > high)
        assert not outside.any(), f"{what}: {int(outside.sum())} elements of {name} are off"


class Masters:
    """A 16-bit `LinearForm` under zeroshard, and its fp32 master under torch's fused AdamW."""

    settings = {"lr": 1e-3, "weight_decay": 0.1}

    def __init__(self, rank, world_size, dtype, stage, **precision):
        self.rank, self.world_size = rank, world_size
        self.model = LinearForm(SHAPES, dtype)
        self.exact = LinearForm(SHAPES)
        self.exact.load_state_dict(weights(self.model))
        self.optimizer = zeroshard.AdamW(
            self.model, stage=stage, precision=zeroshard.Precision(**precision), **self.settings
        )
        self.plain = torch.optim.AdamW(self.exact.parameters(), fused=True, **self.settings)

    def step(self, draw):
        parts = [coefficients(self.model, r, self.world_size, draw) for r in range(self.world_size)]
        self.model(parts[self.rank]).backward()
        mean = averaged(parts, self.world_size)
        gradients = {name: g.float() for name, g in full_gradients(self.model).items()}
        assert_same(gradients, mean, "gradients")
        plain_step(self.exact, self.plain, mean)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self, what, *, slack):
        assert_rounded(weights(self.model), weights(self.exact), what, slack=slack)


# Masters and moments silently in bf16: accelerate#3979.
@pytest.mark.parametrize(
    ("dtype", "master"),
    [
        (torch.bfloat16, "auto"),
        (torch.bfloat16, "split"),
        (torch.bfloat16, "fp32"),
        (torch.float16, "auto"),
        (torch.float16, "fp32"),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
@stages
def test_a_16_bit_parameter_is_its_fp32_master_rounded(stage, dtype, master):
    def body(rank, world_size):
        for reduce in REDUCES:
            masters = Masters(rank, world_size, dtype, stage, master=master, reduce=reduce)
            for draw in range(5):
                masters.step(draw)
                # A few roundings in fp32 a step, if the update is not torch's own kernel.
                masters.check(f"reduce={reduce}, {draw}", slack=(draw + 1) * 2**-22)
            assert_ranks_agree(weights(masters.model), f"reduce={reduce}")

    run(body)


@stages
def test_without_a_master_the_parameter_itself_is_rounded_at_every_step(stage):
    def body(rank, world_size):
        for reduce in REDUCES:
            masters = Masters(rank, world_size, torch.bfloat16, stage, master="none", reduce=reduce)
            for draw in range(4):
                # From where the parameters are now; averages do not depend on weights here.
                masters.exact.load_state_dict(weights(masters.model))
                masters.step(draw)
                masters.check(f"reduce={reduce}, {draw}", slack=2**-21)

    run(body)


@pytest.mark.parametrize("master", ["auto", "split", "fp32", "none"])
def test_all_stages_end_bitwise_equal_in_16_bits(master):
    def body(rank, world_size):
        for reduce in REDUCES:
            precision = zeroshard.Precision(master=master, reduce=reduce)
            expected = None
            for stage, bucket_mb in ((1, 25), (2, 25), (2, 4e-3), (3, 25)):
                model = letters(dtype=torch.bfloat16)
                optimizer = zeroshard.AdamW(
                    decay_groups(model),
                    lr=1e-2,
                    model=model,
                    stage=stage,
                    bucket_mb=bucket_mb,
                    precision=precision,
                    max_grad_norm=1.0,
                )
                got = train(model, optimizer, letter_batches(rank)[:2])
                expected = expected or got
                assert_same(got, expected, f"stage {stage}, {bucket_mb} MB, reduce={reduce}")
                assert_ranks_agree(got, f"reduce={reduce}")

    run(body, 3)


@stages
def test_every_reduction_is_exact_for_fp32_parameters_where_16_bits_suffice(stage):
    def body(rank, world_size):
        for reduce in REDUCES:
            precision = zeroshard.Precision(reduce=reduce)
            twin = Twin(rank, world_size, stage=stage, precision=precision, bucket_mb=1e-3)
            for step in range(2):
                with twin.optimizer.no_sync():
                    twin.backward(2 * step)
                twin.backward(2 * step + 1)
                twin.step()
                twin.check(f"reduce={reduce}, step {step}")

    run(body, 3)


@stages
def test_16_bit_gradients_are_summed_in_fp32_unless_asked_otherwise(stage):
    def body(rank, world_size):
        for reduce in REDUCES:
            model = LinearForm({"weight": (300,)}, torch.bfloat16)
            precision = zeroshard.Precision(reduce=reduce)
            zeroshard.AdamW(model, stage=stage, precision=precision)
            model({"weight": torch.full((300,), 256.0 if rank == 0 else 1.0)}).backward()
            got = model.weight.grad.full_tensor().float()
            if reduce == "param":
                # 128.5 is a tie of bf16, whichever way it is halved and added.
                assert ((got == 128) | (got == 129)).all()
            else:
                assert model.weight.grad.dtype == torch.float32
                assert (got == 128.5).all(), f"reduce={reduce}: {got[0]}"

    run(body)


@stages
def test_16_bit_gradients_of_several_backwards_add_up_in_fp32(stage):
    def body(rank, world_size):
        model = LinearForm({"weight": (300,)}, torch.bfloat16)
        zeroshard.AdamW(model, stage=stage)
        for value in (256.0, 1.0, 1.0):
            model({"weight": torch.full((300,), value)}).backward()
        # In bf16 256 + 1 is 256.
        assert (model.weight.grad.full_tensor() == 258.0).all()

    run(body)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@stages
def test_masters_work_without_a_process_group(stage, dtype):
    def body(rank, world_size):
        masters = Masters(rank, world_size, dtype, stage)
        for draw in range(8):
            masters.step(draw)
            masters.check(f"{draw}", slack=(draw + 1) * 2**-22)

    run(body, 1, process_group=False)


@stages
def test_small_updates_are_not_lost_in_bf16(stage):
    def body(rank, world_size):
        for master, moved in (("auto", True), ("split", True), ("fp32", True), ("none", False)):
            model = LinearForm({"weight": (300,)}, torch.bfloat16)
            with torch.no_grad():
                model.weight.fill_(1.0)
            precision = zeroshard.Precision(master=master)
            optimizer = zeroshard.AdamW(
                model, lr=4e-4, weight_decay=0.0, stage=stage, precision=precision
            )
            for _ in range(15):
                model({"weight": torch.ones(300)}).backward()
                optimizer.step()
                optimizer.zero_grad()
            # Fifteen updates of 4e-4 reach 0.994, between 1 - 2**-8 and 1 - 2**-7; one alone
            # rounds back to 1.
            wanted = torch.tensor(0.994).bfloat16() if moved else 1.0
            got = weights(model)["weight"]
            assert (got == wanted).all(), f"{master}: {got[0]}"

    run(body)


@stages
def test_param_dtype_casts_an_fp32_model_and_keeps_the_exact_values_in_the_master(stage):
    def body(rank, world_size):
        for master in ("auto", "split", "fp32"):
            model, exact = LinearForm(SHAPES), LinearForm(SHAPES)
            precision = zeroshard.Precision(param_dtype=torch.bfloat16, master=master)
            settings = {"lr": 1e-4, "weight_decay": 0.0}
            held = list(model.parameters())
            optimizer = zeroshard.AdamW(model, stage=stage, precision=precision, **settings)
            assert all(p.dtype == torch.bfloat16 for p in model.parameters())
            assert [id(p) for p in held] == [id(p) for p in model.parameters()]
            assert_rounded(weights(model), weights(exact), "cast", slack=0.0)
            plain = torch.optim.AdamW(exact.parameters(), fused=True, **settings)
            for draw in range(5):
                parts = [coefficients(model, r, world_size, draw) for r in range(world_size)]
                model(parts[rank]).backward()
                plain_step(exact, plain, averaged(parts, world_size))
                optimizer.step()
                optimizer.zero_grad()
                # Updates of 1e-4 are far below a bf16 ulp: from a rounded start they would be off.
                assert_rounded(
                    weights(model), weights(exact), f"{master} {draw}", slack=(draw + 1) * 2**-22
                )

    run(body)


@stages
def test_fp16_with_a_grad_scaler_trains_and_skips_overflows(stage):
    def body(rank, world_size):
        masters = Masters(rank, world_size, torch.float16, stage)
        # A rank's gradients reach 8, which overflows fp16 until the scale is 2**12.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=100)
        scales, num_steps = [], 0
        for draw in range(6):
            parts = [coefficients(masters.model, r, world_size, draw) for r in range(world_size)]
            scaler.scale(masters.model(parts[rank])).backward()
            scaler.unscale_(masters.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(masters.model.parameters(), inf).item()
            before = scaler.get_scale()
            scaler.step(masters.optimizer)
            scaler.update()
            masters.optimizer.zero_grad()
            scales.append(scaler.get_scale())
            if scales[-1] == before:
                plain_step(masters.exact, masters.plain, averaged(parts, world_size))
                num_steps += 1
                assert norm < inf
            masters.check(f"{draw}", slack=(draw + 1) * 2**-22)
        assert scales == [2.0**14, 2.0**13, 2.0**12, 2.0**12, 2.0**12, 2.0**12]
        assert num_steps == 3
        assert_ranks_agree({"scale": torch.tensor(scaler.get_scale())}, "scales")

    run(body)


@pytest.mark.parametrize("master", ["auto", "split", "fp32"])
@stages
def test_a_mixed_model_takes_a_master_only_where_it_needs_one(stage, master):
    def body(rank, world_size):
        shapes = {"weight": (300, 7), "bias": (13,)}
        model = LinearForm(shapes)
        model.half_weight = torch.nn.Parameter(torch.randn(300, 7).bfloat16())
        precision = zeroshard.Precision(master=master)
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage, precision=precision)
        plain_model = LinearForm(shapes)
        plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-2, fused=True)
        for draw in range(3):
            parts = [coefficients(model, r, world_size, draw) for r in range(world_size)]
            model(parts[rank]).backward()
            plain_step(plain_model, plain, averaged(parts, world_size))
            optimizer.step()
            optimizer.zero_grad()
        got = weights(model)
        assert got.pop("half_weight").dtype == torch.bfloat16
        assert_same(got, weights(plain_model), "fp32 parameters")
        each = 4 if master == "fp32" else 2
        assert optimizer.memory()["master"] * world_size <= each * (2100 + 2 * 256)

    run(body)


WRONG = [
    {"master": "fp16"},
    {"moments": "fp8"},
    {"reduce": "int8"},
    {"param_dtype": torch.float64},
    {"param_dtype": "bf16"},
]


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_a_precision_that_does_not_exist_is_refused(fields):
    def body(rank, world_size):
        model = LinearForm(SHAPES, torch.bfloat16)
        with pytest.raises(ConfigError, match=next(iter(fields))):
            zeroshard.AdamW(model, precision=zeroshard.Precision(**fields))

    run(body)


@stages
def test_a_split_master_of_fp16_is_refused(stage):
    def body(rank, world_size):
        precision = zeroshard.Precision(master="split")
        with pytest.raises(ConfigError, match="split"):
            zeroshard.AdamW(LinearForm(SHAPES, torch.float16), stage=stage, precision=precision)
        for wrong in ("split", torch.bfloat16, {"master": "split"}):
            with pytest.raises(ConfigError, match="precision"):
                zeroshard.AdamW(LinearForm(SHAPES), stage=stage, precision=wrong)

    run(body)


def test_precision_is_frozen_and_keyword_only():
    assert dataclasses.asdict(zeroshard.Precision()) == {
        "master": "auto",
        "moments": "fp32",
        "reduce": "auto",
        "param_dtype": None,
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        zeroshard.Precision().master = "split"


LARGE = {"first": (301, 512), "second": (257, 300), "third": (70_001,), "bias": (512,)}
NUM_ELEMENTS = 301 * 512 + 257 * 300 + 70_001 + 512


def live_bytes():
    """Bytes of all tensors that Python can reach, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            local = thing.to_local() if hasattr(thing, "to_local") else thing
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("dtype", "master", "parameter_bytes", "master_bytes"),
    [
        (torch.float32, "auto", 4, 0),
        (torch.bfloat16, "auto", 2, 2),
        (torch.bfloat16, "split", 2, 2),
        (torch.bfloat16, "fp32", 2, 4),
        (torch.bfloat16, "none", 2, 0),
        (torch.float16, "auto", 2, 4),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
@stages
def test_memory_is_divided_by_the_ranks_and_really_held(
    stage, world_size, dtype, master, parameter_bytes, master_bytes
):
    def body(rank, world_size):
        before = live_bytes()
        model = LinearForm(LARGE, dtype)
        optimizer = zeroshard.AdamW(
            model, stage=stage, precision=zeroshard.Precision(master=master)
        )
        gradients = {name: torch.ones(shape) for name, shape in LARGE.items()}
        expected = {
            "parameters": parameter_bytes / (world_size if stage == 3 else 1),
            "moments": 8 / world_size,
            "master": master_bytes / world_size,
        }

        def check(when):
            memory = optimizer.memory()
            assert memory["optimizer_state"] == memory["master"] + memory["moments"]
            for key, each in expected.items():
                held = memory[key] / NUM_ELEMENTS
                assert held == pytest.approx(each, rel=0.01), f"{key} {when}: {held:.3f} bytes"
            if stage == 3:
                assert memory["unsharded_parameters"] == 0, when
            return memory

        check("at construction")
        for _ in range(2):
            model(gradients).backward()
            memory = check("after backward")
            gradient_bytes = memory["gradients"] / NUM_ELEMENTS
            if stage >= 2:
                assert gradient_bytes == pytest.approx(4 / world_size, rel=0.01)
                assert memory["communication"] == 0, "buckets are released with the backward"
            else:
                assert gradient_bytes >= 0.99 * 4 / world_size
            optimizer.step()
            optimizer.zero_grad()
        memory = check("at rest")
        counted = sum(memory.values()) - memory["optimizer_state"]
        live = live_bytes() - before - 4 * NUM_ELEMENTS  # without the coefficients made here
        # Tables of hyperparameters and indices are a few kilobytes.
        assert counted == pytest.approx(live, rel=0.01, abs=32768)

    run(body, world_size)


# DeepSpeed#1302, DeepSpeed#4305: stage 2 takes more than stage 1, and stage 3 more than stage 2.
def test_every_stage_holds_less_than_the_one_before():
    def body(rank, world_size):
        held = []
        for stage in (1, 2, 3):
            model = LinearForm(LARGE)
            optimizer = zeroshard.AdamW(model, stage=stage)
            model({name: torch.ones(shape) for name, shape in LARGE.items()}).backward()
            memory = optimizer.memory()
            held.append(sum(memory.values()) - memory["optimizer_state"])
            assert memory["gradients"] >= 0.99 * 4 * NUM_ELEMENTS / world_size
        assert held[1] < held[0], "stage 1 keeps its full buffers"
        assert held[2] < held[1], "stages 1 and 2 keep whole parameters"
        for one in held[1:]:
            smallest = torch.tensor(one)
            dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
            assert one <= 1.01 * int(smallest), "the ranks hold about the same"

    run(body)
