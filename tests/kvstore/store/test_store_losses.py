"""The store when blocks are damaged, disks are slow, peers go and messages are lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvferry.kvstore.client.client import Transfer
from kvferry.kvstore.node.debug import Hooks, StoreHooks
from kvferry.kvstore.wire.faults import FaultInjector, FaultRule
from kvferry.kvstore.wire.server import Server
from kvferry.kvstore.wire.sockets import new_incarnation
from kvferry.kvstore.wire.store import CancelFetch, Commit, FetchRequest, GiveBack, Release, Taken
from kvferry.tests.rigs.slow import slow_but
from kvferry.tests.rigs.store.rig import TENANT, TRANSFERS, MakeRig, Reader, chain_keys

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
    view = rig.storage.view(rig.storage.tiers.host.slot_of(keys[7]))
    view[100] ^= 16
    view.release()
    fetch, blocks = rig.fetch(client, keys)
    assert (fetch.ended, fetch.taken, len(blocks)) == ("damaged", 7, 7)
    assert client.counters["blocks_damaged"] == 1
    rig.settle()
    if (
        transfer == "arena"
    ):  # inline the frame may be what was damaged, so the store keeps its block
        assert rig.counters["host_damaged"] == 1
        assert rig.answer(client.locate(keys)) == "h" * 7
    assert rig.storage.tiers.ledger()["fetches"] == 0


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
    fetch, _ = rig.fetch(client, keys)
    assert (fetch.ended, fetch.taken) == ("short", cold.index("d"))
    assert rig.counters["disk_damaged_payload"] == 1
    rig.node._inject(StoreHooks(damage_host=3))
    fetch, _ = rig.fetch(client, keys)
    assert fetch.ended == "damaged"
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
    fetch, _ = rig.fetch(client, keys, seconds=0.4)
    assert fetch.ended == "deadline" and fetch.taken < 20
    rig.node._inject(StoreHooks(read_delay_ms=0.0))
    rig.settle()
    fetch, _ = rig.fetch(client, keys)
    assert fetch.taken == 30, "used again once it is fast"


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
    fetch = client.fetches.fetch(keys, deadline_s=60.0)
    rig.until(lambda: len(fetch.ready) > 3)
    reader = Reader()
    assert client.fetches.take(fetch, reader.write)
    address = rig.server.address
    rig.node.close()
    rig.server.close()
    deadline = time.monotonic() + 20
    while client.link.attached:
        assert time.monotonic() < deadline
        client.turn()
    assert fetch.ended == "lost" and len(fetch.ready) == 0 and fetch.taken == 1
    assert client.puts.put(TENANT, keys[0], 1, chain_keys("z", 3), lambda index: b"") == 0
    assert client.fetches.fetch(keys, deadline_s=1.0).ended == "no store"
    rig.server = Server(rig.context, address, new_incarnation())
    rig.node = type(rig.node)(rig.server, rig.node._sizes)
    rig.until(lambda: client.link.attached and client.puts.stock)
    rig.settle()
    assert rig.fetch(client, keys)[0].taken == 20


def test_a_node_that_leaves_holds_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    stays, leaves = rig.client(), rig.client()
    keys = chain_keys("x", 10)
    rig.put(stays, keys)
    rig.settle()
    fetch = leaves.fetches.fetch(keys, deadline_s=60.0)
    rig.until(lambda: len(fetch.ready) > 0)
    assert rig.storage.tiers.host.ledger()["leases"] > 0
    rig.clients.remove(leaves)
    leaves.close()
    rig.until(lambda: rig.node.ledger()["members"] == 1)
    rig.until(lambda: rig.node.ledger()["quarantined_nodes"] == 0)
    ledger = rig.storage.tiers.host.ledger()
    assert ledger["leases"] == ledger["quarantined"] == 0
    assert ledger["reserved"] == len(stays.puts.stock)


def said(process: subprocess.Popen[str]) -> str:
    """What it has printed since the last call; nothing is waited for."""
    assert process.stdout is not None
    try:
        return os.read(process.stdout.fileno(), 4096).decode()
    except BlockingIOError:
        return ""


WRITER = """
import os, signal, sys, time, zmq
from kvferry.kvstore.wire.client import Client
from kvferry.kvstore.wire.hello import Hello
from kvferry.kvstore.tiers.shared_memory import SharedMemory
from kvferry.kvstore.wire.sockets import new_incarnation
from kvferry.kvstore.client.client import StoreClient
from kvferry.kvstore.wire.codec import PROTOCOL
from kvferry.tests.rigs.store.rig import BLOCK_BYTES, FINGERPRINT, TENANT

context = zmq.Context()
hello = Hello(PROTOCOL, "prefill", FINGERPRINT)
client = StoreClient(
    lambda: Client(context, sys.argv[1], hello, new_incarnation()), BLOCK_BYTES, transfer="arena"
)
while not client.puts.stock:
    client.turn()
    time.sleep(0.01)

def stopped(index):
    print("stopping", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    return b"late" * (BLOCK_BYTES // 4)  # and now it writes into the slot that it was granted

client.puts.put(TENANT, bytes(16), 0, [b"late" * 4], stopped)
print("written", flush=True)
while True:
    client.turn()
    time.sleep(0.01)
"""


@pytest.mark.B2
@pytest.mark.parametrize("end", slow_but(["continues", "is killed"], "is killed"))
def test_a_stopped_writer_never_writes_into_a_slot_that_was_reused(
    make_rig: MakeRig, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped between reservation and write, past every limit, while the arena is short."""
    monkeypatch.setattr("kvferry.kvstore.wire.sockets.HEARTBEAT_MS", 250)
    monkeypatch.setattr("kvferry.kvstore.wire.sockets.HEARTBEAT_TIMEOUT_MS", 1500)
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
        rig.until(lambda: rig.storage.tiers.host.num_quarantined > 0)
        quarantined = rig.storage.tiers.host.num_quarantined
        skew[0] = 1e6  # past every limit of the store's
        chains = [chain_keys(n, 8) for n in range(30)]
        for keys in chains:
            rig.put(client, keys)
        assert rig.storage.tiers.host.num_quarantined == quarantined, "silence proves nothing"
        os.kill(writer.pid, signal.SIGCONT if end == "continues" else signal.SIGKILL)
        if end == "continues":
            rig.until(lambda: "written" in said(writer))
        rig.until(lambda: rig.storage.tiers.host.num_quarantined == 0)
        taken = sum(rig.fetch(client, keys)[0].taken for keys in chains)  # each block proven right
        assert taken >= 32 - quarantined - 2 * len(client.puts.stock) - 2
        for keys in chains:
            rig.put(client, keys)
        assert rig.fetch(client, chains[-1])[0].taken == 8
        assert rig.answer(client.locate([b"late" * 4])) == "", "the late commit counts for nothing"


@pytest.mark.B2
def test_ids_that_are_unknown_consumed_or_out_of_range_do_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    client, other = rig.client(), rig.client()
    keys = chain_keys("x", 6)
    rig.put(client, keys)
    rig.settle()
    link, foreign = client.link.client, other.puts.stock[0]
    assert link is not None
    dice = random.Random(5)
    for slot in (foreign, 10**9, 2**50, client.puts.stock[0] + 10**6):
        link.send(Commit(TENANT, bytes(16), 0, b"n" * 16, (slot,), (1,), False, False))
        link.send(GiveBack((slot,)))
        link.send(Release((slot,)))
    link.send(Commit(TENANT, bytes(16), 0, b"n" * 15, (1,), (1,), False, False))
    link.send(Commit(TENANT, bytes(16), 0, b"n" * 32, (1,), (1,), False, False))
    for number in (0, 1, 10**9):
        link.send(Taken(number, dice.randrange(10)))
        link.send(CancelFetch(number))
    link.send(FetchRequest(10**6, b"".join(keys), 99, 1.0, 4))
    link.send(FetchRequest(10**6, b"".join(keys), 0, float("nan"), 4))
    rig.settle()
    assert rig.counters["commits_refused"] >= 4
    assert rig.counters["messages_invalid"] >= 2
    assert rig.fetch(client, keys)[0].taken == 6
    assert rig.put(other, chain_keys("y", 6)) == 6


@pytest.mark.D7
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_lost_repeated_and_damaged_messages_serve_nothing_wrong(
    make_rig: MakeRig, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.kvstore.client.puts.HOLDING_SECONDS", 0.1)
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
    link = client.link.client
    assert link is not None
    link.faults = FaultInjector(rules, seed=7)
    chains = [chain_keys(n, 6) for n in range(20)]
    taken = 0
    for number in range(12):
        keys = chains[number % 20]
        rig.until(lambda: client.puts.stock)
        rig.put(client, keys, wait=False)
        taken += rig.fetch(client, keys, seconds=0.2)[0].taken
    assert taken > 8, "it recovers from what was lost"
    rig.server.faults = None
    link.faults = None
    arena = rig.storage.tiers.host
    skew[0] = 2 * rig.storage.tiers.lease_s  # nobody says any more that those were taken
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
                fetch = client.fetches.fetch(keys, deadline_s=dice.choice((0.0, 5.0)))
                rig.turn()
                client.fetches.cancel(fetch)
                continue
            got = rig.fetch(client, keys)[0].taken
            rig.put(client, keys, start=got, wait=False)

    mixed(60)
    rig.settle()
    before = len(os.listdir("/proc/self/fd"))
    mixed(300)
    rig.node.faults.fail_reads = rig.node.faults.damage_reads = rig.node.faults.fail_writes = 0
    rig.settle()
    assert len(os.listdir("/proc/self/fd")) <= before
    ledger: Any = rig.storage.tiers.ledger()
    assert ledger["fetches"] == ledger["held"] == ledger["filling"] == 0
    for place in ("leases", "withdrawn", "quarantined", "filling"):
        assert ledger["arena"][place] == 0
    assert ledger["disk"]["used_bytes"] == rig.bytes_on_disk() <= 2 << 20
