"""What stage 3 holds at every moment and sends in every step, counted from outside.

Bytes are those of the storages of all tensors that Python can reach, each once, and those that
torch's allocator has handed out; never what the optimizer says about itself.
"""

import contextlib
import dataclasses
import gc

import pytest
import torch
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import zeroshard
from zeroshard import optimizer as facade
from zeroshard.transport import Counting

WIDTH = 128
NUM_BLOCKS = 8
BLOCK_NUMEL = 2 * WIDTH * WIDTH  # whole shards at two to four ranks: no padding
ROOT_NUMEL = WIDTH * WIDTH
NUMEL = NUM_BLOCKS * BLOCK_NUMEL + ROOT_NUMEL
BLOCK_BYTES, ROOT_BYTES = 4 * BLOCK_NUMEL, 4 * ROOT_NUMEL
# Inputs, activations and their gradients, losses, step counters, tables of hyperparameters: all
# that is not weights, gradients or moments. A tenth of a unit; the smallest fault is a whole one.
SMALL = BLOCK_BYTES // 10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, pack=None, unpack=None):
        x = x if isinstance(x, torch.Tensor) else unpack(x)
        y = x + self.down(torch.tanh(self.up(x)))
        return y if pack is None else pack(y)


class Stack(nn.Module):
    """Equal blocks below a smaller root. `between` is called with what goes from one to the next.

    Nothing of the measurement touches the parameters or the modules' hooks, so that it is the same
    for every way of sharding.
    """

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.between = lambda index, x: None
        self.give = self.pack = self.unpack = None
        self.checkpointing = self.skipped = None

    def forward(self, x):
        if self.checkpointing:
            x = x.clone().requires_grad_()  # re-entrant checkpointing needs such an input
        for index, block in enumerate(self.blocks):
            self.between(index, x)
            if index == self.skipped:
                continue
            if self.pack is not None:
                x = self.unpack(block(self.give(x), self.pack, self.unpack))
            elif self.checkpointing is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing, preserve_rng_state=False)
        self.between(NUM_BLOCKS, x)
        return self.last(x)


def live_bytes():
    """Bytes of the storages of all tensors that Python can reach, each once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor):
            continue
        # The gradient of a leaf is a Python object only once someone asks for it.
        for tensor in (thing, thing.grad if thing.is_leaf else None):
            if tensor is not None:
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                storage = local.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


class Watch:
    """Trains a model and counts its bytes at every boundary of its blocks, in both directions."""

    def __init__(self, build, rank):
        self.before = live_bytes()
        torch.manual_seed(0)
        self.model, self.optimizer = build()
        self.model.between = self.between
        self.x = torch.full((1, WIDTH), 0.1 + rank)
        self.forward, self.backward = {}, {}

    def now(self):
        return live_bytes() - self.before

    def between(self, index, x):
        # A recomputed forward of a checkpoint does not come here.
        self.forward[index] = self.now()
        if x.requires_grad:
            x.register_hook(lambda gradient: self.backward.update({index: self.now()}))

    def step(self):
        """One step; returns the bytes after each of its parts and the most in backward."""
        self.forward.clear()
        self.backward.clear()
        found = {}
        loss = self.model(self.x).square().mean()
        found["after forward"] = self.now()
        loss.backward()
        found["in backward"] = max(self.backward.values())
        found["after backward"] = self.now()
        self.optimizer.step()
        found["after step"] = self.now()
        self.optimizer.zero_grad()
        return found

    def step_unwatched(self):
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def settled(self):
        """The third step: launch order and order of units are known, all state is there."""
        return [self.step() for _ in range(3)][-1]


def with_stage(stage, checkpointing=None, **options):
    def build():
        model = Stack()
        model.checkpointing = checkpointing
        # A bucket to a block: what stage 2 holds during backward is a few of those.
        options.setdefault("bucket_mb", BLOCK_BYTES / 2**20)
        return model, zeroshard.AdamW(model, stage=stage, **options)

    return build


def with_fsdp():
    model = Stack()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def rest_of(world_size):
    """Shards of weights, gradients and two moments: all that stage 3 holds after backward."""
    return 4 * 4 * NUMEL / world_size


def bare_of(world_size):
    """The same without gradients: all that it holds from zero_grad() to backward."""
    return 3 * 4 * NUMEL / world_size


def whole_bytes(model):
    """Bytes of the parameters that can be read."""
    return sum(p.nbytes for p in model.parameters() if not p.detach().isnan().any())


# --- held


def test_stages_hold_less_and_less_at_every_moment():
    def body(rank, world_size):
        found = {stage: Watch(with_stage(stage), rank).settled() for stage in (1, 2, 3)}
        for when in found[1]:
            first, second, third = (found[stage][when] for stage in (1, 2, 3))
            assert third < second < first, f"{when}: {first}, {second}, {third} bytes"
        # What is between them at rest is at least the weights that other ranks hold.
        gained = found[2]["after step"] - found[3]["after step"]
        assert gained >= 4 * NUMEL * (1 - 1 / world_size) - SMALL

    run(body)


@pytest.mark.parametrize("world_size", [2, 4])
def test_between_steps_stage_3_holds_shards_only(world_size):
    def body(rank, world_size):
        watch = Watch(with_stage(3), rank)
        rest = rest_of(world_size)
        assert watch.now() <= rest + SMALL, "after construction"
        for step in range(3):
            found = watch.step()
            for when in ("after backward", "after step"):
                assert abs(found[when] - rest) <= SMALL, f"step {step}, {when}: {found}, {rest}"
        assert whole_bytes(watch.model) == 0

    run(body, world_size)


@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_at_most_the_root_and_two_units_are_whole_at_any_boundary(checkpointing):
    def body(rank, world_size):
        rest, units = rest_of(world_size), ROOT_BYTES + 2 * BLOCK_BYTES
        # The whole gradients of one unit; re-entrant checkpointing enters the next one later.
        under_way = BLOCK_BYTES * (2 if checkpointing else 1)
        watch = Watch(with_stage(3, checkpointing), rank)
        for step in range(3):  # the first knows no order yet
            found = watch.step()
            assert len(watch.forward) == NUM_BLOCKS + 1
            assert len(watch.backward) >= NUM_BLOCKS
            for index, held in [*watch.forward.items(), ("last", found["after forward"])]:
                bare = bare_of(world_size)
                assert held <= bare + units + SMALL, f"step {step}, forward, {index}"
            for index, held in watch.backward.items():
                assert held <= rest + units + under_way + SMALL, f"step {step}, backward, {index}"

    run(body)


@dataclasses.dataclass
class Packet:
    hidden: torch.Tensor


PACKED = {
    "tuples": (lambda x: (None, x), lambda packed: packed[1]),
    "lists": (lambda x: [x], lambda packed: packed[0]),
    "dicts": (lambda x: {"x": x}, lambda packed: packed["x"]),
    "dataclasses": (Packet, lambda packed: packed.hidden),
}


@pytest.mark.parametrize("packing", PACKED)
def test_units_that_take_and_give_containers_are_freed_as_early(packing):
    def body(rank, world_size):
        pack, unpack = PACKED[packing]
        watch = Watch(with_stage(3), rank)
        model = watch.model
        model.pack, model.unpack = pack, unpack
        model.give = pack if packing != "dataclasses" else lambda x: x
        watch.settled()
        most = ROOT_BYTES + 2 * BLOCK_BYTES + SMALL
        assert max(watch.forward.values()) <= bare_of(world_size) + most
        # The whole gradients of one block are under way.
        assert max(watch.backward.values()) <= rest_of(world_size) + most + BLOCK_BYTES

    run(body)


def test_every_byte_that_can_be_read_is_counted_and_hardly_more():
    """The counts above see what is whole: at a boundary it is the root and the next unit ahead."""

    def body(rank, world_size):
        watch, readable = Watch(with_stage(3), rank), {}
        count = watch.between
        watch.model.between = lambda index, x: (
            count(index, x),
            readable.update({index: whole_bytes(watch.model)}),
        )
        for _ in range(3):
            watch.step()
            for index, held in watch.forward.items():
                assert readable[index] >= ROOT_BYTES
                assert held >= bare_of(world_size) + readable[index] - SMALL, index

    run(body)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_holds_the_root_and_two_units_and_lets_go(mode):
    def body(rank, world_size):
        watch = Watch(with_stage(3), rank)
        watch.settled()
        rest = bare_of(world_size)
        for _ in range(3):
            watch.forward.clear()
            with mode():
                watch.model(watch.x)
            assert len(watch.forward) == NUM_BLOCKS + 1
            most = max(watch.forward.values())
            assert rest + ROOT_BYTES - SMALL <= most <= rest + ROOT_BYTES + 2 * BLOCK_BYTES + SMALL
            assert abs(watch.now() - rest) <= SMALL

    run(body)


def test_without_resharding_after_forward_units_are_kept_until_their_backward():
    def body(rank, world_size):
        watch = Watch(with_stage(3, reshard_after_forward=False), rank)
        found = watch.settled()
        rest = rest_of(world_size)
        assert abs(found["after forward"] - bare_of(world_size) - 4 * NUMEL) <= SMALL
        assert abs(found["after backward"] - rest) <= SMALL
        # Towards the end of backward the units above have gone: at 2 only the lowest two are left,
        # and the gradients of the one above are under way.
        most = rest + ROOT_BYTES + 3 * BLOCK_BYTES
        assert watch.backward[2] <= most + SMALL

    run(body)


# litgpt#1417: memory as if the frozen part were trained.
@pytest.mark.parametrize("where", ["blocks", "lower half"])
def test_frozen_parameters_cost_their_shard_and_nothing_more(where):
    def body(rank, world_size):
        num_frozen = NUM_BLOCKS if where == "blocks" else NUM_BLOCKS // 2

        def build():
            model = Stack()
            model.blocks[:num_frozen].requires_grad_(False)
            trained = [p for p in model.parameters() if p.requires_grad]
            bucket_mb = BLOCK_BYTES / 2**20
            return model, zeroshard.AdamW(trained, model=model, stage=3, bucket_mb=bucket_mb)

        watch = Watch(build, rank)
        rest = (3 * 4 * NUMEL - 2 * 4 * num_frozen * BLOCK_NUMEL) / world_size
        for _ in range(3):
            watch.forward.clear()
            loss = watch.model(watch.x).square().mean()
            most = max(watch.forward.values())
            assert most <= rest + ROOT_BYTES + 2 * BLOCK_BYTES + SMALL
            loss.backward()
            watch.optimizer.step()
            watch.optimizer.zero_grad()
            assert abs(watch.now() - rest) <= SMALL

    run(body)


def test_many_steps_hold_no_more_than_the_third():
    def body(rank, world_size):
        watch = Watch(with_stage(3), rank)
        first = watch.settled()
        for step in range(3):
            with torch.no_grad():
                watch.model(watch.x)
            found = watch.step()
            for when, held in found.items():
                # A collection more or less of what one step leaves to the next.
                assert held <= first[when] + SMALL, f"step {step}, {when}"

    run(body)


def test_a_forward_whose_loss_is_dropped_leaves_shards_after_the_next_step():
    def body(rank, world_size):
        watch = Watch(with_stage(3), rank)
        watch.settled()
        for _ in range(3):
            watch.model(watch.x)
        held = watch.now()
        assert held <= bare_of(world_size) + ROOT_BYTES + 2 * BLOCK_BYTES + SMALL
        assert abs(watch.step()["after step"] - rest_of(world_size)) <= SMALL

    run(body)


# --- beside FSDP2


def counted_peak(build, rank):
    """The most bytes at any boundary of a third step."""
    watch = Watch(build, rank)
    found = watch.settled()
    return max(*found.values(), *watch.forward.values(), *watch.backward.values())


def test_the_peak_counted_at_the_same_points_is_at_most_fsdps():
    def body(rank, world_size):
        ours, theirs = (counted_peak(build, rank) for build in (with_stage(3), with_fsdp))
        # Tables of the optimizer, of some bytes a parameter, which are no tensors under FSDP2.
        tables = 32 * (2 * NUM_BLOCKS + 1)
        assert rest_of(world_size) + ROOT_BYTES <= ours <= theirs + tables, (ours, theirs)

    run(body)


def allocated_peak(build, rank):
    """The most bytes that torch's CPU allocator had handed out at once during a third step.

    Tensors that only C++ knows count here, buffers and temporaries too.
    """
    gc.collect()  # what an earlier optimizer left must not be freed meanwhile
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        watch = Watch(build, rank)
        watch.model.between = lambda index, x: None
        for _ in range(2):
            watch.step_unwatched()
        with torch.profiler.record_function("third step"):
            watch.step_unwatched()
    events = profiler.profiler.kineto_results.events()
    (third,) = [event for event in events if event.name() == "third step"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            if third.start_ns() <= event.start_ns() <= third.end_ns():
                peak = max(peak, held)
    return peak


# Not beside FSDP2: gloo's threads free much of what that allocates, which a profile does not see.
def test_the_peak_that_the_allocator_saw_is_that_of_the_design():
    def body(rank, world_size):
        peak = allocated_peak(with_stage(3), rank)
        whole = ROOT_BYTES + 2 * BLOCK_BYTES
        # As at the boundaries, and the gradient of the block that backward is inside of.
        gradients = BLOCK_BYTES + (2 * BLOCK_BYTES + ROOT_BYTES) * (1 + 1 / world_size)
        rest = rest_of(world_size)
        assert rest + whole <= peak <= rest + whole + gradients + SMALL, (peak, rest)

    run(body)


# --- sent


def counted():
    """Lets the next optimizer (of this rank) talk through a transport that counts."""
    made, connect = [], facade.connect

    def wrapped(*args):
        made.append(Counting(connect(*args)))
        return made[-1]

    facade.connect = wrapped
    return made


class Wire:
    """A model under stage 3 and the bytes and operations of one step of it, on one rank."""

    def __init__(self, rank, world_size, checkpointing=None, **options):
        made = counted()
        torch.manual_seed(0)
        self.model, self.optimizer = with_stage(3, checkpointing, **options)()
        self.counting, self.share = made[-1], (world_size - 1) / world_size
        self.x = torch.full((1, WIDTH), 0.1 + rank)

    def of(self, act):
        """Elements sent by phase, as multiples of (W - 1) / W of a tensor, and operations."""
        self.counting.calls.clear()
        self.counting.nbytes.clear()
        act()
        sent = {phase: n / 4 / self.share for phase, n in self.counting.nbytes.items()}
        return sent, dict(self.counting.calls)

    def loss(self):
        return self.model(self.x).square().mean()

    def step(self):
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("checkpointing", [None, True, False])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_sends_three_times_the_model_and_the_root_twice(world_size, checkpointing):
    def body(rank, world_size):
        wire = Wire(rank, world_size, checkpointing)
        for _ in range(2):
            wire.of(wire.step)
        sent, calls = wire.of(wire.step)
        assert sent["reduce"] == NUMEL
        assert sent["gather"] <= 2 * NUMEL - ROOT_NUMEL
        # Flags and the use of parameters: numbers, not tensors.
        assert sum(sent.values()) <= 3 * NUMEL - ROOT_NUMEL + 100, sent
        assert calls["reduce"] == NUM_BLOCKS + 1
        assert calls["gather"] <= 2 * NUM_BLOCKS + 1
        assert sum(calls.values()) <= 3 * NUM_BLOCKS + 2 + 3, calls

    run(body, world_size)


def test_the_first_step_sends_no_more_than_the_following():
    def body(rank, world_size):
        wire = Wire(rank, world_size)
        sent, _ = wire.of(wire.step)
        assert sent["reduce"] == NUMEL
        assert sent["gather"] <= 2 * NUMEL - ROOT_NUMEL

    run(body)


def test_the_last_unit_of_a_forward_is_gathered_once():
    def body(rank, world_size):
        wire = Wire(rank, world_size)
        for _ in range(3):
            sent, calls = wire.of(wire.step)
        assert sent["gather"] == 2 * NUMEL - ROOT_NUMEL - BLOCK_NUMEL
        assert calls["gather"] == 2 * NUM_BLOCKS

    run(body)


def test_without_resharding_after_forward_every_unit_is_gathered_once():
    def body(rank, world_size):
        wire = Wire(rank, world_size, reshard_after_forward=False)
        for _ in range(3):
            sent, _ = wire.of(wire.step)
            assert sent["gather"] == NUMEL
            assert sent["reduce"] == NUMEL

    run(body)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_gathers_every_unit_once_and_reduces_nothing(mode):
    def body(rank, world_size):
        wire = Wire(rank, world_size)
        wire.step()

        def evaluate():
            with mode():
                wire.model(wire.x)

        for _ in range(3):
            sent, calls = wire.of(evaluate)
            assert sent == {"gather": NUMEL}
            assert calls == {"gather": NUM_BLOCKS + 1}

    run(body)


def test_a_step_and_what_may_not_communicate_gather_nothing():
    def body(rank, world_size):
        wire = Wire(rank, world_size)
        wire.step()
        wire.loss().backward()
        _, calls = wire.of(wire.optimizer.step)
        assert "gather" not in calls
        assert "reduce" not in calls

        def ask():
            repr(wire.optimizer)
            wire.optimizer.state_dict()
            wire.model.state_dict()
            wire.optimizer.memory()
            wire.optimizer.zero_grad()

        assert wire.of(ask) == ({}, {})

    run(body)


@pytest.mark.parametrize("deferred", [False, True])
def test_accumulation_reduces_once_a_synced_backward(deferred):
    def body(rank, world_size):
        wire = Wire(rank, world_size)
        wire.step()

        def accumulate():
            for micro in range(3):
                late = deferred and micro < 2
                with wire.optimizer.no_sync() if late else contextlib.nullcontext():
                    wire.loss().backward()
            wire.optimizer.step()
            wire.optimizer.zero_grad()

        for _ in range(2):
            sent, _ = wire.of(accumulate)
            assert sent["reduce"] == (1 if deferred else 3) * NUMEL
            assert sent["gather"] <= 3 * (2 * NUMEL - ROOT_NUMEL)

    run(body)


# A changed order is a miss, never an error: the unit that was expected may come in vain.
def test_a_unit_that_is_left_out_costs_at_most_the_gathers_ahead_of_it():
    def body(rank, world_size):
        wire = Wire(rank, world_size)
        for _ in range(3):
            wire.step()
        wire.model.skipped = 4
        for _ in range(3):
            sent, _ = wire.of(wire.step)
            assert sent["reduce"] <= NUMEL
            assert sent["gather"] <= 2 * NUMEL - ROOT_NUMEL

    run(body)
