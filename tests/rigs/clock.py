"""A clock that stands still until a test sets it."""

from __future__ import annotations


class Clock:
    """Seconds; handed over in place of `time.monotonic`."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
