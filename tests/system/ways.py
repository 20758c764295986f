"""How long the ways are: every function that one streamed chat and one block pass through.

Run as ``python -m kvferry.tests.system.ways [chat|block] [--list]``. A chat is traced in the
gateway, from its request to its last event; a block from a prefill node to a decode node, into the
store, to its disk, and back. What a function is called for does not matter, only that it is: the
figures say how much a reader has to open, not what it costs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

from kvferry.gateway.router import nodes
from kvferry.tests.rigs.gateway.rig import running, wait_until
from kvferry.tests.rigs.handoff.cluster import prompt_of
from kvferry.tests.rigs.store.cluster import DISK, ask, cluster_of, settle, sources

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("gateway", "kvstore", "decode_node", "prefill_node", "kernels")


@dataclass
class Way:
    """The functions of some packages that were called, in the order of their first calls."""

    packages: tuple[str, ...]
    codes: dict[CodeType, None] = field(default_factory=dict)
    recording: bool = False
    elsewhere: set[int | None] = field(default_factory=set)
    """Threads that do not belong to the way."""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self.recording and event == "call" and threading.get_ident() not in self.elsewhere:
            self.codes[frame.f_code] = None

    def functions(self) -> Iterator[tuple[str, str]]:
        """File and name of each; comprehensions and lambdas belong to what they stand in."""
        for code in self.codes:
            path = Path(code.co_filename)
            if not path.is_relative_to(ROOT) or code.co_name.startswith("<"):
                continue
            inside = path.relative_to(ROOT)
            if inside.parts[0] in self.packages:
                yield inside.as_posix(), code.co_qualname


@contextmanager
def tracing(*packages: str) -> Iterator[Way]:
    way = Way(packages)
    threading.setprofile(way)
    sys.setprofile(way)
    try:
        yield way
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def chat() -> Way:
    """One streamed chat, to a gateway that has served one before."""
    with (
        tracing("gateway", "kvstore") as way,
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder)) as rig,
        patch.object(nodes, "TICK_SECONDS", 3600.0),
    ):
        rig.chat(stream=True)
        time.sleep(0.2)  # the last tick: what it does is on no request's way
        way.elsewhere.add(rig.decode._thread.ident)
        way.recording = True
        answer = rig.chat(stream=True, stream_options={"include_usage": True})
        wait_until(rig.gateway._idle.is_set)  # it is counted and logged
        way.recording = False
        if not answer.text.endswith("data: [DONE]\n\n"):
            raise RuntimeError(f"no whole stream: {answer.text!r}")
    return way


def block() -> Way:
    """Blocks computed on P, shipped to D, put, written to disk, and fetched from there."""
    prompt = prompt_of(330)
    with tracing(*PRODUCT[1:]) as way, tempfile.TemporaryDirectory() as folder:
        for source in ("prefill", "disk"):  # the second time after a restart
            with cluster_of(Path(folder), disk=DISK) as cluster:
                cluster.check = lambda without=None: None  # type: ignore[method-assign]
                way.recording = True
                answer = ask(cluster, prompt)
                settle(cluster)
                way.recording = False
                if sources(answer).get(source) != 320:
                    raise RuntimeError(f"not from {source}: {sources(answer)}")
    return way


WAYS: dict[str, Callable[[], Way]] = {"chat": chat, "block": block}


def main() -> int:
    parser = argparse.ArgumentParser(prog="kvferry.tests.system.ways", description=__doc__)
    parser.add_argument("way", nargs="?", choices=list(WAYS), help="which [both]")
    parser.add_argument("--list", action="store_true", help="every function")
    options = parser.parse_args()
    for name in [options.way] if options.way else WAYS:
        functions = list(WAYS[name]().functions())
        print(f"{name}: {len(set(functions))} functions in {len({f for f, _ in functions})} files")
        for file, function in functions if options.list else ():
            print(f"  {file}: {function}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
