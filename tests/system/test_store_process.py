"""`kvferry store` and the store under `kvferry serve`, as processes: ends, restarts, refusals."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvferry.kernels.engines.standin import StandinConfig, standin_reply
from kvferry.kvstore.client.client import Question, StoreClient, Transfer
from kvferry.kvstore.keys import tenant_key
from kvferry.kvstore.wire.client import Client
from kvferry.kvstore.wire.codec import PROTOCOL
from kvferry.kvstore.wire.hello import Hello
from kvferry.kvstore.wire.sockets import new_incarnation
from kvferry.tests.rigs.gateway.rig import wait_until
from kvferry.tests.rigs.servers.served import Served
from kvferry.tests.rigs.slow import slow_but
from kvferry.tests.rigs.store.rig import BLOCK_BYTES, FINGERPRINT, Reader, chain_keys, payload_of

LIMIT_S = 30
ADMIN = {"authorization": "Bearer root"}
ROOT = b"\0" * 16


class Store:
    """A `kvferry store` of its own, once it answers, and a node of it."""

    def __init__(self, folder: Path, *flags: str) -> None:
        reader, writer = os.pipe()
        self._log = folder / f"log-{writer}"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*command(folder), f"--status-fd={writer}", *flags], pass_fds=[writer], stderr=log
            )
        os.close(writer)
        said = b""
        while b"ready" not in said:
            assert select.select([reader], [], [], LIMIT_S)[0], "it does not start"
            data = os.read(reader, 4096)
            assert data, self._log.read_text()
            said += data
        os.close(reader)
        self.address = json.loads(said.splitlines()[0])["address"]
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def node(self, transfer: Transfer = "auto") -> StoreClient:
        hello = Hello(PROTOCOL, "decode", FINGERPRINT)
        client = StoreClient(
            lambda: Client(self._context, self.address, hello, new_incarnation()),
            BLOCK_BYTES,
            transfer=transfer,
        )
        turn_until(client, lambda: client.puts.stock)
        return client

    def stop(self) -> tuple[int, str]:
        """The exit status, and what it logged."""
        self.process.send_signal(signal.SIGTERM)
        return self.end()

    def end(self) -> tuple[int, str]:
        """The same, of one that has been told."""
        status = self.process.wait(LIMIT_S)
        self.close()
        return status, self._log.read_text()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._context.destroy(0)


def command(folder: Path) -> list[str]:
    return [sys.executable, "-P", "-m", "kvferry", "store", f"--store-dir={folder}/blocks",
            f"--arena-dir={folder}", "--store-ram=64MiB", "--store-disk=64MiB"]  # fmt: skip


def turn_until(client: StoreClient, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "the store says nothing"
        client.turn()
        time.sleep(0.001)


def answer(client: StoreClient, asked: Question) -> Any:
    turn_until(client, lambda: asked.answer is not None)
    return asked.answer


@pytest.mark.D5
@pytest.mark.parametrize("transfer", slow_but(["arena", "inline"], "inline"))
def test_a_clean_stop_writes_what_was_put_last(tmp_path: Path, transfer: Transfer) -> None:
    store = Store(tmp_path)
    try:
        client = store.node(transfer)
        keys = chain_keys("last", 900)
        read = [payload_of(key) for key in keys]
        turn_until(client, lambda: len(client.puts.stock) >= len(keys))
        store.process.send_signal(signal.SIGSTOP)  # so that nothing is read before its end
        assert client.puts.put(tenant_key("a"), ROOT, 0, keys, lambda at: read[at]) == len(keys)
        client.close()
        store.process.send_signal(signal.SIGTERM)
        store.process.send_signal(signal.SIGCONT)
        status, log = store.end()
    finally:
        store.close()
    assert status == 0 and "not written" not in log
    again = Store(tmp_path)
    try:
        client = again.node(transfer)
        turn_until(
            client,
            lambda: answer(client, client.admin("stats"))["gauges"]["recovering_files"] == 0,
        )
        fetch, reader = client.fetches.fetch(keys, deadline_s=LIMIT_S), Reader()
        while not fetch.ended:
            turn_until(client, lambda: fetch.ready or fetch.ended)
            while fetch.ready:
                assert client.fetches.take(fetch, reader.write)
        assert (fetch.ended, fetch.from_disk) == ("complete", len(keys))
        assert reader.blocks == read
        client.close()
        assert again.stop()[0] == 0
    finally:
        again.close()


@pytest.mark.slow
def test_a_directory_that_another_store_has_is_refused_by_its_name(tmp_path: Path) -> None:
    store = Store(tmp_path)
    try:
        done = subprocess.run(command(tmp_path), capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 2
        (line,) = [line for line in done.stderr.splitlines() if "error" in line]
        assert f"(process {store.process.pid})" in line
        assert "--store-dir" in line and "--store-disk 0" in line
        beside = Store(tmp_path, "--store-disk=0")  # what the message advises
        assert beside.stop()[0] == 0
        store.process.kill()
        store.process.wait()
        assert Store(tmp_path).stop()[0] == 0, "a dead store's directory is free"
    finally:
        store.close()


# -- under `kvferry serve` -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(standin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The stand-in with a store; its end is a test of its own."""
    folder = tmp_path_factory.mktemp("stored")
    cluster = Served(
        standin,
        folder / "log",
        "--prefill-nodes=1",
        "--store-ram=32MiB",
        "--store-disk=64MiB",
        f"--store-dir={folder}/blocks",
        "--admin-api-key=root",
        "--enable-debug",
    )
    yield cluster
    assert cluster.stop() == 0
    assert "not written" not in (folder / "log").read_text()


def store_row(served: Served) -> dict[str, Any]:
    rows = served.http.get("/admin/cache/stats", headers=ADMIN).json()["nodes"]
    (row,) = [row for row in rows if row["role"] == "store"]
    found: dict[str, Any] = row
    return found


def test_serve_runs_a_store_and_the_gateway_knows_it(served: Served) -> None:
    row = store_row(served)
    assert row["state"] == "usable" and row["tiers"]["disk"]["capacity_bytes"] == 64 << 20
    assert served.http.get("/ready").json() == {"status": "ready", "absent": []}
    ledger = served.http.get("/debug/ledger", headers=ADMIN).json()["nodes"]
    (kept,) = [row for row in ledger if row["role"] == "store"]
    assert kept["check"] == {"node": "ok"}


def test_a_store_that_is_killed_fails_no_request_and_comes_back(served: Served) -> None:
    address = store_row(served)["address"]
    prompts = [[3 + at, *range(3, 200)] for at in range(4)]
    answers: dict[int, list[int]] = {}

    def follow(at: int) -> None:
        answers[at] = served.ids(prompts[at], 200)

    threads = [threading.Thread(target=follow, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    dead = served.children()["store"]
    os.kill(dead, signal.SIGKILL)
    for thread in threads:
        thread.join(LIMIT_S)
    for at, prompt in enumerate(prompts):
        assert answers[at] == standin_reply(prompt, StandinConfig(), 200)
    wait_until(lambda: served.children().get("store") not in (None, dead), LIMIT_S)
    wait_until(lambda: served.http.get("/ready").json()["status"] == "ready", LIMIT_S)
    row = store_row(served)
    assert (row["state"], row["address"]) == ("usable", address)


def test_a_second_serve_with_the_same_directory_is_one_line(
    served: Served, standin: Path, tmp_path: Path
) -> None:
    folder = served.log.parent / "blocks"
    flags = ["--port=0", "--prefill-nodes=0", "--store-ram=32MiB", f"--store-dir={folder}"]
    second = [sys.executable, "-P", "-m", "kvferry", "serve", str(standin), *flags,
              "--kv-cache-memory-bytes=16MiB", "--log-level=warning"]  # fmt: skip
    done = subprocess.run(second, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("kvferry serve: error: store: --store-dir ")
    assert f"(process {served.children()['store']})" in done.stderr
    assert done.stderr.count("\n") == 1
