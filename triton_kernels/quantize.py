"""8-bit moments: a code for each element and one fp32 scale for each block of 256.

First moment: m = c |c| scale with c in -127..127. Second moment: sqrt(v) = c^2 scale with c in
0..255, where c is at least 1 wherever v > 0: a v that was rounded to zero would divide an m that
was not. The scale has 16 significant bits: few enough that what was decoded, with a rounding or
two, is encoded to the same scale and codes again; enough that it moves by the 0.05 % of a step with
beta2 = 0.999. docs/precision.md says which books were measured.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations  # `tl` is not imported

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .launch import kernel

if TYPE_CHECKING:
    import triton.language as tl

__all__ = [
    "BLOCK",
    "decode_first",
    "decode_first_twin",
    "decode_second",
    "decode_second_twin",
    "encode_first",
    "encode_first_twin",
    "encode_second",
    "encode_second_twin",
]

BLOCK = 256  # elements that share a scale; also the unit of tables, and of norms
FIRST_LEVELS = 127 * 127
SECOND_LEVELS = 255 * 255
TO_INTEGER = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits
QUIET_NAN = 0x7FC00000
INFINITY = 0x7F800000
TINY = (127 - 100) << 23  # 2^-100: a block below it is zero, its scale's inverse would overflow


# --- in kernels; values are [blocks, 256], scales [blocks, 1]


@kernel
def scale_of(top, INVERSE_LEVELS: tl.constexpr):
    """The scale for blocks whose largest magnitude has the bits `top`, and its inverse."""
    ratio = top.to(tl.float32, bitcast=True) * INVERSE_LEVELS
    bits = (ratio.to(tl.int32, bitcast=True) + 0x80) & -0x100
    bits = tl.where(top < 0x0D800000, 0, bits)
    bits = tl.where(top >= 0x7F800000, 0x7FC00000, bits)
    scale = bits.to(tl.float32, bitcast=True)
    has_codes = (top >= 0x0D800000) & (top < 0x7F800000)
    inverse = tl.where(has_codes, tl.div_rn(1.0, tl.where(has_codes, scale, 1.0)), 0.0)
    return scale, inverse, has_codes


@kernel
def encode_first(m):
    """Codes (int8) and scales of first moments."""
    bits = m.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    top = tl.max(magnitude, axis=1, keep_dims=True)
    scale, inverse, has_codes = scale_of(top, 1 / 16129)
    root = tl.sqrt_rn(magnitude.to(tl.float32, bitcast=True) * inverse)
    code = (root + 12582912.0).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(bits < 0, -code, code)
    return tl.where(has_codes, code, 0).to(tl.int8), scale


@kernel
def encode_second(root_v):
    """Codes (uint8) and scales of second moments, from their square roots."""
    bits = root_v.to(tl.int32, bitcast=True)
    top = tl.max(bits & 0x7FFFFFFF, axis=1, keep_dims=True)
    scale, inverse, has_codes = scale_of(top, 1 / 65025)
    root = tl.sqrt_rn(root_v * inverse)
    code = (root + 12582912.0).to(tl.int32, bitcast=True) & 0x1FF
    code = tl.where((code == 0) & (bits != 0), 1, code)
    return tl.where(has_codes, code, 0).to(tl.uint8), scale


@kernel
def decode_first(code, scale):
    """First moments of codes and scales."""
    c = code.to(tl.float32)
    return c * tl.abs(c) * scale


@kernel
def decode_second(code, scale):
    """Second moments of codes and scales."""
    c = code.to(tl.float32)
    root = c * c * scale
    return root * root


# --- the twins


def _scale_of(top: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    inverse_levels = torch.tensor(1 / levels, dtype=torch.float32, device=top.device)
    ratio = top.view(torch.float32) * inverse_levels
    bits = (ratio.view(torch.int32) + 0x80) & -0x100
    bits = torch.where(top < TINY, 0, bits)
    bits = torch.where(top >= INFINITY, QUIET_NAN, bits)
    scale = bits.view(torch.float32)
    has_codes = (top >= TINY) & (top < INFINITY)
    one = torch.ones_like(scale)
    inverse = torch.where(has_codes, one / torch.where(has_codes, scale, one), 0.0)
    return scale, inverse, has_codes


def exact_sqrt(value: Tensor) -> Tensor:
    """The correctly rounded square root of fp32 values; torch's own on a CPU is often one off."""
    return value.double().sqrt_().float()


def encode_first_twin(m: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write first moments as codes and scales.

    A block with a NaN or an Inf gets a NaN as its scale; one below 2^-100 counts as zero.

    Args:
        m: [n] fp32, n a multiple of 256.
        codes: [n] int8, written.
        scales: [n / 256] fp32, written.
    """
    bits = m.view(torch.int32).view(-1, BLOCK)
    magnitude = bits & 0x7FFFFFFF
    top = magnitude.amax(1, keepdim=True)
    scale, inverse, has_codes = _scale_of(top, FIRST_LEVELS)
    root = exact_sqrt(magnitude.view(torch.float32) * inverse)
    code = (root + TO_INTEGER).view(torch.int32) & 0xFF
    code = torch.where(bits < 0, -code, code)
    codes.copy_(torch.where(has_codes, code, 0).flatten())
    scales.copy_(scale.flatten())


def encode_second_twin(root_v: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write second moments as codes and scales, with the rules of `encode_first_twin`.

    Args:
        root_v: [n] fp32, the square roots of the moments, n a multiple of 256.
        codes: [n] uint8, written; at least 1 where the moment is above 0.
        scales: [n / 256] fp32, written.
    """
    bits = root_v.view(torch.int32).view(-1, BLOCK)
    top = (bits & 0x7FFFFFFF).amax(1, keepdim=True)
    scale, inverse, has_codes = _scale_of(top, SECOND_LEVELS)
    root = exact_sqrt(root_v.view(-1, BLOCK) * inverse)
    code = (root + TO_INTEGER).view(torch.int32) & 0x1FF
    code = torch.where((code == 0) & (bits != 0), 1, code)
    codes.copy_(torch.where(has_codes, code, 0).flatten())
    scales.copy_(scale.flatten())


def decode_first_twin(codes: Tensor, scales: Tensor) -> Tensor:
    """[n] fp32: the first moments of codes [n] and scales [n / 256]."""
    c = codes.view(-1, BLOCK).float()
    return (c * c.abs() * scales[:, None]).flatten()


def decode_second_twin(codes: Tensor, scales: Tensor) -> Tensor:
    """[n] fp32: the second moments of codes [n] and scales [n / 256]."""
    c = codes.view(-1, BLOCK).float()
    root = c * c * scales[:, None]
    return (root * root).flatten()
