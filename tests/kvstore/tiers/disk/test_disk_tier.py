"""The disk tier: its cap holds, what is hot stays, what is cleared is gone, and it starts again."""

from __future__ import annotations

import random
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.store.storage import open_files
from kvferry.kvstore.tiers.disk.files import FileSystem
from kvferry.kvstore.tiers.disk.record import ALIGNMENT, HEADER_BYTES, unpack
from kvferry.kvstore.tiers.disk.worker import WriteJob
from kvferry.tests.rigs.store.rig import chain_keys, payload_of
from kvferry.tests.rigs.store.tiers import FINGERPRINT, SIZE, SPAN, TiersRig, filled


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
    assert rig.counter("disk_evictions") > 300
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
    assert rig.tiers.host.num_resident == 0
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
    left = b"".join(rig.files.path(number).read_bytes() for number in rig.files.list())
    for keys, tenant in chains:
        assert all((payload_of(key, SIZE) in left) == (tenant == theirs) for key in keys)
    for number, (keys, tenant) in enumerate(chains):
        assert rig.read(keys, number + 1) == (0 if tenant == mine else 8)
    assert rig.bytes_on_disk() == rig.index.used
    rig.files.close()


def test_what_is_hot_stays_and_each_block_is_written_once(tmp_path: Path) -> None:
    rig = TiersRig(tmp_path, slots=64, cap=640 * SPAN)
    hot = [chain_keys(f"hot {n}", 1) for n in range(60)]
    for number, keys in enumerate(hot):
        rig.put(keys)
        rig.put(chain_keys(number, 9))
        rig.settle()
    for number in range(100):
        for index in range(6):
            keys = hot[(6 * number + index) % 60]
            assert rig.read(keys, 10 * number + index + 1) == 1, "a hot block was given up"
        rig.put(chain_keys(f"cold {number}", 10))
        rig.settle()
    assert rig.counter("disk_writes") == 1600 and rig.counter("disk_evictions") == 960
    assert rig.counter("disk_write_bytes") == 1600 * SPAN
    assert rig.bytes_on_disk() == rig.index.used == 640 * SPAN, "all of the cap is used"
    rig.files.close()


def test_a_block_is_read_while_its_slot_is_given_to_another(tmp_path: Path) -> None:
    """The thread is ahead of the tiers; whatever was asked for before is read before."""
    dice = random.Random(1)
    rig = TiersRig(tmp_path, slots=64, cap=128 * SPAN)
    chains = [chain_keys(number, 4) for number in range(80)]
    given_up = 0
    for number in range(800):
        keys = chains[min(79, int(dice.expovariate(1 / 30)))]
        before = rig.counter("disk_evictions")
        for read in range(4):
            fetch = rig.tiers.fetch(
                "other", 4 * number + read, keys, 0, deadline=rig.now + 5, window=8, now=rig.now
            )
            assert fetch is not None
        rig.tick(dice.random())
        given_up += any(isinstance(job, WriteJob) for job in rig.jobs) and (
            rig.counter("disk_evictions") > before
        )
        rig.run_ahead(dice.randrange(20))
        got = rig.read(keys, number + 1)
        rig.put(keys, start=got)
        for read in range(4):
            rig.tiers.fetches.cancel("other", 4 * number + read)
        rig.hear()
        rig.tiers.check()
    rig.settle()
    assert given_up > 50, "it was not put to the test"
    damages = ("short", "gone", "header", "payload")
    assert [rig.counter(f"disk_damaged_{damage}") for damage in damages] == [0] * 4
    assert rig.bytes_on_disk() == rig.index.used
    rig.files.close()


def test_files_of_another_length_are_used_on(tmp_path: Path) -> None:
    """What a store with another cap has left: neither its files nor its records are in the way."""
    keys = filled(tmp_path, 30, 8, cap=4096 * SPAN)
    assert len(FileSystem(tmp_path).list()) == 1
    rig = TiersRig(tmp_path, slots=64, cap=256 * SPAN)
    assert rig.index.file_bytes == 16 * SPAN
    rig.settle()
    assert [rig.read(chain, number + 1) for number, chain in enumerate(keys)] == [8] * 30
    for number in range(20):
        rig.put(chain_keys(f"new {number}", 4))
        rig.settle()
    assert rig.bytes_on_disk() == rig.index.used == 256 * SPAN
    assert [rig.read(chain_keys(f"new {n}", 4), 100 + n) for n in range(20)] == [4] * 20
    assert len(rig.index) == 256
    rig.files.close()


def test_records_of_another_size_are_counted_and_their_files_go_first(tmp_path: Path) -> None:
    rig = TiersRig(tmp_path, slots=64, cap=64 * SPAN, size=2 * SPAN - 128)
    for number in range(8):
        rig.put(chain_keys(number, 4))
        rig.settle()
    size = rig.bytes_on_disk()
    assert size == 64 * SPAN
    rig.files.close()
    rig = TiersRig(tmp_path, slots=64, cap=64 * SPAN)
    rig.settle()
    assert rig.counter("disk_foreign") == 32 and rig.index.used == size
    keys = chain_keys("new", 40)
    for end in range(4, 41, 4):
        rig.put(keys[:end], start=end - 4)
        rig.settle()
        assert rig.bytes_on_disk() == rig.index.used <= 64 * SPAN
    assert rig.read(keys, 1) == 40 and rig.counter("disk_evictions") == 0
    rig.files.close()


@pytest.mark.parametrize("punches", [True, False])
def test_what_is_erased_reads_as_zeros_and_takes_no_room_where_holes_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, punches: bool
) -> None:
    if not punches:
        monkeypatch.setattr("kvferry.kvstore.tiers.disk.files._punch_hole", lambda *_: False)
    filled(tmp_path, 1, 8)
    files = FileSystem(tmp_path)
    before, blocks = files.path(1).read_bytes(), files.path(1).stat().st_blocks
    files.erase(1, 2 * SPAN, SPAN)
    after = files.path(1).read_bytes()
    assert after == before[: 2 * SPAN] + bytes(SPAN) + before[3 * SPAN :]
    if punches:
        assert files.path(1).stat().st_blocks < blocks
    files.erase(1, 7 * SPAN, 2 * SPAN)  # more than there is
    assert files.path(1).stat().st_size == len(before)
    files.erase(2, 0, SPAN)  # a file that is not there has nothing in it
    assert list(files.list()) == [1]


def test_files_of_the_first_format_are_deleted_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        (tmp_path / f"segment-{number:010d}.kv").write_bytes(b"kvferry1" + bytes(5000))
    files = open_files(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    (line,) = caplog.messages
    assert line == f"3 files of an older format were deleted from {tmp_path}"
    files.close()
    open_files(tmp_path).close()
    assert len(caplog.messages) == 1


def test_of_two_records_of_a_key_the_later_one_counts(tmp_path: Path) -> None:
    (keys,) = filled(tmp_path, 1, 4)
    files = FileSystem(tmp_path)
    data = bytearray(files.path(1).read_bytes())
    first = unpack(data[:HEADER_BYTES], 1, 0)
    assert first is not None and first.block.key == keys[0]
    copy = replace(first, offset=4 * SPAN, sequence=99)
    files.path(1).write_bytes(bytes(data) + copy.pack() + data[HEADER_BYTES:SPAN])
    rig = TiersRig(tmp_path, cap=1 << 30)
    rig.settle()
    assert rig.index.record(keys[0]).offset == 4 * SPAN and len(rig.index) == 4
    assert rig.read(keys, 1) == 4
    rig.put(chain_keys("new", 1))
    rig.settle()
    new = rig.index.record(chain_keys("new", 1)[0])
    assert (new.offset, new.sequence) == (0, 100), "the slot of the other is free"
    rig.files.close()


def test_prompts_seen_once_displace_one_another_and_not_what_is_used(tmp_path: Path) -> None:
    rig = TiersRig(tmp_path, slots=130, cap=64 * SPAN)
    hot = [chain_keys(f"hot {n}", 6) for n in range(10)]
    for keys in hot:
        rig.put(keys)
    rig.settle()
    for number in range(3):
        for index, keys in enumerate(hot):
            assert rig.read(keys, 100 * number + index + 1) == 6
    rig.index._order.give_credit(True)  # as it is when that has proven better
    for number in range(30):
        rig.put(chain_keys(f"scan {number}", 4))
        rig.settle()
    assert rig.index.evictions > 100
    displaced = sum(key not in rig.index for keys in hot for key in keys)
    assert displaced <= 4, "at most one such prompt's worth"
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
    assert (record.sequence, record.uses) == (1, 1)
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
    assert rig.bytes_on_disk() == rig.index.used == 16 * SPAN
    assert rig.index.held == 8 * SPAN
    rig.files.close()
