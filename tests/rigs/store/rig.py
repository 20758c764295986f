"""A store and its nodes in one thread, turned by hand: real sockets, arena and files.

Only the processes are missing, so a test sees every state between two turns, and `check()` proves
all ledgers after each of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import zmq

from kvferry.kvstore.client.client import Question, StoreClient, Transfer
from kvferry.kvstore.client.fetches import Fetch
from kvferry.kvstore.keys import checksum, next_key, root_key, tenant_key
from kvferry.kvstore.node.debug import DebugSwitches
from kvferry.kvstore.store.node import StoreNode
from kvferry.kvstore.store.storage import ModelStorage, StoreSizes
from kvferry.kvstore.tiers.disk.files import FileSystem
from kvferry.kvstore.wire.client import Client
from kvferry.kvstore.wire.codec import PROTOCOL
from kvferry.kvstore.wire.hello import Hello
from kvferry.kvstore.wire.server import Server
from kvferry.kvstore.wire.sockets import new_incarnation

BLOCK_BYTES = 4000
SLOT = 4096
FINGERPRINT = {"weights": "w1", "block_size": "16"}
TENANT = tenant_key("a")
TRANSFERS: tuple[Transfer, ...] = ("arena", "inline")


def chain_keys(name: object, count: int, tenant: str = "a") -> list[bytes]:
    """Keys of a chain that nobody else has; chains of one name share their beginning."""
    parent = root_key(FINGERPRINT, tenant, str(name))
    keys = []
    for index in range(count):
        parent = next_key(parent, [index])
        keys.append(parent)
    return keys


def payload_of(key: bytes, size: int = BLOCK_BYTES) -> bytes:
    """The one right content of a block: a wrong byte anywhere shows."""
    return random.Random(key).randbytes(size)


class Reader:
    """A node's memory that a fetch writes to."""

    def __init__(self) -> None:
        self.blocks: list[bytes] = []

    def write(self, view: memoryview) -> bytes:
        self.blocks.append(bytes(view))
        return self.blocks[-1]


class StoreRig:
    """One store; `client()` makes its nodes."""

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 64,
        disk: int = 0,
        files: FileSystem | None = None,
        block_bytes: int = BLOCK_BYTES,
        lease_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        arena_folder: Path | None = None,
        fingerprint: dict[str, str] | None = None,
    ) -> None:
        self.block_bytes = block_bytes
        self.fingerprint = fingerprint or FINGERPRINT
        self.folder = folder
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.server = Server(self.context, "tcp://127.0.0.1:0", new_incarnation())
        slot = -(-block_bytes // SLOT) * SLOT
        shared = folder / "shared"
        shared.mkdir(exist_ok=True)
        sizes = StoreSizes(slots * slot, disk, folder / "blocks", arena_folder or shared, lease_s)
        self.node = StoreNode(
            self.server, sizes, debug=DebugSwitches(True, True), clock=clock, files=files
        )
        self._slots = slots
        self.clients: list[StoreClient] = []

    def client(
        self, transfer: Transfer = "auto", role: str = "decode", *, wait: bool = True
    ) -> StoreClient:
        """A node; with `wait` it has attached and has slots to write into."""
        hello = Hello(PROTOCOL, role, self.fingerprint)
        client = StoreClient(
            lambda: Client(self.context, self.server.address, hello, new_incarnation()),
            self.block_bytes,
            transfer=transfer,
        )
        self.clients.append(client)
        if wait:
            self.until(lambda: client.link.attached and client.puts.stock)
        return client

    @property
    def storage(self) -> ModelStorage:
        assert self.node.storage is not None
        return self.node.storage

    @property
    def counters(self) -> dict[str, float]:
        return self.node.figures()

    def bytes_on_disk(self) -> int:
        return sum(path.stat().st_size for path in (self.folder / "blocks").glob("*.kv"))

    # -- driving --------------------------------------------------------------------------------

    def turn(self) -> None:
        for client in self.clients:
            client.turn()
        self.node.turn()
        self.node.check()

    def until(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "nothing happened for too long"
            self.turn()
            if self.storage_or_none is not None and self.storage.disk is not None:
                self.storage.disk.wait(0.001)

    @property
    def storage_or_none(self) -> ModelStorage | None:
        return self.node.storage

    def settle(self) -> None:
        """Until every message has arrived and nothing is in flight or unwritten."""
        for client in self.clients:
            if client.link.attached:
                self.answer(client.admin("stats"))
        self.until(lambda: self.storage.tiers.idle)

    def answer(self, asked: Question) -> object:
        self.until(lambda: asked.answer is not None or asked.lost)
        return asked.answer

    # -- what nodes do --------------------------------------------------------------------------

    def put(
        self,
        client: StoreClient,
        keys: Sequence[bytes],
        *,
        start: int = 0,
        tenant: bytes = TENANT,
        wait: bool = True,
    ) -> int:
        """Puts blocks [start, len(keys)); with `wait` until all were taken."""
        done = start
        while done < len(keys):
            parent = keys[done - 1] if done else b"\0" * 16
            rest = keys[done:]
            done += client.puts.put(tenant, parent, done, rest, self._payloads(rest))
            if not wait:
                break
            if done < len(keys):
                self.until(lambda: client.puts.stock)
        return done - start

    def _payloads(self, keys: Sequence[bytes]) -> Callable[[int], bytes]:
        return lambda index: payload_of(keys[index], self.block_bytes)

    def fetch(
        self, client: StoreClient, keys: Sequence[bytes], *, first: int = 0, seconds: float = 20.0
    ) -> tuple[Fetch, list[bytes]]:
        """A whole fetch; its blocks, each proven right."""
        fetch = client.fetches.fetch(keys, first, deadline_s=seconds)
        reader = Reader()
        while not fetch.ended:
            self.until(lambda: fetch.ready or fetch.ended)
            while fetch.ready and client.fetches.take(fetch, reader.write):
                pass
        blocks = reader.blocks[: fetch.taken]
        for index, block in enumerate(blocks):
            key = keys[first + index]
            assert block == payload_of(key, self.block_bytes), "a wrong block was served"
            assert checksum(block) == checksum(payload_of(key, self.block_bytes))
        return fetch, blocks

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.node.close()
        self.context.destroy(0)


class MakeRig(Protocol):
    def __call__(self, **options: Any) -> StoreRig: ...
