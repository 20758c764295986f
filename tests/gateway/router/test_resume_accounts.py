"""What a resumed request's account says, and what nodes say of themselves: blocks, load, an end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.kvstore.keys import unpack_tokens
from kvferry.kvstore.wire.generation import Rejected, Running, Started
from kvferry.kvstore.wire.status import KeyBatch, Status
from kvferry.tests.rigs.gateway.resume import LENGTH, TEXT, answer, once, stream, text_of, tokens_at
from kvferry.tests.rigs.gateway.rig import EOS, Rig, ids_of, running, several, wait_until

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
        first.say(Status(9, 3, 0, 0, 64, False, {}))
        wait_until(lambda: rig.gateway.nodes.decode[0].status is not None)
        for _ in range(3):
            answer(rig)
        assert (len(first.generates), len(second.generates)) == (0, 3)
        second.say(Status(0, 0, 0, 0, 64, True, {}))
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


# -- a node that is told to end --------------------------------------------------------------------


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
        (requests, _) = [node.requests for node in rig.gateway.nodes]
        if after:
            wait_until(lambda: requests.open[number].answered)
        first.say(Status(1, 0, 4, 0, 64, True, {}))
        first.does.hold = True
        first.say(Rejected(number, "shutting_down", "this node ends"))
        reading.join(20)
        assert text_of(lines) == TEXT
        (again,) = second.generates
        begun = [unpack_tokens(ids) for ids in again.outputs]
        assert bool(begun) == bool(after)
        assert all(ids == [*ids_of(TEXT), EOS][: len(ids)] for ids in begun)
