"""A node's side of the store: put finished blocks, fetch a prefix, ship through the arena.

Owns the order of a round and the questions to the store; `link` is the connection and the mapped
arena, `puts` what is written, `fetches` what is read. Nothing here waits: the node's loop calls
`turn` every round and polls `link.sockets` beside its own. It knows no pool and no request: bytes
come from and go to callables of the node.

Without a store every call is harmless: nothing is put, a fetch ends at once, and the node computes.
How a node uses it:

    store = StoreClient(lambda: connect(address), block_bytes)
    each round      store.turn()
    a block is done store.puts.put(tenant, parent, depth, keys, read)
    a prompt comes  fetch = store.fetches.fetch(keys, first, deadline_s=…)
    each round      while fetch.ready and there is time: store.fetches.take(fetch, write)
    fetch.ended     blocks [first, first + fetch.taken) are in the pool, verified; compute the rest
    no longer       store.fetches.cancel(fetch)
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import zmq

from kvferry.kvstore.client.fetches import Fetches
from kvferry.kvstore.client.link import StoreLink
from kvferry.kvstore.client.puts import Puts
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


@dataclass(slots=True)
class Question:
    """A question to the store; `answer` is None until it has come. `lost`: none will."""

    answer: Any = None
    lost: bool = False


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
        self.link = StoreLink(
            connect, block_bytes, may_map=transfer != "inline", must_map=transfer == "arena"
        )
        self.puts = Puts(self.link, self.counters, clock)
        self.fetches = Fetches(self.link, self.puts.known, self.counters, clock)
        self._clock = clock
        self._questions: dict[int, Question] = {}
        self._next = 1

    # -- the loop -------------------------------------------------------------------------------

    def turn(self) -> None:
        """Takes what has come, keeps the link, ends what is over. Call every round."""
        now = self._clock()
        for received in self.link.receive(now):
            self._handle(received.message, received.payloads, now)
        if self.link.over:
            self._lose(now)
        else:
            self.puts.tick(now)
            self.fetches.tick(now)

    def close(self, linger_ms: int = LAST_BLOCKS_MS) -> None:
        """Lets go of the store; granted slots return to it with the link's end.

        `linger_ms`: how long what was sent may still be on its way.
        """
        if self.link.client is not None:
            self.puts.give_back()
            self._lose(self._clock(), linger_ms)
        self.link.close()

    def _lose(self, now: float, linger_ms: int = 0) -> None:
        if self.link.attached is not None:
            self.counters["stores_lost"] += 1
        self.puts.lost()
        self.fetches.lost()
        for question in self._questions.values():
            question.lost = True
        self._questions.clear()
        self.link.drop(now, linger_ms)

    def _handle(self, message: AnyMessage, payloads: tuple[memoryview, ...], now: float) -> None:
        match message:
            case Attached():
                self.link.map(message)
            case Granted(number, slots):
                self.puts.granted(number, slots)
            case Leased() | Delivered():
                self.fetches.handed_out(message, payloads, now)
            case FetchEnded():
                self.fetches.ended(message)
            case Located(number, tiers):
                self._answered(number, tiers.decode())
            case CacheReply(number, body):
                self._answered(number, msgspec.json.decode(body))
            case _:
                log.warning("ignored a %s from the store", type(message).__name__)

    def _answered(self, number: int, answer: Any) -> None:
        question = self._questions.pop(number, None)
        if question is not None:
            question.answer = answer

    # -- asking ---------------------------------------------------------------------------------

    def locate(self, keys: Sequence[bytes]) -> Question:
        """The answer is a text of one letter a block for the longest prefix: `h` or `d`."""
        return self._ask(Locate(self._next, b"".join(keys)))

    def admin(
        self, action: str, *, tenant: bytes = b"", keys: Sequence[bytes] = (), seconds: float = 0.0
    ) -> Question:
        """`stats`, `inspect`, `clear`, `pin`, `unpin`, `prefetch`; the answer is a dict."""
        if action == "clear":
            self.puts.known.clear()
        return self._ask(CacheRequest(self._next, action, tenant, b"".join(keys), seconds))

    def _ask(self, message: Locate | CacheRequest) -> Question:
        question = Question()
        self._next += 1
        if self.link.send(message):
            self._questions[message.number] = question
        else:
            question.lost = True
        return question


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
    while store is not None and store.link.attached is None:
        store.turn()
        if time.monotonic() > deadline:
            log.warning("the store at %s does not answer yet: going on without it", address)
            return
        poller = zmq.Poller()
        for one in store.link.sockets:
            poller.register(one, zmq.POLLIN)
        poller.poll(50)
