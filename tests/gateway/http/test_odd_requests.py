"""Requests that no client should send: each gets a 4xx that says what is wrong, and no other
request notices."""

from __future__ import annotations

import gc
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvferry.gateway.server import Protocol
from kvferry.tests.rigs.gateway import web
from kvferry.tests.rigs.gateway.api import CHAT, COMPLETIONS, error_of, raw_request
from kvferry.tests.rigs.gateway.rig import EOS, Behaviour, Rig, ids_of, wait_until

JSON = {"content-type": "application/json"}


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    """Whatever was sent, the next request works."""
    shared.decode.does = Behaviour()
    shared.decode.generates.clear()
    yield shared
    assert shared.chat().status_code == 200
    wait_until(shared.idle)


def post(rig: Rig, path: str, content: bytes) -> httpx.Response:
    return web.post(rig.url + path, content=content, headers=JSON, timeout=60)


def chat_with(value: str) -> bytes:
    return b'{"messages": [{"role": "user", "content": %s}]}' % value.encode()


DEEP = 100_000
ODD = {
    "surrogate": chat_with('"\\ud800"'),
    "surrogate-key": b'{"messages": [{"role": "user"}], "logit_bias": {"\\udc00": 1}}',
    "swapped-surrogates": chat_with('"\\ude00\\ud83d"'),
    "half-a-surrogate": chat_with('"\\ud83d and more"'),
    "raw-surrogate": b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
    "overlong-utf-8": b'{"messages": [{"role": "user", "content": "\xc0\xaf"}]}',
    "latin-1": b'{"messages": [{"role": "user", "content": "\xe9"}]}',
    "utf-16": chat_with('"x"').decode().encode("utf-16"),
    "nan": b'{"messages": [], "temperature": NaN}',
    "infinity": b'{"messages": [], "temperature": -Infinity}',
    "1e999": b'{"messages": [], "temperature": 1e999}',
    "deep": chat_with("[" * DEEP + "]" * DEEP),
    "deep-objects": chat_with('{"a":' * DEEP + "1" + "}" * DEEP),
    "deep-unclosed": b"[" * DEEP,
    "deep-in-ignored": b'{"messages": [], "metadata": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep-in-tools": b'{"messages": [{"role": "user"}], "tools": [{"type": "f", "function": '
    b'{"name": "f", "parameters": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}}]}",
    "huge-int": b'{"messages": [{"role": "user"}], "n": ' + b"9" * 5000 + b"}",
    "huge-seed": b'{"messages": [{"role": "user"}], "seed": 1' + b"0" * 400 + b"}",
    "huge-float": b'{"messages": [{"role": "user"}], "temperature": ' + b"9" * 400 + b"}",
    "two-bodies": chat_with('"x"') * 2,
    "raw-control": b'{"messages": [{"role": "user", "content": "\x00"}]}',
    "nothing": b"",
    "null": b"null",
    "byte-order-mark": b"\xef\xbb\xbf" + chat_with('"x"'),
}  # fmt: skip


@pytest.mark.C6
@pytest.mark.parametrize("name", ODD)
def test_odd_bodies(rig: Rig, name: str) -> None:
    response = post(rig, CHAT, ODD[name])
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"
    assert len(response.content) < 4096
    assert rig.decode.generates == []


@pytest.mark.C6
@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
def test_surrogates_in_prompts(rig: Rig, path: str) -> None:
    assert error_of(post(rig, path, b'{"prompt": "\\ud800"}'))["type"] == "invalid_request_error"
    assert post(rig, path, b'{"prompt": "\\ud83d\\ude00"}').status_code == 200


@pytest.mark.C6
def test_of_fields_given_twice_the_last_counts(rig: Rig) -> None:
    body = b'{"prompt": "x", "max_tokens": -1, "max_tokens": 3, "ignore_eos": true}'
    assert post(rig, COMPLETIONS, body).json()["usage"]["completion_tokens"] == 3


@pytest.mark.C6
@pytest.mark.parametrize(
    "content",
    ["e\u0301 \u00e9", "a\r\nb\rc", "\u2028\u2029\u0085", "\u0000\u0007", "\ufeff", "\uffff\ufdd0"],
    ids=["nfd", "crlf", "line-separators", "controls", "bom", "noncharacters"],
)
def test_odd_text_is_taken_as_it_is(rig: Rig, content: str) -> None:
    tokens = rig.post("/tokenize", {"prompt": content}).json()["tokens"]
    assert tokens == ids_of(content)
    assert rig.chat(messages=[{"role": "user", "content": content}]).status_code == 200


@pytest.mark.C6
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "I begin"}],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": []}],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}],
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "result"},
        ],
        [{"role": "tool", "tool_call_id": "nobody", "content": "result"}],
        [{"role": "user", "content": "x"}, {"role": "system", "content": "late"}],
        [{"role": "system", "content": "only"}],
        [{"role": "developer", "content": "d"}, {"role": "user", "content": "u", "name": "bob"}],
    ],
    ids=["assistant", "empty", "no-parts", "absent", "parts", "tools", "tool-result", "late-system",
         "system", "developer"],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_odd_but_legal_messages(rig: Rig, messages: list[dict[str, Any]], stream: bool) -> None:
    response = rig.chat(messages=messages, stream=stream)
    assert response.status_code == 200
    assert "Hello" in response.text or "data: [DONE]" in response.text


@pytest.mark.C6
@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "x"}, {"content": "x"}], "messages[1].role"),
        ("hello", "messages"),
    ],
)
def test_messages_without_meaning(rig: Rig, messages: Any, param: str) -> None:
    response = rig.chat(messages=messages)
    assert (response.status_code, error_of(response)["param"]) == (400, param)


@pytest.mark.C6
def test_error_texts_are_bounded(rig: Rig) -> None:
    long = "é" * 100_000
    for fields in ({"model": long}, {"tool_choice": long}, {"reasoning_effort": long},
                   {"messages": [{"role": long, "content": "x"}]}, {"stop": [long]},
                   {"messages": [{"role": "user", "content": [{"type": long}]}]},
                   {"response_format": {"type": long}}, {"logit_bias": {long: 1}},
                   {"logit_bias": {long: "x"}}, {"messages": [0] * 100_000}):  # fmt: skip
        response = rig.chat(**fields)
        assert 400 <= response.status_code < 500
        assert error_of(response)["message"] and len(response.content) < 4096


@pytest.mark.C6
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1e300}}, "logit_bias"),
        ({"temperature": 999999, "top_p": -1}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids"),
        ({"guided_regex": "["}, "guided_regex"),
        ({"n": 10**30}, "n"),
        ({"top_k": 10**30}, "top_k"),
        ({"priority": 10**30}, "priority"),
    ],
)  # fmt: skip
def test_what_broke_engines_elsewhere_is_a_400(
    rig: Rig, fields: dict[str, Any], param: str
) -> None:
    response = rig.chat(**fields)
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert rig.decode.generates == []


# -- paths and methods -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE"])
def test_every_method_of_every_path_answers_json(rig: Rig, method: str) -> None:
    for path in ("/nowhere", "/v1/v1/chat/completions", "/v1/%00", "/%ff", "//", "/v1/models/a/b"):
        response = web.request(method, rig.url + path, timeout=20)
        known = path.startswith("/v1/models/") and method not in ("GET", "HEAD")
        assert response.status_code == (405 if known else 404), path
        check_json(method, response)
    for path in (CHAT, "/tokenize", "/v1/responses", "/v1/embeddings"):
        response = web.request(method, rig.url + path, timeout=20)
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        check_json(method, response)


def check_json(method: str, response: httpx.Response) -> None:
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"] == response.headers["request-id"]
    if method != "HEAD":
        assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nContent-Length: many\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a client that speaks TLS
    ],
    ids=["no-request", "version", "length", "tls"],
)
def test_what_is_no_http_gets_json_as_well(rig: Rig, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", rig.port), timeout=20) as connection:
        connection.sendall(sent)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"Content-Type: application/json" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert rig.get("/health").status_code == 200


def test_nothing_is_kept_of_a_connection_that_is_closed(rig: Rig) -> None:
    def kept() -> int:
        gc.collect()
        return sum(type(it) is Protocol for it in gc.get_objects())

    before = kept()
    for _ in range(20):
        with raw_request(rig, max_tokens=4) as connection:
            wait_until(lambda: bool(rig.decode.generates))
            rig.decode.generates.clear()
            assert connection.recv(1)
            wait_until(rig.idle)
            # With the rest unread: the server hears of a reset.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: kept() <= before + 2)


def test_a_doubled_or_missing_prefix_is_explained(rig: Rig) -> None:
    for path, hint in (("/v1/v1/chat/completions", "twice"), ("/chat/completions", "lack /v1")):
        error = error_of(rig.post(path, {}))
        assert hint in error["message"] and error["code"] == "not_found"


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.C8
def test_streams_have_no_ids_and_only_bare_comments(rig: Rig) -> None:
    rig.decode.does.pace = 0.002
    forced = [*ids_of("id: 1\n\ndata: : x\n\nevent: y"), EOS]
    response = rig.chat(stream=True, kvferry_force_ids=forced)
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in response.headers and "content-length" not in response.headers
    text = ""
    for line in response.text.split("\n"):
        assert line == "" or line == ": keep-alive" or line.startswith("data: ")
        if line.startswith("data: {"):
            delta = json.loads(line[6:])["choices"][0]["delta"]
            text += delta.get("content", "")
    assert text == "id: 1\n\ndata: : x\n\nevent: y"


@pytest.mark.C8
def test_usage_only_when_asked_for_and_only_at_the_end(rig: Rig) -> None:
    for options in (None, {}, {"include_usage": False}):
        response = rig.chat(stream=True, stream_options=options)
        assert '"usage"' not in response.text
    lines = rig.chat(stream=True, stream_options={"include_usage": True}).text.split("\n\n")
    assert [('"usage"' in line) for line in lines] == [False] * (len(lines) - 3) + [
        True, False, False,
    ]  # fmt: skip


@pytest.mark.C2
def test_a_stop_string_delays_no_text_and_adds_no_empty_chunks(rig: Rig) -> None:
    forced = [*ids_of("plain text, then DEFGHI and DEFGHIJ"), EOS]
    response = rig.chat(stream=True, stop=["DEFGHIJ"], kvferry_force_ids=forced)
    chunks = [json.loads(line[6:]) for line in response.text.split("\n") if line[6:7] == "{"]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    contents = [delta["content"] for delta in deltas[1:-1]]
    assert contents[:16] == list("plain text, then")
    assert all(contents), "an empty chunk"
    assert "".join(contents) == "plain text, then DEFGHI and "


def test_echo_begins_with_the_prompt(rig: Rig) -> None:
    for prompt, texts in (("né", ["né"]), (ids_of("ab"), ["ab"]), (["a", "b"], ["a", "b"])):
        body = {"prompt": prompt, "echo": True, "n": 2, "max_tokens": 3}
        answer = rig.post(COMPLETIONS, body).json()
        expected = [text + "Hel" for text in texts for _ in range(2)]
        assert [choice["text"] for choice in answer["choices"]] == expected
        lines = rig.post(COMPLETIONS, body | {"stream": True}).text.split("\n")
        streamed = [""] * len(expected)
        for line in lines:
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    streamed[choice["index"]] += choice["text"]
        assert streamed == expected
        assert answer["usage"]["completion_tokens"] == 3 * len(expected)


def test_prompt_ids_alone(rig: Rig) -> None:
    body = {"prompt": "ab", "return_prompt_token_ids": True}
    (choice,) = rig.post(COMPLETIONS, body).json()["choices"]
    assert choice["prompt_token_ids"] == ids_of("ab") and "token_ids" not in choice
