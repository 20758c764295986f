"""A reply of the model has its own ids in the next prompt, and in no other."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings

from kvferry.gateway.output.choice import Choice, Reply
from kvferry.gateway.params import OutputRules
from kvferry.gateway.prompt.chat_ids import STRIDE_PIECES, ChatIds
from kvferry.gateway.prompt.chat_template import ChatMessage
from kvferry.gateway.tokenizer.tokenizer import Tokenizer
from kvferry.kvstore.wire.generation import Token
from kvferry.tests.rigs.models.chat import (
    NAMES,
    WORDS,
    Model,
    hostile_texts,
    ids_of,
    model,
    names,
    users,
)


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


def test_an_empty_reply_is_not_remembered() -> None:
    it = model("chatml")
    empty = Reply("", array("i"), array("i"), array("i"))
    assert not turn(it, users("hi"), empty, "")[1].reused
