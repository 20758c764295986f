"""Somebody leaves, dies or ends within a hand-off, or blocks arrive damaged, over real sockets."""

from __future__ import annotations

import threading
import time

import pytest

from kvferry.kvstore.keys import checksum
from kvferry.kvstore.wire.client import Client, LinkState
from kvferry.kvstore.wire.generation import Abort
from kvferry.tests.rigs.handoff.cluster import Cluster, prompt_of

# -- somebody leaves -------------------------------------------------------------------------------


@pytest.mark.B1
@pytest.mark.parametrize("turns", range(0, 14))
def test_a_client_may_leave_at_any_stage(cluster: Cluster, turns: int) -> None:
    messages = [cluster.message(prompt_of(2000, seed=n), max_tokens=50) for n in range(3)]
    answers = [cluster.submit(message) for message in messages]
    for _ in range(turns):
        cluster.turn()
    for message in messages[1:]:
        assert cluster.gateway.send(Abort(message.request))
    cluster.until(lambda: answers[0].ended)
    assert answers[0].ids() == cluster.reply(prompt_of(2000, seed=0), 50)
    cluster.until(cluster.idle)


def test_a_gateway_that_leaves_takes_its_requests_along(cluster: Cluster) -> None:
    for number in range(3):
        cluster.submit(cluster.message(prompt_of(1500, seed=number), max_tokens=3000))
    for _ in range(6):
        cluster.turn()
    cluster.gateway.close()
    cluster.gateway = cluster.client(cluster.decode._server.address, "gateway")
    cluster.until(cluster.idle)
    cluster.until(lambda: cluster.gateway.state is LinkState.READY)
    assert cluster.ask(prompt_of(99)).ids() == cluster.reply(prompt_of(99))


@pytest.mark.usefixtures("both_transfers")
@pytest.mark.B3
@pytest.mark.parametrize("turns", [1, 2, 3, 4, 6])
def test_a_prefill_node_that_dies_costs_only_time(turns: int) -> None:
    cluster = Cluster(1)
    prompts = [prompt_of(3000, seed=number) for number in range(3)]
    answers = [cluster.submit(cluster.message(prompt)) for prompt in prompts]
    for _ in range(turns):
        cluster.turn()
    cluster.kill_prefill(cluster.prefill.pop())
    cluster.until(lambda: all(answer.ended for answer in answers))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids() == cluster.reply(prompt)
    cluster.until(cluster.idle)
    cluster.close()


def test_a_prefill_node_that_is_not_there_costs_only_time() -> None:
    cluster = Cluster(0)
    answer = cluster.ask(prompt_of(900), prefill_nodes=("tcp://127.0.0.1:9",))
    assert answer.ids() == cluster.reply(prompt_of(900))
    cluster.until(cluster.idle)
    cluster.close()


def test_an_unreachable_prefill_node_is_tried_only_now_and_then() -> None:
    cluster = Cluster(0)
    connect, tried = cluster.client, []

    def counted(address: str, role: str) -> Client:
        tried.append(address)
        return connect(address, role)

    cluster.client = counted  # type: ignore[method-assign]
    for number in range(3):
        prompt = prompt_of(700, seed=number)
        answer = cluster.ask(prompt, prefill_nodes=("tcp://127.0.0.1:9",))
        assert answer.ids() == cluster.reply(prompt)
    assert len(tried) == 1
    cluster.close()


def test_a_link_that_dies_while_others_are_admitted_strands_nobody() -> None:
    cluster = Cluster(1)
    cluster.ask(prompt_of(300, seed=9))
    prompts = [prompt_of(2000, seed=number) for number in range(3)]
    answers = [cluster.submit(cluster.message(prompt)) for prompt in prompts]
    admit, kill = cluster.decode._admit, cluster.prefill.pop()._server.close

    def dies_first() -> None:
        cluster.decode._admit = admit  # type: ignore[method-assign]
        kill()
        time.sleep(0.2)
        admit()

    cluster.decode._admit = dies_first  # type: ignore[method-assign]
    cluster.until(lambda: all(answer.ended for answer in answers))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids() == cluster.reply(prompt)
    cluster.until(cluster.idle)
    cluster.close()


# -- blocks that are not what they should be -------------------------------------------------------


@pytest.mark.A6
@pytest.mark.parametrize("damages", [1, 2, 5])
def test_a_damaged_block_is_never_used(damages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(1)
    left = [damages]

    def checksum_of_another(payload: bytes | memoryview) -> int:
        left[0] -= 1
        return 0 if left[0] >= 0 else checksum(payload)

    monkeypatch.setattr("kvferry.prefill_node.shipper.checksum", checksum_of_another)
    answer = cluster.ask(prompt_of(1000))
    assert answer.ids() == cluster.reply(prompt_of(1000))
    assert cluster.decode.receiver.transfers.counters.damaged >= 1
    cluster.until(cluster.idle)
    cluster.close()


@pytest.mark.A8
def test_blocks_that_came_twice_are_not_counted_as_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(1)
    left = [20]

    def one_damaged(payload: bytes | memoryview) -> int:
        left[0] -= 1
        return 0 if left[0] == 0 else checksum(payload)

    monkeypatch.setattr("kvferry.prefill_node.shipper.checksum", one_damaged)
    answer = cluster.ask(prompt_of(1000))
    assert answer.ids() == cluster.reply(prompt_of(1000))
    assert cluster.decode.receiver.transfers.counters.damaged == 1
    assert answer.cached == 0 and answer.done is not None
    assert answer.done.sources.prefill == 992 and answer.done.sources.decode == 8
    cluster.close()


@pytest.mark.parametrize("kind", ["empty", "short", "long"])
def test_payloads_of_the_wrong_size_are_not_waited_for(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(1)
    read = cluster.prefill_engines[0].read

    def wrong(block: int) -> bytes:
        payload = bytes(read(block))
        return {"empty": b"", "short": payload[:-1], "long": payload + b"x"}[kind]

    monkeypatch.setattr(cluster.prefill_engines[0], "read", wrong)
    answer = cluster.ask(prompt_of(1000))
    assert answer.ids() == cluster.reply(prompt_of(1000))
    assert answer.done is not None and answer.done.sources.decode == 1000
    cluster.until(cluster.idle)
    cluster.close()


# -- the end of a node -----------------------------------------------------------------------------


def test_a_draining_node_waits_until_its_last_answer_was_read() -> None:
    cluster = Cluster(0)
    answer = cluster.submit(cluster.message(prompt_of(50), max_tokens=200))
    cluster.until(lambda: bool(cluster.decode.requests))
    thread = threading.Thread(target=cluster.decode.run, args=(0, lambda: True))
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive(), "it left before the gateway had read"
    while thread.is_alive():
        for received in cluster.gateway.receive():
            cluster._collect(received.message)
    assert answer.done is not None and answer.ids() == cluster.reply(prompt_of(50), 200)
    cluster.close()


@pytest.mark.D5
@pytest.mark.parametrize("timeout", [0.2, 60.0], ids=["too-long", "in-time"])
def test_a_decode_node_ends_with_its_requests_or_without(apart: Cluster, timeout: float) -> None:
    prompt = prompt_of(100, seed=80)
    count = 5000 if timeout < 1 else 100
    answer = apart.submit(apart.message(prompt, max_tokens=count))
    apart.until(lambda: bool(answer.tokens))
    apart.decode.run(-1, lambda: True, timeout)
    assert apart.decode.pool.num_held == 0
    apart.until(lambda: answer.ended)
    ids = answer.ids()
    assert ids == apart.reply(prompt, count)[: len(ids)]
    if timeout < 1:
        assert answer.rejected is not None and answer.rejected.code == "shutting_down"
        assert 0 < len(ids) < count
    else:
        assert answer.rejected is None and len(ids) == count


@pytest.mark.D5
def test_a_prefill_node_that_ends_gives_up_what_takes_too_long(apart: Cluster) -> None:
    (node,) = apart.prefill
    node.debug.hold = frozenset({"transfer"})
    prompt = prompt_of(700, seed=81)
    answer = apart.submit(apart.message(prompt))
    apart.until(lambda: node.pool.num_held > 0)
    node.run(-1, lambda: True, 0.2)
    assert node.pool.num_held == 0 and not node.scheduler.running
    apart.until(lambda: answer.ended)
    assert answer.ids() == apart.reply(prompt), "the decode node does it alone"
    assert answer.done is not None and answer.done.sources.decode == 700
