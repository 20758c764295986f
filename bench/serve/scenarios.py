"""The scenarios: what is sent, when, and what is kept of the answers.

Owns the order and the number of requests; how they are sent is the load client's business, what the
kept figures must be is judged elsewhere. An answer that failed, that does not have exactly the
tokens asked for, or that was cached where it must be cold ends the measurement.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.bench.client.figures import gaps_touching, gaps_within, tokens_per_second
from kvferry.bench.client.load import (
    Answer,
    Ask,
    Recording,
    Target,
    completion,
    stream,
    together,
)
from kvferry.bench.client.prompts import Prompts
from kvferry.bench.server import Server

Progress = Callable[[str], None]

STREAMS = 4
"""How many decode while a long prompt arrives."""
SHORT_PROMPT = 64
"""Tokens of the prompts whose decoding is measured: short enough not to need a prefill node."""
_TTFT_TOKENS = 4
_ENDLESS = 4000
_SETTLE_EVENTS = 16


class BadAnswer(Exception):
    """An answer that cannot be measured."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running server and what the scenarios need beside it."""

    server: Server
    prompts: Prompts
    progress: Progress

    @property
    def name(self) -> str:
        return self.server.arrangement.name

    def ask(self, size: int, tokens: int) -> Ask:
        """A request that was never sent before."""
        return completion(self.prompts.take(self.server.encode, size), tokens)

    def run(self, asks: Sequence[Ask]) -> list[Answer]:
        """All at once; every answer is whole."""
        answers = asyncio.run(together(self.server.target, asks))
        for ask, answer in zip(asks, answers, strict=True):
            check_whole(ask, answer)
        return answers


def check_whole(ask: Ask, answer: Answer) -> None:
    """BadAnswer unless it has the tokens that were asked for."""
    asked = len(ask.body["prompt"]), ask.body["max_tokens"]
    if answer.failure:
        raise BadAnswer(f"a request of {asked[0]} tokens failed: {answer.failure}")
    if (answer.prompt_tokens, answer.tokens) != asked:
        raise BadAnswer(f"usage is not what was asked for, {asked}: {dict(answer.usage)}")


def warm_up(cluster: Cluster, sizes: Sequence[int]) -> None:
    """Every path once: prefill apart, its repeat, and decoding in a batch. Nothing is kept."""
    cluster.progress(f"{cluster.name}: warming up")
    for size in sizes:
        ask = cluster.ask(size, 8)
        cluster.run([ask])
        cluster.run([ask])
    cluster.run([cluster.ask(SHORT_PROMPT, 8) for _ in range(2 * STREAMS)])


# -- time to first token ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ttft:
    """One prompt, never seen before and then once more."""

    cold: Answer
    repeat: Answer


@dataclass(frozen=True, slots=True)
class TtftRounds:
    arrangement: str
    size: int
    rounds: tuple[Ttft, ...]
    shipped_bytes: float
    """By the prefill node, in all rounds; 0 without one."""


def time_to_first_token(cluster: Cluster, size: int, rounds: int) -> TtftRounds:
    before = _shipped(cluster)
    kept = []
    for at in range(rounds):
        ask = cluster.ask(size, _TTFT_TOKENS)
        (cold,) = cluster.run([ask])
        if cold.cached_tokens:
            raise BadAnswer(f"a new prompt found {cold.cached_tokens} tokens in a cache")
        (repeat,) = cluster.run([ask])
        if not repeat.cached_tokens:
            raise BadAnswer("a repeated prompt found nothing in any cache")
        kept.append(Ttft(cold, repeat))
        cluster.progress(
            f"{cluster.name}: {size} tokens, round {at + 1} of {rounds}: TTFT cold "
            f"{1e3 * cold.ttft:,.0f} ms, repeated {1e3 * repeat.ttft:,.0f} ms"
        )
    return TtftRounds(cluster.name, size, tuple(kept), _shipped(cluster) - before)


def _shipped(cluster: Cluster) -> float:
    return cluster.server.counter("kvferry_node_shipped_bytes_total", "prefill")


# -- decoding --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecodeRounds:
    arrangement: str
    streams: int
    rates: tuple[float, ...]
    """Tokens a second of all streams together, each round."""
    client_us: float
    """Processor time of the load client for each event, in microseconds."""


def decode_rate(cluster: Cluster, streams: int, tokens: int, rounds: int) -> DecodeRounds:
    rates, spent, events = [], 0.0, 0
    for at in range(rounds):
        asks = [cluster.ask(SHORT_PROMPT, tokens) for _ in range(streams)]
        start = time.process_time()
        answers = cluster.run(asks)
        spent += time.process_time() - start
        events += sum(len(answer.arrivals) for answer in answers)
        rates.append(tokens_per_second(answers))
        cluster.progress(
            f"{cluster.name}: {streams} streams, round {at + 1} of {rounds}: "
            f"{rates[-1]:.1f} tokens/s"
        )
    return DecodeRounds(cluster.name, streams, tuple(rates), 1e6 * spent / events)


# -- decoding while a long prompt arrives ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Interference:
    """Gaps between the tokens of running streams, in seconds, of all rounds."""

    arrangement: str
    size: int
    rounds: int
    quiet: tuple[float, ...]
    busy: tuple[float, ...]
    newcomers: tuple[float, ...]
    """TTFT of the long prompts."""


def long_arrival(cluster: Cluster, size: int, quiet_s: float, rounds: int) -> Interference:
    quiet: list[float] = []
    busy: list[float] = []
    newcomers = []
    for at in range(rounds):
        streams = [cluster.ask(SHORT_PROMPT, _ENDLESS) for _ in range(STREAMS)]
        newcomer = cluster.ask(size, _TTFT_TOKENS)
        one = asyncio.run(arrive(cluster.server.target, streams, newcomer, quiet_s))
        quiet += one.quiet
        busy += one.busy
        newcomers.append(one.newcomer.ttft)
        cluster.progress(
            f"{cluster.name}: {STREAMS} streams and {size} tokens, round {at + 1} of {rounds}: "
            f"longest gap {1e3 * max(one.quiet):,.0f} ms quiet, {1e3 * max(one.busy):,.0f} ms busy;"
            f" newcomer's TTFT {newcomers[-1]:.1f} s"
        )
    return Interference(cluster.name, size, rounds, tuple(quiet), tuple(busy), tuple(newcomers))


@dataclass(frozen=True, slots=True)
class Arrived:
    """Gaps of the streams before and while a long prompt is computed, and its answer."""

    quiet: list[float]
    busy: list[float]
    newcomer: Answer


async def arrive(target: Target, asks: Sequence[Ask], newcomer: Ask, quiet_s: float) -> Arrived:
    """Streams run alone for a while, then the newcomer comes; they are cut when it has begun."""
    recordings = [Recording() for _ in asks]
    tasks = [
        asyncio.create_task(stream(target, ask, recording))
        for ask, recording in zip(asks, recordings, strict=True)
    ]
    try:
        while min(len(one.events) for one in recordings) < _SETTLE_EVENTS:
            _check_running(tasks)
            await asyncio.sleep(0.05)
        start = time.perf_counter()
        await asyncio.sleep(quiet_s)
        late = await stream(target, newcomer)
        check_whole(newcomer, late)
        _check_running(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert late.first is not None
    running = [one.read() for one in recordings]
    return Arrived(
        [gap for one in running for gap in gaps_within(one, start, late.sent)],
        [gap for one in running for gap in gaps_touching(one, late.sent, late.first)],
        late,
    )


def _check_running(tasks: Sequence[asyncio.Task[Answer]]) -> None:
    for task in tasks:
        if task.done():
            reason = task.result().failure or "it ended"
            raise BadAnswer(f"a stream did not last until the long prompt was done: {reason}")
