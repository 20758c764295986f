"""The store's memory, files and tiers for one model: what is opened when its first node comes.

Owns the arena's mapping and the disk's thread, and nothing that is decided about them. A store does
not load the model, so it learns from the first node that attaches how large a block is and whose
bytes these are. Another model gets another arena file: a stopped node of the old one may still map,
and write, the file it knows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process.settings import format_size
from kvferry.kvstore.tiers.cache import LEASE_SECONDS, TieredCache
from kvferry.kvstore.tiers.disk.files import FileSystem
from kvferry.kvstore.tiers.disk.record import fingerprint_digest
from kvferry.kvstore.tiers.disk.slots import SlotIndex
from kvferry.kvstore.tiers.disk.worker import (
    Disk,
    DiskFaults,
    DiskWorker,
    ReadJob,
    WriteJob,
)
from kvferry.kvstore.tiers.host import HostTier
from kvferry.kvstore.tiers.shared_memory import SharedMemory, aligned

log = logging.getLogger(__name__)

LEAST_SLOTS = 4


@dataclass(frozen=True, slots=True)
class StoreSizes:
    """What a store may take."""

    ram: int
    """Bytes of the arena."""
    disk: int
    """Bytes of all files; 0: no disk tier."""
    folder: Path
    arena_folder: Path
    lease_s: float = LEASE_SECONDS


class ModelStorage:
    """HostTier, disk and tiers for blocks of one size and one fingerprint.

    Raises
    ------
    ConfigError
        The arena holds too few blocks of this size.
    """

    def __init__(
        self,
        sizes: StoreSizes,
        memory: SharedMemory,
        fingerprint: Mapping[str, str],
        block_bytes: int,
        files: FileSystem | None,
        faults: DiskFaults,
    ) -> None:
        self.block_bytes = block_bytes
        self.slot_bytes = aligned(block_bytes)
        self.memory = memory
        memory.prefault()
        num_slots = memory.divide(self.slot_bytes)
        if num_slots < LEAST_SLOTS:
            raise ConfigError(
                f"--store-ram {format_size(sizes.ram)} holds {num_slots} blocks of "
                f"{self.slot_bytes} bytes; at least {LEAST_SLOTS} are needed"
            )
        digest = fingerprint_digest(fingerprint)
        index = None
        if files is not None and sizes.disk:
            index = SlotIndex(sizes.disk, digest, block_bytes)
        if index is not None and not index.usable:
            log.warning(
                "--store-disk %s holds too few blocks of %d bytes: there is no disk tier",
                format_size(sizes.disk),
                block_bytes,
            )
            index = None
        self.disk: Disk | None = None
        host, lease_s = HostTier(num_slots), sizes.lease_s
        if index is None or files is None:
            self.tiers = TieredCache(host, self.view, lease_s=lease_s)
        else:
            self.disk = Disk(DiskWorker(files, faults))
            self.tiers = TieredCache(host, self.view, index, self.disk.submit, lease_s=lease_s)
            self._recover(files)

    @property
    def recovering(self) -> bool:
        """What is on the disk is not known yet."""
        return self.tiers.disk is not None and self.tiers.disk.recovering > 0

    def view(self, slot: int) -> memoryview:
        """The bytes of the block in a slot."""
        return self.memory.slot(slot, self.slot_bytes, self.block_bytes)

    def _recover(self, files: FileSystem) -> None:
        assert self.tiers.disk is not None
        try:
            listed = files.list()
        except OSError as error:
            log.warning("cannot read %s: %s", files.folder, error)
            return
        self.tiers.disk.recover(listed, files.delete)

    def drain(self, until: Callable[[], bool], now: Callable[[], float]) -> None:
        """Writes what waits to be written, until `until` is true or the disk keeps failing."""
        tier = self.tiers.disk
        while self.disk is not None and tier is not None and not self.tiers.idle:
            if until() or tier.failing:
                break
            self.disk.wait(0.05)
            for job in self.disk.take_done():
                self.tiers.disk_done(job, now())
            self.tiers.tick(now())

    def close(self) -> None:
        """Ends the thread, then unmaps: nothing writes into the arena any more."""
        if self.disk is not None:
            for job in self.disk.close():
                if isinstance(job, ReadJob):
                    job.into.release()
                elif isinstance(job, WriteJob):
                    job.payload.release()
        self.memory.remove()
        self.memory.close()


def open_files(folder: Path) -> FileSystem:
    """The directory of the disk tier, locked if that can be done.

    A directory that cannot be made or written is no error: the tier tries again later.

    Raises
    ------
    ConfigError
        Another store has it.
    """
    files = FileSystem(folder)
    try:
        files.lock()
    except OSError as error:
        log.warning("the disk tier cannot use %s yet: %s", folder, error)
    return files
