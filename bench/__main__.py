"""`make bench`: starts servers, measures them over HTTP, judges the ratios, writes the report.

Owns the order of a whole run and how many rounds each scenario gets. It exits with 1 when a ratio
does not hold and with 2 when something could not be measured.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import httpx

from kvferry.bench.client.prompts import NoChats, Prompts, load_chats
from kvferry.bench.document import write_section
from kvferry.bench.machine import cores_busy, this_machine
from kvferry.bench.serve.report import Conditions, markdown
from kvferry.bench.serve.scenarios import (
    BadAnswer,
    Cluster,
    DecodeRounds,
    Interference,
    TtftRounds,
    decode_rate,
    long_arrival,
    time_to_first_token,
    warm_up,
)
from kvferry.bench.serve.tiers import (
    Conversations,
    TierResults,
    judge_tiers,
    plain_speeds,
    store_folder,
    with_store,
)
from kvferry.bench.serve.verdicts import Results, judge
from kvferry.bench.server import Arrangement, ServerFailed, explain, running
from kvferry.bench.store_speed import SMOLLM2_BLOCK_BYTES, judge_fetch
from kvferry.bench.store_speed import measure as measure_store
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process.cores import available_cores
from kvferry.kvstore.process.settings import flag, option_name, parse, positional


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What a run can be told."""

    model: str | None = positional(None, "what `kvferry serve` takes [SmolLM2-135M-Instruct]")
    url: str | None = flag(None, "measure the server there instead of starting any")
    dtype: str = flag("auto", "type of weights and KV")
    seed: int = flag(1, "chooses the prompts")
    rounds: int = flag(9, "rounds of TTFT; long prompts and decoding get a third", minimum=1)
    core: int | None = flag(None, "core of the load client [the last]")
    tiers: bool = flag(False, "the store and its tiers only, into a section of their own")
    quick: bool = flag(False, "short prompts, few rounds: shows that it works, measures nothing")
    output: Path | None = flag(None, "document that gets the report, between its marks [stdout]")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything."""

    sizes: tuple[int, int, int]
    """Short, middle and long prompts, in tokens; the middle one is judged."""
    rounds: int
    few: int
    streams: tuple[int, ...] = (1, 4, 8)
    decode_tokens: int = 128
    quiet_s: float = 10.0
    conversations: tuple[int, ...] = (2048, 4000, 6000)
    """Tokens; the second is judged."""
    store_blocks: int = 400


def plan(config: BenchConfig) -> Plan:
    if config.quick:
        return Plan((256, 512, 1024), 1, 1, decode_tokens=24, quiet_s=1.5, conversations=(256, 512))
    return Plan((512, 2048, 6000), config.rounds, max(1, config.rounds // 3))


def arrangements(config: BenchConfig, available: frozenset[int]) -> tuple[Arrangement, ...]:
    """The servers to measure. The first is the one that is judged."""
    if config.url is not None:
        return (Arrangement("the server given", url=config.url),)
    common = common_flags(config)
    first = min(available)
    alone = "--prefill-nodes=0"
    return (
        Arrangement("P apart", ("--prefill-nodes=1", *common)),
        Arrangement("D alone, one core", (alone, f"--decode-cores={first}", *common)),
        Arrangement("D alone, all cores", (alone, *common)),
    )


def common_flags(config: BenchConfig) -> list[str]:
    """What every server is started with."""
    return [f"--dtype={config.dtype}", *([config.model] if config.model else [])]


class Run:
    """One whole run: the servers one after another, and what was measured so far."""

    def __init__(self, config: BenchConfig) -> None:
        self.config = config
        self.plan = plan(config)
        self.cores = available_cores()
        self.client_core = max(self.cores) if config.core is None else config.core
        self.arrangements = () if config.tiers else arrangements(config, self.cores)
        self.judged = self.arrangements[0].name if self.arrangements else ""
        self.model = ""
        self.others = 0.0
        self._prompts = Prompts(load_chats(), config.seed)
        self._ttft: list[TtftRounds] = []
        self._decode: list[DecodeRounds] = []
        self._interference: list[Interference] = []
        self._start = time.monotonic()

    def measure(self) -> Results:
        os.sched_setaffinity(0, {self.client_core})
        for arrangement in self.arrangements:
            self.others = max(self.others, cores_busy())
            self._progress(f"{arrangement.name}: starting the server")
            with running(arrangement, self.cores) as server:
                self.model = server.target.model
                self._measure(Cluster(server, self._prompts, self._progress))
        return Results(self._ttft, self._decode, self._interference)

    def measure_tiers(self) -> TierResults | None:
        """None of a server that somebody else runs: it cannot be killed."""
        if self.config.url is not None:
            return None
        found = Conversations(self.plan.conversations, self.plan.few)
        with store_folder() as folder:
            arrangement = with_store(folder, common_flags(self.config))
            self.arrangements += (arrangement,)
            self._progress(f"{arrangement.name}: starting the server")
            with running(arrangement, self.cores) as server:
                self.model = server.target.model
                found.before_the_kill(Cluster(server, self._prompts, self._progress))
                server.kill()
            self._progress(f"{arrangement.name}: killed; starting it again")
            with running(arrangement, self.cores) as server:
                found.after_the_kill(Cluster(server, self._prompts, self._progress))
                server.kill()
            speeds = plain_speeds(folder)
            self._progress(f"{arrangement.name}: killed again; starting it a last time")
            with running(arrangement, self.cores) as server:
                found.from_disk(Cluster(server, self._prompts, self._progress), folder)
        return found.results(speeds)

    def measure_store(self) -> dict[str, float] | None:
        """A store alone: bytes a second in and out of it."""
        if self.config.url is not None:
            return None
        self._progress("the store alone")
        with store_folder() as folder:
            return measure_store(folder, SMOLLM2_BLOCK_BYTES, self.plan.store_blocks)

    def _measure(self, cluster: Cluster) -> None:
        """Everything of the first arrangement; of others what it is compared by."""
        whole, plan = cluster.name == self.judged, self.plan
        short, middle, long = plan.sizes
        warm_up(cluster, (short, middle))
        rounds = plan.rounds if whole else plan.few
        for size, count in ((short, rounds), (middle, rounds), (long, plan.few if whole else 0)):
            if count:
                self._ttft.append(time_to_first_token(cluster, size, count))
        for streams in plan.streams:
            self._decode.append(decode_rate(cluster, streams, plan.decode_tokens, plan.few))
        count = plan.few if whole else 1
        self._interference.append(long_arrival(cluster, long, plan.quiet_s, count))

    def _progress(self, line: str) -> None:
        print(f"{time.monotonic() - self._start:6.1f} s  {line}", file=sys.stderr, flush=True)


def command(config: BenchConfig) -> str:
    """The command line that makes the same run."""
    words = ["python -m kvferry.bench"]
    for item in fields(config):
        value = getattr(config, item.name)
        if value != item.default:
            words.append(option_name(item.name) if value is True else _said(item.name, value))
    return " ".join(words)


def _said(name: str, value: object) -> str:
    return str(value) if name == "model" else f"{option_name(name)} {value}"


def main(argv: Sequence[str]) -> int:
    config = parse(
        BenchConfig, argv, os.environ, prog="python -m kvferry.bench",
        description="Measures kvferry over HTTP and judges the ratios that must hold.",
    )  # fmt: skip
    run = Run(config)
    machine = this_machine()
    results = Results([], [], []) if config.tiers else run.measure()
    tiers = run.measure_tiers()
    store = run.measure_store()
    verdicts = judge(results, run.judged, run.plan.sizes[1])
    if tiers is not None:
        verdicts += judge_tiers(tiers, run.plan.conversations[1])
    if store is not None:
        verdicts.append(judge_fetch(store))
    conditions = Conditions(
        command(config), run.model, config.seed, run.client_core, run.others,
        run.arrangements, config.quick,
    )  # fmt: skip
    text = markdown(results, tiers, store, verdicts, machine, conditions)
    print(text)
    if config.output is not None:
        write_section(config.output, "bench-tiers" if config.tiers else "bench", text)
    return 0 if config.quick or all(verdict.holds for verdict in verdicts) else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (BadAnswer, ConfigError, NoChats, ServerFailed, httpx.HTTPError) as error:
        print(f"bench: error: {explain(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
