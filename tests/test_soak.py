"""The two-minute form of `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.tests.soak import run

MINUTES = 2.0


@pytest.mark.B1
@pytest.mark.B3
@pytest.mark.D7
def test_two_minutes_under_fire(tmp_path: Path) -> None:
    outcome, wrong = run(MINUTES, 1, tmp_path)
    print(dict(outcome.classes), outcome.kills, "kills", outcome.stops, "stops")
    assert not wrong, wrong
    assert outcome.kills + outcome.stops >= 5
    assert outcome.classes["right"] > 100
