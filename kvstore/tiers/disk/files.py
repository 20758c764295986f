"""The disk tier's files: a directory of files of slots that one process owns.

Owns the directory, its lock and every system call on it; it knows no index and decides nothing.
`FileSystem` is the seam at which tests make a disk that is full, broken or gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.tiers.disk.record import ALIGNMENT, HEADER_BYTES, Record, unpack

log = logging.getLogger(__name__)

_NAME = re.compile(r"slots-(\d{10})\.kv")
_OLD_NAMES = "segment-*.kv"
"""Of files of the first format, which are not read."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
"""`fallocate` flags of linux/falloc.h."""
LOCK_NAME = "lock"
"""Locked as long as a store lives. What it holds, a process number, is for people only."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What one file holds."""

    number: int
    size: int
    records: tuple[Record, ...]
    """All of one size."""
    damaged: int
    """Slots in which there is something that is no record."""
    torn: bool
    """Whether less than a slot was at the end, and was cut off."""


class FileSystem:
    """The system calls, for files in one directory. Every method raises OSError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock_fd: int | None = None

    def lock(self) -> None:
        """Makes the directory if need be and takes it for this process, without files that no
        process reads any more.

        Raises
        ------
        ConfigError
            Another process has it.
        OSError
            It cannot be made, or not be locked.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = self._open_lock()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(fd)
            os.close(fd)
            if error.errno == errno.EWOULDBLOCK:
                raise ConfigError(
                    f"--store-dir {self.folder} is in use by another store{holder}: stop that one, "
                    "choose another --store-dir, or start with --store-disk 0"
                ) from None
            raise
        with contextlib.suppress(OSError):  # it can be locked on a read-only disk, but not written
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
        self._lock_fd = fd
        self._remove_old()

    def _open_lock(self) -> int:
        path = self.folder / LOCK_NAME
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EROFS):
                raise
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # it can still be read

    def _remove_old(self) -> None:
        """Deletes what a store of the first format has left, which nobody reads any more."""
        old = list(self.folder.glob(_OLD_NAMES))
        try:
            for path in old:
                path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot delete files of an older format: %s", error)
            return
        if old:
            log.warning("%d files of an older format were deleted from %s", len(old), self.folder)

    def owns_folder(self) -> bool:
        """Whether the directory that was locked is still the one at this path."""
        if self._lock_fd is None:
            return False
        try:
            there = os.stat(self.folder / LOCK_NAME)
        except OSError:
            return False
        ours = os.fstat(self._lock_fd)
        return (there.st_ino, there.st_dev) == (ours.st_ino, ours.st_dev)

    def path(self, number: int) -> Path:
        return self.folder / f"slots-{number:010d}.kv"

    def list(self) -> dict[int, int]:
        """File numbers and lengths, in order."""
        found = {}
        for entry in os.scandir(self.folder):
            match = _NAME.fullmatch(entry.name)
            if match and entry.is_file(follow_symlinks=False):
                found[int(match[1])] = entry.stat(follow_symlinks=False).st_size
        return dict(sorted(found.items()))

    def write_slot(
        self,
        number: int,
        offset: int,
        header: bytes,
        payload: Sequence[bytes | memoryview],
        least_size: int,
    ) -> None:
        """Writes a slot, its header last: whoever reads it before then finds no record.

        A file that is to be `least_size` bytes long and is shorter is not written to; one that had
        grown is as long as it was after an error.
        """
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if least_size else os.O_CREAT)
        fd = os.open(self.path(number), flags, 0o600)
        try:
            size = os.fstat(fd).st_size
            if size < least_size:
                raise OSError(errno.EIO, f"{size} bytes long, not {least_size}")
            try:
                self._write_all(fd, [bytes(len(header)), *payload], offset)
                self._write_all(fd, [header], offset)
            except OSError:
                self._shrink(fd, number, size)
                raise
        finally:
            os.close(fd)

    def _write_all(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> None:
        size = sum(len(part) for part in parts)
        written = self.write(fd, parts, offset)
        if written != size:
            raise OSError(errno.ENOSPC, f"only {written} of {size} bytes were written")

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        return os.pwritev(fd, parts, offset)

    def _shrink(self, fd: int, number: int, size: int) -> None:
        if size == 0:
            self.path(number).unlink(missing_ok=True)
        elif os.fstat(fd).st_size > size:
            os.ftruncate(fd, size)

    def erase(self, number: int, offset: int, size: int) -> None:
        """Leaves no byte of what lies there; the file is as long as before, or gone."""
        try:
            fd = os.open(self.path(number), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        try:
            if not _punch_hole(fd, offset, size):
                left = min(size, os.fstat(fd).st_size - offset)
                self._write_all(fd, [bytes(max(0, left))], offset)
        finally:
            os.close(fd)

    def read(self, number: int, offset: int, into: Sequence[bytearray | memoryview]) -> int:
        """Reads into the buffers, in order; how many bytes there were."""
        fd = os.open(self.path(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return os.preadv(fd, into, offset)
        finally:
            os.close(fd)

    def size(self, number: int) -> int:
        """The file's length; 0 when it is not there, or out of reach."""
        try:
            return self.path(number).stat().st_size
        except OSError:
            return 0

    def delete(self, number: int) -> None:
        self.path(number).unlink(missing_ok=True)

    def scan(self, number: int) -> Scan:
        """All records of a file, by their headers alone; a torn last one is cut off."""
        fd = os.open(self.path(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return self._scan(fd, number)
        finally:
            os.close(fd)

    def _scan(self, fd: int, number: int) -> Scan:
        size = os.fstat(fd).st_size
        span, strange = _span(fd, number, size)
        if span == 0:
            return Scan(number, size, (), int(strange), torn=False)
        records: list[Record] = []
        damaged = 0
        for offset in range(0, size - span + 1, span):
            header = os.pread(fd, HEADER_BYTES, offset)
            record = unpack(header, number, offset)
            if record is not None and record.span == span:
                records.append(record)
            else:
                damaged += header != bytes(HEADER_BYTES)
        torn = size % span > 0
        if torn:
            size = self._cut(number, size - size % span, size)
        return Scan(number, size, tuple(records), damaged, torn)

    def _cut(self, number: int, end: int, size: int) -> int:
        try:
            os.truncate(self.path(number), end)
        except OSError:  # a read-only disk: the rest stays, and counts
            return size
        return end

    def close(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _holder(fd: int) -> str:
    """Who wrote its number into a lock file, for an error message."""
    try:
        written = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
    except OSError:
        return ""
    return f" (process {written})" if written.isdecimal() else ""


def _span(fd: int, number: int, size: int) -> tuple[int, bool]:
    """How long the slots of a file are, which its first record tells; 0: it holds none.

    And whether there is anything before that record which is none.
    """
    strange = False
    for offset in range(0, size, ALIGNMENT):
        header = os.pread(fd, HEADER_BYTES, offset)
        record = unpack(header, number, offset)
        if record is not None and offset % record.span == 0 and offset + record.span <= size:
            return record.span, strange
        strange = strange or header != bytes(HEADER_BYTES)
    return 0, strange


def _punch_hole(fd: int, offset: int, size: int) -> bool:
    """Gives the bytes back to the disk; they read as zeros. False where that cannot be done."""
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
    except (AttributeError, OSError):  # another system than Linux, or another C library
        return False
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return int(fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, size)) == 0
