"""Accounting of the host tier: what is in which slot of the arena, and who may touch its bytes.

Owns slot numbers, write reservations, read leases and quarantine; pure: it never sees the bytes and
reads no clock. Each slot is in exactly one place:

    free         nothing in it
    reserved     a writer may write: it belongs to that writer until it commits or gives back
    filling      the store itself reads a block from disk into it
    resident     committed under a key, findable, never written again; evicted only when nobody
                 holds a lease on it
    withdrawn    was resident or committed twice: not findable any more, still leased
    quarantined  its writer is lost but not proven dead: it may still write

    free ─grant─► reserved ─commit─► resident ─evict, discard─► free
                     │ writer lost       └─ discard while leased ─► withdrawn ─last lease─► free
                     └──────────► quarantined ─writer proven dead─► free

A reservation never ends by time: a stopped writer that wakes must not write into somebody else's
slot. A read lease does: readers copy first and verify their copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from kvferry.kvstore.tiers.block import Block
from kvferry.kvstore.tiers.eviction import EvictionOrder

Owner = Hashable
FOREVER = float("inf")
FUTILE_TAKES = 64
QUARANTINE_SHARE = 0.25
"""With more of the slots in quarantine the store says that it is not well."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to read a slot until a moment on the store's clock."""

    number: int
    owner: Owner
    slot: int
    until: float


class HostTier:
    """The accounting of `num_slots` slots, numbered from 0."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.order = EvictionOrder(num_slots)
        self.evictions = 0
        self.expired_leases = 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._reserved: dict[int, Owner] = {}
        self._filling: set[int] = set()
        self._quarantined: dict[int, Owner] = {}
        self._slot_of: dict[bytes, int] = {}
        self._block_in: dict[int, Block] = {}
        self._withdrawn: set[int] = set()
        self._leases: dict[int, Lease] = {}
        self._leases_on: dict[int, int] = {}
        self._pins: dict[bytes, float] = {}
        self._next_lease = 1
        self.is_unwritten: Callable[[bytes], bool] = lambda key: False
        """Whether a block waits to be written to disk: it goes only when nothing else may."""
        self.is_on_disk: Callable[[bytes], bool] | None = None
        """Whether a block can be read from disk; None without a disk."""
        self.on_evicted: Callable[[bytes], None] = lambda key: None
        """Is told of every block that is evicted, which is not findable any more."""
        self._futile = 0

    # -- looking --------------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    def slot_of(self, key: bytes) -> int:
        return self._slot_of[key]

    def block(self, key: bytes) -> Block:
        return self._block_in[self._slot_of[key]]

    def blocks(self) -> Iterable[Block]:
        """Every findable block."""
        return (self._block_in[slot] for slot in self._slot_of.values())

    @property
    def num_resident(self) -> int:
        return len(self._slot_of)

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    @property
    def well(self) -> bool:
        """Whether the quarantine is within its budget."""
        return len(self._quarantined) <= QUARANTINE_SHARE * self.num_slots

    @property
    def num_leased(self) -> int:
        """Slots that somebody reads, findable or not."""
        return len(self._leases_on)

    @property
    def num_pinned(self) -> int:
        return len(self._pins)

    def reserved_by(self, owner: Owner) -> set[int]:
        return {slot for slot, holder in self._reserved.items() if holder == owner}

    # -- writing --------------------------------------------------------------------------------

    def grant(self, owner: Owner, count: int) -> list[int]:
        """Up to `count` slots that only `owner` may write; fewer when nothing may be evicted."""
        slots: list[int] = []
        while len(slots) < count and (slot := self._take()) is not None:
            self._reserved[slot] = owner
            slots.append(slot)
        return slots

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        key = self.order.evict(lambda it: self.may_go(it) and not self.is_unwritten(it))
        if key is None and self.is_on_disk is not None:
            key = self._take_inner(self.is_on_disk)
        if key is None:
            key = self.order.evict(self.may_go)
        return None if key is None else self._vacate(key)

    def _vacate(self, key: bytes) -> int:
        slot = self._slot_of.pop(key)
        del self._block_in[slot]
        self._pins.pop(key, None)
        self.evictions += 1
        self.on_evicted(key)
        return slot

    def _take_inner(self, on_disk: Callable[[bytes], bool]) -> bytes | None:
        """A chain as long as the arena has one end only, and that may be what is being read or is
        still to be written. What lies before it on disk is no loss.

        A search in vain may have been a long one: the next `FUTILE_TAKES` do without.
        """
        if self._futile > 0:
            self._futile -= 1
            return None
        key = self.order.evict_inner(lambda it: on_disk(it) and self.may_go(it))
        if key is None:
            self._futile = FUTILE_TAKES
        return key

    def may_go(self, key: bytes) -> bool:
        """Whether nobody reads this findable block and nobody has pinned it."""
        return self._slot_of[key] not in self._leases_on and key not in self._pins

    def give_back(self, owner: Owner, slot: int) -> bool:
        """The writer will not use the slot; False if it was not its own."""
        if self._reserved.get(slot) != owner:
            return False
        del self._reserved[slot]
        self._free.append(slot)
        return True

    def holds(self, owner: Owner, slot: int) -> bool:
        """Whether `owner` may write this slot now."""
        return self._reserved.get(slot) == owner

    def commit(
        self, owner: Owner, slot: int, block: Block, hold_until: float | None
    ) -> Lease | None:
        """The writer has written the block and will not touch the slot again.

        A key that is findable already keeps its first slot. With `hold_until` the writer keeps a
        lease on the slot it wrote, whether or not that is the findable one.
        """
        assert self._reserved[slot] == owner, "a slot is committed by somebody else"
        del self._reserved[slot]
        return self._settle(slot, block, owner, hold_until)

    def _settle(
        self, slot: int, block: Block, owner: Owner, hold_until: float | None
    ) -> Lease | None:
        lease = None if hold_until is None else self.lease(owner, block.key, hold_until, slot)
        if block.key in self._slot_of:
            if lease is None:
                self._free.append(slot)
            else:
                self._withdrawn.add(slot)
            return lease
        self._slot_of[block.key] = slot
        self._block_in[slot] = block
        self.order.add(block.key, block.parent, first=block.depth == 0)
        return lease

    def start_fill(self) -> int | None:
        """A slot for the store's own I/O; None when nothing may be evicted."""
        slot = self._take()
        if slot is not None:
            self._filling.add(slot)
        return slot

    def filled(self, slot: int, block: Block) -> None:
        """The store's I/O into the slot has ended well."""
        self._filling.remove(slot)
        self._settle(slot, block, None, None)

    def fill_failed(self, slot: int) -> None:
        """The store's I/O into the slot has ended; its bytes are worth nothing."""
        self._filling.remove(slot)
        self._free.append(slot)

    # -- reading --------------------------------------------------------------------------------

    def lease(self, owner: Owner, key: bytes, until: float, slot: int | None = None) -> Lease:
        """A block stays where it is until the lease is released or expires.

        `slot`: where its writer has just written it, if that is not the findable one.
        """
        slot = self._slot_of[key] if slot is None else slot
        lease = Lease(self._next_lease, owner, slot, until)
        self._next_lease += 1
        self._leases[lease.number] = lease
        self._leases_on[slot] = self._leases_on.get(slot, 0) + 1
        return lease

    def release(self, lease: Lease) -> bool:
        """Ends a lease; False when it had expired."""
        if self._leases.pop(lease.number, None) is None:
            return False
        left = self._leases_on[lease.slot] - 1
        if left:
            self._leases_on[lease.slot] = left
            return True
        del self._leases_on[lease.slot]
        if lease.slot in self._withdrawn:
            self._withdrawn.remove(lease.slot)
            self._free.append(lease.slot)
        return True

    def renew(self, lease: Lease, until: float) -> Lease | None:
        """The same lease with another end; None when it had expired."""
        if lease.number not in self._leases:
            return None
        self._leases[lease.number] = renewed = replace(lease, until=until)
        return renewed

    def is_live(self, lease: Lease) -> bool:
        return lease.number in self._leases

    def expire(self, now: float) -> int:
        """Ends the leases and pins whose time has passed; how many leases."""
        over = [lease for lease in self._leases.values() if lease.until <= now]
        for lease in over:
            self.release(lease)
        self.expired_leases += len(over)
        for key in [key for key, until in self._pins.items() if until <= now]:
            del self._pins[key]
        return len(over)

    # -- removing and keeping -------------------------------------------------------------------

    def discard(self, key: bytes) -> None:
        """Makes a block unfindable; its slot is free once nobody reads it."""
        slot = self._slot_of.pop(key)
        del self._block_in[slot]
        self._pins.pop(key, None)
        self.order.remove(key)
        if slot in self._leases_on:
            self._withdrawn.add(slot)
        else:
            self._free.append(slot)

    def pin(self, keys: Collection[bytes], until: float, most: int) -> int:
        """Keeps resident blocks from eviction; at most `most` in all. Returns how many of these."""
        pinned = 0
        for key in keys:
            if key not in self._slot_of:
                continue
            if key not in self._pins and len(self._pins) >= most:
                break
            self._pins[key] = max(until, self._pins.get(key, 0.0))
            pinned += 1
        return pinned

    def unpin(self, keys: Collection[bytes]) -> int:
        return sum(self._pins.pop(key, None) is not None for key in keys)

    # -- peers that go --------------------------------------------------------------------------

    def lost(self, owner: Owner) -> int:
        """A peer is gone, dead or not: its leases end, what it may write is quarantined.

        Returns how many slots are quarantined for it.
        """
        for lease in [lease for lease in self._leases.values() if lease.owner == owner]:
            self.release(lease)
        slots = [slot for slot, holder in self._reserved.items() if holder == owner]
        for slot in slots:
            del self._reserved[slot]
            self._quarantined[slot] = owner
        return len(slots)

    def proven_dead(self, owner: Owner) -> int:
        """A lost peer is proven dead, or has unmapped the arena: its slots are free."""
        slots = [slot for slot, holder in self._quarantined.items() if holder == owner]
        for slot in slots:
            del self._quarantined[slot]
            self._free.append(slot)
        return len(slots)

    # -- state ----------------------------------------------------------------------------------

    def ledger(self) -> dict[str, int]:
        """Where every slot is."""
        return {
            "total": self.num_slots,
            "free": len(self._free),
            "reserved": len(self._reserved),
            "filling": len(self._filling),
            "resident": len(self._slot_of),
            "withdrawn": len(self._withdrawn),
            "quarantined": len(self._quarantined),
            "leased": len(self._leases_on),
            "leases": len(self._leases),
            "pinned": len(self._pins),
        }

    def check(self) -> None:
        """Proves the invariant: every slot is in one place, every lease on a slot with content."""
        places: Sequence[Collection[int]] = (
            self._free,
            self._reserved,
            self._filling,
            self._block_in,
            self._withdrawn,
            self._quarantined,
        )
        everywhere = [slot for place in places for slot in place]
        assert sorted(everywhere) == list(range(self.num_slots)), "a slot is in no place or in two"
        assert {key: slot for slot, block in self._block_in.items() for key in (block.key,)} == (
            self._slot_of
        ), "the maps disagree"
        counted: dict[int, int] = {}
        for lease in self._leases.values():
            counted[lease.slot] = counted.get(lease.slot, 0) + 1
        assert counted == self._leases_on, "leases are counted wrong"
        assert counted.keys() <= self._block_in.keys() | self._withdrawn, "a lease on nothing"
        assert self._withdrawn <= counted.keys(), "a withdrawn slot that nobody reads"
        assert self._pins.keys() <= self._slot_of.keys(), "a pin on nothing"
        assert set(self.order.entries) == self._slot_of.keys(), "the eviction order disagrees"
        self.order.check()
