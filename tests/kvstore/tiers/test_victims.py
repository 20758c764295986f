"""What the disk gives up stays in memory a while: a few blocks, and at nobody's cost."""

from __future__ import annotations

import shutil
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from kvferry.kvstore.tiers.block import Block
from kvferry.kvstore.tiers.disk.files import FileSystem
from kvferry.kvstore.tiers.disk.record import Record
from kvferry.kvstore.tiers.disk.segments import Placed, SegmentIndex
from kvferry.kvstore.tiers.disk.worker import DeleteJob, Disk, DiskJob, DiskWorker, MoveJob, ReadJob
from kvferry.kvstore.tiers.host import HostTier
from kvferry.tests.rigs.store.rig import TENANT, chain_keys
from kvferry.tests.rigs.store.tiers import FINGERPRINT, SIZE, SPAN, TiersRig

SLOTS, MOST = 64, 4
"""Of the arena; a sixteenth of it."""
RECORDS = 256


def overfull(folder: Path, length: int = 1) -> tuple[TiersRig, list[list[bytes]]]:
    """A disk that got twice what it holds, in chains of so many blocks."""
    rig = TiersRig(folder, slots=SLOTS, cap=RECORDS * SPAN)
    keys = [chain_keys(number, length) for number in range(2 * RECORDS // length)]
    for number, chain in enumerate(keys):
        rig.put(chain)
        rig.settle()
        if number % 32 == 0:
            rig.tiers.check()
    return rig, keys


def until_saving(rig: TiersRig) -> ReadJob:
    """Puts more until the disk gives a block up; the job that saves it, not done yet."""
    for number in range(50):
        rig.put(chain_keys(f"until {number}", 1))
        for _ in range(10):
            rig.tick(1.0)
            for job in rig.jobs:
                if isinstance(job, ReadJob) and not job.urgent:
                    return job
            rig.work()
    raise AssertionError("nothing was given up")


def victims(rig: TiersRig, keys: list[list[bytes]]) -> list[list[bytes]]:
    """Chains that are in memory, and neither on disk nor on their way there."""
    assert rig.tiers.disk is not None and rig.tiers.disk.unwritten == 0
    return [chain for chain in keys if chain[0] in rig.tiers.host and chain[0] not in rig.index]


def test_what_the_disk_gives_up_is_served_from_memory_and_goes_to_disk_again(
    tmp_path: Path,
) -> None:
    rig, keys = overfull(tmp_path)
    saved = victims(rig, keys)
    assert len(saved) == len(rig.tiers.victims) == MOST and rig.counter("disk_saved") > 50
    before = rig.counter("disk_reads")
    assert rig.read(saved[0], 1) == 1
    assert rig.counter("disk_reads") == before and rig.counter("blocks_host") == 1
    rig.settle()
    assert saved[0][0] in rig.index, "what is asked for is on disk again"
    rig.tiers.check()
    rig.files.close()


def test_a_victim_that_is_put_again_goes_to_disk_again(tmp_path: Path) -> None:
    rig, keys = overfull(tmp_path)
    saved = victims(rig, keys)
    rig.put(saved[0])
    rig.settle()
    assert saved[0][0] in rig.index
    rig.files.close()


def test_the_end_of_a_chain_is_kept_while_its_beginning_is_on_disk(tmp_path: Path) -> None:
    rig, keys = overfull(tmp_path, 8)
    dropped, saved = rig.counter("disk_dropped"), rig.counter("disk_saved")
    assert saved == dropped > 200
    before = {it.key for it in rig.tiers.host.blocks() if it.key not in rig.index}
    parents = {key: parent for chain in keys for parent, key in pairwise(chain)}
    alone = {key for key in before if key in parents and parents[key] not in rig.tiers.host}
    assert len(before) == MOST and alone
    rig.put(chain_keys("more", 1))
    assert all(key in rig.tiers.host for key in alone), "parents on disk are enough"
    rig.files.close()


def test_parents_are_given_up_before_what_is_chained_to_them() -> None:
    index = SegmentIndex(1024 * SPAN, FINGERPRINT, SIZE)
    segment = index.segment_bytes // SPAN
    assert segment >= 4
    together = 0
    for number in range(2 * 1024 // segment):
        keys = chain_keys(number, segment)  # one in each segment
        for depth, (key, parent) in enumerate(zip(keys, [bytes(16), *keys], strict=False)):
            block = Block(key, parent, TENANT, depth, 1)
            while (placed := index.place(block, 1, 0)) is Placed.FULL:
                cleaning = index.clean(0)
                assert cleaning is not None
                depths = [record.block.depth for record in cleaning.dropped]
                assert depths == sorted(depths)
                together += len(depths) > 1
                for source, target in cleaning.moves:
                    index.moved(source, target)
                index.deleted(cleaning.segment)
            assert isinstance(placed, Record)
            index.landed(placed)
    assert together > 20


def test_the_oldest_victims_go_first_and_only_victims_go_for_them(tmp_path: Path) -> None:
    rig, keys = overfull(tmp_path)
    first = victims(rig, keys)
    both = [chain for chain in keys if chain[0] in rig.tiers.host and chain not in first]
    for number in range(8):
        rig.put(chain_keys(f"more {number}", 1))
        rig.settle()
    later = victims(rig, keys)
    assert len(later) == MOST and keys.index(later[0]) > keys.index(first[-1])
    there = [chain for chain in both if chain[0] in rig.tiers.host]
    assert len(there) >= len(both) - 8 - MOST, "new blocks push out as many, and victims a few"
    rig.files.close()


def test_nothing_that_waits_to_be_written_makes_room_for_a_victim(tmp_path: Path) -> None:
    rig, _ = overfull(tmp_path)
    host = rig.tiers.host
    held = host.grant("writer", SLOTS)
    assert len(held) == SLOTS and len(rig.tiers.victims) == 0
    for slot in held[:8]:
        host.give_back("writer", slot)
    for number in range(8):  # all that is left of the arena, and all of it unwritten
        rig.put(chain_keys(f"new {number}", 1))
    saved = rig.counter("disk_saved")
    rig.settle()
    assert rig.counter("disk_evicted_unwritten") == 0
    assert rig.counter("disk_saved") <= saved + 8
    assert all(chain_keys(f"new {number}", 1)[0] in rig.index for number in range(8))
    rig.tiers.check()
    rig.files.close()


@pytest.mark.parametrize("whose", [TENANT, None])
def test_what_is_cleared_while_it_is_being_saved_is_not_served(
    whose: bytes | None, tmp_path: Path
) -> None:
    rig, keys = overfull(tmp_path)
    until_saving(rig)
    rig.tiers.clear(whose)
    rig.settle()
    assert len(rig.tiers.victims) == 0 and rig.tiers.host.num_resident == 0
    assert [rig.read(chain, number + 1) for number, chain in enumerate(keys)] == [0] * len(keys)
    rig.tiers.check()
    rig.files.close()


def test_another_tenants_clear_loses_no_block_that_is_being_saved(tmp_path: Path) -> None:
    rig, _ = overfull(tmp_path)
    saving = until_saving(rig)
    rig.tiers.clear(b"somebody else".ljust(16))
    rig.settle()
    assert saving.record.block.key in rig.tiers.host
    rig.files.close()


def test_a_block_that_is_put_again_while_it_is_being_saved_is_no_victim(tmp_path: Path) -> None:
    rig, keys = overfull(tmp_path)
    saving = until_saving(rig)
    wanted = next(chain for chain in keys if chain[0] == saving.record.block.key)
    assert rig.tiers.locate(wanted) == b"", "nobody is made to wait for it"
    rig.put(wanted)
    rig.settle()
    rig.tiers.check()
    assert wanted[0] in rig.index and wanted[0] in rig.tiers.host
    rig.files.close()


def test_a_victim_that_goes_is_remembered_with_the_uses_it_had(tmp_path: Path) -> None:
    rig, keys = overfull(tmp_path)
    (victim,) = victims(rig, keys)[0]
    uses = rig.tiers.host.order.uses
    before = uses(victim)
    for number in range(2 * MOST):
        rig.put(chain_keys(f"more {number}", 1))
        rig.settle()
    assert victim not in rig.tiers.host and uses(victim) == before == 1
    rig.files.close()


def test_that_a_block_comes_to_be_kept_is_no_use_of_it() -> None:
    host = HostTier(4)
    block = Block(b"k" * 16, b"p" * 16, TENANT, 3, 0)
    host.commit("writer", host.grant("writer", 1)[0], block, None)
    host.evict(block.key)
    slot = host.start_fill(spare=True)
    assert slot is not None
    host.filled(slot, block, alone=True)
    assert host.order.uses(block.key) == 1
    host.check()


@pytest.mark.parametrize("cap", [20, 40, 256])
def test_a_directory_that_vanishes_and_fills_again_confuses_no_victim(
    cap: int, tmp_path: Path
) -> None:
    folder = tmp_path / "blocks"
    folder.mkdir()
    rig = TiersRig(folder, slots=SLOTS, cap=cap * SPAN)
    for number in range(cap):
        rig.put(chain_keys(number, 1))
        rig.settle()
    for slot in rig.tiers.host.grant("writer", SLOTS):  # so the arena has none of them
        rig.tiers.host.give_back("writer", slot)
    for number in range(60):
        rig.put(chain_keys(f"next {number}", 1))
        rig.settle()
    assert len(rig.tiers.victims) == MOST
    shutil.rmtree(folder)
    rig.tick(3.0)
    for number in range(300):
        for index in range(4):
            rig.put(chain_keys(f"then {number} {index}", 1))
        rig.tick(0.01)
        rig.work()
        if number < 60:
            rig.tiers.check()
    rig.settle()
    rig.tiers.check()
    rig.files.close()


def test_one_that_cannot_be_read_leaves_no_slot_behind(tmp_path: Path) -> None:
    rig, _ = overfull(tmp_path)
    saved = rig.counter("disk_saved")
    rig.faults.damage_reads = 10**6
    for number in range(20):
        rig.put(chain_keys(f"more {number}", 1))
        rig.settle()
        rig.tiers.check()
    assert rig.counter("disk_damaged_payload") >= 10 and rig.counter("disk_saved") == saved
    ledger = rig.tiers.host.ledger()
    assert ledger["filling"] == 0 and ledger["free"] + ledger["resident"] == SLOTS
    rig.files.close()


def until_moving(rig: TiersRig) -> list[MoveJob]:
    """Puts more until a segment is cleaned; the moves out of it, none of them done yet."""
    for number in range(200):
        rig.put(chain_keys(f"until {number}", 1))
        rig.tick(1.0)
        while rig.jobs:
            moves = [job for job in rig.jobs if isinstance(job, MoveJob)]
            if moves:
                return moves
            rig.work()
    raise AssertionError("nothing was moved")


def test_what_a_full_disk_cannot_move_stays_in_memory(tmp_path: Path) -> None:
    rig = TiersRig(tmp_path, slots=SLOTS, cap=1024 * SPAN)
    assert rig.index.segment_bytes == 4 * SPAN
    keys = [chain_keys(number, 1) for number in range(1020)]
    for chain in keys:
        rig.put(chain)
        rig.settle()
    for number, chain in enumerate(keys[::2]):
        assert rig.read(chain, number) == 1, "half of each segment is worth keeping"
    moves = until_moving(rig)
    assert 1 <= len(moves) <= MOST
    rig.faults.fail_writes = len(moves)
    rig.work(len(moves))
    rig.settle()
    assert rig.counter("disk_write_errors") == len(moves)
    left = [job.source.block.key for job in moves]
    assert all(key in rig.tiers.host and key not in rig.index for key in left)
    assert [rig.read([key], 2000 + at) for at, key in enumerate(left)] == [1] * len(left)
    rig.settle()
    assert all(key in rig.index for key in left), "they were wanted again"
    assert rig.bytes_on_disk() == rig.index.used
    rig.tiers.check()
    rig.files.close()


def test_without_its_parent_a_block_is_not_saved(tmp_path: Path) -> None:
    rig = TiersRig(tmp_path, slots=SLOTS, cap=RECORDS * SPAN)
    orphan = Block(b"o" * 16, b"p" * 16, TENANT, 5, 0)
    rig.tiers._save([Record(FINGERPRINT, orphan, SIZE, 1, 0, 0, 1)])
    assert not rig.jobs and len(rig.tiers.victims) == 0
    rig.files.close()


def test_a_reader_waits_for_no_block_that_is_only_being_saved(tmp_path: Path) -> None:
    order: list[DiskJob] = []
    started, go_on = threading.Event(), threading.Event()

    class Slow(DiskWorker):
        def do(self, job: DiskJob) -> None:
            order.append(job)
            started.set()
            go_on.wait(20)

    disk = Disk(Slow(FileSystem(tmp_path)))
    record = Record(FINGERPRINT, Block(b"k" * 16, b"", TENANT, 0, 0), SIZE, 1, 0, 0, 1)
    jobs: list[DiskJob] = [
        DeleteJob(1),
        ReadJob(record, memoryview(bytearray(SIZE)), urgent=False),
        DeleteJob(2),
        ReadJob(record, memoryview(bytearray(SIZE))),
    ]
    disk.submit(jobs[0])
    assert started.wait(20)
    for job in jobs[1:]:
        disk.submit(job)
    go_on.set()
    assert disk.close() == order == [jobs[0], jobs[3], jobs[1], jobs[2]]
