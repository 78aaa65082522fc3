"""Under stage 3 a parameter never lies: it is whole where it is used, else it reads as NaN."""

import contextlib
import copy
import gc
import inspect
import io
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import (
    SHAPES,
    LinearForm,
    SplitForm,
    assert_ranks_agree,
    assert_same,
    attribute,
    averaged,
    coefficients,
    decay_groups,
    full_gradients,
    is_sharded,
    letter_batches,
    letters,
    loss_of,
    name_of,
    plain_step,
    train,
    train_with_ddp,
    weights,
)
from ranks import run
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from zeroshard import optimizer as facade
from zeroshard.errors import ConfigError, ShardTensorError, ZeroShardError
from zeroshard.transport import Counting, connect

# What the parameters are stored as: dtype, and the copy of higher precision beside it.
KINDS = {
    "fp32": (torch.float32, "auto"),
    "split": (torch.bfloat16, "split"),
    "fp32 master": (torch.bfloat16, "fp32"),
    "fp16": (torch.float16, "fp32"),
}
kinds = pytest.mark.parametrize("kind", KINDS)


class Pair:
    """One training under stage 3, and beside it under stage 2, which has whole parameters.

    Both end in the same bits, so the second says what the parameters of the first are.
    """

    def __init__(self, rank, world_size, kind="fp32", *, draws=(0,), frozen=(), **options):
        self.rank, self.world_size = rank, world_size
        dtype, master = KINDS[kind]
        precision = zeroshard.Precision(master=master)
        options = {"lr": 1e-3, "weight_decay": 0.1, "precision": precision, **options}
        self.model, self.other = SplitForm(SHAPES, dtype), SplitForm(SHAPES, dtype)
        for model in self.models:
            for name in frozen:
                getattr(model, name).requires_grad_(False)
        self.optimizer = zeroshard.AdamW(self.model, stage=3, **options)
        self.other_optimizer = zeroshard.AdamW(self.other, stage=2, **options)
        self.steps(*draws)

    @property
    def models(self):
        return self.model, self.other

    @property
    def optimizers(self):
        return self.optimizer, self.other_optimizer

    def input(self, draw=0):
        return coefficients(self.model, self.rank, self.world_size, draw)

    def backward(self, draw):
        for model in self.models:
            model(self.input(draw)).backward()

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def steps(self, *draws):
        for draw in draws:
            self.backward(draw)
            self.step()

    def stand_still(self):
        """From here on a step moves nothing."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.0

    def check(self, what):
        assert_sharded(self.model, what)
        assert_same(weights(self.model), weights(self.other), what)
        assert_sharded(self.model, f"{what}, after gather")

    def check_gradients(self, what):
        assert_same(full_gradients(self.model), full_gradients(self.other), what)


def assert_sharded(model, what):
    for name, p in model.named_parameters():
        assert is_sharded(p) == (p.numel() > 1), f"{what}: {name} has strides {p.stride()}"
        if p.numel() > 1:
            assert p.isnan().all(), f"{what}: {name}"


def values(shape, dtype=torch.float32, seed=0):
    """Values without a pattern that a shift or a swap of slices would keep."""
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randn(shape, generator=generator).to(dtype)


HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def leftovers(model, *, copied=False):
    """All that a plain module does not have.

    torch copies a module's hooks one for one: in a copy those of ours are functions that do
    nothing and know nothing of the original.
    """
    found = []
    for name, module in model.named_modules():
        for hooks in HOOKS:
            left = list(getattr(module, hooks, {}).values())
            if copied:
                left = [getattr(hook, "hook", hook) for hook in left]  # torch wraps some
                left = [hook for hook in left if not inspect.isfunction(hook) or hook.__closure__]
            found += [f"{hooks} of {name!r}: {hook}" for hook in left]
        found += [f"{key} of {name!r}" for key in ("forward", "_call_impl") if key in vars(module)]
        if "zeroshard" in type(module).__module__:
            found.append(f"class of {name!r}")
    for name, p in model.named_parameters():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            found.append(f"hooks of {name!r}")
        if is_sharded(p) or p.isnan().any():
            found.append(f"values of {name!r}")
        if type(p) is not nn.Parameter or vars(p):
            found.append(f"kind of {name!r}")
        if p.grad is not None and type(p.grad) is not torch.Tensor:
            found.append(f"gradient of {name!r}")
    return found


def is_shard_tensor(value):
    kinds_of = [kind.__name__ for kind in type(value).__mro__]
    return isinstance(value, DTensor) and "ShardTensor" in kinds_of


# --- what a parameter is while its values are elsewhere


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_outside_of_its_unit_a_parameter_keeps_all_but_its_values(dtype):
    def body(rank, world_size):
        model = SplitForm(SHAPES, dtype)
        held = dict(model.named_parameters())
        optimizer = zeroshard.AdamW(model, stage=3)

        def check(when):
            elements = set()
            for name, p in model.named_parameters():
                assert p is held[name], when
                assert type(p) is nn.Parameter
                assert p.is_leaf
                assert p.requires_grad
                assert p.shape == SHAPES[attribute(name)], f"{when}: {name}"
                assert p.dtype == dtype
                assert p.device.type == "cpu"
                if p.numel() <= 1:
                    assert p.isfinite().all(), f"{when}: {name}"
                    continue
                assert p.isnan().all(), f"{when}: {name} reads as {p.flatten()[:3]}"
                assert p.stride() == (0,) * p.ndim
                assert p.untyped_storage().nbytes() <= 32  # an element for each of a unit
                elements.add(p.data_ptr())
            assert len(elements) == 5, "each is its own element"

        check("after construction")
        mine = coefficients(model, rank, world_size)
        for draw in range(2):
            with torch.no_grad():
                model(mine)
            check("after a forward without gradients")
            model(mine).backward()
            check("after backward")
            optimizer.step()
            check("after step")
            optimizer.zero_grad()
            check(f"after zero_grad {draw}")

    run(body)


def test_whatever_is_read_of_a_sharded_parameter_is_nan_and_no_number():
    reads = {
        "sum": lambda p: p.sum(),
        "norm": lambda p: p.norm(),
        "mean of a row": lambda p: p[3].mean(),
        "max": lambda p: p.max(),
        "element": lambda p: p[36, 28],
        "clone": lambda p: p.detach().clone(),
        "data": lambda p: p.data,
        "arithmetic": lambda p: 0 * p + 1,
        "transpose": lambda p: p.t() @ torch.ones(37),
        "reshape": lambda p: p.reshape(29, 37),
        "cast": lambda p: p.double(),
        "flatten": lambda p: nn.utils.parameters_to_vector([p]),
        "numpy": lambda p: torch.from_numpy(p.detach().numpy().copy()),
        "list": lambda p: torch.tensor(p.tolist()),
    }

    def body(rank, world_size):
        model = Pair(rank, world_size).model
        for what, read in reads.items():
            got = read(model.matrix)
            assert got.isnan().all(), f"{what}: {got}"

    run(body)


@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_of_one_element_are_right_at_every_moment(world_size):
    def body(rank, world_size):
        for kind in KINDS:
            pair = Pair(rank, world_size, kind)

            def check(when, pair=pair, kind=kind):
                for name in ("scalar", "single"):
                    ours, other = getattr(pair.model, name), getattr(pair.other, name)
                    assert torch.equal(ours, other), f"{kind}, {when}: {name}"

            check("at rest")
            pair.backward(1)
            check("after backward")
            pair.step()
            check("after step")
            with torch.no_grad():  # they are never anywhere else: written as ever
                for model in pair.models:
                    model.scalar.fill_(3.0)
                    model.single.mul_(0.5)
            check("written")
            pair.steps(2)
            check("after a step from there")
            pair.check(kind)

    run(body, world_size)


# --- writes outside of gather


LOUD = {
    "add_": lambda p: p.add_(1),
    "mul_": lambda p: p.mul_(2),
    "copy_": lambda p: p.copy_(torch.ones_like(p)),
    "copy_ through data": lambda p: p.data.copy_(torch.ones_like(p)),
    "clamp_": lambda p: p.clamp_(-1, 1),
    "normal_": lambda p: nn.init.normal_(p),
    "lerp_": lambda p: p.lerp_(torch.ones_like(p), 0.5),
    "a row": lambda p: p.__setitem__(0, 1.0),
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),
    "foreach copy": lambda p: torch._foreach_copy_([p], [torch.ones_like(p)]),
    "nan_to_num_": lambda p: p.nan_to_num_(),
}


def test_writes_that_need_every_element_raise_by_themselves():
    def body(rank, world_size):
        pair = Pair(rank, world_size, frozen=("block",))
        for what, write in LOUD.items():
            for p in (pair.model.matrix, pair.model.block, pair.model.experts):
                with pytest.raises(RuntimeError), torch.no_grad():
                    write(p)
                assert p.isnan().all(), what
        pair.check("nothing was written")
        pair.steps(1)
        pair.check("and training goes on")

    run(body)


# All of these write the one element that the expanded tensor has.
SILENT = {
    "fill_": lambda p: p.fill_(2.0),
    "zero_": lambda p: p.zero_(),
    "masked_fill_": lambda p: p.masked_fill_(torch.ones(p.shape, dtype=torch.bool), 2.0),
    "an element": lambda p: p.__setitem__((0,) * p.ndim, 2.0),
    "a view": lambda p: p.t().fill_(2.0),
    "row by row": lambda p: [row.fill_(2.0) for row in p],
    "init": lambda p: nn.init.zeros_(p),
    "foreach": lambda p: torch._foreach_zero_([p]),
    "detached": lambda p: p.detach().fill_(2.0),
}


def by_forward(pair):
    pair.model(pair.input(1))


def by_forward_without_gradients(pair):
    with torch.no_grad():
        pair.model(pair.input(1))


def by_state_dict(pair):
    pair.model.state_dict()


def by_gather(pair):
    with zeroshard.gather(pair.model):
        pass


def by_gather_with_writeback(pair):
    with zeroshard.gather(pair.model, writeback=True):
        pass


def by_step(pair):
    pair.optimizer.step()


FINDERS = (
    by_forward,
    by_forward_without_gradients,
    by_state_dict,
    by_gather,
    by_gather_with_writeback,
    by_step,
)
# torch's own warning for some of them, the one it gives before it writes.
lets_through = pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated")


@lets_through
@pytest.mark.parametrize("find", FINDERS)
def test_a_write_that_torch_lets_through_is_found_once_and_undone(find):
    def body(rank, world_size):
        for what, write in SILENT.items() if find is by_forward else [*SILENT.items()][:3]:
            pair = Pair(rank, world_size)
            if find is by_step:
                pair.backward(1)
            with torch.no_grad():
                write(pair.model.matrix)
            with pytest.raises(ConfigError, match=r"parts\.0\.matrix") as caught:
                find(pair)
            assert "gather" in str(caught.value), caught.value
            pair.zero_grad()
            pair.check(f"{what}: as before the write")
            assert pair.model.state_dict(), "raised once"
            pair.steps(2)
            pair.check(f"{what}: and training goes on")

    run(body)


@lets_through
@pytest.mark.parametrize("find", [by_forward, by_state_dict, by_step])
def test_a_write_to_a_parameter_of_the_root_unit_is_found(find):
    def body(rank, world_size):
        pair = Pair(rank, world_size, "split")
        if find is by_step:
            pair.backward(1)
        with torch.no_grad():
            pair.model.experts.zero_()
        with pytest.raises(ConfigError, match=r"experts(?s:.*)gather|gather(?s:.*)experts"):
            find(pair)
        pair.zero_grad()
        pair.check("as before the write")
        pair.steps(2)
        pair.check("and training goes on")

    run(body)


@lets_through
@pytest.mark.parametrize("find", [by_forward, by_state_dict, by_gather])
def test_a_write_to_a_frozen_parameter_is_found(find):
    def body(rank, world_size):
        pair = Pair(rank, world_size, frozen=("matrix", "experts"))
        for name in ("matrix", "experts"):
            with torch.no_grad():
                getattr(pair.model, name).fill_(1.0)
            with pytest.raises(ConfigError, match=name) as caught:
                find(pair)
            assert "gather" in str(caught.value)
            pair.zero_grad()
        pair.check("as before the write")
        pair.steps(2)
        pair.check("and training goes on")

    run(body)


@lets_through
def test_a_write_on_one_rank_is_found_where_nothing_communicates():
    def body(rank, world_size):
        pair = Pair(rank, world_size)
        if rank == 1:
            with torch.no_grad():
                pair.model.block.zero_()
            with pytest.raises(ConfigError, match=r"parts\.2\.block"):
                pair.model.state_dict()
        pair.check("as before the write")
        pair.steps(1)
        pair.check("on all ranks")

    run(body)


BY_DATA = {
    "fill_": lambda p: p.data.fill_(2.0),
    "zero_": lambda p: p.data.zero_(),
    "numpy": lambda p: p.detach().numpy().fill(2.0),
}


@pytest.mark.parametrize("how", BY_DATA)
def test_a_write_that_moves_no_version_is_found_or_gone_after_the_next_use(how):
    """As models initialise their layers: it is lost, but must not be read for long."""

    def body(rank, world_size):
        pair = Pair(rank, world_size)
        BY_DATA[how](pair.model.matrix)
        try:
            with torch.no_grad():
                pair.model(pair.input())
        except ConfigError as error:
            refusal = str(error)
        else:
            refusal = "matrix, gather"
        assert "matrix" in refusal
        assert "gather" in refusal
        pair.zero_grad()
        pair.check("as before the write")
        pair.steps(1)
        pair.check("and training goes on")

    run(body)


@kinds
def test_new_data_takes_effect(kind):
    """`p.data = x`, as checkpoints are often loaded and averages swapped in."""

    def body(rank, world_size):
        dtype, _ = KINDS[kind]
        for turned in (False, True):
            pair = Pair(rank, world_size, kind)
            for model in pair.models:
                data = values((37, 29), dtype)
                model.matrix.data = data.t().contiguous().t() if turned else data
                model.experts.data = values((3, 11, 13), dtype)
            what = f"turned={turned}"
            assert_same(weights(pair.model), weights(pair.other), f"{what}: read back")
            assert_sharded(pair.model, what)
            lrs = [group["lr"] for group in pair.optimizer.param_groups]
            pair.stand_still()
            pair.steps(1)
            assert_same(
                {"matrix": weights(pair.model)[name_of(pair.model, "matrix")]},
                {"matrix": values((37, 29), dtype)},
                f"{what}: kept exactly by a step that moves nothing",
            )
            for optimizer in pair.optimizers:
                for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                    group["lr"] = lr
            pair.steps(2, 3)
            pair.check(f"{what}: trained on from there")

    run(body)


@pytest.mark.parametrize("moment", ["before a forward", "before the step"])
def test_new_data_is_seen_by_whatever_comes_next(moment):
    def body(rank, world_size):
        pair = Pair(rank, world_size)
        if moment == "before the step":
            pair.backward(1)
        for model in pair.models:
            model.matrix.data = values((37, 29))
        if moment == "before a forward":
            with torch.no_grad():
                assert torch.equal(*(model(pair.input()) for model in pair.models))
            pair.backward(1)
        pair.step()
        pair.check(moment)

    run(body)


def test_of_new_data_every_rank_gives_its_slice():
    def body(rank, world_size):
        pair = Pair(rank, world_size)
        before = weights(pair.model)
        pair.model.matrix.data = torch.full((37, 29), float(rank))
        name = name_of(pair.model, "matrix")
        entry = pair.model.state_dict()[name]
        local = entry.to_local()
        assert local.numel() > 0
        assert (local == rank).all()
        after = weights(pair.model)
        assert set(after[name].flatten().tolist()) == {0.0, 1.0}
        assert_ranks_agree(after, "of slices")
        before[name] = after[name]
        assert_same(after, before, "the others")

    run(body)


CONVERSIONS = {
    "another shape": lambda model: setattr(model.parts[0].matrix, "data", torch.ones(3, 5)),
    "another dtype": lambda model: model.to(torch.bfloat16),
    "double": lambda model: model.double(),
}
REPLACEMENTS = {
    "a new Parameter": lambda model: setattr(
        model.parts[0], "matrix", nn.Parameter(torch.ones(37, 29))
    ),
    "assigned": lambda model: model.load_state_dict(
        {name: torch.ones(p.shape) for name, p in model.named_parameters()}, assign=True
    ),
    "another device": lambda model: model.to("meta"),
}


@pytest.mark.parametrize("how", CONVERSIONS)
def test_a_converted_parameter_is_an_error_in_the_next_forward_that_names_it(how):
    def body(rank, world_size):
        for no_grad in (False, True):
            pair = Pair(rank, world_size)
            CONVERSIONS[how](pair.model)
            of_one = "matrix" if how == "another shape" else "|".join(SHAPES)
            with (
                pytest.raises(ConfigError, match=of_one),
                torch.no_grad() if no_grad else contextlib.nullcontext(),
            ):
                pair.model(pair.input())

    run(body)


# pytorch#107843: parameters replaced after the optimizer was built, which trains nothing.
@pytest.mark.parametrize("how", REPLACEMENTS)
def test_a_replaced_parameter_is_an_error_in_the_next_step_at_the_latest_that_names_it(how):
    def use(pair):
        if how != "another device":  # a forward there has torch's own error
            pair.model(pair.input()).backward()
        pair.optimizer.step()

    def body(rank, world_size):
        pair = Pair(rank, world_size)
        REPLACEMENTS[how](pair.model)
        of_one = "matrix" if how == "a new Parameter" else "|".join(SHAPES)
        with pytest.raises(ConfigError, match=of_one):
            use(pair)

    run(body)


def test_a_copy_of_a_placeholder_given_as_data_changes_nothing():
    """As `model.to("cpu:0")`, a function of `model._apply` that copies: nothing was written."""

    def body(rank, world_size):
        # The last rank has no element of the pair.
        for name in ("matrix", "pair"):
            pair = Pair(rank, world_size)
            parameter = getattr(pair.model, name)
            parameter.data = parameter.data.clone()
            pair.steps(1)
            pair.check("training goes on")

    run(body, 3, timeout_s=20)


def test_what_was_computed_of_a_placeholder_is_refused_as_data_on_every_rank():
    """It would train on NaN."""

    def body(rank, world_size):
        for name in ("matrix", "pair"):
            pair = Pair(rank, world_size)
            parameter = getattr(pair.model, name)
            parameter.data = 0.5 * parameter.data
            with pytest.raises(ConfigError, match=name) as caught:
                pair.model(pair.input())
            assert "gather" in str(caught.value)
            pair.zero_grad()
            pair.check("as before")
            pair.steps(1)
            pair.check("and training goes on")

    run(body, 3, timeout_s=20)


def test_weights_swapped_out_and_a_placeholder_swapped_back_are_refused():
    """The usual evaluation of an average: what was put aside are not the weights."""

    def body(rank, world_size):
        pair = Pair(rank, world_size)
        held = {name: p.data for name, p in pair.model.named_parameters()}
        for p in pair.model.parameters():
            p.data = torch.ones(p.shape)
        with torch.no_grad():
            pair.model(pair.input())
        for name, p in pair.model.named_parameters():
            p.data = held[name]

        def use():
            pair.model(pair.input())

        with pytest.raises(ConfigError, match="gather"):
            use()

    run(body)


def test_weights_swapped_for_an_average_inside_gather_and_back_train_on():
    def body(rank, world_size):
        for kind in KINDS:
            pair = Pair(rank, world_size, kind)
            with zeroshard.gather(pair.model):
                held = {name: p.data for name, p in pair.model.named_parameters()}
                for p in pair.model.parameters():
                    p.data = torch.ones_like(p)
                with torch.no_grad():
                    ones = pair.model({name: torch.ones(p.shape) for name, p in held.items()})
                assert ones == sum(p.numel() for p in pair.model.parameters())
                for name, p in pair.model.named_parameters():
                    p.data = held[name]
            pair.check(kind)
            pair.steps(1, 2)
            pair.check(f"{kind}: trained on")

    run(body)


def test_what_changes_nothing_in_torch_changes_nothing():
    def body(rank, world_size):
        pair = Pair(rank, world_size)
        model = pair.model
        for act in (
            lambda: model.to("cpu"),
            lambda: model.float(),
            lambda: model.to(torch.float32),
            lambda: model.requires_grad_(True),
            lambda: model.eval(),
            lambda: model.train(),
            lambda: model.apply(lambda module: None),
            lambda: [setattr(p, "data", p.data) for p in model.parameters()],
            lambda: [p.data.to("cpu", torch.float32) for p in model.parameters()],
            lambda: repr(model),
            lambda: [repr(p) for p in model.parameters()],
            lambda: sum(p.numel() for p in model.parameters()),
            lambda: [p.register_hook(lambda g: None).remove() for p in model.parameters()],
        ):
            act()
        pair.check("as before")
        pair.steps(1)
        pair.check("and training goes on")

    run(body)


def test_a_write_inside_a_forward_takes_effect_or_raises():
    """A parameter kept in bounds by its own module: whole there, so nothing stops the write."""

    class Bounded(nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.weight = nn.Parameter(torch.randn(30, 20))

        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.5, 0.5)
            return x + (x @ self.weight.t()) @ self.weight

    def build():
        return nn.Sequential(nn.ModuleList(Bounded(seed) for seed in range(3)))

    def forward(model, x):
        for layer in model[0]:
            x = layer(x)
        return x.square().mean()

    def body(rank, world_size):
        x = torch.linspace(-1, 1, 80).view(4, 20) * (rank + 1)

        def trained(stage):
            model = build()
            optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
            for _ in range(3):
                forward(model, x).backward()
                optimizer.step()
                optimizer.zero_grad()
            return weights(model)

        expected = trained(2)
        try:
            got = trained(3)
        except ConfigError as error:
            refusal = str(error)
        else:
            return assert_same(got, expected, "bounded")
        assert "gather" in refusal

    run(body)


# --- gather


def test_gather_gives_full_plain_parameters_and_takes_them_away_again():
    def body(rank, world_size):
        for kind in KINDS:
            pair = Pair(rank, world_size, kind, frozen=("block",))
            expected = dict(pair.other.named_parameters())
            held = dict(pair.model.named_parameters())
            for what in (pair.model, pair.optimizer):
                with zeroshard.gather(what):
                    for name, p in pair.model.named_parameters():
                        assert p is held[name]
                        assert type(p) is nn.Parameter
                        assert p.is_leaf
                        assert p.requires_grad == expected[name].requires_grad
                        assert p.stride() == expected[name].stride()
                        assert type(p.data) is torch.Tensor
                        assert torch.equal(p, expected[name]), f"{kind}: {name}"
                    vector = nn.utils.parameters_to_vector(pair.model.parameters())
                    wanted = nn.utils.parameters_to_vector(pair.other.parameters())
                    assert torch.equal(vector, wanted)
                    assert pair.optimizer.memory()["unsharded_parameters"] > 0
                assert pair.optimizer.memory()["unsharded_parameters"] == 0
                pair.check(kind)

    run(body, 3)


def whole(model):
    """The attributes of the parameters that are whole although they could be sharded."""
    return {
        attribute(n) for n, p in model.named_parameters() if p.numel() > 1 and not is_sharded(p)
    }


def test_gather_of_one_module_leaves_the_others_where_they_are():
    def body(rank, world_size):
        pair = Pair(rank, world_size)
        first, _, third = pair.model.parts
        with zeroshard.gather(first):
            assert torch.equal(first.matrix, pair.other.matrix)
            assert whole(pair.model) == {"matrix"}
            with zeroshard.gather(third):
                assert torch.equal(third.block, pair.other.block)
                assert whole(pair.model) == {"matrix", "pair", "block"}
            assert whole(pair.model) == {"matrix"}
        assert whole(pair.model) == set()
        with zeroshard.gather(pair.model.parts):
            assert whole(pair.model) == {"matrix", "pair", "block"}
        pair.check("afterwards")

    run(body)


# trl#3858, trl#5766: weights handed to another engine one layer at a time, not all at once.
def test_weights_copied_layer_by_layer_are_never_whole_at_once():
    def body(rank, world_size):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(6)))
        expected = {name: p.detach().clone() for name, p in model.named_parameters()}
        names = [str(index) for index in range(6)]
        optimizer = zeroshard.AdamW(model, stage=3, units=names)
        layer_nbytes = 4 * (64 * 64 + 64)
        copied = {}
        for index, layer in enumerate(model):
            with zeroshard.gather(layer):
                copied |= {f"{index}.{n}": p.detach().clone() for n, p in layer.named_parameters()}
                # Two slots of whole blocks of 256, in a unit of whole blocks for each rank.
                padded = layer_nbytes + 4 * 256 * (2 + world_size)
                assert layer_nbytes <= optimizer.memory()["unsharded_parameters"] <= padded
        assert_same(copied, expected, "copied")

    run(body)


def test_gather_of_one_parameter_gives_that_parameter():
    def body(rank, world_size):
        pair = Pair(rank, world_size)
        with zeroshard.gather(pair.model.parts[2].block):
            assert torch.equal(pair.model.block, pair.other.block)
            assert "matrix" not in whole(pair.model)
        pair.check("afterwards")

    run(body)


def test_gather_nests_in_every_order():
    def body(rank, world_size):
        pair = Pair(rank, world_size)
        model, first = pair.model, pair.model.parts[0]
        everything = {"matrix", "pair", "block", "experts", "bias"}
        with zeroshard.gather(model):
            with zeroshard.gather(model), zeroshard.gather(first):
                assert whole(model) == everything
            assert whole(model) == everything
            with zeroshard.gather(pair.optimizer):
                assert_same(dict(model.named_parameters()), weights(pair.other), "nested")
            assert whole(model) == everything
        assert whole(model) == set()
        with zeroshard.gather(first):
            with zeroshard.gather(model):
                assert whole(model) == everything
            assert whole(model) == {"matrix"}
        # Left in another order than entered, as an ExitStack may.
        outer, inner = zeroshard.gather(first), zeroshard.gather(model)
        outer.__enter__()
        inner.__enter__()
        outer.__exit__(None, None, None)
        assert whole(model) == everything
        inner.__exit__(None, None, None)
        pair.check("afterwards")
        pair.steps(1)
        pair.check("and training goes on")

    run(body)


def fill_(model, value):
    model.matrix.fill_(value)


def arithmetic(model, value):
    weight = model.matrix
    weight.zero_()
    weight += value


def copy_(model, value):
    model.matrix.copy_(torch.full((37, 29), value))


def data_copy_(model, value):
    model.matrix.data.copy_(torch.full((37, 29), value))


def new_data(model, value):
    model.matrix.data = torch.full((37, 29), value, dtype=model.matrix.dtype)


def by_rows(model, value):
    for row in model.matrix:
        row.fill_(value)


def foreach(model, value):
    torch._foreach_copy_([model.matrix], [torch.full((37, 29), value)])


def init(model, value):
    nn.init.constant_(model.matrix, value)


def load(model, value):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state[name_of(model, "matrix")].fill_(value)
    model.load_state_dict(state)


def vector(model, value):
    nn.utils.vector_to_parameters(torch.full((37 * 29,), value), [model.matrix])


def numpy(model, value):
    if model.matrix.dtype == torch.bfloat16:  # numpy has none
        return data_copy_(model, value)
    model.matrix.detach().numpy().fill(value)


ROUTES = [
    fill_,
    arithmetic,
    copy_,
    data_copy_,
    new_data,
    by_rows,
    foreach,
    init,
    load,
    vector,
    numpy,
]


@kinds
def test_a_write_inside_gather_takes_effect_by_every_route(kind):
    def body(rank, world_size):
        # The others differ from these in what follows a write, not in how one is seen.
        routes = ROUTES if kind in ("fp32", "fp32 master") else [copy_, data_copy_, new_data, load]
        for writeback in (True, False):
            for route in routes:
                if route is vector and kind != "fp32":
                    continue  # torch's own gives the parameters the vector's dtype
                what = f"{route.__name__}, writeback={writeback}"
                pair = Pair(rank, world_size, kind)
                expected = weights(pair.model)
                with zeroshard.gather(pair.model, writeback=writeback), torch.no_grad():
                    route(pair.model, 2.0)
                    assert (pair.model.matrix == 2).all(), what
                expected[name_of(pair.model, "matrix")].fill_(2.0)
                assert_sharded(pair.model, what)
                assert_same(weights(pair.model), expected, what)
                pair.stand_still()
                pair.steps(1)
                assert_same(weights(pair.model), expected, f"{what}: after a step of nothing")

    run(body)


@kinds
def test_training_goes_on_bitwise_from_what_was_written_in_gather(kind):
    def body(rank, world_size):
        dtype, _ = KINDS[kind]
        for module in ("the model", "the part"):
            pair = Pair(rank, world_size, kind)
            for model in pair.models:
                of = model if module == "the model" else model.parts[0]
                # The reference has no other way to say that only this parameter was written.
                context = zeroshard.gather(of) if model is pair.model else contextlib.nullcontext()
                with context, torch.no_grad():
                    model.matrix.copy_(values((37, 29), dtype))
            pair.check(f"written in {module}")
            pair.steps(1, 2)
            pair.check(f"trained on after a write in {module}")

    run(body)


@kinds
def test_with_writeback_the_first_ranks_values_win(kind):
    def body(rank, world_size):
        pair = Pair(rank, world_size, kind, frozen=("pair",))
        with zeroshard.gather(pair.model, writeback=True), torch.no_grad():
            for p in pair.model.parameters():
                p.fill_(0.5 if rank == 0 else 9.0)
        for name, value in weights(pair.model).items():
            assert (value == 0.5).all(), f"{name} on rank {rank}"
        pair.stand_still()
        pair.steps(1)
        for name, value in weights(pair.model).items():
            assert (value == 0.5).all(), f"{name} on rank {rank} after a step"

    run(body, 3)


def test_writeback_of_one_module_and_within_another_gather():
    def body(rank, world_size):
        for inner_writes_back in (True, False):
            pair = Pair(rank, world_size)
            expected = weights(pair.model)
            first = pair.model.parts[0]
            with (
                zeroshard.gather(pair.model, writeback=not inner_writes_back),
                zeroshard.gather(first, writeback=inner_writes_back),
                torch.no_grad(),
            ):
                first.matrix.fill_(1.0 + rank)
            expected[name_of(pair.model, "matrix")].fill_(1.0)
            got = weights(pair.model)
            assert_same(got, expected, f"inner={inner_writes_back}")
            assert_ranks_agree(got, f"inner={inner_writes_back}")

    run(body)


def test_writing_back_what_did_not_change_keeps_the_masters():
    def body(rank, world_size):
        def trained(gathers, kind):
            dtype, master = KINDS[kind]
            model = SplitForm(SHAPES, dtype)
            precision = zeroshard.Precision(master=master)
            optimizer = zeroshard.AdamW(model, lr=1e-5, stage=3, precision=precision)
            for draw in range(4):
                model(coefficients(model, rank, world_size, draw)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if gathers:
                    for writeback in (True, False):
                        with zeroshard.gather(model, writeback=writeback):
                            pass
            optimizer.consolidate_state_dict()
            return optimizer.state_dict()["state"] if rank == 0 else {}

        for kind in ("split", "fp32 master"):
            states = trained(True, kind), trained(False, kind)
            for mine, other in zip(*(state.values() for state in states), strict=True):
                assert torch.equal(mine["master"], other["master"]), kind

    run(body)


@pytest.mark.parametrize("writeback", [False, True])
def test_an_exception_inside_gather_passes_and_the_parameters_are_taken_away(writeback):
    def body(rank, world_size):
        pair = Pair(rank, world_size)
        with pytest.raises(KeyError), zeroshard.gather(pair.model, writeback=writeback):
            raise KeyError("planted")
        pair.check("after an exception")
        with (
            pytest.raises(KeyError),
            zeroshard.gather(pair.model),
            zeroshard.gather(pair.model.parts[0], writeback=writeback),
        ):
            raise KeyError("planted")
        pair.check("after an exception in two")
        pair.steps(1)
        pair.check("and training goes on")

    run(body)


def test_an_exception_inside_gather_on_one_rank_alone_leaves_no_rank_waiting():
    def body(rank, world_size):
        pair = Pair(rank, world_size)
        try:
            with zeroshard.gather(pair.model):
                if rank == 1:
                    raise KeyError("planted")
        except KeyError:
            assert rank == 1
        pair.check("after an exception")
        pair.steps(1)
        pair.check("and training goes on")

    run(body, timeout_s=20)


def test_an_exception_of_a_forward_inside_gather_leaves_training_usable():
    def body(rank, world_size):
        pair = Pair(rank, world_size)

        def fail(*_):
            raise KeyError("planted")

        hook = pair.model.parts[1].register_forward_hook(fail)
        with pytest.raises(KeyError), zeroshard.gather(pair.model):
            pair.model(pair.input())
        hook.remove()
        pair.zero_grad()
        pair.check("after an exception")
        pair.steps(1)
        pair.check("and training goes on")

    run(body)


@kinds
@pytest.mark.parametrize("writeback", [False, True])
def test_training_inside_gather_is_training(kind, writeback):
    def body(rank, world_size):
        pair = Pair(rank, world_size, kind)
        with zeroshard.gather(pair.model, writeback=writeback):
            for draw in (1, 2):
                pair.backward(draw)
                pair.check_gradients(f"draw {draw}")
                inside = {name: p.detach() for name, p in pair.model.named_parameters()}
                before = {n: p.clone() for n, p in inside.items()}
                pair.step()
                assert_same(
                    {name: p.detach() for name, p in pair.model.named_parameters()},
                    weights(pair.other),
                    "step() returns with the parameters whole",
                )
                assert not torch.equal(before["experts"], pair.model.experts)
        pair.check("after two steps inside")
        pair.steps(3)
        pair.check("and outside again")

    run(body)


def test_a_gather_may_begin_or_end_between_forward_backward_and_step():
    def body(rank, world_size):
        pair = Pair(rank, world_size)

        def gathers(number):
            """Around which of the three the parameters are whole: all eight cases."""
            return [number & 1, number & 2, number & 4]

        for number in range(8):
            forward, backward, step = (
                (lambda: zeroshard.gather(pair.model)) if inside else contextlib.nullcontext
                for inside in gathers(number)
            )
            with forward():
                loss = pair.model(pair.input(number))
            with backward():
                loss.backward()
            pair.other(pair.input(number)).backward()
            pair.check_gradients(f"{number:03b}")
            with step():
                pair.optimizer.step()
            pair.other_optimizer.step()
            pair.zero_grad()
            pair.check(f"{number:03b}")

    run(body)


def test_gather_inside_hooks_of_forward_and_backward_gives_full_parameters():
    """As a logger of norms does; what was needed before is still there after."""

    def body(rank, world_size):
        pair, seen = Pair(rank, world_size), []

        def look(*_):
            with zeroshard.gather(pair.model), torch.no_grad():
                of_both = zip(*(model.parameters() for model in pair.models), strict=True)
                seen.append(all(torch.equal(p, q) for p, q in of_both))

        pair.model.parts[1].register_forward_hook(look)
        pair.model.parts[2].register_forward_pre_hook(look)
        pair.model.block.register_hook(look)
        pair.model.bias.register_hook(look)
        pair.steps(1, 2)
        pair.check("trained under observation")
        assert seen == [True] * 8

    run(body)


def test_under_inference_mode_parameters_are_read_used_and_loaded_as_ever():
    def body(rank, world_size):
        pair = Pair(rank, world_size)
        with torch.inference_mode():
            with zeroshard.gather(pair.model):
                for p, q in zip(*(model.parameters() for model in pair.models), strict=True):
                    assert torch.equal(p, q)
                inside = pair.model(pair.input())
            assert torch.equal(pair.model(pair.input()), inside)
            assert torch.equal(pair.other(pair.input()), inside)
            for model in pair.models:
                model.load_state_dict(model.state_dict())
        pair.check("afterwards")
        pair.steps(1)
        pair.check("and training goes on")

    run(body)


def test_a_write_after_a_forward_that_no_backward_follows_takes_effect():
    """The root is still whole there: nothing stops the write."""
    writes = {
        "copy_": lambda model: model.experts.copy_(values((3, 11, 13))),
        "add_": lambda model: model.experts.add_(1),
        "fill_": lambda model: model.experts.fill_(2.0),
        "data": lambda model: setattr(model.experts, "data", values((3, 11, 13))),
        "load": lambda model: model.load_state_dict(
            {name: values(p.shape) for name, p in model.named_parameters()}
        ),
    }

    def body(rank, world_size):
        for what, write in writes.items():
            pair = Pair(rank, world_size)
            losses = [model(pair.input()) for model in pair.models]
            for model in pair.models:
                with torch.no_grad():
                    write(model)
            pair.steps(1)
            pair.check(what)
            del losses

    run(body)


def test_gather_between_deferred_backwards_changes_nothing():
    def body(rank, world_size):
        pair = Pair(rank, world_size)
        with pair.optimizer.no_sync(), pair.other_optimizer.no_sync():
            pair.backward(1)
            assert_same(weights(pair.model), weights(pair.other), "inside no_sync")
            with zeroshard.gather(pair.model):
                pair.backward(2)
        pair.backward(3)
        pair.check_gradients("three backwards")
        pair.step()
        pair.check("three backwards")

    run(body)


def test_inside_gather_ranks_may_defer_different_numbers_of_backwards():
    """Outside every forward needs all ranks; inside no rank needs another until the sync."""

    def body(rank, world_size):
        pair, numbers = Pair(rank, world_size), [3, 1, 0]
        for step in range(2):
            with (
                zeroshard.gather(pair.model),
                pair.optimizer.no_sync(),
                pair.other_optimizer.no_sync(),
            ):
                for draw in range(numbers[rank]):
                    pair.backward(10 * step + draw)
            pair.backward(10 * step + 9)
            pair.check_gradients(f"step {step}")
            pair.step()
            pair.check(f"step {step}")

    run(body, 3)


def counted():
    """The transports of the optimizers built from here on in this rank, with what passed them."""
    made = []

    def counting(*args):
        made.append(Counting(connect(*args)))
        return made[-1]

    facade.connect = counting
    return made


def test_a_loop_of_generation_inside_gather_needs_no_other_rank():
    def body(rank, world_size):
        transports = counted()
        model, other = letters(), letters()
        optimizer = zeroshard.AdamW(decay_groups(model), model=model, lr=1e-2, stage=3)
        ours = transports[-1]
        other_optimizer = zeroshard.AdamW(decay_groups(other), lr=1e-2, stage=2)
        batches = letter_batches(rank)
        train(model, optimizer, batches[:1])
        train(other, other_optimizer, batches[:1])

        def generate(model, num_tokens):
            text = batches[0][:, :2]
            with torch.no_grad():
                for _ in range(num_tokens):
                    text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
            return text

        with zeroshard.gather(model):
            before = sum(ours.calls.values())
            # Each rank stops where its own text ends.
            for num_tokens in (3 + 4 * rank, 9 - 5 * rank):
                assert torch.equal(generate(model, num_tokens), generate(other, num_tokens))
            assert sum(ours.calls.values()) == before, "nothing is communicated inside"
        assert torch.equal(generate(model, 3), generate(other, 3)), "the same number outside"
        got = train(model, optimizer, batches[1:3])
        assert_same(got, train(other, other_optimizer, batches[1:3]), "training goes on")

    run(body)


def test_gather_where_nothing_is_sharded_is_as_in_every_stage():
    def body(rank, world_size):
        with pytest.raises(ConfigError), zeroshard.gather(nn.Linear(3, 3)):
            pass
        pair = Pair(rank, world_size)
        with zeroshard.gather(nn.ModuleList([pair.model.parts[1]])):  # one-element parameters
            assert whole(pair.model) == set()
        expected = weights(pair.other)
        with zeroshard.gather(pair.other, writeback=True), torch.no_grad():
            pair.other.bias.fill_(1.0 + rank)
        assert (pair.other.bias == 1).all()
        pair.optimizer.close()
        with zeroshard.gather(pair.other):
            assert_same(weights(pair.model), expected, "closed")

    run(body)


# --- state_dict


def test_a_state_dict_has_torchs_keys_and_slices_without_communicating():
    def body(rank, world_size):
        for kind in KINDS:
            pair = Pair(rank, world_size, kind, frozen=("block",))
            pair.model.register_buffer("scale", torch.ones(3))
            pair.other.register_buffer("scale", torch.ones(3))
            if rank == 0:  # communicates nothing
                pair.model.state_dict()
            state, wanted = pair.model.state_dict(), pair.other.state_dict()
            assert list(state) == list(wanted)
            assert state._metadata == wanted._metadata
            for name, value in wanted.items():
                entry = state[name]
                assert entry.shape == value.shape, name
                assert entry.dtype == value.dtype, name
                assert not entry.requires_grad
                if attribute(name) not in SHAPES or value.numel() <= 1:
                    assert type(getattr(entry, "data", entry)) is torch.Tensor or value.numel() == 0
                    full = entry.full_tensor() if is_shard_tensor(entry) else entry
                    assert torch.equal(full, value), name
                    continue
                assert is_shard_tensor(entry), name
                numel = torch.tensor(entry.to_local().numel())
                dist.all_reduce(numel)
                assert int(numel) == value.numel(), name
                assert torch.equal(entry.full_tensor(), value), f"{kind}: {name}"
            assert whole(pair.model) == set()

    run(body, 3)


def test_a_state_dict_of_a_part_has_its_slices_under_its_names():
    def body(rank, world_size):
        pair = Pair(rank, world_size)
        part, other = pair.model.parts[2], pair.other.parts[2]
        assert list(part.state_dict()) == list(other.state_dict())
        state = part.state_dict(prefix="here.")
        assert list(state) == ["here.pair", "here.block"]
        assert is_shard_tensor(state["here.block"])
        assert torch.equal(state["here.block"].full_tensor(), other.block)
        given = {}
        assert part.state_dict(destination=given) is given
        assert is_shard_tensor(given["block"])
        wrapped = nn.ModuleDict({"inner": pair.model})  # a wrapper made later
        assert is_shard_tensor(wrapped.state_dict()["inner.experts"])

    run(body)


def test_a_state_dict_keeps_both_names_of_a_tied_weight():
    def body(rank, world_size):
        model, other = letters(), letters()
        optimizer = zeroshard.AdamW(decay_groups(model), model=model, lr=1e-2, stage=3)
        other_optimizer = zeroshard.AdamW(decay_groups(other), lr=1e-2, stage=2)
        batches = letter_batches(rank)
        train(model, optimizer, batches[:1])
        train(other, other_optimizer, batches[:1])
        state, wanted = model.state_dict(), other.state_dict()
        assert list(state) == list(wanted)
        for name, value in wanted.items():
            entry = state[name]
            full = entry.full_tensor() if is_shard_tensor(entry) else entry
            assert torch.equal(full, value), name
        for values_of in (wanted, state):
            model.load_state_dict(values_of)
            other.load_state_dict(wanted)
            assert model.head.weight is model.embed.weight
            assert_same(weights(model), weights(other), "loaded")
        got = train(model, optimizer, batches[1:3])
        assert_same(got, train(other, other_optimizer, batches[1:3]), "trained on")

    run(body)


# Saving a gathered-away parameter writes an empty tensor: peft#453, peft#2892.
def test_saving_slices_raises_and_says_how_to_save():
    def body(rank, world_size):
        pair = Pair(rank, world_size, frozen=("block",))
        state = pair.model.state_dict()
        for act in (
            lambda: torch.save(state, io.BytesIO()),
            lambda: pickle.dumps(state[name_of(pair.model, "matrix")]),
            lambda: pickle.dumps({"block": state[name_of(pair.model, "block")]}),
            lambda: torch.save(pair.model, io.BytesIO()),
            lambda: pickle.dumps(pair.model),
            lambda: pickle.dumps(pair.model.parts[2]),
            lambda: copy.deepcopy(pair.model),
            lambda: copy.deepcopy(pair.model.parts[0]),
            lambda: copy.deepcopy((pair.model, pair.optimizer)),
            lambda: torch.optim.swa_utils.AveragedModel(pair.model),
        ):
            with pytest.raises(ZeroShardError, match="gather"):
                act()
        pair.check("nothing has changed")
        pair.backward(1)
        with pytest.raises(ZeroShardError, match="gather"):
            copy.deepcopy(pair.model)
        pair.step()
        pair.check("and training goes on")

    run(body)


def test_inside_gather_a_state_dict_is_full_plain_and_can_be_saved():
    def body(rank, world_size):
        for kind in KINDS:
            pair = Pair(rank, world_size, kind, frozen=("block",))
            buffer = io.BytesIO()
            with zeroshard.gather(pair.model):
                state = pair.model.state_dict()
                assert all(type(value) is torch.Tensor for value in state.values())
                torch.save(state, buffer)
            expected = pair.other.state_dict()
            # torch saves whole storages: what is saved must not be views of larger ones.
            nbytes = sum(value.nbytes for value in expected.values())
            assert buffer.tell() <= 2 * nbytes + 16384
            buffer.seek(0)
            saved = torch.load(buffer, weights_only=True)
            assert list(saved) == list(expected)
            assert_same(dict(saved), dict(expected), kind)

    run(body)


def test_what_was_read_in_gather_is_right_or_refused_afterwards():
    """`with gather(model): state = model.state_dict()`, used after the block."""

    def body(rank, world_size):
        pair = Pair(rank, world_size)
        with zeroshard.gather(pair.model):
            kept = {
                "state_dict": pair.model.state_dict()[name_of(pair.model, "matrix")],
                "detach": pair.model.matrix.detach(),
                "view": pair.model.matrix.detach().t(),
                "data": pair.model.matrix.data,
            }
        for what, value in kept.items():
            try:
                got = value.clone()
            except RuntimeError:
                continue
            wanted = pair.other.matrix.detach()
            wanted = wanted.t() if what == "view" else wanted
            assert got.isnan().all() or torch.equal(got, wanted), what
        pair.check("afterwards")
        pair.steps(1)
        pair.check("and training goes on")

    run(body)


def test_inside_gather_a_copy_of_a_model_is_plain_and_independent():
    def body(rank, world_size):
        for kind in KINDS:
            pair = Pair(rank, world_size, kind, frozen=("block",))
            with zeroshard.gather(pair.model):
                copies = [copy.deepcopy(pair.model)]
                buffer = io.BytesIO()
                torch.save(pair.model, buffer)
                part = copy.deepcopy(pair.model.parts[0])
            buffer.seek(0)
            copies.append(torch.load(buffer, weights_only=False))
            assert not leftovers(part, copied=True)
            for twin in copies:
                assert not leftovers(twin, copied=True)
                assert [p.requires_grad for p in twin.parameters()] == [
                    p.requires_grad for p in pair.other.parameters()
                ]
                assert_same(weights(twin), weights(pair.other), kind)
            if rank == 0:  # a plain model communicates nothing
                plain = torch.optim.AdamW(copies[0].parameters(), lr=1e-2)
                copies[0](pair.input()).backward()
                plain.step()
            pair.steps(1)
            pair.check("the original trains on")
            assert_same(
                {"matrix": part.matrix.detach()},
                {"matrix": weights(copies[1])[name_of(copies[1], "matrix")]},
                "a copy stays what it was",
            )

    run(body)


def test_an_averaged_model_made_and_updated_inside_gather_follows_the_weights():
    def body(rank, world_size):
        pair = Pair(rank, world_size)
        with zeroshard.gather(pair.model):
            average = torch.optim.swa_utils.AveragedModel(pair.model)
        other = torch.optim.swa_utils.AveragedModel(pair.other)
        for draw in range(3):
            pair.steps(draw)
            with zeroshard.gather(pair.model):
                average.update_parameters(pair.model)
            other.update_parameters(pair.other)
        assert_same(weights(average.module), weights(other.module), "average")
        pair.check("the model itself")

    run(body)


# --- load_state_dict


@kinds
@pytest.mark.parametrize("where", ["outside", "inside gather"])
def test_a_full_state_dict_is_loaded_by_slices_and_trained_on_from(kind, where):
    def body(rank, world_size):
        pair = Pair(rank, world_size, kind, frozen=("block",))
        dtype, _ = KINDS[kind]
        state = {
            name: values(p.shape, dtype, seed) + 2.0
            for seed, (name, p) in enumerate(pair.other.named_parameters())
        }
        inside = zeroshard.gather(pair.model) if where == "inside gather" else None
        with inside or contextlib.nullcontext():
            assert str(pair.model.load_state_dict(state)) == "<All keys matched successfully>"
        pair.other.load_state_dict(state)
        assert_same(weights(pair.model), state, "loaded")
        pair.check("loaded")
        pair.steps(1, 2)
        pair.check("trained on")
        assert_same(
            {"block": weights(pair.model)[name_of(pair.model, "block")]},
            {"block": state[name_of(pair.model, "block")]},
            "frozen",
        )

    run(body, 3)


@kinds
def test_a_load_refreshes_the_masters(kind):
    def body(rank, world_size):
        pair = Pair(rank, world_size, kind)
        dtype, _ = KINDS[kind]
        state = {name: torch.full(p.shape, 2.0) for name, p in pair.other.named_parameters()}
        pair.model.load_state_dict(state)
        pair.stand_still()
        pair.steps(1, 2)
        got = weights(pair.model)
        assert_same(got, {n: v.to(dtype) for n, v in state.items()}, "a stale master came back")
        pair.optimizer.consolidate_state_dict()
        if rank == 0 and kind != "fp32":
            # Where a master rounds to what was loaded, it was not stale and may stay.
            for entry in pair.optimizer.state_dict()["state"].values():
                assert (entry["master"].to(dtype) == 2.0).all()

    run(body)


def test_a_sharded_state_dict_is_loaded_without_communicating():
    def body(rank, world_size):
        for kind in KINDS:
            pair = Pair(rank, world_size, kind, frozen=("block",))
            again = Pair(rank, world_size, kind, frozen=("block",), draws=(5, 6))
            if rank == 0:
                again.model.load_state_dict(again.model.state_dict())
                again.other.load_state_dict(again.other.state_dict())
            else:
                for model in again.models:
                    model.load_state_dict(model.state_dict())
            for one, other in zip(again.models, pair.models, strict=True):
                result = one.load_state_dict(other.state_dict())
                assert str(result) == "<All keys matched successfully>"
            assert_same(weights(again.model), weights(pair.model), kind)
            again.check("loaded")
            again.steps(7)
            again.check("trained on")

    run(body)


def test_a_snapshot_of_slices_brings_the_weights_back():
    """Early stopping: keep the best state, train on, go back."""

    def body(rank, world_size):
        for how in (copy.deepcopy, lambda state: {n: value.clone() for n, value in state.items()}):
            pair = Pair(rank, world_size)
            best = how(pair.model.state_dict())
            wanted = weights(pair.model)
            pair.steps(1, 2)
            assert not torch.equal(weights(pair.model)["experts"], wanted["experts"])
            pair.model.load_state_dict(best)
            pair.other.load_state_dict(wanted)
            pair.check("back")
            pair.steps(3)
            pair.check("and on")

    run(body)


def test_slices_that_do_not_fit_are_refused_and_nothing_changes():
    def body(rank, world_size):
        pair = Pair(rank, world_size)
        before = weights(pair.model)
        alone = [dist.new_group([r]) for r in range(world_size)][rank]
        others = {
            "another number of ranks": (SHAPES, {"mesh": alone}, "slices"),
            "other buckets": (SHAPES, {"bucket_mb": 1e-3}, "slices"),
            "another shape": ({**SHAPES, "matrix": (37, 28)}, {}, r"size mismatch.*matrix"),
        }
        for what, (shapes, options, words) in others.items():
            other = SplitForm(shapes, seed=3)
            optimizer = zeroshard.AdamW(other, stage=3, **options)
            with pytest.raises((RuntimeError, ValueError), match=words):
                pair.model.load_state_dict({n: other.state_dict()[n] for n in before})
            got = weights(pair.model)
            name = name_of(pair.model, "matrix")
            assert torch.equal(got[name], before[name]), what
            optimizer.close()
        plain = SplitForm(SHAPES, seed=7)
        with pytest.raises((RuntimeError, ZeroShardError), match=r"full_tensor|gather"):
            plain.load_state_dict(pair.model.state_dict())

    run(body)


def test_slices_given_while_a_unit_is_whole_are_loaded_or_change_nothing():
    """After a forward that no backward follows, as of an evaluation without no_grad()."""

    def body(rank, world_size):
        for pause in ("a forward", "gather"):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
            optimizer = zeroshard.AdamW(model, stage=3, units=["0", "1", "2"])
            before = weights(model)
            best = {name: 0 * value for name, value in model.state_dict().items()}
            with contextlib.ExitStack() as stack:
                if pause == "gather":  # of the last one: the others are not whole
                    stack.enter_context(zeroshard.gather(model[2]))
                output = model(torch.ones(2, 16))
                try:
                    model.load_state_dict(best)
                except ConfigError as error:
                    expected, refusal = before, str(error)
                else:
                    expected, refusal = {n: 0 * value for n, value in before.items()}, "gather"
            assert output.requires_grad
            optimizer.zero_grad()
            assert "gather" in refusal
            assert_same(weights(model), expected, pause)

    run(body)


@kinds
def test_an_assigned_state_dict_is_refused_or_takes_effect_with_its_masters(kind):
    def body(rank, world_size):
        dtype, master = KINDS[kind]
        shapes = {name: SHAPES[name] for name in ("matrix", "block", "experts", "bias")}
        model = SplitForm(shapes, dtype)
        precision = zeroshard.Precision(master=master)
        optimizer = zeroshard.AdamW(model, lr=1e-3, stage=3, precision=precision)

        def step():
            model(coefficients(model, rank, world_size)).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        state = {n: torch.full(p.shape, 2.0, dtype=dtype) for n, p in model.named_parameters()}
        model.load_state_dict(state, assign=True)
        optimizer.param_groups[0]["lr"] = 0.0
        try:
            step()
        except ConfigError as error:
            refusal = str(error)
        else:
            return assert_same(weights(model), state, "a stale master came back")
        assert "assign" in refusal

    run(body)


def partial(state):
    return {name: value for name, value in state.items() if "parts.2" in name or name == "bias"}


def misshapen(state):
    return state | {"parts.0.matrix": torch.ones(3, 3), "bias": torch.ones(24)}


def flat(state):
    return state | {"parts.2.block": torch.ones(256)}


def unexpected(state):
    return state | {"parts.9.matrix": torch.ones(3), "another": torch.ones(2)}


def unlike(state):
    return misshapen(unexpected(partial(state)))


def nothing(state):
    return {}


def a_list(state):
    return state | {"bias": [1.0]}


def wider(state):
    return {name: value.double() for name, value in state.items()}


GIVEN = (partial, misshapen, flat, unexpected, unlike, nothing, a_list, wider)


@pytest.mark.parametrize("strict", [True, False])
def test_what_does_not_match_is_reported_exactly_as_by_torch(strict):
    def outcome(model, state):
        try:
            result = model.load_state_dict(state, strict=strict)
        except Exception as error:
            return type(error), str(error)
        return tuple(result)

    def body(rank, world_size):
        for change in GIVEN:
            pair = Pair(rank, world_size)
            full = {
                name: values(p.shape, seed=seed)
                for seed, (name, p) in enumerate(pair.other.named_parameters())
            }
            state = change(full)
            got, wanted = (outcome(model, state) for model in pair.models)
            assert got == wanted, change.__name__
            # torch loads what fits even where it raises at the end.
            pair.check(change.__name__)
            pair.steps(1)
            pair.check(f"{change.__name__}: trained on")

    run(body)


def test_a_part_is_loaded_on_its_own():
    def body(rank, world_size):
        pair = Pair(rank, world_size)
        expected = weights(pair.model)
        for model in pair.models:
            model.parts[2].load_state_dict({"pair": torch.ones(2), "block": values((16, 16))})
        expected["parts.2.pair"], expected["parts.2.block"] = torch.ones(2), values((16, 16))
        assert_same(weights(pair.model), expected, "loaded")
        pair.steps(1)
        pair.check("trained on")

    run(body)


def test_a_load_between_backward_and_step_takes_effect():
    def body(rank, world_size):
        for kind in KINDS:
            pair = Pair(rank, world_size, kind)
            state = {n: values(p.shape, p.dtype) for n, p in pair.other.named_parameters()}
            pair.backward(1)
            for model in pair.models:
                model.load_state_dict(state)
            pair.check_gradients(kind)
            pair.step()
            pair.check(kind)

    run(body)


def test_a_load_of_another_model_by_every_rank_in_its_own_time_does_not_hang():
    def body(rank, world_size):
        pair = Pair(rank, world_size)
        state = weights(pair.other)
        for _ in range(1 + 2 * rank):  # communicates nothing
            pair.model.load_state_dict(state)
            pair.model.load_state_dict(pair.model.state_dict())
            assert repr(pair.optimizer)
            assert pair.optimizer.memory()
            pair.optimizer.load_state_dict(pair.optimizer.state_dict())
        pair.check("loaded")
        pair.steps(1)
        pair.check("and training goes on")

    run(body, timeout_s=20)


# --- the end of an optimizer


@kinds
def test_close_leaves_full_plain_parameters_and_no_hook(kind):
    def body(rank, world_size):
        pair = Pair(rank, world_size, kind, frozen=("block",))
        seen = []
        pair.model.parts[0].register_forward_hook(lambda *_: seen.append("forward"))
        expected = weights(pair.other)
        pair.optimizer.close()
        own, *others = leftovers(pair.model)
        assert own.startswith("_forward_hooks of 'parts.0'"), own
        assert not others, others
        assert_same({n: p.detach() for n, p in pair.model.named_parameters()}, expected, kind)
        assert all(type(value) is torch.Tensor for value in pair.model.state_dict().values())
        pair.optimizer.close()
        seen.clear()
        plain = torch.optim.AdamW(pair.model.parameters(), lr=1e-2)
        for _ in range(1 + rank):  # a plain model communicates nothing
            pair.model(pair.input()).backward()
            grads = [p.grad for p in pair.model.parameters() if p.requires_grad]
            assert all(type(grad) is torch.Tensor for grad in grads)
            plain.step()
            plain.zero_grad()
            twin = copy.deepcopy(pair.model)
        assert seen == ["forward"] * (1 + rank), "the user's own hook is still there"
        assert_same(weights(twin), weights(pair.model), "copied")
        with pytest.raises(ConfigError, match="closed"):
            pair.optimizer.step()

    run(body)


def test_close_at_any_moment_leaves_full_parameters():
    def after_forward(pair):
        return pair.model(pair.input())

    def after_backward(pair):
        pair.model(pair.input()).backward()

    def after_a_deferred_backward(pair):
        with pair.optimizer.no_sync():
            pair.model(pair.input()).backward()

    def after_a_forward_without_gradients(pair):
        with torch.no_grad():
            pair.model(pair.input())

    def at_once(pair):
        pass

    def body(rank, world_size):
        moments = (
            after_forward,
            after_backward,
            after_a_deferred_backward,
            after_a_forward_without_gradients,
            at_once,
        )
        for moment in moments:
            pair = Pair(rank, world_size, draws=() if moment is at_once else (0,))
            kept = moment(pair)
            pair.optimizer.close()
            pair.model.zero_grad()
            assert not leftovers(pair.model), (moment.__name__, leftovers(pair.model))
            assert_same(weights(pair.model), weights(pair.other), moment.__name__)
            del kept
        pair = Pair(rank, world_size)
        with zeroshard.gather(pair.model):
            pair.optimizer.close()
        assert not leftovers(pair.model)
        assert_same(weights(pair.model), weights(pair.other), "inside gather")

    run(body)


@pytest.mark.parametrize("then", [1, 2, 3])
def test_a_newer_optimizer_takes_over(then):
    """As when a notebook's cell is run again, with the stage changed or not."""

    def body(rank, world_size):
        for first, options in ((3, {}), (3, {"bucket_mb": 1e-3}), (then, {})):
            model, plain_model = SplitForm(SHAPES), SplitForm(SHAPES)
            settings = {"lr": 1e-2, "weight_decay": 0.1}
            old = zeroshard.AdamW(model, stage=first, **settings)
            model(coefficients(model, rank, world_size)).backward()
            old.step()
            start = weights(model)
            plain_model.load_state_dict(start)
            second = then if first == 3 else 3
            optimizer = zeroshard.AdamW(model, stage=second, **settings, **options)
            with pytest.raises(ConfigError):
                old.step()
            assert_same(weights(model), start, "taken over")
            plain = torch.optim.AdamW(plain_model.parameters(), fused=True, **settings)
            for draw in (1, 2):
                parts = [coefficients(model, r, world_size, draw) for r in range(world_size)]
                model(parts[rank]).backward()
                assert_same(full_gradients(model), averaged(parts, world_size), "gradients")
                optimizer.step()
                optimizer.zero_grad()
                plain_step(plain_model, plain, averaged(parts, world_size))
            assert_same(weights(model), weights(plain_model), f"{first}, then {second}")
            if second == 3:
                assert_sharded(model, "taken over")
            optimizer.close()
            assert not leftovers(model), leftovers(model)

    run(body)


def test_taking_over_again_and_again_leaves_one_set_of_hooks():
    def body(rank, world_size):
        transports = counted()
        model = SplitForm(SHAPES)
        numbers, calls = [], []
        for _ in range(3):
            optimizer = zeroshard.AdamW(model, stage=3)
            optimizer.zero_grad()
            numbers.append(sum(len(vars(m)[h]) for m in model.modules() for h in HOOKS))
            for draw in range(2):
                transports[-1].calls.clear()
                model(coefficients(model, rank, world_size, draw)).backward()
                optimizer.step()
                optimizer.zero_grad()
            calls.append(dict(transports[-1].calls))
        assert len(set(numbers)) == 1, numbers
        assert calls[0] == calls[1] == calls[2]
        assert calls[0]["gather"] >= 3

    run(body)


@pytest.mark.parametrize("dropped", ["optimizer", "model and optimizer"])
def test_a_dropped_optimizer_leaves_no_placeholder_that_nobody_fills(dropped):
    def body(rank, world_size):
        pair = Pair(rank, world_size)
        pair.optimizer = None
        gc.collect()
        with torch.no_grad():
            assert torch.equal(*(model(pair.input()) for model in pair.models))
        assert_same(weights(pair.model), weights(pair.other), "the hooks keep the engine alive")
        if dropped == "optimizer":
            pair.backward(1)
            assert_same(full_gradients(pair.model), full_gradients(pair.other), "gradients")

    run(body)


def freeze(parameter, frozen):
    parameter.requires_grad_(not frozen)
    return {}


def give_complex(model):
    model.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    return {}


def share_memory(first, second):
    first.data = second.data[: first.numel()]
    return {}


WRONG = {
    "units": lambda rank, model: {"units": ["parts.0", "nowhere"]},
    "an option": lambda rank, model: {"betas": (0.9, 2.0)},
    "ranks that differ in an option": lambda rank, model: {"bucket_mb": 25 if rank else 12},
    "ranks that differ in units": lambda rank, model: {"units": ["parts.0"] if rank else None},
    "ranks that differ in reshard_after_forward": lambda rank, model: {
        "reshard_after_forward": rank == 0
    },
    "ranks that differ in what is frozen": lambda rank, model: freeze(model.block, rank == 0),
    "a complex parameter": lambda rank, model: give_complex(model),
    "shared memory": lambda rank, model: share_memory(model.parts[2].pair, model.bias),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_failed_constructor_leaves_plain_parameters_and_no_hook(what):
    def body(rank, world_size):
        model = SplitForm(SHAPES)
        options = WRONG[what](rank, model)
        expected = weights(model)
        held = {name: p.data_ptr() for name, p in model.named_parameters()}
        with pytest.raises(ValueError):
            zeroshard.AdamW(model, stage=3, **options)
        assert not leftovers(model), leftovers(model)
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == held
        assert_same(weights(model), expected, what)
        if "turn" not in expected:
            model(coefficients(model, rank, world_size)).backward()
            assert not leftovers(model)

    run(body, timeout_s=20)


def test_a_wrapper_of_ddp_made_before_is_warned_of_and_bitwise_or_refused():
    def body(rank, world_size):
        expected = train_with_ddp(rank, steps=3)
        model = letters()
        replica = DistributedDataParallel(model)
        try:
            optimizer = zeroshard.AdamW(decay_groups(model), model=replica, lr=1e-2, stage=3)
        except ConfigError as error:
            refusal = str(error)
        else:
            with pytest.warns(UserWarning, match="DistributedDataParallel"):
                got = train(model, optimizer, letter_batches(rank)[:3], forward=replica)
            return assert_same(got, expected, "in DDP")
        assert "DistributedDataParallel" in refusal or "DDP" in refusal

    run(body, timeout_s=20)


def test_a_wrapper_of_ddp_made_after_is_refused_at_once():
    """It sends every rank the first one's parameters, which are not there."""

    def body(rank, world_size):
        pair = Pair(rank, world_size)
        with pytest.raises(ConfigError, match="DistributedDataParallel"):
            DistributedDataParallel(pair.model)
        pair.check("nothing has changed")
        pair.steps(1)
        pair.check("and training goes on")

    run(body, timeout_s=20)


# --- frozen parameters


# pytorch#104690, litgpt#1417: memory as if nothing were frozen.
@kinds
def test_frozen_parameters_are_sharded_without_state_and_never_change(kind):
    frozen = ("matrix", "pair", "experts", "scalar", "empty")

    def body(rank, world_size):
        for chosen in (frozen, ("matrix", "empty"), ("experts", "bias")):
            pair = Pair(rank, world_size, kind, frozen=chosen, lr=0.1)
            dtype, _ = KINDS[kind]
            start = weights(SplitForm(SHAPES, dtype))
            pair.steps(1, 2)
            pair.check(f"frozen {chosen}")
            got = weights(pair.model)
            for name, p in pair.model.named_parameters():
                if attribute(name) in chosen:
                    assert torch.equal(got[name], start[name]), name
                    assert not pair.optimizer.state.get(p)
                    assert p.grad is None
                elif p.numel():
                    assert not torch.equal(got[name], start[name]), name
            for key in ("moments", "master", "gradients"):
                # As stage 2's, which keeps frozen parameters whole and outside of everything; the
                # parts of an arena may be padded by a block for each slot and rank.
                ours, other = (one.memory()[key] for one in pair.optimizers)
                assert ours <= other + 8 * 256 * len(SHAPES), key

    run(body)


def test_the_values_of_frozen_parameters_are_divided_by_the_ranks():
    def body(rank, world_size):
        for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
            model = LinearForm({"base": (300, 400), "adapter": (40, 40)}, dtype)
            model.base.requires_grad_(False)
            optimizer = zeroshard.AdamW(model, stage=3)
            nbytes = size * (300 * 400 + 40 * 40)
            held = optimizer.memory()["parameters"]
            assert held == pytest.approx(nbytes / world_size, rel=0.05)
            assert optimizer.memory()["moments"] <= 8 * (1600 / world_size + 256)

    run(body, 3)


class Adapted(nn.Module):
    """A frozen base with trainable adapters, whose gradient needs the frozen weights."""

    def __init__(self, dtype):
        super().__init__()
        self.base = nn.Linear(16, 16).to(dtype).requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(4, 16))
        self.up = nn.Parameter(0.1 * torch.randn(16, 4))

    def forward(self, x):
        y = self.base(x.to(self.base.weight.dtype)).float()
        return torch.tanh(y + F.linear(F.linear(x, self.down), self.up))


class Adapters(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Adapted(dtype) for _ in range(3))
        self.frozen = nn.ModuleList(nn.Linear(16, 16).requires_grad_(False) for _ in range(2))
        self.table = nn.Parameter(torch.arange(40), requires_grad=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        for layer in self.frozen:  # units of nothing but frozen parameters
            x = layer(x)
        return x[:, self.table[:3]].square().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_adapters_in_a_frozen_base_train_bitwise_as_in_stage_two(dtype):
    def body(rank, world_size):
        x = torch.linspace(-1, 1, 64).view(4, 16) * (rank + 1)

        def trained(stage):
            model = Adapters(dtype)
            optimizer = zeroshard.AdamW(model, lr=1e-2, weight_decay=0.5, stage=stage)
            for _ in range(3):
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
            return weights(model)

        got, start = trained(3), weights(Adapters(dtype))
        assert_same(got, trained(2), "adapters")
        for name, value in got.items():
            assert torch.equal(value, start[name]) == ("up" not in name and "down" not in name)

    run(body)


# DeepSpeed#5639: a layer unfrozen later never trains.
@pytest.mark.parametrize("how", ["requires_grad_", "add_param_group"])
def test_a_frozen_parameter_unfrozen_later_trains(how):
    frozen = ("matrix", "experts", "scalar", "pair", "block")

    def body(rank, world_size):
        for bucket_mb in (25, 1e-3):
            model, plain_model = SplitForm(SHAPES), SplitForm(SHAPES)
            for one in (model, plain_model):
                for name in frozen:
                    getattr(one, name).requires_grad_(False)

            def given(one):
                everything = list(one.parameters())
                return [p for p in everything if p.requires_grad or how == "requires_grad_"]

            settings = {"lr": 1e-2, "weight_decay": 0.3}
            options = {"model": model, "stage": 3, "bucket_mb": bucket_mb, **settings}
            optimizer = zeroshard.AdamW(given(model), **options)
            plain = torch.optim.AdamW(given(plain_model), fused=True, **settings)
            moments = optimizer.memory()["moments"]
            draw = 0
            for names in ((), ("matrix", "scalar"), ("experts",), ("pair", "block")):
                for one, its in ((model, optimizer), (plain_model, plain)):
                    thawed = [getattr(one, name).requires_grad_(True) for name in names]
                    if how == "add_param_group" and thawed:
                        its.add_param_group({"params": thawed, "lr": 2e-2})
                for _ in range(2):
                    draw += 1
                    parts = [coefficients(model, r, world_size, draw) for r in range(world_size)]
                    mean = averaged(parts, world_size)
                    for name, p in plain_model.named_parameters():
                        if not p.requires_grad:
                            mean.pop(name)
                    plain_step(plain_model, plain, mean)
                    model(parts[rank]).backward()
                    got = {n: g for n, g in full_gradients(model).items() if g is not None}
                    assert_same(got, mean, f"gradients after {names}")
                    optimizer.step()
                    optimizer.zero_grad()
                    assert_sharded(model, f"after {names}")
                assert_same(weights(model), weights(plain_model), f"after {names}")
            assert optimizer.memory()["moments"] > moments
            with zeroshard.gather(model, writeback=True), torch.no_grad():
                model.matrix.fill_(1.0)
            state = model.state_dict()
            assert (state[name_of(model, "matrix")].full_tensor() == 1).all()
            optimizer.close()
            assert not leftovers(model)

    run(body)


def test_a_parameter_frozen_later_stops_and_stays():
    def body(rank, world_size):
        pair = Pair(rank, world_size)
        for model in pair.models:
            model.matrix.requires_grad_(False)
            model.bias.requires_grad_(False)
        before = weights(pair.model)
        pair.steps(1, 2)
        pair.check("frozen")
        for name in ("matrix", "bias"):
            full = name_of(pair.model, name)
            assert torch.equal(weights(pair.model)[full], before[full])
        for model in pair.models:
            model.matrix.requires_grad_(True)
        pair.steps(3)
        pair.check("and on again")

    run(body)


def test_a_group_of_parameters_outside_of_the_module_is_refused():
    def body(rank, world_size):
        pair = Pair(rank, world_size)
        with pytest.raises(ConfigError, match="model"):
            pair.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(50))]})
        assert len(pair.optimizer.param_groups) == 1
        pair.steps(1)
        pair.check("and training goes on")

    run(body)


# --- parameters of every kind


# pytorch#176076, accelerate#4171, DeepSpeed#3033: tied weights.
def test_weights_tied_across_units_are_one_parameter_and_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
            self.layers[2].weight = self.layers[0].weight
            self.layers[3].bias = self.layers[1].bias
            self.last = nn.Linear(12, 1)

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return self.last(x).square().mean()

    def body(rank, world_size):
        x = torch.linspace(-1, 1, 60).view(5, 12) * (rank + 1)

        def trained(model, forward, optimizer):
            for _ in range(3):
                forward(x).backward()
                optimizer.step()
                optimizer.zero_grad()
            return weights(model)

        replica, model = Tied(), Tied()
        plain = torch.optim.AdamW(replica.parameters(), lr=1e-2, fused=True)
        expected = trained(replica, DistributedDataParallel(replica), plain)
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=3)
        assert_same(trained(model, model, optimizer), expected, "tied")
        assert model.layers[2].weight is model.layers[0].weight
        assert len(optimizer.param_groups[0]["params"]) == 8
        with zeroshard.gather(model.layers[2], writeback=True), torch.no_grad():
            model.layers[2].weight.fill_(0.25)
        replica.layers[0].weight.data.fill_(0.25)
        assert list(model.state_dict()) == list(replica.state_dict())
        assert_same(weights(model), weights(replica), "written under the other name")
        got, expected = trained(model, model, optimizer), None
        assert torch.isfinite(got["layers.0.weight"]).all()
        optimizer.close()
        assert model.layers[2].weight is model.layers[0].weight
        assert not leftovers(model)

    run(body)


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        convolutions = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.layers = nn.ModuleList(convolutions).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(20, 4).t())
        self.seen = []
        for layer in self.layers:
            layer.register_forward_hook(lambda layer, *_: self.seen.append(layer.weight.stride()))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (self.turned @ torch.ones(20)).square().mean() + x.square().mean()


@pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides")  # DDP's
def test_weights_in_channels_last_stay_so_where_they_are_whole():
    def body(rank, world_size):
        generator = torch.Generator().manual_seed(rank)
        images = [torch.randn(2, 4, 5, 5, generator=generator) for _ in range(3)]

        def trained(model, forward, optimizer):
            for image in images:
                forward(image).backward()
                optimizer.step()
                optimizer.zero_grad()
            return weights(model)

        replica, model = Pictures(), Pictures()
        strides = {name: p.stride() for name, p in model.named_parameters()}
        plain = torch.optim.AdamW(replica.parameters(), lr=1e-2, fused=True)
        expected = trained(replica, DistributedDataParallel(replica), plain)
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=3, bucket_mb=1e-3)
        assert_same(trained(model, model, optimizer), expected, "channels_last")
        assert set(model.seen) == {strides["layers.0.weight"]}
        with zeroshard.gather(model):
            for name, p in model.named_parameters():
                assert p.stride() == strides[name], name
        full = {n: v.full_tensor().stride() for n, v in model.state_dict().items()}
        assert full == strides
        model(images[0]).backward()
        for name, p in model.named_parameters():
            assert p.grad.full_tensor().stride() == strides[name], name
        model.load_state_dict({n: v.contiguous() for n, v in expected.items()})
        assert_same(weights(model), expected, "loaded from another memory format")
        optimizer.close()
        assert {name: p.stride() for name, p in model.named_parameters()} == strides

    run(body)


# DeepSpeed#8467, DeepSpeed#6571: empty tensors and fewer elements than ranks.
def test_empty_parameters_and_fewer_elements_than_ranks():
    orders = [
        {"empty": (0, 3), "three": (3,), "pair": (2,), "single": (1,), "void": (0,), "row": (1, 2)},
        {"pair": (2,), "empty": (0,)},
        {"single": (1,), "scalar": (), "one": (1, 1), "three": (3,)},
        {"empty": (0, 3), "void": (0,), "nothing": (2, 0), "none": (0,)},
    ]

    def body(rank, world_size):
        for shapes in orders:
            model, plain_model = SplitForm(shapes), SplitForm(shapes)
            optimizer = zeroshard.AdamW(model, lr=1e-2, stage=3)
            plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-2, fused=True)
            assert_sharded(model, str(shapes))
            for draw in range(2):
                parts = [coefficients(model, r, world_size, draw) for r in range(world_size)]
                model(parts[rank]).backward()
                assert_same(full_gradients(model), averaged(parts, world_size), str(shapes))
                optimizer.step()
                optimizer.zero_grad()
                plain_step(plain_model, plain, averaged(parts, world_size))
                assert_sharded(model, str(shapes))
            assert_same(weights(model), weights(plain_model), str(shapes))
            with zeroshard.gather(model, writeback=True), torch.no_grad():
                for p in model.parameters():
                    p.fill_(rank + 1.0)
            assert all((value == 1).all() for value in weights(model).values())
            model.load_state_dict(weights(plain_model))
            assert_same(weights(model), weights(plain_model), str(shapes))
            optimizer.close()
            assert not leftovers(model)

    run(body, 4)


def test_without_a_process_group_parameters_are_whole_and_plain():
    def body(rank, world_size):
        model, plain_model = SplitForm(SHAPES), SplitForm(SHAPES)
        optimizer = zeroshard.AdamW(model, lr=1e-2, stage=3)
        plain = torch.optim.AdamW(plain_model.parameters(), lr=1e-2, fused=True)
        for draw in range(3):
            for one, its in ((model, optimizer), (plain_model, plain)):
                one(coefficients(one, 0, 1, draw)).backward()
                its.step()
                its.zero_grad()
            for name, p in model.named_parameters():
                assert torch.equal(p, plain_model.get_parameter(name)), name
        assert all(type(value) is torch.Tensor for value in model.state_dict().values())
        torch.save(model.state_dict(), io.BytesIO())
        twin = copy.deepcopy(model)
        assert_same(weights(twin), weights(plain_model), "copied")
        with torch.no_grad():
            model.matrix.fill_(1.0)
            plain_model.matrix.fill_(1.0)
        with zeroshard.gather(model):
            assert (model.matrix == 1).all()
        assert_same(weights(model), weights(plain_model), "written as ever")
        optimizer.close()
        assert not leftovers(model)

    run(body, 1, process_group=False)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_a_gradient_penalty_is_right_inside_gather_and_right_or_refused_outside():
    def body(rank, world_size):
        batches = letter_batches(rank)[:2]

        def trained(stage, gathers):
            model = letters()
            optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage)
            for batch in batches:
                with zeroshard.gather(model) if gathers else contextlib.nullcontext():
                    loss = loss_of(model, batch)
                    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
                    (loss + 0.1 * sum(g.square().sum() for g in found)).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert int(optimizer.skipped_steps) == 0
            return weights(model)

        expected = trained(2, False)
        assert_same(trained(3, True), expected, "inside gather")
        try:
            got = trained(3, False)
        except ZeroShardError as error:
            refusal = str(error)
        else:
            return assert_same(got, expected, "outside")
        assert "gather" in refusal

    run(body)


# --- memory


def live_bytes():
    """Bytes of all tensors that Python can reach, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            local = thing.to_local() if hasattr(thing, "to_local") else thing
            storage = local.untyped_storage()
            if storage.data_ptr():
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Tower(nn.Module):
    """Four layers of one size, a frozen one among them, and a small root."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(160, 160, bias=False) for _ in range(4))
        self.layers[1].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(160))
        self.to(dtype)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return (x * self.scale).float().square().mean()


@pytest.mark.parametrize(
    ("dtype", "master", "master_bytes"),
    [(torch.float32, "auto", 0), (torch.bfloat16, "split", 2), (torch.bfloat16, "fp32", 4)],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_memory_is_what_is_counted_from_outside(world_size, dtype, master, master_bytes):
    def body(rank, world_size):
        x = torch.linspace(-1, 1, 320).view(2, 160).to(dtype).requires_grad_()
        size = torch.empty((), dtype=dtype).element_size()
        layer, numel = 160 * 160, 4 * 160 * 160 + 160
        trainable = numel - layer
        before = live_bytes()
        model = Tower(dtype)
        precision = zeroshard.Precision(master=master)
        optimizer = zeroshard.AdamW(model, stage=3, lr=1e-3, precision=precision)

        def outside():
            """Bytes of the parameters that are whole, without the one-element ones."""
            return sum(p.nbytes for p in model.parameters() if not is_sharded(p))

        def check(when, *, layers=0, idle=0, root=False, slack=0):
            memory = optimizer.memory()
            shown = size * (layers * layer + root * 160)
            assert outside() == shown, f"{when}: {outside() / size / layer} layers are whole"
            layers += idle  # which show placeholders while their memory waits for backward
            whole = size * (layers * layer + root * 160)
            # Each unit is whole blocks of 256 elements for each rank.
            padding = size * (layers + root) * 256 * world_size
            assert whole <= memory["unsharded_parameters"] <= whole + padding, when
            assert memory["parameters"] == pytest.approx(size * numel / world_size, rel=0.03)
            assert memory["moments"] == pytest.approx(8 * trainable / world_size, rel=0.03)
            wanted = master_bytes * trainable / world_size
            assert memory["master"] == pytest.approx(wanted, rel=0.03), when
            assert memory["optimizer_state"] == memory["master"] + memory["moments"]
            counted = sum(memory.values()) - memory["optimizer_state"]
            live = live_bytes() - before
            # Tables of hyperparameters and indices are a few kilobytes, as are activations here.
            assert counted == pytest.approx(live, rel=0.01, abs=16384 + slack), when

        check("after construction")
        for draw in range(2):
            with torch.no_grad():
                model(x)
            check("after a forward without gradients")
            loss = model(x)
            check("after a forward", idle=1, root=True)
            loss.backward()
            x.grad = None
            del loss
            check("after backward")
            optimizer.step()
            check("after step")
            optimizer.zero_grad()
            check(f"at rest {draw}")
        with zeroshard.gather(model):
            check("in gather", layers=4, root=True)
        with zeroshard.gather(model.layers[1]):
            check("in gather of a frozen layer", layers=1)
        check("after gather")
        optimizer.close()
        gc.collect()
        assert outside() == size * numel

    run(body, world_size)


def test_slices_of_a_state_dict_cost_no_memory():
    def body(rank, world_size):
        model = Tower(torch.float32)
        optimizer = zeroshard.AdamW(model, stage=3)
        optimizer.step()
        before = live_bytes()
        state = model.state_dict()
        assert live_bytes() <= before + 4096
        with pytest.raises(ShardTensorError, match="full_tensor"):
            state["layers.0.weight"] @ torch.ones(160)
        norm = state["layers.0.weight"].norm().item()
        with zeroshard.gather(model):
            assert norm == pytest.approx(model.layers[0].weight.norm().item(), rel=1e-5)

    run(body)


def test_data_replaced_between_two_uses_of_one_unit_is_taken():
    """Between them the unit is whole, and its parameters are placeholders already."""

    def body(rank, world_size):
        torch.manual_seed(0)
        model = nn.Sequential(nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2)))
        optimizer = zeroshard.AdamW(model, lr=0.0, weight_decay=0.0, stage=3)
        block, x = model[0][0], torch.ones(2, 16)
        block(x)
        block.weight.data = torch.full((16, 16), 2.0)
        assert block(x).unique().tolist() == [32.0]
        optimizer.zero_grad()
        with zeroshard.gather(model):
            assert block.weight.unique().tolist() == [2.0]

    run(body)


def test_a_second_optimizer_for_the_rest_of_a_model_is_refused():
    """Each would free parameters of the other's, whose writes it does not know."""

    def body(rank, world_size):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        first = zeroshard.AdamW(model[0].parameters(), model=model, stage=3)
        with pytest.raises(ConfigError, match="one optimizer"):
            zeroshard.AdamW(model[1].parameters(), model=model, stage=3)
        model(torch.ones(2, 8)).sum().backward()
        first.step()

    run(body)
