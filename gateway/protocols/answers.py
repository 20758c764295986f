"""Answers in OpenAI's two forms: whole, and as the chunks of a stream.

Owns every field name of chat completions and completions on the way out. Both forms are built from
the same pieces, and a whole answer is the joined pieces of the stream it could have been. It knows
nothing of how pieces come about, nor of server-sent events.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Protocol

from msgspec.structs import asdict

from kvferry.gateway.output.choice import Finish, Piece, join
from kvferry.gateway.router.generation import Generation, Update
from kvferry.gateway.router.report import Report
from kvferry.gateway.tokenizer.tokenizer import Tokenizer
from kvferry.kvstore.wire.generation import Token

Json = dict[str, Any]

_LEAST_LOGPROB = -9999.0
"""What minus infinity is called, since JSON has no word for it."""


class Form(Protocol):
    """How one API writes an answer."""

    @property
    def id(self) -> str: ...

    def whole(self, pieces: Sequence[Sequence[Piece]], report: Report) -> Json: ...

    def chunks(self, update: Update) -> list[Json]: ...

    def usage_chunk(self, report: Report) -> Json: ...


class _Common:
    """What the two forms share: the envelope, usage and timings."""

    def __init__(
        self, generation: Generation, model: str, tokenizer: Tokenizer, prefix: str
    ) -> None:
        self._generation = generation
        self._params = generation.params
        self._tokenizer = tokenizer
        self._head: Json = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "object": "",
            "created": int(time.time()),
            "model": model,
        }
        self._started: set[int] = set()
        self._streamed = 0
        """Tokens in the chunks so far."""

    @property
    def id(self) -> str:
        """What the answer is called."""
        name: str = self._head["id"]
        return name

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return self._head | {"object": kind, "choices": choices}

    def _count(self, update: Update) -> None:
        self._streamed += len(update.piece.tokens)

    def _finish_chunk(self, chunk: Json, update: Update) -> Json:
        """A chunk with what belongs to it beside its choice."""
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
        return {
            "prompt_tokens": asdict(report.sources),
            "ttft_ms": {stage: round(ms, 3) for stage, ms in asdict(report.stages).items()},
            "handoff_ms": round(report.handoff_ms, 3),
            "predicted_n": self._generation.completion_tokens,
            "predicted_ms": round(report.predicted_ms, 3),
        }

    def _ids(self, piece: Piece) -> Json:
        if not self._params.return_token_ids:
            return {}
        return {"token_ids": [token.token for token in piece.tokens]}

    def _prompt_ids(self, at: int) -> Json:
        if not self._params.return_prompt_token_ids:
            return {}
        return {"prompt_token_ids": self._generation.prompts[at].ids.tolist()}

    def _name(self, token: int) -> str:
        return self._tokenizer.name_of(token)

    def _bytes(self, token: int) -> bytes:
        skip = self._params.rules.skip_special
        return self._tokenizer.bytes_of(token, skip_special=skip)


class ChatForm(_Common):
    """`/v1/chat/completions`."""

    def __init__(self, generation: Generation, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(generation, model, tokenizer, "chatcmpl")

    def whole(self, pieces: Sequence[Sequence[Piece]], report: Report) -> Json:
        choices = []
        for index, parts in enumerate(pieces):
            piece = join(parts)
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            choice = {"index": index, "message": message, "logprobs": self._logprobs(piece)}
            choices.append(choice | _ending(piece.finish) | self._ids(piece))
        answer = self._envelope("chat.completion", choices)
        answer["usage"] = self._usage(self._generation.completion_tokens, report)
        answer["timings"] = self._timings(report)
        return answer | self._prompt_ids(0)

    def chunks(self, update: Update) -> list[Json]:
        before = self._streamed
        self._count(update)
        piece, chunks = update.piece, []
        if update.choice not in self._started:
            self._started.add(update.choice)
            # Only now: a client takes its arrival for the first token's.
            role = self._chunk(update, {"role": "assistant", "content": ""}, None, {})
            if self._params.continuous_usage:
                role["usage"] = self._usage(before, None)
            chunks.append(role | self._prompt_ids(0) if len(self._started) == 1 else role)
        if piece.text or piece.shown:
            delta = {"content": piece.text}
            chunks.append(self._chunk(update, delta, self._logprobs(piece), self._ids(piece)))
        if piece.finish is not None:
            ids = {} if piece.text or piece.shown else self._ids(piece)
            last = self._chunk(update, {}, None, _ending(piece.finish) | ids)
            chunks.append(self._finish_chunk(last, update))
        if self._params.continuous_usage:
            for chunk in chunks:
                chunk.setdefault("usage", self._usage(self._streamed, None))
        return chunks

    def usage_chunk(self, report: Report) -> Json:
        chunk = self._envelope("chat.completion.chunk", [])
        chunk["usage"] = self._usage(self._generation.completion_tokens, report)
        return chunk

    def _chunk(self, update: Update, delta: Json, logprobs: Json | None, more: Json) -> Json:
        choice = {
            "index": update.choice,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None,
        }
        return self._envelope("chat.completion.chunk", [choice | more])

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
            "token": self._name(token),
            "logprob": max(logprob, _LEAST_LOGPROB),
            "bytes": list(self._bytes(token)),
        }


class CompletionForm(_Common):
    """`/v1/completions`."""

    def __init__(
        self,
        generation: Generation,
        model: str,
        tokenizer: Tokenizer,
        echoes: Sequence[str] = (),
    ) -> None:
        super().__init__(generation, model, tokenizer, "cmpl")
        self._echoes = echoes
        """What the texts begin with, one a prompt, if anything."""
        self._offsets: dict[int, int] = {}

    def whole(self, pieces: Sequence[Sequence[Piece]], report: Report) -> Json:
        choices = []
        for index, parts in enumerate(pieces):
            piece = join(parts)
            text = self._echo(index) + piece.text
            choice = {"index": index, "text": text, "logprobs": self._logprobs(index, piece)}
            choice |= _ending(piece.finish) | self._ids(piece)
            choices.append(choice | self._prompt_ids(index // self._params.n))
        answer = self._envelope("text_completion", choices)
        answer["usage"] = self._usage(self._generation.completion_tokens, report)
        answer["timings"] = self._timings(report)
        return answer

    def chunks(self, update: Update) -> list[Json]:
        self._count(update)
        piece, index = update.piece, update.choice
        choice: Json = {"index": index, "text": piece.text}
        choice["logprobs"] = self._logprobs(index, piece)
        choice["finish_reason"] = None
        if piece.finish is not None:
            choice |= _ending(piece.finish)
        choice |= self._ids(piece)
        if index not in self._started:
            self._started.add(index)
            choice["text"] = self._echo(index) + piece.text
            choice |= self._prompt_ids(index // self._params.n)
        return [self._finish_chunk(self._envelope("text_completion", [choice]), update)]

    def usage_chunk(self, report: Report) -> Json:
        chunk = self._envelope("text_completion", [])
        chunk["usage"] = self._usage(self._generation.completion_tokens, report)
        return chunk

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
            "token_logprobs": [max(token.logprob, _LEAST_LOGPROB) for token in piece.shown],
            "top_logprobs": [
                {self._label(other): max(value, _LEAST_LOGPROB) for other, value in token.top}
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


def _ending(finish: Finish | None) -> Json:
    if finish is None:
        return {"finish_reason": None}
    return {"finish_reason": finish.reason, "stop_reason": finish.matched}
