"""The handlers for whoever runs the server: what it is and lets in, and what ends.

Owns the answers of these paths. Who may ask is decided before a handler is reached: all of it needs
the operator's key, but for the end of a request by its id, which its own tenant may ask for too.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any

import orjson
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from kvferry.gateway.errors import BadRequest, NotFound
from kvferry.gateway.http.edge import record_of
from kvferry.gateway.protocols.schemas import decode
from kvferry.gateway.router.cache import identity
from kvferry.gateway.router.link import NodeLink
from kvferry.gateway.service import Gateway
from kvferry.kvstore.process.settings import shown
from kvferry.kvstore.store.figures import by_tier

Body = Callable[[Request], Awaitable[bytes | bytearray]]


class AbortRequest(Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/abort`. `rid` is what SGLang calls it."""

    request_id: str | None = None
    rid: str | None = None


class Admin:
    """These handlers of one gateway. `body` reads a request's."""

    def __init__(self, gateway: Gateway, body: Body) -> None:
        self._gateway = gateway
        self._body = body
        self._started = time.time()

    async def server_info(self, request: Request) -> Response:
        gateway, shape = self._gateway, self._gateway.nodes.shape
        return _json(
            {
                "version": metadata.version("kvferry"),
                "model": gateway.model.name,
                "served_model_names": list(gateway.model.names),
                "started": int(self._started),
                "draining": gateway.draining,
                "requests": len(gateway.open),
                "max_model_len": shape.max_model_len if shape is not None else None,
                "block_size": shape.block_size if shape is not None else None,
                "fingerprint": dict(shape.fingerprint) if shape is not None else None,
                "nodes": [_about(name, node) for node, name in gateway.nodes.named()],
                "config": shown(gateway.config),
            }
        )

    async def drain(self, request: Request) -> Response:
        """From now on nothing new is let in; what runs goes on."""
        return self._pause(True)

    async def resume(self, request: Request) -> Response:
        """Takes a drain back, but not the end of the process."""
        return self._pause(False)

    def _pause(self, paused: bool) -> Response:
        gateway = self._gateway
        gateway.paused = paused
        return _json({"draining": gateway.draining, "requests": len(gateway.open)})

    async def abort(self, request: Request) -> Response:
        """Ends the requests of this name, which is an answer's `id` or an `X-Request-Id`."""
        record = record_of(request)
        asked = decode(await self._body(request), AbortRequest)
        name = asked.request_id or asked.rid
        if not name:
            raise BadRequest("Give the request_id of what to abort.", param="request_id")
        count = self._gateway.abort(name, None if record.admin else record.tenant)
        if not count:
            raise NotFound(
                f"No request called {name[:128]!r} is running.",
                param="request_id",
                code="request_not_found",
            )
        return _json({"aborted": count})


def _about(name: str, node: NodeLink) -> dict[str, Any]:
    status = node.status
    figures: dict[str, Any] = {"state": node.state}
    if status is not None and node.role == "store":
        figures |= {"tiers": by_tier(status.counters)}
    elif status is not None:
        figures |= {
            "running": status.running,
            "waiting": status.waiting,
            "blocks_used": status.blocks_used,
            "blocks_cached": status.blocks_cached,
            "blocks_total": status.blocks_total,
        }
    return identity(name, node) | figures


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
