"""A process's place on the machine: cores, priority, and threads that block or spin.

Owns how cores are written and how a place is applied, which must happen before torch is imported:
OpenMP reads its environment once. Which place a process gets is decided elsewhere.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection

from kvferry.kvstore.errors import ConfigError


def available_cores() -> frozenset[int]:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def parse_cores(text: str) -> frozenset[int]:
    """The cores of `0`, `0,2` or `0-3,8`.

    Raises
    ------
    ConfigError
        Not such a list, or it names a core this process may not use.
    """
    cores = cores_in(text)
    missing = cores - available_cores()
    if missing or not cores:
        raise ConfigError(
            f"cores {text!r}: this process may not use {format_cores(missing)!r}, "
            f"only {format_cores(available_cores())!r}"
        )
    return cores


def cores_in(text: str) -> frozenset[int]:
    """The cores that a list names, whether or not this process may use them; ConfigError if it is
    none."""
    try:
        return frozenset(core for part in text.split(",") for core in _core_range(part))
    except ValueError:
        raise ConfigError(f"cores {text!r}: write them as 0, as 0,2 or as 0-3") from None


def format_cores(cores: Collection[int]) -> str:
    """`0-3,8`: the text that `parse_cores` reads back."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def apply_cores(cores: str | None, threads: int | None, nice: int, spin: bool) -> None:
    """Pins this process and sets its priority and its OpenMP threads; call before torch's import.

    Parameters
    ----------
    cores
        Where to run; None: anywhere.
    threads
        OpenMP threads; None: one a core.
    nice
        Added to the process's niceness; above 0 it gives way to others.
    spin
        False makes idle threads block. Spinning ones would starve a neighbour on the same core.
    """
    if "torch" in sys.modules:
        raise RuntimeError("apply_cores was called after torch was imported: OpenMP has started")
    chosen = parse_cores(cores) if cores else available_cores()
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, chosen)
    if nice:
        os.nice(nice)
    count = str(threads or len(chosen))
    os.environ |= {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
    if not spin:
        os.environ |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}


def _core_range(text: str) -> range:
    low, dash, high = text.strip().partition("-")
    first, last = int(low), int(high if dash else low)
    if last < first:
        raise ValueError(text)
    return range(first, last + 1)
