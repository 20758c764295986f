"""Requests through a decode and a prefill node, over real sockets, checked after every turn."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvferry.kvstore.keys import pack_tokens
from kvferry.kvstore.wire.client import LinkState
from kvferry.kvstore.wire.generation import Sampling, Stop
from kvferry.kvstore.wire.status import CacheReset, ResetCache
from kvferry.tests.rigs.handoff.cluster import (
    BLOCK,
    DECODE_LIMITS,
    STANDIN,
    Answer,
    Cluster,
    prompt_of,
)

B, C = BLOCK, 512
LENGTHS = (1, 2, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1,
           C - 1, C, C + 1, 2 * C - 1, 2 * C, 2 * C + 1)  # fmt: skip


@pytest.fixture(params=["apart", "alone", "arena"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """With a prefill node, without one, and with one that ships through a store's arena."""
    if request.param == "arena":
        request.getfixturevalue("usual_store")
    made = Cluster(0 if request.param == "alone" else 1)
    yield made
    made.until(made.idle)
    made.close()


@pytest.mark.B9
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_around_block_and_chunk(cluster: Cluster, length: int) -> None:
    prompt = prompt_of(length, seed=length)
    cold = cluster.ask(prompt)
    assert cold.ids() == cluster.reply(prompt)
    assert cold.cached == 0
    repeat = cluster.ask(prompt)
    assert repeat.ids() == cold.ids()
    assert repeat.cached == (length - 1) // B * B
    longer = cluster.ask([*prompt, 5])
    assert longer.ids() == cluster.reply([*prompt, 5])
    assert longer.cached == length // B * B
    for answer in (cold, repeat, longer):
        assert answer.done is not None
        sources = answer.done.sources
        assert sum(getattr(sources, name) for name in sources.__struct_fields__) in (
            length,
            length + 1,
        )


def test_generated_blocks_are_reused_by_the_next_turn(cluster: Cluster) -> None:
    prompt = prompt_of(300)
    first = cluster.ask(prompt, max_tokens=64)
    history = prompt + first.ids()
    second = cluster.ask([*history, 1, 2, 3])
    assert second.ids() == cluster.reply([*history, 1, 2, 3])
    assert second.cached >= (len(history) - 1) // B * B


def test_only_the_delta_is_shipped(apart: Cluster) -> None:
    head = prompt_of(1024)
    assert apart.ask(head).done is not None
    answer = apart.ask(head + prompt_of(512, seed=3))
    assert answer.ids() == apart.reply(head + prompt_of(512, seed=3))
    assert answer.done is not None
    assert answer.done.bytes_shipped == (512 // B - 1) * apart.engine.spec.block_bytes
    assert answer.done.sources.device == 1024
    assert answer.done.sources.prefill == 512 - B
    assert answer.done.sources.decode == B


def test_prefill_blocks_are_reused_when_the_decode_node_has_none() -> None:
    cluster = Cluster(1, limits=replace(DECODE_LIMITS, reuse=False))
    prompt = prompt_of(1000)
    cold, repeat = cluster.ask(prompt), cluster.ask(prompt)
    assert cold.ids() == repeat.ids() == cluster.reply(prompt)
    assert cold.cached == 0
    assert repeat.cached == (1000 - 1) // B * B
    assert cluster.decode.pool.num_cached == 0
    cluster.until(cluster.idle)
    cluster.close()


@pytest.mark.A8
def test_what_is_preempted_before_it_was_accepted_keeps_its_hits() -> None:
    """Nothing was said by then of what the prefill node had before."""
    cluster = Cluster(1, limits=replace(DECODE_LIMITS, reuse=False))
    prompt, prefill = prompt_of(1000), cluster.prefill[0]
    cluster.ask(prompt)
    answer = cluster.submit(cluster.message(prompt))
    while not any(one.offered for one in cluster.decode.receiver.transfers.all()):
        cluster.turn(without=prefill)
    cluster.decode.debug.preempt = 1
    cluster.until(lambda: answer.ended)
    assert answer.done is not None and answer.done.preemptions == 1
    assert answer.ids() == cluster.reply(prompt) and answer.cached == (1000 - 1) // B * B
    cluster.until(cluster.idle)
    cluster.close()


@pytest.mark.A8
def test_without_any_reuse_nothing_is_counted_as_cached() -> None:
    cluster = Cluster(1, limits=replace(DECODE_LIMITS, reuse=False), prefill_reuse=False)
    prompt = prompt_of(1000)
    answers = [cluster.ask(prompt) for _ in range(2)]
    assert [answer.cached for answer in answers] == [0, 0]
    assert all(answer.ids() == cluster.reply(prompt) for answer in answers)
    cluster.until(cluster.idle)
    cluster.close()


def test_many_at_once_each_get_their_own_answer(cluster: Cluster) -> None:
    lengths = random.Random(1).sample(range(5, 3000), 24)
    prompts = [prompt_of(length, seed=length) for length in lengths]
    answers = [cluster.submit(cluster.message(prompt)) for prompt in prompts]
    cluster.until(lambda: all(answer.ended for answer in answers))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids() == cluster.reply(prompt)


@pytest.mark.A8
def test_a_prefix_wanted_by_many_at_once_is_computed_once(cluster: Cluster) -> None:
    head = prompt_of(1024)
    prompts = [head + prompt_of(40, seed=1000 + number) for number in range(12)]
    answers = [cluster.submit(cluster.message(prompt)) for prompt in prompts]
    cluster.until(lambda: all(answer.ended for answer in answers))
    computed = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids() == cluster.reply(prompt)
        assert answer.done is not None
        computed += answer.done.sources.prefill + answer.done.sources.decode
    assert computed == 1024 + 12 * 40


@pytest.mark.B6
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17])
def test_counts_and_finish_reasons(cluster: Cluster, max_tokens: int) -> None:
    prompt = prompt_of(200)
    expected = cluster.reply(prompt, 17)
    plain = cluster.ask(prompt, max_tokens=max_tokens)
    assert plain.ids() == expected[:max_tokens] and plain.finish() == "length"
    eos = cluster.ask(prompt, max_tokens=max_tokens, eos_ids=(expected[0],))
    assert eos.ids() == expected[:1] and eos.finish() == "stop"
    stop = cluster.ask(prompt, max_tokens=max_tokens, stop_token_ids=(expected[0],))
    assert stop.ids() == expected[:1] and stop.finish() == f"stop:{expected[0]}"
    assert plain.done is not None and plain.done.predicted_n == max_tokens


def test_min_tokens_holds_back_the_end(cluster: Cluster) -> None:
    prompt = prompt_of(50)
    first = cluster.reply(prompt, 1)[0]
    answer = cluster.ask(prompt, min_tokens=5, eos_ids=(first,), max_tokens=40)
    assert len(answer.ids()) >= 6 or answer.finish() == "length"
    assert first not in answer.ids()[:5]


@pytest.mark.B7
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0),
        Sampling(temperature=0.8),
        Sampling(temperature=1.0, top_p=0.7, top_k=20),
        Sampling(temperature=1.0, min_p=0.1),
        Sampling(temperature=0.0, frequency_penalty=1.5),
        Sampling(temperature=0.0, presence_penalty=1.5),
        Sampling(temperature=0.0, repetition_penalty=1.5),
        Sampling(temperature=0.0, logit_bias=((7, 100.0),)),
        Sampling(temperature=0.7, logprobs=5),
    ],
    ids=lambda one: "-".join(
        f"{name}"
        for name in one.__struct_fields__
        if getattr(one, name) != getattr(Sampling(), name)
    ),
)
@pytest.mark.usefixtures("both_transfers")
def test_sampling_is_the_same_apart_and_alone(sampling: Sampling) -> None:
    prompt = prompt_of(700)
    answers = []
    for prefill_nodes in (1, 0):
        cluster = Cluster(prefill_nodes)
        answers.append(
            cluster.ask(prompt, sampling=sampling, seed=42, choices=3, min_tokens=2, eos_ids=(3,))
        )
        cluster.until(cluster.idle)
        cluster.close()
    for choice in range(3):
        first, second = (
            [(one.token, one.finish, one.logprob, one.top) for one in answer.tokens[choice]]
            for answer in answers
        )
        assert first == second
    if sampling.temperature and sampling.logprobs is None:
        assert answers[0].ids(0) != answers[0].ids(1)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 200, 1000])
def test_choices_fork_after_the_prompt(cluster: Cluster, length: int) -> None:
    prompt = prompt_of(length)
    sampling = Sampling(temperature=1.0)
    together = cluster.ask(prompt, choices=4, sampling=sampling, seed=9, max_tokens=40)
    assert sorted(together.tokens) == [0, 1, 2, 3]
    assert together.done is not None and together.done.predicted_n == 160
    sources = together.done.sources
    assert sources.device + sources.prefill + sources.decode == length
    alone = cluster.ask(prompt, choices=1, sampling=sampling, seed=9, max_tokens=40)
    assert alone.ids(0) == together.ids(0)


@pytest.mark.D3
def test_preemption_changes_nothing_but_time() -> None:
    cluster = Cluster(1, decode_blocks=30)
    prompts = [prompt_of(60 + number, seed=number) for number in range(10)]
    answers = [cluster.submit(cluster.message(prompt, max_tokens=120)) for prompt in prompts]
    cluster.until(lambda: all(answer.ended for answer in answers))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids() == cluster.reply(prompt, 120)
        assert answer.done is not None and answer.cached == 0
    assert sum(answer.done.preemptions for answer in answers if answer.done) > 0
    cluster.until(cluster.idle)
    cluster.close()


@pytest.mark.A8
def test_a_node_says_where_a_prompt_came_from_before_its_first_token(cluster: Cluster) -> None:
    prompt = prompt_of(200)
    whole = cluster.ask(prompt, choices=2)
    assert whole.done is not None and whole.started == [(0, whole.done.sources)]
    outputs = tuple(pack_tokens(whole.ids(choice)[:3]) for choice in range(2))
    message = cluster.message(prompt, choices=2, outputs=outputs)
    resumed = cluster.answers[message.request] = type(whole)(
        {choice: whole.tokens[choice][:3] for choice in range(2)}
    )
    assert cluster.gateway.send(message)
    cluster.until(lambda: resumed.ended)
    assert resumed.started == [], "what it finds now may be of its own making"


def test_a_request_resumes_behind_the_tokens_already_streamed(cluster: Cluster) -> None:
    prompt = prompt_of(333)
    sampling = Sampling(temperature=0.9, frequency_penalty=0.5)
    whole = cluster.ask(prompt, sampling=sampling, seed=5, choices=2, max_tokens=40)
    for kept in (1, 16, 39):
        outputs = tuple(pack_tokens(whole.ids(choice)[:kept]) for choice in range(2))
        message = cluster.message(
            prompt, sampling=sampling, seed=5, choices=2, max_tokens=40, outputs=outputs
        )
        answer = cluster.answers[message.request] = type(whole)(
            {choice: whole.tokens[choice][:kept] for choice in range(2)}
        )
        assert cluster.gateway.send(message)
        cluster.until(lambda answer=answer: answer.ended)  # type: ignore[misc]
        assert answer.ids(0) == whole.ids(0) and answer.ids(1) == whole.ids(1)


def test_a_choice_that_had_finished_is_not_resumed(cluster: Cluster) -> None:
    prompt = prompt_of(100)
    sampling = Sampling(temperature=1.0)
    whole = cluster.ask(prompt, choices=2, sampling=sampling, max_tokens=20)
    outputs = (pack_tokens(whole.ids(0)[:7]), pack_tokens(whole.ids(1)[:7]))
    message = cluster.message(
        prompt, choices=2, sampling=sampling, max_tokens=20, outputs=outputs, finished=(0,)
    )
    answer = cluster.answers[message.request] = Answer({1: whole.tokens[1][:7]})
    assert cluster.gateway.send(message)
    cluster.until(lambda: answer.ended)
    assert answer.ids(1) == whole.ids(1) and 0 not in answer.tokens


def test_a_stop_ends_one_choice_and_its_overrun_is_not_billed(cluster: Cluster) -> None:
    message = cluster.message(prompt_of(30), choices=2, max_tokens=200)
    answer = cluster.submit(message)
    cluster.until(lambda: len(answer.ids(0)) >= 5)
    assert cluster.gateway.send(Stop(message.request, 0, 3))
    cluster.until(lambda: answer.ended)
    assert len(answer.ids(1)) == 200
    assert answer.done is not None and answer.done.predicted_n == 203


def test_a_block_larger_than_the_usual_credit_still_travels() -> None:
    large = replace(STANDIN, kv_bytes_per_token=(2 << 20) + 4096)  # a block is over 32 MiB
    limits = replace(DECODE_LIMITS, local_prefill=16)
    cluster = Cluster(1, config=large, limits=limits, decode_blocks=6, prefill_blocks=6)
    answer = cluster.ask(prompt_of(40), max_tokens=2)
    assert answer.ids() == cluster.reply(prompt_of(40), 2)
    assert answer.done is not None and answer.done.sources.prefill == 32
    cluster.close()


def test_a_prompt_does_not_starve_under_the_smallest_budget() -> None:
    cluster = Cluster(0, limits=replace(DECODE_LIMITS, max_num_batched_tokens=64))
    stream = cluster.submit(cluster.message(prompt_of(20), max_tokens=3000))
    cluster.until(lambda: len(stream.ids()) > 2)
    assert cluster.ask(prompt_of(500, seed=1)).ids() == cluster.reply(prompt_of(500, seed=1))
    assert not stream.ended
    cluster.close()


def test_an_idle_node_sleeps_while_its_queue_waits_for_blocks() -> None:
    """Nothing can run and nothing can be admitted: the loop must wait for a message."""
    cluster = Cluster(1, limits=replace(DECODE_LIMITS, max_num_seqs=1))
    cluster.prefill[0].turn = lambda: None  # type: ignore[method-assign]
    for number in range(3):
        cluster.submit(cluster.message(prompt_of(1000, seed=number)))
    cluster.until(lambda: len(cluster.decode.scheduler.waiting) == 2)
    cluster.turn()
    assert not cluster.decode._runnable
    assert cluster.decode.sleep_ms() > 0
    cluster.close()


def test_a_long_prompt_does_not_stop_other_streams() -> None:
    """While a long prompt is prefilled here, every step still decodes and is bounded."""
    cluster = Cluster(0)
    stream = cluster.submit(cluster.message(prompt_of(20), max_tokens=400))
    cluster.until(lambda: len(stream.ids()) > 5)
    before = len(stream.ids())
    late = cluster.ask(prompt_of(4000, seed=2), max_tokens=1)
    assert late.ids() == cluster.reply(prompt_of(4000, seed=2), 1)
    assert len(stream.ids()) - before >= 4000 // 64
    cluster.until(lambda: stream.ended)
    cluster.close()


def reset(cluster: Cluster, address: str, role: str = "gateway") -> list[CacheReset]:
    """What a node answers to one client's `ResetCache`, once it has heard it."""
    client = cluster.client(address, role)
    answers: list[CacheReset] = []

    def heard() -> bool:
        client.tick(time.monotonic())
        answers.extend(it.message for it in client.receive() if isinstance(it.message, CacheReset))
        return client.state is LinkState.READY and (bool(answers) or role != "gateway")

    cluster.until(lambda: heard() or client.state is LinkState.READY)
    assert client.send(ResetCache(7))
    cluster.until(heard)
    for _ in range(20):
        cluster.turn()
    client.close()
    return answers


def test_a_reset_forgets_what_nobody_uses_and_nothing_else(apart: Cluster) -> None:
    first, second = prompt_of(300, seed=70), prompt_of(300, seed=71)
    assert apart.ask(first).cached == 0 and apart.ask(first).cached == 288
    hold = apart.submit(apart.message(second, max_tokens=900))
    apart.until(lambda: len(hold.tokens.get(0, ())) > 20)
    nodes = [(apart.decode.pool, apart.decode._server.address)]
    nodes += [(node.pool, node._server.address) for node in apart.prefill]
    for pool, address in nodes:
        cached = pool.num_cached
        assert cached
        assert reset(apart, address, "decode") == [], "only gateways may ask for it"
        assert pool.num_cached >= cached
        (answer,) = reset(apart, address)
        assert answer.number == 7 and answer.evicted >= cached
        assert (answer.held > 0) == (pool is apart.decode.pool)
        assert pool.num_cached == 0
        assert len(pool.keys()) <= pool.num_held
    assert not hold.ended
    assert apart.ask(first).cached == 0, "it was forgotten, here and there"
    assert apart.ask(second).cached == 288, "it was in use"
    apart.until(lambda: hold.ended)
    assert hold.ids() == apart.reply(second, 900)


def test_the_negative_control_fails(cluster: Cluster) -> None:
    """Overwriting one reused block changes the text: the checks above can fail."""
    prompt = prompt_of(500)
    honest = cluster.ask(prompt)
    keys = cluster.message(prompt).keys
    block = cluster.decode.pool.match([keys[16 * 10 : 16 * 11]])[0]
    payload = bytearray(cluster.engine.read(block))
    payload[3] ^= 1
    cluster.engine.write(block, bytes(payload))
    cluster.decode.pool.release([block])
    assert cluster.ask(prompt).ids() != honest.ids()


def test_nodes_say_while_they_compute(cluster: Cluster) -> None:
    said: dict[str, list[bool]] = {"decode": [], "prefill": []}
    cluster.decode._busy = said["decode"].append
    for node in cluster.prefill:
        node._busy = said["prefill"].append
    cluster.ask(prompt_of(700))
    for one in (cluster.decode, *cluster.prefill):
        cluster.until(lambda one=one: one.sleep_ms() > 0)  # type: ignore[misc]
    assert said["decode"][0] and not said["decode"][-1]
    apart = [True, False] if cluster.prefill else []
    assert said["prefill"] == apart
