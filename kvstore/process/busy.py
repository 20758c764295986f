"""Which nodes of a host compute now: a line each, in memory that all of them map.

Owns the form of that memory. A node that computes may borrow the cores of those that do not, and
gives them back within a step; who may use which cores is decided elsewhere. A line of a process
that has died is cleared by whoever started it.
"""

from __future__ import annotations

import mmap
import os
import tempfile

LINE_BYTES = 64
"""A cache line, of which the first four bytes are used."""
_FREE, _BUSY = (0).to_bytes(4, "little"), (1).to_bytes(4, "little")


def make_board(lines: int) -> int:
    """A descriptor of a board of so many lines, all of them free; it can be inherited."""
    with tempfile.TemporaryFile() as file:
        file.truncate(max(1, lines) * LINE_BYTES)
        return os.dup(file.fileno())


class BusyBoard:
    """The board behind a descriptor, which may be closed afterwards."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, 0)
        self.memory = memoryview(self._map)

    @property
    def lines(self) -> int:
        return len(self._map) // LINE_BYTES

    def set(self, line: int, busy: bool) -> None:
        """Says of a line whether its node computes."""
        self._map[line * LINE_BYTES : line * LINE_BYTES + 4] = _BUSY if busy else _FREE

    def busy(self, line: int) -> bool:
        return self._map[line * LINE_BYTES : line * LINE_BYTES + 4] != _FREE
