"""Runs the acceptance cases and prints them as a table.

    python -m kvferry.tests.system.acceptance [ID …]

Each case is a pytest marker, described in pyproject.toml. The table says for each how many tests
show it, how long they took together, and whether all of them hold. A case that no test carries is
listed as missing and makes the run fail, unless it is one of `TO_COME`. Without ids a second table
follows: the seconds and ratios that only a measurement can show, beside their limits.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

TO_COME = ("A7", "D6")
"""Cases that nothing shows yet. One of them that a test carries is judged like any other."""


class Tally:
    """A pytest plugin that counts outcomes by marker."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.outcomes: dict[str, Counter[str]] = defaultdict(Counter)
        self.seconds: Counter[str] = Counter()
        self._ids = frozenset(ids)
        self._ids_of: dict[str, frozenset[str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            names = {marker.name for marker in item.iter_markers()}
            self._ids_of[item.nodeid] = self._ids & names

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for case in self._ids_of.get(report.nodeid, ()):
            self.seconds[case] += int(1000 * report.duration)
            if report.when == "call" or report.outcome != "passed":
                self.outcomes[case][report.outcome] += 1


def titles(root: Path) -> dict[str, str]:
    """What each id stands for."""
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    markers: list[str] = settings["tool"]["pytest"]["ini_options"]["markers"]
    pairs = (marker.split(": ", 1) for marker in markers)
    return {name: about for name, about in pairs if name[1:].isdigit()}


def row(case: str, about: str, outcomes: Counter[str], milliseconds: int) -> str:
    total = sum(outcomes.values())
    bad = total - outcomes["passed"]
    absent = "to come" if case in TO_COME else "missing"
    result = absent if not total else f"{bad} failed" if bad else "holds"
    return f"| {case} | {about} | {total} | {milliseconds / 1000:.1f} | {result} |"


def main(arguments: Sequence[str]) -> int:
    root = Path(__file__).parents[2]
    about = titles(root)
    ids = list(arguments) or sorted(about, key=lambda case: (case[0], int(case[1:])))
    tally = Tally(ids)
    status = pytest.main(
        ["-q", "--no-header", "-m", " or ".join(ids), str(root / "tests")], plugins=[tally]
    )
    print("\n| id | case | tests | seconds | result |\n| --- | --- | --- | --- | --- |")
    for case in ids:
        print(row(case, about.get(case, "?"), tally.outcomes[case], tally.seconds[case]))
    missing = [case for case in ids if case not in TO_COME and not tally.outcomes[case]]
    broken = measured() if not arguments else 0
    failed = status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    return 1 if missing or failed or broken else 0


def measured() -> int:
    """Prints what is measured, and returns how much of it does not hold."""
    # Not before pytest has run: it would complain of plugins that are imported already.
    from kvferry.tests.rigs.servers.measures import MODEL, measure

    print(f"\nMeasured over {MODEL}:\n\n| id | what | rounds | found | limit | result |")
    print("| --- | --- | --- | --- | --- | --- |")
    broken = 0
    for one in measure():
        broken += not one.holds
        result = "holds" if one.holds else "FAILS"
        found, limit = (f"{value:.3g} {one.unit}".rstrip() for value in (one.found, one.limit))
        print(
            f"| {one.case} | {one.what} | {one.rounds} | {found} | {limit} | {result} |", flush=True
        )
    return broken


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
