"""What a node reads from the store: loads of a prefix, and blocks that another node has shipped.

Owns the loads under way and what has been handed out for them. Every copy is verified, in the
reader's own memory; one that is not what it should be ends its load.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.kvstore.client.link import StoreLink, Write
from kvferry.kvstore.client.puts import Known, SlotRef
from kvferry.kvstore.keys import checksum
from kvferry.kvstore.wire.store import (
    CancelFetch,
    Damaged,
    Delivered,
    Fetch,
    FetchEnded,
    Leased,
    Taken,
)

WINDOW_BYTES = 32 << 20
"""Of a fetch: handed out and not taken."""
LATE_SECONDS = 1.0
"""Blocks of a fetch that ends by its deadline may still be under way for so long."""


@dataclass(slots=True)
class _Handed:
    checksum: int
    tier: str
    slot: int = -1
    payload: memoryview | None = None
    late_at: float = 0.0


class Loading:
    """One fetch. Blocks come in order; `take` them as there is time."""

    def __init__(
        self, fetches: Fetches, number: int, keys: Sequence[bytes], first: int, deadline: float
    ) -> None:
        self.first = first
        self.taken = 0
        """Blocks copied and verified: `[first, first + taken)`."""
        self.from_host = 0
        self.from_disk = 0
        self.number = number
        self.deadline = deadline
        self._fetches = fetches
        self._keys = keys
        self._handed: deque[_Handed] = deque()
        self._over = ""
        self._untold = 0

    @property
    def ready(self) -> int:
        """Blocks that can be taken now."""
        return len(self._handed)

    @property
    def ended(self) -> str:
        """Empty while blocks may come; then why none does: `complete`, `short`, `deadline`,
        `damaged`, `cancelled`, `refused`, `lost` (the link) or `no store`."""
        return "" if self._handed else self._over

    def take(self, write: Write) -> bool:
        """Copies the next block through `write` and verifies the copy.

        False when the copy is not what it should be: the load has ended before this block, and
        what was written there is worth nothing.
        """
        handed = self._handed.popleft()
        if not self._fetches.copied(handed, write):
            self._fetches.spoiled(self, handed, self._keys[self.first + self.taken])
            return False
        self.taken += 1
        if handed.tier == "d":
            self.from_disk += 1
        else:
            self.from_host += 1
        self._untold += 1
        self._fetches.tell_taken(self)
        return True

    def cancel(self) -> None:
        """Nothing more is wanted. Harmless when it has ended."""
        self._fetches.cancel(self, "cancelled")


class Fetches:
    """All loads of one node."""

    def __init__(
        self,
        link: StoreLink,
        known: Known,
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._link = link
        self._known = known
        self._counters = counters
        self._clock = clock
        self._loads: dict[int, Loading] = {}
        self._next = 1

    # -- beginning and ending -------------------------------------------------------------------

    def fetch(self, keys: Sequence[bytes], first: int = 0, *, deadline_s: float) -> Loading:
        """Asks for blocks `[first, len(keys))` of a chain; `keys` begins at its root.

        The load ends at the first block that the store has not, or at the deadline.
        """
        now = self._clock()
        load = Loading(self, self._next, tuple(keys), first, now + deadline_s)
        self._next += 1
        window = max(1, WINDOW_BYTES // self._link.block_bytes)
        wish = Fetch(load.number, b"".join(keys), first, deadline_s, window)
        if self._link.attached is None or not self._link.send(wish):
            load._over = "no store"
            return load
        self._loads[load.number] = load
        return load

    def handed_out(
        self, message: Leased | Delivered, payloads: tuple[memoryview, ...], now: float
    ) -> None:
        """Notes blocks that may be copied now; they come in order, or their load ends."""
        load = self._loads.get(message.number)
        if load is None or self._link.attached is None:
            self._counters["blocks_unwanted"] += 1
            return
        if message.first != load.first + load.taken + load.ready:
            # A message was lost or came twice. The store asks nothing back, so the load ends here.
            self._counters["blocks_out_of_order"] += 1
            self.cancel(load, "lost")
            return
        late_at = now + self._link.attached.lease_s / 2
        for index, total in enumerate(message.checksums):
            handed = _Handed(total, chr(message.tiers[index]), late_at=late_at)
            if isinstance(message, Leased):
                handed.slot = message.slots[index]
            else:
                handed.payload = payloads[index]
            load._handed.append(handed)
            self._known.add(load._keys[message.first + index])

    # -- what a load asks for -------------------------------------------------------------------

    def copied(self, handed: _Handed, write: Write) -> bool:
        """Copies a block; False when the copy is not what it should be."""
        if handed.payload is not None:
            return checksum(write(handed.payload)) == handed.checksum
        return self._link.copy_out(handed.slot, handed.checksum, write)

    def spoiled(self, load: Loading, handed: _Handed, key: bytes) -> None:
        """A copy was not what it should be: its lease was over, or something is damaged."""
        self._known.discard(key)
        if handed.payload is None and self._clock() > handed.late_at:
            self._counters["leases_late"] += 1
        else:
            self._counters["blocks_damaged"] += 1
            if handed.payload is None:
                self._link.send(Damaged(key))
        self.cancel(load, "damaged")
        load._over = "damaged"  # also when the store had sent all of it already

    def tell_taken(self, load: Loading) -> None:
        """Returns leases, several at once while more is there."""
        most = max(1, WINDOW_BYTES // self._link.block_bytes // 4)
        if load._untold >= most or not load.ready:
            self._link.send(Taken(load.number, load._untold))
            load._untold = 0
        self._forget_if_over(load)

    def _forget_if_over(self, load: Loading) -> None:
        if load.ended:
            self._loads.pop(load.number, None)

    def cancel(self, load: Loading, reason: str) -> None:
        """Nothing more of it is wanted."""
        load._untold = 0
        if self._loads.pop(load.number, None) is not None:
            load._handed.clear()
            load._over = reason
            self._link.send(CancelFetch(load.number))

    # -- the loop -------------------------------------------------------------------------------

    def ended(self, message: FetchEnded) -> None:
        """The store hands out nothing more."""
        load = self._loads.get(message.number)
        if load is not None:
            load._over = load._over or message.reason
            self._forget_if_over(load)

    def tick(self, now: float) -> None:
        """Ends loads whose last words must have been lost."""
        late = now - LATE_SECONDS
        for load in [it for it in self._loads.values() if not it._over and it.deadline < late]:
            self.cancel(load, "deadline")

    def lost(self) -> None:
        """The store is gone: so is what it had handed out."""
        for load in self._loads.values():
            load._handed.clear()
            load._over = "lost"
        self._loads.clear()

    # -- shipments ------------------------------------------------------------------------------

    def copy(self, ref: SlotRef, write: Write) -> bool:
        """Copies a block that another node has shipped; False when it is not there any more."""
        attached = self._link.attached
        if not self._link.shared or attached is None or ref.store != self._link.incarnation:
            return False
        if not 0 <= ref.slot < attached.num_slots:
            return False
        if self._link.copy_out(ref.slot, ref.checksum, write):
            return True
        self._counters["shipments_damaged"] += 1
        return False
