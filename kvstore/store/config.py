"""The store's settings: one frozen value, read once from flags and environment.

Owns also how large a store is when nobody has said: what this host can spare, within caps. That is
looked up when a process starts and stays as it is while it runs.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process.roles import ServerRoleConfig
from kvferry.kvstore.process.settings import Size, default_cache_dir, flag, flag_from_environ
from kvferry.kvstore.tiers.shared_memory import PAGE, memory_left, remove_leftovers, room_for_arena

MOST_RAM = 4 << 30
LEAST_RAM = 16 << 20
"""With less to spare there is no store unless somebody asks for one."""
MOST_DISK = 8 << 30
SMALL_PART = 4
"""The arena is no more than one part in so many of what is available and nobody else's."""
LEAST_PART = 16
"""… and no less than one in so many of all of it: the nodes may be late to use theirs."""


@dataclass(frozen=True, slots=True)
class StoreConfig(ServerRoleConfig):
    """`kvferry store`."""

    store_ram: Size | None = flag(
        None,
        "shared memory for KV blocks; 0: no store "
        "[a quarter of what nodes leave available, at most 4GiB]",
    )
    store_disk: Size | None = flag(
        None, "most bytes of KV blocks on disk; 0: none [half of what is free, at most 8GiB]"
    )
    store_dir: Path = flag_from_environ(
        lambda environ: default_cache_dir(environ) / "blocks",
        "directory of the disk tier [in the cache directory]",
    )
    arena_dir: Path = flag(Path("/dev/shm"), "where the shared memory is made", metavar="DIR")
    shutdown_timeout: float = flag(
        30.0, "seconds to write what is not on disk yet at the end", minimum=0, metavar="S"
    )


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
        ours = sum(path.stat().st_blocks * 512 for path in store_dir.glob("*.kv"))
    except OSError:
        return 0
    return min(MOST_DISK, (disk.f_bavail * disk.f_frsize + ours) // 2)
