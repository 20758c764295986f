"""What reports are made of: machine, verdicts, tables, and a section between marks of a document.

Owns wording and form only; every figure comes from elsewhere. A report can put itself between its
two marks and leave the rest of the document as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.bench.client.figures import Spread
from kvferry.bench.machine import Machine


@dataclass(frozen=True, slots=True)
class Verdict:
    what: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.value <= self.limit


def machine_lines(machine: Machine) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions)
    return [
        f"* Machine: {machine.cpu}, {machine.cores} cores, {machine.memory_gib:.0f} GiB RAM, "
        f"{machine.system}",
        f"* Versions: {versions}",
    ]


def milliseconds(value: Spread) -> str:
    digits = 1 if value.median < 0.1 else 0
    low, middle, high = (f"{1e3 * x:,.{digits}f}" for x in (value.low, value.median, value.high))
    return f"{middle} ({low} to {high})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# -- into a document -------------------------------------------------------------------------------


def write_section(path: Path, name: str, text: str) -> None:
    """Puts `text` between the marks of `name` in a document, or at its end with new marks."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    section = f"{begin}\n{text}{end}"
    document = path.read_text() if path.exists() else ""
    before, found, rest = document.partition(begin)
    if found:
        after = rest.partition(end)[2]
    else:
        before, after = document + ("\n" if document else ""), "\n"
    path.write_text(before + section + after)
