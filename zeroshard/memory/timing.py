"""How long steps take while they are followed, and while they are not."""

import statistics
import time

__all__ = ["Timing"]


class Timing:
    """Takes the time between the ends of steps."""

    def __init__(self) -> None:
        self.followed: list[float] = []  # seconds of each step
        self.free: list[float] = []
        self._began = self._last = time.perf_counter()
        self._ended: float | None = None

    def step_is_over(self, *, was_followed: bool) -> None:
        """Another one ended."""
        now = time.perf_counter()
        (self.followed if was_followed else self.free).append(now - self._last)
        self._last = now

    def end(self) -> None:
        """The context is left."""
        self._ended = time.perf_counter()

    @property
    def total(self) -> float:
        """Seconds in the context, so far."""
        return (time.perf_counter() if self._ended is None else self._ended) - self._began

    def in_words(self) -> list[str]:
        """What following costs, if it is known, as a sentence."""
        followed = self.followed[1:]  # the first began when the context did
        if not followed:
            return []
        median = statistics.median(followed)
        if not self.free:
            return [
                f"A step took {median:.3g} s while it was followed (median of {len(followed)}); "
                "steps= leaves later ones alone, and shows what following costs."
            ]
        alone = statistics.median(self.free)
        return [
            f"A step took {median:.3g} s while it was followed and {alone:.3g} s when it was not "
            f"(medians of {len(followed)} and {len(self.free)}): {median / alone:.2f} times as "
            "long."
        ]
