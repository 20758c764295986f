"""The handlers: one short function a path.

Owns what each path does with the pieces that other modules make, and nothing that has a rule of its
own. Every error is raised; how it is answered is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kvferry.gateway.errors import ApiError, NotFound, NotJson, NotSupported, TooLarge
from kvferry.gateway.http import debug
from kvferry.gateway.http.edge import origin_of, record_of
from kvferry.gateway.http.openapi import document
from kvferry.gateway.http.sse import DONE, ClientGone, EventStream, event, unless_gone
from kvferry.gateway.intake.reader import Taken, is_large
from kvferry.gateway.intake.session import session_of
from kvferry.gateway.output.choice import Piece
from kvferry.gateway.prompt.prompts import Shape
from kvferry.gateway.protocols.answers import ChatForm, CompletionForm, Form
from kvferry.gateway.protocols.schemas import decode
from kvferry.gateway.router.generation import Generation, no_node
from kvferry.gateway.router.nodes import NoNode
from kvferry.gateway.service import Gateway, Origin
from kvferry.gateway.telemetry.access_log import log_prompts
from kvferry.gateway.telemetry.metrics import CONTENT_TYPE

PATIENCE = 4
"""How many times the limit is read of a body that exceeds it. Most clients read no answer before
they have sent all of theirs, and one who sends into a closed connection may never see it."""


@dataclass(frozen=True, slots=True)
class Asking:
    """A body that has been read: what to compute, how, and for which conversation."""

    taken: Taken
    session: bytes


class Api:
    """All handlers of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._version = metadata.version("kvferry")
        self._document = orjson.dumps(document(self._version))

    # -- answers -----------------------------------------------------------------------------------

    async def chat_completions(self, request: Request) -> Response:
        asking = await self.asking(request, self._gateway.admit(), "chat")
        if asking.taken.has_tools:
            self._gateway.metrics.ignored_tools()
        generation = self._generation(asking)
        form = ChatForm(generation, self._gateway.model.name, self._gateway.model.tokenizer)
        return await self._answer(request, asking, generation, form)

    async def completions(self, request: Request) -> Response:
        asking = await self.asking(request, self._gateway.admit(), "completions")
        generation = self._generation(asking)
        name, tokenizer = self._gateway.model.name, self._gateway.model.tokenizer
        form = CompletionForm(generation, name, tokenizer, asking.taken.echoes)
        return await self._answer(request, asking, generation, form)

    async def asking(self, request: Request, shape: Shape, method: str = "") -> Asking:
        """What a request comes to; without `method` a body that names messages is a chat's."""
        tenant = record_of(request).tenant
        taken = await self.taken(await self.body(request), tenant, shape, method)
        return Asking(taken, session_of(request.headers, tenant, *taken.session_names))

    async def taken(self, body: bytearray, tenant: str, shape: Shape, method: str = "") -> Taken:
        """What a body comes to when that tenant sends it."""
        method = method or ("chat" if b'"messages"' in body else "completions")
        taken: Taken = await self._read(method, body, tenant, shape)
        return taken

    async def _read(self, method: str, body: bytearray, *arguments: Any) -> Any:
        """What the body asks for, read where that keeps no stream waiting."""
        if is_large(body):
            return await self._gateway.apart.read(method, body, *arguments)
        return await getattr(self._gateway.reader, method)(body, *arguments)

    def _generation(self, asking: Asking) -> Generation:
        taken = asking.taken
        return self._gateway.generation(taken.prompts, taken.params, asking.session)

    async def _answer(
        self, request: Request, asking: Asking, generation: Generation, form: Form
    ) -> Response:
        gateway, record = self._gateway, record_of(request)
        if len(generation.prompts) == 1:
            caller = (record.tenant, asking.session)
            gateway.last_prompts.swap(caller, generation.prompts[0].packed)
        record.generation, record.response_id = generation, form.id
        if gateway.config.enable_log_requests:
            log_prompts(record, gateway.model.tokenizer, gateway.config.max_log_len)
        if generation.params.stream:
            events = self._events(request, generation, form)
            return EventStream(events, self._gateway.config.sse_keep_alive_interval)
        whole = self._whole(generation, form, origin_of(record))
        return await unless_gone(request.receive, whole)

    async def _whole(self, generation: Generation, form: Form, origin: Origin) -> Response:
        count = len(generation.prompts) * generation.params.n
        pieces: list[list[Piece]] = [[] for _ in range(count)]
        async with aclosing(self._gateway.follow(generation, origin)) as updates:
            async for update in updates:
                pieces[update.choice].append(update.piece)
        assert generation.report is not None
        return _json(form.whole(pieces, generation.report))

    async def _events(
        self, request: Request, generation: Generation, form: Form
    ) -> AsyncGenerator[bytes]:
        origin = origin_of(record_of(request))
        try:
            async with aclosing(self._gateway.follow(generation, origin)) as updates:
                async for update in updates:
                    chunks = form.chunks(update)
                    yield b"".join(event(orjson.dumps(chunk)) for chunk in chunks)
        except ApiError as error:
            record_of(request).code = error.code or error.kind
            raise
        assert generation.report is not None
        last = b""
        if generation.params.include_usage:
            last = event(orjson.dumps(form.usage_chunk(generation.report)))
        yield last + DONE

    async def body(self, request: Request) -> bytearray:
        """The body, while it is JSON and within the limit."""
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip()
        if kind.lower() != "application/json" and not kind.lower().endswith("+json"):
            raise NotJson("The body must be JSON: send it with Content-Type: application/json.")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise NotJson("The body must not be compressed.")
        limit = self._gateway.config.max_request_bytes
        too_large = TooLarge(f"The body is larger than {limit} bytes, the limit of this server.")
        announced = request.headers.get("content-length", "")
        waits = request.headers.get("expect", "").lower() == "100-continue"
        if waits and announced.isdigit() and int(announced) > limit:
            raise too_large
        body, size = bytearray(), 0
        try:
            async for part in request.stream():
                size += len(part)
                if size <= limit:
                    body += part
                elif size > PATIENCE * limit:
                    break
        except ClientDisconnect as error:
            raise ClientGone from error
        if size > limit:
            raise too_large
        return body

    # -- tokens ------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        shape = self._gateway.nodes.shape
        limit = shape.max_model_len if shape is not None else None
        tenant = record_of(request).tenant
        return _ready_json(await self._read("tokenize", await self.body(request), tenant, limit))

    async def detokenize(self, request: Request) -> Response:
        return _ready_json(await self._read("detokenize", await self.body(request)))

    # -- what there is -----------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        cards = [self._card(name) for name in self._gateway.model.names]
        return _json({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._gateway.model.check_name(name)
        return _json(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        shape = self._gateway.nodes.shape
        return {
            "id": name,
            "object": "model",
            "created": self._gateway.model.created,
            "owned_by": "kvferry",
            "max_model_len": shape.max_model_len if shape is not None else None,
        }

    async def root(self, request: Request) -> Response:
        return _json({"name": "kvferry", "version": self._version})

    async def version(self, request: Request) -> Response:
        return _json({"version": self._version})

    async def openapi(self, request: Request) -> Response:
        return _ready_json(self._document)

    # -- how it is ---------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        return Response()

    async def ready(self, request: Request) -> Response:
        gateway = self._gateway
        if gateway.draining:
            raise no_node(NoNode("draining"))
        if not gateway.nodes.ready:
            raise no_node(NoNode("loading" if gateway.nodes.shape is None else "lost"))
        absent = [node.address for node in gateway.nodes if node.stalled or not node.usable]
        return _json({"status": "degraded" if absent else "ready", "absent": absent})

    async def metrics(self, request: Request) -> Response:
        return Response(self._gateway.metrics.page(), media_type=CONTENT_TYPE)

    async def ledger(self, request: Request) -> Response:
        if not self._gateway.config.enable_debug:
            raise NotFound("The server was started without --enable-debug.")
        return _json(await debug.ledger(self._gateway))

    async def faults(self, request: Request) -> Response:
        if not self._gateway.config.enable_test_hooks:
            raise NotFound("The server was started without --enable-test-hooks.")
        asked = decode(await self.body(request), debug.FaultsRequest)
        return _json(await debug.inject(self._gateway, asked))


def unsupported(feature: str) -> Any:
    """A handler for a path whose feature is missing."""

    async def refuse(request: Request) -> Response:
        raise NotSupported(f"{feature} is not supported yet.")

    return refuse


def _json(value: Any) -> Response:
    return _ready_json(orjson.dumps(value))


def _ready_json(text: bytes) -> Response:
    return Response(text, media_type="application/json")
