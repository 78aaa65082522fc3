"""Full reductions of a sharded tensor: a local part, one small all-reduce, the same plain result.

Every rank has to ask. What concerns some dimensions only is refused.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from .errors import ShardTensorError
from .transport import Op, Transport
from .triton_kernels.norm import block_powers

__all__ = ["REDUCTIONS", "combine_powers", "connected", "finish_norms", "norm_of", "refusal"]

aten = torch.ops.aten


class Sharded(Protocol):
    """What a reduction needs of a ShardTensor."""

    _local_tensor: Tensor
    transport: Transport | None
    slices: Any
    siblings: Any
    dtype: torch.dtype
    ndim: int


def refusal(what: str) -> ShardTensorError:
    """The error for a question that a slice cannot answer."""
    return ShardTensorError(
        f"{what}: this rank holds only a slice of the tensor, which cannot answer that rightly. "
        "Call .full_tensor() on every rank for the whole tensor, or .to_local() for the slice"
    )


def connected(x: Sharded, what: str) -> Transport:
    """The transport to the other ranks, or an error where there is none."""
    if x.transport is None:
        raise ShardTensorError(
            f"{what} needs the other ranks, but this ShardTensor was loaded from a file: "
            "give it to load_state_dict() of the optimizer first"
        )
    return x.transport


def _agree(tensor: Sharded, part: Tensor, kind: Literal["sum", "max"], what: str) -> Tensor:
    transport = connected(tensor, what)
    transport.all_reduce(part, kind, op=Op(what)).wait()
    return part


def _whole(x: Sharded, dim: Any, keepdim: bool, what: str) -> None:
    """Refuse a reduction over some dimensions only."""
    dims = [dim] if isinstance(dim, int) else dim
    if keepdim or (dims and sorted(d % max(x.ndim, 1) for d in dims) != list(range(x.ndim))):
        raise refusal(f"{what} over a dimension")


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else torch.int64


def _sum(x: Sharded, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    _whole(x, dim, keepdim, "sum")
    local = x._local_tensor
    wide = _wide(dtype or x.dtype)
    total = _agree(x, local.sum(dtype=wide), "sum", "sum")
    return total.to(dtype or (x.dtype if x.dtype.is_floating_point else torch.int64))


def _mean(x: Sharded, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    _whole(x, dim, keepdim, "mean")
    total = _agree(x, x._local_tensor.sum(dtype=torch.float64), "sum", "mean")
    mean: Tensor = total / x.slices.numel
    return mean.to(dtype or x.dtype)


def _vector_norm(
    x: Sharded,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Tensor:
    _whole(x, dim, keepdim, "norm")
    p = float(ord)
    norm = x.siblings.norm(x, p) if x.siblings is not None else norm_of([x], p)[0]
    return norm.to(dtype or x.dtype)


def _norm(x: Sharded, p: Any = 2, dim: Any = None, keepdim: bool = False, **kw: Any) -> Tensor:
    return _vector_norm(x, 2 if p is None else p, dim, keepdim, **kw)


def _foreach_norm(tensors: Sequence[Sharded], ord: float = 2, dtype: Any = None) -> list[Tensor]:
    return [_vector_norm(x, ord, dtype=dtype) for x in tensors]


def norm_of(tensors: Sequence[Sharded], p: float) -> Tensor:
    """[len(tensors)] fp32 p-norms of whole tensors, the same on every rank, by one all-reduce."""
    locals_ = [x._local_tensor.float() for x in tensors]
    parts = torch.stack([combine_powers(block_powers(local, p), p) for local in locals_])
    return finish_norms(parts, p, connected(tensors[0], "norm"))


def combine_powers(powers: Tensor, p: float) -> Tensor:
    """[] fp64: sum (or largest, least) of the blocks' powers; the neutral element for no block."""
    if p == math.inf:
        return powers.amax() if powers.numel() else powers.new_zeros(())
    if p == -math.inf:
        return powers.amin() if powers.numel() else powers.new_full((), math.inf)
    return powers.sum()


def finish_norms(parts: Tensor, p: float, transport: Transport) -> Tensor:
    """[n] fp64 parts of each rank -> [n] fp32 norms, rounded once."""
    if p == -math.inf:
        parts = -_max_with_nan(-parts, transport)
    elif p == math.inf:
        parts = _max_with_nan(parts, transport)
    else:
        transport.all_reduce(parts, "sum", op=Op("norm")).wait()
        if p != 0:
            parts = parts.sqrt() if p == 2 else parts.pow(1 / p)
    return parts.float()


def _max_with_nan(parts: Tensor, transport: Transport) -> Tensor:
    """A maximum over ranks that keeps a NaN, which a backend's own maximum may drop."""
    nans = parts.isnan().double()
    both = torch.stack([parts.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf), nans])
    transport.all_reduce(both, "max", op=Op("norm")).wait()
    return torch.where(both[1] > 0, math.nan, both[0])


def _extreme(sign: int) -> Callable[..., Tensor]:
    what = "max" if sign > 0 else "min"

    def extreme(x: Sharded, dim: Any = None, keepdim: bool = False) -> Tensor:
        _whole(x, dim, keepdim, what)
        local = x._local_tensor
        least = torch.full((), -math.inf, dtype=torch.float64, device=local.device)
        part = (sign * local.double()).amax() if local.numel() else least
        found = sign * _max_with_nan(part, connected(x, what))
        return found.to(x.dtype)

    return extreme


def _all(x: Sharded, dim: Any = None, keepdim: bool = False) -> Tensor:
    _whole(x, dim, keepdim, "all")
    failed = (~x._local_tensor.bool()).any().to(torch.uint8)
    return _agree(x, failed, "max", "all") == 0


def _any(x: Sharded, dim: Any = None, keepdim: bool = False) -> Tensor:
    _whole(x, dim, keepdim, "any")
    return _agree(x, x._local_tensor.bool().any().to(torch.uint8), "max", "any") != 0


def _count_nonzero(x: Sharded, dim: Any = None) -> Tensor:
    _whole(x, dim, False, "count_nonzero")
    return _agree(x, x._local_tensor.count_nonzero(), "sum", "count_nonzero")


def _equal(x: Sharded, other: Any) -> bool:
    if not hasattr(other, "slices") or not other.slices.same_as(x.slices):
        raise refusal("equal with a tensor of other slices")
    same = torch.equal(x._local_tensor, other._local_tensor)
    differs = torch.tensor(not same, dtype=torch.uint8, device=x._local_tensor.device)
    return not bool(_agree(x, differs, "max", "equal"))


REDUCTIONS: dict[Any, Callable[..., Any]] = {
    aten.sum: _sum,
    aten.mean: _mean,
    aten.linalg_vector_norm: _vector_norm,
    aten.norm: _norm,
    aten._foreach_norm: _foreach_norm,
    aten.max: _extreme(+1),
    aten.amax: _extreme(+1),
    aten.min: _extreme(-1),
    aten.amin: _extreme(-1),
    aten.all: _all,
    aten.any: _any,
    aten.count_nonzero: _count_nonzero,
    aten.equal: _equal,
}
