"""Loads under way: who waits for which blocks, what may be handed out next, and until when.

Owns the order of one load and its leases; pure: it starts a read from disk through a callable and
reads no clock. A load goes through a window, so that a prompt larger than the arena passes through
it: as the reader copies blocks and lets go of them, their slots take the next ones. Slots are
taken in the order of the chain, and a load that gets none holds nothing that waits for one.

A load ends at the first block that is in no tier, cannot be read, or is not there by the deadline.
A shorter answer is a normal one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.kvstore.tiers.host import Arena, Lease, Owner

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
class Load:
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


class Loads:
    """All loads of one arena."""

    def __init__(
        self,
        arena: Arena,
        lease_s: float,
        on_disk: Callable[[bytes], bool],
        start_read: Callable[[bytes], bool],
        recovering: Callable[[], bool],
    ) -> None:
        self.active: dict[tuple[Owner, int], Load] = {}
        self._arena = arena
        self._lease_s = lease_s
        self._on_disk = on_disk
        self._start_read = start_read
        """Begins to bring a block into the arena; False when no slot can be had now."""
        self._recovering = recovering
        """Whether blocks may be on disk that nobody knows of yet: loads wait for that."""
        self._reading: set[bytes] = set()

    def start(self, load: Load) -> bool:
        """False when the reader already has a load of this number."""
        name = (load.owner, load.number)
        if name in self.active:
            return False
        self.active[name] = load
        return True

    def advance(self, load: Load, now: float) -> list[Ready]:
        """Leases what is there, starts reads, and says what may be handed out, in order."""
        if load.ended:
            return []
        if now >= load.deadline:
            self.end(load, "deadline")
            return []
        end = self._reach(load, now)
        handed = self._hand_out(load, now)
        if load.next == end:
            self.end(load, "complete" if end == len(load.keys) else "short")
        return handed

    def _reach(self, load: Load, now: float) -> int | None:
        """Takes what the window allows. Returns where the load must end, if that is known."""
        limit = min(len(load.keys), load.first + load.taken + load.window)
        for index in range(load.next, limit):
            if index in load.ready:
                continue
            key = load.keys[index]
            if key in self._arena:
                until = now + self._lease_s
                load.ready[index] = self._arena.lease(load.owner, key, until)
            elif key in self._reading:
                load.from_disk.add(index)
            elif not self._on_disk(key):
                return None if self._recovering() else index
            elif self._start_read(key):
                self._reading.add(key)
                load.from_disk.add(index)
            else:
                return None
        return len(load.keys) if limit == len(load.keys) else None

    def _hand_out(self, load: Load, now: float) -> list[Ready]:
        handed = []
        while (lease := load.ready.pop(load.next, None)) is not None:
            key = load.keys[load.next]
            renewed = self._arena.renew(lease, now + self._lease_s)
            if renewed is None:  # it expired while an earlier block was being read
                break
            if key not in self._arena or self._arena.slot_of(key) != lease.slot:  # discarded
                self._arena.release(renewed)
                break
            block = self._arena.block(key)
            tier = DISK if load.next in load.from_disk else HOST
            handed.append(Ready(load.next, lease.slot, block.checksum, tier))
            load.next += 1
            if load.keep:
                load.leased.append(renewed)
            else:
                self._arena.release(renewed)
                load.taken += 1
        return handed

    def landed(self, key: bytes) -> list[Load]:
        """A read has ended, well or not: the loads that this may move."""
        self._reading.discard(key)
        return [load for load in self.active.values() if load.from_disk]

    def took(self, owner: Owner, number: int, count: int) -> Load | None:
        """The reader has copied its next `count` blocks; their leases end."""
        load = self.active.get((owner, number))
        if load is None:
            return None
        for _ in range(min(count, len(load.leased))):
            self._arena.release(load.leased.popleft())
            load.taken += 1
        self._forget_if_over(load)
        return load

    def end(self, load: Load, reason: str) -> None:
        """Nothing more is handed out. What the reader has may still be read under its leases."""
        load.ended = reason
        for lease in load.ready.values():
            self._arena.release(lease)
        load.ready.clear()
        self._forget_if_over(load)

    def _forget_if_over(self, load: Load) -> None:
        if load.ended and not load.leased:
            self.active.pop((load.owner, load.number), None)

    def cancel(self, owner: Owner, number: int) -> None:
        """The reader wants nothing more, and reads nothing more."""
        load = self.active.get((owner, number))
        if load is not None:
            for lease in load.leased:
                self._arena.release(lease)
            load.leased.clear()
            self.end(load, "cancelled")

    def lost(self, owner: Owner) -> None:
        """A reader is gone."""
        for name in [name for name in self.active if name[0] == owner]:
            self.cancel(*name)

    def expire(self) -> None:
        """Forgets ended loads whose readers let their leases run out."""
        for load in list(self.active.values()):
            while load.leased and not self._arena.is_live(load.leased[0]):
                load.leased.popleft()
                load.taken += 1
            self._forget_if_over(load)

    def check(self) -> None:
        """Proves that a load holds no more than its window and nothing behind its end."""
        for load in self.active.values():
            assert len(load.leased) + len(load.ready) <= load.window, "a load holds too much"
            assert not (load.ended and load.ready), "an ended load holds blocks"
