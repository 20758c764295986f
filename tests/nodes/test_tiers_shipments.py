"""What one node ships to another through the arena of their host, and who puts it into which store.

The whole hand-off with a store in one thread, over the stand-in engine.
"""

from pathlib import Path
from typing import Any

import pytest

from kvferry.kvstore.client.client import Transfer
from kvferry.kvstore.client.puts import SlotRef
from kvferry.kvstore.store.storage import StoreSizes
from kvferry.kvstore.wire.faults import FaultInjector, FaultRule
from kvferry.kvstore.wire.generation import Abort
from kvferry.tests.rigs.handoff.cluster import Cluster, prompt_of
from kvferry.tests.rigs.store.cluster import (
    RAM,
    TENANT,
    ask,
    cluster_of,
    forget,
    restarted,
    settle,
    sources,
)


@pytest.mark.B9
def test_on_one_host_a_shipment_is_a_slot(tmp_path: Path) -> None:
    with cluster_of(tmp_path) as cluster:
        counters, store = cluster.prefill[0].counters, cluster.decode.connector.store
        for seed, length in enumerate((200, 512, 513, 1500)):
            assert sources(ask(cluster, prompt_of(length, seed)))["prefill"] > 0
        assert counters["lent_bytes"] == counters["shipped_bytes"] > 0
        cluster.until(lambda: cluster.prefill[0].lending.num_lent == 0)
        assert store is not None and store.counters["shipments_damaged"] == 0
        settle(cluster)
        assert cluster.store is not None and cluster.store.storage is not None
        assert not cluster.store.storage.tiers.ledger()["held"]


def test_inline_means_that_nothing_is_lent(tmp_path: Path) -> None:
    with cluster_of(tmp_path, transfer="inline") as cluster:
        ask(cluster, prompt_of(700))
        counters = cluster.prefill[0].counters
        assert counters["lent_bytes"] == 0 and counters["shipped_bytes"] > 0


def test_a_small_arena_ships_the_rest_inline(tmp_path: Path) -> None:
    """Sixty-four slots, four of them granted: most of a transfer travels as bytes."""
    with cluster_of(tmp_path, ram=64 * 4096) as cluster:
        for seed in range(4):
            ask(cluster, prompt_of(1500, seed))
        counters = cluster.prefill[0].counters
        assert 0 < counters["lent_bytes"] < counters["shipped_bytes"]


def puts(cluster: Cluster) -> dict[str, int]:
    """How many blocks each role has written into a store."""
    stores = {
        "prefill": cluster.prefill[0].connector.store,
        "decode": cluster.decode.connector.store,
    }
    return {role: it.counters["puts"] for role, it in stores.items() if it is not None}


@pytest.mark.B9
@pytest.mark.parametrize("transfer", ["auto", "inline"])
def test_with_one_store_a_block_is_written_there_once(tmp_path: Path, transfer: Transfer) -> None:
    with cluster_of(tmp_path, transfer=transfer) as cluster:
        for seed, length in enumerate((900, 2000)):
            ask(cluster, prompt_of(length, seed), 40)
            settle(cluster)
        assert puts(cluster) == {"prefill": 56 + 124, "decode": 2 + 3}
        assert cluster.store is not None and cluster.store.storage is not None
        assert cluster.store.storage.tiers.host.num_resident == sum(puts(cluster).values())


@pytest.mark.parametrize(
    ("where", "transfer"),
    [
        ("other", "auto"),
        ("other", "inline"),
        ("none", "auto"),
        ("does not reuse", "inline"),  # what it lends is in the store by that alone
    ],
)
def test_a_decode_node_offers_what_reaches_its_store_by_nobody_else(
    tmp_path: Path, where: str, transfer: Transfer
) -> None:
    """The prefill node has a store of its own, or none, or keeps no prefixes."""
    (tmp_path / "other").mkdir()
    other = StoreSizes(RAM, 0, tmp_path / "other" / "blocks", tmp_path / "other")
    options: dict[str, Any] = {"prefill_store": other if where == "other" else "none"}
    if where == "does not reuse":
        options = {"prefill_reuse": False}
    with cluster_of(tmp_path, transfer=transfer, **options) as cluster:
        prompt = prompt_of(2000)
        ask(cluster, prompt, 40)
        settle(cluster)
        assert cluster.prefill[0].counters["lent_bytes"] == 0
        assert puts(cluster)["decode"] == 2039 // 16
        assert puts(cluster).get("prefill", 0) == (124 if where == "other" else 0)
        forget(cluster)
        assert sources(ask(cluster, prompt)) == {"host": 1984, "decode": 16}


@pytest.mark.A5
def test_after_a_restart_of_the_store_its_new_life_counts(tmp_path: Path) -> None:
    """What a prefill node said of the store's last life is not true of this one."""
    with cluster_of(tmp_path, transfer="inline") as cluster:
        prompt = prompt_of(3000)
        answer = cluster.submit(cluster.message(prompt, max_tokens=4, tenant=TENANT))
        prefill = cluster.prefill[0]
        cluster.until(lambda: any(job.sent for job in prefill.scheduler.running))
        prefill.debug.hold = frozenset({"transfer"})
        cluster.until(lambda: cluster.decode.receiver.transfers.num_landed > 0)
        store = cluster.decode.connector.store
        assert store is not None
        sizes, address = cluster.sizes, cluster.stop_store(drain=False)
        restarted(cluster, sizes, address)
        landed = cluster.decode.receiver.transfers.num_landed
        assert landed < 187
        prefill.debug.hold = frozenset()
        cluster.until(lambda: answer.ended)
        settle(cluster)
        assert store.counters["puts"] == 187 - landed


@pytest.mark.B2
def test_a_slot_that_was_reused_under_a_shipment_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every slot lent is overwritten before it is copied: asked for again, as bytes."""
    with cluster_of(tmp_path) as cluster:
        prefill = cluster.prefill[0]
        assert cluster.store is not None and cluster.store.storage is not None
        storage, lend = cluster.store.storage, prefill.lending.lend
        damaged: list[int] = []

        def lend_and_damage(*args: Any) -> list[SlotRef]:
            refs = lend(*args)
            for ref in refs:
                view = storage.memory.slot(ref.slot, storage.slot_bytes, storage.block_bytes)
                view[3] ^= 1
                view.release()
                damaged.append(ref.slot)
            return refs

        monkeypatch.setattr(prefill.lending, "lend", lend_and_damage)
        ask(cluster, prompt_of(900))
        assert damaged and cluster.decode.receiver.transfers.counters.damaged > 0


@pytest.mark.A5
@pytest.mark.B2
def test_a_store_that_dies_under_a_shipment_turns_it_inline(tmp_path: Path) -> None:
    with cluster_of(tmp_path) as cluster:
        prompts = [prompt_of(3000, seed) for seed in range(3)]
        answers = [
            cluster.submit(cluster.message(prompt, max_tokens=4, tenant=TENANT))
            for prompt in prompts
        ]
        cluster.until(lambda: cluster.decode.receiver.transfers.num_landed > 40)
        cluster.stop_store(drain=False)
        cluster.until(lambda: all(answer.ended for answer in answers), 60)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.ids() == cluster.reply(prompt, 4)
        assert cluster.prefill[0].counters["lent_bytes"] > 0


@pytest.mark.B1
@pytest.mark.parametrize("turns", range(1, 10, 2))
def test_a_client_that_leaves_a_shipment_leaves_no_slot(tmp_path: Path, turns: int) -> None:
    with cluster_of(tmp_path) as cluster:
        messages = [
            cluster.message(prompt_of(2000, seed), max_tokens=4, tenant=TENANT) for seed in range(3)
        ]
        for message in messages:
            cluster.submit(message)
        for _ in range(turns):
            cluster.turn()
        for message in messages:
            cluster.gateway.send(Abort(message.request))
        cluster.until(lambda: not cluster.decode.requests)
        cluster.until(cluster.idle)
        cluster.until(lambda: cluster.prefill[0].lending.num_lent == 0)
        settle(cluster)
        assert cluster.store is not None and cluster.store.storage is not None
        assert not cluster.store.storage.tiers.ledger()["held"]


@pytest.mark.B2
def test_a_lost_word_about_a_shipment_leaves_no_slot(tmp_path: Path) -> None:
    """The last credits never arrive: the prefill node asks, and its loan ends."""
    with cluster_of(tmp_path) as cluster:
        ask(cluster, prompt_of(300, 7))
        link = cluster.decode.receiver.links.ready(cluster.addresses[0])
        assert link is not None
        link.faults = FaultInjector([FaultRule("drop", ("Credit",))])
        ask(cluster, prompt_of(700))
        assert cluster.prefill[0].lending.num_lent > 0
        cluster.until(lambda: cluster.prefill[0].lending.num_lent == 0, 10)
