"""`make bench-peers`: kvferry beside other servers on this machine, the same prompts in turns.

    python -m kvferry.bench.peers --llama-server PATH [--rounds N] [--quick]

Owns how each peer is started, the figures that are compared, and the ratios. All servers are up at
once and asked one after another, so that what else the machine does meets all of them; every figure
is a median of its rounds. A peer that is not there is left out by name. Nothing is judged here that
was not measured in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from kvferry.bench.client.figures import percentile, tokens_per_second
from kvferry.bench.client.load import Answer, Ask, Target, chat, completion, stream, together
from kvferry.bench.client.prompts import Prompts, load_chats, load_conversations
from kvferry.bench.document import machine_lines, table
from kvferry.bench.machine import this_machine
from kvferry.bench.serve.scenarios import SHORT_PROMPT, arrive, check_whole
from kvferry.bench.server import Arrangement, running
from kvferry.kvstore.process.cores import available_cores
from kvferry.kvstore.process.lifecycle import die_with_parent
from kvferry.kvstore.process.model_files import default_gguf

READY_S = 120.0
DECODE_TOKENS = 160
NEWCOMER = 6000
SLOTS, SLOT_TOKENS = 16, 8192


@dataclass(frozen=True, slots=True)
class Plan:
    """How much of everything."""

    rounds: int
    prompts: tuple[int, ...]
    """Tokens of cold prompts; the next to last is asked again with 32 more."""
    long_context: int
    newcomer: int
    chats: int

    @classmethod
    def of(cls, rounds: int, quick: bool) -> Plan:
        if quick:
            return cls(1, (256, 512), 512, 1024, 2)
        return cls(rounds, (512, 2048, 4096, 7500), 4096, NEWCOMER, 20)


@dataclass(slots=True)
class Peer:
    """A server that is up."""

    name: str
    weights: str
    """Like with like: `Q4_1` or `Q8_0`."""
    target: Target
    ready_s: float
    pids: Callable[[], set[int]]
    figures: dict[str, list[float]] = field(default_factory=dict)

    def note(self, figure: str, value: float) -> None:
        self.figures.setdefault(figure, []).append(value)

    def median(self, figure: str) -> float:
        return statistics.median(self.figures.get(figure, [float("nan")]))

    def memory_mib(self) -> float:
        """Proportional share of memory of all its processes."""
        total = 0
        for pid in self.pids():
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
            total += next(int(line.split()[1]) for line in text.splitlines() if "Pss:" in line)
        return total / 1024


# -- starting --------------------------------------------------------------------------------------


def children(pid: int) -> set[int]:
    """A process and all below it."""
    found = {pid}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found |= children(int(path.parent.name))
    return found


@contextmanager
def kvferry(name: str, weights: str, *flags: str) -> Iterator[Peer]:
    began = time.monotonic()
    with running(Arrangement(name, flags), available_cores()) as server:
        ready = time.monotonic() - began
        process = server.process
        yield Peer(name, weights, server.target, ready, lambda: children(process.pid))


@contextmanager
def llama_server(
    program: Path, name: str, weights: str, model: Path, *flags: str
) -> Iterator[Peer]:
    """llama.cpp's server with both cores' threads, a slot a stream and prefix reuse."""
    cores = available_cores()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = str(len(cores))
    command = [
        str(program), "-m", str(model), "-t", threads, "-tb", threads, "-c",
        str(SLOTS * SLOT_TOKENS), "-np", str(SLOTS), "--cache-reuse", "256", "--no-kv-unified",
        "--host", "127.0.0.1", "--port", str(port), *flags,
    ]  # fmt: skip
    parent = os.getpid()

    def before_exec() -> None:
        die_with_parent(parent)
        os.sched_setaffinity(0, cores)

    began = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=before_exec
    )
    try:
        while not _healthy(port):
            if process.poll() is not None or time.monotonic() - began > READY_S:
                raise SystemExit(f"error: {name} did not become ready: {' '.join(command)}")
            time.sleep(0.05)
        ready = time.monotonic() - began
        target = Target("127.0.0.1", port, name)
        yield Peer(name, weights, target, ready, lambda: children(process.pid))
    finally:
        process.terminate()
        process.wait(20)


def _healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def requantised(program: Path, source: Path, folder: Path) -> Path:
    """The model as Q8_0, by `llama-quantize` from beside the server."""
    target = folder / "model-Q8_0.gguf"
    quantize = program.with_name("llama-quantize")
    subprocess.run(
        [quantize, "--allow-requantize", source, target, "Q8_0"],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return target


# -- measuring -------------------------------------------------------------------------------------


class Comparison:
    """Asks all peers the same, in an order that turns with every round."""

    def __init__(self, peers: Sequence[Peer], plan: Plan, seed: int) -> None:
        self.peers = list(peers)
        self.plan = plan
        self._prompts = Prompts(load_chats(), seed)
        self._turn = 0
        first = peers[0].target
        self._url = f"http://{first.host}:{first.port}/tokenize"
        self._model = first.model

    def run(self) -> None:
        self._each("warming up", 1, self._warm_up)
        for size in self.plan.prompts:
            self._each(f"cold {size}", self.plan.rounds, self._cold(size))
        self._each("warm", self.plan.rounds, self._warm)
        self._each("decode", self.plan.rounds, self._decode)
        self._each("interference", max(1, self.plan.rounds // 2), self._interference)
        self._each("chats", 1, self._chats)
        for peer in self.peers:
            peer.note("memory, MiB", peer.memory_mib())
            peer.note("ready, s", peer.ready_s)

    def _each(self, what: str, rounds: int, run: Callable[[], Callable[[Peer], None]]) -> None:
        for at in range(rounds):
            ask = run()
            self._turn += 1
            order = self._turn % len(self.peers)
            for peer in self.peers[order:] + self.peers[:order]:
                began = time.monotonic()
                ask(peer)
                took = time.monotonic() - began
                _progress(f"{what}, round {at + 1} of {rounds}: {peer.name} {took:.1f} s")

    def _ids(self, size: int) -> list[int]:
        return self._prompts.take(self._encode, size)

    def _encode(self, text: str) -> list[int]:
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        answer = httpx.post(self._url, json=body, timeout=60)
        answer.raise_for_status()
        return list(answer.json()["tokens"])

    def _ask(self, peer: Peer, ask: Ask) -> Answer:
        answer = asyncio.run(stream(peer.target, ask))
        check_whole(ask, answer)
        return answer

    def _warm_up(self) -> Callable[[Peer], None]:
        asks = [completion(self._ids(size), 8) for size in (64, 600)]

        def run(peer: Peer) -> None:
            for ask in asks:
                self._ask(peer, ask)

        return run

    def _cold(self, size: int) -> Callable[[], Callable[[Peer], None]]:
        def one() -> Callable[[Peer], None]:
            ask = completion(self._ids(size), 4)
            return lambda peer: peer.note(f"cold TTFT {size}, s", self._ask(peer, ask).ttft)

        return one

    def _warm(self) -> Callable[[Peer], None]:
        size = self.plan.long_context
        ids = self._ids(size + 32)
        first, again = completion(ids[:size], 4), completion(ids, 4)

        def run(peer: Peer) -> None:
            self._ask(peer, first)
            peer.note(f"warm TTFT {size} + 32, s", self._ask(peer, again).ttft)

        return run

    def _decode(self) -> Callable[[Peer], None]:
        alone = completion(self._ids(SHORT_PROMPT), DECODE_TOKENS)
        long = completion(self._ids(self.plan.long_context), DECODE_TOKENS // 2)
        groups = {n: [completion(self._ids(SHORT_PROMPT), DECODE_TOKENS) for _ in range(n)]
                  for n in (4, SLOTS)}  # fmt: skip

        def run(peer: Peer) -> None:
            peer.note("1 stream, tokens/s", tokens_per_second([self._ask(peer, alone)]))
            at = self.plan.long_context
            peer.note(f"1 stream at {at}, tokens/s", tokens_per_second([self._ask(peer, long)]))
            for streams, asks in groups.items():
                answers = asyncio.run(together(peer.target, asks))
                for ask, answer in zip(asks, answers, strict=True):
                    check_whole(ask, answer)
                peer.note(f"{streams} streams, tokens/s", tokens_per_second(answers))

        return run

    def _interference(self) -> Callable[[Peer], None]:
        streams = [completion(self._ids(SHORT_PROMPT), 4000) for _ in range(4)]
        newcomer = completion(self._ids(self.plan.newcomer), 4)

        def run(peer: Peer) -> None:
            found = asyncio.run(arrive(peer.target, streams, newcomer, 3.0))
            peer.note("quiet gap p99, ms", 1e3 * percentile(found.quiet, 0.99))
            peer.note("busy gap p99, ms", 1e3 * percentile(found.busy, 0.99))
            peer.note(f"newcomer's TTFT {self.plan.newcomer}, s", found.newcomer.ttft)

        return run

    def _chats(self) -> Callable[[Peer], None]:
        chats = [
            [said for who, said in turns if who == "human" and said][:6]
            for turns in load_conversations()
        ]
        chosen = [it for it in chats if len(it) == 6 and 400 < sum(map(len, it)) < 9000]
        chosen = chosen[: self.plan.chats]

        def run(peer: Peer) -> None:
            total, firsts = asyncio.run(_chat_all(peer.target, chosen))
            peer.note("chats, s", total)
            peer.note("chats' TTFT p50, s", statistics.median(firsts))

        return run


async def _chat_all(target: Target, chats: Sequence[Sequence[str]]) -> tuple[float, list[float]]:
    """All chats, four at once, each turn with the whole history; the time, and every TTFT."""
    waiting, firsts = list(chats), []

    async def client() -> None:
        while waiting:
            messages: list[dict[str, str]] = []
            for said in waiting.pop():
                messages.append({"role": "user", "content": said})
                answer = await stream(target, chat(messages, 64))
                if answer.failure:
                    raise SystemExit(f"error: a chat failed: {answer.failure}")
                firsts.append(answer.ttft)
                messages.append({"role": "assistant", "content": answer.text})

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(4)))
    return time.perf_counter() - began, firsts


# -- telling ---------------------------------------------------------------------------------------


def report(peers: Sequence[Peer]) -> str:
    """A table of medians, and of each kind of weights our ratio to the best peer."""
    figures = list(peers[0].figures)
    rows = [[figure, *(f"{peer.median(figure):,.4g}" for peer in peers)] for figure in figures]
    lines = [table(["figure", *(peer.name for peer in peers)], rows), ""]
    ratios = []
    for weights in dict.fromkeys(peer.weights for peer in peers):
        same = [peer for peer in peers if peer.weights == weights]
        ours = [peer for peer in same if peer.name.startswith("kvferry")]
        others = [peer for peer in same if not peer.name.startswith("kvferry")]
        if not ours or not others:
            continue
        for figure in figures:
            best = max if "tokens/s" in figure else min
            other = best(peer.median(figure) for peer in others)
            ratios.append([weights, figure, f"{ours[0].median(figure) / other:.2f}"])
    return "\n".join([*lines, table(["weights", "figure", "kvferry / best peer"], ratios)])


def _progress(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="kvferry.bench.peers", description=__doc__)
    parser.add_argument("--llama-server", type=Path, default=shutil.which("llama-server"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="shows that it works")
    asked = parser.parse_args()
    core = max(available_cores())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours = (("kvferry gguf", "Q4_1"), ("kvferry int8", "Q8_0", "--quantization=int8"))
        peers = [stack.enter_context(kvferry(*arguments)) for arguments in ours]
        if asked.llama_server is None:
            _progress("llama-server is not there: left out (--llama-server PATH)")
        else:
            program = Path(asked.llama_server)
            whole = requantised(program, default_gguf(), folder)
            for weights, model in (("Q4_1", default_gguf()), ("Q8_0", whole)):
                for fa in ("on", "off"):
                    name = f"llama-server {weights} fa {fa}"
                    peers.append(stack.enter_context(
                        llama_server(program, name, weights, model, "-fa", fa)))  # fmt: skip
        os.sched_setaffinity(0, {core})
        Comparison(peers, Plan.of(asked.rounds, asked.quick), asked.seed).run()
    print("\n".join(machine_lines(this_machine())))
    print(report(peers))


if __name__ == "__main__":
    main()
