"""The host and disk tiers as one store: put, locate, fetch, clear, pin.

Joins the arena, the fetches and the disk tier, and owns the rules that concern both: what a prefix
is, what an eviction means for the disk, what is removed where. It knows block keys and slots, never
a socket; time is an argument and the bytes are whatever `view` shows of a slot. Jobs for the disk
go to `submit` and come back through `disk_done`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.kvstore.tiers.block import Block
from kvferry.kvstore.tiers.disk.slots import SlotIndex
from kvferry.kvstore.tiers.disk.tier import DiskTier
from kvferry.kvstore.tiers.disk.worker import DiskJob, ReadJob
from kvferry.kvstore.tiers.fetches import DISK, HOST, ChainFetch, ChainFetches, HandedOut
from kvferry.kvstore.tiers.host import HostTier, Lease, Owner

LEASE_SECONDS = 10.0
"""How long a reader may take to copy what it was handed. Leases also hold up eviction."""
HOLD_SECONDS = 60.0
"""How long a writer may keep a lease on what it wrote, for a shipment."""
PINNED_SHARE = 0.5
"""Of the arena, at most."""
_PREFETCH = "prefetch"


@dataclass(frozen=True, slots=True)
class Cleared:
    """What a `clear` removed."""

    host: int
    disk: int


class TieredCache:
    """One store's blocks. Without a disk tier there is no `index`, and nobody to `submit` to."""

    def __init__(
        self,
        host: HostTier,
        view: Callable[[int], memoryview],
        index: SlotIndex | None = None,
        submit: Callable[[DiskJob], None] | None = None,
        *,
        lease_s: float = LEASE_SECONDS,
    ) -> None:
        self.host = host
        self.counters: Counter[str] = Counter()
        self.disk: DiskTier | None = None
        if index is not None and submit is not None:
            self.disk = DiskTier(index, host, view, submit)
        self.lease_s = lease_s
        self.fetches = ChainFetches(host, self.disk, self._start_read, self.counters, lease_s)
        if self.disk is not None:
            host.on_evicted = self.disk.evicted
        self._filling: dict[bytes, tuple[int, Block]] = {}
        """Blocks being read from disk, by key, and the slots they go to."""
        self._unwanted: set[bytes] = set()
        """Blocks being read that were cleared meanwhile."""
        self._pin_later: dict[bytes, float] = {}
        """Blocks that are on disk only, and until when they are pinned once they are here."""
        self._held: dict[tuple[Owner, int], Lease] = {}
        """Slots that a writer keeps for a shipment."""
        self._prefetches = 0

    # -- putting --------------------------------------------------------------------------------

    def commit(self, owner: Owner, slot: int, block: Block, *, hold: bool, now: float) -> bool:
        """A writer has filled a slot of its own. False, counted, when the slot is not its own."""
        if not self.host.holds(owner, slot):
            self.counters["commits_refused"] += 1
            return False
        known = block.key in self.host
        until = now + HOLD_SECONDS if hold else None
        lease = self.host.commit(owner, slot, block, until)
        if lease is not None:
            self._held[(owner, slot)] = lease
        self.counters["puts_known" if known else "puts"] += 1
        if not known and self.disk is not None:
            self.disk.write_behind(block.key)
        return True

    def release_held(self, owner: Owner, slot: int) -> None:
        """A shipment has arrived, or will not."""
        lease = self._held.pop((owner, slot), None)
        if lease is not None:
            self.host.release(lease)

    def keep_held(self, owner: Owner, slots: frozenset[int]) -> None:
        """Of an owner's shipments only these are still on their way."""
        for holder, slot in list(self._held):
            if holder == owner and slot not in slots:
                self.counters["holds_mislaid"] += 1
                self.release_held(owner, slot)

    # -- finding --------------------------------------------------------------------------------

    def locate(self, keys: Sequence[bytes]) -> bytes:
        """One byte a block, HOST or DISK, for the longest prefix that is there. Takes nothing."""
        tiers = bytearray()
        for key in keys:
            tier = self._tier_of(key)
            if not tier:
                break
            tiers += tier
        return bytes(tiers)

    def inspect(self, keys: Sequence[bytes]) -> bytes:
        """One byte a block, gaps too: HOST, DISK or `-`."""
        return b"".join(self._tier_of(key) or b"-" for key in keys)

    def _tier_of(self, key: bytes) -> bytes:
        if key in self.host:
            return HOST
        return DISK if self.disk is not None and key in self.disk.index else b""

    # -- fetching -------------------------------------------------------------------------------

    def fetch(
        self,
        owner: Owner,
        number: int,
        keys: Sequence[bytes],
        first: int,
        *,
        deadline: float,
        window: int,
        now: float,
    ) -> HandedOut | None:
        """A request wants this chain, and the bytes of its blocks from `first` on.

        None when the reader already has a fetch of this number.
        """
        if (owner, number) in self.fetches.active:
            self.counters["fetches_repeated"] += 1
            return None
        self.host.order.touch(keys)
        if self.disk is not None:
            self.disk.index.touch(keys)
            for key in keys:
                if key in self.host:  # used again: it may have been shed, or have left the disk
                    self.disk.write_behind(key)
        self.counters["fetches"] += 1
        self.counters["blocks_asked"] += len(keys) - first
        fetch = ChainFetch(owner, number, keys, first, deadline, max(1, window))
        return self.fetches.start(fetch, now)

    def _start_read(self, key: bytes) -> bool:
        assert self.disk is not None
        if key in self._filling:  # it will be in memory soon
            return False
        slot = self.host.start_fill()
        if slot is None:
            self.counters["reads_without_slot"] += 1
            return False
        self._filling[key] = slot, self.disk.read(key, slot).record.block
        return True

    def prefetch(self, keys: Sequence[bytes], *, deadline: float, now: float) -> None:
        """Brings a chain's blocks from disk to the arena, without a reader."""
        self._prefetches += 1
        window = max(1, self.host.num_slots // 4)
        fetch = ChainFetch(_PREFETCH, self._prefetches, keys, 0, deadline, window, keep=False)
        self.fetches.start(fetch, now)

    def damaged(self, key: bytes) -> None:
        """A reader's copy was not what the key promises: nobody is served this block again."""
        self.counters["host_damaged"] += 1
        if self.disk is not None:
            self.disk.discard(key)
        if key in self.host:
            self.host.discard(key)
        if key in self._filling:
            self._unwanted.add(key)
        self._pin_later.pop(key, None)

    # -- the disk -------------------------------------------------------------------------------

    def disk_done(self, job: DiskJob, now: float) -> list[HandedOut]:
        """Takes an outcome of the disk's; what it gives to fetches."""
        assert self.disk is not None
        self.disk.done(job, now)
        if not isinstance(job, ReadJob):
            return []
        block = job.record.block
        slot, _ = self._filling.pop(block.key)
        wanted = job.ok and block.key not in self._unwanted
        if wanted:
            self.host.filled(slot, block)
            until = self._pin_later.pop(block.key, 0.0)
            if until > now:
                self.host.pin([block.key], until, self._most_pinned)
        else:
            self.host.fill_failed(slot)
        self._unwanted.discard(block.key)
        return self.fetches.landed(block.key, now)

    # -- turning --------------------------------------------------------------------------------

    def tick(self, now: float) -> list[HandedOut]:
        """Deadlines, leases that expire, writes that can start. Call every turn."""
        self.host.expire(now)
        for name in [it for it, lease in self._held.items() if not self.host.is_live(lease)]:
            del self._held[name]
        handed = self.fetches.tick(now)
        if self.disk is not None:
            self.disk.step(now)
        return handed

    # -- admin ----------------------------------------------------------------------------------

    def clear(self, tenant: bytes | None) -> Cleared:
        """Removes one tenant's blocks, or everything, from both tiers."""
        gone = [it.key for it in self.host.blocks() if tenant is None or it.tenant == tenant]
        on_disk = 0
        if self.disk is not None:
            on_disk = self.disk.clear_all() if tenant is None else self.disk.clear(tenant)
        for key, (_, block) in self._filling.items():
            if tenant is None or block.tenant == tenant:
                self._unwanted.add(key)
        for key in gone:
            self.host.discard(key)
        if tenant is None:
            self._pin_later.clear()
        return Cleared(len(gone), on_disk)

    def pin(self, keys: Sequence[bytes], seconds: float, now: float) -> int:
        """Keeps blocks in the arena until the time is over; how many of these.

        Those on disk only are kept from when they have been read, which is for somebody else to
        start: see `prefetch`.
        """
        pinned = self.host.pin(keys, now + seconds, self._most_pinned)
        self._pin_later = {key: until for key, until in self._pin_later.items() if until > now}
        room = self._most_pinned - self.host.num_pinned
        for key in keys:
            if self._tier_of(key) != DISK:
                continue
            if key not in self._pin_later and len(self._pin_later) >= room:
                break
            self._pin_later[key] = max(now + seconds, self._pin_later.get(key, 0.0))
            pinned += 1
        return pinned

    @property
    def _most_pinned(self) -> int:
        return int(PINNED_SHARE * self.host.num_slots)

    def unpin(self, keys: Sequence[bytes]) -> int:
        """How many of these were pinned."""
        later = sum(self._pin_later.pop(key, None) is not None for key in keys)
        return later + self.host.unpin(keys)

    # -- peers that go --------------------------------------------------------------------------

    def lost(self, owner: Owner) -> bool:
        """A peer is gone: whether slots are in quarantine until it is proven dead."""
        self.fetches.lost(owner)
        for name in [name for name in self._held if name[0] == owner]:
            del self._held[name]
        quarantined = self.host.lost(owner)
        self.counters["slots_quarantined"] += quarantined
        return quarantined > 0

    # -- state ----------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nobody fetches and everything is on disk that can be."""
        return not self.fetches.active and (self.disk is None or self.disk.idle)

    def ledger(self) -> dict[str, object]:
        return {
            "arena": self.host.ledger(),
            "disk": None if self.disk is None else self.disk.ledger(),
            "fetches": len(self.fetches.active),
            "held": len(self._held),
            "filling": len(self._filling),
        }

    def figures(self) -> dict[str, float]:
        """Monotonic counters of both tiers."""
        disk = {} if self.disk is None else self.disk.counters
        index = None if self.disk is None else self.disk.index
        more = {} if index is None else {"disk_evictions": index.evictions}
        return {
            **self.counters,
            **disk,
            **more,
            "evictions": self.host.evictions,
            "leases_expired": self.host.expired_leases,
        }

    def check(self) -> None:
        """Proves the invariants of everything the store owns."""
        self.host.check()
        self.fetches.check()
        if self.disk is not None:
            self.disk.check()
        assert self.host.ledger()["filling"] == len(self._filling), "a fill nobody waits for"
