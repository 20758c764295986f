"""Fetches under way: who waits for which blocks, what may be handed out next, and until when.

Owns the order of one fetch and its leases; pure: it starts a read from disk through a callable and
reads no clock. A fetch goes through a window, so that a prompt larger than the arena passes through
it: as the reader copies blocks and lets go of them, their slots take the next ones. Slots are
taken in the order of the chain, and a fetch that gets none holds nothing that waits for one.

A fetch ends at the first block that is in no tier, cannot be read, or is not there by the deadline.
A shorter answer is a normal one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.kvstore.tiers.disk.tier import DiskTier
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
class ChainFetch:
    """One reader's wish for the blocks of a chain from `next` on."""

    owner: Owner
    number: int
    keys: Sequence[bytes]
    next: int
    """The block to hand out next."""
    deadline: float
    window: int
    """How many blocks may be handed out and not taken."""
    keep: bool = True
    """False: a prefetch, which wants the blocks in the arena and nothing handed out."""
    ended: str = ""
    """Why it ended: `complete`, `short`, `deadline`, `cancelled`."""
    from_disk: set[int] = field(default_factory=set)
    ready: dict[int, Lease] = field(default_factory=dict)
    leased: deque[Lease] = field(default_factory=deque)
    """Handed out and not taken yet."""


@dataclass(frozen=True, slots=True)
class HandedOut:
    """What one fetch got: blocks to copy, and why it ended if it has just done so."""

    fetch: ChainFetch
    blocks: list[Ready]
    ended: str


class ChainFetches:
    """All fetches from one store. `disk` is None without a disk tier."""

    def __init__(
        self,
        host: HostTier,
        disk: DiskTier | None,
        start_read: Callable[[bytes], bool],
        counters: Counter[str],
        lease_s: float,
    ) -> None:
        self.active: dict[tuple[Owner, int], ChainFetch] = {}
        """Those that have not ended, and those whose readers still copy."""
        self._host = host
        self._disk = disk
        self._start_read = start_read
        """Begins to bring a block into the arena; False when no slot can be had now."""
        self._counters = counters
        self._lease_s = lease_s
        self._reading: set[bytes] = set()

    def start(self, fetch: ChainFetch, now: float) -> HandedOut:
        self.active[(fetch.owner, fetch.number)] = fetch
        return self.advance(fetch, now)

    def advance(self, fetch: ChainFetch, now: float) -> HandedOut:
        """Leases what is there, starts reads, and hands out what may be copied, in order.

        An ended fetch is forgotten once its reader has taken everything.
        """
        over, blocks = bool(fetch.ended), []
        if not over and now >= fetch.deadline:
            self._end(fetch, "deadline")
        elif not over:
            end = self._reach(fetch, now)
            blocks = self._hand_out(fetch, now)
            if fetch.next == end:
                self._end(fetch, "complete" if end == len(fetch.keys) else "short")
        if fetch.ended and not fetch.leased:
            self.active.pop((fetch.owner, fetch.number), None)
        if over or not fetch.ended:
            return HandedOut(fetch, blocks, "")
        return HandedOut(fetch, blocks, fetch.ended)

    def _reach(self, fetch: ChainFetch, now: float) -> int | None:
        """Takes what the window allows. Returns where the fetch must end, if that is known."""
        limit = min(len(fetch.keys), fetch.next - len(fetch.leased) + fetch.window)
        for index in range(fetch.next, limit):
            if index in fetch.ready:
                continue
            key = fetch.keys[index]
            if key in self._host:
                until = now + self._lease_s
                fetch.ready[index] = self._host.lease(fetch.owner, key, until)
            elif key in self._reading:
                fetch.from_disk.add(index)
            elif self._disk is None or key not in self._disk.index:
                # While the disk's files are being read, nobody knows what is on it.
                return None if self._disk is not None and self._disk.recovering else index
            elif self._start_read(key):
                self._reading.add(key)
                fetch.from_disk.add(index)
            else:
                return None
        return len(fetch.keys) if limit == len(fetch.keys) else None

    def _hand_out(self, fetch: ChainFetch, now: float) -> list[Ready]:
        handed = []
        while (lease := fetch.ready.pop(fetch.next, None)) is not None:
            key = fetch.keys[fetch.next]
            renewed = self._host.renew(lease, now + self._lease_s)
            if renewed is None:  # it expired while an earlier block was being read
                break
            if key not in self._host or self._host.slot_of(key) != lease.slot:  # discarded
                self._host.release(renewed)
                break
            tier = DISK if fetch.next in fetch.from_disk else HOST
            handed.append(Ready(fetch.next, lease.slot, self._host.block(key).checksum, tier))
            fetch.next += 1
            if fetch.keep:
                fetch.leased.append(renewed)
                self._counters["blocks_host" if tier == HOST else "blocks_disk"] += 1
            else:
                self._host.release(renewed)
        return handed

    def _end(self, fetch: ChainFetch, reason: str) -> None:
        """Nothing more is handed out. What the reader has may still be read under its leases."""
        fetch.ended = reason
        self._counters[f"fetches_{reason}"] += 1
        for lease in fetch.ready.values():
            self._host.release(lease)
        fetch.ready.clear()

    def landed(self, key: bytes, now: float) -> list[HandedOut]:
        """A read has ended, well or not: what it gives to those who may have waited for it."""
        self._reading.discard(key)
        waiting = [fetch for fetch in self.active.values() if fetch.from_disk]
        return [self.advance(fetch, now) for fetch in waiting]

    def took(self, owner: Owner, number: int, count: int, now: float) -> HandedOut | None:
        """The reader has copied its next `count` blocks; their leases end, and more may come."""
        fetch = self.active.get((owner, number))
        if fetch is None:
            return None
        for _ in range(min(count, len(fetch.leased))):
            self._host.release(fetch.leased.popleft())
        return self.advance(fetch, now)

    def cancel(self, owner: Owner, number: int) -> None:
        """The reader wants nothing more, and reads nothing more."""
        fetch = self.active.pop((owner, number), None)
        if fetch is not None:
            for lease in fetch.leased:
                self._host.release(lease)
            fetch.leased.clear()
            if not fetch.ended:
                self._end(fetch, "cancelled")

    def lost(self, owner: Owner) -> None:
        """A reader is gone."""
        for name in [name for name in self.active if name[0] == owner]:
            self.cancel(*name)

    def tick(self, now: float) -> list[HandedOut]:
        """Deadlines, and readers that let their leases run out."""
        handed = []
        for fetch in list(self.active.values()):
            while fetch.leased and not self._host.is_live(fetch.leased[0]):
                fetch.leased.popleft()
            handed.append(self.advance(fetch, now))
        return [it for it in handed if it.blocks or it.ended]

    def check(self) -> None:
        """Proves that a fetch holds no more than its window and nothing behind its end."""
        for fetch in self.active.values():
            assert len(fetch.leased) + len(fetch.ready) <= fetch.window, "a fetch holds too much"
            assert not (fetch.ended and fetch.ready), "an ended fetch holds blocks"
