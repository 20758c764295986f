"""One block on disk: a header that says what it is and where it belongs, and its bytes.

Owns the layout, nothing else. A record begins on a 4 KiB boundary of its file:

    0    8   magic
    8   16   fingerprint      of the build and model whose bytes these are
    24  16   tenant
    40  16   parent           key before it in its chain
    56  16   key
    72   4   depth
    76   4   payload bytes
    80   8   payload checksum xxh3-64
    88   8   file number      a record that was copied elsewhere is none
    96   8   offset
    104  8   sequence         grows with each write; of two records of one key the later counts
    112  4   uses             when it was written
    116  4   zero
    120  8   header checksum  xxh3-64 of bytes 0 to 120
    128      payload

Integers are little-endian. The layout's version is part of the magic.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import xxhash

from kvferry.kvstore.tiers.block import Block

ALIGNMENT = 4096
HEADER_BYTES = 128
_MAGIC = b"kvferry2"
_FIELDS = struct.Struct("<8s16s16s16s16sIIQQQQII")
_SUM = struct.Struct("<Q")

Slot = tuple[int, int]
"""Where a record lies: the number of its file, and the offset in it."""


def record_bytes(payload_bytes: int) -> int:
    """How much of a file a block takes."""
    return -(-(HEADER_BYTES + payload_bytes) // ALIGNMENT) * ALIGNMENT


def fingerprint_digest(fingerprint: Mapping[str, str]) -> bytes:
    """16 bytes for a record's header; fields are length-prefixed as in a root key."""
    digest = blake2b(digest_size=16, person=b"kvferry-record")
    for name in sorted(fingerprint):
        for text in (name, fingerprint[name]):
            raw = text.encode("utf-8", "surrogatepass")
            digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Record:
    """The header of one record."""

    fingerprint: bytes
    block: Block
    payload_bytes: int
    file: int
    offset: int
    sequence: int
    uses: int

    @property
    def span(self) -> int:
        return record_bytes(self.payload_bytes)

    @property
    def slot(self) -> Slot:
        return self.file, self.offset

    def pack(self) -> bytes:
        block = self.block
        fields = _FIELDS.pack(
            _MAGIC,
            self.fingerprint,
            block.tenant,
            block.parent,
            block.key,
            block.depth,
            self.payload_bytes,
            block.checksum,
            self.file,
            self.offset,
            self.sequence,
            self.uses,
            0,
        )
        return fields + _SUM.pack(xxhash.xxh3_64_intdigest(fields))


def unpack(header: bytes | bytearray | memoryview, file: int, offset: int) -> Record | None:
    """The record whose header this is, if it is one and belongs here."""
    if len(header) < HEADER_BYTES:
        return None
    fields = bytes(header[: _FIELDS.size])
    (stated,) = _SUM.unpack_from(header, _FIELDS.size)
    if not fields.startswith(_MAGIC) or xxhash.xxh3_64_intdigest(fields) != stated:
        return None
    (_, fingerprint, tenant, parent, key, depth, size, checksum, number, at, sequence, uses, _) = (
        _FIELDS.unpack(fields)
    )
    if (number, at) != (file, offset):
        return None
    block = Block(key, parent, tenant, depth, checksum)
    return Record(fingerprint, block, size, file, offset, sequence, uses)
