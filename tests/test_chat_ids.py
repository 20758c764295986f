"""A chat in pieces has the ids of the whole, and a reply of the model has its own."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.gateway.chat_ids import STRIDE_PIECES, ChatEncoder, ChatIds
from kvferry.gateway.chat_template import ChatMessage, ChatTemplate, load_template
from kvferry.gateway.conversation import Conversation, Rendered, render
from kvferry.gateway.output import Choice, OutputRules, Reply
from kvferry.gateway.segments import Segmenter, cut_texts
from kvferry.gateway.tokenizer import Tokenizer, load_tokenizer
from kvferry.kvstore.generation_messages import Token
from kvferry.kvstore.keys import unpack_tokens
from kvferry.tests.real_prompts import QUESTIONS
from kvferry.tests.vocabularies import MODELS, vocabularies

NAMES = tuple(MODELS)
WORDS = ["the", "of", "😀", "漢字", "naïve", "f(x):", "it's", "3.14", "<b>", "<think>", "</think>"]
WORDS += ["<tool_call>", "[INST]", "[/INST]", "\n", "\n\n", " ", "  ", "\t", "e\u0301", "\u200d"]
WORDS += ["{{ x }}", "a" * 40, "<|", "|>", "\ufdd0"]
HOSTILE = [
    "<|im_start|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<s>",
    "</s>",
    "<bos>",
]
HOSTILE += [
    "<eos>",
    "<|user|>",
    "<|end|>",
    "<|turn>",
    "<turn|>",
    "<|endoftext|>",
    "<|end_of_text|>",
]


class Model:
    """A tokenizer and a template that belong together."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        template = load_template(folder, None)
        assert template is not None
        self.template: ChatTemplate = template
        self.encoder = self.fresh()

    def fresh(self, **limits: int) -> ChatEncoder:
        return ChatEncoder(self.tokenizer, **limits)

    def rendered(self, chat: Sequence[ChatMessage], **options: Any) -> Rendered:
        conversation = Conversation(tuple(chat), **options)
        return render(conversation, self.template, self.tokenizer.control_text)

    def whole(self, rendered: Rendered) -> list[int]:
        """The ids of the text in one piece."""
        if rendered.marker is None:
            return self.tokenizer.encode(rendered.text, add_special_tokens=False)
        return self.tokenizer.encode_marked(rendered.text, rendered.marker)

    def pieces(self, chat: Sequence[ChatMessage], **options: Any) -> ChatIds:
        return self.encoder.encode(self.rendered(chat, **options), "tenant", None)

    def controls(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if self.tokenizer.is_special(token)]


@cache
def model(name: str) -> Model:
    return Model(vocabularies() / name)


@cache
def default_model(folder: Path) -> Model:
    return Model(folder)


def users(*contents: str) -> list[ChatMessage]:
    """User and assistant by turns, the user first and last."""
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(contents)]


def ids_of(made: ChatIds) -> list[int]:
    return unpack_tokens(made.packed)


texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=6), max_size=12).map(" ".join)
hostile_texts = st.lists(st.sampled_from(WORDS + HOSTILE), max_size=10).map("".join)
names = st.sampled_from(NAMES)


def odd(each: st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    return st.integers(0, 3).flatmap(
        lambda turns: st.lists(each, min_size=2 * turns + 1, max_size=2 * turns + 1)
    )


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
    assert len(it.tokenizer.segmenter.split(rendered.text, None)) >= 2
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


def test_a_long_chat_finds_its_replies_again() -> None:
    """Also those that lie in pieces known together, and under any other beginning none."""
    it, draw = model("chatml"), random.Random(2)
    encoder, chat, expected = it.fresh(), users("go"), list[int]()
    for number in range(STRIDE_PIECES):
        made = encoder.encode(it.rendered(chat), "tenant", None)
        assert ids_of(made)[: len(expected)] == expected and made.end is not None
        text = f"reply number {number}"
        ids = odd_ids(it.tokenizer, text, draw)
        encoder.remember(made.end, said(it.tokenizer, ids, "length"))
        expected = [*ids_of(made), *ids]
        chat += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
    again = encoder.encode(it.rendered(chat), "tenant", None)
    assert ids_of(again)[: len(expected)] == expected
    assert again == encoder.encode(it.rendered(chat), "tenant", None)
    changed = it.rendered([*users("stop"), *chat[1:]])
    other = encoder.encode(changed, "tenant", None)
    assert ids_of(other) == it.whole(changed) and not other.reused


def test_a_cache_that_is_too_small_costs_time_only() -> None:
    it = model("llama3")
    encoder = it.fresh(segment_bytes=2000, reply_bytes=0)
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
    pieces = Segmenter(["<a>", "<a><b>"]).split("x<a><b>y<a>z", None)
    assert [piece.text for piece in pieces] == ["x", "<a><b>y", "<a>z"]
    assert [piece.anchored for piece in pieces] == [False, True, True]


# -- replies ---------------------------------------------------------------------------------------


def odd_ids(tokenizer: Tokenizer, text: str, draw: random.Random) -> list[int]:
    """Ids of a text that no tokenizer would give: of pieces cut anywhere."""
    at, ids = 0, []
    while at < len(text):
        size = draw.randint(1, 4)
        ids += tokenizer.encode(text[at : at + size], add_special_tokens=False)
        at += size
    return ids


def said(tokenizer: Tokenizer, ids: Sequence[int], end: str, **rules: Any) -> Reply:
    """What a choice shows of ids that end so."""
    choice = Choice(tokenizer, OutputRules(**rules))
    for at, token in enumerate(ids):
        choice.push(Token(0, 0, at, token, end if at + 1 == len(ids) else "", 0.0, ()))
    return choice.reply


def turn(it: Model, chat: list[ChatMessage], reply: Reply, content: str) -> tuple[ChatIds, ChatIds]:
    """The prompt, and the one after it when the client sends `content` as the reply."""
    encoder = it.fresh()
    first = encoder.encode(it.rendered(chat), "tenant", None)
    assert first.end is not None
    encoder.remember(first.end, reply)
    next_chat = [*chat, {"role": "assistant", "content": content}, *users("and then?")]
    return first, encoder.encode(it.rendered(next_chat), "tenant", None)


EOS = {"chatml": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "phi3": "<|end|>"}


@pytest.mark.parametrize("name", ["chatml", "qwen3", "llama3"])
@pytest.mark.parametrize("text", ["Hello, 漢字 😀 world! 12345", "yes", "a\n\nb  c"])
@pytest.mark.parametrize("end", ["stop", "length"])
def test_the_next_prompt_begins_with_this_one_and_its_reply(name: str, text: str, end: str) -> None:
    it = model(name)
    ids = odd_ids(it.tokenizer, text, random.Random(5))
    assert ids != it.tokenizer.encode(text, add_special_tokens=False) or text == "yes"
    generated = ids
    if end == "stop":
        generated = [*ids, *it.tokenizer.encode(EOS[name], add_special_tokens=False)]
    reply = said(it.tokenizer, generated, end)
    assert reply.text == text
    first, second = turn(it, users("hi"), reply, text)
    expected = [*ids_of(first), *generated]
    assert ids_of(second)[: len(expected)] == expected
    assert second.reused >= len(ids)
    assert it.tokenizer.decode(ids_of(second), skip_special=False) == (
        it.tokenizer.decode(
            it.whole(it.rendered([*users("hi", text), *users("and then?")])), skip_special=False
        )
    )


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_reused_the_text_is_the_rendered_one(name: str) -> None:
    it, draw = model(name), random.Random(name)
    reused = 0
    for _ in range(20):
        text = " ".join(draw.choices(WORDS[:8], k=draw.randint(1, 8))) + draw.choice(
            ["", "\n", " "]
        )
        ids = odd_ids(it.tokenizer, text, draw)
        reply = said(it.tokenizer, ids, "length")
        _, second = turn(it, users("hi"), reply, reply.text)
        rendered = it.rendered([*users("hi", reply.text), *users("and then?")])
        decode = it.tokenizer.decode
        found = decode(ids_of(second), skip_special=False)
        assert found == decode(it.whole(rendered), skip_special=False)
        reused += bool(second.reused)
    if name not in ("mistral", "phi3", "gemma"):
        assert reused == 20


def test_a_reply_cut_by_a_stop_string_keeps_the_tokens_before_it() -> None:
    it = model("chatml")
    encode = it.tokenizer.encode
    ids = [
        *encode("one two", add_special_tokens=False),
        *encode(" three.STOP here", add_special_tokens=False),
    ]
    reply = said(it.tokenizer, ids, "length", stops=("STOP",))
    assert reply.text == "one two three."
    first, second = turn(it, users("hi"), reply, reply.text)
    kept, rest = reply.cut(len(reply.text))
    assert it.tokenizer.decode(list(kept)) + rest == reply.text
    expected = [*ids_of(first), *kept, *encode(rest, add_special_tokens=False)]
    assert ids_of(second)[: len(expected)] == expected and second.reused


def test_half_a_character_at_the_end_is_the_replys_own() -> None:
    it = model("chatml")
    face = it.tokenizer.encode("😀", add_special_tokens=False)
    assert face
    half = [token for token in range(256) if it.tokenizer.bytes_of(token) == b"\xf0"]
    ids = [*it.tokenizer.encode("so ", add_special_tokens=False), *half]
    reply = said(it.tokenizer, ids, "length")
    assert reply.text == "so \ufffd"
    first, second = turn(it, users("hi"), reply, reply.text)
    expected = [*ids_of(first), *ids]
    assert ids_of(second)[: len(expected)] == expected


def test_a_template_that_strips_leaves_what_is_before() -> None:
    it = model("llama3")
    ids = odd_ids(it.tokenizer, "Good day", random.Random(1))
    tail = it.tokenizer.encode("\n\n", add_special_tokens=False)
    reply = said(it.tokenizer, [*ids, *tail], "length")
    first, second = turn(it, users("hi"), reply, "Good day\n\n")
    expected = [*ids_of(first), *ids, *it.tokenizer.encode("<|eot_id|>", add_special_tokens=False)]
    assert ids_of(second)[: len(expected)] == expected and second.reused


@pytest.mark.parametrize("content", ["Hello!", " Hello", "Hello\n", "hello", ""])
def test_another_text_is_tokenized(content: str) -> None:
    it = model("chatml")
    reply = said(it.tokenizer, odd_ids(it.tokenizer, "Hello", random.Random(1)), "length")
    _, second = turn(it, users("hi"), reply, content)
    assert not second.reused
    assert ids_of(second) == it.whole(it.rendered([*users("hi", content), *users("and then?")]))


def test_every_choice_is_remembered() -> None:
    it = model("chatml")
    encoder, chat = it.fresh(), users("hi")
    first = encoder.encode(it.rendered(chat), "tenant", None)
    assert first.end is not None
    for text in ("one thing", "another thing"):
        ids = odd_ids(it.tokenizer, text, random.Random(3))
        encoder.remember(first.end, said(it.tokenizer, ids, "length"))
    for text in ("one thing", "another thing"):
        second = encoder.encode(it.rendered([*chat, *users("", text)[1:]]), "tenant", None)
        ids = odd_ids(it.tokenizer, text, random.Random(3))
        assert ids_of(second)[: len(ids_of(first)) + len(ids)] == [*ids_of(first), *ids]


@pytest.mark.A1
def test_replies_are_known_to_their_tenant_salt_and_conversation_only() -> None:
    it = model("chatml")
    encoder, chat = it.fresh(), users("hi")
    first = encoder.encode(it.rendered(chat), "one", "salt")
    assert first.end is not None
    ids = odd_ids(it.tokenizer, "Hello there", random.Random(2))
    encoder.remember(first.end, said(it.tokenizer, ids, "length"))
    follow = it.rendered([*chat, {"role": "assistant", "content": "Hello there"}])
    elsewhere = it.rendered([*users("ho"), {"role": "assistant", "content": "Hello there"}])
    assert encoder.encode(follow, "one", "salt").reused
    for tenant, salt in (("two", "salt"), ("one", None), ("one", "other")):
        made = encoder.encode(follow, tenant, salt)
        assert not made.reused and ids_of(made) == it.whole(follow)
    assert not encoder.encode(elsewhere, "one", "salt").reused


@settings(max_examples=60, deadline=None)
@given(names, hostile_texts, hostile_texts)
def test_content_equal_to_a_remembered_reply_never_brings_control_tokens(
    name: str, question: str, answer: str
) -> None:
    """The model wrote control tokens and their texts; a client sends all of it back, as anyone."""
    it = model(name)
    encoder = it.fresh()
    generated = it.tokenizer.encode(answer, add_special_tokens=False)  # control tokens and all
    first = encoder.encode(it.rendered(users(question)), "tenant", None)
    for skip in (True, False):
        reply = said(it.tokenizer, generated, "length", skip_special=skip)
        if first.end is not None:
            encoder.remember(first.end, reply)
        for chat in (
            users(question, reply.text, reply.text),
            users(reply.text),
            users(question + reply.text, answer, reply.text),
        ):
            rendered = it.rendered(chat)
            found = ids_of(encoder.encode(rendered, "tenant", None))
            harmless = it.rendered(users(*("x" for _ in chat)))
            assert it.controls(found) == it.controls(it.whole(harmless))


def test_a_reply_with_control_tokens_is_not_remembered() -> None:
    it = model("chatml")
    (end,) = it.tokenizer.encode("<|im_end|>", add_special_tokens=False)
    words = it.tokenizer.encode("one two", add_special_tokens=False)
    reply = said(it.tokenizer, [words[0], end, *words[1:]], "length")
    assert reply.text == "one two"
    assert not turn(it, users("hi"), reply, "one two")[1].reused


# -- transformers ----------------------------------------------------------------------------------


def random_chats(count: int) -> list[list[ChatMessage]]:
    from pydoc_data.topics import topics

    draw, manual = random.Random(7), [topics[name] for name in sorted(topics)]

    def text() -> str:
        page = draw.choice(manual)
        at = draw.randrange(max(1, len(page) - 400))
        return draw.choice(QUESTIONS) + page[at : at + draw.randint(1, 400)].strip()

    return [users(*(text() for _ in range(2 * draw.randint(0, 3) + 1))) for _ in range(count)]


@pytest.mark.parametrize("name", ["smollm2", "llama3"])
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


def test_an_empty_reply_is_not_remembered() -> None:
    it = model("chatml")
    empty = Reply("", array("i"), array("i"), array("i"))
    assert not turn(it, users("hi"), empty, "")[1].reused
