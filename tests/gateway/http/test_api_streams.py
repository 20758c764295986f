"""Streams of the HTTP API over real sockets: their form, their text, and clients that leave."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from kvferry.tests.rigs.gateway import web
from kvferry.tests.rigs.gateway.api import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    events,
    raw_request,
    text_of,
)
from kvferry.tests.rigs.gateway.rig import EOS, Behaviour, Rig, ids_of, running, wait_until

# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.C8
@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_shape_of_a_chat_stream(rig: Rig, n: int, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    chunks = events(rig.chat(stream=True, n=n, **options))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 8 * n
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert not any("usage" in chunk for chunk in chunks)
    assert [("timings" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    for index in range(n):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert all(choice["delta"].get("content") for choice in mine[1:-1])
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert text_of(chunks, index) == f"Hello {index}"


@pytest.mark.C8
def test_continuous_usage_counts_every_token(rig: Rig) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(rig.chat(stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8]


@pytest.mark.C8
def test_the_role_waits_for_the_first_token(rig: Rig) -> None:
    rig.decode.does.hold = True
    connection = raw_request(rig, stream=True)
    wait_until(lambda: bool(rig.decode.generates))
    connection.settimeout(0.2)
    with pytest.raises(TimeoutError):
        connection.recv(1)
    rig.decode.does.hold = False
    connection.settimeout(10)
    got = connection.recv(1 << 16)
    connection.close()
    assert b'"role":"assistant"' in got and b'"content":"H"' in got


@pytest.mark.C1
@pytest.mark.parametrize("text", ["😀 é 漢字", "👩‍👩‍👧‍👦", "नमस्ते", "a\u2028b\x00c", "🇩🇪"])
def test_streams_join_to_the_whole_answer(rig: Rig, text: str) -> None:
    forced = [*ids_of(text), EOS]
    chunks = events(rig.chat(stream=True, kvferry_force_ids=forced))
    assert text_of(chunks) == text
    assert not any("\ufffd" in json.dumps(chunk, ensure_ascii=False) for chunk in chunks)
    answer = rig.chat(kvferry_force_ids=forced).json()
    assert answer["choices"][0]["message"]["content"] == text


@pytest.mark.C1
def test_clients_that_split_lines_at_more_than_line_feeds_lose_nothing(rig: Rig) -> None:
    text = "".join(f"{code:x}{chr(code)}" for code in (*range(0x20), 0x7F, 0x85, 0x2028, 0x2029))
    body = {"kvferry_force_ids": [*ids_of(text), EOS], "stream": True, "max_tokens": 200}
    for path, more in ((CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "x"})):
        with web.stream("POST", rig.url + path, json=body | more, timeout=20) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines.pop() == "data: [DONE]"
        assert text_of([json.loads(line.removeprefix("data: ")) for line in lines]) == text


@pytest.mark.C1
def test_a_cut_character_is_the_same_in_both_modes(rig: Rig) -> None:
    forced = ids_of("ok😀".encode()[:-1])
    fields = {"kvferry_force_ids": forced, "max_tokens": len(forced)}
    chunks = events(rig.chat(stream=True, **fields))
    answer = rig.chat(**fields).json()["choices"][0]
    assert text_of(chunks) == answer["message"]["content"] == "ok\ufffd"
    assert answer["finish_reason"] == "length"


@pytest.mark.C2
@pytest.mark.parametrize("late", [False, True], ids=["in-time", "late-done"])
@pytest.mark.parametrize(
    ("text", "stop", "shown", "matched"),
    [
        ("one DONE two", ["DONE"], "one ", "DONE"),
        ("DOx DONx DONE", ["DONE"], "DOx DONx ", "DONE"),
        ("xabc", ["abc", "ab"], "x", "ab"),
        ("ok 漢字!", ["漢字"], "ok ", "漢字"),
        ("none of them", ["w", "x", "yy", "them!"], "none of them", None),
        ("DONE", ["DONE"], "", "DONE"),
    ],
)
def test_stop_strings(
    rig: Rig, text: str, stop: list[str], shown: str, matched: str | None, late: bool
) -> None:
    rig.decode.does.split_done = late
    rig.decode.does.pace = 0.005
    # Long enough behind the stop string that the node has not ended by itself when it is found.
    behind = ids_of(" and a good deal more of it" * 15) if matched is not None else []
    fields = {"kvferry_force_ids": [*ids_of(text), *behind, EOS], "stop": stop}
    answer = rig.chat(**fields).json()
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["stop_reason"]) == (shown, matched)
    assert choice["finish_reason"] == "stop"
    chunks = events(rig.chat(stream=True, **fields))
    assert text_of(chunks) == shown
    if matched is not None:
        kept = len(text[: text.index(matched) + len(matched)].encode())
        assert answer["usage"]["completion_tokens"] == kept
        wait_until(lambda: len(rig.decode.stops) == 2)
        assert {stop.kept for stop in rig.decode.stops} == {kept}


@pytest.mark.B6
@pytest.mark.parametrize("stream", [False, True])
def test_first_token_ends_it(rig: Rig, stream: bool) -> None:
    response = rig.chat(stream=stream, kvferry_force_ids=[EOS], stream_options=None)
    if stream:
        chunks = events(response)
        assert text_of(chunks) == ""
        assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, "stop"]
    else:
        assert response.json()["usage"]["completion_tokens"] == 1


def test_silence_is_filled_with_comments(tmp_path: Path) -> None:
    with running(tmp_path / "m", sse_keep_alive_interval=0.05) as rig:
        rig.decode.does.hold = True
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        with web.stream("POST", rig.url + CHAT, json=body, timeout=20) as response:
            lines = (line for line in response.iter_lines() if line)
            assert [next(lines), next(lines)] == [": keep-alive"] * 2
            rig.decode.does.hold = False
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert all(line.startswith(("data: ", ": keep-alive")) for line in rest)


# -- clients that leave ----------------------------------------------------------------------------


@pytest.mark.C3
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold", [False, True], ids=["decoding", "waiting"])
def test_a_client_that_leaves_is_noticed_at_once(rig: Rig, hold: bool, stream: bool) -> None:
    rig.decode.does = Behaviour(pace=0.02, hold=hold)
    connection = raw_request(rig, stream=stream)
    wait_until(lambda: bool(rig.decode.generates))
    if stream and not hold:
        assert connection.recv(10)
    connection.close()
    assert wait_until(lambda: bool(rig.decode.aborts)) < 1.0
    assert rig.decode.aborts[0].request == rig.decode.generates[0].request
    wait_until(rig.idle)


@pytest.mark.C3
def test_leaving_ends_every_request_of_the_answer(rig: Rig) -> None:
    rig.decode.does.hold = True
    with web.Client(timeout=20) as client, pytest.raises(httpx.ReadTimeout):
        client.post(rig.url + COMPLETIONS, json={"prompt": ["a", "b", "c"]}, timeout=0.3)
    wait_until(lambda: len(rig.decode.aborts) == 3)
