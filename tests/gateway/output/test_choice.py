"""One choice: what counts, what is shown, and that pieces and their join say the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from kvferry.gateway.output.choice import Choice, Finish, Piece, join
from kvferry.gateway.params import OutputRules
from kvferry.gateway.tokenizer.tokenizer import Tokenizer
from kvferry.kvstore.wire.generation import Token

EOS = 256


def bytes_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.decoder = decoders.ByteLevel()
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.add_special_tokens(["<eos>"])
    return Tokenizer(raw.to_str())


TOKENIZER = bytes_tokenizer()


def tokens(text: str | bytes, finish: str = "length") -> list[Token]:
    """One token a byte, the last one with `finish`."""
    raw = text.encode() if isinstance(text, str) else text
    ids = [ID_OF[byte] for byte in raw]
    last = len(ids) - 1
    return [Token(0, 0, at, id, finish if at == last else "") for at, id in enumerate(ids)]


ID_OF = {TOKENIZER.bytes_of(id)[0]: id for id in range(256)}


def with_eos(text: str, finish: str = "stop") -> list[Token]:
    start = tokens(text, "")
    return [*start, Token(0, 0, len(start), EOS, finish)]


def pieces(sequence: list[Token], rules: OutputRules) -> list[Piece]:
    choice = Choice(TOKENIZER, rules)
    found = [piece for token in sequence if (piece := choice.push(token)) is not None]
    assert choice.kept == sum(len(piece.tokens) for piece in found)
    return found


def whole(sequence: list[Token], rules: OutputRules) -> Piece:
    return join(pieces(sequence, rules))


@pytest.mark.B6
def test_eos_counts_but_is_not_shown() -> None:
    piece = whole(with_eos("hi"), OutputRules())
    assert (piece.text, len(piece.tokens), len(piece.shown)) == ("hi", 3, 2)
    assert piece.finish == Finish("stop")


@pytest.mark.B6
def test_eos_as_the_only_token() -> None:
    piece = whole(with_eos(""), OutputRules())
    assert (piece.text, len(piece.tokens), piece.shown) == ("", 1, ())


@pytest.mark.B6
def test_a_stop_token_is_named_and_shown_only_when_asked_for() -> None:
    sequence = tokens("ab", f"stop:{ID_OF[ord('b')]}")
    hidden, shown = whole(sequence, OutputRules()), whole(sequence, OutputRules(include_stop=True))
    assert (hidden.text, shown.text) == ("a", "ab")
    assert hidden.finish == shown.finish == Finish("stop", ID_OF[ord("b")])


@pytest.mark.C2
def test_a_stop_string_ends_before_its_text_and_counts_its_tokens() -> None:
    piece = whole(tokens("say DONE and more"), OutputRules(stops=("DONE",)))
    assert (piece.text, len(piece.tokens), len(piece.shown)) == ("say ", 8, 4)
    assert piece.finish == Finish("stop", "DONE")


@pytest.mark.B6
def test_a_stop_string_wins_over_the_length() -> None:
    piece = whole(tokens("xEND", "length"), OutputRules(stops=("END",)))
    assert piece.finish == Finish("stop", "END")


@pytest.mark.C2
def test_min_tokens_keeps_stop_strings_from_firing() -> None:
    piece = whole(tokens("ababab"), OutputRules(stops=("ab",), min_tokens=3))
    assert (piece.text, len(piece.tokens)) == ("ab", 4)


@pytest.mark.C2
def test_tokens_behind_a_stop_string_are_ignored() -> None:
    choice = Choice(TOKENIZER, OutputRules(stops=("b",)))
    for token in tokens("abcdef"):
        choice.push(token)
    assert choice.kept == 2


def test_special_tokens_are_shown_when_asked_for() -> None:
    sequence = with_eos("hi", "length")
    assert whole(sequence, OutputRules()).text == "hi"
    assert whole(sequence, OutputRules(skip_special=False)).text == "hi<eos>"


@pytest.mark.C1
def test_a_cut_character_reads_the_same_in_both_modes() -> None:
    assert whole(tokens("a😀".encode()[:-1]), OutputRules()).text == "a\ufffd"


@pytest.mark.C1
def test_no_piece_is_empty_but_the_last() -> None:
    for piece in pieces(with_eos("é😀漢 END", "stop"), OutputRules(stops=("ENDE",))):
        assert piece.text or piece.finish


@given(
    st.text("ab¶😀", max_size=10),
    st.lists(st.text("ab¶", min_size=1, max_size=3), max_size=3),
    st.integers(0, 4),
)
def test_tokens_of_a_piece_are_those_of_its_text(
    text: str, stops: list[str], min_tokens: int
) -> None:
    rules = OutputRules(stops=tuple(stops), min_tokens=min_tokens)
    sequence = with_eos(text)
    found = pieces(sequence, rules)
    raw = b""
    for piece in found:
        raw += b"".join(TOKENIZER.bytes_of(token.token) for token in piece.shown)
        if piece.finish is None:
            shown = "".join(other.text for other in found[: found.index(piece) + 1])
            assert raw == shown.encode()
    everything = join(found)
    assert list(everything.tokens) == sequence[: len(everything.tokens)]
    assert raw.decode("utf-8", "ignore").startswith(everything.text)
