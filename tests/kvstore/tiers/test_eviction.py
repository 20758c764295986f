"""Which block goes next: orphans, unless just asked for; and the queue of leaves stays short."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

import pytest

from kvferry.kvstore.tiers.block import Block
from kvferry.kvstore.tiers.disk.slots import SlotIndex
from kvferry.kvstore.tiers.eviction import HEAP_SLACK, ChainOrder, EvictionOrder
from kvferry.tests.rigs.store.rig import chain_keys

SPAN = 4096
FEW = 40
"""A capacity of which nothing is spared for being new."""


def anybody(key: bytes) -> bool:
    return True


def add_chain(order: ChainOrder, keys: Sequence[bytes], start: int = 0) -> None:
    for index in range(start, len(keys)):
        order.add(keys[index], keys[index - 1] if index else b"", first=not index)


@pytest.mark.parametrize("asked", [False, True])
def test_orphans_go_first_unless_their_chain_was_just_asked_for(asked: bool) -> None:
    order = EvictionOrder(FEW)
    other, broken = chain_keys("other", 4), chain_keys("broken", 4)
    add_chain(order, other)
    add_chain(order, broken[:2])
    order.add(broken[3], broken[2])
    if asked:
        order.touch(broken)
    assert order.evict(anybody) == (other[3] if asked else broken[3])
    order.check()


def test_an_orphan_that_nobody_asks_for_again_goes_in_its_turn() -> None:
    order = EvictionOrder(FEW)
    broken = chain_keys("broken", 4)
    for key, parent in zip(broken[1:], broken, strict=False):
        order.add(key, parent)
    order.touch(broken)  # whoever asked never brought the parent
    others = [chain_keys(number, 4) for number in range(3)]
    for keys in others:
        add_chain(order, keys)
        order.touch(keys)
    assert [order.evict(anybody) for _ in range(3)] == broken[:0:-1]
    order.check()


def test_blocks_that_come_and_are_cleared_leave_nothing_in_the_queue() -> None:
    order = EvictionOrder(10_000)
    staying = chain_keys("staying", 50)
    add_chain(order, staying)
    for turn in range(100):
        keys = chain_keys(turn, 300)
        add_chain(order, keys)
        for key in keys:
            order.remove(key)
        assert len(order._heap) <= 2 * len(order.entries) + HEAP_SLACK + 1
        order.check()
    assert sorted(order.entries) == sorted(staying)


def sessions(dice: random.Random) -> list[list[bytes]]:
    """Twelve conversations that take turns, each of which resends all that was said before."""
    chains = [chain_keys(number, 160) for number in range(12)]
    said = [dice.randrange(5, 30) for _ in chains]
    requests = []
    for _ in range(150):
        number = dice.randrange(len(chains))
        said[number] = min(160, said[number] + dice.randrange(1, 12))
        requests.append(chains[number][: said[number]])
    return requests


class Lru:
    """The plain thing, at the same capacity."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def ask(self, keys: Sequence[bytes]) -> int:
        hits = next((n for n, key in enumerate(keys) if key not in self._blocks), len(keys))
        for key in reversed(keys):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
            if len(self._blocks) > self._capacity:
                self._blocks.popitem(last=False)
        return hits


def ask_disk(index: SlotIndex, keys: Sequence[bytes]) -> int:
    """Finds what there is of a chain and writes the rest, as the tiers do; the blocks found."""
    hits = next((n for n, key in enumerate(keys) if key not in index), len(keys))
    index.touch(keys)
    for number in range(hits, len(keys)):
        if keys[number] in index:
            continue
        block = Block(keys[number], keys[number - 1] if number else bytes(16), bytes(16), number, 0)
        record = index.place(block, 2)
        assert record is not None
        index.landed(record)
    return hits


@pytest.mark.parametrize("seed", range(5))
def test_conversations_that_grow_are_found_on_disk_as_by_an_lru(seed: int) -> None:
    """What follows a lost block is lost with it: one wrong victim costs a whole request."""
    requests = sessions(random.Random(seed))
    capacity = int(0.8 * len({key for keys in requests for key in keys}))
    index, lru = SlotIndex(capacity * SPAN, bytes(16), SPAN - 128), Lru(capacity)
    found = plain = 0
    for keys in requests:
        found += ask_disk(index, keys)
        plain += lru.ask(keys)
    assert found >= 0.97 * plain
    index._order.check()
