"""Values for parameters and buffers that came from the meta device: `init_weights`.

By what modules know themselves: `_init_weights` of the model around them, as transformers' models
have it, else their own `reset_parameters`.
"""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .adapters import is_tuned, reset_adapters
from .agreement import in_agreement
from .engine import Engine
from .errors import ConfigError
from .gather import engines_for, gathered
from .meta import is_untouched, untouched_value
from .sharding import Unit
from .transport import Op, Transport
from .wrappers import unwrap

__all__ = ["Buffer", "fill_buffers", "init_weights", "persistent_buffers"]


class Buffer(NamedTuple):
    """Where a buffer is: what it is may be replaced."""

    module: nn.Module
    attribute: str

    @property
    def tensor(self) -> Tensor:
        """What it is now."""
        tensor = self.module._buffers[self.attribute]
        assert tensor is not None
        return tensor

    def set(self, values: Tensor, device: torch.device) -> None:
        """Give it values; on `device`, if it is on the meta device."""
        if self.tensor.is_meta:
            self.module._buffers[self.attribute] = torch.empty_like(self.tensor, device=device)
        self.tensor.copy_(values)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Buffer]]:
    """The buffers that are in a model's state dict, by name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), Buffer(module, name)


@torch.no_grad()
def init_weights(model: nn.Module) -> None:
    """Initialise every parameter and buffer that has no values, because it came from meta.

    Module by module, children first: `_init_weights(module)` of the nearest module around it that
    has such a method (as transformers' models do), else `module.reset_parameters()`. Every rank has
    to call this. All draw the same numbers, from the first rank's random state, so the result does
    not depend on the number of ranks; one unit is whole at a time. Random states stay as they are.

    Args:
        model: the one that the optimizer was built with.

    Raises:
        ConfigError: a parameter or buffer that no module initialises, named.
    """
    model = unwrap(model)
    engines = engines_for(model)
    transport = engines[0].transport
    with in_agreement(transport, "init_weights"):
        for engine in engines:
            engine.check_can_step("init_weights")
            engine.masters.look_at_writes()
    without = [engine.parameters.without_values for engine in engines]
    empty = {p for p in model.parameters() if any(p in those for those in without)}
    with (
        in_agreement(transport, "init_weights"),
        _same_random_numbers(transport, engines[0].device),
    ):
        _initialise(model, engines, empty)
    left = [name for name, parameter in model.named_parameters() if parameter in empty]
    if left:
        raise ConfigError(
            f"{', '.join(left)} still have no values: no _init_weights or reset_parameters writes "
            "to them. Write to them inside of zeroshard.gather(module, writeback=True), or load "
            "them with zeroshard.load_weights"
        )


@torch.no_grad()
def fill_buffers(model: nn.Module) -> None:
    """Initialise the buffers that are still on the meta device, and nothing else.

    Raises:
        ConfigError: a buffer that no module initialises, named.
    """
    if any(buffer.is_meta for buffer in model.buffers()):
        engines = engines_for(model)
        with _same_random_numbers(engines[0].transport, engines[0].device):
            _initialise(model, engines, set())


@contextmanager
def _same_random_numbers(transport: Transport, device: torch.device) -> Iterator[None]:
    """Draw from the first rank's random state; afterwards each rank's own is what it was."""
    on_device = (
        torch.get_device_module(device).get_rng_state(device) if device.type != "cpu" else None
    )
    mine = (torch.get_rng_state(), on_device)
    cpu, other = transport.all_gather_object(mine, op=Op("random state"))[0]
    devices = [] if other is None else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.set_rng_state(cpu)
        if other is not None:
            torch.get_device_module(device).set_rng_state(other, device)
        yield


def _initialise(model: nn.Module, engines: list[Engine], empty: set[nn.Parameter]) -> None:
    """Initialise buffers on the meta device and `empty`, from which what has values is taken."""
    calls = list(_calls(model))
    # A tied parameter keeps what it is given where it comes first. Where it comes again the same
    # numbers are drawn, as by a model whose parameters are tied after they were initialised.
    holders: dict[nn.Parameter, nn.Module] = {}
    for module, _ in calls:
        for parameter in module._parameters.values():
            if parameter is not None and parameter in empty:
                holders.setdefault(parameter, module)
    boundaries = {module for engine in engines for module in engine.sharded.unit_modules}
    buffers = _MetaBuffers(engines[0].device)
    failure: Exception | None = None
    with ExitStack() as whole, ExitStack() as stack:
        for engine in engines:  # a parametrized weight is computed by calling modules
            engine.parameters.checks_values = False
            whole.callback(setattr, engine.parameters, "checks_values", True)
        shown: set[Unit] = set()
        for module, call in calls:
            inside = list(_inside(module, boundaries))
            parameters = dict.fromkeys(
                p for m in inside for p in m._parameters.values() if p is not None
            )
            has_buffers = buffers.give_memory(module)
            if call is None or not (has_buffers or any(p in holders for p in parameters)):
                continue
            needed = {unit for e in engines for unit in e.sharding.units_of(parameters)}
            if not needed <= shown:
                stack.close()
                stack.enter_context(gathered(parameters))
                shown = needed
            with _kept_buffers(inside, buffers):
                to_fill = [p for p in parameters if holders.get(p) in inside]
                to_keep = [p for p in parameters if holders.get(p) not in inside]
                failure = _fill(call, to_fill, to_keep, engines) or failure
                empty.difference_update(p for p in to_fill if not is_untouched(p))
    if failure is not None:  # only now: the other ranks gather on
        raise failure
    buffers.check(model)
    for tensor in buffers.shown_now():
        _take_first_ranks(tensor, engines[0].transport)


def _fill(
    call: Callable[[], object],
    to_fill: Collection[nn.Parameter],
    to_keep: Collection[nn.Parameter],
    engines: list[Engine],
) -> Exception | None:
    """Initialise whole parameters; those in `to_keep` stay as they are. Returns what it raised.

    One that a module inside has initialised may be initialised anew, as by GPT-2's blocks.
    """
    kept = {p: p.detach().clone() for p in to_keep}
    failure = None
    try:
        call()
    except Exception as error:
        failure = error
    for parameter, values in kept.items():
        parameter.data.copy_(values)
    for parameter in to_fill:  # whoever draws from elsewhere draws the same all the same
        _take_first_ranks(parameter.data, engines[0].transport)
    filled = [p for p in to_fill if not is_untouched(p)]
    torch.autograd.graph.increment_version(filled)  # also where the call wrote to `.data`
    for engine in engines:
        engine.parameters.mark_unchanged(kept)
        engine.parameters.without_values.difference_update(filled)
    return failure


@contextmanager
def _kept_buffers(modules: Collection[nn.Module], but: "_MetaBuffers") -> Iterator[None]:
    """The buffers of `modules` that had values, and not `but`, are what they were afterwards."""
    kept = [
        (module, name, tensor, tensor.clone())
        for module in modules
        for name, tensor in module._buffers.items()
        if tensor is not None and not tensor.is_meta and Buffer(module, name) not in but.shown
    ]
    yield
    for module, name, tensor, values in kept:
        module._buffers[name] = tensor
        tensor.data.copy_(values)


def _take_first_ranks(tensor: Tensor, transport: Transport) -> None:
    if tensor.numel():
        whole = tensor.contiguous()
        transport.broadcast(whole, op=Op("initial values")).wait()
        tensor.copy_(whole)


def _calls(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[[], object] | None]]:
    """Every module once, children first, with what initialises it."""
    seen: set[nn.Module] = set()
    configs = getattr(model, "peft_config", {})

    def visit(
        module: nn.Module, around: Callable[[nn.Module], object] | None
    ) -> Iterator[tuple[nn.Module, Callable[[], object] | None]]:
        if module in seen:
            return
        seen.add(module)
        around = _init_of(module) or around
        for child in module.children():
            yield from visit(child, around)
        own = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        if is_tuned(module):
            yield module, partial(reset_adapters, module, configs)
        else:
            yield module, own if around is None else partial(around, module)

    return visit(model, None)


def _init_of(module: nn.Module) -> Callable[[nn.Module], object] | None:
    """A module's `_init_weights`, if that takes a module."""
    method = getattr(module, "_init_weights", None)
    if not callable(method):
        return None
    needed = [p for p in inspect.signature(method).parameters.values() if p.default is p.empty]
    return method if len(needed) == 1 else None


def _inside(module: nn.Module, boundaries: Collection[nn.Module]) -> Iterator[nn.Module]:
    """A module and what is in it, other units apart."""
    yield module
    for child in module.children():
        if child not in boundaries:
            yield from _inside(child, boundaries)


class _MetaBuffers:
    """Buffers that leave the meta device, to be filled by whoever knows how.

    Args:
        device: where they go.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.shown: dict[Buffer, tuple[Tensor, int]] = {}  # with the version of the tensor

    def give_memory(self, module: nn.Module) -> bool:
        """Give a module's meta buffers memory; whether there were any."""
        found = [
            Buffer(module, n) for n, t in module._buffers.items() if t is not None and t.is_meta
        ]
        for buffer in found:
            tensor = torch.empty_like(buffer.tensor, device=self.device)
            tensor.fill_(untouched_value(tensor.dtype))
            module._buffers[buffer.attribute] = tensor
            self.shown[buffer] = (tensor, tensor._version)
        return bool(found)

    def shown_now(self) -> list[Tensor]:
        """What the buffers are now."""
        return [buffer.tensor for buffer in self.shown]

    def check(self, model: nn.Module) -> None:
        """Raise if nobody wrote to one of them."""
        left = [
            buffer
            for buffer, (tensor, version) in self.shown.items()
            if buffer.tensor is tensor and tensor._version == version and is_untouched(tensor)
        ]
        names = {
            Buffer(m, n): f"{p}.{n}".lstrip(".")
            for p, m in model.named_modules()
            for n in m._buffers
        }
        for buffer in left:
            buffer.module._buffers[buffer.attribute] = torch.empty_like(
                buffer.tensor, device="meta"
            )
        if left:
            raise ConfigError(
                f"nothing initialises the buffers {', '.join(names[buffer] for buffer in left)}, "
                "which are on the meta device and in no file: assign them, or build the model so "
                "that buffers are real (register them under `with torch.device('cpu'):`)"
            )
