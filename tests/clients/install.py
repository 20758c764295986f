"""Installs the clients, each at its pinned version, into `.clients/` beside the sources.

openai-python is the one that the project's own environment has. What cannot be installed is told
by name: the others are tried all the same.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from importlib import metadata
from json import loads
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent / ".clients"
AIDER = "0.86.2"
PINS: dict[str, str] = loads((HERE / "package.json").read_text())["dependencies"]
VERSIONS = {
    "openai-python": metadata.version("openai"),
    "openai-node": PINS["openai"],
    "aider": AIDER,
    "cline": PINS["cline"],
}


class CannotInstall(Exception):
    """Why a client is not there."""


def node() -> Path:
    """The folder with `node_modules`."""
    folder = ROOT / "node"
    wanted, had = HERE / "package.json", folder / "package.json"
    if had.exists() and had.read_text() == wanted.read_text() and (folder / "done").exists():
        return folder
    if shutil.which("npm") is None:
        raise CannotInstall("npm is not there: it comes with Node 20")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(wanted, had)
    _run(["npm", "install", "--no-audit", "--no-fund", "--silent", f"--prefix={folder}"])
    (folder / "done").touch()
    return folder


def aider() -> Path:
    """The program."""
    folder = ROOT / f"aider-{AIDER}"
    if not (folder / "done").exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(folder / "bin" / "pip"), "--disable-pip-version-check", "install", "--quiet"]
        _run([*pip, f"aider-chat=={AIDER}"])
        (folder / "done").touch()
    return folder / "bin" / "aider"


def _run(command: list[str]) -> None:
    print(f"installs: {' '.join(command[:3])} …", file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no reason given"]
        raise CannotInstall(last[0])
