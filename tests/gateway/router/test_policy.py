"""What the gateway knows of nodes' blocks, and where that sends a request. Values only."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.gateway.router.policy import (
    DecodeView,
    KnownKeys,
    PrefillView,
    best_decode,
    order_prefill,
    split,
)
from kvferry.kvstore.wire.status import KeyBatch


def keys(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


def full(number: int, *held: int) -> KeyBatch:
    return KeyBatch(number, True, keys(*held), b"")


def change(number: int, committed: bytes = b"", evicted: bytes = b"") -> KeyBatch:
    return KeyBatch(number, False, committed, evicted)


# -- keys ------------------------------------------------------------------------------------------


def test_nothing_is_known_before_a_full_batch() -> None:
    known = KnownKeys()
    known.apply(change(1, keys(1, 2)))
    assert not known.synced and known.prefix(keys(1)) == 0
    known.apply(full(4, 1, 2, 3))
    assert known.synced and known.prefix(keys(1, 2, 3, 4)) == 3


def test_batches_add_and_remove() -> None:
    known = KnownKeys()
    known.apply(full(0, 1, 2, 3))
    known.apply(change(1, keys(4), keys(3)))
    assert known.prefix(keys(1, 2, 4)) == 3
    assert known.prefix(keys(1, 2, 3)) == 2
    assert len(known) == 3


def test_a_prefix_ends_at_the_first_block_that_is_missing() -> None:
    known = KnownKeys()
    known.apply(full(0, 1, 3))
    assert known.prefix(keys(1, 2, 3)) == 1 and known.prefix(keys(2, 1)) == 0
    assert known.prefix(b"") == 0 and known.prefix(keys(1)[:-1]) == 0


def test_after_a_gap_nothing_is_known_until_the_next_full_batch() -> None:
    known = KnownKeys()
    known.apply(full(0, 1, 2))
    known.apply(change(2, keys(3)))
    assert not known.synced and known.prefix(keys(1)) == 0
    known.apply(change(3, keys(4)))
    assert not known.synced
    known.apply(full(3, 1, 3, 4))
    assert known.synced and known.prefix(keys(1, 3, 4)) == 3


def test_repeated_and_overtaken_batches_change_nothing() -> None:
    known = KnownKeys()
    known.apply(full(5, 1))
    known.apply(change(6, keys(2)))
    for old in (change(6, keys(2)), change(5, b"", keys(1)), full(5, 1), change(1)):
        known.apply(old)
        assert known.synced and known.prefix(keys(1, 2)) == 2


def test_another_process_at_the_address_has_nothing() -> None:
    known = KnownKeys()
    known.apply(full(9, 1))
    known.expect(keys(7))
    known.forget()
    assert not known.synced and known.prefix(keys(1)) == known.prefix(keys(7)) == 0
    known.apply(full(0, 2))
    assert known.synced and known.prefix(keys(2)) == 1


def test_expected_keys_count_until_they_are_not_expected_any_more() -> None:
    known = KnownKeys()
    known.expect(keys(1, 2))
    known.expect(keys(1, 2, 3))
    assert known.prefix(keys(1, 2, 3)) == 3
    known.expected_no_more(keys(1, 2, 3))
    assert known.prefix(keys(1, 2, 3)) == 2
    known.apply(full(0, 1))
    known.expected_no_more(keys(1, 2))
    assert known.prefix(keys(1, 2, 3)) == 1


@given(st.randoms(use_true_random=False))
def test_whatever_is_lost_what_is_known_was_true(dice: random.Random) -> None:
    """A node's pool changes; batches are lost, repeated and overtaken; a resync ends in truth."""
    pool: set[int] = set()
    known, number = KnownKeys(), 0
    pending: list[KeyBatch] = [full(0)]
    past: list[set[int]] = [set()]
    for _ in range(30):
        gained = {dice.randrange(20) for _ in range(3)} - pool
        lost = {one for one in pool if dice.random() < 0.2}
        pool = (pool | gained) - lost
        number += 1
        past.append(set(pool))
        pending.append(change(number, keys(*gained), keys(*lost)))
        if dice.random() < 0.3:
            pending.append(full(number, *pool))
        dice.shuffle(pending) if dice.random() < 0.2 else None
        while pending and dice.random() < 0.8:
            batch = pending.pop(0)
            for _ in range(dice.choice([0, 1, 1, 1, 2])):
                known.apply(batch)
        if known.synced:
            held = {one for one in range(20) if known.prefix(keys(one))}
            assert held in past, "a state that the node never was in"
        else:
            assert len(known) == 0
    known.forget()
    known.apply(full(number, *pool))
    assert {one for one in range(20) if known.prefix(keys(one))} == pool


def test_keys_are_split_without_the_torn_end() -> None:
    assert list(split(keys(1, 2) + b"xyz")) == [keys(1), keys(2)]


# -- decode nodes ----------------------------------------------------------------------------------

IDLE = DecodeView(prefix=0, pending=0, requests=0, slots=16, chosen=0)


def test_the_longest_prefix_wins_between_equals() -> None:
    views = [IDLE, replace(IDLE, prefix=320), replace(IDLE, prefix=160)]
    assert best_decode(views, 400) == 1


def test_of_equals_the_one_that_waited_longest() -> None:
    views = [replace(IDLE, chosen=3), replace(IDLE, chosen=1), replace(IDLE, chosen=2)]
    assert best_decode(views, 400) == 1


def test_a_prefix_does_not_pile_everything_on_one_node() -> None:
    views = [replace(IDLE, prefix=320), IDLE]
    for _ in range(40):
        at = best_decode(views, 400)
        views[at] = replace(views[at], prefix=320, requests=views[at].requests + 1)
    assert min(view.requests for view in views) >= 15


def test_a_short_prefix_is_not_worth_a_queue() -> None:
    full_up = replace(IDLE, prefix=320, requests=16)
    assert best_decode([full_up, replace(IDLE, requests=8)], 400) == 1
    assert best_decode([replace(full_up, prefix=4000), replace(IDLE, requests=8)], 4100) == 0


def test_prompts_that_must_be_computed_first_count() -> None:
    assert best_decode([replace(IDLE, pending=3000), replace(IDLE, requests=4)], 100) == 1


@given(st.integers(1, 5), st.integers(1, 100))
def test_unrelated_requests_are_spread_evenly(nodes: int, requests: int) -> None:
    views = [IDLE] * nodes
    for count in range(requests):
        at = best_decode(views, 500)
        view = views[at]
        views[at] = replace(view, requests=view.requests + 1, chosen=count + 1)
    loads = [view.requests for view in views]
    assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("tokens", [1, 16, 5000])
def test_a_prefix_never_makes_a_node_worse(tokens: int) -> None:
    for prefix in (0, 16, 320, 6000):
        assert replace(IDLE, prefix=prefix).cost(tokens) <= IDLE.cost(tokens)


# -- prefill nodes ---------------------------------------------------------------------------------


def test_prefill_nodes_by_queue_then_prefix_then_turn() -> None:
    views = [
        PrefillView(prefix=900, jobs=2, chosen=0),
        PrefillView(prefix=0, jobs=0, chosen=2),
        PrefillView(prefix=16, jobs=0, chosen=3),
        PrefillView(prefix=0, jobs=0, chosen=1),
    ]
    assert order_prefill(views) == [2, 3, 1, 0]
    assert order_prefill([]) == []
