"""What a node reads from the store: fetches of a prefix, and blocks that another node has shipped.

Owns the fetches under way and what has been handed out for them. Every copy is verified, in the
reader's own memory; one that is not what it should be ends its fetch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.kvstore.client.link import StoreLink, Write
from kvferry.kvstore.client.puts import KnownBlocks, SlotRef
from kvferry.kvstore.keys import checksum
from kvferry.kvstore.wire.store import (
    CancelFetch,
    Damaged,
    Delivered,
    FetchEnded,
    FetchRequest,
    Leased,
    Taken,
)

WINDOW_BYTES = 32 << 20
"""Of a fetch: handed out and not taken."""
LATE_SECONDS = 1.0
"""Blocks of a fetch that ends by its deadline may still be under way for so long."""


@dataclass(slots=True)
class Handed:
    """A block that may be copied now."""

    checksum: int
    tier: str
    slot: int = -1
    payload: memoryview | None = None
    """The block itself, if it came inline."""
    late_at: float = 0.0


@dataclass(slots=True, eq=False)
class Fetch:
    """One fetch of a chain. Blocks come in order; `Fetches.take` them as there is time."""

    number: int
    keys: Sequence[bytes]
    first: int
    deadline: float
    taken: int = 0
    """Blocks copied and verified: `[first, first + taken)`."""
    from_host: int = 0
    from_disk: int = 0
    ready: deque[Handed] = field(default_factory=deque)
    """Blocks that can be taken now."""
    over: str = ""
    """Why nothing more is handed out, once that is so."""
    untold: int = 0
    """Blocks taken that the store has not been told of."""

    @property
    def ended(self) -> str:
        """Empty while blocks may come; then why none does: `complete`, `short`, `deadline`,
        `damaged`, `cancelled`, `refused`, `lost` (the link) or `no store`."""
        return "" if self.ready else self.over


class Fetches:
    """All fetches of one node."""

    def __init__(
        self,
        link: StoreLink,
        known: KnownBlocks,
        counters: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._link = link
        self._known = known
        self._counters = counters
        self._clock = clock
        self._window = max(1, WINDOW_BYTES // link.block_bytes)
        self._fetches: dict[int, Fetch] = {}
        self._next = 1

    # -- what a node asks for -------------------------------------------------------------------

    def fetch(self, keys: Sequence[bytes], first: int = 0, *, deadline_s: float) -> Fetch:
        """Asks for blocks `[first, len(keys))` of a chain; `keys` begins at its root.

        The fetch ends at the first block that the store has not, or at the deadline.
        """
        fetch = Fetch(self._next, tuple(keys), first, self._clock() + deadline_s)
        self._next += 1
        wish = FetchRequest(fetch.number, b"".join(keys), first, deadline_s, self._window)
        if self._link.attached is None or not self._link.send(wish):
            fetch.over = "no store"
        else:
            self._fetches[fetch.number] = fetch
        return fetch

    def take(self, fetch: Fetch, write: Write) -> bool:
        """Copies the next ready block through `write` and verifies the copy.

        False when the copy is not what it should be: the fetch has ended before this block, and
        what was written there is worth nothing.
        """
        handed = fetch.ready.popleft()
        if handed.payload is not None:
            good = checksum(write(handed.payload)) == handed.checksum
        else:
            good = self._link.copy_out(handed.slot, handed.checksum, write)
        if not good:
            self._spoiled(fetch, handed)
            return False
        fetch.taken += 1
        if handed.tier == "d":
            fetch.from_disk += 1
        else:
            fetch.from_host += 1
        fetch.untold += 1
        if not fetch.ready or fetch.untold >= max(1, self._window // 4):
            self._link.send(Taken(fetch.number, fetch.untold))
            fetch.untold = 0
        if fetch.ended:
            self._fetches.pop(fetch.number, None)
        return True

    def _spoiled(self, fetch: Fetch, handed: Handed) -> None:
        """A copy was not what it should be: its lease was over, or something is damaged."""
        key = fetch.keys[fetch.first + fetch.taken]
        self._known.discard(key)
        if handed.payload is None and self._clock() > handed.late_at:
            self._counters["leases_late"] += 1
        else:
            self._counters["blocks_damaged"] += 1
            if handed.payload is None:
                self._link.send(Damaged(key))
        self.cancel(fetch, "damaged")
        fetch.over = "damaged"  # also when the store had sent all of it already

    def cancel(self, fetch: Fetch, reason: str = "cancelled") -> None:
        """Nothing more of it is wanted. Harmless when it has ended."""
        fetch.untold = 0
        if self._fetches.pop(fetch.number, None) is not None:
            fetch.ready.clear()
            fetch.over = reason
            self._link.send(CancelFetch(fetch.number))

    def copy(self, ref: SlotRef, write: Write) -> bool:
        """Copies a block that another node has shipped; False when it is not there any more."""
        attached = self._link.attached
        if attached is None or not ref.store or ref.store != self._link.mapped:
            return False
        if not 0 <= ref.slot < attached.num_slots:
            return False
        if self._link.copy_out(ref.slot, ref.checksum, write):
            return True
        self._counters["shipments_damaged"] += 1
        return False

    # -- what the store says --------------------------------------------------------------------

    def handed_out(
        self, message: Leased | Delivered, payloads: tuple[memoryview, ...], now: float
    ) -> None:
        """Notes blocks that may be copied now; they come in order, or their fetch ends."""
        fetch = self._fetches.get(message.number)
        if fetch is None or self._link.attached is None:
            self._counters["blocks_unwanted"] += 1
            return
        if message.first != fetch.first + fetch.taken + len(fetch.ready):
            # A message was lost or came twice. The store asks nothing back: the fetch ends here.
            self._counters["blocks_out_of_order"] += 1
            self.cancel(fetch, "lost")
            return
        late_at = now + self._link.attached.lease_s / 2
        for index, total in enumerate(message.checksums):
            handed = Handed(total, chr(message.tiers[index]), late_at=late_at)
            if isinstance(message, Leased):
                handed.slot = message.slots[index]
            else:
                handed.payload = payloads[index]
            fetch.ready.append(handed)
            self._known.add(fetch.keys[message.first + index])

    def ended(self, message: FetchEnded) -> None:
        """The store hands out nothing more."""
        fetch = self._fetches.get(message.number)
        if fetch is not None:
            fetch.over = fetch.over or message.reason
            if fetch.ended:
                del self._fetches[fetch.number]

    def tick(self, now: float) -> None:
        """Ends fetches whose last words must have been lost."""
        late = now - LATE_SECONDS
        for fetch in [it for it in self._fetches.values() if not it.over and it.deadline < late]:
            self.cancel(fetch, "deadline")

    def lost(self) -> None:
        """The store is gone: so is what it had handed out."""
        for fetch in self._fetches.values():
            fetch.ready.clear()
            fetch.over = "lost"
        self._fetches.clear()
