"""The bits of master weights: bf16 upper half + int16 remainder = exact fp32. Torch twins.

Only integer operations, so every device agrees bit for bit. Source of the idea: the bf16 value is
the fp32 value rounded to the nearest, and the remainder the signed distance to it in units of the
last fp32 place.
"""

import torch
from torch import Tensor

__all__ = ["join_master", "split_master"]

QUIET_NAN = 0x7FC00000


def split_master(master: Tensor, high: Tensor, remainder: Tensor) -> None:
    """Write fp32 `master` into its two halves, exactly.

    The bf16 half is the nearest one, ties away from zero (torch's cast rounds ties to even: the
    two differ by one bf16 step in about 8 of a million values). A NaN is made canonical first,
    since a NaN with its payload in the low bits would round to -0.0.

    Args:
        master: [n] fp32.
        high: [n] bf16, written.
        remainder: [n] int16, written.
    """
    bits = master.view(torch.int32)
    bits = torch.where(torch.isnan(master), QUIET_NAN, bits)
    low = bits.to(torch.int16)  # keeps the low 16 bits
    upper = (bits >> 16) + (low < 0)
    remainder.copy_(low)
    high.view(torch.int16).copy_(upper)


def join_master(high: Tensor, remainder: Tensor, master: Tensor) -> None:
    """Write the fp32 value of two halves to `master`; the exact inverse of `split_master`.

    Total: also right for a `high` that somebody wrote over a stale remainder. Zero with a negative
    remainder and infinity or NaN with a positive one are no image of `split_master`; the remainder
    then counts as 0, so that a written 0 stays 0 and a written infinity does not become NaN.

    Args:
        high: [n] bf16.
        remainder: [n] int16.
        master: [n] fp32, written.
    """
    upper = high.view(torch.int16).to(torch.int32)
    low = remainder.to(torch.int32)
    magnitude = upper & 0x7FFF
    stale = (magnitude == 0) & (low < 0)
    stale |= (magnitude == 0x7F80) & (low > 0)
    stale |= magnitude > 0x7F80
    low.masked_fill_(stale, 0)
    # (upper << 16) + low: a negative remainder borrows one from the upper half.
    torch.add(upper << 16, low, out=master.view(torch.int32))
