"""`/v1/chat/completions`: what a chat may ask, how it is read, and how it is answered.

Owns every field name of this API. An answer comes from the pieces of a generation; how they come
about, and server-sent events, are for others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct

from kvferry.gateway.errors import BadRequest, NotSupported
from kvferry.gateway.output.choice import Piece, join
from kvferry.gateway.params import Params, Vocabulary
from kvferry.gateway.prompt.conversation import read_conversation
from kvferry.gateway.prompt.messages import Message
from kvferry.gateway.protocols.common import (
    LEAST_LOGPROB,
    Answer,
    Body,
    Choice,
    Form,
    Ids,
    Json,
    ParsedRequest,
    ReadingContext,
    Refused,
    decode,
    ending,
)
from kvferry.gateway.protocols.options import (
    MAX_TOP_LOGPROBS,
    Alternatives,
    Options,
    Some,
    check_own_fields,
    check_within,
    read_options,
)
from kvferry.gateway.router.generation import Update
from kvferry.gateway.router.report import Report
from kvferry.kvstore.wire.generation import Token

CHECKED_AND_IGNORED = ("functions", "tools")
"""Fields that must be well formed, but that only the chat template sees, if at all."""
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


# -- the request -----------------------------------------------------------------------------------


class ToolFunction(Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Struct, frozen=True):
    type: str
    function: ToolFunction | None = None


class ChatRequest(Options, frozen=True, kw_only=True):
    messages: list[Message]
    max_completion_tokens: Some | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[ToolFunction] | None = None
    function_call: str | dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    audio: Refused = None
    echo: Refused = None
    modalities: list[str] | None = None
    web_search_options: Refused = None


def read_chat(request: ChatRequest, vocabulary: Vocabulary, *, test_hooks: bool) -> Params:
    """A chat's parameters; BadRequest or NotSupported names the first that is wrong."""
    check_own_fields(request)
    _check_tools(request)
    if "audio" in (request.modalities or ()):
        raise BadRequest("modalities: this model answers in text only.", param="modalities")
    top = request.top_logprobs
    if top is not None:
        check_within("top_logprobs", top, 0, MAX_TOP_LOGPROBS)
        if top > 0 and not request.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    name, wanted = "max_completion_tokens", request.max_completion_tokens
    if wanted is None:
        name, wanted = "max_tokens", request.max_tokens
    return read_options(
        request,
        vocabulary,
        test_hooks=test_hooks,
        logprobs=(top or 0) if request.logprobs else None,
        max_tokens=wanted,
        max_tokens_name=name,
    )


def _check_tools(request: ChatRequest) -> None:
    for at, tool in enumerate(request.tools or ()):
        if tool.type == "function" and tool.function is None:
            raise BadRequest(f"tools[{at}] has no function.", param=f"tools[{at}].function")
    for name in ("tool_choice", "function_call"):
        choice = getattr(request, name)
        if choice is None or choice in ("none", "auto"):
            continue
        if choice == "required" or isinstance(choice, dict):
            raise NotSupported("Tool calls cannot be forced yet.", param=name)
        raise BadRequest(f"{name} must be 'none' or 'auto'.", param=name)


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


# -- the answer, as it is promised -----------------------------------------------------------------


class Alternative(Struct):
    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]]


class ChatLogprob(Alternative):
    top_logprobs: list[Alternative]


class ChatLogprobs(Struct):
    content: list[ChatLogprob]
    refusal: None


class ChatMessage(Struct):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Choice, kw_only=True):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(Answer, kw_only=True):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: Ids = UNSET


# -- the answer, as it is written ------------------------------------------------------------------


class ChatForm(Form):
    """Chat completions, and their chunks."""

    prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"

    def whole(self, pieces: Sequence[Sequence[Piece]], report: Report) -> Json:
        choices = []
        for index, parts in enumerate(pieces):
            piece = join(parts)
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            choice = {"index": index, "message": message, "logprobs": self._logprobs(piece)}
            choices.append(choice | ending(piece.finish) | self._token_ids(piece))
        answer = self._head | {"object": "chat.completion", "choices": choices}
        answer["usage"] = self._usage(self._generation.completion_tokens, report)
        answer["timings"] = self._timings(report)
        return answer | self._prompt_ids(0)

    def chunks(self, update: Update) -> list[Json]:
        piece, index, before, chunks = update.piece, update.choice, self._streamed, []
        self._streamed += len(piece.tokens)
        ids = self._token_ids(piece)
        if index not in self._started:
            # Only now: a client takes its arrival for the first token's.
            role = self._chunk(index, {"role": "assistant", "content": ""}, None, {})
            if self._params.continuous_usage:
                role["usage"] = self._usage(before, None)
            chunks.append(role if self._started else role | self._prompt_ids(0))
            self._started.add(index)
        if piece.text or piece.shown:
            delta = {"content": piece.text}
            chunks.append(self._chunk(index, delta, self._logprobs(piece), ids))
            ids = {}
        if piece.finish is not None:
            last = self._chunk(index, {}, None, ending(piece.finish) | ids)
            chunks.append(self._with_figures(last, update))
        if self._params.continuous_usage:
            for chunk in chunks:
                chunk.setdefault("usage", self._usage(self._streamed, None))
        return chunks

    def _chunk(self, index: int, delta: Json, logprobs: Json | None, more: Json) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return self._head | {"choices": [choice | more]}

    def _logprobs(self, piece: Piece) -> Json | None:
        if self._params.sampling.logprobs is None:
            return None
        return {"content": [self._entry(token) for token in piece.shown], "refusal": None}

    def _entry(self, token: Token) -> Json:
        entry = self._alternative(token.token, token.logprob)
        entry["top_logprobs"] = [self._alternative(*pair) for pair in token.top]
        return entry

    def _alternative(self, token: int, logprob: float) -> Json:
        return {
            "token": self._tokenizer.name_of(token),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(self._bytes(token)),
        }


# -- the API ---------------------------------------------------------------------------------------


class Chat(Struct, frozen=True, tag="chat"):
    """This API, as a value that another process understands, too."""

    form: ClassVar[type[Form]] = ChatForm

    def parse(self, body: Body, context: ReadingContext) -> ParsedRequest:
        """What a body asks; ApiError for what cannot be served."""
        request = decode(body, ChatRequest)
        model = context.model
        model.check_name(request.model)
        params = read_chat(request, model.vocabulary, test_hooks=context.test_hooks)
        conversation = read_conversation(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=_variables(request.chat_template_kwargs, request.reasoning_effort),
        )
        has_tools = bool(request.tools or request.functions)
        return ParsedRequest(params, conversation, request.session, has_tools=has_tools)
