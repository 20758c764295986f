"""The gateway's link to one node or store, and what goes over it.

Owns one address: its link is made again when its node dies, what the node says of itself is kept,
and it is told apart as connecting, answering, stalled and gone. Each request's events go to the
callback that came with it; one from which nothing comes is inquired about. A node that says what
none says that works is noticed, and given up for a while if it goes on. It does not choose nodes,
and knows nothing of text, choices or HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Literal

from kvferry.gateway.router.pacing import MessagePacer
from kvferry.gateway.router.policy import MAX_KEYS, KnownKeys
from kvferry.gateway.router.questions import Answer, Questions
from kvferry.gateway.router.requests import (
    REPEAT_SECONDS,
    Loss,
    NodeLost,
    OpenRequest,
    OpenRequests,
)
from kvferry.kvstore.errors import ProtocolBroken
from kvferry.kvstore.process.logs import SparseLog
from kvferry.kvstore.wire.client import Client, LinkState
from kvferry.kvstore.wire.codec import AnyMessage
from kvferry.kvstore.wire.faults import FaultInjector
from kvferry.kvstore.wire.generation import (
    Abort,
    Done,
    Generate,
    Inquire,
    Rejected,
    Running,
    Started,
    StepOutput,
    Stop,
)
from kvferry.kvstore.wire.hello import Welcome
from kvferry.kvstore.wire.status import (
    KeyBatch,
    Resync,
    Status,
    StepNotice,
)

REFUSED_RETRY_SECONDS = 5.0
STALL_SECONDS = 2.0
STALL_FACTOR = 3.0
"""A node is stalled after a silence of so many times the step that it announced."""
ABANDON_SECONDS = 10.0
"""How long a stalled node that is still connected is waited for before it counts as gone."""
SLICE_TOKENS = 64
"""Tokens acted on in one turn of the event loop."""
DRAIN_SECONDS = 0.01
"""What one node's messages may take of the event loop at once."""
MAX_OFFENCES = 5
OFFENCE_SECONDS = 10.0
"""A node that offends so often in this time is given up for as long."""
SPARE_TOKENS = 64
NewClient = Callable[[str], Client]
Role = Literal["decode", "prefill", "store"]


class NodeLink:
    """One configured address and whoever answers there."""

    def __init__(
        self, role: Role, address: str, new_client: NewClient, sparse_log: SparseLog
    ) -> None:
        self.role = role
        self.address = address
        self.welcome: Welcome | None = None
        """What it said of itself, while it answers."""
        self.status: Status | None = None
        self.keys = KnownKeys()
        self.requests = OpenRequests(self.keys)
        self.questions = Questions(self.send)
        self.usable = False
        """It answers, and computes as the others do."""
        self.stalled = False
        self.met = False
        """Whether it has ever answered, be it with a refusal."""
        self.chosen = 0
        """The number of the last choice that fell on it."""
        self.counters: Counter[str] = Counter()
        self.faults: FaultInjector | None = None
        self._new_client = new_client
        self._pacer = MessagePacer(self._take, SLICE_TOKENS, self.drain)
        self._log = sparse_log
        self._offences: deque[float] = deque(maxlen=MAX_OFFENCES)
        self._given_up = False
        """It has offended too often: its link ends with the next tick."""
        self._client: Client | None = None
        self._predicted = 0.0
        self._retry_at = 0.0
        self._resync_at = 0.0

    # -- what it is --------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """For log lines."""
        return self.role if self.role == "store" else f"{self.role} node"

    @property
    def reported(self) -> int:
        """Requests there as of its last report: ours of then, and those of other gateways."""
        return self.status.running + self.status.waiting if self.status is not None else 0

    @property
    def draining(self) -> bool:
        return self.status is not None and self.status.draining

    @property
    def able(self) -> bool:
        """It may be given work."""
        return self.usable and not self.stalled and not self.draining

    @property
    def state(self) -> str:
        """For people: `usable`, `stalled`, `draining`, or how far its link is."""
        if self.usable:
            return "stalled" if self.stalled else "draining" if self.draining else "usable"
        return "closed" if self._client is None else self._client.state.value

    # -- the link ----------------------------------------------------------------------------------

    def open(self) -> None:
        self._client = self._new_client(self.address)
        self._client.faults = self.faults
        asyncio.get_running_loop().add_reader(self._client.fd, self.drain)

    def close(self) -> None:
        if self._client is not None:
            # Before the socket goes: its descriptor's number may be in use again at once.
            asyncio.get_running_loop().remove_reader(self._client.fd)
            self._client.close()
            self._client = None

    def inject(self, faults: FaultInjector | None) -> None:
        """Faults in what is sent from now on (a test hook)."""
        self.faults = faults
        if self._client is not None:
            self._client.faults = faults

    def send(self, message: AnyMessage) -> bool:
        sent = self._client is not None and self._client.send(message)
        # Sending may have taken note of the descriptor's edge: look for what came meanwhile.
        asyncio.get_running_loop().call_soon(self.drain)
        return sent

    def drain(self) -> None:
        """Acts on what has arrived, on the rest in its next turn."""
        client, until = self._client, time.monotonic() + DRAIN_SECONDS
        if client is None or self._given_up or self._pacer.busy:
            return
        for received in client.receive():
            self._pacer.push(received.message)
            if self._given_up or self._pacer.busy or time.monotonic() > until:
                break
        if client.state is LinkState.READY and client.waiting and not self._pacer.busy:
            asyncio.get_running_loop().call_soon(self.drain)

    def tick(self, now: float, listening_since: float) -> bool:
        """Keeps the link and the requests alive. True if its node has just answered first.

        `listening_since`: before it this process slept, so silence proves nothing.
        """
        self.requests.fade(now)
        if self._client is None:
            if now >= self._retry_at:
                self.open()
            return False
        self._client.tick(now)
        self.drain()
        if self._given_up:
            self._give_up(now)
        elif self._client.state is LinkState.DEAD:
            self._lost()
        elif self._client.state is LinkState.REFUSED:
            self._refused(now)
        elif self._client.state is LinkState.READY:
            self._watch(now, min(self._client.silence(now), now - listening_since))
            self._inquire(now)
            if self._client is not None and self.welcome is None:
                self.welcome, self.met = self._client.welcome, True
                self._resync_at = now + REPEAT_SECONDS
                return True
        return False

    def _refused(self, now: float) -> None:
        client = self._client
        assert client is not None
        if client.refusal is not None:
            self._log.error(
                "refused",
                self.address,
                "%s %s is not used: its %s is %r, the gateway's is %r",
                self.title,
                self.address,
                client.refusal.field,
                client.refusal.server_value,
                client.refusal.client_value,
            )
        self._retry_at, self.met = now + REFUSED_RETRY_SECONDS, True
        self._lost()

    def _lost(self, loss: Loss = Loss.DEAD) -> None:
        self._pacer.flush()
        self.close()
        self.usable = self.stalled = self._given_up = False
        self.welcome = self.status = None
        self._predicted = 0.0
        self.questions.abandon()
        for request in self.requests.clear():
            request.on_event(NodeLost(loss))

    # -- nonsense ----------------------------------------------------------------------------------

    def note_offence(self, what: str) -> None:
        """It said what no node says that works. Never closes the link: it may be being read."""
        now = time.monotonic()
        self.counters["offences"] += 1
        text = "%s %s makes no sense: %s"
        self._log.error("offence", self.address, text, self.title, self.address, what)
        self._offences.append(now)
        often = len(self._offences) == MAX_OFFENCES
        self._given_up |= often and self._offences[0] > now - OFFENCE_SECONDS

    def _give_up(self, now: float) -> None:
        text = "%s %s is not used for %g s: it goes on making no sense"
        self._log.error("given up", self.address, text, self.title, self.address, OFFENCE_SECONDS)
        self._lost(Loss.BROKEN)
        self._offences.clear()
        self._retry_at = now + OFFENCE_SECONDS

    # -- silence -----------------------------------------------------------------------------------

    def _watch(self, now: float, silence: float) -> None:
        """A node that computes announces how long; one that is silent for longer has stalled."""
        limit = max(STALL_SECONDS, STALL_FACTOR * self._predicted)
        if silence > limit + ABANDON_SECONDS:
            text = "%s %s does not come back: linking to it anew"
            self._log.error("gone", self.address, text, self.title, self.address)
            self._lost()
        elif silence > limit and not self.stalled:
            self.stalled = True
            self.counters["stalls"] += 1
            text = "%s %s is stalled: silent for %.1f s"
            self._log.error("stalled", self.address, text, self.title, self.address, silence)
        elif silence <= limit and self.stalled:
            self.stalled = False
            text = "%s %s answers again"
            self._log.info("answers", self.address, text, self.title, self.address)

    def evacuate(self) -> None:
        """Takes all requests from a stalled node: they go on elsewhere."""
        for number, request in list(self.requests.open.items()):
            self.abort(number)
            request.on_event(NodeLost(Loss.STALLED))

    def _inquire(self, now: float) -> None:
        announces = self.role != "store"  # it has too many keys to say them all
        if announces and self.welcome and not self.keys.synced and now >= self._resync_at:
            self._resync(now)
        for number in self.requests.due(now):
            self.counters["inquiries"] += 1
            self.send(Inquire(number))

    def _resync(self, now: float) -> None:
        self._resync_at = now + REPEAT_SECONDS
        self.send(Resync())

    # -- requests ----------------------------------------------------------------------------------

    def submit(self, message: Generate, request: OpenRequest) -> bool:
        """Sends a request; its events follow. False: the link is gone."""
        request.allowance = 2 * message.choices * message.max_tokens + SPARE_TOKENS
        self.requests.add(message.request, request)
        if self.send(message):
            return True
        self.requests.remove(message.request, time.monotonic())
        return False

    def stop(self, number: int, choice: int, kept: int) -> None:
        """Ends one choice: the first `kept` tokens count."""
        request = self.requests.open.get(number)
        if request is not None:
            request.stops[choice] = (kept, time.monotonic())
            self.send(Stop(number, choice, kept))

    def abort(self, number: int) -> None:
        """Frees everything of a request, unless it has ended."""
        now = time.monotonic()
        if self.requests.remove(number, now) is not None:
            self.requests.stray(number, now)
            self.send(Abort(number))

    # -- what it says ------------------------------------------------------------------------------

    def _take(self, message: AnyMessage) -> None:
        """Acts on a message. What makes no sense is noted."""
        if self._given_up:
            return
        if not isinstance(message, StepNotice | Answer | Running):
            self._predicted = 0.0  # it says these between steps only
        try:
            if isinstance(message, StepOutput):
                self._tokens(message)
            elif isinstance(message, Started | Running | Done | Rejected):
                request = self.requests.take(message, time.monotonic())
                if request is not None:
                    request.on_event(message)
            elif isinstance(message, Status):
                self.status = message
            elif isinstance(message, StepNotice):
                self._predicted = message.predicted_s
            elif isinstance(message, KeyBatch):
                self._keys_changed(message)
            elif isinstance(message, Answer):
                self.questions.answered(message)
        except ProtocolBroken as error:
            self.note_offence(str(error))

    def _keys_changed(self, batch: KeyBatch) -> None:
        synced = self.keys.synced
        client = self._client
        assert client is not None and client.welcome is not None, "a batch from nobody"
        self.keys.apply(batch, min(client.welcome.num_blocks, MAX_KEYS))
        if synced and not self.keys.synced:
            self.counters["key_gaps"] += 1
            text = "%s %s: a batch of keys was lost"
            self._log.warning("keys", self.address, text, self.title, self.address)
            self._resync(time.monotonic())

    def _tokens(self, output: StepOutput) -> None:
        now = time.monotonic()
        for token in output.tokens:
            request = self.requests.open.get(token.request)
            if request is None:
                self._stray(token.request, now)
                continue
            request.allowance -= 1
            if request.allowance < 0:
                self.abort(token.request)
                request.on_event(NodeLost(Loss.BROKEN))
                self.note_offence("it sends more tokens than were asked for")
                continue
            kept = self.requests.heard(request, token.choice, now)
            if kept is not None:  # the first word of it must have been lost
                self.send(Stop(token.request, token.choice, kept))
            request.on_event(token)

    def _stray(self, number: int, now: float) -> None:
        """A token that nobody waits for: what ended its request must have been lost."""
        if not self.requests.given(number):
            raise ProtocolBroken(f"a token for request {number}, which it was never given")
        if self.requests.stray(number, now):
            self.counters["strays"] += 1
            self.send(Abort(number))

    def check(self) -> None:
        """Proves the invariants of its link and its requests."""
        self.requests.check()
        assert self._client is not None or not self.requests.open, "requests without a link"
