"""The native library: from C sources to a file that can be loaded, made once a machine.

Owns which compiler makes it, with which flags, and where it is kept. It knows nothing of what the
library does. A wheel brings the library compiled; elsewhere it is compiled into the cache folder,
under a name that changes with sources, flags and compiler.
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from kvferry.kernels.errors import NotNative

SOURCES = Path(__file__).parent / "csrc"
BUNDLED = Path(__file__).parent / "libkvferry.so"
FLAGS = ("-O2", "-std=gnu11", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi")
"""No contraction: what is fused is written as such, and all instruction sets give the same bits."""
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c")
COMPILERS = ("cc", "gcc", "clang")
ZIG = "ziglang"
SECONDS = 300

log = logging.getLogger(__name__)


def find_library(cache_dir: Path) -> Path:
    """The library for this machine, compiled first if need be.

    Any number of processes may ask at once: one compiles, the others wait.

    Raises
    ------
    NotNative
        There is no compiler, or it cannot compile the sources.
    """
    if BUNDLED.is_file():
        return BUNDLED
    compiler = _compiler()
    folder = cache_dir / "native"
    path = folder / f"libkvferry-{_name(compiler)}.so"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_file():
            _build(compiler, path)
    return path


def _compiler() -> list[str]:
    for name in COMPILERS:
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec(ZIG) is not None:
        return [sys.executable, "-m", ZIG, "cc"]
    raise NotNative(
        "no C compiler was found (cc, gcc, clang): install one, or pip install 'kvferry[compiler]'"
    )


def units(machine: str) -> Mapping[str, tuple[str, Sequence[str]]]:
    """What is compiled for a machine: by object name the source and its own flags."""
    found: dict[str, tuple[str, Sequence[str]]] = {
        name: (f"{name}.c", ()) for name in ("engine", "threads", "dispatch", "angles")
    }
    found["portable"] = ("kernels.c", ("-DKERNELS=portable",))
    if machine in ("x86_64", "AMD64"):
        found["avx2"] = ("kernels.c", ("-DKERNELS=avx2", *AVX2))
        found["avx512"] = ("kernels.c", ("-DKERNELS=avx512", *AVX512))
    return dict(reversed(found.items()))  # what takes longest first


def _name(compiler: Sequence[str]) -> str:
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, check=False, timeout=SECONDS
    ).stdout
    digest = blake2b(repr((FLAGS, units(platform.machine()))).encode() + version, digest_size=8)
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()


def _build(compiler: Sequence[str], target: Path) -> None:
    began = time.monotonic()
    log.info("compiling the native engine once, into %s", target)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as folder:
        parts = units(platform.machine())
        objects = [str(Path(folder) / f"{name}.o") for name in parts]
        commands = [
            [*compiler, *FLAGS, *flags, "-c", str(SOURCES / source), "-o", made]
            for (source, flags), made in zip(parts.values(), objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        made = str(Path(folder) / target.name)
        _run([*compiler, "-shared", "-o", made, *objects, "-lm", "-lpthread"])
        os.replace(made, target)
    log.info("compiled the native engine in %.1f s", time.monotonic() - began)


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotNative(f"{command[0]} does not compile: {error}") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise NotNative(f"{command[0]} does not compile the native engine: {lines[0][:300]}")
