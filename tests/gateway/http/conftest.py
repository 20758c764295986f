"""One gateway for all tests of a module, and cleared for each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvferry.tests.rigs.gateway.api import fresh
from kvferry.tests.rigs.gateway.rig import Rig, running


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with running(tmp_path_factory.mktemp("model") / "standin") as rig:
        yield rig


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    with fresh(shared) as rig:
        yield rig
