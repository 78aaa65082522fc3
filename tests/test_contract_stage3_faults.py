"""Stage 3 when something goes wrong: training goes on, or a named error ends it."""

import contextlib
import datetime
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import assert_same, weights
from ranks import run
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard
from zeroshard import optimizer as facade
from zeroshard import sharding
from zeroshard.errors import CommunicationError, ZeroShardError
from zeroshard.transport import Delayed
from zeroshard.transport.observe import Around

WIDTH = 8
NUM_BLOCKS = 4
PATIENCE_S = 1.0  # of a process group whose timeout a test runs into


class Milestone(torch.autograd.Function):
    """The identity; tells a model where its forward and its backward are."""

    @staticmethod
    def forward(ctx, x, reach, index):
        ctx.reach, ctx.index = reach, index
        reach("forward", index)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.reach("backward", ctx.index)
        return gradient, None, None


class Block(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.index, self.reach = index, None
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x):
        hidden = Milestone.apply(F.gelu(self.up(self.norm(x))), self.reach, self.index)
        return x + self.down(hidden)


class Stack(nn.Module):
    """Blocks that tell where they are, so that a test can let something happen there.

    Places are ("forward", index) and ("backward", index), in the middle of a block, and
    ("between", index), in the root's forward before a block.
    """

    def __init__(self, use_reentrant=None):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(index) for index in range(NUM_BLOCKS))
        self.last = nn.Linear(WIDTH, 3)
        self.order = range(NUM_BLOCKS)
        self.use_reentrant = use_reentrant
        self.happening = None
        for block in self.blocks:
            block.reach = self.reach

    def reach(self, *place):
        if self.happening is not None and self.happening[0] == place:
            action, self.happening = self.happening[1], None
            action()

    def forward(self, x):
        x = self.first(x)
        for index in self.order:
            self.reach("between", index)
            block = self.blocks[index]
            if self.use_reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.last(x)


class Script:
    """A model under an optimizer of ours, trained on this rank's own numbers."""

    def __init__(self, rank, *, stage=3, use_reentrant=None, **options):
        torch.manual_seed(0)
        self.rank, self.model = rank, Stack(use_reentrant)
        self.optimizer = zeroshard.AdamW(self.model, lr=1e-2, stage=stage, **options)

    def loss(self, step):
        generator = torch.Generator().manual_seed(100 * step + self.rank)
        return self.model(torch.randn(3, WIDTH, generator=generator)).square().mean()

    def step(self, step):
        self.loss(step).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self, step=90):
        with torch.no_grad():
            return self.loss(step)

    def train(self, steps):
        for step in steps:
            self.step(step)

    def weights(self):
        with zeroshard.gather(self.model):
            return weights(self.model)

    def fail(self, place, error, act):
        """Runs `act`, in which the error comes up at the place, and clears up after it."""
        self.model.happening = (place, thrower(error))
        with pytest.raises(type(error)):
            act()
        assert self.model.happening is None, f"{place} was not reached"
        self.optimizer.zero_grad()
        self.check_sharded(f"after {error!r} at {place}")

    def check_sharded(self, what):
        left = [
            name
            for name, p in self.model.named_parameters()
            if p.numel() > 1 and not p.detach().isnan().all()
        ]
        assert not left, f"{what}: {left} are whole"


def thrower(error):
    def throw():
        raise error

    return throw


class MishapError(Exception):
    pass


def expected_after(rank, steps, **options):
    """The weights of a script to which nothing happened."""
    script = Script(rank, stage=1, **options)
    script.train(steps)
    return script.weights()


def impatient():
    """A process group whose collectives give up early, long before a rank would be ended."""
    return dist.new_group(timeout=datetime.timedelta(seconds=PATIENCE_S))


@contextlib.contextmanager
def named_error(*words, kind=CommunicationError):
    """What happens inside ends in a named error in time, whose message has one of the words."""
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        yield caught
    assert time.monotonic() - began < 10 * PATIENCE_S
    message = str(caught.value).lower()
    assert not words or any(word in message for word in words), message


PLACES = [
    (where, index) for where in ("between", "forward", "backward") for index in range(NUM_BLOCKS)
]


# --- on every rank: training goes on


@pytest.mark.parametrize(
    "options", [{}, {"reshard_after_forward": False}, {"bucket_mb": 2e-4}], ids=str
)
def test_after_an_error_on_every_rank_training_goes_on_as_if_it_had_not_been(options):
    def body(rank, world_size):
        expected = expected_after(rank, range(len(PLACES)))
        script = Script(rank, **options)
        for step, place in enumerate(PLACES):  # the first of them with no order of units known
            script.fail(place, MishapError(), lambda step=step: script.loss(step).backward())
            script.step(step)
        assert_same(script.weights(), expected, str(options))

    run(body)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_after_an_error_under_checkpointing_training_goes_on(use_reentrant):
    def body(rank, world_size):
        expected = expected_after(rank, range(len(PLACES)))
        script = Script(rank, use_reentrant=use_reentrant)
        for step, place in enumerate(PLACES):
            script.fail(place, MishapError(), lambda step=step: script.loss(step).backward())
            script.step(step)
        assert_same(script.weights(), expected, "checkpointed")

    run(body)


def test_after_an_error_in_evaluation_or_in_a_deferred_backward_training_goes_on():
    def body(rank, world_size):
        expected = expected_after(rank, range(5))
        script = Script(rank)

        def evaluate():
            script.evaluate()

        def defer():
            with script.optimizer.no_sync():
                script.loss(70).backward()
                script.loss(71).backward()

        script.fail(("forward", 2), MishapError(), evaluate)
        script.step(0)
        script.fail(("forward", 1), MishapError(), evaluate)
        script.step(1)
        script.fail(("backward", 2), MishapError(), defer)
        script.step(2)
        script.fail(("forward", 3), MishapError(), defer)
        script.fail(("backward", 0), MishapError(), defer)
        script.train([3, 4])
        assert_same(script.weights(), expected, "evaluation and no_sync")

    run(body)


def test_an_error_after_a_good_backward_drops_its_gradients_too():
    def body(rank, world_size):
        expected = expected_after(rank, range(3))
        script = Script(rank)
        script.step(0)
        script.loss(50).backward()
        script.fail(("backward", 1), MishapError(), lambda: script.loss(51).backward())
        assert all(p.grad is None for p in script.model.parameters())
        script.train([1, 2])
        assert_same(script.weights(), expected, "a second backward failed")

    run(body)


def test_ctrl_c_leaves_training_usable():
    def body(rank, world_size):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        places = [("forward", 0), ("forward", 2), ("backward", 3), ("backward", 1)]
        expected = expected_after(rank, range(len(places)))
        script = Script(rank)
        for step, place in enumerate(places):
            script.model.happening = (place, lambda: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                script.loss(step).backward()
            script.optimizer.zero_grad()
            script.check_sharded(f"after Ctrl-C at {place}")
            script.step(step)
        assert_same(script.weights(), expected, "interrupted")

    run(body)


class Scarcity:
    """Lets one growth of a storage in this process run out of memory."""

    def __init__(self):
        self.growths, self.failing = 0, None
        inner = torch.UntypedStorage.resize_

        def resize_(storage, size):
            if size > storage.nbytes():
                self.growths += 1
                if self.growths == self.failing:
                    raise torch.OutOfMemoryError("not enough memory (by the test)")
            return inner(storage, size)

        torch.UntypedStorage.resize_ = resize_

    def fail_at(self, growth):
        self.growths, self.failing = 0, growth


@pytest.mark.parametrize("act", ["training", "evaluation"])
def test_running_out_of_memory_while_unsharding_leaves_training_usable(act):
    def body(rank, world_size):
        script, scarcity = Script(rank), Scarcity()
        script.train(range(2))

        def run_out(step):
            script.loss(step).backward() if act == "training" else script.evaluate()

        scarcity.fail_at(None)
        run_out(60)
        script.optimizer.zero_grad()
        growths = scarcity.growths
        assert growths > NUM_BLOCKS, "every unit grows"
        for growth in range(1, growths + 1):
            scarcity.fail_at(growth)
            with pytest.raises(torch.OutOfMemoryError):
                run_out(60 + growth)
            scarcity.fail_at(None)
            script.optimizer.zero_grad()
            script.check_sharded(f"after growth {growth} failed")
            script.step(2 + growth)
        steps = [0, 1, *range(3, 3 + growths)]
        assert_same(script.weights(), expected_after(rank, steps), "out of memory")

    run(body)


def test_an_error_while_parameters_are_gathered_leaves_training_usable():
    def body(rank, world_size):
        expected = expected_after(rank, range(3))
        script = Script(rank)
        script.step(0)
        for writeback in (False, True):
            with pytest.raises(MishapError), zeroshard.gather(script.model, writeback=writeback):
                raise MishapError
            script.check_sharded(f"writeback={writeback}")
        script.train([1, 2])
        assert_same(script.weights(), expected, "an error inside of gather")

    run(body)


@pytest.mark.parametrize("place", [("forward", 2), ("backward", 1)])
def test_close_after_an_error_gives_whole_plain_parameters(place):
    def body(rank, world_size):
        script = Script(rank)
        script.train(range(2))
        script.fail(place, MishapError(), lambda: script.loss(2).backward())
        script.optimizer.close()
        assert_same(weights(script.model), expected_after(rank, range(2)), "closed")
        script.loss(3).backward()
        assert all(type(p.grad) is torch.Tensor for p in script.model.parameters())

    run(body)


# --- on one rank: the others are told


@pytest.mark.parametrize(
    ("place", "step"),
    [(("forward", 1), 0), (("forward", 0), 2), (("between", 3), 2), (("backward", 2), 2)],
)
def test_an_error_on_one_rank_ends_the_others_in_a_named_error(place, step):
    def body(rank, world_size):
        script = Script(rank, mesh=impatient())
        script.train(range(step))
        if rank == 1:
            script.model.happening = (place, thrower(MishapError()))
            with pytest.raises(MishapError):
                script.loss(step).backward()
            return
        with named_error("blocks", "unit", "gather", "reduc"):
            script.step(step)
            script.step(step + 1)

    run(body, 3, timeout_s=30)


# A rank that does one more step or runs out of data: DeepSpeed#2223, pytorch#38174.
@pytest.mark.parametrize("extra", ["evaluation", "forward", "step"])
def test_a_rank_with_one_batch_more_ends_in_a_named_error(extra):
    def body(rank, world_size):
        script = Script(rank, mesh=impatient())
        script.train(range(2))
        script.evaluate()
        if rank == 1:
            return
        acts = {"evaluation": script.evaluate, "forward": lambda: script.loss(2)}
        with named_error("blocks", "unit", "gather"):
            acts.get(extra, lambda: script.step(2))()

    run(body, timeout_s=30)


ORDERS = {
    "crossed": ((0, 1, 2, 3), (1, 0, 2, 3)),
    "skipped": ((0, 1, 2, 3), (0, 2, 3)),
    "once more": ((0, 1, 2, 3), (0, 1, 0, 2, 3)),
    "other last": ((0, 1, 2), (0, 1, 3)),
}


# Modules called in a different order: pytorch#76949. Units of one size would be taken for another.
@pytest.mark.parametrize(
    ("orders", "act"),
    [
        ("crossed", "training"),
        ("crossed", "evaluation"),
        ("skipped", "training"),
        ("once more", "evaluation"),
        ("other last", "training"),
    ],
)
def test_ranks_that_enter_units_in_different_orders_are_told_so(orders, act):
    def body(rank, world_size):
        script = Script(rank, mesh=impatient())
        if act == "evaluation":
            script.train(range(2))
        script.model.order = ORDERS[orders][rank]
        # One rank may come to its end alone, where the other one waits for it from the start.
        with named_error("blocks", "unit", "gather", "reduc", kind=ZeroShardError):
            for step in range(2):
                script.step(step) if act == "training" else script.evaluate()

    run(body, timeout_s=30)


@pytest.mark.parametrize("act", ["training", "evaluation"])
def test_in_debug_mode_crossed_ranks_are_told_the_units_and_the_ranks(act):
    def body(rank, world_size):
        script = Script(rank, mesh=impatient())
        if act == "evaluation":
            script.train(range(2))
        script.model.order = ORDERS["crossed"][rank]
        with named_error(kind=ZeroShardError) as caught:
            script.step(2) if act == "training" else script.evaluate()
        message = str(caught.value)
        said = re.findall(r"rank ([01]): gather of [^;]*'(blocks\.\d)'", message)
        assert [side for side, _ in said] == ["0", "1"], message
        # Which units those are depends on what was gathered ahead.
        assert said[0][1] != said[1][1], message

    run(body, timeout_s=30, ZEROSHARD_DEBUG=1)


def test_in_debug_mode_a_rank_that_does_not_come_is_named_with_the_unit():
    def body(rank, world_size):
        script = Script(rank, mesh=impatient())
        script.train(range(2))
        if rank == 1:
            return
        with named_error() as caught:
            script.evaluate()
        message = str(caught.value)
        assert "rank 1" in message, message
        assert "unit" in message or "root" in message or "first" in message, message

    run(body, timeout_s=30, ZEROSHARD_DEBUG=1)


def test_debug_mode_changes_no_result():
    def body(rank, world_size):
        script = Script(rank, max_grad_norm=1.0)
        losses = []
        for step in range(3):
            script.model.order = ((0, 1, 2, 3), (2, 1), (3, 0, 0))[step]
            script.step(step)
            losses.append(float(script.evaluate()))
        return losses, script.weights()

    plain, checked = run(body), run(body, ZEROSHARD_DEBUG=1)
    for (losses, got), (wanted_losses, wanted) in zip(checked, plain, strict=True):
        assert losses == wanted_losses
        assert_same(got, wanted, "checked")


# --- timing must not matter


def around(wrap):
    """Let every optimizer built from here on (in this rank) talk through `wrap(transport)`."""
    connect = facade.connect
    facade.connect = lambda *args: wrap(connect(*args))


def bits_after(rank, steps, **options):
    """The weights after a training in which orders change, units are left out and some evaluate."""
    script = Script(rank, max_grad_norm=1.0, **options)
    orders = ((0, 1, 2, 3), (0, 1, 2, 3), (0, 2, 1, 3), (3, 1), (0, 1, 2, 3), (1, 1, 2))
    for step in range(steps):
        script.model.order = orders[step % len(orders)]
        script.step(step)
        if step % 7 == 3:
            script.evaluate()
        if step % 9 == 5:
            with script.optimizer.no_sync():
                script.loss(500 + step).backward()
    script.optimizer.zero_grad()
    return script.weights()


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
def test_delays_change_nothing_over_50_steps(options):
    def body(rank, world_size):
        expected = bits_after(rank, 50, stage=1)
        around(lambda transport: Delayed(transport, seed=rank, longest_s=0.0003))
        assert_same(bits_after(rank, 50, **options), expected, "delayed")

    run(body, timeout_s=120)


class AtTheLastMoment(Around):
    """What is gathered arrives when somebody waits for it; before that there is NaN."""

    def gather(self, bucket, shard, *, op):
        arrived = bucket.clone()
        self.inner.gather(arrived, shard, op=op).wait()
        bucket.fill_(torch.nan)
        return Arrival(bucket, arrived)


class Arrival:
    def __init__(self, bucket, arrived):
        self.bucket, self.arrived = bucket, arrived

    def wait(self):
        if self.arrived is not None:
            self.bucket.copy_(self.arrived)
            self.arrived = None


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
def test_everything_that_is_read_was_waited_for(options):
    def body(rank, world_size):
        expected = bits_after(rank, 12, stage=1)
        around(AtTheLastMoment)
        assert_same(bits_after(rank, 12, **options), expected, "at the last moment")

    run(body)


def test_a_missing_wait_is_seen():
    """The tests above can fail: take the wait out of unsharding, and they do."""

    def body(rank, world_size):
        expected = bits_after(rank, 4, stage=1)
        sharding.Sharding._drain = lambda self, unit: unit.pending.clear()
        around(AtTheLastMoment)
        got = bits_after(rank, 4)
        return any(not torch.equal(value, got[name]) for name, value in expected.items())

    assert run(body) == [True, True]
