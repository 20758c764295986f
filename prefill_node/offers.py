"""Offers of decode nodes: which of them become jobs, and what is answered to the others.

Owns the number of the newest transfer of each peer. Peers count upwards, so an offer that is not
newer is a late copy of one that has ended. It does not know when a job gets its blocks: that is the
scheduler's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvferry.kernels.engine import Engine
from kvferry.kvstore.wire.handoff import Declined, Offer, TransferAborted
from kvferry.kvstore.wire.server import Peer, Server
from kvferry.prefill_node.job import Job, open_job
from kvferry.prefill_node.scheduler import PrefillScheduler


class Offers:
    """All offers to one prefill node; at most `max_queued` jobs wait for blocks."""

    def __init__(
        self,
        engine: Engine,
        server: Server,
        scheduler: PrefillScheduler,
        clock: Callable[[], float],
        counters: Counter[str],
        *,
        max_queued: int,
    ) -> None:
        self.newest: dict[bytes, int] = {}
        """By peer: the newest transfer it has offered or aborted."""
        self._engine = engine
        self._server = server
        self._scheduler = scheduler
        self._clock = clock
        self._counters = counters
        self._max_queued = max_queued

    def receive(self, peer: Peer, offer: Offer, *, draining: bool) -> None:
        """Queues a job for it, declines it, or tells a late copy that it has ended."""
        if self._scheduler.find(peer.identity, offer.transfer, offer.epoch) is not None:
            self._counters["offers_duplicated"] += 1
            return
        if offer.transfer <= self.newest.get(peer.identity, 0):
            self._counters["offers_stale"] += 1
            self._server.send(peer, TransferAborted(offer.transfer, offer.epoch, "ended"))
            return
        self.newest[peer.identity] = offer.transfer
        reason = "draining" if draining else self._refusal(peer, offer)
        job = None if reason else self._opened(peer, offer)
        if job is None:
            self._decline(peer, offer, reason or "invalid")
            return
        self._counters["transfers"] += 1
        job.grant(0, self._engine.spec.block_bytes)
        self._scheduler.add(job)

    def ended(self, identity: bytes, transfer: int) -> None:
        """The peer has aborted this transfer: an offer of it that is still on its way is late."""
        self.newest[identity] = max(transfer, self.newest.get(identity, 0))

    def lost(self, identity: bytes) -> None:
        self.newest.pop(identity, None)

    def _refusal(self, peer: Peer, offer: Offer) -> str:
        spec = self._engine.spec
        if peer.role != "decode" or offer.credit < spec.block_bytes:
            return "invalid"
        if offer.last > min(spec.num_blocks, spec.max_model_len // spec.block_size):
            return "too_large"
        return "busy" if len(self._scheduler.waiting) >= self._max_queued else ""

    def _opened(self, peer: Peer, offer: Offer) -> Job | None:
        """None when the offer makes no sense."""
        spec = self._engine.spec
        try:
            job = open_job(peer, offer, spec.block_size, self._clock())
        except ValueError as error:
            text = "an offer from a %s makes no sense: %s"
            self._server.peer_log.warning("offer", peer.identity.hex(), text, peer.role, error)
            return None
        valid = 0 <= min(job.tokens) <= max(job.tokens) < spec.vocab_size
        return job if valid else None

    def _decline(self, peer: Peer, offer: Offer, reason: str) -> None:
        self._counters["transfers_declined"] += 1
        needed, available = offer.last, self._scheduler.pool.num_blocks
        self._server.send(peer, Declined(offer.transfer, offer.epoch, reason, needed, available))
