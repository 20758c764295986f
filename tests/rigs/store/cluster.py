"""Both kinds of node in one thread with a store: asked, settled, and made to forget.

What tests of the tiers share; it shows nothing by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvferry.kvstore.client.client import StoreClient, Transfer
from kvferry.kvstore.client.connector import Connector
from kvferry.kvstore.keys import tenant_key
from kvferry.kvstore.store.storage import StoreSizes
from kvferry.tests.rigs.handoff.cluster import Answer, Cluster

TENANT = tenant_key("default")
RAM = 4 << 20
"""A thousand slots of 4 KiB, one a block."""
DISK = 64 << 20


@contextmanager
def cluster_of(
    folder: Path,
    prefill_nodes: int = 1,
    *,
    ram: int = RAM,
    disk: int = 0,
    transfer: Transfer = "auto",
    **options: Any,
) -> Iterator[Cluster]:
    shared = folder / "shared"
    shared.mkdir(exist_ok=True)
    sizes = StoreSizes(ram, disk, folder / "blocks", shared)
    cluster = Cluster(prefill_nodes, store=sizes, transfer=transfer, **options)
    attached(cluster)
    yield cluster
    cluster.until(cluster.idle)
    cluster.close()


def attached(cluster: Cluster) -> None:
    stores = store_clients(cluster)
    cluster.until(lambda: all(store.link.attached and store.puts.stock for store in stores))


def store_clients(cluster: Cluster) -> list[StoreClient]:
    """The nodes' ends of their conversations with the store."""
    found = [cluster.decode.connector.store, *(node.connector.store for node in cluster.prefill)]
    return [store for store in found if store is not None]


def restarted(cluster: Cluster, sizes: StoreSizes, address: str) -> None:
    """Every node has noticed that its store is gone, and has attached to a new one there."""
    stores = store_clients(cluster)
    cluster.until(lambda: not any(store.link.attached for store in stores))
    cluster.start_store(sizes, address)
    attached(cluster)


def ask(cluster: Cluster, prompt: list[int], tokens: int = 4) -> Answer:
    answer = cluster.ask(prompt, max_tokens=tokens, tenant=TENANT)
    assert answer.ids() == cluster.reply(prompt, tokens)
    return answer


def settle(cluster: Cluster) -> None:
    """All that was finished is in the store, and on its disk if it has one."""
    connectors: list[Connector[Any]] = [
        cluster.decode.connector,
        *(node.connector for node in cluster.prefill),
    ]
    cluster.until(lambda: not any(connector.num_puts_waiting for connector in connectors))
    questions = [connector.store.locate([bytes(16)]) for connector in connectors if connector.store]
    # Each is answered behind everything that was put before it.
    cluster.until(lambda: all(one.answer is not None or one.lost for one in questions))
    cluster.until(lambda: cluster.unwritten() == 0)


def forget(cluster: Cluster) -> None:
    """Every device pool gives up what nobody uses."""
    cluster.until(cluster.idle)
    settle(cluster)
    cluster.decode.pool.evict_cached()
    for node in cluster.prefill:
        node.pool.evict_cached()


def sources(answer: Answer) -> dict[str, int]:
    assert answer.done is not None
    found = {
        name: getattr(answer.done.sources, name) for name in answer.done.sources.__struct_fields__
    }
    return {name: count for name, count in found.items() if count}
