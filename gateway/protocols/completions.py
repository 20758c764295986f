"""`/v1/completions`: what may be continued, how it is read, and how it is answered.

Owns every field name of this API. An answer comes from the pieces of a generation; how they come
about, and server-sent events, are for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from msgspec import UNSET, Struct

from kvferry.gateway.errors import BadRequest
from kvferry.gateway.output.choice import Piece, join
from kvferry.gateway.params import Params, Vocabulary
from kvferry.gateway.prompt.model import ServedModel
from kvferry.gateway.protocols.common import (
    LEAST_LOGPROB,
    Answer,
    Body,
    Choice,
    Count,
    Form,
    Ids,
    Json,
    ParsedRequest,
    ReadingContext,
    Refused,
    TokenId,
    decode,
    ending,
)
from kvferry.gateway.protocols.options import (
    MAX_TOP_LOGPROBS,
    Alternatives,
    Options,
    check_own_fields,
    check_within,
    read_options,
)
from kvferry.gateway.router.generation import Generation, Update
from kvferry.gateway.router.report import Report

DEFAULT_MAX_TOKENS = 16
"""What a request without max_tokens gets; a chat gets the room that is left."""


# -- the request -----------------------------------------------------------------------------------


class CompletionRequest(Options, frozen=True, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: Alternatives | None = None
    echo: bool | None = None

    suffix: Refused = None


def read_completion(
    request: CompletionRequest, vocabulary: Vocabulary, *, test_hooks: bool
) -> Params:
    """A completion's parameters; BadRequest or NotSupported names the first that is wrong."""
    check_own_fields(request)
    if request.logprobs is not None:
        check_within("logprobs", request.logprobs, 0, MAX_TOP_LOGPROBS)
        if request.echo:
            raise BadRequest(
                "echo with logprobs is not supported: a prompt's tokens have none.", param="echo"
            )
    return read_options(
        request,
        vocabulary,
        test_hooks=test_hooks,
        logprobs=request.logprobs,
        max_tokens=request.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        echo=bool(request.echo),
    )


# -- the answer, as it is promised -----------------------------------------------------------------


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[Count]


class CompletionChoice(Choice, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: Ids = UNSET


class Completion(Answer, kw_only=True):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


# -- the answer, as it is written ------------------------------------------------------------------


class CompletionForm(Form):
    """Completions; their chunks are called the same."""

    prefix = "cmpl"
    chunk_object = "text_completion"

    def __init__(
        self, generation: Generation, model: ServedModel, echoes: Sequence[str] = ()
    ) -> None:
        super().__init__(generation, model, echoes)
        self._offsets: dict[int, int] = {}

    def whole(self, pieces: Sequence[Sequence[Piece]], report: Report) -> Json:
        choices = []
        for index, parts in enumerate(pieces):
            piece = join(parts)
            text = self._echo(index) + piece.text
            choice = {"index": index, "text": text, "logprobs": self._logprobs(index, piece)}
            choice |= ending(piece.finish) | self._token_ids(piece)
            choices.append(choice | self._prompt_ids(index // self._params.n))
        answer = self._head | {"choices": choices}
        answer["usage"] = self._usage(self._generation.completion_tokens, report)
        answer["timings"] = self._timings(report)
        return answer

    def chunks(self, update: Update) -> list[Json]:
        piece, index = update.piece, update.choice
        self._streamed += len(piece.tokens)
        choice: Json = {"index": index, "text": piece.text}
        choice["logprobs"] = self._logprobs(index, piece)
        choice |= ending(piece.finish) | self._token_ids(piece)
        if index not in self._started:
            self._started.add(index)
            choice["text"] = self._echo(index) + piece.text
            choice |= self._prompt_ids(index // self._params.n)
        return [self._with_figures(self._head | {"choices": [choice]}, update)]

    def _logprobs(self, index: int, piece: Piece) -> Json | None:
        if self._params.sampling.logprobs is None:
            return None
        offset = self._offsets.get(index, 0)
        offsets = []
        for token in piece.shown:
            offsets.append(offset)
            offset += len(self._bytes(token.token).decode("utf-8", "ignore"))
        self._offsets[index] = offset
        return {
            "tokens": [self._label(token.token) for token in piece.shown],
            "token_logprobs": [max(token.logprob, LEAST_LOGPROB) for token in piece.shown],
            "top_logprobs": [
                {self._label(other): max(value, LEAST_LOGPROB) for other, value in token.top}
                for token in piece.shown
            ],
            "text_offset": offsets,
        }

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._params.n] if self._echoes else ""

    def _label(self, token: int) -> str:
        """A token as this API names it: one that is no text by itself by its bytes."""
        raw = self._tokenizer.bytes_of(token, skip_special=False)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


# -- the API ---------------------------------------------------------------------------------------


class Completions(Struct, frozen=True, tag="completions"):
    """This API, as a value that another process understands, too."""

    form: ClassVar[type[Form]] = CompletionForm

    def parse(self, body: Body, context: ReadingContext) -> ParsedRequest:
        """What a body asks; ApiError for what cannot be served."""
        request = decode(body, CompletionRequest)
        model = context.model
        model.check_name(request.model)
        params = read_completion(request, model.vocabulary, test_hooks=context.test_hooks)
        add = request.add_special_tokens is not False
        return ParsedRequest(params, request.prompt, request.session, add_special_tokens=add)
