"""The decode node: one thread that owns every socket, the pool and the engine, in one loop.

    receive ─► admit ─► plan ─► step ─► send ─┐
       ▲                                       │
       └───────────────────────────────────────┘

Owns the requests of all gateways and what is said to them. What to run is the scheduler's
decision, what to make of arriving blocks the receiver's; neither knows of gateways.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kvferry.decode_node.receiver import Receiver
from kvferry.decode_node.refusals import refusal
from kvferry.decode_node.request import (
    Phase,
    Request,
    Sequence,
    open_request,
    open_sequences,
)
from kvferry.decode_node.scheduler import DecodeScheduler, Limits
from kvferry.decode_node.stepper import Produced, Stepper
from kvferry.kernels.engine import Engine
from kvferry.kvstore.announce import Announcer, NodeState, StepClock
from kvferry.kvstore.blocks import BlockPool
from kvferry.kvstore.keys import matchable_blocks
from kvferry.kvstore.link import Client
from kvferry.kvstore.router import FromPeer, Peer, Server
from kvferry.kvstore.wire import (
    Abort,
    Done,
    Drain,
    Generate,
    Rejected,
    Resync,
    StepOutput,
    Stop,
    Token,
)

log = logging.getLogger(__name__)

INTAKE_SECONDS = 0.01
"""What a turn spends on arriving blocks while some sequence could run."""

IDLE_INTAKE_SECONDS = 0.05
"""The same while none can: gateways are still heard in between."""

IDLE_POLL_MS = 200

FLUSH_SECONDS = 5.0
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


class DecodeNode:
    """Runs until `stopping` says so and the last request has ended."""

    def __init__(
        self,
        engine: Engine,
        server: Server,
        connect: Callable[[str], Client],
        limits: DecodeLimits,
    ) -> None:
        spec = engine.spec
        self.pool = BlockPool(spec.num_blocks)
        self.scheduler = DecodeScheduler(
            self.pool,
            spec.block_size,
            Limits(limits.max_num_seqs, limits.max_num_batched_tokens),
            reuse=limits.reuse,
        )
        self.receiver = Receiver(connect, engine, self.pool, reuse=limits.reuse)
        self._engine = engine
        self._server = server
        self._limits = limits
        self._stepper = Stepper(engine, self.scheduler)
        self._clock = StepClock()
        self._announcer = Announcer(server, self.pool, self._state)
        self._requests: dict[tuple[bytes, int], Request] = {}
        self._counters: Counter[str] = Counter()
        self._draining = False
        self._releases_seen = -1

    # -- the loop ----------------------------------------------------------------------------------

    def run(self, stop_fd: int, stopping: Callable[[], bool]) -> None:
        """Serves until a stop is asked for and nothing runs any more."""
        while True:
            self._wait(stop_fd)
            if stopping():
                self._draining = True
            if self._draining and not self._requests:
                self._server.flush(FLUSH_SECONDS)
                return
            self.turn()

    def _wait(self, stop_fd: int) -> None:
        """Sleeps until there is something to do; not at all while sequences can run."""
        if self._runnable:
            return
        if self.scheduler.waiting and self.pool.releases != self._releases_seen:
            return
        poller = zmq.Poller()
        poller.register(self._server.socket, zmq.POLLIN)
        for socket in self.receiver.sockets():
            poller.register(socket, zmq.POLLIN)
        if not self._draining:
            poller.register(stop_fd, zmq.POLLIN)
        poller.poll(IDLE_POLL_MS)

    @property
    def _runnable(self) -> bool:
        return any(one.phase is not Phase.RECEIVING for one in self.scheduler.running)

    def turn(self) -> None:
        """One round of the loop."""
        now = time.monotonic()
        for received in self._server.receive():
            self._handle(received)
        self.receiver.receive(INTAKE_SECONDS if self._runnable else IDLE_INTAKE_SECONDS)
        self._tick(now)
        self._admit()
        self._step()

    def _tick(self, now: float) -> None:
        self._server.tick(now)
        self.receiver.tick(now)
        for peer in self._server.take_lost():
            for request in [one for one in self._requests.values() if one.peer == peer]:
                self._forget(request)
                self._counters["requests_abandoned"] += 1
        for request in list(self._requests.values()):
            deadline = request.message.deadline_s
            if deadline and now > request.timeline.arrived + deadline:
                self._reject(request, "deadline_exceeded", f"not finished in {deadline:g} s")
        self._announcer.tick(now)

    # -- gateways ----------------------------------------------------------------------------------

    def _handle(self, received: FromPeer) -> None:
        match received.message:
            case Generate() as message:
                self._open(received.peer, message)
            case Stop() as message:
                self._stop(received.peer, message)
            case Abort(number):
                request = self._requests.get((received.peer.identity, number))
                if request is not None:
                    self._counters["requests_aborted"] += 1
                    self._forget(request)
            case Resync():
                self._announcer.resync(received.peer)
            case Drain():
                self._draining = True
            case message:
                log.warning("ignored a %s from a %s", type(message).__name__, received.peer.role)

    def _open(self, peer: Peer, message: Generate) -> None:
        try:
            request = open_request(peer, message, time.monotonic())
        except ValueError as error:
            self._refuse(peer, message, "invalid_request", str(error))
            return
        refused = self._busy(peer, message) or refusal(request, self._engine.spec, self.scheduler)
        if refused is not None:
            self._refuse(peer, message, *refused)
            return
        self._requests[(peer.identity, message.request)] = request
        for sequence in open_sequences(request, self._engine.spec.block_size):
            self.scheduler.add(sequence)

    def _busy(self, peer: Peer, message: Generate) -> tuple[str, str] | None:
        if self._draining:
            return "shutting_down", "this node accepts no new requests"
        if message.forced and not self._limits.forced_ids:
            return "invalid_request", "forced ids need --enable-test-hooks"
        if len(self.scheduler.waiting) >= self._limits.max_queued:
            return "server_overloaded", f"{self._limits.max_queued} requests are waiting already"
        if (peer.identity, message.request) in self._requests:
            return "invalid_request", f"request {message.request} runs already"
        return None

    def _refuse(self, peer: Peer, message: Generate, code: str, why: str) -> None:
        self._counters[f"requests_rejected_{code}"] += 1
        self._server.send(peer, Rejected(message.request, code, why))

    def _stop(self, peer: Peer, message: Stop) -> None:
        """The gateway found a stop string: the choice ends, what came after it is overrun."""
        request = self._requests.get((peer.identity, message.request))
        if request is None or message.choice not in request.unfinished:
            return
        overrun = len(request.outputs[message.choice]) - message.kept
        request.overrun += max(0, overrun)
        for sequence in self.scheduler.sequences(request):
            if message.choice in sequence.choices:
                sequence.choices.remove(message.choice)
                if not sequence.choices:
                    self._end_sequence(sequence)
        self._end_choice(request, message.choice)

    # -- running -----------------------------------------------------------------------------------

    def _admit(self) -> None:
        before = time.monotonic()
        self._releases_seen = self.pool.releases
        admitted = self.scheduler.admit()
        now = time.monotonic()
        for sequence in admitted:
            timeline = sequence.request.timeline
            if not timeline.admitted:
                timeline.admitted = now
                timeline.lookup_s = min((now - before) / len(admitted), now - timeline.arrived)
            self._choose_prefill(sequence)

    def _choose_prefill(self, sequence: Sequence) -> None:
        """A long suffix goes to the prefill node, if there is one; the rest is computed here."""
        address = sequence.request.message.prefill_node
        last = matchable_blocks(len(sequence.tokens), self._engine.spec.block_size)
        missing = last * self._engine.spec.block_size - sequence.computed
        short = sequence.remaining <= self._limits.local_prefill or missing <= 0
        if not short and self.receiver.usable(address):
            self.receiver.ask(sequence, last, address)

    def _step(self) -> None:
        now = time.monotonic()
        plan = self.scheduler.plan(now)
        for sequence in plan.preempted:
            self.receiver.cancel(sequence)
            self._counters["preemptions"] += 1
        if not plan.slices:
            return
        tokens = sum(one.end - one.start for one in plan.slices)
        self._announcer.step_notice(self._clock.predict(tokens))
        produced = self._stepper.run(plan, lambda: None)
        self._clock.observe(tokens, time.monotonic() - now)
        self._counters["steps"] += 1
        self._counters["computed_tokens"] += tokens
        self._publish(produced)

    def _publish(self, produced: Produced) -> None:
        by_peer: dict[Peer, list[Token]] = defaultdict(list)
        for request, token in produced.tokens:
            by_peer[request.peer].append(token)
        for peer, tokens in by_peer.items():
            self._server.send(peer, StepOutput(tuple(tokens)))
        self._counters["generation_tokens"] += len(produced.tokens)
        for sequence in produced.ended:
            request, choice = sequence.request, sequence.choices[0]
            self._end_sequence(sequence)
            self._end_choice(request, choice)
        for request, why in produced.failed:
            if not self._is_over(request):
                self._reject(request, "engine_error", why)

    # -- ending ------------------------------------------------------------------------------------

    def _end_sequence(self, sequence: Sequence) -> None:
        self.receiver.cancel(sequence)
        self.scheduler.end(sequence)

    def _end_choice(self, request: Request, choice: int) -> None:
        request.unfinished.discard(choice)
        if request.unfinished:
            return
        timeline, sources = request.timeline, request.sources
        self._counters["overrun_tokens"] += request.overrun
        self._counters["shipped_bytes"] += request.bytes_shipped
        for name in ("device", "host", "disk", "remote", "prefill", "decode"):
            self._counters[f"prompt_tokens_{name}"] += getattr(sources, name)
        self._server.send(
            request.peer,
            Done(
                request=request.message.request,
                sources=sources,
                stages=timeline.stages(),
                handoff_ms=1e3 * timeline.handoff_s,
                predicted_n=request.generated - request.overrun,
                predicted_ms=1e3 * (timeline.last_token - timeline.first_token),
                bytes_shipped=request.bytes_shipped,
                preemptions=request.preemptions,
            ),
        )
        self._remove(request)

    def _reject(self, request: Request, code: str, message: str) -> None:
        self._server.send(request.peer, Rejected(request.message.request, code, message))
        self._counters[f"requests_rejected_{code}"] += 1
        self._forget(request)

    def _forget(self, request: Request) -> None:
        for sequence in self.scheduler.sequences(request):
            self._end_sequence(sequence)
        self._remove(request)

    def _is_over(self, request: Request) -> bool:
        return (request.peer.identity, request.message.request) not in self._requests

    def _remove(self, request: Request) -> None:
        self._requests.pop((request.peer.identity, request.message.request), None)

    # -- state -------------------------------------------------------------------------------------

    def _state(self) -> NodeState:
        inbox = self.receiver.inbox.counters
        return NodeState(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            draining=self._draining,
            counters={
                **self._counters,
                "blocks_dropped": inbox.dropped,
                "blocks_duplicated": inbox.duplicates,
                "blocks_damaged": inbox.damaged,
                "frames_malformed": self._server.counters.malformed,
                "frames_stale": self._server.counters.stale,
                "peers_refused": self._server.counters.refused,
            },
        )

    def close(self) -> None:
        """Closes the links to prefill nodes."""
        self.receiver.close()

    def check(self) -> None:
        """Proves the invariants of everything this node owns."""
        self.scheduler.check()
        self.receiver.inbox.check()
        for one in self.scheduler.running + self.scheduler.waiting:
            key = (one.request.peer.identity, one.request.message.request)
            assert self._requests.get(key) is one.request, "a sequence of no request"
