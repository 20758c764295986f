"""What a server's ledger says that is still held, once nobody asks anything of it any more."""

from __future__ import annotations

from collections.abc import Iterator

HELD = ("held", "claimed", "reserved", "requests", "queued", "in_flight_bytes", "outbox_blocks",
        "offered", "accepted", "streaming", "aborted", "choices", "fetches", "lent")  # fmt: skip
HELD_OF_ARENA = ("leased", "filling", "withdrawn", "quarantined")
"""Slots that nodes may write into are theirs as long as they live."""


def held(value: object, path: str) -> Iterator[str]:
    """What a ledger says that is held. Who could not be asked may hold anything."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "error":
                yield f"{path}error={inner}"
            elif name == "counters":
                continue
            elif name == "arena":
                yield from (f"{path}arena.{it}={inner[it]}" for it in HELD_OF_ARENA if inner[it])
                continue
            elif name == "check":
                yield from (f"{path}check.{it}" for it in inner.items() if it[1] != "ok")
                continue
            if name in HELD and isinstance(inner, int | float) and inner:
                yield f"{path}{name}={inner}"
            else:
                yield from held(inner, f"{path}{name}.")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from held(inner, f"{path}{index}.")
