"""What `state_dict()` hands out: a slice that can be given a whole tensor. Writes no state.

torch's `set_optimizer_state_dict(full_state_dict=True)` fills a local state dict from whole tensors
before it hands it to `load_state_dict`; with `broadcast_from_rank0` it copies them to `to_local()`.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from .shard_tensor import ShardTensor

__all__ = ["StateShard"]


logger = logging.getLogger(__name__)
_has_warned = False


class StateShard(ShardTensor):
    """An entry of a local state dict, which shares memory with the state.

    Attributes:
        given: [n], this rank's slice of a whole tensor that was copied into `to_local()`, for
            `load_state_dict` to take: the state itself, whose dtype may be another one, is as it
            was until then.
    """

    given: Tensor | None = None

    @staticmethod
    def of(shard: ShardTensor) -> "StateShard":
        """An entry for a tensor of the optimizer's state."""
        entry: Any = StateShard(shard._local_tensor, shard.slices, shard.transport)
        return entry  # type: ignore[no-any-return]

    @staticmethod
    def entries(state: Any) -> Any:
        """The state of one parameter as entries of a state dict; anything else as it is."""
        if not isinstance(state, dict):
            return state
        return {k: StateShard.of(v) if isinstance(v, ShardTensor) else v for k, v in state.items()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        global _has_warned
        transport = self.transport
        is_first_of_many = transport is not None and transport.rank == 0 < transport.world_size - 1
        if is_first_of_many and not _has_warned:
            _has_warned = True
            logger.warning(
                "a state dict of optimizer slices is being pickled: the file is this rank's alone, "
                "and every rank must save and load its own. For one whole file call "
                "consolidate_state_dict() on every rank first"
            )
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardTensor":
        other: Any = super().__deepcopy__(memo)
        other.given = None if self.given is None else self.given.clone()
        return other  # type: ignore[no-any-return]

    def to_local(self, *, grad_placements: object = None) -> Tensor:
        """As that of a ShardTensor; a whole tensor may be copied into it too."""
        local: _Local = self._local_tensor.as_subclass(_Local)
        local.entry = self
        return local


class _Local(Tensor):
    """A slice into which a whole tensor may be copied."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    entry: StateShard

    def copy_(self, src: Tensor, non_blocking: bool = False) -> Tensor:
        entry = self.entry
        if tuple(src.shape) == entry.slices.shape:
            assert entry.transport is not None
            entry.given = entry.slices.cut(entry.slices.flatten(src), entry.transport.rank).clone()
            if src.shape != self.shape or src.dtype != self.dtype:
                return self
        return super().copy_(src, non_blocking)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)
