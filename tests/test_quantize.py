"""8-bit moments: codes, scales, guards, and what happens to the odd block."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.triton_kernels.quantize import (
    decode_first_twin,
    decode_second_twin,
    encode_first_twin,
    encode_second_twin,
    exact_sqrt,
)


def encode(values, *, second=False):
    """Codes and scales of [n] first moments, or of roots of second ones."""
    codes = torch.empty(values.numel(), dtype=torch.uint8 if second else torch.int8)
    scales = torch.empty(values.numel() // 256)
    (encode_second_twin if second else encode_first_twin)(values, codes, scales)
    return codes, scales


def every_code(second):
    """One block that has every code, and with it the largest, which the scale comes from."""
    return (
        torch.arange(256).to(torch.uint8)
        if second
        else (torch.arange(256) - 128).clamp(min=-127).to(torch.int8)
    )


# A second moment up to 3.4e38 has a root below 2^64, so a scale below 2^48; the square of a root
# of at least 2^-63 keeps all its bits, so that a scale from 2^-55 on is beyond doubt.
@pytest.mark.parametrize(
    ("second", "exponent"),
    [(False, e) for e in range(-100, 100, 8)] + [(True, e) for e in range(-55, 41, 4)],
)
def test_what_was_decoded_is_encoded_to_the_same_bits(second, exponent):
    codes = every_code(second)
    for significand in range(2**15, 2**16, 101):  # 16 significant bits
        scale = torch.tensor([significand / 2**15 * 2.0**exponent])
        if second:
            again = encode(exact_sqrt(decode_second_twin(codes, scale)), second=True)
        else:
            again = encode(decode_first_twin(codes, scale))
        assert torch.equal(again[0], codes)
        assert torch.equal(again[1], scale)


@given(st.integers(0, 2**31), st.floats(-20, 15), st.sampled_from([0.1, 1, 3]))
@settings(max_examples=40, deadline=None)
def test_one_encoding_is_half_a_step_off_at_most(seed, exponent, spread):
    """In y = sqrt(|m| / top) a step is 1 / 127: |y - y'| <= 0.5 / 127, and a little for the scale,
    whose 16 bits are 2^-17 off at most, half of it in y.
    """
    random = torch.Generator().manual_seed(seed)
    m = torch.randn(512, generator=random) * (2.0**exponent)
    m *= torch.exp(spread * torch.randn(512, generator=random))
    top = m.abs().view(-1, 256).amax(1).repeat_interleave(256)
    back = decode_first_twin(*encode(m))
    y, y_back = (m.abs() / top).sqrt(), (back.abs() / top).sqrt()
    assert bool(((y - y_back).abs() <= 0.5 / 127 + y * 2**-18 + 1e-6).all())
    assert bool((m.sign() * back.sign() >= 0).all())
    root = m.abs()
    v_back = decode_second_twin(*encode(root, second=True)).sqrt()
    y, y_back = (root / top).sqrt(), (v_back / top).sqrt()
    floored = y < 0.5 / 255
    assert bool(((y - y_back).abs() <= 0.5 / 255 + y * 2**-18 + 1e-6)[~floored].all())
    assert bool((y_back[floored] <= 1 / 255 * (1 + 2**-16)).all())


def test_a_second_moment_above_zero_never_reads_as_zero():
    root = torch.zeros(256)
    root[0], root[1], root[2] = 1e10, 1e-20, torch.finfo(torch.float32).tiny
    codes, scales = encode(root, second=True)
    assert codes[:4].tolist() == [255, 1, 1, 0]
    assert bool((decode_second_twin(codes, scales)[:3] > 0).all())


def test_a_block_of_zeros_is_zero():
    for second in (False, True):
        codes, scales = encode(torch.zeros(512), second=second)
        assert not bool(codes.any())
        assert not bool(scales.any())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("second", [False, True])
def test_what_is_not_finite_makes_its_block_nan_and_no_other(bad, second):
    values = torch.ones(512)
    values[300] = abs(bad) if second else bad
    codes, scales = encode(values, second=second)
    assert not bool(codes[256:].any())
    assert scales[1:].view(torch.int32).tolist() == [0x7FC00000], "one NaN, whatever came"
    decode = decode_second_twin if second else decode_first_twin
    back = decode(codes, scales)
    assert bool(back[256:].isnan().all())
    assert bool(back[:256].isfinite().all())


def test_codes_do_not_depend_on_the_payload_of_a_nan():
    results = []
    for payload in (0x7FC00000, 0x7F800001, -1):
        values = torch.ones(256)
        values.view(torch.int32)[7] = payload
        codes, scales = encode(values)
        results.append((codes.tolist(), scales.view(torch.int32).tolist()))
    assert results[0] == results[1] == results[2]


def test_first_moments_below_2_to_the_minus_100_are_zero():
    """The inverse of a smaller scale overflows."""
    for top, is_zero in ((2.0**-100, False), (2.0**-100 * (1 - 2**-24), True), (1e-45, True)):
        codes, scales = encode(torch.full((256,), top))
        assert bool((codes == 0).all()) == is_zero
        assert bool((scales == 0).all()) == is_zero
        assert bool(decode_first_twin(codes, scales).isfinite().all())


def test_denormal_second_moments_keep_their_order_of_magnitude():
    v = torch.full((256,), 1e-45)
    codes, scales = encode(exact_sqrt(v), second=True)
    assert bool((codes == 255).all())
    assert torch.equal(decode_second_twin(codes, scales), v)


@given(st.integers(0, 2**31), st.booleans())
@settings(max_examples=40, deadline=None)
def test_scales_have_16_bits_and_codes_are_the_nearest(seed, second):
    """Against float64, away from ties: those are beyond the two roundings of root * 1 / scale."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(2560, generator=random)
    values = values.abs() if second else values
    codes, scales = encode(values, second=second)
    assert bool((scales.view(torch.int32) & 0xFF == 0).all())
    top = values.abs().view(-1, 256).amax(1).double()
    exact = top / (65025 if second else 16129)
    assert bool(((scales.double() / exact - 1).abs() <= 2**-16).all())
    root = (values.abs().double().view(-1, 256) / scales.double()[:, None]).sqrt().flatten()
    is_tie = (root - root.floor() - 0.5).abs() < 1e-4
    nearest = (root + 0.5).floor().clamp(min=1 if second else 0)
    nearest = nearest if second else nearest * values.sign()
    assert torch.equal(codes.double()[~is_tie], nearest[~is_tie])
    assert bool((codes.double() - nearest).abs().max() <= 1)


@pytest.mark.parametrize("code", [0.5, 1.5, 2.5, 10.5, 126.5])
def test_a_tie_between_two_codes_goes_to_the_even_one(code):
    values = torch.zeros(256)
    values[0], values[1] = 127.0**2, code * code  # the scale is 1
    codes, scales = encode(values)
    assert float(scales[0]) == 1
    assert int(codes[1]) == round(code)


@pytest.mark.parametrize("value", [1.0, -3.7, 1e-12, 3.4e38, -1e-30])
def test_an_all_equal_block_is_equal_and_near(value):
    codes, scales = encode(torch.full((256,), value))
    assert codes.unique().tolist() == [127 if value > 0 else -127]
    back = decode_first_twin(codes, scales)
    assert back.unique().numel() == 1
    assert float(back[0]) == pytest.approx(value, rel=2**-15)


def test_codes_stay_in_range_wherever_the_scale_was_rounded_down():
    tops = torch.arange(0x3F800000, 0x40000000, 2**11, dtype=torch.int32).view(torch.float32)
    for second, most in ((False, 127), (True, 255)):
        values = torch.zeros(len(tops), 256)
        values[:, 0] = tops
        codes, _ = encode(values.flatten(), second=second)
        assert codes.view(-1, 256)[:, 0].unique().tolist() == [most]


def test_a_scale_follows_a_moment_that_moves_by_a_step_of_beta2():
    """0.05 % a step of the root: with 8 significant bits the scale would stand still."""
    root = torch.full((256,), 1.0)
    for _ in range(1000):
        codes, scales = encode(root, second=True)
        root = exact_sqrt(0.999 * decode_second_twin(codes, scales))
    assert float(root[0]) == pytest.approx(0.999**500, rel=1e-3)
