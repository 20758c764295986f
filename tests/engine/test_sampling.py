"""Sampling: pure, exact in its filters, and distributed as it claims."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from kvferry.kernels.sampling import LOWEST_LOGPROB, Sampled, SamplingParams, sample, uniform

Row = NDArray[np.float32]

rows = hnp.arrays(
    np.float32, st.integers(1, 40), elements=st.floats(-30, 30, width=32, allow_subnormal=False)
)
params = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.floats(1e-6, 5)),
    top_p=st.floats(0, 1),
    top_k=st.integers(-1, 50),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.5, 2),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    min_tokens=st.integers(0, 3),
    logprobs=st.one_of(st.none(), st.integers(0, 50)),
)


def draw(row: Row, seed: int = 0, position: int = 0, **fields: Any) -> Sampled:
    names: tuple[str, ...] = ("prompt", "output", "suppressed")
    extra = {name: fields.pop(name) for name in names if name in fields}
    arguments: dict[str, Any] = {"prompt": (), "output": (), **extra}
    return sample(
        row, SamplingParams(**fields), seed=seed, choice=0, position=position, **arguments
    )


def row_of(*values: float) -> Row:
    return np.array(values, np.float32)


def kept(row: Row, **fields: Any) -> set[int]:
    """Every token that 300 draws at a high temperature find."""
    return {draw(row, seed, **fields).token for seed in range(300)}


@given(rows, params, st.integers(), st.integers(0, 9), st.data())
@settings(max_examples=300, deadline=None)
def test_it_is_pure_and_always_answers(
    row: Row, params: SamplingParams, seed: int, choice: int, data: st.DataObject
) -> None:
    ids = st.lists(st.integers(0, row.size - 1), max_size=8)
    prompt, output, suppressed = (data.draw(ids) for _ in range(3))
    before = row.copy()
    row.flags.writeable = False
    results = [
        sample(
            row,
            params,
            seed=seed,
            choice=choice,
            position=len(output),
            prompt=prompt,
            output=output,
            suppressed=suppressed,
        )
        for _ in range(2)
    ]
    assert results[0] == results[1]
    np.testing.assert_array_equal(row, before)
    token, logprob, top = results[0]
    assert 0 <= token < row.size
    assert (logprob is None) == (params.logprobs is None)
    if logprob is not None and params.logprobs is not None:
        assert math.isfinite(logprob) and logprob <= 1e-6
        assert len(top) == min(params.logprobs, row.size)
    if len(output) < params.min_tokens and set(suppressed) < set(range(row.size)):
        assert token not in suppressed


@given(rows, st.integers(0, 40), st.integers(0, 2**63))
@settings(deadline=None)
def test_log_probabilities_are_of_the_row_as_given(row: Row, count: int, seed: int) -> None:
    got = draw(row, seed, temperature=3, top_k=2, logprobs=count, logit_bias=((0, 5.0),))
    exact = row.astype(np.float64)
    logprobs = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    assert got.logprob == pytest.approx(logprobs[got.token], abs=1e-4)
    order = sorted(range(row.size), key=lambda i: (-row[i], i))[:count]
    assert [i for i, _ in got.top] == order
    assert [value for _, value in got.top] == pytest.approx(logprobs[order], abs=1e-4)


def test_greedy_takes_the_best_and_the_lowest_id_of_a_tie() -> None:
    assert draw(row_of(0, 2, 1, 2), temperature=0).token == 1
    assert draw(row_of(0, 2, 1, 2), temperature=1e-7).token == 1


def test_a_cold_draw_is_greedy_and_a_hot_one_even() -> None:
    row = row_of(0, 1, 2, 3)
    assert kept(row, temperature=0.01) == {3}
    counts = np.bincount([draw(row, s, temperature=1e6).token for s in range(4000)])
    assert (abs(counts - 1000) < 120).all()


def test_top_k() -> None:
    row = row_of(1, 5, 4, 3, 2)
    assert kept(row, temperature=10, top_k=1) == {1}
    assert kept(row, temperature=10, top_k=3) == {1, 2, 3}
    for everything in (0, -1, 5, 99):
        assert len(kept(row, temperature=10, top_k=everything)) == 5
    assert kept(row_of(1, 2, 2, 0), top_k=1, temperature=10) == {1, 2}, "ties stay"


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass() -> None:
    row = np.log(row_of(0.05, 0.5, 0.15, 0.3))
    assert kept(row, top_p=0.0) == {1}
    assert kept(row, top_p=0.49) == {1}
    assert kept(row, top_p=0.6) == {1, 3}
    assert kept(row, top_p=0.79) == {1, 3}
    assert kept(row, top_p=0.9) == {1, 2, 3}
    assert kept(row, top_p=1.0) == {0, 1, 2, 3}


def test_top_p_is_of_what_top_k_left() -> None:
    row = np.log(row_of(0.4, 0.3, 0.2, 0.1))
    assert kept(row, top_p=0.55) == {0, 1}
    assert kept(row, top_p=0.55, top_k=2) == {0}


def test_min_p_is_a_share_of_the_best() -> None:
    row = np.log(row_of(0.5, 0.3, 0.15, 0.05))
    assert kept(row, min_p=0.61) == {0}
    assert kept(row, min_p=0.59) == {0, 1}
    assert kept(row, min_p=0.2) == {0, 1, 2}
    assert kept(row, min_p=1.0) == {0}


@given(rows, st.floats(0.01, 0.99), st.integers(0, 999))
@settings(deadline=None)
def test_the_nucleus_is_that_of_a_full_sort(row: Row, top_p: float, seed: int) -> None:
    token = draw(row, seed, top_p=top_p).token
    weights = np.exp(row.astype(np.float64) - row.max())
    above = weights[row > row[token]].sum() / weights.sum()
    assert above < top_p + 1e-6


def test_repetition_penalty_is_over_prompt_and_output() -> None:
    row = row_of(2, 1.5, -1, -1.5)
    assert draw(row, temperature=0, repetition_penalty=1.5, prompt=[0]).token == 1
    assert draw(row, temperature=0, repetition_penalty=1.5, output=[0, 0]).token == 1
    assert draw(row, temperature=0, repetition_penalty=1.3, prompt=[0]).token == 0
    assert draw(row[2:], temperature=0, repetition_penalty=1.6, prompt=[0]).token == 1
    assert draw(row[2:], temperature=0, repetition_penalty=0.5, prompt=[1]).token == 1


def test_frequency_and_presence_penalties_are_over_the_output() -> None:
    row = row_of(2, 1)
    assert draw(row, temperature=0, frequency_penalty=0.6, output=[0]).token == 0
    assert draw(row, temperature=0, frequency_penalty=0.6, output=[0, 0]).token == 1
    assert draw(row, temperature=0, presence_penalty=0.6, output=[0, 0]).token == 0
    assert draw(row, temperature=0, presence_penalty=1.1, output=[0]).token == 1
    assert draw(row, temperature=0, presence_penalty=2, frequency_penalty=2, prompt=[0]).token == 0


def test_bias_moves_and_forbids() -> None:
    row = row_of(2, 1, 0)
    assert draw(row, temperature=0, logit_bias=((2, 3.0),)).token == 2
    assert 0 not in kept(row, logit_bias=((0, -100.0),))
    assert kept(row, logit_bias=((2, 100.0),)) == {2}


def test_suppression_lasts_until_min_tokens() -> None:
    row = row_of(9, 1)
    fields: dict[str, Any] = {"temperature": 0, "min_tokens": 2, "suppressed": [0]}
    assert [draw(row, position=p, **fields).token for p in range(4)] == [1, 1, 0, 0]
    assert draw(row, temperature=0, min_tokens=1, suppressed=[0, 1]).token == 0
    assert draw(row, temperature=0, min_tokens=0, suppressed=[0]).token == 0


def test_infinities_and_nan_never_win() -> None:
    row = row_of(1, math.nan, -math.inf, 2)
    assert kept(row, temperature=5) == {0, 3}
    got = draw(row, temperature=0, logprobs=4)
    assert got.token == 3
    assert got.top[2:] == ((1, LOWEST_LOGPROB), (2, LOWEST_LOGPROB))
    assert kept(row_of(0, math.inf, 5), temperature=5) == {1}
    for hopeless in (row_of(math.nan, math.nan), row_of(-math.inf)):
        with pytest.raises(ValueError, match="finite"):
            draw(hopeless)


def test_extreme_logits_do_not_overflow() -> None:
    row = row_of(3e38, -3e38, 0)
    assert draw(row, temperature=0.001, logprobs=3).token == 0
    assert kept(row, temperature=2, top_p=0.5, min_p=0.1) == {0}
    assert draw(row, repetition_penalty=0.5, prompt=[0]).token == 0


def test_a_draw_follows_the_distribution() -> None:
    """Chi-square over fixed seeds: the 0.999 quantile at 7 degrees of freedom is 24.3."""
    row = row_of(0, 0.5, 1, 1.5, 2, -1, 3, 0.2)
    for fields in ({}, {"temperature": 2.0}, {"temperature": 0.7}):
        weights = np.exp(row.astype(np.float64) / fields.get("temperature", 1))
        expected = 8000 * weights / weights.sum()
        tokens = [draw(row, seed, position=seed % 7, **fields).token for seed in range(8000)]
        observed = np.bincount(tokens, minlength=row.size)
        assert ((observed - expected) ** 2 / expected).sum() < 24.3


def test_a_filtered_draw_follows_the_renormalised_distribution() -> None:
    row = row_of(0, 1, 2, 3, 1.5)
    expected = np.exp(row[[2, 3, 4]].astype(np.float64))
    expected *= 6000 / expected.sum()
    tokens = [draw(row, seed, top_k=3).token for seed in range(6000)]
    observed = np.bincount(tokens, minlength=5)[[2, 3, 4]]
    assert ((observed - expected) ** 2 / expected).sum() < 13.8


def test_the_uniform_number_is_pinned_and_even() -> None:
    assert [uniform(0, 0, 0), uniform(1, 0, 0), uniform(0, 1, 0), uniform(0, 0, 1)] == PINNED
    assert uniform(-1, 0, 0) == uniform(2**64 - 1, 0, 0)
    numbers = np.array([uniform(7, 0, position) for position in range(5000)])
    counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 27.9


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", math.nan),
        ("presence_penalty", math.inf),
        ("logit_bias", ((0, math.nan),)),
        ("min_tokens", -1),
        ("logprobs", -1),
    ],
)
def test_a_value_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


PINNED = [0.8344006647190152, 0.331385971694413, 0.19468468561312968, 0.0750862312520506]
