"""Log lines that a peer can cause as often as it likes.

Owns how often a line is written: the first of its kind and peer at once, then at most one every few
seconds, which says how many there were in between. What is remembered is bounded, whatever names
peers give themselves. It does not know what the lines are about; the clock is an argument.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

QUIET_SECONDS = 5.0
"""Between two lines of a kind."""
MAX_REMEMBERED = 64
"""Kinds and peers told apart; what comes beyond is one peer more."""
MAX_LINE = 500
"""Characters; some of them are the peer's."""


@dataclass(slots=True)
class _Said:
    level: int
    line: str
    at: float
    held: int = 0
    """Lines like it since then."""


class SparseLog:
    """In place of a logger, for what others cause. Call `tick` now and then."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._said: dict[tuple[str, str], _Said] = {}

    def info(self, kind: str, peer: str, text: str, *args: object) -> None:
        self._say(logging.INFO, kind, peer, text, args)

    def warning(self, kind: str, peer: str, text: str, *args: object) -> None:
        """Says it now, or counts it. `kind` is one of the caller's few, `peer` who caused it."""
        self._say(logging.WARNING, kind, peer, text, args)

    def error(self, kind: str, peer: str, text: str, *args: object) -> None:
        self._say(logging.ERROR, kind, peer, text, args)

    def _say(self, level: int, kind: str, peer: str, text: str, args: tuple[object, ...]) -> None:
        key = (kind, peer)
        if key not in self._said and len(self._said) >= MAX_REMEMBERED:
            key = (kind, "")
        said, now = self._said.get(key), self._clock()
        if said is not None and now - said.at < QUIET_SECONDS:
            said.held += 1
            return
        line = _printable(text % args)
        more = f" (and {said.held} more like it)" if said is not None and said.held else ""
        self._said[key] = _Said(level, line, now)
        self._logger.log(level, "%s%s", line, more)

    def tick(self) -> None:
        """Tells the counts that are due, and forgets what has not come again."""
        now = self._clock()
        for key, said in list(self._said.items()):
            if now - said.at < QUIET_SECONDS:
                continue
            if said.held:
                self._logger.log(said.level, "%s (and %d more like it)", said.line, said.held)
                said.at, said.held = now, 0
            else:
                del self._said[key]


def _printable(line: str) -> str:
    """One line of a bounded length, whatever a peer put into it."""
    return "".join(char if char.isprintable() else "?" for char in line[:MAX_LINE])
