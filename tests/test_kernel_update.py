"""The tables of the one-launch update, and its place in the optimizer."""

import math
import warnings

import pytest
import ranks
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zeroshard
from zeroshard import kernel_update, update
from zeroshard.config import Precision
from zeroshard.formats import state_format
from zeroshard.kernel_update import KernelUpdater, SlotScalars, first_blocks, plan_rows
from zeroshard.layout import ParamSpec, plan_layout
from zeroshard.storage import Arena
from zeroshard.triton_kernels.adamw import LEAST_EPS, ROW_BLOCKS, Scalars

GROUP = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}


def layout_of(numels, world_size, bucket_nbytes):
    specs = [
        ParamSpec(name=str(i), shape=(n,), stride=(1,), dtype="float32", device="cpu")
        for i, n in enumerate(numels)
    ]
    return plan_layout(specs, world_size=world_size, bucket_nbytes=bucket_nbytes)


@given(
    st.lists(st.integers(0, 40_000), min_size=1, max_size=6),
    st.integers(1, 4),
    st.sampled_from([1, 20_000, 2**30]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_rows_cover_every_element_once_and_know_its_place_in_model_space(
    numels, world_size, bucket_nbytes, sharded
):
    layout = layout_of(numels, world_size, bucket_nbytes)
    starts, first_block = 0, []
    for numel in numels:
        first_block.append(starts)
        starts += -(-numel // 256)
    seen = []
    for arena in layout.arenas:
        buckets = [bucket.index for bucket in arena.buckets]
        for rank in range(world_size):
            rows, rows_of = plan_rows(layout, buckets, rank, first_block, sharded=sharded)
            assert [rows_of[b][0] for b in buckets] + [len(rows)] == [
                0,
                *(rows_of[b][1] for b in buckets),
            ]
            for bucket in buckets:
                for row in rows[slice(*rows_of[bucket])]:
                    state, parameter, length, slot, key = row
                    assert 1 <= length <= ROW_BLOCKS
                    plan = layout.buckets[bucket]
                    shard = plan.shard_offset // 256
                    assert shard <= state
                    assert state + length <= shard + plan.shard_numel // 256
                    whole = (plan.offset + rank * plan.shard_numel) // 256 + state - shard
                    assert parameter == (state if sharded else whole)
                    in_slot = whole - layout.slots[slot].offset // 256
                    assert key == first_block[slot] + in_slot
                    seen += [(slot, in_slot + i) for i in range(length)]
    expected = [(i, b) for i, numel in enumerate(numels) for b in range(-(-numel // 256))]
    assert sorted(seen) == expected


def test_model_space_follows_the_param_groups_and_counts_frozen_parameters():
    sizes = [(300,), (), (0,), (256,)]
    parameters = [nn.Parameter(torch.zeros(size), requires_grad=size != ()) for size in sizes]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    assert list(first_blocks(groups).values()) == [0, 2, 3, 3]


def scalars_of(groups, group_of, counts, found_inf=None):
    scalars = SlotScalars(len(counts), torch.device("cpu"))
    scalars.plan(group_of)
    scalars.refresh(groups, torch.tensor(counts), found_inf)
    return [Scalars(*row.tolist()) for row in scalars.table]


def test_scalars_are_those_of_float64_rounded_once():
    groups = [GROUP, {**GROUP, "lr": torch.tensor(3e-4), "maximize": True, "betas": (0.8, 0.95)}]
    first, second, third = scalars_of(groups, {0: 0, 1: 1}, [1.0, 1000.0, 0.0])

    def fp32(value):
        return torch.tensor(value, dtype=torch.float64).float().item()

    assert first.one_minus_beta2 == fp32(1 - 0.999)
    assert first.correction == fp32(1 / math.sqrt(1 - 0.999))
    assert first.step_size == fp32(1e-2 / (1 - 0.9))
    assert first.lr_decay == fp32(1e-2 * 0.1)
    assert (first.sign, first.step, first.live) == (1, 1, 1)
    lr = float(torch.tensor(3e-4))
    assert second.step_size == fp32(lr / (1 - 0.8**1000))
    assert (second.sign, second.step, second.live) == (-1, 1000, 1)
    assert third.live == 0
    assert all(math.isfinite(value) for value in third)


def test_a_skipped_step_leaves_nothing_live_and_eps_is_never_zero():
    (scalars,) = scalars_of([{**GROUP, "eps": 0.0}], {0: 0}, [0.0], torch.ones(1))
    assert scalars.live == 0
    assert scalars.eps == LEAST_EPS > 0


@pytest.mark.parametrize(
    "betas", [(0.9, 0.999), (0.9, 0.81), (0.95, 0.9), (0.0, 0.999), (0.0, 0.0)]
)
def test_the_bound_is_the_largest_update_of_exact_adamw(betas):
    """The equality case of Cauchy-Schwarz: gradients that fall as (b1 / b2)^i going back."""
    steps = 6
    (scalars,) = scalars_of([{**GROUP, "betas": betas}], {0: 0}, [float(steps)])
    beta1, beta2 = betas
    m = v = 0.0
    for step in range(steps):
        back = steps - 1 - step
        gradient = (beta1 / beta2) ** back if beta2 else float(back == 0)
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
    largest = m / math.sqrt(v / (1 - beta2**steps))  # the step size corrects m
    assert scalars.bound == pytest.approx(largest, rel=1e-6)


def test_options_that_change_between_steps_are_seen():
    group = dict(GROUP)
    scalars = SlotScalars(1, torch.device("cpu"))
    scalars.plan({0: 0})
    for key, value in (("lr", 0.5), ("betas", (0.5, 0.75)), ("weight_decay", 0.0), ("lr", 0.0)):
        group[key] = value
        scalars.refresh([group], torch.ones(1), None)
        fresh = scalars_of([group], {0: 0}, [1.0])[0]
        assert Scalars(*scalars.table[0].tolist()) == fresh
    assert fresh.step_size == 0


def test_without_a_second_beta_there_is_no_bound():
    (scalars,) = scalars_of([{**GROUP, "betas": (0.9, 0.0)}], {0: 0}, [3.0])
    assert scalars.bound == math.inf


def updater_of(numels, *, gathers, bucket_nbytes=4096):
    layout = layout_of(numels, 1, bucket_nbytes)
    fmt = state_format("float32", Precision(moments="int8"))
    arena = Arena(layout.arenas[0], 1, 0)
    arena.allocate_state(fmt.fields)
    scalars = SlotScalars(len(numels), arena.device)
    return KernelUpdater(arena, layout, fmt, scalars, [0] * len(numels), gathers=gathers)


def test_buckets_without_a_gather_are_one_launch_and_else_a_few():
    group_of, buckets = {0: 0}, list(range(20))
    assert updater_of([20_480], gathers=False).plan(group_of, buckets) == [buckets]
    together = updater_of([20_480], gathers=True).plan(group_of, buckets)
    assert len(together) == kernel_update.LAUNCHES
    assert [bucket for some in together for bucket in some] == buckets


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_a_bucket_between_two_updated_ones_keeps_every_bit(moments):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(1000)) for _ in range(3)]
    optimizer = zeroshard.AdamW(
        parameters, bucket_mb=0.004, precision=Precision(moments=moments), lr=0.1
    )
    for parameter in parameters:
        parameter.grad = torch.randn(1000)
    optimizer.step()
    before = parameters[1].detach().clone()
    state = {key: value.clone() for key, value in optimizer.state[parameters[1]].items()}
    parameters[1].grad = None
    optimizer.step()
    assert torch.equal(parameters[1], before)
    assert all(
        torch.equal(value, state[key]) for key, value in optimizer.state[parameters[1]].items()
    )
    assert not torch.equal(parameters[0], before)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_groups_in_another_order_than_the_modules_clip_alike_in_every_stage(stage):
    """The order in which norms are added up must not be that of the stage's own slots."""

    def train(rank, world_size, stage=stage):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(50, 70), nn.LayerNorm(70), nn.Sequential(nn.Linear(70, 9)))
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        optimizer = zeroshard.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
            lr=1e-2,
            stage=stage,
            model=model if stage == 3 else None,
            max_grad_norm=0.5,
            precision=Precision(moments="bf16"),
        )
        for step in range(5):
            torch.manual_seed(step)
            model(torch.randn(16, 50)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with zeroshard.gather(model):
            return [p.detach().clone() for p in model.parameters()]

    ours = ranks.run(train, 2)[0]
    first = ranks.run(lambda rank, world_size: train(rank, world_size, stage=1), 2)[0]
    assert all(torch.equal(a, b) for a, b in zip(ours, first, strict=True))


def test_a_gpu_without_triton_is_told_once(monkeypatch):
    monkeypatch.setattr(update, "is_available", lambda device: False)
    update._warn_once.cache_clear()

    class Gpu:
        device = torch.device("cuda", 0)

    monkeypatch.setattr(update, "TorchUpdater", lambda *arguments: "torch")
    monkeypatch.setattr(update, "KernelUpdater", lambda *arguments, gathers: "twin")
    formats = [state_format("float32", Precision(moments=moments)) for moments in ("fp32", "int8")]
    counters = update.StepCounters()

    def build():
        return update.new_updaters([Gpu, Gpu], formats, None, counters, None, [], gathers=False)

    with pytest.warns(UserWarning, match="pip install triton"):
        assert build() == ["torch", "twin"]
    with warnings.catch_warnings(record=True) as caught:
        assert build() == ["torch", "twin"]
    assert not caught


def test_cpu_tensors_never_meet_triton():
    parameter = nn.Parameter(torch.randn(300))
    optimizer = zeroshard.AdamW([parameter], precision=Precision(moments="int8"))
    assert "update by torch twin" in repr(optimizer)
    assert "update by torch fused" in repr(zeroshard.AdamW([nn.Parameter(torch.randn(3))]))


@pytest.mark.gpu
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_triton_and_the_twin_train_alike(moments, dtype, monkeypatch):
    def train():
        torch.manual_seed(0)
        parameters = [
            nn.Parameter(torch.randn(shape, dtype=dtype, device="cuda"))
            for shape in ((300, 77), (5,), (70_000,))
        ]
        optimizer = zeroshard.AdamW(
            [{"params": parameters[:2]}, {"params": parameters[2:], "maximize": True}],
            lr=torch.tensor(1e-2, device="cuda"),
            precision=Precision(moments=moments),
            max_grad_norm=10.0,
        )
        for _ in range(4):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        return repr(optimizer), [p.detach().clone() for p in parameters]

    text, ours = train()
    assert "update by Triton" in text
    monkeypatch.setattr("zeroshard.triton_kernels.adamw.is_available", lambda device: False)
    _, twin = train()
    assert all(torch.equal(a, b) for a, b in zip(ours, twin, strict=True))


@pytest.mark.parametrize("missing", ["exp_avg_scale", "exp_avg_sq_scale", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_codes_without_their_scales_are_no_state_to_load(missing, moments):
    """As values they would be moments of up to 255."""
    saved = zeroshard.AdamW([nn.Parameter(torch.randn(300))], precision=Precision(moments="int8"))
    state = saved.state_dict()
    del state["state"][0][missing]
    optimizer = zeroshard.AdamW(
        [nn.Parameter(torch.randn(300))], precision=Precision(moments=moments)
    )
    with pytest.raises(zeroshard.errors.ConfigError, match="codes and"):
        optimizer.load_state_dict(state)
