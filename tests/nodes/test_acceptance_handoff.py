"""Acceptance cases of the hand-off that need a whole cluster, in one thread and at full speed."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace

import pytest

from kvferry.kvstore.keys import checksum
from kvferry.kvstore.wire.faults import FaultInjector, FaultRule
from kvferry.kvstore.wire.generation import Abort
from kvferry.kvstore.wire.handoff import (
    AbortTransfer,
    Accepted,
    Blocks,
    Complete,
    Credit,
    Probe,
    Progress,
    TransferAborted,
)
from kvferry.prefill_node.job import Job
from kvferry.tests.rigs.handoff.cluster import DECODE_LIMITS, STANDIN, Answer, Cluster, prompt_of
from kvferry.tests.rigs.slow import slow_but

pytestmark = pytest.mark.usefixtures("both_transfers")

STAGES = ("waiting", "offered", "mid-chunk", "in transfer", "landed", "decoding")


def stage_of(cluster: Cluster, number: int) -> str:
    """How far a request is: one of `STAGES`; "absent" before and after."""
    request = next((one for one in cluster.decode.requests if one.message.request == number), None)
    if request is None:
        return "absent"
    phases = [one.phase.value for one in cluster.decode.scheduler.sequences(request)]
    transfers = cluster.decode.receiver.transfers
    transfer = next((one for one in transfers.all() if one.owner.request is request), None)
    if phases != ["receiving"] or transfer is None:
        early = {"waiting": "waiting", "fetching": "offered", "decoding": "decoding"}
        return early.get("".join(phases), "landed")
    if len(transfer.landed) == transfer.last - transfer.first:
        return "landed"
    if transfer.landed:
        return "in transfer"
    scheduler = cluster.prefill[0].scheduler
    accepted = any(job.number == transfer.number for job in scheduler.running)
    return "mid-chunk" if accepted else "offered"


@pytest.mark.parametrize("both_transfers", slow_but(["inline", "arena"], "inline"), indirect=True)
@pytest.mark.B1
def test_clients_that_leave_at_every_stage_leave_nothing() -> None:
    """Eight at once, each left at a stage of its own, a hundred times; then one fills the pool.

    Only four decode at a time, so the others wait. A request that runs past its stage between two
    looks is left where it then is. The node steps in every second turn only, so that what has just
    landed is seen.
    """
    limits = replace(DECODE_LIMITS, max_num_seqs=4)
    cluster = Cluster(1, limits=limits, decode_blocks=256, prefill_blocks=256)
    decode = cluster.decode.debug
    dice = random.Random(1)
    stages: Counter[str] = Counter()
    for round_number in range(100):
        leaves: dict[int, str] = {}
        for n in range(8):
            prompt = prompt_of(dice.choice([400, 900, 1400]), seed=round_number * 8 + n)
            message = cluster.message(prompt, max_tokens=200)
            leaves[message.request] = dice.choice(STAGES)
            cluster.submit(message)
        deadline = time.monotonic() + 20
        while leaves:
            assert time.monotonic() < deadline, leaves
            decode.hold ^= {"decode"}
            cluster.turn()
            for number, leaves_at in list(leaves.items()):
                stage = stage_of(cluster, number)
                if stage in STAGES and STAGES.index(stage) >= STAGES.index(leaves_at):
                    assert cluster.gateway.send(Abort(number))
                    stages[stage] += 1
                    del leaves[number]
    decode.hold = frozenset()
    cluster.until(cluster.idle, 10)
    print(stages)
    assert stages.total() == 800 and set(stages) == set(STAGES), stages
    whole = prompt_of(256 * 16 - 20, seed=99_999)
    assert cluster.ask(whole, max_tokens=16).ids() == cluster.reply(whole, 16)
    cluster.until(cluster.idle, 10)
    cluster.close()


@pytest.mark.B1
def test_a_hundred_refused_requests_hold_nothing() -> None:
    cluster = Cluster(1, limits=replace(DECODE_LIMITS, max_queued=3, max_num_seqs=1))
    answers = [
        cluster.ask(prompt_of(8000, seed=number), max_tokens=500) for number in range(50)
    ] + [
        cluster.submit(cluster.message(prompt_of(300, seed=number), max_tokens=20))
        for number in range(60)
    ]
    cluster.until(lambda: all(answer.ended for answer in answers))
    refused = [answer for answer in answers if answer.rejected]
    assert len(refused) >= 100
    cluster.until(cluster.idle)
    cluster.close()


@pytest.mark.B2
def test_late_frames_of_an_aborted_transfer_never_reach_another_request() -> None:
    """X's blocks are delayed, X is aborted, Y gets the same memory: Y is right."""
    cluster = Cluster(1, decode_blocks=40, prefill_blocks=200)
    server = cluster.prefill[0]._server
    server.faults = FaultInjector([FaultRule("delay", ("Blocks", "Lent"), seconds=0.5)])
    x = cluster.message(prompt_of(500, seed=1))
    cluster.submit(x)
    cluster.until(lambda: server.faults is not None and server.faults.num_held > 0)
    cluster.gateway.send(Abort(x.request))
    server.faults.replace([])
    y = cluster.submit(cluster.message(prompt_of(500, seed=2), max_tokens=100))
    dropped = cluster.decode.receiver.transfers.counters
    cluster.until(lambda: y.ended)
    assert y.ids() == cluster.reply(prompt_of(500, seed=2), 100)
    cluster.until(lambda: dropped.dropped > 0)
    cluster.until(cluster.idle)
    cluster.close()


@pytest.mark.B2
def test_messages_of_transfers_that_nobody_knows_are_survived() -> None:
    cluster = Cluster(1)
    running = cluster.submit(cluster.message(prompt_of(3000), max_tokens=30))
    cluster.until(lambda: cluster.decode.receiver.transfers.num_landed > 0)
    server = cluster.prefill[0]._server
    decode = next(peer for peer in server.peers.values() if peer.role == "decode")
    payload = bytes(cluster.engine.spec.block_bytes)
    for number in (0, 7, 2**40):
        for message, payloads in (
            (Blocks(number, 1, 2**40, (checksum(payload),)), [payload]),
            (Accepted(number, 1, 2**50, -1.0), []),
            (Complete(number, 1, 1, 1, 0.0, 0.0), []),
            (TransferAborted(number, 1, "asked"), []),
            (Progress(number, 1, False, 3), []),
        ):
            assert server.send(decode, message, payloads)
    link = cluster.decode.receiver.links.ready(cluster.addresses[0])
    assert link is not None
    for number in (0, 7, 2**40):
        for question in (Credit(number, 1, 5), AbortTransfer(number, 9), Probe(number, 1)):
            assert link.send(question)
    cluster.until(lambda: running.ended)
    assert running.ids() == cluster.reply(prompt_of(3000), 30)
    cluster.until(cluster.idle)
    cluster.close()


@pytest.mark.B8
@pytest.mark.parametrize("both_transfers", slow_but(["inline", "arena"], "inline"), indirect=True)
@pytest.mark.parametrize("prefill_nodes", slow_but([1, 0], 0))
def test_a_burst_on_a_small_pool_finishes(prefill_nodes: int) -> None:
    """Room for four; 200 requests of 512 in and 64 out at once, a tenth of the clients leaves."""
    cluster = Cluster(prefill_nodes, decode_blocks=4 * 36 + 4, prefill_blocks=200)
    dice = random.Random(3)
    asked = []
    for number in range(200):
        message = cluster.message(prompt_of(512, seed=number), max_tokens=64)
        asked.append((message, cluster.submit(message)))
    leaving = dice.sample(asked, 20)
    staying = [one for one in asked if one not in leaving]
    started = time.monotonic()
    halves: list[float] = []

    def finished() -> bool:
        if leaving and dice.random() < 0.1:
            cluster.gateway.send(Abort(leaving.pop()[0].request))
        done = sum(answer.ended for _, answer in staying)
        if not halves and done >= len(staying) // 2:
            halves.append(time.monotonic() - started)
        return done == len(staying)

    cluster.until(finished, 120)
    halves.append(time.monotonic() - started - halves[0])
    for number, (message, answer) in enumerate(asked):
        if (message, answer) in staying:
            assert answer.ids() == cluster.reply(prompt_of(512, seed=number), 64)
    assert cluster.decode.stall_watch.stalls == 0
    print(f"halves: {halves[0]:.1f} s, {halves[1]:.1f} s")
    for message, _ in leaving:
        cluster.gateway.send(Abort(message.request))
    cluster.until(cluster.idle)
    cluster.close()


@pytest.mark.D2
def test_short_prompts_do_not_wait_for_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a prompt of 6,000 tokens, short ones are prefilled within three chunks.

    Counted on the prefill node, from the arrival of an offer to its last block.
    """
    cluster = Cluster(1)
    node = cluster.prefill[0]
    chunks: dict[int, int] = {}
    add, complete = node.scheduler.add, node.scheduler.complete

    def arrived(job: Job) -> None:
        chunks[job.number] = -node.counters["chunks"]
        add(job)

    def completed(job: Job) -> None:
        chunks[job.number] += node.counters["chunks"]
        complete(job)

    monkeypatch.setattr(node.scheduler, "add", arrived)
    monkeypatch.setattr(node.scheduler, "complete", completed)
    long = cluster.submit(cluster.message(prompt_of(6000), max_tokens=1))
    cluster.until(lambda: node.counters["chunks"] >= 2)
    for number in range(5):
        prompt = prompt_of(300, seed=10 + number)
        assert cluster.ask(prompt, max_tokens=1).ids() == cluster.reply(prompt, 1)
    cluster.until(lambda: long.ended)
    assert long.ids() == cluster.reply(prompt_of(6000), 1)
    first, *short = [chunks[number] for number in sorted(chunks)]
    assert first > 10 and len(short) == 5
    assert all(1 <= count <= 6 for count in short), "two chunks a pass, three passes"
    cluster.close()


@pytest.mark.D2
def test_a_prompt_that_can_never_fit_is_refused_with_both_figures() -> None:
    cluster = Cluster(1, decode_blocks=64)
    waiting: list[Answer] = []
    refused = cluster.submit(cluster.message(prompt_of(2000), max_tokens=16))
    for number in range(4):
        message = cluster.message(prompt_of(100, seed=number), max_tokens=16)
        waiting.append(cluster.submit(message))
    cluster.until(lambda: refused.ended and all(answer.ended for answer in waiting))
    assert refused.rejected is not None
    assert "2016" in refused.rejected.message and "1024" in refused.rejected.message
    assert all(answer.ids() for answer in waiting)
    cluster.close()


@pytest.mark.D7
@pytest.mark.parametrize("both_transfers", slow_but(["inline", "arena"], "inline"), indirect=True)
@pytest.mark.parametrize(
    "action", slow_but(["drop", "duplicate", "reorder", "corrupt"], "drop", "corrupt")
)
def test_one_frame_of_fifty(action: str) -> None:
    """Lost, repeated, overtaken or damaged frames on both links: nothing decodes with a hole."""
    large = replace(STANDIN, kv_bytes_per_token=1 << 12)  # several `Blocks` messages a prompt
    cluster = Cluster(1, config=large, decode_blocks=800, prefill_blocks=800)
    spared = ("Blocks", "Lent", "Accepted", "Complete", "Offer", "Credit", "AbortTransfer")
    rules = [FaultRule(action, spared, probability=0.02)]  # type: ignore[arg-type]
    cluster.prefill[0]._server.faults = FaultInjector(rules, seed=1)
    cluster.ask(prompt_of(200, seed=999))
    link = cluster.decode.receiver.links.ready(cluster.addresses[0])
    assert link is not None
    link.faults = FaultInjector(rules, seed=2)
    prompts = [prompt_of(2000, seed=number) for number in range(16)]
    for at in range(0, 16, 8):
        some = prompts[at : at + 8]
        answers = [cluster.submit(cluster.message(one, max_tokens=3)) for one in some]
        cluster.until(lambda answers=answers: all(one.ended for one in answers), 60)  # type: ignore[misc]
        for prompt, answer in zip(some, answers, strict=True):
            assert answer.ids() == cluster.reply(prompt, 3) and answer.cached == 0
    struck = [one.faults.counters for one in (cluster.prefill[0]._server, link) if one.faults]
    assert sum(sum(counts.values()) for counts in struck) > 0
    cluster.until(cluster.idle)
    cluster.close()
