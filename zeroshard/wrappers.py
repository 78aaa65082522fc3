"""Is a live DistributedDataParallel averaging our gradients? Changes nothing.

A post-accumulate hook fires before DDP's reducer: taking a gradient away there would make DDP
average zeros. So where a DDP wraps the model its gradients are left alone.
"""

import gc
import warnings
import weakref
from collections.abc import Collection, Iterable
from typing import Any

import torch.nn as nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

__all__ = ["DDPGuard", "DDPWatch", "unwrap"]


class DDPWatch:
    """Knows every DDP instance that lives, whether made before this object or after it."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        for thing in gc.get_objects():
            if issubclass(type(thing), DistributedDataParallel):
                self._known.add(thing)
        self.generation = 0
        this = weakref.ref(self)

        def seen(module: nn.Module, name: str, child: Any) -> None:
            watch = this()
            if watch is not None and isinstance(module, DistributedDataParallel):
                watch._known.add(module)
                watch.generation += 1

        # DDP's constructor registers the wrapped model, which is how a later one is noticed.
        handle = register_module_module_registration_hook(seen)
        self._finalizer = weakref.finalize(self, handle.remove)

    def wraps(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether a live DDP holds any of the parameters."""
        if not self._known:
            return False
        ours = set(parameters)
        return any(
            not ours.isdisjoint(ddp.module.parameters())
            for ddp in list(self._known)
            if "module" in ddp._modules
        )

    def count(self) -> int:
        """How many DDP instances live: when it has not changed, nor has the answer."""
        return len(self._known)

    def close(self) -> None:
        """Stop watching."""
        self._finalizer()


class DDPGuard:
    """Answers, cheaply and at every gradient, whether a live DDP averages them already."""

    def __init__(self, parameters: Collection[nn.Parameter]) -> None:
        self.watch = DDPWatch()
        self.parameters = parameters
        self.seen: tuple[int, int] = (-1, -1)
        self.answer = False
        self.warned = False

    def __call__(self) -> bool:
        now = (self.watch.generation, self.watch.count())
        if now != self.seen:
            self.seen = now
            self.answer = self.watch.wraps(self.parameters)
            if self.answer and not self.warned:
                self.warned = True
                warnings.warn(
                    "the model is wrapped in DistributedDataParallel, which averages and keeps "
                    "full gradients: only optimizer state is sharded. Remove the wrapper, and "
                    "zeroshard reduces and shards the gradients itself",
                    stacklevel=2,
                )
        return self.answer


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model
