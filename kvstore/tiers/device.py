"""Accounting of one device pool: who holds which block, what it contains, what may be reused.

Owns block numbers, reference counts, the key → block map and the order of eviction. It is pure: it
never touches the bytes. Each block is in exactly one of three places:

    free        no content worth keeping
    held        referenced by at least one sequence or transfer
    cached      unreferenced, but findable by its key; evicted least recently used first

    reserve ─► held ─claim(key)─► held, pending ─commit─► held, findable
                 │ release (last reference)              │ release
                 ▼                                       ▼
               free ◄──────────── evict ───────────── cached

References are dropped tail first, so the deepest block of a chain is evicted before its parents: a
match walks from the root and could never reach a block whose parent is gone. Committed blocks are
never written again. Block tables are append-only: when two sequences computed the same block, each
keeps its own and the first one committed is the findable one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class KeyChanges(NamedTuple):
    """Keys that became findable and keys that stopped being so, since the last report."""

    committed: list[bytes]
    evicted: list[bytes]


class BlockPool:
    """The accounting of `num_blocks` blocks, numbered from 0."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._pending: dict[bytes, int] = {}
        self._claim_of: dict[int, bytes] = {}
        self._gained: dict[bytes, None] = {}
        self._lost: dict[bytes, None] = {}
        self.releases = 0
        """Grows whenever room appears: who waits for some need not look again before."""

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_available

    @property
    def num_available(self) -> int:
        """Blocks that `reserve` could hand out now, evicting cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def match_length(self, keys: Sequence[bytes]) -> int:
        """How many leading keys are findable; takes nothing."""
        for count, key in enumerate(keys):
            if key not in self._block_of:
                return count
        return len(keys)

    def pinned_cost(self, keys: Sequence[bytes]) -> int:
        """How many of these findable blocks are only cached: matching them shrinks the room."""
        return sum(1 for key in keys if self._references[self._block_of[key]] == 0)

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Takes a reference to each block of the longest findable prefix."""
        blocks = [self._block_of[key] for key in keys[: self.match_length(keys)]]
        for block in blocks:
            self.share(block)
        return blocks

    def share(self, block: int) -> None:
        """One more reference to a block that is held or cached."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def reserve(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each and no content, or None and nothing taken."""
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def _forget(self, block: int) -> None:
        key = self._key_of.pop(block)
        del self._block_of[key]
        if key in self._gained:
            del self._gained[key]
        else:
            self._lost[key] = None

    def claim(self, block: int, key: bytes) -> None:
        """Announces that a held block is being filled with what `key` names (single flight)."""
        if key not in self._pending and key not in self._block_of:
            self._pending[key] = block
            self._claim_of[block] = key

    def is_pending(self, key: bytes) -> bool:
        """Whether somebody is computing or receiving this block right now."""
        return key in self._pending

    def commit(self, block: int, key: bytes) -> None:
        """Declares a held block filled: from now on it is findable and never written again."""
        assert self._references[block] > 0, f"block {block} is committed but not held"
        self._unclaim(block)
        if key in self._block_of or block in self._key_of:
            return
        self._block_of[key] = block
        self._key_of[block] = key
        if key in self._lost:
            del self._lost[key]
        else:
            self._gained[key] = None

    def is_committed(self, block: int) -> bool:
        return block in self._key_of

    def holds(self, block: int, key: bytes) -> bool:
        """Whether this block is the findable one of this key, now."""
        return self._key_of.get(block) == key

    def _unclaim(self, block: int) -> None:
        claimed = self._claim_of.pop(block, None)
        if claimed is not None:
            del self._pending[claimed]

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference to each, the last one first."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is released but not held"
            self._references[block] -= 1
            if self._references[block] == 0:
                self.releases += 1
                self._unclaim(block)
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def discard(self, blocks: Iterable[int]) -> None:
        """Makes blocks unfindable (their content is not to be trusted); references stay."""
        for block in blocks:
            if block in self._key_of:
                self._forget(block)
                if self._references[block] == 0:
                    del self._cached[block]
                    self._free.append(block)

    def evict_cached(self) -> int:
        """Forgets every block that nobody holds; returns how many. Held ones stay findable."""
        count = len(self._cached)
        self.discard(list(self._cached))
        return count

    def clear(self) -> int:
        """Forgets every cached block, and makes held ones unfindable. Returns how many keys."""
        count = len(self._block_of)
        self.discard(list(self._key_of))
        return count

    def keys(self) -> list[bytes]:
        """All findable keys, for a full restatement."""
        return list(self._block_of)

    def take_changes(self) -> KeyChanges:
        """What became findable or unfindable since the last call, net."""
        changes = KeyChanges(list(self._gained), list(self._lost))
        self._gained, self._lost = {}, {}
        return changes

    def ledger(self) -> dict[str, int]:
        """Where every block is, for whoever wants to see that nothing leaks."""
        return {
            "total": self.num_blocks,
            "held": self.num_held,
            "shared": sum(count > 1 for count in self._references),
            "cached": self.num_cached,
            "free": len(self._free),
            "claimed": len(self._pending),
        }

    def check(self) -> None:
        """Proves the invariant: every block is free, held or cached, and the maps agree."""
        free, cached = set(self._free), set(self._cached)
        held = {block for block, count in enumerate(self._references) if count > 0}
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & held or free & cached or held & cached), "a block is in two places"
        assert free | held | cached == set(range(self.num_blocks)), "a block is nowhere"
        assert all(self._block_of[key] == block for block, key in self._key_of.items())
        assert len(self._block_of) == len(self._key_of)
        assert cached <= self._key_of.keys(), "a cached block cannot be found"
        assert not free & self._key_of.keys(), "a free block can be found"
        assert all(self._pending[key] == block for block, key in self._claim_of.items())
        assert self._claim_of.keys() <= held, "a claim on a block nobody holds"
