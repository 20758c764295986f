"""The store's settings: one frozen value, read once from flags and environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvferry.kvstore.process.roles import ServerRoleConfig
from kvferry.kvstore.process.settings import Size, default_cache_dir, flag, flag_from_environ


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
