"""Stores in the test's own thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.tests.rigs.store.rig import MakeRig, StoreRig


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
