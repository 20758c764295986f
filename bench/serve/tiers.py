"""Time to first token by the tier that has the conversation: device, host, disk after a kill.

Owns a server with a store, from its start over its deaths by SIGKILL to its last life on the same
directory. A kill of every process leaves the kernel's page cache as it was, so what a restart costs
is *killed*; *disk* is read after the kernel has forgotten the files as well. Every warm request is
a conversation's next turn: the prompt, its reply, and a few tokens that were never sent before. The
*floor* of a tier is what no server could be below on this machine: the device tier's TTFT (the new
tokens alone) and the blocks' bytes at the measured speed of a plain copy out of shared memory, or
of a plain read of the store's own files.
"""

from __future__ import annotations

import mmap
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvferry.bench.client.figures import Spread, spread
from kvferry.bench.client.load import Answer, Ask, completion
from kvferry.bench.document import Verdict
from kvferry.bench.serve.scenarios import BadAnswer, Cluster, warm_up
from kvferry.bench.server import Arrangement
from kvferry.bench.store_speed import drop_page_cache, rate

TIERS = ("device", "host", "killed", "disk")
SOURCES = {"device": "device", "host": "host", "killed": "disk", "disk": "disk"}
"""Where the server says that the tokens came from."""
NAME = "P apart, with a store"
BLOCK = 16
REPLY_TOKENS = 4
NEW_TOKENS = 32
WRITTEN_S = 120.0
"""What the store gets to write everything."""
RESTART_FACTOR, RESTART_SHARE = 1.5, 0.10
PAUSE_S = 0.5
"""Before each turn: nobody answers at once."""
_PIECE = 4 << 20


@dataclass(frozen=True, slots=True)
class TierRounds:
    """One size of conversation. TTFT in seconds, one value a round."""

    size: int
    cold: tuple[float, ...]
    warm: Mapping[str, tuple[float, ...]]
    bytes_loaded: float
    """Of one conversation's blocks."""

    def median(self, tier: str) -> float:
        return statistics.median(self.warm[tier])

    def spread(self, tier: str) -> Spread:
        return spread(self.warm[tier])


@dataclass(frozen=True, slots=True)
class TierResults:
    rounds: tuple[TierRounds, ...]
    speeds: Mapping[str, float]
    """Bytes a second of a plain copy or read, by tier."""

    def floor(self, one: TierRounds, tier: str) -> float:
        """Seconds."""
        moved = one.bytes_loaded / self.speeds[tier] if tier in self.speeds else 0.0
        return one.median("device") + moved


def with_store(folder: Path, common: Sequence[str]) -> Arrangement:
    """The server under test. Its key lets the client empty the devices."""
    sizes = ("--store-ram=1GiB", "--store-disk=4GiB", f"--store-dir={folder}")
    return Arrangement(NAME, ("--prefill-nodes=1", "--admin-api-key=bench", *sizes, *common))


@contextmanager
def store_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvferry-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Conversations:
    """The conversations of one run: what was said in each so far."""

    def __init__(self, sizes: Sequence[int], rounds: int) -> None:
        self._sizes = sizes
        self._rounds = rounds
        self._said: dict[tuple[int, int], list[int]] = {}
        self._cold: dict[int, list[float]] = {size: [] for size in sizes}
        self._warm: dict[str, dict[int, list[float]]] = {
            tier: {size: [] for size in sizes} for tier in TIERS
        }
        self._block_bytes = 0.0

    def before_the_kill(self, cluster: Cluster) -> None:
        """Cold, then out of the device, then out of host memory; at the end all is written."""
        warm_up(cluster, (512,))
        for size in self._sizes:
            for at in range(self._rounds):
                self._begin(cluster, size, at)
                self._turn(cluster, size, at, "device")
                cluster.server.forget_devices()
                self._turn(cluster, size, at, "host")
        self._block_bytes = cluster.server.wait_written(WRITTEN_S)

    def after_the_kill(self, cluster: Cluster) -> None:
        """Out of the files, as the kill has left them."""
        warm_up(cluster, (512,))
        for size in self._sizes:
            for at in range(self._rounds):
                self._turn(cluster, size, at, "killed")

    def from_disk(self, cluster: Cluster, folder: Path) -> None:
        """After a second kill, out of files whose pages the kernel has forgotten."""
        warm_up(cluster, (512,))
        for size in self._sizes:
            for at in range(self._rounds):
                drop_page_cache(folder)
                self._turn(cluster, size, at, "disk")

    def results(self, speeds: dict[str, float]) -> TierResults:
        return TierResults(
            tuple(
                TierRounds(
                    size,
                    tuple(self._cold[size]),
                    {tier: tuple(self._warm[tier][size]) for tier in TIERS},
                    self._block_bytes * (size // BLOCK),
                )
                for size in self._sizes
            ),
            speeds,
        )

    def _begin(self, cluster: Cluster, size: int, at: int) -> None:
        ask = cluster.ask(size, REPLY_TOKENS)
        (answer,) = cluster.run([ask])
        if answer.cached_tokens:
            raise BadAnswer(f"a new prompt found {answer.cached_tokens} tokens in a cache")
        self._cold[size].append(answer.ttft)
        self._said[size, at] = [*ask.body["prompt"], *answer.ids]
        cluster.progress(f"{NAME}: {size} tokens, round {at + 1}: cold {1e3 * answer.ttft:,.0f} ms")

    def _turn(self, cluster: Cluster, size: int, at: int, tier: str) -> None:
        said = self._said[size, at]
        ask = self._next(cluster, said)
        time.sleep(PAUSE_S)
        (answer,) = cluster.run([ask])
        _check(answer, tier, size)
        self._warm[tier][size].append(answer.ttft)
        cluster.progress(f"{NAME}: {size} tokens, {tier}: {1e3 * answer.ttft:,.0f} ms")

    def _next(self, cluster: Cluster, said: list[int]) -> Ask:
        new = cluster.prompts.take(cluster.server.encode, NEW_TOKENS)
        return completion([*said, *new], REPLY_TOKENS)


def _check(answer: Answer, tier: str, size: int) -> None:
    """The tier had nearly all of it: what is measured is what it is called."""
    sources = answer.timings["prompt_tokens"]
    if sources[SOURCES[tier]] < 0.9 * size:
        raise BadAnswer(f"{tier}: too few of {size} tokens came from there: {sources}")


# -- the floor -------------------------------------------------------------------------------------


def plain_speeds(folder: Path) -> dict[str, float]:
    """Bytes a second: one thread copies out of shared memory, and reads the files."""
    killed = _read_speed(folder)
    drop_page_cache(folder)
    return {"host": _copy_speed(), "killed": killed, "disk": _read_speed(folder)}


def _copy_speed(size: int = 256 << 20) -> float:
    source = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    source[:] = 1
    target = np.ones(size, np.uint8)
    return statistics.median(rate(size, lambda: np.copyto(target, source)) for _ in range(5))


def _read_speed(folder: Path) -> float:
    buffer, size, spent = bytearray(_PIECE), 0, 0.0
    for path in folder.glob("*.kv"):
        with open(path, "rb", buffering=0) as file:
            start = time.perf_counter()
            while count := file.readinto(buffer):
                size += count
            spent += time.perf_counter() - start
    if not size:
        raise BadAnswer(f"the store has written nothing to {folder}")
    return size / spent


# -- verdicts --------------------------------------------------------------------------------------


def judge_tiers(results: TierResults, size: int) -> list[Verdict]:
    """A kill of everything must cost the next turn of a conversation of `size` tokens little."""
    verdicts = []
    for one in results.rounds:
        if one.size == size:
            cold, killed = statistics.median(one.cold), one.median("killed")
            what = f"TTFT after SIGKILL at {size:,} tokens"
            verdicts += [
                Verdict(f"{what} / host tier's", killed / one.median("host"), RESTART_FACTOR),
                Verdict(f"{what} / cold", killed / cold, RESTART_SHARE),
                Verdict(f"{what}, page cache dropped / cold", one.median("disk") / cold,
                        RESTART_SHARE),
            ]  # fmt: skip
    return verdicts
