"""Who owns memory: told to whoever follows it. The only place where a storage changes its size.

Nobody listens, except where memory is profiled or simulated.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Observer", "observed_by", "resize", "tell"]


class Observer(Protocol):
    """Follows memory."""

    def owned(self, tensor: Tensor, category: str) -> None:
        """The storage of `tensor` is of a category, by the keys of memory()."""
        ...

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size now."""
        ...


_observers: list[Observer] = []


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Tell `observer` from now on."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def tell(tensor: Tensor, category: str) -> Tensor:
    """Say what the storage of `tensor` is for.

    Returns:
        The same tensor.
    """
    for observer in _observers:
        observer.owned(tensor, category)
    return tensor


def resize(storage: torch.UntypedStorage, nbytes: int) -> None:
    """Give a storage that size; views of it stay."""
    storage.resize_(nbytes)
    for observer in _observers:
        observer.resized(storage)
