"""Large tensors without values: programs run as ever, but nothing is computed with them.

A ghost is an ordinary tensor on the CPU, whose memory nobody reads or writes, so that it costs
address space and no memory. What an operation would make of ghosts is asked of torch's fake
tensors. Small tensors that do not depend on ghosts (masks, positions, counters, flags) are real,
and so is every decision that is taken from them.
"""

import mmap
import weakref
from collections.abc import Callable, Mapping
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
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

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
        flat, spec = tree_flatten((args, kwargs))
        tensors = [value for value in flat if isinstance(value, Tensor)]
        if any(type(t) not in _PLAIN for t in tensors):
            return NotImplemented  # a subclass, which takes itself apart first
        if func.is_view or func in _NEVER_TOUCH:
            return func(*args, **kwargs)
        has_ghosts = any(self.is_ghost(tensor) for tensor in tensors)
        schema = func._schema
        if func.namespace == "c10d":
            return _without_data(func, flat, spec) if has_ghosts else func(*args, **kwargs)
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
        return self._infer(func, flat, spec, tensors, has_ghosts=has_ghosts)

    def _read(self, func: Any) -> Any:
        if not self._may_read():
            why = "reads a value of a tensor that has none here"
            raise GhostError(str(func), why, self._where())
        return _READS[func]

    def _infer(
        self, func: Any, flat: list[Any], spec: Any, tensors: list[Tensor], *, has_ghosts: bool
    ) -> Any:
        """What an operation gives: real where that is small and known, else ghosts."""
        has_ghosts = has_ghosts or func in _ON_A_GPU_ONLY
        try:
            try:
                out, fake_of = self._ask(func, flat, spec, tensors, self._device)
            except Exception:  # a build without CUDA knows its kernels in part
                if self._device == _CPU:
                    raise
                out, fake_of = self._ask(func, flat, spec, tensors, _CPU)
        except _DEPENDS_ON_VALUES as error:
            if not has_ghosts:
                arguments, named = tree_unflatten(flat, spec)
                return func(*arguments, **named)
            why = "gives as many elements as the values ask for, which are not known here"
            raise GhostError(str(func), why, self._where()) from error
        except UnsupportedOperatorException as error:
            why = "does not say what shape its result has"
            raise GhostError(str(func), why, self._where()) from error
        made = [value for value in tree_flatten(out)[0] if isinstance(value, Tensor)]
        if not has_ghosts and all(t.untyped_storage().nbytes() <= REAL_NBYTES for t in made):
            arguments, named = tree_unflatten(flat, spec)
            out = func(*arguments, **named)
            return out.zero_() if func in _UNDEFINED else out
        known = {
            fake_of[id(tensor)].untyped_storage()._cdata: tensor
            for tensor in tensors
            if id(tensor) in fake_of
        }
        return tree_map_only(Tensor, lambda fake: self._ghost(fake, known), out)

    def _ask(
        self, func: Any, flat: list[Any], spec: Any, tensors: list[Tensor], device: torch.device
    ) -> tuple[Any, dict[int, Tensor]]:
        """What an operation gives for fakes on `device`, and the fake of each tensor's id."""
        fake_of: dict[int, Tensor] = {}
        for tensor in tensors:
            if id(tensor) not in fake_of:
                fake_of[id(tensor)] = self._fake(tensor, device)

        def instead(value: Any) -> Any:
            if isinstance(value, Tensor):
                return fake_of[id(value)]
            return device if isinstance(value, torch.device) and value.type == "cpu" else value

        if func in _KNOWN_TO_THE_LIBRARY:
            zeros = [torch.zeros_like(v) if isinstance(v, Tensor) else v for v in flat]
            arguments, named = tree_unflatten(zeros, spec)
            made = func(*arguments, **named)
            return tree_map_only(Tensor, lambda real: self._fake(real, device), made), {}
        arguments, named = tree_unflatten([instead(value) for value in flat], spec)
        with self._fakes:
            return _SHAPES.get(func, func)(*arguments, **named), fake_of

    def _fake(self, tensor: Tensor, device: torch.device) -> Tensor:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        converter = self._fakes.fake_tensor_converter
        on = device if tensor.device.type == "cpu" else tensor.device
        fake: Tensor = converter.from_meta_and_device(self._fakes, meta, on)
        return fake

    def _ghost(self, fake: Tensor, known: dict[int, Tensor]) -> Tensor:
        """A ghost like `fake`; of a storage in `known` its tensor, or a view of that."""
        source = known.get(fake.untyped_storage()._cdata)
        if source is not None:
            same = fake.shape == source.shape and fake.stride() == source.stride()
            if same and fake.storage_offset() == 0:
                return source
            offset = source.storage_offset() + int(fake.storage_offset())
            return source.as_strided(fake.shape, fake.stride(), offset)
        on = _CPU if fake.device == self._device else fake.device
        ghost = _untouched(fake, on)
        if fake.untyped_storage().nbytes() <= ZEROED_NBYTES:
            ghost.zero_()
        return self.haunt(ghost)


def _untouched(like: Tensor, device: torch.device) -> Tensor:
    """Memory that nobody will touch; there may be less of it."""
    try:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    except RuntimeError:
        if device.type != "cpu" or not like.untyped_storage().nbytes():
            raise
        # More at once than the machine has; this asks it to promise nothing.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _PROMISE_NOTHING
        memory = mmap.mmap(-1, like.untyped_storage().nbytes(), flags=flags)
        flat = torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype)
        return flat.as_strided(like.shape, like.stride())


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


def _without_data(func: Any, flat: list[Any], spec: Any) -> Any:
    """A collective of the fake process group, which copies data in some of them."""
    empty = [value.new_empty(0) if isinstance(value, Tensor) else value for value in flat]
    arguments, named = tree_unflatten(empty, spec)
    return func(*arguments, **named)


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
