"""Text to token ids and a token id to bytes, with bare `tokenizers`.

Owns the model's tokenizer and what can be asked of it: a completion's text (with the special
tokens it adds, never a second one), a rendered chat (no special token beside the template's own),
and the exact bytes of every token, so that an answer is put together from bytes and not from
lossy per-token texts. It knows no message and no template.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from kvferry.gateway.tokenizer.control_text import ControlText, alias
from kvferry.gateway.tokenizer.pieces import ChatCutter, cut_texts
from kvferry.kvstore.errors import ConfigError, KvferryError


class CannotEncode(KvferryError):
    """Text that this tokenizer cannot take as it is meant."""


class Tokenizer:
    """One model's vocabulary. Safe to use from several threads."""

    def __init__(self, tokenizer_json: str) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
            self._spec: dict[str, Any] = json.loads(tokenizer_json)
        except Exception as error:  # the library raises bare Exceptions
            raise ConfigError(f"tokenizer.json cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = {token: item.content for token, item in added.items() if item.special}
        """Texts of the special tokens, by id."""
        self._bytes = _bytes_reader(self._spec.get("decoder"))
        self._table: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self.control_text = ControlText({text: token for token, text in self.special.items()})
        self.cutter = ChatCutter(cut_texts(self._spec.get("added_tokens") or []))
        self.size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._prefix = _encode(self._tokenizer, "", True)

    # -- encoding ----------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text in which control tokens are control tokens.

        A text that already begins with what the tokenizer would add does not get it twice.
        """
        ids = _encode(self._tokenizer, text, add_special_tokens)
        size = len(self._prefix)
        if add_special_tokens and size and ids[size : 2 * size] == self._prefix:
            return ids[size:]
        return ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens beside those in it."""
        if not texts:
            return []
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [one.ids for one in encoded]

    def encode_marked(self, rendered: str, marker: str) -> list[int]:
        """Ids of a rendered chat in which `marker` breaks the control texts that users wrote.

        Raises
        ------
        CannotEncode
            The vocabulary makes a control token even of plain text.
        """
        with self._lock:  # the first use builds it
            tokenizer, back = self._aliased
        text = self.control_text.to_aliases(rendered, marker)
        ids = _encode(tokenizer, text, False)
        if any(token in self.special and token not in back for token in ids):
            raise CannotEncode("this model cannot take the text of a control token as plain text")
        return [back.get(token, token) for token in ids]

    @cached_property
    def _aliased(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The same vocabulary with its control tokens under other names, and the way back."""
        added = self._spec.get("added_tokens") or []
        renamed = [
            item | {"content": alias(item["id"]), "normalized": False} if item["special"] else item
            for item in added
        ]
        spec = self._spec | {"added_tokens": renamed}
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(spec))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # New names can get new ids, and move the ids of other added tokens.
        back: dict[int, int] = {}
        for item in renamed:
            given = tokenizer.token_to_id(item["content"])
            assert given is not None, "an added token has an id"
            back[given] = item["id"]
        return tokenizer, back

    # -- decoding ----------------------------------------------------------------------------------

    def bytes_of(self, token: int, *, skip_special: bool = True) -> bytes:
        """What a token adds to the text; nothing for a special one or an id without a token."""
        if token in self.special:
            return b"" if skip_special else self.special[token].encode()
        found = self._table.get(token)
        if found is None:
            text = self._tokenizer.id_to_token(token) if token >= 0 else None
            found = self._table[token] = b"" if text is None else self._bytes(text)
        return found

    def name_of(self, token: int) -> str:
        """A token as a person reads it; broken bytes read U+FFFD."""
        return self.bytes_of(token, skip_special=False).decode("utf-8", "replace")

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        """The text of ids, put together as an answer is."""
        raw = b"".join(self.bytes_of(token, skip_special=skip_special) for token in ids)
        return raw.decode("utf-8", "replace")


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder.

    Raises
    ------
    ConfigError
        There is none, or one whose tokens have no exact bytes.
    """
    path = folder / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    return Tokenizer(text)


def _encode(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    # Without offsets, which nobody reads: a third less time, and little of it with the GIL held.
    encoded = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoded[0].ids
    return ids


# -- the bytes of a token --------------------------------------------------------------------------


class _ByteLevel:
    """GPT-2's alphabet: every byte is one printable character."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in printable]
        self._table = {chr(byte): byte for byte in printable}
        self._table |= {chr(256 + at): byte for at, byte in enumerate(hidden)}

    def __call__(self, text: str) -> bytes:
        table = self._table
        if all(character in table for character in text):
            return bytes(table[character] for character in text)
        return text.encode()


class _BytePieces:
    """SentencePiece: pieces with `▁` for a space, and `<0xNN>` for a byte that has no piece."""

    def __init__(self, replacement: str, byte_fallback: bool) -> None:
        self._replacement = replacement
        self._byte_fallback = byte_fallback

    def __call__(self, text: str) -> bytes:
        if self._byte_fallback and len(text) == 6 and text.startswith("<0x") and text[5] == ">":
            return bytes.fromhex(text[3:5])
        return text.replace(self._replacement, " ").encode()


def _bytes_reader(decoder: Mapping[str, Any] | None) -> _ByteLevel | _BytePieces:
    steps = _steps(decoder)
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _ByteLevel()
    for step in steps:
        if step["type"] == "Metaspace":
            return _BytePieces(step.get("replacement", "▁"), "ByteFallback" in kinds)
        if step["type"] == "Replace" and step.get("content") == " ":
            pattern = step.get("pattern", {}).get("String", "▁")
            return _BytePieces(pattern, "ByteFallback" in kinds)
    found = ", ".join(sorted(kinds)) or "none"
    raise ConfigError(
        f"the tokenizer's decoder ({found}) gives tokens no exact bytes; "
        "byte-level and SentencePiece vocabularies do"
    )


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]
