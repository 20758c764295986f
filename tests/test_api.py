"""The HTTP API over real sockets, in front of a decode node that says what the test wants."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.kvstore.keys import chain, root_key, unpack_tokens
from kvferry.kvstore.wire import Load
from kvferry.tests import web
from kvferry.tests.gateway_rig import (
    BYTE,
    EOS,
    MAX_MODEL_LEN,
    Behaviour,
    FakeDecode,
    Rig,
    ids_of,
    running,
    wait_until,
)

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with running(tmp_path_factory.mktemp("model") / "standin") as rig:
        yield rig


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    decode = shared.decode
    decode.does = Behaviour()
    for record in (decode.generates, decode.stops, decode.aborts):
        record.clear()
    yield shared
    decode.does = Behaviour()
    wait_until(shared.idle)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream; it must end as streams do."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    assert data.pop() == "[DONE]"
    return [json.loads(text) for text in data]


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)


# -- whole answers ---------------------------------------------------------------------------------


def test_chat(rig: Rig) -> None:
    rig.decode.does.cached = 16
    answer = rig.chat(model="standin").json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello 0", "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    size = len(rig.decode.generates[0].prompt) // 4
    assert answer["usage"] == {
        "prompt_tokens": size,
        "completion_tokens": 8,
        "total_tokens": size + 8,
        "prompt_tokens_details": {"cached_tokens": 16},
    }


def test_timings_say_where_tokens_and_time_went(rig: Rig) -> None:
    rig.decode.does.cached = 16
    timings = rig.chat().json()["timings"]
    prompt = timings["prompt_tokens"]
    assert prompt["device"] == 16
    assert sum(prompt.values()) == len(rig.decode.generates[0].prompt) // 4
    assert timings["ttft_ms"] == {
        "queue": 1, "lookup": 2, "load": 3, "prefill": 4, "transfer": 5, "first_step": 6,
    }  # fmt: skip
    assert (timings["handoff_ms"], timings["predicted_n"], timings["predicted_ms"]) == (7, 8, 8)


def test_cached_tokens_never_reach_the_whole_prompt(rig: Rig) -> None:
    rig.decode.does.cached = len("hello")
    usage = rig.post(COMPLETIONS, {"prompt": "hello"}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1


def test_what_the_node_gets(rig: Rig) -> None:
    rig.post(
        COMPLETIONS,
        {"prompt": "x" * 40, "max_tokens": 9, "min_tokens": 2, "seed": -3, "ignore_eos": True,
         "stop_token_ids": [7], "temperature": 0, "n": 2, "priority": 4, "cache_salt": "s",
         "logprobs": 1},
    )  # fmt: skip
    (generate,) = rig.decode.generates
    root = root_key({"weights": "w"}, "default", "s")
    ids = ids_of("x" * 40)
    assert unpack_tokens(generate.prompt) == ids
    assert (generate.root, generate.keys) == (root, b"".join(chain(root, ids, 16)))
    assert (generate.max_tokens, generate.min_tokens, generate.seed) == (9, 2, -3)
    assert (generate.eos_ids, generate.stop_token_ids) == ((), (7,))
    assert (generate.choices, generate.priority, generate.prefill_nodes) == (2, 4, ())
    assert (generate.sampling.temperature, generate.sampling.logprobs) == (0, 1)


def follow_up(rig: Rig, reply: str, **fields: Any) -> list[int]:
    """The prompt of the turn after a reply to "hi"."""
    rig.decode.generates.clear()
    said = [("user", "hi"), ("assistant", reply), ("user", "and?")]
    messages = [{"role": role, "content": content} for role, content in said]
    rig.post(CHAT, {"messages": messages, "max_tokens": 1} | fields)
    return unpack_tokens(rig.decode.generates[0].prompt)


BROKEN = [BYTE + 0xC3, *ids_of("o"), BYTE + 0xFF]
"""Ids whose text, tokenized again, has others."""


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_the_next_turn_gets_the_ids_that_were_generated(rig: Rig, stream: bool) -> None:
    rig.chat(kvferry_force_ids=[*BROKEN, EOS], stream=stream)
    first = unpack_tokens(rig.decode.generates[0].prompt)
    expected = [*first, *BROKEN, EOS]
    assert follow_up(rig, "\ufffdo\ufffd")[: len(expected)] == expected
    plain = follow_up(rig, "\ufffdo\ufffd", cache_salt="other")
    assert plain[len(first) :][:3] == ids_of("\ufffd"), "under another salt nothing is remembered"


def test_every_choice_and_a_cut_reply_are_remembered(rig: Rig) -> None:
    rig.chat(n=2)
    rig.chat(kvferry_force_ids=[*BROKEN, *ids_of("STOP"), EOS], stop="STOP")
    first = unpack_tokens(rig.decode.generates[0].prompt)
    for text, ids in (("Hello 1", ids_of("Hello 1")), ("\ufffdo\ufffd", BROKEN)):
        expected = [*first, *ids, EOS]
        assert follow_up(rig, text)[: len(expected)] == expected


def test_a_reply_that_the_client_stopped_is_remembered(rig: Rig) -> None:
    rig.decode.does.pace = 0.02
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    body |= {"kvferry_force_ids": [*BROKEN, *ids_of("x" * 200)]}
    with web.stream("POST", rig.url + CHAT, json=body, timeout=20) as response:
        for line in response.iter_lines():
            if "x" in text_of([json.loads(line[6:])] if line.startswith("data: {") else []):
                break
    wait_until(lambda: bool(rig.decode.aborts) and not rig.gateway.open)
    first = unpack_tokens(rig.decode.generates[0].prompt)
    rig.decode.does.pace = 0
    expected = [*first, *BROKEN]
    replies = ["\ufffdo\ufffd" + "x" * count for count in range(1, 40)]
    assert any(follow_up(rig, reply)[: len(expected)] == expected for reply in replies)


def test_room_that_is_left_is_the_default(rig: Rig) -> None:
    rig.chat()
    rig.post(COMPLETIONS, {"prompt": "hi"})
    chat, completion = rig.decode.generates
    assert chat.max_tokens == MAX_MODEL_LEN - len(chat.prompt) // 4
    assert completion.max_tokens == 16
    assert chat.eos_ids == (EOS,)


def test_completions_of_every_kind_of_prompt(rig: Rig) -> None:
    for prompt, expected in [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        (ids_of("ab"), ["ab"]),
        ([ids_of("ab"), ids_of("c")], ["ab", "c"]),
    ]:
        rig.decode.generates.clear()
        answer = rig.post(COMPLETIONS, {"prompt": prompt, "n": 2}).json()
        got = [unpack_tokens(generate.prompt) for generate in rig.decode.generates]
        assert got == [ids_of(text) for text in expected]
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
        assert [c["text"] for c in answer["choices"]] == ["Hello 0", "Hello 1"] * len(expected)
        usage = answer["usage"]
        assert usage["prompt_tokens"] == sum(map(len, expected))
        assert usage["completion_tokens"] == 16 * len(expected)


def test_n_choices_count_the_prompt_once(rig: Rig) -> None:
    answer = rig.chat(n=3).json()
    contents = [choice["message"]["content"] for choice in answer["choices"]]
    assert contents == ["Hello 0", "Hello 1", "Hello 2"]
    assert answer["usage"]["completion_tokens"] == 24


def test_logprobs_add_up_to_the_content(rig: Rig) -> None:
    forced = [*ids_of("a😀b"), EOS]
    choice = rig.chat(logprobs=True, top_logprobs=2, kvferry_force_ids=forced).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "a😀b"
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * 6
    legacy = rig.post(
        COMPLETIONS, {"prompt": "x", "logprobs": 1, "kvferry_force_ids": forced}
    ).json()["choices"][0]["logprobs"]
    assert legacy["tokens"] == [
        "a",
        "bytes:\\xf0",
        "bytes:\\x9f",
        "bytes:\\x98",
        "bytes:\\x80",
        "b",
    ]
    assert legacy["token_logprobs"] == [-0.5] * 6


def test_returned_ids_are_all_that_count(rig: Rig) -> None:
    forced = [*ids_of("ab"), EOS]
    body = {"prompt": "xy", "kvferry_force_ids": forced, "return_token_ids": True}
    choice = rig.post(COMPLETIONS, body).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids_of("xy"), forced)
    chunks = events(rig.post(COMPLETIONS, body | {"stream": True}))
    assert [t for chunk in chunks for t in chunk["choices"][0]["token_ids"]] == forced


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


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.C6
@pytest.mark.parametrize("stream", [False, True])
def test_bad_values_are_refused_before_any_compute(rig: Rig, stream: bool) -> None:
    response = rig.chat(stream=stream, temperature=9)
    assert response.status_code == 400
    assert error_of(response)["param"] == "temperature"
    assert rig.decode.generates == []
    assert rig.chat().status_code == 200


@pytest.mark.C5
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("over", [0, 1, 44, 400 * MAX_MODEL_LEN])
def test_over_length(rig: Rig, over: int, stream: bool) -> None:
    size = MAX_MODEL_LEN + over
    response = rig.post(COMPLETIONS, {"prompt": "x" * size, "stream": stream})
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in error["message"]
    assert str(size) in error["message"]
    assert rig.decode.generates == []


@pytest.mark.C5
def test_room_for_one_token_is_enough(rig: Rig) -> None:
    body = {"prompt": "x" * (MAX_MODEL_LEN - 1)}
    assert rig.post(COMPLETIONS, body).json()["usage"]["completion_tokens"] == 1
    response = rig.post(COMPLETIONS, body | {"max_tokens": 2})
    assert (response.status_code, error_of(response)["param"]) == (400, "prompt")
    assert f"{MAX_MODEL_LEN + 1} tokens" in error_of(response)["message"]


@pytest.mark.C6
@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", 1], [5000], [-1]])
def test_prompts_without_meaning(rig: Rig, prompt: object) -> None:
    response = rig.post(COMPLETIONS, {"prompt": prompt})
    assert response.status_code == 400
    assert error_of(response)["param"] == "prompt"


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({"content-type": "text/plain"}, b"{}", 415),
        ({"content-type": "application/x-www-form-urlencoded"}, b"a=b", 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, b"", 415),
        ({"content-type": "application/json; charset=utf-8"}, b"{", 400),
        ({}, b'{"messages": []}', 400),
    ],
)
def test_bodies(rig: Rig, headers: dict[str, str], content: bytes, status: int) -> None:
    response = web.post(rig.url + CHAT, content=content, headers=headers, timeout=20)
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.C5
@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies(tmp_path: Path, chunked: bool) -> None:
    with running(tmp_path / "m", max_request_bytes=1000) as rig:
        content = (b"x" * 100 for _ in range(30)) if chunked else b"x" * 3000
        headers = {"content-type": "application/json"}
        response = web.post(rig.url + CHAT, content=content, headers=headers, timeout=20)
        assert response.status_code == 413
        assert "1000 bytes" in error_of(response)["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status"),
    [("server_overloaded", 503), ("shutting_down", 503), ("engine_error", 500),
     ("deadline_exceeded", 503), ("context_length_exceeded", 400)],
)  # fmt: skip
def test_a_nodes_refusal_is_a_status(rig: Rig, code: str, status: int, stream: bool) -> None:
    rig.decode.does.reject = code
    response = rig.chat(stream=stream)
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    if status == 503:
        assert 1 <= int(response.headers["retry-after"]) <= 30


def test_every_path_and_method_answers_json(rig: Rig) -> None:
    for method, path, status in [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/v1/messages", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
        ("POST", "/v1/responses", 501),
        ("POST", "/v1/messages", 501),
        ("POST", "/v1/embeddings", 501),
        ("GET", "/debug/ledger", 401),
        ("GET", "/v1/models/", 404),
    ]:
        response = web.request(method, rig.url + path, timeout=20)
        assert response.status_code == status, path
        error = error_of(response)
        assert (error["type"] == "invalid_request_error") == (status < 500)


def test_unknown_model(rig: Rig) -> None:
    response = rig.chat(model="gpt-4")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


def test_request_ids(rig: Rig) -> None:
    for path in ("/health", "/nowhere"):
        own = rig.get(path).headers
        assert own["x-request-id"] == own["request-id"] != ""
        assert rig.get(path, headers={"x-request-id": "a.b-1"}).headers["x-request-id"] == "a.b-1"
        for odd in ("a b", "x" * 200, "é".encode()):
            assert rig.get(path, headers={"x-request-id": odd}).headers["x-request-id"] != odd


# -- small paths -----------------------------------------------------------------------------------


def test_models(rig: Rig) -> None:
    (card,) = rig.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("standin", MAX_MODEL_LEN)
    assert rig.get("/v1/models/standin").json() == card


def test_probes(rig: Rig) -> None:
    for path in ("/", "/health", "/ready", "/readyz", "/metrics", "/version"):
        assert rig.get(path).status_code == 200
        head = httpx.head(rig.url + path, timeout=20)
        assert (head.status_code, head.content) == (200, b"")
    assert rig.get("/ready").json() == {"status": "ready", "absent": []}


def test_tokenize_and_back(rig: Rig) -> None:
    answer = rig.post("/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert answer["tokens"] == ids_of("hé")
    assert (answer["count"], answer["max_model_len"]) == (3, MAX_MODEL_LEN)
    assert rig.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "hé"}
    chat = rig.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()
    rig.chat()
    rig.chat(messages=[{"role": "user", "content": "x"}])
    assert unpack_tokens(rig.decode.generates[-1].prompt) == chat["tokens"]
    assert rig.post("/detokenize", {"tokens": [-1]}).status_code == 400
    assert rig.post("/tokenize", {}).status_code == 400


def test_metrics_count_what_happened(rig: Rig) -> None:
    def value(series: str) -> float:
        lines = rig.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(series))

    names = (
        'kvferry_request_success_total{finished_reason="stop"',
        "kvferry_generation_tokens_total",
        'kvferry_prompt_tokens_by_source_total{model_name="standin",source="device"}',
        "kvferry_time_to_first_token_seconds_count",
        "kvferry_inter_token_latency_seconds_count",
        'kvferry_request_failure_total{code="model_not_found"',
    )
    before = [value(name) for name in names]
    rig.decode.does.cached = 16
    rig.chat()
    rig.chat(model="other")
    assert [value(name) for name in names] == [
        then + more for then, more in zip(before, (1, 8, 16, 1, 7, 1), strict=True)
    ]
    rig.decode.say(Load(3, 4, 16, 8, 64, False, {"preemptions": 5.0, "steps": 9.0}))
    wait_until(lambda: value("kvferry_num_requests_running") == 3)
    assert value("kvferry_num_requests_waiting") == 4
    assert value("kvferry_kv_cache_usage_perc") == 0.25
    assert value("kvferry_num_preemptions_total") == 5
    assert value("kvferry_node_steps_total") == 9


# -- keys ------------------------------------------------------------------------------------------


def test_keys(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "api_key": ("alice=s1", "s2"),
        "admin_api_key": "root",
        "enable_debug": True,
    }
    with running(tmp_path / "m", **settings) as rig:
        refused = rig.get("/v1/models")
        assert (refused.status_code, error_of(refused)["code"]) == (401, "invalid_api_key")
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.headers["x-request-id"]
        assert rig.get("/anything").status_code == 401
        assert rig.get("/health").status_code == 200
        roots = []
        for headers in ({"authorization": "Bearer s1"}, {"x-api-key": "s2"}):
            rig.post(COMPLETIONS, {"prompt": "x", "user": "bob"}, headers=headers)
            roots.append(rig.decode.generates[-1].root)
        assert roots == [root_key({"weights": "w"}, name, None) for name in ("alice", "default")]
        assert rig.get("/debug/ledger", headers={"x-api-key": "s2"}).status_code == 401
        ledger = rig.get("/debug/ledger", headers={"x-api-key": "root"})
        assert ledger.json()["gateway"]["links"][0]["state"] == "usable"


# -- clients that leave ----------------------------------------------------------------------------


def raw_request(rig: Rig, **fields: Any) -> socket.socket:
    """A request whose connection the test holds in its hand."""
    body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True} | fields
    content = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", rig.port))
    connection.sendall(head.encode() + content)
    return connection


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


# -- nodes that die --------------------------------------------------------------------------------


@pytest.mark.C7
@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_node_ends_the_answer_with_one_error(tmp_path: Path, stream: bool) -> None:
    with running(tmp_path / "m") as rig:
        rig.decode.does.pace = 0.01
        connection = raw_request(rig, stream=stream)
        wait_until(lambda: bool(rig.decode.generates))
        got = connection.recv(1 << 16) if stream else b""
        rig.decode.close()
        connection.settimeout(4)
        while piece := connection.recv(1 << 16):
            got += piece
            if not stream and b"}}" in got:
                break
        connection.close()
        text = got.decode()
        assert text.count('{"error":') == 1
        assert ('"code":"engine_lost"' if stream else '"code":"engine_unavailable"') in text
        assert "[DONE]" not in text and '"finish_reason":"stop"' not in text
        assert text.startswith("HTTP/1.1 200" if stream else "HTTP/1.1 503")
        if stream:
            assert not text.endswith("0\r\n\r\n"), "a clean end looks like success"


@pytest.mark.D1
def test_readiness_follows_the_decode_node(tmp_path: Path) -> None:
    with running(tmp_path / "m") as rig:
        rig.decode.close()
        wait_until(lambda: rig.get("/ready").status_code == 503)
        assert rig.get("/health").status_code == 200
        refused = rig.chat()
        assert (refused.status_code, error_of(refused)["code"]) == (503, "engine_unavailable")
        assert int(refused.headers["retry-after"]) <= 60
        back = FakeDecode(rig.decode.address)
        try:
            wait_until(lambda: rig.get("/ready").status_code == 200)
            assert rig.chat().status_code == 200
        finally:
            back.close()


@pytest.mark.D1
def test_before_the_first_node_answers_the_model_is_loading(tmp_path: Path) -> None:
    with running(tmp_path / "m", decode_node=("tcp://127.0.0.1:9",), wait=False) as rig:
        assert rig.get("/health").status_code == 200
        for refused in (rig.get("/ready"), rig.chat(), rig.chat(stream=True)):
            assert (refused.status_code, error_of(refused)["code"]) == (503, "model_loading")
            assert int(refused.headers["retry-after"]) <= 60
        assert rig.get("/v1/models").json()["data"][0]["max_model_len"] is None


@pytest.mark.D1
def test_a_prefill_node_is_named_while_it_is_there(tmp_path: Path) -> None:
    prefill = FakeDecode(role="prefill")
    with running(tmp_path / "m", prefill_node=(prefill.address,)) as rig:
        wait_until(lambda: rig.get("/ready").json()["status"] == "ready")
        rig.chat()
        assert rig.decode.generates[-1].prefill_nodes == (prefill.address,)
        prefill.close()
        wait_until(lambda: rig.get("/ready").json()["status"] == "degraded")
        assert rig.chat().status_code == 200
        assert not rig.decode.generates[-1].prefill_nodes


def test_a_node_of_another_role_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = FakeDecode()
    with running(tmp_path / "m", first, prefill_node=(first.address,), wait=False) as rig:
        wait_until(lambda: "is not used: it is a decode node" in caplog.text)
        (node,) = rig.gateway.nodes.prefill
        assert not node.usable and not node.able


def test_nodes_that_differ_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, other = FakeDecode(), FakeDecode(weights="v")
    addresses = (first.address, other.address)
    try:
        with running(tmp_path / "m", first, decode_node=addresses) as rig:
            wait_until(lambda: "is not used: weights differs" in caplog.text)
            usable = [node for node in rig.gateway.nodes if node.usable]
            assert len(usable) == 1
            assert rig.get("/ready").json()["status"] == "degraded"
            assert rig.chat().status_code == 200
    finally:
        other.close()


def test_a_node_with_another_tokenizer_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = FakeDecode(), FakeDecode(tokenizer="another")
    try:
        with running(tmp_path / "m", first, decode_node=(first.address, other.address)) as rig:
            wait_until(lambda: "its tokenizer is 'another'" in caplog.text)
            assert [node.usable for node in rig.gateway.nodes.decode] == [True, False]
    finally:
        other.close()


# -- load and the end ------------------------------------------------------------------------------


@pytest.mark.D11
def test_too_many_waiting_requests_are_refused_at_once(tmp_path: Path) -> None:
    with running(tmp_path / "m", max_num_queued_reqs=2) as rig:
        rig.decode.does.hold = True
        accepted = 2 + rig.gateway.nodes.slots
        waiting = [raw_request(rig) for _ in range(accepted)]
        wait_until(lambda: len(rig.decode.generates) == accepted)
        refused = rig.chat()
        assert (refused.status_code, error_of(refused)["code"]) == (503, "server_overloaded")
        for connection in waiting:
            connection.close()
        wait_until(rig.idle)
        rig.decode.does.hold = False
        assert rig.chat().status_code == 200


def test_metrics_cannot_fail_a_request(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(reason: str) -> None:
        raise RuntimeError(reason)

    monkeypatch.setattr(rig.gateway.metrics, "_success", broken)
    assert rig.chat().status_code == 200
