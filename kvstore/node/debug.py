"""What a process says of itself to a debugger, and the test hooks that one can pull with it.

Owns the answers to `DebugRequest`: the figures that every process has, of the operating system and
of its sockets, and beside them the ledger of whoever holds something. Owns the rules for frame
faults, the stages at which work is held, and how many preemptions are still to be forced. Nodes
read the last two; the first reaches every socket of the process, also those made later. Both
switches are off unless the process was started for it. An answer is plain values that JSON can
carry, and asking for the ledger changes nothing.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvferry.kvstore.wire.client import Client
from kvferry.kvstore.wire.faults import FaultInjector, rules_from_json
from kvferry.kvstore.wire.server import Server
from kvferry.kvstore.wire.status import DebugReply, DebugRequest

STAGES = ("queue", "prefill", "transfer", "decode")

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


# -- hooks and answers ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DebugSwitches:
    ledger: bool = False
    """Whether the ledger may be asked for."""
    hooks: bool = False
    """Whether faults may be injected: for tests only."""


class StoreHooks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Faults of the store's tiers."""

    read_delay_ms: float | None = None
    """Added to every block read from disk."""
    damage_reads: int = 0
    """How many of the next blocks read from disk get one wrong bit."""
    fail_reads: int = 0
    fail_writes: int = 0
    """How many of the next writes find the disk full."""
    damage_host: int = 0
    """How many resident blocks get one wrong bit now."""


class Hooks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `faults`: everything it does not name is left as it is."""

    rules: list[Any] | None = None
    """Frame faults; they replace all earlier ones."""
    hold: tuple[str, ...] | None = None
    """Stages at which nothing moves until the next request says otherwise."""
    preempt: int = 0
    """How many of the youngest sequences to preempt."""
    seed: int = 0
    clear: bool = False
    """End all faults and holds first."""
    store: StoreHooks | None = None
    """For a store only."""


class DebugEndpoint:
    """One for each process with a server."""

    def __init__(
        self,
        server: Server,
        switches: DebugSwitches,
        ledger: Callable[[], Mapping[str, Any]],
        check: Callable[[], None],
        clients: Callable[[], Iterable[Client]],
        on_store: Callable[[StoreHooks], None] | None = None,
    ) -> None:
        self.hold: frozenset[str] = frozenset()
        self.preempt = 0
        self._server = server
        self._switches = switches
        self._ledger = ledger
        self._check = check
        self._clients = clients
        self._on_store = on_store
        self._faults: FaultInjector | None = None

    def answer(self, request: DebugRequest) -> DebugReply:
        """The reply to a question, never an exception for one that is wrong."""
        return DebugReply(request.number, msgspec.json.encode(dict(self._answer(request))))

    def _answer(self, request: DebugRequest) -> Mapping[str, Any]:
        if request.kind == "ledger":
            if self._switches.ledger:
                return self._figures()
            return _error("debugging is off: --enable-debug allows it")
        if request.kind != "faults":
            return _error(f"nothing is known of {request.kind[:100]!r}")
        if not self._switches.hooks:
            return _error("test hooks are off: --enable-test-hooks allows them")
        if len(request.body) > MAX_BODY_BYTES:
            return _error(f"{len(request.body)} bytes of rules; the limit is {MAX_BODY_BYTES}")
        try:
            return self._inject(request.body)
        except ValueError as error:
            return _error(str(error))

    def watched(self, client: Client) -> Client:
        """A client that has just been made: today's faults are for it too."""
        if self._faults is not None:
            client.faults = self._faults.sibling()
        return client

    def _figures(self) -> Mapping[str, Any]:
        return {
            **self._ledger(),
            "check": check_figures({"node": self._check}),
            "hold": sorted(self.hold),
            "process": process_figures(),
            "sockets": socket_figures(self._server, self._clients()),
        }

    def _inject(self, body: bytes) -> Mapping[str, Any]:
        try:
            hooks = msgspec.json.decode(body, type=Hooks)
        except msgspec.MsgspecError as error:
            raise ValueError(f"hooks: {error}") from None
        if unknown := sorted(set(hooks.hold or ()) - set(STAGES)):
            raise ValueError(f"no stage is called {unknown[0]!r}: choose {', '.join(STAGES)}")
        if hooks.store is not None and self._on_store is None:
            raise ValueError("this process is no store")
        rules = rules_from_json(hooks.rules or [])
        if hooks.clear:
            self.hold, self.preempt = frozenset(), 0
            if self._on_store is not None:
                self._on_store(StoreHooks(read_delay_ms=0.0))
        if hooks.clear or hooks.rules is not None:
            self._replace(FaultInjector(rules, hooks.seed) if rules else None)
        if hooks.hold is not None:
            self.hold = frozenset(hooks.hold)
        self.preempt += max(0, hooks.preempt)
        if hooks.store is not None and self._on_store is not None:
            self._on_store(hooks.store)
        return {"rules": len(rules), "hold": sorted(self.hold), "preempt": self.preempt}

    def _replace(self, faults: FaultInjector | None) -> None:
        self._faults = faults
        self._server.faults = faults
        for client in self._clients():
            client.faults = None if faults is None else faults.sibling()


def _error(text: str) -> Mapping[str, Any]:
    return {"error": text}
