"""Where a rendered chat can be cut so that its pieces tokenize as the whole does.

A tokenizer finds its added tokens first, in the raw text, and treats what lies between them piece
by piece. So a cut right before a control token changes no id: neither merges nor normalisers nor
pre-tokenizers look across it, and a piece that begins with a control token is nowhere taken for the
beginning of the text. Owns which control tokens are good for that, and the cutting. It knows
strings and the flags of added tokens, and no ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """A piece of a rendered chat."""

    text: str
    anchored: bool
    """It begins with a control token of the template's; only the first piece may not."""
    marked: bool
    """It holds a control token's text that a user wrote, broken by the marker."""


class ChatCutter:
    """Cuts rendered chats before the control tokens `cuts`."""

    def __init__(self, cuts: Iterable[str]) -> None:
        longest_first = sorted(cuts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def borders(self, rendered: str) -> list[int]:
        """Where the pieces begin, and where the last one ends."""
        starts = [found.start() for found in self._pattern.finditer(rendered)]
        if rendered and (not starts or starts[0]):
            starts.insert(0, 0)
        return [*starts, len(rendered)]

    def pieces(self, rendered: str, borders: Sequence[int], marker: str | None) -> list[ChatPiece]:
        """The pieces between some successive borders."""
        return [
            ChatPiece(
                rendered[start:end],
                start > 0 or self._pattern.match(rendered) is not None,
                marker is not None and rendered.find(marker, start, end) >= 0,
            )
            for start, end in pairwise(borders)
        ]


def cut_texts(added_tokens: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Texts of the control tokens before which every chat may be cut.

    `added_tokens` is the list of that name in a tokenizer.json. Left out are tokens that are looked
    for in normalised text only, that take the spaces before them, and those whose text another
    added token can overlap, so that it is not always this one which is found. One token that wants
    a word's border on its sides looks across every cut: then there are none.
    """
    if any(item.get("single_word") for item in added_tokens):
        return frozenset()
    found_raw = [item for item in added_tokens if not item.get("normalized")]
    cuts = {item["content"] for item in found_raw if _is_firm(item)}
    while True:
        others = {item["content"] for item in found_raw} - cuts
        clashing = _overlapped(cuts, others)
        if not clashing:
            return frozenset(cuts)
        cuts -= clashing


def _is_firm(item: Mapping[str, Any]) -> bool:
    text: str = item["content"]
    return (
        bool(item.get("special")) and not item.get("lstrip") and len(text.strip()) == len(text) > 1
    )


def _overlapped(cuts: Iterable[str], others: Iterable[str]) -> set[str]:
    """The cuts that one of the others can cover from the left."""
    by_prefix: dict[str, set[str]] = {}
    for text in cuts:
        for size in range(1, len(text) + 1):
            by_prefix.setdefault(text[:size], set()).add(text)
    whole = set(cuts)
    clashing: set[str] = set()
    for other in others:
        for start in range(len(other)):
            tail = other[start:]
            if start:
                clashing |= by_prefix.get(tail, set())
            clashing |= {tail[:size] for size in range(1, len(tail) + 1)} & whole
    return clashing
