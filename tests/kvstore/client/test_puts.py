"""What a node knows the store to have is forgotten in time, and is never much."""

from __future__ import annotations

from kvferry.kvstore.client.puts import KNOWN_SECONDS, MAX_KNOWN, KnownBlocks
from kvferry.tests.rigs.clock import Clock


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_what_was_seen_is_known_for_a_while_and_costs_no_memory_then() -> None:
    clock = Clock(5.0)
    known = KnownBlocks(clock)
    for number in range(100):
        known.add(key(number))
        clock.now += KNOWN_SECONDS / 10
        assert key(number) in known and len(known) <= 11
    assert key(89) not in known and key(92) in known
    known.add(key(92))  # seen again: known for longer
    clock.now += KNOWN_SECONDS / 2
    assert key(92) in known and key(94) not in known
    known.add(key(100))
    assert len(known) == 2 + sum(key(number) in known for number in range(93, 100))
    known.discard(key(92))
    assert key(92) not in known
    known.clear()
    assert key(100) not in known and len(known) == 0


def test_the_oldest_goes_when_there_are_too_many() -> None:
    known = KnownBlocks(Clock(5.0))
    for number in range(MAX_KNOWN + 10):
        known.add(key(number))
    assert len(known) == MAX_KNOWN
    assert key(9) not in known and key(10) in known
