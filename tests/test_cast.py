"""Split masters: every fp32 value goes through two halves and back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.triton_kernels.cast import (
    join_master,
    random_words_twin,
    round_nearest_twin,
    round_stochastic_twin,
    split_master,
)


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


CPU = torch.device("cpu")


def bits_of(half):
    return half.view(torch.int16)


def test_every_upper_half_with_every_class_of_remainder_joins_to_what_it_says():
    """Also those that no split makes: then the upper half stands alone."""
    high = torch.arange(0x10000).to(torch.int16).view(torch.bfloat16)
    for remainder in (-32768, -32767, -1, 0, 1, 32766, 32767):
        back = join(high, torch.full_like(bits_of(high), remainder))
        bits = (bits_of(high).long() << 16) + remainder
        plain = ((bits + 2**31) % 2**32 - 2**31).to(torch.int32).view(torch.float32)
        expected = torch.where(plain.isnan(), high.float(), plain)
        assert torch.equal(back.isnan(), high.isnan())
        known = ~high.isnan()
        assert torch.equal(back[known].view(torch.int32), expected[known].view(torch.int32))


def test_rounding_to_the_nearest_is_torchs_for_every_exponent_and_lower_half():
    lower = torch.arange(0x10000)
    for sign in (0, 0x8000):
        for exponents in torch.arange(256).split(32):
            for significand in (0x2A, 0x7F):  # an even and an odd upper half
                values = all_patterns_of(sign | (exponents << 7) | significand, lower)
                ours, torchs = round_nearest_twin(values), values.bfloat16()
                assert torch.equal(ours.isnan(), values.isnan())
                known = ~values.isnan()
                assert torch.equal(bits_of(ours)[known], bits_of(torchs)[known])
                assert bool((bits_of(ours)[~known] == 0x7FC0).all())


@given(st.integers(-(2**31), 2**31 - 1), st.integers(0, 0xFFFF))
def test_stochastic_rounding_gives_one_of_the_two_neighbours(bits, random):
    value = from_bits(torch.tensor([bits]))
    rounded = round_stochastic_twin(value, torch.tensor([random], dtype=torch.int32))
    if bool(value.isnan()):
        assert bits_of(rounded).item() == 0x7FC0
    elif bool(value.isinf()) or bits & 0xFFFF == 0:
        assert torch.equal(rounded.float(), value)
    else:
        down = from_bits(torch.tensor([bits & ~0xFFFF]))
        up = (down.view(torch.int32) + 0x10000).view(torch.float32)
        assert bits_of(rounded) in (bits_of(down.bfloat16()), bits_of(up.bfloat16()))
        assert bool(rounded.float() == up) == ((bits & 0xFFFF) + random > 0xFFFF)


def test_stochastic_rounding_has_the_right_mean():
    """Over all 2^16 random numbers it is exact: one in 2^16 rounds up for each unit below."""
    random = torch.arange(0x10000, dtype=torch.int32)
    for value in (1.2345, -1e-3, 1e20, 2.0**-130):
        values = torch.full((0x10000,), value)
        mean = round_stochastic_twin(values, random).double().mean()
        assert float(mean) == pytest.approx(float(values[0].double()), rel=2**-40)


def plain_philox(counter, key, rounds=7):
    """Philox4x32 in Python's integers."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_the_random_words_are_philox():
    # Known answer of Random123 1.14 for 7 rounds.
    assert plain_philox([0] * 4, [0] * 2) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    for seed, step, first in ((0, 0, 0), (0x5EED, 3, 1024), (2**31 - 1, 2**24, 2**34 + 512)):
        words = random_words_twin(seed, step, first, 8, CPU).long() & 0xFFFFFFFF
        expected = []
        for four in (first // 4, first // 4 + 1):
            expected += plain_philox([four & 0xFFFFFFFF, four >> 32, step, 0], [seed, 0])
        assert words.tolist() == expected


def test_an_elements_word_does_not_depend_on_where_a_range_is_cut():
    whole = random_words_twin(1, 5, 2**34, 4096, CPU)
    for cut in (4, 256, 1000, 4092):
        parts = [
            random_words_twin(1, 5, 2**34, cut, CPU),
            random_words_twin(1, 5, 2**34 + cut, 4096 - cut, CPU),
        ]
        assert torch.equal(torch.cat(parts), whole)
    for other in ((2, 5, 2**34), (1, 6, 2**34), (1, 5, 2**34 + 4096)):
        assert float((random_words_twin(*other, 4096, CPU) == whole).float().mean()) < 0.01


def test_the_halves_of_a_word_are_uniform_and_independent():
    """Sums over n = 2^16 words: a mean of n uniform 16-bit numbers has a standard deviation of
    2^16 / sqrt(12 n), a correlation one of 1 / sqrt(n). Both within 5 of them.
    """
    words = random_words_twin(0x5EED, 7, 0, 2**16, CPU)
    low, high = (words & 0xFFFF).double(), ((words >> 16) & 0xFFFF).double()
    for half in (low, high):
        assert abs(float(half.mean()) - (2**16 - 1) / 2) < 5 * 2**16 / (12 * 2**16) ** 0.5
    for other in (high, low.roll(1), low.roll(4), low.roll(256)):
        correlation = torch.corrcoef(torch.stack((low, other)))[0, 1]
        assert abs(float(correlation)) < 5 / 256
