"""All nodes and stores, judged and compared, and the way of a request to a decode node.

Owns who may be used (nodes that differ in what they compute are not), the numbers of requests, and
the clock that drives the links. A request is sent where the router says; who waits because no
decode node is there is told when one is. It knows nothing of HTTP, text or choices.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import zmq

from kvferry.gateway.prompt.prompts import Prompt, Shape
from kvferry.gateway.router.link import NodeLink
from kvferry.gateway.router.policy import (
    DecodeView,
    PrefillView,
    affinity,
    best_decode,
    order_prefill,
)
from kvferry.gateway.router.requests import INQUIRE_SECONDS, OnEvent, OpenRequest
from kvferry.kvstore.errors import KvferryError
from kvferry.kvstore.keys import KEY_BYTES
from kvferry.kvstore.process.logs import SparseLog
from kvferry.kvstore.wire.client import Client
from kvferry.kvstore.wire.curve import CurveKeys
from kvferry.kvstore.wire.faults import FaultInjector
from kvferry.kvstore.wire.generation import Generate
from kvferry.kvstore.wire.hello import Hello, Welcome
from kvferry.kvstore.wire.sockets import first_difference

log = logging.getLogger(__name__)

TICK_SECONDS = 0.05
ASLEEP_SECONDS = 0.5
"""A tick that comes so much late: this process slept, and others' silence proves nothing."""
OTHERS_GRACE_SECONDS = 10.0
"""How long the first announcement waits for the other nodes once a decode node is there."""


class NoNode(KvferryError):
    """No decode node can take a request now.

    `reason`: `loading`, `draining`, `lost`, or `died`: it was found dead by this very request.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"no decode node: {reason}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request is: at which decode node, and under which number."""

    node: NodeLink
    request: int
    known: int
    """The most tokens of its prompt that any node it may use had, as far as was known."""


class Nodes:
    """All nodes. `start` and everything after it run on one event loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        decode: Sequence[str],
        prefill: Sequence[str],
        stores: Sequence[str],
        hello: Hello,
        incarnation: int,
        on_ready: Callable[[], None],
        curve: CurveKeys | None = None,
    ) -> None:
        def new_client(address: str) -> Client:
            return Client(context, address, hello, incarnation, curve, sparse_log)

        self._log = sparse_log = SparseLog(log)
        self.decode = [NodeLink("decode", address, new_client, sparse_log) for address in decode]
        self.prefill = [NodeLink("prefill", address, new_client, sparse_log) for address in prefill]
        self.stores = [NodeLink("store", address, new_client, sparse_log) for address in stores]
        """No request goes there: they are asked for what they keep. A store that is gone only
        makes prompts cost more."""
        self.shape: Shape | None = None
        """What all usable nodes have in common; known once a decode node has answered."""
        self.lag = 0.0
        """By how much the last ticks came late, the most of them: how long the loop was busy."""
        self.on_lag: Callable[[float], None] = lambda seconds: None
        """Told at every tick by how much it came late."""
        self._on_ready: Callable[[], None] | None = on_ready
        self._ready_since: float | None = None
        self._next_request = 1
        self._choices = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ticked = self._listening_since = 0.0
        self._parked: list[Callable[[], None]] = []

    def __iter__(self) -> Iterator[NodeLink]:
        yield from self.decode
        yield from self.prefill
        yield from self.stores

    def named(self) -> list[tuple[NodeLink, str]]:
        """`decode-0`, `decode-1`, … in the order in which the gateway was told of them."""
        return [
            (node, f"{node.role}-{number}")
            for group in (self.decode, self.prefill, self.stores)
            for number, node in enumerate(group)
        ]

    def start(self) -> None:
        self._ticked = self._listening_since = time.monotonic()
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
        return any(node.able for node in self.decode)

    @property
    def slots(self) -> int:
        """Requests that all decode nodes in use run at once; 0: none takes any."""
        welcomes = (node.welcome for node in self.decode if node.able)
        return sum(welcome.max_num_seqs for welcome in welcomes if welcome is not None)

    @property
    def parked(self) -> int:
        """How many wait for a decode node to be there."""
        return len(self._parked)

    def check(self) -> None:
        """Proves the invariants of all nodes."""
        for node in self:
            node.check()

    def inject(self, faults: FaultInjector | None) -> None:
        """Faults in everything sent to any node from now on (a test hook)."""
        for node in self:
            node.inject(faults.sibling() if faults is not None else None)

    # -- the clock ---------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        late = max(0.0, now - self._ticked - TICK_SECONDS)
        self.lag = max(late, 0.98 * self.lag)
        self.on_lag(late)
        if late > ASLEEP_SECONDS:
            self._listening_since = now
        self._ticked = now
        self._log.tick()
        for node in self:
            if node.tick(now, self._listening_since):
                self._judge()
        if self.ready:
            self._save_requests()
            if self._on_ready is not None:
                self._announce(now, self._on_ready)
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _save_requests(self) -> None:
        """Those at stalled nodes go on elsewhere, and those that waited go on."""
        for node in self.decode:
            if node.stalled and node.requests.open:
                node.evacuate()
        parked, self._parked = self._parked, []
        for wake in parked:
            wake()

    def park(self, wake: Callable[[], None]) -> None:
        """Calls `wake` once, soon after some decode node can be given work."""
        self._parked.append(wake)

    def _announce(self, now: float, on_ready: Callable[[], None]) -> None:
        """Calls `on_ready` once, when everybody is there or the missing have been waited for."""
        if self._ready_since is None:
            self._ready_since = now
        complete = all(node.met for node in self)
        if complete or now >= self._ready_since + OTHERS_GRACE_SECONDS:
            on_ready()
            self._on_ready = None

    # -- who may be used ---------------------------------------------------------------------------

    def _judge(self) -> None:
        """Compares everybody's fingerprint with that of the first decode node in use."""
        for store in self.stores:
            if store.welcome is not None:
                reason = None if store.welcome.role == "store" else f"a {store.welcome.role} node"
                self._set_usable(store, reason)
        if not any(node.usable for node in self.decode):
            welcomes = (node.welcome for node in self.decode)
            found = next((it for it in welcomes if it is not None and it.role == "decode"), None)
            if found is None:
                return
            self.shape = Shape(found.fingerprint, found.block_size, found.max_model_len)
        for node in (*self.decode, *self.prefill):
            if node.welcome is not None:
                self._judge_one(node, node.welcome)

    def _judge_one(self, node: NodeLink, welcome: Welcome) -> None:
        assert self.shape is not None
        reason: object = None
        if welcome.role != node.role:
            reason = f"it is a {welcome.role} node"
        elif welcome.block_size != self.shape.block_size:
            reason = f"its blocks hold {welcome.block_size} tokens, not {self.shape.block_size}"
        else:
            ours, theirs = self.shape.fingerprint, welcome.fingerprint
            reason = first_difference(ours, theirs, partial=False)
        self._set_usable(node, reason)

    def _set_usable(self, node: NodeLink, reason: object) -> None:
        """Whether a node may be used; `reason` says why it may not."""
        if reason is not None:
            text = "%s %s is not used: %s"
            self._log.error("unused", node.address, text, node.title, node.address, reason)
        elif not node.usable:
            self._log.info("ready", node.address, "%s %s is ready", node.title, node.address)
        node.usable = reason is None

    # -- requests ----------------------------------------------------------------------------------

    def submit(
        self,
        on_event: OnEvent,
        prompt: Prompt,
        make: Callable[[int, tuple[str, ...]], Generate],
        avoid: frozenset[str] = frozenset(),
        doubted: frozenset[str] = frozenset(),
        session: bytes = b"",
    ) -> Placement:
        """Sends a request to the best decode node that is not to be avoided.

        One that is `doubted` gets it only if there is no other. `make` gets its number and the
        addresses of prefill nodes, the best one first. Between equals `session` decides, so that
        one conversation tends to stay where it was.

        Raises
        ------
        NoNode
            None can take it.
        """
        dead: frozenset[str] = frozenset()
        while True:
            node, prefix = self._choose_decode(prompt, avoid, doubted, dead, session)
            prefill, known = self._order_prefill(prompt, session)
            addresses = tuple(link.address for link in prefill)
            assert self.shape is not None, "who may be used has shown it"
            missing, block_size = prompt.size - prefix, self.shape.block_size
            remote = prefill[0] if prefill and missing > block_size else None
            number, self._next_request = self._next_request, self._next_request + 1
            new = prompt.keys[prefix // block_size * KEY_BYTES :]
            inquire_at = time.monotonic() + INQUIRE_SECONDS
            where = remote.address if remote is not None else ""
            request = OpenRequest(on_event, new, missing, where, inquire_at)
            if node.submit(make(number, addresses), request):
                break
            dead |= {node.address}
        self._choices += 1
        node.chosen = self._choices
        if remote is not None:
            remote.chosen = self._choices
        return Placement(node, number, min(max(prefix, known), prompt.size - 1))

    def _choose_decode(
        self,
        prompt: Prompt,
        avoid: frozenset[str],
        doubted: frozenset[str],
        dead: frozenset[str],
        session: bytes,
    ) -> tuple[NodeLink, int]:
        usable = [node for node in self.decode if node.usable]
        able = [node for node in usable if node.able and node.address not in avoid | dead]
        if not able and dead:
            raise NoNode("died")
        if not able:
            draining = any(node.draining for node in usable) and not avoid
            raise NoNode("draining" if draining else "loading" if self.shape is None else "lost")
        able = [node for node in able if node.address not in doubted] or able
        views = [
            DecodeView(
                self._prefix(node, prompt),
                node.requests.pending,
                max(len(node.requests.open), node.reported),
                node.welcome.max_num_seqs if node.welcome is not None else 1,
                node.chosen,
                affinity(session, node.address),
            )
            for node in able
        ]
        at = best_decode(views, prompt.size)
        return able[at], views[at].prefix

    def _order_prefill(self, prompt: Prompt, session: bytes) -> tuple[list[NodeLink], int]:
        """Prefill nodes, the best one first, and the longest prefix that one of them has."""
        able = [node for node in self.prefill if node.able]
        ours = Counter(item.prefill for node in self.decode for item in node.requests.open.values())
        views = [
            PrefillView(
                self._prefix(node, prompt),
                max(ours[node.address], node.reported),
                node.chosen,
                affinity(session, node.address),
            )
            for node in able
        ]
        known = max((view.prefix for view in views), default=0)
        return [able[at] for at in order_prefill(views)], known

    def _prefix(self, node: NodeLink, prompt: Prompt) -> int:
        """Tokens of a prompt that a node has; at least its last one is always computed."""
        assert self.shape is not None, "who may be used has shown it"
        return min(node.keys.prefix(prompt.keys) * self.shape.block_size, prompt.size - 1)
