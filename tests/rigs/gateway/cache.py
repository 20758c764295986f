"""A gateway over HTTP in front of a real store, and how an operator asks it about blocks.

The store is turned by a thread of this process. Which blocks it has the tests decide: they put them
under the keys that the gateway says a prompt has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from kvferry.kvstore.client.client import StoreClient
from kvferry.kvstore.keys import tenant_key
from kvferry.tests.rigs.gateway.rig import Behaviour, Rig, running, wait_until
from kvferry.tests.rigs.store.rig import StoreRig

ADMIN = {"authorization": "Bearer root"}
ALICE = {"authorization": "Bearer a"}
DISK = 4 << 20
T = TypeVar("T")


class Store:
    """A store with one node; everything that is done to it is done between two of its turns."""

    def __init__(self, folder: Path) -> None:
        self.rig = StoreRig(folder, disk=DISK)
        self.node: StoreClient = self.rig.client()
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return self.rig.server.address

    def _run(self) -> None:
        while not self._ending.is_set():
            with self._lock:
                self.rig.turn()
            time.sleep(0.002)

    def do(self, work: Callable[[], T]) -> T:
        with self._lock:
            return work()

    def put(self, keys: list[bytes], tenant: str, start: int = 0) -> None:
        """Until they are in memory and on disk."""
        whose = tenant_key(tenant)
        assert self.do(lambda: self.rig.put(self.node, keys, tenant=whose, start=start))
        self.do(self.rig.settle)

    def close(self) -> None:
        """Ends as a killed process does."""
        self._ending.set()
        self._thread.join(10)
        self.rig.close()


@contextmanager
def beside_a_store(folder: Path) -> Iterator[tuple[Rig, Store]]:
    """A gateway with two tenants and an operator, and the store that it knows."""
    store = Store(folder)
    with running(
        folder / "standin",
        api_key=("alice=a", "bob=b"),
        admin_api_key="root",
        enable_debug=True,
        store_node=(store.address,),
    ) as rig:
        wait_until(lambda: rig.gateway.nodes.stores[0].usable)
        yield rig, store
    store.close()


@contextmanager
def emptied(rig: Rig, store: Store) -> Iterator[Rig]:
    """Both of them for one test of many: nothing is left of it afterwards."""
    yield rig
    rig.decode.does = Behaviour()
    assert ask(rig, "clear", all=True)["success"]
    assert store.do(lambda: store.rig.storage.tiers.host.num_resident) == 0


def ask(rig: Rig, action: str, **body: Any) -> dict[str, Any]:
    response = rig.post(f"/admin/cache/{action}", body, headers=ADMIN)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def keys_of(rig: Rig, **body: Any) -> list[bytes]:
    blocks = ask(rig, "inspect", **body)["blocks"]
    return [bytes.fromhex(block["key"]) for block in blocks]


def text(name: str, blocks: int) -> str:
    return (name * 16 * blocks)[: 16 * blocks]
