"""Which gradients no step has used yet. Changes nothing."""

import weakref
from collections.abc import Iterable

from torch import Tensor, nn

from .shard_tensor import ShardTensor

__all__ = ["Waiting"]


class Waiting:
    """Tells a gradient that waits for a step from one that a step has left in `p.grad`."""

    def __init__(self) -> None:
        self._has_reduced = False  # since the last step
        self._used: dict[nn.Parameter, tuple[weakref.ref[Tensor], int]] = {}

    def reduced(self) -> None:
        """A backward has begun to reduce gradients."""
        self._has_reduced = True

    def used(self, parameters: Iterable[nn.Parameter]) -> None:
        """A step has used the gradients of `parameters`, and there are no others."""
        self._has_reduced = False
        self._used = {
            parameter: (weakref.ref(grad), grad._version)
            for parameter in parameters
            if (grad := parameter.grad) is not None and type(grad) is not ShardTensor
        }

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether `p.grad` waits."""
        grad = parameter.grad
        if grad is None:
            return False
        if isinstance(grad, ShardTensor):
            return self._has_reduced
        before, version = self._used.get(parameter, (None, 0))
        return before is None or before() is not grad or grad._version != version
