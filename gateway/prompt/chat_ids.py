"""Ids of a rendered chat: known pieces from a cache, replies as they were generated.

A history grows at its end, so its pieces are looked up by their text and only new ones are
tokenized. The piece that ends in a reply of the model gets the very ids that were generated, for
theirs are the KV blocks: another tokenization of the same text would miss them. A reply is known by
everything before it, down to the id, and by its text; so the same words elsewhere, from a user or
behind another question, are tokenized like any others. Remembered ids never hold a control token
beyond the template's own. Owns both caches; it knows no message, no node and no API.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from kvferry.gateway.output.choice import Reply
from kvferry.gateway.prompt.conversation import ChatText
from kvferry.gateway.prompt.memory import TenantCache
from kvferry.gateway.tokenizer.pieces import ChatPiece
from kvferry.gateway.tokenizer.tokenizer import Tokenizer
from kvferry.kvstore.keys import pack_tokens

PIECE_BYTES = 64 << 20
REPLY_BYTES = 64 << 20
STRIDE_PIECES = 64
"""So many pieces are also known together, by what is before them: a long history in few steps."""
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """The piece that a prompt ends in, and what stands before it: where its reply will go on."""

    tenant: str
    prefix: bytes
    """A digest of all ids before the piece."""
    piece: ChatPiece
    ids: bytes
    """Of the piece, packed."""


@dataclass(frozen=True, slots=True)
class ChatIds:
    packed: bytes
    end: PromptEnd | None
    """None: a reply to this prompt is not to be remembered."""
    reused: int
    """How many of the ids are those of remembered replies and what the template wrote before."""


@dataclass(slots=True)
class _Begun:
    """A prompt as far as its ids are known."""

    prefix: blake2b
    """The running digest of the ids."""
    parts: list[bytes] = field(default_factory=list)
    reused: int = 0
    end: PromptEnd | None = None

    def add(self, ids: bytes, reused: int) -> None:
        self.parts.append(ids)
        self.prefix.update(ids)
        self.reused += reused


class ChatEncoder:
    """Encodes rendered chats of one model. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        piece_bytes: int = PIECE_BYTES,
        reply_bytes: int = REPLY_BYTES,
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = TenantCache(piece_bytes)
        self._replies = TenantCache(reply_bytes)

    @property
    def remembered_bytes(self) -> int:
        return self._pieces.size + self._replies.size

    def encode(self, rendered: ChatText, tenant: str, salt: str | None) -> ChatIds:
        """The ids of a chat, as one tenant and under one cache salt has seen it so far.

        Raises
        ------
        CannotEncode
            The vocabulary makes a control token even of plain text.
        """
        text, marker = rendered.text, rendered.marker
        cutter = self._tokenizer.cutter
        borders = cutter.borders(text)
        # The last piece is always looked at: the reply goes on from it.
        strides = max(0, len(borders) - 2) // STRIDE_PIECES
        begun = _Begun(_empty_prefix(salt))
        for at in range(0, strides * STRIDE_PIECES, STRIDE_PIECES):
            stride = borders[at : at + STRIDE_PIECES + 1]
            name = _stride_name(begun.prefix.digest(), text[stride[0] : stride[-1]], marker)
            known = self._pieces.get(tenant, name)
            if known is None:
                before = begun.reused
                ids = self._go_on(begun, tenant, cutter.pieces(text, stride, marker), marker)
                reused = begun.reused - before
                self._pieces.put(tenant, name, reused.to_bytes(4, "little") + ids)
            else:
                begun.add(known[4:], reused=int.from_bytes(known[:4], "little"))
        rest = cutter.pieces(text, borders[strides * STRIDE_PIECES :], marker)
        self._go_on(begun, tenant, rest, marker)
        return ChatIds(b"".join(begun.parts), begun.end, begun.reused)

    def _go_on(
        self, begun: _Begun, tenant: str, pieces: Sequence[ChatPiece], marker: str | None
    ) -> bytes:
        """Adds the ids of these pieces, and says which they are."""
        names = [_name(piece, marker) for piece in pieces]
        first = len(begun.parts)
        for piece, name, plain in zip(
            pieces, names, self._plain(tenant, pieces, names, marker), strict=True
        ):
            before = begun.prefix.digest()
            reply = None
            if not piece.marked:
                reply = self._replies.get(tenant, _reply_name(before, name))
            ids = plain if reply is None else reply
            begun.add(ids, reused=0 if reply is None else len(reply) // 4)
            begun.end = None if piece.marked else PromptEnd(tenant, before, piece, ids)
        return b"".join(begun.parts[first:])

    def _plain(
        self, tenant: str, pieces: Sequence[ChatPiece], names: Sequence[bytes], marker: str | None
    ) -> list[bytes]:
        """Packed ids of every piece, as a tokenizer gives them."""
        found = {name: self._pieces.get(tenant, name) for name in names}
        missing = {
            name: piece for name, piece in zip(names, pieces, strict=True) if found[name] is None
        }
        clean = {name: piece.text for name, piece in missing.items() if not piece.marked}
        encoded = self._tokenizer.encode_many(list(clean.values()))
        made = dict(zip(clean, encoded, strict=True))
        for name, piece in missing.items():
            if piece.marked:
                assert marker is not None
                made[name] = self._tokenizer.encode_marked(piece.text, marker)
        for name, ids in made.items():
            packed = found[name] = pack_tokens(ids)
            self._pieces.put(tenant, name, packed)
        return [found[name] or b"" for name in names]

    # -- remembering -------------------------------------------------------------------------------

    def remember(self, end: PromptEnd, reply: Reply) -> None:
        """From now on a chat that goes on with this reply's text gets the ids of the reply.

        Remembered are the text that was shown and, because many templates strip it, the text
        without the white space at its end.
        """
        for size in {len(reply.text), len(reply.text.rstrip())}:
            ids = self._ids(reply, size)
            if ids:
                text = end.piece.text + reply.text[:size]
                piece = replace(end.piece, text=text)
                name = _reply_name(end.prefix, _name(piece, None))
                self._replies.put(end.tenant, name, end.ids + ids.tobytes())

    def forget(self, tenant: str) -> None:
        """Drops a tenant's pieces and replies."""
        self._pieces.forget(tenant)
        self._replies.forget(tenant)

    def _ids(self, reply: Reply, size: int) -> array[int] | None:
        """Ids of the reply's first characters; None where they are not to be had exactly.

        Where they end inside a token, what they have of it is tokenized by itself.
        """
        ids, rest = reply.cut(size)
        if rest:
            tail = self._tokenizer.encode(rest, add_special_tokens=False)
            if b"".join(map(self._tokenizer.bytes_of, tail)) != rest.encode("utf-8", "replace"):
                return None
            ids.extend(tail)
        if any(token in self._tokenizer.special for token in ids):
            return None
        return ids


def _empty_prefix(salt: str | None) -> blake2b:
    """The running digest of a prompt's ids, before the first."""
    salted = b"-" if salt is None else b"s" + salt.encode("utf-8", "surrogatepass")
    context = blake2b(salted, digest_size=_DIGEST_BYTES).digest()
    return blake2b(context, digest_size=_DIGEST_BYTES, person=b"kvferry-prefix")


def _name(piece: ChatPiece, marker: str | None) -> bytes:
    """What a piece is known by: its text and how it is to be read."""
    kind = (b"a" if piece.anchored else b"h") + (b"m" if piece.marked else b"c")
    digest = blake2b(kind, digest_size=_DIGEST_BYTES, person=b"kvferry-piece")
    if piece.marked and marker is not None:
        digest.update(marker.encode())
    digest.update(piece.text.encode("utf-8", "surrogatepass"))
    return digest.digest()


def _stride_name(before: bytes, text: str, marker: str | None) -> bytes:
    digest = blake2b(before, digest_size=_DIGEST_BYTES, person=b"kvferry-pieces")
    digest.update((marker or "").encode() + b"\0" + text.encode("utf-8", "surrogatepass"))
    return digest.digest()


def _reply_name(before: bytes, name: bytes) -> bytes:
    return blake2b(before + name, digest_size=_DIGEST_BYTES, person=b"kvferry-reply").digest()
