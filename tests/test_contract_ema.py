"""An average over fp32 masters costs 1/W of the memory and is a hand-written loop, bit for bit."""

import copy
import gc
import io

import pytest
import torch
import torch.distributed as dist
from models import (
    SHAPES,
    SplitForm,
    Twin,
    assert_ranks_agree,
    assert_same,
    coefficients,
    gathered,
    letter_batches,
    letters,
    loss_of,
    train,
    weights,
    writing,
)
from ranks import run
from torch import nn
from weight_files import in_every_stage

import zeroshard
from zeroshard.errors import ConfigError

DECAY = 0.9

# What the parameters are stored as: dtype, and the copy of higher precision beside it.
KINDS = {
    "fp32": (torch.float32, "auto"),
    "split": (torch.bfloat16, "split"),
    "fp32 master": (torch.bfloat16, "fp32"),
    "fp16": (torch.float16, "fp32"),
}
kinds = pytest.mark.parametrize("kind", KINDS)


class Loop:
    """The average as one writes it by hand, on full copies."""

    def __init__(self, values, decay=DECAY):
        self.decay = decay
        self.average = {name: value.detach().float().clone() for name, value in values.items()}

    def update(self, values):
        for name, average in self.average.items():
            average.copy_(torch.lerp(average, values[name].detach().float(), 1 - self.decay))


def named(model):
    """What tells an optimizer the names of its parameters where it is not given the module."""
    return list(model.named_parameters())


def averages(ema):
    """The full averages on every rank. Communicates."""
    found = {}
    for name, value in ema.state_dict()["average"].items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name] = whole.clone()
    return found


def masters(optimizer, model):
    """The exact fp32 value of every trainable parameter, on every rank. Communicates."""
    found = weights(model)
    optimizer.consolidate_state_dict(to=0)
    payload = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        payload = [optimizer.state_dict()["state"]]
    if dist.is_initialized():
        dist.broadcast_object_list(payload, 0)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    names = {p: name for name, p in model.named_parameters()}
    exact = {}
    for index, p in enumerate(held):
        entry = payload[0].get(index)
        if entry is not None:
            exact[names[p]] = entry.get("master", found[names[p]])
    return exact


def trained(rank, world_size, stage, kind, **options):
    """A model one step into its training, so that its masters differ from its parameters."""
    dtype, master = KINDS[kind]
    model = SplitForm(SHAPES, dtype)
    precision = zeroshard.Precision(master=master)
    options = {"lr": 1e-2, "weight_decay": 0.1, "precision": precision, **options}
    optimizer = zeroshard.AdamW(model, stage=stage, **options)
    steps(rank, world_size, model, optimizer, range(1))
    return model, optimizer


def steps(rank, world_size, model, optimizer, draws):
    for draw in draws:
        model(coefficients(model, rank, world_size, draw)).backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model, optimizer):
    """Full parameters, and this rank's masters and moments, for comparisons bit by bit."""
    found = weights(model)
    names = {p: name for name, p in model.named_parameters()}
    for p, entry in optimizer.state.items():
        for key, value in entry.items():
            local = value.to_local() if hasattr(value, "to_local") else value
            found[f"{names[p]}: {key}"] = torch.as_tensor(local).clone()
    return found


# --- the average


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_in_fp32_the_average_is_bitwise_a_hand_written_loop(world_size):
    def body(rank, world_size, stage):
        for bucket_mb in (25, 1e-3):
            twin = Twin(rank, world_size, groups=named, stage=stage, bucket_mb=bucket_mb)
            twin.backward(0)
            twin.step()
            ema = zeroshard.EMA(twin.optimizer, decay=DECAY)
            loop = Loop(dict(twin.plain_model.named_parameters()))
            assert_same(averages(ema), loop.average, "at construction")
            for draw in range(1, 5):
                # Once with a parameter that has no gradient and is not touched by the step.
                names = (lambda rank: set(SHAPES) - {"pair"}) if draw == 2 else None
                twin.backward(draw, names)
                twin.step()
                loop.update(dict(twin.plain_model.named_parameters()))
                assert_same(averages(ema), loop.average, f"after step {draw}")
            assert ema.state_dict()["num_updates"] == 4
            twin.check("the weights themselves")
            moved = loop.average["matrix" if stage < 3 else "parts.0.matrix"]
            assert not moved.equal(twin.plain_model.matrix)

    in_every_stage(body, world_size)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
def test_every_decay_is_bitwise_that_of_torchs_lerp(decay):
    def body(rank, world_size):
        for stage in (2, 3):
            twin = Twin(rank, world_size, groups=named, stage=stage)
            ema = zeroshard.EMA(twin.optimizer, decay=decay)
            loop = Loop(dict(twin.plain_model.named_parameters()), decay)
            for draw in range(3):
                twin.backward(draw)
                twin.step()
                loop.update(dict(twin.plain_model.named_parameters()))
            assert_same(averages(ema), loop.average, f"decay {decay}")
            assert ema.state_dict()["decay"] == decay

    run(body)


@kinds
def test_the_average_is_that_of_the_fp32_masters_and_not_of_rounded_parameters(kind):
    def body(rank, world_size, stage):
        model, optimizer = trained(rank, world_size, stage, kind)
        ema = zeroshard.EMA(optimizer, decay=DECAY)
        loop = Loop(masters(optimizer, model))
        assert_same(averages(ema), loop.average, "at construction")
        rounded = Loop(weights(model))
        for draw in range(1, 3):
            steps(rank, world_size, model, optimizer, [draw])
            loop.update(masters(optimizer, model))
            rounded.update(weights(model))
            assert_same(averages(ema), loop.average, f"{kind}, step {draw}")
        same = all(rounded.average[n].equal(v) for n, v in loop.average.items())
        assert same == (kind == "fp32")

    in_every_stage(body)


def test_without_a_process_group_the_average_is_the_loop_too():
    def body(rank, world_size, stage):
        twin = Twin(rank, world_size, groups=named, stage=stage)
        ema = zeroshard.EMA(twin.optimizer, decay=DECAY)
        loop = Loop(dict(twin.plain_model.named_parameters()))
        for draw in range(3):
            twin.backward(draw)
            twin.step()
            loop.update(dict(twin.plain_model.named_parameters()))
        state = ema.state_dict()
        assert all(type(v) is torch.Tensor for v in state["average"].values())
        assert_same(dict(state["average"]), loop.average, "alone")
        with ema.swap():
            assert_same(weights(twin.model), loop.average, "swapped in")
            with pytest.raises(ConfigError):
                twin.optimizer.step()
        twin.check("swapped back")

    in_every_stage(body, alone=True)


def test_a_real_network_has_the_same_average_in_every_stage_and_that_of_plain_torch():
    def body(rank, world_size):
        results = []
        for stage in (1, 2, 3):
            model = letters()
            optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
            ema = zeroshard.EMA(optimizer, decay=DECAY)
            loop = Loop(weights(model))
            for batch in letter_batches(rank)[:4]:
                train(model, optimizer, [batch])
                loop.update(weights(model))
            assert_same(averages(ema), loop.average, f"stage {stage}")
            results.append(averages(ema))
        assert_same(results[1], results[0], "stages 1 and 2")
        assert_same(results[2], results[0], "stages 1 and 3")

    run(body)


def test_only_trainable_floating_point_parameters_are_averaged():
    def body(rank, world_size, stage):
        model = SplitForm(SHAPES)
        frozen = [name for name, _ in model.named_parameters() if name.endswith(("block", "pair"))]
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        model.register_parameter(
            "codes", nn.Parameter(torch.arange(300, dtype=torch.uint8), requires_grad=False)
        )
        model.register_buffer("table", torch.ones(5))
        optimizer = zeroshard.AdamW(
            [p for p in model.parameters() if p.requires_grad], model=model, lr=1e-2, stage=stage
        )
        ema = zeroshard.EMA(optimizer, decay=DECAY)
        names = {name for name, p in model.named_parameters() if p.requires_grad}
        assert ema.state_dict()["average"].keys() == names
        before = {name: value for name, value in weights(model).items() if name not in names}
        values = {
            name: c for name, c in coefficients(model, rank, world_size).items() if name != "codes"
        }
        model(values).backward()
        optimizer.step()
        with ema.swap():
            held = weights(model)
            assert_same({name: held[name] for name in before}, before, "frozen ones in a swap")
        held = weights(model)
        assert_same({name: held[name] for name in before}, before, "frozen ones")

    in_every_stage(body)


def test_it_follows_every_step_and_can_be_updated_by_hand():
    def body(rank, world_size, stage):
        model, optimizer = trained(rank, world_size, stage, "split")
        ema = zeroshard.EMA(optimizer, decay=DECAY)
        loop = Loop(masters(optimizer, model))
        # By hand, after a write from outside: what the parameters are now.
        with writing(model), torch.no_grad():
            for p in model.parameters():
                p.fill_(0.375)
        ema.update()
        loop.update({name: torch.full_like(v, 0.375) for name, v in weights(model).items()})
        assert_same(averages(ema), loop.average, "after a write and update()")
        assert ema.state_dict()["num_updates"] == 1
        # A step without any gradient is a step.
        optimizer.step()
        loop.update(masters(optimizer, model))
        assert_same(averages(ema), loop.average, "after an empty step")

        def closure():
            optimizer.zero_grad()
            loss = model(coefficients(model, rank, world_size, 3))
            loss.backward()
            return loss

        optimizer.step(closure)
        loop.update(masters(optimizer, model))
        assert_same(averages(ema), loop.average, "after a step with a closure")
        assert ema.state_dict()["num_updates"] == 3

    in_every_stage(body)


def test_a_skipped_step_is_a_step_of_the_same_weights():
    def body(rank, world_size, stage):
        model, optimizer = trained(rank, world_size, stage, "fp32")
        ema = zeroshard.EMA(optimizer, decay=DECAY)
        loop = Loop(weights(model))
        steps(rank, world_size, model, optimizer, [1])
        loop.update(weights(model))
        gradients = coefficients(model, rank, world_size, 2)
        if rank == 0:
            next(iter(gradients.values())).fill_(float("inf"))
        model(gradients).backward()
        before = weights(model)
        optimizer.step()
        optimizer.zero_grad()
        assert_same(weights(model), before, "skipped")
        loop.update(weights(model))
        assert_same(averages(ema), loop.average, "after a skipped step")
        steps(rank, world_size, model, optimizer, [3])
        loop.update(weights(model))
        assert_same(averages(ema), loop.average, "and one that is not")
        assert int(optimizer.skipped_steps) == 1

    in_every_stage(body)


def test_several_averages_of_one_optimizer_are_independent_and_close_ends_one():
    def body(rank, world_size, stage):
        model, optimizer = trained(rank, world_size, stage, "split")
        slow, fast = (zeroshard.EMA(optimizer, decay=d) for d in (0.99, 0.5))
        start = masters(optimizer, model)
        loops = [Loop(start, decay) for decay in (0.99, 0.5)]
        for draw in range(1, 4):
            steps(rank, world_size, model, optimizer, [draw])
            exact = masters(optimizer, model)
            loops[0].update(exact)
            if draw < 3:
                loops[1].update(exact)
            if draw == 2:
                fast.close()
                fast.close()
        assert_same(averages(slow), loops[0].average, "slow")
        assert_same(averages(fast), loops[1].average, "closed")
        assert (slow.state_dict()["num_updates"], fast.state_dict()["num_updates"]) == (3, 2)
        # Each swaps in its own; one at a time, whichever it is.
        for ema, loop in ((slow, loops[0]), (fast, loops[1])):
            with ema.swap():
                got = {name: v.float() for name, v in weights(model).items()}
                wanted = {name: v.to(torch.bfloat16).float() for name, v in loop.average.items()}
                assert_near(got, wanted)
        with slow.swap(), pytest.raises(ConfigError), fast.swap():
            pass

    in_every_stage(body)


def assert_near(got, wanted):
    """Equal bf16 values, or where a master is a tie the other neighbour: one step of bf16 apart."""
    for name, value in got.items():
        step = 2**-7 * wanted[name].abs()
        assert ((value - wanted[name]).abs() <= step).all(), name


@pytest.mark.parametrize("first", ["state_dict", "swap", "step"])
def test_a_group_that_is_added_later_is_averaged_from_then_on(first):
    def body(rank, world_size, stage):
        model = SplitForm(SHAPES)
        late = [(n, p) for n, p in model.named_parameters() if n.endswith(("experts", "pair"))]
        for _, p in late:
            p.requires_grad_(False)
        early = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        optimizer = zeroshard.AdamW(early, lr=1e-2, model=model, stage=stage)
        ema = zeroshard.EMA(optimizer, decay=DECAY)
        numbers = coefficients(model, rank, world_size)
        model(numbers).backward()
        optimizer.step()
        optimizer.zero_grad()
        for _, p in late:
            p.requires_grad_(True)
        optimizer.add_param_group({"params": late})
        start = weights(model)
        if first == "state_dict":
            for name, _ in late:
                assert averages(ema)[name].equal(start[name])
        elif first == "swap":
            with ema.swap():
                assert weights(model)[late[0][0]].equal(start[late[0][0]])
        model(numbers).backward()
        optimizer.step()
        found, now = averages(ema), weights(model)
        assert found.keys() == start.keys()
        for name, _ in late:
            # Averaged from when it was added; or, where nobody looked, from after its first step.
            average = torch.lerp(start[name], now[name], 1 - DECAY)
            allowed = [average, now[name]] if first == "step" else [average]
            assert any(found[name].equal(value) for value in allowed), name

    in_every_stage(body)


def test_a_decay_that_is_none_is_refused():
    def body(rank, world_size):
        model, optimizer = trained(rank, world_size, 2, "fp32")
        for decay in (-0.1, 1.1, float("nan"), float("inf"), "0.9", None):
            with pytest.raises(ConfigError, match="decay"):
                zeroshard.EMA(optimizer, decay=decay)
        with pytest.raises(ConfigError):
            zeroshard.EMA(torch.optim.AdamW(nn.Linear(2, 2).parameters()), decay=0.9)
        # A refused one does not follow the steps.
        steps(rank, world_size, model, optimizer, [1])

    run(body)


def test_an_average_of_weights_that_have_no_values_is_refused():
    def body(rank, world_size, stage):
        model = SplitForm(SHAPES).to("meta")
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
        with pytest.raises(ConfigError, match="experts"):
            zeroshard.EMA(optimizer, decay=DECAY)
        model.load_state_dict(weights(SplitForm(SHAPES)))
        ema = zeroshard.EMA(optimizer, decay=DECAY)
        assert_same(averages(ema), weights(SplitForm(SHAPES)), "then")

    in_every_stage(body)


# --- memory


def live_bytes():
    """Bytes of the storages of all tensors that Python can reach, each once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            local = thing.to_local() if hasattr(thing, "to_local") else thing
            storages[local.untyped_storage()._cdata] = local.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_an_average_costs_four_bytes_a_trainable_parameter_divided_by_the_ranks(world_size):
    def body(rank, world_size, stage):
        for dtype in (torch.float32, torch.bfloat16):
            model = nn.Sequential(
                nn.ModuleList(nn.Linear(128, 128, bias=False) for _ in range(4)),
                nn.Linear(128, 128, bias=False).requires_grad_(False),
            ).to(dtype)
            optimizer = zeroshard.AdamW(
                [p for p in model.parameters() if p.requires_grad], model=model, stage=stage
            )
            numel = 4 * 128 * 128  # whole shards at up to four ranks: no padding
            for p in model[0].parameters():
                p.grad = torch.ones(p.shape, dtype=dtype)
            optimizer.step()
            optimizer.zero_grad()
            before, told = live_bytes(), sum_of(optimizer.memory())
            ema = zeroshard.EMA(optimizer, decay=DECAY)
            expected = 4 * numel / world_size
            assert expected <= live_bytes() - before <= expected + 2048, f"{dtype}"
            for p in model[0].parameters():
                p.grad = torch.ones(p.shape, dtype=dtype)
            optimizer.step()
            optimizer.zero_grad()
            assert live_bytes() - before <= expected + 2048, f"{dtype}, updated"
            state = ema.state_dict()
            assert live_bytes() - before <= expected + 2048, f"{dtype}, its state"
            with ema.swap():
                pass
            assert live_bytes() - before <= expected + 2048, f"{dtype}, swapped back"
            assert sum_of(optimizer.memory()) <= told + expected + 2048
            del ema, state

    in_every_stage(body, world_size)


def sum_of(memory):
    """All that is held, where one key is the sum of others."""
    return sum(value for key, value in memory.items() if key != "optimizer_state")


# --- swap


@pytest.mark.parametrize(
    ("kind", "world_size"), [("fp32", 1), ("split", 3), *((kind, 2) for kind in KINDS)]
)
def test_in_a_swap_the_parameters_are_the_averages_and_afterwards_what_they_were(kind, world_size):
    def body(rank, world_size, stage):
        model, optimizer = trained(rank, world_size, stage, kind)
        other, its_optimizer = trained(rank, world_size, stage, kind)
        ema = zeroshard.EMA(optimizer, decay=DECAY)
        for draw in range(1, 3):
            steps(rank, world_size, model, optimizer, [draw])
            steps(rank, world_size, other, its_optimizer, [draw])
            before = everything(model, optimizer)
            expected = averages(ema)
            with ema.swap():
                swapped = weights(model)
                assert_ranks_agree(swapped, "swapped in")
                if kind == "fp32":
                    assert_same(swapped, expected, "swapped in")
                else:
                    for name, value in swapped.items():
                        assert value.dtype == KINDS[kind][0]
                        # To the nearest: torch rounds a tie to even, a split master away from 0.
                        exact = expected[name].to(value.dtype)
                        tie = (value.float() - expected[name]).abs() == (
                            exact.float() - expected[name]
                        ).abs()
                        assert ((value == exact) | tie).all(), name
                    assert not all(v.equal(before[n]) for n, v in swapped.items())
                numbers = coefficients(model, rank, world_size, 9)
                plain = SplitForm(SHAPES, KINDS[kind][0])
                plain.load_state_dict(swapped)
                with torch.no_grad():
                    assert model(numbers).equal(plain(numbers)), "forward in a swap"
            assert_same(everything(model, optimizer), before, "swapped back")
            assert_same(averages(ema), expected, "the average")
        steps(rank, world_size, model, optimizer, range(3, 5))
        steps(rank, world_size, other, its_optimizer, range(3, 5))
        assert_same(everything(model, optimizer), everything(other, its_optimizer), "trained on")

    in_every_stage(body, world_size)


class MishapError(Exception):
    pass


@kinds
def test_after_an_error_in_a_swap_everything_is_what_it_was(kind):
    def body(rank, world_size, stage):
        model, optimizer = trained(rank, world_size, stage, kind)
        ema = zeroshard.EMA(optimizer, decay=DECAY)
        steps(rank, world_size, model, optimizer, [1])
        before, average = everything(model, optimizer), averages(ema)

        def enter_and_fail(fail):
            with ema.swap():
                fail()

        def throw():
            raise MishapError

        def step():
            optimizer.step()

        def nest():
            with ema.swap():
                raise AssertionError("it nests")

        def update():
            ema.update()

        for fail, error in (
            (throw, MishapError),
            (step, ConfigError),
            (nest, ConfigError),
            (update, ConfigError),
        ):
            with pytest.raises(error):
                enter_and_fail(fail)
            assert_same(everything(model, optimizer), before, fail.__name__)
            assert_same(averages(ema), average, fail.__name__)
        with ema.swap():
            swapped = weights(model)
            for fail in (step, nest, update):
                with pytest.raises(ConfigError):
                    fail()
                assert_same(weights(model), swapped, f"still swapped after {fail.__name__}")
        assert_same(everything(model, optimizer), before, "in the end")
        assert ema.state_dict()["num_updates"] == 1
        other, its_optimizer = trained(rank, world_size, stage, kind)
        steps(rank, world_size, other, its_optimizer, [1, 2])
        steps(rank, world_size, model, optimizer, [2])
        assert_same(weights(model), weights(other), "trained on")

    in_every_stage(body)


def test_a_step_in_a_swap_is_refused_with_gradients_that_are_kept_for_afterwards():
    def body(rank, world_size, stage):
        model, optimizer = trained(rank, world_size, stage, "split")
        other, its_optimizer = trained(rank, world_size, stage, "split")
        steps(rank, world_size, other, its_optimizer, [1])
        ema = zeroshard.EMA(optimizer, decay=DECAY)
        model(coefficients(model, rank, world_size, 1)).backward()
        with ema.swap():
            with pytest.raises(ConfigError, match="swap"):
                optimizer.step()
            with torch.no_grad():
                model(coefficients(model, rank, world_size, 5))
        optimizer.step()
        assert_same(everything(model, optimizer), everything(other, its_optimizer), "stepped")

    in_every_stage(body)


def test_a_network_evaluates_saves_and_exports_its_average(tmp_path):
    def body(rank, world_size, stage):
        model = letters(dtype=torch.bfloat16)
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
        ema = zeroshard.EMA(optimizer, decay=DECAY)
        batches = letter_batches(rank)
        train(model, optimizer, batches[:3])
        own = weights(model)
        with ema.swap():
            swapped = weights(model)
            plain = letters(dtype=torch.bfloat16)
            plain.load_state_dict(swapped | {"head.weight": swapped["embed.weight"]})
            with torch.no_grad():
                assert loss_of(model, batches[4]).equal(loss_of(plain, batches[4]))
            with gathered(model):
                buffer = io.BytesIO()
                torch.save(model.state_dict(), buffer)
            assert_same(dict(zeroshard.full_parameters(model)), swapped, "pushed")
            zeroshard.export_weights(model, tmp_path / str(stage))
        buffer.seek(0)
        saved = torch.load(buffer)
        saved.pop("head.weight")
        assert_same(saved, swapped, "saved")
        assert_same(weights(model), own, "its own")
        assert not own["embed.weight"].equal(swapped["embed.weight"])
        again = letters(dtype=torch.bfloat16, seed=7)
        zeroshard.AdamW(again, stage=stage)
        zeroshard.load_weights(again, tmp_path / str(stage))
        assert_same(weights(again), swapped, "exported")
        train(model, optimizer, batches[3:])

    in_every_stage(body)


# --- state


def test_its_state_is_local_and_continues_bitwise():
    def body(rank, world_size, stage):
        model, optimizer = trained(rank, world_size, stage, "split")
        ema = zeroshard.EMA(optimizer, decay=DECAY)
        steps(rank, world_size, model, optimizer, range(1, 3))
        if rank == 0:  # reading does not communicate
            for _ in range(3):
                ema.state_dict()
        state = ema.state_dict()
        assert state.keys() == {"decay", "num_updates", "average"}
        assert (state["decay"], state["num_updates"]) == (DECAY, 2)
        parameters = dict(model.named_parameters())
        assert state["average"].keys() == parameters.keys()
        for name, value in state["average"].items():
            assert isinstance(value, zeroshard.ShardTensor), name
            assert value.shape == parameters[name].shape
            assert value.dtype == torch.float32
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=False)
        full = {**state, "average": averages(ema)}
        for draw in range(3, 5):
            steps(rank, world_size, model, optimizer, [draw])
        expected = averages(ema)
        assert not expected["parts.0.matrix"].equal(full["average"]["parts.0.matrix"])
        for what, given in (("sharded", saved), ("full", full)):
            for other_stage in (stage, 1 + stage % 3):
                again, its_optimizer = trained(rank, world_size, other_stage, "split")
                steps(rank, world_size, again, its_optimizer, range(1, 3))
                other = zeroshard.EMA(its_optimizer, decay=0.1)
                other.update()
                if what == "sharded" and other_stage != stage:
                    continue
                unmoved = everything(again, its_optimizer)
                if rank == 0:  # loading does not communicate
                    other.load_state_dict(copy.deepcopy(given))
                    other.load_state_dict(given)
                else:
                    other.load_state_dict(given)
                assert other.state_dict()["decay"] == DECAY
                assert other.state_dict()["num_updates"] == 2
                assert_same(everything(again, its_optimizer), unmoved, "the model itself")
                steps(rank, world_size, again, its_optimizer, range(3, 5))
                assert_same(averages(other), expected, f"{what}, stage {other_stage}")
                assert other.state_dict()["num_updates"] == 4

    in_every_stage(body)


def test_what_a_state_holds_is_not_changed_by_the_next_update_when_copied():
    def body(rank, world_size, stage):
        model, optimizer = trained(rank, world_size, stage, "fp32")
        ema = zeroshard.EMA(optimizer, decay=DECAY)
        given = {"decay": DECAY, "num_updates": 3, "average": weights(model)}
        kept = copy.deepcopy(given)
        ema.load_state_dict(given)
        steps(rank, world_size, model, optimizer, [1])
        assert_same(given["average"], kept["average"], "what was loaded belongs to the caller")

    in_every_stage(body)


def test_a_full_average_of_three_ranks_continues_at_two_and_alone():
    def saved(rank, world_size):
        twin = Twin(rank, world_size, stage=3)
        ema = zeroshard.EMA(twin.optimizer, decay=DECAY)
        for draw in range(2):
            twin.backward(draw)
            twin.step()
        state = ema.state_dict()
        return weights(twin.model), {**state, "average": averages(ema)}

    values, state = run(saved, 3)[0]
    loop = Loop(state["average"])

    def continued(rank, world_size):
        for stage in (1, 2, 3):
            model = SplitForm(SHAPES)
            optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
            model.load_state_dict(values)
            ema = zeroshard.EMA(optimizer, decay=0.5)
            ema.load_state_dict(copy.deepcopy(state))
            mine = copy.deepcopy(loop)
            for draw in range(2):
                steps(rank, world_size, model, optimizer, [draw])
                mine.update(weights(model))
            assert_same(averages(ema), mine.average, f"stage {stage}")
            assert ema.state_dict()["num_updates"] == 4

    run(continued, 2)
    run(continued, 1, process_group=False, WORLD_SIZE=None)


def test_distributed_checkpoint_saves_and_loads_an_average_at_another_world_size(tmp_path):
    import torch.distributed.checkpoint as dcp

    def saved(rank, world_size):
        model, optimizer = trained(rank, world_size, 3, "split")
        ema = zeroshard.EMA(optimizer, decay=DECAY)
        steps(rank, world_size, model, optimizer, range(1, 3))
        dcp.save({"ema": ema.state_dict()}, checkpoint_id=tmp_path)
        return averages(ema)

    expected = run(saved, 3)[0]

    def loaded(rank, world_size):
        _, optimizer = trained(rank, world_size, 2, "split")
        ema = zeroshard.EMA(optimizer, decay=0.1)
        state = {"ema": ema.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path)
        ema.load_state_dict(state["ema"])
        assert_same(averages(ema), expected, "through DCP")
        assert ema.state_dict()["decay"] == DECAY
        assert ema.state_dict()["num_updates"] == 2

    run(loaded, 2)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    def body(rank, world_size, stage):
        model, optimizer = trained(rank, world_size, stage, "split")
        ema = zeroshard.EMA(optimizer, decay=DECAY)
        steps(rank, world_size, model, optimizer, [1])
        before = averages(ema)
        good = {"decay": 0.5, "num_updates": 7, "average": averages(ema)}
        for value in good["average"].values():
            value.add_(1)
        name = next(n for n in good["average"] if n.endswith("experts"))

        def broken(**changes):
            average = {**good["average"], **changes}
            return {**good, "average": {n: v for n, v in average.items() if v is not None}}

        bad = {
            "missing": (broken(**{name: None}), name),
            "unexpected": (broken(other=torch.ones(3)), "other"),
            "misshapen": (broken(**{name: torch.ones(3, 11, 12)}), name),
            "as many elements": (broken(**{name: torch.ones(13, 11, 3)}), name),
        }
        for what, (state, word) in bad.items():
            with pytest.raises(ConfigError, match=word.replace(".", r"\.")):
                ema.load_state_dict(state)
            assert_same(averages(ema), before, what)
            assert ema.state_dict()["decay"] == DECAY
            assert ema.state_dict()["num_updates"] == 1
        ema.load_state_dict(good)
        assert_same(averages(ema), good["average"], "a good one then")

    in_every_stage(body)


def test_a_written_or_loaded_model_does_not_move_the_average_until_the_next_step():
    def body(rank, world_size, stage):
        model, optimizer = trained(rank, world_size, stage, "split")
        ema = zeroshard.EMA(optimizer, decay=DECAY)
        loop = Loop(masters(optimizer, model))
        steps(rank, world_size, model, optimizer, [1])
        loop.update(masters(optimizer, model))
        model.load_state_dict(weights(SplitForm(SHAPES, torch.bfloat16, seed=5)))
        assert_same(averages(ema), loop.average, "loaded")
        with ema.swap():
            pass
        assert_same(
            weights(model), weights(SplitForm(SHAPES, torch.bfloat16, seed=5)), "after a swap"
        )
        steps(rank, world_size, model, optimizer, [2])
        loop.update(masters(optimizer, model))
        assert_same(averages(ema), loop.average, "and a step")

    in_every_stage(body)


def test_a_closed_average_can_still_be_read_swapped_in_and_moved_by_hand():
    def body(rank, world_size, stage):
        model, optimizer = trained(rank, world_size, stage, "fp32")
        ema = zeroshard.EMA(optimizer, decay=DECAY)
        loop = Loop(weights(model))
        ema.close()
        steps(rank, world_size, model, optimizer, [1])
        assert_same(averages(ema), loop.average, "closed")
        with ema.swap():
            assert_same(weights(model), loop.average, "swapped in")
        ema.update()
        loop.update(weights(model))
        assert_same(averages(ema), loop.average, "by hand")

    in_every_stage(body)


def test_what_would_change_masters_in_a_swap_is_refused(tmp_path):
    def body(rank, world_size, stage):
        model, optimizer = trained(rank, world_size, stage, "fp32 master")
        ema = zeroshard.EMA(optimizer, decay=DECAY)
        steps(rank, world_size, model, optimizer, [1])
        saved = optimizer.state_dict()
        before = everything(model, optimizer)

        def write_back():
            with zeroshard.gather(model, writeback=True):
                raise AssertionError("it was let in")

        with ema.swap():
            for change in (
                lambda: zeroshard.load_weights(model, tmp_path),
                lambda: optimizer.load_state_dict(saved),
                lambda: optimizer.consolidate_state_dict(),
                lambda: zeroshard.init_weights(model),
                optimizer.refresh_master,
                write_back,
            ):
                with pytest.raises(ConfigError):
                    change()
        assert_same(everything(model, optimizer), before, "afterwards")

    in_every_stage(body)
