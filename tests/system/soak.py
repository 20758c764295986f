"""The hand-off under fire: a bounded run of everything that goes wrong, all at once.

    python -m kvferry.tests.system.soak --minutes 20

Two prefill and two decode nodes and a store over the stand-in engine, real processes and sockets,
with so little room that every tier is always being evicted. Clients ask
for prompts of mixed lengths and 10 % of them leave at random points; frames between the nodes are
delayed, dropped, duplicated, reordered and damaged; every ten seconds a random node is killed or
stopped for a while. In the last quarter nothing is killed any more. Every finished answer must
equal its reference, every request must end, and afterwards nothing may be left behind: no block, no
transfer, no request, and no descriptor, thread or memory beyond what the warm-up had.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kvferry.kernels.engines.standin import StandinConfig, standin_reply, write_standin_model
from kvferry.tests.rigs.gateway import web
from kvferry.tests.rigs.servers.leftovers import held
from kvferry.tests.rigs.servers.served import Served

ADMIN = "soak-admin"
CLIENTS = 12
CHAOS_SECONDS = 10.0
WARM_UP_REQUESTS = 200
REQUEST_SECONDS = 90.0
"""No request may take longer, whatever happens to it."""

RULES = [
    {"action": "delay", "probability": 0.02, "seconds": 0.05},
    {"action": "drop", "probability": 0.004},
    {"action": "duplicate", "probability": 0.01},
    {"action": "reorder", "probability": 0.01},
    {"action": "corrupt", "probability": 0.004, "part": "payload", "messages": ["Blocks"]},
    {"action": "corrupt", "probability": 0.002, "part": "header"},
]


@dataclass
class Outcome:
    """What became of all requests."""

    classes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    kills: int = 0
    stops: int = 0


class Soak:
    """One run against one `kvferry serve`."""

    def __init__(self, served: Served, config: StandinConfig, seed: int) -> None:
        self.served = served
        self.config = config
        self.seed = seed
        self.outcome = Outcome()
        self._lock = threading.Lock()
        self._faulty: list[int] = []
        self._heads = [self._ids(random.Random(seed + n), 1500) for n in range(4)]

    def _ids(self, dice: random.Random, length: int) -> list[int]:
        return [3 + dice.randrange(256) for _ in range(length)]

    # -- clients --------------------------------------------------------------------------------

    def load(self, stop: threading.Event, limit: int | None = None) -> list[threading.Thread]:
        """Starts the clients; they end when `stop` is set or `limit` requests were made."""
        left = [limit]
        threads = [
            threading.Thread(target=self._client, args=(number, stop, left), daemon=True)
            for number in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        return threads

    def _client(self, number: int, stop: threading.Event, left: list[int | None]) -> None:
        dice = random.Random(self.seed * 1000 + number + time.monotonic_ns() % 1000)
        while not stop.is_set():
            with self._lock:
                if left[0] is not None:
                    if left[0] <= 0:
                        return
                    left[0] -= 1
            began = time.monotonic()
            what = self._leave(dice) if dice.random() < 0.1 else self._ask(dice)
            took = time.monotonic() - began
            with self._lock:
                self.outcome.classes[what] += 1
                if took > REQUEST_SECONDS:
                    self.outcome.slow.append(f"{what} after {took:.0f} s")
            if what != "right":
                time.sleep(0.05)

    @property
    def num_right(self) -> int:
        """Requests that were answered, and rightly."""
        with self._lock:
            return self.outcome.classes["right"]

    def _body(self, dice: random.Random) -> dict[str, Any]:
        head = dice.choice(self._heads)[: dice.choice([0, 40, 300, 1500])]
        prompt = head + self._ids(dice, dice.choice([1, 15, 17, 100, 400, 1500]))
        return {
            "prompt": prompt,
            "max_tokens": dice.choice([1, 5, 20, 80]),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": dice.random() < 0.5,
        }

    def _ask(self, dice: random.Random) -> str:
        body = self._body(dice)
        try:
            if body["stream"]:
                status, ids = self._streamed(body)
            else:
                response = web.post(
                    f"{self.served.url}/v1/completions", json=body, timeout=REQUEST_SECONDS + 30
                )
                status = str(response.status_code)
                ids = response.json()["choices"][0]["token_ids"] if status == "200" else []
        except (httpx.HTTPError, ValueError) as error:  # ValueError: it was cut within a line
            return f"connection {type(error).__name__}"
        if status != "200":
            return status
        if ids != standin_reply(body["prompt"], self.config, body["max_tokens"]):
            with self._lock:
                self.outcome.wrong.append(f"{len(body['prompt'])} tokens, stream {body['stream']}")
            return "wrong"
        return "right"

    def _streamed(self, body: dict[str, Any]) -> tuple[str, list[int]]:
        ids: list[int] = []
        url = f"{self.served.url}/v1/completions"
        with web.stream("POST", url, json=body, timeout=REQUEST_SECONDS + 30) as response:
            if response.status_code != 200:
                response.read()
                return str(response.status_code), []
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return "error event", []
                for choice in event["choices"]:
                    ids += choice.get("token_ids") or []
        return "200", ids

    def _leave(self, dice: random.Random) -> str:
        host, port = self.served.url.removeprefix("http://").split(":")
        content = json.dumps(self._body(dice)).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + content)
            time.sleep(dice.choice([0.0, 0.01, 0.05, 0.2, 0.5]))
        return "left"

    # -- chaos ----------------------------------------------------------------------------------

    def keep_faults(self) -> None:
        """Gives the rules to all nodes whenever one of them is new."""
        nodes = sorted(self.served.children().values())
        if nodes != self._faulty:
            self._faulty = nodes
            self.set_faults(RULES)

    def set_faults(self, rules: list[dict[str, Any]]) -> None:
        """New rules for every node."""
        self.served.http.post(
            "/debug/faults",
            json={"node": "all", "rules": rules, "clear": not rules},
            headers={"authorization": f"Bearer {ADMIN}"},
        )

    def chaos(self, seconds: float) -> None:
        """Kills or stops a random node every ten seconds, and keeps the frame faults up."""
        dice = random.Random(self.seed)
        until = time.monotonic() + seconds
        due = time.monotonic() + CHAOS_SECONDS
        while time.monotonic() < until:
            self.keep_faults()
            time.sleep(1.0)
            if time.monotonic() >= due:
                due += CHAOS_SECONDS
                self._strike(dice)

    def _strike(self, dice: random.Random) -> None:
        nodes = {
            name: pid for name, pid in self.served.children().items() if not name.startswith("gate")
        }
        if not nodes:
            return
        pid = nodes[dice.choice(sorted(nodes))]
        try:
            if dice.random() < 0.5:
                os.kill(pid, signal.SIGKILL)
                self.outcome.kills += 1
            else:
                os.kill(pid, signal.SIGSTOP)
                self.outcome.stops += 1
                time.sleep(dice.choice([0.5, 3.0, 6.0]))
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return  # it was between two lives

    # -- judging --------------------------------------------------------------------------------

    def ledger(self) -> dict[str, Any]:
        response = self.served.http.get(
            "/debug/ledger", headers={"authorization": f"Bearer {ADMIN}"}
        )
        response.raise_for_status()
        found: dict[str, Any] = response.json()
        return found

    def lasting(self) -> dict[str, Figures]:
        """The processes that live from the warm-up to the end. What the gateway remembers of
        prompts goes on growing to its bounds, of 192 MiB, for as long as prompts are new."""
        remembered = self.ledger()["gateway"]["remembered_bytes"]
        return {
            "supervisor": Figures.of(self.served.process.pid),
            "gateway": Figures.of(self.served.children()["gateway"], remembered),
        }

    def leftovers(self) -> list[str]:
        """What is still held anywhere."""
        return list(held(self.ledger(), ""))

    def await_empty(self, seconds: float) -> list[str]:
        """What is left after at most that long."""
        deadline = time.monotonic() + seconds
        while True:
            left = self.leftovers()
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.2)


@dataclass(frozen=True)
class Figures:
    """What a process holds of the machine."""

    descriptors: int
    threads: int
    rss: int

    @classmethod
    def of(cls, pid: int, remembered: int = 0) -> Figures:
        """The figures of a process, without the bytes that it remembers within bounds."""
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        return cls(
            len(list(Path(f"/proc/{pid}/fd").iterdir())),
            int(fields["Threads"]),
            # The arena's pages are the store's, whoever has touched them.
            ((int(fields["VmRSS"].split()[0]) - int(fields["RssShmem"].split()[0])) << 10)
            - remembered,
        )

    def grown(self, before: Figures) -> list[str]:
        """In what it exceeds the earlier figures by more than 2 % and, for memory, 16 MiB."""
        found = []
        if self.descriptors > before.descriptors * 1.02 + 4:
            found.append(f"descriptors {before.descriptors} → {self.descriptors}")
        if self.threads > before.threads * 1.02:
            found.append(f"threads {before.threads} → {self.threads}")
        if self.rss > max(before.rss * 1.02, before.rss + (16 << 20)):
            found.append(f"memory {before.rss >> 20} → {self.rss >> 20} MiB")
        return found


def run(minutes: float, seed: int, folder: Path) -> tuple[Outcome, list[str]]:
    """The whole soak; the outcome and everything that is wrong."""
    config = write_standin_model(
        folder / "standin", seconds_per_pass=0.001, seconds_per_token=0.00002
    )
    served = Served(
        folder / "standin",
        folder / "log",
        "--prefill-nodes=2",
        "--decode-nodes=2",
        "--kv-cache-memory-bytes=512KiB",  # 2,048 blocks: they are used up and evicted at once
        "--store-ram=16MiB",  # twice as many, and all that is pushed out of them goes to the disk
        "--store-disk=64MiB",
        f"--store-dir={folder / 'blocks'}",
        "--enable-debug",
        "--enable-test-hooks",
        f"--admin-api-key={ADMIN}",
    )
    try:
        return _soak(Soak(served, config, seed), 60 * minutes)
    finally:
        served.stop()


def _soak(soak: Soak, seconds: float) -> tuple[Outcome, list[str]]:
    for thread in soak.load(threading.Event(), WARM_UP_REQUESTS):
        thread.join()
    before = soak.lasting()
    stop = threading.Event()
    threads = soak.load(stop)
    soak.chaos(0.75 * seconds)
    deadline = time.monotonic() + 0.25 * seconds
    warm_at = soak.num_right + WARM_UP_REQUESTS  # some nodes have just started
    calm_from: dict[str, tuple[int, Figures]] = {}
    while time.monotonic() < deadline or not calm_from:
        soak.keep_faults()
        time.sleep(1.0)
        if not calm_from and soak.num_right >= warm_at:
            nodes = soak.served.children().items()
            calm_from = {name: (pid, Figures.of(pid)) for name, pid in nodes}
        if time.monotonic() > deadline + REQUEST_SECONDS:
            break  # too few are right, which is judged below
    stop.set()
    wrong = []
    for thread in threads:
        thread.join(REQUEST_SECONDS + 30)
        if thread.is_alive():
            wrong.append("a request never ended")
    soak.set_faults([])
    wrong += [f"left behind: {one}" for one in soak.await_empty(10)]
    for name, figures in soak.lasting().items():
        wrong += [f"{name}: {one}" for one in figures.grown(before[name])]
    if not calm_from:
        wrong.append("too few right answers, once nothing was killed any more")
    nodes_now = soak.served.children()
    for name, (pid, figures) in calm_from.items():
        if nodes_now.get(name) != pid:
            wrong.append(f"{name} has died, and nobody has killed it")
        elif name != "gateway":
            wrong += [f"{name}: {one}" for one in Figures.of(pid).grown(figures)]
    outcome = soak.outcome
    lines = soak.served.log.read_text().splitlines()
    wrong += [f"nobody damages the disk: {line}" for line in lines if "on disk is damaged" in line]
    wrong += [f"wrong answer: {one}" for one in outcome.wrong]
    wrong += [f"too slow: {one}" for one in outcome.slow]
    if outcome.classes["right"] < sum(outcome.classes.values()) // 2:
        wrong.append(f"most requests failed: {dict(outcome.classes)}")
    return outcome, wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="kvferry.tests.system.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvferry-soak-") as folder:
        outcome, wrong = run(arguments.minutes, arguments.seed, Path(folder))
        print(f"{dict(outcome.classes)}, {outcome.kills} kills, {outcome.stops} stops")
        for one in wrong:
            print(f"FAIL: {one}")
        if wrong:
            print((Path(folder) / "log").read_text()[-20_000:], file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
