"""Which modules are gathered and freed together: from a module to units. Changes nothing.

A unit is a module whose parameters live and die together; parameters outside of all units, and
those that several units use, belong to the root unit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from .errors import ConfigError

__all__ = ["ROOT", "UnitPlan", "plan_units"]

ROOT = ""


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """The units of a model.

    Attributes:
        modules: name of the unit -> its module; the root unit, "", comes first.
        lookups: units that are one embedding, whose backward reads indices and no weights.
        unit_of: parameter -> name of the innermost unit that contains all its users.
        owners: (module, name of its unit) for every module that holds a parameter itself.
        read_outside: parameters that somebody reads outside of every forward.
    """

    modules: dict[str, nn.Module]
    lookups: frozenset[str] = frozenset()
    unit_of: dict[nn.Parameter, str] = field(default_factory=dict)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    read_outside: frozenset[nn.Parameter] = frozenset()


def plan_units(model: nn.Module, choice: Sequence[type[nn.Module] | str] | None) -> UnitPlan:
    """Find the units of a model.

    Args:
        model: the root unit.
        choice: module classes, class names or names of modules. None: elements of every outermost
            ModuleList of two or more modules of one class (and modules that the model lists in
            `_no_split_modules`, as transformers' models do); the embeddings and the untied output
            head (as many outputs as the longest of them has rows) outside of these, unless they are
            a tenth of the largest unit or less.

    Raises:
        ConfigError: an entry of `choice` that names nothing.
    """
    found = _discover(model) if choice is None else _chosen(model, choice)
    found = {
        name: module
        for name, module in found.items()
        if next(module.parameters(), None) is not None
    }
    lookups = frozenset(name for name, module in found.items() if type(module) is nn.Embedding)
    # PEFT takes prompts from the parameters themselves when it saves them.
    prompts = [
        module.get_submodule("prompt_encoder")
        for module in model.modules()
        if hasattr(module, "peft_config") and "prompt_encoder" in module._modules
    ]
    read_outside = frozenset(p for prompt in prompts for p in prompt.parameters())
    plan = UnitPlan(modules={ROOT: model, **found}, lookups=lookups, read_outside=read_outside)
    names = {module: name for name, module in plan.modules.items()}
    chains: dict[nn.Parameter, tuple[str, ...]] = {}
    seen_owners = set()
    for module, chain in _walk(model, (ROOT,), names):
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        for parameter in own:
            chains[parameter] = _common(chains.get(parameter, chain), chain)
        if own and (module, chain[-1]) not in seen_owners:
            seen_owners.add((module, chain[-1]))
            plan.owners.append((module, chain[-1]))
    plan.unit_of.update((parameter, chain[-1]) for parameter, chain in chains.items())
    return plan


def _walk(
    module: nn.Module, chain: tuple[str, ...], names: dict[nn.Module, str]
) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """Every module with the units it lies in, once for each chain of units that leads to it."""
    seen = set()
    waiting = [(module, chain)]
    while waiting:
        module, chain = waiting.pop()
        if (module, chain) in seen:
            continue
        seen.add((module, chain))
        yield module, chain
        for child in module._modules.values():
            if child is not None:
                unit = names.get(child)
                waiting.append((child, chain if unit is None else (*chain, unit)))


def _common(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    """The units that both chains go through, from the root on."""
    shared = [a for a, b in zip(first, second, strict=False) if a == b]
    return tuple(shared)


def _chosen(model: nn.Module, choice: Sequence[type[nn.Module] | str]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    found: set[nn.Module] = set()
    for wanted in choice:
        if isinstance(wanted, str):
            matching = [m for n, m in modules.items() if wanted in (n, type(m).__name__)]
        else:
            matching = [m for m in modules.values() if isinstance(m, wanted)]
        if not matching:
            raise ConfigError(
                f"units: {wanted!r} is neither the class nor the name of a module of "
                f"{type(model).__name__}, whose modules are {', '.join(list(modules)[1:8])} ..."
            )
        found.update(matching)
    return {name: module for name, module in modules.items() if module in found and name}


def _discover(model: nn.Module) -> dict[str, nn.Module]:
    """The units of a model of which nobody said any."""
    unsplit = {name for m in model.modules() for name in getattr(m, "_no_split_modules", ()) or ()}
    found: dict[str, nn.Module] = {}
    outside: dict[str, nn.Module] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        repeats = isinstance(module, nn.ModuleList) and _repeats(list(module.children()))
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            is_table = type(child) is nn.Embedding  # whose weight others may read
            if (repeats and not is_table) or type(child).__name__ in unsplit:
                found[path] = child
            else:
                outside[path] = child
                visit(child, f"{path}.")

    visit(model, "")
    users: dict[Tensor, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users[parameter] = users.get(parameter, 0) + 1
    # Not worth a gather of its own: a table of positions, say.
    little = max((_numel(module) for module in found.values()), default=_numel(model)) / 10
    rows = max(
        (m.num_embeddings for m in outside.values() if isinstance(m, nn.Embedding)), default=0
    )
    for path, module in outside.items():
        if type(module) is nn.Linear and module.out_features != rows:
            continue
        if _is_own_table(module, users) and _numel(module) >= little:
            path = _reader(path, outside)
            found[path] = outside[path]
    return {path: module for path, module in model.named_modules() if path in found}


def _reader(path: str, modules: Mapping[str, nn.Module]) -> str:
    """Who reads the weight of a module: itself, or PEFT's wrappers, which need not call it."""
    parent, _, name = path.rpartition(".")
    if name in ("base_layer", "token_adapter") and parent in modules:
        return _reader(parent, modules)
    return path


def _is_own_table(module: nn.Module, users: Mapping[Tensor, int]) -> bool:
    """Whether this is an embedding or a head that shares its weight with nobody."""
    # No subclass of Linear: that of nn.MultiheadAttention is never called.
    if isinstance(module, nn.Embedding) or type(module) is nn.Linear:
        return users[module.weight] == 1
    return False


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _repeats(modules: Sequence[nn.Module]) -> bool:
    """Whether two or more of the modules are of one class."""
    classes = [type(module) for module in modules]
    return len(classes) > len(set(classes))
