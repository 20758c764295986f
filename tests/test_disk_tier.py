"""The disk tier: nothing wrong is served, nothing is lost silently, the cap holds."""

from __future__ import annotations

import errno
import os
import random
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvferry.kvstore.arena import Block
from kvferry.kvstore.disk_files import FileSystem
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.record import ALIGNMENT, HEADER_BYTES, Record, record_bytes, unpack
from kvferry.kvstore.segments import Placed, SegmentIndex
from kvferry.tests.store_rig import TENANT, chain_keys
from kvferry.tests.tiers_rig import FINGERPRINT, SIZE, TiersRig

SPAN = record_bytes(SIZE)
PADDING = SPAN - HEADER_BYTES - SIZE


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


class Counting:
    """Adds up what a rig has counted as damaged, in reading and in scanning."""

    NAMES = ("header", "payload", "short", "gone")

    @classmethod
    def of(cls, rig: TiersRig) -> int:
        return sum(rig.counter(f"disk_damaged_{name}") for name in cls.NAMES)


@pytest.mark.A6
def test_ten_thousand_damaged_records_are_not_served(tmp_path: Path) -> None:
    """While the store runs: header and payload bits, records swapped, another key's record."""
    chains, length, rounds = 250, 8, 5
    keys = filled(tmp_path, chains, length)
    segments = FileSystem(tmp_path)
    pristine = {number: segments.path(number).read_bytes() for number in segments.list()}
    dice = random.Random(1)
    damaged = 0
    for _ in range(rounds):
        rig = TiersRig(tmp_path, slots=64, cap=64 << 20)
        rig.settle()
        assert rig.counter("disk_recovered") == chains * length
        for number, whole in pristine.items():
            segments.path(number).write_bytes(_all_damaged(bytearray(whole), dice))
        number = 0
        for chain in keys:
            for depth in range(length):  # each record by itself: the first is no shield
                number += 1
                assert rig.read([chain[depth]], number) == 0
                assert chain[depth] not in rig.index, "a damaged record is asked for again"
        assert Counting.of(rig) == chains * length
        damaged += Counting.of(rig)
        rig.tiers.check()
        rig.files.close()
        for number, whole in pristine.items():
            segments.path(number).write_bytes(whole)
    assert damaged == chains * length * rounds >= 10_000


def _all_damaged(data: bytearray, dice: random.Random) -> bytearray:
    """Each record of a segment is damaged in one of the ways that keep the file's length."""
    offsets = list(range(0, len(data), SPAN))
    whole = bytes(data)
    for offset in offsets:
        kind = dice.choice(("header", "payload", "swapped", "zeros"))
        if kind == "swapped" and len(offsets) > 1:
            other = dice.choice([it for it in offsets if it != offset])
            data[offset : offset + SPAN] = whole[other : other + SPAN]
        elif kind == "zeros":
            data[offset : offset + SPAN] = bytes(SPAN)
        else:
            # Unused bytes of the header are part of its checksum, padding is of nothing.
            low, high = (0, HEADER_BYTES) if kind == "header" else (HEADER_BYTES, 128 + SIZE)
            data[offset + dice.randrange(low, high)] ^= 1 << dice.randrange(8)
    return data


@pytest.mark.A6
@pytest.mark.parametrize("kind", ["deleted", "empty", "half", "one byte less"])
@pytest.mark.parametrize("running", [True, False])
def test_a_shortened_file_costs_what_was_cut_and_nothing_else(
    tmp_path: Path, kind: str, running: bool
) -> None:
    keys = filled(tmp_path, 10, 8)
    rig = TiersRig(tmp_path, cap=64 << 20) if running else None
    if rig is not None:
        rig.settle()
    path = FileSystem(tmp_path).path(1)
    size = path.stat().st_size
    if kind == "deleted":
        path.unlink()
    else:
        os.truncate(
            path, {"empty": 0, "half": size // 2, "one byte less": size - PADDING - 1}[kind]
        )
    left = {"deleted": 0, "empty": 0, "half": 40, "one byte less": 79}[kind]
    if rig is None:
        rig = TiersRig(tmp_path, cap=64 << 20)
        rig.settle()
        assert rig.counter("disk_recovered") == left
    served = sum(rig.read(chain, number + 1) for number, chain in enumerate(keys))
    assert served == left
    rig.settle()
    assert rig.bytes_on_disk() == rig.index.used
    if running:
        assert rig.counter("disk_damaged_short") >= 1
        # The first that is missed says how long the file is, and the rest is known to be lost.
        assert rig.counter("disk_records_lost") + rig.counter("disk_damaged_short") >= 80 - left
    rig.put(chain_keys("later", 4))
    rig.settle()
    rig.tiers.check()
    assert rig.bytes_on_disk() == rig.index.used
    rig.files.close()


@pytest.mark.A6
def test_damage_found_at_the_start_is_counted_and_the_rest_is_served(tmp_path: Path) -> None:
    keys = filled(tmp_path, 10, 8)
    path = FileSystem(tmp_path).path(1)
    data = bytearray(path.read_bytes())
    data[17 * SPAN + 20] ^= 4  # chain 2, block 1
    data[60 * SPAN] ^= 1  # chain 7, block 4
    path.write_bytes(data)
    rig = TiersRig(tmp_path, cap=64 << 20)
    rig.settle()
    assert rig.counter("disk_recovered") == 78
    assert rig.counter("disk_damaged_header") == 2
    served = [rig.read(chain, number + 1) for number, chain in enumerate(keys)]
    assert served == [8, 8, 1, 8, 8, 8, 8, 4, 8, 8], "the prefix ends before the damaged block"
    rig.files.close()


@pytest.mark.A6
def test_a_writer_killed_between_header_and_payload_leaves_a_torn_tail(tmp_path: Path) -> None:
    keys = filled(tmp_path, 4, 8)
    script = (
        "import os, sys, signal\n"
        "data = open(sys.argv[1], 'rb').read()\n"
        "from kvferry.kvstore.record import unpack\n"
        "from dataclasses import replace\n"
        "record = replace(unpack(data[:128], 1, 0), offset=len(data))\n"
        "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)\n"
        "os.write(fd, record.pack())\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = FileSystem(tmp_path).path(1)
    size = path.stat().st_size
    ended = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert ended.returncode == -9
    assert path.stat().st_size == size + HEADER_BYTES
    rig = TiersRig(tmp_path, cap=64 << 20)
    rig.settle()
    assert rig.counter("disk_torn") == 1
    assert path.stat().st_size == size, "the torn tail is cut off"
    assert [rig.read(chain, number + 1) for number, chain in enumerate(keys)] == [8] * 4
    rig.tiers.check()
    rig.files.close()


@pytest.mark.A2
def test_another_build_never_hits_and_its_records_go_first(tmp_path: Path) -> None:
    keys = filled(tmp_path, 4, 8, cap=64 * SPAN)
    other = TiersRig(tmp_path, cap=64 * SPAN, fingerprint=b"g" * 16)
    other.settle()
    assert [other.read(chain, number + 1) for number, chain in enumerate(keys)] == [0] * 4
    assert other.counter("disk_foreign") == 32
    assert other.index.used == other.bytes_on_disk() == 32 * SPAN, "they are kept, and counted"
    for number in range(20):
        other.put(chain_keys(f"new {number}", 8))
        other.settle()
    other.files.close()
    back = TiersRig(tmp_path, cap=64 * SPAN)
    back.settle()
    assert [back.read(chain, number + 1) for number, chain in enumerate(keys)] == [0] * 4
    back.files.close()


@pytest.mark.A5
def test_the_cap_is_never_passed_and_equals_the_files(tmp_path: Path) -> None:
    dice = random.Random(3)
    cap = 40 * SPAN
    rig = TiersRig(tmp_path, slots=64, cap=cap)
    for number in range(300):
        rig.put(chain_keys(number, dice.randrange(1, 6)))
        rig.tick()
        while rig.jobs:
            rig.work()
            assert rig.bytes_on_disk() <= cap, "the hard cap was passed"
            rig.tick()
            rig.tiers.check()
    rig.settle()
    assert rig.bytes_on_disk() == rig.index.used
    assert rig.counter("disk_segments_cleaned") > 10
    rig.files.close()


@pytest.mark.A5
def test_a_thousand_puts_and_removals_near_the_budget_account_for_every_byte(
    tmp_path: Path,
) -> None:
    dice = random.Random(4)
    cap = 100 * SPAN
    rig = TiersRig(tmp_path, slots=40, cap=cap)
    tenants = [bytes([65 + n]) * 16 for n in range(4)]
    for number in range(1000):
        rig.put(chain_keys(number % 30, 4, tenant=str(number % 4)), tenant=tenants[number % 4])
        if dice.random() < 0.1:
            rig.tiers.clear(tenants[dice.randrange(4)])
        if number % 10 == 0:
            rig.settle()
            assert rig.bytes_on_disk() == rig.index.used <= cap
        rig.tiers.check()
    rig.settle()
    rig.tiers.clear(None)
    rig.settle()
    assert rig.bytes_on_disk() == rig.index.used == 0
    assert rig.tiers.arena.num_resident == 0
    rig.tiers.check()
    rig.files.close()


def test_clearing_one_tenant_removes_its_bytes_from_the_files(tmp_path: Path) -> None:
    rig = TiersRig(tmp_path, slots=300, cap=200 * SPAN)
    mine, theirs = b"m" * 16, b"t" * 16
    chains = [(chain_keys(n, 8), mine if n % 2 else theirs) for n in range(16)]
    for keys, tenant in chains:
        rig.put(keys, tenant=tenant)
    rig.settle()
    cleared = rig.tiers.clear(mine)
    assert (cleared.host, cleared.disk) == (64, 64)
    rig.settle()
    stored = [
        unpack(data[at : at + HEADER_BYTES], number, at)
        for number in rig.files.list()
        for data in [rig.files.path(number).read_bytes()]
        for at in range(0, len(data), ALIGNMENT)
    ]
    assert {it.block.tenant for it in stored if it} == {theirs}
    for number, (keys, tenant) in enumerate(chains):
        assert rig.read(keys, number + 1) == (0 if tenant == mine else 8)
    assert rig.bytes_on_disk() == rig.index.used
    rig.files.close()


def test_cleaning_keeps_what_is_hot(tmp_path: Path) -> None:
    rig = TiersRig(tmp_path, slots=64, cap=640 * SPAN)
    hot = [chain_keys(f"hot {n}", 1) for n in range(60)]
    for number, keys in enumerate(hot):  # one in each segment
        rig.put(keys)
        rig.put(chain_keys(number, 9))
        rig.settle()
    for number in range(100):
        for index in range(6):
            keys = hot[(6 * number + index) % 60]
            assert rig.read(keys, 10 * number + index + 1) == 1, "a hot block was given up"
        rig.put(chain_keys(f"cold {number}", 10))
        rig.settle()
    assert rig.counter("disk_rewritten") > 0
    assert rig.counter("disk_dropped") > 500
    rig.files.close()


def test_larger_files_of_an_earlier_store_are_cleaned_without_loss() -> None:
    """What is kept free is enough for all of a segment that is worth keeping."""
    index = SegmentIndex(4096 * SPAN, FINGERPRINT, SIZE)
    assert index.segment_bytes == 8 * SPAN
    keys = chain_keys("found", 3840)
    blocks = [Block(key, bytes(16), TENANT, 0, 1) for key in keys]
    for number in range(30):
        index.found(number + 1, 128 * SPAN)
    for number in range(30):
        records = [
            Record(FINGERPRINT, block, SIZE, number + 1, at * SPAN, 0, 1)
            for at, block in enumerate(blocks[128 * number : 128 * (number + 1)])
        ]
        assert index.recovered(number + 1, 128 * SPAN, records) == 128
    hot = keys[::2]
    for key in hot:
        index.touch([key])
    for key in chain_keys("new", 500):
        while (placed := index.place(Block(key, bytes(16), TENANT, 0, 1), 2, 0)) is Placed.FULL:
            cleaning = index.clean(0)
            assert cleaning is not None
            for source, target in cleaning.moves:
                index.moved(source, target)
            index.deleted(cleaning.segment)
            assert index.used <= index.cap
        assert isinstance(placed, Record)
        index.landed(placed)
    index.check()
    assert all(key in index for key in hot)


def test_a_block_used_once_does_not_displace_blocks_that_are_used(tmp_path: Path) -> None:
    rig = TiersRig(tmp_path, slots=130, cap=64 * SPAN)
    hot = [chain_keys(f"hot {n}", 6) for n in range(10)]
    for keys in hot:
        rig.put(keys)
    rig.settle()
    for number in range(3):
        for index, keys in enumerate(hot):
            assert rig.read(keys, 100 * number + index + 1) == 6
    rig.index._order.give_credit(True)  # as it is when that has proven better
    for number in range(6):
        rig.put(chain_keys(f"scan {number}", 4))
        rig.settle()
    assert rig.counter("disk_not_worth") > 0
    assert all(key in rig.index for keys in hot for key in keys)
    rig.files.close()


# -- disks that fail -------------------------------------------------------------------------------


class FullDisk(FileSystem):
    """Has room for so many bytes."""

    def __init__(self, folder: Path, room: int) -> None:
        super().__init__(folder)
        self.room = room

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        used = sum(self.list().values())
        whole = b"".join(parts)
        if used >= self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.pwrite(fd, whole[: self.room - used], offset)


@pytest.mark.A5
def test_a_disk_that_fills_part_way_is_counted_and_used_again_when_there_is_room(
    tmp_path: Path,
) -> None:
    disk = FullDisk(tmp_path, 20 * SPAN + 1000)
    rig = TiersRig(tmp_path, slots=100, cap=64 << 20, files=disk)
    keys = [chain_keys(number, 8) for number in range(6)]
    for chain in keys:
        rig.put(chain)
    for _ in range(40):
        rig.tick(1.0)
        rig.work(10)
        rig.tiers.check()
    assert rig.counter("disk_write_errors") > 0
    assert rig.bytes_on_disk() == rig.index.used <= disk.room, "nothing half-written is left"
    assert [rig.read(chain, n + 1) for n, chain in enumerate(keys)] == [8] * 6, "serves on"
    disk.room = 64 << 20
    rig.settle(seconds=40.0)
    assert len(rig.index) == 48, "puts resume"
    assert rig.bytes_on_disk() == rig.index.used
    rig.files.close()


@pytest.mark.A5
def test_a_file_size_limit_of_the_system_is_met_like_a_full_disk(tmp_path: Path) -> None:
    """A real kernel that refuses, in a process of its own: limits and signals are a process's."""
    script = f"""
import resource, signal, sys
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (5 * {SPAN} + 77, resource.RLIM_INFINITY))
from kvferry.tests.store_rig import chain_keys
from kvferry.tests.tiers_rig import TiersRig
rig = TiersRig(Path(sys.argv[1]), slots=100, cap=64 << 20)
for number in range(6):
    rig.put(chain_keys(number, 8))
for _ in range(60):
    rig.tick(40.0)
    rig.work(10)
rig.tiers.check()
assert rig.counter("disk_write_errors") > 0
assert rig.bytes_on_disk() == rig.index.used
assert [rig.read(chain_keys(n, 8), n + 1) for n in range(6)] == [8] * 6
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)


class BrokenDisk(FileSystem):
    """Reads as it should; every write fails with this."""

    code = errno.EROFS

    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        raise OSError(self.code, os.strerror(self.code))

    def delete(self, number: int) -> None:
        raise OSError(self.code, os.strerror(self.code))


@pytest.mark.A5
@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO, errno.EACCES])
def test_a_disk_that_cannot_be_written_is_still_read(tmp_path: Path, code: int) -> None:
    keys = filled(tmp_path, 4, 8)
    disk = BrokenDisk(tmp_path)
    disk.code = code
    rig = TiersRig(tmp_path, slots=24, cap=64 << 20, files=disk)
    rig.tick(1.0)
    rig.work(10)
    for number in range(20):
        rig.put(chain_keys(f"new {number}", 4))
        rig.tick(10.0)
        rig.work(10)
        rig.tiers.check()
    assert rig.counter("disk_write_errors") > 0
    assert [rig.read(chain, n + 1) for n, chain in enumerate(keys)] == [8] * 4
    assert rig.bytes_on_disk() == rig.index.used
    rig.files.close()


@pytest.mark.A5
def test_a_directory_that_cannot_be_written_is_still_read(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    keys = filled(folder, 4, 8)
    os.chmod(folder, 0o500)
    try:
        rig = TiersRig(folder, slots=48, cap=64 << 20)
        rig.tick()
        rig.work(10)
        assert [rig.read(chain, n + 1) for n, chain in enumerate(keys)] == [8] * 4
        rig.put(chain_keys("new", 4))
        for _ in range(5):
            rig.tick(10.0)
            rig.work(10)
        rig.tiers.check()
        if os.geteuid() != 0:  # root may write anywhere
            assert rig.counter("disk_write_errors") > 0
        rig.files.close()
    finally:
        os.chmod(folder, 0o700)


@pytest.mark.A5
def test_a_directory_that_vanishes_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    rig = TiersRig(folder, slots=64, cap=64 << 20)
    keys = chain_keys("x", 8)
    rig.put(keys)
    rig.settle()
    assert len(rig.index) == 8
    shutil.rmtree(folder)
    rig.settle(seconds=3.0)
    assert rig.counter("disk_lost") == 1
    rig.settle(seconds=3.0)
    assert len(rig.index) == 8, "what memory still has is written again"
    assert rig.bytes_on_disk() == rig.index.used == 8 * SPAN
    shutil.rmtree(folder)
    rig.tiers.arena.discard(keys[3])
    assert rig.read(keys, 1) == 3, "a block that is gone ends the load, and nothing else"
    rig.tiers.check()
    rig.files.close()


def test_one_directory_has_one_owner_and_nobody_else_can_read_it(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    rig = TiersRig(folder, cap=64 << 20)
    rig.put(chain_keys("x", 4))
    rig.settle()
    with pytest.raises(ConfigError, match="in use"):
        FileSystem(folder).lock()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    rig.files.close()
    again = FileSystem(folder)
    again.lock()
    again.close()


def test_a_smaller_cap_at_the_next_start_is_kept_at_once(tmp_path: Path) -> None:
    filled(tmp_path, 40, 8, cap=400 * SPAN)
    rig = TiersRig(tmp_path, cap=64 * SPAN)
    assert rig.bytes_on_disk() <= 64 * SPAN
    rig.settle()
    rig.tiers.check()
    assert rig.bytes_on_disk() == rig.index.used
    rig.files.close()


def test_more_than_can_be_written_is_shed_and_counted(tmp_path: Path) -> None:
    rig = TiersRig(tmp_path, slots=64, cap=64 << 20)
    for number in range(30):
        rig.put(chain_keys(number, 4))  # and the disk does nothing
        rig.tiers.check()
    assert rig.counter("disk_shed") > 0
    assert rig.tiers.disk is not None and rig.tiers.disk.unwritten <= 33
    rig.settle()
    assert rig.counter("disk_shed") + rig.counter("disk_evicted_unwritten") + len(rig.index) == 120
    rig.files.close()


def test_reads_come_before_writes(tmp_path: Path) -> None:
    keys = filled(tmp_path, 8, 8)
    rig = TiersRig(tmp_path, slots=32, cap=64 << 20)
    rig.settle()
    rig.put(chain_keys("new", 8))
    rig.tick(1.0)
    assert rig.jobs, "a write waits"
    assert rig.read(keys[0], 1) == 8
    assert rig.counter("disk_writes") == 0, "the reads overtook it"
    rig.settle()
    assert rig.counter("disk_writes") == 8
    rig.files.close()


@pytest.mark.A3
def test_a_restart_doubles_nothing(tmp_path: Path) -> None:
    keys = filled(tmp_path, 10, 8)
    before = sum(FileSystem(tmp_path).list().values())
    for _ in range(3):
        rig = TiersRig(tmp_path, slots=200, cap=64 << 20)
        rig.settle()
        for chain in keys:
            rig.put(chain)
        rig.settle()
        assert rig.bytes_on_disk() == before
        assert [rig.read(chain, n + 1) for n, chain in enumerate(keys)] == [8] * 10
        rig.files.close()


def test_time_is_not_part_of_identity(tmp_path: Path) -> None:
    filled(tmp_path, 1, 2)
    data = FileSystem(tmp_path).path(1).read_bytes()
    record = unpack(data[:HEADER_BYTES], 1, 0)
    assert record is not None and record.fingerprint == FINGERPRINT
    assert abs(record.written_s - time.time()) < 3600
    assert unpack(data[:HEADER_BYTES], 1, SPAN) is None, "a record elsewhere is none"
    assert unpack(data[:HEADER_BYTES], 2, 0) is None


def test_a_tenant_is_cleared_and_what_was_found_at_the_start_is_kept(tmp_path: Path) -> None:
    mine, theirs = b"m" * 16, b"t" * 16
    rig = TiersRig(tmp_path, slots=100, cap=200 * SPAN)
    kept, gone = chain_keys("kept", 8), chain_keys("gone", 8)
    rig.put(kept, tenant=theirs)
    rig.put(gone, tenant=mine)
    rig.settle()
    rig.files.close()
    rig = TiersRig(tmp_path, slots=100, cap=200 * SPAN)
    rig.settle()
    rig.tiers.clear(mine)
    rig.settle()
    assert (rig.read(kept, 1), rig.read(gone, 2)) == (8, 0)
    assert rig.bytes_on_disk() == rig.index.used == 8 * SPAN
    rig.files.close()
