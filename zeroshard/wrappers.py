"""Which live modules hold our parameters: a DDP that averages gradients, and the owners.

Changes nothing.

A post-accumulate hook fires before DDP's reducer: taking a gradient away there would make DDP
average zeros. So where a DDP wraps the model its gradients are left alone.
"""

import gc
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from typing import Any

import torch
import torch.nn as nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from .errors import ConfigError

__all__ = [
    "DDPGuard",
    "DDPWatch",
    "Owners",
    "check_nothing_is_lost",
    "ddp_is_local",
    "owners_of",
    "strip_wrappers",
    "unwrap",
]

# What torch.compile and the checkpoint wrapper put into names.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")

Owners = dict[nn.Parameter, list[tuple["weakref.ref[nn.Module]", str]]]


class DDPWatch:
    """Knows every DDP instance that lives, whether made before this object or after it.

    Args:
        on_wrapping: called with a model that is about to be wrapped.

    Attributes:
        generation: changes whenever an instance is made or goes.
    """

    def __init__(self, on_wrapping: Callable[[nn.Module], None]) -> None:
        self.generation = 0
        self.on_wrapping = on_wrapping
        self._known: list[weakref.ref[DistributedDataParallel]] = []
        for module in live_modules():
            if isinstance(module, DistributedDataParallel):
                self._add(module)
        _listen()
        _watches.add(self)

    def _add(self, ddp: DistributedDataParallel) -> None:
        this = weakref.ref(self)

        def gone(reference: "weakref.ref[DistributedDataParallel]") -> None:
            watch = this()
            if watch is not None:
                watch._known.remove(reference)
                watch.generation += 1

        if all(reference() is not ddp for reference in self._known):
            self._known.append(weakref.ref(ddp, gone))
            self.generation += 1

    def wraps(self, parameters: Collection[nn.Parameter]) -> bool:
        """Whether a live DDP holds any of the parameters."""
        live = [ddp for ddp in (reference() for reference in self._known) if ddp is not None]
        return any(
            parameter in parameters
            for ddp in live
            if "module" in ddp._modules
            for parameter in ddp.module.parameters()
        )


# One hook for good: to remove one, as when a watch goes, would disturb who is just calling them.
_watches: "weakref.WeakSet[DDPWatch]" = weakref.WeakSet()


@lru_cache(maxsize=1)
def _listen() -> None:
    # DDP's constructor registers the wrapped model, which is how a later one is noticed.
    register_module_module_registration_hook(_seen)


def _seen(module: nn.Module, name: str, child: Any) -> None:
    if isinstance(module, DistributedDataParallel):
        for watch in list(_watches):
            if isinstance(child, nn.Module):
                watch.on_wrapping(child)
            watch._add(module)


class DDPGuard:
    """Answers, cheaply and at every gradient, whether a live DDP averages them already.

    Args:
        parameters: whose gradients.
        refuse: raise ConfigError instead of answering yes.
    """

    def __init__(self, parameters: Collection[nn.Parameter], *, refuse: bool = False) -> None:
        self.watch = DDPWatch(self._look_at)
        self.parameters = parameters
        self.refuse = refuse
        self.seen = -1
        self.answer = False
        self.warned = False

    def _look_at(self, model: nn.Module) -> None:
        if self.refuse and any(parameter in self.parameters for parameter in model.parameters()):
            raise _refuse_ddp()

    def __call__(self) -> bool:
        if self.watch.generation != self.seen:
            self.seen = self.watch.generation
            self.answer = self.watch.wraps(self.parameters)
            if self.answer and self.refuse:
                self.seen = -1
                raise _refuse_ddp()
            if self.answer and not self.warned:
                self.warned = True
                warnings.warn(
                    "the model is wrapped in DistributedDataParallel, which averages and keeps "
                    "full gradients: only optimizer state is sharded. Remove the wrapper, and "
                    "zeroshard reduces and shards the gradients itself",
                    stacklevel=2,
                )
        return self.answer


def ddp_is_local(parameters: Collection[nn.Parameter]) -> bool:
    """Whether the last forward of a DDP around any of `parameters` was inside of its no_sync()."""
    return any(
        not getattr(ddp, "require_forward_param_sync", True)
        for ddp in _live(DistributedDataParallel)
        if _holds(ddp.module, parameters)
    )


def _refuse_ddp() -> ConfigError:
    return ConfigError(
        "the model is wrapped in DistributedDataParallel, which needs whole parameters and "
        "gradients: remove the wrapper, stage 3 shards and reduces by itself; or use stage=1"
    )


def check_nothing_is_lost(
    ours: Collection[nn.Parameter], trained: Collection[nn.Parameter], model: nn.Module | None
) -> None:
    """Of parameters none of which got a gradient: raise where the model trains others instead.

    As when adapters were added, which freezes all the rest, behind the optimizer's back. Every rank
    answers alike: what has a gradient on this one does not matter.

    Args:
        ours: the parameters of one optimizer.
        trained: those of all zeroshard optimizers.
        model: theirs, if it is known; else it is every live module that holds any.

    Raises:
        ConfigError: none of them requires a gradient, and others do that are in no optimizer.
    """
    if any(parameter.requires_grad for parameter in ours):
        return
    roots = [model] if model is not None else [m for m in live_modules() if _holds(m, ours)]
    lost = {
        parameter: name
        for root in roots
        for name, parameter in root.named_parameters()
        if parameter.requires_grad and parameter not in trained
    }
    for optimizer in _live(torch.optim.Optimizer) if lost else ():
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                lost.pop(parameter, None)
    if lost:
        raise ConfigError(
            "nothing was trained: no parameter of this optimizer requires a gradient any more, and "
            f"{len(lost)} that do are in no optimizer, like {max(lost.values(), key=len)!r}. Build "
            "the optimizer after what adds parameters to the model (as get_peft_model does), or "
            "give them to add_param_group()"
        )


def _holds(module: nn.Module, parameters: Collection[nn.Parameter]) -> bool:
    return any(parameter in parameters for parameter in module.parameters())


def live_modules() -> Iterator[nn.Module]:
    """Every module that lives in this process."""
    return _live(nn.Module)


def _live(kind: type) -> Iterator[Any]:
    for thing in gc.get_objects():
        if kind in type(thing).__mro__:
            yield thing


def owners_of(parameters: Collection[nn.Parameter]) -> Owners:
    """Which modules hold each parameter, and under which attribute; modules are not kept alive.

    Looked up among all live modules, since an optimizer is mostly built from `parameters()`.
    """
    owners: Owners = {}
    for module in live_modules():
        for name, parameter in module.__dict__.get("_parameters", {}).items():
            if parameter is not None and parameter in parameters:
                owners.setdefault(parameter, []).append((weakref.ref(module), name))
    return owners


def strip_wrappers(name: str) -> str:
    """The name of a parameter or buffer without what wrappers put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model
