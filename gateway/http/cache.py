"""The operator's handlers under `/admin/cache`: what a prompt has where, keeping it, forgetting it.

Owns the bodies of these paths. A chain of blocks is named by the body of a chat or completions
request, to which `tenant` says whose it is, or by its keys. What is done about it is for `cache`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from kvferry.gateway.auth import DEFAULT_TENANT
from kvferry.gateway.errors import BadRequest
from kvferry.gateway.http.handlers import Api
from kvferry.gateway.protocols.schemas import CacheChain, CacheClear, decode
from kvferry.gateway.router import cache
from kvferry.gateway.router.generation import no_node
from kvferry.gateway.router.nodes import NoNode
from kvferry.gateway.service import Gateway

MAX_TTL_S = 7 * 86400.0
PREFETCH_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Chain:
    packed: bytes
    ttl: float | None
    about: dict[str, Any]
    """What is known of the prompt, for the answer."""


class CacheAdmin:
    """These handlers of one gateway."""

    def __init__(self, gateway: Gateway, api: Api) -> None:
        self._gateway = gateway
        self._api = api

    async def stats(self, request: Request) -> Response:
        return _json(await cache.stats(self._gateway.nodes))

    async def reset(self, request: Request) -> Response:
        """`/reset_prefix_cache`: all tiers, everybody's blocks. Takes no body."""
        return _json(await cache.clear(self._gateway.nodes, None))

    async def clear(self, request: Request) -> Response:
        asked = decode(await self._api.body(request), CacheClear)
        if asked.all and asked.tenant is not None:
            raise BadRequest("Give either a tenant or all, not both.", param="tenant")
        if not asked.all and not asked.tenant:
            raise BadRequest('Give the tenant to clear, or {"all": true}.', param="tenant")
        if asked.tiers == []:
            raise BadRequest("Give at least one tier to clear, or leave tiers out.", param="tiers")
        tiers = asked.tiers or ("device", "store")
        if asked.tenant and "store" in tiers:
            self._gateway.forget(asked.tenant)
        return _json(await cache.clear(self._gateway.nodes, asked.tenant, tiers))

    async def inspect(self, request: Request) -> Response:
        chain = await self._chain(request)
        return _json(chain.about | await cache.inspect(self._gateway.nodes, chain.packed))

    async def pin(self, request: Request) -> Response:
        chain = await self._chain(request)
        if chain.ttl is None:
            raise BadRequest("Give the ttl of the pin, in seconds.", param="ttl")
        told = await cache.pin(self._gateway.nodes, chain.packed, chain.ttl)
        return _json(told | {"ttl": chain.ttl})

    async def unpin(self, request: Request) -> Response:
        chain = await self._chain(request)
        return _json(await cache.unpin(self._gateway.nodes, chain.packed))

    async def prefetch(self, request: Request) -> Response:
        chain = await self._chain(request)
        seconds = PREFETCH_SECONDS if chain.ttl is None else chain.ttl
        return _json(await cache.prefetch(self._gateway.nodes, chain.packed, seconds))

    async def _chain(self, request: Request) -> _Chain:
        body = await self._api.body(request)
        asked = decode(body, CacheChain)
        if asked.ttl is not None and not 0 < asked.ttl <= MAX_TTL_S:
            text = f"ttl must be above 0 and at most {MAX_TTL_S:g} seconds."
            raise BadRequest(text, param="ttl")
        if asked.keys is not None:
            return _Chain(cache.keys_from_hex(asked.keys), asked.ttl, {})
        shape = self._gateway.nodes.shape
        if shape is None:
            raise no_node(NoNode("loading"))
        tenant = asked.tenant or DEFAULT_TENANT
        prompts = (await self._api.taken(body, tenant, shape)).prompts
        if len(prompts) != 1:
            raise BadRequest("Give one prompt.", param="prompt")
        about = {"tenant": tenant, "tokens": prompts[0].size, "block_size": shape.block_size}
        return _Chain(prompts[0].keys, asked.ttl, about)


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
