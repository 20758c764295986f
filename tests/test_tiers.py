"""What left the device comes back from the store: host, disk, after a restart, after preemption.

The whole hand-off with a store in one thread, over the stand-in engine: a wrong byte anywhere
changes the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.kvstore.faults import FaultInjector, FaultRule
from kvferry.kvstore.generation_messages import Abort
from kvferry.kvstore.keys import tenant_key
from kvferry.kvstore.loader import Loader
from kvferry.kvstore.store_client import SlotRef, Transfer
from kvferry.kvstore.store_space import StoreSizes
from kvferry.tests.harness import DECODE_LIMITS, Answer, Cluster, prompt_of

TENANT = tenant_key("default")
RAM = 4 << 20
"""A thousand slots of 4 KiB, one a block."""
DISK = 64 << 20


@contextmanager
def cluster_of(
    folder: Path,
    prefill_nodes: int = 1,
    *,
    ram: int = RAM,
    disk: int = 0,
    transfer: Transfer = "auto",
    **options: Any,
) -> Iterator[Cluster]:
    shared = folder / "shared"
    shared.mkdir(exist_ok=True)
    sizes = StoreSizes(ram, disk, folder / "blocks", shared)
    cluster = Cluster(prefill_nodes, store=sizes, transfer=transfer, **options)
    attached(cluster)
    yield cluster
    cluster.until(cluster.idle)
    cluster.close()


def attached(cluster: Cluster) -> None:
    found = [cluster.decode.loader.store, *(node.loader.store for node in cluster.prefill)]
    stores = [store for store in found if store is not None]
    cluster.until(lambda: all(store.available and store.room > 0 for store in stores))


def ask(cluster: Cluster, prompt: list[int], tokens: int = 4) -> Answer:
    answer = cluster.ask(prompt, max_tokens=tokens, tenant=TENANT)
    assert answer.ids() == cluster.reply(prompt, tokens)
    return answer


def settle(cluster: Cluster) -> None:
    """All that was finished is in the store, and on its disk if it has one."""
    loaders: list[Loader[Any]] = [cluster.decode.loader, *(node.loader for node in cluster.prefill)]
    cluster.until(lambda: not any(loader.num_offered for loader in loaders))
    questions = [loader.store.locate([bytes(16)]) for loader in loaders if loader.store]
    # Each is answered behind everything that was put before it.
    cluster.until(lambda: all(one.answer is not None or one.lost for one in questions))
    cluster.until(lambda: cluster.unwritten() == 0)


def forget(cluster: Cluster) -> None:
    """Every device pool gives up what nobody uses."""
    cluster.until(cluster.idle)
    settle(cluster)
    cluster.decode.pool.evict_cached()
    for node in cluster.prefill:
        node.pool.evict_cached()


def sources(answer: Answer) -> dict[str, int]:
    assert answer.done is not None
    found = {
        name: getattr(answer.done.sources, name) for name in answer.done.sources.__struct_fields__
    }
    return {name: count for name, count in found.items() if count}


@pytest.mark.parametrize("transfer", ["auto", "inline"])
@pytest.mark.parametrize("prefill_nodes", [1, 0], ids=["apart", "alone"])
def test_a_prompt_comes_back_from_the_host_tier(
    tmp_path: Path, prefill_nodes: int, transfer: Transfer
) -> None:
    with cluster_of(tmp_path, prefill_nodes, transfer=transfer) as cluster:
        prompt = prompt_of(1000)
        computed = "prefill" if prefill_nodes else "decode"
        assert sources(ask(cluster, prompt))[computed] >= 992
        forget(cluster)
        assert sources(ask(cluster, prompt)) == {"host": 992, "decode": 8}
        assert sources(ask(cluster, prompt)) == {"device": 992, "decode": 8}


def test_a_long_new_part_is_computed_behind_a_loaded_prefix(tmp_path: Path) -> None:
    """The prefill node has given up its blocks, too: it loads them to compute what is new."""
    with cluster_of(tmp_path) as cluster:
        prompt = prompt_of(1008)
        ask(cluster, prompt)
        forget(cluster)
        before = cluster.prefill[0]._counters["computed_tokens"]
        longer = prompt + prompt_of(400, seed=3)
        assert sources(ask(cluster, longer)) == {"host": 1008, "prefill": 384 + 0, "decode": 16}
        assert cluster.prefill[0]._counters["computed_tokens"] - before == 384


def test_generated_blocks_are_kept_as_well(tmp_path: Path) -> None:
    with cluster_of(tmp_path) as cluster:
        prompt = prompt_of(300)
        reply = ask(cluster, prompt, 100).ids()
        forget(cluster)
        answer = ask(cluster, [*prompt, *reply, 7, 8, 9])
        assert sources(answer)["host"] == (300 + 100 - 1) // 16 * 16


@pytest.mark.A3
@pytest.mark.parametrize("prefill_nodes", [1, 0], ids=["apart", "alone"])
def test_a_restart_of_everything_finds_the_disk(tmp_path: Path, prefill_nodes: int) -> None:
    prompts = [prompt_of(500 + 40 * seed, seed) for seed in range(4)]
    with cluster_of(tmp_path, prefill_nodes, disk=DISK) as cluster:
        for prompt in prompts:
            ask(cluster, prompt)
        settle(cluster)
    for _ in range(2):  # the second time from a store that has only read
        with cluster_of(tmp_path, prefill_nodes, disk=DISK) as cluster:
            for prompt in prompts:
                whole = (len(prompt) - 1) // 16 * 16
                assert sources(ask(cluster, prompt)) == {
                    "disk": whole,
                    "decode": len(prompt) - whole,
                }


@pytest.mark.A4
def test_a_working_set_beyond_device_and_host_comes_from_the_disk(tmp_path: Path) -> None:
    """Twenty conversations of 32 blocks over pools of 120 and an arena of 200."""
    with cluster_of(
        tmp_path, ram=200 * 4096, disk=DISK, decode_blocks=120, prefill_blocks=120
    ) as cluster:
        prompts = [prompt_of(520, seed) for seed in range(20)]
        for prompt in prompts:
            ask(cluster, prompt)
            settle(cluster)
        totals: dict[str, int] = {}
        for prompt in prompts:
            for name, count in sources(ask(cluster, prompt)).items():
                totals[name] = totals.get(name, 0) + count
        assert totals["disk"] > 0.5 * 20 * 512, totals
        assert totals.get("prefill", 0) == 0, totals


@pytest.mark.A1
def test_no_tenant_loads_the_blocks_of_another(tmp_path: Path) -> None:
    with cluster_of(tmp_path) as cluster:
        prompt = prompt_of(500)
        ask(cluster, prompt)
        forget(cluster)
        other = replace_root(cluster, prompt)
        assert sources(other) == {"prefill": 496, "decode": 4}


def replace_root(cluster: Cluster, prompt: list[int]) -> Answer:
    from kvferry.kvstore.keys import chain, root_key

    root = root_key({"weights": "w1"}, "other", None)
    keys = b"".join(chain(root, prompt, 16))
    return cluster.ask(prompt, root=root, keys=keys, tenant=tenant_key("other"), max_tokens=2)


@pytest.mark.D3
def test_what_was_preempted_is_loaded_and_not_computed_again(tmp_path: Path) -> None:
    limits = replace(DECODE_LIMITS, max_num_seqs=8)
    with cluster_of(tmp_path, 0, decode_blocks=60, limits=limits) as cluster:
        prompts = [prompt_of(60 + number, seed=number) for number in range(8)]
        answers = [
            cluster.submit(cluster.message(prompt, max_tokens=200, tenant=TENANT))
            for prompt in prompts
        ]
        cluster.until(lambda: all(answer.ended for answer in answers), 60)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.ids() == cluster.reply(prompt, 200)
            assert answer.cached == 0, "it is no hit to find one's own blocks"
        assert sum(answer.done.preemptions for answer in answers if answer.done) > 0
        assert cluster.decode.loader.num_landed > 0


@pytest.mark.B1
@pytest.mark.parametrize("turns", range(0, 12, 2))
def test_a_client_may_leave_while_blocks_are_loaded(tmp_path: Path, turns: int) -> None:
    with cluster_of(tmp_path) as cluster:
        prompt = prompt_of(2000)
        ask(cluster, prompt)
        forget(cluster)
        message = cluster.message(prompt + prompt_of(500, 2), max_tokens=4, tenant=TENANT)
        cluster.submit(message)
        for _ in range(turns):
            cluster.turn()
        cluster.gateway.send(Abort(message.request))
        cluster.until(lambda: not cluster.decode.desk)
        cluster.until(cluster.idle)
        ask(cluster, prompt)


@pytest.mark.A6
def test_damaged_blocks_are_computed_again(tmp_path: Path) -> None:
    """Every tenth block of the arena is overwritten behind everybody's back."""
    with cluster_of(tmp_path) as cluster:
        prompt = prompt_of(1000)
        ask(cluster, prompt)
        forget(cluster)
        assert cluster.store is not None and cluster.store.space is not None
        space = cluster.store.space
        for slot in range(0, space.tiers.arena.num_slots, 10):
            view = space.memory.slot(slot, space.slot_bytes, space.block_bytes)
            view[7] ^= 1
            view.release()
        answer = ask(cluster, prompt)
        assert sources(answer).get("host", 0) < 992


@pytest.mark.A5
def test_a_store_that_dies_costs_only_time(tmp_path: Path) -> None:
    with cluster_of(tmp_path, disk=DISK) as cluster:
        prompts = [prompt_of(1500, seed) for seed in range(3)]
        for prompt in prompts:
            ask(cluster, prompt)
        settle(cluster)
        forget(cluster)
        answers = [
            cluster.submit(cluster.message(prompt, max_tokens=4, tenant=TENANT))
            for prompt in prompts
        ]
        cluster.until(lambda: cluster.decode.loader.num_landed > 10)
        sizes, address = cluster.sizes, cluster.stop_store(drain=False)
        cluster.until(lambda: all(answer.ended for answer in answers), 60)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.ids() == cluster.reply(prompt, 4)
        cluster.start_store(sizes, address)
        attached(cluster)
        forget(cluster)
        assert sources(ask(cluster, prompts[0])).get("disk", 0) > 0


@pytest.mark.B9
def test_on_one_host_a_shipment_is_a_slot(tmp_path: Path) -> None:
    with cluster_of(tmp_path) as cluster:
        counters, store = cluster.prefill[0].shipper.counters, cluster.decode.loader.store
        for seed, length in enumerate((200, 512, 513, 1500)):
            assert sources(ask(cluster, prompt_of(length, seed)))["prefill"] > 0
        assert counters["lent_bytes"] == counters["shipped_bytes"] > 0
        cluster.until(lambda: cluster.prefill[0].shipper.lending.num_lent == 0)
        assert store is not None and store.counters["shipments_damaged"] == 0
        settle(cluster)
        assert cluster.store is not None and cluster.store.space is not None
        assert not cluster.store.space.tiers.ledger()["held"]


def test_inline_means_that_nothing_is_lent(tmp_path: Path) -> None:
    with cluster_of(tmp_path, transfer="inline") as cluster:
        ask(cluster, prompt_of(700))
        counters = cluster.prefill[0].shipper.counters
        assert counters["lent_bytes"] == 0 and counters["shipped_bytes"] > 0


def test_a_small_arena_ships_the_rest_inline(tmp_path: Path) -> None:
    """Sixty-four slots, four of them granted: most of a transfer travels as bytes."""
    with cluster_of(tmp_path, ram=64 * 4096) as cluster:
        for seed in range(4):
            ask(cluster, prompt_of(1500, seed))
        counters = cluster.prefill[0].shipper.counters
        assert 0 < counters["lent_bytes"] < counters["shipped_bytes"]


@pytest.mark.B2
def test_a_slot_that_was_reused_under_a_shipment_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every slot lent is overwritten before it is copied: asked for again, as bytes."""
    with cluster_of(tmp_path) as cluster:
        prefill = cluster.prefill[0]
        assert cluster.store is not None and cluster.store.space is not None
        space, lend = cluster.store.space, prefill.shipper.lending.lend
        damaged: list[int] = []

        def lend_and_damage(*args: Any) -> list[SlotRef]:
            refs = lend(*args)
            for ref in refs:
                view = space.memory.slot(ref.slot, space.slot_bytes, space.block_bytes)
                view[3] ^= 1
                view.release()
                damaged.append(ref.slot)
            return refs

        monkeypatch.setattr(prefill.shipper.lending, "lend", lend_and_damage)
        ask(cluster, prompt_of(900))
        assert damaged and cluster.decode.receiver.inbox.counters.damaged > 0


@pytest.mark.A5
@pytest.mark.B2
def test_a_store_that_dies_under_a_shipment_turns_it_inline(tmp_path: Path) -> None:
    with cluster_of(tmp_path) as cluster:
        prompts = [prompt_of(3000, seed) for seed in range(3)]
        answers = [
            cluster.submit(cluster.message(prompt, max_tokens=4, tenant=TENANT))
            for prompt in prompts
        ]
        cluster.until(lambda: cluster.decode.receiver.inbox.num_landed > 40)
        cluster.stop_store(drain=False)
        cluster.until(lambda: all(answer.ended for answer in answers), 60)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.ids() == cluster.reply(prompt, 4)
        assert cluster.prefill[0].shipper.counters["lent_bytes"] > 0


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
        cluster.until(lambda: not cluster.decode.desk)
        cluster.until(cluster.idle)
        cluster.until(lambda: cluster.prefill[0].shipper.lending.num_lent == 0)
        settle(cluster)
        assert cluster.store is not None and cluster.store.space is not None
        assert not cluster.store.space.tiers.ledger()["held"]


@pytest.mark.B2
def test_a_lost_word_about_a_shipment_leaves_no_slot(tmp_path: Path) -> None:
    """The last credits never arrive: the prefill node asks, and its loan ends."""
    with cluster_of(tmp_path) as cluster:
        ask(cluster, prompt_of(300, 7))
        link = cluster.decode.receiver.links.ready(cluster.addresses[0])
        assert link is not None
        link.faults = FaultInjector([FaultRule("drop", ("Credit",))])
        ask(cluster, prompt_of(700))
        assert cluster.prefill[0].shipper.lending.num_lent > 0
        cluster.until(lambda: cluster.prefill[0].shipper.lending.num_lent == 0, 10)
