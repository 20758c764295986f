"""`kvferry store` as a process of its own: killed, restarted, shared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from kvferry.__main__ import main
from kvferry.kvstore.client.client import StoreClient
from kvferry.kvstore.tiers.shared_memory import remove_leftovers
from kvferry.kvstore.wire.client import Client
from kvferry.kvstore.wire.codec import PROTOCOL
from kvferry.kvstore.wire.hello import Hello
from kvferry.kvstore.wire.sockets import new_incarnation
from kvferry.tests.rigs.store.rig import (
    BLOCK_BYTES,
    FINGERPRINT,
    TENANT,
    Reader,
    chain_keys,
    payload_of,
)

LIMIT_S = 60.0


class Process:
    """A running store and one node of it."""

    def __init__(self, folder: Path, *flags: str) -> None:
        reader, writer = os.pipe()
        environ = {name: value for name, value in os.environ.items() if "KVFERRY" not in name}
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "kvferry", "store", "--store-ram=1MiB",
                "--store-disk=16MiB", f"--store-dir={folder / 'blocks'}",
                f"--arena-dir={folder}", f"--status-fd={writer}", "--log-level=warning", *flags,
            ],
            pass_fds=[writer],
            env=environ,
        )  # fmt: skip
        os.close(writer)
        with os.fdopen(reader) as status:
            self.address = json.loads(status.readline()).get("address", "")
            assert json.loads(status.readline())["ready"] is True
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        hello = Hello(PROTOCOL, "decode", FINGERPRINT)
        self.client = StoreClient(
            lambda: Client(self.context, self.address, hello, new_incarnation()), BLOCK_BYTES
        )
        self.until(lambda: self.client.puts.stock)

    def until(self, condition: object, seconds: float = LIMIT_S) -> None:
        assert callable(condition)
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "nothing happened for too long"
            self.client.turn()
            time.sleep(0.002)

    def put(self, keys: list[bytes]) -> None:
        done = 0
        while done < len(keys):
            done += self._put_some(keys[done:], keys[done - 1] if done else bytes(16), done)
            self.client.turn()
            self.until(lambda: self.client.puts.stock)

    def _put_some(self, keys: list[bytes], parent: bytes, depth: int) -> int:
        return self.client.puts.put(TENANT, parent, depth, keys, lambda it: payload_of(keys[it]))

    def stats(self) -> dict[str, dict[str, int]]:
        asked = self.client.admin("stats")
        self.until(lambda: asked.answer is not None)
        answer: dict[str, dict[str, int]] = asked.answer
        return answer

    def fetch(self, keys: list[bytes]) -> int:
        fetch, reader = self.client.fetches.fetch(keys, deadline_s=LIMIT_S), Reader()
        while not fetch.ended:
            self.until(lambda: fetch.ready or fetch.ended)
            while fetch.ready and self.client.fetches.take(fetch, reader.write):
                pass
        assert reader.blocks == [payload_of(key) for key in keys[: fetch.taken]]
        return fetch.taken

    def close(self) -> None:
        self.client.close()
        self.context.destroy(0)
        self.process.kill()
        self.process.wait()


@contextmanager
def running(folder: Path, *flags: str) -> Iterator[Process]:
    store = Process(folder, *flags)
    try:
        yield store
    finally:
        store.close()


@pytest.mark.A3
@pytest.mark.A5
def test_what_is_written_survives_a_kill_and_the_arena_does_not(tmp_path: Path) -> None:
    keys = chain_keys("x", 60)
    with running(tmp_path) as store:
        store.put(keys)
        store.until(lambda: store.stats()["disk"]["unwritten_bytes"] == 0)
        os.kill(store.process.pid, signal.SIGKILL)
        store.process.wait()
    assert len(list(tmp_path.glob("*.arena"))) == 1, "a killed process cannot clean up"
    with running(tmp_path) as store:
        assert len(list(tmp_path.glob("*.arena"))) == 1, "the next one does"
        assert store.fetch(keys) == 60
        os.kill(store.process.pid, signal.SIGTERM)
        assert store.process.wait(LIMIT_S) == 0
    assert not list(tmp_path.glob("*.arena"))


@pytest.mark.A6
def test_a_kill_at_any_moment_of_writing_serves_nothing_wrong(tmp_path: Path) -> None:
    """Right, only shorter; and the files are what the accounting says."""
    chains = [chain_keys(n, 12) for n in range(40)]
    for turn in range(4):
        with running(tmp_path) as store:
            for keys in chains[10 * turn : 10 * turn + 10]:
                store.put(keys)
            time.sleep(0.004 * turn)
            os.kill(store.process.pid, signal.SIGKILL)
            store.process.wait()
    with running(tmp_path) as store:
        store.until(lambda: store.stats()["disk"]["recovering"] == 0)
        on_disk = sum(path.stat().st_size for path in (tmp_path / "blocks").glob("*.kv"))
        assert store.stats()["disk"]["used_bytes"] == on_disk
        taken = [store.fetch(keys) for keys in chains]
        assert sum(taken) > 0


def test_a_stop_writes_what_waits(tmp_path: Path) -> None:
    keys = chain_keys("x", 60)
    with running(tmp_path) as store:
        store.put(keys)
        store.stats()  # behind all commits
        os.kill(store.process.pid, signal.SIGTERM)
        assert store.process.wait(LIMIT_S) == 0
    with running(tmp_path) as store:
        assert store.fetch(keys) == 60


def test_a_second_store_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    with running(tmp_path):
        flags = [f"--store-dir={tmp_path / 'blocks'}", f"--arena-dir={tmp_path}"]
        second = subprocess.run(
            [sys.executable, "-m", "kvferry", "store", "--store-ram=1MiB", *flags],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert second.returncode == 2
    assert "in use by another store" in second.stderr


def test_flags_that_cannot_be(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "--store-ram", "0"]) == 2
    assert "turns the store off" in capfd.readouterr().err
    assert main(["store", "--store-ram", "many"]) == 2
    assert "512MiB" in capfd.readouterr().err


def test_the_arena_of_a_living_store_is_left_alone(tmp_path: Path) -> None:
    with running(tmp_path) as store:
        assert remove_leftovers(tmp_path) == 0
        store.put(chain_keys("x", 4))
        assert store.fetch(chain_keys("x", 4)) == 4
