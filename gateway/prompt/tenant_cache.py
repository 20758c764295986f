"""Bytes by key, bounded in bytes, kept apart by tenant.

Owns who has to give way when the bound is reached: the tenant that holds most, and of its entries
the one that was not used longest. So nobody is evicted by a neighbour who holds more, and no lookup
tells one tenant what another has sent. It does not know what the bytes mean. Safe to use from
several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

ENTRY_BYTES = 250
"""What the interpreter takes for one entry beside its value: key, object headers, links."""


class _Shelf:
    """The entries of one tenant, the least recently used first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[bytes, bytes] = OrderedDict()
        self.size = 0


class TenantCache:
    """At most `max_bytes` of entries, all tenants together."""

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
