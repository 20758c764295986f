"""`/render`: the exact prompt of a request, and where it leaves the caller's last one.

Owns the comparison of two prompts. A caller is a session of a tenant, or the tenant itself where no
session is named. The difference is found by ids, because ids are what the cache compares, and told
in text, because that is what a person can mend.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from kvferry.gateway.errors import BadRequest
from kvferry.gateway.http.bodies import json_response
from kvferry.gateway.http.generate import prepare
from kvferry.gateway.prompt.prompts import Prompt
from kvferry.gateway.service import Gateway
from kvferry.gateway.telemetry.access_log import record_of
from kvferry.gateway.tokenizer.tokenizer import Tokenizer

ID_BYTES = 4
EXCERPT_TOKENS = 64
"""How much of each text is shown around a difference."""


async def render(gateway: Gateway, request: Request) -> Response:
    """Takes the body of a chat or a completion request, and runs nothing."""
    shape = gateway.admit()
    prepared = await prepare(gateway, request, shape)
    if len(prepared.prompts) != 1:
        raise BadRequest("render takes one prompt.", param="prompt")
    (prompt,) = prepared.prompts
    caller = (record_of(request).tenant, prepared.session)
    before = gateway.last_prompts.swap(caller, prompt.packed)
    answer: dict[str, Any] = {
        "object": "render",
        "model": gateway.model.name,
        "count": prompt.size,
        "max_model_len": shape.max_model_len,
        "block_size": shape.block_size,
    }

    def explain() -> bytes:
        tokenizer = gateway.model.tokenizer
        answer["prompt"] = tokenizer.decode(prompt.ids.tolist(), skip_special=False)
        answer["token_ids"] = prompt.ids.tolist()
        answer["difference"] = None if before is None else difference(before, prompt, tokenizer)
        return orjson.dumps(answer)

    return json_response(await gateway.intake.beside(explain))


def difference(before: bytes, prompt: Prompt, tokenizer: Tokenizer) -> dict[str, Any]:
    """Where `prompt` leaves an earlier one (packed ids): how far they agree, and what follows."""
    at = common_ids(before, prompt.packed)
    old, new = memoryview(before).cast("i"), prompt.ids

    def text(ids: memoryview) -> str:
        return tokenizer.decode(ids.tolist(), skip_special=False)

    return {
        "common_tokens": at,
        "common_characters": len(text(new[:at])),
        "previous_count": len(old),
        "shared": text(new[max(0, at - EXCERPT_TOKENS) : at]),
        "previous": text(old[at : at + EXCERPT_TOKENS]),
        "now": text(new[at : at + EXCERPT_TOKENS]),
    }


def common_ids(first: bytes, second: bytes) -> int:
    """How many leading ids two packed lists share."""
    low, high = 0, min(len(first), len(second)) // ID_BYTES
    one, other = memoryview(first), memoryview(second)
    while low < high:  # a comparison of bytes is so fast that halving beats walking
        middle = (low + high + 1) // 2
        if one[low * ID_BYTES : middle * ID_BYTES] == other[low * ID_BYTES : middle * ID_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
