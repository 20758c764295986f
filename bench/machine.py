"""What a reader must know of the machine and the software to judge a figure.

Owns the reading of it, and of how busy others keep the machine; it measures no server.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvferry.kvstore.process.cores import available_cores

PACKAGES = ("kvferry", "torch", "transformers", "pyzmq")


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str
    cores: int
    memory_gib: float
    system: str
    versions: tuple[tuple[str, str], ...]


def this_machine() -> Machine:
    versions = [("Python", platform.python_version())]
    versions += [(name, _version(name)) for name in PACKAGES]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(_cpu(), len(available_cores()), pages / (1 << 30), _system(), tuple(versions))


def cores_busy(seconds: float = 1.0) -> float:
    """How many cores' worth of work the whole machine does just now."""
    before = _busy_seconds()
    time.sleep(seconds)
    return (_busy_seconds() - before) / seconds


def _busy_seconds() -> float:
    line = Path("/proc/stat").read_text().splitlines()[0]
    user, nice, system, _idle, _wait, irq, softirq, steal = (int(n) for n in line.split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "not installed"
