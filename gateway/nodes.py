"""The gateway's links to all decode and prefill nodes, and which requests are where.

Owns one link per configured address: it is made again when its node dies, judged by its
fingerprint when it answers, and told apart as loading, usable, refused and lost. Events of a
request go to the callback that came with it, ending with `Done`, `Rejected` or `EngineLost`. It
knows nothing of HTTP, text or choices.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import zmq

from kvferry.gateway.prompts import Shape
from kvferry.kvstore.errors import KvferryError
from kvferry.kvstore.link import Client, LinkState
from kvferry.kvstore.sockets import first_difference
from kvferry.kvstore.wire import (
    Abort,
    AnyMessage,
    Done,
    Generate,
    Hello,
    KeyBatch,
    Load,
    Rejected,
    StepNotice,
    StepOutput,
    Stop,
    Token,
    Welcome,
)

log = logging.getLogger(__name__)

TICK_SECONDS = 0.05
PREFILL_GRACE_SECONDS = 10.0
"""How long the first announcement waits for prefill nodes once a decode node is there."""
REFUSED_RETRY_SECONDS = 5.0

Role = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The node died, or its link did, while it had the request."""

    address: str


Event = Token | Done | Rejected | EngineLost
Sink = Callable[[Event], None]
NewClient = Callable[[str], Client]


class NoNode(KvferryError):
    """No decode node can take a request now. `reason`: `loading`, `lost` or `draining`."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"no decode node: {reason}")
        self.reason = reason


@dataclass(slots=True)
class _Open:
    """A request that has not ended, and where its prompt is being prefilled, until it is."""

    sink: Sink
    prefill: str


class Node:
    """One configured address and whoever answers there."""

    def __init__(self, role: Role, address: str, new_client: NewClient) -> None:
        self.role = role
        self.address = address
        self.load: Load | None = None
        self.requests: dict[int, _Open] = {}
        self.usable = False
        """It answers, and computes as the others do."""
        self.key_batches = 0
        self.key_gaps = 0
        self.busy_until = 0.0
        """When the step that it announced should be over, on the monotonic clock."""
        self._new_client = new_client
        self._client: Client | None = None
        self._welcomed = False
        self._next_batch: int | None = None
        self._retry_at = 0.0

    @property
    def welcome(self) -> Welcome | None:
        """What it said of itself, while it answers."""
        client = self._client
        return client.welcome if client is not None and client.state is LinkState.READY else None

    @property
    def draining(self) -> bool:
        return self.load is not None and self.load.draining

    def open(self) -> None:
        self._client = self._new_client(self.address)
        asyncio.get_running_loop().add_reader(self._client.fd, self.drain)

    def close(self) -> None:
        if self._client is not None:
            # Before the socket goes: its descriptor's number may be in use again at once.
            asyncio.get_running_loop().remove_reader(self._client.fd)
            self._client.close()
            self._client = None

    def send(self, message: AnyMessage) -> bool:
        sent = self._client is not None and self._client.send(message)
        # Sending may have taken note of the descriptor's edge: look for what came meanwhile.
        asyncio.get_running_loop().call_soon(self.drain)
        return sent

    def drain(self) -> None:
        """Acts on everything that has arrived."""
        if self._client is not None:
            for received in self._client.receive():
                self._take(received.message)

    def tick(self, now: float) -> bool:
        """Keeps the link alive. True if its node has just answered for the first time."""
        if self._client is None:
            if now >= self._retry_at:
                self.open()
            return False
        self._client.tick(now)
        self.drain()
        if self._client.state is LinkState.DEAD:
            self._lost()
        elif self._client.state is LinkState.REFUSED:
            self._refused(now)
        elif self._client.state is LinkState.READY and not self._welcomed:
            self._welcomed = True
            return True
        return False

    def _refused(self, now: float) -> None:
        client = self._client
        assert client is not None
        if client.refusal is not None:
            log.error(
                "%s node %s is not used: its %s is %r, the gateway's is %r",
                self.role,
                self.address,
                client.refusal.field,
                client.refusal.server_value,
                client.refusal.client_value,
            )
        self._retry_at = now + REFUSED_RETRY_SECONDS
        self._lost()

    def _lost(self) -> None:
        self.close()
        self.usable = self._welcomed = False
        self.load = None
        self._next_batch = None
        requests, self.requests = self.requests, {}
        for request in requests.values():
            request.sink(EngineLost(self.address))

    def _take(self, message: AnyMessage) -> None:
        if isinstance(message, StepOutput):
            for token in message.tokens:
                request = self.requests.get(token.request)
                if request is not None:
                    request.prefill = ""
                    request.sink(token)
        elif isinstance(message, Done | Rejected):
            ended = self.requests.pop(message.request, None)
            if ended is not None:
                ended.sink(message)
        elif isinstance(message, Load):
            self.load = message
        elif isinstance(message, StepNotice):
            self.busy_until = time.monotonic() + message.predicted_s
        elif isinstance(message, KeyBatch):
            self._count_batch(message)

    def _count_batch(self, batch: KeyBatch) -> None:
        self.key_batches += 1
        if not batch.full and batch.number != self._next_batch:
            self.key_gaps += 1
        self._next_batch = batch.number + 1


@dataclass(frozen=True, slots=True)
class Run:
    """A request on its way through a decode node."""

    node: Node
    request: int

    def stop(self, choice: int, kept: int) -> None:
        """Ends one choice: the first `kept` tokens count."""
        if self.request in self.node.requests:
            self.node.send(Stop(self.request, choice, kept))

    def abort(self) -> None:
        """Frees everything of the request, unless it has ended."""
        if self.node.requests.pop(self.request, None) is not None:
            self.node.send(Abort(self.request))


class Nodes:
    """All nodes. `start` and everything after it run on one event loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        decode: Sequence[str],
        prefill: Sequence[str],
        hello: Hello,
        incarnation: int,
        on_ready: Callable[[], None],
    ) -> None:
        def new_client(address: str) -> Client:
            return Client(context, address, hello, incarnation)

        self.decode = [Node("decode", address, new_client) for address in decode]
        self.prefill = [Node("prefill", address, new_client) for address in prefill]
        self.shape: Shape | None = None
        """What all usable nodes have in common; known once a decode node has answered."""
        self._on_ready: Callable[[], None] | None = on_ready
        self._ready_since: float | None = None
        self._next_request = 1
        self._timer: asyncio.TimerHandle | None = None

    def __iter__(self) -> Iterator[Node]:
        yield from self.decode
        yield from self.prefill

    def start(self) -> None:
        for node in self:
            node.open()
        self._tick()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for node in self:
            node.close()

    @property
    def ready(self) -> bool:
        """Some decode node takes requests."""
        return any(node.usable and not node.draining for node in self.decode)

    def _tick(self) -> None:
        now = time.monotonic()
        for node in self:
            if node.tick(now):
                self._judge()
        self._announce(now)
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _announce(self, now: float) -> None:
        """Calls `on_ready` once, when everybody is there or the missing have been waited for."""
        if self._on_ready is None or not self.ready:
            return
        if self._ready_since is None:
            self._ready_since = now
        complete = all(node.usable for node in self.prefill)
        if complete or now >= self._ready_since + PREFILL_GRACE_SECONDS:
            self._on_ready()
            self._on_ready = None

    # -- who may be used ---------------------------------------------------------------------------

    def _judge(self) -> None:
        """Compares everybody's fingerprint with that of the first decode node in use."""
        if not any(node.usable for node in self.decode):
            welcomes = (node.welcome for node in self.decode)
            found = next((it for it in welcomes if it is not None and it.role == "decode"), None)
            if found is None:
                return
            self.shape = Shape(found.fingerprint, found.block_size, found.max_model_len)
        for node in self:
            if node.welcome is not None:
                self._judge_one(node, node.welcome)

    def _judge_one(self, node: Node, welcome: Welcome) -> None:
        assert self.shape is not None
        reason: object = None
        if welcome.role != node.role:
            reason = f"it is a {welcome.role} node"
        elif welcome.block_size != self.shape.block_size:
            reason = f"its blocks hold {welcome.block_size} tokens, not {self.shape.block_size}"
        else:
            ours, theirs = self.shape.fingerprint, welcome.fingerprint
            reason = first_difference(ours, theirs, partial=False)
        if reason is not None:
            log.error("%s node %s is not used: %s", node.role, node.address, reason)
        elif not node.usable:
            log.info("%s node %s is ready", node.role, node.address)
        node.usable = reason is None

    # -- requests ----------------------------------------------------------------------------------

    def submit(self, sink: Sink, make: Callable[[int, str], Generate]) -> Run:
        """Sends a request to the best decode node; `make` gets its id and a prefill address.

        Raises
        ------
        NoNode
            None can take it.
        """
        node, prefill = self._least_busy(), self._prefill_address()
        request, self._next_request = self._next_request, self._next_request + 1
        node.requests[request] = _Open(sink, prefill)
        if not node.send(make(request, prefill)):
            del node.requests[request]
            raise NoNode("lost")
        return Run(node, request)

    def _least_busy(self) -> Node:
        usable = [node for node in self.decode if node.usable]
        able = [node for node in usable if not node.draining]
        if able:
            return min(able, key=_burden)
        raise NoNode("draining" if usable else "loading" if self.shape is None else "lost")

    def _prefill_address(self) -> str:
        able = [node for node in self.prefill if node.usable and not node.draining]
        if not able:
            return ""
        busy = Counter(item.prefill for node in self.decode for item in node.requests.values())
        return min(able, key=lambda node: busy[node.address]).address


def _burden(node: Node) -> int:
    """Requests on a decode node: ours as of now, others' as of its last report."""
    reported = node.load.running + node.load.waiting if node.load is not None else 0
    return max(len(node.requests), reported)
