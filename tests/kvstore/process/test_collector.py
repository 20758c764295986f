"""Full collections come in idle moments, and in a busy process seldom."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from kvferry.kvstore.process.collector import BUSY_SECONDS, IDLE_SECONDS, Collector
from kvferry.tests.rigs.clock import Clock


@pytest.fixture
def clock() -> Iterator[Clock]:
    """Time, in a process as good as new: its thresholds Python's own, and nothing to walk.

    What growth has to exceed is a quarter of what the last full collection walked, so there has to
    be one after what lives here already is frozen.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    gc.collect()
    gc.freeze()
    gc.collect()
    yield Clock(100.0)
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.fixture
def full(clock: Clock) -> Iterator[list[int]]:
    """Grows by one with each full collection."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            seen.append(1)

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def grow(kept: list[list[int]], count: int = 200_000) -> None:
    kept += ([number] for number in range(count))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python collects in small steps there")
def test_growth_alone_starts_no_full_collection(clock: Clock, full: list[int]) -> None:
    kept: list[list[int]] = []
    grow(kept)
    assert full, "Python's own thresholds would not have started one either"
    collector = Collector(clock=clock)
    full.clear()
    grow(kept)
    assert not full
    assert not collector.turn(idle=True), "it is not time yet"
    clock.now += IDLE_SECONDS
    assert not collector.turn(idle=False), "somebody waits"
    assert collector.turn(idle=True) and len(full) == 1
    clock.now += IDLE_SECONDS
    assert not collector.turn(idle=True), "nothing has come since"
    grow(kept)
    assert collector.turn(idle=True) and len(full) == 2


def test_a_process_that_is_never_idle_collects_all_the_same(clock: Clock, full: list[int]) -> None:
    collector = Collector(clock=clock)
    full.clear()
    kept: list[list[int]] = []
    for _ in range(3):
        grow(kept)
        clock.now += BUSY_SECONDS - 1
        assert not collector.turn(idle=False)
        clock.now += 1
        assert collector.turn(idle=False)
    assert len(full) == 3


class Ring:
    """It refers to itself."""

    def __init__(self) -> None:
        self.self = self


def test_what_was_kept_in_a_cycle_goes_once_it_is_let_go(clock: Clock) -> None:
    collector = Collector(keeps=True, clock=clock)
    ring = Ring()
    seen = weakref.ref(ring)
    for last in (False, True):
        grow([], 2000)
        clock.now += IDLE_SECONDS
        assert collector.turn(idle=True)
        if not last:
            del ring
    assert seen() is not None, "what is kept is not walked again"
    collector.let_go()
    clock.now += IDLE_SECONDS
    assert collector.turn(idle=True) and seen() is None


@pytest.mark.parametrize("keeps", [False, True])
def test_what_a_process_keeps_is_walked_once(clock: Clock, keeps: bool) -> None:
    collector = Collector(keeps=keeps, clock=clock)
    frozen = gc.get_freeze_count()
    kept: list[list[int]] = []
    grow(kept)
    clock.now += IDLE_SECONDS
    assert collector.turn(idle=True)
    assert (gc.get_freeze_count() - frozen >= len(kept)) == keeps
