"""Weights come from files or from initialisation into any model, and leave it whole, everywhere."""

import contextlib
import copy
import itertools
import json
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import (
    SHAPES,
    SplitForm,
    assert_ranks_agree,
    assert_same,
    coefficients,
    gathered,
    is_sharded,
    weights,
    writing,
)
from ranks import run
from torch import nn
from weight_files import (
    WIDTH,
    Assorted,
    Block,
    Peaks,
    assert_without_values,
    assorted_batches,
    converted,
    everything,
    give_memory_back_at_once,
    in_every_stage,
    kill_myself,
    llama_config,
    on_meta,
    outcomes,
    read_export,
    some_values,
    watch_files,
    without,
    write_file,
    write_folder,
    write_shards,
)

import zeroshard
from zeroshard.errors import ConfigError, ZeroShardError

pytest.importorskip("safetensors")

# A single file, a directory with one file, a directory with an index.
WRITERS = {
    "file": lambda path, state: write_file(path / "some name.safetensors", state),
    "folder": write_folder,
    "shards": write_shards,
}


def loss_of(model, letters):
    return F.cross_entropy(model(letters).flatten(0, 1), letters.flatten())


def train(model, optimizer, batches):
    """Trains and returns all parameters and buffers."""
    for batch in batches:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return everything(model)


def loaded_plainly(state, dtype=torch.float32, seed=0, **options):
    """The reference: an ordinary model into which torch's `load_state_dict` loads."""
    torch.manual_seed(seed)
    model = Assorted(**options).to(dtype)
    model.load_state_dict(state)
    return model


def consolidated(rank, optimizer):
    """The full state of the optimizer on the first rank, elsewhere nothing."""
    if not dist.is_initialized():
        return optimizer.state_dict()["state"]
    optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict()["state"] if rank == 0 else {}


def assert_states_equal(got, expected, what):
    assert got.keys() == expected.keys(), what
    for index, entry in expected.items():
        assert_same(dict(got[index]), dict(entry), f"{what}: state of parameter {index}")


def assert_no_meta(model, what):
    left = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    assert not left, f"{what}: {left} are on meta"


# --- a model on the meta device


def seeded(dtype=torch.float32, **options):
    torch.manual_seed(11)
    return Assorted(**options).to(dtype)


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_on_meta_keep_their_identity_and_read_as_nan_until_they_get_values(world_size):
    def body(rank, world_size, stage):
        model = on_meta(Assorted)
        parameters = dict(model.named_parameters())
        plain = dict(Assorted().named_parameters())
        for name, p in parameters.items():
            p.told = name
        groups = [{"params": list(parameters.values())[:5], "lr": 0.5}]
        groups += [{"params": list(parameters.values())[5:]}]
        optimizer = zeroshard.AdamW(groups, lr=1e-3, model=model, stage=stage)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert [id(p) for p in held] == [id(p) for p in parameters.values()]
        for name, p in model.named_parameters():
            assert p is parameters[name]
            assert p.told == name
            assert (p.shape, p.dtype) == (plain[name].shape, plain[name].dtype)
            assert p.requires_grad == plain[name].requires_grad
            assert p.is_leaf
            assert type(p) is nn.Parameter
        assert model.head.weight is model.embed.weight
        assert_without_values(parameters.items(), "outside")
        with gathered(model):
            assert_without_values(parameters.items(), "gathered")
            for name, p in parameters.items():
                assert p.stride() == plain[name].stride() or p.numel() < 2, name

    in_every_stage(body, world_size)


def test_without_a_process_group_a_model_on_meta_is_made_real_too(tmp_path):
    state = some_values(Assorted())
    path = write_folder(tmp_path, without(state, "head.weight"))

    def body(rank, world_size, stage):
        model = on_meta(Assorted)
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
        assert_without_values(model.named_parameters(), "before")
        zeroshard.load_weights(model, path)
        plain = loaded_plainly(state)
        assert_same(everything(model), everything(plain), "loaded")
        reference = torch.optim.AdamW(
            [p for p in plain.parameters() if p.requires_grad], lr=1e-2, fused=True
        )
        batches = assorted_batches(0)
        assert_same(
            train(model, optimizer, batches), train(plain, reference, batches), "trained on"
        )

    in_every_stage(body, alone=True)


def give_all_but(model, missing):
    """Gives values to all parameters but those named."""
    for name, p in model.named_parameters():
        if name not in missing:
            p.data = torch.full(p.shape, 0.25)


def test_a_unit_that_would_use_parameters_without_values_refuses_its_forward_and_names_them():
    def body(rank, world_size):
        model = on_meta(Assorted)
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=3)
        x = torch.ones(2, WIDTH)
        for block in model.layers:
            block.sign = torch.ones(WIDTH)
            block.table.speed = torch.ones(WIDTH)
        for _ in range(2):  # it is an error each time, and not only the first
            with pytest.raises(ConfigError) as caught:
                model.layers[1](x)
            for word in ("load_weights", "init_weights", "layers.1."):
                assert word in str(caught.value), word
            for word in ("layers.0", "layers.2", "embed"):
                assert word not in str(caught.value), word
        with pytest.raises(ConfigError, match="load_weights"), torch.no_grad():
            model.embed(torch.zeros(2, 3, dtype=torch.int64))
        give_all_but(model, {"layers.1.pair"})
        assert model.layers[0](x).isfinite().all()
        with pytest.raises(ConfigError, match=r"layers\.1\.pair") as caught:
            model.layers[1](x)
        assert "layers.1.up" not in str(caught.value)
        model.layers[1].pair.data = torch.full((2,), 0.25)
        # Nothing is left behind by the errors: the unit is used and trained.
        model.layers[1](x).sum().backward()
        optimizer.step()
        assert everything(model)["layers.1.pair"].ne(0.25).all()

    run(body)


def test_a_step_that_would_use_parameters_without_values_is_refused_and_names_them():
    def body(rank, world_size, stage):
        model = SplitForm(SHAPES).to("meta")
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
        first, second = name_of_two(model)

        def give_gradients(names):
            for name, p in model.named_parameters():
                p.grad = torch.ones(p.shape) if name in names else None

        give_all_but(model, {first, second})
        give_gradients({name for name, _ in model.named_parameters()})
        with pytest.raises(ConfigError) as caught:
            optimizer.step()
        for word in (first, second, "load_weights", "init_weights"):
            assert word in str(caught.value), word
        optimizer.zero_grad()
        # One that has no gradient is not used by a step.
        before = weights(model)
        give_gradients({n for n in before if n not in (first, second)})
        optimizer.step()
        after = weights(model)
        assert after[first].isnan().all()
        assert after["parts.0.matrix"].ne(before["parts.0.matrix"]).all()
        optimizer.zero_grad()
        model.get_parameter(first).data = torch.ones(SHAPES["experts"])
        give_gradients({first})
        optimizer.step()
        assert weights(model)[first].lt(1).all()

    in_every_stage(body)


def name_of_two(model):
    names = dict(model.named_parameters())
    return next(n for n in names if n.endswith("experts")), next(
        n for n in names if n.endswith("pair")
    )


@pytest.mark.parametrize("closed", [True, False], ids=["after close()", "taking over"])
def test_a_newer_optimizer_knows_which_parameters_have_no_values(closed):
    def body(rank, world_size, stage):
        model = SplitForm(SHAPES).to("meta")
        older = zeroshard.AdamW(model, lr=1e-2, stage=stage)
        give_all_but(model, {"parts.2.pair"})
        if closed:
            older.close()
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
        numbers = coefficients(model, rank, world_size)
        with pytest.raises(ConfigError, match=r"parts\.2\.pair"):  # noqa: PT012
            model(numbers).backward()
            optimizer.step()
        optimizer.zero_grad()
        model.get_parameter("parts.2.pair").data = torch.full((2,), 0.25)
        model(numbers).backward()
        optimizer.step()
        assert weights(model)["parts.2.pair"].ne(0.25).all()

    in_every_stage(body)


class Quantised(nn.Module):
    """A frozen weight in codes, which cannot read as NaN, below a trained one."""

    def __init__(self):
        super().__init__()
        codes = torch.zeros(WIDTH, 2 * WIDTH, dtype=torch.uint8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.linear = nn.Linear(2 * WIDTH, 3)

    def forward(self, x):
        return self.linear(x @ (self.codes.float() - 128))


def test_codes_without_values_are_not_taken_for_zeros(tmp_path):
    state = some_values(Quantised())
    path = write_folder(tmp_path / "in", state)

    def body(rank, world_size, stage):
        model = on_meta(Quantised)
        trained = list(model.linear.parameters())
        optimizer = zeroshard.AdamW(trained, model=model, lr=1e-2, stage=stage)
        for p in trained:
            p.data = torch.ones(p.shape)
        x = torch.ones(2, WIDTH)
        with pytest.raises(ConfigError, match="codes"):
            zeroshard.export_weights(model, tmp_path / f"out-{stage}")
        if stage == 3:
            with pytest.raises(ConfigError, match="codes"):
                model(x)
        zeroshard.load_weights(model, path)
        plain = Quantised()
        plain.load_state_dict(state)
        assert_same(weights(model), weights(plain), "loaded")
        model(x).sum().backward()
        optimizer.step()
        zeroshard.export_weights(model, tmp_path / f"out-{stage}")

    in_every_stage(body)


def through_load_state_dict(model, state):
    model.load_state_dict(state)


def through_new_data(model, state):
    for name, p in model.named_parameters():
        p.data = state[name].clone()


def through_gather(model, state):
    with zeroshard.gather(model, writeback=True), torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(state[name])


def through_data_in_gather(model, state):
    with zeroshard.gather(model, writeback=True):
        for name, p in model.named_parameters():
            p.data.copy_(state[name])


def through_gather_module_by_module(model, state):
    modules = dict.fromkeys([*getattr(model, "parts", []), model])
    for module in modules:
        with zeroshard.gather(module, writeback=True), torch.no_grad():
            for p in module.parameters(recurse=False):
                p.copy_(next(state[n] for n, q in model.named_parameters() if q is p))


def through_the_first_rank(model, state):
    with zeroshard.gather(model, writeback=True), torch.no_grad():
        if not dist.is_initialized() or dist.get_rank() == 0:
            for name, p in model.named_parameters():
                p.copy_(state[name])


def through_copy(model, state):
    """As rule 6 has it: parameters that are whole can be written to."""
    with writing(model), torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(state[name])


WAYS = [
    through_load_state_dict,
    through_new_data,
    through_gather,
    through_data_in_gather,
    through_gather_module_by_module,
    through_the_first_rank,
    through_copy,
]


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_values_that_are_written_into_a_model_from_meta_are_trained_from(kind):
    def body(rank, world_size, stage):
        plain = SplitForm(SHAPES, kind)
        state = weights(plain)
        reference = zeroshard.AdamW(plain, lr=1e-2, stage=1)
        step(rank, world_size, plain, reference, range(1))
        expected = weights(plain)
        for give in WAYS:
            model = SplitForm(SHAPES, kind).to("meta")
            optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
            give(model, state)
            assert_same(weights(model), state, give.__name__)
            step(rank, world_size, model, optimizer, range(1))
            assert_same(weights(model), expected, f"{give.__name__}, trained")

    in_every_stage(body)


def step(rank, world_size, model, optimizer, draws):
    for draw in draws:
        model(coefficients(model, rank, world_size, draw)).backward()
        optimizer.step()
        optimizer.zero_grad()


class AdaptedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return x + self.base(x) + self.up(self.down(x))


class Adapted(nn.Module):
    """A frozen base beside a trained adapter, in blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(AdaptedBlock() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_frozen_base_on_meta_joins_adapters_that_are_real(tmp_path):
    torch.manual_seed(4)
    plain = Adapted()
    for name, p in plain.named_parameters():
        p.requires_grad_("base" not in name)
    base = {k: v for k, v in plain.state_dict().items() if "base" in k}
    path = write_shards(tmp_path, base)
    adapters = {k: v.clone() for k, v in plain.state_dict().items() if "base" not in k}

    def body(rank, world_size, stage):
        model = on_meta(Adapted)
        for block, made in zip(model.blocks, plain.blocks, strict=True):
            block.base.requires_grad_(False)
            block.down, block.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
            block.down.load_state_dict(made.down.state_dict())
            block.up.load_state_dict(made.up.state_dict())
        kept = dict(model.named_parameters())
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
        assert all(p is kept[name] for name, p in model.named_parameters())
        assert_without_values([(n, p) for n, p in kept.items() if "base" in n], "base")
        got = {name: value for name, value in weights(model).items() if "base" not in name}
        assert_same(got, adapters, "adapters")
        missing, unexpected = zeroshard.load_weights(model, path, strict=False)
        assert set(missing) == adapters.keys()
        assert list(unexpected) == []
        assert_same(weights(model), dict(plain.named_parameters()), "both")
        other = copy.deepcopy(plain)
        reference = zeroshard.AdamW(other, lr=1e-2, stage=1)
        for draw in range(2):
            x = torch.full((2, WIDTH), 0.1 + rank + draw)
            for each, its in ((model, optimizer), (other, reference)):
                each(x).square().mean().backward()
                its.step()
                its.zero_grad()
        assert_same(weights(model), weights(other), "trained")
        assert not weights(model)["blocks.0.up.weight"].equal(adapters["blocks.0.up.weight"])

    in_every_stage(body)


# --- load_weights: values


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_loading_is_bitwise_what_torch_loads_into_a_model_that_is_not_sharded(world_size, tmp_path):
    state = some_values(Assorted())
    paths = {
        how: write(tmp_path / how, without(state, "head.weight")) for how, write in WRITERS.items()
    }

    def body(rank, world_size, stage):
        expected = everything(loaded_plainly(state))
        for how, bucket_mb, build in (
            ("file", 25, lambda: on_meta(Assorted)),
            ("folder", 1e-3, seeded),
            ("shards", 25, seeded),
            ("shards", 1e-3, lambda: on_meta(Assorted)),
        ):
            model = build()
            kept = list(model.parameters())
            optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage, bucket_mb=bucket_mb)
            where = how, bucket_mb
            zeroshard.load_weights(model, str(paths[how]) if build is seeded else paths[how])
            assert_no_meta(model, where)
            assert all(p is q for p, q in zip(model.parameters(), kept, strict=True))
            assert model.head.weight is model.embed.weight
            assert_same(everything(model), expected, where)
            if stage == 3 and world_size > 1:
                # Loading left nothing whole but what is whole anyway.
                assert is_sharded(model.layers[0].experts), where
                assert is_sharded(model.frozen.weight), where
            del optimizer

    in_every_stage(body, world_size)


def test_what_was_loaded_on_meta_trains_bitwise_as_what_torch_loaded(tmp_path):
    state = some_values(Assorted())
    path = write_shards(tmp_path, without(state, "embed.weight"), count=5)

    def body(rank, world_size, stage):
        batches = assorted_batches(rank)
        plain = loaded_plainly(state)
        expected = train(plain, zeroshard.AdamW(plain, lr=1e-2, stage=1), batches)
        model = on_meta(Assorted)
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
        zeroshard.load_weights(model, path)
        assert_same(train(model, optimizer, batches), expected, "trained")

    in_every_stage(body)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype_of_a_file_is_cast_to_that_of_the_parameter_as_torch_casts(stored, tmp_path):
    state = converted(some_values(Assorted()), stored)
    path = write_folder(tmp_path, without(state, "head.weight"))

    def body(rank, world_size, stage):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            expected = everything(loaded_plainly(state, dtype))
            for build in (lambda dtype=dtype: on_meta(Assorted).to(dtype), lambda: seeded(dtype)):  # noqa: B023
                model = build()
                zeroshard.AdamW(model, stage=stage, precision=zeroshard.Precision(master="none"))
                zeroshard.load_weights(model, path)
                assert_same(everything(model), expected, f"{stored} into {dtype}")

    in_every_stage(body)


def test_wide_floats_and_other_integers_in_a_file_are_cast_as_torch_casts(tmp_path):
    state = some_values(Assorted())
    state["layers.0.gain"] = torch.tensor(1 / 3, dtype=torch.float64)
    state["layers.1.calls"] = torch.tensor(7, dtype=torch.int32)
    path = write_folder(tmp_path, without(state, "head.weight"))

    def body(rank, world_size):
        model = on_meta(Assorted)
        zeroshard.AdamW(model, stage=3)
        zeroshard.load_weights(model, path)
        assert_same(everything(model), everything(loaded_plainly(state)), "odd dtypes")

    run(body)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64], ids=str)
def test_what_is_not_of_floating_point_numbers_is_no_weight(dtype, tmp_path):
    """Above all not the codes of a quantised checkpoint, without their scales."""
    state = some_values(Assorted())
    state["layers.0.pair"] = torch.ones(2, dtype=dtype)
    path = write_folder(tmp_path, without(state, "head.weight"))

    def body(rank, world_size):
        model = on_meta(Assorted)
        zeroshard.AdamW(model, stage=3)
        with pytest.raises(ConfigError, match=r"layers\.0\.pair"):
            zeroshard.load_weights(model, path, strict=False)

    run(body)


def test_ranks_that_load_other_tensors_are_told_so(tmp_path):
    path = write_folder(tmp_path, without(some_values(Assorted()), "head.weight"))

    def body(rank, world_size):
        model = on_meta(Assorted)
        zeroshard.AdamW(model, stage=3)

        def but_one(name):
            return None if rank == 1 and name == "layers.0.pair" else name

        with pytest.raises(ConfigError, match=r"layers\.0\.pair"):
            zeroshard.load_weights(model, path, strict=False, names=but_one)

    run(body)


def test_initialisation_from_another_source_of_numbers_is_the_same_on_all_ranks():
    class Own(nn.Linear):
        def reset_parameters(self):
            if not self.weight.is_meta:
                self.weight.fill_(dist.get_rank())
                self.bias.fill_(dist.get_rank())

    def body(rank, world_size, stage):
        with torch.device("meta"):
            model = nn.Sequential(*(Own(4, 4) for _ in range(3)))
        zeroshard.AdamW(model, stage=stage)
        zeroshard.init_weights(model)
        assert all(not p.any() for _, p in zeroshard.full_parameters(model))

    in_every_stage(body)


KINDS = {
    "split": (torch.bfloat16, "split"),
    "fp32 master": (torch.bfloat16, "fp32"),
    "fp16": (torch.float16, "fp32"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_masters_keep_the_precision_of_the_file(kind, tmp_path):
    """As in a run whose fp32 model was cast: Precision(param_dtype=...) is the reference."""
    dtype, master = KINDS[kind]
    state = weights(SplitForm(SHAPES))
    paths = {how: write(tmp_path / how, state) for how, write in WRITERS.items()}

    def body(rank, world_size, stage):
        exact = SplitForm(SHAPES)
        if dtype == torch.bfloat16:
            precision = zeroshard.Precision(param_dtype=dtype, master=master)
            reference = zeroshard.AdamW(exact, lr=1e-3, stage=1, precision=precision)
            start = weights(exact)
            before = consolidated(rank, reference)
        else:
            start = converted(state, dtype)
            before = None

        def check_masters(optimizer, what):
            got = consolidated(rank, optimizer)
            if rank == 0:
                for (name, value), entry in zip(state.items(), got.values(), strict=True):
                    assert_same({name: entry["master"]}, {name: value}, what)
            if before is not None:
                assert_states_equal(got, before, what)

        finals = []
        for path, build in (
            (paths["shards"], lambda: SplitForm(SHAPES, dtype).to("meta")),
            (paths["file"], lambda: SplitForm(SHAPES, dtype, seed=8)),
        ):
            model = build()
            precision = zeroshard.Precision(master=master)
            optimizer = zeroshard.AdamW(model, lr=1e-3, stage=stage, precision=precision)
            zeroshard.load_weights(model, path)
            assert_same(weights(model), start, f"{path}")
            check_masters(optimizer, f"{path}")
            step(rank, world_size, model, optimizer, range(1))
            finals.append((weights(model), consolidated(rank, optimizer)))
        if before is not None:
            step(rank, world_size, exact, reference, range(1))
            finals.insert(0, (weights(exact), consolidated(rank, reference)))
        for final, masters in finals[1:]:
            assert_same(final, finals[0][0], "trained")
            assert_states_equal(masters, finals[0][1], "trained")

    in_every_stage(body)


def test_a_16_bit_file_gives_masters_of_exactly_its_values(tmp_path):
    state = converted(weights(SplitForm(SHAPES)), torch.float16)  # has bits that bf16 has not
    path = write_folder(tmp_path, state)

    def body(rank, world_size, stage):
        for master in ("split", "fp32"):
            model = SplitForm(SHAPES, torch.bfloat16, seed=8)
            precision = zeroshard.Precision(master=master)
            optimizer = zeroshard.AdamW(model, lr=1e-3, stage=stage, precision=precision)
            step(rank, world_size, model, optimizer, range(1))  # remainders that must go
            zeroshard.load_weights(model, path)
            got = consolidated(rank, optimizer)
            for (name, value), entry in zip(state.items(), got.values(), strict=bool(got)):
                assert_same({name: entry["master"]}, {name: value.float()}, master)

    in_every_stage(body)


def test_a_model_on_meta_that_is_cast_at_construction_gets_its_masters_from_the_file(tmp_path):
    state = weights(SplitForm(SHAPES))
    path = write_shards(tmp_path, state)

    def body(rank, world_size, stage):
        precision = zeroshard.Precision(param_dtype=torch.bfloat16)
        plain = SplitForm(SHAPES)
        reference = zeroshard.AdamW(plain, lr=1e-3, stage=1, precision=precision)
        model = SplitForm(SHAPES).to("meta")
        optimizer = zeroshard.AdamW(model, lr=1e-3, stage=stage, precision=precision)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert_without_values(model.named_parameters(), "cast on meta")
        zeroshard.load_weights(model, path)
        assert_states_equal(consolidated(rank, optimizer), consolidated(rank, reference), "loaded")
        for each, its in ((plain, reference), (model, optimizer)):
            step(rank, world_size, each, its, range(2))
        assert_same(weights(model), weights(plain), "trained")
        assert_states_equal(consolidated(rank, optimizer), consolidated(rank, reference), "trained")

    in_every_stage(body)


@pytest.mark.parametrize("kind", ["fp32", "split", "fp32 master"])
def test_moments_and_step_counters_are_left_alone(kind, tmp_path):
    dtype, master = KINDS.get(kind, (torch.float32, "auto"))
    # Far from what the model has: an fp32 master stays where a write is its very rounding.
    state = {name: v.to(dtype) + 8 for name, v in weights(SplitForm(SHAPES, seed=3)).items()}
    path = write_folder(tmp_path, state)

    def body(rank, world_size, stage):
        results = []
        for load in ("load_weights", "load_state_dict"):
            model = SplitForm(SHAPES, dtype)
            precision = zeroshard.Precision(master=master)
            optimizer = zeroshard.AdamW(model, lr=1e-3, stage=stage, precision=precision)
            step(rank, world_size, model, optimizer, range(1))
            before = consolidated(rank, optimizer)
            if load == "load_weights":
                zeroshard.load_weights(model, path)
            else:
                model.load_state_dict(state)
            after = consolidated(rank, optimizer)
            for index, entry in before.items():
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    assert after[index][key].equal(entry[key]), f"{load}: {key} of {index}"
            step(rank, world_size, model, optimizer, range(1, 2))
            results.append((weights(model), consolidated(rank, optimizer)))
        assert_same(results[0][0], results[1][0], "trained on")
        assert_states_equal(results[0][1], results[1][1], "trained on")

    in_every_stage(body)


def test_loading_between_backward_and_step_and_twice_takes_effect(tmp_path):
    first = write_folder(tmp_path / "first", weights(SplitForm(SHAPES, seed=3)))
    second = write_folder(tmp_path / "second", weights(SplitForm(SHAPES, seed=4)))

    def body(rank, world_size, stage):
        results = []
        for load in (True, False):
            model = SplitForm(SHAPES)
            optimizer = zeroshard.AdamW(model, lr=1e-3, stage=stage)
            model(coefficients(model, rank, world_size, 0)).backward()
            if load:
                zeroshard.load_weights(model, first)
                zeroshard.load_weights(model, second)
            else:
                model.load_state_dict(weights(SplitForm(SHAPES, seed=4)))
            optimizer.step()
            results.append(weights(model))
        assert_same(*results, "between")

    in_every_stage(body)


# --- load_weights: names


@pytest.mark.parametrize("held", ["embed.weight", "head.weight", "both"])
def test_tied_parameters_are_found_under_any_of_their_names(held, tmp_path):
    state = some_values(Assorted())
    other = {"embed.weight": "head.weight", "head.weight": "embed.weight"}.get(held)
    paths = [write(tmp_path / how, without(state, other)) for how, write in WRITERS.items()]

    def body(rank, world_size):
        expected = everything(loaded_plainly(state))
        for stage in (1, 3):
            for path in paths:
                model = on_meta(Assorted)
                zeroshard.AdamW(model, stage=stage)
                zeroshard.load_weights(model, path)
                assert_same(everything(model), expected, f"stage {stage}")
                missing, unexpected = zeroshard.load_weights(model, path, strict=False)
                assert not missing
                assert not unexpected

    run(body)


# Names of what `broken` does to a file: dropped, added, of another shape.
DROPPED = ["layers.0.up.weight", "layers.2.pair", "norm.running_mean", "frozen.bias"]
ADDED = ["layers.3.pair", "lm_head.bias"]
MISSHAPEN = ["layers.1.experts", "norm.running_var"]


def broken(state, *, misshapen=True):
    state = without(state, *DROPPED, "head.weight")
    state |= {name: torch.ones(3) for name in ADDED}
    if misshapen:
        # As many elements, in another shape; and fewer.
        state |= {MISSHAPEN[0]: torch.ones(WIDTH, 3, WIDTH), MISSHAPEN[1]: torch.ones(WIDTH - 1)}
    return state


def test_all_names_that_do_not_fit_are_listed_before_anything_changes(tmp_path):
    state = some_values(Assorted())
    paths = [write(tmp_path / how, broken(state)) for how, write in WRITERS.items()]
    good = write_folder(tmp_path / "good", state)

    def body(rank, world_size, stage):
        for build in (lambda: on_meta(Assorted), seeded):
            model = build()
            zeroshard.AdamW(model, stage=stage)
            real = not model.norm.running_mean.is_meta
            before = everything(model) if real else {}
            for path in paths:
                with pytest.raises(ConfigError) as caught:
                    zeroshard.load_weights(model, path)
                for name in (*DROPPED, *ADDED, *MISSHAPEN):
                    assert name in str(caught.value), f"{name} is not in {caught.value}"
                for name in ("layers.0.experts", "head.weight", "embed.weight", "table.speed"):
                    assert name not in str(caught.value), f"{name} is in {caught.value}"
                for size in ("[12, 3, 12]", "[3, 12, 12]"):
                    assert size in str(caught.value).replace("(", "[").replace(")", "]"), size
                if real:
                    assert_same(everything(model), before, "after the error")
                else:
                    assert_without_values(model.named_parameters(), "after the error")
                # With strict=False a misshapen one still raises, as in torch.
                with pytest.raises(ConfigError) as caught:
                    zeroshard.load_weights(model, path, strict=False)
                assert all(name in str(caught.value) for name in MISSHAPEN)
                if real:
                    assert_same(everything(model), before, "after the second error")
            zeroshard.load_weights(model, good)
            assert_same(everything(model), everything(loaded_plainly(state)), "a good file then")

    in_every_stage(body)


def test_what_is_missing_or_unexpected_is_returned_when_not_strict(tmp_path):
    state = some_values(Assorted())
    held = broken(state, misshapen=False)
    path = write_shards(tmp_path, held)

    def body(rank, world_size, stage):
        plain = seeded()
        expected = plain.load_state_dict(held, strict=False)
        model = seeded()
        zeroshard.AdamW(model, stage=stage)
        result = zeroshard.load_weights(model, path, strict=False)
        # torch misses the second name of a tied parameter, which is not missing.
        assert sorted(result.missing_keys) == sorted(set(expected.missing_keys) - {"head.weight"})
        assert sorted(result.unexpected_keys) == sorted(expected.unexpected_keys)
        missing, unexpected = result
        assert (missing, unexpected) == (result.missing_keys, result.unexpected_keys)
        assert_same(everything(model), everything(plain), "the rest is loaded")

    in_every_stage(body)


def test_what_was_missing_is_loaded_or_initialised_later(tmp_path):
    state = some_values(Assorted())
    absent = ["layers.0.up.weight", "layers.2.pair", "frozen.bias"]
    part = write_folder(tmp_path / "part", without(state, *absent, "head.weight"))
    rest = write_folder(tmp_path / "rest", {name: state[name] for name in absent})

    def body(rank, world_size, stage):
        model = on_meta(Assorted)
        zeroshard.AdamW(model, stage=stage)
        result = zeroshard.load_weights(model, part, strict=False)
        assert sorted(result.missing_keys) == sorted(absent)
        found = everything(model)
        assert all(found[name].isnan().all() for name in absent)
        result = zeroshard.load_weights(model, rest, strict=False)
        assert not result.unexpected_keys
        assert set(result.missing_keys).isdisjoint(absent)
        assert_same(everything(model), everything(loaded_plainly(state)), "two files")

        model = on_meta(Assorted)
        zeroshard.AdamW(model, stage=stage)
        zeroshard.load_weights(model, part, strict=False)
        zeroshard.init_weights(model)
        found = everything(model)
        for name, value in everything(loaded_plainly(state)).items():
            if name in absent:
                assert found[name].isfinite().all(), name
                assert not found[name].equal(value), name
            else:
                assert_same({name: found[name]}, {name: value}, "initialised the rest")
        assert_ranks_agree(found, "initialised")

    in_every_stage(body)


def test_names_of_a_file_are_translated_or_left_out(tmp_path):
    state = some_values(Assorted())
    held = {f"net.{name}": value for name, value in without(state, "embed.weight").items()}
    held |= {"teacher.weight": torch.ones(3), "net.layers.0.pair_old": torch.ones(2)}
    paths = [write(tmp_path / how, held) for how, write in WRITERS.items()]

    def translate(name):
        if name.startswith("teacher") or name.endswith("_old"):
            return None
        return name.removeprefix("net.")

    def body(rank, world_size, stage):
        expected = everything(loaded_plainly(state))
        for path in paths:
            model = on_meta(Assorted)
            zeroshard.AdamW(model, stage=stage)
            zeroshard.load_weights(model, path, names=translate)
            assert_same(everything(model), expected, "translated")
            with pytest.raises(ConfigError, match="net"):
                zeroshard.load_weights(model, path)
            assert_same(everything(model), expected, "after the errors")

    in_every_stage(body)


def test_two_tensors_of_a_file_for_one_parameter_are_refused(tmp_path):
    """Nobody can say which one is meant, and the other one would be dropped without a word."""
    state = some_values(Assorted())
    path = write_folder(tmp_path, state | {"layers.0.pair_old": torch.ones(2)})

    def body(rank, world_size):
        for stage in (1, 3):
            model = seeded()
            zeroshard.AdamW(model, stage=stage)
            before = everything(model)
            with pytest.raises(ConfigError, match=r"layers\.0\.pair"):
                zeroshard.load_weights(model, path, names=lambda name: name.replace("_old", ""))
            assert_same(everything(model), before, "after the error")

    run(body)


# --- load_weights: buffers


class WithTable(nn.Module):
    """Its own weight and a table are both filled by one function, or by the model's."""

    def __init__(self, *, resets=True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("table", torch.empty(WIDTH), persistent=False)
        self.register_buffer("kept", torch.empty(3))
        if resets:
            self.reset_parameters = lambda: fill(self, 2.0)

    def forward(self, x):
        return x * self.weight + self.table


def fill(module, base):
    nn.init.normal_(module.weight)
    nn.init.zeros_(module.kept)
    module.table.copy_(base ** torch.arange(WIDTH))


class WithInitialisation(nn.Module):
    """Fills what is inside of it by `_init_weights`, as the models of transformers do."""

    def __init__(self, base, *inside, resets=True):
        super().__init__()
        self.base = base
        self.first = WithTable(resets=resets)
        self.inside = nn.ModuleList(inside)

    def _init_weights(self, module):
        if isinstance(module, WithTable):
            fill(module, self.base)


def test_tables_that_no_file_holds_are_computed_and_loaded_values_stay(tmp_path):
    """By `_init_weights` of the nearest module that has it, else by `reset_parameters`."""

    def build():
        model = nn.Module()
        model.plain = WithTable()
        model.outer = WithInitialisation(3.0, WithInitialisation(0.5), WithTable(resets=False))
        return model

    state = some_values(build())
    path = write_shards(tmp_path, state)
    powers = torch.arange(WIDTH)
    tables = {
        "plain.table": 2.0**powers,
        "outer.first.table": 3.0**powers,
        "outer.inside.0.first.table": 0.5**powers,
        "outer.inside.1.table": 3.0**powers,
    }

    def body(rank, world_size, stage):
        model = on_meta(build)
        zeroshard.AdamW(model, stage=stage)
        torch.manual_seed(70 + rank)
        random = torch.get_rng_state()
        zeroshard.load_weights(model, path)
        # Nothing random is kept of what was computed, so nothing is drawn from the caller.
        assert torch.get_rng_state().equal(random)
        assert_no_meta(model, "loaded")
        assert_same(everything(model), state | tables, "loaded")

    in_every_stage(body)


def test_a_table_that_is_real_already_is_left_as_it_is(tmp_path):
    state = some_values(Assorted())
    path = write_folder(tmp_path, state)

    def body(rank, world_size, stage):
        model = seeded()
        model.layers[1].table.speed.fill_(7.0)
        zeroshard.AdamW(model, stage=stage)
        zeroshard.load_weights(model, path)
        assert model.layers[1].table.speed.eq(7.0).all()
        half = on_meta(Assorted)
        half.layers[1].table.speed = torch.full((WIDTH,), 7.0)
        zeroshard.AdamW(half, stage=stage)
        zeroshard.load_weights(half, path)
        assert half.layers[1].table.speed.eq(7.0).all()
        assert half.layers[0].table.speed.equal(model.layers[0].table.speed)

    in_every_stage(body)


class Unfillable(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("frequencies", torch.ones(4), persistent=False)


@pytest.mark.parametrize("how", ["no function", "a function that leaves it"])
def test_a_buffer_on_meta_that_nothing_fills_is_named(how, tmp_path):
    def build():
        model = nn.Module()
        model.inner = Unfillable()
        if how != "no function":
            model.inner.reset_parameters = lambda: None
        return model

    path = write_folder(tmp_path, some_values(build()))

    def body(rank, world_size):
        for stage in (1, 3):
            for fill_it in (lambda m: zeroshard.load_weights(m, path), zeroshard.init_weights):
                model = on_meta(build)
                zeroshard.AdamW(model, stage=stage)
                with pytest.raises(ConfigError, match=r"inner\.frequencies"):
                    fill_it(model)

    run(body)


# --- load_weights: files that cannot be read


def absent(path, state):
    return path / "nowhere"


def empty_folder(path, state):
    path.mkdir()
    return path


def empty_file(path, state):
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"")
    return path


def noise(path, state):
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"\x07" * 4096)
    return path / "model.safetensors"


def truncated(path, state):
    write_folder(path, state)
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:-100])
    return path


def huge_header(path, state):
    write_folder(path, state)
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + content[8:])
    return path


def index_of_noise(path, state):
    write_shards(path, state)
    (path / "model.safetensors.index.json").write_text('{"weight_map": {')
    return path


def index_without_map(path, state):
    write_shards(path, state)
    (path / "model.safetensors.index.json").write_text("{}")
    return path


def absent_shard(path, state):
    write_shards(path, state)
    (path / "model-00002-of-00003.safetensors").unlink()
    return path


def truncated_shard(path, state):
    write_shards(path, state)
    shard = path / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    return path


def shard_without_what_the_index_says(path, state):
    write_shards(path, without(state, "layers.0.experts"))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["layers.0.experts"] = "model-00001-of-00003.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def misshapen(path, state):
    return write_folder(path, state | {"layers.0.pair": torch.ones(3)})


def incomplete(path, state):
    return write_folder(path, without(state, "layers.0.pair"))


UNREADABLE = [
    absent,
    empty_folder,
    empty_file,
    noise,
    truncated,
    huge_header,
    index_of_noise,
    index_without_map,
    absent_shard,
    truncated_shard,
    shard_without_what_the_index_says,
]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_file_that_is_bad_anywhere_is_an_error_on_every_rank_in_time(stage, tmp_path):
    from safetensors import SafetensorError

    state = some_values(Assorted())
    good = write_shards(tmp_path / "good", state)
    bad = {spoil.__name__: spoil(tmp_path / spoil.__name__, state) for spoil in UNREADABLE}
    bad |= {spoil.__name__: spoil(tmp_path / spoil.__name__, state) for spoil in MISFITS}

    def body(rank, world_size):
        for build in (lambda: on_meta(Assorted), seeded):
            model = build()
            zeroshard.AdamW(model, stage=stage)
            real = not model.norm.running_mean.is_meta
            before = everything(model) if real else {}
            for what, path in bad.items():
                for where in ((0, 1), (0,), (1,)):
                    began = time.monotonic()
                    with pytest.raises((ZeroShardError, OSError, SafetensorError)) as caught:
                        zeroshard.load_weights(model, path if rank in where else good)
                    assert time.monotonic() - began < 5, f"{what} on ranks {where}"
                    if rank in where:
                        said = str(caught.value)
                        names = (str(path), "safetensors", "layers.0.")
                        assert any(name in said for name in names), f"{what}: {said}"
                    if real:
                        assert_same(everything(model), before, f"{what} on ranks {where}")
                    else:
                        assert_without_values(model.named_parameters(), what)
            zeroshard.load_weights(model, good)  # the ranks are in step
            assert_same(everything(model), everything(loaded_plainly(state)), "good again")

    run(body)


MISFITS = [misshapen, incomplete]


def test_an_error_in_the_callers_own_names_on_one_rank_is_an_error_on_every_rank(tmp_path):
    state = some_values(Assorted())
    path = write_folder(tmp_path, state)

    class NamesError(Exception):
        pass

    def body(rank, world_size):
        model = seeded()
        zeroshard.AdamW(model, stage=3)

        def names(name):
            if rank == 1 and name == "layers.2.gain":
                raise NamesError("no such layer")
            return name

        with pytest.raises((NamesError, ZeroShardError), match="no such layer"):
            zeroshard.load_weights(model, path, names=names)
        zeroshard.load_weights(model, path)
        assert_same(everything(model), everything(loaded_plainly(state)), "afterwards")

    run(body)


# --- load_weights: memory


MIB = 2**20


class Tall(nn.Module):
    """Units of a few MiB each, so that what a rank holds is far above the noise of a process."""

    def __init__(self, count, unit_mib):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(512, 512 * unit_mib, bias=False) for _ in range(count)
        )


def warm_up(tmp_path):
    """Imports and connections are there afterwards, so that only what is measured shows."""
    give_memory_back_at_once()
    model = seeded()
    zeroshard.AdamW(model, stage=3)
    zeroshard.export_weights(model, tmp_path / "warm")
    zeroshard.load_weights(model, tmp_path / "warm")


on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc/self/status"
)


# NeMo-RL#279: every rank loads the whole model. PyTorch#110479: loading takes the unsharded size.
@on_linux
def test_a_rank_that_loads_reads_its_slices_and_holds_its_shards_and_one_unit(tmp_path):
    def body(rank, world_size):
        warm_up(tmp_path)
        found = []
        for sizes in ((24, 2), (2, 24)):
            path, total = tmp_path / str(sizes[0]), 48 * MIB
            if rank == 0:
                torch.manual_seed(0)
                write_shards(path, dict(Tall(*sizes).named_parameters()))
            dist.barrier()
            with Peaks() as peaks:
                model = on_meta(Tall, *sizes)
                optimizer = zeroshard.AdamW(model, lr=1e-2, stage=3)
                zeroshard.load_weights(model, path)
            assert sum(p.numel() for p in model.parameters()) * 4 == total
            found.append((peaks.anonymous, peaks.mapped))
            del optimizer
        return found

    for small, large in run(body, 4):
        # Weights and both moments are 3/4 of the model, beside one unit; 6 MiB for all the rest.
        # Whoever holds the whole model beside its shards is above.
        allowed = 36 * MIB + 2 * MIB + 6 * MIB
        assert small[0] <= allowed, f"{small[0] / MIB:.1f} MiB, allowed {allowed / MIB:.1f}"
        # A quarter of the file, in two pieces: the system maps up to 2 MiB around what is touched.
        allowed = 12 * MIB + 2 * 4 * MIB + 6 * MIB
        assert large[1] <= allowed, f"{large[1] / MIB:.1f} MiB of the file, {allowed / MIB:.1f}"


# --- init_weights


def initialise(module):
    """What `reset_parameters` of every module, children first, is when nothing is sharded."""
    if callable(getattr(module, "reset_parameters", None)):
        module.reset_parameters()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_initialisation_is_that_of_the_modules_from_the_first_ranks_random_state(world_size):
    def body(rank, world_size, stage):
        plain = Assorted(tied=False)
        torch.manual_seed(42)
        plain.apply(initialise)
        for bucket_mb in (25, 1e-3):
            model = on_meta(Assorted, tied=False)
            kept = list(model.parameters())
            zeroshard.AdamW(model, stage=stage, bucket_mb=bucket_mb)
            torch.manual_seed(42 + rank)
            zeroshard.init_weights(model)
            assert_no_meta(model, "initialised")
            assert all(p is q for p, q in zip(model.parameters(), kept, strict=True))
            assert_same(everything(model), everything(plain), f"bucket_mb={bucket_mb}")
            if stage == 3 and world_size > 1:
                assert is_sharded(model.layers[0].experts)

    in_every_stage(body, world_size)


def test_initialisation_without_a_process_group():
    def body(rank, world_size, stage):
        plain = Assorted(tied=False)
        torch.manual_seed(42)
        plain.apply(initialise)
        model = on_meta(Assorted, tied=False)
        zeroshard.AdamW(model, stage=stage)
        torch.manual_seed(42)
        zeroshard.init_weights(model)
        assert_same(everything(model), everything(plain), "alone")

    in_every_stage(body, alone=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_initialisation_in_16_bits_is_that_of_the_modules_and_trains(dtype):
    def body(rank, world_size, stage):
        plain = Assorted(tied=False).to(dtype)
        torch.manual_seed(42)
        plain.apply(initialise)
        model = on_meta(Assorted, tied=False).to(dtype)
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
        torch.manual_seed(42)
        zeroshard.init_weights(model)
        assert_same(everything(model), everything(plain), "initialised")
        batches = assorted_batches(rank, 2)
        reference = zeroshard.AdamW(plain, lr=1e-2, stage=1)
        assert_same(train(model, optimizer, batches), train(plain, reference, batches), "trained")

    in_every_stage(body)


def test_a_tied_parameter_is_initialised_once_for_all_and_stays_tied():
    def body(rank, world_size, stage):
        model = on_meta(Assorted)
        zeroshard.AdamW(model, stage=stage)
        torch.manual_seed(42 + rank)
        zeroshard.init_weights(model)
        assert model.head.weight is model.embed.weight
        found = everything(model)
        assert all(v.isfinite().all() for v in found.values())
        assert_ranks_agree(found, "tied")
        return found

    one, two = (in_every_stage(body, world_size)[0] for world_size in (1, 2))
    for stage, found in [*one.items(), *two.items()]:
        assert_same(found, one[1], f"stage {stage}")


def test_parameters_and_buffers_with_values_are_not_touched():
    def body(rank, world_size, stage):
        model = on_meta(Assorted, tied=False)
        real = Block()
        model.layers[1] = real
        model.norm = nn.BatchNorm1d(WIDTH)
        for tensor in [*real.parameters(), *real.buffers(), *model.norm.buffers()]:
            tensor.data.fill_(5)
        zeroshard.AdamW(model, stage=stage)
        model.layers[0].up.weight.data = torch.full((2 * WIDTH + 3, WIDTH), 5.0)
        model.layers[2].experts.data = torch.full((3, WIDTH, WIDTH), 5.0)
        zeroshard.init_weights(model)
        found = everything(model)
        fives = {name for name, value in found.items() if value.numel() and value.eq(5).all()}
        assert {"layers.0.up.weight", "layers.2.experts"} <= fives
        assert all(
            name in fives or not value.numel()
            for name, value in found.items()
            if name.startswith("layers.1.")
        )
        assert {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"} <= fives
        # Their neighbours got values, in the same module too.
        for name in ("layers.0.up.bias", "layers.2.pair", "layers.2.gain", "embed.weight"):
            assert found[name].isfinite().all(), name
            assert name not in fives, name
        assert_ranks_agree(found, "initialised")
        again = everything(model)
        zeroshard.init_weights(model)
        assert_same(everything(model), again, "a second call has nothing to do")

    in_every_stage(body)


def test_parameters_that_nothing_fills_are_named():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(5))
            self.linear = nn.Linear(WIDTH, WIDTH)

    class Forgetful(Bare):
        def reset_parameters(self):
            pass

    def body(rank, world_size, stage):
        for kind in (Bare, Forgetful):
            model = on_meta(
                lambda kind=kind: nn.ModuleDict({"one": nn.Linear(3, 3), "two": kind()})
            )
            zeroshard.AdamW(model, stage=stage)
            with pytest.raises(ConfigError, match=r"two\.scale") as caught:
                zeroshard.init_weights(model)
            assert "linear" not in str(caught.value)
            assert "one" not in str(caught.value).replace("None", "").replace("none", "")

    in_every_stage(body)


def test_initialisation_leaves_ranks_as_random_as_they_were():
    def body(rank, world_size, stage):
        results = []
        for seeds in ((7, 7), (7, 8)):
            model = on_meta(Assorted)
            zeroshard.AdamW(model, stage=stage)
            torch.manual_seed(seeds[rank])
            before = torch.get_rng_state()
            zeroshard.init_weights(model)
            drawn = F.dropout(torch.ones(64))
            everyone = [torch.empty(64) for _ in range(world_size)]
            dist.all_gather(everyone, drawn)
            results.append(everyone[0].equal(everyone[1]))
            if seeds[0] != seeds[1]:
                # Not the first rank's either, which is what the others had drawn by themselves.
                torch.set_rng_state(before)
                mine = F.dropout(torch.ones(64))
                assert mine.equal(drawn) or rank == 0 or not everyone[0].equal(drawn)
        assert results == [True, False]

    in_every_stage(body)


def test_initialisation_of_a_model_that_has_all_values_does_nothing(tmp_path):
    def body(rank, world_size):
        for stage in (1, 3):
            model = seeded()
            optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
            train(model, optimizer, assorted_batches(rank, 1))
            before, random = everything(model), torch.get_rng_state()
            zeroshard.init_weights(model)
            assert_same(everything(model), before, "nothing to do")
            assert torch.get_rng_state().equal(random)

    run(body)


# --- transformers' models


HF_MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama tied": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "head_dim": 8,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 3, "num_experts_per_tok": 2},
    ),
    "qwen3 moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "num_experts": 11,  # two digits: experts are put together by number, not by name
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "head_dim": 8,
        },
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "n_inner": 24},
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
    ),
}


def hf_model(name):
    """One of the models above from its config, on whatever device is the default."""
    transformers = pytest.importorskip("transformers")
    config, kind, settings = HF_MODELS[name]
    if name in ("gpt2", "t5"):
        settings = {"vocab_size": 37, "bos_token_id": 1, "eos_token_id": 2, **settings}
        config = getattr(transformers, config)(**settings)
    else:
        config = llama_config(getattr(transformers, config), **settings)
    return getattr(transformers, kind)(config)


def hf_output(model, seed=0):
    """Logits for a few tokens, in evaluation."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 37, (2, 6), generator=generator)
    inputs = {"input_ids": tokens, "use_cache": False}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(**inputs).logits
    model.train(training)
    return logits


@pytest.mark.parametrize(
    "name", ["llama", "llama tied", "gpt-oss", "gpt2", "t5", "mixtral", "qwen3 moe"]
)
def test_what_transformers_saved_is_loaded_into_a_model_on_meta(name, tmp_path):
    torch.manual_seed(5)
    plain = hf_model(name)
    plain.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    expected = everything(plain)
    logits = hf_output(plain)

    def body(rank, world_size):
        for stage in (1, 3):
            model = on_meta(hf_model, name)
            zeroshard.AdamW(model, stage=stage)
            zeroshard.load_weights(model, tmp_path)
            assert_no_meta(model, name)
            assert_same(everything(model), expected, f"stage {stage}")
            assert_same({"": hf_output(model)}, {"": logits}, f"logits in stage {stage}")

    run(body)


def untie(model):
    """Gives every further name of a parameter one of its own.

    So are models of transformers when they are initialised: they are tied afterwards.
    """
    seen = set()
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None and p in seen:
                module._parameters[name] = nn.Parameter(p.detach().clone())
            seen.add(p)


@pytest.mark.parametrize("name", HF_MODELS)
def test_a_model_of_transformers_is_initialised_bitwise_as_it_is_on_a_cpu(name):
    plain = hf_model(name)
    untie(plain)
    for module in plain.modules():
        module._is_hf_initialized = False
    torch.manual_seed(42)
    plain.initialize_weights()
    expected = everything(plain)

    def body(rank, world_size):
        for stage in (1, 3):
            model = on_meta(hf_model, name)
            zeroshard.AdamW(model, stage=stage)
            torch.manual_seed(42 + rank)
            zeroshard.init_weights(model)
            assert_no_meta(model, name)
            found = everything(model)
            assert_same(found, {key: expected[key] for key in found}, f"stage {stage}")

    for world_size in (1, 2):
        run(body, world_size)


# --- export_weights


def written(rank, path):
    """What was exported, on the first rank; elsewhere nothing."""
    return read_export(path) if rank == 0 else ({}, [])


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_export_holds_every_weight_and_kept_buffer_once(world_size, tmp_path):
    def body(rank, world_size, stage):
        model = seeded()
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage, bucket_mb=1e-3)
        train(model, optimizer, assorted_batches(0, 2))
        expected = everything(model)
        stored = [n for n in expected if "table.speed" not in n and ".sign" not in n]
        expected = {name: expected[name] for name in stored}
        folder = tmp_path / str(stage)
        zeroshard.export_weights(model, folder / "whole")
        zeroshard.export_weights(model, str(folder / "parts"), max_file_nbytes=3000)
        held = everything(model)
        for where in ("whole", "parts"):
            dist.barrier()
            tensors, files = read_export(folder / where)
            assert (len(files) == 1) == (where == "whole"), files
            # Tied weights once, under either name.
            tied = {"embed.weight", "head.weight"} & tensors.keys()
            assert len(tied) == 1, tied
            tensors["embed.weight"] = tensors.pop(tied.pop())
            assert_same(tensors, expected, where)
            names = {path.name for path in (folder / where).iterdir()}
            index = {"model.safetensors.index.json"} if where == "parts" else set()
            assert names == {*files, *index}
            again = on_meta(Assorted)
            zeroshard.AdamW(again, stage=stage)
            zeroshard.load_weights(again, folder / where)
            assert_same(everything(again), held, f"{where}, loaded")
        assert_same(everything(model), held, "the model itself")

    in_every_stage(body, world_size)


def test_an_export_without_a_process_group(tmp_path):
    def body(rank, world_size, stage):
        model = seeded()
        zeroshard.AdamW(model, lr=1e-2, stage=stage)
        path = tmp_path / str(stage)
        zeroshard.export_weights(model, path, max_file_nbytes=3000)
        again = on_meta(Assorted)
        zeroshard.AdamW(again, lr=1e-2, stage=stage)
        zeroshard.load_weights(again, path)
        assert_same(everything(again), everything(model), "alone")

    in_every_stage(body, alone=True)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_export_is_in_the_dtype_of_the_parameters_or_the_one_asked_for(dtype, tmp_path):
    def body(rank, world_size):
        for kind in (torch.float32, torch.bfloat16):
            for stage in (1, 3):
                path = tmp_path / f"{kind}-{stage}"
                model = seeded(kind)
                zeroshard.AdamW(model, stage=stage)
                zeroshard.export_weights(model, path, dtype=dtype)
                expected = everything(model)
                for name, value in written(rank, path)[0].items():
                    value_of = expected["embed.weight" if name == "head.weight" else name]
                    if value_of.is_floating_point():
                        value_of = value_of.to(dtype or kind)
                    assert_same({name: value}, {name: value_of}, f"{kind} as {dtype}")

    run(body)


def test_files_of_an_export_stay_below_the_limit_unless_one_tensor_is_larger(tmp_path):
    def body(rank, world_size):
        model = seeded()
        zeroshard.AdamW(model, stage=3)
        for limit in (1, 1500, 4000, 9000):
            path = tmp_path / str(limit)
            zeroshard.export_weights(model, path, max_file_nbytes=limit)
            if rank:
                continue
            tensors, files = read_export(path)
            index = json.loads((path / "model.safetensors.index.json").read_text())
            sizes = {}
            for name, file in index["weight_map"].items():
                nbytes = tensors[name].numel() * tensors[name].element_size()
                sizes.setdefault(file, []).append(nbytes)
            for file, held in sizes.items():
                # Beside a tensor that is larger than the limit only empty ones may be.
                nonempty = [nbytes for nbytes in held if nbytes]
                assert sum(held) <= limit or len(nonempty) == 1, f"{file}: {held}"
            # And not needlessly many: what follows did not fit.
            totals = [sum(sizes[file]) for file in files if file in sizes]
            assert all(a + b > limit for a, b in itertools.pairwise(totals)), totals

    run(body)


def test_training_goes_on_after_an_export_as_if_it_had_not_been(tmp_path):
    def body(rank, world_size, stage):
        results = []
        for export in (False, True):
            model = seeded(torch.bfloat16)
            optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
            for index, batch in enumerate(assorted_batches(rank, 3)):
                loss_of(model, batch).backward()
                if export:  # with gradients at hand too
                    zeroshard.export_weights(model, tmp_path / f"{stage}-{index}-0")
                optimizer.step()
                optimizer.zero_grad()
                if export:
                    before = optimizer.memory()["unsharded_parameters"]
                    zeroshard.export_weights(model, tmp_path / f"{stage}-{index}-1")
                    assert optimizer.memory()["unsharded_parameters"] <= before
            results.append((everything(model), consolidated(rank, optimizer)))
        assert_same(results[0][0], results[1][0], "trained")
        assert_states_equal(results[0][1], results[1][1], "trained")

    in_every_stage(body)


@on_linux
def test_the_rank_that_writes_holds_one_unit_at_a_time(tmp_path):
    def body(rank, world_size):
        warm_up(tmp_path)
        model = Tall(24, 2)
        zeroshard.AdamW(model, lr=1e-2, stage=3)
        with Peaks() as peaks:
            zeroshard.export_weights(model, tmp_path / "out")
        return peaks.anonymous

    # One unit whole, one under way, one on its way to the file, and 6 MiB for all the rest; the
    # whole model is 24 units.
    for peak in run(body, 4):
        assert peak <= 3 * 2 * MIB + 6 * MIB, f"{peak / MIB:.1f} MiB"


@pytest.mark.parametrize("name", ["llama", "llama tied", "gpt-oss", "mixtral", "gpt2", "t5"])
def test_transformers_reads_an_export_bitwise(name, tmp_path):
    kind = type(hf_model(name))

    def body(rank, world_size):
        for stage, dtype, limit in ((1, torch.float32, 5 * 10**9), (3, torch.bfloat16, 9000)):
            path = tmp_path / str(stage)
            torch.manual_seed(5)
            model = hf_model(name).to(dtype)
            if model.can_generate():
                model.generation_config.max_new_tokens = 3
            zeroshard.AdamW(model, stage=stage)
            config = model.config.to_dict()
            zeroshard.export_weights(model, path, max_file_nbytes=limit)
            assert model.config.to_dict() == config
            expected = weights(model)
            logits = hf_output(model)
            if rank == 0:
                assert (path / "model.safetensors.index.json").exists() == (limit == 9000)
                again, told = kind.from_pretrained(path, output_loading_info=True)
                assert not told["missing_keys"]
                assert not told["unexpected_keys"]
                assert not told["mismatched_keys"]
                assert_same(weights(again), expected, f"{name}, {dtype}")
                assert_same({"": hf_output(again)}, {"": logits}, "logits")
                for key, value in config.items():
                    if key not in ("dtype", "torch_dtype", "_name_or_path", "architectures"):
                        assert again.config.to_dict()[key] == value, key
                assert json.loads((path / "config.json").read_text())["architectures"] == [
                    kind.__name__
                ]
                if model.can_generate():
                    assert again.generation_config.max_new_tokens == 3
            dist.barrier()

    run(body)


def test_transformers_reads_an_export_in_another_dtype_as_that(tmp_path):
    kind = type(hf_model("llama"))

    def body(rank, world_size):
        model = hf_model("llama")
        zeroshard.AdamW(model, stage=3)
        zeroshard.export_weights(model, tmp_path / "out", dtype=torch.bfloat16)
        expected = converted(weights(model), torch.bfloat16)
        assert model.config.dtype != torch.bfloat16
        if rank == 0:
            assert_same(weights(kind.from_pretrained(tmp_path / "out")), expected, "bf16")

    run(body)


# peft asks transformers by a name that transformers is about to drop.
peft_of_today = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


# peft#453, peft#2892: adapters of 40 bytes.
@peft_of_today
@pytest.mark.parametrize("stage", [2, 3])
def test_of_a_peft_model_the_adapter_is_exported_as_peft_reads_it(stage, tmp_path):
    peft = pytest.importorskip("peft")
    hf_model("llama")  # imports before ranks are forked

    def body(rank, world_size):
        torch.manual_seed(3)
        base = hf_model("llama")
        kept = {name: value.clone() for name, value in base.state_dict().items()}
        config = peft.LoraConfig(
            r=3,
            lora_alpha=8,
            target_modules=["q_proj", "down_proj"],
            modules_to_save=["lm_head"],
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(base, config)
        optimizer = zeroshard.AdamW(model, lr=1e-1, stage=stage)
        tokens = torch.full((2, 5), 4 + rank)
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        path = tmp_path / "adapter"
        zeroshard.export_weights(model, path)
        expected = weights(model)
        logits = hf_output(model)
        if rank == 0:
            assert {entry.name for entry in path.iterdir()} >= {
                "adapter_config.json",
                "adapter_model.safetensors",
            }
            assert not list(path.glob("model*.safetensors"))
            again = hf_model("llama")
            again.load_state_dict(kept)
            again = peft.PeftModel.from_pretrained(again, path)
            assert_same(weights(again), expected, "the adapted model")
            assert_same({"": hf_output(again)}, {"": logits}, "logits")
            assert any("lora_B" in n and v.any() for n, v in expected.items())
            held = read_export(path)[0]
            with zeroshard.gather(again):
                assert_same(held, peft.get_peft_model_state_dict(again), "the file")

    run(body)


def test_weights_that_have_no_values_are_not_exported(tmp_path):
    def body(rank, world_size, stage):
        model = SplitForm(SHAPES).to("meta")
        zeroshard.AdamW(model, stage=stage)
        give_all_but(model, {"parts.2.pair"})
        with pytest.raises(ConfigError, match=r"parts\.2\.pair"):
            zeroshard.export_weights(model, tmp_path / f"bad-{stage}")
        with pytest.raises(ConfigError, match=r"parts\.2\.pair"):
            dict(zeroshard.full_parameters(model))
        model.get_parameter("parts.2.pair").data = torch.full((2,), 0.25)
        zeroshard.export_weights(model, tmp_path / f"good-{stage}")
        assert_same(dict(zeroshard.full_parameters(model)), weights(model), "then")
        dist.barrier()
        assert not list(tmp_path.glob("*bad*"))

    in_every_stage(body)


def test_an_export_replaces_nothing_unless_told_to(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")

    def body(rank, world_size):
        model = seeded()
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=3)
        zeroshard.export_weights(model, tmp_path / "empty")
        with pytest.raises(ZeroShardError):
            zeroshard.export_weights(model, tmp_path / "file")
        with pytest.raises(ConfigError, match="overwrite"):
            zeroshard.export_weights(model, tmp_path / "full")
        dist.barrier()
        assert [entry.name for entry in (tmp_path / "full").iterdir()] == ["notes.txt"]
        assert (tmp_path / "file").read_text() == "mine"
        dist.barrier()
        zeroshard.export_weights(model, tmp_path / "full", overwrite=True, max_file_nbytes=3000)
        # One that follows has fewer files: nothing of the last one is left among them.
        train(model, optimizer, assorted_batches(rank, 1))
        zeroshard.export_weights(model, tmp_path / "full", overwrite=True)
        dist.barrier()
        tensors, files = read_export(tmp_path / "full")
        assert files == ["model.safetensors"]
        assert tensors["layers.0.experts"].equal(everything(model)["layers.0.experts"])
        assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full"]

    run(body)


def test_a_wrong_argument_of_an_export_is_refused_by_name(tmp_path):
    wrong = {
        "dtype": (torch.int8, torch.bool, "bfloat16"),  # integers would keep nothing of a weight
        "max_file_nbytes": (0, -5, "5GB"),
    }

    def body(rank, world_size):
        model = seeded()
        zeroshard.AdamW(model, stage=3)
        for name, values in wrong.items():
            for value in values:
                with pytest.raises(ConfigError, match=name):
                    zeroshard.export_weights(model, tmp_path / "out", **{name: value})
        dist.barrier()
        assert not list(tmp_path.iterdir())

    run(body)


def content(path):
    """Every file below a directory and its bytes; None where there is nothing."""
    if not path.exists():
        return None
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def exporting(path, *, overwrite, number=None, action=None):
    """A rank function that exports, and lets something happen at a touch of the file system."""

    def body(rank, world_size):
        model = seeded()
        zeroshard.AdamW(model, lr=1e-2, stage=3)
        seen = []
        if rank == 0:
            seen = watch_files(path.parent, lambda seen: len(seen) == number and action())
        zeroshard.export_weights(model, path, overwrite=overwrite, max_file_nbytes=6000)
        return list(seen)

    return body


def old_export(path):
    """Fills the directory with another export; returns its content."""
    write_shards(path, some_values(Assorted()), count=2)
    return content(path)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_kill_at_any_moment_of_an_export_leaves_no_half_behind_the_final_name(
    overwrite, tmp_path
):
    clean = tmp_path / "clean" / "out"
    clean.parent.mkdir()
    if overwrite:
        old_export(clean)
    first = outcomes(exporting(clean, overwrite=overwrite), tmp_path / "ranks")
    assert [outcome.error for outcome in first] == [None, None]
    new = content(clean)
    num_events = len(first[0].result)
    assert num_events >= 3
    # Kills spread over all events, among them the first, and all of the last ones: the renames.
    spread = range(1, num_events, max(1, num_events // 3))
    for number in sorted({*spread, *range(max(1, num_events - 3), num_events + 1)}):
        path = tmp_path / f"killed-{number}" / "out"
        path.parent.mkdir()
        old = old_export(path) if overwrite else None
        killed, other = outcomes(
            exporting(path, overwrite=overwrite, number=number, action=kill_myself),
            tmp_path / f"ranks-{number}",
        )
        what = f"before {first[0].result[number - 1]}"
        assert not killed.answered, what
        assert content(path) in (old, new), f"{what}: half an export"
        assert other.answered, f"{what}: the other rank hangs"
        assert other.elapsed_s < 8, what
        if content(path) == old:
            assert other.error is not None, f"{what}: the other rank believes it is there"
    # What the killed ones left beside it is in nobody's way.
    assert_same(exported_alone(path), read_export(clean)[0], what)


def exported_alone(path):
    """Exports once more, without a process group; returns what is there then."""

    def body(rank, world_size):
        model = seeded()
        zeroshard.AdamW(model, lr=1e-2, stage=3)
        zeroshard.export_weights(model, path, overwrite=True, max_file_nbytes=6000)
        return read_export(path)[0]

    return run(body, 1, process_group=False, WORLD_SIZE=None)[0]


class DiskError(OSError):
    pass


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_error_at_any_moment_of_an_export_is_one_on_every_rank_and_leaves_nothing(
    overwrite, tmp_path
):
    def body(rank, world_size):
        armed = [0]

        def happen(seen):
            if rank == 0 and armed[0] and len(seen) == armed[0]:
                raise DiskError("the disk is full")

        seen = watch_files(tmp_path, happen)
        model = seeded()
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=3)
        number, refused = 0, 0
        while True:
            number += 1
            path = tmp_path / f"out-{number}"
            old = None
            if rank == 0:
                armed[0] = 0
                old = old_export(path) if overwrite else None
            dist.barrier()
            seen.clear()
            armed[0] = number
            error = None
            try:
                zeroshard.export_weights(model, path, overwrite=overwrite, max_file_nbytes=6000)
            except (ZeroShardError, OSError) as caught:
                error = caught
            last = torch.tensor(float(len(seen) < number))
            armed[0] = 0
            failed = [None] * world_size
            dist.all_gather_object(failed, error is not None)
            dist.broadcast(last, 0)
            if last:  # there are fewer touches than that
                assert failed == [False, False]
                break
            refused += any(failed)
            assert failed in ([True, True], [False, False]), f"touch {number}: {failed}"
            if rank == 0:
                what = f"touch {number}: {seen[number - 1]}"
                if failed[0]:
                    assert content(path) == old, what
                    left = [p.name for p in tmp_path.iterdir() if not p.name.startswith("out-")]
                    assert left == [], what
                else:
                    assert read_export(path)[1], what
        assert refused >= 2
        # The ranks are in step, and nothing is whole.
        train(model, optimizer, assorted_batches(rank, 1))
        zeroshard.export_weights(model, tmp_path / "good")
        dist.barrier()
        held = read_export(tmp_path / "good")[0]
        assert held["layers.1.experts"].equal(everything(model)["layers.1.experts"])

    run(body)


# --- full_parameters


@pytest.mark.parametrize("world_size", [1, 3])
def test_full_parameters_come_once_each_and_stay_as_they_were(world_size):
    def body(rank, world_size, stage):
        for dtype in (torch.float32, torch.bfloat16):
            model = seeded(dtype)
            optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage, bucket_mb=1e-3)
            batches = assorted_batches(rank, 2)
            train(model, optimizer, batches[:1])
            expected = weights(model)
            listed = list(zeroshard.full_parameters(model))
            assert len(listed) == len(expected)
            kept = dict(listed)
            assert_same(kept, expected, "all")
            for name, value in kept.items():
                assert type(value) is torch.Tensor, f"{name} is a {type(value)}"
                assert not value.requires_grad, name
            train(model, optimizer, batches[1:])
            assert_same(kept, expected, "kept over a step")
            assert not weights(model)["layers.0.experts"].equal(expected["layers.0.experts"])
            # Nor does a write to one of them reach the model.
            now = weights(model)
            for _, value in zeroshard.full_parameters(model):
                value.zero_()
            assert_same(weights(model), now, "written to")

    in_every_stage(body, world_size)


def test_of_the_full_parameters_one_unit_is_whole_at_a_time():
    def body(rank, world_size):
        model = nn.Module()
        model.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=3)
        unit = 4 * 64 * 64
        whole = optimizer.memory()["unsharded_parameters"]
        most, names = 0, []
        for name, value in zeroshard.full_parameters(model):
            most = max(most, optimizer.memory()["unsharded_parameters"])
            assert value.shape == (64, 64)
            names.append(name)
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())
        assert most <= whole + unit, f"{most} bytes are whole, one unit has {unit}"
        assert optimizer.memory()["unsharded_parameters"] == whole

    run(body)


def test_an_iteration_that_ends_early_leaves_nothing_whole():
    def body(rank, world_size, stage):
        results = []
        for look in (False, True):
            model = seeded()
            optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
            whole = optimizer.memory()["unsharded_parameters"]
            if look:
                for count in (1, 4, 12):
                    for index, _ in enumerate(zeroshard.full_parameters(model)):
                        if index == count:
                            break
                    assert optimizer.memory()["unsharded_parameters"] == whole, count
                with contextlib.suppress(ZeroDivisionError):
                    for _ in zeroshard.full_parameters(model):
                        1 / 0  # noqa: B018
                assert optimizer.memory()["unsharded_parameters"] == whole, "after an error"
            results.append(train(model, optimizer, assorted_batches(rank, 2)))
        assert_same(*results, "trained on")

    in_every_stage(body)


def test_the_model_is_used_and_trained_while_its_full_parameters_are_pushed():
    def body(rank, world_size):
        model = seeded()
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=3)
        before = weights(model)
        iteration = iter(zeroshard.full_parameters(model))
        first = dict([next(iteration)])
        with torch.no_grad():
            model(assorted_batches(0, 1)[0])
        assert_same(dict(iteration) | first, before, "with a forward in between")
        train(model, optimizer, assorted_batches(rank, 1))

    run(body)


LORA = {
    "linear": ("llama", {"target_modules": ["q_proj", "down_proj", "lm_head"]}),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "v_proj"]}),
    "rank-stabilised": ("llama", {"target_modules": ["o_proj"], "use_rslora": True}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "saved modules": (
        "llama",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    ),
    "experts": (
        "mixtral",
        {
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "biases": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}),
}


@peft_of_today
@pytest.mark.parametrize("kind", LORA)
def test_merged_adapters_are_pushed_under_the_names_of_the_plain_model(kind):
    peft = pytest.importorskip("peft")
    name, settings = LORA[kind]
    plain_names = dict(hf_model(name).named_parameters())

    def adapted():
        torch.manual_seed(3)
        model = peft.get_peft_model(hf_model(name), peft.LoraConfig(r=3, lora_alpha=8, **settings))
        with torch.no_grad():
            for full, p in model.named_parameters():
                if p.requires_grad and "lora_A" not in full:
                    p.add_(0.1 * torch.randn(p.shape))
        return model

    def body(rank, world_size):
        reference = adapted().merge_and_unload()
        expected = {n: p.detach() for n, p in reference.named_parameters()}
        assert expected.keys() == plain_names.keys()
        for stage in (1, 3):
            model = adapted()
            zeroshard.AdamW(model, lr=1e-2, stage=stage)
            before, logits = weights(model), hf_output(model)
            # One that is asked for without adapters merged has all names, as ever.
            assert_same(dict(zeroshard.full_parameters(model)), before, "not merged")
            listed = list(zeroshard.full_parameters(model, merge_adapters=True))
            assert len(listed) == len(expected)
            assert_same(dict(listed), expected, f"merged in stage {stage}")
            assert_same(weights(model), before, "the model itself")
            assert_same({"": hf_output(model)}, {"": logits}, "its logits")

    run(body)


@peft_of_today
def test_adapters_that_are_not_simply_added_are_refused_on_every_rank():
    peft = pytest.importorskip("peft")
    target = {"target_modules": ["q_proj"]}
    others = [
        peft.LoraConfig(r=3, use_dora=True, **target),
        peft.LoHaConfig(r=2, init_weights=False, **target),
        peft.VeraConfig(r=4, init_weights=False, **target),
        peft.OFTConfig(oft_block_size=4, init_weights=False, **target),
        peft.IA3Config(feedforward_modules=[], **target),
    ]
    hf_model("llama")

    def body(rank, world_size):
        for config in others:
            for stage in (1, 3):
                torch.manual_seed(3)
                model = peft.get_peft_model(hf_model("llama"), config)
                optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
                before, whole = weights(model), optimizer.memory()["unsharded_parameters"]
                with pytest.raises(ConfigError, match="merge"):
                    list(zeroshard.full_parameters(model, merge_adapters=True))
                assert_same(weights(model), before, "afterwards")
                assert optimizer.memory()["unsharded_parameters"] == whole
                assert_same(dict(zeroshard.full_parameters(model)), before, "not merged")

    run(body)


def test_merging_needs_no_adapters():
    def body(rank, world_size):
        model = seeded()
        zeroshard.AdamW(model, stage=3)
        merged = dict(zeroshard.full_parameters(model, merge_adapters=True))
        assert_same(merged, weights(model), "none to merge")

    run(body)


# --- what a file may say twice, and ranks that fail alone


def test_two_values_for_one_tied_parameter_are_refused(tmp_path):
    state = some_values(Assorted())
    same = write_folder(tmp_path / "same", {**state, "head.weight": state["embed.weight"].clone()})
    state["head.weight"] = state["embed.weight"].clone()
    state["head.weight"][-1, -1] += 1  # on one rank's slice alone
    other = write_folder(tmp_path / "other", state)

    def body(rank, world_size, stage):
        model = on_meta(Assorted)
        zeroshard.AdamW(model, stage=stage)
        with pytest.raises(ConfigError, match="one parameter in the model"):
            zeroshard.load_weights(model, other)
        assert bool(model.get_parameter("layers.0.up.weight").isnan().all()), "nothing was loaded"
        zeroshard.load_weights(model, same)

    in_every_stage(body)


def test_of_a_tensor_in_two_files_the_one_that_the_index_names_counts(tmp_path):
    state = some_values(Assorted())
    folder = write_shards(tmp_path, without(state, "head.weight"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    stale = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for file in set(index.values()):
        kept = {name: state[name] for name in index if index[name] == file}
        write_file(folder / file, {**without(stale, "head.weight"), **kept})

    def body(rank, world_size):
        model = on_meta(Assorted)
        zeroshard.AdamW(model, stage=3)
        zeroshard.load_weights(model, folder)
        assert_same(everything(model), everything(loaded_plainly(state)), "by the index")

    run(body)


def test_an_initialisation_that_fails_on_one_rank_is_an_error_on_all():
    class Fails(nn.Linear):
        def reset_parameters(self):
            if not self.weight.is_meta and dist.get_rank() == 1:
                raise RuntimeError("no luck")
            super().reset_parameters()

    def body(rank, world_size, stage):
        with torch.device("meta"):
            model = nn.Sequential(nn.ModuleList(Fails(4, 4) for _ in range(3)))
        zeroshard.AdamW(model, stage=stage)
        with pytest.raises(ConfigError, match="no luck"):
            zeroshard.init_weights(model)

    in_every_stage(body)


def test_a_new_optimizer_knows_of_frozen_parameters_without_values():
    def body(rank, world_size, stage):
        model = on_meta(Assorted)
        for number in range(2):
            optimizer = zeroshard.AdamW(model, stage=stage)
            with pytest.raises(ConfigError, match="frozen"):
                zeroshard.export_weights(model, "never")
            if number == 0:
                optimizer.close()

    in_every_stage(body)


def test_where_this_process_is_nothing_is_exported(tmp_path, monkeypatch):
    (tmp_path / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "inside")
    model = nn.Linear(2, 2)
    optimizer = zeroshard.AdamW(model)
    for path in (".", tmp_path):
        with pytest.raises(ConfigError, match="another path"):
            zeroshard.export_weights(model, path, overwrite=True)
    optimizer.close()
