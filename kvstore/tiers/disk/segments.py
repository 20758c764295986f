"""Accounting of the disk tier: which record lies in which segment, and which segment goes next.

Owns segment numbers, sizes, the key → record map and the choice of what is cleaned; pure: it never
touches a file. Records are appended to one head segment. At the cap a whole segment is cleaned: the
records in it that are worth keeping are appended again, then its file is deleted (Rosenblum and
Ousterhout 1992). One segment's worth of the cap is kept free for that, so the cap is never passed.

What is worth keeping is decided as in memory (`eviction`): records are condemned in that order
until a quarter of some segment need not be kept, and that one is cleaned. A condemned record is
served until its file goes, and a request that asks for it revives it. What has been used once may
not displace what has earned more time than a new block has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvferry.kvstore.tiers.block import Block
from kvferry.kvstore.tiers.disk.record import Record, record_bytes
from kvferry.kvstore.tiers.eviction import EvictionOrder

SEGMENTS_IN_CAP, SEGMENTS_IN_SMALL_CAP = 2048, 256
"""One of them is kept free: the more there are, the less of the cap that costs."""
LEAST_RECORDS = 8
"""Of a segment, unless the cap would have less than `SEGMENTS_IN_SMALL_CAP` of them then."""
MAX_SEGMENT_BYTES = 64 << 20
MOST_KEPT = 0.75
"""Of a segment that is cleaned, written again: more would be exacter, and wear the disk more."""


@dataclass(slots=True)
class Segment:
    """One file. `size` is its length once what is being written to it has landed."""

    number: int
    size: int = 0
    sealed: bool = False
    busy: int = 0
    """Writes into it that have not landed yet."""
    keys: set[bytes] = field(default_factory=set)
    """Of its live records, condemned ones too."""
    condemned: int = 0
    tenants: set[bytes] = field(default_factory=set)
    """Of all records it ever got: a tenant's bytes may be in it even when no live record is."""


class Placed(Enum):
    """Why a block got no place on disk."""

    FULL = "full"
    """A segment must be cleaned first."""
    NOT_WORTH = "not worth"
    """It was seen once and everything on disk is worth more."""


@dataclass(frozen=True, slots=True)
class Cleaning:
    """A segment to be emptied: these records are written again first."""

    segment: int
    moves: tuple[tuple[Record, Record], ...]
    """From, to."""
    dropped: tuple[Record, ...]
    """Given up, though they could still be served; parents before what is chained to them."""
    forced: bool
    """It was marked by `rewrite`."""


class SegmentIndex:
    """The accounting of at most `cap` bytes of records of `payload_bytes` each."""

    def __init__(self, cap: int, fingerprint: bytes, payload_bytes: int) -> None:
        self.cap = cap
        self.span = record_bytes(payload_bytes)
        least = min(LEAST_RECORDS * self.span, cap // SEGMENTS_IN_SMALL_CAP)
        wanted = min(MAX_SEGMENT_BYTES, max(least, cap // SEGMENTS_IN_CAP))
        self.segment_bytes = max(self.span, wanted)
        self.segment_bytes -= self.segment_bytes % self.span
        self.cleaned = 0
        self.rewritten = 0
        """Records."""
        self.dropped = 0
        """Live records that a cleaning gave up."""
        self._fingerprint = fingerprint
        self._payload_bytes = payload_bytes
        self._segments: dict[int, Segment] = {}
        self._records: dict[bytes, Record] = {}
        self._order = EvictionOrder(max(1, cap // self.span))
        """Of the live records that are not condemned."""
        self._condemned: set[bytes] = set()
        self._heads: dict[bool, Segment] = {}
        """Where new records go, and where those go that a cleaning has kept: the old ones together,
        so that what grows cold together can be dropped together."""
        self._next_segment = 1
        self._reserve = self.segment_bytes
        """What is kept free: the largest segment, which may be one that was found."""
        self._cleaning: Cleaning | None = None
        self._forced: list[int] = []

    # -- looking --------------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        return key in self._records

    def __len__(self) -> int:
        return len(self._records)

    def record(self, key: bytes) -> Record:
        return self._records[key]

    @property
    def used(self) -> int:
        """Bytes of all segment files, once nothing is in flight."""
        return sum(segment.size for segment in self._segments.values())

    @property
    def segments(self) -> Collection[int]:
        return self._segments.keys()

    @property
    def usable(self) -> bool:
        """Whether the cap holds a segment beside the one kept free."""
        return self.cap >= 2 * self.segment_bytes

    def touch(self, keys: Sequence[bytes]) -> None:
        """A request asks for this chain, from its root."""
        for key in keys:
            if key in self._condemned:
                self._condemned.remove(key)
                record = self._records[key]
                self._segments[record.segment].condemned -= 1
                self._order.restore(key, record.block.parent, first=record.block.depth == 0)
        self._order.touch(keys)

    def _rank(self, block: Block, found: tuple[int, int] = (0, 0)) -> None:
        self._order.add(block.key, block.parent, first=block.depth == 0, found=found)

    # -- writing --------------------------------------------------------------------------------

    def place(self, block: Block, uses: int, now_s: int) -> Record | Placed:
        """Where this block is to be written. Its bytes count from now on; call `landed` then."""
        if self.used + self.span > self.cap - self._reserve:
            if uses < 2 and not self._has_garbage() and self._order.outlives_new():
                return Placed.NOT_WORTH
            return Placed.FULL
        return self._append(block, uses, now_s, kept=False)

    def _append(self, block: Block, uses: int, now_s: int, *, kept: bool) -> Record:
        head = self._heads.get(kept)
        if head is None or head.sealed or head.size + self.span > self.segment_bytes:
            head = self._open_segment(kept)
        record = Record(
            self._fingerprint,
            block,
            self._payload_bytes,
            head.number,
            head.size,
            now_s,
            uses,
        )
        head.size += self.span
        head.busy += 1
        head.tenants.add(block.tenant)
        return record

    def _open_segment(self, kept: bool) -> Segment:
        if kept in self._heads:
            self._heads[kept].sealed = True
        self._heads[kept] = segment = Segment(self._next_segment)
        self._segments[self._next_segment] = segment
        self._next_segment += 1
        return segment

    def _close_head(self, segment: Segment) -> None:
        """Nothing more is appended to it."""
        segment.sealed = True
        self._heads = {kept: it for kept, it in self._heads.items() if it is not segment}

    def landed(self, record: Record) -> None:
        """The record is in its file: findable from now on."""
        segment = self._segments.get(record.segment)
        if segment is None:
            return
        segment.busy -= 1
        segment.size = max(segment.size, record.offset + record.span)
        self._enter(record)

    def _enter(self, record: Record, found: tuple[int, int] = (0, 0)) -> None:
        key = record.block.key
        old = self._records.get(key)
        if old is None:
            self._records[key] = record
            self._segments[record.segment].keys.add(key)
            self._rank(record.block, found)
        elif (old.segment, old.offset) < (record.segment, record.offset):
            self._relocate(key, record)

    def _relocate(self, key: bytes, record: Record) -> None:
        before, after = self._segments[self._records[key].segment], self._segments[record.segment]
        self._records[key] = record
        before.keys.discard(key)
        after.keys.add(key)
        before.condemned -= key in self._condemned
        after.condemned += key in self._condemned

    def failed(self, records: Iterable[Record], sizes: dict[int, int]) -> int:
        """These records are not in their files, whose lengths are `sizes`; nothing else goes in.

        Returns how many live records the files have lost besides: none, if nobody else cuts them.
        """
        lost = 0
        for record in records:
            segment = self._segments.get(record.segment)
            if segment is not None:
                segment.busy -= 1
                segment.sealed = True
                segment.size = sizes.get(segment.number, segment.size)
                lost += self._discard_behind(segment, segment.size)
                self._drop_if_empty(segment)
        return lost

    def _discard_behind(self, segment: Segment, size: int) -> int:
        lost = [key for key in segment.keys if self._records[key].offset + self.span > size]
        for key in lost:
            self.discard(key)
        return len(lost)

    def _drop_if_empty(self, segment: Segment) -> None:
        """A file of no bytes is not kept."""
        if segment.size == 0 and segment.busy == 0 and not segment.keys:
            del self._segments[segment.number]
            self._close_head(segment)

    # -- removing -------------------------------------------------------------------------------

    def discard(self, key: bytes) -> None:
        """The record is not to be read again; its bytes stay until its segment is cleaned."""
        segment = self._segments[self._records.pop(key).segment]
        segment.keys.discard(key)
        if key in self._condemned:
            self._condemned.remove(key)
            segment.condemned -= 1
        else:
            self._order.remove(key)

    def truncated(self, number: int, size: int) -> int:
        """A file is shorter than it was (0: gone). Returns how many live records that cost."""
        segment = self._segments.get(number)
        if segment is None or segment.busy or size >= segment.size:
            return 0
        lost = self._discard_behind(segment, size)
        segment.size, segment.sealed = size, True
        if size == 0 and (self._cleaning is None or self._cleaning.segment != number):
            del self._segments[number]
            self._close_head(segment)
        return lost

    def clear(self, tenant: bytes) -> int:
        """Forgets a tenant's records and marks every segment with bytes of it for rewriting."""
        keys = [key for key, it in self._records.items() if it.block.tenant == tenant]
        for key in keys:
            self.discard(key)
        for segment in self._segments.values():
            if tenant in segment.tenants:
                self.rewrite(segment.number)
        return len(keys)

    def rewrite(self, number: int) -> None:
        """Marks a segment: it is cleaned as soon as that can be, and keeps all its live records."""
        segment = self._segments.get(number)
        if segment is not None and number not in self._forced:
            self._forced.append(number)
            segment.sealed = True

    def clear_all(self) -> int:
        """Forgets every record; all segments are to be deleted (see `segments`)."""
        count = len(self._records)
        for key in list(self._records):
            self.discard(key)
        self._segments.clear()
        self._heads.clear()
        self._cleaning = None
        self._forced.clear()
        return count

    # -- cleaning -------------------------------------------------------------------------------

    @property
    def wants_cleaning(self) -> bool:
        """Whether segments wait for being rewritten because a tenant was cleared."""
        return bool(self._forced) and self._cleaning is None

    @property
    def cleaning(self) -> Cleaning | None:
        """The one under way."""
        return self._cleaning

    def clean(self, now_s: int) -> Cleaning | None:
        """Chooses a segment to empty. None: one is under way, or none can be."""
        if self._cleaning is not None:
            return None
        forced = self._forced_segment()
        segment = forced or self._emptiest()
        if segment is None:
            return None
        self._close_head(segment)
        kept = [key for key in segment.keys if forced or key not in self._condemned]
        kept.sort(key=lambda key: self._records[key].offset)
        room = max(0, (self.cap - self.used) // self.span)
        gone = self._drop(segment.keys - set(kept[:room]))
        moves = []
        for record in [self._records[key] for key in kept[:room]]:
            uses = max(1, self._order.uses(record.block.key))
            moves.append((record, self._append(record.block, uses, now_s, kept=True)))
        self._cleaning = Cleaning(segment.number, tuple(moves), gone, forced is not None)
        return self._cleaning

    def _drop(self, keys: Iterable[bytes]) -> tuple[Record, ...]:
        gone = sorted((self._records[key] for key in keys), key=lambda it: it.block.depth)
        for record in gone:
            self.discard(record.block.key)
            self.dropped += 1
        return tuple(gone)

    def emptied(self, number: int) -> tuple[Record, ...] | None:
        """Every move out of the segment has ended, well or not: its file may be deleted.

        Returns what is given up with it, parents before what is chained to them: records that did
        not come to their new place. None: this segment is not being cleaned any more.
        """
        segment = self._segments.get(number)
        if segment is None or self._cleaning is None or self._cleaning.segment != number:
            return None
        return self._drop(set(segment.keys))

    def moved(self, source: Record, target: Record) -> None:
        """A record of the segment being cleaned is in its new place."""
        key = source.block.key
        segment = self._segments.get(target.segment)
        if segment is not None:
            segment.busy -= 1
            segment.size = max(segment.size, target.offset + target.span)
            if self._records.get(key) is source:
                self._relocate(key, target)
                self.rewritten += 1

    def deleted(self, number: int) -> None:
        """The file of the segment being cleaned is gone."""
        segment = self._segments.get(number)
        if segment is not None:
            assert not segment.keys, "a file is gone that still had records to serve"
            del self._segments[number]
            largest = max((it.size for it in self._segments.values()), default=0)
            self._reserve = max(self.segment_bytes, largest)
        if self._cleaning is not None and self._cleaning.segment == number:
            self._cleaning = None
            self.cleaned += 1

    def keep(self, number: int, size: int) -> None:
        """A file of `size` bytes could not be deleted: it still counts, and is tried again."""
        if self._cleaning is not None and self._cleaning.segment == number:
            self._cleaning = None
        if number not in self._segments and size:  # all was forgotten, but this file is there
            self._segments[number] = Segment(number, size, sealed=True)
        self.rewrite(number)

    def _forced_segment(self) -> Segment | None:
        while self._forced:
            segment = self._segments.get(self._forced[0])
            if segment is None:
                self._forced.pop(0)
            elif segment.busy:
                return None
            else:
                self._forced.pop(0)
                return segment
        return None

    def _emptiest(self) -> Segment | None:
        """Condemns records until the segment with the least to keep is half empty; that one."""
        candidates = {it.number: it for it in self._segments.values() if it.sealed and not it.busy}
        if not candidates:
            candidates = {it.number: it for it in self._segments.values() if not it.busy}
        best = min(candidates.values(), key=self._share_kept, default=None)
        while best is not None and self._share_kept(best) > MOST_KEPT:
            key = self._order.evict(lambda key: True)
            if key is None:
                break
            self._condemned.add(key)
            segment = self._segments[self._records[key].segment]
            segment.condemned += 1
            if segment.number in candidates:
                best = min(best, segment, key=self._share_kept)
        return best

    def _share_kept(self, segment: Segment) -> float:
        return (len(segment.keys) - segment.condemned) * self.span / max(1, segment.size)

    def _has_garbage(self) -> bool:
        """Whether there is something that nobody would miss."""
        in_flight = sum(segment.busy for segment in self._segments.values())
        worth = len(self._records) - len(self._condemned) + in_flight
        return self.used >= (worth + 1) * self.span

    # -- recovery -------------------------------------------------------------------------------

    def found(self, number: int, size: int) -> None:
        """A file is there at the start; what is in it is not known yet."""
        self._segments[number] = Segment(number, size, sealed=True, busy=1)
        self._reserve = max(self._reserve, size)
        self._next_segment = max(self._next_segment, number + 1)

    def recovered(self, number: int, size: int, records: Iterable[Record]) -> int:
        """What a scan of the file has found. Returns how many records can be served."""
        segment = self._segments.get(number)
        if segment is None:
            return 0
        segment.busy -= 1
        segment.size = size
        count = 0
        for record in records:
            segment.tenants.add(record.block.tenant)
            ours = record.fingerprint == self._fingerprint
            if ours and record.payload_bytes == self._payload_bytes:
                # What was written before this start is older than everything touched since.
                before = record.segment - self._next_segment - 1
                self._enter(record, (before, max(1, record.uses)))
                count += 1
        self._drop_if_empty(segment)
        return count

    # -- state ----------------------------------------------------------------------------------

    def ledger(self) -> dict[str, int]:
        cleaning = self._cleaning
        return {
            "cap_bytes": self.cap,
            "used_bytes": self.used,
            "live_bytes": len(self._records) * self.span,
            "records": len(self._records),
            "segments": len(self._segments),
            "to_rewrite": len(self._forced) + (cleaning is not None and cleaning.forced),
            "in_flight": sum(segment.busy for segment in self._segments.values()),
        }

    def check(self) -> None:
        """Proves the invariant: the cap holds, and each live record lies within its segment."""
        assert self.used <= self.cap, f"{self.used} bytes on disk exceed the cap of {self.cap}"
        placed = {}
        for segment in self._segments.values():
            assert segment.busy >= 0, "more writes have landed than were started"
            assert segment.condemned == len(segment.keys & self._condemned), "condemned wrong"
            for key in segment.keys:
                placed[key] = segment.number
                record = self._records[key]
                assert record.segment == segment.number, "a record is in another segment"
                assert record.offset + self.span <= segment.size, "a record behind the end"
        assert placed.keys() == self._records.keys(), "a record is in no segment"
        assert set(self._order.entries) == self._records.keys() - self._condemned
        self._order.check()
