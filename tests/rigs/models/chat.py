"""Real vocabularies with their templates, chats for them to encode, and texts that are hard to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from kvferry.gateway.prompt.chat_ids import ChatEncoder, ChatIds
from kvferry.gateway.prompt.chat_template import ChatMessage, ChatTemplate, load_template
from kvferry.gateway.prompt.conversation import ChatText, Conversation, render
from kvferry.gateway.tokenizer.tokenizer import Tokenizer, load_tokenizer
from kvferry.kvstore.keys import unpack_tokens
from kvferry.tests.rigs.models.vocabularies import MODELS, vocabularies

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

    def rendered(self, chat: Sequence[ChatMessage], **options: Any) -> ChatText:
        conversation = Conversation(tuple(chat), **options)
        return render(conversation, self.template, self.tokenizer.control_text)

    def whole(self, rendered: ChatText) -> list[int]:
        """The ids of the text in one piece."""
        if rendered.marker is None:
            return self.tokenizer.encode(rendered.text, add_special_tokens=False)
        return self.tokenizer.encode_marked(rendered.text, rendered.marker)

    def pieces(self, chat: Sequence[ChatMessage], **options: Any) -> ChatIds:
        return self.encoder.encode(self.rendered(chat, **options), "tenant", None)

    def controls(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self.tokenizer.special]


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
