"""Notices that work waits, room is free, and yet nothing moves.

Owns one judgement and its counter; it knows neither requests nor transfers, only what a node says
of itself each turn. A deadlock that nobody foresaw shows here, in the log and in the metrics, and
not as a server that is healthy and silent.
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

STALL_SECONDS = 2.0


class StallWatch:
    """Call `observe` every turn."""

    def __init__(self, role: str) -> None:
        self.stalls = 0
        self._role = role
        self._moved: object = None
        self._since = 0.0
        self._told = False

    def observe(self, now: float, *, work: bool, moved: object, reason: str) -> None:
        """`work`: something could be done now. `moved`: any value that changes with progress."""
        if not work or moved != self._moved:
            self._moved, self._since, self._told = moved, now, False
        elif not self._told and now - self._since > STALL_SECONDS:
            self._told = True
            self.stalls += 1
            log.error(
                "%s: work waits, nothing moves for %g s: %s", self._role, STALL_SECONDS, reason
            )
