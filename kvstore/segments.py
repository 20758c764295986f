"""Accounting of the disk tier: which record lies in which segment, and which segment goes next.

Owns segment numbers, sizes, the key → record map and the choice of what is cleaned; pure: it never
touches a file. Records are appended to one head segment. At the cap a whole segment is cleaned: the
records in it that are worth keeping are appended again, then its file is deleted (Rosenblum and
Ousterhout 1992). One segment's worth of the cap is kept free for that, so the cap is never passed.

Worth is the same score as in memory: the last touch, and credit for each use after the first. What
has been used once may displace only dead records and records that have outlived their credit.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from kvferry.kvstore.arena import Block
from kvferry.kvstore.record import Record, record_bytes
from kvferry.kvstore.retention import CREDITED_USES

SEGMENTS_IN_CAP = 64
MAX_SEGMENT_BYTES = 64 << 20
LOOKED_AT = 32
"""Records of a segment that are looked at to judge it."""
COLD_SHARE = 0.1
"""The part of all live records that a cleaning may drop: those with the lowest scores."""
SAMPLE = 256
_LOWEST = -(1 << 62)
"""No score is as low: what was found at the start has scores below zero."""


@dataclass(slots=True)
class _Entry:
    record: Record
    touched: int
    uses: int


@dataclass(slots=True)
class Segment:
    """One file. `size` is its length once what is being written to it has landed."""

    number: int
    size: int = 0
    sealed: bool = False
    busy: int = 0
    """Writes into it that have not landed yet."""
    keys: set[bytes] = field(default_factory=set)
    """Of its live records."""
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


class SegmentIndex:
    """The accounting of at most `cap` bytes of records of `payload_bytes` each."""

    def __init__(self, cap: int, fingerprint: bytes, payload_bytes: int, seed: int = 0) -> None:
        self.cap = cap
        self.span = record_bytes(payload_bytes)
        self.segment_bytes = max(self.span, min(MAX_SEGMENT_BYTES, cap // SEGMENTS_IN_CAP))
        self.segment_bytes -= self.segment_bytes % self.span
        self.cleaned = 0
        self.rewritten = 0
        """Records."""
        self.dropped = 0
        """Live records that a cleaning gave up."""
        self._fingerprint = fingerprint
        self._payload_bytes = payload_bytes
        self._segments: dict[int, Segment] = {}
        self._entries: dict[bytes, _Entry] = {}
        self._heads: dict[bool, Segment] = {}
        """Where new records go, and where those go that a cleaning has kept: the old ones together,
        so that what grows cold together can be dropped together."""
        self._next_segment = 1
        self._cleaning: Cleaning | None = None
        self._forced: list[int] = []
        self._clock = 0
        self._random = random.Random(seed)
        self._credit = max(1, cap // self.span)

    # -- looking --------------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def record(self, key: bytes) -> Record:
        return self._entries[key].record

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
        for key in reversed(keys):
            self._clock += 1
            entry = self._entries.get(key)
            if entry is not None:
                entry.touched = self._clock
                entry.uses += 1

    def _score(self, entry: _Entry) -> int:
        return entry.touched + self._credit * min(entry.uses - 1, CREDITED_USES)

    # -- writing --------------------------------------------------------------------------------

    def place(self, block: Block, uses: int, now_s: int) -> Record | Placed:
        """Where this block is to be written. Its bytes count from now on; call `landed` then."""
        if self.used + self.span > self.cap - self.segment_bytes:
            if uses < 2 and not self._has_cold():
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
        above = self._entries.get(record.block.parent)
        if above is None:
            self._clock += 1
        # A little older than its parent: the end of a chain goes before its beginning.
        touched = self._clock if above is None else above.touched - 1
        self._enter(record, touched, record.uses)

    def _enter(self, record: Record, touched: int, uses: int) -> None:
        old = self._entries.get(record.block.key)
        if old is not None:
            here = (record.segment, record.offset)
            if (old.record.segment, old.record.offset) > here:
                return
            self._segments[old.record.segment].keys.discard(record.block.key)
            touched, uses = max(touched, old.touched), max(uses, old.uses)
        self._entries[record.block.key] = _Entry(record, touched, uses)
        self._segments[record.segment].keys.add(record.block.key)

    def failed(self, records: Iterable[Record], sizes: dict[int, int]) -> None:
        """These records are not in their files, whose lengths are `sizes`; nothing else goes in."""
        for record in records:
            segment = self._segments.get(record.segment)
            if segment is not None:
                segment.busy -= 1
                segment.sealed = True
                segment.size = sizes.get(segment.number, segment.size)
                self._drop_if_empty(segment)

    def _drop_if_empty(self, segment: Segment) -> None:
        """A file of no bytes is not kept."""
        if segment.size == 0 and segment.busy == 0 and not segment.keys:
            del self._segments[segment.number]
            self._close_head(segment)

    # -- removing -------------------------------------------------------------------------------

    def discard(self, key: bytes) -> None:
        """The record is not to be read again; its bytes stay until its segment is cleaned."""
        entry = self._entries.pop(key)
        self._segments[entry.record.segment].keys.discard(key)

    def truncated(self, number: int, size: int) -> int:
        """A file is shorter than it was (0: gone). Returns how many live records that cost."""
        segment = self._segments.get(number)
        if segment is None or segment.busy or size >= segment.size:
            return 0
        lost = [key for key in segment.keys if self._entries[key].record.offset + self.span > size]
        for key in lost:
            self.discard(key)
        segment.size, segment.sealed = size, True
        if size == 0 and (self._cleaning is None or self._cleaning.segment != number):
            del self._segments[number]
            self._close_head(segment)
        return len(lost)

    def clear(self, tenant: bytes) -> int:
        """Forgets a tenant's records and marks every segment with bytes of it for rewriting."""
        keys = [key for key, entry in self._entries.items() if entry.record.block.tenant == tenant]
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
        count = len(self._entries)
        self._entries.clear()
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
        segment = forced or self._coldest()
        if segment is None:
            return None
        cutoff = _LOWEST if forced else self._cutoff()
        worth = [e for key in segment.keys if self._score(e := self._entries[key]) > cutoff]
        worth.sort(key=self._score, reverse=True)
        room = (self.cap - self.used) // self.span
        if not forced:
            room = min(room, self.segment_bytes // self.span // 2)
        self._close_head(segment)
        kept = sorted(worth[: max(0, room)], key=lambda entry: entry.record.offset)
        moves = tuple(
            (entry.record, self._append(entry.record.block, entry.uses, now_s, kept=True))
            for entry in kept
        )
        staying = {entry.record.block.key for entry in kept}
        for key in segment.keys - staying:
            del self._entries[key]
            self.dropped += 1
        segment.keys &= staying
        self._cleaning = Cleaning(segment.number, moves)
        return self._cleaning

    def moved(self, source: Record, target: Record) -> None:
        """A record of the segment being cleaned is in its new place."""
        entry = self._entries.get(source.block.key)
        segment = self._segments.get(target.segment)
        if segment is not None:
            segment.busy -= 1
            segment.size = max(segment.size, target.offset + target.span)
        if entry is None or entry.record is not source or segment is None:
            return
        self._segments[source.segment].keys.discard(source.block.key)
        entry.record = target
        segment.keys.add(source.block.key)
        self.rewritten += 1

    def deleted(self, number: int) -> None:
        """The file of the segment being cleaned is gone."""
        segment = self._segments.pop(number, None)
        if self._cleaning is not None and self._cleaning.segment == number:
            self._cleaning = None
            self.cleaned += 1
        if segment is not None:
            for key in segment.keys:
                del self._entries[key]

    def keep(self, number: int) -> None:
        """The file of the segment being cleaned could not be deleted: it still counts."""
        if self._cleaning is not None and self._cleaning.segment == number:
            self._cleaning = None

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

    def _cleanable(self) -> list[Segment]:
        return [
            segment for segment in self._segments.values() if segment.sealed and not segment.busy
        ]

    def _coldest(self) -> Segment | None:
        candidates = self._cleanable()
        if not candidates:
            candidates = [it for it in self._segments.values() if not it.busy]
        cutoff = self._cutoff()
        return min(candidates, key=lambda it: self._coldness(it, cutoff), default=None)

    def _coldness(self, segment: Segment, cutoff: int) -> tuple[float, float]:
        """Sort key, coldest first: the share that must be kept, then how recent that is."""
        keys = list(islice(segment.keys, LOOKED_AT))
        scores = [self._score(self._entries[key]) for key in keys]
        hot = sum(score > cutoff for score in scores) / max(1, len(keys))
        live = len(segment.keys) * self.span / max(1, segment.size)
        return hot * live, sum(scores) / max(1, len(keys))

    def _cutoff(self) -> int:
        """The score below which a record is among the coldest, from a sample."""
        if not self._entries:
            return 0
        entries = list(self._entries.values())
        if len(entries) > SAMPLE:
            entries = self._random.sample(entries, SAMPLE)
        scores = sorted(self._score(entry) for entry in entries)
        return scores[int(COLD_SHARE * (len(scores) - 1))]

    def _has_cold(self) -> bool:
        """Whether something on disk may give way to a block that was used once."""
        in_flight = sum(segment.busy for segment in self._segments.values())
        if self.used >= (len(self._entries) + in_flight + 1) * self.span:
            return True  # something dead
        oldest = next(iter(self._segments.values()), None)
        if oldest is None:
            return True
        return any(
            entry.uses < 2 or self._score(entry) < self._clock
            for entry in map(self._entries.__getitem__, oldest.keys)
        )

    # -- recovery -------------------------------------------------------------------------------

    def found(self, number: int, size: int) -> None:
        """A file is there at the start; what is in it is not known yet."""
        self._segments[number] = Segment(number, size, sealed=True, busy=1)
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
                self._enter(record, record.segment - self._next_segment, record.uses)
                count += 1
        self._drop_if_empty(segment)
        return count

    # -- state ----------------------------------------------------------------------------------

    def ledger(self) -> dict[str, int]:
        return {
            "cap_bytes": self.cap,
            "used_bytes": self.used,
            "live_bytes": len(self._entries) * self.span,
            "records": len(self._entries),
            "segments": len(self._segments),
            "to_rewrite": len(self._forced),
            "in_flight": sum(segment.busy for segment in self._segments.values()),
        }

    def check(self) -> None:
        """Proves the invariant: the cap holds, and each live record lies within its segment."""
        assert self.used <= self.cap, f"{self.used} bytes on disk exceed the cap of {self.cap}"
        placed = {}
        for segment in self._segments.values():
            assert segment.busy >= 0, "more writes have landed than were started"
            for key in segment.keys:
                placed[key] = segment.number
                record = self._entries[key].record
                assert record.segment == segment.number, "a record is in another segment"
                assert record.offset + self.span <= segment.size, "a record behind the end"
        assert placed.keys() == self._entries.keys(), "a record is in no segment"
