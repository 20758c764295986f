"""The store through a node's eyes: put, fetch, ship, clear, pin, and find again after a restart."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from kvferry.kvstore.client.client import StoreClient, Transfer
from kvferry.kvstore.client.puts import SlotRef
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.keys import tenant_key
from kvferry.kvstore.tiers import shared_memory
from kvferry.kvstore.tiers.shared_memory import SharedMemory
from kvferry.kvstore.wire.client import Client, LinkState
from kvferry.kvstore.wire.codec import PROTOCOL
from kvferry.kvstore.wire.hello import Hello
from kvferry.kvstore.wire.sockets import new_incarnation
from kvferry.tests.rigs.store.rig import (
    BLOCK_BYTES,
    TENANT,
    TRANSFERS,
    MakeRig,
    Reader,
    StoreRig,
    chain_keys,
    payload_of,
)

# -- what was put is fetched -----------------------------------------------------------------------


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_what_was_put_is_loaded(make_rig: MakeRig, transfer: Transfer) -> None:
    rig = make_rig()
    client = rig.client(transfer)
    keys = chain_keys("x", 20)
    assert rig.put(client, keys) == 20
    fetch, _ = rig.fetch(client, keys)
    assert (fetch.ended, fetch.taken, fetch.from_host) == ("complete", 20, 20)
    fetch, _ = rig.fetch(client, [*keys, *chain_keys("y", 3)], first=5)
    assert (fetch.ended, fetch.taken) == ("short", 15)
    assert bool(client.link.mapped) is (transfer == "arena")
    fetch, _ = rig.fetch(client, [])
    assert (fetch.ended, fetch.taken) == ("complete", 0)


@pytest.mark.A5
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_prompt_larger_than_the_arena_passes_through_it(
    make_rig: MakeRig, transfer: Transfer
) -> None:
    rig = make_rig(slots=8, disk=16 << 20)
    client = rig.client(transfer)
    keys = chain_keys("x", 100)
    for done in range(2, 101, 2):
        rig.put(client, keys[:done], start=done - 2)
        rig.settle()
    assert rig.counters["disk_writes"] == 100
    fetch, _ = rig.fetch(client, keys)
    assert (fetch.ended, fetch.taken) == ("complete", 100)
    assert fetch.from_disk > 50
    assert rig.bytes_on_disk() == rig.storage.tiers.disk.index.used  # type: ignore[union-attr]


def test_two_nodes_share_what_one_of_them_put(make_rig: MakeRig) -> None:
    rig = make_rig()
    writer, reader = rig.client("arena", "prefill"), rig.client("inline", "decode")
    keys = chain_keys("x", 12)
    rig.put(writer, keys)
    rig.settle()
    fetch, _ = rig.fetch(reader, keys)
    assert fetch.taken == 12
    assert reader.puts.put(TENANT, keys[3], 4, keys[4:], lambda index: pytest.fail("read")) == 8, (
        "what a node has just fetched it does not put again"
    )


@pytest.mark.A1
def test_a_tenant_hits_only_its_own(make_rig: MakeRig) -> None:
    rig = make_rig()
    client = rig.client()
    mine, theirs = chain_keys("p", 4, tenant="a"), chain_keys("p", 4, tenant="b")
    rig.put(client, mine)
    assert rig.fetch(client, mine)[0].taken == 4
    assert rig.fetch(client, theirs)[0].taken == 0
    assert tenant_key("a") != tenant_key("b") != tenant_key("")


def test_a_shipment_is_a_slot_until_it_is_let_go(make_rig: MakeRig) -> None:
    rig = make_rig()
    prefill, decode = rig.client("arena", "prefill"), rig.client("arena", "decode")
    keys = chain_keys("x", 3)
    for _ in range(
        2
    ):  # the second time the store has the blocks, and they are shipped all the same
        rig.until(lambda: len(prefill.puts.stock) >= 3)
        refs = prefill.puts.ship(TENANT, b"\0" * 16, 0, keys, lambda index: payload_of(keys[index]))
        assert len(refs) == 3
        reader = Reader()
        assert all(decode.fetches.copy(ref, reader.write) for ref in refs)
        assert reader.blocks == [payload_of(key) for key in keys]
        rig.settle()
        assert rig.storage.tiers.ledger()["held"] == 3
        prefill.puts.let_go(refs)
        rig.settle()
        assert rig.storage.tiers.ledger()["held"] == 0
    assert rig.storage.tiers.host.num_resident == 3
    old = SlotRef(refs[0].store + 1, refs[0].slot, refs[0].checksum)
    assert not decode.fetches.copy(old, reader.write), "another store's slot"
    assert not decode.fetches.copy(SlotRef(refs[0].store, 10**6, 1), reader.write)
    assert not decode.fetches.copy(SlotRef(refs[0].store, refs[0].slot, 1), reader.write)
    inline = rig.client("inline", "prefill")
    assert inline.puts.ship(TENANT, b"\0" * 16, 0, keys, lambda index: b"") == []


def test_what_the_store_has_no_room_for_is_dropped_and_counted(make_rig: MakeRig) -> None:
    rig = make_rig(slots=16)
    client, other = rig.client(), rig.client()
    keys = chain_keys("x", 10)
    rig.put(client, keys)
    fetch = other.fetches.fetch(keys, deadline_s=60.0)
    rig.until(lambda: len(fetch.ready) >= 8)
    before = client.counters["puts_dropped"]
    taken = rig.put(client, chain_keys("y", 100), wait=False)
    assert taken < 100 and client.counters["puts_dropped"] - before == 100 - taken
    other.fetches.cancel(fetch)
    rig.until(lambda: client.puts.stock)
    assert rig.storage.tiers.counters["fetches_cancelled"] == 1
    assert rig.put(client, chain_keys("z", 12)) == 12, "usable again"


# -- an operator's requests ------------------------------------------------------------------------


def test_clear_pin_prefetch_and_inspect(make_rig: MakeRig) -> None:
    rig = make_rig(slots=16, disk=4 << 20)
    client = rig.client()
    kept, other = chain_keys("kept", 4), chain_keys("other", 40, tenant="b")
    rig.put(client, kept)
    rig.settle()
    assert rig.answer(client.admin("pin", keys=kept, seconds=60.0)) == {"pinned": 4}
    for done in range(2, 41, 2):
        rig.put(client, other[:done], start=done - 2, tenant=tenant_key("b"))
        rig.settle()
    assert rig.answer(client.locate(kept)) == "hhhh"
    assert rig.answer(client.admin("unpin", keys=kept)) == {"unpinned": 4}
    tiers = rig.answer(client.admin("inspect", keys=other))["tiers"]  # type: ignore[index]
    assert set(tiers) == {"h", "d"}
    rig.answer(client.admin("prefetch", keys=other[:3], seconds=5.0))
    rig.settle()
    assert rig.answer(client.locate(other[:3])) == "hhh"
    cleared: Any = rig.answer(client.admin("clear", tenant=tenant_key("b")))
    assert cleared["cleared_disk"] == 40
    rig.settle()
    assert rig.answer(client.locate(other)) == ""
    assert rig.fetch(client, kept)[0].taken == 4
    rig.answer(client.admin("clear"))
    rig.settle()
    assert rig.answer(client.locate(kept)) == "" and rig.bytes_on_disk() == 0
    assert "error" in rig.answer(client.admin("dance"))  # type: ignore[operator]
    assert "error" in rig.answer(client.admin("pin", keys=kept, seconds=0))  # type: ignore[operator]
    stats: Any = rig.answer(client.admin("stats"))
    assert stats["arena"]["resident"] == 0 and stats["well"] is True


# -- restart ---------------------------------------------------------------------------------------


@pytest.mark.A3
def test_a_new_store_finds_what_the_old_one_wrote(tmp_path: Path) -> None:
    keys = chain_keys("x", 30)
    rig = StoreRig(tmp_path, disk=4 << 20)
    rig.put(rig.client(), keys)
    rig.settle()
    written = rig.bytes_on_disk()
    rig.close()
    rig = StoreRig(tmp_path, disk=4 << 20)
    client = rig.client()
    rig.settle()
    assert rig.counters["disk_recovered"] == 30
    fetch, _ = rig.fetch(client, keys)
    assert (fetch.ended, fetch.taken, fetch.from_disk) == ("complete", 30, 30)
    assert rig.answer(client.locate(keys)) == "h" * 30
    assert rig.bytes_on_disk() == written
    rig.close()


@pytest.mark.A2
def test_another_model_gets_another_arena_and_no_hit(make_rig: MakeRig) -> None:
    rig = make_rig(disk=4 << 20)
    first = rig.client()
    keys = chain_keys("x", 8)
    rig.put(first, keys)
    rig.settle()
    arena = rig.storage.memory.path
    other = Hello(PROTOCOL, "decode", {**rig.fingerprint, "weights": "w2"})
    stranger = Client(rig.context, rig.server.address, other, new_incarnation())

    def met() -> bool:
        stranger.tick(time.monotonic())
        list(stranger.receive())
        return stranger.state in (LinkState.REFUSED, LinkState.READY)

    rig.until(met)
    assert stranger.refusal is not None and stranger.refusal.field == "weights"
    stranger.close()
    first.close()
    rig.clients.clear()
    rig.until(lambda: not rig.server.peers)
    rig.fingerprint = {**rig.fingerprint, "weights": "w2"}
    second = rig.client()
    assert rig.storage.memory.path != arena and not arena.exists()
    assert rig.fetch(second, keys)[0].taken == 0
    rig.settle()
    assert rig.counters["disk_foreign"] == 8


def test_a_block_of_another_size_is_refused_by_name(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.client()
    hello = Hello(PROTOCOL, "decode", rig.fingerprint)
    links: list[Client] = []

    def connect() -> Client:
        links.append(Client(rig.context, rig.server.address, hello, new_incarnation()))
        return links[-1]

    other = StoreClient(connect, BLOCK_BYTES + 1)
    rig.clients.append(other)
    rig.until(lambda: bool(links) and links[0].refusal is not None)
    assert links[0].refusal is not None
    assert links[0].refusal.field == "block_bytes"
    assert links[0].refusal.server_value == str(BLOCK_BYTES)
    assert not other.link.attached
    assert other.fetches.fetch([b"k" * 16], deadline_s=1.0).ended == "no store"


def test_the_arena_must_fit_somewhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="arena-dir"):
        SharedMemory.create(tmp_path / "nowhere", 1 << 20, 1)
    memory = SharedMemory.create(tmp_path, 1 << 20, 1)
    assert memory.size > 1 << 20
    assert os.stat(memory.path).st_blocks * 512 >= 1 << 20, "allocated in full"
    memory.remove()
    memory.close()


def test_an_arena_larger_than_what_is_free_shrinks_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "available_memory", lambda: 8 << 20)
    memory = SharedMemory.create(tmp_path, 1 << 40, 1)
    assert 4 << 20 <= memory.size <= 8 << 20
    memory.remove()
    memory.close()
    monkeypatch.setattr(shared_memory, "available_memory", lambda: 1 << 20)
    with pytest.raises(ConfigError, match=r"1TiB: available memory is 1MiB"):
        SharedMemory.create(tmp_path, 1 << 40, 1)
