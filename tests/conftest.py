"""Fixtures that many tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.kvstore.model_files import resolve_model


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the default model, converted once for all sessions of this machine."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry"
    return resolve_model(None, cache, lambda line: None).folder
