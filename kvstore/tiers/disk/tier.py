"""What the disk tier does next: write-behind, erasing, recovery, and getting on without a disk.

Joins the index of slots, the arena that blocks are written from, and the thread that does the I/O.
It decides and accounts; it makes no system call but the listing of the directory at the start.

Blocks of the arena are written as they come, some at a time, whenever reads leave room. After an
error, which is counted, the tier rests for a growing while; blocks stay in the arena meanwhile and
are tried again. When blocks come faster than they can be written the newest are shed. Nothing is
written before all files of an earlier store have been read.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable

from kvferry.kvstore.tiers.disk.record import Record
from kvferry.kvstore.tiers.disk.slots import SlotIndex
from kvferry.kvstore.tiers.disk.worker import (
    DiskJob,
    EraseJob,
    ProbeJob,
    ReadJob,
    ScanJob,
    WriteJob,
)
from kvferry.kvstore.tiers.host import FOREVER, HostTier, Lease

log = logging.getLogger(__name__)

BATCH_BYTES = 4 << 20
"""Of the writes that are asked for at once."""
MOST_ERASURES = 256
"""Of those that are asked for at once."""
STARVED_SECONDS = 0.05
"""A batch is written this long after the last one even while reads wait."""
FIRST_REST_S, FAILING_REST_S, LONGEST_REST_S = 0.5, 2.0, 30.0
PROBE_SECONDS = 2.0
_OWNER = "disk"


class DiskTier:
    """The disk tier of one arena. `submit` hands a job to whoever does the I/O."""

    def __init__(
        self,
        index: SlotIndex,
        host: HostTier,
        view: Callable[[int], memoryview],
        submit: Callable[[DiskJob], None],
    ) -> None:
        self.index = index
        self.counters: Counter[str] = Counter()
        self.recovering = 0
        """Files whose records are not known yet."""
        self._host = host
        self._view = view
        self._submit = submit
        self._dirty: OrderedDict[bytes, None] = OrderedDict()
        host.is_unwritten = self._dirty.__contains__
        host.is_on_disk = index.__contains__
        self._writing: dict[bytes, tuple[Lease, Record]] = {}
        """Blocks being written, by key."""
        self._doomed: set[bytes] = set()
        """Blocks being written that were cleared meanwhile."""
        self._cleared: set[bytes] = set()
        """Tenants that were cleared while files of theirs may not have been read yet."""
        self._reads = 0
        self._writes = 0
        """Erasures too."""
        self._jobs = 0
        """Everything submitted and not done."""
        self._rest = FIRST_REST_S
        self._batch = BATCH_BYTES
        """How many records to write at once, at most."""
        self._resting_until = 0.0
        self._last_write = 0.0
        self._probe_at = 0.0

    # -- recovery -------------------------------------------------------------------------------

    def recover(self, files: dict[int, int], delete: Callable[[int], None]) -> None:
        """Starts from the files that are there. Of those beyond the cap the last ones go first."""
        total = sum(files.values())
        for number, size in reversed(files.items()):
            if total > self.index.cap:
                delete(number)
                total -= size
                self.counters["disk_files_over_cap"] += 1
                continue
            self.index.found(number, size)
            self.recovering += 1
            self._give(ScanJob(number))

    # -- blocks ---------------------------------------------------------------------------------

    @property
    def unwritten(self) -> int:
        """Blocks that wait to be written or are being written."""
        return len(self._dirty) + len(self._writing)

    def write_behind(self, key: bytes) -> None:
        """A resident block may be written."""
        if key in self.index or key in self._dirty or key in self._writing:
            return
        if not self.index.usable:
            return
        uses = self._host.order.uses(key)
        if uses < 2 and len(self._dirty) >= max(1, self._host.num_slots // 2):
            self.counters["disk_shed"] += 1
            return
        self._dirty[key] = None

    def evicted(self, key: bytes) -> None:
        """The host tier has given this block up."""
        if key in self._dirty:
            del self._dirty[key]
            self.counters["disk_evicted_unwritten"] += 1

    def read(self, key: bytes, slot: int) -> ReadJob:
        """Starts reading a block into a slot."""
        job = ReadJob(self.index.record(key), self._view(slot))
        self._reads += 1
        self._give(job)
        return job

    def discard(self, key: bytes) -> None:
        """A block is not to be trusted, wherever it came from."""
        self._dirty.pop(key, None)
        if key in self.index:
            self.index.discard(key)
        elif key in self._writing:
            self._doomed.add(key)

    def clear(self, tenant: bytes) -> int:
        for key in list(self._dirty):
            if self._host.block(key).tenant == tenant:
                del self._dirty[key]
        self._doomed.update(
            key for key, (_, record) in self._writing.items() if record.block.tenant == tenant
        )
        if self.recovering:
            self._cleared.add(tenant)
        return self.index.clear(tenant)

    def clear_all(self) -> int:
        """Forgets everything and deletes every file."""
        self._dirty.clear()
        self._doomed.update(self._writing)
        return self._delete_all()

    def _delete_all(self) -> int:
        count = self.index.clear_all()
        self._erase()
        return count

    # -- deciding -------------------------------------------------------------------------------

    def step(self, now: float) -> None:
        """Starts what can be started."""
        if now >= self._probe_at:
            self._probe_at = now + PROBE_SECONDS
            self._give(ProbeJob())
        if now < self._resting_until or self._writes or self.recovering:
            return
        self._erase()
        if not self._dirty:
            return
        if self._reads and now - self._last_write < STARVED_SECONDS:
            return
        self._last_write = now
        self._write()

    def _erase(self) -> None:
        for erasure in self.index.erasures(MOST_ERASURES):
            self._writes += 1
            self._give(EraseJob(erasure, self.index.span))

    def _write(self) -> None:
        for _ in range(min(self._batch, max(1, BATCH_BYTES // self.index.span))):
            if not self._dirty:
                return
            key = next(iter(self._dirty))
            record = self.index.place(self._host.block(key), self._host.order.uses(key))
            if record is None:
                self.index.make_room()
                self._erase()
                return
            del self._dirty[key]
            self._write_one(record)

    def _write_one(self, record: Record) -> None:
        lease = self._host.lease(_OWNER, record.block.key, FOREVER)
        self._writing[record.block.key] = lease, record
        self._writes += 1
        self._give(WriteJob(record, self._view(lease.slot), self.index.least_size(record)))

    def _give(self, job: DiskJob) -> None:
        self._jobs += 1
        self._submit(job)

    # -- outcomes -------------------------------------------------------------------------------

    def done(self, job: DiskJob, now: float) -> None:
        """Accounts for what was done. Reads are accounted for here and acted on by the caller."""
        self._jobs -= 1
        match job:
            case ReadJob():
                self._reads -= 1
                self._read_done(job, now)
            case WriteJob():
                self._writes -= 1
                self._write_done(job, now)
            case EraseJob():
                self._writes -= 1
                self._erase_done(job, now)
            case ScanJob():
                self._scan_done(job)
            case ProbeJob():
                self._probe_done(job, now)

    def _read_done(self, job: ReadJob, now: float) -> None:
        job.into.release()
        if job.ok:
            self.counters["disk_reads"] += 1
            self.counters["disk_read_bytes"] += job.record.payload_bytes
            return
        record = job.record
        self._damaged(record, job.damage)
        if job.damage == "short":
            lost = self.index.shortened(record.file, job.file_bytes)
            self.counters["disk_records_lost"] += lost
            self._probe_at = now  # perhaps the whole directory is gone

    def _damaged(self, record: Record, damage: str) -> None:
        self.counters[f"disk_damaged_{damage}"] += 1
        log.warning("block %s on disk is damaged (%s)", record.block.key.hex(), damage)
        key = record.block.key
        if key in self.index and self.index.record(key) is record:
            self.index.discard(key)

    def _write_done(self, job: WriteJob, now: float) -> None:
        job.payload.release()
        key = job.record.block.key
        self._host.release(self._writing.pop(key)[0])
        doomed = key in self._doomed
        self._doomed.discard(key)
        if job.error is not None:
            lost = self.index.failed(job.record, job.file_bytes)
            self.counters["disk_records_lost"] += lost
            self._failed(job.error, now)
            if key in self._host and not doomed:
                self._dirty[key] = None
                self._dirty.move_to_end(key, last=False)
            return
        self._rest = FIRST_REST_S
        self._batch = min(BATCH_BYTES, 2 * self._batch)
        self.counters["disk_writes"] += 1
        self.counters["disk_write_bytes"] += job.record.span
        self.index.landed(job.record)
        if doomed:
            if key in self.index:
                self.index.soil(key)
            if key in self._host:  # it has been put again since
                self.write_behind(key)

    def _erase_done(self, job: EraseJob, now: float) -> None:
        if job.error is None:
            self.index.erased(job.erasure)
            return
        self.index.not_erased(job.erasure, job.file_bytes)
        self._failed(job.error, now)

    def _scan_done(self, job: ScanJob) -> None:
        self.recovering -= 1
        self._scanned(job)
        if not self.recovering:
            self._cleared.clear()

    def _scanned(self, job: ScanJob) -> None:
        if job.scan is None:
            log.warning("cannot read file %d: %s", job.file, job.error)
            self.counters["disk_read_errors"] += 1
            self.index.unreadable(job.file)
            return
        found = self.index.recovered(job.file, job.scan.size, job.scan.records)
        self.counters["disk_recovered"] += found
        self.counters["disk_foreign"] += len(job.scan.records) - found
        self.counters["disk_damaged_header"] += job.scan.damaged
        self.counters["disk_torn"] += job.scan.torn
        for tenant in self._cleared:
            self.index.clear(tenant)

    def _probe_done(self, job: ProbeJob, now: float) -> None:
        if job.lost:
            self.counters["disk_lost"] += 1
            log.warning("the cache directory is gone: %d blocks with it", len(self.index))
            self._delete_all()  # what was written to the new directory before this was known
            for block in self._host.blocks():
                self.write_behind(block.key)
        if job.error is not None:
            self._failed(job.error, now)

    def _failed(self, error: OSError, now: float) -> None:
        self.counters["disk_write_errors"] += 1
        self._batch = 1  # a disk that is nearly full has room for one
        if now >= self._resting_until:
            log.warning("the disk tier rests for %g s: %s", self._rest, error)
            self._resting_until = now + self._rest
            self._rest = min(LONGEST_REST_S, 2 * self._rest)

    # -- state ----------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing is in flight and nothing waits to be written or erased."""
        return not (self._jobs or self._dirty or self.index.to_erase)

    @property
    def failing(self) -> bool:
        """Several writes in a row have failed: waiting for the next one takes long."""
        return self._rest > FAILING_REST_S

    def wants_turn(self, now: float) -> bool:
        """Whether a `step` soon could start something, without any outcome before it."""
        waiting = bool(self._dirty) or self.index.to_erase > 0
        busy = self._writes or self.recovering
        return waiting and not busy and now >= self._resting_until

    def ledger(self) -> dict[str, int]:
        return {
            **self.index.ledger(),
            "unwritten": self.unwritten,
            "unwritten_bytes": self.unwritten * self.index.span,
            "reads_in_flight": self._reads,
            "writes_in_flight": self._writes,
            "recovering": self.recovering,
        }

    def check(self) -> None:
        self.index.check()
        assert all(key in self._host for key in self._dirty), "an unwritten block is gone"
        assert self._reads >= 0 and self._writes >= 0, "more was done than was started"
