"""The prefill node: one thread that owns the socket, the pool and the engine, in one loop.

    receive ─► accept ─► ship ─► compute a chunk ─┐
       ▲            (between layers: the same)     │
       └───────────────────────────────────────────┘

Owns the conversation with decode nodes. It never samples and ships whole blocks only. The socket
is also served between the layers of a pass, so that offers, credits, aborts and shipments do not
wait for its end. A shipment is copied into ZeroMQ's own memory when it is sent, so a block may be
evicted as soon as its transfer is complete.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

import zmq

from kvferry.kernels.engine import Batch, Engine, Span
from kvferry.kvstore.announce import Announcer, NodeState, StepClock
from kvferry.kvstore.blocks import BlockPool
from kvferry.kvstore.keys import checksum
from kvferry.kvstore.router import FromPeer, Peer, Server
from kvferry.kvstore.wire import (
    AbortTransfer,
    Accepted,
    Blocks,
    Complete,
    Credit,
    Declined,
    Drain,
    Offer,
    Resync,
    TransferAborted,
)
from kvferry.prefill_node.job import Job, JobState, open_job
from kvferry.prefill_node.scheduler import Chunk, PrefillScheduler

log = logging.getLogger(__name__)

MESSAGE_BYTES = 4 << 20
"""Payload of one `Blocks` message at most; one block is sent whatever its size."""

IDLE_POLL_MS = 200

FLUSH_SECONDS = 5.0
"""How long a node that has nothing more to do waits for its peers to read what it sent."""


class _Abandoned(Exception):
    """Everybody who wanted the running pass has left."""


class PrefillNode:
    """Runs until `stopping` says so and the last transfer has ended."""

    def __init__(
        self,
        engine: Engine,
        server: Server,
        max_num_batched_tokens: int,
        *,
        max_queued: int,
        reuse: bool,
    ) -> None:
        spec = engine.spec
        self.pool = BlockPool(spec.num_blocks)
        self.scheduler = PrefillScheduler(
            self.pool, spec.block_size, max_num_batched_tokens, reuse=reuse
        )
        self._engine = engine
        self._server = server
        self._max_queued = max_queued
        self._clock = StepClock()
        self._announcer = Announcer(server, self.pool, self._state)
        self._counters: Counter[str] = Counter()
        self._draining = False
        self._releases_seen = -1
        self._message_blocks = max(1, MESSAGE_BYTES // spec.block_bytes)

    # -- the loop -------------------------------------------------------------------------------

    def run(self, stop_fd: int, stopping: Callable[[], bool]) -> None:
        """Serves until a stop is asked for and nothing is under way any more."""
        while True:
            self._wait(stop_fd)
            if stopping():
                self._draining = True
            if self._draining and not self.scheduler.active and not self.scheduler.waiting:
                self._server.flush(FLUSH_SECONDS)
                return
            self.turn()

    def _wait(self, stop_fd: int) -> None:
        """Sleeps until there is something to do; not at all while there is to compute."""
        if any(job.remaining for job in self.scheduler.active):
            return
        if self.scheduler.waiting and self.pool.releases != self._releases_seen:
            return
        poller = zmq.Poller()
        poller.register(self._server.socket, zmq.POLLIN)
        if not self._draining:
            poller.register(stop_fd, zmq.POLLIN)
        poller.poll(IDLE_POLL_MS)

    def turn(self) -> None:
        """One round of the loop."""
        self._serve()
        chunks = self.scheduler.plan(time.monotonic())
        if chunks:
            self._compute(chunks)
            self._ship()

    def _serve(self) -> None:
        """Everything but computing; also called between two layers."""
        for received in self._server.receive():
            self._handle(received)
        now = time.monotonic()
        self._server.tick(now)
        for peer in self._server.take_lost():
            for job in self.scheduler.of_peer(peer.identity):
                self.scheduler.abort(job)
                self._counters["transfers_orphaned"] += 1
        self._releases_seen = self.pool.releases
        for job in self.scheduler.accept():
            self._accepted(job)
        self._ship()
        self._announcer.tick(now)

    # -- computing ------------------------------------------------------------------------------

    def _compute(self, chunks: list[Chunk]) -> None:
        started = time.monotonic()
        spans = []
        for job, start, end in chunks:
            job.started_at = job.started_at or started
            spans.append(Span(job.tokens[start:end], start, job.blocks, wants_logits=False))
        batch = Batch(tuple(spans))
        self._announcer.step_notice(self._clock.predict(batch.num_tokens))
        try:
            self._engine.forward(batch, self._between_layers)
        except _Abandoned:
            self.scheduler.abandoned()
            self._counters["chunks_abandoned"] += 1
            return
        finished = time.monotonic()
        self._clock.observe(batch.num_tokens, finished - started)
        for chunk in chunks:
            chunk.job.finished_at = finished
        self.scheduler.computed(chunks)
        self._counters["computed_tokens"] += batch.num_tokens
        self._counters["chunks"] += len(chunks)

    def _between_layers(self) -> None:
        self._serve()
        if self.scheduler.all_aborted:
            raise _Abandoned

    # -- the hand-off ---------------------------------------------------------------------------

    def _handle(self, received: FromPeer) -> None:
        match received.message:
            case Offer() as message:
                self._offered(received.peer, message)
            case Credit() as message:
                job = self._find(received.peer, message.transfer, message.epoch)
                if job is not None:
                    job.credit += message.size
            case AbortTransfer(transfer, epoch):
                job = self._find(received.peer, transfer, epoch)
                if job is not None:
                    self.scheduler.abort(job)
                    self._counters["transfers_aborted"] += 1
                self._server.send(received.peer, TransferAborted(transfer, epoch, "asked"))
            case Resync():
                self._announcer.resync(received.peer)
            case Drain():
                self._draining = True
            case message:
                log.warning("ignored a %s from a %s", type(message).__name__, received.peer.role)

    def _find(self, peer: Peer, number: int, epoch: int) -> Job | None:
        return self.scheduler.find(peer.identity, number, epoch)

    def _offered(self, peer: Peer, offer: Offer) -> None:
        if self._find(peer, offer.transfer, offer.epoch) is not None:
            self._counters["offers_duplicated"] += 1
            return
        reason = self._refusal(peer, offer)
        job = None
        if not reason:
            try:
                job = open_job(peer, offer, self._engine.spec.block_size, time.monotonic())
            except ValueError as error:
                log.warning("an offer from %s makes no sense: %s", peer.role, error)
                reason = "invalid"
        if job is None or not self._valid_ids(job):
            self._counters["transfers_declined"] += 1
            needed, available = offer.last, self.pool.num_blocks
            self._server.send(
                peer, Declined(offer.transfer, offer.epoch, reason or "invalid", needed, available)
            )
            return
        self._counters["transfers"] += 1
        self.scheduler.add(job)

    def _refusal(self, peer: Peer, offer: Offer) -> str:
        spec = self._engine.spec
        if self._draining:
            return "draining"
        if peer.role != "decode" or offer.credit < spec.block_bytes:
            return "invalid"
        if offer.last > min(spec.num_blocks, spec.max_model_len // spec.block_size):
            return "too_large"
        return "busy" if len(self.scheduler.waiting) >= self._max_queued else ""

    def _valid_ids(self, job: Job) -> bool:
        return 0 <= min(job.tokens) <= max(job.tokens) < self._engine.spec.vocab_size

    def _accepted(self, job: Job) -> None:
        job.finished_at = time.monotonic()
        wait = self._clock.predict(self.scheduler.tokens_ahead(job)) if job.remaining else 0.0
        self._server.send(job.peer, Accepted(job.number, job.epoch, job.prefix, wait))

    def _ship(self) -> None:
        for job in list(self.scheduler.active):
            if job.state is JobState.ABORTED:
                continue
            while self._ship_some(job):
                pass
            if job.sent == job.last:
                self._completed(job)

    def _ship_some(self, job: Job) -> bool:
        size = self._engine.spec.block_bytes
        indices = self.scheduler.sendable(job, size, self._message_blocks)
        if not indices:
            return False
        payloads = [self._engine.read(job.blocks[index]) for index in indices]
        checksums = tuple(checksum(payload) for payload in payloads)
        header = Blocks(job.number, job.epoch, indices.start, checksums)
        if not self._server.send(job.peer, header, payloads):
            return False
        self.scheduler.shipped(job, len(indices), size)
        self._counters["shipped_bytes"] += len(indices) * size
        return True

    def _completed(self, job: Job) -> None:
        reused = max(0, min(job.prefix, job.last) - job.first)
        self._server.send(
            job.peer,
            Complete(
                job.number,
                job.epoch,
                reused,
                job.last - job.first - reused,
                job.started_at or job.finished_at,
                job.finished_at,
            ),
        )
        self.scheduler.complete(job)

    # -- state ----------------------------------------------------------------------------------

    def _state(self) -> NodeState:
        return NodeState(
            running=len(self.scheduler.active),
            waiting=len(self.scheduler.waiting),
            draining=self._draining,
            counters={
                **self._counters,
                "frames_malformed": self._server.counters.malformed,
                "frames_stale": self._server.counters.stale,
                "peers_refused": self._server.counters.refused,
            },
        )

    def check(self) -> None:
        """Proves the invariants of everything this node owns."""
        self.scheduler.check()
