"""How a process is told to end, ends, and says how far it is, whatever its role.

Owns the pipe on which a role reports to its supervisor, the answer to signals, and the tie of a
process to its parent's life. It knows no role and no supervisor.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from kvferry.kvstore.errors import ConfigError

_PR_SET_PDEATHSIG = 1


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
        facts = {"address": address, "ready": ready, "error": error}
        line = {name: value for name, value in facts.items() if value is not None}
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
