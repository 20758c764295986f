"""The answers that clients get, as types.

Owns what is promised: answers are built as plain dicts where that is quick, and the document at
`/openapi.json` says these shapes of them. Tests hold the two together.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, defstruct

from kvferry.kvstore.wire.generation import SOURCES, STAGES

Count = Annotated[int, Meta(ge=0)]
Ids = list[Count] | UnsetType
Finish = Literal["stop", "length"]


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    """Every refusal and failure, on every path."""

    error: ErrorDetail


# -- what all answers share ------------------------------------------------------------------------


class CachedTokens(Struct):
    cached_tokens: Count


class Usage(Struct):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens


PromptTokens: Any = defstruct(
    "PromptTokens",
    [(source, Count) for source in SOURCES],
    namespace={"__doc__": "Where the prompt's KV came from."},
)
FirstToken: Any = defstruct(
    "FirstToken",
    [(stage, float) for stage in STAGES],
    namespace={"__doc__": "Milliseconds to the first token, by stage."},
)


class Timings(Struct):
    prompt_tokens: PromptTokens
    ttft_ms: FirstToken
    handoff_ms: float
    predicted_n: Count
    predicted_ms: float


class _Choice(Struct, kw_only=True):
    index: Count
    finish_reason: Finish
    stop_reason: str | int | None
    """The stop string or token, if one ended it."""
    token_ids: Ids = UNSET


class _Answer(Struct, kw_only=True):
    id: str
    created: int
    model: str
    usage: Usage
    timings: Timings


# -- chat completions ------------------------------------------------------------------------------


class Alternative(Struct):
    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]]


class ChatLogprob(Alternative):
    top_logprobs: list[Alternative]


class ChatLogprobs(Struct):
    content: list[ChatLogprob]
    refusal: None


class ChatMessage(Struct):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Choice, kw_only=True):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(_Answer, kw_only=True):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: Ids = UNSET


# -- completions -----------------------------------------------------------------------------------


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[Count]


class CompletionChoice(_Choice, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: Ids = UNSET


class Completion(_Answer, kw_only=True):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


# -- the rest --------------------------------------------------------------------------------------


class Tokenized(Struct):
    count: Count
    max_model_len: int | None
    tokens: list[Count]
    token_strs: list[str] | None


class Detokenized(Struct):
    prompt: str


class ModelCard(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(Struct):
    object: Literal["list"]
    data: list[ModelCard]


class Name(Struct):
    name: str
    version: str


class Version(Struct):
    version: str


class Readiness(Struct):
    status: Literal["ready", "degraded"]
    absent: list[str]


class Ledger(Struct):
    """What every process has in use."""

    gateway: dict[str, Any]
    nodes: list[dict[str, Any]]


class Injected(Struct):
    nodes: list[Any]
    gateway: dict[str, Any] | UnsetType = UNSET


# -- for whoever runs the server ------------------------------------------------------------------


class Difference(Struct):
    """Where a prompt leaves the caller's last one."""

    common_tokens: Count
    common_characters: Count
    previous_count: Count
    shared: str
    previous: str
    now: str


class Rendered(Struct):
    object: Literal["render"]
    model: str
    count: Count
    max_model_len: Count
    block_size: Count
    prompt: str
    token_ids: list[Count]
    difference: Difference | None


class AbortedRequests(Struct):
    aborted: Count


class ServerInfo(Struct):
    version: str
    model: str
    served_model_names: list[str]
    started: Count
    draining: bool
    requests: Count
    max_model_len: Count | None
    block_size: Count | None
    fingerprint: dict[str, str] | None
    nodes: list[dict[str, Any]]
    config: dict[str, Any]


class Cleared(Struct):
    evicted: Count
    """Blocks that were findable and are not any more."""
    held: Count
    """Blocks that requests or transfers use: they stay."""


class CacheReset(Struct):
    success: bool
    tiers: dict[str, Cleared]
    """The sums over all nodes and stores: `device`, `host`, `disk`."""
    nodes: list[dict[str, Any]]
    absent: list[str]


class CacheStats(Struct):
    nodes: list[dict[str, Any]]
    """Of a store: `tiers`, `gauges`, `counters`, or `error`."""


class BlockPlace(Struct):
    key: str
    device: list[str]
    """Nodes that have it."""
    store: Literal["host", "disk"] | None


class CacheSummary(Struct):
    """Counts of blocks."""

    blocks: Count
    device: Count
    host: Count
    disk: Count
    missing: Count
    prefix: Count
    """Without a gap, from the first one on."""


class CacheInspection(Struct):
    blocks: list[BlockPlace]
    summary: CacheSummary
    tenant: str | UnsetType = UNSET
    tokens: Count | UnsetType = UNSET
    block_size: Count | UnsetType = UNSET


class Pinned(Struct):
    blocks: Count
    pinned: Count
    ttl: float


class Unpinned(Struct):
    blocks: Count
    unpinned: Count


class Prefetched(Struct):
    blocks: Count
    host: Count
    disk: Count
    missing: Count


class Pause(Struct):
    draining: bool
    requests: Count
