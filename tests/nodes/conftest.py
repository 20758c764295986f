"""Decode and prefill nodes in one thread, with a store and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.kvstore.store.storage import StoreSizes
from kvferry.tests.rigs.handoff.cluster import Cluster


@pytest.fixture(autouse=True)
def no_cluster_outlives_its_test() -> Iterator[None]:
    yield
    for cluster in list(Cluster.living):
        cluster.close()


@pytest.fixture
def usual_store(tmp_path: Path) -> Iterator[None]:
    """Every cluster of a test has a store, and ships through its arena."""
    (tmp_path / "shared").mkdir()
    Cluster.usual_store = StoreSizes(8 << 20, 0, tmp_path / "blocks", tmp_path / "shared")
    yield
    Cluster.usual_store = None


@pytest.fixture(params=["inline", "arena"])
def both_transfers(request: pytest.FixtureRequest) -> None:
    """Once without a store, and once with one through whose arena blocks are shipped."""
    if request.param == "arena":
        request.getfixturevalue("usual_store")


@pytest.fixture(params=[1, 0], ids=["apart", "alone"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The hand-off in one thread, with a prefill node and without; at its end nothing is held."""
    made = Cluster(request.param)
    yield made
    made.until(made.idle)
    made.close()


@pytest.fixture
def apart() -> Iterator[Cluster]:
    made = Cluster(1)
    yield made
    made.until(made.idle)
    made.close()
