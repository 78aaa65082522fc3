"""The twin of the AdamW kernel: against float64, at special values, and the traps of exactness.

That Triton does the same bit for bit is test_kernels.py.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.kernel_update import SlotScalars
from zeroshard.triton_kernels.adamw import LEAST_EPS, State, adamw_twin
from zeroshard.triton_kernels.norm import block_powers_twin
from zeroshard.triton_kernels.quantize import (
    SECOND_LEVELS,
    _scale_of,
    decode_second_twin,
    exact_sqrt,
)


def zeros(blocks, moments="fp32", master="none", dtype=torch.float32):
    """State of `blocks` blocks, all zero."""
    n = blocks * 256
    of = {"fp32": torch.float32, "bf16": torch.bfloat16}
    first, second = (torch.int8, torch.uint8) if moments == "int8" else (of[moments], of[moments])
    return State(
        grad=torch.zeros(n),
        param=torch.zeros(n, dtype=dtype),
        master=torch.zeros(n, dtype=torch.int16 if master == "split" else torch.float32),
        exp_avg=torch.zeros(n, dtype=first),
        exp_avg_sq=torch.zeros(n, dtype=second),
        exp_avg_scale=torch.zeros(blocks),
        exp_avg_sq_scale=torch.zeros(blocks),
    )


def update(state, group, step, *, master="none", moments="fp32", coefficient=1.0):
    blocks = state.grad.numel() // 256
    scalars = SlotScalars(1, torch.device("cpu"))
    scalars.plan({0: 0})
    scalars.refresh([group], torch.tensor([float(step)]), None)
    rows = torch.tensor(
        [[b, b, min(64, blocks - b), 0, b, 0, 0, 0] for b in range(0, blocks, 64)],
        dtype=torch.int32,
    ).view(-1, 8)
    rest = torch.tensor([coefficient]), 0, len(rows), 0, master, moments
    adamw_twin(state, rows, scalars.table, *rest)


GROUPS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 1e-5, 1e-2, 1.0]),
        "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.999), (0.9, 0.0), (0.0, 0.0), (0.5, 0.9)]),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "maximize": st.booleans(),
    }
)


@given(GROUPS, st.sampled_from([0, 1, 255, 256, 257, 20_000]), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_three_steps_are_those_of_float64(group, numel, seed):
    """Each step rounds a value at most four times on its way, by 2^-24 each: m and v collect 4 * 3
    of that, the update half of v's and three roundings of its own beside; u is at most 10. Bounded
    by 2^-19 of what is added, and by 2^-22 of the weight itself.
    """
    random = torch.Generator().manual_seed(seed)
    state = zeros(-(-numel // 256))
    state.param[:numel] = torch.randn(numel, generator=random)
    x = state.param.double().clone()
    m, v, moved = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    sizes = torch.zeros_like(x)  # what m is a sum of, without its signs: that is what is rounded
    beta1, beta2 = group["betas"]
    for step in (1, 2, 3):
        state.grad[:numel] = torch.randn(numel, generator=random)
        update(state, group, step)
        g = -state.grad.double() if group["maximize"] else state.grad.double()
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        sizes = beta1 * sizes + (1 - beta1) * g.abs()
        denominator = (1 - beta1**step) * ((v / (1 - beta2**step)).sqrt() + group["eps"])
        u = m / denominator
        moved += group["lr"] * (sizes / denominator + group["weight_decay"] * x.abs())
        x = x * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * u
    assert bool(((state.param - x).abs() <= 2**-19 * moved + 2**-21 * (1 + x.abs())).all())
    assert not bool(state.param[numel:].any())


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("master", ["none", "split"])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("coefficient", [1.0, 0.0, math.nan, math.inf])
def test_padding_stays_zero_whatever_the_rest_does(moments, master, eps, coefficient):
    dtype = torch.bfloat16 if master == "split" else torch.float32
    state = zeros(2, moments, master, dtype)
    state.grad[:100] = torch.linspace(-1, 1, 100)
    state.param[:100] = 1
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": eps, "weight_decay": 0.1, "maximize": False}
    for step in (1, 2):
        update(state, group, step, master=master, moments=moments, coefficient=coefficient)
    for name, tensor in zip(State._fields[:5], state[:5], strict=True):
        behind = (
            tensor[256:] if moments == "int8" and not math.isfinite(coefficient) else tensor[100:]
        )
        assert not bool(behind.any()), name
    assert (
        bool(state.param[:100].isnan().any()) == math.isnan(coefficient) or coefficient == math.inf
    )


def test_eps_zero_leaves_an_element_alone_that_never_had_a_gradient():
    state = zeros(1)
    state.param.fill_(1)
    state.grad[0] = 1e-25  # whose square is 0
    state.grad[1] = 1e-10
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 0, "weight_decay": 0, "maximize": False}
    update(state, group, 1)
    assert float(state.param[1]) == pytest.approx(0.9)
    assert 0.9 < float(state.param[0]) <= 1, "a square that is lost makes no large update"
    assert bool((state.param[2:] == 1).all())
    assert math.sqrt(1.4e-45) > LEAST_EPS


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_special_gradients_stay_where_they_are(moments):
    """A NaN goes no further than its element, or with 8-bit moments its block."""
    state = zeros(3, moments)
    state.grad[300], state.grad[301], state.grad[302] = math.nan, -0.0, 1e-45
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "maximize": False}
    for step in (1, 2):
        update(state, group, step, moments=moments)
    wrong = state.param.isnan()
    assert bool(wrong[300])
    assert int(wrong.sum()) == (256 if moments == "int8" else 1)
    assert not bool(wrong[:256].any())
    assert not bool(wrong[512:].any())


def test_one_huge_finite_gradient_leaves_8_bit_moments_finite():
    state = zeros(1, "int8")
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "maximize": False}
    for step, gradient in enumerate((1e22, 3e38, 1.0), start=1):
        state.grad.fill_(1)
        state.grad[7] = gradient
        update(state, group, step, moments="int8")
        assert bool(state.param.isfinite().all())
        assert bool(state.exp_avg_sq_scale.isfinite().all())
        v = decode_second_twin(state.exp_avg_sq, state.exp_avg_sq_scale)
        assert bool(v.isfinite().all())
    assert bool((state.param[state.param != state.param[7]] < 0).all())


# --- traps: what looks the same and is not


def test_trap_a_number_divided_by_a_tensor_is_not_rounded_once():
    """torch makes it a reciprocal and a product. The scales' inverses must be divisions."""
    top = (torch.rand(4096) + 0.5).view(4096, 1)
    scale, inverse, _ = _scale_of(top.view(torch.int32), SECOND_LEVELS)
    assert torch.equal(inverse, (1 / scale.double()).float())
    exact = (65025.0 / top.double()).float()
    assert not torch.equal(65025.0 / top, exact), "or this trap is no more"


def test_trap_torchs_square_root_on_a_cpu_may_be_one_off():
    values = torch.rand(100_000)
    exact = torch.tensor([math.sqrt(value) for value in values.double().tolist()]).float()
    assert torch.equal(exact_sqrt(values), exact)


def test_trap_a_fused_multiply_add_is_not_rounded_twice():
    """m and v must be products, then a sum: an fp64 sum rounded once differs."""
    state = zeros(64)
    torch.manual_seed(0)
    state.grad.normal_()
    state.exp_avg.normal_()
    before = state.exp_avg.clone()
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "maximize": False}
    update(state, group, 2)
    beta1 = torch.tensor(0.9)
    complement = torch.tensor(1 - 0.9, dtype=torch.float64).float()
    assert torch.equal(state.exp_avg, beta1 * before + complement * state.grad)
    once = beta1.double() * before.double() + (complement * state.grad).double()
    assert not torch.equal(state.exp_avg, once.float())


def test_trap_the_largest_of_a_block_keeps_a_nan():
    values = torch.ones(512)
    values[3] = math.nan
    for p in (1.0, 2.0, math.inf):
        powers = block_powers_twin(values, p)
        assert bool(powers[0].isnan())
        assert bool(powers[1].isfinite())


def test_trap_one_minus_beta_in_fp32_is_off_by_1e_minus_5():
    in_fp32 = float(1 - torch.tensor(0.999))
    assert abs(in_fp32 / 0.001 - 1) > 1e-5
    scalars = SlotScalars(1, torch.device("cpu"))
    scalars.plan({0: 0})
    group = {"lr": 1, "betas": (0.9, 0.999), "eps": 0, "weight_decay": 0, "maximize": False}
    scalars.refresh([group], torch.ones(1), None)
    assert float(scalars.table[0, 5]) == pytest.approx(0.001, rel=1e-7)


def test_trap_bf16_moments_to_the_nearest_do_not_move():
    """Half a bf16 step is 2^-9 of a value, more than what a step with beta2 = 0.999 takes away."""
    group = {"lr": 0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "maximize": False}
    state = zeros(8, "bf16")
    state.exp_avg_sq.fill_(1.0)
    for step in range(1, 501):
        update(state, group, step, moments="bf16")
    expected = 0.999**500
    stalled = torch.tensor(1.0).bfloat16()
    assert torch.equal((stalled.float() * 0.999).bfloat16(), stalled)
    # 2048 elements, each a walk with steps of at most 2^-8 and a mean of `expected`.
    assert float(state.exp_avg_sq.float().mean()) == pytest.approx(expected, rel=0.02)
