"""How large a store is when nobody has said: what this host can spare, within caps.

Owns the two defaults and nothing else. Both are looked up when a process starts and stay as they
are while it runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.tiers.shared_memory import PAGE, memory_left, remove_leftovers, room_for_arena

MOST_RAM = 4 << 30
LEAST_RAM = 16 << 20
"""With less to spare there is no store unless somebody asks for one."""
MOST_DISK = 8 << 30
SMALL_PART = 4
"""The arena is no more than one part in so many of what is available and nobody else's."""
LEAST_PART = 16
"""… and no less than one in so many of all of it: the nodes may be late to use theirs."""


def default_ram(arena_dir: Path, nodes: int = 0) -> int:
    """Bytes of the arena: a quarter of the available memory, as far as it fits; 0: no store.

    `nodes` are bytes that this host's nodes will use for blocks of their own; they do not count as
    available, but a sixteenth of all of it is taken in any case.
    """
    if sys.platform != "linux":
        return 0
    remove_leftovers(arena_dir)  # what a killed store has left would count as taken
    try:
        fits = room_for_arena(arena_dir).fits
    except ConfigError:
        return 0
    available = memory_left()
    share = max((available - nodes) // SMALL_PART, available // LEAST_PART)
    size = min(MOST_RAM, fits, share) // PAGE * PAGE
    return size if size >= LEAST_RAM else 0


def default_disk(store_dir: Path) -> int:
    """Most bytes on disk: half of what is free or already the store's, within the cap.

    0 where that cannot be found out: no disk tier.
    """
    place = store_dir
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        disk = os.statvfs(place)
        ours = sum(path.stat().st_size for path in store_dir.glob("segment-*.kv"))
    except OSError:
        return 0
    return min(MOST_DISK, (disk.f_bavail * disk.f_frsize + ours) // 2)
