"""A request that loses its decode node goes on at another: the client notices nothing but time."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.kvstore.generation_messages import (
    Abort,
    Done,
    Generate,
    Rejected,
    Running,
    Started,
    StepOutput,
    Stop,
)
from kvferry.kvstore.keys import unpack_tokens
from kvferry.kvstore.node_messages import KeyBatch, Load
from kvferry.kvstore.wire import AnyMessage
from kvferry.tests import web
from kvferry.tests.gateway_rig import EOS, FakeDecode, Rig, ids_of, running, several, wait_until

COMPLETIONS = "/v1/completions"
TEXT = "Hello 0"
LENGTH = len(TEXT) + 1
"""Tokens of an answer: its bytes and an end."""


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with running(tmp_path_factory.mktemp("healthy") / "m") as rig:
        yield rig


def once(concerns: Callable[[AnyMessage], bool], times: int = 1) -> Callable[[AnyMessage], bool]:
    """True for the first messages of a kind, and never again."""
    left = [times]

    def check(message: AnyMessage) -> bool:
        if left[0] and concerns(message):
            left[0] -= 1
            return True
        return False

    return check


def tokens_at(index: int) -> Callable[[AnyMessage], bool]:
    return lambda message: isinstance(message, StepOutput) and message.tokens[0].index == index


def answer(rig: Rig, **body: Any) -> dict[str, Any]:
    response = rig.post(COMPLETIONS, {"prompt": "x" * 40, "max_tokens": 50} | body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    timings = whole["timings"]
    assert sum(timings["prompt_tokens"].values()) == whole["usage"]["prompt_tokens"]
    return whole


def stream(rig: Rig, **body: Any) -> list[str]:
    """The data of a stream's events, as far as they came."""
    request = {"prompt": "x" * 40, "max_tokens": 50, "stream": True} | body
    found: list[str] = []
    with (
        web.Client(timeout=20) as client,
        client.stream("POST", rig.url + COMPLETIONS, json=request) as response,
    ):
        try:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    found.append(line.removeprefix("data: "))
        except httpx.RemoteProtocolError:
            pass
    return found


def text_of(lines: list[str]) -> str:
    assert lines[-1] == "[DONE]", lines
    chunks = [json.loads(line) for line in lines[:-1]]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


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
        wait_until(lambda: first.dead)
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


# -- a node falls silent ---------------------------------------------------------------------------


@pytest.mark.D1
@pytest.mark.C7
def test_a_stalled_nodes_requests_go_on_elsewhere_and_it_comes_back(tmp_path: Path) -> None:
    with several(tmp_path / "m") as (rig, (first, second)):
        first.does.pace = 0.05
        got: list[str] = []
        thread = threading.Thread(target=lambda: got.append(text_of(stream(rig))))
        thread.start()
        wait_until(lambda: first.emitted(1))
        first.does.deaf = True
        thread.join(60)
        assert got == [TEXT]
        assert second.generates[0].outputs
        (stalled, _) = rig.gateway.nodes.decode
        assert stalled.stalled and rig.get("/ready").json()["absent"] == [first.address]
        for _ in range(3):
            assert answer(rig)["choices"][0]["text"] == TEXT
        assert len(first.generates) == 1, "a stalled node was chosen"
        first.does.deaf = False
        wait_until(lambda: not stalled.stalled)
        wait_until(lambda: bool(first.aborts))
        for _ in range(2):
            answer(rig)
        assert len(first.generates) > 1
        assert "kvferry_link_stalls_total" in rig.get("/metrics").text


@pytest.mark.D1
def test_the_last_node_stalls_and_goes_on(tmp_path: Path) -> None:
    with several(tmp_path / "m", 1) as (rig, (only,)):
        only.does.pace = 0.05
        got: list[str] = []
        thread = threading.Thread(target=lambda: got.append(text_of(stream(rig))))
        thread.start()
        wait_until(lambda: bool(only.generates))
        only.does.deaf = True
        wait_until(lambda: rig.get("/ready").status_code == 503)
        refused = rig.chat()
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert rig.get("/health").status_code == 200
        only.does.deaf = False
        wait_until(lambda: rig.get("/ready").status_code == 200)
        thread.join(60)
        assert got == [TEXT] and len(only.generates) == 1


@pytest.mark.D1
def test_a_node_that_stays_silent_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.gateway.node.ABANDON_SECONDS", 0.3)
    with several(tmp_path / "m", 1) as (rig, (only,)):
        only.does.deaf = True
        refused = rig.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        only.does.deaf = False
        wait_until(lambda: rig.get("/ready").status_code == 200)
        assert answer(rig)["choices"][0]["text"] == TEXT


@pytest.mark.C7
@pytest.mark.D1
def test_the_only_node_falls_silent_within_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known to be lost after `ABANDON_SECONDS` more than a stall takes; then the error is soon."""
    monkeypatch.setattr("kvferry.gateway.node.ABANDON_SECONDS", 0.5)
    with several(tmp_path / "m", 1) as (rig, (only,)):
        only.does.pace = 0.05
        (node,) = rig.gateway.nodes.decode
        got: list[str] = []
        thread = threading.Thread(target=lambda: got.extend(stream(rig, n=2)))
        thread.start()
        wait_until(lambda: only.emitted(1))
        only.does.deaf = True
        wait_until(lambda: not node.usable)
        known = time.monotonic()
        thread.join(30)
        assert time.monotonic() - known <= 8.0, "as long as one waits for others"
        assert [line for line in got if "error" in line] == got[-1:]
        assert json.loads(got[-1])["error"]["code"] == "engine_lost"
        only.does.deaf = False
        wait_until(lambda: node.usable)


# -- refusals and deadlines ------------------------------------------------------------------------


@pytest.mark.D11
def test_a_full_node_is_no_full_server(tmp_path: Path) -> None:
    with several(tmp_path / "m") as (rig, (first, second)):
        first.does.reject = "server_overloaded"
        assert answer(rig)["choices"][0]["text"] == TEXT
        assert len(first.generates) == len(second.generates) == 1
        second.does.reject = "server_overloaded"
        refused = rig.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_overloaded")


def test_a_resumed_request_waits_for_room(tmp_path: Path) -> None:
    with several(tmp_path / "m") as (rig, (first, second)):
        first.does.dies_at = 3
        second.does.reject = "server_overloaded"
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(answer(rig)))
        thread.start()
        wait_until(lambda: len(second.generates) >= 2)
        second.does.reject = ""
        thread.join(60)
        assert got[0]["choices"][0]["text"] == TEXT


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("which", ["first_token_timeout", "request_timeout"])
def test_deadlines(tmp_path: Path, which: str, streamed: bool) -> None:
    timeouts: dict[str, Any] = {which: 0.3}
    with running(tmp_path / "m", **timeouts) as rig:
        rig.decode.does.hold = True
        refused = rig.chat(stream=streamed)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "deadline_exceeded")
        assert "0.3 s" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        wait_until(lambda: bool(rig.decode.aborts))
        if which == "request_timeout":
            assert 0 < rig.decode.generates[0].deadline_s <= 0.3
        rig.decode.does.hold = False
        assert rig.chat().status_code == 200
        page = rig.get("/metrics").text
        assert 'kvferry_request_failure_total{code="deadline_exceeded"' in page


def test_a_first_token_in_time_is_enough(tmp_path: Path) -> None:
    with running(tmp_path / "m", first_token_timeout=0.3) as rig:
        rig.decode.does.pace = 0.1
        assert answer(rig)["choices"][0]["text"] == TEXT


# -- accounts --------------------------------------------------------------------------------------


@pytest.mark.A8
def test_a_resumed_request_does_not_hit_its_own_blocks(tmp_path: Path) -> None:
    with several(tmp_path / "m", 1) as (rig, (only,)):
        lost = once(tokens_at(3))
        only.does.loses = lambda message: isinstance(message, Started) or lost(message)
        only.does.cached = 32
        got = answer(rig)
        assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert got["timings"]["prompt_tokens"]["device"] == 0
        assert answer(rig)["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


@pytest.mark.A8
def test_a_resumed_request_keeps_the_hits_it_was_known_to_have(tmp_path: Path) -> None:
    with several(tmp_path / "m", 1) as (rig, (only,)):
        only.does.cached = 32
        answer(rig)
        only.say(KeyBatch(7, True, only.generates[0].keys[:16], b""))
        (node,) = rig.gateway.nodes.decode
        wait_until(lambda: len(node.keys) == 1)
        time.sleep(1.2)  # until the first request's blocks are not expected any more
        lost = once(tokens_at(3))
        only.does.loses = lambda message: isinstance(message, Started) or lost(message)
        got = answer(rig)
        assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


@pytest.mark.A8
@pytest.mark.parametrize("died_at", [0, 1, 4])
def test_what_the_first_node_found_in_any_tier_is_what_counts(tmp_path: Path, died_at: int) -> None:
    """The next one finds more, on its device and in the store: what this request has left there."""
    with several(tmp_path / "m") as (rig, (first, second)):
        first.does.cached, first.does.from_host, first.does.from_disk = 8, 12, 4
        first.does.dies_at, first.does.pace = died_at, 0.05
        second.does.cached, second.does.from_host = 20, 16
        got = answer(rig)
        assert first.dead and len(second.generates) == 1
        found = {name: count for name, count in got["timings"]["prompt_tokens"].items() if count}
        # Before the first token nobody knows what the first node had found.
        known = {"device": 8, "host": 12, "disk": 4, "prefill": 16}
        assert found == (known if died_at else {"prefill": 4, "decode": 36})
        cached = got["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == (24 if died_at else 0)


def test_timings_of_a_resumed_request_are_the_requests(tmp_path: Path) -> None:
    with several(tmp_path / "m") as (rig, (first, _)):
        first.does.pace, first.does.dies_at = 0.05, 4
        timings = answer(rig)["timings"]
        assert timings["ttft_ms"]["queue"] == 0 and 0 < timings["ttft_ms"]["first_step"] < 1000
        assert timings["predicted_ms"] > 100 and timings["predicted_n"] == LENGTH


# -- what nodes hold -------------------------------------------------------------------------------


@pytest.mark.A8
def test_a_prompt_goes_where_its_prefix_is(tmp_path: Path) -> None:
    with several(tmp_path / "m") as (rig, (first, second)):
        answer(rig, prompt="y" * 80)
        answer(rig, prompt="z" * 80)
        assert (len(first.generates), len(second.generates)) == (1, 1)
        second.say(KeyBatch(0, True, second.generates[0].keys, b""))
        first.say(KeyBatch(0, True, first.generates[0].keys, b""))
        wait_until(lambda: all(node.keys.synced for node in rig.gateway.nodes.decode))
        for _ in range(3):
            answer(rig, prompt="y" * 80 + "more")
        answer(rig, prompt="z" * 80 + "more")
        assert (len(first.generates), len(second.generates)) == (4, 2)


def test_other_gateways_requests_count(tmp_path: Path) -> None:
    with several(tmp_path / "m") as (rig, (first, second)):
        first.say(Load(9, 3, 0, 0, 64, False, {}))
        wait_until(lambda: rig.gateway.nodes.decode[0].load is not None)
        for _ in range(3):
            answer(rig)
        assert (len(first.generates), len(second.generates)) == (0, 3)
        second.say(Load(0, 0, 0, 0, 64, True, {}))
        wait_until(lambda: rig.gateway.nodes.decode[1].draining)
        answer(rig)
        assert (len(first.generates), len(second.generates)) == (1, 3)


def test_a_gap_is_asked_to_be_filled(tmp_path: Path) -> None:
    with several(tmp_path / "m", 1) as (rig, (only,)):
        (node,) = rig.gateway.nodes.decode
        only.say(KeyBatch(0, True, bytes(16), b""))
        wait_until(lambda: node.keys.synced)
        asked = len(only.resyncs)
        only.say(KeyBatch(2, False, bytes(range(16)), b""))
        wait_until(lambda: len(only.resyncs) > asked)
        assert len(node.keys) == 0 and node.counters["key_gaps"] == 1
        wait_until(lambda: len(only.resyncs) > asked + 1)  # the answer did not come
        only.say(KeyBatch(2, True, bytes(range(16)), b""))
        wait_until(lambda: len(node.keys) == 1)
        assert "kvferry_link_key_gaps_total" in rig.get("/metrics").text


def test_messages_of_strange_requests_are_ignored(rigged: Rig) -> None:
    rigged.decode.say(Running(999, (1, 2)))
    rigged.decode.say(Rejected(999, "unknown_request", ""))
    assert answer(rigged)["choices"][0]["text"] == TEXT


@pytest.fixture
def rigged(tmp_path: Path) -> Iterator[Rig]:
    with running(tmp_path / "m") as rig:
        yield rig


@pytest.mark.D5
@pytest.mark.parametrize("after", [0, 3])
def test_a_node_that_is_told_to_end_hands_its_requests_over(tmp_path: Path, after: int) -> None:
    with several(tmp_path / "m") as (rig, (first, second)):
        first.does.pace = 0.05
        first.does.hold = after == 0
        lines: list[str] = []
        reading = threading.Thread(target=lambda: lines.extend(stream(rig)))
        reading.start()
        wait_until(lambda: bool(first.generates))
        number = first.generates[0].request
        (book, _) = [node.book for node in rig.gateway.nodes]
        if after:
            wait_until(lambda: book.requests[number].answered)
        first.say(Load(1, 0, 4, 0, 64, True, {}))
        first.does.hold = True
        first.say(Rejected(number, "shutting_down", "this node ends"))
        reading.join(20)
        assert text_of(lines) == TEXT
        (again,) = second.generates
        begun = [unpack_tokens(ids) for ids in again.outputs]
        assert bool(begun) == bool(after)
        assert all(ids == [*ids_of(TEXT), EOS][: len(ids)] for ids in begun)
