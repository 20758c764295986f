"""Token bytes to text, a token at a time, without ever showing half a character.

Owns one choice's UTF-8 decoder. A tail that may still become a character is held back until it
does, or until the end, where it reads U+FFFD just as a decode of the whole answer would. The prompt
is never fed in. Streams and plain answers both come from here, so they cannot differ. It does not
know what a token is: the tokenizer says which bytes belong to one.
"""

from __future__ import annotations

import codecs

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Bytes in, the text they complete out."""

    def __init__(self) -> None:
        self._decoder = _Utf8(errors="replace")

    @property
    def pending(self) -> bool:
        """The bytes so far end inside a character."""
        return bool(self._decoder.getstate()[0])

    def push(self, raw: bytes) -> str:
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """The end: what is still held back can no longer become a character."""
        return self._decoder.decode(b"", final=True)
