"""Keeps what a user wrote from turning into control tokens.

A message may contain the text of a control token (`<|im_end|>`); the template writes the real ones
beside it, and in the rendered text the two look alike. So before rendering, every such text in the
user's strings is broken by a marker character inside it. In the rendered text an unbroken one is
the template's own, and is replaced by an alias that no text contains; then the markers are removed.
The tokenizer knows the aliases and no other control token. This module knows strings only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_MARKERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Noncharacters: they have no meaning in text, and no template looks for them."""


def alias(token: int) -> str:
    """The stand-in for a control token's text. Contains noncharacters, which marking removes."""
    return f"\uffff{token}\ufffe"


class ControlText:
    """The texts of a vocabulary's control tokens."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = {text: token for text, token in tokens.items() if len(text) > 1}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def occurs_in(self, value: Any) -> bool:
        """Whether any string within a JSON value contains a control token's text."""
        return any(self._pattern.search(text) for text in strings(value))

    def mark(self, value: Any, marker: str) -> Any:
        """The JSON value with every control text in its strings broken by `marker`."""
        if isinstance(value, str):
            return self._pattern.sub(lambda found: found[0][:1] + marker + found[0][1:], value)
        if isinstance(value, dict):
            return {self.mark(key, marker): self.mark(item, marker) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark(item, marker) for item in value]
        return value

    def to_aliases(self, rendered: str, marker: str) -> str:
        """Rendered text with the template's control tokens as aliases, the user's as plain text."""
        aliased = self._pattern.sub(lambda found: alias(self._tokens[found[0]]), rendered)
        return aliased.replace(marker, "")


def strings(value: Any) -> Iterable[str]:
    """All strings within a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def unused_marker(value: Any) -> str | None:
    """A marker that no string within the value contains; None if there is none."""
    everything = "".join(strings(value))
    if "\uffff" in everything:  # it could forge an alias
        return None
    return next((marker for marker in _MARKERS if marker not in everything), None)
