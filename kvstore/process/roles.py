"""The flags that several roles have: all of them, those with a model, those with a ROUTER socket.

Owns their names, defaults, bounds and help, once. A role's own config class inherits them and adds
what it alone has. Nothing here knows which roles there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvferry.kvstore.process.settings import (
    default_cache_dir,
    flag,
    flag_from_environ,
    positional,
)


@dataclass(frozen=True, slots=True)
class RoleConfig:
    """Every role."""

    shutdown_timeout: float = flag(
        30.0, "seconds that running work gets at the end", minimum=0, metavar="S"
    )
    curve_keys: Path | None = flag(
        None, "folder of `kvferry keys`: encrypt, and let nobody else connect", metavar="DIR"
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "least level to log")
    log_format: Literal["text", "json"] = flag("text", "form of log lines")
    enable_debug: bool = flag(False, "let gateways ask for the ledger", hidden=True)
    enable_test_hooks: bool = flag(False, "accept forced ids and injected faults", hidden=True)
    status_fd: int | None = flag(None, "pipe to report to", hidden=True, own=True)


# The two below have no slots: a node's config inherits both, and Python joins the slots of one base
# only.


@dataclass(frozen=True)
class ModelRoleConfig(RoleConfig):
    """A role that reads a model, or its tokenizer only."""

    model: str | None = positional(None, "folder, .gguf file or hub id [SmolLM2-135M-Instruct]")
    cache_dir: Path = flag_from_environ(
        default_cache_dir, "converted models [$XDG_CACHE_HOME/kvferry or ~/.cache/kvferry]"
    )


@dataclass(frozen=True)
class ServerRoleConfig(RoleConfig):
    """A role that others connect to over ZeroMQ, and that pins itself to cores."""

    listen: str = flag("tcp://127.0.0.1:0", "address to bind; port 0 picks one", own=True)
    cores: str | None = flag(None, "cores to run on, as 0-1,3 [all]", own=True)
    nice: int = flag(0, "added to the process's niceness", own=True)
