"""The ratios that must hold, and whether they did. Values in, values out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.bench.client.figures import Spread, gaps, spread
from kvferry.bench.document import Verdict
from kvferry.bench.serve.scenarios import DecodeRounds, Interference, TtftRounds

HANDOFF_SHARE = 0.03
REPEAT_SHARE = 0.10
BUSY_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that was measured."""

    ttft: Sequence[TtftRounds]
    decode: Sequence[DecodeRounds]
    interference: Sequence[Interference]


def judge(results: Results, apart: str, size: int) -> list[Verdict]:
    """The verdicts on the arrangement `apart`, its TTFT at prompts of `size` tokens.

    Where nothing was shipped, the hand-off took for ever.
    """
    verdicts = []
    for one in results.ttft:
        if (one.arrangement, one.size) == (apart, size):
            cold = cold_ttft(one).median
            share = handoff(one).median / cold if one.shipped_bytes else float("inf")
            verdicts += [
                Verdict(f"hand-off / cold TTFT at {size:,} tokens", share, HANDOFF_SHARE),
                Verdict(
                    f"repeated / cold TTFT at {size:,} tokens",
                    repeat_ttft(one).median / cold,
                    REPEAT_SHARE,
                ),
            ]
    for run in results.interference:
        if run.arrangement == apart:
            factor = gaps(run.busy).p99 / gaps(run.quiet).p99
            what = f"p99 ITL while {run.size:,} tokens arrive / quiet"
            verdicts.append(Verdict(what, factor, BUSY_FACTOR))
    return verdicts


def cold_ttft(rounds: TtftRounds) -> Spread:
    return spread([one.cold.ttft for one in rounds.rounds])


def repeat_ttft(rounds: TtftRounds) -> Spread:
    return spread([one.repeat.ttft for one in rounds.rounds])


def handoff(rounds: TtftRounds) -> Spread:
    """Seconds from the prefill node's last chunk to the decode node's first step."""
    return spread([one.cold.timings["handoff_ms"] / 1e3 for one in rounds.rounds])
