"""What all APIs have in common: how a body is decoded, and the envelope of an answer.

Owns the refusal of a body that does not fit, the fields that are refused whatever they hold, and
what every generated answer says beside its text: its name, usage and timings. What one API asks and
answers is in a module of its own; nothing here knows a path or how pieces come about.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, defstruct, structs

from kvferry.gateway.errors import BadRequest
from kvferry.gateway.output.choice import Finish, Piece
from kvferry.gateway.params import Params
from kvferry.gateway.prompt.conversation import Conversation
from kvferry.gateway.prompt.model import ServedModel
from kvferry.gateway.prompt.prompts import CompletionPrompt, PromptMaker
from kvferry.gateway.router.generation import Generation, Update
from kvferry.gateway.router.report import Report
from kvferry.kvstore.wire.generation import SOURCES, STAGES

Body = bytes | bytearray
Json = dict[str, Any]
T = TypeVar("T")

LEAST_LOGPROB = -9999.0
"""What minus infinity is called, since JSON has no word for it."""


# -- requests --------------------------------------------------------------------------------------


def hint(**schema: Any) -> Meta:
    """What the OpenAPI document says of values; they are checked elsewhere, with better words."""
    return Meta(extra_json_schema=schema)


TokenId = Annotated[int, hint(minimum=0)]
_REFUSED = Meta(
    description="Refused with 400, unless it is null, false or empty.", extra={"refused": True}
)
Refused = Annotated[Any, _REFUSED]
"""A field that is not there, and to ignore it would change the answer."""


@cache
def refused_fields(kind: type[Struct]) -> tuple[str, ...]:
    """The names of a request's `Refused` fields."""
    types = ((field.name, field.type) for field in structs.fields(kind))
    return tuple(name for name, it in types if _REFUSED in getattr(it, "__metadata__", ()))


@dataclass(frozen=True, slots=True)
class ReadingContext:
    """What bodies are read with. Safe to use from several threads."""

    model: ServedModel
    prompts: PromptMaker
    test_hooks: bool


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request whose values are good, as far as that can be told without its prompt."""

    params: Params
    prompt: Conversation | CompletionPrompt
    session: str
    """What it calls its conversation, if anything."""
    add_special_tokens: bool = True
    has_tools: bool = False


def decode(body: Body, kind: type[T]) -> T:
    """A body as a request.

    Raises
    ------
    BadRequest
        The body is not JSON, or not of this shape; `param` is the path of the culprit.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _misfit(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"The body is not valid JSON: {str(error)[:200]}") from error
    except RecursionError as error:
        raise BadRequest("The body is nested too deeply.") from error


def _misfit(text: str) -> BadRequest:
    """msgspec says `what - at `$.path``; a missing field it names in the text."""
    what, _, path = text.partition(" - at `")
    place = path.rstrip("`").removeprefix("$").removeprefix(".")
    if what.startswith("Object missing required field"):
        field = what.split("`")[1]
        place = f"{place}.{field}" if place else field
    where = f"{place[:200]}: " if place else ""
    return BadRequest(f"{where}{what[:300]}", param=place[:200] or None)


# -- answers, as they are promised -----------------------------------------------------------------

Count = Annotated[int, Meta(ge=0)]
Ids = list[Count] | UnsetType


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    """Every refusal and failure, on every path."""

    error: ErrorDetail


class CachedTokens(Struct):
    cached_tokens: Count


class Usage(Struct):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens


PromptTokens: Any = defstruct(
    "PromptTokens",
    [(source, Count) for source in SOURCES],
    namespace={"__doc__": "Where the prompt's KV came from."},
)
FirstToken: Any = defstruct(
    "FirstToken",
    [(stage, float) for stage in STAGES],
    namespace={"__doc__": "Milliseconds to the first token, by stage."},
)


class Timings(Struct):
    prompt_tokens: PromptTokens
    ttft_ms: FirstToken
    handoff_ms: float
    predicted_n: Count
    predicted_ms: float


class Choice(Struct, kw_only=True):
    index: Count
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    """The stop string or token, if one ended it."""
    token_ids: Ids = UNSET


class Answer(Struct, kw_only=True):
    id: str
    created: int
    model: str
    usage: Usage
    timings: Timings


# -- answers, as they are written ------------------------------------------------------------------


class Form(ABC):
    """How one API writes the answer of a generation: whole, or as the chunks of a stream.

    Both are built from the same pieces: a whole answer is the joined pieces of the stream it could
    have been. `echoes` are the texts that the answer shall begin with, one a prompt, if any.
    """

    prefix: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self, generation: Generation, model: ServedModel, echoes: Sequence[str] = ()
    ) -> None:
        self._generation = generation
        self._params = generation.params
        self._tokenizer = model.tokenizer
        self._echoes = echoes
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        """What the answer is called."""
        self._head: Json = {
            "id": self.id,
            "object": self.chunk_object,
            "created": int(time.time()),
            "model": model.name,
        }
        self._started: set[int] = set()
        """Choices of which there was a chunk."""
        self._streamed = 0
        """Tokens in the chunks so far."""

    @abstractmethod
    def whole(self, pieces: Sequence[Sequence[Piece]], report: Report) -> Json:
        """The answer of these pieces, a list a choice."""

    @abstractmethod
    def chunks(self, update: Update) -> list[Json]:
        """What a stream says of an update."""

    def usage_chunk(self, report: Report) -> Json:
        """A stream's last chunk, for whoever asked for it."""
        usage = self._usage(self._generation.completion_tokens, report)
        return self._head | {"choices": [], "usage": usage}

    def _with_figures(self, chunk: Json, update: Update) -> Json:
        """A chunk with what is known of the whole answer after it."""
        if self._params.continuous_usage:
            chunk["usage"] = self._usage(self._streamed, update.report)
        if update.report is not None:
            chunk["timings"] = self._timings(update.report)
        return chunk

    def _usage(self, completion_tokens: int, report: Report | None) -> Json:
        prompt_tokens = self._generation.prompt_tokens
        usage: Json = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        # Earlier it is not known; nor ever, if the node's account was lost with it.
        if report is not None and report.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": report.cached_tokens}
        return usage

    def _timings(self, report: Report) -> Json:
        stages = structs.asdict(report.stages)
        return {
            "prompt_tokens": structs.asdict(report.sources),
            "ttft_ms": {name: round(value, 3) for name, value in stages.items()},
            "handoff_ms": round(report.handoff_ms, 3),
            "predicted_n": self._generation.completion_tokens,
            "predicted_ms": round(report.predicted_ms, 3),
        }

    def _token_ids(self, piece: Piece) -> Json:
        if not self._params.return_token_ids:
            return {}
        return {"token_ids": [token.token for token in piece.tokens]}

    def _prompt_ids(self, at: int) -> Json:
        if not self._params.return_prompt_token_ids:
            return {}
        return {"prompt_token_ids": self._generation.prompts[at].ids.tolist()}

    def _bytes(self, token: int) -> bytes:
        skip = self._params.rules.skip_special
        return self._tokenizer.bytes_of(token, skip_special=skip)


def ending(finish: Finish | None) -> Json:
    """How a choice says why it ended."""
    if finish is None:
        return {"finish_reason": None}
    return {"finish_reason": finish.reason, "stop_reason": finish.matched}
