"""The application: which path leads to which handler, and where every error goes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvferry.gateway.errors import ApiError, from_http, to_response
from kvferry.gateway.http.admin import Admin
from kvferry.gateway.http.cache import CacheAdmin
from kvferry.gateway.http.edge import Edge, record_of
from kvferry.gateway.http.handlers import Api, unsupported
from kvferry.gateway.http.openapi import MISSING
from kvferry.gateway.http.render import Render
from kvferry.gateway.service import Gateway

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def build_app(gateway: Gateway) -> Starlette:
    """The ASGI application of a gateway. Its lifespan starts and closes the links to the nodes."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        gateway.nodes.start()
        try:
            yield
        finally:
            gateway.close()

    app = Starlette(
        routes=_routes(gateway),
        middleware=[Middleware(Edge, gateway=gateway)],
        exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


def _routes(gateway: Gateway) -> list[Route]:
    api = Api(gateway)
    admin, render = Admin(gateway, api.body), Render(gateway, api)
    cache = CacheAdmin(gateway, api)
    return [
        _post("/v1/chat/completions", api.chat_completions),
        _post("/v1/completions", api.completions),
        _get("/v1/models", api.models),
        _get("/v1/models/{name:path}", api.model),
        _post("/tokenize", api.tokenize),
        _post("/detokenize", api.detokenize),
        _post("/render", render.answer),
        _post("/v1/abort", admin.abort),
        _post("/abort_request", admin.abort),
        _get("/server_info", admin.server_info),
        _post("/reset_prefix_cache", cache.reset),
        _post("/flush_cache", cache.reset),
        _get("/admin/cache/stats", cache.stats),
        _post("/admin/cache/inspect", cache.inspect),
        _post("/admin/cache/pin", cache.pin),
        _post("/admin/cache/unpin", cache.unpin),
        _post("/admin/cache/prefetch", cache.prefetch),
        _post("/admin/cache/clear", cache.clear),
        _post("/admin/drain", admin.drain),
        _post("/admin/resume", admin.resume),
        _get("/", api.root),
        _get("/health", api.health),
        _get("/ready", api.ready),
        _get("/readyz", api.ready),
        _get("/metrics", api.metrics),
        _get("/version", api.version),
        _get("/openapi.json", api.openapi),
        _get("/debug/ledger", api.ledger),
        _post("/debug/faults", api.faults),
        *(_post(path, unsupported(feature)) for path, feature in MISSING.items()),
    ]


def _get(path: str, handler: Handler) -> Route:
    return Route(path, handler, methods=["GET"])


def _post(path: str, handler: Handler) -> Route:
    return Route(path, handler, methods=["POST"])


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    record_of(request).code = error.code or error.kind
    return to_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _on_api_error(request, from_http(error, request.url.path))
