"""`zeroshard.gather`: full parameters of a module everywhere, for as long as a context lasts."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from .engine import Engine, engines_of, newest_engine
from .errors import ConfigError

__all__ = ["engines_for", "gather", "gathered"]


def engines_for(model: nn.Module) -> list[Engine]:
    """The engines of the optimizers that a model's parameters are in.

    Raises:
        ConfigError: there is none.
    """
    engines = engines_of(model.parameters())
    if not engines:
        raise ConfigError(
            f"no zeroshard optimizer has parameters of this {type(model).__name__}: build "
            "zeroshard.AdamW first"
        )
    return engines


@contextmanager
def gathered(parameters: Collection[nn.Parameter]) -> Iterator[None]:
    """Keep the units of `parameters` whole, of whichever optimizer."""
    with ExitStack() as stack:
        for engine in engines_of(parameters):
            stack.enter_context(engine.gathered(set(parameters)))
        yield


@contextmanager
def gather(
    target: nn.Module | torch.optim.Optimizer | nn.Parameter, writeback: bool = False
) -> Iterator[None]:
    """Full parameters inside the context; below stage 3 they are full anyway.

    Contexts nest, and forward, backward and `step()` may run inside. What is written to a parameter
    inside takes effect; without `writeback` every rank must write the same.

    Args:
        target: a module, the optimizer, or one parameter.
        writeback: at the end the first rank's values win on every rank, and masters follow them.
            Every rank must enter and leave; after an exception nothing is written.

    Raises:
        ConfigError: there is no zeroshard optimizer.
    """
    if isinstance(target, nn.Module):
        parameters = list(target.parameters())
    elif isinstance(target, torch.optim.Optimizer):
        parameters = [p for group in target.param_groups for p in group["params"]]
    else:
        parameters = [target]
    engines = engines_of(parameters)
    newest = newest_engine()
    if newest is None:
        raise ConfigError(
            f"there is no zeroshard optimizer that could gather {type(target).__name__}: build "
            "zeroshard.AdamW first"
        )
    with gathered(parameters):
        yield
        if writeback:
            with torch.no_grad():
                for engine in engines:
                    engine.masters.write_back(parameters)
                owned = {p for engine in engines for p in engine.parameters.places}
                newest.broadcast(dict.fromkeys(p for p in parameters if p not in owned))
