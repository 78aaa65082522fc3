"""The update on shards: bitwise torch's fused AdamW on the whole tensor."""

import pytest
import torch

from zeroshard.config import Precision
from zeroshard.conversions import exact_master, reread_master, restore_master, seed_master
from zeroshard.formats import state_format
from zeroshard.layout import ParamSpec, plan_layout
from zeroshard.storage import Arena
from zeroshard.torch_update import TorchUpdater

GROUP = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
SHAPES = [(70, 33), (5,), (), (2000,), (0, 4)]
ALL = dict.fromkeys(range(len(SHAPES)), 0)  # every slot is of the first param group


def contiguous_stride(shape):
    return torch.empty(shape).stride()


def arenas_of(dtype, world_size, precision, bucket_nbytes=6000):
    specs = [
        ParamSpec(
            name=str(i), shape=shape, stride=contiguous_stride(shape), dtype=dtype, device="cpu"
        )
        for i, shape in enumerate(SHAPES)
    ]
    layout = plan_layout(specs, world_size=world_size, bucket_nbytes=bucket_nbytes)
    fmt = state_format(dtype, precision)
    torch.manual_seed(0)
    values = [torch.randn(shape).to(getattr(torch, dtype)) for shape in SHAPES]
    arenas = []
    for rank in range(world_size):
        (plan,) = layout.arenas
        arena = Arena(plan, layout.world_size, rank)
        arena.parameters.zero_()
        arena.allocate_gradients()
        arena.allocate_state(fmt.fields)
        for slot in layout.slots:
            whole = values[slot.index].flatten()
            arena.parameters[slot.offset : slot.offset + slot.numel].copy_(whole)
        arenas.append(arena)
    return layout, fmt, arenas, values


def set_gradients(layout, arena, gradients):
    for run in layout.runs:
        if run.rank == arena.rank:
            piece = gradients[run.slot].flatten()[run.slot_offset : run.slot_offset + run.numel]
            arena.gradients[run.shard_offset : run.shard_offset + run.numel].copy_(piece)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("maximize", [False, True])
def test_shards_of_any_world_are_bitwise_the_whole(world_size, maximize):
    layout, fmt, arenas, values = arenas_of("float32", world_size, Precision())
    parameters = [torch.nn.Parameter(value.clone()) for value in values]
    plain = torch.optim.AdamW(parameters, fused=True, **{**GROUP, "maximize": maximize})
    steps = [torch.zeros(()) for _ in layout.slots]
    updaters = [TorchUpdater(arena, layout, fmt, steps) for arena in arenas]
    group = {**GROUP, "maximize": maximize}
    for _ in range(3):
        gradients = [torch.randn(shape) for shape in SHAPES]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        plain.step()
        torch._foreach_add_(steps, 1)
        for arena, updater in zip(arenas, updaters, strict=True):
            set_gradients(layout, arena, gradients)
            for buckets in updater.plan(ALL, [bucket.index for bucket in layout.buckets]):
                updater.update(buckets, [group], None)
    for run in layout.runs:
        ours = arenas[run.rank].parameters[run.arena_offset : run.arena_offset + run.numel]
        whole = parameters[run.slot].detach().flatten()
        assert torch.equal(ours, whole[run.slot_offset : run.slot_offset + run.numel])


@pytest.mark.parametrize("master", ["split", "fp32"])
def test_masters_of_both_kinds_are_bitwise_an_fp32_training(master):
    layout, fmt, (arena,), values = arenas_of("bfloat16", 1, Precision(master=master))
    for bucket in layout.buckets:
        shard = arena.parameter_shard(bucket.index)
        stop = bucket.shard_offset + bucket.shard_numel
        state = arena.state_of(bucket.shard_offset, stop)
        seed_master(shard.float(), shard, state, fmt.master)
    parameters = [torch.nn.Parameter(value.float()) for value in values]
    plain = torch.optim.AdamW(parameters, fused=True, **GROUP)
    steps = [torch.zeros(()) for _ in layout.slots]
    updater = TorchUpdater(arena, layout, fmt, steps)
    for _ in range(3):
        gradients = [torch.randn(shape) for shape in SHAPES]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        plain.step()
        torch._foreach_add_(steps, 1)
        set_gradients(layout, arena, gradients)
        for buckets in updater.plan(ALL, [bucket.index for bucket in layout.buckets]):
            updater.update(buckets, [GROUP], None)
    for run in layout.runs:
        where = slice(run.shard_offset, run.shard_offset + run.numel)
        state = {name: flat[where] for name, flat in arena.state.items()}
        ours = arena.parameters[run.arena_offset : run.arena_offset + run.numel]
        expected = parameters[run.slot].detach().flatten()
        expected = expected[run.slot_offset : run.slot_offset + run.numel]
        assert torch.equal(exact_master(ours, state), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_skipped_step_moves_no_bit_and_padding_stays_zero(dtype):
    layout, fmt, (arena,), _ = arenas_of(dtype, 1, Precision())
    updater = TorchUpdater(arena, layout, fmt, [torch.zeros(()) for _ in layout.slots])
    before = arena.parameters.clone()
    arena.gradients.fill_(torch.inf)
    for buckets in updater.plan(ALL, [bucket.index for bucket in layout.buckets]):
        updater.update(buckets, [GROUP], torch.ones(1))
    assert torch.equal(arena.parameters, before)
    assert not any(bool(flat.any()) for flat in arena.state.values())
    arena.gradients.zero_()
    set_gradients(layout, arena, [torch.randn(shape) for shape in SHAPES])
    for buckets in updater.plan(ALL, [bucket.index for bucket in layout.buckets]):
        updater.update(buckets, [GROUP], torch.zeros(1))
    real = torch.zeros(arena.plan.numel, dtype=torch.bool)
    for slot in layout.slots:
        real[slot.offset : slot.offset + slot.numel] = True
    assert not bool(arena.parameters[~real].any())
    assert not any(bool(flat[~real].any()) for flat in arena.state.values())


def test_a_written_parameter_keeps_the_masters_it_did_not_touch():
    parameter = torch.tensor([1.0, 2.0]).bfloat16()
    state = {"master": torch.tensor([1.0001, 2.0001])}
    parameter[0] = 5
    reread_master(parameter, state, torch.tensor([True, True]))
    assert state["master"].tolist() == pytest.approx([5.0, 2.0001])


def test_a_restored_split_master_is_exact_or_one_step_off_at_a_tie():
    master = torch.tensor([1.0 + 2.0**-8, 1.25, 7.0])  # the first is a tie of two bf16 values
    even = master.bfloat16()
    state = {"remainder": torch.full((3,), 9, dtype=torch.int16)}
    even[2] = -3.0  # changed since
    restore_master(master, even, state)
    back = exact_master(even, state)
    assert back[1] == 1.25
    assert back[2] == -3.0
    assert abs(float(back[0] - master[0])) <= 2.0**-23
