"""The pure cores of both nodes: chunks, urgency, admission, growth, forks, jobs, transfers."""

from __future__ import annotations

import pytest

from kvferry.decode_node.request import Phase, Request, Sequence, open_request, open_sequences
from kvferry.decode_node.scheduler import DecodeScheduler, Limits
from kvferry.decode_node.transfers import Transfers, TransferState, Windows
from kvferry.kvstore.keys import chain, pack_tokens
from kvferry.kvstore.node.chunks import blocks_for, chunk_end, urgency
from kvferry.kvstore.tiers.device import BlockPool
from kvferry.kvstore.wire.generation import Generate, Sampling
from kvferry.kvstore.wire.handoff import Accepted, Blocks, Complete, Offer
from kvferry.kvstore.wire.server import Peer
from kvferry.prefill_node.job import MAX_CREDIT_BYTES, Job, JobState, open_job
from kvferry.prefill_node.scheduler import PrefillScheduler

B = 16
ROOT = b"r" * 16
PEER = Peer(b"peer", "gateway", 1)
LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=512)


def request(length: int, *, seed: int = 0, arrived: float = 0.0, **changes: object) -> Request:
    prompt = [(seed * 1000 + index) % 5000 for index in range(length)]
    fields: dict[str, object] = {
        "request": seed,
        "prompt": pack_tokens(prompt),
        "root": ROOT,
        "keys": b"".join(chain(ROOT, prompt, B)),
        "max_tokens": 10,
        "min_tokens": 0,
        "eos_ids": (),
        "stop_token_ids": (),
        "sampling": Sampling(),
        "seed": 0,
        "choices": 1,
    }
    return open_request(PEER, Generate(**{**fields, **changes}), arrived)  # type: ignore[arg-type]


def decoder(blocks: int, limits: Limits = LIMITS) -> DecodeScheduler:
    return DecodeScheduler(BlockPool(blocks), B, limits)


def queue(scheduler: DecodeScheduler, *requests: Request) -> list[Sequence]:
    sequences = [one for each in requests for one in open_sequences(each, B)]
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


def compute(scheduler: DecodeScheduler, sequence: Sequence, token: int = 1) -> None:
    """Pretends that a step ran all of a sequence and drew one token."""
    scheduler.advance(sequence, len(sequence.tokens))
    sequence.phase = Phase.DECODING
    sequence.request.outputs[sequence.choices[0]].append(token)
    sequence.tokens.append(token)


@pytest.mark.parametrize(
    ("start", "budget", "end", "expected"),
    [(0, 512, 100, 100), (0, 512, 600, 512), (16, 64, 600, 64), (64, 63, 600, 64), (0, 0, 5, 0),
     (48, 512, 1024, 512), (512, 100, 1000, 576), (0, 5, 5, 5)],
)  # fmt: skip
def test_chunks_end_at_multiples_of_64_or_at_the_end(
    start: int, budget: int, end: int, expected: int
) -> None:
    assert chunk_end(start, budget, end) == expected


def test_waiting_outweighs_length_in_the_end() -> None:
    assert urgency(100, 0) < urgency(5000, 0)
    assert urgency(5000, 60) < urgency(100, 0)
    assert [blocks_for(tokens, B) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_a_sequence_gets_its_blocks_and_its_growth_or_nothing() -> None:
    scheduler = decoder(10)
    first, second = queue(scheduler, request(100, seed=1), request(100, seed=2, arrived=1))
    assert scheduler.admit() == [first]
    assert len(first.blocks) == 7 and len(first.spare) == 0 and not second.blocks
    scheduler.end(first)
    assert scheduler.admit() == [second]
    scheduler.check()


def test_the_queue_is_served_in_order_of_priority_and_arrival() -> None:
    scheduler = decoder(100)
    late, urgent, early = queue(
        scheduler,
        request(20, seed=1, arrived=5),
        request(20, seed=2, arrived=9, priority=-1),
        request(20, seed=3, arrived=1),
    )
    assert scheduler.admit() == [urgent, early, late]


def test_a_small_request_does_not_overtake_one_that_waits_for_room() -> None:
    scheduler = decoder(12)
    running, large, small = queue(
        scheduler,
        request(90, seed=1, arrived=1),
        request(150, seed=2, arrived=2),
        request(5, seed=3, arrived=3),
    )
    assert scheduler.admit() == [running]
    scheduler.end(running)
    assert scheduler.admit() == [large, small]


def test_choices_count_as_sequences() -> None:
    scheduler = decoder(100)
    first, second = queue(scheduler, request(20, seed=1, choices=3), request(20, seed=2, choices=2))
    assert scheduler.admit() == [first]
    assert "exceeds the limit of 4" in scheduler.never_fits(request(20, choices=5))
    assert scheduler.waiting == [second]


def test_what_the_pool_can_never_hold_is_known_on_arrival() -> None:
    scheduler = decoder(10)
    assert not scheduler.never_fits(request(100, max_tokens=60))
    assert "176 tokens" in scheduler.never_fits(request(100, max_tokens=61))
    assert "160" in scheduler.never_fits(request(100, max_tokens=61))
    assert scheduler.never_fits(request(100, max_tokens=60, choices=2))


def test_a_shared_prefix_is_computed_once() -> None:
    scheduler = decoder(100)
    owner, follower = queue(scheduler, request(100, seed=1), request(100, seed=1, arrived=1))
    assert scheduler.admit() == [owner]
    assert scheduler.admit() == []
    scheduler.advance(owner, 64)
    assert scheduler.admit() == []
    compute(scheduler, owner)
    assert scheduler.admit() == [follower]
    assert follower.computed == 96 and follower.blocks[:6] == owner.blocks[:6]
    scheduler.check()


def test_the_work_of_an_aborted_owner_is_handed_over() -> None:
    scheduler = decoder(100)
    owner, follower = queue(scheduler, request(100, seed=1), request(100, seed=1, arrived=1))
    scheduler.admit()
    scheduler.advance(owner, 32)
    scheduler.end(owner)
    assert scheduler.admit() == [follower]
    assert follower.computed == 32
    scheduler.check()


def test_a_step_decodes_everybody_and_prefills_a_bounded_slice() -> None:
    scheduler = decoder(200)
    first, second = queue(scheduler, request(20, seed=1), request(1000, seed=2, arrived=1))
    scheduler.admit()
    plan = scheduler.plan(0.0)
    assert [(one.sequence, one.start, one.end) for one in plan.slices] == [
        (first, 0, 20),
        (second, 0, 448),
    ]
    compute(scheduler, first)
    scheduler.advance(second, 448)
    plan = scheduler.plan(0.0)
    assert [(one.sequence, one.start, one.end) for one in plan.slices] == [
        (first, 20, 21),
        (second, 448, 512),
    ]
    assert plan.slices[0].is_last and not plan.slices[1].is_last


def test_preemption_takes_the_youngest_first() -> None:
    scheduler = decoder(8)
    requests = [request(30, seed=seed, arrived=seed, max_tokens=1) for seed in (1, 2)]
    old, young = queue(scheduler, *requests)
    assert scheduler.admit() == [old, young]
    for _ in range(3):
        for sequence in (old, young):
            if sequence.phase is not Phase.WAITING:
                compute(scheduler, sequence)
                scheduler.plan(0.0)
    while young.phase is not Phase.WAITING:
        compute(scheduler, old)
        scheduler.plan(0.0)
    assert young.request.preemptions == 1 and old.request.preemptions == 0
    assert young in scheduler.waiting and not young.blocks
    scheduler.check()


@pytest.mark.parametrize("length", [31, 32, 33])
@pytest.mark.parametrize("choices", [2, 3, 4])
def test_forks_share_whole_blocks_and_copy_the_unfilled_one(length: int, choices: int) -> None:
    scheduler = decoder(40)
    (root,) = queue(scheduler, request(length, choices=choices))
    assert scheduler.admit() == [root]
    scheduler.advance(root, length)
    forks = scheduler.fork(root)
    assert [fork.sequence.choices for fork in forks] == [[choice] for choice in range(1, choices)]
    for fork in forks:
        assert fork.sequence.blocks[: length // B] == root.blocks[: length // B]
        if length % B:
            assert fork.copy == (root.blocks[-1], fork.sequence.blocks[-1])
        else:
            assert fork.copy is None
    scheduler.check()
    for sequence in [root, *(fork.sequence for fork in forks)]:
        scheduler.end(sequence)
    assert scheduler.pool.num_held == 0


# -- the prefill node --------------------------------------------------------------------------


def job(number: int, blocks: int, *, first: int = 0, seed: int = 0, arrived: float = 0.0) -> Job:
    tokens = [(seed * 1000 + index) % 5000 for index in range(blocks * B)]
    offer = Offer(
        number, 1, pack_tokens(tokens), b"".join(chain(ROOT, tokens, B)), first, blocks, 10_000
    )
    return open_job(Peer(b"d", "decode", 1), offer, B, arrived)


def test_a_job_waits_unaccepted_until_its_whole_span_fits() -> None:
    scheduler = PrefillScheduler(BlockPool(10), B, 512)
    first, second = job(1, 6, seed=1), job(2, 6, seed=2, arrived=1)
    scheduler.add(first)
    scheduler.add(second)
    assert scheduler.accept() == [first]
    assert second.state is JobState.OFFERED and not second.blocks
    chunks = scheduler.plan(0.0)
    scheduler.computed(chunks)
    scheduler.shipped(first, 6, 100)
    scheduler.complete(first)
    assert scheduler.accept() == [second]
    scheduler.check()


def test_short_work_comes_first_and_shares_a_pass_with_long_work() -> None:
    scheduler = PrefillScheduler(BlockPool(1000), B, 512)
    long, short = job(1, 100, seed=1), job(2, 8, seed=2, arrived=0.1)
    for one in (long, short):
        scheduler.add(one)
    scheduler.accept()
    assert [(one.job, one.start, one.end) for one in scheduler.plan(0.1)] == [
        (short, 0, 128),
        (long, 0, 384),
    ]


def test_only_whole_blocks_within_the_credit_are_shipped() -> None:
    scheduler = PrefillScheduler(BlockPool(100), B, 512)
    one = job(1, 20, first=2)
    scheduler.add(one)
    scheduler.accept()
    assert not scheduler.sendable(one, 1000, 8)
    scheduler.computed(scheduler.plan(0.0))
    assert scheduler.sendable(one, 1000, 8) == range(2, 10)
    scheduler.shipped(one, 8, 1000)
    assert scheduler.sendable(one, 1000, 8) == range(10, 12)
    scheduler.shipped(one, 2, 1000)
    assert not scheduler.sendable(one, 1000, 8)
    one.credit += 8000
    assert scheduler.sendable(one, 1000, 8) == range(12, 20)


def test_an_abort_during_a_pass_waits_for_its_end() -> None:
    scheduler = PrefillScheduler(BlockPool(100), B, 512)
    one, other = job(1, 10, seed=1), job(2, 10, seed=2)
    for each in (one, other):
        scheduler.add(each)
    scheduler.accept()
    chunks = scheduler.plan(0.0)
    scheduler.abort(one)
    assert one.blocks and not scheduler.all_aborted
    scheduler.abort(other)
    assert scheduler.all_aborted
    scheduler.abandoned()
    assert scheduler.pool.num_held == 0 and scheduler.pool.num_cached == 0
    assert one.state is JobState.DRAINED
    assert len(chunks) == 2
    scheduler.check()


@pytest.mark.parametrize(
    "changes", [{"keys": b"k" * 16}, {"tokens": b"t" * 8}, {"first": 4}, {"first": 5}]
)
def test_an_offer_whose_counts_disagree_is_refused(changes: dict[str, object]) -> None:
    tokens = list(range(4 * B))
    fields: dict[str, object] = {
        "transfer": 1,
        "epoch": 1,
        "tokens": pack_tokens(tokens),
        "keys": b"".join(chain(ROOT, tokens, B)),
        "first": 0,
        "last": 4,
        "credit": 1,
    }
    with pytest.raises(ValueError):
        open_job(PEER, Offer(**{**fields, **changes}), B, 0.0)  # type: ignore[arg-type]


@pytest.mark.B5
def test_no_receiver_is_granted_more_than_this_process_would_hold() -> None:
    tokens = list(range(4 * B))
    keys = b"".join(chain(ROOT, tokens, B))
    offer = Offer(1, 1, pack_tokens(tokens), keys, 0, 4, 100)
    job = open_job(PEER, offer, B, 0.0)
    job.grant(50, 10)
    assert job.credit == 150
    for _ in range(3):
        job.grant(1 << 53, 10)
    assert job.credit == MAX_CREDIT_BYTES
    job.grant(1 << 53, MAX_CREDIT_BYTES)
    assert job.credit == 2 * MAX_CREDIT_BYTES, "two blocks always fit"


# -- the transfers ---------------------------------------------------------------------------------

SIZE = 100
WINDOWS = Windows(transfer=1000, node=2000, least=200)


def test_credit_is_shared_out_among_the_transfers_of_one_node() -> None:
    transfers: Transfers[str] = Transfers(SIZE, WINDOWS)
    first = transfers.open("a", 0, 100, "p")
    assert transfers.first_credit(first) == 1000
    second, elsewhere = transfers.open("b", 0, 100, "p"), transfers.open("c", 0, 100, "q")
    assert transfers.first_credit(second) == transfers.first_credit(elsewhere) == 1000
    third = transfers.open("d", 0, 100, "p")
    assert transfers.first_credit(third) == 666
    fourth = transfers.open("e", 0, 100, "p")
    assert transfers.first_credit(fourth) == 500
    # The windows of the first two shrink as their blocks land.
    assert [transfers.credit(first, SIZE) for _ in range(6)] == [0, 0, 0, 0, 0, 100]
    assert first.window == 500 and second.window == 1000
    for one in (second, third, fourth):
        transfers.abort(one, acknowledged=True)
    assert transfers.credit(first, SIZE) == 600 and first.window == 1000
    many = [transfers.open(str(number), 0, 9, "p") for number in range(40)]
    assert {transfers.first_credit(one) for one in many[20:]} == {200}, "never too little to go on"
    assert transfers.first_credit(first) == 200, "nothing of an earlier offer is out"


def test_a_transfer_completes_in_whatever_order_its_messages_come() -> None:
    for order in ("blocks first", "complete first"):
        transfers: Transfers[str] = Transfers(SIZE, WINDOWS)
        transfer = transfers.open("owner", 2, 4, "p")
        transfers.accepted(Accepted(transfer.number, transfer.epoch, 0, 0.0))
        done = Complete(transfer.number, transfer.epoch, 0, 2, 0.0, 0.0)
        if order == "complete first":
            assert transfers.completed(done) is transfer
        arriving = transfers.arriving(
            Blocks(transfer.number, transfer.epoch, 2, (0, 0)), [SIZE] * 2
        )
        assert arriving is not None and arriving.fresh == [0, 1]
        transfers.landed(transfer, 3)
        assert transfer.leading == 2
        transfers.landed(transfer, 2)
        if order == "blocks first":
            assert transfer.state is TransferState.STREAMING and transfer.leading == 4
            transfers.completed(done)
        assert transfer.state is TransferState.COMPLETE and transfers.num_live == 0
        transfers.check()


@pytest.mark.B2
def test_frames_that_nobody_asked_for_are_dropped_and_counted() -> None:
    transfers: Transfers[str] = Transfers(SIZE, WINDOWS)
    transfer = transfers.open("owner", 2, 4, "p")
    number, epoch = transfer.number, transfer.epoch
    for message in (
        Blocks(number + 1, epoch, 2, (0,)),
        Blocks(number, epoch + 1, 2, (0,)),
    ):
        assert transfers.arriving(message, [SIZE]) is None
    assert transfers.counters.dropped == 2
    for message, size in (
        (Blocks(number, epoch, 1, (0,)), SIZE),
        (Blocks(number, epoch, 4, (0,)), SIZE),
        (Blocks(number, epoch, 3, (0, 0)), SIZE),
        (Blocks(number, epoch, 2, (0,)), SIZE - 1),
    ):
        unsound = transfers.arriving(message, [size] * len(message.checksums))
        assert unsound is not None and not unsound.sound and not unsound.fresh
    assert transfers.counters.damaged == 4
    transfers.landed(transfer, 2)
    again = transfers.arriving(Blocks(number, epoch, 2, (0, 0)), [SIZE, SIZE])
    assert again is not None and again.fresh == [1] and transfers.counters.duplicates == 1


def test_an_abort_stays_known_until_it_is_acknowledged() -> None:
    transfers: Transfers[str] = Transfers(SIZE, WINDOWS)
    transfer = transfers.open("owner", 0, 4, "p")
    assert transfers.of_owner("owner") is transfer
    transfers.abort(transfer, acknowledged=False)
    assert transfers.num_draining == 1 and transfers.of_owner("owner") is None
    late = Blocks(transfer.number, transfer.epoch, 0, (0,))
    assert transfers.arriving(late, [SIZE]) is None
    transfers.drained(transfer.number, transfer.epoch + 1)
    assert transfers.num_draining == 1
    transfers.drained(transfer.number, transfer.epoch)
    assert transfers.num_draining == 0 and transfer.state is TransferState.DRAINED
