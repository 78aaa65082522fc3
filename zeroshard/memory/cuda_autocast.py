"""torch.autocast("cuda") on tensors of the CPU: on, with CUDA's lists of operations.

On a build without CUDA it warns and does nothing, and a model would be taken for one in fp32.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["IN_FP32", "autocast_of_cuda"]

IN_FP32 = (
    *("exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "softplus"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "logsumexp", "dist", "renorm"),
    *("layer_norm", "native_layer_norm", "group_norm", "rms_norm", "cosine_similarity"),
    *("kl_div", "l1_loss", "hinge_embedding_loss", "soft_margin_loss", "margin_ranking_loss"),
)
"""Casts its inputs to fp32 under CUDA's autocast and not under the CPU's."""

IN_FP32_BY_DTYPE = ("softmax.int", "log_softmax.int", "cumsum", "sum", "sum.dim_IntList")
"""Likewise, by its argument `dtype`, unless the caller gave one."""

has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_KEY = torch._C.DispatchKey.AutocastCPU
_without_autocast = torch._C._ExcludeDispatchKeyGuard


def _operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _in_fp32(name: str) -> Callable[..., Any]:
    operation = _operation(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast(torch._C.DispatchKeySet(_KEY)):
            return operation(
                *(_widened(value) for value in args),
                **{key: _widened(value) for key, value in kwargs.items()},
            )

    return call


def _in_fp32_by_dtype(name: str) -> Callable[..., Any]:
    operation = _operation(name)
    place = [argument.name for argument in operation._schema.arguments].index("dtype")

    def call(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("dtype", args[place] if place < len(args) else None)
        with _without_autocast(torch._C.DispatchKeySet(_KEY)):
            if given is not None or args[0].dtype not in _NARROW:
                return operation(*args, **kwargs)
            return operation(*args[:place], **{**kwargs, "dtype": torch.float32})

    return call


_NARROW = (torch.float16, torch.bfloat16)


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _NARROW else value


@contextmanager
def autocast_of_cuda() -> Iterator[None]:
    """Let `torch.autocast("cuda")` be what it is on a GPU, for tensors on the CPU."""
    library = torch.library.Library("aten", "IMPL")
    original = torch.autocast.__init__

    def begin(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == "cuda":
            dtype = torch.get_autocast_dtype("cuda") if dtype is None else dtype
            device_type = "cpu"
        original(self, device_type, dtype, enabled, cache_enabled)

    try:
        for names, make in ((IN_FP32, _in_fp32), (IN_FP32_BY_DTYPE, _in_fp32_by_dtype)):
            for name in names:
                if not has_kernel(f"aten::{name}", "AutocastCPU"):  # else the CPU widens it too
                    library.impl(name, make(name), "AutocastCPU")
        torch.autocast.__init__ = begin  # type: ignore[method-assign]
        yield
    finally:
        torch.autocast.__init__ = original  # type: ignore[method-assign]
        library._destroy()
