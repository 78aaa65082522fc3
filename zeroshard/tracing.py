"""Named ranges in a profiler's trace."""

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["traced"]

_NOTHING: AbstractContextManager[object] = nullcontext()


def traced(name: str) -> AbstractContextManager[object]:
    """A range of that name where a profiler is running; else nothing, at no cost."""
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(name)
    return _NOTHING
