"""What `kvferry serve` can be told, and what follows from it for each role on this host.

Owns the flags of `serve`, the cores and priorities of the roles, and the command line of each. All
of it is values in, values out: nothing here starts a process, opens a socket or reads a model.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.model_files import ModelFiles
from kvferry.kvstore.process import format_cores, parse_cores
from kvferry.kvstore.settings import (
    Size,
    default_cache_dir,
    flag,
    flag_from_environ,
    positional,
    to_argv,
    to_environ,
    without_settings,
)

# The fields of ServeConfig that a role's own config class has too; a test compares them.
_EVERY_ROLE = ("cache_dir", "log_level")
PREFILL_FLAGS = (
    "max_num_batched_tokens",
    "max_model_len",
    "kv_cache_memory_bytes",
    "dtype",
    "block_size",
    *_EVERY_ROLE,
)
DECODE_FLAGS = (*PREFILL_FLAGS, "max_num_seqs", "local_prefill", "enable_test_hooks")
GATEWAY_FLAGS = (
    "host",
    "port",
    "api_key",
    "admin_api_key",
    "shutdown_timeout",
    "enable_debug",
    "enable_test_hooks",
    *_EVERY_ROLE,
)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """All roles on one host. Fields named as in a role's own config are handed on to it."""

    model: str | None = positional(None, "folder, .gguf file or hub id [SmolLM2-135M-Instruct]")
    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8000, "port to listen on; 0: any free one", minimum=0)
    served_model_name: tuple[str, ...] = flag((), "name in the API; repeatable [the folder's name]")
    api_key: tuple[str, ...] = flag(
        (), "NAME=SECRET or SECRET; repeatable [none: open to all]", metavar="KEY", secret=True
    )
    admin_api_key: str | None = flag(
        None, "secret for /debug and administration", metavar="KEY", secret=True
    )
    max_model_len: int | None = flag(
        None, "longest prompt and output together, tokens [the model's]", minimum=1
    )
    max_num_seqs: int = flag(16, "sequences decoded at once", minimum=1)
    max_num_batched_tokens: int = flag(512, "tokens a prefill pass computes at most", minimum=64)
    kv_cache_memory_bytes: Size = flag(2 << 30, "memory for KV blocks, each node", minimum=1)
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = flag(
        "auto", "type of weights and KV"
    )
    block_size: int = flag(16, "tokens a KV block", minimum=1)
    prefill_nodes: int | None = flag(
        None, "0: the decode node prefills by itself [1; on one core 0]", minimum=0, metavar="N"
    )
    local_prefill: int = flag(
        128, "tokens up to which the decode node prefills by itself", minimum=0, metavar="N"
    )
    decode_cores: str | None = flag(None, "cores of the decode node: 0,2 or 0-3 [the first half]")
    prefill_cores: str | None = flag(None, "cores of the prefill node, at low priority [all]")
    cache_dir: Path = flag_from_environ(
        default_cache_dir, "converted models [$XDG_CACHE_HOME/kvferry or ~/.cache/kvferry]"
    )
    shutdown_timeout: float = flag(
        30.0, "seconds that running requests get at the end", minimum=0, metavar="S"
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "least level shown")
    enable_debug: bool = flag(False, "serve GET /debug/ledger to the admin key")
    enable_test_hooks: bool = flag(
        False, "serve POST /debug/faults: for tests, never in production"
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Where one role runs. A prefill node gives way: its threads block, its priority is low."""

    cores: frozenset[int]
    nice: int = 0

    @property
    def threads(self) -> int:
        return len(self.cores)


@dataclass(frozen=True, slots=True)
class Placement:
    decode: Place
    prefill: Place | None
    """None: the decode node is alone."""
    gateway: Place


def place(config: ServeConfig, available: frozenset[int]) -> Placement:
    """Who computes where.

    The decode node gets the first half of the cores at normal priority, one thread a core. The
    prefill node may use every core, but at the lowest priority and with threads that block, so the
    operating system lends it what decoding leaves idle and decoding does not notice. The gateway
    keeps off the decode node's cores. A decode node that is alone gets every core.
    """
    everywhere = frozenset(available)
    if _prefill_nodes(config, len(everywhere)) == 0:
        if config.prefill_cores:
            raise ConfigError(
                f"--prefill-cores {config.prefill_cores} without a prefill node: drop it, "
                "or set --prefill-nodes 1"
            )
        alone = parse_cores(config.decode_cores) if config.decode_cores else everywhere
        return Placement(Place(alone), None, Place((everywhere - alone) or everywhere))
    half = frozenset(sorted(everywhere)[: max(1, len(everywhere) // 2)])
    decode = parse_cores(config.decode_cores) if config.decode_cores else half
    prefill = parse_cores(config.prefill_cores) if config.prefill_cores else everywhere
    return Placement(
        Place(decode), Place(prefill, nice=19), Place((everywhere - decode) or everywhere)
    )


def _prefill_nodes(config: ServeConfig, cores: int) -> int:
    if config.prefill_nodes is None:
        return 0 if cores == 1 else 1
    if config.prefill_nodes > 1:
        raise ConfigError(
            f"--prefill-nodes {config.prefill_nodes}: more than one prefill node is not supported "
            "yet; use 1, or 0 for a decode node alone"
        )
    return config.prefill_nodes


# -- command lines ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """One supervised role: how to start it, but for what only the running supervisor knows."""

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    cores: frozenset[int] | None = None
    """Set from outside before it starts; a node pins itself."""


def role_specs(
    config: ServeConfig, placement: Placement, model: ModelFiles, environ: Mapping[str, str]
) -> tuple[RoleSpec, tuple[RoleSpec, ...]]:
    """The gateway and the nodes."""
    model_flag = f"--model={model.folder}"
    # A role reads its flags and nothing else: what `serve` was told by environment is in them.
    clean = without_settings(environ)
    names = config.served_model_name or (model.name,)
    gateway = RoleSpec(
        "gateway",
        (
            *_command("gateway"),
            model_flag,
            *(f"--served-model-name={name}" for name in names),
            *to_argv(config, GATEWAY_FLAGS),
        ),
        clean | to_environ(config, GATEWAY_FLAGS),
        placement.gateway.cores,
    )
    nodes: list[tuple[str, Place, tuple[str, ...]]] = [("decode", placement.decode, DECODE_FLAGS)]
    if placement.prefill is not None:
        nodes.append(("prefill", placement.prefill, PREFILL_FLAGS))
    return gateway, tuple(
        RoleSpec(
            name,
            (*_command(name), model_flag, *_place_flags(where), *to_argv(config, flags)),
            clean,
        )
        for name, where, flags in nodes
    )


def _command(role: str) -> tuple[str, ...]:
    # -P: whatever the current folder holds, it is not imported.
    return (sys.executable, "-P", "-m", "kvferry", role)


def _place_flags(where: Place) -> tuple[str, ...]:
    cores, threads = format_cores(where.cores), where.threads
    return (f"--cores={cores}", f"--threads={threads}", f"--nice={where.nice}")
