"""A node's pool and the store of its host: loads what a prompt needs, offers what is finished.

Owns which of the node's sequences or jobs waits for which load, and the copy between pool and
store. A load fills the blocks that its owner has reserved, in order, each verified in the pool
before anybody may find it; it ends with whatever came in time, and the owner computes the rest.
Without a store everything here does nothing. It knows no request and decides nothing about blocks.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import zmq

from kvferry.kvstore.client.client import LAST_BLOCKS_MS, Asked, StoreClient
from kvferry.kvstore.client.fetches import Loading
from kvferry.kvstore.tiers.device import BlockPool
from kvferry.kvstore.wire.client import Client

log = logging.getLogger(__name__)

Owner = TypeVar("Owner")

LEAST_PATIENCE_S = 0.25
"""What a load gets even if computing would take no time."""
UNMEASURED_S = 0.002
"""What computing a token is taken to cost before any was computed."""
MAX_OFFERED = 4096
"""Finished blocks that may wait for the store to have room; what comes then is dropped."""
PATIENCE = 0.25
"""What a load gets of the time that computing its blocks would take."""


class BlockBytes(Protocol):
    """The part of an engine that holds bytes."""

    def read(self, block: int) -> bytes | memoryview: ...
    def write(self, block: int, payload: bytes | memoryview) -> None: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load came to: blocks `[first, reached)`, by the tier they lay in."""

    first: int
    reached: int
    host: int
    disk: int
    seconds: float


@dataclass(slots=True)
class _Offer:
    """Finished blocks that the store has not taken yet."""

    tenant: bytes
    parent: bytes
    depth: int
    keys: Sequence[bytes]
    blocks: Sequence[int]


@dataclass(slots=True)
class _Wait:
    load: Loading
    blocks: Sequence[int]
    began: float


class Loader(Generic[Owner]):
    """`landed` is told of every verified block by its index, `ended` once a load is over."""

    def __init__(
        self,
        store: StoreClient | None,
        bytes_of: BlockBytes,
        pool: BlockPool,
        *,
        landed: Callable[[Owner, int], None],
        ended: Callable[[Owner, Loaded], None],
        clock: Callable[[], float] = time.monotonic,
        least_patience_s: float = LEAST_PATIENCE_S,
    ) -> None:
        self.store = store
        self.num_landed = 0
        """Blocks loaded since the start."""
        self._bytes_of = bytes_of
        self._pool = pool
        self._landed = landed
        self._ended = ended
        self._clock = clock
        self._least_patience_s = least_patience_s
        self._offers: deque[_Offer] = deque()
        self.num_offered = 0
        """Finished blocks that wait for the store to take them."""
        self._num_dropped = 0
        self._close_by: float | None = None
        """Until when `close` may leave its last words under way; None: as long as they may be."""
        self._waits: dict[int, tuple[Owner, _Wait]] = {}

    # -- loading ----------------------------------------------------------------------------------

    def begin(
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
        if self.store is None or not self.store.available or first >= len(keys):
            return False
        patience = max(self._least_patience_s, PATIENCE * compute_s)
        load = self.store.fetch(keys, first, deadline_s=patience)
        if load.ended:
            return False
        self._waits[id(owner)] = (owner, _Wait(load, blocks, self._clock()))
        return True

    def turn(self, seconds: float) -> None:
        """Takes what has come, until nothing is left or that much time was spent on it."""
        if self.store is None:
            return
        self.store.turn()
        self._put_offers(self.store)
        until = self._clock() + seconds
        for owner, wait in list(self._waits.values()):
            while wait.load.ready and self._clock() <= until:
                index = wait.load.first + wait.load.taken
                block = wait.blocks[index]
                if wait.load.take(lambda view, block=block: self._write(block, view)):  # type: ignore[misc]
                    self.num_landed += 1
                    self._landed(owner, index)
            if wait.load.ended:
                self._waits.pop(id(owner), None)
                self._ended(owner, self._outcome(wait))

    def _write(self, block: int, view: memoryview) -> bytes | memoryview:
        self._bytes_of.write(block, view)
        return self._bytes_of.read(block)

    def _outcome(self, wait: _Wait) -> Loaded:
        load = wait.load
        return Loaded(
            load.first,
            load.first + load.taken,
            load.from_host,
            load.from_disk,
            self._clock() - wait.began,
        )

    def is_loading(self, owner: Owner) -> bool:
        return id(owner) in self._waits

    @property
    def num_loading(self) -> int:
        return len(self._waits)

    def cancel(self, owner: Owner) -> Loaded | None:
        """The owner wants nothing more; its blocks may be reused at once. What it got of a load."""
        found = self._waits.pop(id(owner), None)
        if found is None:
            return None
        outcome = self._outcome(found[1])
        found[1].load.cancel()
        return outcome

    # -- offering ---------------------------------------------------------------------------------

    def offer(
        self, tenant: bytes, parent: bytes, depth: int, keys: Sequence[bytes], blocks: Sequence[int]
    ) -> None:
        """Gives finished blocks of a chain to the store: now, or while they are in the pool."""
        if self.store is None or not keys:
            return
        if not self.store.available or self.num_offered + len(keys) > MAX_OFFERED:
            self._num_dropped += len(keys)
            return
        self._offers.append(_Offer(tenant, parent, depth, keys, blocks))
        self.num_offered += len(keys)
        self._put_offers(self.store)

    def _put_offers(self, store: StoreClient) -> None:
        while self._offers and (store.room or not store.available):
            offer = self._offers.popleft()
            self.num_offered -= len(offer.keys)
            left = self._put(store, offer)
            if left is not None:
                self._offers.appendleft(left)
                self.num_offered += len(left.keys)

    def _put(self, store: StoreClient, offer: _Offer) -> _Offer | None:
        """What of it the store had no room for."""
        blocks = offer.blocks
        there = 0
        while there < len(blocks) and self._pool.holds(blocks[there], offer.keys[there]):
            there += 1
        keys = offer.keys[: min(there, store.room)]
        done = 0
        if keys:
            done = store.put(
                offer.tenant,
                offer.parent,
                offer.depth,
                keys,
                lambda index: self._bytes_of.read(blocks[index]),
            )
        if not done or done == len(offer.keys) or there < len(blocks):
            self._num_dropped += len(offer.keys) - done
            return None
        parent, depth = offer.keys[done - 1], offer.depth + done
        return _Offer(offer.tenant, parent, depth, offer.keys[done:], blocks[done:])

    @property
    def offers_to(self) -> int:
        """Incarnation of the store that gets what is offered now; 0: none does."""
        return 0 if self.store is None else self.store.attached_to

    def deliver(self) -> None:
        """Waits until the store has all that was offered, for `LAST_BLOCKS_MS` at most.

        For a node that ends, as its last act before `close`: nothing is loaded meanwhile.
        """
        store = self.store
        if store is None:
            return
        self._close_by = self._clock() + LAST_BLOCKS_MS / 1e3
        read: Asked | None = None
        while store.available and self._clock() < self._close_by:
            self._put_offers(store)
            if read is None and not self._offers:
                read = store.locate(())  # it is answered behind everything that was put before
            if read is not None and (read.answer is not None or read.lost):
                return
            self._await(store, self._close_by)
            store.turn()
        if self._offers:
            log.warning("%d finished blocks are lost: the store took too long", self.num_offered)

    def _await(self, store: StoreClient, until: float) -> None:
        poller = zmq.Poller()
        for one in store.sockets:
            poller.register(one, zmq.POLLIN)
        poller.poll(max(1, int(1e3 * (until - self._clock()))))

    # -- the loop ---------------------------------------------------------------------------------

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What a poller has to watch."""
        return [] if self.store is None else self.store.sockets

    @property
    def links(self) -> list[Client]:
        return [] if self.store is None else self.store.links

    @property
    def counters(self) -> dict[str, float]:
        """By metric stem."""
        if self.store is None:
            return {}
        counts = {f"store_{name}": float(count) for name, count in self.store.counters.items()}
        return {**counts, "store_offers_dropped": float(self._num_dropped)}

    def close(self) -> None:
        """Lets go of the store. What was not offered by then is dropped: see `deliver`."""
        if self.store is None:
            return
        linger_ms = LAST_BLOCKS_MS
        if self._close_by is not None:
            linger_ms = max(0, int(1e3 * (self._close_by - self._clock())))
        self.store.close(linger_ms)
