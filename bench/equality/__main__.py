"""`make bench-equality`: the server's greedy float32 output against plain `transformers`.

Owns the prompts' lengths, the ways in which each is asked, and the comparison: alone and sixteen at
once, cold and repeated, with prefill apart and with the decode node alone, and out of each tier of
a store, which is killed with everything else before its disk is read. A difference counts unless
the oracle was undecided there; such ties are listed, and what follows one is not compared.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import tokenizers

from kvferry.bench.client.load import Answer, completion, together
from kvferry.bench.client.prompts import NoChats, Prompts, load_chats
from kvferry.bench.document import machine_lines, write_section
from kvferry.bench.equality.comparison import Outcome, Output, comparison, judge
from kvferry.bench.equality.expected import expected
from kvferry.bench.machine import this_machine
from kvferry.bench.serve.scenarios import BadAnswer, check_whole
from kvferry.bench.serve.tiers import store_folder
from kvferry.bench.server import Arrangement, Server, ServerFailed, explain, running
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process.cores import available_cores
from kvferry.kvstore.process.model_files import resolve_model
from kvferry.kvstore.process.settings import (
    default_cache_dir,
    flag,
    flag_from_environ,
    parse,
    positional,
)

LENGTHS = (5, 9, 16, 17, 33, 64, 100, 128, 129, 200, 256, 300, 400, 511, 512, 513,
           700, 900, 1100, 1300, 1600, 2000, 2500, 3000)  # fmt: skip
QUICK_LENGTHS = (5, 9, 15, 16, 17, 31, 33, 40, 48, 64, 65, 80, 100, 128, 129, 300)
BATCH = 16
BLOCK = 16
"""Tokens that must be repeated before any of them is found."""
APART = Arrangement("P apart", ("--prefill-nodes=1",))
ALONE = Arrangement("D alone", ("--prefill-nodes=0",))
STORED = "P apart, with a store"
WRITTEN_S = 120.0


@dataclass(frozen=True, slots=True)
class EqualityConfig:
    """What a run can be told."""

    model: str | None = positional(None, "what `kvferry serve` takes [SmolLM2-135M-Instruct]")
    seed: int = flag(1, "chooses the prompts")
    tokens: int = flag(64, "tokens generated after each prompt", minimum=1)
    quick: bool = flag(False, "few short prompts and tokens: shows that it works")
    tiers: bool = flag(False, "out of the store only: host, and disk after a kill")
    output: Path | None = flag(None, "document that gets the report, between its marks")
    cache_dir: Path = flag_from_environ(default_cache_dir, "converted models and oracle's answers")


@dataclass(frozen=True, slots=True)
class Way:
    """One way of asking all prompts. A salt keeps one way's blocks from being found by another."""

    name: str
    salt: str
    batch: int
    tier: str = ""
    """What has it, as the same was asked before; empty: nothing has."""


WAYS = (
    Way("alone, cold", "alone", 1),
    Way("alone, repeated", "alone", 1, "device"),
    Way(f"{BATCH} at once, cold", "batch", BATCH),
    Way(f"{BATCH} at once, repeated", "batch", BATCH, "device"),
)
FROM_HOST = Way(f"{BATCH} at once, from the host tier", "batch", BATCH, "host")
FROM_DISK = Way(f"{BATCH} at once, from the disk tier after a kill", "batch", BATCH, "disk")


class Equality:
    """One run: the prompts, what is expected of them, and what came back."""

    def __init__(self, config: EqualityConfig) -> None:
        self.config = config
        self.tokens = 8 if config.quick else config.tokens
        self.lengths = QUICK_LENGTHS if config.quick else LENGTHS
        self._start = time.monotonic()
        folder = resolve_model(config.model, config.cache_dir, self.progress).folder
        prompts = Prompts(load_chats(), config.seed)
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False).ids)

        self.prompts = [prompts.take(encode, length) for length in self.lengths]
        self.expected = expected(folder, config.cache_dir, self.prompts, self.tokens, self.progress)

    def progress(self, line: str) -> None:
        print(f"{time.monotonic() - self._start:6.1f} s  {line}", file=sys.stderr, flush=True)

    def ask_everything(self) -> list[Outcome]:
        servers = () if self.config.tiers else (APART, ALONE)
        plain = [outcome for one in servers for outcome in self._ask_server(one)]
        return [*plain, *self._ask_tiers()]

    def _ask_server(self, arrangement: Arrangement) -> Iterator[Outcome]:
        with self._running(arrangement) as server:
            for way in WAYS:
                yield self._told(server, way)

    def _ask_tiers(self) -> Iterator[Outcome]:
        """Cold, then out of the arena, then out of the files of a server that was killed."""
        with store_folder() as folder:
            sizes = ("--store-ram=2GiB", "--store-disk=8GiB", f"--store-dir={folder}")
            key = "--admin-api-key=bench"
            arrangement = Arrangement(STORED, (*APART.flags, key, *sizes))
            with self._running(arrangement) as server:
                yield self._told(server, WAYS[2])
                server.forget_devices()
                yield self._told(server, FROM_HOST)
                server.wait_written(WRITTEN_S)
                server.kill()
            with self._running(arrangement) as server:
                yield self._told(server, FROM_DISK)

    @contextmanager
    def _running(self, arrangement: Arrangement) -> Iterator[Server]:
        config = self.config
        flags = ("--dtype=float32", f"--max-num-seqs={BATCH}", f"--cache-dir={config.cache_dir}")
        model = (config.model,) if config.model else ()
        started = Arrangement(arrangement.name, (*arrangement.flags, *flags, *model))
        self.progress(f"{arrangement.name}: starting the server")
        with running(started, available_cores()) as server:
            yield server

    def _told(self, server: Server, way: Way) -> Outcome:
        outcome = self._ask(server, way)
        self.progress(f"{outcome.arrangement}, {way.name}: {self._summary(outcome)}")
        return outcome

    def _ask(self, server: Server, way: Way) -> Outcome:
        outputs: list[Output] = []
        sources: Counter[str] = Counter()
        for number, group in enumerate(groups(len(self.prompts), way.batch)):
            asks = [
                completion(self.prompts[at], self.tokens, cache_salt=f"{way.salt} {number}")
                for at in group
            ]
            answers = asyncio.run(together(server.target, asks))
            for at, ask, answer in zip(group, asks, answers, strict=True):
                check_whole(ask, answer)
                _check_cached(answer, way.tier)
                outputs.append(Output(at, tuple(answer.ids)))
                sources.update(answer.timings["prompt_tokens"])
        if way.tier and not sources[way.tier]:
            raise BadAnswer(f"{way.name}: nothing came from {way.tier}: {dict(sources)}")
        used = tuple((name, count) for name, count in sources.items() if count)
        return Outcome(server.arrangement.name, way.name, tuple(outputs), used)

    def _summary(self, outcome: Outcome) -> str:
        kinds = Counter(judge(self.expected[one.prompt], one.ids).kind for one in outcome.outputs)
        return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))


def groups(count: int, size: int) -> list[range]:
    """Ranges of exactly `size` that cover 0 to `count`: the last may overlap the one before."""
    starts = [*range(0, max(1, count - size), size), max(0, count - size)]
    return [range(start, min(count, start + size)) for start in dict.fromkeys(starts)]


def _check_cached(answer: Answer, tier: str) -> None:
    found = answer.timings["prompt_tokens"]
    kept = {name: found[name] for name in ("device", "host", "disk")}
    if not tier and any(kept.values()):
        raise BadAnswer(f"a cold prompt of {answer.prompt_tokens} tokens was found: {kept}")
    # What the decode node gave up waiting for is in the host tier when the prefill node asks: a
    # server that has just started has nothing there but what it has read from its disk.
    wanted = ("disk", "host") if tier == "disk" else (tier,)
    if tier and not any(kept[name] for name in wanted) and answer.prompt_tokens > BLOCK:
        raise BadAnswer(f"of {answer.prompt_tokens} tokens none came from {tier}: {kept}")


def conditions(run: Equality) -> list[str]:
    long = sum(length > 1000 for length in run.lengths)
    return [
        f"* {len(run.prompts)} prompts of real chats, {run.lengths[0]} to {run.lengths[-1]:,} "
        f"tokens ({long} above 1,000), {run.tokens} new tokens each, greedy, float32, "
        f"seed {run.config.seed}",
        *machine_lines(this_machine()),
    ]


def main(argv: Sequence[str]) -> int:
    config = parse(
        EqualityConfig, argv, os.environ, prog="python -m kvferry.bench.equality",
        description="Compares kvferry's greedy float32 output with that of transformers.",
    )  # fmt: skip
    run = Equality(config)
    outcomes = run.ask_everything()
    text = comparison(outcomes, run.expected, run.lengths, (WAYS[0].name, WAYS[2].name))
    text = "\n".join(conditions(run)) + "\n\n" + text
    print(text)
    if config.output is not None:
        write_section(config.output, "equality", text)
    wrong = sum(
        judge(run.expected[output.prompt], output.ids).kind == "different"
        for outcome in outcomes
        for output in outcome.outputs
    )
    print("PASS: no difference counts" if not wrong else f"FAIL: {wrong} outputs differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (BadAnswer, ConfigError, NoChats, ServerFailed, httpx.HTTPError) as error:
        print(f"equality: error: {explain(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
