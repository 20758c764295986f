"""Block keys of a prompt, of which only the new end is hashed.

A conversation's next prompt begins with the last one, and so do its keys. They are kept in strides
of whole blocks, each under the key of the block before it and its tokens, so that a prompt is
looked up stride by stride. A stride's name is as strong a hash as the keys themselves. It knows
packed ids and keys, and nothing of prompts.
"""

from __future__ import annotations

from hashlib import blake2b

from kvferry.gateway.prompt.tenant_cache import TenantCache
from kvferry.kvstore.keys import KEY_BYTES, chain_packed

STRIDE_BLOCKS = 64


class KeyChain:
    """Chains keys, remembering those of earlier prompts."""

    def __init__(self, max_bytes: int) -> None:
        self._strides = TenantCache(max_bytes)

    def forget(self, tenant: str) -> None:
        """Drops what is remembered of a tenant's prompts."""
        self._strides.forget(tenant)

    def keys(self, tenant: str, root: bytes, packed: bytes, block_size: int) -> bytes:
        """Keys of the whole blocks of `packed` ids, concatenated: those of `chain`."""
        size = 4 * block_size * STRIDE_BLOCKS
        parent, made = root, []
        whole = len(packed) - len(packed) % size
        for start in range(0, whole, size):
            stride = packed[start : start + size]
            name = blake2b(
                parent + stride, digest_size=KEY_BYTES, person=b"kvferry-stride"
            ).digest()
            keys = self._strides.get(tenant, name)
            if keys is None:
                keys = b"".join(chain_packed(parent, stride, block_size))
                self._strides.put(tenant, name, keys)
            made.append(keys)
            parent = keys[-KEY_BYTES:]
        made.extend(chain_packed(parent, packed[whole:], block_size))
        return b"".join(made)
