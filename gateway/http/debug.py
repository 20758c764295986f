"""What an operator or a test may ask of the whole deployment: the ledger, and faults on purpose.

Owns the gateway's own part of the ledger and the questions to all nodes, each of which has a moment
to answer; who cannot is in the answer all the same. Asking changes nothing; faults need the test
hooks, and a node that was started without them refuses. Who may ask is decided elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from kvferry.gateway.errors import BadRequest, NotFound
from kvferry.gateway.http.bodies import json_response, read_body
from kvferry.gateway.protocols.common import decode
from kvferry.gateway.protocols.operator import FaultsRequest
from kvferry.gateway.router.cache import identity
from kvferry.gateway.router.link import NodeLink
from kvferry.gateway.router.nodes import Nodes
from kvferry.gateway.service import Gateway
from kvferry.kvstore.node.debug import check_figures, process_figures
from kvferry.kvstore.wire.faults import FaultInjector, rules_from_json

ANSWER_SECONDS = 2.0
GATEWAY = "gateway"


async def ledger(gateway: Gateway, request: Request) -> Response:
    """What every process has in use."""
    if not gateway.config.enable_debug:
        raise NotFound("The server was started without --enable-debug.")
    nodes = await _ask_all(gateway.nodes, "ledger", b"")
    return json_response({"gateway": _own(gateway), "nodes": nodes})


async def faults(gateway: Gateway, request: Request) -> Response:
    """Faults on purpose, and what each process made of them."""
    if not gateway.config.enable_test_hooks:
        raise NotFound("The server was started without --enable-test-hooks.")
    asked = decode(await read_body(gateway, request), FaultsRequest)
    return json_response(await _inject(gateway, asked))


async def _inject(gateway: Gateway, asked: FaultsRequest) -> dict[str, Any]:
    try:
        rules = rules_from_json(asked.rules or [])
    except ValueError as error:
        raise BadRequest(str(error), param="rules") from error
    if asked.node == GATEWAY:
        if asked.hold or asked.preempt or asked.store:
            param = "hold" if asked.hold else "preempt" if asked.preempt else "store"
            raise BadRequest("The gateway has rules only.", param=param)
        if asked.clear or asked.rules is not None:
            gateway.nodes.inject(FaultInjector(rules, asked.seed) if rules else None)
        return {"gateway": {"rules": len(rules)}, "nodes": []}
    chosen = [node for node in gateway.nodes if asked.node in _names(gateway.nodes, node)]
    if not chosen:
        known = ", ".join(name for _, name in gateway.nodes.named())
        text = f"No node is called {asked.node[:100]!r}: there are {known}, roles, all and gateway."
        raise BadRequest(text, param="node")
    fields: dict[str, Any] = msgspec.to_builtins(asked)
    body = {name: value for name, value in fields.items() if name != "node"}
    return {"nodes": await _ask_all(gateway.nodes, "faults", orjson.dumps(body), chosen)}


# -- the gateway itself ----------------------------------------------------------------------------


def _own(gateway: Gateway) -> dict[str, Any]:
    nodes = gateway.nodes
    return {
        "requests": len(gateway.open),
        "choices": sum(len(generation.choices) for generation in gateway.open),
        "unanswered": gateway.unanswered(),
        "waiting_for_a_node": nodes.parked,
        "draining": gateway.draining,
        "remembered_bytes": gateway.prompts.remembered_bytes + gateway.last_prompts.bytes,
        "loop_lag_ms": round(1e3 * nodes.lag, 3),
        "check": check_figures({"nodes": nodes.check, "service": gateway.check}),
        "process": process_figures(),
        "links": [_link(name, node) for node, name in nodes.named()],
    }


def _link(name: str, node: NodeLink) -> dict[str, Any]:
    return identity(name, node) | {
        "state": node.state,
        "requests": len(node.requests.open),
        "pending_tokens": node.requests.pending,
        "keys": len(node.keys),
        "keys_synced": node.keys.synced,
        "counters": dict(node.counters),
        "faults": node.faults.counters if node.faults is not None else {},
    }


# -- nodes -----------------------------------------------------------------------------------------


def _names(nodes: Nodes, node: NodeLink) -> tuple[str, ...]:
    own = next(name for other, name in nodes.named() if other is node)
    return ("all", node.role, node.address, own)


async def _ask_all(
    nodes: Nodes, kind: str, body: bytes, chosen: Iterable[NodeLink] | None = None
) -> list[dict[str, Any]]:
    asked = [(node, name) for node, name in nodes.named() if chosen is None or node in chosen]
    answers = await asyncio.gather(
        *(node.questions.debug(kind, body, ANSWER_SECONDS) for node, _ in asked)
    )
    return [
        answer | identity(name, node) for (node, name), answer in zip(asked, answers, strict=True)
    ]
