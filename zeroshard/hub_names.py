"""Checkpoints whose names or tensors differ from the model's, as transformers knows of them.

Mixtral's experts, say, are one tensor each in its files and one for all in the model. The rules,
and what they do, are transformers' own.
"""

from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ConfigError
from .weight_files import WeightFiles

__all__ = ["Source", "forget_conversions", "sources_of"]


class Source:
    """Where one tensor of the model comes from: one tensor of the files, as it is.

    Attributes:
        name: of the tensor in the files.
        shape: of it; None where only reading it tells.
    """

    def __init__(self, files: WeightFiles, name: str) -> None:
        self.files, self.name = files, name
        self.shape: tuple[int, ...] | None = files.shapes[name]
        self.is_float = name in files.floats

    def read(self) -> Tensor:
        """The whole tensor, in the file's dtype."""
        return self.files.read(self.name)

    def read_range(self, stride: tuple[int, ...], start: int, numel: int) -> Tensor:
        """See `WeightFiles.read_range`."""
        return self.files.read_range(self.name, stride, start, numel)


class Conversion:
    """Tensors of the files that become one or more of the model's, by one of those rules."""

    last: "Conversion | None" = None  # whose results are kept: the others' have been read

    def __init__(self, converter: Any, key: str, model: Any) -> None:
        self.converter, self.key, self.model = converter, key, model
        self.parts: list[tuple[str, Source]] = []  # with the pattern that each one matches
        self.results: dict[str, Tensor] = {}

    def result(self, name: str) -> Tensor:
        """One of the model's tensors."""
        if Conversion.last is not self:
            forget_conversions()
            Conversion.last = self
            converter = deepcopy(self.converter)
            for pattern, source in self.parts:
                converter.add_tensor(self.key, source.name, pattern, source.read)
            made = converter.convert(self.key, model=self.model, config=self.model.config)
            self.results = {k: v[0] if isinstance(v, list) else v for k, v in made.items()}
        return self.results[name]


def forget_conversions() -> None:
    """Let go of what the last conversion made."""
    if Conversion.last is not None:
        Conversion.last.results = {}
    Conversion.last = None


class Converted(Source):
    """One result of a conversion, which is made whole, whatever part of it is wanted."""

    def __init__(self, conversion: Conversion, name: str) -> None:
        self.conversion, self.name, self.shape = conversion, name, None
        self.is_float = True

    def read(self) -> Tensor:
        return self.conversion.result(self.name)

    def read_range(self, stride: tuple[int, ...], start: int, numel: int) -> Tensor:
        whole = self.read()
        ordered = torch.empty_strided(whole.shape, stride, dtype=whole.dtype).copy_(whole)
        return ordered.as_strided((whole.numel(),), (1,))[start : start + numel]


def sources_of(
    files: WeightFiles,
    model: nn.Module,
    known: Collection[str],
    names: Callable[[str], str | None] | None,
) -> Iterator[tuple[str, Source]]:
    """What the files hold, under the names of the model.

    Args:
        files: the checkpoint.
        model: whose rules to use, where it is one of transformers'.
        known: the names that the model has.
        names: see `load_weights`.
    """
    wanted = {name: name if names is None else names(name) for name in files.shapes}
    for name, target in wanted.items():
        if target is not None and not isinstance(target, str):
            raise ConfigError(f"names({name!r}) must return a string or None, got {target!r}")
    renames = any(name is not None and name not in known for name in wanted.values())
    rules = _rules_of(model) if renames else None
    conversions: dict[str, Conversion] = {}
    for name in sorted(files.shapes, key=_natural_order):
        target = wanted[name]
        if target is None:
            continue
        pattern = None
        if rules is not None and target not in known:
            target, pattern = rules.rename(target, known)
        if rules is None or pattern is None:
            yield target, Source(files, name)
            continue
        if target not in conversions:
            converter = rules.converters[pattern]
            conversion = conversions[target] = Conversion(converter, target, model)
            first, *_ = converter.target_patterns
            for result in converter.target_patterns:
                made = target.replace(first, result)
                yield made, Converted(conversion, made)
        conversions[target].parts.append((pattern, Source(files, name)))


def _natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Numbers in names compare as numbers: experts are put together in this order."""
    return [
        (not part.isdecimal(), int(part) if part.isdecimal() else 0, part)
        for part in name.split(".")
    ]


class _Rules:
    """Transformers' rules for one model."""

    def __init__(self, model: Any, rename: Callable[..., Any], rules: list[Any]) -> None:
        self.prefix = model.base_model_prefix
        self._rename = rename
        converters = [rule for rule in rules if hasattr(rule, "operations")]
        self._renamings = [rule for rule in rules if not hasattr(rule, "operations")]
        self._converters = converters
        self.converters = {p: rule for rule in converters for p in rule.source_patterns}

    def rename(self, name: str, known: Collection[str]) -> tuple[str, str | None]:
        """The model's name, and the pattern of the converter that makes it of several."""
        has = dict.fromkeys(known, True)
        renamed, pattern = self._rename(name, self._renamings, self._converters, self.prefix, has)
        return renamed, pattern


def _rules_of(model: Any) -> _Rules | None:
    if not hasattr(model, "base_model_prefix"):
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import rename_source_key
    except ImportError:
        return None
    return _Rules(model, rename_source_key, get_model_conversion_mapping(model))
