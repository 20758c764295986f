"""Clients of a whole server, many at a time, and what they leave behind."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from kvferry.kernels.engines.standin import StandinConfig, write_standin_model
from kvferry.tests.rigs.gateway import web
from kvferry.tests.rigs.servers.served import Served

ADMIN = {"authorization": "Bearer root"}
DEBUG = ("--enable-debug", "--enable-test-hooks", "--admin-api-key=root",
         "--kv-cache-memory-bytes=2MiB")  # fmt: skip
"""With 8,192 blocks: a ledger proves something of every one of them."""


def prompt_of(length: int, seed: int) -> list[int]:
    """Ids of bytes, different between seeds from the first one on."""
    return [3 + (seed * 101 + index * 31 + index // 7) % 250 for index in range(length)]


def text_ids(text: str) -> list[int]:
    """The stand-in's tokens are bytes behind three specials."""
    return [byte + 3 for byte in text.encode()]


@contextmanager
def serving(folder: Path, *flags: str, **model: Any) -> Iterator[tuple[Served, StandinConfig]]:
    config = write_standin_model(folder / "standin", **model)
    served = Served(folder / "standin", folder / "log", *DEBUG, *flags)
    try:
        yield served, config
    finally:
        assert served.stop() == 0, (folder / "log").read_text()


@dataclass
class Stream:
    """One streamed answer, read as it comes."""

    prompt: list[int]
    count: int
    ids: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    error: str = ""
    whole: bool = False
    status: int = 200
    times: list[float] = field(default_factory=list)
    """When it was sent, and when each event with tokens came."""
    ended: float = 0.0

    @property
    def ttft(self) -> float:
        return self.times[1] - self.times[0]

    @property
    def gaps(self) -> list[float]:
        """Times between tokens."""
        return [after - before for before, after in pairwise(self.times[1:])]

    def read(self, server: str) -> None:
        body = {"prompt": self.prompt, "max_tokens": self.count, "stream": True, "temperature": 0,
                "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        self.times.append(time.monotonic())
        try:
            url = server + "/v1/completions"
            with web.stream("POST", url, json=body, timeout=60) as response:
                self.status = response.status_code
                if self.status != 200:
                    self.error = json.loads(response.read())["error"]["code"]
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self._take(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.error = self.error or repr(error)
        finally:
            self.ended = time.monotonic()

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.whole = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]["code"]
        if any(choice["token_ids"] for choice in event.get("choices", [])):
            self.times.append(time.monotonic())
        for choice in event.get("choices", []):
            self.ids += choice["token_ids"]
            self.reasons += [choice["finish_reason"]] * bool(choice["finish_reason"])


def at_once(works: Sequence[Callable[[], None]]) -> list[threading.Thread]:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    return threads


def ledger(served: Served) -> dict[str, Any]:
    found: dict[str, Any] = served.http.get("/debug/ledger", headers=ADMIN).json()
    return found


def idle(served: Served) -> bool:
    """Nothing is open, here or at any node."""
    found = ledger(served)["gateway"]
    return not (found["requests"] or any(link["requests"] for link in found["links"]))


def nodes_idle(served: Served) -> bool:
    """Whether the nodes report that nothing runs, waits or is held."""
    return all(
        served.metric(f"kvferry_num_requests_{state}") == 0 for state in ("running", "waiting")
    )


def clear_faults(served: Served, node: str) -> bool:
    """Whether everyone asked has said so: an answer may be the last frame that is lost."""
    return not _unanswered(served, {"node": node, "clear": True})


def hold(served: Served, stages: list[str]) -> None:
    unanswered = _unanswered(served, {"node": "all", "hold": stages})
    assert not unanswered, unanswered


def _unanswered(served: Served, faults: dict[str, Any]) -> list[dict[str, Any]]:
    """Injects faults; the nodes that have not said that they took them."""
    response = served.http.post("/debug/faults", json=faults, headers=ADMIN)
    assert response.status_code == 200, response.text
    return [node for node in response.json()["nodes"] if "error" in node]
