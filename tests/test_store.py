"""The store through a node's eyes: put, load, restart, clear."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from kvferry.tests.store_rig import StoreRig, chain_keys


class MakeRig(Protocol):
    def __call__(self, **options: object) -> StoreRig: ...


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    rigs: list[StoreRig] = []

    def make(**options: object) -> StoreRig:
        rigs.append(StoreRig(tmp_path, **options))  # type: ignore[arg-type]
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.mark.parametrize("transfer", ["arena", "inline"])
def test_what_was_put_is_loaded(make_rig: MakeRig, transfer: str) -> None:
    rig = make_rig()
    client = rig.client(transfer)  # type: ignore[arg-type]
    keys = chain_keys("x", 20)
    assert rig.put(client, keys) == 20
    load, _ = rig.load(client, keys)
    assert (load.ended, load.taken, load.from_host) == ("complete", 20, 20)
    load, _ = rig.load(client, [*keys, *chain_keys("y", 3)], first=5)
    assert (load.ended, load.taken) == ("short", 15)
    assert client.shared is (transfer == "arena")


@pytest.mark.parametrize("transfer", ["arena", "inline"])
def test_a_prompt_larger_than_the_arena_passes_through_it(make_rig: MakeRig, transfer: str) -> None:
    rig = make_rig(slots=8, disk=16 << 20)
    client = rig.client(transfer)  # type: ignore[arg-type]
    keys = chain_keys("x", 600)
    for start in range(0, 600, 20):
        rig.put(client, keys[: start + 20], start=start)
        rig.settle()
    assert rig.counters["disk_writes"] == 600
    load, _ = rig.load(client, keys)
    assert (load.ended, load.taken) == ("complete", 600)
    assert load.from_disk > 300
    assert rig.bytes_on_disk() == rig.space.tiers.disk.index.used  # type: ignore[union-attr]


def test_a_new_store_finds_what_the_old_one_wrote(tmp_path: Path) -> None:
    keys = chain_keys("x", 30)
    rig = StoreRig(tmp_path, disk=4 << 20)
    rig.put(rig.client(), keys)
    rig.settle()
    rig.close()
    rig = StoreRig(tmp_path, disk=4 << 20)
    client = rig.client()
    rig.settle()
    assert rig.counters["disk_recovered"] == 30
    load, _ = rig.load(client, keys)
    assert (load.ended, load.taken, load.from_disk) == ("complete", 30, 30)
    assert rig.answer(client.locate(keys)) == "h" * 30
    rig.close()
