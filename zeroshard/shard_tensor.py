"""A rank's slice of a tensor that has the global shape: what `p.grad` and optimizer state are.

A slice follows the layout's runs, which no DTensor placement can say, so the dispatch is our own:
elementwise operations act on the slice, full reductions answer for the whole tensor (and
communicate), everything else refuses.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .chunks import Chunks
from .layout import Layout
from .shard_reductions import REDUCTIONS, connected, refusal
from .transport import Op, Transport

__all__ = ["RaggedShard", "ShardTensor", "Slices"]

aten = torch.ops.aten


class RaggedShard(Partial):
    """The placement of a ShardTensor: a contiguous range of storage order, not of any dimension.

    To torch it is partial: the whole tensor is the sum over ranks of their slices among zeros. But
    a plain DTensor of this placement, as `distribute_tensor` makes it, has all of it on each rank.
    """

    def _partition_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        return tensor

    def __repr__(self) -> str:
        return "RaggedShard()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RaggedShard)

    def __hash__(self) -> int:
        return hash(RaggedShard)


class Siblings(Protocol):
    """The gradients of one optimizer, which can answer for all of them with one collective."""

    def norm(self, tensor: "ShardTensor", p: float) -> Tensor:
        """The p-norm of one of them, [] fp32, the same on every rank."""


@dataclass(frozen=True, eq=False)
class Slices:
    """Where the elements of a tensor lie: for each rank, ranges (start, numel) of storage order."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    by_rank: tuple[tuple[tuple[int, int], ...], ...]

    @staticmethod
    def of_slot(layout: Layout, slot: int) -> "Slices":
        """The slices of one slot of a layout."""
        spec = layout.slots[slot].spec
        return Slices(spec.shape, spec.stride, layout.ranges_by_rank(slot))

    @cached_property
    def numels(self) -> tuple[int, ...]:
        """Elements on each rank."""
        return tuple(sum(numel for _, numel in ranges) for ranges in self.by_rank)

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def same_as(self, other: "Slices") -> bool:
        """Whether the same elements lie in the same places."""
        return self is other or (self.shape, self.stride, self.by_rank) == (
            other.shape,
            other.stride,
            other.by_rank,
        )

    def per_block(self, block: int) -> "Slices":
        """The slices of a flat tensor with one element for each `block` elements of this one."""
        by_rank = tuple(
            tuple((start // block, -(-numel // block)) for start, numel in ranges)
            for ranges in self.by_rank
        )
        return Slices((-(-self.numel // block),), (1,), by_rank)

    def cut(self, flat: Tensor, rank: int) -> Tensor:
        """One rank's slice of a tensor given in storage order; a view where it is one range."""
        pieces = [flat[start : start + numel] for start, numel in self.by_rank[rank]]
        if not pieces:
            return flat.new_empty(0)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def flatten(self, whole: Tensor) -> Tensor:
        """A tensor of the global shape in storage order; a view where its strides allow it."""
        if whole.stride() != self.stride and whole.numel() > 1:
            ordered = torch.empty_strided(
                self.shape, self.stride, dtype=whole.dtype, device=whole.device
            )
            whole = ordered.copy_(whole)
        return whole.as_strided((self.numel,), (1,), whole.storage_offset())


class ShardTensor(DTensor):
    """This rank's slice of a tensor of global shape, which other ranks hold the rest of.

    `shape`, `dtype`, `stride()` and `numel()` are those of the whole tensor. Elementwise
    operations with scalars or tensors of the same slices, `torch._foreach_*`, `clone`, `detach`,
    `zero_` and AMP's unscaling act on the slice. Full reductions (`norm`, `sum`, `mean`, `max`,
    `all` ...) return the whole tensor's result as a plain tensor on every rank; every rank has to
    call them. Anything else raises `ShardTensorError`.
    """

    _local_tensor: Tensor  # [slices.numels[rank]], in storage order
    slices: Slices
    transport: Transport | None
    siblings: Siblings | None
    saved_by: int | None = None  # the rank whose slice it is, for one that was loaded from a file

    @staticmethod
    def __new__(
        cls,
        local: Tensor,
        slices: Slices,
        transport: Transport | None,
        siblings: Siblings | None = None,
    ) -> "ShardTensor":
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            slices.shape,
            strides=slices.stride,
            dtype=local.dtype,
            device=local.device,
            layout=torch.strided,
            requires_grad=False,
        )
        self._local_tensor = local
        self.slices = slices
        self.transport = transport
        self.siblings = siblings
        if transport is not None and transport.mesh is not None:
            meta = TensorMeta(torch.Size(slices.shape), slices.stride, local.dtype)
            placements = (RaggedShard(),) * transport.mesh.ndim
            self._spec = DTensorSpec(transport.mesh, placements, tensor_meta=meta)
        return self

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"ShardTensor(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"local={self._local_tensor.numel()} of {self.slices.numel} elements)"
        )

    def to_local(self, *, grad_placements: object = None) -> Tensor:
        """[slice's numel] this rank's elements in storage order, sharing memory. No communication.

        The storage order is that of the parameter: row-major unless its strides say otherwise.
        """
        return self._local_tensor

    def full_tensor(self, *, grad_placements: object = None) -> Tensor:
        """The whole tensor, gathered from all ranks: every rank must call it. Never a view."""
        transport = connected(self, "full_tensor()")
        flat = self._local_tensor.new_empty(self.slices.numel)
        longest = max(self.slices.numels, default=0)
        if longest:
            buffer = self._local_tensor.new_zeros(transport.world_size * longest)
            shards = buffer.split(longest)
            own = shards[transport.rank]
            own[: self._local_tensor.numel()].copy_(self._local_tensor)
            transport.gather(buffer, own, op=Op("full_tensor")).wait()
            for shard, ranges in zip(shards, self.slices.by_rank, strict=True):
                taken = 0
                for start, numel in ranges:
                    flat[start : start + numel].copy_(shard[taken : taken + numel])
                    taken += numel
        return flat.as_strided(self.slices.shape, self.slices.stride)

    def item(self) -> Any:
        """Refused, as `numpy` and `tolist` are: not all elements are here."""
        raise refusal("item")

    def numpy(self, *, force: bool = False) -> Any:
        """Refused."""
        raise refusal("numpy")

    def tolist(self) -> Any:
        """Refused."""
        raise refusal("tolist")

    def chunks(self) -> Chunks:
        """This rank's slice as chunks of the whole tensor."""
        rank = self.transport.rank if self.transport is not None else self.saved_by or 0
        ranges, at = [], 0
        for start, numel in self.slices.by_rank[rank]:
            ranges.append((start, numel, at))
            at += numel
        if self.slices.numel == 0 and rank == 0:  # nobody has an element: the first rank speaks
            ranges = [(0, 0, 0)]
        return Chunks(self._local_tensor, self.slices.shape, self.slices.stride, ranges)

    # The protocol by which torch.distributed.checkpoint asks a tensor for its chunks.

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        return self.chunks().__create_write_items__(fqn, tensor)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.chunks().__create_chunk_list__()

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.chunks().__get_tensor_shard__(index)

    def redistribute(
        self, device_mesh: Any = None, placements: Sequence[Placement] | None = None, **_: Any
    ) -> DTensor:
        """The whole tensor on every rank, as a DTensor; any other placement is refused.

        Of int16, which no backend of torch.distributed sends on, the bits come as bfloat16.
        """
        if not placements or not all(isinstance(wanted, Replicate) for wanted in placements):
            raise refusal(f"redistribute to {placements}")
        transport = connected(self, "redistribute()")
        mesh = device_mesh or transport.mesh
        whole = self.full_tensor()
        if whole.dtype == torch.int16:
            whole = whole.view(torch.bfloat16)
        return DTensor.from_local(whole, mesh, placements, run_check=False)

    def __copy__(self) -> "ShardTensor":
        return self.like(self._local_tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardTensor":
        return self.like(self._local_tensor.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle this rank's slice only: it can be loaded again by the same rank of as many."""
        rank = self.transport.rank if self.transport is not None else self.saved_by
        slices = (self.slices.shape, self.slices.stride, self.slices.by_rank)
        return (_unpickle, (self._local_tensor.detach().clone(), slices, rank))

    def like(self, local: Tensor) -> "ShardTensor":
        """A tensor of the same kind and slices around another local tensor."""
        other = type(self)(local, self.slices, self.transport)
        other.saved_by = self.saved_by
        return other

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        reduction = REDUCTIONS.get(packet)
        if reduction is not None:
            return reduction(*args, **kwargs)
        if packet in (aten.detach, aten.alias, aten.lift_fresh):
            return args[0].like(args[0]._local_tensor)
        if packet is aten._amp_foreach_non_finite_check_and_unscale_:
            return _unscale(*args)
        if _is_elementwise(func):
            return _elementwise(func, args, kwargs)
        raise refusal(packet.__name__)


class _OwnDispatch(TorchDispatchMode):
    """Sends operations on a ShardTensor to its own dispatch."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(isinstance(value, ShardTensor) for value in tree_leaves((args, kwargs))):
            return ShardTensor.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _through_own_dispatch(
    cls: type, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
) -> Any:
    with torch._C.DisableTorchFunctionSubclass(), _OwnDispatch():  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
    # These send every subclass of DTensor to DTensor's own dispatch, whatever the class defines; a
    # dispatch mode comes before that.
    ShardTensor.__torch_function__ = classmethod(_through_own_dispatch)  # type: ignore


def _unpickle(local: Tensor, slices: tuple[Any, Any, Any], rank: int | None) -> ShardTensor:
    loaded = ShardTensor(local, Slices(*slices), None)
    loaded.saved_by = rank
    return loaded


torch.serialization.add_safe_globals([_unpickle])  # for torch.load(weights_only=True)

# Elementwise in effect although torch does not tag them as pointwise.
ELEMENTWISE = {
    aten._to_copy,
    aten.clone,
    aten.copy_,
    aten.empty_like,
    aten.fill_,
    aten.full_like,
    aten.ones_like,
    aten.zero_,
    aten.zeros_like,
}


def _is_elementwise(func: Any) -> bool:
    packet = func.overloadpacket
    if packet in ELEMENTWISE:
        return True
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    name = packet.__name__
    if name.startswith("_foreach_"):
        return name not in ("_foreach_norm", "_foreach_max")
    return torch.Tag.pointwise in func.tags


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on the local tensors; results become ShardTensors of the same slices."""
    in_lists = func.overloadpacket.__name__.startswith("_foreach_")
    leaders: list[ShardTensor] = []  # whose slices the n-th result has

    def local(value: Any, position: int) -> Any:
        if isinstance(value, ShardTensor):
            if position == len(leaders):
                leaders.append(value)
            elif not value.slices.same_as(leaders[position].slices):
                raise refusal(f"{func.overloadpacket.__name__} of tensors with other slices")
            return value._local_tensor
        if isinstance(value, (list, tuple)):
            return type(value)(
                local(entry, number if in_lists else position) for number, entry in enumerate(value)
            )
        if isinstance(value, Tensor) and value.ndim > 0:
            raise refusal(f"{func.overloadpacket.__name__} with a plain tensor")
        return value

    local_args = tuple(local(arg, 0) for arg in args)
    kwargs = {key: local(value, 0) for key, value in kwargs.items() if key != "memory_format"}
    out = func(*local_args, **kwargs)
    if out is None:  # torch._foreach_ in place
        _written(args[0])
        return None
    if func._schema.is_mutable:
        _written(args[0])
        return args[0]
    if isinstance(out, (list, tuple)):
        return type(out)(leader.like(o) for leader, o in zip(leaders, out, strict=True))
    return leaders[0].like(out)


def _written(tensors: Any) -> None:
    """Count a write. Below autograd, where dispatch runs, torch counts none."""
    for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
        if isinstance(tensor, ShardTensor):
            torch.autograd.graph.increment_version(tensor._local_tensor)


def _unscale(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """GradScaler's check, with a flag that every rank agrees on."""
    sharded = [grad for grad in grads if isinstance(grad, ShardTensor)]
    locals_ = [g._local_tensor if isinstance(g, ShardTensor) else g for g in grads]
    aten._amp_foreach_non_finite_check_and_unscale_(locals_, found_inf, inv_scale)
    _written(grads)
    transport = connected(sharded[0], "GradScaler.unscale_()")
    transport.all_reduce(found_inf, "max", op=Op("found_inf")).wait()
