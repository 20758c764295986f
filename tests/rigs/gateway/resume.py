"""How tests of requests that are resumed ask and read, and which messages they make get lost.

Owns no server and no node: `gateway_rig.py` does, and its decode node says the same text each time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx

from kvferry.kvstore.wire.codec import AnyMessage
from kvferry.kvstore.wire.generation import StepOutput
from kvferry.tests.rigs.gateway import web
from kvferry.tests.rigs.gateway.api import COMPLETIONS
from kvferry.tests.rigs.gateway.rig import Rig

TEXT = "Hello 0"
LENGTH = len(TEXT) + 1
"""Tokens of an answer: its bytes and an end."""


def once(concerns: Callable[[AnyMessage], bool], times: int = 1) -> Callable[[AnyMessage], bool]:
    """True for the first messages of a kind, and never again."""
    left = [times]

    def check(message: AnyMessage) -> bool:
        if left[0] and concerns(message):
            left[0] -= 1
            return True
        return False

    return check


def tokens_at(index: int) -> Callable[[AnyMessage], bool]:
    return lambda message: isinstance(message, StepOutput) and message.tokens[0].index == index


def answer(rig: Rig, **body: Any) -> dict[str, Any]:
    response = rig.post(COMPLETIONS, {"prompt": "x" * 40, "max_tokens": 50} | body)
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    timings = whole["timings"]
    assert sum(timings["prompt_tokens"].values()) == whole["usage"]["prompt_tokens"]
    return whole


def stream(rig: Rig, **body: Any) -> list[str]:
    """The data of a stream's events, as far as they came."""
    request = {"prompt": "x" * 40, "max_tokens": 50, "stream": True} | body
    found: list[str] = []
    with (
        web.Client(timeout=20) as client,
        client.stream("POST", rig.url + COMPLETIONS, json=request) as response,
    ):
        try:
            for line in response.iter_lines():
                if line.startswith("data: "):
                    found.append(line.removeprefix("data: "))
        except httpx.RemoteProtocolError:
            pass
    return found


def text_of(lines: list[str]) -> str:
    assert lines[-1] == "[DONE]", lines
    chunks = [json.loads(line) for line in lines[:-1]]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
