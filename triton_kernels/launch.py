"""How a Triton kernel is launched: where, with which block sizes, from which compiled handle.

Nothing here, and no kernel, imports Triton before the first launch, so that the package works
without it. No autotuning: it would run an update many times on live state.
"""

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import triton.language as tl

__all__ = ["dry_launches", "is_available", "kernel", "launch", "load", "sizes_for", "target_of"]

logger = logging.getLogger(__name__)

_functions: dict[str, Callable[..., Any]] = {}
_compiled: dict[tuple[Any, ...], Any] = {}
_is_dry = False


def kernel(function: Callable[..., Any]) -> Any:
    """Mark a function that Triton compiles; until `load` it is a plain one that cannot run."""
    _functions[f"{function.__module__}.{function.__name__}"] = function
    return function


@lru_cache(maxsize=1)
def load() -> Mapping[str, Any]:
    """Import Triton and hand it every kernel; their modules' names then mean the compiled ones.

    Returns:
        The kernels by name, without their module.
    """
    import triton
    import triton.language as tl

    numbers = ["step", "first_row", "num_blocks", "numel", "seed"]
    jitted: dict[Any, Any] = {}
    for function in _functions.values():
        taken = function.__code__.co_varnames[: function.__code__.co_argcount]
        jit = triton.jit(do_not_specialize=[name for name in numbers if name in taken])
        jitted[function] = jit(function)
    for module in {function.__module__ for function in _functions.values()}:
        names = vars(sys.modules[module])
        names["tl"] = tl
        for name, value in list(names.items()):
            if callable(value) and value in jitted:
                names[name] = jitted[value]
    return {function.__name__: compiled for function, compiled in jitted.items()}


@contextmanager
def dry_launches() -> Iterator[None]:
    """Take the way of a GPU on any device, and launch nothing."""
    global _is_dry
    before, _is_dry = _is_dry, True
    try:
        yield
    finally:
        _is_dry = before


@lru_cache(maxsize=1)
def _is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_available(device: torch.device) -> bool:
    """Whether Triton runs on `device`: a GPU that it knows, with all that it needs to compile."""
    return _is_dry or _runs_on(device)


@cache
def _runs_on(device: torch.device) -> bool:
    if device.type != "cuda" or not _is_installed():
        return False
    try:
        one = torch.zeros(1, device=device)
        launch("probe", 1, (one,), (), (), num_warps=1)
        return bool(one == 1)
    except Exception:  # of whatever kind: an old GPU, no C compiler, a broken installation
        logger.warning("Triton is installed and does not run on %s", device, exc_info=True)
        return False


@kernel
def probe(out):  # type: ignore[no-untyped-def]
    """Set `out` [1] to 1."""
    tl.store(out, 1.0)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How the update is cut into programs."""

    block: int  # elements that a program has in registers at a time
    vectors: int  # how many of them it does, one after the other
    num_warps: int

    @property
    def program_numel(self) -> int:
        """Elements of a program."""
        return self.block * self.vectors


def sizes_for(moments: str, target: str) -> Sizes:
    """The sizes for moments of a format on a target, "sm_90" or "gfx942" for example.

    Four elements a thread make 16-byte accesses of fp32 and 8-byte ones of 16-bit types without a
    detour through shared memory. With 8-bit moments a warp takes a whole block of 256. Two vectors
    a program read its row of the table and its scalars once; on Blackwell Triton then needs so many
    registers for 16- and 8-bit moments that one is better. docs/kernels.md has the figures.
    """
    is_amd, is_blackwell = target.startswith("gfx"), target.startswith(("sm_10", "sm_12"))
    return Sizes(
        block=1024 if moments == "int8" else 512,
        vectors=1 if is_blackwell and moments != "fp32" else 2,
        num_warps=2 if is_amd else 4,
    )


@cache
def target_of(device: torch.device) -> str:
    """What kernels for `device` are compiled for; a CPU has Triton's interpreter only."""
    if device.type == "cpu":
        return "cpu"
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _bits(tensor: Tensor) -> Tensor:
    """bf16 as int16, as kernels take it; anything else as it is."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def launch(
    name: str,
    num_programs: int,
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    constants: Sequence[Any],
    num_warps: int,
) -> None:
    """Launch a kernel on the current stream of the tensors' device.

    After the first launch the compiled handle is called directly, a sixth of the host time: Triton
    would look at every argument again to find the same one.

    Args:
        name: of the kernel.
        num_programs: size of the grid; 0 launches nothing.
        tensors: its pointers, in order.
        numbers: its numbers, which are never compiled in; each below 2^31.
        constants: its constexprs, in order.
        num_warps: warps of a program.
    """
    if num_programs == 0 or _is_dry:
        return
    device = tensors[0].device
    alignments = [(tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors]
    key = (name, device.index, num_warps, *constants, *alignments)
    with _current(device):
        compiled = _compiled.get(key)
        # For AMD Triton compiles in how far the memory behind a pointer reaches, so it must look.
        if compiled is None or torch.version.hip is not None:
            # Fusing a multiplication with an addition would round once where torch rounds twice.
            options = {"num_warps": num_warps, "enable_fp_fusion": False}
            arguments = (*map(_bits, tensors), *numbers, *constants)
            _compiled[key] = load()[name][(num_programs,)](*arguments, **options)
        else:  # which takes addresses only, and no notice of dtypes
            compiled[(num_programs, 1, 1)](*tensors, *numbers, *constants)


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be the tensors' own."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
