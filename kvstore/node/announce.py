"""What a node tells every gateway about itself, unasked: status, keys, long steps.

Owns the numbering of key batches and when the next report is due; it reads the pool's changes and
knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvferry.kvstore.tiers.device import BlockPool
from kvferry.kvstore.wire.message import MAX_STEP_SECONDS
from kvferry.kvstore.wire.server import Peer, Server
from kvferry.kvstore.wire.status import KeyBatch, Status, StepNotice

REPORT_SECONDS = 0.5
NOTICE_SECONDS = 0.25
"""A step predicted to be shorter needs no notice: its silence alarms nobody."""


@dataclass(frozen=True, slots=True)
class NodeState:
    """The part of a `Status` that only the node knows."""

    running: int
    waiting: int
    draining: bool
    counters: Mapping[str, float]


class StepClock:
    """Predicts how long a step of so many tokens takes: a moving average of seconds a token."""

    def __init__(self) -> None:
        self._per_token = 0.0

    def predict(self, tokens: int) -> float:
        return self._per_token * tokens

    def observe(self, tokens: int, seconds: float) -> None:
        measured = seconds / max(1, tokens)
        self._per_token = (
            measured if not self._per_token else 0.8 * self._per_token + 0.2 * measured
        )


class Announcer:
    """Reports to the gateways among a server's peers; `state` is asked when a report is due."""

    def __init__(self, server: Server, pool: BlockPool, state: Callable[[], NodeState]) -> None:
        self._server = server
        self._pool = pool
        self._state = state
        self._number = 0
        self._due = 0.0
        self._informed: set[bytes] = set()

    def step_notice(self, predicted_s: float) -> None:
        """Call before a step; only a long one is announced, to every peer."""
        if predicted_s >= NOTICE_SECONDS:
            for peer in list(self._server.peers.values()):
                self._server.send(peer, StepNotice(min(predicted_s, MAX_STEP_SECONDS)))

    def resync(self, peer: Peer) -> None:
        """Restates all keys to one gateway with the next report."""
        self._informed.discard(peer.identity)

    def tick(self, now: float) -> None:
        """Sends what is due."""
        newcomers = [peer for peer in self._gateways() if peer.identity not in self._informed]
        if now < self._due and not newcomers:
            return
        self._due = now + REPORT_SECONDS
        state = self._state()
        status = Status(
            running=state.running,
            waiting=state.waiting,
            blocks_used=self._pool.num_held,
            blocks_cached=self._pool.num_cached,
            blocks_total=self._pool.num_blocks,
            draining=state.draining,
            counters=dict(state.counters),
        )
        for peer in self._gateways():
            self._server.send(peer, status)
        self._send_keys(newcomers)

    def _send_keys(self, newcomers: list[Peer]) -> None:
        changes = self._pool.take_changes()
        if changes.committed or changes.evicted:
            self._number += 1
            batch = KeyBatch(
                self._number, False, b"".join(changes.committed), b"".join(changes.evicted)
            )
            for peer in self._gateways():
                if peer.identity in self._informed:
                    self._server.send(peer, batch)
        for peer in newcomers:
            full = KeyBatch(self._number, True, b"".join(self._pool.keys()), b"")
            if self._server.send(peer, full):
                self._informed.add(peer.identity)
        self._informed &= self._server.peers.keys()

    def _gateways(self) -> list[Peer]:
        return [peer for peer in self._server.peers.values() if peer.role == "gateway"]
