"""The tiers without processes, sockets or threads: slots are a bytearray, the disk works when told.

Every outcome comes in an order that the test chooses, so a seed is a whole run.
"""

from __future__ import annotations

import errno
import sys
from pathlib import Path

from kvferry.kvstore.keys import checksum
from kvferry.kvstore.tiers.block import Block
from kvferry.kvstore.tiers.cache import TieredCache
from kvferry.kvstore.tiers.disk.files import FileSystem
from kvferry.kvstore.tiers.disk.record import record_bytes
from kvferry.kvstore.tiers.disk.slots import SlotIndex
from kvferry.kvstore.tiers.disk.worker import DiskFaults, DiskJob, DiskWorker, ReadJob
from kvferry.kvstore.tiers.fetches import HandedOut, Ready
from kvferry.kvstore.tiers.host import HostTier
from kvferry.tests.rigs.store.rig import TENANT, chain_keys, payload_of

SIZE = 300
SPAN = record_bytes(SIZE)
FINGERPRINT = b"f" * 16


class StubbornFiles(FileSystem):
    """Some files cannot be deleted at first, and some slots not be erased."""

    refusals = 0

    def delete(self, number: int) -> None:
        self._refuse()
        super().delete(number)

    def erase(self, number: int, offset: int, size: int) -> None:
        self._refuse()
        super().erase(number, offset, size)

    def _refuse(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EIO, "injected")


class TiersRig:
    """Payloads of `SIZE` bytes; time is `now`, and stands still unless a test moves it."""

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 32,
        cap: int = 0,
        files: FileSystem | None = None,
        fingerprint: bytes = FINGERPRINT,
        size: int = SIZE,
        lease_s: float = 10.0,
    ) -> None:
        self.now = 0.0
        self.size = size
        self.memory = memoryview(bytearray(slots * size))
        self.files = files or FileSystem(folder)
        self.faults = DiskFaults()
        self.worker = DiskWorker(self.files, self.faults)
        self.jobs: list[DiskJob] = []
        self.outcomes: list[DiskJob] = []
        """Of jobs that are done, while the tiers have not heard of it."""
        index = SlotIndex(cap, fingerprint, size) if cap else None
        self.tiers = TieredCache(
            HostTier(slots), self.view, index, self.jobs.append, lease_s=lease_s
        )
        if index is not None and self.tiers.disk is not None:
            self.files.lock()
            self.tiers.disk.recover(self.files.list(), self.files.delete)
        self.handed: list[HandedOut] = []

    def view(self, slot: int) -> memoryview:
        return self.memory[slot * self.size : (slot + 1) * self.size]

    # -- the disk -------------------------------------------------------------------------------

    def work(self, count: int = 1) -> None:
        """Does so many jobs, reads first, as the thread would."""
        for _ in range(count):
            self.run_ahead()
            self.hear()

    def run_ahead(self, count: int = 1) -> None:
        """Does so many jobs before the tiers hear of any, as the thread may."""
        for _ in range(min(count, len(self.jobs))):
            reads = [job for job in self.jobs if isinstance(job, ReadJob)]
            job = reads[0] if reads else self.jobs[0]
            self.jobs.remove(job)
            self.worker.do(job)
            self.outcomes.append(job)

    def hear(self, count: int = sys.maxsize) -> None:
        """The tiers hear of what is done, oldest first."""
        for _ in range(min(count, len(self.outcomes))):
            self.handed += self.tiers.disk_done(self.outcomes.pop(0), self.now)

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.handed += self.tiers.tick(self.now)

    def settle(self, seconds: float = 1.0) -> None:
        """Until nothing is in flight; time moves, so that a resting disk is tried again."""
        for _ in range(10_000):
            self.tick(seconds)
            while self.jobs or self.outcomes:
                self.work()
            if self.tiers.idle:
                return
        raise AssertionError("the disk never gets done")

    # -- blocks ---------------------------------------------------------------------------------

    def put(self, keys: list[bytes], *, start: int = 0, tenant: bytes = TENANT) -> int:
        """Puts blocks [start, len(keys)) until one finds no slot; how many."""
        for index in range(start, len(keys)):
            slots = self.tiers.host.grant("writer", 1)
            if not slots:
                return index - start
            key = keys[index]
            parent = keys[index - 1] if index else b"\0" * 16
            payload = payload_of(key, self.size)
            self.view(slots[0])[:] = payload
            block = Block(key, parent, tenant, index, checksum(payload))
            self.tiers.commit("writer", slots[0], block, hold=False, now=self.now)
        return len(keys) - start

    def read(self, keys: list[bytes], number: int, first: int = 0, window: int = 8) -> int:
        """A whole fetch, blocks verified as a reader would; how many it got."""
        self.handed.clear()
        started = self.tiers.fetch(
            "reader", number, keys, first, deadline=self.now + 5, window=window, now=self.now
        )
        assert started is not None
        self.handed.insert(0, started)
        got = 0
        while True:
            while self.handed:
                handed = self.handed.pop(0)
                if handed.fetch.number != number or handed.fetch.owner != "reader":
                    continue
                for block in handed.blocks:
                    assert block.index == first + got, "a block is missing"
                    if not self.is_right(block, keys[block.index]):
                        self.tiers.damaged(keys[block.index])
                        self.tiers.fetches.cancel("reader", number)
                        return got
                    got += 1
                    more = self.tiers.fetches.took("reader", number, 1, self.now)
                    self.handed += [more] if more else []
                if handed.ended:
                    return got
            if self.jobs:
                self.work()
            else:
                self.tick(0.5)

    def is_right(self, block: Ready, key: bytes) -> bool:
        """What a reader does; and no copy that it would accept may be a wrong one."""
        copy = bytes(self.view(block.slot))
        accepted = checksum(copy) == block.checksum
        assert not accepted or copy == payload_of(key, self.size), "a wrong block was served"
        return accepted

    def bytes_on_disk(self) -> int:
        return sum(self.files.list().values())

    @property
    def index(self) -> SlotIndex:
        assert self.tiers.disk is not None
        return self.tiers.disk.index

    def counter(self, name: str) -> int:
        return int(self.tiers.figures().get(name, 0))


def filled(folder: Path, chains: int, length: int, cap: int = 1 << 30) -> list[list[bytes]]:
    """A directory with so many chains on it, and nobody who has it open."""
    rig = TiersRig(folder, slots=2 * chains * length + 4, cap=cap)
    keys = [chain_keys(number, length) for number in range(chains)]
    for chain in keys:
        rig.put(chain)
    rig.settle()
    rig.tiers.check()
    assert rig.counter("disk_writes") == chains * length
    rig.files.close()
    return keys
