"""Damaged records and disks that fail: nothing wrong is served, and nothing is lost silently."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvferry.kvstore.tiers.disk.files import FileSystem
from kvferry.kvstore.tiers.disk.record import HEADER_BYTES
from kvferry.tests.rigs.store.rig import chain_keys
from kvferry.tests.rigs.store.tiers import SIZE, SPAN, TiersRig, filled

PADDING = SPAN - HEADER_BYTES - SIZE


# -- damaged records -------------------------------------------------------------------------------


class Counting:
    """Adds up what a rig has counted as damaged, in reading and in scanning."""

    NAMES = ("header", "payload", "short", "gone")

    @classmethod
    def of(cls, rig: TiersRig) -> int:
        return sum(rig.counter(f"disk_damaged_{name}") for name in cls.NAMES)


@pytest.mark.slow
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
        "from kvferry.kvstore.tiers.disk.record import unpack\n"
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
from kvferry.tests.rigs.store.rig import chain_keys
from kvferry.tests.rigs.store.tiers import TiersRig
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
    rig.tiers.host.discard(keys[3])
    assert rig.read(keys, 1) == 3, "a block that is gone ends the fetch, and nothing else"
    rig.tiers.check()
    rig.files.close()
