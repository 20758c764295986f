"""The HTTP API over real sockets, in front of a decode node that says what the test wants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.kvstore.keys import chain, root_key, unpack_tokens
from kvferry.kvstore.wire.status import Status
from kvferry.tests.rigs.gateway import web
from kvferry.tests.rigs.gateway.api import CHAT, COMPLETIONS, error_of, events, text_of
from kvferry.tests.rigs.gateway.rig import (
    BYTE,
    EOS,
    MAX_MODEL_LEN,
    Rig,
    ids_of,
    running,
    wait_until,
)

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
    rig.decode.say(Status(3, 4, 16, 8, 64, False, {"preemptions": 5.0, "steps": 9.0}))
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
        own = ledger.json()["gateway"]
        assert own["links"][0]["state"] == "usable"
        assert own["remembered_bytes"] == rig.gateway.last_prompts.bytes > 0
