"""aider and Cline as a person starts them: which command is which case.

Owns their command lines and their folders, and nothing of the server. Neither says what its
requests cost, so that is read from the server's log. Cline resumes a session in a terminal only:
its second turn is another request that begins as the first one did.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LONG = "word " * 9000
STORY = "Tell a very long story about a lighthouse."


@dataclass
class Agent:
    """One installed agent, with a home of its own."""

    name: str
    version: str
    folder: Path
    environ: Mapping[str, str]
    base: Sequence[str]
    setup: Sequence[Sequence[str]] = ()

    def prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for command in self.setup:
            subprocess.run(command, env=self.environ, cwd=self.folder, stdin=subprocess.DEVNULL,
                           capture_output=True, timeout=120, check=True)  # fmt: skip

    def command(self, case: str) -> list[str]:
        texts = {
            "plain": "What is the capital of France?",
            "second": "And of Italy?",
            "over-length": LONG,
            "cancelled": STORY,
            "streamed": "What is the capital of Spain?",
        }
        if self.name == "aider":
            resumed = ["--restore-chat-history"] if case == "second" else []
            message = self.folder / "message"
            message.write_text(texts[case])
            plain = ["--no-stream"] if case == "plain" else []
            return [*self.base, *plain, *resumed, "--message-file", str(message)]
        return [*self.base, texts[case]]

    @contextmanager
    def running(self, case: str, output: Path) -> Iterator[subprocess.Popen[bytes]]:
        """The process, which is killed at the end if it still runs."""
        with output.open("wb") as file:
            process = subprocess.Popen(
                self.command(case), env=self.environ, cwd=self.folder,
                stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            )  # fmt: skip
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def aider(version: str, program: Path, home: Path, url: str, model: str) -> Agent:
    environ = _environ(home) | {"OPENAI_API_BASE": url, "OPENAI_API_KEY": "sk-x"}
    base = [str(program), "--model", f"openai/{model}", "--chat-mode", "ask", "--map-tokens", "0",
            "--no-show-model-warnings", "--no-check-update", "--no-analytics", "--yes-always",
            "--no-auto-commits", "--no-pretty"]  # fmt: skip
    setup = [["git", "init", "--quiet"]]
    return Agent("aider", version, home / "aider", environ, base, setup)


def cline(version: str, program: Path, home: Path, url: str, model: str) -> Agent:
    data = str(home / "cline-data")
    environ = _environ(home) | {"CLINE_TELEMETRY_DISABLED": "1"}
    base = [str(program), "--data-dir", data, "-P", "openai-compatible", "-m", model, "--json",
            "--compaction", "off", "--retries", "1", "-s", "Answer in one sentence."]  # fmt: skip
    login = [str(program), "auth", "-p", "openai-compatible", "-k", "sk-x", "-m", model, "-b", url,
             "--data-dir", data]  # fmt: skip
    return Agent("cline", version, home / "cline", environ, base, [login])


def _environ(home: Path) -> dict[str, str]:
    home.mkdir(parents=True, exist_ok=True)
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "NO_PROXY": "127.0.0.1,localhost",
    }
