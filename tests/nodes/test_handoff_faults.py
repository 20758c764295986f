"""What is lost, late, repeated, declined or dead in a hand-off costs only time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import zmq

from kvferry.decode_node.node import DecodeNode
from kvferry.decode_node.transfers import Windows
from kvferry.kvstore.node.compute import StallWatch
from kvferry.kvstore.wire.client import Client, LinkState
from kvferry.kvstore.wire.codec import PROTOCOL, AnyMessage
from kvferry.kvstore.wire.generation import Abort, Inquire, Rejected, Running
from kvferry.kvstore.wire.handoff import (
    AbortTransfer,
    Accepted,
    Blocks,
    Complete,
    Credit,
    Lent,
    Offer,
    Progress,
    TransferAborted,
)
from kvferry.kvstore.wire.hello import Hello
from kvferry.kvstore.wire.message import Message
from kvferry.kvstore.wire.sockets import new_incarnation
from kvferry.kvstore.wire.status import Drain
from kvferry.prefill_node.node import PrefillNode
from kvferry.tests.rigs.handoff.cluster import (
    DECODE_LIMITS,
    FINGERPRINT,
    STANDIN,
    Cluster,
    prompt_of,
)
from kvferry.tests.rigs.slow import slow_but


@pytest.mark.B3
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.usefixtures("both_transfers")
def test_another_prefill_node_takes_over_from_a_dead_one(share: float) -> None:
    """Fifty requests on two nodes; one dies when it has computed that share of its chunks."""
    cluster = Cluster(2, limits=replace(DECODE_LIMITS, max_num_seqs=50), decode_blocks=6000,
                      prefill_blocks=6000)  # fmt: skip
    first, second = cluster.addresses
    for number, address in enumerate((first, second)):  # both links are up
        cluster.ask(prompt_of(200, seed=90 + number), prefill_nodes=(address,))
    prompts = [prompt_of(1550, seed=number) for number in range(50)]
    orders = [(first, second), (second, first)]
    answers = [
        cluster.submit(cluster.message(prompt, prefill_nodes=orders[number % 2]))
        for number, prompt in enumerate(prompts)
    ]
    doomed = cluster.prefill[0]
    before = doomed.counters["computed_tokens"]
    of_it = 25 * 1536
    cluster.until(lambda: doomed.counters["computed_tokens"] - before >= share * of_it)
    assert doomed.counters["computed_tokens"] - before < of_it
    cluster.kill_prefill(doomed)
    cluster.prefill.remove(doomed)
    cluster.until(lambda: all(answer.ended for answer in answers), 60)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids() == cluster.reply(prompt)
        assert answer.done is not None and answer.done.sources.prefill > 1500
    cluster.until(cluster.idle)
    cluster.close()


@pytest.mark.D7
def test_a_stopped_reader_bounds_what_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """High-water marks of ten messages and 200 requests; then the decode node stands still."""
    large = replace(STANDIN, kv_bytes_per_token=1 << 12)  # 64 KiB a block, 57 MB for fifty
    limits = replace(DECODE_LIMITS, max_num_seqs=50)
    cluster = Cluster(1, config=large, limits=limits, decode_blocks=1200, prefill_blocks=1200)
    monkeypatch.setattr("kvferry.kvstore.wire.sockets.HIGH_WATER", 10)  # for the link to come
    prefill, transfers = cluster.prefill[0], cluster.decode.receiver.transfers
    prefill._server.socket.setsockopt(zmq.SNDHWM, 10)
    prefill._server.socket.setsockopt(zmq.RCVHWM, 10)
    transfers.windows = Windows(transfer=2 << 20, node=4 << 20, least=128 << 10)
    prompts = [prompt_of(300 + number // 10, seed=number) for number in range(200)]
    answers = [cluster.submit(cluster.message(prompt, max_tokens=2)) for prompt in prompts]
    cluster.until(lambda: transfers.num_landed > 0)
    shipped, still_from = 0, time.monotonic()
    while time.monotonic() < still_from + 0.5:
        prefill.turn()
        prefill.check()
        if prefill.counters["shipped_bytes"] > shipped:
            shipped, still_from = prefill.counters["shipped_bytes"], time.monotonic()
    on_the_way = shipped - transfers.num_landed * cluster.engine.spec.block_bytes
    assert 0 < on_the_way <= 20 << 20, "4 MiB shared by fifty who came one after the other"
    cluster.until(lambda: all(answer.ended for answer in answers), 60)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids() == cluster.reply(prompt, 2)
    cluster.until(cluster.idle)
    cluster.close()


def test_another_prefill_node_is_asked_when_the_first_declines() -> None:
    cluster = Cluster(2)
    cluster.prefill[0].draining = True
    answer = cluster.ask(prompt_of(1000))
    assert answer.ids() == cluster.reply(prompt_of(1000))
    assert answer.done is not None and answer.done.sources.prefill == 992
    cluster.close()


class Lossy:
    """Wraps a node's `send`: the messages for which `wanted` says so never leave."""

    def __init__(self, node: object, wanted: Callable[[AnyMessage], bool]) -> None:
        self.lost = 0
        self._wanted = wanted
        self._send = node.send  # type: ignore[attr-defined]
        node.send = self.send  # type: ignore[attr-defined]

    def send(self, *args: object) -> bool:
        if any(isinstance(one, Message) and self._wanted(one) for one in args):  # type: ignore[arg-type]
            self.lost += 1
            return True
        sent: bool = self._send(*args)
        return sent


@pytest.mark.D7
@pytest.mark.parametrize(
    "kind", [Accepted, Blocks, Complete, TransferAborted, Progress], ids=lambda kind: kind.__name__
)
@pytest.mark.usefixtures("both_transfers")
def test_a_lost_frame_of_the_prefill_node_costs_only_time(kind: type) -> None:
    cluster = Cluster(1)
    kinds = (Blocks, Lent) if kind is Blocks else kind  # a shipment by slot says it otherwise
    lossy = Lossy(
        cluster.prefill[0]._server, lambda one: isinstance(one, kinds) and lossy.lost == 0
    )
    answer = cluster.submit(cluster.message(prompt_of(2000)))
    if kind is Progress:  # it is asked for only where nothing moves
        cluster.prefill[0].debug.hold = frozenset({"prefill"})
        cluster.until(lambda: lossy.lost > 0)
        cluster.prefill[0].debug.hold = frozenset()
    cluster.until(lambda: answer.ended)
    assert answer.ids() == cluster.reply(prompt_of(2000)) and answer.cached == 0
    message = cluster.message(prompt_of(2000, seed=1))
    cluster.submit(message)
    cluster.until(lambda: bool(cluster.prefill[0].scheduler.running))
    cluster.gateway.send(Abort(message.request))
    cluster.until(cluster.idle)
    assert lossy.lost == 1
    cluster.close()


@pytest.mark.D7
@pytest.mark.parametrize(
    ("kind", "times"),
    [(Offer, 8), (Credit, 8), (AbortTransfer, 2)],  # an abort is said again every second
    ids=["Offer", "Credit", "AbortTransfer"],
)
@pytest.mark.parametrize("both_transfers", slow_but(["inline", "arena"], "inline"), indirect=True)
@pytest.mark.usefixtures("both_transfers")
def test_a_lost_frame_of_the_decode_node_costs_only_time(kind: type, times: int) -> None:
    large = replace(STANDIN, kv_bytes_per_token=1 << 17)  # 2 MiB a block: credit matters
    cluster = Cluster(1, config=large, decode_blocks=60, prefill_blocks=60)
    cluster.ask(prompt_of(150, seed=7), max_tokens=1)
    link = cluster.decode.receiver.links.ready(cluster.addresses[0])
    assert link is not None
    lossy = Lossy(link, lambda one: isinstance(one, kind) and lossy.lost < times)
    answer = cluster.ask(prompt_of(450), max_tokens=2)
    assert answer.ids() == cluster.reply(prompt_of(450), 2)
    message = cluster.message(prompt_of(450, seed=1))
    cluster.submit(message)
    cluster.until(lambda: any(one.offered for one in cluster.decode.receiver.transfers.all()))
    cluster.gateway.send(Abort(message.request))
    cluster.until(lambda: not cluster.decode.requests)
    cluster.until(cluster.idle)
    assert lossy.lost > 0
    cluster.close()


@pytest.mark.B3
@pytest.mark.usefixtures("both_transfers")
def test_a_prefill_node_that_stalls_is_given_up() -> None:
    cluster = Cluster(2)
    cluster.ask(prompt_of(200, seed=50), prefill_nodes=(cluster.addresses[0],))
    answer = cluster.submit(cluster.message(prompt_of(3000)))
    counters, before = cluster.prefill[0].counters, 200 // 16 * 16
    cluster.until(lambda: counters["computed_tokens"] > before)
    assert counters["computed_tokens"] < before + 2900, "it has nothing left to do"
    cluster.prefill[0].turn = lambda: None  # type: ignore[method-assign]
    cluster.until(lambda: answer.ended)
    assert answer.ids() == cluster.reply(prompt_of(3000))
    assert cluster.decode.receiver.links.stalls == 1
    cluster.close()


def test_a_repeated_generate_runs_once(cluster: Cluster) -> None:
    message = cluster.message(prompt_of(300))
    answer = cluster.submit(message)
    cluster.gateway.send(message)
    cluster.until(lambda: answer.ended)
    cluster.gateway.send(message)
    cluster.until(lambda: cluster.decode.counters["requests_repeated"] == 2)
    for _ in range(20):
        cluster.turn()
    assert answer.ids() == cluster.reply(prompt_of(300)) and answer.rejected is None


def test_a_gateway_may_ask_how_far_a_request_is(cluster: Cluster) -> None:
    message = cluster.message(prompt_of(30), max_tokens=2000)
    answer = cluster.submit(message)
    cluster.until(lambda: len(answer.ids()) > 3)
    for number, expected in ((message.request, Running), (12345, Rejected)):
        cluster.gateway.send(Inquire(number))
        found: list[AnyMessage] = []
        deadline = time.monotonic() + 5
        while not found and time.monotonic() < deadline:
            cluster.decode.turn()
            for received in cluster.gateway.receive():
                if isinstance(received.message, Running | Rejected):
                    found.append(received.message)
                else:
                    cluster._collect(received.message)
        assert isinstance(found[0], expected)
    cluster.gateway.send(Abort(message.request))


@pytest.mark.D7
@pytest.mark.A8
def test_an_account_that_was_lost_is_said_again_but_not_for_ever(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.decode_node.request_table.REMEMBERED", 3)
    cluster.ask(prompt_of(300), max_tokens=3)

    def lose_the_account() -> int:
        message = cluster.message(prompt_of(300), max_tokens=3)
        answer = cluster.submit(message)
        cluster.until(lambda: answer.ended)
        first, answer.done = answer.done, None
        assert first is not None and first.sources.device == 288
        cluster.gateway.send(Inquire(message.request))
        cluster.until(lambda: answer.ended)
        assert answer.done == first and answer.rejected is None
        return message.request

    numbers = [lose_the_account() for _ in range(4)]
    forgotten = cluster.answers[numbers[0]]
    forgotten.done = None
    cluster.gateway.send(Inquire(numbers[0]))
    cluster.until(lambda: forgotten.ended)
    assert forgotten.rejected is not None and forgotten.rejected.code == "unknown_request"
    assert len(cluster.decode.requests._ended) == 3


@pytest.mark.B5
@pytest.mark.parametrize("role", ["decode", "prefill", "nobody", "gateway"])
def test_only_a_gateway_may_end_a_node(cluster: Cluster, role: str) -> None:
    nodes: list[DecodeNode | PrefillNode] = [cluster.decode, *cluster.prefill]
    for node in nodes:
        _send_drain(cluster, node, role)
    assert [node.status().draining for node in nodes] == [role == "gateway"] * len(nodes)


def _send_drain(cluster: Cluster, node: DecodeNode | PrefillNode, role: str) -> None:
    """Until the node has read it."""
    hello = Hello(PROTOCOL, role, FINGERPRINT)
    client = Client(cluster.context, node._server.address, hello, new_incarnation())

    def sent() -> bool:
        client.tick(time.monotonic())
        list(client.receive())
        return client.state is LinkState.READY and client.send(Drain())

    def heard() -> bool:
        state = node.status()
        return state.draining or state.counters.get("messages_ignored", 0) == 1

    cluster.until(sent)
    cluster.until(heard)
    client.close()


@pytest.mark.B5
def test_whoever_says_hello_as_another_loses_what_it_had(cluster: Cluster) -> None:
    server = cluster.decode._server
    answer = cluster.submit(cluster.message(prompt_of(30), max_tokens=5000))
    cluster.until(lambda: len(answer.ids()) > 3)
    (identity,) = [it.identity for it in server.peers.values() if it.role == "gateway"]
    server._meet(identity, 12345, Hello(PROTOCOL, "gateway", {}))
    cluster.until(lambda: not cluster.decode.requests)
    assert cluster.decode.counters["requests_abandoned"] == 1


def test_the_watch_speaks_up_once_when_nothing_moves(caplog: pytest.LogCaptureFixture) -> None:
    watch = StallWatch("decode")
    for now in (0.0, 1.0, 1.9):
        watch.observe(now, work=True, moved=1, reason="three wait")
    assert not caplog.records
    for now in (2.1, 5.0, 9.0):
        watch.observe(now, work=True, moved=1, reason="three wait")
    assert watch.stalls == 1 and "three wait" in caplog.text
    watch.observe(10.0, work=True, moved=2, reason="")
    watch.observe(11.0, work=True, moved=2, reason="")
    assert watch.stalls == 1
