"""The disk tier's files: a directory of segments that one process owns.

Owns the directory, its lock and every system call on it; it knows no index and decides nothing.
`FileSystem` is the seam at which tests make a disk that is full, broken or gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.tiers.disk.record import ALIGNMENT, HEADER_BYTES, Record, unpack

_NAME = re.compile(r"segment-(\d{10})\.kv")
LOCK_NAME = "lock"
"""Locked as long as a store lives. What it holds, a process number, is for people only."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What one segment file holds."""

    number: int
    size: int
    records: tuple[Record, ...]
    damaged: int
    """Stretches in which no record could be recognised."""
    torn: bool
    """Whether the last record had been cut off, and was dropped."""


class FileSystem:
    """The system calls, for segments in one directory. Every method raises OSError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._head: tuple[int, int] | None = None
        """Number and descriptor of the segment that is appended to."""
        self._lock_fd: int | None = None

    def lock(self) -> None:
        """Makes the directory if need be and takes it for this process.

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

    def _open_lock(self) -> int:
        path = self.folder / LOCK_NAME
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EROFS):
                raise
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # it can still be read

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
        return self.folder / f"segment-{number:010d}.kv"

    def list(self) -> dict[int, int]:
        """Segment numbers and file lengths, in order."""
        found = {}
        for entry in os.scandir(self.folder):
            match = _NAME.fullmatch(entry.name)
            if match and entry.is_file(follow_symlinks=False):
                found[int(match[1])] = entry.stat(follow_symlinks=False).st_size
        return dict(sorted(found.items()))

    def append(self, number: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        """Writes all parts at the end of a segment, or leaves it as long as it was."""
        fd = self._open_head(number)
        there = os.fstat(fd)
        if there.st_nlink == 0:
            raise OSError(errno.ENOENT, "the segment was deleted", str(self.path(number)))
        if there.st_size != offset:  # what should lie before it could not be written
            raise OSError(errno.EIO, f"{there.st_size} bytes long, not {offset}")
        size = sum(len(part) for part in parts)
        try:
            written = self.write(fd, parts, offset)
            if written != size:
                raise OSError(errno.ENOSPC, f"only {written} of {size} bytes were written")
        except OSError:
            os.ftruncate(fd, offset)
            raise

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        return os.pwritev(fd, parts, offset)

    def _open_head(self, number: int) -> int:
        if self._head is not None and self._head[0] == number:
            return self._head[1]
        self.close_head()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.path(number), flags, 0o600)
        self._head = (number, fd)
        return fd

    def close_head(self) -> None:
        if self._head is not None:
            os.close(self._head[1])
            self._head = None

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
        if self._head is not None and self._head[0] == number:
            self.close_head()
        self.path(number).unlink(missing_ok=True)

    def scan(self, number: int) -> Scan:
        """All records of a segment, by their headers alone; a torn last one is cut off."""
        fd = os.open(self.path(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return self._scan(fd, number)
        finally:
            os.close(fd)

    def _scan(self, fd: int, number: int) -> Scan:
        size = os.fstat(fd).st_size
        records: list[Record] = []
        damaged, lost, offset = 0, False, 0
        end = 0
        torn = False
        while offset < size:
            record = unpack(os.pread(fd, HEADER_BYTES, offset), number, offset)
            if record is None:
                damaged += not lost
                lost = True
                offset += ALIGNMENT
                continue
            lost = False
            if offset + record.span > size:
                torn = True
                break
            records.append(record)
            offset += record.span
            end = offset
        if torn or lost:
            damaged -= lost and not torn
            torn = True
            size = self._cut(number, end, size)
        return Scan(number, size, tuple(records), damaged, torn)

    def _cut(self, number: int, end: int, size: int) -> int:
        try:
            if end == 0:
                self.path(number).unlink()
            else:
                os.truncate(self.path(number), end)
        except OSError:  # a read-only disk: the rest stays, and counts
            return size
        return end

    def close(self) -> None:
        self.close_head()
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
