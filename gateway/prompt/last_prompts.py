"""The last prompt of every caller, for whoever asks how the next one differs from it.

Owns packed ids by caller (tenant and session) within a bound of bytes; the caller that was not
heard of longest is forgotten first. Pure.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_BYTES = 32 << 20
"""Eight million ids."""
MAX_CALLERS = 4096

Caller = tuple[str, bytes]


class LastPrompts:
    """Packed ids by caller."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_callers: int = MAX_CALLERS) -> None:
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
