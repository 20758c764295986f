"""What a decode or a prefill node refuses of the other, or of a gateway, and how it goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.kvstore.keys import pack_tokens
from kvferry.kvstore.wire.generation import Sampling
from kvferry.tests.rigs.handoff.cluster import DECODE_LIMITS, STANDIN, Cluster, prompt_of


def test_a_span_larger_than_the_prefill_pool_is_computed_on_the_decode_node() -> None:
    cluster = Cluster(1, prefill_blocks=20)
    small, large = prompt_of(300), prompt_of(1000, seed=1)
    assert cluster.ask(small).ids() == cluster.reply(small)
    answer = cluster.ask(large)
    assert answer.ids() == cluster.reply(large)
    assert answer.done is not None and answer.done.sources.decode == 1000
    cluster.until(cluster.idle)
    cluster.close()


def test_a_prefill_node_with_a_shorter_limit_declines_longer_prompts() -> None:
    cluster = Cluster(1)
    short = replace(cluster.prefill_engines[0].spec, max_model_len=1024)
    cluster.prefill_engines[0]._spec = short
    for length in (900, 3000):
        answer = cluster.ask(prompt_of(length, seed=length))
        assert answer.ids() == cluster.reply(prompt_of(length, seed=length))
        assert answer.done is not None and (answer.done.sources.prefill > 0) == (length == 900)
    cluster.close()


def test_a_node_that_is_no_prefill_node_is_not_asked(apart: Cluster) -> None:
    for address in (apart.decode._server.address, "foo", "tcp://nonsense"):
        answer = apart.ask(prompt_of(700, seed=len(address)), prefill_nodes=(address,))
        assert answer.ids() == apart.reply(prompt_of(700, seed=len(address)))
        assert answer.done is not None and answer.done.sources.decode == 700


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"outputs": (pack_tokens([1] * 16),)}, "has its 16 tokens"),
        ({"outputs": (pack_tokens([1] * 9000),)}, "has its 16 tokens"),
        ({"outputs": (b"", b"")}, "outputs"),
        ({"finished": (0,)}, "every choice"),
        ({"eos_ids": (2**31 - 1,), "min_tokens": 3}, "vocabulary"),
        ({"stop_token_ids": (300,), "min_tokens": 3}, "vocabulary"),
        ({"sampling": Sampling(logit_bias=((300, 1.0),))}, "vocabulary"),
        ({"sampling": Sampling(temperature=-1.0)}, "temperature"),
        ({"sampling": Sampling(top_k=-5)}, "top_k"),
    ],
)
def test_absurd_values_are_refused_and_the_node_lives(
    cluster: Cluster, changes: dict[str, object], words: str
) -> None:
    answer = cluster.ask(prompt_of(40), **changes)
    assert answer.rejected is not None and words in answer.rejected.message
    assert cluster.ask(prompt_of(40)).ids() == cluster.reply(prompt_of(40))


@pytest.mark.D11
def test_a_full_queue_refuses_at_once() -> None:
    cluster = Cluster(0, limits=replace(DECODE_LIMITS, max_queued=5, max_num_seqs=2))
    answers = [
        cluster.submit(cluster.message(prompt_of(50, seed=number), max_tokens=100))
        for number in range(20)
    ]
    cluster.until(lambda: all(answer.ended for answer in answers))
    refused = [answer.rejected.code for answer in answers if answer.rejected]
    assert refused == ["server_overloaded"] * len(refused) and 10 <= len(refused) < 20
    cluster.until(cluster.idle)
    cluster.close()


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"max_tokens": 8000}, "context_length_exceeded", "8192"),
        ({"choices": 17}, "invalid_request", "17"),
        ({"keys": b"k" * 32}, "invalid_request", "keys"),
        ({"prompt": b"abc"}, "invalid_request", ""),
        ({"prompt": pack_tokens([0, 300]), "keys": b""}, "invalid_request", "vocabulary"),
        ({"prompt": b"", "keys": b""}, "invalid_request", "empty"),
    ],
)
def test_what_can_never_run_is_refused(
    cluster: Cluster, changes: dict[str, object], code: str, words: str
) -> None:
    answer = cluster.ask(prompt_of(500), **changes)
    assert answer.rejected is not None and answer.rejected.code == code
    assert words in answer.rejected.message
    assert cluster.ask(prompt_of(40)).ids() == cluster.reply(prompt_of(40))


def test_forced_ids_need_the_test_hooks() -> None:
    closed = Cluster(0, limits=replace(DECODE_LIMITS, forced_ids=False))
    answer = closed.ask([1], forced=pack_tokens([5, 6]))
    assert answer.rejected is not None and "test-hooks" in answer.rejected.message
    closed.close()
    opened = Cluster(0)
    answer = opened.ask([1], forced=pack_tokens([5, 6]), max_tokens=3)
    assert answer.ids()[:2] == [5, 6]
    assert answer.ids()[2] == opened.reply([1, 5, 6], 1)[0]
    opened.close()


def test_deadlines_end_requests() -> None:
    slow = replace(STANDIN, seconds_per_pass=0.02)
    cluster = Cluster(0, config=slow)
    answer = cluster.ask(prompt_of(30), max_tokens=1000, deadline_s=0.2)
    assert answer.rejected is not None and answer.rejected.code == "deadline_exceeded"
    cluster.until(cluster.idle)
    cluster.close()
