"""Named ranges in a profiler's trace, and functions that torch.compile must not trace."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch.compiler import is_dynamo_compiling

__all__ = ["followed_by", "traced", "untraced"]

P = ParamSpec("P")
R = TypeVar("R")

_followers: list[Callable[[str], AbstractContextManager[object]]] = []
_NOTHING: AbstractContextManager[object] = nullcontext()


def traced(name: str) -> AbstractContextManager[object]:
    """A range of that name where a profiler is running; else nothing, at no cost."""
    if _followers:
        return _followers[-1](name)
    if torch.autograd.profiler._is_profiler_enabled:
        return torch.profiler.record_function(name)
    return _NOTHING


@contextmanager
def followed_by(follower: Callable[[str], AbstractContextManager[object]]) -> Iterator[None]:
    """Enter what `follower` returns for the name of each range, instead of telling a profiler."""
    _followers.append(follower)
    try:
        yield
    finally:
        _followers.remove(follower)


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, for which torch.compile breaks the graph.

    torch's own way of saying so costs every call 10 us, so only where something is being compiled:
    here, or by whoever called what called us, where torch gave up on this frame.
    """
    in_eager: Callable[P, R] = _disable_dynamo(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if is_dynamo_compiling() or get_eval_frame_callback() is not None:
            return in_eager(*args, **kwargs)
        return function(*args, **kwargs)

    return call
