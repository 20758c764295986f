"""A `kvferry serve` of its own: real processes, real sockets, on a free port."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from kvferry.kernels.engines.standin import MODEL_TYPE
from kvferry.tests.rigs.gateway import web

START_S = 120.0
LISTENING = "0A"
ROLES = ("gateway", "prefill", "decode", "store")


class Served:
    """Starts `kvferry serve MODEL --port 0 FLAGS` and waits until it serves.

    Without a store, unless a flag says what it may take.
    """

    def __init__(self, model: Path, log: Path, *flags: str, cache_dir: Path | None = None) -> None:
        self.model = model
        self.log = log
        environ = {name: value for name, value in os.environ.items() if "KVFERRY" not in name}
        extra = [f"--cache-dir={cache_dir}"] if cache_dir else []
        if MODEL_TYPE in (model / "config.json").read_text():
            extra.append("--kv-cache-memory-bytes=16MiB")  # 65,536 of the stand-in's small blocks
        if not any(flag.startswith("--store-ram") for flag in flags):
            extra.append("--store-ram=0")
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvferry", "serve", str(model), "--port=0", *extra, *flags],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=log.parent,
                env=environ,
            )
        self.url = self._await_url()
        self.http = web.Client(base_url=self.url, timeout=120)

    def _await_url(self) -> str:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], START_S)
        line = self.process.stdout.readline() if readable else ""
        found = re.search(r"http://\S+?(?=/v1)", line)
        if found is None:
            self.process.kill()
            raise AssertionError(f"not serving: {line!r}\n{self.log.read_text()}")
        return found[0]

    def children(self) -> dict[str, int]:
        """Process ids of the roles, by role; numbered where there are several of one."""
        found: dict[str, list[int]] = {}
        for entry in Path("/proc").iterdir():
            role = self._role(entry) if entry.name.isdecimal() else None
            if role is not None:
                found.setdefault(role, []).append(int(entry.name))
        return {
            role if len(pids) == 1 else f"{role}-{number}": pid
            for role, pids in found.items()
            for number, pid in enumerate(sorted(pids))
        }

    def _role(self, entry: Path) -> str | None:
        """The role of a process, if it is a child of this supervisor."""
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent != self.process.pid:
                return None
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except (OSError, IndexError):
            return None  # it has just ended
        roles = (role for role in ROLES if role.encode() in command[:6])
        return next(roles, None)

    # -- asking ---------------------------------------------------------------------------------

    def post(self, path: str, body: Mapping[str, Any], **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def complete(self, **body: Any) -> dict[str, Any]:
        """`/v1/completions`, greedy unless said otherwise, EOS ignored."""
        response = self.post("/v1/completions", {"temperature": 0, "ignore_eos": True, **body})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def ids(self, prompt: list[int], count: int, **body: Any) -> list[int]:
        """The ids that follow a prompt of ids."""
        answer = self.complete(prompt=prompt, max_tokens=count, return_token_ids=True, **body)
        found: list[int] = answer["choices"][0]["token_ids"]
        return found

    def metric(self, name: str, **labels: str) -> float:
        """The sum of one metric's samples with these labels."""
        total = 0.0
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith((f"{name}{{", f"{name} ")) and all(
                f'{label}="{value}"' in line for label, value in labels.items()
            ):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def wait_until_ready(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while self.http.get("/ready").status_code != 200:
            assert time.monotonic() < deadline, "not ready again"
            time.sleep(0.05)

    # -- ending ---------------------------------------------------------------------------------

    def stop(self, seconds: float = 40.0) -> int:
        """Drains it; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait(seconds)

    def kill(self) -> None:
        """Every process at once, without a word."""
        for pid in [self.process.pid, *self.children().values()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait()

    def wait(self, seconds: float = 40.0) -> int:
        """Waits for its end, which somebody has asked for; the exit status."""
        self.http.close()
        try:
            return self.process.wait(seconds)
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()


def listening(*pids: int) -> list[str]:
    """The addresses, as the kernel writes them (hex, with the port), on which processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
                inodes |= {found[1]} if found else set()
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == LISTENING and row[9] in inodes]
