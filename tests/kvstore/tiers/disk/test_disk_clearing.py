"""What is cleared does not come back: not when files cannot be deleted, not when the store ends."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from kvferry.kvstore.client.client import StoreClient
from kvferry.kvstore.keys import tenant_key
from kvferry.kvstore.tiers.disk.worker import ProbeJob, WriteJob
from kvferry.tests.rigs.store.rig import StoreRig, chain_keys, payload_of
from kvferry.tests.rigs.store.tiers import SIZE, SPAN, StubbornFiles, TiersRig

CAP = 1024 * SPAN
"""Files of 64 slots."""
ALICE, BOB = tenant_key("alice"), tenant_key("bob")


def shared_file(folder: Path) -> tuple[TiersRig, StubbornFiles, list[bytes], list[bytes]]:
    """Two tenants whose blocks are in one file."""
    files = StubbornFiles(folder)
    rig = TiersRig(folder, slots=300, cap=CAP, files=files)
    alices, bobs = chain_keys("alice's", 2), chain_keys("bob's", 2)
    rig.put(alices, tenant=ALICE)
    rig.put(bobs, tenant=BOB)
    rig.settle()
    assert list(files.list()) == [1]
    return rig, files, alices, bobs


def put_slowly(rig: TiersRig, keys: list[bytes]) -> None:
    """No faster than the disk can take it."""
    for end in range(10, len(keys) + 1, 10):
        rig.put(keys[:end], start=end - 10, tenant=BOB)
        rig.settle()


def served_after_restart(folder: Path, *chains: list[bytes]) -> list[int]:
    rig = TiersRig(folder, cap=CAP)
    rig.settle()
    served = [rig.read(keys, number + 1) for number, keys in enumerate(chains)]
    rig.files.close()
    return served


@pytest.mark.parametrize("refusals", [0, 1, 3])
def test_a_tenants_bytes_go_in_the_end(tmp_path: Path, refusals: int) -> None:
    rig, files, alices, bobs = shared_file(tmp_path)
    files.refusals = refusals
    rig.tiers.clear(ALICE)
    rig.tick(1.0)
    assert rig.index.ledger()["to_erase"] == 2, "it is not done yet"
    rig.settle()
    assert not files.refusals and rig.counter("disk_write_errors") == refusals
    assert rig.index.ledger()["to_erase"] == 0
    assert rig.bytes_on_disk() == rig.index.used == 4 * SPAN and rig.index.held == 2 * SPAN
    rig.tiers.check()
    files.close()
    left = files.path(1).read_bytes()
    assert ALICE not in left and not any(key in left for key in alices)
    assert [payload_of(key, SIZE) in left for key in alices + bobs] == [False] * 2 + [True] * 2
    assert served_after_restart(tmp_path, alices, bobs) == [0, 2]


@pytest.mark.parametrize("refusals", [1, 3])
def test_of_all_that_is_cleared_each_file_counts_until_it_is_gone(
    tmp_path: Path, refusals: int
) -> None:
    rig, files, alices, bobs = shared_file(tmp_path)
    more = chain_keys("more", 140)
    put_slowly(rig, more)
    sizes = list(files.list().values())
    assert sizes == [64 * SPAN, 64 * SPAN, 16 * SPAN]
    files.refusals = refusals
    rig.tiers.clear(None)
    rig.work(len(rig.jobs))
    assert rig.bytes_on_disk() == rig.index.used == sum(sizes[:refusals])
    rig.settle()
    assert not files.refusals and not files.list() and not rig.index.used
    rig.put(bobs, tenant=BOB)
    rig.settle()
    rig.tiers.check()
    files.close()
    assert served_after_restart(tmp_path, alices, bobs, more) == [0, 2, 0]


def shared_store(folder: Path) -> tuple[StoreRig, StoreClient, list[bytes], list[bytes]]:
    """The same with real sockets and the thread."""
    rig = StoreRig(folder, disk=8 << 20)
    client = rig.client()
    alices, bobs = chain_keys("alice's", 2, "alice"), chain_keys("bob's", 2, "bob")
    rig.put(client, alices, tenant=ALICE)
    rig.put(client, bobs, tenant=BOB)
    rig.settle()
    return rig, client, alices, bobs


def test_what_was_cleared_is_not_found_again_by_the_next_start(tmp_path: Path) -> None:
    """The store ends while they are being erased."""
    rig, _, alices, bobs = shared_store(tmp_path)
    disk = rig.storage.tiers.disk
    assert disk is not None and rig.storage.tiers.clear(ALICE).disk == 2
    disk.step(time.monotonic())
    assert disk.index.to_erase == 2, "it was to end in the middle"
    rig.close()
    rig = StoreRig(tmp_path, disk=8 << 20)
    client = rig.client()
    served = [rig.fetch(client, keys)[0].taken for keys in (alices, bobs)]
    rig.close()
    assert served == [0, 2]


def test_what_was_cleared_is_gone_when_another_model_comes(tmp_path: Path) -> None:
    rig, client, alices, bobs = shared_store(tmp_path)
    rig.storage.tiers.clear(ALICE)
    client.close()
    rig.clients.remove(client)
    rig.until(lambda: not rig.server.peers)
    ours, rig.fingerprint = rig.fingerprint, {"weights": "others"}
    other = rig.client()
    other.close()
    rig.clients.remove(other)
    rig.until(lambda: not rig.server.peers)
    rig.fingerprint = ours
    client = rig.client()
    served = [rig.fetch(client, keys)[0].taken for keys in (alices, bobs)]
    rig.close()
    assert served == [0, 2]


# -- files that somebody else takes away -----------------------------------------------------------


def test_a_file_deleted_under_its_writer_costs_what_was_in_it(tmp_path: Path) -> None:
    rig = TiersRig(tmp_path, cap=CAP)
    keys, later = chain_keys("in the file", 2), chain_keys("later", 2)
    rig.put(keys)
    rig.settle()
    rig.files.path(1).unlink()
    rig.put(later)
    rig.settle()
    rig.tiers.check()
    assert rig.counter("disk_records_lost") == 2
    assert rig.bytes_on_disk() == rig.index.used == 2 * SPAN
    rig.files.close()
    assert served_after_restart(tmp_path, keys, later) == [0, 2]


def test_what_is_written_to_a_directory_that_has_just_been_made_again_is_accounted_for(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "blocks"
    folder.mkdir()
    rig, files, alices, _ = shared_file(folder)
    put_slowly(rig, chain_keys("fills the first file", 60))
    rig.put(alices, tenant=ALICE)
    rig.put(chain_keys("a new file", 4))
    rig.tick(10.0)
    shutil.rmtree(folder)
    rig.settle()
    assert rig.counter("disk_lost") == 1
    assert rig.bytes_on_disk() == rig.index.used, "a file that nobody knows of"
    assert all(key in rig.index for key in alices), "filled from memory"
    rig.tiers.check()
    files.close()


def test_writes_behind_the_probe_that_finds_the_directory_gone(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    folder.mkdir()
    rig, files, *_ = shared_file(folder)
    put_slowly(rig, chain_keys("fills the first file", 60))
    shutil.rmtree(folder)
    rig.put(chain_keys("a new file", 4))
    rig.tick(10.0)
    kinds = [type(job) for job in rig.jobs]
    assert kinds.index(ProbeJob) < kinds.index(WriteJob)
    rig.run_ahead(len(rig.jobs))
    assert rig.bytes_on_disk() > 0, "nothing was written behind it"
    rig.settle()
    assert rig.bytes_on_disk() == rig.index.used
    rig.tiers.check()
    files.close()
