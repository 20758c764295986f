"""What is remembered of earlier prompts, each within a bound of bytes, so that the next costs less.

Owns what has to give way when a bound is reached, and that one tenant never sees, nor can tell by a
lookup, what another has sent. It knows packed ids and keys, and nothing of prompts.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b

from kvferry.kvstore.keys import KEY_BYTES, chain_packed

ENTRY_BYTES = 250
"""What the interpreter takes for one entry beside its value: key, object headers, links."""
STRIDE_BLOCKS = 64
LAST_PROMPT_BYTES = 32 << 20
"""Eight million ids."""
MAX_CALLERS = 4096

Caller = tuple[str, bytes]


@dataclass(slots=True)
class _Shelf:
    """The entries of one tenant, the least recently used first."""

    entries: OrderedDict[bytes, bytes] = field(default_factory=OrderedDict)
    size: int = 0


class TenantCache:
    """Bytes by key, at most `max_bytes` of entries, all tenants together.

    When the bound is reached, the tenant that holds most has to give way, and of its entries the
    one that was not used longest. So nobody is evicted by a neighbour who holds more, and no lookup
    tells one tenant what another has sent. Safe to use from several threads.
    """

    def __init__(self, max_bytes: int) -> None:
        self.size = 0
        self._max = max_bytes
        self._shelves: dict[str, _Shelf] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(len(shelf.entries) for shelf in self._shelves.values())

    def get(self, tenant: str, key: bytes) -> bytes | None:
        """The value under a tenant's key, which counts as used now."""
        with self._lock:
            shelf = self._shelves.get(tenant)
            found = shelf.entries.get(key) if shelf is not None else None
            if shelf is not None and found is not None:
                shelf.entries.move_to_end(key)
            return found

    def put(self, tenant: str, key: bytes, value: bytes) -> None:
        """Keeps a value, in the place of an older one under the same key; too large a one never."""
        added = len(value) + ENTRY_BYTES
        if added > self._max:
            return
        with self._lock:
            shelf = self._shelves.setdefault(tenant, _Shelf())
            old = shelf.entries.pop(key, None)
            if old is not None:
                added -= len(old) + ENTRY_BYTES
            shelf.entries[key] = value
            shelf.size += added
            self.size += added
            while self.size > self._max:
                self._evict()

    def forget(self, tenant: str) -> None:
        """Drops everything of a tenant."""
        with self._lock:
            shelf = self._shelves.pop(tenant, None)
            if shelf is not None:
                self.size -= shelf.size

    def _evict(self) -> None:
        tenant, shelf = max(self._shelves.items(), key=lambda item: item[1].size)
        _, value = shelf.entries.popitem(last=False)
        shelf.size -= len(value) + ENTRY_BYTES
        self.size -= len(value) + ENTRY_BYTES
        if not shelf.entries:
            del self._shelves[tenant]


class KeyChain:
    """Block keys of prompts, of which only the new end is hashed.

    A conversation's next prompt begins with the last one, and so do its keys. They are kept in
    strides of whole blocks, each under the key of the block before it and its tokens, so that a
    prompt is looked up stride by stride. A stride's name is as strong a hash as the keys.
    """

    def __init__(self, max_bytes: int) -> None:
        self._strides = TenantCache(max_bytes)

    @property
    def remembered_bytes(self) -> int:
        return self._strides.size

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


class LastPrompts:
    """The last prompt of every caller, for whoever asks how the next one differs from it.

    Packed ids by caller (tenant and session); the caller that was not heard of longest is forgotten
    first.
    """

    def __init__(self, max_bytes: int = LAST_PROMPT_BYTES, max_callers: int = MAX_CALLERS) -> None:
        self._max_bytes = max_bytes
        self._max_callers = max_callers
        self._ids: OrderedDict[Caller, bytes] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._ids)

    def swap(self, caller: Caller, ids: bytes) -> bytes | None:
        """The caller's last prompt, if it is remembered; from now on it is this one."""
        before = self._ids.pop(caller, None)
        self.bytes -= len(before or b"")
        if len(ids) <= self._max_bytes:
            self._ids[caller] = ids
            self.bytes += len(ids)
        while self.bytes > self._max_bytes or len(self._ids) > self._max_callers:
            _, forgotten = self._ids.popitem(last=False)
            self.bytes -= len(forgotten)
        return before

    def forget(self, tenant: str) -> None:
        """Drops the prompts of all of a tenant's sessions."""
        for caller in [caller for caller in self._ids if caller[0] == tenant]:
            self.bytes -= len(self._ids.pop(caller))
