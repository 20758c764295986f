"""How fast blocks go into the store and come out of it, beside the machine's own memcpy.

    python -m kvferry.bench.store_speed [--block-bytes N] [--blocks N] [--dir DIR]

Starts a real store and is its only node: one thread copies, verification included, payload bytes
only. Every figure is the median of its rounds; memcpy and the fetch are measured in turns, because
other work on the machine moves both. Copying out of shared memory is slower than between private
memory where the kernel gives huge pages to the second only, so both are shown. The page cache is
dropped with `posix_fadvise` for the cold disk; a file system that ignores it shows the same figure
twice.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import zmq
from numpy.typing import NDArray

from kvferry.bench.document import Verdict
from kvferry.kvstore.client.client import StoreClient, Transfer
from kvferry.kvstore.keys import chain, checksum, root_key, tenant_key
from kvferry.kvstore.wire.client import Client
from kvferry.kvstore.wire.codec import PROTOCOL
from kvferry.kvstore.wire.hello import Hello
from kvferry.kvstore.wire.sockets import new_incarnation

ROUNDS = 7
SMOLLM2_BLOCK_BYTES = 368_640
"""16 tokens of SmolLM2-135M in bfloat16."""
LIMIT_S = 300.0
FLOOR = 0.5
"""Of memcpy out of shared memory: a fetch from memory that is slower fails."""

Pool = NDArray[np.uint8]


class Node:
    """A store process and a node with a pool of blocks."""

    def __init__(self, folder: Path, pool: Pool, transfer: Transfer) -> None:
        reader, writer = os.pipe()
        size = pool.nbytes * 5 // 4
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "kvferry", "store", f"--store-ram={size}",
                f"--store-disk={4 * size}", f"--store-dir={folder}", f"--status-fd={writer}",
                "--log-level=warning",
            ],
            pass_fds=[writer],
        )  # fmt: skip
        os.close(writer)
        with os.fdopen(reader) as status:
            address = json.loads(status.readline())["address"]
            status.readline()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        hello = Hello(PROTOCOL, "decode", {"bench": "1"})
        self.client = StoreClient(
            lambda: Client(self._context, address, hello, new_incarnation()),
            pool.shape[1],
            transfer=transfer,
        )
        self._pool = pool
        self.until(lambda: self.client.puts.stock)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + LIMIT_S
        poller = zmq.Poller()
        for socket in self.client.link.sockets:
            poller.register(socket, zmq.POLLIN)
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("the store does not answer")
            self.client.turn()
            if not condition():
                poller.poll(5) if self.client.link.sockets else time.sleep(0.01)

    def put(self, keys: list[bytes]) -> None:
        done = 0
        while done < len(keys):
            self.until(lambda: self.client.puts.stock)
            done += self._put_some(keys, done)

    def _put_some(self, keys: list[bytes], done: int) -> int:
        parent = keys[done - 1] if done else bytes(16)
        rest = keys[done : done + len(self.client.puts.stock)]
        return self.client.puts.put(
            tenant_key("bench"), parent, done, rest, lambda index: self._pool[done + index].data
        )

    def fetch(self, keys: list[bytes]) -> tuple[int, int]:
        """Into the pool; how many blocks came from memory and from disk."""
        fetch = self.client.fetches.fetch(keys, deadline_s=LIMIT_S)

        def write(view: memoryview) -> memoryview:
            row = memoryview(self._pool[fetch.taken])
            row[:] = view
            return row

        while not fetch.ended:
            self.until(lambda: fetch.ready or fetch.ended)
            while fetch.ready:
                self.client.fetches.take(fetch, write)
        if fetch.taken != len(keys):
            raise RuntimeError(f"{fetch.taken} of {len(keys)} blocks came: {fetch.ended}")
        return fetch.from_host, fetch.from_disk

    def settle(self) -> None:
        """Until everything is on disk."""
        unwritten = 1
        while unwritten:
            asked = self.client.admin("stats")
            self.until(lambda asked=asked: asked.answer is not None)  # type: ignore[misc]
            unwritten = asked.answer["disk"]["unwritten_bytes"]

    def close(self, *, kill: bool = False) -> None:
        self.client.close()
        self._context.destroy(0)
        self._process.kill() if kill else self._process.terminate()
        self._process.wait()


def rate(size: int, action: Callable[[], object]) -> float:
    """Bytes a second, one run."""
    started = time.perf_counter()
    action()
    return size / (time.perf_counter() - started)


def drop_page_cache(folder: Path) -> None:
    """Asks the kernel to forget the files' pages."""
    for path in folder.glob("*.kv"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def memcpy(source: Pool, target: Pool) -> None:
    for row, other in zip(source, target, strict=True):
        other[:] = row


def checksums(pool: Pool) -> None:
    for row in pool:
        checksum(row.data)


def measure(folder: Path, block_bytes: int, blocks: int) -> dict[str, float]:
    """All figures in bytes a second, and the fetch's part of memcpy."""
    pool = np.random.default_rng(0).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
    other = np.zeros_like(pool)
    size = pool.nbytes
    keys = list(chain(root_key({}, "bench", None), range(16 * blocks), 16))
    figures: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)

    node = Node(folder, pool, "arena")
    note("put", rate(size, lambda: node.put(keys)))
    node.settle()
    shared = np.frombuffer(mmap.mmap(-1, size), np.uint8).reshape(pool.shape)
    shared[:] = pool
    for _ in range(ROUNDS):
        copy = rate(size, lambda: memcpy(shared, other))
        fetch = rate(size, lambda: node.fetch(keys))
        note("memcpy", rate(size, lambda: memcpy(pool, other)))
        note("memcpy, shared memory", copy)
        note("checksum", rate(size, lambda: checksums(pool)))
        note("fetch host", fetch)
        note("fetch of memcpy", fetch / copy)
    node.close(kill=True)
    inline = Node(folder, pool, "inline")
    inline.fetch(keys)
    for _ in range(3):
        note("fetch host, inline", rate(size, lambda: inline.fetch(keys)))
    inline.close(kill=True)
    for name in ("fetch disk, page cache", "fetch disk, dropped"):
        for _ in range(3):
            if name.endswith("dropped"):
                drop_page_cache(folder)
            node = Node(folder, pool, "arena")
            note(name, _timed_fetch(node, size, keys))
            node.close(kill=True)
    return {name: statistics.median(values) for name, values in figures.items()}


def checksum_cost(figures: Mapping[str, float]) -> float:
    """As a part of the time that a copy out of shared memory takes."""
    return figures["memcpy, shared memory"] / figures["checksum"]


def judge_fetch(figures: Mapping[str, float]) -> Verdict:
    """A fetch out of host memory, verification included, beside a plain copy."""
    took = 1 / figures["fetch of memcpy"]
    return Verdict("time of a fetch from the host tier / of a plain copy", took, 1 / FLOOR)


def _timed_fetch(node: Node, size: int, keys: list[bytes]) -> float:
    return rate(size, lambda: node.fetch(keys))


def main() -> int:
    """Prints the figures; the status is 1 when fetching is slower than it must be."""
    parser = argparse.ArgumentParser(prog="python -m kvferry.bench.store_speed")
    parser.add_argument("--block-bytes", type=int, default=SMOLLM2_BLOCK_BYTES)
    parser.add_argument("--blocks", type=int, default=400)
    parser.add_argument("--dir", type=Path, help="where the disk tier is [a temporary directory]")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.dir) as folder:
        figures = measure(Path(folder), asked.block_bytes, asked.blocks)
    for name, value in figures.items():
        shown = f"{100 * value:6.1f} %" if name == "fetch of memcpy" else f"{value / 1e9:6.2f} GB/s"
        print(f"{name:<24} {shown}")
    print(f"{'checksum costs':<24} {100 * checksum_cost(figures):6.1f} % of a copy's time")
    return 0 if judge_fetch(figures).holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
