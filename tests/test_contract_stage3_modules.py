"""Stage 3 under models of every shape: units, checkpointing, frozen parts, outputs of any kind.

Each test trains one model under DDP with torch's fused AdamW and under stages 1 and 3, and compares
bits. After every backward and every step of stage 3 it also looks that nothing was left whole.
"""

import collections
import contextlib
import dataclasses
import functools
import re
import traceback
import types
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import (
    VOCABULARY,
    assert_close,
    assert_same,
    full_gradients,
    letter_batches,
    letters,
    loss_of,
    weights,
)
from ranks import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zeroshard
from zeroshard.errors import ConfigError, ZeroShardError

WIDTH = 10
SETTINGS = {"lr": 1e-2, "weight_decay": 0.3}
OURS = {
    "stage 1": {"stage": 1},
    "stage 3": {"stage": 3},
    "stage 3 without resharding after forward": {"stage": 3, "reshard_after_forward": False},
}
STAGE_3 = {"stage 3": {"stage": 3}}


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 3)
        self.down = nn.Linear(2 * width + 3, width, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def change(self, x):
        return self.gain * self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x):
        return x + self.change(x)


def in_turn(blocks, x, step):
    for block in blocks:
        x = block(x)
    return x


class Stack(nn.Module):
    """Blocks between two layers, walked through by a function that a test gives."""

    def __init__(self, walk=in_turn, blocks=4, kind=Block):
        super().__init__()
        self.walk = walk
        self.first = nn.Linear(WIDTH, WIDTH)
        # Given as a number, or ready: one object several times, blocks of several classes.
        ready = [kind() for _ in range(blocks)] if isinstance(blocks, int) else blocks
        self.blocks = nn.ModuleList(ready)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x, step=0):
        return self.last(self.walk(self.blocks, self.first(x), step) * self.scale)


def inputs(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, WIDTH, generator=generator)


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def whole(model):
    """The names of parameters that can be read now; one-element parameters always can."""
    return {
        name
        for name, p in model.named_parameters()
        if p.numel() > 1 and not p.detach().isnan().any()
    }


class Trainer:
    """A model under our optimizer, as a test script would use it."""

    def __init__(self, rank, build, **options):
        torch.manual_seed(0)
        self.rank, self.model = rank, build()
        self.is_sharded = options["stage"] == 3
        self.optimizer = zeroshard.AdamW(
            trainable(self.model), model=self.model, **SETTINGS, **options
        )
        self.no_sync = self.optimizer.no_sync
        self.forward = self.model

    def loss(self, step):
        return self.forward(inputs(self.rank, step), step).square().mean()

    def backward(self, loss, **options):
        loss.backward(**options)
        self.check_nothing_is_whole("backward")

    def step(self):
        self.optimizer.step()
        self.check_nothing_is_whole("step")
        self.zero_grad()

    def zero_grad(self):
        self.optimizer.zero_grad()

    def check_nothing_is_whole(self, when):
        if self.is_sharded:
            left = whole(self.model)
            assert not left, f"whole after {when}: {sorted(left)}"

    def weights(self):
        with zeroshard.gather(self.model):
            return weights(self.model)


class WithDDP(Trainer):
    """The reference: DDP and torch's fused AdamW."""

    def __init__(self, rank, build, **options):
        torch.manual_seed(0)
        self.rank, self.model, self.is_sharded = rank, build(), False
        self.forward = DistributedDataParallel(self.model, **options)
        self.no_sync = self.forward.no_sync
        self.optimizer = torch.optim.AdamW(trainable(self.model), fused=True, **SETTINGS)

    def weights(self):
        return weights(self.model)


class ByHand(WithDDP):
    """DDP written out, for scripts that DDP does not take: every backward is averaged and added.

    At two ranks half a sum is the sum of halves, so this is bitwise DDP (a test below shows it).
    """

    def __init__(self, rank, build):
        super().__init__(rank, build)
        self.forward, self.is_local, self.averages = self.model, False, {}

    @contextlib.contextmanager
    def no_sync(self):
        self.is_local = True
        yield
        self.is_local = False

    def backward(self, loss, **options):
        loss.backward(**options)
        if self.is_local:
            return
        for p in trainable(self.model):
            used = torch.tensor(float(p.grad is not None))
            dist.all_reduce(used)
            if used:
                total = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(total)
                average = total / dist.get_world_size()
                self.averages[p] = self.averages[p] + average if p in self.averages else average
            p.grad = None

    def step(self):
        for p in trainable(self.model):
            p.grad = self.averages.get(p)
        super().step()

    def zero_grad(self):
        super().zero_grad()
        self.averages = {}


def once(trainer, step):
    trainer.backward(trainer.loss(step))


def trained(trainer, play=once, steps=3):
    for step in range(steps):
        play(trainer, step)
        trainer.step()
    return trainer.weights()


def stage_1(rank, build):
    """The reference of scripts whose sums DDP adds in another order."""
    return Trainer(rank, build, stage=1)


def compare(
    rank,
    build,
    play=once,
    *,
    ways=STAGE_3,
    reference=WithDDP,
    plain_build=None,
    steps=2,
    ddp=None,
    **options,
):
    """Training in some ways is bitwise the reference's at two ranks.

    Args:
        build: makes the model.
        play: what a script does in one step before `optimizer.step()`.
        ways: options of zeroshard.AdamW by the name of the way.
        plain_build: makes the model of the reference, where it is another one.
        ddp: options of DistributedDataParallel.
        options: of zeroshard.AdamW under stage 3.
    """
    expected = trained(reference(rank, plain_build or build, **(ddp or {})), play, steps)
    assert all(value.isfinite().all() for value in expected.values())
    for name, ours in ways.items():
        ours = {**ours, **options} if ours["stage"] == 3 else ours
        assert_same(trained(Trainer(rank, build, **ours), play, steps), expected, name)


def check_each(cases):
    """Compares many cases on ranks that are started once, and reports all that fail.

    Args:
        cases: the arguments of `compare` by the name of the case.
    """
    __tracebackhide__ = True

    def body(rank, world_size):
        failed = []
        for what, case in cases.items():
            try:
                compare(rank, **case)
            except Exception:
                failed.append(f"{what}:\n{traceback.format_exc()}")
        assert not failed, "\n".join(failed)

    run(body, timeout_s=30)


def check(build, play=once, **options):
    __tracebackhide__ = True
    check_each({"all": {"build": build, "play": play, "ways": OURS, "steps": 3, **options}})


UNUSED = {"find_unused_parameters": True}


# --- which units run, and in which order


def test_a_stack_of_blocks_is_bitwise_ddp():
    check(Stack)


def test_the_reference_written_out_by_hand_is_ddp():
    def body(rank, world_size):
        expected = trained(WithDDP(rank, Stack))
        assert_same(trained(ByHand(rank, Stack)), expected, "by hand")

    run(body)


@pytest.mark.parametrize("world_size", [1, 3])
def test_any_number_of_ranks_is_bitwise_stage_1(world_size):
    def body(rank, world_size):
        expected = trained(Trainer(rank, Stack, stage=1))
        for name, ours in OURS.items():
            # Alone there is nobody to shard with.
            trainer = Trainer(rank, Stack, **ours)
            trainer.is_sharded &= world_size > 1
            assert_same(trained(trainer), expected, name)

    run(body, world_size)


def test_the_size_of_buckets_changes_nothing():
    sizes = (1e-4, 1e-3, 100)
    check_each({f"bucket_mb={size}": {"build": Stack, "bucket_mb": size} for size in sizes})


def test_units_may_be_used_twice_in_one_forward():
    def walk(blocks, x, step):
        for index in (0, 1, 0, 2, 2, 3, 1):
            x = blocks[index](x)
        return x

    check(lambda: Stack(walk))


# Modules called in a different order in evaluation: pytorch#76949.
def test_units_may_run_in_another_order_each_step():
    def walk(blocks, x, step):
        orders = ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1), (1, 1, 3, 2, 0), (0, 1, 2, 3))
        for index in orders[step]:
            x = blocks[index](x)
        return x

    check(lambda: Stack(walk), steps=5)


def test_units_left_out_of_a_step_are_not_touched():
    def walk(blocks, x, step):
        for index in ((0, 1, 2, 3), (0, 3), (2,), (), (0, 1, 2, 3))[step]:
            x = blocks[index](x)
        return x

    check(lambda: Stack(walk), steps=5, ddp=UNUSED)


def test_a_unit_whose_output_nobody_uses_is_not_touched():
    def walk(blocks, x, step):
        x = blocks[0](x)
        blocks[1](x)
        with torch.no_grad():
            blocks[2](x)
        return blocks[3](x)

    check(lambda: Stack(walk), ddp=UNUSED)


def test_a_backward_may_stop_before_the_first_unit():
    def walk(blocks, x, step):
        x = blocks[1](blocks[0](x))
        return blocks[3](blocks[2](x.detach() if step % 2 else x))

    check(lambda: Stack(walk), ddp=UNUSED)


def test_units_left_out_in_evaluation_train_on():
    def walk(blocks, x, step):
        kept = blocks if torch.is_grad_enabled() else list(blocks)[::-2]
        return in_turn(kept, x, step)

    def play(trainer, step):
        with torch.no_grad():
            trainer.model.eval()
            trainer.model(inputs(trainer.rank, 50 + step))
            trainer.check_nothing_is_whole("evaluation")
            trainer.model.train()
        once(trainer, step)

    check(lambda: Stack(walk), play)


# A parameter used on some ranks only gets the average over all ranks, inside of a unit too.
def test_inside_of_a_unit_ranks_may_use_different_parameters():
    class Branches(Block):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x):
            side = self.left if dist.get_rank() == 0 else self.right
            return side(super().forward(x))

    check(lambda: Stack(kind=Branches), ddp=UNUSED)


def test_one_block_repeated_six_times_is_one_unit():
    def in_a_list():
        return Stack(blocks=[Block()] * 6)

    def called():
        return Stack(lambda blocks, x, step: in_turn([blocks[0]] * 6, x, step), blocks=[Block()])

    check_each({"in a list": {"build": in_a_list}, "called six times": {"build": called}})


class Outer(nn.Module):
    """A unit with units inside, and parameters of its own around them."""

    def __init__(self):
        super().__init__()
        self.inside = nn.ModuleList([Block(), Block()])
        self.around = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        for block in self.inside:
            x = block(self.around(x)) + self.shift
        return x


def test_nested_units_given_by_hand_train_alike():
    ways = (
        [Outer, Block],
        ["Outer", "Block"],
        ["blocks.0", "blocks.0.inside.1"],
        [nn.Linear],
        [Block, "blocks.1.around"],
    )

    def build():
        return Stack(blocks=[Outer(), Outer()])

    check_each({str(units): {"build": build, "units": units} for units in ways})


def test_a_parameter_tied_across_units_trains_alike():
    def build():
        model = Stack()
        model.blocks[2].up.weight = model.blocks[0].up.weight
        model.blocks[3].norm = model.blocks[1].norm
        return model

    check(build)


# --- activation checkpointing: DeepSpeed#4332, DeepSpeed#4595, trl#2514

kinds = pytest.mark.parametrize("use_reentrant", [True, False])


class Recomputing(Block):
    """Recomputes a part of itself, with parameters used before, inside and after it."""

    use_reentrant = None

    def forward(self, x):
        normed = self.norm(x)
        return x + self.gain * self.down(
            checkpoint(
                lambda h: F.gelu(self.up(h)),
                normed,
                use_reentrant=self.use_reentrant,
            )
        )


def around_each(blocks, x, step, use_reentrant):
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=use_reentrant)
    return x


def around_some(blocks, x, step, use_reentrant):
    for index, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=use_reentrant) if index % 2 else block(x)
    return x


def around_two(blocks, x, step, use_reentrant):
    def part(x, start):
        return blocks[start + 1](blocks[start](x))

    for start in range(0, len(blocks), 2):
        x = checkpoint(part, x, start, use_reentrant=use_reentrant)
    return x


def around_all(blocks, x, step, use_reentrant):
    return checkpoint(lambda x: in_turn(blocks, x, step), x, use_reentrant=use_reentrant)


def around_two_and_each(blocks, x, step, use_reentrant):
    def part(x, start):
        return around_each(blocks[start : start + 2], x, step, use_reentrant)

    for start in range(0, len(blocks), 2):
        x = checkpoint(part, x, start, use_reentrant=use_reentrant)
    return x


PLACES = (around_each, around_some, around_two, around_all, around_two_and_each)
# A nested re-entrant checkpoint meets inputs without gradients in the outer one's forward.
quiet = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@quiet
@kinds
def test_checkpointing_around_units_is_bitwise_training_without(use_reentrant):
    def case(place):
        walk = functools.partial(place, use_reentrant=use_reentrant)
        return {"build": lambda: Stack(walk), "plain_build": Stack, "steps": 3}

    check_each({place.__name__: case(place) for place in PLACES})


@kinds
def test_checkpointing_inside_of_a_unit_is_bitwise_training_without(use_reentrant):
    def build():
        model = Stack(kind=Recomputing)
        for block in model.blocks:
            block.use_reentrant = use_reentrant
        return model

    check(build, plain_build=Stack)


@kinds
def test_checkpointed_dropout_draws_the_same_numbers(use_reentrant):
    class Dropping(Block):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.3)

    def play(trainer, step):
        torch.manual_seed(10 * step + trainer.rank)
        once(trainer, step)

    def walk(blocks, x, step):
        return around_each(blocks, x, step, use_reentrant)

    check(lambda: Stack(walk, kind=Dropping), play, plain_build=lambda: Stack(kind=Dropping))


def checkpointed_twice(use_reentrant):
    def walk(blocks, x, step):
        for index in (0, 1, 0, 2):
            block = blocks[index]
            is_plain = use_reentrant is None
            x = block(x) if is_plain else checkpoint(block, x, use_reentrant=use_reentrant)
        return x

    return lambda: Stack(walk, blocks=3)


def test_a_unit_used_twice_under_checkpointing_is_bitwise_training_without():
    check(checkpointed_twice(use_reentrant=False), plain_build=checkpointed_twice(None))


# Re-entrant checkpointing brings the gradients of the two uses one after the other. One that comes
# after its bucket was launched is reduced by itself, so the four terms of two uses and two ranks
# may be added in another order: 3 roundings of a partial sum below four times the largest entry.
def test_a_unit_used_twice_under_reentrant_checkpointing_has_the_same_gradients():
    def body(rank, world_size):
        plain = Trainer(rank, checkpointed_twice(None), stage=1)
        once(plain, 0)
        expected = full_gradients(plain.model)
        largest = max(float(g.abs().max()) for g in expected.values())
        for name, ours in OURS.items():
            trainer = Trainer(rank, checkpointed_twice(use_reentrant=True), **ours)
            for _ in range(2):  # in the second backward the order of units is known
                trainer.zero_grad()
                once(trainer, 0)
                got = full_gradients(trainer.model)
                assert_close(got, expected, name, atol=3 * 2**-24 * 4 * largest)

    run(body)


# --- frozen parts


class Adapted(nn.Module):
    """A frozen product and a low-rank trained one, one after or beside the other."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.shrink = nn.Linear(WIDTH, 2, bias=False)
        self.grow = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        if self.form == "frozen, then trained":
            return x + self.grow(self.shrink(torch.tanh(self.base(x))))
        if self.form == "trained, then frozen":
            return x + self.base(torch.tanh(self.grow(self.shrink(x))))
        if self.form == "frozen beside, first":
            frozen = self.base(x)
            return torch.tanh(frozen + self.grow(self.shrink(x)))
        grown = self.grow(self.shrink(x))
        return torch.tanh(grown + self.base(x))


FORMS = ("frozen, then trained", "trained, then frozen", "frozen beside, first", "frozen beside")


# The gradients of the trained part may be complete while the frozen weight is still needed.
def test_adapters_beside_frozen_weights_train_alike():
    def case(form):
        return {"build": lambda: Stack(blocks=[Adapted(form) for _ in range(3)])}

    check_each({form: case(form) for form in FORMS})


@kinds
def test_checkpointed_adapters_train_alike(use_reentrant):
    def build(form, walk):
        model = Stack(walk, blocks=[Adapted(form) for _ in range(3)])
        for p in (*model.first.parameters(), model.scale):
            p.requires_grad_(False)
        return model

    def play(trainer, step):
        # As HF's enable_input_require_grads: re-entrant checkpointing needs such an input.
        x = inputs(trainer.rank, step).requires_grad_()
        trainer.backward(trainer.forward(x, step).square().mean())

    walk = functools.partial(around_each, use_reentrant=use_reentrant)
    check_each(
        {
            form: {
                "build": functools.partial(build, form, walk),
                "plain_build": functools.partial(build, form, in_turn),
                "play": play,
            }
            for form in FORMS
        }
    )


FROZEN = {
    "in the middle": r"blocks\.[12]\.",
    "at the bottom": r"first|blocks\.[01]\.",
    "at the top": r"blocks\.3\.|last",
    "all units": r"blocks\.",
    "the root": r"first|last|scale",
    "parts of every unit": r".*(norm|up)\.",
    "all but one vector": r"(?!blocks\.2\.up\.bias)",
}


def test_frozen_parameters_train_the_rest_alike():
    def build(pattern):
        model = Stack()
        for name, p in model.named_parameters():
            p.requires_grad_(not re.match(pattern, name))
        return model

    check_each(
        {where: {"build": functools.partial(build, pattern)} for where, pattern in FROZEN.items()}
    )


# --- what goes in and out of a unit


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extra: torch.Tensor | None = None


Named = collections.namedtuple("Named", "hidden extra")
PACKED = {
    "tuple": (lambda h, e: (h, e), lambda o: o),
    "list": (lambda h, e: [h, e], lambda o: o),
    "dict": (lambda h, e: {"hidden": h, "extra": e}, lambda o: (o["hidden"], o["extra"])),
    "named tuple": (Named, lambda o: (o.hidden, o.extra)),
    "dataclass": (Output, lambda o: (o.hidden, o.extra)),
    "tuple with None": (lambda h, e: (None, h, e, 3), lambda o: o[1:3]),
    "nested": (lambda h, e: ({"a": [h]}, (Output(e),)), lambda o: (o[0]["a"][0], o[1][0].hidden)),
}


class Packing(Block):
    def __init__(self, pack):
        super().__init__()
        self.pack = pack

    def forward(self, x):
        return self.pack(super().forward(x), torch.tanh(self.up(x))[:, :WIDTH])


def test_outputs_may_be_packed_in_any_way():
    def case(packing, used):
        pack, unpack = PACKED[packing]

        def walk(blocks, x, step):
            for block in blocks:
                hidden, extra = unpack(block(x))
                x = {"both": hidden + 0.1 * extra, "first": hidden, "second": x + extra}[used]
            return x

        build = functools.partial(Stack, walk, kind=functools.partial(Packing, pack))
        return {"build": build, "ddp": UNUSED}

    cases = [(packing, "both") for packing in PACKED]
    cases += [(packing, used) for packing in ("tuple", "dict") for used in ("first", "second")]
    check_each({f"{packing}, {used}": case(packing, used) for packing, used in cases})


def test_inputs_may_be_packed_in_any_way():
    class Unpacking(Adapted):
        def forward(self, packed, *, more):
            mixed = packed[0]["x"] * more.hidden + torch.tanh(more.extra)
            return super().forward(mixed)

    def walk(blocks, x, step):
        for block in blocks:
            x, hidden, extra = (part.clone() for part in (x, torch.sigmoid(x), x + 1))
            x = block(({"x": x}, None), more=Output(hidden, extra))
        return x

    check_each(
        {
            form: {"build": functools.partial(Stack, walk, kind=functools.partial(Unpacking, form))}
            for form in FORMS
        }
    )


# The gradients of what is watched may be done while those of what is not still need the weights.
def test_inputs_out_of_sight_do_not_end_a_unit_too_early():
    class Late(Adapted):
        def __init__(self, unpack):
            super().__init__("frozen beside, first")
            self.unpack = unpack

        def forward(self, x, packed):
            return self.base(self.unpack(packed)) + self.grow(self.shrink(x))

    ways = {
        "a tuple": (lambda h: (h,), lambda packed: packed[0]),
        "a list": (lambda h: [h], lambda packed: packed[0]),
        "a dict": (lambda h: {"hidden": h}, lambda packed: packed["hidden"]),
        "a dataclass": (Output, lambda packed: packed.hidden),
        "an object": (lambda h: types.SimpleNamespace(hidden=h), lambda packed: packed.hidden),
        "a closure": (lambda h: lambda: h, lambda packed: packed()),
    }

    def case(pack, unpack):
        def walk(blocks, x, step):
            for block in blocks:
                x = block(torch.tanh(x), pack(torch.sigmoid(x)))
            return x

        return {"build": lambda: Stack(walk, kind=functools.partial(Late, unpack))}

    check_each({name: case(*way) for name, way in ways.items()})


# As caches and lists of hidden states or losses, which blocks fill for their caller.
def test_a_unit_may_fill_its_callers_containers():
    class Collecting(Block):
        def forward(self, x, losses, seen):
            y = super().forward(x)
            losses.append(y.square().mean())
            seen[len(seen)] = y.detach()
            seen["last"] = y
            return y

    def walk(blocks, x, step):
        losses, seen = [x.mean()], {"first": x}
        for block in blocks:
            x = block(x, losses, seen=seen)
        assert len(losses) == len(blocks) + 1
        assert seen["last"] is not None
        return x + 0.1 * sum(losses[1:]) + 0.1 * seen["last"]

    check(lambda: Stack(walk, kind=Collecting))


def test_tensors_may_be_given_by_keyword():
    class Masked(Adapted):
        def __init__(self):
            super().__init__("frozen beside, first")

        def forward(self, mask=None, *, hidden):
            return hidden + super().forward(hidden) * mask

    def walk(blocks, x, step):
        for block in blocks:
            x = block(hidden=x, mask=(inputs(0, 7) > 0).float())
        return x

    check(lambda: Stack(walk, kind=Masked))


class Filling(Block):
    """Gives its result through a list of the caller's, and returns nothing."""

    def forward(self, x, results):
        results.append(super().forward(x))


def test_a_unit_without_an_output_trains_alike_or_says_that_it_cannot():
    def walk(blocks, x, step):
        results = [x]
        for block in blocks:
            block(results[-1], results)
        return results[-1]

    def body(rank, world_size):
        def build():
            return Stack(walk, kind=Filling)

        expected = trained(WithDDP(rank, build))
        for name, ours in OURS.items():
            with contextlib.suppress(ZeroShardError):
                assert_same(trained(Trainer(rank, build, **ours)), expected, name)

    run(body)


# As the load balancing of experts: a loss that a block keeps for its model to collect.
# Backward may come to it before it comes to the output, the sign that the unit is needed again:
# then there must be an error, if not the right gradients.
@pytest.mark.parametrize("when", ["before the output", "after the output"])
def test_a_loss_kept_on_the_side_trains_alike_or_raises(when):
    class Keeping(Block):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(WIDTH, 3)

        def forward(self, x):
            if when == "before the output":
                self.aside = self.router(x).logsumexp(-1).square().mean()
            y = super().forward(x)
            if when == "after the output":
                self.aside = self.router(x).logsumexp(-1).square().mean()
            return y

    def play(trainer, step):
        loss = trainer.loss(step)
        trainer.backward(loss + 0.1 * sum(block.aside for block in trainer.model.blocks))

    def build():
        return Stack(kind=Keeping)

    def body(rank, world_size):
        expected = trained(ByHand(rank, build), play)
        for name, ours in OURS.items():
            is_late = when == "after the output" and name == "stage 3"
            with contextlib.suppress(*([RuntimeError] if is_late else [])):
                assert_same(trained(Trainer(rank, build, **ours), play), expected, name)

    run(body)


def test_a_unit_may_return_its_input_as_it_came():
    class Idle(Block):
        is_idle = True

        def forward(self, x):
            return x if self.is_idle else super().forward(x)

    def walk(blocks, x, step):
        for index, block in enumerate(blocks):
            block.is_idle = index % 2 == step % 2
            x = block(x)
        return x

    check(lambda: Stack(walk, kind=Idle), ddp=UNUSED)


CHANGES = {
    "add_": lambda y: y.add_(1.0),
    "mul_": lambda y: y.mul_(1.5),
    "relu_": lambda y: F.relu_(y),
    "item": lambda y: y.__setitem__((0, slice(0, 4)), 0.5),
    "masked_fill_": lambda y: y.masked_fill_(y < 0, 0.1),
}


def test_outputs_may_be_changed_in_place():
    def case(change):
        def walk(blocks, x, step):
            for block in blocks:
                x = block(x)
                change(x)
            return x

        def play(trainer, step):
            logits = trainer.model(inputs(trainer.rank, step), step)
            change(logits)
            trainer.backward(logits.square().mean())

        return {"build": lambda: Stack(walk), "play": play, "reference": ByHand}

    check_each({name: case(change) for name, change in CHANGES.items()})


def test_packed_outputs_may_be_changed_in_place():
    def case(packing):
        pack, unpack = PACKED[packing]

        def walk(blocks, x, step):
            for block in blocks:
                x, extra = unpack(block(x))
                x += 0.1 * extra
            return x

        return {"build": functools.partial(Stack, walk, kind=functools.partial(Packing, pack))}

    check_each({packing: case(packing) for packing in PACKED})


class InPlace(Block):
    def forward(self, x):
        x += self.change(x.clone())
        return x


def test_a_unit_may_change_its_input_in_place():
    check(lambda: Stack(kind=InPlace))


def test_a_caller_may_go_on_with_its_own_tensor_that_a_unit_changed_in_place():
    def walk(blocks, x, step):
        for block in blocks:
            block(x)
        return x

    check(lambda: Stack(walk, kind=InPlace))


def test_outputs_may_be_views():
    class Viewing(Block):
        def forward(self, x):
            return super().forward(x).view(5, 2, WIDTH // 2).transpose(0, 1)

    def walk(blocks, x, step):
        for block in blocks:
            x = block(x.transpose(0, 1).reshape(5, WIDTH) if x.ndim == 3 else x)
        return x.transpose(0, 1).reshape(5, WIDTH)

    check(lambda: Stack(walk, kind=Viewing))


class Crossing(Block):
    def __init__(self):
        super().__init__()
        self.query, self.both = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, y, memory):
        key, value = self.both(memory).chunk(2, -1)
        return super().forward(y + (self.query(y) @ key.T).softmax(-1) @ value)


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Crossing() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, step=0):
        memory = in_turn(self.encoder, x, step)
        y = x.flip(0)
        for block in self.decoder:
            y = block(y, memory)
        return self.head(y)


def test_an_encoders_output_may_go_to_every_decoder_block():
    check(EncoderDecoder)


class Exact(nn.Module):
    """Linear in whole numbers, so that gradients are whole and the same in every order of adding.

    A tensor that is used several times inside of a unit and outside of it too has its gradient
    added up inside first, which rounds differently from torch's order for the same terms.
    """

    def __init__(self):
        super().__init__()
        whole_numbers = torch.arange(2 * WIDTH * WIDTH).remainder(5).sub(2).float()
        self.first, self.second = (nn.Parameter(w) for w in whole_numbers.view(2, WIDTH, WIDTH))

    def forward(self, y, memory):
        return y @ self.first + memory @ self.second + memory.flip(0) - 2 * memory


def test_a_tensor_used_several_times_in_and_outside_of_units_gets_every_gradient():
    def walk(blocks, x, step):
        memory = (x - x.detach()) + inputs(dist.get_rank(), step).mul(4).round()
        memory, y = memory + 1, memory
        for block in blocks:
            y = block(y, memory) + memory
        return y

    def build():
        model = Stack(walk, blocks=2, kind=Exact)
        with torch.no_grad():
            for p in model.parameters():
                p.round_()
        return model

    def play(trainer, step):
        x = inputs(trainer.rank, step).mul(4).round()
        trainer.backward(trainer.forward(x, step).sum())

    check(build, play, steps=1)


# --- scripts that do more than forward, backward, step


def test_two_forwards_may_come_before_their_backwards():
    def play(trainer, step):
        losses = [trainer.loss(2 * step), trainer.loss(2 * step + 1)]
        for loss in losses if step % 2 else losses[::-1]:
            loss.backward() if type(trainer) is Trainer else trainer.backward(loss)

    check(Stack, play, reference=ByHand)


def test_two_forwards_may_share_one_backward():
    def play(trainer, step):
        trainer.backward(trainer.loss(2 * step) + 0.5 * trainer.loss(2 * step + 1))

    check(Stack, play, reference=ByHand)


def test_a_kept_graph_may_be_walked_twice():
    def play(trainer, step):
        loss = trainer.loss(step)
        trainer.backward(loss, retain_graph=True)
        trainer.backward(loss)

    check(Stack, play, reference=ByHand)


@pytest.mark.parametrize("of", ["the input", "the parameters", "a hidden tensor"])
def test_autograd_grad_between_forward_and_backward_changes_nothing(of):
    asked = {}

    def walk(blocks, x, step):
        x = blocks[1](blocks[0](x))
        asked["hidden"] = x
        return in_turn(blocks[2:], x, step)

    def play(trainer, step):
        x = inputs(trainer.rank, step).requires_grad_()
        loss = trainer.model(x, step).square().mean()
        sources = {
            "the input": [x],
            "the parameters": trainable(trainer.model),
            "a hidden tensor": [asked["hidden"]],
        }[of]
        found = torch.autograd.grad(loss, sources, retain_graph=True)
        trainer.check_nothing_is_whole("autograd.grad")
        asked.setdefault(type(trainer), []).append([g.clone() for g in found])
        trainer.backward(loss)

    def body(rank, world_size):
        def build():
            return Stack(walk)

        expected = trained(ByHand(rank, build), play)
        for name, ours in OURS.items():
            asked[Trainer] = []
            assert_same(trained(Trainer(rank, build, **ours), play), expected, name)
            # What autograd.grad returns is local, as under stage 1 and in plain torch.
            for got, wanted in zip(asked[Trainer], asked[ByHand], strict=True):
                for a, b in zip(got, wanted, strict=True):
                    assert torch.equal(a, b), name

    run(body)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_forwards_without_gradients_may_come_at_any_time(mode):
    def look(trainer, step):
        with mode():
            return trainer.model(inputs(trainer.rank, 90 + step), step).clone()

    def play(trainer, step, when):
        if when == "first of all" and step == 0:
            for draw in range(2):
                look(trainer, draw)
                trainer.check_nothing_is_whole("evaluation")
        loss = trainer.loss(step)
        if when == "before backward":
            look(trainer, step)
        trainer.backward(loss)
        if when == "between steps":
            look(trainer, step)
            trainer.check_nothing_is_whole("evaluation")

    check_each(
        {
            when: {
                "build": Stack,
                "play": functools.partial(play, when=when),
                "reference": ByHand,
            }
            for when in ("first of all", "between steps", "before backward")
        }
    )


def test_evaluation_gives_the_numbers_of_stage_1():
    def body(rank, world_size):
        results = {}
        for name, ours in OURS.items():
            trainer = Trainer(rank, Stack, **ours)
            trained(trainer, steps=2)
            with torch.no_grad():
                results[name] = [trainer.model(inputs(rank, 60 + i)[: i + 1]) for i in range(4)]
            trainer.check_nothing_is_whole("evaluation")
        for name, outputs in results.items():
            for got, wanted in zip(outputs, results["stage 1"], strict=True):
                assert torch.equal(got, wanted), name

    run(body)


def test_a_forward_without_its_backward_is_forgotten():
    def play(trainer, step):
        kept = trainer.loss(20 + step)
        trainer.loss(30 + step)
        once(trainer, step)
        del kept

    check(Stack, play, reference=ByHand)


def test_a_forward_without_its_backward_may_be_the_last_before_a_step():
    def play(trainer, step):
        once(trainer, step)
        trainer.loss(20 + step)

    check(Stack, play, reference=ByHand)


class WithMethods(Stack):
    """What HF models offer beside forward: an encoder, an embedding, a method that uses them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)

    def embedded(self, ids):
        return in_turn(self.blocks[:2], self.first(self.embed(ids)), 0)


# Encoders called directly: the parts of a model are modules in their own right.
def test_submodules_may_be_called_directly():
    def play(trainer, step):
        model, x = trainer.model, inputs(trainer.rank, step)
        ids = torch.arange(5) + trainer.rank
        parts = {
            0: lambda: model.blocks[2](x),
            1: lambda: model.embedded(ids),
            2: lambda: model.last(model.blocks[0](model.first(x))),
            3: lambda: model.embed(ids),
            4: lambda: model(x) + model.last(model.embed(ids)),
            5: lambda: model.blocks[1].up(x),
        }
        trainer.backward(parts[step]().square().mean())

    check(WithMethods, play, reference=ByHand, steps=6)


PARTS = {
    "embed": lambda model, x, ids: model.embed(ids),
    "first": lambda model, x, ids: model.first(x),
    "a block": lambda model, x, ids: model.blocks[3](x),
    "a part of a block": lambda model, x, ids: model.blocks[0].norm(x),
    "a method": lambda model, x, ids: model.embedded(ids),
}


def test_submodules_called_directly_without_gradients_give_the_numbers_of_stage_1():
    def body(rank, world_size):
        trainers = {name: Trainer(rank, WithMethods, **ours) for name, ours in OURS.items()}
        for what, part in PARTS.items():
            found = {}
            for name, trainer in trainers.items():
                with torch.no_grad():
                    found[name] = part(trainer.model, inputs(rank, 1), torch.arange(5))
                trainer.check_nothing_is_whole(what)
            for name, got in found.items():
                assert torch.equal(got, found["stage 1"]), f"{name}: {what}"

    run(body)


def test_gradients_may_be_dropped_between_forward_and_backward():
    def play(trainer, step, through):
        once(trainer, 10 + step)
        loss = trainer.loss(step)
        trainer.zero_grad()
        if through == "model":
            trainer.model.zero_grad()
        trainer.backward(loss)

    check_each(
        {
            through: {
                "build": Stack,
                "play": functools.partial(play, through=through),
                "reference": ByHand,
            }
            for through in ("optimizer", "model")
        }
    )


def accumulate(trainer, step, *, deferred):
    for micro in range(4):
        context = trainer.no_sync() if micro in deferred else contextlib.nullcontext()
        with context:
            trainer.backward(trainer.loss(4 * step + micro))


def test_deferred_accumulation_is_bitwise_ddps():
    check(Stack, functools.partial(accumulate, deferred=(0, 1, 2)))


# DDP averages the sum of the old average and the new gradient again: other roundings, so the
# reference is stage 1, whose accumulated gradients have tests of their own.
def test_synced_and_deferred_backwards_add_up_bitwise_as_under_stage_1():
    ways = ((), (1,), (0, 2))
    check_each(
        {
            f"deferred {deferred}": {
                "build": Stack,
                "play": functools.partial(accumulate, deferred=deferred),
                "reference": stage_1,
            }
            for deferred in ways
        }
    )


# --- kinds of parameters, uses outside of a module's forward


class Mixed(nn.Module):
    """Sixteen-bit matrices and 32-bit norms in one unit."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 3).bfloat16()
        self.tilt = nn.Parameter(torch.linspace(-1, 1, WIDTH, dtype=torch.float16))
        self.down = nn.Linear(2 * WIDTH + 3, WIDTH, bias=False).bfloat16()

    def forward(self, x):
        hidden = self.down(F.gelu(self.up(self.norm(x).bfloat16())))
        return x + hidden.float() * self.tilt.float()


# DDP adds 16-bit gradients in 16 bits and its AdamW keeps no masters: the oracle is stage 1.
def test_several_dtypes_in_one_unit_train_bitwise_as_under_stage_1():
    def body(rank, world_size):
        def build():
            return Stack(kind=Mixed)

        expected = trained(Trainer(rank, build, stage=1))
        assert {value.dtype for value in expected.values()} == {
            torch.float32,
            torch.float16,
            torch.bfloat16,
        }
        for name, ours in OURS.items():
            assert_same(trained(Trainer(rank, build, **ours)), expected, name)

    run(body)


# Autocast keeps 16-bit copies of weights, and a step must not meet stale ones.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_autocast_trains_bitwise_as_under_stage_1():
    def play(trainer, step):
        with torch.autocast("cpu", torch.bfloat16):
            loss = trainer.forward(inputs(trainer.rank, step), step).float().square().mean()
        trainer.backward(loss)

    check(Stack, play)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_of_fp32_weights_is_warned_of_once(dtype):
    def body(rank, world_size):
        model = Stack().to(dtype)
        zeroshard.AdamW(model, stage=3)
        x = inputs(rank, 0).to(dtype)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                model(x)  # saves nothing
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    model(x).float().sum().backward()
        said = [str(w.message) for w in caught if "autocast" in str(w.message)]
        assert len(said) == (1 if dtype == torch.float32 else 0)
        assert all("Precision(param_dtype=torch.bfloat16)" in text for text in said)

    run(body)


class Tied(nn.Module):
    """A head without a module of its own: the embedding's matrix, used by the root's forward."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, step=0):
        ids = (x[:, 0].abs() * 10).long() % VOCABULARY
        return F.linear(in_turn(self.blocks, self.embed(ids), step), self.embed.weight)


def test_the_root_may_use_a_tied_matrix_by_hand_where_it_is_in_no_other_unit():
    check(Tied, units=[Block])


# What units=None takes for a unit of its own cannot be seen from outside of its module: then it
# reads as NaN, which every later number shows, but as nothing else.
def test_a_tied_matrix_used_by_hand_is_never_silently_another():
    def body(rank, world_size):
        plain, trainer = ByHand(rank, Tied), Trainer(rank, Tied, stage=3)
        expected, loss = plain.loss(0), trainer.loss(0)
        if not loss.isnan():
            assert torch.equal(loss, expected)
            assert_same(trained(trainer), trained(plain), "tied by hand")

    run(body)


class Giving(Block):
    """Returns a parameter, or a slice of it, as prompts and tables of positions do."""

    def __init__(self, give):
        super().__init__()
        self.table = nn.Parameter(torch.randn(5, WIDTH))
        self.give = give

    def forward(self, x):
        return super().forward(x), self.give(self.table)


@pytest.mark.parametrize("cut", [False, True])
def test_a_parameter_that_leaves_its_unit_is_right_or_refused_or_nan(cut):
    def walk(blocks, x, step):
        given = []
        for block in blocks:
            x, table = block(x)
            given.append(table)
        return x + sum(given)

    def build():
        return Stack(walk, blocks=[Giving(lambda t: t[:, 1:2] if cut else t) for _ in range(3)])

    def body(rank, world_size):
        plain, trainer = ByHand(rank, build), Trainer(rank, build, stage=3)
        expected = plain.loss(0)
        with contextlib.suppress(ZeroShardError):
            loss = trainer.loss(0)
            if not loss.isnan():
                assert torch.equal(loss, expected)
                assert_same(trained(trainer), trained(plain), "given away")

    run(body)


def test_a_model_with_tied_embedding_and_experts_is_bitwise_ddp():
    def body(rank, world_size):
        def train(trainer):
            for batch in letter_batches(rank)[:4]:
                trainer.backward(loss_of(trainer.forward, batch))
                trainer.step()
            return trainer.weights()

        expected = train(WithDDP(rank, letters))
        for name, ours in OURS.items():
            assert_same(train(Trainer(rank, letters, **ours)), expected, name)

    run(body)


# --- hooks of the user

REGISTERED = ("before the optimizer", "after the optimizer")


@pytest.mark.parametrize("registered", REGISTERED)
@pytest.mark.parametrize("graded", [True, False])
def test_hooks_around_the_forward_of_a_unit_see_whole_parameters(registered, graded):
    def body(rank, world_size):
        seen = []

        def look(name):
            def hook(module, *rest):
                readable = not any(p.isnan().any() for p in module.parameters())
                seen.append((name, readable))

            return hook

        def register(model):
            for index, block in enumerate(model.blocks):
                block.register_forward_pre_hook(look(f"before {index}"))
                block.register_forward_hook(look(f"after {index}"))

        def build():
            model = Stack()
            if registered == "before the optimizer":
                register(model)
            return model

        trainer = Trainer(rank, build, stage=3)
        if registered == "after the optimizer":
            register(trainer.model)
        for step in range(2):
            seen.clear()
            with torch.set_grad_enabled(graded):
                loss = trainer.loss(step)
            order = [f"{when} {index}" for index in range(4) for when in ("before", "after")]
            assert seen == [(name, True) for name in order]
            if graded:
                trainer.backward(loss)
                trainer.step()

    run(body)


def backward_hooks_of(rank, registered):
    """What hooks around the backward of units see under DDP's arithmetic and under stage 3."""
    seen = []

    def before(module, gradients):
        is_whole = not any(p.isnan().any() for p in module.parameters())
        seen.append(("before", is_whole, gradients[0].clone()))

    def after(module, ingoing, outgoing):
        seen.append(("after", None, ingoing[0].clone()))

    def register(model):
        for block in model.blocks:
            block.register_full_backward_pre_hook(before)
            block.register_full_backward_hook(after)

    def build():
        model = Stack()
        if registered == "before the optimizer":
            register(model)
        return model

    results = []
    for trainer in (ByHand(rank, build), Trainer(rank, build, stage=3)):
        if registered == "after the optimizer":
            register(trainer.model)
        seen.clear()
        once(trainer, 0)
        results.append(seen.copy())
        assert len(seen) == 2 * len(trainer.model.blocks)
    return results


@pytest.mark.parametrize("registered", REGISTERED)
def test_hooks_around_the_backward_of_a_unit_are_given_the_same_gradients(registered):
    def body(rank, world_size):
        plain, ours = backward_hooks_of(rank, registered)
        for got, wanted in zip(ours, plain, strict=True):
            assert got[0] == wanted[0]
            assert torch.equal(got[2], wanted[2])

    run(body)


def test_hooks_that_change_what_goes_in_and_out_are_obeyed():
    def build():
        model = Stack()
        for block in model.blocks:
            block.register_forward_pre_hook(lambda module, args: (args[0] * 1.25,))
            block.register_forward_hook(lambda module, args, output: output - 0.5 * args[0])
        return model

    check(build)


def test_hooks_on_parameters_are_given_the_whole_local_gradient():
    def body(rank, world_size):
        seen = []

        def build():
            model = Stack()
            model.blocks[1].up.weight.register_hook(lambda g: seen.append(g.clone()) or 2 * g)
            return model

        expected = trained(ByHand(rank, build))
        wanted = seen.copy()
        for name, ours in OURS.items():
            seen.clear()
            assert_same(trained(Trainer(rank, build, **ours)), expected, name)
            assert len(seen) == len(wanted)
            assert all(torch.equal(a, b) for a, b in zip(seen, wanted, strict=True)), name

    run(body)


# --- which modules are units


def readable_in(model, module, *args):
    """The names of parameters that are whole while `module` runs in a forward without gradients."""
    seen = set()
    handle = module.register_forward_pre_hook(lambda *_: seen.update(whole(model)))
    with torch.no_grad():
        for _ in range(2):  # from the second on, the order of units is known
            model(*args)
    handle.remove()
    return seen


def names_under(model, *prefixes):
    return {
        name
        for name, p in model.named_parameters()
        if p.numel() > 1 and any(name.startswith(prefix) for prefix in prefixes)
    }


class Language(nn.Module):
    """An embedding, blocks with experts in a list inside, an untied head and a root."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Inside() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        return self.head(self.norm(in_turn(self.layers, self.embed(ids), 0)))


class Inside(Block):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        return super().forward(x) + sum(expert(x) for expert in self.experts)


def test_layers_embedding_and_untied_head_are_units_and_the_rest_is_the_root():
    def body(rank, world_size):
        model, ids = Language(), torch.arange(6)
        zeroshard.AdamW(model, stage=3)
        root = names_under(model, "norm")
        for module, prefix, following in (
            (model.layers[0], "layers.0.", "layers.1."),
            (model.layers[1], "layers.1.", "layers.2."),
            (model.embed, "embed", "layers.0."),
            (model.head, "head", "embed"),
        ):
            seen = readable_in(model, module, ids)
            # A unit that was gathered ahead may be readable already; one that is over is not.
            assert root | names_under(model, prefix) <= seen, prefix
            assert seen <= root | names_under(model, prefix, following), prefix

    run(body)


def test_repr_names_the_units():
    def body(rank, world_size):
        text = repr(zeroshard.AdamW(Language(), stage=3))
        for name in ("embed", "layers.0", "layers.3", "head"):
            assert name in text, text
        assert "experts" not in text
        text = repr(zeroshard.AdamW(Language(), stage=3, units=["layers.2", nn.Embedding]))
        assert "layers.2" in text
        assert "embed" in text
        assert "layers.1" not in text
        assert "head" not in text

    run(body)


class Attributes(nn.Module):
    """Layers that are attributes, not in a list, as some models name them: HF's way to say so."""

    _no_split_modules = ["Inside", "NotInThisModel"]

    def __init__(self):
        super().__init__()
        self.bottom, self.top = Inside(), Inside()
        self.several = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x, step=0):
        return in_turn(self.several, self.top(self.bottom(x)), step)


def test_units_are_those_that_a_model_names_in_no_split_modules():
    def body(rank, world_size):
        torch.manual_seed(0)
        model = Attributes()
        text = repr(zeroshard.AdamW(model, stage=3))
        assert "bottom" in text
        assert "top" in text
        assert "experts" not in text
        seen = readable_in(model, model.bottom, torch.ones(2, WIDTH))
        assert names_under(model, "bottom.") <= seen
        assert not names_under(model, "several.1.") & seen

    run(body)
    check(Attributes)


WAYS = {
    "classes": [Block],
    "class names": ["Block"],
    "dotted names": [f"blocks.{index}" for index in range(4)],
    "a tuple": (Block,),
    "mixed": [Block, "blocks.0"],
}


def test_units_may_be_given_as_classes_class_names_or_module_names():
    def body(rank, world_size):
        texts = {}
        for way, units in WAYS.items():
            trainer = Trainer(rank, Stack, stage=3, units=units)
            model = trainer.model
            seen = readable_in(model, model.blocks[1], inputs(rank, 0))
            assert names_under(model, "blocks.1.", "first", "last", "scale") <= seen, way
            assert not names_under(model, "blocks.0.", "blocks.3.") & seen, way
            texts[way] = repr(trainer.optimizer)
        assert len(set(texts.values())) == 1, texts

    run(body)


WRONG = {
    "a name that no module has": (["blocks.9"], "blocks.9"),
    "a class that no module is of": ([nn.Conv2d], "Conv2d"),
    "the name of such a class": (["Conv2d"], "Conv2d"),
    "one right, one wrong": ([Block, "middle"], "middle"),
    "a parameter's name": (["scale"], "scale"),
    "a number": ([3], "3"),
    "an instance": ([Block()], "Block|module"),
}


def test_units_that_match_nothing_are_refused():
    def body(rank, world_size):
        for what, (units, came) in WRONG.items():
            model = Stack()
            with pytest.raises(ConfigError, match=came) as caught:
                zeroshard.AdamW(model, stage=3, units=units)
            assert "unit" in str(caught.value), what
            assert not any(
                m._forward_hooks or m._forward_pre_hooks or m._backward_hooks
                for m in model.modules()
            ), what
            assert whole(model) == names_under(model, ""), what

    run(body)


def test_ranks_that_name_other_units_are_told_so_on_every_rank():
    def body(rank, world_size):
        with pytest.raises(ConfigError, match="unit") as caught:
            zeroshard.AdamW(Stack(), stage=3, units=[Block] if rank else ["blocks.0"])
        assert "rank" in str(caught.value)

    run(body, timeout_s=20)
