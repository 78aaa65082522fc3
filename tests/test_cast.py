"""Split masters: every fp32 value goes through two halves and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.triton_kernels.cast import join_master, split_master


def split(master):
    high = torch.empty_like(master, dtype=torch.bfloat16)
    remainder = torch.empty_like(master, dtype=torch.int16)
    split_master(master, high, remainder)
    return high, remainder


def join(high, remainder):
    master = torch.empty(high.numel())
    join_master(high, remainder, master)
    return master


def from_bits(bits):
    return bits.to(torch.int32).view(torch.float32)


def all_patterns_of(upper, lower):
    """Every combination of upper and lower 16 bits, [n] fp32."""
    bits = (upper.long()[:, None] << 16) | (lower.long()[None, :] & 0xFFFF)
    return from_bits(torch.where(bits >= 2**31, bits - 2**32, bits).flatten())


def test_every_exponent_with_every_lower_half_comes_back():
    lower = torch.arange(0x10000)
    for sign in (0, 0x8000):
        for exponents in torch.arange(256).split(32):
            upper = sign | (exponents << 7) | 0x2A
            master = all_patterns_of(upper, lower)
            back = join(*split(master))
            same = master.view(torch.int32) == back.view(torch.int32)
            assert bool((same | (master.isnan() & back.isnan())).all())


def test_every_upper_half_comes_back():
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    master = all_patterns_of(torch.arange(0x10000), lower)
    back = join(*split(master))
    same = master.view(torch.int32) == back.view(torch.int32)
    assert bool((same | (master.isnan() & back.isnan())).all())


def test_the_upper_half_is_the_nearest_ties_away_from_zero():
    torch.manual_seed(0)
    master = torch.randn(1 << 20)
    high, _ = split(master)
    even = master.bfloat16()
    differs = high != even
    ties = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert bool((ties | ~differs).all()), "differs from torch's rounding at ties only"
    assert bool((high.float().abs() >= master.abs())[ties].all())


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF])
def test_no_nan_hides_as_a_number(pattern):
    master = from_bits(torch.tensor([pattern]))
    assert bool(master.isnan())
    high, remainder = split(master)
    assert bool(high.isnan())
    assert bool(join(high, remainder).isnan())


@pytest.mark.parametrize("remainder", [-32768, -1, 0, 1, 32767])
def test_a_value_written_over_a_stale_remainder_is_read(remainder):
    written = torch.tensor([0.0, -0.0, 2.0, -3.0, float("inf"), float("-inf"), float("nan")])
    high = written.bfloat16()
    back = join(high, torch.full((7,), remainder, dtype=torch.int16))
    assert bool(back[6].isnan())
    assert not bool(back[:6].isnan().any())
    assert torch.allclose(back[:4], written[:4], rtol=2**-8, atol=1e-38)
    assert bool((back[4:6].abs() > 3.38e38).all())


@given(st.integers(-(2**31), 2**31 - 1))
def test_one_value_comes_back(bits):
    master = from_bits(torch.tensor([bits]))
    back = join(*split(master))
    assert bool((back.view(torch.int32) == master.view(torch.int32)) | master.isnan())
