"""Memory that is there before it is used.

Owns how far the pages of one buffer are mapped. The first touch of a page costs more than copying
it, much more where a hypervisor has to find the memory first, and a block that is fetched would pay
for all of its pages. It knows nothing of what lies in the buffer, and does nothing unasked.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
from numpy.typing import NDArray

_MADV_POPULATE_WRITE = 23
MOST_AHEAD = 512 << 20
STEP_BYTES = 2 << 20
"""What a step maps: a millisecond or less, some milliseconds where the host has to find it."""


class Prefault:
    """Keeps the next bytes of a buffer mapped, as it fills from its beginning to its end.

    What is behind them stays untouched, so a buffer costs what was used of it and so much. Where
    the kernel knows no way to do it (before Linux 5.14, elsewhere) pages are mapped as they are
    touched.

    Parameters
    ----------
    ahead
        Bytes that may be needed at once. At most a quarter of the buffer and `MOST_AHEAD` are
        mapped.
    """

    def __init__(self, buffer: NDArray[np.uint8], ahead: int) -> None:
        self._buffer = buffer
        self._ahead = min(ahead, buffer.size // 4, MOST_AHEAD)
        self._mapped = 0
        self._target = self._ahead
        self._populate = _populate()

    @property
    def mapped(self) -> int:
        """Bytes from the beginning that are mapped or in use."""
        return self._mapped

    def reached(self, end: int) -> None:
        """The first `end` bytes are in use, or will be at once."""
        self._mapped = max(self._mapped, end)
        self._target = max(self._target, min(end + self._ahead, self._buffer.size))

    def step(self) -> bool:
        """Maps a little; False when all that should be mapped is."""
        size = min(STEP_BYTES, self._target - self._mapped)
        if size <= 0 or self._populate is None:
            return False
        start = self._buffer.ctypes.data + self._mapped
        whole = start // mmap.PAGESIZE * mmap.PAGESIZE
        if self._populate(whole, start + size - whole, _MADV_POPULATE_WRITE) != 0:
            self._populate = None
            return False
        self._mapped += size
        return True


def _populate() -> ctypes._NamedFuncPointer | None:
    """The system's `madvise`, where its advice has these numbers."""
    if sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
