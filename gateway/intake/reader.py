"""From the bytes of a body to what the nodes need: parameters and prompts.

Owns the order of the checks, one function a path, and where they run: a small body is read where it
is, a larger one on a thread. Decoding one holds the interpreter, so one whose decoding alone would
take as long as several tokens is not for this process; `is_large` says which. It knows neither HTTP
nor nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson

from kvferry.gateway.errors import BadRequest
from kvferry.gateway.params import Params
from kvferry.gateway.prompt.conversation import Conversation, read_conversation
from kvferry.gateway.prompt.model import ServedModel
from kvferry.gateway.prompt.prompts import Prompt, PromptMaker, Shape, parts_of
from kvferry.gateway.protocols.parameters import read_chat, read_completion
from kvferry.gateway.protocols.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    decode,
)

INLINE_BYTES = 16 << 10
"""Bodies up to this size are decoded and checked on the event loop: 2 ms if they are all objects,
0.1 ms if they are text."""
LARGE_BYTES = 1 << 20
"""Decoding this much holds the interpreter for 6 ms if it is text with escapes, 20 ms if ids."""
LARGE_OBJECTS = 20_000
"""Decoding this many takes 20 ms, a few more characters each."""
MAX_IDS = 1 << 20
"""Most ids that /tokenize answers and /detokenize takes."""
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

Body = bytes | bytearray
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Taken:
    """A request that has passed every check that needs no node."""

    params: Params
    prompts: list[Prompt]
    echoes: list[str]
    """Texts of the prompts, if the answer shall begin with them."""
    has_tools: bool
    session_names: tuple[str, ...]
    """What the body calls the conversation, the better name first."""


def is_large(body: Body) -> bool:
    """Whether to decode it would keep the event loop of this process waiting."""
    return len(body) > LARGE_BYTES or (
        len(body) > INLINE_BYTES and body.count(b"{") > LARGE_OBJECTS
    )


class Reader:
    """Reads bodies for one model. Every method raises ApiError for what cannot be served."""

    def __init__(
        self, model: ServedModel, prompts: PromptMaker, executor: Executor, *, test_hooks: bool
    ) -> None:
        self._model = model
        self._prompts = prompts
        self._executor = executor
        self._test_hooks = test_hooks

    async def chat(self, body: Body, tenant: str, shape: Shape) -> Taken:
        """`/v1/chat/completions`."""
        asked, params, conversation = await self._run(body, lambda: self._chat(body))
        prompt = await self._prompts.chat(conversation, params, tenant, shape)
        tools = bool(asked.tools or asked.functions)
        return Taken(params, [prompt], [], tools, _session_names(asked))

    async def completions(self, body: Body, tenant: str, shape: Shape) -> Taken:
        """`/v1/completions`."""
        asked, params = await self._run(body, lambda: self._completion(body))
        add = asked.add_special_tokens is not False
        prompts = await self._prompts.completions(asked.prompt, add, params, tenant, shape)
        echoes = self._echoes(asked, params) if params.echo else []
        return Taken(params, prompts, echoes, False, _session_names(asked))

    async def tokenize(self, body: Body, tenant: str, max_model_len: int | None) -> bytes:
        """`/tokenize`: the answer's JSON."""
        asked = await self._run(body, lambda: self._decoded(body, TokenizeRequest))
        if asked.messages is not None:
            conversation = read_conversation(
                asked.messages,
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message,
                variables=_variables(asked.chat_template_kwargs, None),
            )
            ids = (await self._prompts.chat_text(conversation, tenant)).ids
        elif asked.prompt is not None:
            add = asked.add_special_tokens is not False
            ids = await self._prompts.text_ids(asked.prompt, add)
        else:
            raise BadRequest("Give a prompt or messages.", param="prompt")
        if len(ids) > MAX_IDS:
            text = f"These are {len(ids)} tokens; /tokenize answers at most {MAX_IDS}."
            raise BadRequest(text, param="prompt" if asked.messages is None else "messages")

        def answer() -> bytes:
            names = [self._model.tokenizer.name_of(token) for token in ids]
            return orjson.dumps(
                {
                    "count": len(ids),
                    "max_model_len": max_model_len,
                    "tokens": ids,
                    "token_strs": names if asked.return_token_strs else None,
                }
            )

        return await self._run(body, answer)

    async def detokenize(self, body: Body) -> bytes:
        """`/detokenize`: the answer's JSON."""
        return await self._run(body, lambda: self._detokenize(body))

    # -- the work, on whichever thread -------------------------------------------------------------

    async def _run(self, body: Body, work: Callable[[], T]) -> T:
        if len(body) <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _decoded(self, body: Body, kind: type[T]) -> T:
        asked = decode(body, kind)
        self._model.check_name(getattr(asked, "model", None))
        return asked

    def _chat(self, body: Body) -> tuple[ChatRequest, Params, Conversation]:
        asked = self._decoded(body, ChatRequest)
        params = read_chat(asked, self._model.vocabulary, test_hooks=self._test_hooks)
        conversation = read_conversation(
            asked.messages,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
            variables=_variables(asked.chat_template_kwargs, asked.reasoning_effort),
        )
        return asked, params, conversation

    def _completion(self, body: Body) -> tuple[CompletionRequest, Params]:
        asked = self._decoded(body, CompletionRequest)
        return asked, read_completion(asked, self._model.vocabulary, test_hooks=self._test_hooks)

    def _echoes(self, asked: CompletionRequest, params: Params) -> list[str]:
        skip, tokenizer = params.rules.skip_special, self._model.tokenizer
        return [
            part if isinstance(part, str) else tokenizer.decode(list(part), skip_special=skip)
            for part in parts_of(asked.prompt)
        ]

    def _detokenize(self, body: Body) -> bytes:
        tokens = self._decoded(body, DetokenizeRequest).tokens
        size = self._model.vocabulary.size
        if len(tokens) > MAX_IDS:
            raise BadRequest(f"tokens takes at most {MAX_IDS} ids.", param="tokens")
        if not all(0 <= token < size for token in tokens):
            raise BadRequest(f"tokens must be ids from 0 to {size - 1}.", param="tokens")
        return orjson.dumps({"prompt": self._model.tokenizer.decode(tokens, skip_special=False)})


def _session_names(asked: ChatRequest | CompletionRequest) -> tuple[str, ...]:
    names = (asked.prompt_cache_key, asked.session_id)
    return tuple(name for name in names if isinstance(name, str) and name)


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
