"""Fetches under way: who waits for which blocks, what may be handed out next, and until when.

Owns the order of one fetch and its leases; pure: it starts a read from disk through a callable and
reads no clock. A fetch goes through a window, so that a prompt larger than the arena passes through
it: as the reader copies blocks and lets go of them, their slots take the next ones. Slots are
taken in the order of the chain, and a fetch that gets none holds nothing that waits for one.

A fetch ends at the first block that is in no tier, cannot be read, or is not there by the deadline.
A shorter answer is a normal one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.kvstore.tiers.host import HostTier, Lease, Owner

HOST, DISK = b"h", b"d"


@dataclass(frozen=True, slots=True)
class Ready:
    """A block that its reader may copy now."""

    index: int
    slot: int
    checksum: int
    tier: bytes
    """Where it came from: HOST or DISK."""


@dataclass(slots=True)
class Fetch:
    """One reader's wish for blocks `[first, len(keys))` of a chain."""

    owner: Owner
    number: int
    keys: Sequence[bytes]
    first: int
    deadline: float
    window: int
    """How many blocks may be handed out and not taken."""
    keep: bool = True
    """False: a prefetch, which wants the blocks in the arena and nothing handed out."""
    next: int = 0
    """The block to hand out next."""
    taken: int = 0
    ended: str = ""
    """Why it ended: `complete`, `short`, `deadline`, `cancelled`."""
    from_disk: set[int] = field(default_factory=set)
    ready: dict[int, Lease] = field(default_factory=dict)
    leased: deque[Lease] = field(default_factory=deque)
    """Handed out and not taken yet."""

    def __post_init__(self) -> None:
        self.next = self.first


class Fetches:
    """All fetches of one arena."""

    def __init__(
        self,
        host: HostTier,
        lease_s: float,
        on_disk: Callable[[bytes], bool],
        start_read: Callable[[bytes], bool],
        recovering: Callable[[], bool],
    ) -> None:
        self.active: dict[tuple[Owner, int], Fetch] = {}
        self._host = host
        self._lease_s = lease_s
        self._on_disk = on_disk
        self._start_read = start_read
        """Begins to bring a block into the arena; False when no slot can be had now."""
        self._recovering = recovering
        """Whether blocks may be on disk that nobody knows of yet: fetches wait for that."""
        self._reading: set[bytes] = set()

    def start(self, fetch: Fetch) -> bool:
        """False when the reader already has a fetch of this number."""
        name = (fetch.owner, fetch.number)
        if name in self.active:
            return False
        self.active[name] = fetch
        return True

    def advance(self, fetch: Fetch, now: float) -> list[Ready]:
        """Leases what is there, starts reads, and says what may be handed out, in order."""
        if fetch.ended:
            return []
        if now >= fetch.deadline:
            self.end(fetch, "deadline")
            return []
        end = self._reach(fetch, now)
        handed = self._hand_out(fetch, now)
        if fetch.next == end:
            self.end(fetch, "complete" if end == len(fetch.keys) else "short")
        return handed

    def _reach(self, fetch: Fetch, now: float) -> int | None:
        """Takes what the window allows. Returns where the fetch must end, if that is known."""
        limit = min(len(fetch.keys), fetch.first + fetch.taken + fetch.window)
        for index in range(fetch.next, limit):
            if index in fetch.ready:
                continue
            key = fetch.keys[index]
            if key in self._host:
                until = now + self._lease_s
                fetch.ready[index] = self._host.lease(fetch.owner, key, until)
            elif key in self._reading:
                fetch.from_disk.add(index)
            elif not self._on_disk(key):
                return None if self._recovering() else index
            elif self._start_read(key):
                self._reading.add(key)
                fetch.from_disk.add(index)
            else:
                return None
        return len(fetch.keys) if limit == len(fetch.keys) else None

    def _hand_out(self, fetch: Fetch, now: float) -> list[Ready]:
        handed = []
        while (lease := fetch.ready.pop(fetch.next, None)) is not None:
            key = fetch.keys[fetch.next]
            renewed = self._host.renew(lease, now + self._lease_s)
            if renewed is None:  # it expired while an earlier block was being read
                break
            if key not in self._host or self._host.slot_of(key) != lease.slot:  # discarded
                self._host.release(renewed)
                break
            block = self._host.block(key)
            tier = DISK if fetch.next in fetch.from_disk else HOST
            handed.append(Ready(fetch.next, lease.slot, block.checksum, tier))
            fetch.next += 1
            if fetch.keep:
                fetch.leased.append(renewed)
            else:
                self._host.release(renewed)
                fetch.taken += 1
        return handed

    def landed(self, key: bytes) -> list[Fetch]:
        """A read has ended, well or not: the fetches that this may move."""
        self._reading.discard(key)
        return [fetch for fetch in self.active.values() if fetch.from_disk]

    def took(self, owner: Owner, number: int, count: int) -> Fetch | None:
        """The reader has copied its next `count` blocks; their leases end."""
        fetch = self.active.get((owner, number))
        if fetch is None:
            return None
        for _ in range(min(count, len(fetch.leased))):
            self._host.release(fetch.leased.popleft())
            fetch.taken += 1
        self._forget_if_over(fetch)
        return fetch

    def end(self, fetch: Fetch, reason: str) -> None:
        """Nothing more is handed out. What the reader has may still be read under its leases."""
        fetch.ended = reason
        for lease in fetch.ready.values():
            self._host.release(lease)
        fetch.ready.clear()
        self._forget_if_over(fetch)

    def _forget_if_over(self, fetch: Fetch) -> None:
        if fetch.ended and not fetch.leased:
            self.active.pop((fetch.owner, fetch.number), None)

    def cancel(self, owner: Owner, number: int) -> None:
        """The reader wants nothing more, and reads nothing more."""
        fetch = self.active.get((owner, number))
        if fetch is not None:
            for lease in fetch.leased:
                self._host.release(lease)
            fetch.leased.clear()
            self.end(fetch, "cancelled")

    def lost(self, owner: Owner) -> None:
        """A reader is gone."""
        for name in [name for name in self.active if name[0] == owner]:
            self.cancel(*name)

    def expire(self) -> None:
        """Forgets ended fetches whose readers let their leases run out."""
        for fetch in list(self.active.values()):
            while fetch.leased and not self._host.is_live(fetch.leased[0]):
                fetch.leased.popleft()
                fetch.taken += 1
            self._forget_if_over(fetch)

    def check(self) -> None:
        """Proves that a fetch holds no more than its window and nothing behind its end."""
        for fetch in self.active.values():
            assert len(fetch.leased) + len(fetch.ready) <= fetch.window, "a fetch holds too much"
            assert not (fetch.ended and fetch.ready), "an ended fetch holds blocks"
