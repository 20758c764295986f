"""What every role's process does at its start and its end, whatever its role.

Owns the process's place on the machine (cores, priority, threads that block), the pipe on which it
reports to a supervisor and its answer to signals. It knows no role, and it must run before torch is
imported: OpenMP reads its environment once.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Collection
from types import FrameType

from kvferry.kvstore.errors import ConfigError

_PR_SET_PDEATHSIG = 1


# -- place on the machine ----------------------------------------------------------------------


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
    try:
        cores = frozenset(core for part in text.split(",") for core in _core_range(part))
    except ValueError:
        raise ConfigError(f"cores {text!r}: write them as 0, as 0,2 or as 0-3") from None
    missing = cores - available_cores()
    if missing or not cores:
        raise ConfigError(
            f"cores {text!r}: this process may not use {format_cores(missing)!r}, "
            f"only {format_cores(available_cores())!r}"
        )
    return cores


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


# -- under a supervisor --------------------------------------------------------------------------


class StatusPipe:
    """Where a role tells its supervisor how far it is: JSON lines on an inherited pipe.

    Without a supervisor (`fd` is None) a report goes nowhere. A supervisor that is gone is no
    error either: `die_with_parent` is what ends the process then.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            try:
                os.set_inheritable(fd, False)
            except OSError as error:
                raise ConfigError(f"--status-fd {fd} is not open: {error.strerror}") from None

    def report(
        self, *, address: str | None = None, ready: bool | None = None, error: str | None = None
    ) -> None:
        """Says what is given: the bound address, that requests are served, or why this ends."""
        said = {"address": address, "ready": ready, "error": error}
        line = {name: value for name, value in said.items() if value is not None}
        if self._fd is None or not line:
            return
        try:
            os.write(self._fd, json.dumps(line).encode() + b"\n")
        except BrokenPipeError:
            self._fd = None


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when the process `parent` ends, however that ends.

    Linux only, elsewhere nothing happens. It outlasts an exec, so the parent calls it between
    fork and exec; it follows the parent's thread that forked, which must be one that lasts.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the line above took effect
        os.kill(os.getpid(), signal.SIGKILL)


# -- signals -------------------------------------------------------------------------------------


class StopSignal:
    """SIGTERM and SIGINT: the first asks for a drain, the second ends the process at once.

    `fileno()` becomes readable with the first, so a poller can wait for it beside its sockets, and
    stays so until `acknowledge()`. Without `on_second` the kernel's own action is what the second
    meets, so it ends even a process that is deep in a computation. Install it from the main
    thread, and close it (or leave its `with`) to restore the handlers.
    """

    _SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, *, on_second: Callable[[], None] | None = None) -> None:
        self.requested = False
        self._on_second = on_second
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._previous = {number: signal.signal(number, self._handle) for number in self._SIGNALS}

    def fileno(self) -> int:
        return self._reader

    def acknowledge(self) -> None:
        """Makes `fileno()` unreadable again, until a second signal."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 64)

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def __enter__(self) -> StopSignal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and self._on_second is not None:
            self._on_second()
        self.requested = True
        if self._on_second is None:
            for name in self._SIGNALS:
                signal.signal(name, signal.SIG_DFL)
        os.write(self._writer, b"\0")
