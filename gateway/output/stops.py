"""Stop strings, found across the borders of tokens.

Owns the text of one choice that has not been released yet. The match that completes first wins, and
of two that complete on the same character the longer one. Only a tail that really begins
a stop string is held back, so text without one flows undelayed. It does not know tokens, only text
that arrives in any pieces: how it is cut changes when text is released, never which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Released:
    text: str
    """Text that is certain to belong to the answer."""
    stop: str | None = None
    """The stop string that ended it."""


class StopMatcher:
    """Text in, text that may be shown out; after a match, nothing more."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str, *, armed: bool = True, final: bool = False) -> Released:
        """The next text. Unarmed text (below min_tokens) completes no stop, but may begin one.

        With the `final` one nothing is held back: it has begun no stop string after all.
        """
        if not self._stops:
            return Released(text)
        unarmed = len(self._held) if armed else len(self._held) + len(text)
        held = self._held + text
        match = self._first(held, unarmed)
        if match is not None:
            end, stop = match
            self._held = ""
            return Released(held[: end if self._include else end - len(stop)], stop)
        keep = 0 if final else self._beginning(held)
        self._held = held[len(held) - keep :]
        return Released(held[: len(held) - keep])

    def _first(self, text: str, beyond: int) -> tuple[int, str] | None:
        """Where the first match ends that ends behind `beyond` characters, and which it is."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = text.find(stop, max(0, beyond - len(stop) + 1))
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        return None if best is None else (best[0], best[2])

    def _beginning(self, text: str) -> int:
        """Length of the longest tail of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
