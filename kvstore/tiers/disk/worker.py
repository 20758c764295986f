"""The disk tier's thread: it does what the store's loop has decided, reads before all else.

Owns the queue between the two and the verification of what is read. It decides nothing, keeps no
index and touches no accounting: a job in, an outcome out. Jobs that are no reads are done in order,
one at a time, and every read that waits is done before the next of them: so what is to be read is
read before its slot is written to.
"""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import xxhash

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.tiers.disk.files import FileSystem, Scan
from kvferry.kvstore.tiers.disk.record import HEADER_BYTES, Record, unpack
from kvferry.kvstore.tiers.disk.slots import Erasure


@dataclass(slots=True)
class ReadJob:
    """Bring one block into `into`, which is as long as its payload."""

    record: Record
    into: memoryview
    ok: bool = False
    damage: str = ""
    """`header`, `payload` or `short`; empty when it was read well, or `gone` by an I/O error."""
    file_bytes: int = 0
    """Length of the file, when the record was not in it whole."""
    seconds: float = 0.0


@dataclass(slots=True)
class WriteJob:
    """Write this block to its slot."""

    record: Record
    payload: memoryview
    least_size: int
    """Of its file, before; 0: it may have to be made."""
    error: OSError | None = None
    file_bytes: int = 0
    """Length of the file, after an error."""
    seconds: float = 0.0


@dataclass(slots=True)
class EraseJob:
    """Leave nothing of a slot of `span` bytes, or of a file."""

    erasure: Erasure
    span: int
    error: OSError | None = None
    file_bytes: int = 0
    """What is still there after an error."""


@dataclass(slots=True)
class ScanJob:
    file: int
    scan: Scan | None = None
    error: OSError | None = None


@dataclass(slots=True)
class ProbeJob:
    """Is the directory still there and ours? If it is not, make and lock it again."""

    lost: bool = False
    """It was not: everything that was in it is gone."""
    error: OSError | None = None


DiskJob = ReadJob | WriteJob | EraseJob | ScanJob | ProbeJob


@dataclass(slots=True)
class DiskFaults:
    """What a test does to the tier."""

    read_delay_s: float = 0.0
    """For each block."""
    damage_reads: int = 0
    """How many of the next blocks read arrive with one bit changed."""
    fail_writes: int = 0
    """How many of the next writes find the disk full."""
    fail_reads: int = 0
    """How many of the next reads are I/O errors."""


class DiskWorker:
    """Does jobs; the caller gives and takes them. Pure of threads: `Disk` adds one."""

    def __init__(self, files: FileSystem, faults: DiskFaults | None = None) -> None:
        self.files = files
        self.faults = faults or DiskFaults()
        self._header = bytearray(HEADER_BYTES)

    def do(self, job: DiskJob) -> None:
        started = time.monotonic()
        match job:
            case ReadJob():
                self._read(job)
                job.seconds = time.monotonic() - started
            case WriteJob():
                self._write(job)
                job.seconds = time.monotonic() - started
            case EraseJob():
                job.error = _error_of(lambda: self._erase(job.erasure, job.span))
                job.file_bytes = self.files.size(job.erasure.file) if job.error else 0
            case ScanJob():
                self._scan(job)
            case ProbeJob():
                self._probe(job)

    def _read(self, job: ReadJob) -> None:
        if self.faults.read_delay_s:
            time.sleep(self.faults.read_delay_s)
        job.damage, job.file_bytes = self._verified(job.record, job.into)
        job.ok = not job.damage

    def _verified(self, record: Record, into: memoryview) -> tuple[str, int]:
        """What is wrong with the record, and the file's length if that is what is wrong."""
        try:
            if self.faults.fail_reads:
                self.faults.fail_reads -= 1
                raise OSError(errno.EIO, "injected")
            count = self.files.read(record.file, record.offset, [self._header, into])
            if count < HEADER_BYTES + len(into):
                return "short", self.files.size(record.file)
        except FileNotFoundError:
            return "short", 0
        except OSError:
            return "gone", 0
        if self.faults.damage_reads:
            self.faults.damage_reads -= 1
            into[len(into) // 2] ^= 1
        if unpack(self._header, record.file, record.offset) != record:
            return "header", 0
        if xxhash.xxh3_64_intdigest(into) != record.block.checksum:
            return "payload", 0
        return "", 0

    def _write(self, job: WriteJob) -> None:
        if self.faults.fail_writes:
            self.faults.fail_writes -= 1
            job.error = OSError(errno.ENOSPC, "injected")
        else:
            job.error = _error_of(lambda: self._write_slot(job))
        job.file_bytes = self.files.size(job.record.file) if job.error else 0

    def _write_slot(self, job: WriteJob) -> None:
        record = job.record
        padding = bytes(record.span - HEADER_BYTES - record.payload_bytes)
        payload: list[bytes | memoryview] = [job.payload, padding]
        self.files.write_slot(*record.slot, record.pack(), payload, job.least_size)

    def _erase(self, erasure: Erasure, span: int) -> None:
        if erasure.offset is None:
            self.files.delete(erasure.file)
        else:
            self.files.erase(erasure.file, erasure.offset, span)

    def _scan(self, job: ScanJob) -> None:
        try:
            job.scan = self.files.scan(job.file)
        except OSError as error:
            job.error = error

    def _probe(self, job: ProbeJob) -> None:
        if self.files.owns_folder():
            return
        job.lost = True
        try:
            self.files.lock()
        except ConfigError as error:
            job.error = OSError(errno.EBUSY, str(error))
        except OSError as error:
            job.error = error


def _error_of(action: Callable[[], None]) -> OSError | None:
    try:
        action()
    except OSError as error:
        return error
    return None


@dataclass(slots=True)
class _Queues:
    reads: deque[ReadJob] = field(default_factory=deque)
    others: deque[DiskJob] = field(default_factory=deque)
    done: deque[DiskJob] = field(default_factory=deque)
    closing: bool = False


class Disk:
    """A worker in a thread of its own. `fileno()` is readable while outcomes wait."""

    def __init__(self, worker: DiskWorker) -> None:
        self.worker = worker
        self._queues = _Queues()
        self._changed = threading.Condition()
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        return self._reader

    def submit(self, job: DiskJob) -> None:
        with self._changed:
            if isinstance(job, ReadJob):
                self._queues.reads.append(job)
            else:
                self._queues.others.append(job)
            self._changed.notify()

    def wait(self, seconds: float) -> None:
        """Returns when an outcome waits, or after so long."""
        select.select([self._reader], [], [], seconds)

    def take_done(self) -> list[DiskJob]:
        """Outcomes since the last call, in the order in which they came about."""
        with self._changed:
            done = list(self._queues.done)
            self._queues.done.clear()
            if done:
                os.read(self._reader, 1)
        return done

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self.worker.do(job)
            with self._changed:
                if not self._queues.done:
                    os.write(self._writer, b"\0")
                self._queues.done.append(job)

    def _next(self) -> DiskJob | None:
        with self._changed:
            while True:
                if self._queues.reads:
                    return self._queues.reads.popleft()
                if self._queues.others:
                    return self._queues.others.popleft()
                if self._queues.closing:
                    return None
                self._changed.wait()

    def close(self) -> list[DiskJob]:
        """Finishes what was submitted and ends the thread; the last outcomes."""
        with self._changed:
            self._queues.closing = True
            self._changed.notify()
        self._thread.join()
        done = self.take_done()
        os.close(self._reader)
        os.close(self._writer)
        self.worker.files.close()
        return done
