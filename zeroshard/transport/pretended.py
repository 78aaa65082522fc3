"""A world of ranks of which only one is there: every collective returns at once."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from ..errors import ConfigError

__all__ = ["pretended_world"]


@contextmanager
def pretended_world(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of many; what collectives give is meaningless.

    Raises:
        ConfigError: this process has a process group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigError(
            "a simulation makes a process group of its own, and this process has one already: "
            "run it in another process, or before torch.distributed.init_process_group()"
        )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
