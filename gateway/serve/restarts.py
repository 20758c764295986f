"""What a supervisor remembers of one role, and what it decides when that role ends.

Owns a role's restarts (how soon, and when to give up) and what it has reported on its status pipe.
Pure: the clock is an argument, and processes and pipes are somebody else's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

CONFIG_ERROR = 2
"""Exit status of a role that was told something impossible: the same start would fail again."""


@dataclass(frozen=True, slots=True)
class RoleReport:
    """One line of a status pipe."""

    address: str | None = None
    ready: bool = False
    error: str | None = None


class ReportReader:
    """Turns the bytes of a status pipe into reports, whichever way they are cut."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[RoleReport]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [_report(line) for line in lines if line.strip()]


def _report(line: bytes) -> RoleReport:
    told: dict[str, Any] = json.loads(line)
    return RoleReport(told.get("address"), bool(told.get("ready")), told.get("error"))


class Restarts:
    """When a role that ended is started again.

    The first time at once, then ever later, until it has been ready for a while. A role that was
    never ready is given up: at once after a configuration error, else after a few tries.
    """

    DELAYS_S = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
    STEADY_S = 30.0
    FIRST_TRIES = 4

    def __init__(self) -> None:
        self.ever_ready = False
        self._failures = 0
        self._ready_at: float | None = None

    def became_ready(self, now: float) -> None:
        self.ever_ready = True
        self._ready_at = now

    def ended(self, status: int, now: float) -> float | None:
        """Seconds to wait before the next start; None: give up."""
        if self._ready_at is not None and now - self._ready_at >= self.STEADY_S:
            self._failures = 0
        self._ready_at = None
        self._failures += 1
        if not self.ever_ready and (status == CONFIG_ERROR or self._failures >= self.FIRST_TRIES):
            return None
        return self.DELAYS_S[min(self._failures, len(self.DELAYS_S)) - 1]
