"""How tests of the HTTP API ask, and how they read what is answered.

Owns no server: `rig.py` does. Whoever reads a stream here also checks that it has the form
that every stream has.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from kvferry.tests.rigs.gateway.rig import Behaviour, Rig, wait_until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


@contextmanager
def fresh(shared: Rig) -> Iterator[Rig]:
    """A rig that many tests share, for one of them: nothing is left of the others."""
    decode = shared.decode
    decode.does = Behaviour()
    for record in (decode.generates, decode.stops, decode.aborts):
        record.clear()
    yield shared
    decode.does = Behaviour()
    wait_until(shared.idle)


def raw_request(rig: Rig, **fields: Any) -> socket.socket:
    """A request whose connection the test holds in its hand."""
    body = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True} | fields
    content = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", rig.port))
    connection.sendall(head.encode() + content)
    return connection


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream; it must end as streams do."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    assert data.pop() == "[DONE]"
    return [json.loads(text) for text in data]


def error_of(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)
