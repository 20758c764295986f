"""Text comes out a whole character at a time, and is the same however bytes are cut into tokens."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.gateway.output.choice import Choice, Piece, join
from kvferry.gateway.params import OutputRules
from kvferry.gateway.tokenizer.tokenizer import Tokenizer
from kvferry.kvstore.wire.generation import Token

ODD = ["😀", "👩‍👩‍👧‍👦", "漢字かな", "é", "ﷺ", "नमस्ते", "\u2028", "\ufffd", "a", "\x00", "🇩🇪"]
TEXTS = st.lists(st.sampled_from(ODD) | st.text(max_size=5), max_size=8).map("".join)


def cut(raw: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(raw) + 1) for place in places), len(raw)]
    return [raw[a:b] for a, b in itertools.pairwise(edges)]


class Parts(Tokenizer):
    """Each token is one of these byte strings."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    def bytes_of(self, token: int, *, skip_special: bool = True) -> bytes:
        return self._parts[token]


def deltas(parts: list[bytes]) -> list[Piece]:
    """The pieces of an answer of these tokens; the last one ends it."""
    choice = Choice(Parts(parts), OutputRules())
    ends = {len(parts) - 1: "length"}
    tokens = [Token(0, 0, at, at, ends.get(at, "")) for at in range(len(parts))]
    return [piece for token in tokens if (piece := choice.push(token)) is not None]


def text_of(parts: list[bytes]) -> str:
    return join(deltas(parts)).text


@pytest.mark.C1
@given(TEXTS, st.lists(st.integers(0, 1000), max_size=12))
def test_any_cut_of_valid_text_joins_to_it(text: str, places: list[int]) -> None:
    out = [piece.text for piece in deltas(cut(text.encode(), places))]
    assert "".join(out) == text
    assert sum(delta.count("\ufffd") for delta in out) == text.count("\ufffd")


@pytest.mark.C1
@given(st.binary(max_size=40), st.lists(st.integers(0, 1000), max_size=12))
def test_any_cut_of_any_bytes_joins_to_their_decode(raw: bytes, places: list[int]) -> None:
    assert text_of(cut(raw, places)) == raw.decode("utf-8", "replace")


@pytest.mark.C1
@pytest.mark.parametrize("text", ODD)
def test_a_character_appears_with_its_last_byte_and_not_later(text: str) -> None:
    shown, tokens, raw = "", 0, text.encode()
    choice = Choice(Parts([raw[at : at + 1] for at in range(len(raw))]), OutputRules())
    for at in range(len(raw)):
        piece = choice.push(Token(0, 0, at, at))
        if piece is not None:
            shown, tokens = shown + piece.text, tokens + len(piece.tokens)
        assert shown == raw[: at + 1].decode("utf-8", "ignore")
        assert (tokens == at + 1) == (shown.encode() == raw[: at + 1])


@pytest.mark.C1
def test_a_truncated_character_reads_as_in_a_whole_decode() -> None:
    raw = "ok😀".encode()[:-1]
    assert text_of([raw]) == raw.decode("utf-8", "replace") == "ok\ufffd"


def test_garbage_does_not_stop_it() -> None:
    assert text_of([b"\xff", b"\x80\x80", b"fine"]) == "\ufffd\ufffd\ufffdfine"
