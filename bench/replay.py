"""Replays request traces against the store alone, at full length: hit ratio beside plain LRU.

    python -m kvferry.bench.replay PATH… [--tier ram|disk|both] [--requests N]

Owns the traces' format, the capacities and the table; the store is the real one, arena, slots
and files, without sockets and threads. Tokens are kept and bytes are scaled: a block's payload has
`PAYLOAD_BYTES`, whatever its length in tokens. A block counts as a hit only while every earlier
block of its request is one, is fetched, and is verified.

`ram` is a store whose arena holds the capacity. `disk` has a disk cap of the capacity in records
and an arena of an eighth of it; every record, dead or alive, counts against the cap.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvferry.kvstore.keys import checksum
from kvferry.kvstore.tiers.block import Block
from kvferry.kvstore.tiers.cache import TieredCache
from kvferry.kvstore.tiers.disk.files import FileSystem
from kvferry.kvstore.tiers.disk.record import record_bytes
from kvferry.kvstore.tiers.disk.slots import SlotIndex
from kvferry.kvstore.tiers.disk.worker import DiskJob, DiskWorker, ReadJob
from kvferry.kvstore.tiers.fetches import HandedOut
from kvferry.kvstore.tiers.host import HostTier

PAYLOAD_BYTES = 64
CAPACITIES = {512: (2_000, 6_000, 20_000, 60_000), 64: (4_096, 8_192, 16_384, 32_768)}
"""Blocks, by tokens per block."""
ARENA_PART = 8
"""With a disk, the arena has this part of its capacity."""
PUTS_AT_ONCE = 8
"""Blocks computed between two looks at the disk."""
_ROOT = b"\0" * 16
_TENANT = b"\1" * 16


class Request(msgspec.Struct):
    """A row of a trace; what is not named here is not needed."""

    input_length: int
    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    block_tokens: int
    requests: list[list[bytes]]
    """Each one's chain of block keys."""


def read_trace(path: Path, most: int | None = None) -> Trace:
    """A trace file; ValueError when it is none."""
    decoder = msgspec.json.Decoder(Request)
    rows = []
    with path.open("rb") as lines:
        for line in lines:
            try:
                rows.append(decoder.decode(line))
            except msgspec.MsgspecError as error:
                raise ValueError(f"{path}: row {len(rows) + 1}: {error}") from None
            if len(rows) == most:
                break
    tokens = sum(row.input_length for row in rows) / sum(len(row.hash_ids) for row in rows)
    block_tokens = min(CAPACITIES, key=lambda it: abs(it - tokens))
    keys = [[number.to_bytes(16, "big") for number in row.hash_ids] for row in rows]
    return Trace(path.stem, block_tokens, keys)


def plain_lru(requests: Sequence[Sequence[bytes]], capacity: int) -> float:
    """Hit ratio of an LRU over blocks, deepest block of a request touched first."""
    resident: OrderedDict[bytes, None] = OrderedDict()
    hits = 0
    for keys in requests:
        for key in keys:
            if key not in resident:
                break
            hits += 1
        for key in reversed(keys):
            resident[key] = None
            resident.move_to_end(key)
            if len(resident) > capacity:
                resident.popitem(last=False)
    return hits / sum(map(len, requests))


def ideal(requests: Sequence[Sequence[bytes]]) -> float:
    """Hit ratio of a cache that forgets nothing."""
    return plain_lru(requests, 1 << 62)


class Replay:
    """One store and its only node. Close it, or leave its `with`."""

    def __init__(self, folder: Path, slots: int, disk_records: int = 0) -> None:
        self._memory = memoryview(bytearray((slots + 1) * PAYLOAD_BYTES))
        self._jobs: list[DiskJob] = []
        self._files = FileSystem(folder)
        self._worker = DiskWorker(self._files)
        index = None
        if disk_records:
            self._files.lock()
            index = SlotIndex(disk_records * record_bytes(PAYLOAD_BYTES), b"\2" * 16, PAYLOAD_BYTES)
        # One slot more: the one that is being written holds no block yet.
        self.tiers = TieredCache(HostTier(slots + 1), self._view, index, self._jobs.append)
        self._now = 0.0
        self._number = 0

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def _view(self, slot: int) -> memoryview:
        return self._memory[slot * PAYLOAD_BYTES : (slot + 1) * PAYLOAD_BYTES]

    def run(self, requests: Sequence[Sequence[bytes]]) -> float:
        """Fetches what there is of each request and puts the rest; the hit ratio."""
        hits = 0
        for keys in requests:
            fetched = self._fetch(keys)
            hits += fetched
            self._put(keys, fetched)
        self._disk()
        self.tiers.check()
        return hits / sum(map(len, requests))

    def _fetch(self, keys: Sequence[bytes]) -> int:
        self._number += 1
        window = max(1, self.tiers.host.num_slots // 4)
        deadline = self._now + 60.0
        handed = self.tiers.fetch(
            "node", self._number, keys, 0, deadline=deadline, window=window, now=self._now
        )
        assert handed is not None
        waiting: list[HandedOut] = [handed]
        fetched = 0
        while True:
            while waiting:
                now = waiting.pop(0)
                for block in now.blocks:
                    assert checksum(bytes(self._view(block.slot))) == block.checksum
                fetched += len(now.blocks)
                if now.blocks:
                    count = len(now.blocks)
                    more = self.tiers.fetches.took("node", self._number, count, self._now)
                    waiting += [more] if more else []
                if now.ended:
                    return fetched
            waiting += self._disk() or self.tiers.tick(self._now)

    def _put(self, keys: Sequence[bytes], start: int) -> None:
        for index in range(start, len(keys)):
            slots = self.tiers.host.grant("node", 1)
            if not slots:
                return
            view, key = self._view(slots[0]), keys[index]
            view[:] = key * (PAYLOAD_BYTES // len(key))
            parent = keys[index - 1] if index else _ROOT
            block = Block(key, parent, _TENANT, index, checksum(view))
            self.tiers.commit("node", slots[0], block, hold=False, now=self._now)
            if index % PUTS_AT_ONCE == 0:
                self._disk()
        self._now += 1.0
        self._disk()

    def _disk(self) -> list[HandedOut]:
        """Lets the disk do what is asked of it, and ask for more, until it has nothing to do."""
        handed: list[HandedOut] = []
        if self.tiers.disk is None:
            return handed
        while True:
            self.tiers.disk.step(self._now)
            if not self._jobs:
                return handed
            self._jobs.sort(key=lambda job: not (isinstance(job, ReadJob)))
            for job in list(self._jobs):
                self._jobs.remove(job)
                self._worker.do(job)
                handed += self.tiers.disk_done(job, self._now)


@dataclass(frozen=True, slots=True)
class Row:
    trace: str
    tier: str
    tokens: int
    lru: float
    store: float

    @property
    def line(self) -> str:
        verdict = "ok" if self.store >= self.lru else "BELOW"
        return (
            f"{self.trace:<36} {self.tier:<5} {self.tokens / 1e6:>6.2f} M "
            f"{100 * self.lru:>7.3f} % {100 * self.store:>7.3f} %  {verdict}"
        )


def compare(trace: Trace, tiers: Sequence[str], capacities: Sequence[int]) -> Iterator[Row]:
    """A row for each capacity in blocks and each kind of store."""
    for capacity in capacities:
        lru = plain_lru(trace.requests, capacity)
        for tier in tiers:
            slots = capacity if tier == "ram" else max(8, capacity // ARENA_PART)
            records = 0 if tier == "ram" else capacity
            with (
                tempfile.TemporaryDirectory() as folder,
                Replay(Path(folder), slots, records) as replay,
            ):
                ratio = replay.run(trace.requests)
            yield Row(trace.name, tier, capacity * trace.block_tokens, lru, ratio)


def main() -> int:
    """Prints the table; the status is 1 when a row is below plain LRU."""
    parser = argparse.ArgumentParser(prog="python -m kvferry.bench.replay", description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH")
    parser.add_argument("--tier", choices=("ram", "disk", "both"), default="both")
    parser.add_argument("--requests", type=int, help="only the first N rows")
    parser.add_argument("--capacity", type=int, action="append", help="blocks; may be repeated")
    asked = parser.parse_args()
    tiers = ("ram", "disk") if asked.tier == "both" else (asked.tier,)
    below = 0
    print(f"{'trace':<36} {'tier':<5} {'capacity':>8} {'plain LRU':>9} {'store':>9}", flush=True)
    for path in asked.paths:
        trace = read_trace(path, asked.requests)
        capacities = asked.capacity or CAPACITIES[trace.block_tokens]
        for row in compare(trace, tiers, capacities):
            print(row.line, flush=True)
            below += row.store < row.lru
        print(f"{trace.name:<36} ideal {100 * ideal(trace.requests):>25.2f} %", flush=True)
    return 1 if below else 0


if __name__ == "__main__":
    raise SystemExit(main())
