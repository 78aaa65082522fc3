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
        self._lock = threading.Lock()
        self._is_looking = False

    def watch(self, op: Op, is_done: Callable[[], bool]) -> None:
        """Remember an operation until `is_done` (which must not block) says so."""
        with self._lock:
            while self._under_way and self._under_way[0][2]():
                self._under_way.popleft()
            self._under_way.append((time.monotonic(), op, is_done))
            if not self._is_looking:
                self._is_looking = True
                threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        """Look at the operations now and then; end when there is none."""
        goes_on = True
        while goes_on:
            time.sleep(self.timeout_s / 20)
            with self._lock:
                late = time.monotonic() - self.timeout_s / 2
                waiting = [entry for entry in self._under_way if not entry[2]()]
                stuck = [entry for entry in waiting if entry[0] < late]
                self._under_way = deque(entry for entry in waiting if entry[0] >= late)
                goes_on = self._is_looking = bool(self._under_way)
            for _, op, _ in stuck:
                logger.warning(STUCK, op, self.timeout_s / 2, self.timeout_s)
