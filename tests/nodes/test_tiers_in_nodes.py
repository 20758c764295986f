"""What left the device comes back from the store: host, disk, after a restart, after preemption.

The whole hand-off with a store in one thread, over the stand-in engine: a wrong byte anywhere
changes the answer.
"""

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.decode_node.node import DecodeNode
from kvferry.kvstore.client.client import Transfer
from kvferry.kvstore.keys import tenant_key
from kvferry.kvstore.wire.generation import Abort
from kvferry.prefill_node.node import PrefillNode
from kvferry.tests.rigs.handoff.cluster import DECODE_LIMITS, Answer, Cluster, prompt_of
from kvferry.tests.rigs.store.cluster import (
    DISK,
    TENANT,
    ask,
    cluster_of,
    forget,
    restarted,
    settle,
    sources,
)


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
    """The prefill node has given up its blocks, too: it fetches them to compute what is new."""
    with cluster_of(tmp_path) as cluster:
        prompt = prompt_of(1008)
        ask(cluster, prompt)
        forget(cluster)
        before = cluster.prefill[0].counters["computed_tokens"]
        longer = prompt + prompt_of(400, seed=3)
        assert sources(ask(cluster, longer)) == {"host": 1008, "prefill": 384 + 0, "decode": 16}
        assert cluster.prefill[0].counters["computed_tokens"] - before == 384


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


def end(cluster: Cluster, node: DecodeNode | PrefillNode) -> None:
    """What SIGTERM does to one node, while all others go on."""
    reader, writer = os.pipe()
    thread = threading.Thread(target=lambda: node.run(reader, lambda: True))
    thread.start()
    while thread.is_alive():
        cluster.turn(without=node)
    os.close(reader)
    os.close(writer)
    node.close()


@pytest.mark.D5
@pytest.mark.parametrize("transfer", ["auto", "inline"])
@pytest.mark.parametrize("prefill_nodes", [1, 0], ids=["apart", "alone"])
def test_nodes_that_end_leave_their_last_blocks_to_the_store(
    tmp_path: Path, prefill_nodes: int, transfer: Transfer
) -> None:
    """The store stands still while they are made: more than it has granted slots for."""
    prompt = prompt_of(2500)
    with cluster_of(tmp_path, prefill_nodes, disk=DISK, transfer=transfer) as cluster:
        computes = cluster.prefill[0] if prefill_nodes else cluster.decode
        message = cluster.message(prompt, max_tokens=100, tenant=TENANT)
        answer = cluster.submit(message)
        cluster.until(lambda: computes.connector.num_fetches > 0)
        cluster.until(lambda: computes.connector.num_fetches == 0)
        store, cluster.store = cluster.store, None
        cluster.until(lambda: answer.ended)
        cluster.until(cluster.idle)
        assert computes.connector.num_puts_waiting > 0
        cluster.store = store
        for node in reversed(cluster.nodes):
            end(cluster, node)
        assert computes.connector.num_puts_waiting == 0
        cluster.until(lambda: cluster.unwritten() == 0)
    whole = (len(prompt) + 100 - 1) // 16 * 16
    with cluster_of(tmp_path, prefill_nodes, disk=DISK, transfer=transfer) as cluster:
        again = ask(cluster, [*prompt, *answer.ids(), 7, 8, 9])
        assert sources(again).get("disk") == whole


def test_a_store_that_stands_still_holds_up_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for as long as that may last, and no longer."""
    monkeypatch.setattr("kvferry.kvstore.client.connector.LAST_BLOCKS_MS", 300)
    with cluster_of(tmp_path, 0) as cluster:
        ask(cluster, prompt_of(500))
        store, cluster.store = cluster.store, None
        begun = time.monotonic()
        end(cluster, cluster.decode)
        assert 0.3 <= time.monotonic() - begun < 30
        cluster.store = store


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
def test_no_tenant_fetches_the_blocks_of_another(tmp_path: Path) -> None:
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
        assert cluster.decode.connector.num_landed > 0


@pytest.mark.A8
@pytest.mark.D3
def test_a_preempted_transfer_or_load_counts_as_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are findable afterwards, here and in the store, and so are more of its own."""
    with cluster_of(tmp_path) as cluster:
        prompt = prompt_of(3000)
        connector, transfers = cluster.decode.connector, cluster.decode.receiver.transfers
        answer = cluster.submit(cluster.message(prompt, max_tokens=4, tenant=TENANT))
        cluster.until(lambda: transfers.num_landed > 40)
        cluster.decode.debug.preempt = 1
        cluster.until(lambda: answer.ended)
        assert answer.done is not None and answer.done.preemptions == 1
        assert sources(answer) == {"prefill": 2992, "decode": 8}
        forget(cluster)
        before = connector.num_landed
        write = connector._write

        def write_slowly(block: int, view: memoryview) -> bytes | memoryview:
            time.sleep(0.002)  # so that a fetch takes several turns
            return write(block, view)

        monkeypatch.setattr(connector, "_write", write_slowly)
        answer = cluster.submit(cluster.message(prompt, max_tokens=4, tenant=TENANT))
        cluster.until(lambda: connector.num_landed > before + 40)
        assert connector.num_fetches
        cluster.decode.debug.preempt = 1
        cluster.until(lambda: answer.ended)
        assert answer.done is not None and answer.done.preemptions == 1
        assert sources(answer) == {"host": 2992, "decode": 8}


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
        cluster.until(lambda: not cluster.decode.requests)
        cluster.until(cluster.idle)
        ask(cluster, prompt)


@pytest.mark.A6
def test_damaged_blocks_are_computed_again(tmp_path: Path) -> None:
    """Every tenth block of the arena is overwritten behind everybody's back."""
    with cluster_of(tmp_path) as cluster:
        prompt = prompt_of(1000)
        ask(cluster, prompt)
        forget(cluster)
        assert cluster.store is not None and cluster.store.storage is not None
        storage = cluster.store.storage
        for slot in range(0, storage.tiers.host.num_slots, 10):
            view = storage.memory.slot(slot, storage.slot_bytes, storage.block_bytes)
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
        cluster.until(lambda: cluster.decode.connector.num_landed > 10)
        sizes, address = cluster.sizes, cluster.stop_store(drain=False)
        cluster.until(lambda: all(answer.ended for answer in answers), 60)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.ids() == cluster.reply(prompt, 4)
        restarted(cluster, sizes, address)
        forget(cluster)
        assert sources(ask(cluster, prompts[0])).get("disk", 0) > 0
