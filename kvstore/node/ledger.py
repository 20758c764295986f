"""What a process can say of itself when it is asked: the answers to `DebugRequest`.

Owns the figures that every process has, of the operating system and of its sockets, and the rules
by which a question is answered or refused. What else is in a ledger is said by whoever owns it.
All of it is plain values that JSON can carry, and asking changes nothing.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from kvferry.kvstore.wire.client import Client
from kvferry.kvstore.wire.server import Server
from kvferry.kvstore.wire.status import DebugReply, DebugRequest

MAX_BODY_BYTES = 64 << 10
"""Of a question; rules for faults are a few hundred bytes."""

_SELF = Path("/proc/self")
# Of /proc/self/stat, counted from the field behind the name in brackets.
_NUM_THREADS, _START_TICKS = 17, 19


# -- figures ---------------------------------------------------------------------------------------


def process_figures() -> dict[str, Any]:
    """What the operating system knows of this process; only its id and CPU time where no /proc is.

    `threads` are the system's, with those of ZeroMQ and OpenMP.
    """
    figures: dict[str, Any] = {"pid": os.getpid(), "cpu_seconds": time.process_time()}
    try:
        stat = (_SELF / "stat").read_text().rpartition(")")[2].split()
        resident_pages = int((_SELF / "statm").read_text().split()[1])
        open_fds = len(os.listdir(_SELF / "fd")) - 1  # without the listing's own
    except OSError:
        return figures
    started = int(stat[_START_TICKS]) / os.sysconf("SC_CLK_TCK")
    return figures | {
        "rss_bytes": resident_pages * os.sysconf("SC_PAGE_SIZE"),
        "open_fds": open_fds,
        "threads": int(stat[_NUM_THREADS]),
        "uptime_seconds": time.clock_gettime(time.CLOCK_BOOTTIME) - started,
    }


def socket_figures(server: Server | None, clients: Iterable[Client]) -> dict[str, Any]:
    """The socket that others connect to, if there is one, and the links to others."""
    return {
        "server": None if server is None else _server_figures(server),
        "links": [_link_figures(client) for client in clients],
    }


def _server_figures(server: Server) -> dict[str, Any]:
    figures = {
        "address": server.address,
        "incarnation": server.incarnation,
        "peers": dict(Counter(peer.role for peer in server.peers.values())),
        "counters": asdict(server.counters),
    }
    return figures if server.faults is None else figures | {"faults": server.faults.counters}


def _link_figures(client: Client) -> dict[str, Any]:
    return {
        "address": client.address,
        "role": None if client.welcome is None else client.welcome.role,
        "state": client.state.value,
        "incarnation": client.server_incarnation,
        "counters": asdict(client.counters),
    }


def check_figures(checks: Mapping[str, Callable[[], None]]) -> dict[str, str]:
    """Each owner's `check()` by name: `ok`, or what does not hold."""
    return {name: _verdict(check) for name, check in checks.items()}


def _verdict(check: Callable[[], None]) -> str:
    try:
        check()
    except AssertionError as error:
        return f"broken: {error}"
    return "ok"


# -- answering -------------------------------------------------------------------------------------


def answer_debug(
    request: DebugRequest,
    *,
    ledger: Callable[[], Mapping[str, Any]],
    inject: Callable[[bytes], Mapping[str, Any]] | None,
    enabled: bool,
    hooks: bool,
) -> DebugReply:
    """The reply to a question, never an exception for one that is wrong.

    Parameters
    ----------
    ledger
        What `ledger` is answered with, if `enabled`.
    inject
        Acts on the body of `faults` and says what holds now, if `hooks`; ValueError refuses it.
    """
    return DebugReply(request.number, _encode(_answer(request, ledger, inject, enabled, hooks)))


def _answer(
    request: DebugRequest,
    ledger: Callable[[], Mapping[str, Any]],
    inject: Callable[[bytes], Mapping[str, Any]] | None,
    enabled: bool,
    hooks: bool,
) -> Mapping[str, Any]:
    if request.kind == "ledger":
        return ledger() if enabled else {"error": "debugging is off: --enable-debug allows it"}
    if request.kind != "faults":
        return {"error": f"nothing is known of {request.kind[:100]!r}"}
    if inject is None or not hooks:
        return {"error": "test hooks are off: --enable-test-hooks allows them"}
    if len(request.body) > MAX_BODY_BYTES:
        return {"error": f"{len(request.body)} bytes of rules; the limit is {MAX_BODY_BYTES}"}
    try:
        return inject(request.body)
    except ValueError as error:
        return {"error": str(error)}


def _encode(answer: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode(dict(answer))
