"""What is computed from answers: percentiles, rates and gaps. Values in, values out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvferry.bench.client.load import Answer, Arrival


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some rounds and their extremes."""

    median: float
    low: float
    high: float
    rounds: int


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values), len(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Gaps:
    """Times between successive tokens of a stream, in seconds."""

    p50: float
    p99: float
    most: float
    count: int


def gaps(values: Sequence[float]) -> Gaps:
    return Gaps(percentile(values, 0.5), percentile(values, 0.99), max(values), len(values))


def gaps_within(answer: Answer, start: float, end: float) -> list[float]:
    """Gaps that lie wholly between two moments."""
    return [b - a for a, b in _pairs(answer) if start <= a and b <= end]


def gaps_touching(answer: Answer, start: float, end: float) -> list[float]:
    """Gaps of which any part lies between two moments: a stall at the edge is not lost."""
    return [b - a for a, b in _pairs(answer) if b > start and a < end]


def _pairs(answer: Answer) -> Iterator[tuple[float, float]]:
    return pairwise(one.at for one in answer.arrivals)


def tokens_per_second(answers: Sequence[Answer]) -> float:
    """Tokens of all streams a second while all of them run: from the last one's first token to
    the first one's last."""
    start = max(answer.arrivals[0].at for answer in answers)
    end = min(answer.arrivals[-1].at for answer in answers)
    if end <= start:
        return 0.0
    return sum(_tokens_between(answer, start, end) for answer in answers) / (end - start)


def _tokens_between(answer: Answer, start: float, end: float) -> float:
    return sum(_weight(answer, one) for one in answer.arrivals if start < one.at <= end)


def _weight(answer: Answer, arrival: Arrival) -> float:
    """Tokens in one event. A server that does not say gets its usage spread over its events."""
    return len(arrival.ids) if arrival.ids else answer.tokens / len(answer.arrivals)
