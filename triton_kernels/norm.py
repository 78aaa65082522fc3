"""Norms by blocks of 256 elements: fp32 in a fixed order within a block, fp64 across blocks.

A block means the same elements at every world size, so a norm does not depend on how the elements
are spread over ranks (up to fp64 rounding).
"""

import math

import torch
from torch import Tensor

__all__ = ["block_powers"]

BLOCK = 256
CHUNK = 256 * BLOCK  # elements; a chunk and its square stay in the second-level cache


def block_powers(flat: Tensor, p: float) -> Tensor:
    """Sum of |x|^p in each block, or the block's largest |x| for p = inf (least for -inf).

    Args:
        flat: [n] fp32, contiguous.
        p: the order of the norm.

    Returns:
        [ceil(n / 256)] fp64; NaN where the block holds one.
    """
    whole = flat.numel() // BLOCK * BLOCK
    chunk_numel = CHUNK if flat.device.type == "cpu" else max(whole, 1)
    parts = [_powers(chunk.view(-1, BLOCK), p) for chunk in flat[:whole].split(chunk_numel)]
    if whole < flat.numel():
        parts.append(_powers(flat[whole:].view(1, -1), p))
    return torch.cat(parts) if parts else flat.new_empty(0, dtype=torch.float64)


def _powers(blocks: Tensor, p: float) -> Tensor:
    if blocks.numel() == 0:
        return blocks.new_empty(0, dtype=torch.float64)
    if p == 2:
        return blocks.square().sum(1).double()
    if p == math.inf:
        return blocks.abs().amax(1).double()
    if p == -math.inf:
        return blocks.abs().amin(1).double()
    if p == 0:
        return (blocks != 0).sum(1).double()
    return blocks.abs().double().pow(p).sum(1)
