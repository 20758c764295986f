"""Real clients against a real server: `make test-clients`.

    python -m kvferry.tests.clients [NAME …]

Each client does a plain turn, a second one, a prompt that is too long, a request that it gives up,
and a streamed one. What it cost is what the client says of it, or the line of the server's log. A
table is printed; the status is 0 if every check holds and every client could be installed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.kvstore.process.model_files import resolve_model
from kvferry.tests.clients import agents, install
from kvferry.tests.rigs.servers.served import Served

CASES = ("plain", "second", "over-length", "cancelled", "streamed")
BLOCK = 16
CASE_SECONDS = 300.0
CONTEXT = 2048
"""Tokens. Agents sample and set no limit: a reply that never ends fills it within the case."""
TRIES = 3
"""Of a case in which a sampled reply filled the context, and the agent then asked for more."""
Told = dict[str, Any]


@dataclass
class Log:
    """The server's log, read as it grows: the lines of requests that generate."""

    path: Path
    offset: int = 0
    requests: list[Told] = field(default_factory=list)

    def skip(self) -> None:
        self.read()
        self.requests.clear()

    def read(self) -> list[Told]:
        with self.path.open() as file:
            file.seek(self.offset)
            while (line := file.readline()).endswith("\n"):
                self.offset = file.tell()
                if line.startswith("{"):
                    told = json.loads(line)
                    if told.get("path") == "/v1/chat/completions":
                        self.requests.append(told)
        return self.requests

    def wait_for(self, wanted: Callable[[Told], bool], seconds: float = 20.0) -> Told | None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = [told for told in self.read() if wanted(told)]
            if found:
                return found[-1]
            time.sleep(0.05)
        return None


@dataclass
class Row:
    client: str
    case: str
    told: Told
    problem: str = ""

    def cells(self) -> list[str]:
        ttft, rate = self.told.get("ttft_ms"), self.told.get("tokens_per_s")
        return [
            self.client,
            self.case,
            str(self.told.get("status", 200)),
            *(str(self.told.get(name, "")) for name in ("prompt", "cached", "completion")),
            f"{ttft:.0f}" if ttft else "",
            f"{rate:.1f}" if rate else "",
            self.problem or "ok",
        ]


# -- what must hold --------------------------------------------------------------------------------


def judge(case: str, told: Told, first: Told, log: Log, *, strict: bool) -> str:
    """What is wrong with a case; nothing if it holds."""
    if case == "over-length":
        found = (told.get("status"), told.get("code"))
        return "" if found == (400, "context_length_exceeded") else f"{found}, not a 400"
    if case == "cancelled":
        gone = log.wait_for(lambda it: it["status"] == 499)
        return "" if gone is not None else "the server did not notice that the client left"
    if not told.get("completion"):
        return f"no answer: {told.get('code', 'of any length')}"
    if case == "second":
        bound = (first.get("prompt", 0) + first.get("completion", 0) - 1) // BLOCK * BLOCK
        if strict and (told.get("cached") or 0) < bound:
            return f"{told.get('cached')} tokens cached, not {bound}"
    if case == "streamed" and not (told.get("ttft_ms") and told.get("tokens_per_s")):
        return "no time to the first token"
    return ""


# -- SDKs ------------------------------------------------------------------------------------------


def run_sdk(name: str, command: Sequence[str], environ: dict[str, str], log: Log) -> list[Row]:
    log.skip()
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=5 * CASE_SECONDS
    )
    told = {line["case"]: line for line in map(json.loads, done.stdout.splitlines())}
    first = told.get("plain", {})
    rows = [
        Row(name, case, told[case], judge(case, told[case], first, log, strict=True))
        for case in CASES
        if case in told
    ]
    missing = [case for case in CASES if case not in told]
    reason = (done.stderr.strip().splitlines() or ["nothing was printed"])[-1][:80]
    return rows + [Row(name, case, {"status": ""}, reason) for case in missing]


# -- agents ----------------------------------------------------------------------------------------


def run_agent(
    agent: agents.Agent, log: Log, outputs: Path, generating: Callable[[], bool]
) -> list[Row]:
    agent.prepare()
    rows: list[Row] = []
    for case in CASES:
        output = outputs / f"{agent.name}-{case}"
        for _ in range(TRIES):
            log.skip()
            told = _one(agent, case, log, output, generating)
            if case == "over-length" or told.get("code") != "context_length_exceeded":
                break
        first = rows[0].told if rows else {}
        rows.append(Row(agent.version, case, told, judge(case, told, first, log, strict=False)))
    return rows


def _one(
    agent: agents.Agent, case: str, log: Log, output: Path, generating: Callable[[], bool]
) -> Told:
    with agent.running(case, output) as process:
        if case == "cancelled":
            return _cancel(process, generating)
        try:
            process.wait(CASE_SECONDS)
        except subprocess.TimeoutExpired:
            came = "its last request was answered" if log.read() else "no request was answered"
            return {"status": "", "code": f"it never ended, {came}{_last_words(output)}"}
    found = log.wait_for(lambda it: True, 2.0)
    if found is None:
        return {"status": "", "code": f"no request came{_last_words(output)}"}
    if found.get("completion", 0) > 1 and "ttft_ms" in found:
        seconds = (found["total_ms"] - found["ttft_ms"]) / 1000
        found["tokens_per_s"] = (found["completion"] - 1) / max(seconds, 1e-6)
    return found


def _last_words(output: Path) -> str:
    said = output.read_text(errors="replace").strip()
    return f", it said {said[-200:]!r}" if said else ""


def _cancel(process: subprocess.Popen[bytes], generating: Callable[[], bool]) -> Told:
    """Ctrl-C once tokens come, as often as it takes."""
    deadline = time.monotonic() + CASE_SECONDS
    while process.poll() is None and time.monotonic() < deadline and not generating():
        time.sleep(0.05)
    for _ in range(10):
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    return {"status": 499}


# -- all of them -----------------------------------------------------------------------------------


def run(names: Sequence[str], served: Served, model: str, log: Log, folder: Path) -> list[Row]:
    def generating() -> bool:
        return served.metric("kvferry_num_requests_running") > 0

    url = f"{served.url}/v1"
    rows: list[Row] = []
    script = str(install.HERE / "openai_python.py")
    sources = str(install.HERE / "openai_node.cjs")
    plain = {name: value for name, value in os.environ.items() if "OPENAI" not in name}
    for name in names:
        version, home = install.VERSIONS[name], folder / name
        title = f"{name} {version}"
        try:
            if name == "openai-python":
                found = run_sdk(title, [sys.executable, script, url, model], plain, log)
            elif name == "openai-node":
                environ = plain | {"NODE_PATH": str(install.node() / "node_modules")}
                found = run_sdk(title, ["node", sources, url, model], environ, log)
            elif name == "aider":
                agent = agents.aider(title, install.aider(), home, url, model)
                found = run_agent(agent, log, folder, generating)
            else:
                program = install.node() / "node_modules" / ".bin" / "cline"
                agent = agents.cline(title, program, home, url, model)
                found = run_agent(agent, log, folder, generating)
        except install.CannotInstall as error:
            found = [Row(title, "install", {"status": ""}, f"not installed: {error}")]
        rows += found
    return rows


def table(rows: Sequence[Row]) -> str:
    head = ["client", "case", "status", "prompt", "cached", "new", "ttft ms", "tokens/s", "result"]
    lines = [head, ["---"] * len(head), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: Sequence[str]) -> int:
    names = list(arguments) or list(install.VERSIONS)
    if unknown := set(names) - set(install.VERSIONS):
        print(f"no client {', '.join(unknown)}: choose {', '.join(install.VERSIONS)}")
        return 2
    with tempfile.TemporaryDirectory(prefix="kvferry-clients-") as temporary:
        folder = Path(temporary)
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry"
        model = resolve_model(None, cache, lambda line: None)
        flags = ("--log-format=json", f"--max-model-len={CONTEXT}", "--prefill-nodes=0")
        served = Served(model.folder, folder / "log", *flags)
        try:
            rows = run(names, served, model.name, Log(folder / "log"), folder)
        finally:
            status = served.stop()
    print(table(rows))
    failed = [row for row in rows if row.problem]
    return 1 if failed or status else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
