"""A node that lies, babbles or breaks the protocol harms nobody but itself."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
import pytest
import xxhash
from prometheus_client.parser import text_string_to_metric_families

from kvferry.gateway.router.requests import MAX_STRAYS
from kvferry.kvstore.wire.codec import AnyMessage, Envelope, encode
from kvferry.kvstore.wire.generation import (
    Done,
    Generate,
    Rejected,
    Running,
    Started,
    StepOutput,
    Token,
)
from kvferry.kvstore.wire.generation import PromptSources as Sources
from kvferry.kvstore.wire.generation import Stages as StageTimes
from kvferry.kvstore.wire.hello import HelloRequired, Refused, Welcome
from kvferry.kvstore.wire.server import Peer
from kvferry.kvstore.wire.status import DebugReply, KeyBatch, Status
from kvferry.tests.rigs.gateway import web
from kvferry.tests.rigs.gateway.rig import EOS, Rig, ids_of, several, wait_until
from kvferry.tests.rigs.servers.wire_fuzz import Fuzz

pytestmark = pytest.mark.B5

COMPLETIONS = "/v1/completions"
TEXT = "Hello 0"
SIZE = 40
"""Prompt tokens of every request here."""
VOCABULARY = 259
BLOCKS = 64
"""What a fake node says that it has."""
ADMIN = {"authorization": "Bearer root"}
H = ids_of("H")[0]


def ask(rig: Rig, **body: Any) -> httpx.Response:
    return rig.post(COMPLETIONS, {"prompt": "x" * SIZE, "max_tokens": 50} | body)


def events_of(rig: Rig) -> list[str]:
    """A stream's events, as far as they came; a refusal is one, too."""
    body = {"prompt": "x" * SIZE, "max_tokens": 50, "stream": True}
    found: list[str] = []
    with (
        suppress(httpx.RemoteProtocolError),
        web.stream("POST", rig.url + COMPLETIONS, json=body, timeout=20) as response,
    ):
        for line in response.iter_lines():
            found += [line] * bool(line)
    return found


def token(generate: Generate, index: int, token: int, finish: str = "", **more: Any) -> StepOutput:
    return StepOutput(
        (Token(generate.request, more.pop("choice", 0), index, token, finish, **more),)
    )


def done(generate: Generate, sources: Sources | None = None) -> Done:
    found = Sources(decode=SIZE) if sources is None else sources
    return Done(generate.request, found, StageTimes(), 0.0, 1, 0.0, 0, 0)


def whole(generate: Generate) -> list[AnyMessage]:
    """The right tokens, without the account."""
    ids = [*ids_of(TEXT), EOS]
    return [token(generate, at, it, "stop" if it == EOS else "") for at, it in enumerate(ids)]


Lie = Callable[[Generate], Sequence[AnyMessage]]

LIES: dict[str, Lie] = {
    "a token outside the vocabulary": lambda it: [token(it, 0, VOCABULARY)],
    "a token far outside": lambda it: [token(it, 0, H), token(it, 1, (1 << 31) - 1)],
    "an alternative that nobody wanted": lambda it: [token(it, 0, H, top=((H, -1.0),))],
    "a choice that there is not": lambda it: [token(it, 0, H, choice=1)],
    "the last choice that can be": lambda it: [token(it, 0, H, choice=127)],
    "an end too early": lambda it: [token(it, 0, H, "length")],
    "an end by no end token": lambda it: [token(it, 0, H, "stop")],
    "an end by a stop token that nobody named": lambda it: [token(it, 0, H, f"stop:{H}")],
    "an index that jumps": lambda it: [token(it, 3, H)],
    "indices that are never next": lambda it: [token(it, at, H) for at in (9, 5, 50, 1 << 53)],
    "an account before anything": lambda it: [done(it)],
    "an account before the end": lambda it: [token(it, 0, H), done(it)],
    "that it never heard of it": lambda it: [Rejected(it.request, "unknown_request", "")],
    "the same token for ever": lambda it: [token(it, 0, H) for _ in range(2000)],
    "more than one a choice": lambda it: [
        StepOutput(tuple(Token(it.request, 0, 0, H) for _ in range(5000)))
    ],
}


@pytest.mark.C7
@pytest.mark.parametrize("lie", LIES, ids=[name.replace(" ", "_") for name in LIES])
def test_a_request_that_is_lied_to_goes_on_elsewhere(tmp_path: Path, lie: str) -> None:
    with several(tmp_path / "m") as (rig, (liar, honest)):
        liar.does.lies = LIES[lie]
        got = ask(rig)
        assert got.status_code == 200, got.text
        (choice,) = got.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (TEXT, "stop")
        assert len(liar.generates) >= 1 and len(honest.generates) == 1


@pytest.mark.C7
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "lie",
    [
        "a token far outside",
        "an end too early",
        "an index that jumps",
        "an account before the end",
        "the same token for ever",
    ],
)
def test_with_nobody_else_it_ends_with_one_error(tmp_path: Path, lie: str, streamed: bool) -> None:
    with several(tmp_path / "m", 1, resume_timeout=0.3) as (rig, (liar,)):
        liar.does.lies = LIES[lie]
        if streamed:
            events = events_of(rig)
            assert [it for it in events if '"error"' in it] == events[-1:]
            assert not any('"finish_reason":"' in it for it in events)
        else:
            got = ask(rig)
            assert got.status_code in (500, 503) and got.json()["error"]["code"], got.text
        assert rig.get("/health").status_code == 200


def test_one_that_goes_on_is_given_up_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvferry.gateway.router.link.OFFENCE_SECONDS", 60.0)
    with several(tmp_path / "m") as (rig, (liar, honest)):
        (node, _) = rig.gateway.nodes.decode
        liar.does.lies = LIES["a token outside the vocabulary"]
        before = time.monotonic()
        while node.usable:
            assert ask(rig).json()["choices"][0]["text"] == TEXT
            assert time.monotonic() - before < 60
        assert node.counters["offences"] >= 5 and len(honest.generates) >= 5
        heard = len(liar.generates)
        for _ in range(4):
            assert ask(rig).json()["choices"][0]["text"] == TEXT
        assert len(liar.generates) == heard, "it got work although it was given up"
        page = rig.get("/metrics").text
        assert f'kvferry_link_offences_total{{node="{liar.address}",role="decode"}}' in page
        liar.does.lies = None
        node._retry_at = time.monotonic()  # the minute is over
        wait_until(lambda: node.usable)
        told = [it for it in caplog.messages if "makes no sense" in it or "no sense" in it]
        assert 2 <= len(told) <= 4, told


@pytest.mark.A8
@pytest.mark.parametrize(
    "sources",
    [Sources(), Sources(device=1 << 53), Sources(device=30, decode=30)],
)
def test_an_account_that_cannot_be_is_not_passed_on(tmp_path: Path, sources: Sources) -> None:
    with several(tmp_path / "m", 1) as (rig, (liar,)):
        liar.does.lies = lambda it: [*whole(it), done(it, sources)]
        got = ask(rig).json()
        assert got["choices"][0]["text"] == TEXT
        assert "prompt_tokens_details" not in got["usage"]
        assert sum(got["timings"]["prompt_tokens"].values()) == SIZE
        assert rig.gateway.nodes.decode[0].counters["offences"] == 1
        assert rig.get("/metrics").status_code == 200


@pytest.mark.A8
def test_whoever_begins_with_an_account_that_cannot_be_is_left(tmp_path: Path) -> None:
    with several(tmp_path / "m") as (rig, (liar, other)):
        liar.does.lies = lambda it: [Started(it.request, Sources(host=7)), *whole(it), done(it)]
        got = ask(rig).json()
        assert got["choices"][0]["text"] == TEXT and len(other.generates) == 1
        assert sum(got["timings"]["prompt_tokens"].values()) == SIZE
        assert sum(node.counters["offences"] for node in rig.gateway.nodes.decode) == 1


def test_keys_are_bounded_by_the_blocks_that_there_are(tmp_path: Path) -> None:
    with several(tmp_path / "m") as (rig, (liar, _)):
        (node, _) = rig.gateway.nodes.decode

        def keys(first: int, count: int) -> bytes:
            return b"".join(it.to_bytes(16, "big") for it in range(first, first + count))

        liar.say(KeyBatch(0, True, keys(0, BLOCKS), b""))
        wait_until(lambda: len(node.keys) == BLOCKS)
        liar.say(KeyBatch(1, False, keys(BLOCKS, 1), b""))
        wait_until(lambda: node.counters["offences"] == 1)
        assert len(node.keys) == 0 and not node.keys.synced
        liar.say(KeyBatch(2, True, keys(0, 100_000), b""))
        wait_until(lambda: node.counters["offences"] == 2)
        assert len(node.keys) == 0
        liar.say(KeyBatch(3, True, keys(0, 5), b""))
        wait_until(lambda: len(node.keys) == 5)
        for number in range(4, 3000):
            liar.say(KeyBatch(number, False, keys(number * BLOCKS, 7), b""))
        wait_until(lambda: node.counters["offences"] > 2)
        assert len(node.keys) <= BLOCKS
        assert ask(rig).json()["choices"][0]["text"] == TEXT


def test_what_a_node_counts_never_spoils_the_page(tmp_path: Path) -> None:
    with several(tmp_path / "m", 1) as (rig, (liar,)):
        (node,) = rig.gateway.nodes.decode
        names = ("up", "steps", "steps_total", "num_preemptions", "preemptions", "a" * 100, "x_sum")
        liar.say(Status(1, 2, 3, 4, 0, False, dict.fromkeys(names, 1e18)))
        wait_until(lambda: node.status is not None)
        families = list(text_string_to_metric_families(rig.get("/metrics").text))
        assert len({it.name for it in families}) == len(families)
        samples = [(one.name, *sorted(one.labels.items())) for it in families for one in it.samples]
        assert len(set(samples)) == len(samples)
        assert ("kvferry_node_steps_total", ("node", liar.address), ("role", "decode")) in samples
        # What is no name of a counter does not even arrive.
        for name in ('x"} 1\ny{a="', "Größe", "", "a b", "le"):
            liar.say(Status(9, 0, 0, 0, 0, False, {"steps": 1.0, name + "\n": 1.0}))
        liar.say(Status(7, 0, 0, 0, 0, False, {"le": 1.0}))
        wait_until(lambda: node.status is not None and node.status.running == 7)
        assert len(list(text_string_to_metric_families(rig.get("/metrics").text))) > 10


@pytest.mark.parametrize(
    "body",
    [b"", b"no json", b"[1]", b"[" * 5000, b'{"a":' * 500 + b"1" + b"}" * 500, b'{"a": NaN}',
     b"\xff", b'{"pid": 123456789012345678901234567890}'],
)  # fmt: skip
def test_an_absurd_answer_to_a_question_is_an_error_of_that_node(
    tmp_path: Path, body: bytes
) -> None:
    settings: dict[str, Any] = {"enable_debug": True, "admin_api_key": "root"}
    with several(tmp_path / "m", **settings) as (rig, (liar, _)):
        liar.does.ignores = lambda message: type(message).__name__ == "DebugRequest"
        stop = threading.Event()

        def babble() -> None:
            while not stop.wait(0.02):
                for number in range(50):
                    liar.say(DebugReply(number, body))

        thread = threading.Thread(target=babble)
        thread.start()
        try:
            got = rig.get("/debug/ledger", headers=ADMIN)
        finally:
            stop.set()
            thread.join()
        assert got.status_code == 200, got.text
        first, second = got.json()["nodes"]
        assert (first["name"], second["name"]) == ("decode-0", "decode-1")
        assert first["address"] == liar.address and ("error" in first or "pid" in first)
        assert second["kind"] == "ledger"


def test_a_lost_answer_to_a_question_is_told_as_an_error(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"enable_debug": True, "admin_api_key": "root"}
    with several(tmp_path / "m", **settings) as (rig, (first, _)):
        first.does.loses = lambda message: isinstance(message, DebugReply)
        nodes = rig.get("/debug/ledger", headers=ADMIN).json()["nodes"]
        assert "no answer" in nodes[0]["error"] and "error" not in nodes[1]


# -- a storm ---------------------------------------------------------------------------------------


class Storm:
    """Frames of every kind: absurd, nearly right about requests that are open, and damaged."""

    KINDS = tuple(
        kind for kind in get_args(AnyMessage) if kind not in (HelloRequired, Refused, Welcome)
    )
    ENDS = (HelloRequired(), Refused("a", "b", "c"), Welcome("prefill", {}, 1, 1, 1, 1))

    def __init__(self, seed: int) -> None:
        self.fuzz = Fuzz(seed)
        self.sent = 0
        self.requests = 1

    def __call__(self, peer: Peer, incarnation: int) -> list[list[bytes]]:
        """Twenty messages to one gateway."""
        self.sent += 20
        return [self._frames(peer, incarnation) for _ in range(20)]

    def _frames(self, peer: Peer, incarnation: int) -> list[bytes]:
        dice = self.fuzz.dice
        message = self._message()
        frame = encode(Envelope(incarnation, peer.incarnation, message))
        if dice.random() < 0.2:
            body = bytearray(frame[:-8])
            for _ in range(dice.choice((1, 2, 8))):
                body[dice.randrange(len(body))] = dice.randrange(256)
            frame = bytes(body) + xxhash.xxh3_64_digest(bytes(body))
        return [frame, *self.fuzz.payloads(message)] if dice.random() < 0.9 else [frame, b"more"]

    def _message(self) -> AnyMessage:
        dice, fuzz = self.fuzz.dice, self.fuzz
        number = dice.randrange(1, self.requests + 5)
        if dice.random() < 0.001:
            return dice.choice(self.ENDS)
        if dice.random() < 0.5:
            message: AnyMessage = fuzz.absurd(dice.choice(self.KINDS))
            if "request" in message.__struct_fields__ and dice.random() < 0.8:
                message = msgspec.structs.replace(message, request=number)
            return message
        one = Token(number, 0, dice.randrange(100), dice.randrange(300))
        return dice.choice(
            (
                StepOutput((one, fuzz.nearly(one))),
                Running(number, (dice.randrange(100),)),
                Rejected(number, "unknown_request", ""),
                fuzz.nearly(Done(number, Sources(decode=SIZE), StageTimes(), 0.0, 1, 0.0, 0, 0)),
                fuzz.nearly(KeyBatch(dice.randrange(5), True, bytes(16 * BLOCKS), b"")),
                fuzz.nearly(Status(1, 0, 0, 0, BLOCKS, False, {"steps": 1.0})),
            )
        )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.C7
def test_a_storm_of_nonsense_changes_no_other_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Given up again and again, but never for long: the storm is to go on.
    monkeypatch.setattr("kvferry.gateway.router.link.OFFENCE_SECONDS", 0.1)
    caplog.set_level(logging.INFO)
    with several(tmp_path / "m", first_token_timeout=2.0) as (rig, (stormy, honest)):
        node, other = rig.gateway.nodes.decode
        stormy.say(Status(0, 0, 0, 0, BLOCKS, True, {}))
        wait_until(lambda: node.draining)
        honest.does.pace = 0.01
        texts = [f"{number} of many streams " * 6 for number in range(6)]
        got: dict[str, str] = {}

        def read(text: str) -> None:
            body = {"prompt": "x" * SIZE, "max_tokens": len(text), "stream": True,
                    "kvferry_force_ids": ids_of(text)}  # fmt: skip
            with web.stream("POST", rig.url + COMPLETIONS, json=body, timeout=60) as response:
                lines = [it[6:] for it in response.iter_lines() if it.startswith("data: ")]
            assert lines[-1] == "[DONE]", lines[-1]
            chunks = [json.loads(line) for line in lines[:-1]]
            got[text] = "".join(it["text"] for chunk in chunks for it in chunk["choices"])

        threads = [threading.Thread(target=read, args=(text,)) for text in texts]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(honest.generates) == len(texts))
        before = resident_bytes()
        storm = stormy.does.storm = Storm(1)
        statuses: list[int] = []
        while any(thread.is_alive() for thread in threads) or storm.sent < 3000:
            # New ones may meet the stormy node; what becomes of them is an answer or an error.
            storm.requests = 6 + len(statuses)
            statuses.append(ask(rig, max_tokens=5).status_code)
            assert rig.get("/health").status_code == 200
            page = rig.get("/metrics")
            assert page.status_code == 200 and list(text_string_to_metric_families(page.text))
            rig.gateway.nodes.check()
        for thread in threads:
            thread.join(10)
        stormy.does.storm = None
        assert [got.get(text) for text in texts] == texts
        assert set(statuses) <= {200, 400, 500, 503} and 200 in statuses
        assert other.counters["offences"] == 0 and node.counters["offences"] > 0
        assert len(node.keys) <= BLOCKS and len(node.requests._strays) <= MAX_STRAYS
        assert resident_bytes() - before < 200 << 20
        wait_until(lambda: node.usable)
        assert ask(rig).status_code == 200
        assert not any(record.exc_info for record in caplog.records), caplog.text[-3000:]
        lines = [it for it in caplog.messages if stormy.address in it]
        assert len(lines) < 60, f"{len(lines)} lines about one node"
