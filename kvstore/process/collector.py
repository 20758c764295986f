"""When a process looks for garbage in cycles: not while somebody waits for it.

Owns the thresholds of Python's collector. Its full collection walks every object that lives, which
takes tens of milliseconds with a thousand open streams and a tenth of a second for a million
blocks of an index, and finds next to nothing: what is dropped here is in no cycle. Python starts
one by the growth of what lives, so in the middle of a burst; here it is asked for in idle moments.
The short collections of what is young stay as they are. From Python 3.14 on the interpreter
collects in small steps by itself, and only the idle moments are left of this.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

IDLE_SECONDS = 5.0
"""Between two full collections while there is nothing to do."""
BUSY_SECONDS = 60.0
"""Between two of a process that never has nothing to do."""
_NEVER = 1 << 30


class Collector:
    """The collector of this process, from now on: make it when everything is loaded.

    What lives at that moment is taken to live for ever, and with `keeps` what lives after each full
    collection too: later ones do not walk it. It is freed all the same when nobody refers to it,
    but in a cycle only after `let_go`.
    """

    def __init__(self, *, keeps: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self._keeps = keeps
        self._clock = clock
        gc.collect()
        gc.freeze()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, _NEVER)
        self._note()

    def turn(self, *, idle: bool) -> bool:
        """Collects if it is time to; whether it did. Costs next to nothing when it is not."""
        pause = IDLE_SECONDS if idle else BUSY_SECONDS
        if self._clock() - self._last < pause or _collections() == self._seen:
            return False
        gc.collect()
        if self._keeps:
            gc.freeze()
        self._note()
        return True

    def let_go(self) -> None:
        """Much of what was kept is garbage now: the next collection walks all of it."""
        gc.unfreeze()
        self._seen = -1

    def _note(self) -> None:
        self._last, self._seen = self._clock(), _collections()


def _collections() -> int:
    """Of any length, since the process started: without one nothing much has come."""
    return sum(generation["collections"] for generation in gc.get_stats())
