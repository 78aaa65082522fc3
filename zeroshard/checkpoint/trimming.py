"""Memory of what was read goes back. Knows no files."""

import ctypes

__all__ = ["Trimmer"]

TRIM_NBYTES = 2 * 2**20


class Trimmer:
    """Tells the C library to give memory back, after every few MiB that were read.

    What was freed in pieces of changing sizes would stay with it otherwise: some 70 MiB.
    """

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
        self._nbytes = 0  # since the last time

    def count(self, nbytes: int) -> None:
        """So many bytes more were read."""
        self._nbytes += nbytes
        if self._nbytes >= TRIM_NBYTES:
            self._trim(0)
            self._nbytes = 0
