"""The handler of every API that generates text: from the request to the whole answer or its stream.

Owns the order of the steps, from admission to the answer's form. What a body means is for `intake`
and `protocols`, how pieces come about for `router`. Every error is raised; how it is answered is
decided elsewhere.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import orjson
from starlette.requests import Request
from starlette.responses import Response

from kvferry.gateway.errors import ApiError
from kvferry.gateway.http.bodies import json_response, read_body
from kvferry.gateway.http.sse import DONE, EventStream, event, unless_gone
from kvferry.gateway.intake.reader import PreparedRequest, ReadPrompts, TextApi, session_name
from kvferry.gateway.output.choice import Piece
from kvferry.gateway.prompt.prompts import Shape
from kvferry.gateway.protocols.chat import Chat
from kvferry.gateway.protocols.common import Body, Form
from kvferry.gateway.protocols.completions import Completions
from kvferry.gateway.router.generation import Generation, Update
from kvferry.gateway.service import Gateway, Origin
from kvferry.gateway.telemetry.access_log import Record, log_prompts, record_of


async def generate(api: TextApi, gateway: Gateway, request: Request) -> Response:
    """Answers a request for text."""
    prepared = await prepare(gateway, request, gateway.admit(), api)
    if prepared.has_tools:
        gateway.metrics.ignored_tools()
    generation = Generation(
        gateway.nodes,
        gateway.model,
        prepared.prompts,
        prepared.params,
        gateway.timeouts,
        prepared.session,
    )
    form, record = api.form(generation, gateway.model, prepared.echoes), record_of(request)
    if len(prepared.prompts) == 1:
        caller = (record.tenant, prepared.session)
        gateway.last_prompts.swap(caller, prepared.prompts[0].packed)
    record.generation, record.response_id = generation, form.id
    if gateway.config.enable_log_requests:
        log_prompts(record, gateway.model.tokenizer, gateway.config.max_log_len)
    origin = Origin(record.tenant, frozenset({record.request_id, form.id}))
    updates = gateway.follow(generation, origin)
    if generation.params.stream:
        events = _events(generation, updates, form, record)
        return EventStream(events, gateway.config.sse_keep_alive_interval)
    return await unless_gone(request.receive, _whole(generation, updates, form))


async def prepare(
    gateway: Gateway, request: Request, shape: Shape, api: TextApi | None = None
) -> PreparedRequest:
    """What a request comes to; without `api` its body decides which it is."""
    body = await read_body(gateway, request)
    tenant, session = record_of(request).tenant, session_name(request.headers)
    wanted = ReadPrompts(api or api_of(body), tenant, shape, session)
    return await gateway.intake.read(wanted, body)


def api_of(body: Body) -> TextApi:
    """Which API a body is for: one that names messages is a chat's."""
    return Chat() if b'"messages"' in body else Completions()


async def _whole(generation: Generation, updates: AsyncGenerator[Update], form: Form) -> Response:
    count = len(generation.prompts) * generation.params.n
    pieces: list[list[Piece]] = [[] for _ in range(count)]
    async with aclosing(updates):
        async for update in updates:
            pieces[update.choice].append(update.piece)
    assert generation.report is not None
    return json_response(form.whole(pieces, generation.report))


async def _events(
    generation: Generation, updates: AsyncGenerator[Update], form: Form, record: Record
) -> AsyncGenerator[bytes]:
    try:
        async with aclosing(updates):
            async for update in updates:
                yield b"".join(event(orjson.dumps(chunk)) for chunk in form.chunks(update))
    except ApiError as error:
        record.code = error.code or error.kind
        raise
    assert generation.report is not None
    last = b""
    if generation.params.include_usage:
        last = event(orjson.dumps(form.usage_chunk(generation.report)))
    yield last + DONE
