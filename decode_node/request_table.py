"""The requests of all gateways on one decode node: opened or refused, inquired about, ended.

Owns which requests there are, for what one is refused on arrival, before it holds anything, and
every message that goes to a gateway about one. What runs when is the scheduler's business, and how
a token comes about the stepper's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from kvferry.decode_node.request import Request, Sequence, open_request, open_sequences
from kvferry.decode_node.scheduler import DecodeScheduler
from kvferry.decode_node.stepper import Produced
from kvferry.kernels.engine import EngineSpec
from kvferry.kvstore.wire.generation import (
    SOURCES,
    Abort,
    Done,
    Generate,
    Inquire,
    Rejected,
    Running,
    Started,
    StepOutput,
    Stop,
    Token,
)
from kvferry.kvstore.wire.server import Peer, Server

REMEMBERED = 4096
"""How many ended requests are known: a repeated `Generate` does not run again, and a lost `Done` is
said again to whoever inquires."""

Refusal = tuple[str, str]
"""A code of `Rejected`, and a sentence that names the figures."""


class RequestTable:
    """Requests by gateway and number."""

    def __init__(
        self,
        server: Server,
        scheduler: DecodeScheduler,
        cancel: Callable[[Sequence], None],
        spec: EngineSpec,
        counters: Counter[str],
        *,
        max_queued: int,
        forced_ids: bool,
    ) -> None:
        self._server = server
        self._scheduler = scheduler
        self._cancel = cancel
        self._counters = counters
        self._spec = spec
        self._max_queued = max_queued
        self._forced_ids = forced_ids
        self._requests: dict[tuple[bytes, int], Request] = {}
        self._ended: dict[tuple[bytes, int], Done | None] = {}
        """With the account, if it ran to its end; the oldest one first."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._requests.values()))

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.key) is request

    # -- opening --------------------------------------------------------------------------------

    def open(self, peer: Peer, message: Generate, now: float, *, draining: bool) -> None:
        """Queues a request, or says at once why not. One that is known already is ignored."""
        key = (peer.identity, message.request)
        if key in self._requests or key in self._ended:
            self._counters["requests_repeated"] += 1
            return
        try:
            request = open_request(peer, message, now)
        except ValueError as error:
            self._refuse(peer, message, "invalid_request", str(error))
            return
        refused = self._refusal(request, draining=draining)
        if refused is not None:
            self._refuse(peer, message, *refused)
            return
        self._requests[key] = request
        for sequence in open_sequences(request, self._spec.block_size):
            self._scheduler.add(sequence)

    def _refusal(self, request: Request, *, draining: bool) -> Refusal | None:
        """Why this request cannot run here now, or never can; None when it can."""
        if draining:
            return "shutting_down", "this node accepts no new requests"
        if request.forced and not self._forced_ids:
            return "invalid_request", "forced ids need --enable-test-hooks"
        if len(self._scheduler.waiting) >= self._max_queued:
            return "server_overloaded", f"{self._max_queued} requests are waiting already"
        prompt, spec = len(request.prompt), self._spec
        if prompt + request.message.max_tokens > spec.max_model_len:
            return (
                "context_length_exceeded",
                f"This model's maximum context length is {spec.max_model_len} tokens. However, "
                f"your prompt has {prompt} tokens and max_tokens is {request.message.max_tokens}.",
            )
        ids = request.token_ids()
        if not 0 <= min(ids) <= max(ids) < spec.vocab_size:
            return "invalid_request", f"a token id is outside the vocabulary of {spec.vocab_size}"
        if len(request.keys) != prompt // spec.block_size:
            return "invalid_request", f"{len(request.keys)} block keys for {prompt} tokens"
        never = self._scheduler.never_fits(request)
        return ("invalid_request", never) if never else None

    def _refuse(self, peer: Peer, message: Generate, code: str, why: str) -> None:
        self._counters[f"requests_rejected_{code}"] += 1
        self._server.send(peer, Rejected(message.request, code, why))

    # -- while it runs --------------------------------------------------------------------------

    def inquired(self, peer: Peer, message: Inquire) -> None:
        request = self._requests.get((peer.identity, message.request))
        done = self._ended.get((peer.identity, message.request))
        if done is not None:
            self._counters["accounts_repeated"] += 1
            self._server.send(peer, done)
            return
        if request is None:
            why = "this node does not know the request"
            self._server.send(peer, Rejected(message.request, "unknown_request", why))
            return
        sent = tuple(len(request.outputs[choice]) for choice in sorted(request.outputs))
        self._server.send(peer, Running(message.request, sent))

    def stop(self, peer: Peer, message: Stop) -> None:
        """The gateway found a stop string: the choice ends, what came after it is overrun."""
        request = self._requests.get((peer.identity, message.request))
        if request is None or message.choice not in request.unfinished:
            return
        request.overrun += max(0, len(request.outputs[message.choice]) - message.kept)
        for sequence in self._scheduler.sequences(request):
            if message.choice in sequence.choices:
                sequence.choices.remove(message.choice)
                if not sequence.choices:
                    self._end_sequence(sequence)
        self._end_choice(request, message.choice)

    def abort(self, peer: Peer, message: Abort) -> None:
        request = self._requests.get((peer.identity, message.request))
        if request is not None:
            self._counters["requests_aborted"] += 1
            self.forget(request)

    def publish(self, produced: Produced) -> None:
        """Sends a step's tokens, one message a gateway, and ends what has ended."""
        for request in produced.started:
            if not request.message.outputs:  # else another node has said more of it
                self._server.send(request.peer, Started(request.message.request, request.sources))
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
            if request in self:
                self.reject(request, "engine_error", why)

    def expire(self, now: float) -> None:
        """Rejects requests whose time is up."""
        for request in self:
            deadline = request.message.deadline_s
            if deadline and now > request.timeline.arrived + deadline:
                self.reject(request, "deadline_exceeded", f"not finished in {deadline:g} s")

    # -- ending ---------------------------------------------------------------------------------

    def _end_sequence(self, sequence: Sequence) -> None:
        self._cancel(sequence)
        self._scheduler.end(sequence)

    def _end_choice(self, request: Request, choice: int) -> None:
        request.unfinished.discard(choice)
        if request.unfinished:
            return
        self._counters["overrun_tokens"] += request.overrun
        self._counters["shipped_bytes"] += request.bytes_shipped
        for name in SOURCES:
            self._counters[f"prompt_tokens_{name}"] += getattr(request.sources, name)
        timeline = request.timeline
        done = Done(
            request=request.message.request,
            sources=request.sources,
            stages=timeline.stages(),
            handoff_ms=1e3 * timeline.handoff_s,
            predicted_n=sum(map(len, request.outputs.values())) - request.overrun,
            predicted_ms=1e3 * (timeline.last_token - timeline.first_token),
            bytes_shipped=request.bytes_shipped,
            preemptions=request.preemptions,
        )
        self._server.send(request.peer, done)
        self._remove(request, done)

    def reject(self, request: Request, code: str, message: str) -> None:
        self._server.send(request.peer, Rejected(request.message.request, code, message))
        self._counters[f"requests_rejected_{code}"] += 1
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Frees everything of a request that nobody waits for any more."""
        for sequence in self._scheduler.sequences(request):
            self._end_sequence(sequence)
        self._remove(request)

    def _remove(self, request: Request, done: Done | None = None) -> None:
        self._requests.pop(request.key, None)
        self._ended[request.key] = done
        if len(self._ended) > REMEMBERED:
            del self._ended[next(iter(self._ended))]

    def lost(self, peer: Peer) -> None:
        """A gateway is gone."""
        for request in self:
            if request.peer == peer:
                self._counters["requests_abandoned"] += 1
                self.forget(request)

    def check(self) -> None:
        """Proves that every sequence belongs to a request that is open."""
        for one in self._scheduler.running + self._scheduler.waiting:
            assert one.request in self, "a sequence of no request"
