"""The store through a node's eyes: put, load, ship, clear, pin, and a peer that goes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from kvferry.kvstore import shared_memory
from kvferry.kvstore.debug import Hooks, StoreHooks
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.faults import FaultInjector, FaultRule
from kvferry.kvstore.keys import tenant_key
from kvferry.kvstore.link import Client, LinkState
from kvferry.kvstore.link_messages import Hello
from kvferry.kvstore.router import Server
from kvferry.kvstore.shared_memory import SharedMemory
from kvferry.kvstore.sockets import new_incarnation
from kvferry.kvstore.store_client import StoreClient, Transfer
from kvferry.kvstore.store_messages import CancelFetch, Commit, Fetch, GiveBack, Release, Taken
from kvferry.kvstore.store_puts import SlotRef
from kvferry.kvstore.wire import PROTOCOL
from kvferry.tests.store_rig import BLOCK_BYTES, TENANT, Reader, StoreRig, chain_keys, payload_of

TRANSFERS: tuple[Transfer, ...] = ("arena", "inline")


class MakeRig(Protocol):
    def __call__(self, **options: Any) -> StoreRig: ...


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    rigs: list[StoreRig] = []

    def make(**options: Any) -> StoreRig:
        rigs.append(StoreRig(tmp_path, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


# -- what was put is loaded ------------------------------------------------------------------------


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_what_was_put_is_loaded(make_rig: MakeRig, transfer: Transfer) -> None:
    rig = make_rig()
    client = rig.client(transfer)
    keys = chain_keys("x", 20)
    assert rig.put(client, keys) == 20
    load, _ = rig.load(client, keys)
    assert (load.ended, load.taken, load.from_host) == ("complete", 20, 20)
    load, _ = rig.load(client, [*keys, *chain_keys("y", 3)], first=5)
    assert (load.ended, load.taken) == ("short", 15)
    assert client.shared is (transfer == "arena")
    load, _ = rig.load(client, [])
    assert (load.ended, load.taken) == ("complete", 0)


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
    load, _ = rig.load(client, keys)
    assert (load.ended, load.taken) == ("complete", 100)
    assert load.from_disk > 50
    assert rig.bytes_on_disk() == rig.space.tiers.disk.index.used  # type: ignore[union-attr]


def test_two_nodes_share_what_one_of_them_put(make_rig: MakeRig) -> None:
    rig = make_rig()
    writer, reader = rig.client("arena", "prefill"), rig.client("inline", "decode")
    keys = chain_keys("x", 12)
    rig.put(writer, keys)
    rig.settle()
    load, _ = rig.load(reader, keys)
    assert load.taken == 12
    assert reader.put(TENANT, keys[3], 4, keys[4:], lambda index: pytest.fail("read")) == 8, (
        "what a node has just loaded it does not offer again"
    )


@pytest.mark.A1
def test_a_tenant_hits_only_its_own(make_rig: MakeRig) -> None:
    rig = make_rig()
    client = rig.client()
    mine, theirs = chain_keys("p", 4, tenant="a"), chain_keys("p", 4, tenant="b")
    rig.put(client, mine)
    assert rig.load(client, mine)[0].taken == 4
    assert rig.load(client, theirs)[0].taken == 0
    assert tenant_key("a") != tenant_key("b") != tenant_key("")


def test_a_shipment_is_a_slot_until_it_is_let_go(make_rig: MakeRig) -> None:
    rig = make_rig()
    prefill, decode = rig.client("arena", "prefill"), rig.client("arena", "decode")
    keys = chain_keys("x", 3)
    for _ in range(
        2
    ):  # the second time the store has the blocks, and they are shipped all the same
        rig.until(lambda: prefill.room >= 3)
        refs = prefill.ship(TENANT, b"\0" * 16, 0, keys, lambda index: payload_of(keys[index]))
        assert len(refs) == 3
        reader = Reader()
        assert all(decode.copy(ref, reader.write) for ref in refs)
        assert reader.blocks == [payload_of(key) for key in keys]
        rig.settle()
        assert rig.space.tiers.ledger()["held"] == 3
        prefill.let_go(refs)
        rig.settle()
        assert rig.space.tiers.ledger()["held"] == 0
    assert rig.space.tiers.arena.num_resident == 3
    old = SlotRef(refs[0].store + 1, refs[0].slot, refs[0].checksum)
    assert not decode.copy(old, reader.write), "another store's slot"
    assert not decode.copy(SlotRef(refs[0].store, 10**6, 1), reader.write)
    assert not decode.copy(SlotRef(refs[0].store, refs[0].slot, 1), reader.write)
    inline = rig.client("inline", "prefill")
    assert inline.ship(TENANT, b"\0" * 16, 0, keys, lambda index: b"") == []


def test_what_the_store_has_no_room_for_is_dropped_and_counted(make_rig: MakeRig) -> None:
    rig = make_rig(slots=16)
    client, other = rig.client(), rig.client()
    keys = chain_keys("x", 10)
    rig.put(client, keys)
    load = other.fetch(keys, deadline_s=60.0)
    rig.until(lambda: load.ready >= 8)
    before = client.counters["puts_dropped"]
    taken = rig.put(client, chain_keys("y", 100), wait=False)
    assert taken < 100 and client.counters["puts_dropped"] - before == 100 - taken
    load.cancel()
    rig.until(lambda: client.room > 0)
    assert rig.put(client, chain_keys("z", 12)) == 12, "usable again"


# -- care ------------------------------------------------------------------------------------------


def test_clear_pin_prefetch_and_inspect(make_rig: MakeRig) -> None:
    rig = make_rig(slots=16, disk=4 << 20)
    client = rig.client()
    kept, other = chain_keys("kept", 4), chain_keys("other", 40, tenant="b")
    rig.put(client, kept)
    rig.settle()
    assert rig.answer(client.care("pin", keys=kept, seconds=60.0)) == {"pinned": 4}
    for done in range(2, 41, 2):
        rig.put(client, other[:done], start=done - 2, tenant=tenant_key("b"))
        rig.settle()
    assert rig.answer(client.locate(kept)) == "hhhh"
    assert rig.answer(client.care("unpin", keys=kept)) == {"unpinned": 4}
    tiers = rig.answer(client.care("inspect", keys=other))["tiers"]  # type: ignore[index]
    assert set(tiers) == {"h", "d"}
    rig.answer(client.care("prefetch", keys=other[:3], seconds=5.0))
    rig.settle()
    assert rig.answer(client.locate(other[:3])) == "hhh"
    cleared: Any = rig.answer(client.care("clear", tenant=tenant_key("b")))
    assert cleared["cleared_disk"] == 40
    rig.settle()
    assert rig.answer(client.locate(other)) == ""
    assert rig.load(client, kept)[0].taken == 4
    rig.answer(client.care("clear"))
    rig.settle()
    assert rig.answer(client.locate(kept)) == "" and rig.bytes_on_disk() == 0
    assert "error" in rig.answer(client.care("dance"))  # type: ignore[operator]
    assert "error" in rig.answer(client.care("pin", keys=kept, seconds=0))  # type: ignore[operator]
    stats: Any = rig.answer(client.care("stats"))
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
    load, _ = rig.load(client, keys)
    assert (load.ended, load.taken, load.from_disk) == ("complete", 30, 30)
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
    arena = rig.space.memory.path
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
    assert rig.space.memory.path != arena and not arena.exists()
    assert rig.load(second, keys)[0].taken == 0
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
    assert not other.available and other.fetch([b"k" * 16], deadline_s=1.0).ended == "no store"


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


# -- damage, deadlines, slow disks -----------------------------------------------------------------


@pytest.mark.A6
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_damaged_block_in_memory_ends_the_load_before_it(
    make_rig: MakeRig, transfer: Transfer
) -> None:
    rig = make_rig()
    client = rig.client(transfer)
    keys = chain_keys("x", 12)
    rig.put(client, keys)
    rig.settle()
    view = rig.space.view(rig.space.tiers.arena.slot_of(keys[7]))
    view[100] ^= 16
    view.release()
    load, blocks = rig.load(client, keys)
    assert (load.ended, load.taken, len(blocks)) == ("damaged", 7, 7)
    assert client.counters["blocks_damaged"] == 1
    rig.settle()
    if (
        transfer == "arena"
    ):  # inline the frame may be what was damaged, so the store keeps its block
        assert rig.counters["host_damaged"] == 1
        assert rig.answer(client.locate(keys)) == "h" * 7
    assert rig.space.tiers.ledger()["loads"] == 0


@pytest.mark.A6
def test_hooks_damage_and_slow_the_tiers(make_rig: MakeRig) -> None:
    rig = make_rig(slots=16, disk=4 << 20)
    client = rig.client()
    keys = chain_keys("x", 20)
    for done in range(2, 21, 2):
        rig.put(client, keys[:done], start=done - 2)
        rig.settle()
    cold = rig.answer(client.locate(keys))
    assert isinstance(cold, str) and "d" in cold
    rig.node._inject(StoreHooks(damage_reads=1))
    load, _ = rig.load(client, keys)
    assert (load.ended, load.taken) == ("short", cold.index("d"))
    assert rig.counters["disk_damaged_payload"] == 1
    rig.node._inject(StoreHooks(damage_host=3))
    load, _ = rig.load(client, keys)
    assert load.ended == "damaged"
    assert Hooks(store=StoreHooks(read_delay_ms=5.0)).store is not None


@pytest.mark.A7
def test_a_load_from_a_slow_disk_ends_by_its_deadline_with_what_came(make_rig: MakeRig) -> None:
    rig = make_rig(slots=64, disk=4 << 20)
    client = rig.client()
    keys = chain_keys("x", 30)
    rig.put(client, keys)
    rig.settle()
    rig.close()
    rig = make_rig(slots=64, disk=4 << 20)
    client = rig.client()
    rig.settle()
    rig.node._inject(StoreHooks(read_delay_ms=50.0))
    load, _ = rig.load(client, keys, seconds=0.4)
    assert load.ended == "deadline" and load.taken < 20
    rig.node._inject(StoreHooks(read_delay_ms=0.0))
    rig.settle()
    load, _ = rig.load(client, keys)
    assert load.taken == 30, "used again once it is fast"


# -- peers that go ---------------------------------------------------------------------------------


@pytest.mark.A5
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_store_that_dies_ends_every_load_and_a_new_one_is_found(
    make_rig: MakeRig, tmp_path: Path, transfer: Transfer
) -> None:
    rig = make_rig(disk=4 << 20)
    client = rig.client(transfer)
    keys = chain_keys("x", 20)
    rig.put(client, keys)
    rig.settle()
    load = client.fetch(keys, deadline_s=60.0)
    rig.until(lambda: load.ready > 3)
    reader = Reader()
    assert load.take(reader.write)
    address = rig.server.address
    rig.node.close()
    rig.server.close()
    deadline = time.monotonic() + 20
    while client.available:
        assert time.monotonic() < deadline
        client.turn()
    assert load.ended == "lost" and load.ready == 0 and load.taken == 1
    assert client.put(TENANT, keys[0], 1, chain_keys("z", 3), lambda index: b"") == 0
    assert client.fetch(keys, deadline_s=1.0).ended == "no store"
    rig.server = Server(rig.context, address, new_incarnation())
    rig.node = type(rig.node)(rig.server, rig.node._sizes)
    rig.until(lambda: client.available and client.room > 0)
    rig.settle()
    assert rig.load(client, keys)[0].taken == 20


def test_a_node_that_leaves_holds_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    stays, leaves = rig.client(), rig.client()
    keys = chain_keys("x", 10)
    rig.put(stays, keys)
    rig.settle()
    load = leaves.fetch(keys, deadline_s=60.0)
    rig.until(lambda: load.ready > 0)
    assert rig.space.tiers.arena.ledger()["leases"] > 0
    rig.clients.remove(leaves)
    leaves.close()
    rig.until(lambda: rig.node.ledger()["members"] == 1)
    rig.until(lambda: rig.node.ledger()["unburied"] == 0)
    ledger = rig.space.tiers.arena.ledger()
    assert ledger["leases"] == ledger["quarantined"] == 0
    assert ledger["reserved"] == stays.room


def said(process: subprocess.Popen[str]) -> str:
    """What it has printed since the last call; nothing is waited for."""
    assert process.stdout is not None
    try:
        return os.read(process.stdout.fileno(), 4096).decode()
    except BlockingIOError:
        return ""


WRITER = """
import os, signal, sys, time, zmq
from kvferry.kvstore.link import Client
from kvferry.kvstore.link_messages import Hello
from kvferry.kvstore.shared_memory import SharedMemory
from kvferry.kvstore.sockets import new_incarnation
from kvferry.kvstore.store_client import StoreClient
from kvferry.kvstore.wire import PROTOCOL
from kvferry.tests.store_rig import BLOCK_BYTES, FINGERPRINT, TENANT

context = zmq.Context()
hello = Hello(PROTOCOL, "prefill", FINGERPRINT)
client = StoreClient(
    lambda: Client(context, sys.argv[1], hello, new_incarnation()), BLOCK_BYTES, transfer="arena"
)
while not client.room:
    client.turn()
    time.sleep(0.01)

def stopped(index):
    print("stopping", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    return b"late" * (BLOCK_BYTES // 4)  # and now it writes into the slot that it was granted

client.put(TENANT, bytes(16), 0, [b"late" * 4], stopped)
print("written", flush=True)
while True:
    client.turn()
    time.sleep(0.01)
"""


@pytest.mark.B2
@pytest.mark.parametrize("end", ["continues", "is killed"])
def test_a_stopped_writer_never_writes_into_a_slot_that_was_reused(
    make_rig: MakeRig, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped between reservation and write, past every limit, while the arena is short."""
    monkeypatch.setattr("kvferry.kvstore.sockets.HEARTBEAT_MS", 250)
    monkeypatch.setattr("kvferry.kvstore.sockets.HEARTBEAT_TIMEOUT_MS", 1500)
    skew = [0.0]
    rig = make_rig(slots=32, clock=lambda: time.monotonic() + skew[0])
    client = rig.client()
    with (
        subprocess.Popen(
            [sys.executable, "-c", WRITER, rig.server.address], stdout=subprocess.PIPE, text=True
        ) as writer,
        contextlib.ExitStack() as at_end,
    ):
        at_end.callback(writer.kill)
        assert writer.stdout is not None
        os.set_blocking(writer.stdout.fileno(), False)
        rig.until(lambda: "stopping" in said(writer))
        rig.until(lambda: rig.space.tiers.arena.num_quarantined > 0)
        quarantined = rig.space.tiers.arena.num_quarantined
        skew[0] = 1e6  # past every limit of the store's
        chains = [chain_keys(n, 8) for n in range(30)]
        for keys in chains:
            rig.put(client, keys)
        assert rig.space.tiers.arena.num_quarantined == quarantined, "silence proves nothing"
        os.kill(writer.pid, signal.SIGCONT if end == "continues" else signal.SIGKILL)
        if end == "continues":
            rig.until(lambda: "written" in said(writer))
        rig.until(lambda: rig.space.tiers.arena.num_quarantined == 0)
        taken = sum(rig.load(client, keys)[0].taken for keys in chains)  # each block proven right
        assert taken >= 32 - quarantined - 2 * client.room - 2
        for keys in chains:
            rig.put(client, keys)
        assert rig.load(client, chains[-1])[0].taken == 8
        assert rig.answer(client.locate([b"late" * 4])) == "", "the late commit counts for nothing"


@pytest.mark.B2
def test_ids_that_are_unknown_consumed_or_out_of_range_do_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    client, other = rig.client(), rig.client()
    keys = chain_keys("x", 6)
    rig.put(client, keys)
    rig.settle()
    link, foreign = client.links[0], other._puts.stock[0]
    dice = random.Random(5)
    for slot in (foreign, 10**9, 2**50, client._puts.stock[0] + 10**6):
        link.send(Commit(TENANT, bytes(16), 0, b"n" * 16, (slot,), (1,), False, False))
        link.send(GiveBack((slot,)))
        link.send(Release((slot,)))
    link.send(Commit(TENANT, bytes(16), 0, b"n" * 15, (1,), (1,), False, False))
    link.send(Commit(TENANT, bytes(16), 0, b"n" * 32, (1,), (1,), False, False))
    for number in (0, 1, 10**9):
        link.send(Taken(number, dice.randrange(10)))
        link.send(CancelFetch(number))
    link.send(Fetch(10**6, b"".join(keys), 99, 1.0, 4))
    link.send(Fetch(10**6, b"".join(keys), 0, float("nan"), 4))
    rig.settle()
    assert rig.counters["commits_refused"] >= 4
    assert rig.counters["messages_invalid"] >= 2
    assert rig.load(client, keys)[0].taken == 6
    assert rig.put(other, chain_keys("y", 6)) == 6


@pytest.mark.D7
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_lost_repeated_and_damaged_messages_serve_nothing_wrong(
    make_rig: MakeRig, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.kvstore.store_puts.HOLDING_SECONDS", 0.1)
    skew = [0.0]
    rig = make_rig(slots=64, disk=4 << 20, clock=lambda: time.monotonic() + skew[0])
    client = rig.client(transfer)
    rules = [
        FaultRule(
            "drop", ("Commit", "Granted", "Taken", "Leased", "Delivered", "FetchEnded"), 0.05
        ),
        FaultRule(
            "duplicate", ("Commit", "Granted", "Taken", "Leased", "Delivered", "FetchEnded"), 0.05
        ),
        FaultRule("reorder", ("Granted", "Leased", "Delivered", "FetchEnded"), 0.05),
        FaultRule("corrupt", ("Commit", "Delivered"), 0.05, part="payload"),
    ]
    rig.server.faults = FaultInjector(rules, seed=6)
    client.links[0].faults = FaultInjector(rules, seed=7)
    chains = [chain_keys(n, 6) for n in range(20)]
    taken = 0
    for number in range(12):
        keys = chains[number % 20]
        rig.until(lambda: client.room > 0)
        rig.put(client, keys, wait=False)
        taken += rig.load(client, keys, seconds=0.2)[0].taken
    assert taken > 8, "it recovers from what was lost"
    rig.server.faults = None
    client.links[0].faults = None
    arena = rig.space.tiers.arena
    skew[0] = 2 * rig.space.tiers.lease_s  # nobody says any more that those were taken
    rig.settle()
    assert arena.ledger()["leases"] == 0
    rig.node.check()


@pytest.mark.D4
def test_a_mixed_load_with_faults_leaves_nothing_behind(make_rig: MakeRig) -> None:
    rig = make_rig(slots=48, disk=2 << 20)
    clients = [rig.client("arena"), rig.client("inline")]
    dice = random.Random(8)
    chains = [chain_keys(n, 8) for n in range(40)]

    def mixed(count: int) -> None:
        for _ in range(count):
            client, keys = dice.choice(clients), dice.choice(chains)
            if dice.random() < 0.05:
                faults = rig.node.faults
                faults.fail_reads = faults.damage_reads = faults.fail_writes = 1
            if dice.random() < 0.1:
                load = client.fetch(keys, deadline_s=dice.choice((0.0, 5.0)))
                rig.turn()
                load.cancel()
                continue
            got = rig.load(client, keys)[0].taken
            rig.put(client, keys, start=got, wait=False)

    mixed(60)
    rig.settle()
    before = len(os.listdir("/proc/self/fd"))
    mixed(300)
    rig.node.faults.fail_reads = rig.node.faults.damage_reads = rig.node.faults.fail_writes = 0
    rig.settle()
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the segment that is appended to
    ledger: Any = rig.space.tiers.ledger()
    assert ledger["loads"] == ledger["held"] == ledger["filling"] == 0
    for place in ("leases", "withdrawn", "quarantined", "filling"):
        assert ledger["arena"][place] == 0
    assert ledger["disk"]["used_bytes"] == rig.bytes_on_disk() <= 2 << 20
