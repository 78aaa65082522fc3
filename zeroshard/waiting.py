"""Which gradients no step has used yet. Changes nothing."""

import weakref
from collections.abc import Iterable

from torch import Tensor, nn

__all__ = ["Waiting"]


class Waiting:
    """Tells a gradient that waits for a step from one that a step has left in `p.grad`."""

    def __init__(self) -> None:
        self._has_reduced = False  # since the last step
        self._used: dict[nn.Parameter, tuple[weakref.ref[Tensor], int]] = {}

    def reduced(self) -> None:
        """A backward has begun to reduce gradients."""
        self._has_reduced = True

    def used(self, given: Iterable[nn.Parameter]) -> None:
        """A step has used all gradients; those of `given` are tensors of others, not our slices."""
        self._has_reduced = False
        self._used = {
            parameter: (weakref.ref(grad), grad._version)
            for parameter in given
            if (grad := parameter.grad) is not None
        }

    def holds(self, parameter: nn.Parameter, *, is_ours: bool) -> bool:
        """Whether `p.grad`, which is our slice or a tensor of others, waits."""
        grad = parameter.grad
        if grad is None or is_ours:
            return grad is not None and self._has_reduced
        before, version = self._used.get(parameter, (None, 0))
        return before is None or before() is not grad or grad._version != version
