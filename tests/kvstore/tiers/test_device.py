"""The block pool: hand-written cases, and every invariant under random use."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.kvstore.tiers.device import BlockPool


def key(name: int) -> bytes:
    return name.to_bytes(16, "little")


def filled(pool: BlockPool, names: list[int]) -> list[int]:
    blocks = pool.reserve(len(names))
    assert blocks is not None
    for block, name in zip(blocks, names, strict=True):
        pool.commit(block, key(name))
    return blocks


def test_blocks_are_found_again_after_their_release() -> None:
    pool = BlockPool(4)
    blocks = filled(pool, [1, 2, 3])
    pool.release(blocks)
    assert pool.num_held == 0 and pool.num_cached == 3
    assert pool.match([key(1), key(2), key(9)]) == blocks[:2]
    assert pool.num_held == 2
    pool.check()


def test_the_deepest_block_of_a_chain_is_evicted_first() -> None:
    pool = BlockPool(3)
    pool.release(filled(pool, [1, 2, 3]))
    taken = pool.reserve(1)
    assert taken is not None
    assert pool.match_length([key(1), key(2), key(3)]) == 2


def test_the_least_recently_used_chain_is_evicted_first() -> None:
    pool = BlockPool(4)
    pool.release(filled(pool, [1, 2]))
    pool.release(filled(pool, [3, 4]))
    pool.release(pool.match([key(1), key(2)]))
    pool.reserve(2)
    assert pool.match_length([key(1), key(2)]) == 2
    assert pool.match_length([key(3)]) == 0


def test_too_much_is_refused_and_nothing_taken() -> None:
    pool = BlockPool(3)
    held = pool.reserve(2)
    assert pool.reserve(2) is None
    assert held is not None and pool.num_available == 1
    pool.check()


def test_matching_counts_what_it_takes_from_the_room() -> None:
    pool = BlockPool(3)
    blocks = filled(pool, [1, 2])
    assert pool.pinned_cost([key(1), key(2)]) == 0
    pool.release(blocks)
    assert pool.pinned_cost([key(1), key(2)]) == 2


def test_a_claim_ends_with_the_commit_or_the_release() -> None:
    pool = BlockPool(3)
    blocks = pool.reserve(2)
    assert blocks is not None
    for block, name in zip(blocks, (1, 2), strict=True):
        pool.claim(block, key(name))
    assert pool.is_pending(key(1)) and pool.is_pending(key(2))
    pool.commit(blocks[0], key(1))
    assert not pool.is_pending(key(1))
    pool.release(blocks)
    assert not pool.is_pending(key(2))
    assert pool.match_length([key(1)]) == 1 and pool.match_length([key(2)]) == 0
    pool.check()


def test_the_same_block_computed_twice_is_found_once() -> None:
    pool = BlockPool(4)
    first, second = filled(pool, [1]), filled(pool, [1])
    assert pool.match([key(1)]) == first
    pool.release(first + first)
    pool.release(second)
    assert pool.num_held == 0 and pool.num_cached == 1
    pool.check()


def test_discarded_blocks_cannot_be_found() -> None:
    pool = BlockPool(4)
    held = filled(pool, [1])
    pool.release(filled(pool, [2]))
    assert pool.clear() == 2
    assert pool.match_length([key(1)]) == 0 and pool.match_length([key(2)]) == 0
    pool.release(held)
    assert pool.num_cached == 0 and pool.num_available == 4
    pool.check()


def test_changes_are_reported_once_and_net() -> None:
    pool = BlockPool(2)
    pool.release(filled(pool, [1, 2]))
    assert pool.take_changes() == ([key(1), key(2)], [])
    pool.release(filled(pool, [3, 4]))
    gained, lost = pool.take_changes()
    assert sorted(gained) == sorted([key(3), key(4)])
    assert sorted(lost) == sorted([key(1), key(2)])
    pool.release(filled(pool, [5]))
    pool.clear()
    gained, lost = pool.take_changes()
    assert gained == [] and len(lost) == 2 and key(5) not in lost
    assert pool.keys() == []


class PoolMachine(RuleBasedStateMachine):
    """Random holders over a small pool; a listener keeps its own idea of what is findable."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.holders: list[list[int]] = []
        self.heard: set[bytes] = set()

    @rule(names=st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True))
    def run_a_chain(self, names: list[int]) -> None:
        keys = [key(name) for name in names]
        found = self.pool.match_length(keys)
        room = self.pool.num_available - self.pool.pinned_cost(keys[:found])
        if len(keys) - found > room:
            return
        blocks = self.pool.match(keys)
        fresh = self.pool.reserve(len(keys) - found)
        assert fresh is not None and len(blocks) == found
        for block, name in zip(fresh, keys[found:], strict=True):
            self.pool.claim(block, name)
        self.holders.append(blocks + fresh)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), name=st.integers(0, 12))
    def commit_one(self, data: st.DataObject, name: int) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.holders))))
        self.pool.commit(block, key(name))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(index))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        for block in blocks:
            self.pool.share(block)
        self.holders.append(list(blocks))

    @rule()
    def clear(self) -> None:
        self.pool.clear()

    @rule()
    def listen(self) -> None:
        gained, lost = self.pool.take_changes()
        self.heard |= set(gained)
        self.heard -= set(lost)
        assert self.heard == set(self.pool.keys())

    @invariant()
    def holds_together(self) -> None:
        self.pool.check()
        held = {block for blocks in self.holders for block in blocks}
        assert len(held) == self.pool.num_held


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
