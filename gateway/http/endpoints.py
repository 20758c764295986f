"""The table of endpoints: every path of the server, and what is true of it.

Owns which paths there are, who may ask, what they take and answer, and what handles them. Routes,
the OpenAPI document, access, and the refusal of what is not there yet follow from it. A new API for
text is a module in `protocols`, its name in `TextApi`, and a row here. It knows no request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from kvferry.gateway.http import admin, cache, debug, handlers
from kvferry.gateway.http.generate import generate
from kvferry.gateway.http.render import render
from kvferry.gateway.protocols.chat import Chat, ChatCompletion, ChatRequest
from kvferry.gateway.protocols.completions import Completion, CompletionRequest, Completions
from kvferry.gateway.protocols.models import ModelCard, ModelList, Name, Readiness, Version
from kvferry.gateway.protocols.operator import (
    AbortedRequests,
    AbortRequest,
    CacheChain,
    CacheClear,
    CacheInspection,
    CacheReset,
    CacheStats,
    FaultsRequest,
    Injected,
    Ledger,
    Pause,
    Pinned,
    Prefetched,
    Rendered,
    ServerInfo,
    Unpinned,
)
from kvferry.gateway.protocols.tokens import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
)
from kvferry.gateway.service import Gateway


class Access(Enum):
    """Who may ask."""

    OPEN = auto()
    """Everybody. It is logged only where everything is."""
    TENANT = auto()
    """Whoever has a key, while any is configured."""
    OWNER = auto()
    """The same, for what is theirs; the operator, for what is anybody's."""
    ADMIN = auto()
    """The operator."""


Handler = Callable[[Gateway, Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One thing that can be asked, under one path or several."""

    method: str
    paths: tuple[str, ...]
    """As the routes spell them: `{name:path}` takes the rest of a path."""
    access: Access
    summary: str
    handler: Handler | None
    """None: it is not there yet."""
    asks: type[Struct] | None = None
    answers: type[Struct] | None = None
    """The shape of a JSON answer."""
    media: tuple[str, ...] = ()
    """Other types that an answer may have."""
    failures: tuple[int, ...] = ()
    """Statuses beside success and what any body may get; 401 and 500 are possible everywhere."""
    operation: str = ""
    """What OpenTelemetry calls it, if it is to generate: only that has spans."""


ENDPOINTS = (
    Endpoint("POST", ("/v1/chat/completions",), Access.TENANT, "Answer a conversation",
             partial(generate, Chat()), ChatRequest, ChatCompletion, ("text/event-stream",),
             (404, 499, 501, 503, 504), operation="chat"),
    Endpoint("POST", ("/v1/completions",), Access.TENANT, "Continue a text",
             partial(generate, Completions()), CompletionRequest, Completion,
             ("text/event-stream",), (404, 499, 501, 503, 504), operation="text_completion"),
    Endpoint("GET", ("/v1/models",), Access.TENANT, "The served model, under each of its names",
             handlers.models, None, ModelList),
    Endpoint("GET", ("/v1/models/{name:path}",), Access.TENANT, "One of them",
             handlers.model, None, ModelCard, (), (404,)),
    Endpoint("POST", ("/tokenize",), Access.TENANT, "The ids of a text or a conversation",
             handlers.tokenize, TokenizeRequest, Tokenized, (), (404, 501)),
    Endpoint("POST", ("/detokenize",), Access.TENANT, "The text of ids",
             handlers.detokenize, DetokenizeRequest, Detokenized, (), (404,)),
    Endpoint("POST", ("/render",), Access.TENANT,
             "The exact prompt of a request, and where it leaves the last one",
             render, ChatRequest, Rendered, (), (404, 501, 503)),
    Endpoint("POST", ("/v1/abort", "/abort_request"), Access.OWNER,
             "End requests by the id of their answer or their X-Request-Id",
             admin.abort, AbortRequest, AbortedRequests, (), (404,)),
    Endpoint("GET", ("/server_info",), Access.ADMIN, "What runs here",
             admin.server_info, None, ServerInfo),
    Endpoint("POST", ("/reset_prefix_cache", "/flush_cache"), Access.ADMIN,
             "Empty the prefix cache", cache.reset, None, CacheReset, (), (503,)),
    Endpoint("GET", ("/admin/cache/stats",), Access.ADMIN, "What every node and store keeps",
             cache.stats, None, CacheStats),
    Endpoint("POST", ("/admin/cache/inspect",), Access.ADMIN,
             "Where each block of a prompt is: a chat or completions request, with the tenant "
             "beside it, or keys", cache.inspect, CacheChain, CacheInspection, (), (404, 501, 503)),
    Endpoint("POST", ("/admin/cache/pin",), Access.ADMIN, "Keep a prompt's blocks in memory",
             cache.pin, CacheChain, Pinned, (), (404, 501, 503)),
    Endpoint("POST", ("/admin/cache/unpin",), Access.ADMIN, "Let them go",
             cache.unpin, CacheChain, Unpinned, (), (404, 501, 503)),
    Endpoint("POST", ("/admin/cache/prefetch",), Access.ADMIN,
             "Read a prompt's blocks from disk to memory",
             cache.prefetch, CacheChain, Prefetched, (), (404, 501, 503)),
    Endpoint("POST", ("/admin/cache/clear",), Access.ADMIN, "Forget a tenant's blocks, or all",
             cache.clear, CacheClear, CacheReset, (), (503,)),
    Endpoint("POST", ("/admin/drain",), Access.ADMIN, "Take nothing new", admin.drain, None, Pause),
    Endpoint("POST", ("/admin/resume",), Access.ADMIN, "Take requests again",
             admin.resume, None, Pause),
    Endpoint("GET", ("/",), Access.OPEN, "What this is", handlers.root, None, Name),
    Endpoint("GET", ("/version",), Access.OPEN, "Its version", handlers.version, None, Version),
    Endpoint("GET", ("/health",), Access.OPEN, "Whether the process lives", handlers.health),
    Endpoint("GET", ("/ready",), Access.OPEN, "Whether it can answer",
             handlers.ready, None, Readiness, (), (503,)),
    Endpoint("GET", ("/readyz",), Access.OPEN, "The same",
             handlers.ready, None, Readiness, (), (503,)),
    Endpoint("GET", ("/metrics",), Access.OPEN, "Prometheus metrics",
             handlers.metrics, media=("text/plain",)),
    Endpoint("GET", ("/openapi.json",), Access.TENANT, "This document",
             handlers.openapi, media=("application/json",)),
    Endpoint("GET", ("/debug/ledger",), Access.ADMIN, "What every process has in use",
             debug.ledger, None, Ledger, (), (404,)),
    Endpoint("POST", ("/debug/faults",), Access.ADMIN, "Inject faults",
             debug.faults, FaultsRequest, Injected, (), (404,)),
    Endpoint("POST", ("/v1/responses", "/v1/responses/input_tokens"), Access.TENANT,
             "The Responses API", None),
    Endpoint("POST", ("/v1/messages", "/v1/messages/count_tokens"), Access.TENANT,
             "The Messages API", None),
    Endpoint("POST", ("/v1/embeddings",), Access.TENANT, "The Embeddings API", None),
    Endpoint("POST", ("/v1/systemone",), Access.TENANT, "The System One API", None),
    Endpoint("POST", ("/v1/decisions",), Access.TENANT, "The Decisions API", None),
)  # fmt: skip

BY_PATH = {path: endpoint for endpoint in ENDPOINTS for path in endpoint.paths}
_ADMIN_PREFIXES = tuple(
    {"/" + path.split("/")[1] for path, one in BY_PATH.items() if one.access is Access.ADMIN}
)


def access_of(path: str) -> Access:
    """Who may ask for a path; of those that do not exist nobody is told so without a key."""
    if path.startswith(_ADMIN_PREFIXES):
        return Access.ADMIN
    endpoint = BY_PATH.get(path)
    return Access.TENANT if endpoint is None else endpoint.access
