"""What holds for every HTTP request, whatever its path.

Owns the request's id, who it is from, the form in which anything unforeseen is answered, and the
one log line. Only a few paths are open without a key; every other one, known or not, needs one. It
knows no body and no model.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.gateway.auth import DEFAULT_TENANT
from kvferry.gateway.errors import ApiError, EngineFailure, Unauthorized, to_response
from kvferry.gateway.generate import Generation
from kvferry.gateway.service import Gateway
from kvferry.gateway.streaming import ClientGone

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/", "/health", "/metrics", "/ready", "/readyz", "/version"})
ADMIN_PREFIXES = ("/admin", "/debug")
CLIENT_GONE = 499
"""The log's status for a client that left first."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:+/=-]{1,128}")


@dataclass(slots=True)
class Record:
    """What the log line says; handlers fill in what they learn."""

    method: str
    path: str
    request_id: str
    tenant: str = DEFAULT_TENANT
    status: int = 0
    code: str = ""
    generation: Generation | None = None
    started: float = field(default_factory=time.monotonic)


def record_of(request: Request) -> Record:
    """The record of a request that came through the edge."""
    record = request.scope["state"]["record"]
    assert isinstance(record, Record)
    return record


class Edge:
    """ASGI middleware around everything."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = Record(scope["method"], scope["path"], _request_id(headers))
        scope.setdefault("state", {})["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                added = MutableHeaders(scope=message)
                added["x-request-id"] = added["request-id"] = record.request_id
            await send(message)

        self._gateway.began()
        try:
            await self._serve(record, headers, scope, receive, send_with_id)
        finally:
            self._gateway.ended()
            self._close(record)

    async def _serve(
        self, record: Record, headers: Headers, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            record.tenant = self._authenticate(record.path, headers)
            if scope["method"] == "POST":
                await self._gateway.turnstile.passed()
            await self._app(scope, receive, send)
        except ApiError as error:
            record.code = error.code or error.kind
            await to_response(error)(scope, receive, send)
        except ClientGone:
            record.status, record.code = CLIENT_GONE, "client_gone"
        except Exception:
            log.exception("request %s failed", record.request_id)
            record.code = "internal_error"
            if record.status:
                raise  # too late for an answer: the server cuts the connection
            failure = EngineFailure("The gateway failed.", code=record.code)
            await to_response(failure)(scope, receive, send)

    def _authenticate(self, path: str, headers: Headers) -> str:
        if path in OPEN_PATHS:
            return DEFAULT_TENANT
        if path.startswith(ADMIN_PREFIXES):
            if self._gateway.admin_keys.open:
                raise Unauthorized("This needs the server to have an --admin-api-key.")
            return self._gateway.admin_keys.tenant(headers)
        return self._gateway.keys.tenant(headers)

    def _close(self, record: Record) -> None:
        if record.code:
            self._gateway.metrics.failed(record.code)
        level = logging.DEBUG if record.path in OPEN_PATHS else logging.INFO
        if log.isEnabledFor(level):
            log.log(level, "%s", _line(record))


def _request_id(headers: Headers) -> str:
    offered = headers.get("x-request-id", "")
    return offered if _REQUEST_ID.fullmatch(offered) else f"req-{secrets.token_hex(12)}"


def _line(record: Record) -> str:
    path = record.path[:100].encode("unicode_escape").decode()
    facts: dict[str, Any] = {"request": record.request_id, "tenant": record.tenant}
    if record.code:
        facts["code"] = record.code
    generation = record.generation
    if generation is not None:
        facts |= _facts(generation)
    facts["total_ms"] = f"{(time.monotonic() - record.started) * 1000:.1f}"
    told = " ".join(f"{name}={value}" for name, value in facts.items())
    return f"{record.method} {path} {record.status} {told}"


def _facts(generation: Generation) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "stream": generation.params.stream,
        "prompt": generation.prompt_tokens,
        "completion": generation.completion_tokens,
    }
    if generation.finish_reasons:
        facts["finish"] = ",".join(sorted(set(generation.finish_reasons)))
    if generation.timeline.ttft is not None:
        facts["ttft_ms"] = f"{generation.timeline.ttft * 1000:.1f}"
    report = generation.report
    if report is not None:
        facts["cached"] = report.cached_tokens
        for name in ("queue", "lookup", "load", "prefill", "transfer", "first_step"):
            facts[f"{name}_ms"] = f"{getattr(report.stages, name):.1f}"
        facts["handoff_ms"] = f"{report.handoff_ms:.1f}"
    return facts
