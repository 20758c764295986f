"""A gateway beside a store, for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvferry.tests.rigs.gateway.cache import Store
    from kvferry.tests.rigs.gateway.rig import Rig


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rig, Store]]:
    from kvferry.tests.rigs.gateway.cache import beside_a_store

    with beside_a_store(tmp_path_factory.mktemp("store")) as both:
        yield both


@pytest.fixture
def store(both: tuple[Rig, Store]) -> Store:
    return both[1]
