"""What tests of several rooms share. Each fixture imports what it needs: a room starts at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from xdist.remote import Producer  # type: ignore[import-untyped]
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    from kvferry.tests.rigs.servers.served import Served

# Before anything imports torch: spinning OpenMP threads starve the servers under test.
os.environ |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}


# The same examples every time, however slow the machine is.
settings.register_profile(
    "here", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("here")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    from kvferry.tests.rigs.workers import ByModule

    return ByModule(config, log)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the default model, converted once for all sessions of this machine."""
    from kvferry.kvstore.process.model_files import resolve_model

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry"
    return resolve_model(None, cache, lambda line: None).folder


@pytest.fixture(scope="session")
def real_vocabularies() -> Path:
    """A folder with a tokenizer and a chat template for each of `vocabularies.MODELS`."""
    from kvferry.tests.rigs.models.vocabularies import vocabularies

    return vocabularies()


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that selects the stand-in engine; its tokens are bytes."""
    from kvferry.kernels.engines.standin import write_standin_model

    folder = tmp_path_factory.mktemp("models") / "standin"
    write_standin_model(folder)
    return folder


@pytest.fixture(scope="session", params=["apart", "alone"])
def served(
    request: pytest.FixtureRequest, standin: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The stand-in, served by real processes: with a prefill node, and by a decode node alone."""
    from kvferry.tests.rigs.servers.served import Served

    log = tmp_path_factory.mktemp("served") / "log"
    nodes = 1 if request.param == "apart" else 0
    cluster = Served(standin, log, f"--prefill-nodes={nodes}", "--enable-test-hooks")
    yield cluster
    assert cluster.stop() == 0, log.read_text()
