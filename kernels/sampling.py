"""Sampling as a pure function of (seed, choice, position, logits, parameters, ids).

There is no generator state: one uniform number is hashed from seed, choice and position, and the
token is read off the inverse of the cumulative distribution. So a choice can be resumed anywhere,
on any machine, from its token ids alone. This module knows numpy only: no torch, no requests, no
tokenizer.

The order, for a row of logits ``x``: penalties, bias, suppression, temperature, min-p, top-k,
top-p, draw. Reported log-probabilities are of the row as given, before all of these.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float32]

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: the division by it would leave one token anyway."""
LOWEST_LOGPROB = -9999.0
"""Reported in place of minus infinity, which JSON cannot carry."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose a token; ValueError names the field that is out of range."""

    temperature: float = 1.0
    """``x / temperature``; 0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose mass reaches this (Holtzman et al.,
    *The Curious Case of Neural Text Degeneration*, 2020)."""
    top_k: int = 0
    """Keep this many most probable tokens (Fan et al., *Hierarchical Neural Story Generation*,
    2018); 0 and -1 keep all. Here as in top-p, tokens that tie with the last one are kept."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the best one's probability (Nguyen et al.,
    *Turning Up the Heat: Min-p Sampling*, 2024)."""
    repetition_penalty: float = 1.0
    """Over prompt and output: ``x / r`` where x > 0, else ``x * r`` (Keskar et al., *CTRL*,
    2019)."""
    frequency_penalty: float = 0.0
    """``x - f * count``, counted over the output (OpenAI API)."""
    presence_penalty: float = 0.0
    """``x - p`` for tokens that the output has (OpenAI API)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """``x + bias`` by token id (OpenAI API)."""
    min_tokens: int = 0
    """Before this position the ids that the caller passes as `suppressed` are not chosen."""
    logprobs: int | None = None
    """How many of the best tokens to report; None reports no log-probability at all."""

    def __post_init__(self) -> None:
        _require(0 <= self.temperature < math.inf, "temperature must be finite and not negative")
        _require(0 <= self.top_p <= 1, "top_p must be between 0 and 1")
        _require(self.top_k >= -1, "top_k must be -1, 0 or a count")
        _require(0 <= self.min_p <= 1, "min_p must be between 0 and 1")
        _require(0 < self.repetition_penalty < math.inf, "repetition_penalty must be positive")
        _require(math.isfinite(self.frequency_penalty), "frequency_penalty must be finite")
        _require(math.isfinite(self.presence_penalty), "presence_penalty must be finite")
        _require(all(i >= 0 and math.isfinite(b) for i, b in self.logit_bias), "bad logit_bias")
        _require(self.min_tokens >= 0, "min_tokens must not be negative")
        _require(self.logprobs is None or self.logprobs >= 0, "logprobs must not be negative")


class Sampled(NamedTuple):
    token: int
    logprob: float | None
    """None unless `logprobs` was asked for."""
    top: tuple[tuple[int, float], ...]
    """The best tokens with their log-probabilities, best first, the lower id first on a tie."""


def sample(
    logits_row: Row,
    params: SamplingParams,
    *,
    seed: int,
    choice: int,
    position: int,
    prompt: Sequence[int],
    output: Sequence[int],
    suppressed: Sequence[int] = (),
) -> Sampled:
    """Chooses the token that follows `prompt` and `output`.

    Parameters
    ----------
    logits_row : float32 ``[vocab_size]``; not changed. NaN counts as minus infinity.
    prompt, output : all ids of the choice so far, each below ``vocab_size``.
    position : the number of output tokens so far.
    suppressed : ids not to be chosen while ``position < params.min_tokens``, such as EOS. If
        nothing else is left, they are allowed.

    Raises ValueError where no logit is finite: the model has failed, and any token would be a lie.
    """
    row = _finite(logits_row)
    banned = suppressed if position < params.min_tokens else ()
    with np.errstate(over="ignore"):
        adjusted = _finite(_adjust(row, params, prompt, output, banned))
    if params.temperature < GREEDY_BELOW:
        token = int(adjusted.argmax())
    else:
        token = _draw(adjusted, params, uniform(seed, choice, position))
    if params.logprobs is None:
        return Sampled(token, None, ())
    logprob, top = _report(row, token, params.logprobs)
    return Sampled(token, logprob, top)


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same on every machine."""
    mask = (1 << 64) - 1
    packed = struct.pack("<QQQ", seed & mask, choice & mask, position & mask)
    digest = hashlib.blake2b(packed, digest_size=8, person=b"kvferry-sample").digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _finite(row: Row) -> Row:
    """`row` itself where its maximum is finite, else a copy whose maximum is."""
    if math.isfinite(row.max()):
        return row
    usable = np.where(np.isnan(row), np.float32(-np.inf), row)
    best = usable.max()
    if best == np.inf:
        usable = np.where(usable == np.inf, np.float32(0), np.float32(-np.inf))
    elif best == -np.inf:
        raise ValueError("no logit is finite")
    return usable


def _adjust(
    row: Row,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    banned: Sequence[int],
) -> Row:
    """Penalties, bias and suppression; a copy if there are any, else `row`."""
    penalised = bool(params.frequency_penalty or params.presence_penalty) and len(output) > 0
    repeated = params.repetition_penalty != 1
    if not (penalised or repeated or params.logit_bias or len(banned)):
        return row
    adjusted = row.copy()
    if repeated:
        _penalise_repetition(adjusted, params.repetition_penalty, prompt, output)
    if penalised:
        ids, counts = np.unique(np.asarray(output), return_counts=True)
        penalty = params.frequency_penalty * counts + params.presence_penalty
        adjusted[ids] -= penalty.astype(np.float32)
    for token, bias in params.logit_bias:
        adjusted[token] += np.float32(bias)
    return _suppress(adjusted, banned)


def _penalise_repetition(
    row: Row, penalty: float, prompt: Sequence[int], output: Sequence[int]
) -> None:
    seen = np.zeros(row.shape, np.bool_)
    for ids in (prompt, output):
        seen[np.asarray(ids, dtype=np.intp)] = True
    factor = np.float32(penalty)
    values = row[seen]
    row[seen] = np.where(values > 0, values / factor, values * factor)


def _suppress(row: Row, banned: Sequence[int]) -> Row:
    if len(banned) == 0:
        return row
    suppressed = row.copy()
    suppressed[np.asarray(banned)] = -np.inf
    return suppressed if math.isfinite(suppressed.max()) else row


def _draw(row: Row, params: SamplingParams, u: float) -> int:
    """The inverse of the cumulative distribution, by ascending token id, at `u`."""
    with np.errstate(over="ignore"):
        weights = np.exp((row - row.max()) * np.float32(1 / params.temperature))  # best is 1
    floor = _floor(weights, params)
    if floor > 0:
        ids = np.flatnonzero(weights >= floor)
        return int(ids[_invert(weights[ids], u)])
    return _invert(weights, u)


def _invert(weights: Row, u: float) -> int:
    """The first index whose cumulative weight exceeds ``u`` times the total."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    total = cumulative[-1]
    index = int(np.searchsorted(cumulative, u * total, side="right"))
    # Rounding may put u * total at the total itself: then the last token of any weight.
    return min(index, int(np.searchsorted(cumulative, total, side="left")))


def _floor(weights: Row, params: SamplingParams) -> float:
    """The smallest weight that min-p, top-k and top-p keep; never above the best, which is 1."""
    floor = params.min_p
    if 0 < params.top_k < weights.size:
        rank = weights.size - params.top_k
        floor = max(floor, float(np.partition(weights, rank)[rank]))
    if params.top_p < 1:
        floor = max(floor, _nucleus(weights[weights >= floor], params.top_p))
    return floor


def _nucleus(weights: Row, top_p: float) -> float:
    """The weight of the last token that top-p keeps.

    All tokens below ``(1 - p) * total / n`` weigh less than ``(1 - p) * total`` together, so the
    nucleus lies above and only those few need sorting.
    """
    total = float(weights.sum(dtype=np.float64))
    likely = weights[weights >= (1 - top_p) * total / weights.size]
    descending = np.sort(likely)[::-1]
    cumulative = np.cumsum(descending, dtype=np.float64)
    last = int(np.searchsorted(cumulative, top_p * total, side="left"))
    return float(descending[min(last, descending.size - 1)])


def _report(row: Row, token: int, count: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    best = row.max()
    with np.errstate(over="ignore"):
        mass = float(np.exp(row - best).sum(dtype=np.float64))
    normaliser = float(best) + math.log(mass)
    top = ((i, _logprob(row[i], normaliser)) for i in _best(row, count))
    return _logprob(row[token], normaliser), tuple(top)


def _logprob(logit: np.float32, normaliser: float) -> float:
    return max(float(logit) - normaliser, LOWEST_LOGPROB)


def _best(row: Row, count: int) -> list[int]:
    count = min(count, row.size)
    if count == 0:
        return []
    if count == 1:
        return [int(row.argmax())]
    rank = row.size - count
    ids = np.flatnonzero(row >= np.partition(row, rank)[rank])
    order = np.lexsort((ids, -row[ids]))[:count]
    return [int(i) for i in ids[order]]
