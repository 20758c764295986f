"""One choice's way from token ids to the text that is shown, never half a character.

Owns the choice's UTF-8 decoder and stop strings, and joins what belongs together: which tokens a
piece of text comes from (for logprobs and returned ids), how many tokens count, and why it ended.
Everything an answer says about a choice comes from the pieces it yields, whether they are sent one
by one or joined. It knows no API and no node.
"""

from __future__ import annotations

import codecs
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.gateway.output.stops import StopMatcher
from kvferry.gateway.params import OutputRules
from kvferry.gateway.tokenizer.tokenizer import Tokenizer
from kvferry.kvstore.wire.generation import Token

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class Finish:
    reason: str
    """`stop` or `length`."""
    matched: str | int | None = None
    """The stop string or stop token id that ended it; None for the model's own end."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of text and the tokens whose last character lies in it."""

    text: str
    tokens: tuple[Token, ...]
    """All tokens that count."""
    shown: tuple[Token, ...]
    """Those that have a part in the text: these have logprobs."""
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """A choice's text as it was shown, and where in it the tokens are that it comes from."""

    text: str
    ids: array[int]
    """All tokens that have a part in the decoded text, of which the shown one is the beginning."""
    starts: array[int]
    ends: array[int]
    """Characters of the decoded text that each token spans; one that ends inside a character ends
    behind it."""

    def cut(self, size: int) -> tuple[array[int], str]:
        """The tokens that lie whole within the first `size` characters, and the text behind them.

        They end together: no token that is left out has a part in those that are taken.
        """
        beyond = bisect_right(self.ends, size)
        if beyond == len(self.ids):
            return self.ids[:], ""
        border = self.starts[beyond]
        while (whole := bisect_right(self.ends, border)) < beyond:  # it shares a character
            beyond, border = whole, self.starts[whole]
        return self.ids[:beyond], self.text[border:size]


@dataclass(slots=True)
class _Pending:
    """A token whose text is not released yet: it spans these characters of the whole text."""

    token: Token
    start: int
    end: int
    shown: bool


class Choice:
    """Tokens in, pieces out, until one has a finish."""

    def __init__(self, tokenizer: Tokenizer, rules: OutputRules) -> None:
        self.kept = 0
        """Tokens that count so far; with a finish, the final number."""
        self.finish: Finish | None = None
        self._tokenizer = tokenizer
        self._rules = rules
        self._utf8 = _Utf8Decoder(errors="replace")
        """Holds back a tail that may still become a character; at the end it reads U+FFFD, as in a
        decode of the whole answer. The prompt is never fed in."""
        self._matcher = StopMatcher(rules.stops, include=rules.include_stop)
        self._decoded = 0
        self._released = 0
        self._pending: deque[_Pending] = deque()
        self._shown: list[str] = []
        self._ids, self._starts, self._ends = array("i"), array("i"), array("i")

    @property
    def reply(self) -> Reply:
        """What was shown so far, and its tokens."""
        text = "".join(self._shown)
        return Reply(text, self._ids[:], self._starts[:], self._ends[:])

    def push(self, token: Token) -> Piece | None:
        """The piece that this token completes, if any. Tokens behind the end are ignored."""
        if self.finish is not None:
            return None
        self.kept += 1
        ends = _finish_of(token)
        text = self._decode(token, ends)
        armed = self.kept > self._rules.min_tokens
        released = self._matcher.push(text, armed=armed, final=ends is not None)
        if released.stop is not None:
            ends = Finish("stop", released.stop)
        if ends is not None:
            return self._end(released.text, ends)
        return self._release(released.text)

    def _decode(self, token: Token, ends: Finish | None) -> str:
        silent, raw = False, b""
        if ends is not None and ends.reason == "stop":
            silent = ends.matched is None or not self._rules.include_stop
        if not silent:
            skip = self._rules.skip_special
            raw = self._tokenizer.bytes_of(token.token, skip_special=skip)
        start = self._decoded
        text = self._utf8.decode(raw, final=ends is not None)
        self._decoded += len(text)
        # A token that ends inside a character is complete once that character is.
        end = self._decoded + bool(self._utf8.getstate()[0])
        self._pending.append(_Pending(token, start, end, not silent))
        if not silent:
            self._ids.append(token.token)
            self._starts.append(start)
            self._ends.append(end)
        return text

    def _release(self, text: str) -> Piece | None:
        if not text:
            return None
        self._released += len(text)
        self._shown.append(text)
        tokens = []
        while self._pending and self._pending[0].end <= self._released:
            tokens.append(self._pending.popleft().token)
        return Piece(text, tuple(tokens), tuple(tokens))

    def _end(self, text: str, finish: Finish) -> Piece:
        self.finish = finish
        self._released += len(text)
        self._shown.append(text)
        rest, self._pending = self._pending, deque()
        cut = isinstance(finish.matched, str)
        shown = [
            item.token for item in rest if item.shown and not (cut and item.start >= self._released)
        ]
        return Piece(text, tuple(item.token for item in rest), tuple(shown), finish)


def join(pieces: Sequence[Piece]) -> Piece:
    """What the pieces of a whole choice say together."""
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        tuple(token for piece in pieces for token in piece.shown),
        pieces[-1].finish if pieces else None,
    )


def _finish_of(token: Token) -> Finish | None:
    reason, _, matched = token.finish.partition(":")
    if not reason:
        return None
    return Finish(reason, int(matched) if matched else None)
