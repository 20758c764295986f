"""The bodies of requests and answers, as bytes.

Owns what a client may send: JSON, uncompressed, within the limit. What it means is for others.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kvferry.gateway.errors import NotJson, TooLarge
from kvferry.gateway.http.sse import ClientGone
from kvferry.gateway.service import Gateway

OVERSIZE_FACTOR = 4
"""How many times the limit is read of a body that exceeds it. Most clients read no answer before
they have sent all of theirs, and one who sends into a closed connection may never see it."""


async def read_body(gateway: Gateway, request: Request) -> bytearray:
    """The body, while it is JSON and within the limit.

    Raises
    ------
    NotJson, TooLarge
        It is not.
    ClientGone
        The client left before it had sent all of it.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if kind.lower() != "application/json" and not kind.lower().endswith("+json"):
        raise NotJson("The body must be JSON: send it with Content-Type: application/json.")
    if request.headers.get("content-encoding", "identity") != "identity":
        raise NotJson("The body must not be compressed.")
    limit = gateway.config.max_request_bytes
    too_large = f"The body is larger than {limit} bytes, the limit of this server."
    announced = request.headers.get("content-length", "")
    waits = request.headers.get("expect", "").lower() == "100-continue"
    if waits and announced.isdigit() and int(announced) > limit:
        raise TooLarge(too_large)
    body, size = bytearray(), 0
    try:
        async for part in request.stream():
            size += len(part)
            if size <= limit:
                body += part
            elif size > OVERSIZE_FACTOR * limit:
                break
    except ClientDisconnect as error:
        raise ClientGone from error
    if size > limit:
        raise TooLarge(too_large)
    return body


def json_response(value: Any) -> Response:
    """An answer; bytes are JSON already."""
    text = value if isinstance(value, bytes) else orjson.dumps(value)
    return Response(text, media_type="application/json")
