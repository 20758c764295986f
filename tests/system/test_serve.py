"""The whole server over HTTP: real processes around the stand-in engine, apart and alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.kernels.engines.standin import StandinConfig, standin_reply, write_standin_model
from kvferry.kvstore.wire.generation import SOURCES
from kvferry.tests.rigs.gateway import web
from kvferry.tests.rigs.gateway.rig import wait_until
from kvferry.tests.rigs.servers.served import Served, listening
from kvferry.tests.rigs.servers.streams import nodes_idle, prompt_of, text_ids

B = 16
CONFIG = StandinConfig()


def events(served: Served, path: str = "/v1/completions", **body: Any) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream; `[DONE]` must be the last line."""
    request = {"temperature": 0, "ignore_eos": True, "stream": True, **body}
    with served.http.stream("POST", path, json=request) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    yield from (json.loads(line.removeprefix("data: ")) for line in lines[:-1])


def streamed(served: Served, **body: Any) -> tuple[dict[int, str], dict[int, str]]:
    """Text and finish reason of each choice of a streamed completion."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for event in events(served, **body):
        for choice in event["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["text"]
            if choice["finish_reason"]:
                assert index not in reasons, "a second finish_reason"
                reasons[index] = choice["finish_reason"]
    return texts, reasons


def test_the_answer_is_the_reference(served: Served) -> None:
    for length in (1, 16, 17, 129, 700, 3000):
        prompt = prompt_of(length, length)
        assert served.ids(prompt, 40) == standin_reply(prompt, CONFIG, 40)


@pytest.mark.A8
@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_one_after_the_other(served: Served, stream: bool) -> None:
    length = 700
    prompt = prompt_of(length, 1 + stream)
    before = {name: prompt_tokens(served, name) for name in SOURCES}
    cached = []
    totals = dict.fromkeys(SOURCES, 0)
    for _ in range(3):
        if stream:
            options = {"include_usage": True}
            answers = list(events(served, prompt=prompt, max_tokens=4, stream_options=options))
            usage = answers[-1]["usage"]
            timings = next(event["timings"] for event in answers if "timings" in event)
        else:
            answer = served.complete(prompt=prompt, max_tokens=4)
            usage, timings = answer["usage"], answer["timings"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert sum(timings["prompt_tokens"].values()) == usage["prompt_tokens"] == length
        for name, count in timings["prompt_tokens"].items():
            totals[name] += count
    assert cached == [0, (length - 1) // B * B, (length - 1) // B * B]
    for name, total in totals.items():
        assert prompt_tokens(served, name) - before[name] == total


def prompt_tokens(served: Served, source: str) -> float:
    return served.metric("kvferry_prompt_tokens_by_source_total", source=source)


@pytest.mark.B6
@pytest.mark.parametrize("count", [1, 2, 3, 17])
def test_counts_and_finish_reasons(served: Served, count: int) -> None:
    prompt = prompt_of(150, 50)
    reply = standin_reply(prompt, CONFIG, 17)
    answer = served.complete(prompt=prompt, max_tokens=count)
    assert answer["usage"]["completion_tokens"] == count
    assert answer["choices"][0]["finish_reason"] == "length"
    texts, reasons = streamed(served, prompt=prompt, max_tokens=count)
    assert texts[0] == answer["choices"][0]["text"] and reasons[0] == "length"
    assert served.ids(prompt, count) == reply[:count]


@pytest.mark.B6
def test_the_first_token_may_end_it(served: Served) -> None:
    prompt = text_ids("a prompt")
    forced = [2, *text_ids("behind the end")]
    common = {"prompt": prompt, "max_tokens": 5, "kvferry_force_ids": forced}
    ended = served.complete(**common, ignore_eos=False)
    assert ended["choices"][0]["finish_reason"] == "stop"
    assert ended["choices"][0]["text"] == "" and ended["usage"]["completion_tokens"] == 1
    went_on = served.complete(**common)
    assert went_on["choices"][0]["finish_reason"] == "length"
    assert went_on["usage"]["completion_tokens"] == 5
    stopped = served.complete(
        prompt=prompt, max_tokens=5, kvferry_force_ids=text_ids("xyz"), stop="x"
    )
    assert stopped["choices"][0]["text"] == "" and stopped["choices"][0]["finish_reason"] == "stop"


@pytest.mark.B7
def test_apart_and_alone_give_identical_results(
    standin: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prompt = prompt_of(600, 77)
    bodies: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 7, "n": 3},
        {"temperature": 0.9, "seed": 8, "top_p": 0.6, "top_k": 30, "min_p": 0.01},
        {"temperature": 0, "frequency_penalty": 1.2},
        {"temperature": 0, "presence_penalty": 1.2},
        {"temperature": 0, "repetition_penalty": 1.3},
        {"temperature": 0, "logit_bias": {"70": 100}},
        {"temperature": 0, "min_tokens": 20, "ignore_eos": False},
        {"temperature": 0.5, "seed": 3, "logprobs": 5},
        {"temperature": 0, "stop": ["a", "e", "\x07"]},
    ]
    answers = []
    for nodes in (1, 0):
        log = tmp_path_factory.mktemp("pair") / "log"
        cluster = Served(standin, log, f"--prefill-nodes={nodes}")
        try:
            answers.append(
                [cluster.complete(prompt=prompt, max_tokens=24, **body) for body in bodies]
            )
        finally:
            assert cluster.stop() == 0
    for body, apart, alone in zip(bodies, *answers, strict=True):
        assert apart["choices"] == alone["choices"], body
        assert apart["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
    assert answers[0][0]["timings"]["prompt_tokens"]["prefill"] == (600 - 1) // B * B
    assert answers[1][0]["timings"]["prompt_tokens"]["prefill"] == 0


@pytest.mark.C1
@pytest.mark.parametrize(
    "text",
    ["😀👩‍👩‍👧 ok", "漢字かな", "e\u0301a\u0308", "نص", "mixed 😀 漢 e\u0301 end"],
)
def test_text_split_over_tokens_arrives_whole(served: Served, text: str) -> None:
    forced = text_ids(text)
    common: dict[str, Any] = {"prompt": "x", "max_tokens": len(forced), "kvferry_force_ids": forced}
    whole = served.complete(**common)["choices"][0]["text"]
    pieces = [choice["text"] for event in events(served, **common) for choice in event["choices"]]
    assert whole == "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert [piece for piece in pieces if piece] == list(text), "a character came late, in a burst"


@pytest.mark.C1
def test_a_character_cut_off_by_the_end_is_the_same_in_both_modes(served: Served) -> None:
    forced = text_ids("ab😀")[:-1]
    common: dict[str, Any] = {"prompt": "x", "max_tokens": len(forced), "kvferry_force_ids": forced}
    whole = served.complete(**common)["choices"][0]["text"]
    texts, _ = streamed(served, **common)
    assert texts[0] == whole and whole.startswith("ab")


@pytest.mark.C2
@pytest.mark.parametrize(
    ("output", "stops", "expected"),
    [
        ("abcDEFGHIJxyz", ["DEFGHIJ"], "abc"),
        ("abcDEFGHxDEFGHIJz", ["DEFGHIJ"], "abcDEFGHx"),
        ("one two three", ["two t", "two"], "one "),
        ("one two three", ["two thz", "three"], "one two "),
        ("日本語の文章です", ["文章"], "日本語の"),
        ("aaaaab", ["aab"], "aaa"),
        ("stop at any of four", ["zzz", "four", "any", "yyy"], "stop at "),
        ("no stop at all", ["never"], "no stop at all"),
        ("almost nev", ["never"], "almost nev"),
    ],
)
def test_stop_strings(served: Served, output: str, stops: list[str], expected: str) -> None:
    forced = text_ids(output)
    common = {
        "prompt": "x",
        "max_tokens": len(forced),
        "kvferry_force_ids": forced,
        "stop": stops,
    }
    answer = served.complete(**common)
    reason = "length" if expected == output else "stop"
    assert answer["choices"][0]["text"] == expected
    assert answer["choices"][0]["finish_reason"] == reason
    texts, reasons = streamed(served, **common)
    assert texts[0] == expected and reasons[0] == reason


def test_choices_of_one_request_differ_and_are_complete(served: Served) -> None:
    common = {"prompt": prompt_of(40, 3), "n": 4, "temperature": 1.0, "seed": 5, "max_tokens": 20}
    answer = served.complete(**common)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4 and answer["usage"]["completion_tokens"] == 80
    found, reasons = streamed(served, **common)
    assert [found[index] for index in range(4)] == texts
    assert reasons == dict.fromkeys(range(4), "length")


def test_a_client_that_leaves_stops_the_compute(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    write_standin_model(slow, seconds_per_pass=0.02, seconds_per_token=0.0002)
    served = Served(slow, tmp_path / "log")
    try:
        for stream in (True, False):
            for length in (20, 4000):
                body = {
                    "prompt": prompt_of(length, length + stream),
                    "max_tokens": 4000,
                    "stream": stream,
                    "ignore_eos": True,
                }
                leave_early(served, body)
                deadline = time.monotonic() + 10
                while not nodes_idle(served):
                    assert time.monotonic() < deadline, "it still computes for nobody"
                    time.sleep(0.05)
        assert served.ids([5], 3) == standin_reply([5], CONFIG, 3)
    finally:
        assert served.stop() == 0


def leave_early(served: Served, body: dict[str, Any]) -> None:
    """Sends a request over a connection of its own, and closes it while the answer is awaited."""
    host, port = served.url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + content)
        deadline = time.monotonic() + 10
        while nodes_idle(served):
            assert time.monotonic() < deadline, "the request never ran"
            time.sleep(0.01)


@pytest.mark.B3
@pytest.mark.C7
def test_deaths_are_survived(standin: Path, tmp_path: Path) -> None:
    served = Served(standin, tmp_path / "log", "--enable-test-hooks")
    try:
        before = served.children()
        os.kill(before["prefill"], signal.SIGKILL)
        prompt = prompt_of(2000, 9)
        assert served.ids(prompt, 20) == standin_reply(prompt, CONFIG, 20)
        deadline = time.monotonic() + 60
        while served.children().get("prefill") in (None, before["prefill"]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        while True:  # until the prefill node is used again
            prompt = prompt_of(1000, int(time.monotonic() * 1000) % 10_000)
            answer = served.complete(prompt=prompt, max_tokens=4)
            if answer["timings"]["prompt_tokens"]["prefill"]:
                break
            assert time.monotonic() < deadline, "the new prefill node is not used"
        os.kill(served.process.pid, signal.SIGSTOP)  # so that it stays dead for a while
        os.kill(before["decode"], signal.SIGKILL)
        while served.http.get("/ready").status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert served.http.get("/health").status_code == 200
        refused = served.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) <= 60
        os.kill(served.process.pid, signal.SIGCONT)
        served.wait_until_ready()
        assert served.ids(prompt, 8) == standin_reply(prompt, CONFIG, 8)
    finally:
        os.kill(served.process.pid, signal.SIGCONT)
        assert served.stop() == 0


@pytest.mark.C7
def test_a_stream_that_loses_its_node_goes_on_or_ends_with_one_error(tmp_path: Path) -> None:
    config = write_standin_model(tmp_path / "slow", seconds_per_pass=0.02)
    served = Served(tmp_path / "slow", tmp_path / "log")
    body = {
        "prompt": [5],
        "max_tokens": 200,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    lines: list[str] = []
    try:
        with (
            contextlib.suppress(httpx.HTTPError),
            served.http.stream("POST", "/v1/completions", json=body) as response,
        ):
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                lines.append(line.removeprefix("data: "))
                if len(lines) == 5:
                    os.kill(served.children()["decode"], signal.SIGKILL)
        parsed = [json.loads(line) for line in lines if line != "[DONE]"]
        ids = [
            token
            for event in parsed
            for choice in event.get("choices", [])
            for token in choice.get("token_ids") or []
        ]
        expected = standin_reply([5], config, 200)
        assert len(ids) >= 4 and ids == expected[: len(ids)]
        errors = [event for event in parsed if "error" in event]
        if errors:
            assert len(errors) == 1 and parsed[-1] is errors[0] and lines[-1] != "[DONE]"
            assert not any(
                choice["finish_reason"] for event in parsed for choice in event.get("choices", [])
            )
        else:
            assert ids == expected and lines[-1] == "[DONE]"
    finally:
        assert served.stop() == 0


STREAMS = 10


class Following:
    """A stream and how it ended, read in a thread of its own."""

    def __init__(self, served: Served, number: int) -> None:
        self.lines: list[str] = []
        self.cut = False
        self._body = {"prompt": [number + 3], "max_tokens": 150, "ignore_eos": True,
                      "stream": True, "temperature": 0}  # fmt: skip
        self._url = served.url + "/v1/completions"
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        try:
            with web.stream("POST", self._url, json=self._body, timeout=60) as response:
                for line in response.iter_lines():
                    self.lines += [line] if line else []
        except httpx.TransportError:
            self.cut = True

    @property
    def whole(self) -> bool:
        return not self.cut and self.lines[-1] == "data: [DONE]"

    @property
    def errors(self) -> list[str]:
        return [line for line in self.lines if '"error"' in line]


@pytest.mark.D5
@pytest.mark.parametrize("end", ["long", "short", "second-signal"])
def test_a_stop_leaves_nothing_behind(
    tmp_path: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    write_standin_model(tmp_path / "slow", seconds_per_pass=0.02)
    timeout = "0.3" if end == "short" else "30"
    served = Served(
        tmp_path / "slow", tmp_path / "log", f"--shutdown-timeout={timeout}", "--decode-nodes=2"
    )
    children = list(served.children().values())
    found = listening(served.process.pid, *children)
    ports = {int(one.rpartition(":")[2], 16) for one in found}
    assert len(ports) >= 4
    streams = [Following(served, number) for number in range(STREAMS)]
    wait_until(lambda: all(len(it.lines) >= 3 for it in streams), 20)
    served.process.send_signal(signal.SIGTERM)
    if end == "second-signal":
        wait_until(lambda: web.get(served.url + "/ready").status_code == 503)
        served.process.send_signal(signal.SIGTERM)
    for it in streams:
        it.thread.join(30)
    if end == "long":
        assert all(it.whole and not it.errors for it in streams)
    else:
        assert all(it.cut and len(it.errors) == 1 for it in streams)
        assert all('"code":"shutting_down"' in it.errors[0] for it in streams)
    assert served.wait() == 0
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()
    assert list((tmp_path / "tmp").iterdir()) == []
