"""CUDA's streams and events, and what stands for them where a GPU is imitated."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from ..imitation import is_imitated

__all__ = ["Event", "Stream", "new_stream"]

T = TypeVar("T")


class Event(Protocol):
    """The end of some work on a stream."""

    def is_done(self) -> bool:
        """Whether the device has come to it; does not block."""
        ...

    def wait(self) -> None:
        """Let the current stream wait for it."""
        ...


class Stream(Protocol):
    """A second queue of work of a device."""

    def run(self, work: Callable[[], T]) -> tuple[T, Event]:
        """Queue `work` behind what the current stream has so far."""
        ...


def new_stream(device: torch.device) -> Stream:
    """A stream of its own on a device."""
    return HostStream() if is_imitated() else CudaStream(device)


class CudaStream:
    """A stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream()

    def run(self, work: Callable[[], T]) -> tuple[T, Event]:
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                result = work()
                event = torch.cuda.Event()
                event.record(self.stream)
        return result, CudaEvent(event, self.device)


class CudaEvent:
    """An event of a GPU."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event, self.device = event, device

    def is_done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


class HostStream:
    """Work that is done at once."""

    def run(self, work: Callable[[], T]) -> tuple[T, Event]:
        return work(), HostEvent()


class HostEvent:
    """The end of work that is done."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass
