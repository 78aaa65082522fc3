"""What torch does otherwise on a GPU than on a CPU, and a program must keep for it.

A table of rewrites, each of which holds for a context and leaves nothing behind. What a kernel
returns (the types of a norm's statistics, strides) is asked of torch's fake tensors of a GPU; the
entries here are the choices that torch makes before it comes to a kernel.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .cuda_attention import attention
from .cuda_autocast import autocast_of_cuda

__all__ = ["CHOICES", "Choice", "cuda_choices"]

aten = torch.ops.aten

KEYS = ("CPU", "AutogradCPU")
"""Where an operation is still whole; below it the CPU's way has been chosen."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One rewrite.

    Attributes:
        name: what is rewritten.
        what: what a GPU does.
        applied: a context in which tensors of the CPU are treated so.
    """

    name: str
    what: str
    applied: Callable[[], AbstractContextManager[object]]


def _dropout(input: Tensor, p: float, train: bool) -> Any:
    if not train or p in (0.0, 1.0) or not input.numel():
        return input * 0.0 if train and p == 1.0 else aten.alias.default(input)
    return aten.native_dropout.default(input, p, train)[0]


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    if weight is not None and weight.dtype != input.dtype:
        # The fused kernel wants one dtype. On a CPU this is no kernel, but what both do without.
        return aten._fused_rms_norm.default(input, normalized_shape, weight, eps)[0]
    return _RmsNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]


class _RmsNorm(torch.autograd.Function):
    """What the fused kernel allocates: on a CPU torch has none, nor a gradient of it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, num_dims: int) -> Tensor:
        rows = (*input.shape[: input.dim() - num_dims], *[1] * num_dims)
        ctx.save_for_backward(input, weight, input.new_empty(rows, dtype=torch.float32))
        return torch.empty_like(input, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        input, weight, _ = ctx.saved_tensors
        of_weight = ctx.needs_input_grad[1]
        return torch.empty_like(input), torch.empty_like(weight) if of_weight else None, None


class _OnTheCpu(TorchFunctionMode):
    """Whoever asks for a GPU gets the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0].to("cpu")
        if "device" in kwargs:
            kwargs["device"] = _without_gpu(kwargs["device"])
        if func in _TAKES_DEVICE:
            args = tuple(_without_gpu(value) for value in args)
        return func(*args, **kwargs)


_TAKES_DEVICE = {Tensor.to, Tensor.new_tensor, Tensor.pin_memory}


def _without_gpu(value: Any) -> Any:
    is_gpu = (isinstance(value, str) and value.split(":")[0] == "cuda") or (
        isinstance(value, torch.device) and value.type == "cuda"
    )
    return torch.device("cpu") if is_gpu else value


def _instead(name: str, function: Callable[..., Any]) -> Callable[[], AbstractContextManager[Any]]:
    """A context in which `function` is aten's operation of that name, on tensors of the CPU."""

    @contextmanager
    def applied() -> Iterator[None]:
        library = torch.library.Library("aten", "IMPL")
        try:
            for key in KEYS:
                library.impl(name, function, key)
            yield
        finally:
            library._destroy()

    return applied


CHOICES = (
    Choice(
        name="attention",
        what="flash attention for 16 bits without a mask, else the memory-efficient kernel, where "
        "these can be used: a sum for each row is kept, no matrix of scores",
        applied=_instead("scaled_dot_product_attention", attention),
    ),
    Choice(
        name="dropout",
        what="keeps a mask of one byte an element, where a CPU keeps one of the input's dtype",
        applied=_instead("dropout", _dropout),
    ),
    Choice(
        name="rms_norm",
        what="one kernel, which keeps a statistic for each row and makes nothing between",
        applied=_instead("rms_norm", _rms_norm),
    ),
    Choice(
        name="autocast",
        what='torch.autocast("cuda") is on, and casts the operations of its own lists',
        applied=autocast_of_cuda,
    ),
    Choice(
        name="devices",
        what='"cuda" is there: tensors and modules that are made on it or sent to it',
        applied=_OnTheCpu,
    ),
)
"""All rewrites. Each has a test of its name."""


@contextmanager
def cuda_choices() -> Iterator[None]:
    """Let torch choose on tensors of the CPU as it does on a GPU; in one thread at a time."""
    with ExitStack() as stack:
        for choice in CHOICES:
            stack.enter_context(choice.applied())
        yield
