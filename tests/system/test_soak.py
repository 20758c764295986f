"""The two-minute form of `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.tests.rigs.servers.leftovers import held
from kvferry.tests.system.soak import run

MINUTES = 2.0


def test_what_could_not_be_asked_is_not_empty() -> None:
    empty = {"blocks": {"held": 0, "cached": 9}, "requests": 0, "check": {"node": "ok"}}
    assert not list(held({"gateway": empty, "nodes": [empty, empty]}, ""))
    lost = {"name": "decode-1", "error": "no answer within 2 s"}
    assert len(list(held({"gateway": empty, "nodes": [empty, lost]}, ""))) == 1
    assert list(held({"nodes": [empty | {"blocks": {"held": 3}}]}, "")) == ["nodes.0.blocks.held=3"]
    assert len(list(held({"nodes": [empty | {"check": {"node": "broken: x"}}]}, ""))) == 1


@pytest.mark.slow
@pytest.mark.B1
@pytest.mark.B3
@pytest.mark.D7
def test_two_minutes_under_fire(tmp_path: Path) -> None:
    outcome, wrong = run(MINUTES, 1, tmp_path)
    print(dict(outcome.classes), outcome.kills, "kills", outcome.stops, "stops")
    assert not wrong, wrong
    assert outcome.kills + outcome.stops >= 5
    assert outcome.classes["right"] > 100
