"""What a block of KV is, in whichever tier it lies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """The name of a block, its place in a chain, and what its bytes must be."""

    key: bytes
    parent: bytes
    """The key before it in its chain, or the root."""
    tenant: bytes
    depth: int
    """How many blocks come before it."""
    checksum: int
    """xxh3-64 of its bytes."""
