"""Identity of a block: the chained key over tokens and over everything that changes the bytes.

    root        = H(fingerprint, tenant, cache_salt)
    key(0)      = H(root,     tokens of block 0)
    key(i)      = H(key(i-1), tokens of block i)

H is BLAKE2b with a 16-byte digest (RFC 7693). Every field of the root is typed and length-prefixed,
so that no two different contexts encode alike, and the encoding is pinned by a golden vector in the
tests: keys are equal in every process, on every host, after every restart. A checksum guards
copies of the bytes; the key says what the bytes mean. This module knows no pool and no peer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

import xxhash

KEY_BYTES = 16
_TOKEN = "i"  # int32, little-endian on the wire


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return array(_TOKEN, tokens).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """The inverse of `pack_tokens`; ValueError when the length is not a multiple of four."""
    ids = array(_TOKEN)
    ids.frombytes(packed)
    return ids.tolist()


def root_key(fingerprint: Mapping[str, str], tenant: str, salt: str | None) -> bytes:
    """The key that every chain of one tenant starts from; no salt differs from an empty one."""
    digest = blake2b(digest_size=KEY_BYTES, person=b"kvferry-root")
    digest.update(len(fingerprint).to_bytes(4, "little"))
    for name in sorted(fingerprint):
        _field(digest, b"n", name)
        _field(digest, b"v", fingerprint[name])
    _field(digest, b"t", tenant)
    if salt is None:
        digest.update(b"-")
    else:
        _field(digest, b"s", salt)
    return digest.digest()


def tenant_key(tenant: str) -> bytes:
    """16 bytes by which a store knows whose a block is, whatever salts its roots have."""
    return blake2b(
        tenant.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES, person=b"kvferry-tenant"
    ).digest()


def _field(digest: blake2b, tag: bytes, text: str) -> None:
    raw = text.encode("utf-8", "surrogatepass")
    digest.update(tag + len(raw).to_bytes(8, "little"))
    digest.update(raw)


def next_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the block that holds `tokens` behind the block (or root) `parent`."""
    return blake2b(
        parent + pack_tokens(tokens), digest_size=KEY_BYTES, person=b"kvferry-block"
    ).digest()


def chain(root: bytes, tokens: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Keys of the whole blocks of `tokens`, from position 0."""
    return chain_packed(root, pack_tokens(tokens), block_size)


def chain_packed(parent: bytes, tokens: bytes, block_size: int) -> Iterator[bytes]:
    """Keys of the whole blocks of packed `tokens` behind the block (or root) `parent`."""
    packed = memoryview(tokens)
    step = 4 * block_size
    for start in range(0, len(packed) - step + 1, step):
        parent = blake2b(
            parent + packed[start : start + step], digest_size=KEY_BYTES, person=b"kvferry-block"
        ).digest()
        yield parent


def split_keys(packed: bytes) -> list[bytes]:
    """Keys out of their concatenation; ValueError when it is torn."""
    if len(packed) % KEY_BYTES:
        raise ValueError(f"{len(packed)} bytes are not a whole number of {KEY_BYTES}-byte keys")
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]


def checksum(payload: bytes | memoryview) -> int:
    """xxh3-64 of a block's bytes: guards a copy, says nothing of identity."""
    return xxhash.xxh3_64_intdigest(payload)


def matchable_blocks(num_tokens: int, block_size: int) -> int:
    """How many leading blocks of a prompt may come from a cache: floor((n - 1) / B).

    At least one token is always computed, because its logits choose the next one; so a committed
    block is never written again.
    """
    return max(0, num_tokens - 1) // block_size
