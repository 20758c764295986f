"""The form of a process's log lines: one an event on stderr, for people or for machines.

Owns both forms. A caller that has facts beside its message (`extra={"facts": {...}}`) writes them
into the message for people; as JSON they are fields of their own. It knows no role.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]


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
