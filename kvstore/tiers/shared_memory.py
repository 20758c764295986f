"""The arena's bytes: one file in shared memory that the store makes and nodes of its host map.

Owns the file, its mapping and the proof of a writer's death; it knows neither keys nor slots'
contents. The file is allocated in full when it is made, because a page that cannot be had later
ends a process with SIGBUS.

Every process that maps the file holds a lock on one byte of it, its lane, in the name of the open
file that it mapped (an open-file-description lock). The kernel releases that lock when the last
descriptor *and the last mapping* of this open file are gone: a lane that is not locked proves that
nobody behind it can write any more. A stopped process keeps its lane, and no process number is
compared, so the proof also holds between containers. Linux only; elsewhere there is no arena to
map, and blocks travel inline.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import secrets
import struct
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from kvferry.kvstore.errors import ConfigError, KvferryError
from kvferry.kvstore.process.settings import format_size

if sys.platform == "linux":
    import fcntl

log = logging.getLogger(__name__)

PAGE = 4096
HEADER_BYTES = PAGE
"""The first page says whose arena this is; slots follow."""
_MAGIC = b"kvfarena"
_HEADER = struct.Struct("<8sqqq")
_FLOCK = struct.Struct("hhqqi4x")
_F_OFD_GETLK, _F_OFD_SETLK = 36, 37
_SLOT_BYTES_AT = 16
STORE_LANE = 0
_MADV_POPULATE_WRITE = 23
_PREFAULT_BYTES = 16 << 20
LEAST_BYTES = 1 << 20
SPARE_BYTES = 1 << 30
"""With less left, memory is short."""
KEPT_FREE = 64 << 20
"""Memory that the arena leaves to everybody else."""


class ArenaUnavailable(KvferryError):
    """The arena cannot be mapped by this process: another host, another user, another system."""


def aligned(size: int) -> int:
    """The next multiple of a page."""
    return -(-size // PAGE) * PAGE


class SharedMemory:
    """The arena in one process. Its memoryviews must not outlive it."""

    def __init__(self, path: Path, fd: int, lane: int) -> None:
        self.path = path
        self.size = os.fstat(fd).st_size
        self.lane = lane
        self._fd = fd
        self._map = mmap.mmap(fd, self.size)
        self.view = memoryview(self._map)
        self._prefaulting: threading.Thread | None = None
        self._closing = False

    def prefault(self) -> None:
        """Maps every page in a thread, so that no copy stops at each of them the first time.

        A first touch costs more than copying the page. Where the kernel knows no way to do it
        (before 5.14) pages are mapped as they are touched.
        """
        handle = ctypes.c_char.from_buffer(self._map)
        address = ctypes.addressof(handle)
        del handle  # it would keep the mapping from being closed
        self._prefaulting = threading.Thread(
            target=self._prefault, args=(address,), name="prefault", daemon=True
        )
        self._prefaulting.start()

    def _prefault(self, address: int) -> None:
        # A foreign call lets other threads of Python run meanwhile, which mmap.madvise does not.
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for start in range(0, self.size, _PREFAULT_BYTES):
            size = min(_PREFAULT_BYTES, self.size - start)
            if self._closing or madvise(address + start, size, _MADV_POPULATE_WRITE) != 0:
                return

    @classmethod
    def create(cls, folder: Path, size: int, incarnation: int) -> SharedMemory:
        """A new arena of `size` bytes, or of less if the host has not so much.

        Raises
        ------
        ConfigError
            Not even a small arena fits, or the folder cannot be used.
        """
        if sys.platform != "linux":
            raise ConfigError("--store-ram needs Linux: start with --store-ram 0")
        remove_leftovers(folder)
        size = _what_fits(folder, size)
        path = folder / f"kvferry-{os.getuid()}-{secrets.token_hex(8)}.arena"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--arena-dir {folder}: {error.strerror}") from error
        try:
            _lock(fd, STORE_LANE)
            os.posix_fallocate(fd, 0, HEADER_BYTES + size)
            os.pwrite(fd, _HEADER.pack(_MAGIC, incarnation, 0, size), 0)
            return cls(path, fd, STORE_LANE)
        except OSError as error:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise ConfigError(
                f"--store-ram {format_size(size)}: {folder} cannot hold it ({error.strerror})"
            ) from error

    @classmethod
    def attach(cls, path: Path, incarnation: int, slot_bytes: int, lane: int) -> SharedMemory:
        """Maps another process's arena and locks a lane of it.

        Raises
        ------
        ArenaUnavailable
            The file is not there, not ours, or another store's.
        """
        if sys.platform != "linux":
            raise ArenaUnavailable("shared arenas need Linux")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ArenaUnavailable(f"{path}: {error.strerror}") from error
        try:
            said = _HEADER.unpack(os.pread(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))
            if said[:3] != (_MAGIC, incarnation, slot_bytes):
                raise ArenaUnavailable(f"{path} is not the arena of store {incarnation:x}")
            if os.fstat(fd).st_size < HEADER_BYTES + said[3]:
                raise ArenaUnavailable(f"{path} is shorter than it says")
            _lock(fd, lane)
            return cls(path, fd, lane)
        except OSError as error:
            os.close(fd)
            raise ArenaUnavailable(f"{path}: {error.strerror}") from error
        except ArenaUnavailable:
            os.close(fd)
            raise

    def divide(self, slot_bytes: int) -> int:
        """Says how large a slot is; from now on others may attach. Returns how many there are."""
        struct.pack_into("<q", self.view, _SLOT_BYTES_AT, slot_bytes)
        return (self.size - HEADER_BYTES) // slot_bytes

    def slot(self, number: int, slot_bytes: int, size: int) -> memoryview:
        """The first `size` bytes of a slot. Release the view before the arena is closed."""
        start = HEADER_BYTES + number * slot_bytes
        return self.view[start : start + size]

    def is_locked(self, lane: int) -> bool:
        """Whether a process other than this one still maps the file with that lane."""
        return _is_locked(self._fd, lane)

    def close(self) -> None:
        """Unmaps. The lane is free when this has succeeded.

        Raises BufferError while a view of a slot is held by somebody; try again then.
        """
        self._closing = True
        if self._prefaulting is not None:
            self._prefaulting.join()
        self.view.release()
        self._map.close()
        os.close(self._fd)

    def remove(self) -> None:
        """Takes the file's name away; whoever maps it keeps the memory until it unmaps."""
        self.path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> int:
    """Removes arenas of this user whose store is dead; how many."""
    removed = 0
    for path in folder.glob(f"kvferry-{os.getuid()}-*.arena"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            # A file that a store has just made and not locked yet is seconds old.
            young = os.fstat(fd).st_size == 0
            if not young and not _is_locked(fd, STORE_LANE):
                path.unlink(missing_ok=True)
                removed += 1
        finally:
            os.close(fd)
    if removed:
        log.info("removed %d arenas of stores that are dead", removed)
    return removed


# -- locks -----------------------------------------------------------------------------------------


def _lock(fd: int, lane: int) -> None:
    fcntl.fcntl(fd, _F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, lane, 1, 0))


def _is_locked(fd: int, lane: int) -> bool:
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, lane, 1, 0)
    answer = fcntl.fcntl(fd, _F_OFD_GETLK, asked)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


# -- how much --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Room:
    """What an arena may take now, and what it is that sets the limit."""

    limit: str
    available: int
    """Bytes, all of it."""

    @property
    def fits(self) -> int:
        """Bytes of an arena that leaves something to everybody else."""
        return (self.available - min(KEPT_FREE, self.available // 4)) // PAGE * PAGE


def room_for_arena(folder: Path) -> Room:
    """The least of free shared memory, available memory and the control group's limit.

    Raises
    ------
    ConfigError
        The folder cannot be used.
    """
    try:
        disk = os.statvfs(folder)
    except OSError as error:
        raise ConfigError(f"--arena-dir {folder}: {error.strerror}") from error
    rooms = (
        Room(f"free space of {folder}", disk.f_bavail * disk.f_frsize),
        Room("available memory", available_memory()),
        Room("the limit of this control group", _cgroup_room()),
    )
    return min(rooms, key=lambda room: room.available)


def _what_fits(folder: Path, wanted: int) -> int:
    room = room_for_arena(folder)
    what, least, fits = room.limit, room.available, room.fits
    if wanted <= fits:
        return aligned(wanted)
    if fits < LEAST_BYTES:
        raise ConfigError(
            f"--store-ram {format_size(wanted)}: {what} is {format_size(least)}; "
            "free some, or start with --store-ram 0"
        )
    log.warning(
        "--store-ram %s is more than fits: %s is %s; the arena has %s",
        format_size(wanted),
        what,
        format_size(least),
        format_size(fits),
    )
    return fits


def available_memory() -> int:
    """Bytes that processes may still take without swapping; very many where nobody says."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES):
            raise
    return sys.maxsize


def memory_left() -> int:
    """Bytes that this process may still take: what the system and its control group allow."""
    return min(available_memory(), _cgroup_room())


def memory_is_short() -> bool:
    """Whether so little is left that nothing should be taken before it is needed."""
    return memory_left() < SPARE_BYTES


def _cgroup_room() -> int:
    """What this process's own group (version 2) may still take, or no limit."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        folder = Path("/sys/fs/cgroup") / group.lstrip("/")
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        return sys.maxsize if limit == "max" else max(0, int(limit) - used)
    except (OSError, ValueError):
        return sys.maxsize
