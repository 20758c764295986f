"""The prefill node: one thread that owns the socket, the pool and the engine, in one loop.

    receive ─► accept ─► ship ─► compute a chunk ─┐
       ▲            (between layers: the same)     │
       └───────────────────────────────────────────┘

Owns the turns and the passes, and says which part of the node a message is for. It never samples.
The socket is also served between the layers of a pass, so that offers, credits, aborts and
shipments do not wait for its end. How the loop sleeps and ends is the same for all nodes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from kvferry.kernels.engine import Batch, Engine, Span
from kvferry.kvstore.client.client import StoreClient
from kvferry.kvstore.client.connector import LEAST_PATIENCE_S, UNMEASURED_S, Fetched
from kvferry.kvstore.node.compute import ComputeNode
from kvferry.kvstore.node.debug import DebugSwitches
from kvferry.kvstore.tiers.device import BlockPool
from kvferry.kvstore.wire.handoff import (
    AbortTransfer,
    Accepted,
    Credit,
    Offer,
    Probe,
    Progress,
    TransferAborted,
)
from kvferry.kvstore.wire.server import FromPeer, Peer, Server
from kvferry.prefill_node.job import Job, JobState
from kvferry.prefill_node.lending import Lending
from kvferry.prefill_node.offers import Offers
from kvferry.prefill_node.scheduler import Chunk, PrefillScheduler
from kvferry.prefill_node.shipper import Shipper

INTAKE_SECONDS = 0.01
"""What goes at once into blocks that come from the store."""


class _Abandoned(Exception):
    """Everybody who wanted the running pass has left."""


class PrefillNode(ComputeNode[Job]):
    """Runs until a stop is asked for and the last transfer has ended."""

    _engine: Engine

    def __init__(
        self,
        engine: Engine,
        server: Server,
        max_num_batched_tokens: int,
        *,
        max_queued: int,
        reuse: bool,
        clock: Callable[[], float] = time.monotonic,
        debug: DebugSwitches | None = None,
        store: StoreClient | None = None,
        load_patience_s: float = LEAST_PATIENCE_S,
        busy: Callable[[bool], None] | None = None,
    ) -> None:
        spec = engine.spec
        pool = BlockPool(spec.num_blocks)
        self.scheduler = PrefillScheduler(
            pool, spec.block_size, max_num_batched_tokens, reuse=reuse
        )
        super().__init__(
            "prefill",
            server,
            engine,
            pool,
            self.scheduler,
            store=store,
            load_patience_s=load_patience_s,
            clock=clock,
            debug=debug,
            busy=busy,
        )
        self.offers = Offers(
            engine, server, self.scheduler, clock, self.counters, max_queued=max_queued
        )
        self.lending = Lending(store, clock)
        self.shipper = Shipper(engine, server, self.scheduler, self.lending, self.counters)
        self._layers = 0

    # -- the loop -------------------------------------------------------------------------------

    def turn(self) -> None:
        """One round of the loop."""
        self._serve()
        held = "prefill" in self.debug.hold
        chunks = [] if held else self.scheduler.plan(self._clock())
        if chunks and self._compute(chunks):
            blocks = [chunk.job.blocks for chunk in chunks]  # a job lets go of them at its end
            self._ship()
            for chunk, its in zip(chunks, blocks, strict=True):
                self._put(chunk, its)  # now: what was lent is in the store already

    def _serve(self) -> None:
        """Everything but computing; also called between two layers."""
        self.receive()
        self._releases_seen = self.pool.releases
        self.connector.turn(INTAKE_SECONDS)
        for peer, transfer, epoch in self.lending.tick():
            # The last word of it may have been lost: who does not want it any more aborts it.
            self._server.send(peer, Progress(transfer, epoch, True, 0))
        for job in self.scheduler.accept():
            self._load(job)
        self._ship()
        now = self._clock()
        self._observe(now)
        self._announcer.tick(now)

    @property
    def can_compute(self) -> bool:
        computes = any(job.remaining and not job.fetching for job in self.scheduler.running)
        return computes and "prefill" not in self.debug.hold

    @property
    def idle(self) -> bool:
        return not self.scheduler.running and not self.scheduler.waiting

    def give_up(self) -> None:
        """Ends every transfer; decode nodes do without."""
        for job in [*self.scheduler.running, *self.scheduler.waiting]:
            if job.state is not JobState.ABORTED:
                self._server.send(job.peer, TransferAborted(job.number, job.epoch, "draining"))
                self._abort(job)
                self.counters["transfers_aborted"] += 1

    def lost(self, peer: Peer) -> None:
        self.offers.lost(peer.identity)
        self.lending.lost(peer.identity)
        for job in self.scheduler.of_peer(peer.identity):
            self._abort(job)
            self.counters["transfers_orphaned"] += 1

    # -- computing ------------------------------------------------------------------------------

    def _compute(self, chunks: list[Chunk]) -> bool:
        """False: nobody wanted the pass any more."""
        started = self._clock()
        spans = []
        for job, start, end in chunks:
            job.started_at = job.started_at or started
            spans.append(Span(job.tokens[start:end], start, job.blocks, wants_logits=False))
        batch = Batch(tuple(spans))
        self._announcer.step_notice(self._step_clock.predict(batch.num_tokens))
        self.computing(True)
        try:
            self._engine.forward(batch, self._between_layers)
        except _Abandoned:
            self.scheduler.abandoned()
            self.counters["chunks_abandoned"] += 1
            return False
        finished = self._clock()
        self._step_clock.observe(batch.num_tokens, finished - started)
        for chunk in chunks:
            chunk.job.finished_at = finished
        self.scheduler.computed(chunks)
        self.counters["computed_tokens"] += batch.num_tokens
        self.counters["chunks"] += len(chunks)
        return True

    def _between_layers(self) -> None:
        self._layers += 1
        self._serve()
        if self.scheduler.all_aborted:
            raise _Abandoned

    # -- the store ------------------------------------------------------------------------------

    def _put(self, chunk: Chunk, blocks: list[int]) -> None:
        """Gives what a pass has finished to the store; an aborted job holds nothing any more."""
        job, start, end = chunk
        if self.scheduler.reuse and blocks:
            size = self._engine.spec.block_size
            first, last = start // size, end // size
            parent = job.keys[first - 1] if first else job.root
            self.connector.put(job.tenant, parent, first, job.keys[first:last], blocks[first:last])

    def _load(self, job: Job) -> None:
        """The store may have what comes before the blocks that are wanted, and more."""
        first = job.computed // self._engine.spec.block_size
        keys = job.keys if self.scheduler.reuse else []
        seconds = self._step_clock.predict(job.remaining) or UNMEASURED_S * job.remaining
        job.fetching = self.connector.fetch(job, keys, first, job.blocks, seconds)
        if not job.fetching:
            self._accepted(job)

    def block_fetched(self, job: Job, index: int) -> None:
        self.scheduler.fetched(job, index)

    def fetch_ended(self, job: Job, fetched: Fetched) -> None:
        job.fetching = False
        job.prefix = fetched.reached
        job.from_host, job.from_disk = fetched.host, fetched.disk
        self._accepted(job)

    # -- the hand-off ---------------------------------------------------------------------------

    def handle(self, received: FromPeer) -> bool:
        peer = received.peer
        match received.message:
            case Offer() as message:
                self.offers.receive(peer, message, draining=self.draining)
            case Credit() as message:
                self.lending.taken(peer.identity, message)
                job = self.scheduler.find(peer.identity, message.transfer, message.epoch)
                if job is not None:
                    job.grant(message.size, self._engine.spec.block_bytes)
            case AbortTransfer(transfer, epoch):
                self._aborted(peer, transfer, epoch)
            case Probe(transfer, epoch):
                self._probed(peer, transfer, epoch)
            case _:
                return super().handle(received)
        return True

    def _aborted(self, peer: Peer, transfer: int, epoch: int) -> None:
        job = self.scheduler.find(peer.identity, transfer, epoch)
        if job is not None:
            self._abort(job)
            self.counters["transfers_aborted"] += 1
        self.lending.ended(peer.identity, transfer)
        self.offers.ended(peer.identity, transfer)
        self._server.send(peer, TransferAborted(transfer, epoch, "asked"))

    def _abort(self, job: Job) -> None:
        self.connector.cancel(job)
        self.scheduler.abort(job)

    def _probed(self, peer: Peer, transfer: int, epoch: int) -> None:
        job = self.scheduler.find(peer.identity, transfer, epoch)
        if job is None:
            self._server.send(peer, TransferAborted(transfer, epoch, "unknown"))
            return
        working = job.state is JobState.OFFERED or job.remaining > 0
        self._server.send(peer, Progress(transfer, epoch, working, job.sent))

    def _accepted(self, job: Job) -> None:
        job.finished_at = self._clock()
        wait = self._step_clock.predict(self.scheduler.tokens_ahead(job)) if job.remaining else 0.0
        store = self.connector.puts_to if self.scheduler.reuse else 0
        self._server.send(
            job.peer,
            Accepted(job.number, job.epoch, job.prefix, wait, store, job.from_host, job.from_disk),
        )

    def _ship(self) -> None:
        if "transfer" not in self.debug.hold:
            self.shipper.ship()

    # -- state ----------------------------------------------------------------------------------

    def _observe(self, now: float) -> None:
        waiting, running = self.scheduler.waiting, self.scheduler.running
        head = waiting[0].last if waiting else 0
        self.stall_watch.observe(
            now,
            work=bool(running or (waiting and head <= self.pool.num_available)),
            moved=(
                self._layers,
                self.counters["shipped_bytes"],
                len(running),
                self.connector.num_landed,
            ),
            reason=f"{len(running)} transfers are accepted, {len(waiting)} wait for it; "
            f"the first needs up to {head} of {self.pool.num_available} free blocks",
        )

    def ledger(self) -> dict[str, object]:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        size = self._engine.spec.block_size
        return {
            "blocks": self.pool.ledger(),
            "transfers": Counter(job.state.value for job in running + waiting),
            "outbox_blocks": sum(max(0, job.computed // size - job.sent) for job in running),
            "queued": len(waiting),
            "fetches": self.connector.num_fetches,
            "lent": self.lending.num_lent,
        }

    def check(self) -> None:
        self.scheduler.check()
