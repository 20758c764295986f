"""`python -m kvferry.bench.streams`: a thousand open streams, and what they do to the event loop.

Over a stand-in model that takes microseconds a step, so that the gateway is what is measured. The
loop's lag is the gateway's own figure, from `/metrics`: how late its 50 ms tick came. It exits with
1 when an answer is wrong, or the median round's 99th percentile of the lag is not below 20 ms.
"""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from kvferry.bench.client.load import Answer, Target, completion, stream
from kvferry.bench.machine import this_machine
from kvferry.bench.server import Arrangement, running
from kvferry.kernels.engines.standin import StandinConfig, standin_reply, write_standin_model
from kvferry.kvstore.process.settings import flag, parse

LAG_LIMIT_S = 0.02
PROMPT = 32


@dataclass(frozen=True, slots=True)
class StreamsConfig:
    """How much of it."""

    streams: int = flag(1000, "open at once", minimum=1)
    tokens: int = flag(64, "of each", minimum=1)
    rounds: int = flag(3, "one after the other: other work on the machine is late, too", minimum=1)


@dataclass(frozen=True, slots=True)
class Round:
    seconds: float
    tokens: int
    wrong: int
    lag: float
    """The 99th percentile's bucket, in seconds."""


def prompt_of(seed: int) -> list[int]:
    return [3 + (seed * 101 + index * 31) % 250 for index in range(PROMPT)]


async def run(target: Target, config: StreamsConfig) -> list[Answer]:
    asks = [completion(prompt_of(seed), config.tokens) for seed in range(config.streams)]
    return list(await asyncio.gather(*(stream(target, ask) for ask in asks)))


def lag_buckets(url: str) -> dict[float, float]:
    """How often the loop's lag was at most so many seconds."""
    name = "kvferry_event_loop_lag_seconds_bucket{"
    found = {}
    for line in httpx.get(url + "/metrics", timeout=60).text.splitlines():
        if line.startswith(name):
            bound = line.split('le="')[1].split('"')[0]
            found[float(bound)] = float(line.rsplit(" ", 1)[1])
    return found


def lag_percentile(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """The upper bound of the bucket in which that share of the ticks between the two lies."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = max(counts.values())
    return next(bound for bound, count in counts.items() if count >= share * total)


def wrong(answers: Sequence[Answer], model: StandinConfig, tokens: int) -> int:
    return sum(
        bool(answer.failure) or answer.ids != standin_reply(prompt_of(seed), model, tokens)
        for seed, answer in enumerate(answers)
    )


def main(argv: Sequence[str]) -> int:
    config = parse(StreamsConfig, argv, os.environ, prog="kvferry.bench.streams",
                   description="A thousand open streams over a stand-in model.")  # fmt: skip
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        model = write_standin_model(Path(folder) / "standin")
        flags = (str(Path(folder) / "standin"), "--prefill-nodes=0", "--max-num-seqs=1024",
                 "--max-num-queued-reqs=4096", "--kv-cache-memory-bytes=64MiB")  # fmt: skip
        with running(Arrangement("stand-in", flags), frozenset(os.sched_getaffinity(0))) as server:
            url = f"http://{server.target.host}:{server.target.port}"
            few = StreamsConfig(min(8, config.streams), config.tokens)
            asyncio.run(run(server.target, few))
            print(f"{this_machine()}")
            rounds = [one_round(server.target, url, config, model) for _ in range(config.rounds)]
    lag = statistics.median_high(one.lag for one in rounds)
    each = ", ".join(f"{1e3 * one.lag:g}" for one in rounds)
    print(f"event-loop lag p99: at most {1e3 * lag:g} ms, the median of {each} "
          f"(limit {1e3 * LAG_LIMIT_S:g} ms)")  # fmt: skip
    return 1 if any(one.wrong for one in rounds) or lag > LAG_LIMIT_S else 0


def one_round(target: Target, url: str, config: StreamsConfig, model: StandinConfig) -> Round:
    before, begun = lag_buckets(url), time.monotonic()
    answers = asyncio.run(run(target, config))
    took = time.monotonic() - begun
    lag = lag_percentile(before, lag_buckets(url), 0.99)
    total = sum(answer.tokens for answer in answers)
    found = Round(took, total, wrong(answers, model, config.tokens), lag)
    print(f"{config.streams} streams of {config.tokens} tokens: {took:.1f} s, "
          f"{total / took:.0f} tokens/s, {found.wrong} wrong, lag p99 at most {1e3 * lag:g} ms",
          flush=True)  # fmt: skip
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
