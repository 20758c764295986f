"""The store's settings: one frozen value, read once from flags and environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvferry.kvstore.process.settings import Size, default_cache_dir, flag, flag_from_environ


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """`kvferry store`."""

    listen: str = flag("tcp://127.0.0.1:0", "address to bind; port 0 picks one")
    store_ram: Size | None = flag(
        None, "shared memory for KV blocks [a quarter of what is available, at most 4GiB]"
    )
    store_disk: Size | None = flag(
        None, "most bytes of KV blocks on disk; 0: none [half of what is free, at most 8GiB]"
    )
    store_dir: Path = flag_from_environ(
        lambda environ: default_cache_dir(environ) / "blocks",
        "directory of the disk tier [in the cache directory]",
    )
    arena_dir: Path = flag(Path("/dev/shm"), "where the shared memory is made", metavar="DIR")
    cores: str | None = flag(None, "cores to run on, as 0-1,3 [all]")
    nice: int = flag(0, "added to the process's niceness")
    shutdown_timeout: float = flag(
        30.0, "seconds to write what is not on disk yet at the end", minimum=0, metavar="S"
    )
    curve_keys: Path | None = flag(
        None, "folder of `kvferry keys`: encrypt, and let nobody else connect", metavar="DIR"
    )
    status_fd: int | None = flag(None, "pipe to report to", hidden=True)
    enable_debug: bool = flag(False, "let gateways ask for the ledger", hidden=True)
    enable_test_hooks: bool = flag(False, "accept injected faults", hidden=True)
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "least level to log")
    log_format: Literal["text", "json"] = flag("text", "form of log lines")
