"""A node's side of the store: offer finished blocks, load a prefix, ship through the arena.

Owns the order of a round and the questions to the store; `store_link` has the link and the
mapping, `store_puts` what is written, `store_fetches` what is read. Nothing here waits: the node's
loop calls `turn` every round and polls `sockets` beside its own. It knows no pool and no request:
bytes come from and go to callables of the node.

Without a store every call is harmless: nothing is accepted, a fetch ends at once, and the node
computes. How a node uses it:

    store = StoreClient(lambda: connect(address), block_bytes)
    each round      store.turn()
    a block is done store.put(tenant, parent, depth, keys, read)
    a prompt comes  fetch = store.fetch(keys, first, deadline_s=…)
    each round      while fetch.ready and there is time: fetch.take(write)
    fetch.ended     blocks [first, first + fetch.taken) are in the pool, verified; compute the rest
    no longer       fetch.cancel()
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import zmq

from kvferry.kvstore.client.fetches import Fetches, Loading
from kvferry.kvstore.client.link import StoreLink, Write
from kvferry.kvstore.client.puts import Known, Puts, Read, SlotRef
from kvferry.kvstore.wire.client import Client
from kvferry.kvstore.wire.codec import AnyMessage
from kvferry.kvstore.wire.store import (
    Attached,
    CacheReply,
    CacheRequest,
    Delivered,
    FetchEnded,
    Granted,
    Leased,
    Locate,
    Located,
)

log = logging.getLogger(__name__)

Transfer = Literal["auto", "arena", "inline"]

ATTACH_SECONDS = 10.0
"""What a starting node gives its store, which may be reading its disk."""
LAST_BLOCKS_MS = 1000
"""What a node that ends gives its last blocks to reach the store."""


class Asked:
    """A question to the store; `answer` is None until it has come. `lost`: none will."""

    def __init__(self) -> None:
        self.answer: Any = None
        self.lost = False


class StoreClient:
    """`connect` makes a link to the store; it is called again after each link's death."""

    def __init__(
        self,
        connect: Callable[[], Client],
        block_bytes: int,
        *,
        transfer: Transfer = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._clock = clock
        self._link = StoreLink(
            connect, block_bytes, may_map=transfer != "inline", must_map=transfer == "arena"
        )
        self._known = Known(clock)
        self._puts = Puts(self._link, self._known, self.counters, clock)
        self._fetches = Fetches(self._link, self._known, self.counters, clock)
        self._asks: dict[int, Asked] = {}
        self._next = 1

    # -- the loop -------------------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """Whether a store is there and knows how blocks travel."""
        return self._link.attached is not None

    @property
    def shared(self) -> bool:
        """Whether blocks go through the arena and not through messages."""
        return self._link.shared

    @property
    def incarnation(self) -> int:
        """Of the store whose arena is mapped; 0: none is."""
        return self._link.incarnation if self.shared else 0

    @property
    def attached_to(self) -> int:
        """Incarnation of the store that takes blocks, whichever way; 0: none does."""
        return self._link.incarnation if self.available else 0

    @property
    def room(self) -> int:
        """How many blocks `put` would take now."""
        return len(self._puts.stock)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to poll for reading; another list after each `turn`."""
        return self._link.sockets

    @property
    def links(self) -> list[Client]:
        """For the ledger and for faults."""
        return [] if self._link.client is None else [self._link.client]

    def turn(self) -> None:
        """Takes what has come, keeps the link, ends what is over. Call every round."""
        now = self._clock()
        for received in self._link.receive(now):
            self._take(received.message, received.payloads, now)
        if self._link.over:
            self._lose(now)
            return
        self._link.tick(now)
        self._puts.tick(now)
        self._fetches.tick(now)

    def close(self, linger_ms: int = LAST_BLOCKS_MS) -> None:
        """Lets go of the store; granted slots return to it with the link's end.

        `linger_ms`: how long what was sent may still be on its way.
        """
        if self._link.client is not None:
            self._puts.give_back()
            self._lose(self._clock(), linger_ms)
        self._link.close()

    def _lose(self, now: float, linger_ms: int = 0) -> None:
        if self.available:
            self.counters["stores_lost"] += 1
        self._puts.lost()
        self._known.clear()
        self._fetches.lost()
        for asked in self._asks.values():
            asked.lost = True
        self._asks.clear()
        self._link.drop(now, linger_ms)

    def _take(self, message: AnyMessage, payloads: tuple[memoryview, ...], now: float) -> None:
        match message:
            case Attached():
                self._link.map(message)
            case Granted(number, slots):
                self._puts.granted(number, slots)
            case Leased() | Delivered():
                self._fetches.handed_out(message, payloads, now)
            case FetchEnded():
                self._fetches.ended(message)
            case Located(number, tiers):
                self._answered(number, tiers.decode())
            case CacheReply(number, body):
                self._answered(number, msgspec.json.decode(body))
            case _:
                log.warning("ignored a %s from the store", type(message).__name__)

    def _answered(self, number: int, answer: Any) -> None:
        asked = self._asks.pop(number, None)
        if asked is not None:
            asked.answer = answer

    # -- putting --------------------------------------------------------------------------------

    def put(
        self, tenant: bytes, parent: bytes, depth: int, keys: Sequence[bytes], read: Read
    ) -> int:
        """Offers consecutive finished blocks of one chain; never waits.

        Parameters
        ----------
        tenant
            16 bytes that `clear` can name: `keys.tenant_key`.
        parent
            Key of the block before the first one, or the root.
        depth
            How many blocks come before the first one.
        read
            Called with 0 … n - 1 for the blocks that are accepted.

        Returns how many of them the store has now or had; the rest is dropped and counted.
        """
        return self._puts.put(tenant, parent, depth, keys, read)

    def ship(
        self, tenant: bytes, parent: bytes, depth: int, keys: Sequence[bytes], read: Read
    ) -> list[SlotRef]:
        """Puts blocks and keeps their slots for another node, until `let_go`.

        As `put`, but a block is written even if the store has it. Returns where the leading blocks
        are; fewer than were given, or none, when the rest must travel inline.
        """
        return self._puts.ship(tenant, parent, depth, keys, read)

    def let_go(self, refs: Sequence[SlotRef]) -> None:
        """The other node has copied these, or will not."""
        self._puts.let_go(refs)

    # -- loading --------------------------------------------------------------------------------

    def fetch(self, keys: Sequence[bytes], first: int = 0, *, deadline_s: float) -> Loading:
        """Asks for blocks `[first, len(keys))` of a chain; `keys` begins at its root.

        The load ends at the first block that the store has not, or at the deadline.
        """
        return self._fetches.fetch(keys, first, deadline_s=deadline_s)

    def copy(self, ref: SlotRef, write: Write) -> bool:
        """Copies a block that another node has shipped; False when it is not there any more."""
        return self._fetches.copy(ref, write)

    # -- asking ---------------------------------------------------------------------------------

    def locate(self, keys: Sequence[bytes]) -> Asked:
        """The answer is a text of one letter a block for the longest prefix: `h` or `d`."""
        return self._ask(lambda number: Locate(number, b"".join(keys)))

    def care(
        self, action: str, *, tenant: bytes = b"", keys: Sequence[bytes] = (), seconds: float = 0.0
    ) -> Asked:
        """`stats`, `inspect`, `clear`, `pin`, `unpin`, `prefetch`; the answer is a dict."""
        if action == "clear":
            self._known.clear()
        joined = b"".join(keys)
        return self._ask(lambda number: CacheRequest(number, action, tenant, joined, seconds))

    def _ask(self, message: Callable[[int], AnyMessage]) -> Asked:
        asked, number = Asked(), self._next
        self._next += 1
        if not self._link.send(message(number)):
            asked.lost = True
            return asked
        self._asks[number] = asked
        return asked


def store_client(
    address: str | None, connect: Callable[[str], Client], block_bytes: int, transfer: Transfer
) -> StoreClient | None:
    """A client of the store at `address`; None when there is none."""
    if address is None:
        return None
    return StoreClient(lambda: connect(address), block_bytes, transfer=transfer)


def await_store(store: StoreClient | None, address: str | None) -> None:
    """Gives the store time to answer: what it has is worth a moment at the start."""
    deadline = time.monotonic() + ATTACH_SECONDS
    while store is not None and not store.available:
        store.turn()
        if time.monotonic() > deadline:
            log.warning("the store at %s does not answer yet: going on without it", address)
            return
        poller = zmq.Poller()
        for one in store.sockets:
            poller.register(one, zmq.POLLIN)
        poller.poll(50)
