"""`state_dict()` and `load_state_dict()` of modules whose parameters live in arenas.

Both are local. Of a sharded parameter the one shows this rank's slice, and the other keeps this
rank's slice of what it is given. A whole one is shown behind a storage of its own, and what is
loaded into it is told. Everything else about them is torch's own.
"""

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from .errors import ConfigError, ShardTensorError
from .modules import OwnHook
from .parameters import Parameters
from .place import Place
from .shard_tensor import ShardTensor
from .transport import Transport

__all__ = ["ModuleState", "ParameterShard"]


class ParameterShard(ShardTensor):
    """A sharded parameter in a module's state dict: this rank's slice, which shares memory."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardTensorError(
            "this state dict holds a slice of each sharded parameter, and a file of it would miss "
            "the other ranks' slices: save inside of `with zeroshard.gather(model):`, where "
            "state_dict() is whole, or with torch.distributed.checkpoint, which knows slices"
        )

    def untyped_storage(self) -> Any:
        """Refused, as pickling is: safetensors and others save what they find there."""
        return self.__reduce_ex__(2)

    storage = untyped_storage


class ModuleState:
    """The state-dict hooks on all modules that hold parameters of one optimizer.

    Args:
        parameters: where the parameters live.
        transport: the wire, which `full_tensor()` of the slices needs.
        is_pinned: whether `zeroshard.gather` keeps a place whole.
        free: frees the unit of a place, which is not pinned.
        may_copy: see `ModuleHooks`.

    Attributes:
        on_loaded: called with parameters that a `load_state_dict` may have written to.
    """

    def __init__(
        self,
        parameters: Parameters,
        transport: Transport,
        is_pinned: Callable[[Place], bool],
        free: Callable[[Place], None],
        may_copy: Callable[[int], bool],
    ) -> None:
        self.parameters, self.transport = parameters, transport
        self.is_pinned, self.free, self.may_copy = is_pinned, free, may_copy
        self.on_loaded: Callable[[Collection[nn.Parameter]], None] = _nothing
        self.handles: list[Any] = []
        self._watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Hook modules all of whose parameters are whole, if they are not hooked already."""
        for module in modules:
            if module not in self._watched and not self._sharded(module):
                self._watched.add(module)
                self.handles += [
                    module.register_state_dict_post_hook(_Hook(self._show, _always, 0)),
                    module.register_load_state_dict_post_hook(_Hook(self._loaded, _always, 0)),
                ]

    def attach(self, module: nn.Module, unit: int) -> None:
        """Hook one module, whose parameters are in a unit."""
        self.handles += [
            module.register_state_dict_post_hook(_Hook(self._show, self.may_copy, unit)),
            module.register_load_state_dict_pre_hook(_Hook(self._load, self.may_copy, unit)),
            module.register_load_state_dict_post_hook(_Hook(self._loaded, self.may_copy, unit)),
        ]

    def attach_root(self, model: nn.Module) -> None:
        """Hook the whole model, to refuse a state dict before any of it is loaded."""
        hook = _Hook(self._check, self.may_copy, 0)
        self.handles.append(model.register_load_state_dict_pre_hook(hook))

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _places(self, module: nn.Module) -> list[tuple[str, Place]]:
        """The module's own parameters that live in arenas, by attribute."""
        known = self.parameters.places
        return [(name, known[p]) for name, p in module._parameters.items() if p in known]

    def _sharded(self, module: nn.Module) -> list[tuple[str, Place]]:
        """Those of them that are sharded."""
        return [(n, place) for n, place in self._places(module) if place.arena.shard is not None]

    def _show(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        """Put slices in the place of placeholders, and tensors of their own in that of views."""
        for name, place in self._places(module):
            key = prefix + name
            value = state_dict.get(key)
            if value is place.parameter:
                continue  # asked for with keep_vars=True, as the object that it is
            if place.arena.shard is None or self.is_pinned(place):
                if value is not None and value.data_ptr() == place.view.data_ptr():
                    state_dict[key] = place.apart()
                continue
            self.parameters.settle([place])
            if value is not None:
                local = self.parameters.shard_of(place)
                state_dict[key] = ParameterShard(local, place.slices, self.transport)

    @torch.no_grad()
    def _load(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any, **__: Any
    ) -> None:
        """Keep this rank's slices, and leave torch a copy of each parameter onto itself to do."""
        for name, place in self._sharded(module):
            key = prefix + name
            value = state_dict.get(key)
            if not isinstance(value, torch.Tensor) or value.shape != place.parameter.shape:
                continue  # torch reports what is missing or misshapen
            self.parameters.settle([place])
            if isinstance(value, ShardTensor):
                self._check_slices(key, place, value)
                local = value._local_tensor
            else:
                flat = place.slices.flatten(value.detach().to(place.view.dtype))
                local = place.slices.cut(flat, self.parameters.rank)
            if self.is_pinned(place):
                place.view.copy_(value)
            else:
                self.free(place)
            self.parameters.shard_of(place).copy_(local)
            self.parameters.note_written(place)
            state_dict[key] = place.parameter

    def _check(
        self, model: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any, **__: Any
    ) -> None:
        for place in self.parameters.places.values():
            value = state_dict.get(prefix + place.name)
            if not isinstance(value, ShardTensor) or place.arena.shard is None:
                continue
            if value.shape == place.parameter.shape:
                self._check_slices(prefix + place.name, place, value)

    def _check_slices(self, key: str, place: Place, value: ShardTensor) -> None:
        if value.saved_by not in (None, self.parameters.rank):
            raise ConfigError(
                f"{key} is the slice of rank {value.saved_by}, loaded by rank "
                f"{self.parameters.rank}: every rank must load its own, or a whole state dict"
            )
        if not value.slices.same_as(place.slices):
            raise ConfigError(
                f"{key} was saved as slices for {len(value.slices.by_rank)} ranks or another "
                "bucket size, which do not fit this model: load a whole state dict, or with "
                "torch.distributed.checkpoint"
            )
        if self.is_pinned(place):
            raise ConfigError(
                f"{key} is given as slices while zeroshard.gather() keeps the module whole: load "
                "them outside of the context"
            )

    def _loaded(self, module: nn.Module, _: Any) -> None:
        """Note which parameters torch has copied onto themselves, and which it has written to."""
        for _, place in self._sharded(module):
            place.version = place.parameter._version
        self.on_loaded([place.parameter for _, place in self._places(module)])


def _always(unit: int) -> bool:
    return True


def _nothing(_: Collection[nn.Parameter]) -> None:
    pass


class _Hook(OwnHook):
    def __init__(
        self, function: Callable[..., None], may_copy: Callable[[int], bool], unit: int
    ) -> None:
        super().__init__(may_copy, unit)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.function(*args, **kwargs)
