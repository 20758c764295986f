"""Blocks that the disk has given up and that the arena keeps a while longer: a victim cache.

Owns which blocks of the arena are there for that reason alone, and how many may be; it knows
neither files nor bytes. The arena holds much of what is on disk anyway. A small part of it is worth
more as the place of blocks that are nowhere else, in the order in which they were given up (Jouppi
1990, between two caches of which one includes the other). One that is asked for is no victim any
more: it goes to disk again.
"""

from __future__ import annotations

from collections import OrderedDict

from kvferry.kvstore.tiers.host import HostTier

VICTIM_SHARE = 1 / 16
"""Of the arena, at most."""


class Victims:
    """The victims in one arena, oldest first."""

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._most = int(VICTIM_SHARE * host.num_slots)
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._coming = 0
        """Slots that are being filled."""

    def __len__(self) -> int:
        return len(self._keys)

    def start_fill(self) -> int | None:
        """A slot for one more, at the cost of the oldest; None when the arena can spare none."""
        while self._keys and len(self._keys) + self._coming >= self._most:
            oldest, _ = self._keys.popitem(last=False)
            if self._host.may_go(oldest) and not self._host.is_unwritten(oldest):
                self._host.evict(oldest)
        if self._coming >= self._most:
            return None
        slot = self._host.start_fill(spare=True)
        self._coming += slot is not None
        return slot

    def filled(self, key: bytes, *, kept: bool) -> None:
        """What was read into a slot from `start_fill` is in the arena for this reason, or not."""
        self._coming -= 1
        if kept:
            self._keys[key] = None

    def forget(self, key: bytes) -> bool:
        """This block is no victim any more: it is wanted, or gone. False if it was none."""
        if key not in self._keys:
            return False
        del self._keys[key]
        return True

    def check(self) -> None:
        """Proves that no victim is forgotten by the arena."""
        assert all(key in self._host for key in self._keys), "a victim that is not there"
        assert len(self._keys) + self._coming <= self._most, "more victims than there may be"
