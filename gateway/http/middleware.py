"""What holds for every HTTP request, whatever its path.

Owns the request's id, who it is from, the form in which anything unforeseen is answered, and that
it is counted, traced and logged once. Only a few paths are open without a key; every other one,
known or not, needs one. It knows no body and no model.
"""

from __future__ import annotations

import logging
import re
import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.gateway.errors import ApiError, EngineFailure, Unauthorized, to_response
from kvferry.gateway.http.endpoints import BY_PATH, Access, access_of
from kvferry.gateway.http.sse import ClientGone
from kvferry.gateway.service import Gateway
from kvferry.gateway.telemetry.access_log import Record, log_request

log = logging.getLogger(__name__)

CLIENT_GONE = 499
"""The log's status for a client that left first."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:+/=-]{1,128}")


class RequestMiddleware:
    """ASGI middleware around everything."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        offered = headers.get("x-request-id", "")
        name = offered if _REQUEST_ID.fullmatch(offered) else f"req-{secrets.token_hex(12)}"
        path, endpoint = scope["path"], BY_PATH.get(scope["path"])
        operation = endpoint.operation if endpoint is not None else ""
        record = Record(scope["method"], path, name, operation)
        scope.setdefault("state", {})["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                added = MutableHeaders(scope=message)
                added["x-request-id"] = added["request-id"] = record.request_id
            await send(message)

        with self._gateway.in_flight():
            try:
                await self._serve(record, headers, scope, receive, send_with_id)
            finally:
                self._close(record, headers)

    async def _serve(
        self, record: Record, headers: Headers, scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            self._authenticate(record, headers)
            if scope["method"] == "POST":
                await self._gateway.request_pacer.turn()
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

    def _authenticate(self, record: Record, headers: Headers) -> None:
        admin, access = self._gateway.admin_keys, access_of(record.path)
        if access is Access.OPEN:
            return
        if access is Access.ADMIN:
            if admin.open:
                raise Unauthorized("This needs the server to have an --admin-api-key.")
            admin.tenant(headers)
            record.admin = True
        elif access is Access.OWNER and admin.known(headers):
            record.admin = True
        else:
            record.tenant = self._gateway.keys.tenant(headers)

    def _close(self, record: Record, headers: Headers) -> None:
        if record.code:
            self._gateway.metrics.failed(record.code)
        if self._gateway.tracer is not None:
            self._gateway.tracer.finished(record, headers)
        level = logging.DEBUG if access_of(record.path) is Access.OPEN else logging.INFO
        log_request(record, level)
