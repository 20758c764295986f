"""A chat in pieces has the ids of the whole, and is cut only where it may be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.gateway.prompt.chat_template import ChatMessage
from kvferry.gateway.tokenizer.pieces import ChatCutter, cut_texts
from kvferry.tests.rigs.models.chat import (
    NAMES,
    default_model,
    hostile_texts,
    ids_of,
    model,
    names,
    odd,
    texts,
    users,
)
from kvferry.tests.rigs.models.prompts import QUESTIONS
from kvferry.tests.rigs.slow import slow_but

# -- the same ids as in one piece ------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(names, odd(texts), st.booleans())
def test_pieces_have_the_ids_of_the_whole(name: str, contents: list[str], prompt: bool) -> None:
    it, chat = model(name), users(*contents)
    expected = it.whole(it.rendered(chat, add_generation_prompt=prompt))
    assert ids_of(it.pieces(chat, add_generation_prompt=prompt)) == expected
    assert ids_of(it.pieces(chat, add_generation_prompt=prompt)) == expected, "from the cache"


@settings(max_examples=150, deadline=None)
@given(names, odd(hostile_texts))
def test_hostile_content_never_becomes_control_tokens(name: str, contents: list[str]) -> None:
    it = model(name)
    chat = users(*contents)
    ids = ids_of(it.pieces(chat))
    assert ids == it.whole(it.rendered(chat))
    harmless = users(*("x" for _ in contents))
    assert it.controls(ids) == it.controls(ids_of(it.pieces(harmless)))


@pytest.mark.parametrize("name", NAMES)
def test_real_vocabularies_are_cut_and_bos_is_there_once(name: str) -> None:
    it = model(name)
    rendered = it.rendered(users("one", "two", "three"))
    assert len(it.tokenizer.cutter.borders(rendered.text)) > 2, "more than one piece"
    ids = ids_of(it.pieces(users("one", "two", "three")))
    bos = it.controls(ids)[0]
    if name in ("llama3", "mistral", "gemma"):
        assert ids[0] == bos and ids.count(bos) == 1


def test_only_what_is_new_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    it = model("chatml")
    encoder = it.fresh()
    history = [f"{at} {QUESTIONS[at % len(QUESTIONS)]}" for at in range(401)]
    encoder.encode(it.rendered(users(*history)), "tenant", None)
    asked: list[str] = []
    encode_many = it.tokenizer.encode_many

    def counting(texts: Sequence[str]) -> list[list[int]]:
        asked.extend(texts)
        return encode_many(texts)

    monkeypatch.setattr(it.tokenizer, "encode_many", counting)
    longer = it.rendered(users(*history, "an answer", "a question"))
    assert ids_of(encoder.encode(longer, "tenant", None)) == it.whole(longer)
    assert sorted(asked) == ["<|im_start|>assistant\nan answer", "<|im_start|>user\na question"]


def test_a_cache_that_is_too_small_costs_time_only() -> None:
    it = model("llama3")
    encoder = it.fresh(piece_bytes=2000, reply_bytes=0)
    for turns in (1, 3, 5, 7):
        rendered = it.rendered(users(*(f"turn {at} " * 30 for at in range(turns))))
        assert ids_of(encoder.encode(rendered, "tenant", None)) == it.whole(rendered)


# -- where to cut ----------------------------------------------------------------------------------


def added(content: str, **flags: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"content": content, "special": True} | plain | flags


@pytest.mark.parametrize(
    ("others", "cuts"),
    [
        ([], {"<end>"}),
        ([added("<e", special=False)], {"<end>"}),
        ([added("x<e", special=False)], set()),
        ([added("<end>>", special=False)], set()),
        ([added("a<end>", special=False)], set()),
        ([added("d>x", special=False)], {"<end>"}),
        ([added("<mask>", lstrip=True)], {"<end>"}),
        ([added("w", single_word=True)], set()),
        ([added("x<e", special=False, normalized=True)], {"<end>"}),
        ([added("<pad>", normalized=True), added("<s>", rstrip=True)], {"<end>", "<s>"}),
        ([added("\n"), added("a <end"), added("  ")], {"a <end", "<end>"}),
    ],
)  # fmt: skip
def test_cuts_are_made_only_where_nothing_can_reach_across(
    others: list[dict[str, Any]], cuts: set[str]
) -> None:
    assert cut_texts([added("<end>"), *others]) == cuts


def test_the_longest_of_two_control_tokens_is_the_one() -> None:
    cutter, text = ChatCutter(["<a>", "<a><b>"]), "x<a><b>y<a>z"
    pieces = cutter.pieces(text, cutter.borders(text), None)
    assert [piece.text for piece in pieces] == ["x", "<a><b>y", "<a>z"]
    assert [piece.anchored for piece in pieces] == [False, True, True]


# -- transformers ----------------------------------------------------------------------------------


def random_chats(count: int) -> list[list[ChatMessage]]:
    from pydoc_data.topics import topics

    draw, manual = random.Random(7), [topics[name] for name in sorted(topics)]

    def text() -> str:
        page = draw.choice(manual)
        at = draw.randrange(max(1, len(page) - 400))
        return draw.choice(QUESTIONS) + page[at : at + draw.randint(1, 400)].strip()

    return [users(*(text() for _ in range(2 * draw.randint(0, 3) + 1))) for _ in range(count)]


@pytest.mark.parametrize("name", slow_but(["smollm2", "llama3"], "smollm2"))
def test_ids_of_100_chats_equal_transformers(
    name: str, smollm2: Path, real_vocabularies: Path
) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = smollm2 if name == "smollm2" else real_vocabularies / name
    load: Any = AutoTokenizer if name == "smollm2" else PreTrainedTokenizerFast
    theirs: Any = load.from_pretrained(folder)
    it = default_model(smollm2) if name == "smollm2" else model(name)
    for chat in random_chats(100):
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)
        ids = expected if isinstance(expected, list) else expected["input_ids"]
        assert ids_of(it.pieces(chat)) == ids
