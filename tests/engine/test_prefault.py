"""Pages are mapped ahead of use, and no further than that."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray

from kvferry.kernels.host_pool import HostPool
from kvferry.kernels.prefault import MOST_AHEAD, STEP_BYTES, Prefault
from kvferry.kvstore.tiers import shared_memory
from kvferry.tests.rigs.handoff.cluster import Cluster

SIZE = 64 << 20
AHEAD = 8 << 20


def fresh() -> NDArray[np.uint8]:
    """Memory in pages of the usual size."""
    memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def resident(buffer: NDArray[np.uint8]) -> int:
    """Bytes of it that are mapped."""
    pages = (ctypes.c_ubyte * (buffer.size // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    assert mincore(buffer.ctypes.data, buffer.size, pages) == 0, ctypes.get_errno()
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


@pytest.fixture
def buffer() -> Iterator[NDArray[np.uint8]]:
    """Fresh memory, none of it touched."""
    probe = fresh()
    if not Prefault(probe, AHEAD).step() or resident(probe) >= SIZE:
        pytest.skip("this kernel maps nothing ahead, or does not say what is mapped")
    yield fresh()


def finish(prefault: Prefault) -> None:
    while prefault.step():
        pass


def test_so_much_is_mapped_ahead_and_no_more(buffer: NDArray[np.uint8]) -> None:
    prefault = Prefault(buffer, AHEAD)
    assert resident(buffer) == 0
    assert prefault.step()
    assert resident(buffer) == prefault.mapped == STEP_BYTES
    finish(prefault)
    assert resident(buffer) == prefault.mapped == AHEAD
    for end in range(0, SIZE // 2, 5 << 20):
        prefault.reached(end)
        finish(prefault)
        assert resident(buffer) == prefault.mapped == end + AHEAD


def test_a_large_buffer_is_mapped_only_so_far_ahead() -> None:
    prefault = Prefault(np.zeros(8 * MOST_AHEAD, np.uint8), 2 * MOST_AHEAD)
    finish(prefault)
    assert prefault.mapped == MOST_AHEAD


def test_of_a_small_buffer_a_quarter_is_mapped_ahead(buffer: NDArray[np.uint8]) -> None:
    prefault = Prefault(buffer, SIZE)
    finish(prefault)
    assert resident(buffer) == prefault.mapped == SIZE // 4


def test_at_the_end_nothing_is_left_to_map(buffer: NDArray[np.uint8]) -> None:
    prefault = Prefault(buffer, AHEAD)
    prefault.reached(SIZE - 4097)
    finish(prefault)
    assert prefault.mapped == SIZE
    assert resident(buffer[-mmap.PAGESIZE :]) == mmap.PAGESIZE
    prefault.reached(SIZE)
    assert not prefault.step()


def test_what_is_in_use_already_is_not_mapped_behind_its_back(
    buffer: NDArray[np.uint8],
) -> None:
    prefault = Prefault(buffer, AHEAD)
    prefault.reached(SIZE // 2)
    prefault.reached(SIZE // 4)  # blocks are reused in any order
    finish(prefault)
    assert resident(buffer[: SIZE // 2]) == 0
    assert resident(buffer) == AHEAD


def small_pool() -> HostPool:
    return HostPool(num_blocks=256, block_bytes=64 << 10, num_ahead=32)


def mapped(pool: HostPool) -> int:
    return pool._prefault.mapped


def test_a_pool_maps_what_comes_behind_the_blocks_that_are_written(
    buffer: NDArray[np.uint8],
) -> None:
    pool = small_pool()
    payload = bytes(range(256)) * (pool.block_bytes // 256)
    for block in range(200):
        pool.write(block, payload)
        while pool.prepare():
            pass
        assert mapped(pool) == (block + 1 + 32) * pool.block_bytes
    assert all(pool.read(block) == payload for block in range(200))
    assert pool.read(255) == bytes(pool.block_bytes), "mapping has written"


def test_where_nothing_can_be_mapped_ahead_nobody_tries_again() -> None:
    pool = small_pool()
    calls: list[int] = []

    def refuse(*call: int) -> int:
        calls.append(1)
        return -1

    pool._prefault._populate = refuse  # type: ignore[assignment]
    assert not pool.prepare() and not pool.prepare()
    assert calls == [1]
    pool.write(3, bytes(pool.block_bytes))
    assert not pool.prepare() and mapped(pool) == 4 * pool.block_bytes


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_node_with_nothing_to_do_prepares_until_nothing_is_left(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    left = [True] * 5
    asked: list[bool] = []

    def prepare() -> bool:
        asked.append(left.pop() if left else False)
        return asked[-1]

    node = cluster.decode if role == "decode" else cluster.prefill[0]
    monkeypatch.setattr(node._engine, "prepare", prepare)
    slept: list[tuple[int, int]] = []

    def poll(poller: zmq.Poller, timeout: int) -> list[tuple[int, int]]:
        slept.append((timeout, len(asked)))
        return []

    monkeypatch.setattr(zmq.Poller, "poll", poll)
    reader, writer = os.pipe()
    node.run(reader, lambda: len(asked) >= 6)
    os.close(reader)
    os.close(writer)
    assert asked == [True] * 5 + [False]
    assert slept[0] == (200, 6), "each piece is a turn of the loop, and then it sleeps"


def test_a_node_that_has_a_request_prepares_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def prepare() -> bool:
        asked.append(len(cluster.decode.requests))
        return False

    monkeypatch.setattr(cluster.engine, "prepare", prepare)
    reader, writer = os.pipe()
    cluster.decode._wait(reader)
    cluster.submit(cluster.message([7] * 40))
    cluster.decode.debug.hold = frozenset({"queue", "decode"})
    cluster.until(lambda: len(cluster.decode.requests) == 1)
    cluster.decode._wait(reader)
    assert asked == [0], "once, while it had none"
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_with_little_memory_left_nothing_is_prepared(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    node = cluster.decode if role == "decode" else cluster.prefill[0]
    asked: list[int] = []

    def prepare() -> bool:
        asked.append(1)
        return False

    monkeypatch.setattr(node._engine, "prepare", prepare)
    monkeypatch.setattr(shared_memory, "memory_left", lambda: shared_memory.SPARE_BYTES - 1)
    reader, writer = os.pipe()
    node._wait(reader)
    assert not asked
    monkeypatch.setattr(shared_memory, "memory_left", lambda: shared_memory.SPARE_BYTES)
    node._wait(reader)
    assert asked
    os.close(reader)
    os.close(writer)
