"""The handlers for whoever runs the server: what it is and lets in, and what ends.

Owns the answers of these paths. Who may ask is decided before a handler is reached: all of it needs
the operator's key, but for the end of a request by its id, which its own tenant may ask for too.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvferry.gateway.errors import BadRequest, NotFound
from kvferry.gateway.http.bodies import json_response, read_body
from kvferry.gateway.http.handlers import installed_version
from kvferry.gateway.protocols.common import decode
from kvferry.gateway.protocols.operator import AbortRequest
from kvferry.gateway.router.cache import identity
from kvferry.gateway.router.link import NodeLink
from kvferry.gateway.service import Gateway
from kvferry.gateway.telemetry.access_log import record_of
from kvferry.kvstore.process.settings import shown
from kvferry.kvstore.store.figures import by_tier


async def server_info(gateway: Gateway, request: Request) -> Response:
    shape = gateway.nodes.shape
    return json_response(
        {
            "version": installed_version(),
            "model": gateway.model.name,
            "served_model_names": list(gateway.model.names),
            "started": int(gateway.started),
            "draining": gateway.draining,
            "requests": len(gateway.open),
            "max_model_len": shape.max_model_len if shape is not None else None,
            "block_size": shape.block_size if shape is not None else None,
            "fingerprint": dict(shape.fingerprint) if shape is not None else None,
            "nodes": [_about(name, node) for node, name in gateway.nodes.named()],
            "config": shown(gateway.config),
        }
    )


async def drain(gateway: Gateway, request: Request) -> Response:
    """From now on nothing new is let in; what runs goes on."""
    return _pause(gateway, True)


async def resume(gateway: Gateway, request: Request) -> Response:
    """Takes a drain back, but not the end of the process."""
    return _pause(gateway, False)


def _pause(gateway: Gateway, paused: bool) -> Response:
    gateway.paused = paused
    return json_response({"draining": gateway.draining, "requests": len(gateway.open)})


async def abort(gateway: Gateway, request: Request) -> Response:
    """Ends the requests of this name, which is an answer's `id` or an `X-Request-Id`."""
    record = record_of(request)
    asked = decode(await read_body(gateway, request), AbortRequest)
    name = asked.request_id or asked.rid
    if not name:
        raise BadRequest("Give the request_id of what to abort.", param="request_id")
    count = gateway.abort(name, None if record.admin else record.tenant)
    if not count:
        raise NotFound(
            f"No request called {name[:128]!r} is running.",
            param="request_id",
            code="request_not_found",
        )
    return json_response({"aborted": count})


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
