"""What `make acceptance` measures and judges: seconds and ratios that tests only bound loosely.

Each case runs against a whole server over the stand-in engine, with steps as long as a small
model's, and yields what it found beside what must hold. A figure is the median of the rounds where
there are several.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from kvferry.kernels.engines.standin import StandinConfig, standin_reply
from kvferry.tests.rigs.gateway import web
from kvferry.tests.rigs.gateway.rig import wait_until
from kvferry.tests.rigs.servers.many_requests import growth, small_server
from kvferry.tests.rigs.servers.served import Served
from kvferry.tests.rigs.servers.streams import Stream, at_once, idle, ledger, prompt_of, serving

PASS_S, TOKEN_S = 0.01, 0.0002
"""A step of the stand-in: so long, and longer by so much a token."""
CHUNK_S = PASS_S + 512 * TOKEN_S
MODEL = "stand-in, 10 ms a pass and 0.2 ms a token"


class Measured(NamedTuple):
    """One figure and its limit, both in `unit`."""

    case: str
    what: str
    rounds: int
    found: float
    limit: float
    unit: str = "s"

    @property
    def holds(self) -> bool:
        return self.found <= self.limit


class Rig:
    """One server, and a folder of its own."""

    def __init__(self, served: Served, config: StandinConfig) -> None:
        self.served = served
        self.config = config

    def run(self, streams: Sequence[Stream], seconds: float = 120) -> None:
        """Reads all of them to their ends, and checks their texts."""
        threads = self.start(streams)
        for thread in threads:
            thread.join(seconds)
        self.check(streams)

    def start(self, streams: Sequence[Stream]) -> list[threading.Thread]:
        return at_once([partial(one.read, self.served.url) for one in streams])

    def check(self, streams: Sequence[Stream]) -> None:
        for one in streams:
            expected = standin_reply(one.prompt, self.config, one.count)
            assert one.ids == expected and not one.error, (one.error, len(one.ids))

    def ready(self) -> bool:
        return self.served.http.get("/ready").status_code == 200

    def kill(self, role: str) -> None:
        os.kill(self.served.children()[role], signal.SIGKILL)

    def descriptors(self, role: str) -> int:
        return len(os.listdir(f"/proc/{self.served.children()[role]}/fd"))


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(np.array(values), share))


# -- one D, one P ----------------------------------------------------------------------------------


def one_of_each(rig: Rig) -> Iterator[Measured]:
    yield from short_beside_long(rig)
    yield abandoned(rig)
    yield abandoned_together(rig)
    yield from health_under_load(rig)
    yield dead_prefill_node_frees_the_decode_node(rig)
    yield from dead_decode_node(rig)


def short_beside_long(rig: Rig) -> Iterator[Measured]:
    def short(seed: int) -> float:
        stream = Stream(prompt_of(200, seed), 2)
        rig.run([stream])
        return stream.ttft

    quiet = percentile([short(seed) for seed in range(20)], 95)
    long = Stream(prompt_of(6000, 77), 1)
    (thread,) = rig.start([long])
    time.sleep(2 * CHUNK_S)
    found: list[float] = []
    while thread.is_alive() and len(found) < 20:
        found.append(short(100 + len(found)))
    thread.join()
    rig.check([long])
    limit = quiet + 3 * CHUNK_S
    yield Measured("D2", "TTFT p95 of short prompts beside 6,000 tokens", len(found),
                   percentile(found, 95), limit)  # fmt: skip


def long_request(rig: Rig) -> socket.socket:
    """A request of 5,000 tokens over a connection of its own."""
    host, port = rig.served.url.removeprefix("http://").split(":")
    body = b'{"prompt": "a", "max_tokens": 5000, "ignore_eos": true, "stream": true}'
    connection = socket.create_connection((host, int(port)))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    return connection


def abandoned_together(rig: Rig) -> Measured:
    """From the close of a hundred sockets to gauges that say nothing."""

    def gauges() -> float:
        names = ("running", "waiting", "unanswered")
        return sum(rig.served.metric(f"kvferry_num_requests_{name}") for name in names)

    connections = [long_request(rig) for _ in range(100)]
    wait_until(lambda: ledger(rig.served)["nodes"][0]["requests"] == 100)
    for connection in connections:
        connection.close()
    found = wait_until(lambda: not gauges())
    return Measured("D10", "a hundred that left: gauges at nothing", 1, found, 2.0)


def abandoned(rig: Rig) -> Measured:
    """From the close of a socket to the ledger without its request."""
    found = []
    for _ in range(10):
        with long_request(rig) as connection:
            connection.recv(100)
        found.append(wait_until(lambda: not ledger(rig.served)["nodes"][0]["requests"], 20))
    return Measured("C3", "a client that left is seen by the node", 10, max(found), 1.0)


def health_under_load(rig: Rig) -> Iterator[Measured]:
    streams = [Stream(prompt_of(300 + 10 * seed, 200 + seed), 100) for seed in range(16)]
    threads = rig.start(streams)
    times = []
    while any(thread.is_alive() for thread in threads):
        begun = time.monotonic()
        assert rig.served.http.get("/health").status_code == 200
        times.append(1000 * (time.monotonic() - begun))
        time.sleep(0.01)
    rig.check(streams)
    yield Measured(
        "D1", "/health p99 beside 16 streams", len(times), percentile(times, 99), 200, "ms"
    )


def dead_prefill_node_frees_the_decode_node(rig: Rig) -> Measured:
    found = []
    for number in range(3):
        stream = Stream(prompt_of(4000, 300 + number), 1)
        (thread,) = rig.start([stream])
        time.sleep(3 * CHUNK_S)
        pid = rig.served.children()["prefill"]
        rig.kill("prefill")
        found.append(wait_until(lambda: not ledger(rig.served)["nodes"][0]["transfers"], 20))
        thread.join(60)
        rig.check([stream])
        wait_until(partial(replaced, rig, pid), 20)
        wait_until(lambda: not rig.served.http.get("/ready").json()["absent"], 20)
    return Measured("B1", "SIGKILL P: D's transfer is gone", 3, median(found), 5.0)


def replaced(rig: Rig, pid: int) -> bool:
    return rig.served.children().get("prefill") not in (None, pid)


def dead_decode_node(rig: Rig) -> Iterator[Measured]:
    told: list[float] = []
    unready, back = [], []
    for number in range(3):
        streams = [Stream(prompt_of(30, 400 + number * 10 + seed), 400) for seed in range(4)]
        threads = rig.start(streams)
        wait_until(partial(all_begun, streams), 20)
        rig.kill("decode")
        killed = time.monotonic()
        unready.append(wait_until(lambda: not rig.ready(), 20))
        wait_until(rig.ready, 30)
        back.append(time.monotonic() - killed)
        for thread in threads:
            thread.join(60)
        rig.check([one for one in streams if not one.error])
        told += [one.ended - killed for one in streams if one.error]
        assert not any(one.reasons for one in streams if one.error)
        rig.run([Stream(prompt_of(300, 500 + number), 3)])
    if told:  # else the node was back so soon that all of them went on
        yield Measured("C7", "SIGKILL the last D: an error event", len(told), max(told), 2.0)
    yield Measured("D1", "SIGKILL D: /ready is 503", 3, max(unready), 5.0)
    yield Measured("B4", "SIGKILL D: served again", 3, max(back), 10.0)


def all_begun(streams: Sequence[Stream]) -> bool:
    return all(len(one.ids) > 5 for one in streams)


# -- several ---------------------------------------------------------------------------------------


def several(rig: Rig) -> Iterator[Measured]:
    yield from stopped_prefill_node(rig)
    yield from stopped_decode_node(rig)


def stopped_prefill_node(rig: Rig) -> Iterator[Measured]:
    def gaps(seed: int) -> list[float]:
        streams = [Stream(prompt_of(30, seed + number), 150) for number in range(6)]
        threads = rig.start(streams)
        prompts = [Stream(prompt_of(1500, seed + 50 + number), 1) for number in range(4)]
        rig.run(prompts)
        for thread in threads:
            thread.join(60)
        rig.check(streams)
        return [gap for one in streams for gap in one.gaps]

    gaps(1000)
    roles = ("gateway", "decode-0", "decode-1")
    before = {role: rig.descriptors(role) for role in roles}
    quiet = percentile(gaps(2000), 99)
    stopped = rig.served.children()["prefill-0"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        busy = percentile(gaps(3000), 99)
    finally:
        os.kill(stopped, signal.SIGCONT)
    wait_until(lambda: not rig.served.http.get("/ready").json()["absent"], 20)
    gaps(4000)
    wait_until(lambda: idle(rig.served), 20)
    time.sleep(12)  # a node that is avoided for ten seconds is linked to again after them
    gaps(5000)
    more = max(rig.descriptors(role) - before[role] for role in roles)
    yield Measured("B4", "ITL p99 with one P stopped, to both serving", 1, busy / quiet, 2.0, "x")
    yield Measured("B4", "descriptors more than before", 3, more, 4, "")


def stopped_decode_node(rig: Rig) -> Iterator[Measured]:
    """200 requests, then one of two decode nodes stands still for ten seconds."""
    streams = [Stream(prompt_of(400 + number % 200, 6000 + number), 20) for number in range(200)]
    prefill = [rig.served.children()[role] for role in ("prefill-0", "prefill-1")]
    before = sum(map(resident, prefill))
    threads = rig.start(streams)
    time.sleep(1)
    pid = rig.served.children()["decode-0"]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(10)
    grown = sum(map(resident, prefill)) - before
    os.kill(pid, signal.SIGCONT)
    for thread in threads:
        thread.join(120)
    rig.check(streams)
    yield Measured("D7", "SIGSTOP D for 10 s, 200 requests: P's memory grows by", 1,
                   grown / (1 << 20), 160, "MiB")  # fmt: skip


def resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) << 10


# -- a small pool ----------------------------------------------------------------------------------


def burst(rig: Rig) -> Iterator[Measured]:
    """200 of 512 tokens in and 64 out, at once, over a pool with room for four."""
    streams = [Stream(prompt_of(512, 7000 + number), 64) for number in range(200)]
    begun = time.monotonic()
    rig.run(streams, 300)
    ends = sorted(one.ended - begun for one in streams)
    halves = ends[99], ends[-1] - ends[99]
    yield Measured("B8", "second half of a burst of 200, to the first", 1, halves[1] / halves[0],
                   1.5, "x")  # fmt: skip


def full_queue(rig: Rig) -> Iterator[Measured]:
    def ask(seed: int) -> tuple[int, float]:
        begun = time.monotonic()
        body = {"prompt": prompt_of(300, 8000 + seed), "max_tokens": 20, "ignore_eos": True}
        status = web.post(rig.served.url + "/v1/completions", json=body, timeout=120).status_code
        return status, time.monotonic() - begun

    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(ask, range(200)))
    refused = [took for status, took in answers if status == 503]
    assert {status for status, _ in answers} == {200, 503}
    yield Measured("D11", "a full queue refuses: p95", len(refused), percentile(refused, 95), 1.0)


def many_requests() -> Iterator[Measured]:
    """20,000 short requests over tiers that fail, after 2,000 to warm up."""
    with (
        tempfile.TemporaryDirectory(prefix="kvferry-measure-") as folder,
        small_server(Path(folder)) as rush,
    ):
        rush.run(2000, seed=0)
        before = rush.figures()
        rush.run(20_000, seed=1)
        after = rush.figures()
        yield Measured("D4", "20,000 short requests: wrong answers", 1, len(rush.wrong), 0, "")
        for name, limit, unit in (("open_fds", 4, ""), ("threads", 0, "")):
            found = growth(before, after, name)
            yield Measured("D4", f"of a process, {name} more than before", 1, found, limit, unit)
        share = max(
            (after[who]["rss_bytes"] - before[who]["rss_bytes"])
            / max(0.02 * before[who]["rss_bytes"], 16 << 20)
            for who in before
        )
        yield Measured("D4", "of a process, memory grown, to 16 MiB or 2 %", 1, share, 1.0, "x")


def starts() -> Measured:
    """Gateway, two nodes of each kind and a store, one start after the other."""
    failed = 0
    for number in range(20):
        with (
            tempfile.TemporaryDirectory(prefix="kvferry-measure-") as folder,
            serving(Path(folder), "--prefill-nodes=2", "--decode-nodes=2") as (served, config),
        ):
            answer = served.http.get("/ready").json()
            prompt = prompt_of(300, number)
            right = served.ids(prompt, 5) == standin_reply(prompt, config, 5)
            failed += answer != {"status": "ready", "absent": []} or not right
    return Measured("D8", "starts of all at once that failed", 20, failed, 0, "")


SETS: tuple[tuple[Callable[[Rig], Iterator[Measured]], tuple[str, ...]], ...] = (
    (one_of_each, ("--prefill-nodes=1",)),
    (several, ("--prefill-nodes=2", "--decode-nodes=2", "--max-num-seqs=64")),
    (burst, ("--kv-cache-memory-bytes=38400", "--max-model-len=592", "--max-num-queued-reqs=300")),
    (full_queue, ("--max-num-queued-reqs=50", "--max-num-seqs=4")),
)


def measure() -> Iterator[Measured]:
    """Everything, one server after the other."""
    yield starts()
    yield from many_requests()
    for cases, flags in SETS:
        with (
            tempfile.TemporaryDirectory(prefix="kvferry-measure-") as folder,
            serving(Path(folder), *flags, seconds_per_pass=PASS_S, seconds_per_token=TOKEN_S) as it,
        ):
            yield from cases(Rig(*it))
