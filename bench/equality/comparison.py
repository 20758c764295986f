"""The server's outputs against the oracle's: the rule, prompt by prompt, and the tables.

A difference counts unless the oracle's two best logits lay close together at that token; then it is
a tie, listed as such, and what follows it is not compared. Nothing here asks a server or a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.bench.document import table
from kvferry.tests.rigs.models.oracle import TIE, Greedy, agree

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Output:
    """What came back for one prompt, by its number."""

    prompt: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one way of asking gave; a prompt may be asked more than once."""

    arrangement: str
    way: str
    outputs: tuple[Output, ...]
    sources: tuple[tuple[str, int], ...]
    """Prompt tokens of all requests by where they came from."""


@dataclass(frozen=True, slots=True)
class Judgement:
    kind: str
    """`equal`, `tie` or `different`."""
    at: int | None = None
    """The token at which the texts part."""


def judge(want: Greedy, got: Sequence[int]) -> Judgement:
    """By the oracle's rule; an output that is too short or too long differs too."""
    verdict = agree(want.tokens, want.margins, got)
    if not verdict.equal:
        return Judgement("different", verdict.wrong_at)
    if len(got) != len(want.tokens):
        return Judgement("different", min(len(got), len(want.tokens)))
    return Judgement("equal") if verdict.tie_at is None else Judgement("tie", verdict.tie_at)


def comparison(
    outcomes: Sequence[Outcome],
    expected: Sequence[Greedy],
    lengths: Sequence[int],
    cold: tuple[str, str],
) -> str:
    """The tables. `cold` names the ways in which cold prompts were asked alone and in a batch."""
    agreement = _agreement(outcomes, *cold)
    said = "The same cold prompt alone and in a batch, whatever the oracle says:\n\n"
    return (
        (f"{said}{agreement}\n\n" if agreement else "")
        + "Against the oracle. A difference counts unless the oracle's two best logits are "
        f"less than {TIE:g} apart there; what follows such a tie is not compared.\n\n"
        + _totals(outcomes, expected)
        + "\n\n"
        + _partings(outcomes, expected, lengths)
        + "\n"
    )


def _agreement(outcomes: Sequence[Outcome], alone: str, batch: str) -> str:
    rows: list[Row] = []
    for arrangement in dict.fromkeys(one.arrangement for one in outcomes):
        by_way = {one.way: one for one in outcomes if one.arrangement == arrangement}
        if alone not in by_way or batch not in by_way:
            continue
        single = {one.prompt: one.ids for one in by_way[alone].outputs}
        same = [single[one.prompt] == one.ids for one in by_way[batch].outputs]
        rows.append((arrangement, f"{sum(same)} of {len(same)}"))
    return table(("arrangement", f"{alone} = {batch}"), rows) if rows else ""


def _totals(outcomes: Sequence[Outcome], expected: Sequence[Greedy]) -> str:
    rows: list[Row] = []
    for outcome in outcomes:
        kinds = Counter(judge(expected[one.prompt], one.ids).kind for one in outcome.outputs)
        figures = [str(kinds[kind]) for kind in ("equal", "tie", "different")]
        sources = ", ".join(f"{name} {count:,}" for name, count in outcome.sources)
        rows.append((outcome.arrangement, outcome.way, *figures, sources))
    head = ("arrangement", "way", "equal", "part at a tie", "different", "prompt tokens from")
    return table(head, rows)


def _partings(
    outcomes: Sequence[Outcome], expected: Sequence[Greedy], lengths: Sequence[int]
) -> str:
    rows: list[Row] = []
    for outcome in outcomes:
        for one in outcome.outputs:
            want = expected[one.prompt]
            found = judge(want, one.ids)
            if found.at is None:
                continue
            margin = f"{want.margins[found.at]:.1e}" if found.at < len(want.margins) else ""
            what = "tie, not compared further" if found.kind == "tie" else "**different**"
            prompt = f"{lengths[one.prompt]:,}"
            rows.append((outcome.arrangement, outcome.way, prompt, str(found.at), margin, what))
    if not rows:
        return "No output parts from the oracle's anywhere."
    head = ("arrangement", "way", "prompt tokens", "parts at", "oracle's margin", "")
    return table(head, rows)
