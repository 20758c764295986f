"""The handlers: one short function a path.

Owns what each path does with the pieces that other modules make, and nothing that has a rule of its
own. Every error is raised; how it is answered is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from importlib import metadata
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from kvferry.gateway import debug
from kvferry.gateway.answers import ChatForm, CompletionForm, Form
from kvferry.gateway.conversation import read_conversation
from kvferry.gateway.edge import record_of
from kvferry.gateway.errors import ApiError, BadRequest, NotFound, NotJson, NotSupported, TooLarge
from kvferry.gateway.generate import Generation, no_node
from kvferry.gateway.metrics import CONTENT_TYPE
from kvferry.gateway.nodes import NoNode
from kvferry.gateway.output import Piece
from kvferry.gateway.parameters import read_chat, read_completion
from kvferry.gateway.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    decode,
)
from kvferry.gateway.service import Gateway
from kvferry.gateway.streaming import DONE, ClientGone, EventStream, event, unless_gone

MAX_DETOKENIZE = 1 << 20
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class Api:
    """All handlers of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._version = metadata.version("kvferry")

    # -- answers -----------------------------------------------------------------------------------

    async def chat_completions(self, request: Request) -> Response:
        gateway = self._gateway
        shape = gateway.admit()
        asked = decode(await self._body(request), ChatRequest)
        gateway.check_model(asked.model)
        params = read_chat(
            asked, gateway.model.vocabulary, test_hooks=gateway.config.enable_test_hooks
        )
        conversation = read_conversation(
            asked.messages,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
            variables=_variables(asked.chat_template_kwargs, asked.reasoning_effort),
        )
        if asked.tools or asked.functions:
            gateway.metrics.ignored_tools()
        tenant = record_of(request).tenant
        prompt = await gateway.prompts.chat(conversation, params, tenant, shape)
        generation = gateway.generation([prompt], params)
        form = ChatForm(generation, gateway.model.name, gateway.model.tokenizer)
        return await self._answer(request, generation, form)

    async def completions(self, request: Request) -> Response:
        gateway = self._gateway
        shape = gateway.admit()
        asked = decode(await self._body(request), CompletionRequest)
        gateway.check_model(asked.model)
        params = read_completion(
            asked, gateway.model.vocabulary, test_hooks=gateway.config.enable_test_hooks
        )
        add = asked.add_special_tokens is not False
        tenant = record_of(request).tenant
        prompts = await gateway.prompts.completions(asked.prompt, add, params, tenant, shape)
        generation = gateway.generation(prompts, params)
        form = CompletionForm(generation, gateway.model.name, gateway.model.tokenizer)
        return await self._answer(request, generation, form)

    async def _answer(self, request: Request, generation: Generation, form: Form) -> Response:
        record_of(request).generation = generation
        if generation.params.stream:
            events = self._events(request, generation, form)
            return EventStream(events, self._gateway.config.sse_keep_alive_interval)
        return await unless_gone(request.receive, self._whole(generation, form))

    async def _whole(self, generation: Generation, form: Form) -> Response:
        count = len(generation.prompts) * generation.params.n
        pieces: list[list[Piece]] = [[] for _ in range(count)]
        async with aclosing(self._gateway.follow(generation)) as updates:
            async for update in updates:
                pieces[update.choice].append(update.piece)
        assert generation.report is not None
        return _json(form.whole(pieces, generation.report))

    async def _events(
        self, request: Request, generation: Generation, form: Form
    ) -> AsyncGenerator[bytes]:
        try:
            async with aclosing(self._gateway.follow(generation)) as updates:
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

    async def _body(self, request: Request) -> bytes:
        """The body, while it is JSON and within the limit."""
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip()
        if kind.lower() != "application/json" and not kind.lower().endswith("+json"):
            raise NotJson("The body must be JSON: send it with Content-Type: application/json.")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise NotJson("The body must not be compressed.")
        limit = self._gateway.config.max_request_bytes
        announced = request.headers.get("content-length", "")
        too_large = TooLarge(f"The body is larger than {limit} bytes, the limit of this server.")
        if announced.isdigit() and int(announced) > limit:
            raise too_large
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_large
        except ClientDisconnect as error:
            raise ClientGone from error
        return bytes(body)

    # -- tokens ------------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        gateway = self._gateway
        asked = decode(await self._body(request), TokenizeRequest)
        gateway.check_model(asked.model)
        if asked.messages is not None:
            conversation = read_conversation(
                asked.messages,
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message,
                variables=_variables(asked.chat_template_kwargs, None),
            )
            ids = await gateway.prompts.chat_ids(conversation)
        elif asked.prompt is not None:
            add = asked.add_special_tokens is not False
            ids = await gateway.prompts.text_ids(asked.prompt, add)
        else:
            raise BadRequest("Give a prompt or messages.", param="prompt")
        names = [gateway.model.tokenizer.name_of(token) for token in ids]
        shape = gateway.nodes.shape
        return _json(
            {
                "count": len(ids),
                "max_model_len": shape.max_model_len if shape is not None else None,
                "tokens": ids,
                "token_strs": names if asked.return_token_strs else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        gateway = self._gateway
        asked = decode(await self._body(request), DetokenizeRequest)
        gateway.check_model(asked.model)
        size = gateway.model.vocabulary.size
        if len(asked.tokens) > MAX_DETOKENIZE:
            raise BadRequest(f"tokens takes at most {MAX_DETOKENIZE} ids.", param="tokens")
        if not all(0 <= token < size for token in asked.tokens):
            raise BadRequest(f"tokens must be ids from 0 to {size - 1}.", param="tokens")
        return _json({"prompt": gateway.model.tokenizer.decode(asked.tokens, skip_special=False)})

    # -- what there is -----------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        cards = [self._card(name) for name in self._gateway.model.names]
        return _json({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._gateway.check_model(name)
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
        asked = decode(await self._body(request), debug.FaultsRequest)
        return _json(await debug.inject(self._gateway, asked))


def unsupported(feature: str) -> Any:
    """A handler for a path whose feature is missing."""

    async def refuse(request: Request) -> Response:
        raise NotSupported(f"{feature} is not supported yet.")

    return refuse


def _variables(kwargs: Mapping[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """What the chat template sees beside the messages."""
    variables = dict(kwargs or {})
    if effort is not None:
        if effort not in _EFFORTS:
            raise BadRequest(
                f"reasoning_effort must be one of {', '.join(_EFFORTS)}.", param="reasoning_effort"
            )
        variables.setdefault("enable_thinking", effort != "none")
        variables["reasoning_effort"] = effort
    return variables


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
