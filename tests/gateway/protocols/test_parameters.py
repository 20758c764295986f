"""Every parameter is in one of three classes, the documentation says which, and it is true."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from kvferry.gateway.params import Params, Vocabulary
from kvferry.gateway.protocols.chat import CHECKED_AND_IGNORED, ChatRequest, read_chat
from kvferry.gateway.protocols.common import decode, refused_fields
from kvferry.gateway.protocols.completions import CompletionRequest, read_completion
from kvferry.gateway.protocols.options import IGNORED

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
VOCABULARY = Vocabulary(1000, {})
MESSAGES = [{"role": "user", "content": "hi"}]
CHAT_FIELDS = set(ChatRequest.__struct_fields__)
COMPLETION_FIELDS = set(CompletionRequest.__struct_fields__)
LATER = {"structured_outputs"}
"""Refused as features to come."""
REFUSED = {*refused_fields(ChatRequest), *refused_fields(CompletionRequest), *LATER}
KNOWN = """
    messages model temperature top_p top_k min_p repetition_penalty frequency_penalty
    presence_penalty seed n best_of max_tokens max_completion_tokens min_tokens ignore_eos stop
    stop_token_ids stop_regex include_stop_str_in_output no_stop_trim logprobs top_logprobs
    logprob_token_ids allowed_token_ids bad_words prompt_logprobs echo logit_bias response_format
    structured_outputs regex ebnf grammar json_schema guided_json tools tool_choice
    parallel_tool_calls reasoning_effort chat_template_kwargs thinking_token_budget thinking
    add_generation_prompt continue_final_message add_special_tokens truncate_prompt_tokens stream
    stream_options stream_interval user metadata store safety_identifier service_tier verbosity
    prediction moderation modalities audio web_search_options prompt_cache_retention
    prompt_cache_key prompt_cache_options cache_salt priority session_id conversation_params
    request_id rid kv_transfer_params disaggregated_params return_token_ids
    return_prompt_token_ids lora lora_path chat_template documents mm_processor_kwargs prompt
    suffix prompt_embeds functions function_call repeat_penalty skip_special_tokens
"""
"""What clients of OpenAI, vLLM, SGLang, llama-server and TensorRT-LLM send."""


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def names(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


def honoured() -> set[str]:
    rows = [line for line in section("Honoured").splitlines() if line.startswith("| `")]
    return set().union(*(names(row.split("|")[1]) for row in rows))


def read(path: str, **fields: Any) -> Params:
    """Parameters with a fixed seed."""
    if path == "chat":
        body = orjson.dumps({"messages": MESSAGES, "seed": 1} | fields)
        return read_chat(decode(body, ChatRequest), VOCABULARY, test_hooks=True)
    body = orjson.dumps({"prompt": "hi", "seed": 1} | fields)
    return read_completion(decode(body, CompletionRequest), VOCABULARY, test_hooks=True)


def test_the_documented_lists_are_the_codes() -> None:
    checked, _, anything = section("Accepted and ignored").partition("These may hold anything:")
    assert set(re.findall(r"`(\w+)`", checked.partition("total`:")[2])) == {*CHECKED_AND_IGNORED}
    assert names(anything.partition("\n\n")[0]) == set(IGNORED)
    listed = names(section("Refused").partition("empty.")[2]) - {"n"}
    assert listed == REFUSED
    taken = (CHAT_FIELDS | COMPLETION_FIELDS) - REFUSED - {*CHECKED_AND_IGNORED}
    assert honoured() == taken | {"echo"}


def test_every_known_parameter_is_in_one_class() -> None:
    classes = (honoured(), {*IGNORED, *CHECKED_AND_IGNORED}, REFUSED - {"echo"})
    for name in KNOWN.split():
        assert sum(name in names for names in classes) == 1, name


def test_what_is_ignored_is_not_even_decoded() -> None:
    assert not {*IGNORED} & (CHAT_FIELDS | COMPLETION_FIELDS)
    for path in ("chat", "completion"):
        odds: list[Any] = [[7], {"a": {}}, "x", -1, True]
        for odd in odds:
            assert read(path, **dict.fromkeys(IGNORED, odd)) == read(path)


EFFECTS: dict[str, Any] = {
    "cache_salt": "s", "frequency_penalty": 1, "ignore_eos": True, "kvferry_force_ids": [5],
    "logit_bias": {"3": 1}, "max_tokens": 7, "min_p": 0.5, "min_tokens": 2, "n": 2,
    "presence_penalty": 1, "priority": 3, "repeat_penalty": 2, "repetition_penalty": 2,
    "return_prompt_token_ids": True, "return_token_ids": True, "seed": 9,
    "skip_special_tokens": False, "stop": "x", "stop_token_ids": [4], "stream": True,
    "temperature": 0.5, "top_k": 3, "top_p": 0.5, "include_stop_str_in_output": True,
}  # fmt: skip
"""A value of every parameter that both APIs have, other than its default."""
CHAT_EFFECTS = EFFECTS | {"max_completion_tokens": 7, "logprobs": True}
COMPLETION_EFFECTS = EFFECTS | {"echo": True, "logprobs": 1}
ELSEWHERE = {
    "add_generation_prompt", "add_special_tokens", "chat_template_kwargs", "continue_final_message",
    "function_call", "messages", "modalities", "model", "prompt", "reasoning_effort",
    "prompt_cache_key", "response_format", "session_id", "stream_options", "tool_choice",
    "top_logprobs",
}  # fmt: skip
"""What takes two to have an effect, has one on the prompt, or has only harmless values."""


def test_every_honoured_parameter_is_tried() -> None:
    assert {*CHAT_EFFECTS, *COMPLETION_EFFECTS} | ELSEWHERE == honoured()


@pytest.mark.parametrize("path", ["chat", "completion"])
@pytest.mark.parametrize("name", sorted({*CHAT_EFFECTS, *COMPLETION_EFFECTS}))
def test_what_is_honoured_has_an_effect(path: str, name: str) -> None:
    effects = CHAT_EFFECTS if path == "chat" else COMPLETION_EFFECTS
    if name in effects:
        assert read(path, **{name: effects[name]}) != read(path)
        assert read(path, **{name: None}) == read(path) or name == "seed"


def test_effects_of_pairs() -> None:
    plain = read("chat", stream=True)
    usage = read("chat", stream=True, stream_options={"include_usage": True})
    assert usage == replace(plain, include_usage=True)
    steady = read("chat", stream=True, stream_options={"continuous_usage_stats": True})
    assert steady == replace(plain, continuous_usage=True)
    silent = read("chat", stream=True, stream_options={"include_obfuscation": True})
    assert silent == plain
    both = read("chat", repetition_penalty=3, repeat_penalty=2)
    assert both.sampling.repetition_penalty == 3
    assert read("chat", logprobs=True, top_logprobs=2).sampling.logprobs == 2
