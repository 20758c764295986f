"""Which block a full tier gives up: the order of eviction, in memory and on disk.

Owns recency, uses and the shape of the chains; it is pure and knows neither slots nor files.

    orphans first   a block without its parent cannot be found: a match walks from the root. So
                    the end of a prompt that is larger than the tier does not push out its beginning
                    (but whoever has asked for an orphan is about to bring its parent)
    leaves next     a block with a resident child stays
    least recent    among leaves the one with the lowest score goes
    second touch    score = last touch + credit for each use after the first, so that a scan of
                    prompts that are never asked for again does not push out what is shared

The clock counts touched blocks. Uses of evicted blocks are remembered for as many blocks as the
tier holds (the ghosts of 2Q, Johnson and Shasha 1994, and of ARC, Megiddo and Modha 2003); the
newest blocks are spared, so that a block written while everything is hot can still be read.

Whether credit helps depends on the traffic: near the size at which everything fits it only keeps
what is dead. So two imaginary tiers of the same size run beside the real one, keys only, a plain
LRU and a credited one, and the real one gives credit while the second is ahead (set duelling,
Qureshi et al. 2007).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import islice

CREDITED_USES = 3
"""Each is worth as many touched blocks as the tier holds."""
SPARED_SHARE = 0.02
"""The newest blocks of a tier that go last, as a part of it."""
LEAD_SHARE = 0.03
"""How far ahead, in blocks hit as a part of the tier, the credited tier must be."""
LEAVES_TRIED = 16
HEAP_SLACK = 256
"""Places of removed blocks that the queue of leaves may hold beside as many as there are blocks."""

_LOWEST = -(1 << 62)


@dataclass(slots=True)
class Entry:
    """A resident block."""

    parent: bytes
    first: bool
    """Nothing comes before it in its chain."""
    touched: int
    uses: int
    asked: bool = False
    """A request has asked for it while its parent was gone, and will put the parent again."""


class ChainOrder:
    """Blocks of at most `capacity`, in the order in which they go."""

    def __init__(self, capacity: int, *, credited: bool) -> None:
        self.capacity = capacity
        self._credit = capacity if credited else 0
        self._spared = int(capacity * SPARED_SHARE)
        self.entries: dict[bytes, Entry] = {}
        """What is resident."""
        self._children: dict[bytes, int] = {}
        self._ghosts: OrderedDict[bytes, int] = OrderedDict()
        self._newest: OrderedDict[bytes, None] = OrderedDict()
        self._heap: list[tuple[int, bytes]] = []
        self._queued: set[bytes] = set()
        self._clock = 0

    def uses(self, key: bytes) -> int:
        """How often a block was put or asked for, as far as is remembered; 0: never seen."""
        entry = self.entries.get(key)
        return entry.uses if entry is not None else self._ghosts.get(key, 0)

    def touch(self, keys: Sequence[bytes]) -> None:
        """A request asks for this chain, from its root: a use of every resident block of it."""
        for key in reversed(keys):
            self._clock += 1
            entry = self.entries.get(key)
            if entry is not None:
                entry.touched = self._clock
                entry.uses += 1
                entry.asked = self._is_orphan(entry)

    def add(
        self, key: bytes, parent: bytes, *, first: bool = False, found: tuple[int, int] = (0, 0)
    ) -> None:
        """A block has become resident; `first`: it begins its chain.

        `found` is for one that was there before: when it was last touched (before this process:
        below zero; 0: now), and how often it was used.
        """
        assert key not in self.entries, "a block is resident twice"
        self._clock += 1
        touched, uses = found
        uses = max(uses, self._ghosts.pop(key, 0) + 1)
        entry = self.entries[key] = Entry(parent, first, touched or self._clock, uses)
        self._children[parent] = self._children.get(parent, 0) + 1
        if self._is_orphan(entry):
            self._queue(key)
            return
        self._newest[key] = None
        if len(self._newest) > self._spared:
            self._queue(self._newest.popitem(last=False)[0])

    def remove(self, key: bytes) -> None:
        """A block is no longer resident, and not because of its age: it is not remembered."""
        self._drop(key)
        if len(self._heap) > 2 * len(self.entries) + HEAP_SLACK:
            self._queue_all()

    def evict(self, may_go: Callable[[bytes], bool]) -> bytes | None:
        """Gives up the first block in the order that `may_go`; None if none may."""
        victim = self._first_queued(may_go)
        if victim is None:
            candidates = (key for key in self._newest if key not in self._children)
            victim = next(filter(may_go, candidates), None)
        if victim is not None:
            self._give_up(victim)
        return victim

    def evict_inner(self, may_go: Callable[[bytes], bool]) -> bytes | None:
        """Gives up a block that others are chained to: the deepest that `may_go` of some chain.

        For a tier whose blocks can be found in another one as well, where a block without its
        parent is not lost. It looks at the chains of a few leaves, and at each block once: that may
        be all of them.
        """
        seen: set[bytes] = set()
        leaves = heapq.nsmallest(LEAVES_TRIED, self._heap)
        newest = (key for key in reversed(self._newest) if key not in self._children)
        for key in [*(key for _, key in leaves), *islice(newest, LEAVES_TRIED)]:
            above: bytes | None = key
            while above in self.entries and above not in seen:
                seen.add(above)
                if may_go(above):
                    self._give_up(above)
                    return above
                above = self.entries[above].parent
        return None

    def _give_up(self, key: bytes) -> None:
        """A block goes, and its uses are remembered."""
        self._ghosts[key] = self._drop(key).uses
        if len(self._ghosts) > self.capacity:
            self._ghosts.popitem(last=False)

    def _first_queued(self, may_go: Callable[[bytes], bool]) -> bytes | None:
        skipped: list[bytes] = []
        victim = None
        while self._heap and victim is None:
            score, key = heapq.heappop(self._heap)
            self._queued.discard(key)
            entry = self.entries.get(key)
            if entry is None or key in self._children or key in self._newest:
                continue
            if score != self._score(entry):
                self._queue(key)
            elif may_go(key):
                victim = key
            else:
                skipped.append(key)
        for key in skipped:
            self._queue(key)
        return victim

    def _drop(self, key: bytes) -> Entry:
        entry = self.entries.pop(key)
        self._newest.pop(key, None)
        left = self._children[entry.parent] - 1
        if left:
            self._children[entry.parent] = left
            return entry
        del self._children[entry.parent]
        above = self.entries.get(entry.parent)
        if above is not None:
            # Whoever touched the child walked through the parent.
            above.touched = max(above.touched, entry.touched)
            self._queue(entry.parent)
        return entry

    def _queue(self, key: bytes) -> None:
        if key in self._queued or key in self._children or key in self._newest:
            return
        self._queued.add(key)
        heapq.heappush(self._heap, (self._score(self.entries[key]), key))

    def _score(self, entry: Entry) -> int:
        if self._is_orphan(entry) and not entry.asked:
            return _LOWEST
        return entry.touched + self._credit * min(entry.uses - 1, CREDITED_USES)

    def _is_orphan(self, entry: Entry) -> bool:
        return not entry.first and entry.parent not in self.entries

    def give_credit(self, credited: bool) -> None:
        """Changes whether uses count, for all blocks at once."""
        self._credit = self.capacity if credited else 0
        self._queue_all()

    def _queue_all(self) -> None:
        self._heap, self._queued = [], set()
        for key in self.entries:
            self._queue(key)

    def check(self) -> None:
        """Proves that children are counted right and that no block is out of reach of eviction."""
        counted: dict[bytes, int] = {}
        for entry in self.entries.values():
            counted[entry.parent] = counted.get(entry.parent, 0) + 1
        assert counted == self._children, "children are counted wrong"
        leaves = self.entries.keys() - self._children.keys() - self._newest.keys()
        assert leaves <= self._queued, "a leaf could never be evicted"
        assert self._newest.keys() <= self.entries.keys(), "a block is new and not there"
        assert not self._ghosts.keys() & self.entries.keys(), "a resident block is a ghost"


class EvictionOrder(ChainOrder):
    """The order of a real tier: credited only while that has proven better than plain LRU."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, credited=False)
        self.credited = False
        """The verdict of the duel between the two imaginary tiers."""
        self.lead = 0
        """Prefix hits of the imaginary credited tier less those of the plain one, within bounds."""
        self._margin = max(1, int(capacity * LEAD_SHARE))
        self._trial = ChainOrder(capacity, credited=True)
        self._plain: OrderedDict[bytes, None] = OrderedDict()

    def touch(self, keys: Sequence[bytes]) -> None:
        lead = self.lead + prefix_length(keys, self._trial.entries)
        lead -= prefix_length(keys, self._plain)
        self.lead = max(-self._margin, min(2 * self._margin, lead))
        self._trial.touch(keys)
        for key, parent in zip(keys, [b"", *keys], strict=False):
            self._try(key, parent, first=not parent)
        for key in reversed(keys):
            self._touch_plain(key)
        before, self.credited = self.credited, self.lead > (0 if self.credited else self._margin)
        if before != self.credited:
            self.give_credit(self.credited)
        super().touch(keys)

    def add(
        self, key: bytes, parent: bytes, *, first: bool = False, found: tuple[int, int] = (0, 0)
    ) -> None:
        super().add(key, parent, first=first, found=found)
        self._try(key, parent, first)
        if key not in self._plain:
            self._touch_plain(key)

    def _try(self, key: bytes, parent: bytes, first: bool) -> None:
        if key not in self._trial.entries:
            if len(self._trial.entries) >= self.capacity:
                self._trial.evict(lambda key: True)
            self._trial.add(key, parent, first=first)

    def _touch_plain(self, key: bytes) -> None:
        self._plain[key] = None
        self._plain.move_to_end(key)
        if len(self._plain) > self.capacity:
            self._plain.popitem(last=False)


def prefix_length(keys: Sequence[bytes], resident: Container[bytes]) -> int:
    """How many leading keys are resident."""
    for count, key in enumerate(keys):
        if key not in resident:
            return count
    return len(keys)
