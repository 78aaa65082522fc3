"""Large tensors without values: programs run as ever, but nothing is computed with them.

A ghost is an ordinary tensor on the CPU, whose memory nobody reads or writes, so that it costs
address space and no memory. What an operation would make of ghosts is asked of torch's fake
tensors. Small tensors that do not depend on ghosts (masks, positions, counters, flags) are real,
and so is every decision that is taken from them.
"""

import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ConfigError

__all__ = ["REAL_NBYTES", "GhostError", "Ghosts"]

REAL_NBYTES = 2**20
"""Results of up to this size are real, unless they depend on ghosts."""

ZEROED_NBYTES = 4096  # ghosts of up to this size are full of zeros, for who reads a number


class GhostError(ConfigError):
    """An operation whose result depends on values that ghosts do not have.

    Attributes:
        operation: its name in torch, such as "aten.nonzero.default".
        where: the module that was running, "" for none.
    """

    def __init__(self, operation: str, why: str, where: str = "") -> None:
        super().__init__(f"{operation} {why}" + (f", in {where}" if where else ""))
        self.operation, self.where = operation, where


class Ghosts(TorchDispatchMode):
    """Makes ghosts of large tensors, and lets operations on them do nothing.

    Args:
        may_read: asked where a program reads a number of a ghost (`.item()`, `if tensor:`); it then
            gets 0, or a GhostError where the answer is no.
        where: asked for the module that is running, for errors.
        kernels_of: "cuda" or "cpu": whose kernels are asked what they give. What only a GPU can
            do gives ghosts, also of small and real tensors.
    """

    def __init__(
        self,
        may_read: Callable[[], bool] = lambda: True,
        *,
        where: Callable[[], str] = lambda: "",
        kernels_of: str = "cpu",
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._may_read, self._where = may_read, where
        self._device = torch.device(kernels_of, 0) if kernels_of != "cpu" else _CPU
        self._fakes = FakeTensorMode()
        self._known: dict[Any, Any] = {}  # operation and arguments -> what it returns
        self._ghosts: dict[int, Any] = {}  # address of the storage's object -> weak reference

    def is_ghost(self, tensor: Tensor) -> bool:
        """Whether a tensor has no values."""
        return tensor.untyped_storage()._cdata in self._ghosts

    def haunt(self, tensor: Tensor) -> Tensor:
        """From now on nobody reads or writes the memory of `tensor`."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        forget = self._ghosts.pop
        self._ghosts[key] = weakref.ref(storage, lambda _: forget(key, None))
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a subclass, which takes itself apart first
        if func.is_view or func in _NEVER_TOUCH:
            return func(*args, **kwargs)
        tensors = [*_tensors_in(args), *_tensors_in(kwargs.values())]
        has_ghosts = any(self.is_ghost(tensor) for tensor in tensors)
        schema = func._schema
        if func.namespace == "c10d":
            return _without_data(func, args, kwargs) if has_ghosts else func(*args, **kwargs)
        if schema.is_mutable:
            if not has_ghosts:
                return func(*args, **kwargs)
            returned = _written(schema, args, kwargs)
            if returned is not None:
                return returned[0] if len(returned) == 1 else returned or None
        if has_ghosts and func in _READS:
            return self._read(func)
        if not tensors and not _is_on_cpu(kwargs):
            return func(*args, **kwargs)
        return self._infer(func, args, kwargs, tensors, has_ghosts=has_ghosts)

    def _read(self, func: Any) -> Any:
        if not self._may_read():
            why = "reads a value of a tensor that has none here"
            raise GhostError(str(func), why, self._where())
        return _READS[func]

    def _infer(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], *, has_ghosts: bool
    ) -> Any:
        """What an operation gives: real where that is small and known, else ghosts."""
        has_ghosts = has_ghosts or func in _ON_A_GPU_ONLY
        try:
            made = self._shapes_of(func, args, kwargs, tensors)
        except _DEPENDS_ON_VALUES as error:
            if not has_ghosts:
                return func(*args, **kwargs)
            why = "gives as many elements as the values ask for, which are not known here"
            raise GhostError(str(func), why, self._where()) from error
        except UnsupportedOperatorException as error:
            why = "does not say what shape its result has"
            raise GhostError(str(func), why, self._where()) from error
        if not has_ghosts and all(shape.nbytes <= REAL_NBYTES for shape in _shapes_in(made)):
            out = func(*args, **kwargs)
            return out.zero_() if func in _UNDEFINED else out
        return _mapped(made, _Shape, lambda shape: self._ghost(shape, tensors))

    def _shapes_of(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """What an operation returns, with a _Shape for each tensor; the like is asked once."""
        place_of = {id(tensor): place for place, tensor in enumerate(tensors)}
        try:
            arguments = _key_of((args, sorted(kwargs.items())), place_of)
            key = (func, torch.get_default_dtype(), arguments)
            if key in self._known:
                return self._known[key]
        except TypeError:  # an argument that cannot be compared
            key = None
        try:
            made = self._ask(func, args, kwargs, tensors, self._device)
        except Exception:  # a build without CUDA knows its kernels in part
            if self._device == _CPU:
                raise
            made = self._ask(func, args, kwargs, tensors, _CPU)
        if key is not None:
            self._known[key] = made
        return made

    def _ask(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], device: torch.device
    ) -> Any:
        """What an operation returns for fakes on `device`, with a _Shape for each of them."""
        fake_of = {id(tensor): self._fake(tensor, device) for tensor in tensors}
        if func in _KNOWN_TO_THE_LIBRARY:
            args, kwargs = _mapped((args, kwargs), Tensor, torch.zeros_like)
            return _mapped(func(*args, **kwargs), Tensor, lambda real: _Shape.of(real, None))
        args, kwargs = _mapped((args, kwargs), Tensor, lambda tensor: fake_of[id(tensor)])
        args, kwargs = _mapped((args, kwargs), torch.device, lambda on: _moved(on, device))
        with self._fakes:
            out = _SHAPES.get(func, func)(*args, **kwargs)
        places = {
            fake_of[id(tensor)].untyped_storage()._cdata: place
            for place, tensor in enumerate(tensors)
        }
        return _mapped(
            out, Tensor, lambda fake: _Shape.of(fake, places.get(fake.untyped_storage()._cdata))
        )

    def _fake(self, tensor: Tensor, device: torch.device) -> Tensor:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        converter = self._fakes.fake_tensor_converter
        on = _moved(tensor.device, device)
        fake: Tensor = converter.from_meta_and_device(self._fakes, meta, on)
        return fake

    def _ghost(self, shape: "_Shape", tensors: list[Tensor]) -> Tensor:
        """A ghost of that shape, in memory of its own or in that of one of `tensors`."""
        if shape.source is not None:
            source = tensors[shape.source]
            same = shape.size == source.shape and shape.stride == source.stride()
            if same and shape.offset == 0:
                return source
            offset = source.storage_offset() + shape.offset
            return source.as_strided(shape.size, shape.stride, offset)
        ghost = _untouched(shape, _CPU if shape.device == self._device else shape.device)
        if shape.nbytes <= ZEROED_NBYTES:
            ghost.zero_()
        return self.haunt(ghost)


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor that an operation returns.

    Attributes:
        source: place of the argument whose memory it shares, None for memory of its own.
        offset: in elements, from where that argument begins.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    source: int | None
    offset: int

    @staticmethod
    def of(tensor: Tensor, source: int | None) -> "_Shape":
        """That of a fake tensor."""
        return _Shape(
            tuple(map(int, tensor.shape)),
            tuple(map(int, tensor.stride())),
            tensor.dtype,
            tensor.device,
            int(tensor.untyped_storage().nbytes()),
            source,
            int(tensor.storage_offset()),
        )


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The same lists, tuples and dicts with other values in the place of those of a kind."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(entry, kind, change) for entry in value])
    if isinstance(value, dict):
        return {name: _mapped(entry, kind, change) for name, entry in value.items()}
    return value


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def _shapes_in(value: Any) -> Iterator[_Shape]:
    if isinstance(value, _Shape):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _shapes_in(entry)


def _key_of(value: Any, place_of: Mapping[int, int]) -> Any:
    """All of an argument that says what shapes come of it."""
    if isinstance(value, Tensor):
        place = place_of[id(value)]
        return place, value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple([_key_of(entry, place_of) for entry in value])
    if value is None or isinstance(value, _COMPARED):
        return type(value), value
    raise TypeError(f"{type(value)} is not compared")


def _moved(device: torch.device, to: torch.device) -> torch.device:
    return to if device.type == "cpu" else device


def _untouched(like: _Shape, device: torch.device) -> Tensor:
    """Memory that nobody will touch; there may be less of it."""
    try:
        return torch.empty_strided(like.size, like.stride, dtype=like.dtype, device=device)
    except RuntimeError:
        if device.type != "cpu" or not like.nbytes:
            raise
        # More at once than the machine has; this asks it to promise nothing.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _PROMISE_NOTHING
        memory = mmap.mmap(-1, like.nbytes, flags=flags)
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype)
        return flat.as_strided(like.size, like.stride)


def _is_on_cpu(kwargs: Mapping[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is None or torch.device(device).type == "cpu"


def _written(schema: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """The arguments that an operation writes to and returns; None if it returns others too."""
    given = {
        argument.name: kwargs.get(argument.name, args[place] if place < len(args) else None)
        for place, argument in enumerate(schema.arguments)
    }
    found = []
    for value in schema.returns:
        if value.alias_info is None:
            return None
        for argument in schema.arguments:
            alias = argument.alias_info
            if alias is not None and alias.before_set == value.alias_info.before_set:
                found.append(given[argument.name])
    return tuple(found)


def _without_data(func: Any, args: Any, kwargs: Any) -> Any:
    """A collective of the fake process group, which copies data in some of them."""
    args, kwargs = _mapped((args, kwargs), Tensor, lambda tensor: tensor.new_empty(0))
    return func(*args, **kwargs)


def _grouped_mm(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """What torch's own rule says for bf16, for any dtype."""
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == 3 and b.dim() == 3:
        shape.insert(0, a.shape[0])
    elif a.dim() == 2 and b.dim() == 2:
        assert offs is not None
        shape.insert(0, offs.shape[0])
    dtype = out_dtype or a.dtype
    row = -(-shape[-1] * dtype.itemsize // 16) * 16 // dtype.itemsize  # multiples of 16 bytes
    strides = [shape[-2] * row, row, 1][-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=dtype, device=a.device)


_PROMISE_NOTHING = getattr(mmap, "MAP_NORESERVE", 0x4000)  # its value in Linux
_CPU = torch.device("cpu")
_COMPARED = (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_DEPENDS_ON_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)
_NEVER_TOUCH = {
    torch.ops.aten.set_.source_Storage_storage_offset,
    torch.ops.aten.set_.source_Tensor,
    torch.ops.aten.resize_.default,
    torch.ops.aten.lift_fresh.default,
}
_UNDEFINED = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_READS = {
    torch.ops.aten._local_scalar_dense.default: 0,
    torch.ops.aten.equal.default: True,
    torch.ops.aten.is_nonzero.default: False,
}
_SHAPES: Mapping[Any, Callable[..., Any]] = {torch.ops.aten._grouped_mm.default: _grouped_mm}
"""Operations of which torch's fake tensors do not know all."""

_KNOWN_TO_THE_LIBRARY = {torch.ops.aten.mkldnn_rnn_layer.default}
"""What returns a workspace of a size that a library chooses: run once, with zeros."""

_ON_A_GPU_ONLY = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_backward.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention_backward.default,
}
