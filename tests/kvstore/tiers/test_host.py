"""The arena's accounting and the tiers above it, without processes: who may touch which slot."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvferry.kvstore.tiers.block import Block
from kvferry.kvstore.tiers.disk.record import record_bytes
from kvferry.kvstore.tiers.eviction import EvictionOrder, prefix_length
from kvferry.kvstore.tiers.fetches import Ready
from kvferry.kvstore.tiers.host import HostTier
from kvferry.tests.rigs.store.rig import TENANT, chain_keys
from kvferry.tests.rigs.store.tiers import SIZE, TiersRig


def block(key: bytes, parent: bytes = b"\0" * 16, depth: int = 0) -> Block:
    return Block(key, parent, TENANT, depth, 7)


def fill(host: HostTier, keys: list[bytes], owner: str = "w") -> list[int]:
    slots = host.grant(owner, len(keys))
    parent = b"\0" * 16
    for slot, key in zip(slots, keys, strict=True):
        host.commit(owner, slot, block(key, parent), None)
        parent = key
    return slots


def test_a_reservation_ends_by_commit_by_return_or_by_proven_death_only() -> None:
    host = HostTier(4)
    slots = host.grant("w", 4)
    host.expire(1e9)
    assert host.grant("other", 1) == [], "no time frees a slot that may be written"
    assert host.give_back("w", slots[0]) and not host.give_back("w", slots[0])
    assert not host.give_back("other", slots[1])
    assert host.lost("w") == 3
    assert host.grant("other", 4) == [slots[0]]
    host.expire(1e9)
    assert host.ledger()["quarantined"] == 3
    host.check()
    assert host.proven_dead("w") == 3
    assert len(host.grant("other", 4)) == 3
    host.check()


def test_a_leased_block_is_not_evicted_and_a_lease_ends_by_time() -> None:
    host = HostTier(4)
    keys = chain_keys("x", 4)
    fill(host, keys)
    leases = [host.lease("r", key, until=10.0) for key in keys]
    assert host.grant("w", 1) == []
    assert host.release(leases[3])
    assert host.grant("w", 2) == [leases[3].slot], "only the released one can go"
    assert host.expire(10.0) == 3
    assert not host.release(leases[0])
    assert len(host.grant("w", 4)) == 3
    host.check()


def test_a_discarded_block_keeps_its_slot_while_it_is_read() -> None:
    host = HostTier(2)
    keys = chain_keys("x", 2)
    fill(host, keys)
    lease = host.lease("r", keys[1], until=10.0)
    host.discard(keys[1])
    assert keys[1] not in host
    host.check()
    assert host.ledger()["withdrawn"] == 1
    slots = host.grant("w", 2)
    assert lease.slot not in slots
    host.release(lease)
    assert host.grant("w", 1) == [lease.slot]
    host.check()


def test_the_second_copy_of_a_block_serves_its_shipment_and_goes() -> None:
    host = HostTier(4)
    first, second = host.grant("w", 2)
    key = chain_keys("x", 1)[0]
    host.commit("w", first, block(key), None)
    held = host.commit("w", second, block(key), hold_until=50.0)
    assert held is not None and host.slot_of(key) == first
    host.check()
    host.release(held)
    assert host.ledger()["free"] == 3
    host.check()


def test_the_deepest_block_of_the_oldest_chain_goes_first() -> None:
    host = HostTier(8)
    old, new = chain_keys("old", 4), chain_keys("new", 4)
    fill(host, old)
    fill(host, new)
    evicted: list[bytes] = []
    host.on_evicted = evicted.append
    for count in range(1, 6):
        host.grant("w", 1)
        assert evicted == [*reversed(old), new[3]][:count]


def test_a_pinned_block_stays_until_its_time_is_over() -> None:
    host = HostTier(4)
    keys = chain_keys("x", 4)
    fill(host, keys)
    assert host.pin(keys, until=5.0, most=2) == 2
    assert len(host.grant("w", 4)) == 2
    assert keys[1] in host
    host.expire(5.0)
    assert len(host.grant("w", 4)) == 2
    host.check()


@pytest.mark.A5
def test_a_prompt_larger_than_the_arena_keeps_its_beginning(tmp_path: Path) -> None:
    rig = TiersRig(tmp_path, slots=16)
    keys = chain_keys("long", 60)
    assert rig.put(keys) == 60
    assert rig.read(keys, 1) >= 14
    rig.put(keys, start=14)
    assert rig.read(keys, 2) >= 14, "the end of a prompt has pushed out its beginning"
    rig.tiers.check()


@pytest.mark.A9
def test_new_blocks_are_not_the_first_victims_even_when_all_others_are_hot() -> None:
    order = EvictionOrder(100)
    hot = [chain_keys(n, 10) for n in range(10)]
    for keys in hot:
        for key, parent in zip(keys, [b"", *keys], strict=False):
            order.add(key, parent, first=not parent)
    order.give_credit(True)
    for _ in range(5):
        for keys in hot:
            order.touch(keys)
    order.give_credit(True)
    assert order.evict(lambda key: True) is not None
    new = chain_keys("new", 2)
    order.add(new[0], b"", first=True)
    for _ in range(2):
        victim = order.evict(lambda key: True)
        assert victim is not None and victim not in new
    order.add(new[1], new[0])
    order.evict(lambda key: True)
    assert new[0] in order.entries and new[1] in order.entries
    order.check()


@pytest.mark.A9
def test_what_is_written_at_full_capacity_is_read_at_once(tmp_path: Path) -> None:
    rig = TiersRig(tmp_path, slots=64)
    number = 0
    for chain in range(8):
        rig.put(chain_keys(chain, 8))
    for _ in range(5):
        for chain in range(8):
            number += 1
            rig.read(chain_keys(chain, 8), number)
    for chain in range(8, 60):
        keys = chain_keys(chain, 4)
        assert rig.put(keys) == 4
        number += 1
        assert rig.read(keys, number) == 4, "what has just been written is gone"
    rig.tiers.check()


def test_a_scan_does_not_push_out_what_is_used() -> None:
    """Credit is given once it has proven better than plain LRU on this very traffic."""
    capacity = 100
    order = EvictionOrder(capacity)
    shared = [chain_keys(f"shared {n}", 10) for n in range(4)]
    hits = asked = 0
    for turn in range(400):
        keys = shared[turn % 4]
        if turn >= 200:
            hits += prefix_length(keys, order.entries)
            asked += len(keys)
        for chain in (keys, chain_keys(f"scan {turn}", 40)):
            order.touch(chain)
            for key, parent in zip(chain, [b"", *chain], strict=False):
                if key not in order.entries:
                    if len(order.entries) >= capacity:
                        order.evict(lambda key: True)
                    order.add(key, parent, first=not parent)
        order.check()
    assert order.credited and order.lead > 0
    assert hits > 0.8 * asked  # a plain LRU has none of them: 160 other blocks come between


def test_the_end_of_a_fetch_is_told_once_and_counted_once(tmp_path: Path) -> None:
    rig = TiersRig(tmp_path, slots=8)
    keys = chain_keys("mine", 3)
    rig.put(keys)
    began = rig.tiers.fetch("r", 1, keys, 0, deadline=5.0, window=8, now=0.0)
    assert began is not None and began.ended == "complete" and len(began.blocks) == 3
    for _ in range(4):
        rig.tick(0.1)
    assert not rig.handed and rig.counter("fetches_complete") == 1
    assert rig.tiers.fetches.active, "its reader still copies"
    rig.tiers.fetches.took("r", 1, 3, rig.now)
    assert not rig.tiers.fetches.active


# -- interleavings ---------------------------------------------------------------------------------


@pytest.mark.A4
def test_what_foreign_blocks_have_displaced_is_a_shorter_answer(tmp_path: Path) -> None:
    rig = TiersRig(tmp_path, slots=8)
    keys = chain_keys("mine", 6)
    rig.put(keys)
    assert rig.tiers.locate(keys) == b"h" * 6
    assert rig.put(chain_keys("foreign", 8)) == 8
    assert rig.read(keys, 1) == 0
    for number in range(1000):
        rig.tiers.locate(chain_keys("foreign", 8))
        assert number or rig.tiers.host.ledger()["leases"] == 0
    assert rig.tiers.host.ledger()["leases"] == 0, "a look costs nothing"
    assert rig.put(chain_keys("later", 8)) == 8
    rig.tiers.check()


@pytest.mark.A4
@pytest.mark.A5
@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_random_interleavings_serve_right_bytes(tmp_path: Path, seed: int) -> None:
    """Ten times: every step may be any of these, the disk works at any time or not at all."""
    dice = random.Random(seed)
    cap = dice.choice((0, 24, 60)) * record_bytes(SIZE)
    rig = TiersRig(tmp_path, slots=dice.choice((8, 20, 40)), cap=cap, lease_s=3.0)
    rig.tiers.host.expire(0.0)
    chains = [chain_keys(n, 8) for n in range(12)]
    readers: dict[tuple[str, int], list[bytes]] = {}
    leased: dict[tuple[str, int], list[tuple[int, int, bytes]]] = {}
    number = 0

    def collect() -> None:
        for handed in rig.handed:
            name = (str(handed.fetch.owner), handed.fetch.number)
            for it in handed.blocks:
                leased.setdefault(name, []).append(
                    (it.slot, it.checksum, handed.fetch.keys[it.index])
                )
        rig.handed.clear()

    for _ in range(1000):
        keys = dice.choice(chains)[: dice.randrange(1, 9)]
        match dice.randrange(12):
            case 0 | 1 | 2:
                rig.put(keys, start=0)
            case 3 | 4:
                number += 1
                reader = dice.choice(("r1", "r2"))
                readers[(reader, number)] = keys
                started = rig.tiers.fetch(
                    reader,
                    number,
                    keys,
                    dice.randrange(len(keys) + 1),
                    deadline=rig.now + dice.choice((0.0, 1.0, 9.0)),
                    window=dice.choice((1, 3, 8)),
                    now=rig.now,
                )
                assert started is not None
                rig.handed.append(started)
            case 5 | 6:
                rig.work(dice.randrange(6))
            case 7:
                rig.tick(dice.choice((0.0, 0.2, 4.0)))
            case 8 if readers:
                name = dice.choice(list(readers))
                rig.tiers.fetches.cancel(*name)
                del readers[name]
                leased.pop(name, None)
            case 9:
                rig.tiers.pin(keys, 2.0, rig.now)
            case 10 if dice.random() < 0.2:
                rig.tiers.clear(None)
                leased.clear()
            case 11 if dice.random() < 0.3:
                owner = dice.choice(("r1", "r2", "writer"))
                slots = rig.tiers.host.grant("writer", 1) if owner == "writer" else []
                rig.tiers.lost(owner)
                assert not slots or rig.tiers.host.num_quarantined >= 1
                rig.tiers.host.proven_dead(owner)
                for name in [name for name in readers if name[0] == owner]:
                    del readers[name]
                    leased.pop(name, None)
        collect()
        for name, blocks in list(leased.items()):
            slot, total, key = blocks.pop(0)
            live = rig.tiers.fetches.active.get(name)
            right = rig.is_right(Ready(0, slot, total, b"h"), key)
            if live is not None and live.leased and rig.tiers.host.is_live(live.leased[0]):
                assert right, "a block under a live lease was overwritten"
            more = rig.tiers.fetches.took(name[0], name[1], 1, rig.now)
            rig.handed += [more] if more else []
            if not blocks:
                del leased[name]
        rig.tiers.check()
        if cap:
            assert rig.bytes_on_disk() <= cap
    for name in readers:
        rig.tiers.fetches.cancel(*name)
    rig.settle()
    ledger = rig.tiers.host.ledger()
    assert ledger["leases"] == ledger["filling"] == ledger["withdrawn"] == 0, "something leaks"
    rig.tick(1e4)
    free = len(rig.tiers.host.grant("last", 100))
    assert free == rig.tiers.host.num_slots, "the arena is usable again, all of it"
