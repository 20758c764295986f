"""The operator's handlers under `/admin/cache`: what a prompt has where, keeping it, forgetting it.

Owns the bodies of these paths. A chain of blocks is named by the body of a chat or completions
request, to which `tenant` says whose it is, or by its keys. What is done about it is for `router`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvferry.gateway.auth import DEFAULT_TENANT
from kvferry.gateway.errors import BadRequest, no_node
from kvferry.gateway.http.bodies import json_response, read_body
from kvferry.gateway.http.generate import api_of
from kvferry.gateway.intake.reader import ReadPrompts
from kvferry.gateway.protocols.common import decode
from kvferry.gateway.protocols.operator import CacheChain, CacheClear
from kvferry.gateway.router import cache
from kvferry.gateway.service import Gateway

MAX_TTL_S = 7 * 86400.0
PREFETCH_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Chain:
    packed: bytes
    ttl: float | None
    about: dict[str, Any]
    """What is known of the prompt, for the answer."""


async def stats(gateway: Gateway, request: Request) -> Response:
    return json_response(await cache.stats(gateway.nodes))


async def reset(gateway: Gateway, request: Request) -> Response:
    """`/reset_prefix_cache`: all tiers, everybody's blocks. Takes no body."""
    return json_response(await cache.clear(gateway.nodes, None))


async def clear(gateway: Gateway, request: Request) -> Response:
    asked = decode(await read_body(gateway, request), CacheClear)
    if asked.all and asked.tenant is not None:
        raise BadRequest("Give either a tenant or all, not both.", param="tenant")
    if not asked.all and not asked.tenant:
        raise BadRequest('Give the tenant to clear, or {"all": true}.', param="tenant")
    if asked.tiers == []:
        raise BadRequest("Give at least one tier to clear, or leave tiers out.", param="tiers")
    tiers = asked.tiers or ("device", "store")
    if asked.tenant and "store" in tiers:
        gateway.forget(asked.tenant)
    return json_response(await cache.clear(gateway.nodes, asked.tenant, tiers))


async def inspect(gateway: Gateway, request: Request) -> Response:
    chain = await _chain(gateway, request)
    return json_response(chain.about | await cache.inspect(gateway.nodes, chain.packed))


async def pin(gateway: Gateway, request: Request) -> Response:
    chain = await _chain(gateway, request)
    if chain.ttl is None:
        raise BadRequest("Give the ttl of the pin, in seconds.", param="ttl")
    answer = await cache.pin(gateway.nodes, chain.packed, chain.ttl)
    return json_response(answer | {"ttl": chain.ttl})


async def unpin(gateway: Gateway, request: Request) -> Response:
    chain = await _chain(gateway, request)
    return json_response(await cache.unpin(gateway.nodes, chain.packed))


async def prefetch(gateway: Gateway, request: Request) -> Response:
    chain = await _chain(gateway, request)
    seconds = PREFETCH_SECONDS if chain.ttl is None else chain.ttl
    return json_response(await cache.prefetch(gateway.nodes, chain.packed, seconds))


async def _chain(gateway: Gateway, request: Request) -> _Chain:
    body = await read_body(gateway, request)
    asked = decode(body, CacheChain)
    if asked.ttl is not None and not 0 < asked.ttl <= MAX_TTL_S:
        text = f"ttl must be above 0 and at most {MAX_TTL_S:g} seconds."
        raise BadRequest(text, param="ttl")
    if asked.keys is not None:
        return _Chain(cache.keys_from_hex(asked.keys), asked.ttl, {})
    shape = gateway.nodes.shape
    if shape is None:
        raise no_node("loading")
    tenant = asked.tenant or DEFAULT_TENANT
    prepared = await gateway.intake.read(ReadPrompts(api_of(body), tenant, shape), body)
    prompts = prepared.prompts
    if len(prompts) != 1:
        raise BadRequest("Give one prompt.", param="prompt")
    about = {"tenant": tenant, "tokens": prompts[0].size, "block_size": shape.block_size}
    return _Chain(prompts[0].keys, asked.ttl, about)
