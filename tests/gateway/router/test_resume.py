"""A request that loses its decode node goes on at another: the client notices nothing but time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.kvstore.keys import unpack_tokens
from kvferry.kvstore.wire.codec import AnyMessage
from kvferry.kvstore.wire.generation import Abort, Done, Generate, Started, Stop
from kvferry.tests.rigs.gateway import web
from kvferry.tests.rigs.gateway.api import COMPLETIONS
from kvferry.tests.rigs.gateway.resume import LENGTH, TEXT, answer, once, stream, text_of, tokens_at
from kvferry.tests.rigs.gateway.rig import (
    EOS,
    FakeDecode,
    Rig,
    ids_of,
    running,
    several,
    wait_until,
)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with running(tmp_path_factory.mktemp("healthy") / "m") as rig:
        yield rig


# -- a node dies -----------------------------------------------------------------------------------


@pytest.mark.C7
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("after", range(LENGTH))
def test_a_death_after_any_token_costs_nothing_but_time(
    tmp_path: Path, after: int, whole: bool
) -> None:
    with several(tmp_path / "m") as (rig, (first, second)):
        first.does.dies_at = after
        if whole:
            got = answer(rig)
            assert got["choices"][0]["text"] == TEXT
            assert got["choices"][0]["finish_reason"] == "stop"
            assert got["usage"]["completion_tokens"] == LENGTH
        else:
            assert text_of(stream(rig)) == TEXT
        assert first.dead
        (again,) = second.generates
        begun = [unpack_tokens(ids) for ids in again.outputs]
        # A death may take the last messages with it, from the socket's buffers.
        assert all(ids == [*ids_of(TEXT), EOS][: len(ids)] for ids in begun)
        assert sum(map(len, begun)) <= after
        assert again.prompt == first.generates[0].prompt and again.seed == first.generates[0].seed
        wait_until(rig.idle)
        page = rig.get("/metrics").text
        assert 'kvferry_requests_resumed_total{model_name="m",reason="dead"} 1.0' in page


@pytest.mark.C7
@pytest.mark.parametrize(
    "body",
    [
        {"n": 3},
        {"n": 3, "stop": ["lo 1"]},
        {"stop": ["lo"]},
        {"stop": ["o 9", "ello 0"], "include_stop_str_in_output": True},
        {"logprobs": 2, "n": 2},
        {"max_tokens": 6, "n": 2},
        {"prompt": ["a", "b", "c"]},
        {"prompt": ["a", "b"], "n": 2, "stop": ["o 1"]},
        {"return_token_ids": True},
    ],
)
@pytest.mark.parametrize("after", [1, 5])
def test_whatever_was_asked_for_is_the_same(
    tmp_path: Path, healthy: Rig, body: dict[str, Any], after: int
) -> None:
    expected = answer(healthy, **body)
    with several(tmp_path / "m") as (rig, (first, second)):
        first.does.dies_at = second.does.dies_at = after
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(answer(rig, **body)))
        # Both nodes die; the first one's address is taken over in time.
        thread.start()
        wait_until(lambda: first.dead or bool(got))
        assert first.dead or body == {"stop": ["lo"]}, "only that may end before its node dies"
        first.close()
        back = FakeDecode(first.address)
        thread.join(60)
        back.close()
        assert got and got[0]["choices"] == expected["choices"]
        # How much was cached may have died with the node that found it.
        cached = {"prompt_tokens_details": {"cached_tokens": 0}}
        assert got[0]["usage"] | cached == expected["usage"]


@pytest.mark.C7
def test_choices_that_had_ended_are_not_run_again(tmp_path: Path) -> None:
    with several(tmp_path / "m") as (rig, (first, second)):
        first.does.pace, first.does.dies_at = 0.02, 7
        got = answer(rig, n=3, stop=["lo 1"])
        assert [choice["text"] for choice in got["choices"]] == ["Hello 0", "Hel", "Hello 2"]
        (again,) = second.generates
        assert again.finished == (1,)
        assert [len(ids) // 4 for ids in again.outputs] == [7, 7, 7]


@pytest.mark.C7
def test_what_kills_every_node_is_given_up_before_all_are_dead(tmp_path: Path) -> None:
    with several(tmp_path / "m", 6) as (rig, nodes):
        for node in nodes:
            node.does.dies_at = 0
        refused = rig.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (500, "engine_lost")
        assert sum(node.dead for node in nodes) == 4


@pytest.mark.C7
@pytest.mark.parametrize("streamed", [False, True])
def test_without_another_node_there_is_one_error_soon(tmp_path: Path, streamed: bool) -> None:
    with several(tmp_path / "m", 1) as (rig, (only,)):
        only.does.pace = 0.01
        only.does.dies_at = 5
        begun = time.monotonic()
        if streamed:
            lines = stream(rig)
            assert [line for line in lines if "error" in line] == lines[-1:]
            assert json.loads(lines[-1])["error"]["code"] == "engine_lost"
            assert not any('"finish_reason":"' in line for line in lines)
        else:
            only.does.dies_at = 0
            refused = rig.post(COMPLETIONS, {"prompt": "x", "stream": True})
            assert refused.status_code == 503 and 1 <= int(refused.headers["retry-after"]) <= 30
        assert time.monotonic() - begun < 8.0, "as long as one waits for others"
        assert rig.get("/ready").status_code == 503
        now = time.monotonic()
        assert rig.chat().status_code == 503 and time.monotonic() - now < 5.0


# -- messages that are lost, repeated, or come of nobody -------------------------------------------


@pytest.mark.C7
@pytest.mark.D7
@pytest.mark.parametrize("lost", range(LENGTH))
def test_a_lost_token_is_generated_again(tmp_path: Path, lost: int) -> None:
    with several(tmp_path / "m", 1) as (rig, (only,)):
        only.does.loses = once(tokens_at(lost))
        got = answer(rig, n=2)
        assert [choice["text"] for choice in got["choices"]] == [TEXT, "Hello 1"]
        assert len(only.generates) == 2
        assert [len(ids) // 4 for ids in only.generates[1].outputs] == ([lost] * 2 if lost else [])
        wait_until(rig.idle)


@pytest.mark.D7
@pytest.mark.parametrize(
    "kind", [Generate, Done], ids=lambda kind: kind.__name__ if isinstance(kind, type) else None
)
def test_a_lost_message_hangs_nobody(tmp_path: Path, kind: type[AnyMessage]) -> None:
    with several(tmp_path / "m", 1) as (rig, (only,)):
        only.does.ignores = once(lambda message: kind is Generate and isinstance(message, Generate))
        only.does.loses = once(lambda message: kind is Done and isinstance(message, Done))
        only.does.cached = 16
        got = answer(rig)
        assert got["choices"][0]["text"] == TEXT
        # A node says a lost account again; of a request that it did not know before it was asked
        # anew, nobody knows what it would have found.
        cached = 16 if kind is Done else 0
        assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        assert rig.idle()


@pytest.mark.D7
@pytest.mark.A8
@pytest.mark.parametrize("said", [True, False], ids=["said before", "never said"])
def test_nobody_makes_up_an_account_that_died_with_its_node(tmp_path: Path, said: bool) -> None:
    with several(tmp_path / "m", 1) as (rig, (only,)):
        only.does.cached = 16

        def lose_and_die(message: AnyMessage) -> bool:
            if isinstance(message, Done):
                threading.Timer(0.3, only._ending.set).start()  # when the tokens have left it
                return True
            return isinstance(message, Started) and not said

        only.does.loses = lose_and_die
        got = answer(rig)
        assert got["choices"][0]["text"] == TEXT
        if said:
            assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
        else:
            assert "prompt_tokens_details" not in got["usage"]


@pytest.mark.D7
def test_the_last_tokens_may_be_lost_with_their_account(tmp_path: Path) -> None:
    with several(tmp_path / "m", 1) as (rig, (only,)):
        ends = once(lambda message: isinstance(message, Done))
        last = once(tokens_at(LENGTH - 1))
        only.does.loses = lambda message: ends(message) or last(message)
        assert answer(rig)["choices"][0]["text"] == TEXT


@pytest.mark.D7
def test_tokens_that_a_node_says_it_sent_are_missed(tmp_path: Path) -> None:
    with several(tmp_path / "m", 1) as (rig, (only,)):
        last = once(tokens_at(4))

        def lose_and_hold(message: AnyMessage) -> bool:
            only.does.hold = only.does.hold or tokens_at(4)(message)
            return last(message)

        only.does.loses = lose_and_hold
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(answer(rig)))
        thread.start()
        wait_until(lambda: len(only.generates) == 2)
        assert [len(ids) // 4 for ids in only.generates[1].outputs] == [4]
        only.does.loses, only.does.hold = lambda message: False, False
        thread.join(60)
        assert got[0]["choices"][0]["text"] == TEXT


@pytest.mark.D7
def test_repeated_messages_change_nothing(tmp_path: Path, healthy: Rig) -> None:
    with several(tmp_path / "m", 1) as (rig, (only,)):
        only.does.repeats = True
        for body in ({}, {"n": 3, "stop": ["lo 1"]}, {"prompt": ["a", "b"], "logprobs": 1}):
            got, expected = answer(rig, **body), answer(healthy, **body)
            assert got["choices"] == expected["choices"] and got["usage"] == expected["usage"]
        assert len(only.generates) == 4


@pytest.mark.D7
def test_a_lost_stop_or_abort_is_said_again(tmp_path: Path) -> None:
    with several(tmp_path / "m", 1) as (rig, (only,)):
        only.does.pace = 0.02
        only.does.ignores = once(lambda message: isinstance(message, Stop))
        forced = ids_of("xyz" * 100)
        body = {"kvferry_force_ids": forced, "max_tokens": 300, "stop": "y"}
        assert answer(rig, **body)["choices"][0]["text"] == "x"
        assert [stop.kept for stop in only.stops] == [2]
        only.does.ignores = once(lambda message: isinstance(message, Abort))
        with web.Client() as client, pytest.raises(httpx.ReadTimeout):
            client.post(
                rig.url + COMPLETIONS, json=body | {"prompt": "a", "stop": None}, timeout=0.3
            )
        wait_until(lambda: bool(only.aborts))
        assert only.aborts[0].request == only.generates[-1].request


@pytest.mark.D7
def test_a_long_queue_is_no_loss(tmp_path: Path) -> None:
    with several(tmp_path / "m", 1) as (rig, (only,)):
        only.does.hold = True
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(answer(rig)))
        thread.start()
        time.sleep(3.5)
        only.does.hold = False
        thread.join(60)
        assert got[0]["choices"][0]["text"] == TEXT and len(only.generates) == 1
