"""The decode node: one thread that owns every socket, the pool and the engine, in one loop.

    receive ─► admit ─► plan ─► step ─► send ─┐
       ▲                                       │
       └───────────────────────────────────────┘

Owns the order of these acts and when to sleep. What to run is the scheduler's decision, what to
make of arriving blocks the receiver's, and what gateways are told the desk's.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import zmq

from kvferry.decode_node.desk import Desk
from kvferry.decode_node.receiver import Receiver
from kvferry.decode_node.request import Phase, Sequence
from kvferry.decode_node.scheduler import DecodeScheduler, Limits
from kvferry.decode_node.stepper import Filled, Stepper, filled
from kvferry.kernels.engine import Engine
from kvferry.kvstore.client.client import StoreClient
from kvferry.kvstore.client.connector import LEAST_PATIENCE_S, UNMEASURED_S, Loaded, Loader
from kvferry.kvstore.keys import matchable_blocks
from kvferry.kvstore.node.announce import Announcer, NodeState, StepClock
from kvferry.kvstore.node.debug import DebugDesk, DebugSwitches
from kvferry.kvstore.node.watch import StallWatch
from kvferry.kvstore.process.collector import Collector
from kvferry.kvstore.tiers.device import BlockPool
from kvferry.kvstore.tiers.shared_memory import memory_is_short
from kvferry.kvstore.wire.client import Client
from kvferry.kvstore.wire.generation import Abort, Generate, Inquire, Stop
from kvferry.kvstore.wire.server import FromPeer, Server
from kvferry.kvstore.wire.status import CacheReset, DebugRequest, Drain, ResetCache, Resync

log = logging.getLogger(__name__)

INTAKE_SECONDS = 0.01
"""What a turn spends on arriving blocks while some sequence could run."""

IDLE_INTAKE_SECONDS = 0.05
"""The same while none can: gateways are still heard in between."""

IDLE_POLL_MS = 200

PREFILL_TOKENS = 64
"""A step of at least so many tokens says how fast prompts are computed."""

AWAITING = (Phase.LOADING, Phase.RECEIVING)

FLUSH_SECONDS = 2.0
"""How long a node that has nothing more to do waits for its peers to read what it sent."""


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued: int
    local_prefill: int
    reuse: bool
    forced_ids: bool
    """Whether requests may say which ids to emit (a test hook)."""
    load_patience_s: float = LEAST_PATIENCE_S
    """The least that a load from the store gets."""


class DecodeNode:
    """Runs until `stopping` says so and the last request has ended."""

    def __init__(
        self,
        engine: Engine,
        server: Server,
        connect: Callable[[str], Client],
        limits: DecodeLimits,
        clock: Callable[[], float] = time.monotonic,
        debug: DebugSwitches | None = None,
        store: StoreClient | None = None,
    ) -> None:
        spec = engine.spec
        self.debug = DebugDesk(
            server,
            debug or DebugSwitches(),
            ledger=lambda: self.ledger(),
            check=lambda: self.check(),
            clients=lambda: self.receiver.links.all() + self.loader.links,
        )
        self.pool = BlockPool(spec.num_blocks)
        self.scheduler = DecodeScheduler(
            self.pool,
            spec.block_size,
            Limits(limits.max_num_seqs, limits.max_num_batched_tokens),
            reuse=limits.reuse,
        )
        self.receiver = Receiver(
            lambda address: self.debug.watched(connect(address)),
            engine,
            self.pool,
            reuse=limits.reuse,
            clock=clock,
            handed_back=self._choose_prefill,
            to_offer=lambda *span: self._offer(filled(*span)),
            said=server.peer_log,
            store=store,
        )
        self.loader: Loader[Sequence] = Loader(
            store,
            engine,
            self.pool,
            landed=self._block_loaded,
            ended=self._load_ended,
            clock=clock,
            least_patience_s=limits.load_patience_s,
        )
        self.desk = Desk(
            server,
            self.scheduler,
            self._cancel,
            spec,
            max_queued=limits.max_queued,
            forced_ids=limits.forced_ids,
        )
        self._engine = engine
        self._block_size = spec.block_size
        self._reuse = limits.reuse
        self._server = server
        self._clock = clock
        self._local_prefill = limits.local_prefill
        self._stepper = Stepper(engine, self.scheduler, clock)
        self._step_clock = StepClock()
        self._prefill_clock = StepClock()
        self._announcer = Announcer(server, self.pool, self._state)
        self._watch = StallWatch("decode")
        self._releases_seen = -1

    # -- the loop -------------------------------------------------------------------------------

    def run(
        self,
        stop_fd: int,
        stopping: Callable[[], bool],
        timeout: float = inf,
        collector: Collector | None = None,
    ) -> None:
        """Serves until a stop is asked for and nothing runs any more, `timeout` seconds later at
        most: what still runs then is handed back to its gateway, which may go on elsewhere."""
        deadline = inf
        while True:
            self._wait(stop_fd)
            if stopping():
                self.desk.draining = True
                deadline = min(deadline, self._clock() + timeout)
            if self._clock() >= deadline:
                for request in self.desk:
                    self.desk.reject(request, "shutting_down", "this node ends")
            if self.desk.draining and not self.desk:
                self.loader.deliver()
                self._server.flush(FLUSH_SECONDS)
                return
            self.turn()
            if collector is not None:
                collector.turn(idle=not self.desk)

    def _wait(self, stop_fd: int) -> None:
        """Sleeps until there is something to do; not at all while sequences can run."""
        runnable = self._runnable and "decode" not in self.debug.hold
        if runnable or (self.scheduler.waiting and self._room_appeared):
            return
        poller = zmq.Poller()
        poller.register(self._server.socket, zmq.POLLIN)
        for socket in (*self.receiver.sockets(), *self.loader.sockets):
            poller.register(socket, zmq.POLLIN)
        if not self.desk.draining:
            poller.register(stop_fd, zmq.POLLIN)
        prepared = not self.desk and not memory_is_short() and self._engine.prepare()
        poller.poll(0 if prepared else IDLE_POLL_MS)

    @property
    def _runnable(self) -> bool:
        return any(one.phase not in AWAITING for one in self.scheduler.running)

    @property
    def _room_appeared(self) -> bool:
        return self.pool.releases != self._releases_seen

    def turn(self) -> None:
        """One round of the loop."""
        for received in self._server.receive():
            self._handle(received)
        intake = INTAKE_SECONDS if self._runnable else IDLE_INTAKE_SECONDS
        self.receiver.receive(intake)
        self.loader.turn(intake)
        self._tick(self._clock())
        if "queue" not in self.debug.hold:
            self._admit()
        self._force_preemptions()
        if "decode" not in self.debug.hold:
            self._step()

    def _force_preemptions(self) -> None:
        while self.debug.preempt and self.scheduler.running:
            self.debug.preempt -= 1
            youngest = max(self.scheduler.running, key=lambda running: running.request.order)
            self.scheduler.preempt(youngest)
            self._cancel(youngest)
            self.desk.counters["preemptions"] += 1

    def _handle(self, received: FromPeer) -> None:
        match received.message:
            case Generate() as message:
                self.desk.open(received.peer, message, self._clock())
            case Stop() as message:
                self.desk.stop(received.peer, message)
            case Abort() as message:
                self.desk.abort(received.peer, message)
            case Inquire() as message:
                self.desk.inquired(received.peer, message)
            case DebugRequest() as message:
                self.debug.answer(received.peer, message)
            case Resync():
                self._announcer.resync(received.peer)
            case ResetCache(number) if received.peer.role == "gateway":
                held, evicted = self.pool.num_held, self.pool.evict_cached()
                self._server.send(received.peer, CacheReset(number, evicted, held))
                log.info("the prefix cache was reset: %d blocks evicted, %d in use", evicted, held)
            case Drain() if received.peer.role == "gateway":
                self.desk.draining = True
            case message:
                self.desk.counters["messages_ignored"] += 1
                self._server.ignored(received.peer, message)

    def _tick(self, now: float) -> None:
        self._server.tick(now)
        for peer in self._server.take_lost():
            self.desk.lost(peer)
        self.receiver.tick(now)
        self.desk.expire(now)
        self._observe(now)
        self._announcer.tick(now)

    # -- running --------------------------------------------------------------------------------

    def _admit(self) -> None:
        before = self._clock()
        self._releases_seen = self.pool.releases
        admitted = self.scheduler.admit()
        now = self._clock()
        for sequence in admitted:
            timeline = sequence.request.timeline
            if not timeline.admitted:
                timeline.admitted = now
                timeline.lookup_s = min((now - before) / len(admitted), now - timeline.arrived)
            self._load(sequence)

    def _load(self, sequence: Sequence) -> None:
        """What the store has is loaded first, as long as that is quicker than computing it."""
        last = matchable_blocks(len(sequence.tokens), self._block_size) if self._reuse else 0
        first = sequence.computed // self._block_size
        tokens = (last - first) * self._block_size
        compute_s = self._prefill_clock.predict(tokens) or UNMEASURED_S * tokens
        keys, blocks = sequence.keys[:last], sequence.blocks
        if self.loader.begin(sequence, keys, first, blocks, compute_s):
            sequence.phase = Phase.LOADING
        else:
            self._choose_prefill(sequence)

    def _block_loaded(self, sequence: Sequence, index: int) -> None:
        self.pool.commit(sequence.blocks[index], sequence.keys[index])

    def _load_ended(self, sequence: Sequence, loaded: Loaded) -> None:
        sequence.computed = loaded.reached * self._block_size
        sequence.phase = Phase.PREFILLING
        sequence.sources.loaded(loaded.first, loaded.reached, loaded.disk)
        if not sequence.request.timeline.first_token:
            sequence.request.timeline.load_s += loaded.seconds
        self._choose_prefill(sequence)

    def _cancel(self, sequence: Sequence) -> None:
        """Nothing more shall come for it: its blocks are reused at once."""
        self.receiver.cancel(sequence)
        loaded = self.loader.cancel(sequence)
        if loaded is not None:
            sequence.sources.loaded(loaded.first, loaded.reached, loaded.disk)

    def _choose_prefill(self, sequence: Sequence) -> None:
        """A long suffix goes to a prefill node, if one can be asked; the rest is computed here."""
        last = matchable_blocks(len(sequence.tokens), self._block_size)
        missing = last * self._block_size - sequence.computed
        if sequence.remaining <= self._local_prefill or missing <= 0:
            return
        address = self.receiver.candidate(sequence)
        if address is not None:
            self.receiver.ask(sequence, last, address)

    def _step(self) -> None:
        now = self._clock()
        plan = self.scheduler.plan(now)
        for sequence in plan.preempted:
            self._cancel(sequence)
            self.desk.counters["preemptions"] += 1
        if not plan.slices:
            return
        tokens = sum(one.end - one.start for one in plan.slices)
        self._announcer.step_notice(self._step_clock.predict(tokens))
        produced = self._stepper.run(plan, lambda: None)
        took = self._clock() - now
        self._step_clock.observe(tokens, took)
        if tokens >= PREFILL_TOKENS:
            self._prefill_clock.observe(tokens, took)
        self.desk.counters["steps"] += 1
        self.desk.counters["computed_tokens"] += tokens
        self.desk.publish(produced)
        for one in produced.filled:
            self._offer(one)

    def _offer(self, one: Filled) -> None:
        """Gives blocks that are whole to the store."""
        if self._reuse:
            tenant = one.request.message.tenant
            self.loader.offer(tenant, one.parent, one.first, one.keys, one.blocks)

    # -- state ----------------------------------------------------------------------------------

    def _observe(self, now: float) -> None:
        waiting, running = self.scheduler.waiting, self.scheduler.running
        receiving = [one for one in running if one.phase in AWAITING]
        head = self.scheduler.blocks_needed(waiting[0]) if waiting else 0
        counters = self.desk.counters
        self._watch.observe(
            now,
            work=bool(receiving or (waiting and head <= self.pool.num_available)),
            moved=(
                counters["steps"],
                self.receiver.inbox.num_landed,
                len(running),
                self.receiver.heard,
                self.loader.num_landed,
            ),
            reason=f"{len(receiving)} sequences wait for blocks, {len(waiting)} for admission; "
            f"the first needs {head} of {self.pool.num_available} free blocks",
        )

    def _state(self) -> NodeState:
        inbox = self.receiver.inbox
        sockets = self._server.counters
        return NodeState(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            draining=self.desk.draining,
            counters={
                **self.desk.counters,
                "blocks_dropped": inbox.counters.dropped,
                "blocks_duplicated": inbox.counters.duplicates,
                "blocks_damaged": inbox.counters.damaged,
                **self.loader.counters,
                "transfer_retries": self.receiver.retries,
                "prefill_stalls": self.receiver.links.stalls,
                "stalls": self._watch.stalls,
                "frames_malformed": sockets.malformed,
                "frames_stale": sockets.stale,
                "peers_refused": sockets.refused,
            },
        )

    def ledger(self) -> dict[str, object]:
        """Everything that is held here and by whom; all zero when nobody wants anything."""
        running = self.scheduler.running
        return {
            "blocks": self.pool.ledger(),
            "reserved": sum(len(one.spare) for one in running),
            "requests": len(self.desk),
            "sequences": Counter(one.phase.value for one in running + self.scheduler.waiting),
            "transfers": Counter(one.state.value for one in self.receiver.inbox.all()),
            "loads": self.loader.num_loading,
            "in_flight_bytes": self.receiver.in_flight_bytes,
            "queued": len(self.scheduler.waiting),
        }

    def close(self) -> None:
        """Closes the links to prefill nodes and to the store."""
        self.receiver.close()
        self.loader.close()

    def check(self) -> None:
        """Proves the invariants of everything this node owns."""
        self.scheduler.check()
        self.receiver.inbox.check()
        self.desk.check()
