"""A node's answers to `DebugRequest`, and the test hooks that one can pull with it.

Owns the rules for frame faults, the stages at which work is held, and how many preemptions are
still to be forced. Nodes read the last two; the first reaches every socket of the process, also
those made later. Both switches are off unless the process was started for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.kvstore.node.ledger import (
    answer_debug,
    check_figures,
    process_figures,
    socket_figures,
)
from kvferry.kvstore.wire.client import Client
from kvferry.kvstore.wire.faults import FaultInjector, rules_from_json
from kvferry.kvstore.wire.server import Peer, Server
from kvferry.kvstore.wire.status import DebugRequest

STAGES = ("queue", "prefill", "transfer", "decode")


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


class DebugDesk:
    """One for each node."""

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

    def answer(self, peer: Peer, request: DebugRequest) -> None:
        """Sends the reply."""
        reply = answer_debug(
            request,
            ledger=self._figures,
            inject=self._inject,
            enabled=self._switches.ledger,
            hooks=self._switches.hooks,
        )
        self._server.send(peer, reply)

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
