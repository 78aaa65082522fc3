"""`zeroshard.gather`: full parameters of a module everywhere, for as long as a context lasts."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .engine import engines_of
from .errors import ConfigError

__all__ = ["gather"]


@contextmanager
def gather(
    target: nn.Module | torch.optim.Optimizer | nn.Parameter, writeback: bool = False
) -> Iterator[None]:
    """Full parameters inside the context; below stage 3 they are full anyway.

    Args:
        target: a module, the optimizer, or one parameter.
        writeback: at the end the first rank's values win on every rank, and masters follow them.
            Every rank must enter and leave; after an exception nothing is written.

    Raises:
        ConfigError: no zeroshard optimizer owns any of the parameters.
    """
    if isinstance(target, nn.Module):
        parameters = list(target.parameters())
    elif isinstance(target, torch.optim.Optimizer):
        parameters = [p for group in target.param_groups for p in group["params"]]
    else:
        parameters = [target]
    engines = engines_of(parameters)
    if not engines:
        raise ConfigError(
            f"no zeroshard optimizer owns a parameter of {type(target).__name__}: build "
            "zeroshard.AdamW before gathering"
        )
    if not writeback:
        yield
        return
    yield
    with torch.no_grad():
        for engine in engines:
            engine.write_back(parameters)
