"""The OpenAPI document of this server.

Owns the table of operations: what each takes, answers, and with which statuses. Shapes come from
the types that requests are decoded with and from those that answers are promised in, so the
document cannot say another thing than the code. It knows no handler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import Struct

from kvferry.gateway.http.admin import AbortRequest
from kvferry.gateway.http.debug import FaultsRequest
from kvferry.gateway.protocols import shapes
from kvferry.gateway.protocols.parameters import (
    IGNORED,
    REFUSED,
    REFUSED_IN_CHATS,
    REFUSED_IN_COMPLETIONS,
)
from kvferry.gateway.protocols.schemas import (
    CacheChain,
    CacheClear,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

Json = dict[str, Any]

MISSING: Mapping[str, str] = {
    "/v1/responses": "The Responses API",
    "/v1/responses/input_tokens": "The Responses API",
    "/v1/messages": "The Messages API",
    "/v1/messages/count_tokens": "The Messages API",
    "/v1/embeddings": "The Embeddings API",
    "/v1/systemone": "The System One API",
    "/v1/decisions": "The Decisions API",
}
"""Paths whose feature is to come."""

BODY = (400, 413, 415)
"""What any body may get."""


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str
    summary: str
    asks: type[Struct] | None = None
    answers: type[Struct] | None = None
    """The shape of a JSON answer."""
    media: tuple[str, ...] = ()
    """Other types that an answer may have."""
    failures: tuple[int, ...] = ()
    """Statuses beside success; 401 and 500 are possible everywhere."""
    succeeds: bool = True


OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation",
        ChatRequest,
        shapes.ChatCompletion,
        ("text/event-stream",),
        (*BODY, 404, 499, 501, 503, 504),
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue a text",
        CompletionRequest,
        shapes.Completion,
        ("text/event-stream",),
        (*BODY, 404, 499, 501, 503, 504),
    ),
    Operation("get", "/v1/models", "The served model, under each of its names", None,
              shapes.ModelList),
    Operation("get", "/v1/models/{name}", "One of them", None, shapes.ModelCard, (), (404,)),
    Operation("post", "/tokenize", "The ids of a text or a conversation", TokenizeRequest,
              shapes.Tokenized, (), (*BODY, 404, 501)),
    Operation("post", "/detokenize", "The text of ids", DetokenizeRequest, shapes.Detokenized, (),
              (*BODY, 404)),
    Operation("post", "/render", "The exact prompt of a request, and where it leaves the last one",
              ChatRequest, shapes.Rendered, (), (*BODY, 404, 501, 503)),
    *(
        Operation("post", path, "End requests by the id of their answer or their X-Request-Id",
                  AbortRequest, shapes.AbortedRequests, (), (*BODY, 404))
        for path in ("/v1/abort", "/abort_request")
    ),
    Operation("get", "/server_info", "What runs here", None, shapes.ServerInfo),
    *(
        Operation("post", path, "Empty the prefix cache", None, shapes.CacheReset, (), (503,))
        for path in ("/reset_prefix_cache", "/flush_cache")
    ),
    Operation("get", "/admin/cache/stats", "What every node and store keeps", None,
              shapes.CacheStats),
    Operation("post", "/admin/cache/inspect", "Where each block of a prompt is: a chat or "
              "completions request, with the tenant beside it, or keys", CacheChain,
              shapes.CacheInspection, (), (*BODY, 404, 501, 503)),
    Operation("post", "/admin/cache/pin", "Keep a prompt's blocks in memory", CacheChain,
              shapes.Pinned, (), (*BODY, 404, 501, 503)),
    Operation("post", "/admin/cache/unpin", "Let them go", CacheChain, shapes.Unpinned, (),
              (*BODY, 404, 501, 503)),
    Operation("post", "/admin/cache/prefetch", "Read a prompt's blocks from disk to memory",
              CacheChain, shapes.Prefetched, (), (*BODY, 404, 501, 503)),
    Operation("post", "/admin/cache/clear", "Forget a tenant's blocks, or all", CacheClear,
              shapes.CacheReset, (), (*BODY, 503)),
    Operation("post", "/admin/drain", "Take nothing new", None, shapes.Pause),
    Operation("post", "/admin/resume", "Take requests again", None, shapes.Pause),
    Operation("get", "/", "What this is", None, shapes.Name),
    Operation("get", "/version", "Its version", None, shapes.Version),
    Operation("get", "/health", "Whether the process lives"),
    Operation("get", "/ready", "Whether it can answer", None, shapes.Readiness, (), (503,)),
    Operation("get", "/readyz", "The same", None, shapes.Readiness, (), (503,)),
    Operation("get", "/metrics", "Prometheus metrics", media=("text/plain",)),
    Operation("get", "/openapi.json", "This document", media=("application/json",)),
    Operation("get", "/debug/ledger", "What every process has in use", None, shapes.Ledger, (),
              (404,)),
    Operation("post", "/debug/faults", "Inject faults", FaultsRequest, shapes.Injected, (),
              (*BODY, 404)),
    *(
        Operation("post", path, f"{feature}: to come", failures=(501,), succeeds=False)
        for path, feature in MISSING.items()
    ),
)  # fmt: skip


def document(version: str, operations: tuple[Operation, ...] = OPERATIONS) -> Json:
    """The document, ready for JSON."""
    components = _components(operations)
    paths: Json = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvferry", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _components(operations: tuple[Operation, ...]) -> Json:
    types = {kind for one in operations for kind in (one.asks, one.answers) if kind is not None}
    _, found = msgspec.json.schema_components(
        sorted({*types, shapes.Error}, key=lambda kind: kind.__name__),
        ref_template="#/components/schemas/{name}",
    )
    components: Json = dict(found)
    _annotate(components["ChatRequest"], (*REFUSED, *REFUSED_IN_CHATS))
    _annotate(components["CompletionRequest"], (*REFUSED, *REFUSED_IN_COMPLETIONS))
    return components


def _annotate(schema: Json, refused: tuple[str, ...]) -> None:
    properties = schema["properties"]
    for name in refused:
        properties[name]["description"] = "Refused with 400, unless it is null, false or empty."
    for name in IGNORED:
        properties[name] = {"description": "Accepted and ignored."}


def _operation(operation: Operation) -> Json:
    told: Json = {"summary": operation.summary, "responses": _responses(operation)}
    if operation.asks is not None:
        content = {"application/json": {"schema": _ref(operation.asks)}}
        told["requestBody"] = {"required": True, "content": content}
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    if names:
        told["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return told


def _responses(operation: Operation) -> Json:
    responses: Json = {}
    if operation.succeeds:
        content: Json = {kind: {} for kind in operation.media}
        if operation.answers is not None:
            content["application/json"] = {"schema": _ref(operation.answers)}
        responses["200"] = {"description": "OK"} | ({"content": content} if content else {})
    error = {"application/json": {"schema": _ref(shapes.Error)}}
    for status in sorted({401, 500, *operation.failures}):
        phrase = next((known.phrase for known in HTTPStatus if known == status), "Failure")
        responses[str(status)] = {"description": phrase, "content": error}
    return responses


def _ref(kind: type[Struct]) -> Json:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
