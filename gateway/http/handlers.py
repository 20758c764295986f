"""The handlers of what needs no generation: tokens, the model, and how the server is.

Owns what each path does with the pieces that other modules make, and nothing that has a rule of its
own. Every error is raised; how it is answered is decided elsewhere.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvferry.gateway.errors import no_node
from kvferry.gateway.http.bodies import json_response, read_body
from kvferry.gateway.protocols.tokens import Detokenize, Tokenize
from kvferry.gateway.service import Gateway
from kvferry.gateway.telemetry.access_log import record_of
from kvferry.gateway.telemetry.metrics import CONTENT_TYPE

# -- tokens ----------------------------------------------------------------------------------------


async def tokenize(gateway: Gateway, request: Request) -> Response:
    shape = gateway.nodes.shape
    limit = shape.max_model_len if shape is not None else None
    wanted = Tokenize(record_of(request).tenant, limit)
    return json_response(await gateway.intake.read(wanted, await read_body(gateway, request)))


async def detokenize(gateway: Gateway, request: Request) -> Response:
    body = await read_body(gateway, request)
    return json_response(await gateway.intake.read(Detokenize(), body))


# -- what there is ---------------------------------------------------------------------------------


async def models(gateway: Gateway, request: Request) -> Response:
    cards = [_card(gateway, name) for name in gateway.model.names]
    return json_response({"object": "list", "data": cards})


async def model(gateway: Gateway, request: Request) -> Response:
    name = request.path_params["name"]
    gateway.model.check_name(name)
    return json_response(_card(gateway, name))


def _card(gateway: Gateway, name: str) -> dict[str, Any]:
    shape = gateway.nodes.shape
    return {
        "id": name,
        "object": "model",
        "created": gateway.model.created,
        "owned_by": "kvferry",
        "max_model_len": shape.max_model_len if shape is not None else None,
    }


@cache
def installed_version() -> str:
    """What runs here, as it is installed."""
    return metadata.version("kvferry")


async def root(gateway: Gateway, request: Request) -> Response:
    return json_response({"name": "kvferry", "version": installed_version()})


async def version(gateway: Gateway, request: Request) -> Response:
    return json_response({"version": installed_version()})


async def openapi(gateway: Gateway, request: Request) -> Response:
    return json_response(request.app.state.document)


# -- how it is -------------------------------------------------------------------------------------


async def health(gateway: Gateway, request: Request) -> Response:
    return Response()


async def ready(gateway: Gateway, request: Request) -> Response:
    if gateway.draining:
        raise no_node("draining")
    if not gateway.nodes.ready:
        raise no_node("loading" if gateway.nodes.shape is None else "lost")
    absent = [node.address for node in gateway.nodes if node.stalled or not node.usable]
    return json_response({"status": "degraded" if absent else "ready", "absent": absent})


async def metrics(gateway: Gateway, request: Request) -> Response:
    return Response(gateway.metrics.page(), media_type=CONTENT_TYPE)
