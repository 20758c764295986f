"""Where a prompt's tokens came from is said by tier, whichever node has brought them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.decode_node.request import BlockSources
from kvferry.kvstore.client.client import Transfer
from kvferry.kvstore.wire.handoff import Accepted
from kvferry.tests.rigs.handoff.cluster import Cluster, prompt_of
from kvferry.tests.rigs.store.cluster import DISK, ask, cluster_of, forget, settle, sources


def no_load_in_time(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode node finds nothing in the store, so the prefill node has to."""
    monkeypatch.setattr(cluster.decode.connector, "fetch", lambda *asked: False)


@pytest.mark.A8
@pytest.mark.parametrize("transfer", ["auto", "inline"])
def test_what_the_prefill_node_fetches_counts_by_its_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transfer: Transfer
) -> None:
    prompt, longer = prompt_of(1000), [*prompt_of(1000), *prompt_of(500, 9)]
    with cluster_of(tmp_path, disk=DISK, transfer=transfer) as cluster:
        ask(cluster, prompt)
        forget(cluster)
        no_load_in_time(cluster, monkeypatch)
        assert sources(ask(cluster, longer)) == {"host": 992, "prefill": 496, "decode": 12}
        cluster.decode.pool.evict_cached()
        assert sources(ask(cluster, longer)) == {"device": 1488, "decode": 12}
        settle(cluster)
    with cluster_of(tmp_path, disk=DISK, transfer=transfer) as cluster:
        no_load_in_time(cluster, monkeypatch)
        assert sources(ask(cluster, longer)) == {"disk": 1488, "decode": 12}


def counts(found: BlockSources) -> dict[str, int]:
    names = ("device", "host", "disk", "prefill")
    return {name: getattr(found, name) for name in names if getattr(found, name)}


def accepted(prefix: int, host: int = 0, disk: int = 0) -> Accepted:
    return Accepted(1, 1, prefix, 0.0, 0, host, disk)


@pytest.mark.A8
def test_a_transfer_that_is_asked_for_again_counts_as_what_it_was_first() -> None:
    """The prefill node has fetched and computed for this very request before frames were lost."""
    found = BlockSources()
    found.shipped(0, 5, accepted(20, host=4, disk=10))
    assert counts(found) == {"device": 5}
    found.shipped(5, 12, accepted(30))
    assert counts(found) == {"device": 6, "disk": 6}
    found.shipped(12, 30, accepted(30))
    assert counts(found) == {"device": 6, "host": 4, "disk": 10, "prefill": 10}


@pytest.mark.A8
def test_what_both_nodes_have_loaded_is_counted_once() -> None:
    found = BlockSources()
    found.found(2)
    found.fetched(2, 8, disk=3)
    assert counts(found) == {"device": 2, "host": 3, "disk": 3}
    found.shipped(8, 20, accepted(16, host=2, disk=9))
    assert counts(found) == {"device": 2, "host": 3, "disk": 11, "prefill": 4}


@pytest.mark.A8
@pytest.mark.B5
def test_absurd_counts_of_a_prefill_node_are_no_more_than_its_blocks() -> None:
    found = BlockSources()
    found.shipped(0, 10, accepted(6, host=2**50, disk=2**50))
    assert counts(found) == {"disk": 6, "prefill": 4}
    found = BlockSources()
    found.shipped(4, 10, accepted(2, host=1))
    assert counts(found) == {"prefill": 6}
