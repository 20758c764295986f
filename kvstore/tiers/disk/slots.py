"""Accounting of the disk tier: which record lies in which slot, and which record goes next.

Owns file numbers and lengths, the key → record map and the choice of what is overwritten; pure: it
never touches a file. All records of one fingerprint have one size, so a file is a row of slots of
that size, and each slot is in exactly one state:

    free ──place──► writing ──landed──► live ──discard──► free
                    │      ▲             │
                    failed └── evicted ──┤
                    ▼                    │
    free ◄─erased── soiled ◄───clear─────┘

Files grow by a slot at a time up to the cap. At the cap a block is written over the one that goes
next in the order of `eviction`: a block is written once in its life, and no room is kept free.

A free slot may still hold the bytes of a tenant, so it says whose. A soiled one holds what nobody
may find again, and is erased before anything else happens to it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvferry.kvstore.tiers.block import Block
from kvferry.kvstore.tiers.disk.record import Record, Slot, record_bytes
from kvferry.kvstore.tiers.eviction import EvictionOrder

MAX_FILE_BYTES = 64 << 20
FEWEST_FILES, MOST_FILES = 16, 1024
"""In the cap: a smaller cap at the next start costs whole files, and each has to be opened."""
FOUND_SINCE = 1 << 60
"""What was written before this start is older than everything touched since, in the order in which
it was written."""
_ANYBODY, _NOBODY = b"?", b""
"""In place of a tenant: nobody knows whose bytes there are, and there are none."""


class FileState(Enum):
    """What is known of a file."""

    UNREAD = "unread"
    """It was there at the start and is being scanned."""
    OPEN = "open"
    """Its slots are ours."""
    FOREIGN = "foreign"
    """Its records have another size, or cannot be read: it goes as a whole when room is needed."""
    GOING = "going"
    """It is to be deleted, and counts until it is gone."""


@dataclass(slots=True)
class SlotFile:
    """One file. `size` is its length once what is being written to it has landed."""

    state: FileState
    size: int = 0
    least_size: int = 0
    """Its length is no less unless somebody else has cut it."""
    tenants: set[bytes] = field(default_factory=set)
    """Of the records in it, if it is foreign."""


@dataclass(frozen=True, slots=True)
class Erasure:
    """A slot whose bytes are to go, or a whole file."""

    file: int
    offset: int | None = None


class SlotIndex:
    """The accounting of at most `cap` bytes of records of `payload_bytes` each."""

    def __init__(self, cap: int, fingerprint: bytes, payload_bytes: int) -> None:
        self.cap = cap
        self.span = record_bytes(payload_bytes)
        wanted = max(min(MAX_FILE_BYTES, cap // FEWEST_FILES), cap // MOST_FILES)
        self.file_bytes = max(self.span, wanted - wanted % self.span)
        self.evictions = 0
        self._fingerprint = fingerprint
        self._payload_bytes = payload_bytes
        self._files: dict[int, SlotFile] = {}
        self._last_file = 0
        self._next_sequence = 1
        self._records: dict[bytes, Record] = {}
        self._order = EvictionOrder(max(1, cap // self.span))
        self._free: dict[Slot, bytes] = {}
        """And whose bytes may be in there."""
        self._writing: set[Slot] = set()
        self._soiled: dict[Slot, None] = {}
        """Those that are being erased too."""
        self._erasing: set[Erasure] = set()
        self._awaited: set[Slot] = set()
        """Written to when a tenant was cleared: what lay there before may have been that one's."""

    # -- looking --------------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        return key in self._records

    def __len__(self) -> int:
        return len(self._records)

    def record(self, key: bytes) -> Record:
        return self._records[key]

    @property
    def used(self) -> int:
        """Bytes of all files, once nothing is in flight."""
        return sum(file.size for file in self._files.values())

    @property
    def held(self) -> int:
        """Of these, bytes that are not free to be written to."""
        return self.used - len(self._free) * self.span

    @property
    def usable(self) -> bool:
        """Whether the cap holds anything worth mentioning."""
        return self.cap >= 2 * self.span

    def touch(self, keys: Sequence[bytes]) -> None:
        """A request asks for this chain, from its root."""
        self._order.touch(keys)

    # -- writing --------------------------------------------------------------------------------

    def place(self, block: Block, uses: int) -> Record | None:
        """Where this block is to be written. Call `landed` or `failed` when that is over.

        None: files must be deleted first; until then nothing may go.
        """
        slot = self._free_slot() or self._new_slot()
        if slot is None and self._next_foreign() is None:
            slot = self._evict()
        if slot is None:
            return None
        self._writing.add(slot)
        sequence = self._next_sequence
        self._next_sequence += 1
        return Record(self._fingerprint, block, self._payload_bytes, *slot, sequence, uses)

    def least_size(self, record: Record) -> int:
        """How long the record's file is at least; 0: it may have to be made."""
        return self._files[record.file].least_size

    def _free_slot(self) -> Slot | None:
        return self._free.popitem()[0] if self._free else None

    def _new_slot(self) -> Slot | None:
        """At the end of the last file, or in a new one."""
        number = self._last_file
        file = self._files.get(number)
        if file is None or not self._may_grow(file):
            number, file = self._last_file + 1, SlotFile(FileState.OPEN)
        if self.used - file.size + self._end(file) > self.cap:
            return None
        self._files[number], self._last_file = file, number
        file.size = self._end(file)
        return number, file.size - self.span

    def _may_grow(self, file: SlotFile) -> bool:
        return file.state is FileState.OPEN and self._end(file) <= self.file_bytes

    def _end(self, file: SlotFile) -> int:
        """Its length with a slot more. What is less than a slot at its end is written over."""
        return (file.size // self.span + 1) * self.span

    def _evict(self) -> Slot | None:
        key = self._order.evict(lambda key: True)
        if key is None:
            return None
        self.evictions += 1
        return self._records.pop(key).slot

    def landed(self, record: Record) -> None:
        """The record is in its file: findable from now on."""
        self._ended(record)
        file = self._files.get(record.file)
        if file is None or file.state is not FileState.OPEN:
            return
        file.least_size = max(file.least_size, record.offset + self.span)
        self._enter(record)

    def failed(self, record: Record, file_bytes: int) -> int:
        """The record is not in its file, which is so long now. What lay there is not worth keeping.

        Returns how many live records the file has lost besides: none, if nobody else cuts it.
        """
        self._ended(record)
        file = self._files.get(record.file)
        if file is None or file.state is not FileState.OPEN:
            return 0
        self._soiled[record.slot] = None
        return self.shortened(record.file, file_bytes)

    def _ended(self, record: Record) -> None:
        self._writing.discard(record.slot)
        self._awaited.discard(record.slot)

    def _enter(self, record: Record, found: tuple[int, int] = (0, 0)) -> None:
        block = record.block
        old = self._records.get(block.key)
        if old is not None and old.sequence > record.sequence:
            self._free[record.slot] = block.tenant
            return
        if old is not None:
            self.discard(block.key)
        self._records[block.key] = record
        self._order.add(block.key, block.parent, first=block.depth == 0, found=found)

    # -- removing -------------------------------------------------------------------------------

    def discard(self, key: bytes) -> None:
        """The record is not to be read again; its slot is free, and its bytes are still there."""
        record = self._records.pop(key)
        self._order.remove(key)
        self._free[record.slot] = record.block.tenant

    def shortened(self, number: int, size: int) -> int:
        """A file is so long (0: gone). Returns how many live records that costs."""
        file = self._files.get(number)
        if file is None or file.state is not FileState.OPEN:
            return 0
        lost = self._discard_behind(number, size) if size < file.least_size else 0
        file.least_size = min(file.least_size, size)
        ends = [offset + self.span for at, offset in self._writing if at == number]
        file.size = min(file.size, max([size, *ends]))
        for slots in (self._free, self._soiled):
            for slot in [it for it in slots if self._is_behind(it, number, file.size)]:
                del slots[slot]
        if not file.size:
            del self._files[number]
        return lost

    def _discard_behind(self, number: int, size: int) -> int:
        records = self._records.values()
        lost = [it.block.key for it in records if self._is_behind(it.slot, number, size)]
        for key in lost:
            self.discard(key)
        return len(lost)

    def _is_behind(self, slot: Slot, number: int, size: int) -> bool:
        return slot[0] == number and slot[1] + self.span > size

    def clear(self, tenant: bytes) -> int:
        """Forgets a tenant's records; every slot that may hold bytes of it is to be erased."""
        keys = [key for key, it in self._records.items() if it.block.tenant == tenant]
        for key in keys:
            self.discard(key)
        theirs = (tenant, _ANYBODY)
        for slot in [slot for slot, owner in self._free.items() if owner in theirs]:
            del self._free[slot]
            self._soiled[slot] = None
        for number, file in self._files.items():
            if file.state is FileState.FOREIGN and not file.tenants.isdisjoint(theirs):
                self.give_up(number)
        self._awaited |= self._writing
        return len(keys)

    def soil(self, key: bytes) -> None:
        """The record is not to be read again, and not to be found again either."""
        slot = self._records[key].slot
        self.discard(key)
        del self._free[slot]
        self._soiled[slot] = None

    def clear_all(self) -> int:
        """Forgets every record; all files are to be deleted."""
        count = len(self._records)
        for key in list(self._records):
            self.discard(key)
        self._free.clear()
        self._soiled.clear()
        for file in self._files.values():
            file.state = FileState.GOING
        return count

    def give_up(self, number: int) -> None:
        """A file is to be deleted, with all that is in it."""
        for key in [key for key, it in self._records.items() if it.file == number]:
            self.discard(key)
        for slots in (self._free, self._soiled):
            for slot in [it for it in slots if it[0] == number]:
                del slots[slot]
        self._files[number].state = FileState.GOING

    def make_room(self) -> None:
        """Gives up a file of records that cannot be served, if there is one and none is going."""
        number = self._next_foreign()
        if number is not None and not self._going():
            self.give_up(number)

    def _next_foreign(self) -> int | None:
        files = self._files.items()
        return next((number for number, it in files if it.state is FileState.FOREIGN), None)

    def _going(self) -> Collection[int]:
        return [number for number, it in self._files.items() if it.state is FileState.GOING]

    # -- erasing --------------------------------------------------------------------------------

    @property
    def to_erase(self) -> int:
        """Slots and files that hold what must not be found again."""
        return len(self._soiled) + len(self._going()) + len(self._awaited)

    def erasures(self, most: int) -> list[Erasure]:
        """Up to so many that can begin: call `erased` or `not_erased` for each when it is over."""
        wanted = [Erasure(number) for number in self._going()]
        wanted += [Erasure(*slot) for slot in self._soiled]
        begun = [it for it in wanted if it not in self._erasing][:most]
        self._erasing.update(begun)
        return begun

    def erased(self, erasure: Erasure) -> None:
        """The bytes are gone."""
        self._erasing.discard(erasure)
        if erasure.offset is None:
            self._files.pop(erasure.file, None)
            return
        slot = (erasure.file, erasure.offset)
        if slot in self._soiled:
            del self._soiled[slot]
            self._free[slot] = _NOBODY

    def not_erased(self, erasure: Erasure, file_bytes: int) -> None:
        """The bytes are still there, in a file of `file_bytes`: they count and are tried again."""
        self._erasing.discard(erasure)
        file = self._files.get(erasure.file)
        if erasure.offset is None and file is not None:
            file.size = file.least_size = file_bytes

    # -- recovery -------------------------------------------------------------------------------

    def found(self, number: int, size: int) -> None:
        """A file is there at the start; what is in it is not known yet."""
        self._files[number] = SlotFile(FileState.UNREAD, size)
        self._last_file = max(self._last_file, number)

    def recovered(self, number: int, size: int, records: Sequence[Record]) -> int:
        """What a scan of the file has found: its length now, and records of one size.

        Returns how many records can be served.
        """
        file = self._files.get(number)
        if file is None or file.state is not FileState.UNREAD:
            return 0
        file.size = file.least_size = size
        if not records:
            self.give_up(number)
            return 0
        if records[0].span != self.span:
            file.state = FileState.FOREIGN
            file.tenants = {record.block.tenant for record in records}
            if len(records) < size // records[0].span:
                file.tenants.add(_ANYBODY)
            return 0
        file.state = FileState.OPEN
        self._free |= {(number, at): _ANYBODY for at in self._offsets(size)}
        return sum(self._recover(record) for record in records)

    def _recover(self, record: Record) -> bool:
        self._next_sequence = max(self._next_sequence, record.sequence + 1)
        ours = record.fingerprint == self._fingerprint
        if not ours or record.payload_bytes != self._payload_bytes:
            self._free[record.slot] = record.block.tenant
            return False
        del self._free[record.slot]
        self._enter(record, (record.sequence - FOUND_SINCE, max(1, record.uses)))
        return True

    def unreadable(self, number: int) -> None:
        """A scan of the file has failed: what is in it is not known, and counts."""
        file = self._files.get(number)
        if file is not None and file.state is FileState.UNREAD:
            file.state, file.tenants = FileState.FOREIGN, {_ANYBODY}

    # -- state ----------------------------------------------------------------------------------

    def ledger(self) -> dict[str, int]:
        return {
            "cap_bytes": self.cap,
            "used_bytes": self.used,
            "live_bytes": len(self._records) * self.span,
            "records": len(self._records),
            "files": len(self._files),
            "free": len(self._free),
            "to_erase": self.to_erase,
            "in_flight": len(self._writing),
        }

    def check(self) -> None:
        """Proves the invariant: the cap holds, and each slot of ours is in one state."""
        assert self.used <= self.cap, f"{self.used} bytes on disk exceed the cap of {self.cap}"
        open_files = {n: it.size for n, it in self._files.items() if it.state is FileState.OPEN}
        slots = [(n, at) for n, size in open_files.items() for at in self._offsets(size)]
        placed = [record.slot for record in self._records.values()]
        placed += [*self._free, *self._soiled]
        placed += [slot for slot in self._writing if slot[0] in open_files]
        assert sorted(slots) == sorted(placed), "a slot is in no state or in two"
        for file in self._files.values():
            assert file.least_size <= file.size, "a file is longer than it will be"
        assert self._awaited <= self._writing, "a write is awaited that has ended"
        assert set(self._order.entries) == self._records.keys(), "the eviction order disagrees"
        self._order.check()

    def _offsets(self, size: int) -> range:
        return range(0, size - self.span + 1, self.span)
