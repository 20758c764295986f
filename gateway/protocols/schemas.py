"""The bodies that clients send, as types; and how a body that does not fit is refused.

Owns the shape of requests only: which fields there are and of which JSON type. Every optional field
accepts null, which means the same as absent. Unknown fields are ignored; known fields that would
silently change the answer if ignored are listed here as `refused` so that they can be named. What
values make sense together is for `parameters`, and nothing here knows a model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvferry.gateway.errors import BadRequest
from kvferry.gateway.prompt.messages import Message

Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


def _hint(**schema: Any) -> Meta:
    """What the OpenAPI document says of values; they are checked elsewhere, with better words."""
    return Meta(extra_json_schema=schema)


Some = Annotated[int, _hint(minimum=1)]
Choices = Annotated[int, _hint(minimum=1, maximum=128)]
Share = Annotated[float, _hint(minimum=0, maximum=1)]
Penalty = Annotated[float, _hint(minimum=-2, maximum=2)]
Repetition = Annotated[float, _hint(exclusiveMinimum=0, maximum=100)]
Alternatives = Annotated[int, _hint(minimum=0, maximum=20)]
TokenId = Annotated[int, _hint(minimum=0)]
BlockKey = Annotated[str, _hint(pattern="^[0-9a-f]{32}$")]
T = TypeVar("T")


# -- options ---------------------------------------------------------------------------------------


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(Struct, frozen=True):
    type: Annotated[str, _hint(enum=["text", "json_object", "json_schema"])]


class ToolFunction(Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Struct, frozen=True):
    type: str
    function: ToolFunction | None = None


class Options(Struct, frozen=True, kw_only=True):
    """What chat completions and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    max_tokens: Some | None = None
    min_tokens: Annotated[int, _hint(minimum=0)] | None = None
    temperature: Annotated[float, _hint(minimum=0, maximum=2)] | None = None
    top_p: Annotated[float, _hint(exclusiveMinimum=0, maximum=1)] | None = None
    top_k: Annotated[int, _hint(minimum=-1)] | None = None
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
    priority: Annotated[int, _hint(minimum=-100, maximum=100)] | None = None
    cache_salt: Annotated[str, _hint(minLength=1)] | None = None
    response_format: ResponseFormat | None = None
    kvferry_force_ids: list[int] | None = None

    # Hints for routing: they count if they are texts.
    prompt_cache_key: Any = None
    session_id: Any = None

    # Refused by name, because to ignore them would change the answer.
    allowed_token_ids: Any = None
    bad_words: Any = None
    best_of: Any = None
    chat_template: Any = None
    custom_logit_processor: Any = None
    documents: Any = None
    ebnf: Any = None
    grammar: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    json_schema: Any = None
    logits_processors: Any = None
    logprob_token_ids: Any = None
    lora: Any = None
    lora_path: Any = None
    mm_processor_kwargs: Any = None
    moderation: Any = None
    no_stop_trim: Any = None
    prediction: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    regex: Any = None
    stop_regex: Any = None
    return_tokens_as_token_ids: Any = None
    structured_outputs: Any = None
    thinking: Any = None
    thinking_token_budget: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None


class ChatRequest(Options, frozen=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: Some | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[ToolFunction] | None = None
    function_call: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    audio: Any = None
    echo: Any = None
    modalities: list[str] | None = None
    web_search_options: Any = None


class CompletionRequest(Options, frozen=True, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Alternatives | None = None
    echo: bool | None = None

    suffix: Any = None


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """Of a text, or of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


class CacheChain(Struct, frozen=True, kw_only=True):
    """The blocks of one prompt: the fields of a chat or completions request beside these."""

    tenant: str | None = None
    """Whose prompt it is: the name of an API key."""
    keys: list[BlockKey] | None = None
    """The blocks themselves, from the first one on, in place of a prompt."""
    ttl: float | None = None
    """Seconds: how long a pin lasts, or a prefetch may take."""


class CacheClear(Struct, frozen=True, kw_only=True):
    """The body of `POST /admin/cache/clear`."""

    tenant: str | None = None
    all: bool | None = None
    tiers: list[Literal["device", "store"]] | None = None
    """Those that forget; everything otherwise. `store` is memory and disk."""


# -- decoding --------------------------------------------------------------------------------------


def decode(body: bytes | bytearray, kind: type[T]) -> T:
    """A body as a request.

    Raises
    ------
    BadRequest
        The body is not JSON, or not of this shape; `param` is the path of the culprit.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _misfit(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"The body is not valid JSON: {str(error)[:200]}") from error
    except RecursionError as error:
        raise BadRequest("The body is nested too deeply.") from error


def _misfit(text: str) -> BadRequest:
    """msgspec says `what - at `$.path``; a missing field it names in the text."""
    what, _, path = text.partition(" - at `")
    place = path.rstrip("`").removeprefix("$").removeprefix(".")
    if what.startswith("Object missing required field"):
        field = what.split("`")[1]
        place = f"{place}.{field}" if place else field
    where = f"{place[:200]}: " if place else ""
    return BadRequest(f"{where}{what[:300]}", param=place[:200] or None)
