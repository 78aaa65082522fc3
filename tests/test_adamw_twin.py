"""The twin of the AdamW kernel: against float64, at special values, and the traps of exactness.

That Triton does the same bit for bit is test_kernels.py.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.kernel_update import SlotScalars
from zeroshard.triton_kernels import quantize
from zeroshard.triton_kernels.adamw import LEAST_EPS, Scalars, State, adamw_twin
from zeroshard.triton_kernels.cast import random_words_twin, round_stochastic_twin
from zeroshard.triton_kernels.norm import block_powers_twin
from zeroshard.triton_kernels.quantize import (
    SECOND_LEVELS,
    _scale_of,
    decode_second_twin,
    exact_sqrt,
)

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_an_infinite_gradient_makes_nan_of_its_element_at_once(moments):
    state = zeros(2, moments)
    state.grad[3] = math.inf
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "maximize": False}
    update(state, group, 1, moments=moments)
    assert bool(state.param[3].isnan())
    assert not bool(state.param[4:].isnan().any())


# --- every operation, from its definition


def rounded(value):
    """Float64 results as fp32 ones; right for + - * / and roots of fp32 numbers, since 53 bits are
    more than twice 24 and two (Figueroa 1995).
    """
    return value.float().double()


def expected_of(x, g, m, v, scalars, coefficient):
    """Weights, first moments, roots of second ones and updates, all fp64 holding fp32 numbers."""
    s = {name: float(value) for name, value in scalars.items()}
    g = rounded(g * rounded(torch.tensor(coefficient * s["sign"], dtype=torch.float64)))
    x = rounded(x - rounded(s["lr_decay"] * x))
    m = rounded(rounded(s["beta1"] * m) + rounded(s["one_minus_beta1"] * g))
    v = rounded(rounded(s["beta2"] * v) + rounded(rounded(s["one_minus_beta2"] * g) * g))
    root = rounded(v.sqrt())
    update = rounded(m / rounded(rounded(root * s["correction"]) + s["eps"]))
    return x, m, v, root, update


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    ("dtype", "master"),
    [
        (torch.float32, "none"),
        (torch.bfloat16, "none"),
        (torch.bfloat16, "split"),
        (torch.bfloat16, "fp32"),
        (torch.float16, "fp32"),
    ],
)
def test_each_operation_is_rounded_once_and_in_the_order_that_is_written_down(dtype, master, sign):
    torch.manual_seed(0)
    state = zeros(16, master=master, dtype=dtype)
    weight = torch.randn(4096)
    if master == "split":
        state.param.copy_(weight.bfloat16())
        state.master.random_(-30000, 30000)
        bits = (state.param.view(torch.int16).int() << 16) + state.master.int()
        weight = bits.view(torch.float32).clone()
    elif master == "fp32":
        state.master.copy_(weight)  # and parameters that say something else
    else:
        state.param.copy_(weight)
        weight = state.param.float()
    state.grad.normal_()
    state.exp_avg.normal_()
    state.exp_avg_sq.copy_(torch.rand(4096))
    values = [sign, 1.1e-3, 0.9, 0.1, 0.999, 0.001, 1.3e-2, 7.7, 1e-3, 0.2, 5, 1]
    scalars = dict(zip(Scalars._fields, torch.tensor([values])[0], strict=True))
    before = [tensor.double() for tensor in (weight, state.grad, state.exp_avg, state.exp_avg_sq)]
    x, m, v, _, u = expected_of(*before, scalars, 0.75)
    x = rounded(x - rounded(float(scalars["step_size"]) * u)).float()
    rows = torch.tensor([[0, 0, 16, 0, 0, 0, 0, 0]], dtype=torch.int32)
    rest = torch.tensor([0.75]), 0, 1, 0, master, "fp32"
    adamw_twin(state, rows, torch.tensor([values]), *rest)
    assert torch.equal(state.exp_avg, m.float())
    assert torch.equal(state.exp_avg_sq, v.float())
    if master == "split":
        bits = (state.param.view(torch.int16).int() << 16) + state.master.int()
        assert torch.equal(bits.view(torch.float32), x)
    else:
        assert torch.equal(state.param, x.to(dtype))
        assert master == "none" or torch.equal(state.master, x)


def test_8_bit_moments_bound_the_update_on_both_sides():
    torch.manual_seed(0)
    state = zeros(16, "int8")
    state.param.normal_()
    state.grad.normal_()
    state.exp_avg.random_(-127, 128)
    state.exp_avg_sq.random_(1, 256)
    state.exp_avg_scale.fill_(2.0**-14)
    state.exp_avg_sq_scale.fill_(2.0**-14)
    c, d = state.exp_avg.double(), state.exp_avg_sq.double()
    m, root = rounded(c * c.abs() * 2.0**-14), rounded(d * d * 2.0**-14)
    values = [1, 1.1e-3, 0.9, 0.1, 0.999, 0.001, 1.3e-2, 7.7, 1e-3, 0.2, 5, 1]
    scalars = dict(zip(Scalars._fields, torch.tensor([values])[0], strict=True))
    before = state.param.double(), state.grad.double(), m, rounded(root * root)
    x, m, _, root, u = expected_of(*before, scalars, 1.0)
    bound = float(scalars["bound"])
    above, below = u > bound, u < -bound
    assert 0.01 < float(above.double().mean()) < 0.9
    assert 0.01 < float(below.double().mean()) < 0.9
    u[above], u[below] = bound, -bound
    x = rounded(x - rounded(float(scalars["step_size"]) * u)).float()
    rows = torch.tensor([[0, 0, 16, 0, 0, 0, 0, 0]], dtype=torch.int32)
    adamw_twin(state, rows, torch.tensor([values]), torch.ones(1), 0, 1, 0, "none", "int8")
    assert torch.equal(state.param, x)
    codes = torch.empty(4096, dtype=torch.int8), torch.empty(4096, dtype=torch.uint8)
    scales = torch.empty(2, 16)
    quantize.encode_first_twin(m.float(), codes[0], scales[0])
    quantize.encode_second_twin(root.float(), codes[1], scales[1])
    for ours, expected in (
        (state.exp_avg, codes[0]),
        (state.exp_avg_sq, codes[1]),
        (state.exp_avg_scale, scales[0]),
        (state.exp_avg_sq_scale, scales[1]),
    ):
        assert torch.equal(ours, expected)


def test_the_two_moments_are_rounded_by_different_random_bits():
    """Equal values under equal factors: with the same bits they would stay equal."""
    state = zeros(16, "bf16")
    state.exp_avg.fill_(1.0)
    state.exp_avg_sq.fill_(1.0)
    group = {"lr": 0, "betas": (0.9, 0.9), "eps": 1e-8, "weight_decay": 0, "maximize": False}
    update(state, group, 1, moments="bf16")
    assert state.exp_avg.unique().numel() == state.exp_avg_sq.unique().numel() == 2
    assert 0.2 < float((state.exp_avg == state.exp_avg_sq).float().mean()) < 0.8
    words = random_words_twin(0, 1, 0, 4096, CPU)
    value = torch.full((4096,), 0.9)
    assert torch.equal(state.exp_avg, round_stochastic_twin(value, words & 0xFFFF))
    assert torch.equal(state.exp_avg_sq, round_stochastic_twin(value, (words >> 16) & 0xFFFF))


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
def test_a_slot_that_is_not_live_keeps_every_bit(moments):
    state = zeros(2, moments, "split", torch.bfloat16)
    for tensor in state:
        tensor.fill_(1)
    before = [tensor.clone() for tensor in state]
    live = [1, 0.1, 0.9, 0.1, 0.999, 0.001, 0.1, 7.7, 1e-3, 5, 5, 1]
    scalars = torch.tensor([live, [*live[:-1], 0]])
    rows = torch.tensor([[0, 0, 1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 1, 0, 0, 0]], dtype=torch.int32)
    adamw_twin(state, rows, scalars, torch.ones(1), 0, 2, 0, "split", moments)
    for name, ours, old in zip(State._fields, state, before, strict=True):
        half = ours.numel() // 2
        assert torch.equal(ours[:half], old[:half]), name
    assert not torch.equal(state.param[256:], before[1][256:])


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
