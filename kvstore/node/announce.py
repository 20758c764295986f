"""What a node tells every gateway about itself, unasked: status, keys, long steps.

Owns the numbering of key batches and when the next report is due; it reads the pool's changes and
knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable

from kvferry.kvstore.tiers.device import BlockPool
from kvferry.kvstore.wire.message import MAX_STEP_SECONDS
from kvferry.kvstore.wire.server import Peer, Server
from kvferry.kvstore.wire.status import KeyBatch, Status, StepNotice

REPORT_SECONDS = 0.5
NOTICE_SECONDS = 0.25
"""A step predicted to be shorter needs no notice: its silence alarms nobody."""


class Announcer:
    """Reports to the gateways among a server's peers; `status` is asked when a report is due.

    Without a pool there are no keys to tell.
    """

    def __init__(self, server: Server, pool: BlockPool | None, status: Callable[[], Status]):
        self._server = server
        self._pool = pool
        self._status = status
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
        """Sends what is due; to a gateway that is new, at once."""
        gateways = [peer for peer in self._server.peers.values() if peer.role == "gateway"]
        newcomers = [peer for peer in gateways if peer.identity not in self._informed]
        if now < self._due and not newcomers:
            return
        self._due = now + REPORT_SECONDS
        status = self._status()
        for peer in gateways:
            self._server.send(peer, status)
        changes = self._changes()
        for peer in gateways:
            if peer.identity not in self._informed:
                self._introduce(peer)
            elif changes is not None:
                self._server.send(peer, changes)
        self._informed &= self._server.peers.keys()

    def _changes(self) -> KeyBatch | None:
        """What has changed in the pool since the last report; None: nothing."""
        if self._pool is None:
            return None
        gained, lost = self._pool.take_changes()
        if not gained and not lost:
            return None
        self._number += 1
        return KeyBatch(self._number, False, b"".join(gained), b"".join(lost))

    def _introduce(self, peer: Peer) -> None:
        pool = self._pool
        if pool is None or self._server.send(
            peer, KeyBatch(self._number, True, b"".join(pool.keys()), b"")
        ):
            self._informed.add(peer.identity)
