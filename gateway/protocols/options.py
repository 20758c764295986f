"""What a request for text may ask, whichever API it comes by, checked as far as values can tell.

Owns the three classes of parameters: honoured, accepted and ignored, refused by name. Every
optional field accepts null, which means the same as absent; unknown fields are ignored. The result
is one form for all APIs in which every default is filled in, the seed included, so that a request
means the same on every node that ever works on it. It knows the model's vocabulary and defaults,
but no prompt: what depends on its length is for `prompts`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from kvferry.gateway.errors import BadRequest, NotSupported
from kvferry.gateway.params import MAX_CHOICES, OutputRules, Params, Vocabulary
from kvferry.gateway.protocols.common import Refused, TokenId, hint, refused_fields
from kvferry.kvstore.wire.generation import Sampling

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 4096
MAX_STOP_TOKEN_IDS = 1024
MAX_TOP_LOGPROBS = 20
_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""What is drawn from the logits as they are, if neither the client nor the author says more."""

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

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Some = Annotated[int, hint(minimum=1)]
Choices = Annotated[int, hint(minimum=1, maximum=MAX_CHOICES)]
Share = Annotated[float, hint(minimum=0, maximum=1)]
Penalty = Annotated[float, hint(minimum=-2, maximum=2)]
Repetition = Annotated[float, hint(exclusiveMinimum=0, maximum=100)]
Alternatives = Annotated[int, hint(minimum=0, maximum=MAX_TOP_LOGPROBS)]


# -- fields ----------------------------------------------------------------------------------------


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(Struct, frozen=True):
    type: Annotated[str, hint(enum=["text", "json_object", "json_schema"])]


class Options(Struct, frozen=True, kw_only=True):
    """What chat completions and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    max_tokens: Some | None = None
    min_tokens: Annotated[int, hint(minimum=0)] | None = None
    temperature: Annotated[float, hint(minimum=0, maximum=2)] | None = None
    top_p: Annotated[float, hint(exclusiveMinimum=0, maximum=1)] | None = None
    top_k: Annotated[int, hint(minimum=-1)] | None = None
    min_p: Share | None = None
    repetition_penalty: Repetition | None = None
    repeat_penalty: Repetition | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    priority: Annotated[int, hint(minimum=-100, maximum=100)] | None = None
    cache_salt: Annotated[str, hint(minLength=1)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Any = None
    kvferry_force_ids: list[int] | None = None

    # Hints for routing: they count if they are texts.
    prompt_cache_key: Any = None
    session_id: Any = None

    # Refused by name, because to ignore them would change the answer.
    allowed_token_ids: Refused = None
    bad_words: Refused = None
    best_of: Refused = None
    chat_template: Refused = None
    custom_logit_processor: Refused = None
    documents: Refused = None
    ebnf: Refused = None
    grammar: Refused = None
    guided_choice: Refused = None
    guided_grammar: Refused = None
    guided_json: Refused = None
    guided_regex: Refused = None
    json_schema: Refused = None
    logits_processors: Refused = None
    logprob_token_ids: Refused = None
    lora: Refused = None
    lora_path: Refused = None
    mm_processor_kwargs: Refused = None
    moderation: Refused = None
    no_stop_trim: Refused = None
    prediction: Refused = None
    prompt_embeds: Refused = None
    prompt_logprobs: Refused = None
    regex: Refused = None
    return_tokens_as_token_ids: Refused = None
    stop_regex: Refused = None
    thinking: Refused = None
    thinking_token_budget: Refused = None
    truncate_prompt_tokens: Refused = None
    use_beam_search: Refused = None

    @property
    def session(self) -> str:
        """What the request calls its conversation, the better name first; "" without one."""
        names = (self.prompt_cache_key, self.session_id)
        return next((name for name in names if isinstance(name, str) and name), "")


# -- reading ---------------------------------------------------------------------------------------


def read_options(
    request: Options,
    vocabulary: Vocabulary,
    *,
    test_hooks: bool,
    logprobs: int | None,
    max_tokens: int | None,
    max_tokens_name: str = "max_tokens",
    default_max_tokens: int | None = None,
    echo: bool = False,
) -> Params:
    """A request's parameters; BadRequest or NotSupported names the first that is wrong.

    What the APIs name differently is given beside the request: `logprobs` is how many alternatives
    each token shall have, None for no logprobs at all.
    """
    n = 1 if request.n is None else request.n
    check_within("n", n, 1, MAX_CHOICES)
    _check_supported(request, n, test_hooks)
    if max_tokens is not None:
        check_within(max_tokens_name, max_tokens, 1, 2**31)
    options = request.stream_options
    if options is not None and not request.stream:
        raise BadRequest("stream_options needs stream to be true.", param="stream_options")
    if request.cache_salt == "":
        raise BadRequest("cache_salt must not be empty.", param="cache_salt")
    priority = request.priority or 0
    check_within("priority", priority, -100, 100)
    stop_token_ids = request.stop_token_ids or ()
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise BadRequest(
            f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids.", param="stop_token_ids"
        )
    return Params(
        n=n,
        max_tokens=max_tokens,
        default_max_tokens=default_max_tokens,
        rules=_rules(request, max_tokens),
        sampling=_sampling(request, vocabulary, logprobs),
        seed=secrets.randbits(63) if request.seed is None else request.seed,
        stop_token_ids=_ids("stop_token_ids", stop_token_ids, vocabulary.size),
        ignore_eos=bool(request.ignore_eos),
        priority=priority,
        cache_salt=request.cache_salt,
        forced=_ids("kvferry_force_ids", request.kvferry_force_ids or (), vocabulary.size),
        return_token_ids=bool(request.return_token_ids),
        return_prompt_token_ids=bool(request.return_token_ids or request.return_prompt_token_ids),
        echo=echo,
        stream=bool(request.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
    )


def check_own_fields(request: Options) -> None:
    """BadRequest for a refused field that only this API has; `read_options` sees to all others.

    It comes first, so that of several faults of a request the same one is named by every version.
    """
    own = set(refused_fields(type(request))) - set(refused_fields(Options))
    _refuse(request, sorted(own))


def _refuse(request: Options, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(request, name)
        if not (value is None or value is False or value in ("", [], {})):
            raise BadRequest(
                f"{name} is not supported by this server, and ignoring it would change the answer.",
                param=name,
                code="unsupported_parameter",
            )


def _check_supported(request: Options, n: int, test_hooks: bool) -> None:
    # `best_of` like `n`: so many are made, and all of them are answered.
    harmless = ("best_of",) if request.best_of == n else ()
    _refuse(request, (name for name in refused_fields(Options) if name not in harmless))
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


def check_within(name: str, value: float, low: float, high: float) -> None:
    """BadRequest unless a value is in its range."""
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
    asked = {name: value for name in _NEUTRAL if (value := getattr(request, name)) is not None}
    values = _NEUTRAL | dict(vocabulary.defaults) | asked
    temperature, top_p = values["temperature"], values["top_p"]
    top_k, min_p = int(values["top_k"]), values["min_p"]
    penalty, repetition = "repetition_penalty", values["repetition_penalty"]
    if request.repetition_penalty is None and request.repeat_penalty is not None:
        penalty, repetition = "repeat_penalty", request.repeat_penalty
    frequency = request.frequency_penalty or 0.0
    presence = request.presence_penalty or 0.0
    check_within("temperature", temperature, 0, 2)
    check_within("min_p", min_p, 0, 1)
    check_within("top_k", top_k, -1, 2**31)
    check_within("frequency_penalty", frequency, -2, 2)
    check_within("presence_penalty", presence, -2, 2)
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
        check_within("logit_bias", value, -100, 100)
        pairs.append((int(key), value))
    return tuple(sorted(pairs))


def _ids(name: str, ids: Sequence[int], vocabulary_size: int) -> tuple[int, ...]:
    if not all(0 <= token < vocabulary_size for token in ids):
        raise BadRequest(f"{name} must be token ids from 0 to {vocabulary_size - 1}.", param=name)
    return tuple(ids)
