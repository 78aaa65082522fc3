"""What fails on one rank fails on all of them, at the same point. Knows no parameters."""

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import ConfigError
from .transport import HostRanks, Op, Transport

__all__ = ["in_agreement"]


@contextmanager
def in_agreement(
    transport: Transport | HostRanks, what: str, kind: type[ConfigError] = ConfigError
) -> Iterator[None]:
    """Wait, at the end, for every rank to come there; raise on all if the body raised on any.

    Args:
        transport: the wire.
        what: names the work, for messages.
        kind: of the error where it was not a ConfigError, or another rank's.

    Raises:
        ConfigError: the first failure, by rank.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    said = None if error is None else str(error) or repr(error)
    answers = transport.all_gather_object(said, op=Op(what))
    failed = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
    if not failed:
        return
    if isinstance(error, ConfigError) and set(failed.values()) == {said}:
        raise error
    rank, message = next(iter(failed.items()))
    raise kind(f"{what} failed on rank {rank}: {message}") from error
