"""The decode node: one thread that owns every socket, the pool and the engine, in one loop.

    receive ─► admit ─► plan ─► step ─► send ─┐
       ▲                                       │
       └───────────────────────────────────────┘

Owns the order of these acts. What to run is the scheduler's decision, what to make of arriving
blocks the receiver's, and what gateways are told the table of requests'. How the loop sleeps and
ends is the same for all nodes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import zmq

from kvferry.decode_node.receiver import Receiver
from kvferry.decode_node.request import Phase, Sequence
from kvferry.decode_node.request_table import RequestTable
from kvferry.decode_node.scheduler import DecodeScheduler, Limits
from kvferry.decode_node.stepper import Filled, Stepper, filled
from kvferry.kernels.engine import Engine
from kvferry.kvstore.client.client import StoreClient
from kvferry.kvstore.client.connector import LEAST_PATIENCE_S, UNMEASURED_S, Fetched
from kvferry.kvstore.keys import matchable_blocks
from kvferry.kvstore.node.compute import ComputeNode, StepClock
from kvferry.kvstore.node.debug import DebugSwitches
from kvferry.kvstore.tiers.device import BlockPool
from kvferry.kvstore.wire.client import Client
from kvferry.kvstore.wire.generation import Abort, Generate, Inquire, Stop
from kvferry.kvstore.wire.server import FromPeer, Peer, Server

INTAKE_SECONDS = 0.01
"""What a turn spends on arriving blocks while some sequence could run."""

IDLE_INTAKE_SECONDS = 0.05
"""The same while none can: gateways are still heard in between."""

PREFILL_TOKENS = 64
"""A step of at least so many tokens says how fast prompts are computed."""

AWAITING = (Phase.FETCHING, Phase.RECEIVING)


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
    """The least that a fetch from the store gets."""


class DecodeNode(ComputeNode[Sequence]):
    """Runs until a stop is asked for and the last request has ended."""

    def __init__(
        self,
        engine: Engine,
        server: Server,
        connect: Callable[[str], Client],
        limits: DecodeLimits,
        clock: Callable[[], float] = time.monotonic,
        debug: DebugSwitches | None = None,
        store: StoreClient | None = None,
        busy: Callable[[bool], None] | None = None,
    ) -> None:
        spec = engine.spec
        pool = BlockPool(spec.num_blocks)
        self.scheduler = DecodeScheduler(
            pool,
            spec.block_size,
            Limits(limits.max_num_seqs, limits.max_num_batched_tokens),
            reuse=limits.reuse,
        )
        super().__init__(
            "decode",
            server,
            engine,
            pool,
            self.scheduler,
            store=store,
            load_patience_s=limits.load_patience_s,
            clock=clock,
            debug=debug,
            busy=busy,
        )
        self.receiver = Receiver(
            lambda address: self.debug.watched(connect(address)),
            engine,
            pool,
            reuse=limits.reuse,
            clock=clock,
            handed_back=self._choose_prefill,
            to_put=lambda *span: self._put(filled(*span)),
            peer_log=server.peer_log,
            store=store,
        )
        self.requests = RequestTable(
            server,
            self.scheduler,
            self._cancel,
            spec,
            self.counters,
            max_queued=limits.max_queued,
            forced_ids=limits.forced_ids,
        )
        self._block_size = spec.block_size
        self._reuse = limits.reuse
        self._local_prefill = limits.local_prefill
        self._stepper = Stepper(engine, self.scheduler, clock)
        self._prefill_clock = StepClock()

    # -- the loop -------------------------------------------------------------------------------

    def turn(self) -> None:
        """One round of the loop."""
        self.receive()
        intake = INTAKE_SECONDS if self._runnable else IDLE_INTAKE_SECONDS
        self.receiver.receive(intake)
        self.connector.turn(intake)
        now = self._clock()
        self.receiver.tick(now)
        self.requests.expire(now)
        self._observe(now)
        self._announcer.tick(now)
        if "queue" not in self.debug.hold:
            self._admit()
        while self.debug.preempt and self.scheduler.running:
            self.debug.preempt -= 1
            self._preempted(self.scheduler.preempt_youngest())
        if "decode" not in self.debug.hold:
            self._step()

    def handle(self, received: FromPeer) -> bool:
        peer = received.peer
        match received.message:
            case Generate() as message:
                self.requests.open(peer, message, self._clock(), draining=self.draining)
            case Stop() as message:
                self.requests.stop(peer, message)
            case Abort() as message:
                self.requests.abort(peer, message)
            case Inquire() as message:
                self.requests.inquired(peer, message)
            case _:
                return super().handle(received)
        return True

    def lost(self, peer: Peer) -> None:
        self.requests.lost(peer)

    @property
    def can_compute(self) -> bool:
        return self._runnable and "decode" not in self.debug.hold

    @property
    def _runnable(self) -> bool:
        return any(one.phase not in AWAITING for one in self.scheduler.running)

    @property
    def idle(self) -> bool:
        return not self.requests

    def give_up(self) -> None:
        """Hands what still runs back to its gateway, which may go on elsewhere."""
        for request in self.requests:
            self.requests.reject(request, "shutting_down", "this node ends")

    def sockets(self) -> Iterable[zmq.Socket[bytes] | int]:
        return (*self.receiver.links.sockets(), *self.connector.sockets)

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
        """What the store has is fetched first, as long as that is quicker than computing it."""
        last = matchable_blocks(len(sequence.tokens), self._block_size) if self._reuse else 0
        first = sequence.computed // self._block_size
        tokens = (last - first) * self._block_size
        compute_s = self._prefill_clock.predict(tokens) or UNMEASURED_S * tokens
        keys, blocks = sequence.keys[:last], sequence.blocks
        if self.connector.fetch(sequence, keys, first, blocks, compute_s):
            sequence.phase = Phase.FETCHING
        else:
            self._choose_prefill(sequence)

    def block_fetched(self, sequence: Sequence, index: int) -> None:
        self.pool.commit(sequence.blocks[index], sequence.keys[index])

    def fetch_ended(self, sequence: Sequence, fetched: Fetched) -> None:
        sequence.computed = fetched.reached * self._block_size
        sequence.phase = Phase.PREFILLING
        sequence.sources.fetched(fetched.first, fetched.reached, fetched.disk)
        if not sequence.request.timeline.first_token:
            sequence.request.timeline.load_s += fetched.seconds
        self._choose_prefill(sequence)

    def _cancel(self, sequence: Sequence) -> None:
        """Nothing more shall come for it: its blocks are reused at once."""
        self.receiver.cancel(sequence)
        fetched = self.connector.cancel(sequence)
        if fetched is not None:
            sequence.sources.fetched(fetched.first, fetched.reached, fetched.disk)

    def _preempted(self, sequence: Sequence) -> None:
        self._cancel(sequence)
        self.counters["preemptions"] += 1

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
            self._preempted(sequence)
        if not plan.slices:
            return
        tokens = sum(one.end - one.start for one in plan.slices)
        self._announcer.step_notice(self._step_clock.predict(tokens))
        self.computing(True)
        produced = self._stepper.run(plan)
        took = self._clock() - now
        self._step_clock.observe(tokens, took)
        if tokens >= PREFILL_TOKENS:
            self._prefill_clock.observe(tokens, took)
        self.counters["steps"] += 1
        self.counters["computed_tokens"] += tokens
        self.requests.publish(produced)
        for one in produced.filled:
            self._put(one)

    def _put(self, one: Filled) -> None:
        """Gives blocks that are whole to the store."""
        if self._reuse:
            tenant = one.request.message.tenant
            self.connector.put(tenant, one.parent, one.first, one.keys, one.blocks)

    # -- state ----------------------------------------------------------------------------------

    def _observe(self, now: float) -> None:
        waiting, running = self.scheduler.waiting, self.scheduler.running
        receiving = [one for one in running if one.phase in AWAITING]
        head = self.scheduler.blocks_needed(waiting[0]) if waiting else 0
        self.stall_watch.observe(
            now,
            work=bool(receiving or (waiting and head <= self.pool.num_available)),
            moved=(
                self.counters["steps"],
                self.receiver.transfers.num_landed,
                len(running),
                self.receiver.heard,
                self.connector.num_landed,
            ),
            reason=f"{len(receiving)} sequences wait for blocks, {len(waiting)} for admission; "
            f"the first needs {head} of {self.pool.num_available} free blocks",
        )

    def figures(self) -> dict[str, float]:
        blocks = self.receiver.transfers.counters
        return {
            **super().figures(),
            "blocks_dropped": blocks.dropped,
            "blocks_duplicated": blocks.duplicates,
            "blocks_damaged": blocks.damaged,
            "transfer_retries": self.receiver.retries,
            "prefill_stalls": self.receiver.links.stalls,
        }

    def clients(self) -> list[Client]:
        return self.receiver.links.all() + super().clients()

    def ledger(self) -> dict[str, object]:
        running = self.scheduler.running
        return {
            "blocks": self.pool.ledger(),
            "reserved": sum(len(one.spare) for one in running),
            "requests": len(self.requests),
            "sequences": Counter(one.phase.value for one in running + self.scheduler.waiting),
            "transfers": Counter(one.state.value for one in self.receiver.transfers.all()),
            "fetches": self.connector.num_fetches,
            "in_flight_bytes": self.receiver.in_flight_bytes,
            "queued": len(self.scheduler.waiting),
        }

    def close(self) -> None:
        self.receiver.links.close()
        super().close()

    def check(self) -> None:
        self.scheduler.check()
        self.receiver.transfers.check()
        self.requests.check()
