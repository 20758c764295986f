"""What a node writes into the store: finished blocks, and shipments for other nodes.

Owns the slots that the store has granted, those that another node is still to copy, and which
blocks the store is known to have. Nothing here waits: a block without a slot is dropped or travels
inline.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from kvferry.kvstore.client.link import StoreLink
from kvferry.kvstore.keys import checksum
from kvferry.kvstore.wire.store import Commit, GiveBack, Holding, Keeping, Release

Read = Callable[[int], "bytes | memoryview"]
"""The bytes of the n-th block of a call; valid until the next call."""

KNOWN_SECONDS = 30.0
"""How long a block that was seen in the store is not put there again."""
MAX_KNOWN = 1 << 16
KEEPING_SECONDS = 2.0
"""How often a node that ships says what of it is still to be copied."""
KEEPING_TIMES = 4
"""How often it says so after the last shipment: one may be lost."""
HOLDING_SECONDS = 1.0
"""Without a slot to write for so long, a node says so: something may have been lost on its way."""


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A block in a slot of the arena, for another node of the same host."""

    store: int
    """Incarnation of the store whose arena it is."""
    slot: int
    checksum: int


class KnownBlocks:
    """Blocks that were seen in the store a moment ago."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, key: bytes) -> None:
        now = self._clock()
        self._until[key] = now + KNOWN_SECONDS
        self._until.move_to_end(key)
        while len(self._until) > MAX_KNOWN or next(iter(self._until.values())) < now:
            self._until.popitem(last=False)

    def __contains__(self, key: bytes) -> bool:
        return self._until.get(key, -inf) >= self._clock()

    def __len__(self) -> int:
        return len(self._until)

    def discard(self, key: bytes) -> None:
        self._until.pop(key, None)

    def clear(self) -> None:
        self._until.clear()


class Puts:
    """Granted slots and what becomes of them."""

    def __init__(self, link: StoreLink, counters: Counter[str], clock: Callable[[], float]) -> None:
        self.stock: deque[int] = deque()
        """Slots that this node may write: so many blocks `put` would take now."""
        self.known = KnownBlocks(clock)
        self._link = link
        self._counters = counters
        self._clock = clock
        self._lent: set[int] = set()
        """Slots that another node is still to copy."""
        self._keeping_at = self._keep_until = 0.0
        self._grants = 0
        """The last grant that has come."""
        self._holding_at = 0.0

    def granted(self, number: int, slots: tuple[int, ...]) -> None:
        """One that comes late or twice is ignored: its slots may be somebody else's by now."""
        if number > self._grants:
            self._grants = number
            self.stock.extend(slots)

    def tick(self, now: float) -> None:
        """Says what is held, in case that something was lost on its way."""
        if self.stock:
            self._holding_at = now + HOLDING_SECONDS
        elif self._link.attached is not None and now >= self._holding_at:
            self._holding_at = now + HOLDING_SECONDS
            self._link.send(Holding(self._grants, ()))
        if self._link.attached is not None and self._keeping_at <= now < self._keep_until:
            self._keeping_at = now + KEEPING_SECONDS
            self._link.send(Keeping(tuple(self._lent)))

    def give_back(self) -> None:
        """Returns what is not written."""
        self._link.send(GiveBack(tuple(self.stock)))

    def lost(self) -> None:
        """The store is gone, and all its slots with it."""
        self._lent.clear()
        self.stock.clear()
        self.known.clear()
        self._grants = 0

    def put(
        self, tenant: bytes, parent: bytes, depth: int, keys: Sequence[bytes], read: Read
    ) -> int:
        """Puts consecutive finished blocks of one chain; never waits.

        Parameters
        ----------
        tenant
            16 bytes that `clear` can name: `keys.tenant_key`.
        parent
            Key of the block before the first one, or the root.
        depth
            How many blocks come before the first one.
        read
            Called with 0 … n - 1 for the blocks that are written.

        Returns how many of them the store has now or had; the rest is dropped and counted.
        """
        done = 0
        while done < len(keys):
            if keys[done] in self.known:
                done += 1
                continue
            start = done
            while done < len(keys) and keys[done] not in self.known:
                done += 1
            above = keys[start - 1] if start else parent
            run = keys[start:done]
            written = len(self._write(tenant, above, depth + start, run, read, start))
            if start + written < done:
                self._counters["puts_dropped"] += len(keys) - start - written
                return start + written
        return done

    def ship(
        self, tenant: bytes, parent: bytes, depth: int, keys: Sequence[bytes], read: Read
    ) -> list[SlotRef]:
        """Puts blocks and keeps their slots for another node, until `let_go`.

        As `put`, but a block is written even if the store has it. Returns where the leading blocks
        are; fewer than were given, or none, when the rest must travel inline.
        """
        if not self._link.mapped:
            return []
        refs = self._write(tenant, parent, depth, keys, read, hold=True)
        self._lent.update(ref.slot for ref in refs)
        self._keep_until = self._clock() + KEEPING_TIMES * KEEPING_SECONDS
        return refs

    def let_go(self, refs: Sequence[SlotRef]) -> None:
        """The other node has copied these, or will not."""
        ours = tuple(ref.slot for ref in refs if ref.store == self._link.incarnation)
        self._lent.difference_update(ours)
        self._keep_until = self._clock() + KEEPING_TIMES * KEEPING_SECONDS
        if ours:
            self._link.send(Release(ours))

    def _write(
        self,
        tenant: bytes,
        parent: bytes,
        depth: int,
        keys: Sequence[bytes],
        read: Read,
        first: int = 0,
        *,
        hold: bool = False,
    ) -> list[SlotRef]:
        """Commits leading ones of these blocks, as far as there are slots; `read` from `first`."""
        count = min(len(keys), len(self.stock))
        if not count or self._link.attached is None:
            return []
        refs, payloads = [], []
        for index in range(count):
            slot, payload = self.stock.popleft(), read(first + index)
            if not self._link.mapped:
                payloads.append(bytes(payload))
                total = checksum(payloads[-1])
            else:
                total = self._link.copy_in(slot, payload)
            refs.append(SlotRef(self._link.incarnation, slot, total))
        message = Commit(
            tenant,
            parent,
            depth,
            b"".join(keys[:count]),
            tuple(ref.slot for ref in refs),
            tuple(ref.checksum for ref in refs),
            hold,
            not self._link.mapped,
        )
        if not self._link.send(message, payloads):
            return []
        self._counters["puts"] += count
        for key in keys[:count]:
            self.known.add(key)
        return refs
