"""With ZEROSHARD_DEBUG=1: nothing computes with a unit's memory while it is freed, or half there.

On a CPU such a use is a segmentation fault, or whatever the memory is used for by then. Here each
operation is looked at before it runs, and the error names the parameter. Changes nothing else.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    _get_dispatch_stack_at,
    _len_torch_dispatch_stack,
    _pop_torch_dispatch_stack,
    _push_on_torch_dispatch_stack,
)
from torch.utils._python_dispatch import TorchDispatchMode

from .config import is_debugging
from .errors import ConfigError, GradientError
from .modules import tensors_in
from .schedule import Event
from .sharding import Sharding, Unit
from .storage import Arena

__all__ = ["Liveness", "checked"]

RaiseEvent = Callable[[Event, int], None]

NO_VALUES = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
"""Operations, beside those that make views, which look at a tensor's shape and not at its values;
so do all that begin with `new_`, `sym_` or `is_same_`."""


def checked(sharding: Sharding, raise_event: RaiseEvent) -> RaiseEvent:
    """`raise_event` for a model's boundaries; in debug mode with every operation looked at.

    A thread that runs forwards, or that calls this, is looked at from then on. Backward takes the
    modes of its caller along to threads of its own.
    """
    if not is_debugging():
        return raise_event
    _liveness.watch(sharding)
    _liveness.look_at_this_thread()

    def raise_looked_at(event: Event, unit: int) -> None:
        _liveness.look_at_this_thread()
        raise_event(event, unit)

    return raise_looked_at


class Liveness(TorchDispatchMode):
    """Looks whether any argument of an operation lies in memory that is not there."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shardings: weakref.WeakSet[Sharding] = weakref.WeakSet()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave torch.compile alone: what it has compiled is not looked into."""
        return True

    def watch(self, sharding: Sharding) -> None:
        """Look at the units of one more optimizer, as long as it lives."""
        self.shardings.add(sharding)

    def look_at_this_thread(self) -> None:
        """Look at the operations of this thread, below all modes that its users have entered.

        They leave theirs in the order of a stack, so that ours must not lie on top.
        """
        depth = _len_torch_dispatch_stack()
        if any(_get_dispatch_stack_at(level) is self for level in range(depth)):
            return
        above = []
        while depth and not _get_dispatch_stack_at(depth - 1).is_infra_mode():
            above.append(_pop_torch_dispatch_stack(None))
            depth -= 1
        for mode in (self, *reversed(above)):
            _push_on_torch_dispatch_stack(mode)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        arriving = {
            arena.storage._cdata
            for sharding in self.shardings
            for unit in sharding.units
            if unit.pending
            for arena, _ in unit.arenas
        }
        without_memory: ConfigError | GradientError | None = None
        for tensor in tensors_in((args, kwargs)):
            storage = _storage_of(tensor)
            if storage is None:
                continue
            is_freed = storage.nbytes() == 0
            if not is_freed and storage._cdata not in arriving:
                continue
            found = self._find(storage)
            if found is None:
                continue
            if _is_composite(func):  # some of which only make a view
                with _Again(self):
                    return func.decompose(*args, **kwargs)
            fault = _not_live(func, tensor, *found, is_freed)
            if not _reads_nothing(func, tensor, args, kwargs, is_freed):
                raise fault
            if is_freed:
                without_memory = fault
        if without_memory is None:
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:  # torch refuses most views of what has no memory
            raise without_memory from error

    def _find(self, storage: torch.UntypedStorage) -> tuple[Unit, Arena] | None:
        """Whose memory it is, if it is a unit's."""
        for sharding in self.shardings:
            for unit in sharding.units:
                for arena, _ in unit.arenas:
                    if arena.storage._cdata == storage._cdata:
                        return unit, arena
        return None


class _Again:
    """Lets the mode, which is off while it looks at an operation, look at the parts of that."""

    def __init__(self, mode: Liveness) -> None:
        self.mode = mode

    def __enter__(self) -> None:
        _push_on_torch_dispatch_stack(self.mode)

    def __exit__(self, *_: object) -> None:
        _pop_torch_dispatch_stack(None)


_liveness = Liveness()


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor that has elements and memory of its own."""
    if tensor.layout != torch.strided or not tensor.numel():
        return None
    try:
        return tensor.untyped_storage()
    except RuntimeError:  # a subclass that has none
        return None


def _is_composite(func: Any) -> bool:
    """Whether an operation is made of others, which arrive one by one unless in inference mode."""
    return isinstance(func, torch._ops.OpOverload) and func._can_decompose()


def _reads_nothing(
    func: Any, tensor: Tensor, args: Iterable[Any], kwargs: Mapping[str, Any], is_freed: bool
) -> bool:
    """Whether an operation leaves the elements of `tensor` alone.

    Where they are on their way, what brings them writes to them.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return False
    name = func._schema.name.split("::")[-1]
    if name in NO_VALUES or name.startswith(("new_", "sym_", "is_same_")):
        return True
    results = func._schema.returns
    if results:
        aliases = [result.alias_info for result in results]
        if all(alias is not None and not alias.is_write for alias in aliases):
            return True
    if is_freed:
        return False
    if func.namespace in ("c10d", "_c10d_functional"):
        return True
    written = {
        argument.name: argument.alias_info is not None and argument.alias_info.is_write
        for argument in func._schema.arguments
    }
    given = [*zip(written, args, strict=False), *kwargs.items()]
    return all(written[argument] for argument, value in given if value is tensor)


def _not_live(
    func: Any, tensor: Tensor, unit: Unit, arena: Arena, is_freed: bool
) -> ConfigError | GradientError:
    start = tensor.storage_offset()
    slots = [slot for slot in arena.plan.slots if slot.offset <= start < slot.offset + slot.numel]
    what = f"parameter {slots[0].spec.name!r}" if slots else "the parameters"
    state = "freed" if is_freed else "still being gathered"
    in_backward = torch._C._current_graph_task_id() != -1
    where = " in backward" if in_backward else ""
    message = (
        f"{func} uses {what} of unit {unit.name or '(root)'!r}{where}, while the memory of the "
        f"unit is {state}: compute with a module's parameters in its own forward only, keep a copy "
        "(.clone()) instead of a view, pass what backward needs to ctx.save_for_backward, or do it "
        "inside of `with zeroshard.gather(module):`"
    )
    return GradientError(message) if in_backward else ConfigError(message)
