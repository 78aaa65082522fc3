"""Memory of what was read goes back. Knows no files."""

import ctypes

__all__ = ["Trimmer", "trim"]

TRIM_NBYTES = 2 * 2**20


def trim() -> None:
    """Tell the C library to give back what was freed."""
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)


class Trimmer:
    """Tells the C library to give memory back, after every few MiB that were read.

    What was freed in pieces of changing sizes would stay with it otherwise: some 70 MiB.
    """

    def __init__(self) -> None:
        self._nbytes = 0  # since the last time

    def count(self, nbytes: int) -> None:
        """So many bytes more were read."""
        self._nbytes += nbytes
        if self._nbytes >= TRIM_NBYTES:
            trim()
            self._nbytes = 0
