"""The application: the table of endpoints as routes, and where every error goes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvferry.gateway.errors import ApiError, NotSupported, from_http, to_response
from kvferry.gateway.http.endpoints import ENDPOINTS, Endpoint
from kvferry.gateway.http.handlers import installed_version
from kvferry.gateway.http.middleware import RequestMiddleware
from kvferry.gateway.http.openapi import document
from kvferry.gateway.service import Gateway
from kvferry.gateway.telemetry.access_log import record_of


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
        routes=[_route(gateway, one, path) for one in ENDPOINTS for path in one.paths],
        middleware=[Middleware(RequestMiddleware, gateway=gateway)],
        exception_handlers={ApiError: _on_api_error, HTTPException: _on_http_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.document = orjson.dumps(document(installed_version(), ENDPOINTS))
    return app


def _route(gateway: Gateway, endpoint: Endpoint, path: str) -> Route:
    handler = endpoint.handler or partial(_not_there_yet, endpoint.summary)
    return Route(path, partial(handler, gateway), methods=[endpoint.method])


async def _not_there_yet(feature: str, gateway: Gateway, request: Request) -> Response:
    raise NotSupported(f"{feature} is not supported yet.")


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    record_of(request).code = error.code or error.kind
    return to_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return await _on_api_error(request, from_http(error, request.url.path))
