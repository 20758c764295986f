"""Thousands of short requests, some left, some invalid, some over a store that fails: case D4.

Owns the mix and what must be flat over it: memory, descriptors, threads, and a ledger that comes
back to nothing. The prompts are chosen so that most of them were evicted from the device and many
from host memory since they came last.
"""

from __future__ import annotations

import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from kvferry.kernels.engines.standin import StandinConfig, standin_reply
from kvferry.tests.rigs.gateway.rig import wait_until
from kvferry.tests.rigs.servers.leftovers import held
from kvferry.tests.rigs.servers.served import Served
from kvferry.tests.rigs.servers.streams import ADMIN, ledger, prompt_of, serving

CLIENTS = 8
PROMPTS = 600
TOKENS = 4
FLAGS = ("--prefill-nodes=1", "--max-model-len=1024", "--kv-cache-memory-bytes=64KiB",
         "--store-ram=4MiB", "--store-disk=64MiB")  # fmt: skip
LEAVE, INVALID, FAIL = 0.10, 0.05, 0.01
INVALID_BODIES: tuple[bytes, ...] = (
    b'{"prompt": [1, 2], "temperature": -1}',
    b'{"prompt": [1, 2], "max_tokens": "many"}',
    b'{"prompt": [999999999]}',
    b'{"prompt": ',
    json.dumps({"prompt": [5] * 5000}).encode(),
)
FAILURES = ({"fail_reads": 1}, {"damage_reads": 1}, {"damage_host": 1}, {"fail_writes": 1})


@contextmanager
def small_server(folder: Path) -> Iterator[Rush]:
    with serving(folder, *FLAGS) as (served, config):
        yield Rush(served, config)


class Rush:
    """Clients of one server."""

    def __init__(self, served: Served, config: StandinConfig) -> None:
        self.served = served
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._lock = threading.Lock()
        self._prompts = [prompt_of(60 + at % 140, at) for at in range(PROMPTS)]
        self._replies = [standin_reply(prompt, config, TOKENS) for prompt in self._prompts]
        host, port = served.url.removeprefix("http://").split(":")
        self._place = host, int(port)

    def run(self, count: int, seed: int) -> None:
        """So many requests, `CLIENTS` at a time."""
        shares = [count // CLIENTS + (at < count % CLIENTS) for at in range(CLIENTS)]
        with ThreadPoolExecutor(CLIENTS) as pool:
            for done in [
                pool.submit(self._client, share, seed * CLIENTS + at)
                for at, share in enumerate(shares)
            ]:
                done.result()

    def figures(self) -> dict[str, dict[str, Any]]:
        """Of every process, by its name, when nothing is held anywhere."""
        wait_until(lambda: not list(held(ledger(self.served), "")), 20)
        found = ledger(self.served)
        nodes = {node["name"]: node["process"] for node in found["nodes"]}
        return {"gateway": found["gateway"]["process"]} | nodes

    def _client(self, count: int, seed: int) -> None:
        dice = random.Random(seed)
        connection = HTTPConnection(*self._place, timeout=60)
        for _ in range(count):
            if dice.random() < FAIL:
                self._fail(dice.choice(FAILURES))
            drawn = dice.random()
            if drawn < LEAVE:
                kind = self._leave(dice)
            elif drawn < LEAVE + INVALID:
                kind = self._ask(connection, dice.choice(INVALID_BODIES), None)
            else:
                at = dice.randrange(PROMPTS)
                kind = self._ask(connection, self._body(at, dice), at)
            with self._lock:
                self.counts[kind] += 1
        connection.close()

    def _body(self, at: int, dice: random.Random) -> bytes:
        body = {"prompt": self._prompts[at], "max_tokens": TOKENS, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True,
                "stream": dice.random() < 0.5}  # fmt: skip
        return json.dumps(body).encode()

    def _ask(self, connection: HTTPConnection, body: bytes, at: int | None) -> str:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        response = connection.getresponse()
        said = response.read()
        if at is not None and (response.status != 200 or _ids(said) != self._replies[at]):
            self.wrong.append(f"{response.status}: {said[:300]!r}")
        return str(response.status)

    def _leave(self, dice: random.Random) -> str:
        body = self._body(dice.randrange(PROMPTS), dice)
        with socket.create_connection(self._place) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            if dice.random() < 0.5:
                connection.recv(1)
        return "left"

    def _fail(self, failure: dict[str, int]) -> None:
        body = {"node": "store", "store": failure}
        answer = self.served.http.post("/debug/faults", json=body, headers=ADMIN)
        assert answer.status_code == 200, answer.text
        with self._lock:
            self.counts["tier failures"] += 1


def _ids(said: bytes) -> list[int]:
    """The tokens of an answer, streamed or not."""
    if not said.startswith(b"data: "):
        return list(json.loads(said)["choices"][0]["token_ids"])
    events = [line[6:] for line in said.splitlines() if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    return [token for choice in choices for token in choice["token_ids"] or []]


def growth(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]], name: str) -> float:
    """The most that any process has of `name` more than before."""
    return max(float(after[who][name] - before[who][name]) for who in before)
