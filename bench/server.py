"""The server under test: a `kvferry serve` of its own, or one that already runs.

Owns the child process from its start to its end, and the few questions asked of a server beside
the load: its model's name, its tokenizer, its counters. Everything goes over HTTP.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO
from urllib.parse import urlsplit

import httpx

from kvferry.bench.client.load import Target
from kvferry.kvstore.process.lifecycle import die_with_parent
from kvferry.kvstore.process.settings import without_settings

READY_S = 600
"""The first start may convert the model."""
END_S = 20
ADMIN_KEY = "bench"
"""Of a server that is to forget what its devices have; others ignore it."""
_SERVES = re.compile(r"kvferry serves (\S+) at (http://\S+)/v1")


class ServerFailed(Exception):
    """It did not start, or it does not answer as it should."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One way of running the server; `url` names one that runs already."""

    name: str
    flags: tuple[str, ...] = ()
    url: str = ""

    @property
    def told(self) -> tuple[str, ...]:
        """All flags. Without a store, unless they size one: what must be cold is cold then."""
        sized = any(flag.startswith("--store-ram") for flag in self.flags)
        return self.flags if sized else (*self.flags, "--store-ram=0")


class Server:
    """A server that is ready."""

    def __init__(
        self, url: str, arrangement: Arrangement, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.arrangement = arrangement
        self._process = process
        admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
        self._http = httpx.Client(base_url=url, timeout=60, headers=admin)
        place = urlsplit(url)
        models = self._get("/v1/models").json()["data"]
        self.target = Target(place.hostname or "", place.port or 80, models[0]["id"])

    def encode(self, text: str) -> list[int]:
        """A text's tokens, by the server's tokenizer."""
        body = {"model": self.target.model, "prompt": text, "add_special_tokens": False}
        answer = self._http.post("/tokenize", json=body)
        answer.raise_for_status()
        return list(answer.json()["tokens"])

    def counter(self, name: str, role: str) -> float:
        """A counter of all nodes of a role, once the nodes have had time to report it."""
        time.sleep(1.5)
        page = self._get("/metrics").text
        line = re.compile(rf'^{name}\{{[^}}]*role="{role}"[^}}]*\}} (\S+)$', re.MULTILINE)
        return sum(float(value) for value in line.findall(page))

    def forget_devices(self) -> None:
        """Empties the pools of all nodes; what the store has stays."""
        body = {"all": True, "tiers": ["device"]}
        answer = self._http.post("/admin/cache/clear", json=body)
        answer.raise_for_status()

    def wait_written(self, seconds: float) -> float:
        """Until the store has nothing left to write; bytes of a block in its memory.

        The nodes are given a moment before: a block is put when it is done.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(1)
            rows = self._get("/admin/cache/stats").json()["nodes"]
            (store,) = (row for row in rows if row["role"] == "store")
            host = store["tiers"]["host"]
            if host["blocks"] and not store["gauges"]["unwritten_bytes"]:
                return float(host["bytes"] / host["blocks"])
        raise ServerFailed(f"the store has not written everything within {seconds:g} s")

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The supervisor of a server of our own."""
        assert self._process is not None, "a server that somebody else runs"
        return self._process

    def kill(self) -> None:
        """Every process at once, without a word."""
        assert self._process is not None, "a server that somebody else runs"
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _get(self, path: str) -> httpx.Response:
        answer = self._http.get(path)
        answer.raise_for_status()
        return answer

    def close(self) -> None:
        self._http.close()


@contextmanager
def running(arrangement: Arrangement, cores: frozenset[int]) -> Iterator[Server]:
    """The server, from ready to the end of the block. It may use `cores`, whatever we may use."""
    if arrangement.url:
        server = Server(arrangement.url, arrangement)
        try:
            yield server
        finally:
            server.close()
        return
    with tempfile.TemporaryFile("w+") as log:
        process = _start(arrangement, cores, log)
        try:
            server = Server(_wait(process), arrangement, process)
            try:
                yield server
            finally:
                server.close()
        except Exception as error:
            error.add_note(_complaints(log))
            raise
        finally:
            _stop(process)


def _start(
    arrangement: Arrangement, cores: frozenset[int], log: IO[str]
) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def before_exec() -> None:
        die_with_parent(parent)
        os.sched_setaffinity(0, cores)

    # -P: whatever the current folder holds, it is not imported.
    command = [sys.executable, "-P", "-m", "kvferry", "serve", "--port=0", *arrangement.told]
    return subprocess.Popen(
        command,
        env=without_settings(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,
        preexec_fn=before_exec,
    )


def _complaints(log: IO[str]) -> str:
    """The end of what the server logged beside its requests."""
    log.seek(0)
    lines = [line for line in log if " INFO " not in line]
    return "the server said:\n" + "".join(lines[-30:])


def explain(error: Exception) -> str:
    """An error and what its server said."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def _wait(process: subprocess.Popen[bytes]) -> str:
    """The URL, when it serves."""
    assert process.stdout is not None
    deadline, said = time.monotonic() + READY_S, b""
    while time.monotonic() < deadline:
        if not select.select([process.stdout], [], [], 1)[0]:
            continue
        data = os.read(process.stdout.fileno(), 65536)
        said += data
        found = _SERVES.search(said.decode(errors="replace"))
        if found:
            return found[2]
        if not data:
            break
    raise ServerFailed("the server did not become ready")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()
