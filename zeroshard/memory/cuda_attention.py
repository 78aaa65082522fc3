"""Which of torch's attention kernels a GPU would take, and what it is handed. For NVIDIA's, sm_80
and newer.

Source: torch's own dispatch of `scaled_dot_product_attention` (2.13); torch.nn.attention's
switches are respected, as there.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Kernel", "attention", "kernel_of"]

Kernel = Literal["flash", "efficient", "math"]

LARGEST_FLASH_HEAD = 256

aten = torch.ops.aten


def kernel_of(
    query: Tensor,  # [B, heads, S, E]
    key: Tensor,  # [B, heads of keys, L, E]
    value: Tensor,  # [B, heads of values, L, F]
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Kernel:
    """The kernel that a GPU takes for these.

    cuDNN's, which torch prefers on Hopper and datacenter Blackwell where it is new enough, keeps as
    much as flash attention does.
    """
    backends = torch.backends.cuda
    if not _fits_fused(query, key, value, enable_gqa=enable_gqa) or (
        mask is not None and mask.stride(-1) != 1
    ):
        return "math"
    same_head = query.shape[-1] == key.shape[-1] == value.shape[-1]
    if (
        backends.flash_sdp_enabled()
        and mask is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and same_head
        and query.shape[-1] <= LARGEST_FLASH_HEAD
        and not (is_causal and query.shape[-2] != key.shape[-2])
    ):
        return "flash"
    aligned = 16 // query.element_size()
    if (
        backends.mem_efficient_sdp_enabled()
        and query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and query.shape[:2] == key.shape[:2]
        and query.shape[-1] == key.shape[-1]
        and all(tensor.shape[-1] % aligned == 0 for tensor in (query, value))
        and all(tensor.storage_offset() % aligned == 0 for tensor in (query, key, value))
        and all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    ):
        return "efficient"
    return "math"


def _fits_fused(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> bool:
    tensors = (query, key, value)
    if any(t.dim() != 4 or t.dtype != query.dtype or not t.numel() for t in tensors):
        return False
    if len({t.shape[0] for t in tensors}) > 1 or key.shape[1] != value.shape[1]:
        return False
    if any(t.stride(-1) != 1 and t.shape[-1] != 1 for t in tensors):
        return False
    if enable_gqa:
        return query.shape[1] % key.shape[1] == 0
    return query.shape[1] == key.shape[1]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`scaled_dot_product_attention` as a GPU takes it apart."""
    kernel = kernel_of(query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa)
    if kernel == "math":
        return aten._scaled_dot_product_attention_math.default(
            query,
            key,
            value,
            _as_addend(attn_mask, query.dtype),
            dropout_p,
            is_causal,
            None,
            scale=scale,
            enable_gqa=enable_gqa,
        )[0]
    if kernel == "flash":
        head = query.shape[-1]
        missing = -head % 8
        if missing:
            query, key, value = (functional.pad(t, (0, missing)) for t in (query, key, value))
        scale = head**-0.5 if scale is None else scale
        out = aten._scaled_dot_product_flash_attention.default(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
        return out[..., :head] if missing else out
    mask = _as_addend(attn_mask, query.dtype)
    if mask is not None:
        if any(stride % 8 for stride in mask.stride()[:-1]) or mask.stride(-1) != 1:
            length = mask.shape[-1]
            mask = functional.pad(mask, (0, 8 - length % 8))[..., :length]
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    keeps_sums = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return aten._scaled_dot_product_efficient_attention.default(
        query, key, value, mask, keeps_sums, dropout_p, is_causal, scale=scale
    )[0]


def _as_addend(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=dtype))
