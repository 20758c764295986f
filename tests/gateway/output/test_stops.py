"""Stop strings: exact in any cut of the text, nothing of them leaks, nothing else is delayed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.gateway.output.stops import StopMatcher


def run(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include=include)
    shown = ""
    for piece in pieces:
        released = matcher.push(piece)
        shown += released.text
        if released.stop is not None:
            return shown, released.stop
    return shown + matcher.push("", final=True).text, None


def oracle(text: str, stops: list[str], *, include: bool = False) -> tuple[str, str | None]:
    """Character by character: the first end of a stop; of several, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@pytest.mark.C2
@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "stop"),
    [
        (["AB", "C", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"], "ABC", "DEFGHIJ"),
        (["DEF", "G", "HI", "J"], ["DEFGHIJ"], "", "DEFGHIJ"),
        (["a", "aa", "b"], ["aab"], "a", "aab"),
        (["DEF", "G", "DEF", "GH"], ["DEFGH"], "DEFG", "DEFGH"),
        (["x", "ab", "c"], ["abc", "ab"], "x", "ab"),
        (["x", "a", "b", "d"], ["abc", "b"], "xa", "b"),
        (["xabc"], ["bc", "abc"], "x", "abc"),
        (["mañ", "ana ", "漢", "字", "!"], ["漢字"], "mañana ", "漢字"),
        (["one ", "two"], ["a", "b", "c", "o t"], "one two", None),
        (["fin", "e EN"], ["END"], "fine EN", None),
        (["a1", "b2"], ["2", "1", "b", "z"], "a", "1"),
    ],
)
def test_cases(pieces: list[str], stops: list[str], shown: str, stop: str | None) -> None:
    assert run(pieces, stops) == (shown, stop)
    assert run(pieces, stops, include=True) == (shown + (stop or ""), stop)


SMALL = st.text("ab¶", max_size=14)
STOPS = st.lists(st.text("ab¶", min_size=1, max_size=4), min_size=1, max_size=4)


@pytest.mark.C2
@given(SMALL, STOPS, st.lists(st.integers(0, 20), max_size=8), st.booleans())
def test_any_cut_is_the_whole_text(
    text: str, stops: list[str], places: list[int], include: bool
) -> None:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert run(pieces, stops, include=include) == oracle(text, stops, include=include)


@pytest.mark.C2
@given(SMALL, STOPS)
def test_only_a_beginning_of_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for at, character in enumerate(text):
        released = matcher.push(character)
        shown += released.text
        if released.stop is not None:
            return
        held = text[len(shown) : at + 1]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.C2
def test_text_below_the_minimum_completes_no_stop() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("xEND", armed=False).text == "xEND"
    assert matcher.push("E", armed=False).text == ""
    released = matcher.push("ND", armed=True)
    assert (released.text, released.stop) == ("", "END")


@pytest.mark.C2
def test_a_stop_that_an_unarmed_text_completed_stays_text() -> None:
    matcher = StopMatcher(["ab", "abc"])
    assert matcher.push("ab", armed=False).text == ""
    released = matcher.push("x", armed=True)
    assert (released.text, released.stop) == ("abx", None)
