"""A process's log lines: their form on stderr, and how often a peer can cause one.

Owns both forms, for people and for machines: a caller that has facts beside its message
(`extra={"facts": {...}}`) writes them into the message for people; as JSON they are fields of
their own. Of lines that others cause as often as they like, the first of its kind and peer is
written at once, then at most one every few seconds, which says how many there were in between; what
is remembered is bounded, whatever names peers give themselves. It knows no role, and not what the
lines are about.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]

QUIET_SECONDS = 5.0
"""Between two lines of a kind."""
MAX_REMEMBERED = 64
"""Kinds and peers told apart; what comes beyond is one peer more."""
MAX_LINE = 500
"""Characters; some of them are the peer's."""


def set_up_logging(name: str, level: str, form: str = "text") -> None:
    """From now on everything at `level` or above goes to stderr; `name` says whose line it is."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonLines(name)
        if form == "json"
        else logging.Formatter(f"%(asctime)s {name} %(levelname)s %(message)s")
    )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "role": self._name,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        facts: dict[str, Any] = getattr(record, "facts", {})
        return json.dumps(facts | line, default=str)


# -- lines that a peer can cause -----------------------------------------------------------------


@dataclass(slots=True)
class _Line:
    level: int
    text: str
    at: float
    held: int = 0
    """Lines like it since then."""


class SparseLog:
    """In place of a logger, for what others cause. Call `tick` now and then."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lines: dict[tuple[str, str], _Line] = {}

    def info(self, kind: str, peer: str, text: str, *args: object) -> None:
        self._write(logging.INFO, kind, peer, text, args)

    def warning(self, kind: str, peer: str, text: str, *args: object) -> None:
        """Says it now, or counts it. `kind` is one of the caller's few, `peer` who caused it."""
        self._write(logging.WARNING, kind, peer, text, args)

    def error(self, kind: str, peer: str, text: str, *args: object) -> None:
        self._write(logging.ERROR, kind, peer, text, args)

    def _write(self, level: int, kind: str, peer: str, text: str, args: tuple[object, ...]) -> None:
        key = (kind, peer)
        if key not in self._lines and len(self._lines) >= MAX_REMEMBERED:
            key = (kind, "")
        known, now = self._lines.get(key), self._clock()
        if known is not None and now - known.at < QUIET_SECONDS:
            known.held += 1
            return
        line = _printable(text % args)
        more = f" (and {known.held} more like it)" if known is not None and known.held else ""
        self._lines[key] = _Line(level, line, now)
        self._logger.log(level, "%s%s", line, more)

    def tick(self) -> None:
        """Tells the counts that are due, and forgets what has not come again."""
        now = self._clock()
        for key, known in list(self._lines.items()):
            if now - known.at < QUIET_SECONDS:
                continue
            if known.held:
                self._logger.log(known.level, "%s (and %d more like it)", known.text, known.held)
                known.at, known.held = now, 0
            else:
                del self._lines[key]


def _printable(line: str) -> str:
    """One line of a bounded length, whatever a peer put into it."""
    return "".join(char if char.isprintable() else "?" for char in line[:MAX_LINE])
