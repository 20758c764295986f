"""Which cases of a test are run by `make test-slow` only: those that seldom fail and take long."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Values for `parametrize`; all but the quick ones carry the mark `slow`."""
    return [
        pytest.param(value, marks=() if value in quick else pytest.mark.slow) for value in values
    ]
