"""The wire: counted, sized, delayed, checked."""

import dataclasses
import datetime
import itertools
import time

import pytest
import torch
import torch.distributed as dist
from models import letter_batches, letters, train
from ranks import run
from torch import nn

import zeroshard
from zeroshard import optimizer as facade
from zeroshard import schedule
from zeroshard.errors import CommunicationError, ConfigError
from zeroshard.layout import BLOCK
from zeroshard.storage import BufferPool
from zeroshard.transport import (
    Checked,
    Counting,
    Delayed,
    Op,
    Part,
    Replicated,
    WorldOfOne,
    connect,
)
from zeroshard.transport.breadcrumbs import Breadcrumbs


def around(wrap):
    """Let every optimizer built from here on (in this rank) talk through `wrap(transport)`."""
    made = []

    def wrapped(mesh, device):
        made.append(wrap(connect(mesh, device)))
        return made[-1]

    facade.connect = wrapped
    return made


# --- operations alone


def cut(flat, edges):
    return [Part(a, flat[a:b]) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_reduce_is_a_sum_in_rank_order_whatever_the_parts(world_size, spare):
    def body(rank, world_size):
        transport = connect(None, torch.device("cpu"))
        transport.buffers = BufferPool(spare=spare)
        generator = torch.Generator().manual_seed(0)
        numel = world_size * 2 * BLOCK
        whole = torch.randn(world_size, numel, generator=generator)
        expected = whole[0].clone()
        for other in whole[1:]:
            expected += other
        shards = []
        for number, edges in enumerate(([0, numel], [0, 5, 700, 701, numel], [0, 300, numel])):
            out = torch.full((2 * BLOCK,), torch.nan)
            seen = []
            transport.reduce(
                cut(whole[rank], edges),
                out,
                op=Op("reduce", bucket=number),
                sum_dtype=torch.float32,
                finish=lambda piece, seen=seen: seen.append(piece.numel()),
            ).wait()
            assert sum(seen) == 2 * BLOCK, "finish sees every element once"
            shards.append(out)
        for shard in shards:
            assert torch.equal(shard, expected.view(world_size, -1)[rank])

    run(body, world_size)


def test_padding_between_parts_is_left_alone():
    def body(rank, world_size):
        transport = connect(None, torch.device("cpu"))
        out = torch.full((BLOCK,), -1.0)
        parts = [Part(3, torch.ones(2)), Part(BLOCK + 3, torch.ones(2))]
        kind = {"op": Op("reduce"), "sum_dtype": torch.float32, "finish": lambda piece: None}
        transport.reduce(parts, out, **kind).wait()
        assert out[3:5].tolist() == [2.0, 2.0]
        assert bool((out[:3] == -1).all())
        assert bool((out[5:] == -1).all())

    run(body, 2)


def test_sixteen_bits_on_the_wire_are_summed_in_32():
    """1 + 2^-9 is no bf16 value: a sum in bf16 would round it to 1."""

    def body(rank, world_size):
        transport = connect(None, torch.device("cpu"))
        mine = torch.full((2 * BLOCK,), 1.0 if rank == 0 else 2.0**-9, dtype=torch.bfloat16)
        sums = {}
        for sum_dtype in (torch.float32, torch.bfloat16):
            out = torch.zeros(BLOCK)
            kind = {"op": Op("reduce"), "sum_dtype": sum_dtype, "finish": lambda piece: None}
            transport.reduce([Part(0, mine)], out, **kind).wait()
            sums[sum_dtype] = float(out[0])
        assert sums == {torch.float32: 1 + 2.0**-9, torch.bfloat16: 1.0}

    run(body, 2)


def own(bucket, transport):
    return bucket.chunk(transport.world_size)[transport.rank]


def gather_zeros(transport, numel=2 * BLOCK, *, op):
    bucket = torch.zeros(numel)
    return transport.gather(bucket, own(bucket, transport), op=op)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gather_fills_the_bucket_in_place(world_size):
    def body(rank, world_size):
        transport = connect(None, torch.device("cpu"))
        bucket = torch.full((world_size * BLOCK,), torch.nan)
        bucket.chunk(world_size)[rank].fill_(rank)
        transport.gather(bucket, own(bucket, transport), op=Op("gather")).wait()
        assert torch.equal(bucket, torch.arange(world_size).float().repeat_interleave(BLOCK))

    run(body, world_size)


def test_two_axes_reduce_over_both_and_gather_over_one():
    def body(rank, world_size):
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
        transport = connect(mesh, torch.device("cpu"))
        assert isinstance(transport, Replicated)
        assert (transport.world_size, transport.num_ranks) == (2, 4)
        out = torch.zeros(BLOCK)
        kind = {"op": Op("reduce"), "sum_dtype": torch.float32, "finish": lambda piece: None}
        mine = torch.full((2 * BLOCK,), 2.0**rank)
        transport.reduce([Part(0, mine)], out, **kind).wait()
        assert bool((out == 15).all())
        highest = torch.tensor([rank])
        transport.all_reduce(highest, "max", op=Op("flags")).wait()
        assert int(highest) == 3
        over_shards = torch.tensor([2**rank])
        transport.all_reduce(over_shards, "sum", op=Op("norm")).wait()
        assert int(over_shards) == (3 if rank < 2 else 12)
        first = torch.tensor([rank])
        transport.broadcast(first, op=Op("initial")).wait()
        assert int(first) == 0
        assert transport.all_gather_object(rank, op=Op("compare")) == [0, 1, 2, 3]

    run(body, 4)


def test_a_world_of_one_needs_no_wire():
    transport = WorldOfOne(distributed=False)
    out = torch.zeros(BLOCK)
    kind = {"op": Op("reduce"), "sum_dtype": torch.float32, "finish": lambda piece: piece.mul_(2)}
    transport.reduce([Part(4, torch.ones(3))], out, **kind).wait()
    assert float(out.sum()) == 6
    transport.gather(out, out, op=Op("gather")).wait()


# --- what a training step costs


class Wide(nn.Module):
    """Large enough that padding is below a percent."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_one_reduce_and_one_gather_a_bucket_and_step(stage, world_size):
    def body(rank, world_size):
        counted = around(Counting)
        for dtype, reduce, wire, gathered in (
            (torch.float32, "auto", 4, 4),
            (torch.bfloat16, "auto", 2, 2),
            (torch.bfloat16, "fp32", 4, 2),
        ):
            torch.manual_seed(0)
            model = Wide().to(dtype)
            precision = zeroshard.Precision(reduce=reduce)
            optimizer = zeroshard.AdamW(model, stage=stage, bucket_mb=0.2, precision=precision)
            counting = counted[-1]
            numel = sum(p.numel() for p in model.parameters())
            for _ in range(2):  # after the first step, in which the launch order is agreed
                counting.calls.clear()
                counting.nbytes.clear()
                model(torch.ones(2, 256, dtype=dtype)).float().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            buckets = len(optimizer.engine.layout.buckets)
            assert buckets > 1
            assert counting.calls == {
                "reduce": buckets,
                "gather": buckets,
                "use of parameters": 1,
                "flags": 1,
            }
            share = numel * (world_size - 1) / world_size
            assert counting.nbytes["reduce"] == pytest.approx(wire * share, rel=0.01)
            assert counting.nbytes["gather"] == pytest.approx(gathered * share, rel=0.01)
            small = counting.nbytes["use of parameters"] + counting.nbytes["flags"]
            assert small < 100

    run(body, world_size)


def test_a_large_gradient_is_sent_from_where_it_lies():
    """No packed copy, and no buffer but the one that the other rank's slice arrives in."""

    def body(rank, world_size):
        model = nn.Linear(512, 512, bias=False)
        optimizer = zeroshard.AdamW(model, stage=1)
        model(torch.ones(1, 512)).sum().backward()
        assert optimizer.memory()["communication"] == model.weight.nbytes / 2

    run(body, 2)


# --- timing must not matter


def bits_after(steps, stage, rank):
    model = letters()
    optimizer = zeroshard.AdamW(model, lr=1e-2, stage=stage, bucket_mb=0.002, max_grad_norm=1.0)
    batches = [letter_batches(rank)[step % 6] for step in range(steps)]
    return train(model, optimizer, batches)


@pytest.mark.parametrize("stage", [1, 2])
def test_delays_change_nothing_over_50_steps(stage):
    def body(rank, world_size):
        expected = bits_after(50, stage, rank)
        around(lambda transport: Delayed(transport, seed=rank, longest_s=0.0005))
        got = bits_after(50, stage, rank)
        for name, value in expected.items():
            assert torch.equal(value, got[name]), name

    run(body, 2, timeout_s=120)


@pytest.mark.parametrize("event", [schedule.Event.BACKWARD_END, schedule.Event.STEP])
def test_a_missing_wait_is_seen_under_delays(event):
    """The test above can fail: take one wait out of the table, and it does."""

    def body(rank, world_size):
        expected = bits_after(4, 2, rank)
        compiled = schedule.compile_schedule

        def without_wait(options):
            planned = compiled(options)
            actions = tuple(a for a in planned.table[event] if a is not schedule.Action.WAIT)
            table = {**planned.table, event: actions}
            return dataclasses.replace(planned, table=table, in_flight=1000)

        from zeroshard import engine

        engine.compile_schedule = without_wait
        around(lambda transport: Delayed(transport, seed=rank, longest_s=0.01))
        got = bits_after(4, 2, rank)
        return any(not torch.equal(value, got[name]) for name, value in expected.items())

    assert run(body, 2) == [True, True]


# --- ranks that come apart


def test_the_check_names_ranks_that_do_different_things():
    def body(rank, world_size):
        inner = connect(None, torch.device("cpu"))
        checked = Checked(inner, [0, 1], datetime.timedelta(seconds=5))
        gather_zeros(checked, op=Op("gather", bucket=1)).wait()
        with pytest.raises(CommunicationError) as raised:
            gather_zeros(checked, op=Op("gather", bucket=2 + rank))
        message = str(raised.value)
        assert "rank 0: gather of bucket 2" in message
        assert "rank 1: gather of bucket 3" in message

    run(body, 2)


def test_the_check_names_a_rank_that_does_not_come():
    def body(rank, world_size):
        inner = connect(None, torch.device("cpu"))
        checked = Checked(inner, [0, 1], datetime.timedelta(seconds=1))
        gather_zeros(checked, op=Op("gather", bucket=1, round=4)).wait()
        if rank == 1:
            return
        began = time.monotonic()
        with pytest.raises(CommunicationError, match=r"rank 1 did not come within 1 s") as raised:
            gather_zeros(checked, op=Op("gather", bucket=2))
        assert "its last was operation 1: gather of bucket 1 (step 4)" in str(raised.value)
        assert time.monotonic() - began < 10

    run(body, 2)


def test_messages_of_other_operations_never_meet():
    """Crossed ranks would end gloo's process by a message of the wrong size; here they wait."""

    def body(rank, world_size):
        transport = connect(None, torch.device("cpu"))
        numel = (2 + 2 * rank) * BLOCK
        with pytest.raises(CommunicationError, match=f"gather of bucket {rank}"):
            gather_zeros(transport, numel, op=Op("gather", bucket=rank)).wait()

    run(body, 2, timeout_s=16.0)  # they wait for half of that


def test_a_stuck_operation_is_logged_before_the_watchdog_ends_the_process(caplog):
    breadcrumbs = Breadcrumbs(timeout_s=0.4)
    breadcrumbs.watch(Op("reduce", bucket=1, round=2), lambda: True)
    breadcrumbs.watch(Op("gather", bucket=3, round=2), lambda: False)
    deadline = time.monotonic() + 5
    while not caplog.records and time.monotonic() < deadline:
        time.sleep(0.02)
    (record,) = caplog.records
    assert "gather of bucket 3 (step 2)" in record.getMessage()


def test_what_one_rank_cannot_train_is_heard_of_on_every_rank():
    def body(rank, world_size):
        model = nn.Linear(3, 3).to(torch.float64 if rank else torch.float32)
        with pytest.raises(ConfigError, match="float64") as raised:
            zeroshard.AdamW(model)
        assert "rank [1]" in str(raised.value)

    run(body, 2)
