"""Bodies and parameters: null is absent, nonsense is a 4xx that names it, defaults fill in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from kvferry.gateway.errors import ApiError, BadRequest, NotSupported
from kvferry.gateway.params import Params, Vocabulary
from kvferry.gateway.protocols.chat import ChatRequest, read_chat
from kvferry.gateway.protocols.common import decode, refused_fields
from kvferry.gateway.protocols.completions import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
    read_completion,
)

VOCABULARY = Vocabulary(1000, {"temperature": 0.6, "top_k": 20.0})
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Params:
    request = decode(orjson.dumps({"messages": MESSAGES} | fields), ChatRequest)
    return read_chat(request, VOCABULARY, test_hooks="hooks" in fields)


def completion(**fields: Any) -> Params:
    request = decode(orjson.dumps({"prompt": "hi"} | fields), CompletionRequest)
    return read_completion(request, VOCABULARY, test_hooks=False)


# -- bodies ----------------------------------------------------------------------------------------


@pytest.mark.C6
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [], "temperature": NaN}',
        b'{"messages": [], "temperature": 1e999}',
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": [], "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=["empty", "null", "list", "cut", "utf-16", "surrogate", "nan", "inf", "deep", "deeper",
         "deep-ignored"],
)  # fmt: skip
def test_bodies_that_are_no_request(body: bytes) -> None:
    with pytest.raises(BadRequest) as refused:
        decode(body, ChatRequest)
    assert len(refused.value.body()) < 4000


@pytest.mark.C6
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": 1}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
            "messages[0].content[0].type",
        ),
        ({"temperature": "hot"}, "temperature"),
        ({"n": True}, "n"),
        ({"stop": [1]}, "stop[0]"),
        ({"seed": 2**63}, "seed"),
        ({"logit_bias": {"1": "x"}}, "logit_bias[...]"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ],
)
def test_wrong_types_are_named_by_path(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        chat(**fields)
    assert refused.value.param == param


def test_errors_do_not_echo_what_was_sent() -> None:
    with pytest.raises(BadRequest) as refused:
        chat(**{"x" * 100: 1, "tool_choice": "y" * 100_000})
    assert len(refused.value.body()) < 4000


def test_null_is_absent() -> None:
    nothing = dict.fromkeys(ChatRequest.__struct_fields__) | {"messages": MESSAGES}
    given, absent = (
        chat(
            **nothing,
        ),
        chat(),
    )
    assert {name: getattr(given, name) for name in Params.__slots__ if name != "seed"} == {
        name: getattr(absent, name) for name in Params.__slots__ if name != "seed"
    }
    nothing = dict.fromkeys(CompletionRequest.__struct_fields__) | {"prompt": "hi"}
    assert completion(**nothing).max_tokens is None


def test_unknown_and_harmless_fields_are_ignored() -> None:
    ignored = chat(
        user="u", metadata={"a": "b"}, store=True, service_tier="auto", safety_identifier="x",
        verbosity="low", prompt_cache_key="k", kv_transfer_params={"do": 1}, whatever=[1],
        parallel_tool_calls=False, stream_interval=3,
    )  # fmt: skip
    assert replace(ignored, seed=0) == replace(chat(), seed=0)


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.C6
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 999_999),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", -1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("repeat_penalty", 0),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -3),
        ("n", 0),
        ("n", 129),
        ("max_tokens", 0),
        ("max_completion_tokens", -1),
        ("min_tokens", -1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", list("abcde")),
        ("stop_token_ids", [1000]),
        ("stop_token_ids", [-1]),
        ("logit_bias", {"1000": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1.5": 1}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {"1": 101}),
        ("top_logprobs", 3),
        ("stream_options", {"include_usage": True}),
        ("cache_salt", ""),
        ("priority", 10_000),
        ("kvferry_force_ids", [1]),
        ("modalities", ["text", "audio"]),
        ("tool_choice", "sometimes"),
    ],
)
def test_bad_values_are_named(name: str, value: object) -> None:
    with pytest.raises(BadRequest) as refused:
        chat(**{name: value})
    assert refused.value.param == name


def test_an_echo_has_no_logprobs() -> None:
    assert completion(echo=True).echo and not completion().echo
    with pytest.raises(BadRequest) as refused:
        completion(echo=True, logprobs=0)
    assert refused.value.param == "echo"


def test_limits_that_depend_on_each_other() -> None:
    with pytest.raises(BadRequest, match="min_tokens"):
        chat(max_tokens=3, min_tokens=4)
    with pytest.raises(BadRequest, match="top_logprobs"):
        chat(logprobs=True, top_logprobs=21)
    with pytest.raises(BadRequest, match="logprobs"):
        completion(logprobs=21)


IN_CHATS, IN_COMPLETIONS = refused_fields(ChatRequest), refused_fields(CompletionRequest)


@pytest.mark.parametrize("name", sorted({*IN_CHATS, *IN_COMPLETIONS}))
def test_what_would_change_the_answer_is_refused_by_name(name: str) -> None:
    for read, names in ((chat, IN_CHATS), (completion, IN_COMPLETIONS)):
        if name not in names:
            continue
        with pytest.raises(BadRequest) as refused:
            read(**{name: [7]})
        assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")
        read(**{name: None})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"audio": {"voice": "x"}, "tool_choice": "required"}, "audio"),
        ({"web_search_options": {"a": 1}, "n": 0}, "web_search_options"),
        ({"tool_choice": "required", "bad_words": ["x"]}, "tool_choice"),
        ({"top_logprobs": 99, "guided_json": {"a": 1}}, "top_logprobs"),
        ({"n": 0, "best_of": 3}, "n"),
        ({"best_of": 3, "bad_words": ["x"], "max_tokens": 0}, "bad_words"),
        ({"stop_regex": "x", "return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"prompt_logprobs": 1, "response_format": {"type": "json_object"}}, "prompt_logprobs"),
    ],
)
def test_of_several_faults_the_same_one_is_named_always(fields: dict[str, Any], named: str) -> None:
    with pytest.raises((BadRequest, NotSupported)) as refused:
        chat(**fields)
    assert refused.value.param == named


def test_harmless_spellings_of_refused_parameters_pass() -> None:
    completion(echo=False, suffix="", best_of=2, n=2, use_beam_search=False, bad_words=[])
    chat(echo=False, no_stop_trim=False)
    with pytest.raises(BadRequest):
        completion(best_of=2)
    with pytest.raises(BadRequest):
        completion(prompt_logprobs=0)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ],
)
def test_features_that_are_missing_say_so(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(NotSupported) as refused:
        chat(**fields)
    assert refused.value.param == param


def test_tools_are_accepted() -> None:
    function = {"type": "function", "function": {"name": "f", "parameters": {}}}
    chat(tools=[function, {"type": "web_search"}], tool_choice="auto")
    with pytest.raises(ApiError) as refused:
        chat(tools=[{"type": "function"}])
    assert refused.value.param == "tools[0].function"


# -- results ---------------------------------------------------------------------------------------


def test_defaults() -> None:
    params = chat()
    assert (params.n, params.max_tokens, params.default_max_tokens) == (1, None, None)
    assert (params.sampling.temperature, params.sampling.top_k) == (0.6, 20)
    assert params.sampling.logprobs is None
    assert chat(temperature=0, top_k=-1).sampling.temperature == 0
    assert chat(top_k=-1).sampling.top_k == 0
    assert completion().default_max_tokens == DEFAULT_MAX_TOKENS


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7


def test_seeds() -> None:
    assert chat(seed=-5).seed == -5
    assert chat().seed != chat().seed


def test_logprobs() -> None:
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).sampling.logprobs == 4
    assert chat(logprobs=False, top_logprobs=0).sampling.logprobs is None
    assert completion(logprobs=0).sampling.logprobs == 0


def test_the_rest_is_handed_on() -> None:
    params = chat(
        hooks=True, kvferry_force_ids=[3, 4], stop="x", include_stop_str_in_output=True,
        min_tokens=2, ignore_eos=True, stop_token_ids=[9], logit_bias={"7": -100, "3": 1},
        priority=-1, cache_salt="s", stream=True, return_token_ids=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )  # fmt: skip
    assert params.forced == (3, 4)
    assert (params.rules.stops, params.rules.include_stop, params.rules.min_tokens) == (
        ("x",), True, 2,
    )  # fmt: skip
    assert (params.ignore_eos, params.stop_token_ids) == (True, (9,))
    assert params.sampling.logit_bias == ((3, 1.0), (7, -100.0))
    assert (params.priority, params.cache_salt, params.return_token_ids) == (-1, "s", True)
    assert params.stream and params.include_usage and params.continuous_usage
