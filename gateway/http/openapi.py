"""The OpenAPI document of this server.

Owns its form only. What there is comes from the table of endpoints, shapes from the types that
requests are decoded with and from those that answers are promised in, so the document cannot say
another thing than the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import Struct

from kvferry.gateway.http.endpoints import Endpoint
from kvferry.gateway.protocols.common import Error
from kvferry.gateway.protocols.options import IGNORED, Options

Json = dict[str, Any]

BODY_FAILURES = (400, 413, 415)
"""What any body may get."""


def document(version: str, endpoints: Sequence[Endpoint]) -> Json:
    """The document, ready for JSON."""
    paths: Json = {}
    for one in endpoints:
        for path in one.paths:
            path = path.replace(":path}", "}")
            paths.setdefault(path, {})[one.method.lower()] = _operation(one, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvferry", "version": version},
        "paths": paths,
        "components": {
            "schemas": _components(endpoints),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _components(endpoints: Sequence[Endpoint]) -> Json:
    types = {kind for one in endpoints for kind in (one.asks, one.answers) if kind is not None}
    _, found = msgspec.json.schema_components(
        sorted({*types, Error}, key=lambda kind: kind.__name__),
        ref_template="#/components/schemas/{name}",
    )
    components: Json = dict(found)
    for kind in types:
        if issubclass(kind, Options):
            ignored = {name: {"description": "Accepted and ignored."} for name in IGNORED}
            components[kind.__name__]["properties"] |= ignored
    return components


def _operation(endpoint: Endpoint, path: str) -> Json:
    there = endpoint.handler is not None
    summary = endpoint.summary if there else f"{endpoint.summary}: to come"
    described: Json = {"summary": summary, "responses": _responses(endpoint)}
    if endpoint.asks is not None:
        content = {"application/json": {"schema": _ref(endpoint.asks)}}
        described["requestBody"] = {"required": True, "content": content}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return described


def _responses(endpoint: Endpoint) -> Json:
    responses: Json = {}
    failures = {401, 500, *endpoint.failures, *(BODY_FAILURES if endpoint.asks else ())}
    if endpoint.handler is None:
        failures.add(501)
    else:
        content: Json = {kind: {} for kind in endpoint.media}
        if endpoint.answers is not None:
            content["application/json"] = {"schema": _ref(endpoint.answers)}
        responses["200"] = {"description": "OK"} | ({"content": content} if content else {})
    error = {"application/json": {"schema": _ref(Error)}}
    for status in sorted(failures):
        phrase = next((known.phrase for known in HTTPStatus if known == status), "Failure")
        responses[str(status)] = {"description": phrase, "content": error}
    return responses


def _ref(kind: type[Struct]) -> Json:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
