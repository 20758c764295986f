"""What a request asks for, checked as far as values alone can tell.

Owns the three classes of parameters: honoured, accepted and ignored, refused by name. The result is
one form for both APIs in which every default is filled in, the seed included, so that a request
means the same on every node that ever works on it. It knows the model's vocabulary and defaults,
but no prompt: what depends on its length is for `prompts`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

from kvferry.gateway.errors import BadRequest, NotSupported
from kvferry.gateway.params import MAX_CHOICES, OutputRules, Params, Vocabulary
from kvferry.gateway.protocols.schemas import ChatRequest, CompletionRequest, Options
from kvferry.kvstore.wire.generation import Sampling

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 4096
MAX_STOP_TOKEN_IDS = 1024
MAX_TOP_LOGPROBS = 20
COMPLETION_MAX_TOKENS = 16
"""What a completions request without max_tokens gets; a chat gets the room that is left."""

REFUSED = (
    "allowed_token_ids",
    "bad_words",
    "best_of",
    "chat_template",
    "custom_logit_processor",
    "documents",
    "ebnf",
    "grammar",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "json_schema",
    "logits_processors",
    "logprob_token_ids",
    "lora",
    "lora_path",
    "mm_processor_kwargs",
    "moderation",
    "no_stop_trim",
    "prediction",
    "prompt_embeds",
    "prompt_logprobs",
    "regex",
    "return_tokens_as_token_ids",
    "stop_regex",
    "thinking",
    "thinking_token_budget",
    "truncate_prompt_tokens",
    "use_beam_search",
)
"""What would change the answer, and is not there."""
REFUSED_IN_CHATS = ("audio", "echo", "web_search_options")
REFUSED_IN_COMPLETIONS = ("suffix",)
IGNORED = (
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "cache_prompt",
    "conversation_params",
    "data_parallel_rank",
    "disaggregated_params",
    "early_stopping",
    "id_slot",
    "include_reasoning",
    "kv_transfer_params",
    "length_penalty",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_options",
    "prompt_cache_retention",
    "request_id",
    "return_progress",
    "rid",
    "safety_identifier",
    "separate_reasoning",
    "service_tier",
    "spaces_between_special_tokens",
    "store",
    "stream_interval",
    "stream_reasoning",
    "timings_per_token",
    "user",
    "verbosity",
)
"""Known fields that change no answer here. Whatever they hold, it is not even decoded."""
CHECKED_AND_IGNORED = ("functions", "tools")
"""Fields that must be well formed, but that only the chat template sees, if at all."""


def read_chat(request: ChatRequest, vocabulary: Vocabulary, *, test_hooks: bool) -> Params:
    """A chat's parameters; BadRequest or NotSupported names the first that is wrong."""
    _check_refused(request, REFUSED_IN_CHATS)
    _check_tools(request)
    if "audio" in (request.modalities or ()):
        raise BadRequest("modalities: this model answers in text only.", param="modalities")
    top = request.top_logprobs
    if top is not None:
        _within("top_logprobs", top, 0, MAX_TOP_LOGPROBS)
        if top > 0 and not request.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    logprobs = (top or 0) if request.logprobs else None
    name, wanted = "max_completion_tokens", request.max_completion_tokens
    if wanted is None:
        name, wanted = "max_tokens", request.max_tokens
    return _read(request, vocabulary, test_hooks, logprobs, name, wanted, None)


def read_completion(
    request: CompletionRequest, vocabulary: Vocabulary, *, test_hooks: bool
) -> Params:
    """A completion's parameters; BadRequest or NotSupported names the first that is wrong."""
    _check_refused(request, REFUSED_IN_COMPLETIONS)
    if request.logprobs is not None:
        _within("logprobs", request.logprobs, 0, MAX_TOP_LOGPROBS)
        if request.echo:
            raise BadRequest(
                "echo with logprobs is not supported: a prompt's tokens have none.", param="echo"
            )
    return _read(
        request,
        vocabulary,
        test_hooks,
        request.logprobs,
        "max_tokens",
        request.max_tokens,
        COMPLETION_MAX_TOKENS,
    )


def _read(
    request: Options,
    vocabulary: Vocabulary,
    test_hooks: bool,
    logprobs: int | None,
    max_name: str,
    max_tokens: int | None,
    default_max_tokens: int | None,
) -> Params:
    n = 1 if request.n is None else request.n
    _within("n", n, 1, MAX_CHOICES)
    _check_common(request, n, test_hooks)
    if max_tokens is not None:
        _within(max_name, max_tokens, 1, 2**31)
    options = request.stream_options
    if options is not None and not request.stream:
        raise BadRequest("stream_options needs stream to be true.", param="stream_options")
    if request.cache_salt == "":
        raise BadRequest("cache_salt must not be empty.", param="cache_salt")
    priority = request.priority or 0
    _within("priority", priority, -100, 100)
    return Params(
        n=n,
        max_tokens=max_tokens,
        default_max_tokens=default_max_tokens,
        rules=_rules(request, max_tokens),
        sampling=_sampling(request, vocabulary, logprobs),
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        stop_token_ids=_stop_token_ids(request, vocabulary.size),
        ignore_eos=bool(request.ignore_eos),
        priority=priority,
        cache_salt=request.cache_salt,
        forced=_ids("kvferry_force_ids", request.kvferry_force_ids or (), vocabulary.size),
        return_token_ids=bool(request.return_token_ids),
        return_prompt_token_ids=bool(request.return_token_ids or request.return_prompt_token_ids),
        echo=isinstance(request, CompletionRequest) and bool(request.echo),
        stream=bool(request.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
    )


# -- refusals --------------------------------------------------------------------------------------


def _check_refused(request: Options, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(request, name)
        if not (value is None or value is False or value in ("", [], {})):
            raise BadRequest(
                f"{name} is not supported by this server, and ignoring it would change the answer.",
                param=name,
                code="unsupported_parameter",
            )


def _check_common(request: Options, n: int, test_hooks: bool) -> None:
    harmless = ("best_of",) if request.best_of == n else ()
    _check_refused(request, (name for name in REFUSED if name not in harmless))
    if request.structured_outputs:
        raise NotSupported("Structured output is not supported yet.", param="structured_outputs")
    form = request.response_format
    if form is not None and form.type != "text":
        if form.type in ("json_object", "json_schema"):
            raise NotSupported("Structured output is not supported yet.", param="response_format")
        raise BadRequest(
            "response_format.type must be 'text', 'json_object' or 'json_schema'.",
            param="response_format.type",
        )
    if request.kvferry_force_ids and not test_hooks:
        raise BadRequest(
            "kvferry_force_ids is a test hook, which this server was started without.",
            param="kvferry_force_ids",
        )


def _check_tools(request: ChatRequest) -> None:
    for at, tool in enumerate(request.tools or ()):
        if tool.type == "function" and tool.function is None:
            raise BadRequest(f"tools[{at}] has no function.", param=f"tools[{at}].function")
    for name in ("tool_choice", "function_call"):
        choice = getattr(request, name)
        if choice is None or choice in ("none", "auto"):
            continue
        if choice == "required" or isinstance(choice, dict):
            raise NotSupported("Tool calls cannot be forced yet.", param=name)
        raise BadRequest(f"{name} must be 'none' or 'auto'.", param=name)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise BadRequest(f"{name} must be between {low:g} and {high:g}.", param=name)


# -- parts -----------------------------------------------------------------------------------------


def _rules(request: Options, max_tokens: int | None) -> OutputRules:
    stop = request.stop
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"stop takes at most {MAX_STOPS} strings.", param="stop")
    if not all(0 < len(text) <= MAX_STOP_CHARACTERS for text in stops):
        raise BadRequest(
            f"stop strings must have 1 to {MAX_STOP_CHARACTERS} characters.", param="stop"
        )
    minimum = request.min_tokens or 0
    if minimum < 0 or (max_tokens is not None and minimum > max_tokens):
        raise BadRequest("min_tokens must be between 0 and max_tokens.", param="min_tokens")
    return OutputRules(
        stops=stops,
        include_stop=bool(request.include_stop_str_in_output),
        min_tokens=minimum,
        skip_special=request.skip_special_tokens is not False,
    )


def _sampling(request: Options, vocabulary: Vocabulary, logprobs: int | None) -> Sampling:
    def value(name: str, neutral: float) -> float:
        asked: float | None = getattr(request, name)
        return vocabulary.defaults.get(name, neutral) if asked is None else asked

    temperature, top_p = value("temperature", 1.0), value("top_p", 1.0)
    top_k, min_p = int(value("top_k", 0)), value("min_p", 0.0)
    penalty, repetition = "repetition_penalty", value("repetition_penalty", 1.0)
    if request.repetition_penalty is None and request.repeat_penalty is not None:
        penalty, repetition = "repeat_penalty", request.repeat_penalty
    frequency = request.frequency_penalty or 0.0
    presence = request.presence_penalty or 0.0
    _within("temperature", temperature, 0, 2)
    _within("min_p", min_p, 0, 1)
    _within("top_k", top_k, -1, 2**31)
    _within("frequency_penalty", frequency, -2, 2)
    _within("presence_penalty", presence, -2, 2)
    if not 0 < top_p <= 1:
        raise BadRequest("top_p must be above 0 and at most 1.", param="top_p")
    if not 0 < repetition <= 100:
        raise BadRequest(f"{penalty} must be above 0 and at most 100.", param=penalty)
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=max(0, top_k),
        min_p=min_p,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        logit_bias=_logit_bias(request.logit_bias or {}, vocabulary.size),
        logprobs=logprobs,
    )


def _logit_bias(bias: Mapping[str, float], vocabulary_size: int) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in bias.items():
        known = key.isascii() and key.isdigit() and len(key) < 10
        if not known or int(key) >= vocabulary_size:
            raise BadRequest(
                f"logit_bias keys must be token ids from 0 to {vocabulary_size - 1}.",
                param="logit_bias",
            )
        _within("logit_bias", value, -100, 100)
        pairs.append((int(key), value))
    return tuple(sorted(pairs))


def _stop_token_ids(request: Options, vocabulary_size: int) -> tuple[int, ...]:
    ids = request.stop_token_ids or ()
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise BadRequest(
            f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids.", param="stop_token_ids"
        )
    return _ids("stop_token_ids", ids, vocabulary_size)


def _ids(name: str, ids: tuple[int, ...] | list[int], vocabulary_size: int) -> tuple[int, ...]:
    if not all(0 <= token < vocabulary_size for token in ids):
        raise BadRequest(f"{name} must be token ids from 0 to {vocabulary_size - 1}.", param=name)
    return tuple(ids)
