"""The prefill node: one thread that owns the socket, the pool and the engine, in one loop.

    receive ─► accept ─► ship ─► compute a chunk ─┐
       ▲            (between layers: the same)     │
       └───────────────────────────────────────────┘

Owns the turns and the passes, and says which part of the node a message is for. It never samples.
The socket is also served between the layers of a pass, so that offers, credits, aborts and
shipments do not wait for its end.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from math import inf

import zmq

from kvferry.kernels.engine import Batch, Engine, Span
from kvferry.kvstore.client.client import StoreClient
from kvferry.kvstore.client.connector import LEAST_PATIENCE_S, UNMEASURED_S, Loaded, Loader
from kvferry.kvstore.node.announce import Announcer, NodeState, StepClock
from kvferry.kvstore.node.debug import DebugDesk, DebugSwitches
from kvferry.kvstore.node.watch import StallWatch
from kvferry.kvstore.process.collector import Collector
from kvferry.kvstore.tiers.device import BlockPool
from kvferry.kvstore.tiers.shared_memory import memory_is_short
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
from kvferry.kvstore.wire.status import CacheReset, DebugRequest, Drain, ResetCache, Resync
from kvferry.prefill_node.job import Job, JobState
from kvferry.prefill_node.lending import Lending
from kvferry.prefill_node.offers import Offers
from kvferry.prefill_node.scheduler import Chunk, PrefillScheduler
from kvferry.prefill_node.shipper import Shipper

log = logging.getLogger(__name__)

IDLE_POLL_MS = 200

INTAKE_SECONDS = 0.01
"""What goes at once into blocks that come from the store."""

FLUSH_SECONDS = 2.0
"""How long a node that has nothing more to do waits for its peers to read what it sent."""


Finished = tuple[bytes, bytes, int, list[bytes], list[int]]
"""As `Loader.offer` takes it: tenant, parent, depth, keys and blocks."""


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
        clock: Callable[[], float] = time.monotonic,
        debug: DebugSwitches | None = None,
        store: StoreClient | None = None,
        load_patience_s: float = LEAST_PATIENCE_S,
    ) -> None:
        self.debug = DebugDesk(
            server,
            debug or DebugSwitches(),
            ledger=lambda: self.ledger(),
            check=lambda: self.check(),
            clients=lambda: self.loader.links,
        )
        spec = engine.spec
        self.pool = BlockPool(spec.num_blocks)
        self.scheduler = PrefillScheduler(
            self.pool, spec.block_size, max_num_batched_tokens, reuse=reuse
        )
        self._engine = engine
        self._server = server
        self.loader: Loader[Job] = Loader(
            store,
            engine,
            self.pool,
            landed=self.scheduler.loaded,
            ended=self._load_ended,
            clock=clock,
            least_patience_s=load_patience_s,
        )
        self.offers = Offers(engine, server, self.scheduler, clock, max_queued=max_queued)
        self.shipper = Shipper(engine, server, self.scheduler, Lending(store, clock))
        self._clock = clock
        self._step_clock = StepClock()
        self._watch = StallWatch("prefill")
        self._announcer = Announcer(server, self.pool, self._state)
        self._counters: Counter[str] = Counter()
        self._draining = False
        self._releases_seen = -1
        self._layers = 0

    # -- the loop -------------------------------------------------------------------------------

    def run(
        self,
        stop_fd: int,
        stopping: Callable[[], bool],
        timeout: float = inf,
        collector: Collector | None = None,
    ) -> None:
        """Serves until a stop is asked for and nothing is under way any more, `timeout` seconds
        later at most: what still is then is given up, and decode nodes do without."""
        deadline = inf
        while True:
            self._wait(stop_fd)
            if stopping():
                self._draining = True
                deadline = min(deadline, self._clock() + timeout)
            if self._clock() >= deadline:
                self._give_up()
            if self._draining and self._idle:
                self.loader.deliver()
                self._server.flush(FLUSH_SECONDS)
                return
            self.turn()
            if collector is not None:
                collector.turn(idle=self._idle)

    @property
    def _idle(self) -> bool:
        return not self.scheduler.active and not self.scheduler.waiting

    def _give_up(self) -> None:
        """Ends every transfer."""
        for job in [*self.scheduler.active, *self.scheduler.waiting]:
            if job.state is not JobState.ABORTED:
                self._server.send(job.peer, TransferAborted(job.number, job.epoch, "draining"))
                self._abort(job)
                self._counters["transfers_aborted"] += 1

    def _wait(self, stop_fd: int) -> None:
        """Sleeps until there is something to do; not at all while there is to compute."""
        computes = any(job.remaining and not job.loading for job in self.scheduler.active)
        if computes and "prefill" not in self.debug.hold:
            return
        if self.scheduler.waiting and self.pool.releases != self._releases_seen:
            return
        poller = zmq.Poller()
        poller.register(self._server.socket, zmq.POLLIN)
        for socket in self.loader.sockets:
            poller.register(socket, zmq.POLLIN)
        if not self._draining:
            poller.register(stop_fd, zmq.POLLIN)
        prepared = self._idle and not memory_is_short() and self._engine.prepare()
        poller.poll(0 if prepared else IDLE_POLL_MS)

    def turn(self) -> None:
        """One round of the loop."""
        self._serve()
        held = "prefill" in self.debug.hold
        chunks = [] if held else self.scheduler.plan(self._clock())
        if chunks and self._compute(chunks):
            filled = list(self._filled(chunks))
            self._ship()
            for one in filled:  # now: what was lent is in the store already
                self.loader.offer(*one)

    def _serve(self) -> None:
        """Everything but computing; also called between two layers."""
        for received in self._server.receive():
            self._handle(received)
        now = self._clock()
        self._server.tick(now)
        for peer in self._server.take_lost():
            self.offers.lost(peer.identity)
            self.shipper.lending.lost(peer.identity)
            for job in self.scheduler.of_peer(peer.identity):
                self._abort(job)
                self._counters["transfers_orphaned"] += 1
        self._releases_seen = self.pool.releases
        self.loader.turn(INTAKE_SECONDS)
        for peer, transfer, epoch in self.shipper.lending.tick():
            # The last word of it may have been lost: who does not want it any more aborts it.
            self._server.send(peer, Progress(transfer, epoch, True, 0))
        for job in self.scheduler.accept():
            self._load(job)
        self._ship()
        self._observe(now)
        self._announcer.tick(now)

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
        try:
            self._engine.forward(batch, self._between_layers)
        except _Abandoned:
            self.scheduler.abandoned()
            self._counters["chunks_abandoned"] += 1
            return False
        finished = self._clock()
        self._step_clock.observe(batch.num_tokens, finished - started)
        for chunk in chunks:
            chunk.job.finished_at = finished
        self.scheduler.computed(chunks)
        self._counters["computed_tokens"] += batch.num_tokens
        self._counters["chunks"] += len(chunks)
        return True

    def _filled(self, chunks: list[Chunk]) -> Iterator[Finished]:
        """What a pass has finished for the store; aborted jobs hold nothing any more."""
        size = self._engine.spec.block_size
        for job, start, end in chunks:
            first, last = start // size, end // size
            if job.state is not JobState.DRAINED and self.scheduler.reuse:
                parent = job.keys[first - 1] if first else job.root
                keys, blocks = job.keys[first:last], job.blocks[first:last]
                yield job.tenant, parent, first, keys, blocks

    def _load(self, job: Job) -> None:
        """The store may have what comes before the blocks that are wanted, and more."""
        first = job.computed // self._engine.spec.block_size
        keys = job.keys if self.scheduler.reuse else []
        seconds = self._step_clock.predict(job.remaining) or UNMEASURED_S * job.remaining
        job.loading = self.loader.begin(job, keys, first, job.blocks, seconds)
        if not job.loading:
            self._accepted(job)

    def _load_ended(self, job: Job, loaded: Loaded) -> None:
        job.loading = False
        job.prefix = loaded.reached
        job.from_host, job.from_disk = loaded.host, loaded.disk
        self._accepted(job)

    def _between_layers(self) -> None:
        self._layers += 1
        self._serve()
        if self.scheduler.all_aborted:
            raise _Abandoned

    # -- the hand-off ---------------------------------------------------------------------------

    def _handle(self, received: FromPeer) -> None:
        match received.message:
            case Offer() as message:
                self.offers.receive(received.peer, message, draining=self._draining)
            case Credit() as message:
                self.shipper.lending.taken(received.peer.identity, message)
                job = self._find(received.peer, message.transfer, message.epoch)
                if job is not None:
                    job.grant(message.size, self._engine.spec.block_bytes)
            case AbortTransfer(transfer, epoch):
                self._aborted(received.peer, transfer, epoch)
            case Probe(transfer, epoch):
                self._probed(received.peer, transfer, epoch)
            case DebugRequest() as message:
                self.debug.answer(received.peer, message)
            case Resync():
                self._announcer.resync(received.peer)
            case ResetCache(number) if received.peer.role == "gateway":
                held, evicted = self.pool.num_held, self.pool.evict_cached()
                self._server.send(received.peer, CacheReset(number, evicted, held))
                log.info("the prefix cache was reset: %d blocks evicted, %d in use", evicted, held)
            case Drain() if received.peer.role == "gateway":
                self._draining = True
            case message:
                self._counters["messages_ignored"] += 1
                self._server.ignored(received.peer, message)

    def _aborted(self, peer: Peer, transfer: int, epoch: int) -> None:
        job = self._find(peer, transfer, epoch)
        if job is not None:
            self._abort(job)
            self._counters["transfers_aborted"] += 1
        self.shipper.lending.ended(peer.identity, transfer)
        self.offers.ended(peer.identity, transfer)
        self._server.send(peer, TransferAborted(transfer, epoch, "asked"))

    def _abort(self, job: Job) -> None:
        self.loader.cancel(job)
        self.scheduler.abort(job)

    def _probed(self, peer: Peer, transfer: int, epoch: int) -> None:
        job = self._find(peer, transfer, epoch)
        if job is None:
            self._server.send(peer, TransferAborted(transfer, epoch, "unknown"))
            return
        working = job.state is JobState.OFFERED or job.remaining > 0
        self._server.send(peer, Progress(transfer, epoch, working, job.sent))

    def _find(self, peer: Peer, number: int, epoch: int) -> Job | None:
        return self.scheduler.find(peer.identity, number, epoch)

    def _accepted(self, job: Job) -> None:
        job.finished_at = self._clock()
        wait = self._step_clock.predict(self.scheduler.tokens_ahead(job)) if job.remaining else 0.0
        store = self.loader.offers_to if self.scheduler.reuse else 0
        self._server.send(
            job.peer,
            Accepted(job.number, job.epoch, job.prefix, wait, store, job.from_host, job.from_disk),
        )

    def _ship(self) -> None:
        if "transfer" not in self.debug.hold:
            self.shipper.ship()

    def _observe(self, now: float) -> None:
        waiting, active = self.scheduler.waiting, self.scheduler.active
        head = waiting[0].last if waiting else 0
        self._watch.observe(
            now,
            work=bool(active or (waiting and head <= self.pool.num_available)),
            moved=(
                self._layers,
                self.shipper.counters["shipped_bytes"],
                len(active),
                self.loader.num_landed,
            ),
            reason=f"{len(active)} transfers active, {len(waiting)} wait for acceptance; "
            f"the first needs up to {head} of {self.pool.num_available} free blocks",
        )

    # -- state ----------------------------------------------------------------------------------

    def _state(self) -> NodeState:
        return NodeState(
            running=len(self.scheduler.active),
            waiting=len(self.scheduler.waiting),
            draining=self._draining,
            counters={
                **self._counters,
                **self.offers.counters,
                **self.shipper.counters,
                **self.loader.counters,
                "stalls": self._watch.stalls,
                "frames_malformed": self._server.counters.malformed,
                "frames_stale": self._server.counters.stale,
                "peers_refused": self._server.counters.refused,
            },
        )

    def ledger(self) -> dict[str, object]:
        """Everything that is held here and by whom; all zero when nobody wants anything."""
        jobs = self.scheduler.active + self.scheduler.waiting
        return {
            "blocks": self.pool.ledger(),
            "transfers": Counter(job.state.value for job in jobs),
            "outbox_blocks": sum(
                job.computed // self._engine.spec.block_size - job.sent
                for job in self.scheduler.active
                if job.computed // self._engine.spec.block_size > job.sent
            ),
            "queued": len(self.scheduler.waiting),
            "loads": self.loader.num_loading,
            "lent": self.shipper.lending.num_lent,
        }

    def close(self) -> None:
        """Closes the link to the store."""
        self.loader.close()

    def check(self) -> None:
        """Proves the invariants of everything this node owns."""
        self.scheduler.check()
