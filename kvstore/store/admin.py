"""What an operator asks of a store: figures, inspect, clear, pin, prefetch.

Owns the bounds of these requests and their answers, which are JSON. Before the first node has come
nothing is indexed, but files may be there: they can be cleared.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvferry.kvstore.keys import split_keys
from kvferry.kvstore.store.figures import GAUGES, by_tier, gauge_names
from kvferry.kvstore.store.storage import ModelStorage
from kvferry.kvstore.store.traffic import MAX_DEADLINE_S
from kvferry.kvstore.tiers.disk.files import FileSystem
from kvferry.kvstore.wire.store import CacheRequest

MAX_PIN_S = 7 * 86400.0


def answer_admin(
    request: CacheRequest,
    storage: ModelStorage | None,
    files: FileSystem | None,
    figures: Callable[[], dict[str, float]],
    now: float,
) -> bytes:
    """JSON; `{"error": …}` when it makes no sense or cannot be done."""
    try:
        keys = split_keys(request.keys)
        if request.action == "stats":
            answer = _stats(storage, figures())
        elif storage is None:
            answer = _answer_unopened(request, keys, files)
        else:
            answer = _answer(request, keys, storage, now)
    except ValueError as error:
        answer = {"error": str(error)}
    return msgspec.json.encode(answer)


def _answer(
    request: CacheRequest, keys: list[bytes], storage: ModelStorage, now: float
) -> dict[str, object]:
    tiers = storage.tiers
    match request.action:
        case "inspect":
            return {"tiers": tiers.inspect(keys).decode()}
        case "clear":
            if request.tenant and len(request.tenant) != 16:
                raise ValueError(f"a tenant of {len(request.tenant)} bytes; it has 16")
            cleared = tiers.clear(request.tenant or None)
            held = tiers.host.num_leased
            return {"cleared_host": cleared.host, "cleared_disk": cleared.disk, "held": held}
        case "pin":
            if not 0 < request.seconds <= MAX_PIN_S:
                raise ValueError(f"a pin of {request.seconds} s; at most {MAX_PIN_S:g}")
            tiers.prefetch(keys, deadline=now + min(60.0, request.seconds), now=now)
            return {"pinned": tiers.pin(keys, request.seconds, now)}
        case "unpin":
            return {"unpinned": tiers.unpin(keys)}
        case "prefetch":
            deadline = now + min(MAX_DEADLINE_S, max(0.0, request.seconds) or 60.0)
            tiers.prefetch(keys, deadline=deadline, now=now)
            return {"tiers": tiers.inspect(keys).decode()}
    raise ValueError(f"no action is called {request.action[:100]!r}")


def _stats(storage: ModelStorage | None, figures: dict[str, float]) -> dict[str, object]:
    gauges = gauge_names()
    ledger = {} if storage is None else storage.tiers.ledger()
    return {
        **ledger,
        "tiers": by_tier(figures),
        "gauges": {name: int(figures.get(name, 0)) for name in GAUGES},
        "counters": {name: it for name, it in figures.items() if name not in gauges},
        "well": storage is None or storage.tiers.host.well,
    }


def _answer_unopened(
    request: CacheRequest, keys: list[bytes], files: FileSystem | None
) -> dict[str, object]:
    match request.action:
        case "clear":
            cleared = _clear_unopened(request, files)
            return {"cleared_host": 0, "cleared_disk": cleared, "held": 0}
        case "inspect" | "prefetch":
            return {"tiers": "-" * len(keys)}
        case "pin":
            return {"pinned": 0}
        case "unpin":
            return {"unpinned": 0}
    raise ValueError(f"no action is called {request.action[:100]!r}")


def _clear_unopened(request: CacheRequest, files: FileSystem | None) -> int:
    if files is None:
        return 0
    try:
        numbers = list(files.list())
        if request.tenant and numbers:
            raise ValueError("no node has come yet, so nobody knows whose the blocks are")
        for number in numbers:
            files.delete(number)
    except OSError as error:
        raise ValueError(f"cannot clear {files.folder}: {error}") from None
    return len(numbers)
