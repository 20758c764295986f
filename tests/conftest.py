"""Fixtures that many tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer  # type: ignore[import-untyped]
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from kvferry.kernels.engines.standin import write_standin_model
from kvferry.kvstore.process.model_files import resolve_model
from kvferry.kvstore.store.space import StoreSizes
from kvferry.tests.rigs.handoff.cluster import Cluster
from kvferry.tests.rigs.models.vocabularies import vocabularies
from kvferry.tests.rigs.servers.served import Served
from kvferry.tests.rigs.store.rig import MakeRig, StoreRig

# Before anything imports torch: spinning OpenMP threads starve the servers under test.
os.environ |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}

# The same examples every time, however slow the machine is.
settings.register_profile(
    "here", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("here")


class ByModule(LoadScopeScheduling):  # type: ignore[misc]
    """A worker runs a module in one piece, so that its fixtures are made once.

    What starts whole servers (`tests/system`) runs in one worker, one after another.
    """

    def _split_scope(self, nodeid: str) -> str:
        module = Path(nodeid.split("::", 1)[0])
        return "servers" if "system" in module.parts else str(module)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByModule:
    return ByModule(config, log)


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


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    """Makes stores, one after another in the same folder; at the end they are closed."""
    rigs: list[StoreRig] = []

    def make(**options: Any) -> StoreRig:
        rigs.append(StoreRig(tmp_path, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the default model, converted once for all sessions of this machine."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry"
    return resolve_model(None, cache, lambda line: None).folder


@pytest.fixture(scope="session")
def real_vocabularies() -> Path:
    """A folder with a tokenizer and a chat template for each of `vocabularies.MODELS`."""
    return vocabularies()


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that selects the stand-in engine; its tokens are bytes."""
    folder = tmp_path_factory.mktemp("models") / "standin"
    write_standin_model(folder)
    return folder


@pytest.fixture(scope="session", params=["apart", "alone"])
def served(
    request: pytest.FixtureRequest, standin: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The stand-in, served by real processes: with a prefill node, and by a decode node alone."""
    log = tmp_path_factory.mktemp("served") / "log"
    nodes = 1 if request.param == "apart" else 0
    cluster = Served(standin, log, f"--prefill-nodes={nodes}", "--enable-test-hooks")
    yield cluster
    assert cluster.stop() == 0, log.read_text()
