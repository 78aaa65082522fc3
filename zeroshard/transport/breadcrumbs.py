"""Says which operations are stuck before a backend's watchdog ends the process."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from .base import Op

__all__ = ["Breadcrumbs"]

logger = logging.getLogger(__name__)

STUCK = (
    "%s has waited %.0f s for the other ranks; the process ends after %.0f s. Every rank must run "
    "the same number of backwards and steps; ZEROSHARD_DEBUG=1 says which rank does something else"
)


class Breadcrumbs:
    """Watches operations from a thread and logs each one that takes half of the timeout.

    NCCL's watchdog aborts the process when a collective times out, so no exception can carry the
    name of what was waited for; a line in the log before it does.

    Args:
        timeout_s: after which the backend gives up.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._under_way: deque[tuple[float, Op, Callable[[], bool]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def watch(self, op: Op, is_done: Callable[[], bool]) -> None:
        """Remember an operation until `is_done` (which must not block) says so."""
        with self._changed:
            self._under_way.append((time.monotonic(), op, is_done))
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, daemon=True)
                self._thread.start()

    def _look(self) -> None:
        """Look at the oldest operations now and then; end when there is none."""
        while True:
            time.sleep(self.timeout_s / 20)
            with self._changed:
                self._under_way = deque(entry for entry in self._under_way if not entry[2]())
                late = time.monotonic() - self.timeout_s / 2
                stuck = [entry for entry in self._under_way if entry[0] < late]
                for entry in stuck:
                    self._under_way.remove(entry)
                if not self._under_way:
                    self._thread = None
            for _, op, _ in stuck:
                logger.warning(STUCK, op, self.timeout_s / 2, self.timeout_s)
            if self._thread is None:
                return
