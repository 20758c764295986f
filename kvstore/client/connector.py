"""A node's pool and the store of its host: fetches what a prompt needs, puts what is finished.

Owns which of the node's sequences or jobs waits for which fetch, and the copy between pool and
store. A fetch fills the blocks that its owner has reserved, in order, each verified in the pool
before anybody may find it; it ends with whatever came in time, and the owner computes the rest.
Without a store everything here does nothing. It knows no request and decides nothing about blocks.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import zmq

from kvferry.kvstore.client.client import LAST_BLOCKS_MS, Question, StoreClient
from kvferry.kvstore.client.fetches import Fetch
from kvferry.kvstore.tiers.device import BlockPool
from kvferry.kvstore.wire.client import Client

log = logging.getLogger(__name__)

Owner = TypeVar("Owner")

LEAST_PATIENCE_S = 0.25
"""What a fetch gets even if computing would take no time."""
UNMEASURED_S = 0.002
"""What computing a token is taken to cost before any was computed."""
MAX_PUTS_WAITING = 4096
"""Finished blocks that may wait for the store to have room; what comes then is dropped."""
PATIENCE = 0.25
"""What a fetch gets of the time that computing its blocks would take."""


class BlockBytes(Protocol):
    """The part of an engine that holds bytes."""

    def read(self, block: int) -> bytes | memoryview: ...
    def write(self, block: int, payload: bytes | memoryview) -> None: ...


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a fetch came to: blocks `[first, reached)`, by the tier they lay in."""

    first: int
    reached: int
    host: int
    disk: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Finished:
    """Finished blocks that the store has not taken yet."""

    tenant: bytes
    parent: bytes
    depth: int
    keys: Sequence[bytes]
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[Owner]):
    """Who waits for a fetch, and where its blocks go."""

    owner: Owner
    fetch: Fetch
    blocks: Sequence[int]
    began: float


class Connector(Generic[Owner]):
    """`landed` is told of every verified block by its index, `ended` once a fetch is over."""

    def __init__(
        self,
        store: StoreClient | None,
        bytes_of: BlockBytes,
        pool: BlockPool,
        *,
        landed: Callable[[Owner, int], None],
        ended: Callable[[Owner, Fetched], None],
        clock: Callable[[], float] = time.monotonic,
        least_patience_s: float = LEAST_PATIENCE_S,
    ) -> None:
        self.store = store
        self.num_landed = 0
        """Blocks fetched since the start."""
        self._bytes_of = bytes_of
        self._pool = pool
        self._landed = landed
        self._ended = ended
        self._clock = clock
        self._least_patience_s = least_patience_s
        self._finished: deque[_Finished] = deque()
        self.num_puts_waiting = 0
        """Finished blocks that wait for the store to take them."""
        self._num_lost = 0
        self._close_by: float | None = None
        """Until when `close` may leave its last words under way; None: as long as they may be."""
        self._waiting: dict[int, _Waiting[Owner]] = {}

    # -- fetching ---------------------------------------------------------------------------------

    def fetch(
        self,
        owner: Owner,
        keys: Sequence[bytes],
        first: int,
        blocks: Sequence[int],
        compute_s: float,
    ) -> bool:
        """Asks for blocks `[first, len(keys))` of a chain; False when nobody can be asked.

        Parameters
        ----------
        blocks
            Block numbers of the owner, from index 0 on.
        compute_s
            How long it would take to compute them.
        """
        store = self.store
        if store is None or store.link.attached is None or first >= len(keys):
            return False
        patience = max(self._least_patience_s, PATIENCE * compute_s)
        fetch = store.fetches.fetch(keys, first, deadline_s=patience)
        if fetch.ended:
            return False
        self._waiting[id(owner)] = _Waiting(owner, fetch, blocks, self._clock())
        return True

    def turn(self, seconds: float) -> None:
        """Takes what has come, until nothing is left or that much time was spent on it."""
        store = self.store
        if store is None:
            return
        store.turn()
        self._put_finished(store)
        until = self._clock() + seconds
        for waiting in list(self._waiting.values()):
            fetch = waiting.fetch
            while fetch.ready and self._clock() <= until:
                index = fetch.first + fetch.taken
                if store.fetches.take(fetch, partial(self._write, waiting.blocks[index])):
                    self.num_landed += 1
                    self._landed(waiting.owner, index)
            if fetch.ended:
                self._waiting.pop(id(waiting.owner), None)
                self._ended(waiting.owner, self._outcome(waiting))

    def _write(self, block: int, view: memoryview) -> bytes | memoryview:
        self._bytes_of.write(block, view)
        return self._bytes_of.read(block)

    def _outcome(self, waiting: _Waiting[Owner]) -> Fetched:
        fetch, seconds = waiting.fetch, self._clock() - waiting.began
        reached = fetch.first + fetch.taken
        return Fetched(fetch.first, reached, fetch.from_host, fetch.from_disk, seconds)

    @property
    def num_fetches(self) -> int:
        return len(self._waiting)

    def cancel(self, owner: Owner) -> Fetched | None:
        """The owner wants nothing more; its blocks may be reused at once. What it got by then."""
        waiting = self._waiting.pop(id(owner), None)
        if waiting is None or self.store is None:
            return None
        outcome = self._outcome(waiting)
        self.store.fetches.cancel(waiting.fetch)
        return outcome

    # -- putting ----------------------------------------------------------------------------------

    def put(
        self, tenant: bytes, parent: bytes, depth: int, keys: Sequence[bytes], blocks: Sequence[int]
    ) -> None:
        """Puts finished blocks of a chain into the store: now, or while they are in the pool."""
        store = self.store
        if store is None or not keys:
            return
        if store.link.attached is None or self.num_puts_waiting + len(keys) > MAX_PUTS_WAITING:
            self._num_lost += len(keys)
            return
        self._finished.append(_Finished(tenant, parent, depth, keys, blocks))
        self.num_puts_waiting += len(keys)
        self._put_finished(store)

    def _put_finished(self, store: StoreClient) -> None:
        """Puts what waits, as far as the store has room. Without a store it is dropped."""
        while self._finished and (store.puts.stock or store.link.attached is None):
            one = self._finished.popleft()
            self.num_puts_waiting -= len(one.keys)
            held = 0
            while held < len(one.blocks) and self._pool.holds(one.blocks[held], one.keys[held]):
                held += 1
            keys = one.keys[: min(held, len(store.puts.stock))]
            read = partial(self._read, one.blocks)
            done = store.puts.put(one.tenant, one.parent, one.depth, keys, read) if keys else 0
            left = len(one.keys) - done
            if not done or not left or held < len(one.blocks):
                self._num_lost += left
                continue
            rest = one.keys[done:], one.blocks[done:]
            self._finished.appendleft(
                _Finished(one.tenant, one.keys[done - 1], one.depth + done, *rest)
            )
            self.num_puts_waiting += left

    def _read(self, blocks: Sequence[int], index: int) -> bytes | memoryview:
        return self._bytes_of.read(blocks[index])

    @property
    def puts_to(self) -> int:
        """Incarnation of the store that gets what is put now; 0: none does."""
        return 0 if self.store is None else self.store.link.incarnation

    def deliver(self) -> None:
        """Waits until the store has all that was finished, for `LAST_BLOCKS_MS` at most.

        For a node that ends, as its last act before `close`: nothing is fetched meanwhile.
        """
        store = self.store
        if store is None:
            return
        self._close_by = self._clock() + LAST_BLOCKS_MS / 1e3
        read: Question | None = None
        while store.link.attached is not None and self._clock() < self._close_by:
            self._put_finished(store)
            if read is None and not self._finished:
                read = store.locate(())  # it is answered behind everything that was put before
            if read is not None and (read.answer is not None or read.lost):
                return
            poller = zmq.Poller()
            for one in store.link.sockets:
                poller.register(one, zmq.POLLIN)
            poller.poll(max(1, int(1e3 * (self._close_by - self._clock()))))
            store.turn()
        if self._finished:
            log.warning(
                "%d finished blocks are lost: the store took too long", self.num_puts_waiting
            )

    # -- the loop ---------------------------------------------------------------------------------

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What a poller has to watch."""
        return [] if self.store is None else self.store.link.sockets

    @property
    def clients(self) -> list[Client]:
        """For the ledger and for faults."""
        client = None if self.store is None else self.store.link.client
        return [] if client is None else [client]

    @property
    def counters(self) -> dict[str, float]:
        """By metric stem."""
        if self.store is None:
            return {}
        counts = {f"store_{name}": float(count) for name, count in self.store.counters.items()}
        return {**counts, "store_puts_lost": float(self._num_lost)}

    def close(self) -> None:
        """Lets go of the store. What was not put by then is dropped: see `deliver`."""
        if self.store is None:
            return
        linger_ms = LAST_BLOCKS_MS
        if self._close_by is not None:
            linger_ms = max(0, int(1e3 * (self._close_by - self._clock())))
        self.store.close(linger_ms)
