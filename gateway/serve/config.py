"""What `kvferry serve` can be told, and what follows from it for each role on this host.

Owns the flags of `serve`, the cores and priorities of the roles, and the command line of each. All
of it is values in, values out, but for the size of a store that nobody has said: that is looked up.
Nothing here starts a process, opens a socket or reads a model.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process.model_files import ModelFiles
from kvferry.kvstore.process.process import format_cores, parse_cores
from kvferry.kvstore.process.settings import (
    Size,
    default_cache_dir,
    flag,
    flag_from_environ,
    positional,
    to_argv,
    to_environ,
    without_settings,
)
from kvferry.kvstore.store.defaults import default_disk, default_ram

# The fields of ServeConfig that a role's own config class has too; a test compares them.
_EVERY_ROLE = (
    "cache_dir",
    "curve_keys",
    "log_level",
    "log_format",
    "max_num_queued_reqs",
    "shutdown_timeout",
)
PREFILL_FLAGS = (
    "max_num_batched_tokens",
    "max_model_len",
    "kv_cache_memory_bytes",
    "dtype",
    "block_size",
    "transfer",
    "enable_debug",
    "enable_test_hooks",
    *_EVERY_ROLE,
)
DECODE_FLAGS = (*PREFILL_FLAGS, "max_num_seqs", "local_prefill")
GATEWAY_FLAGS = (
    "host",
    "port",
    "api_key",
    "admin_api_key",
    "first_token_timeout",
    "request_timeout",
    "enable_log_requests",
    "max_log_len",
    "metrics_compat",
    "otlp_traces_endpoint",
    "enable_debug",
    "enable_test_hooks",
    *_EVERY_ROLE,
)
STORE_FLAGS = (
    "arena_dir",
    "curve_keys",
    "shutdown_timeout",
    "log_level",
    "log_format",
    "enable_debug",
    "enable_test_hooks",
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
        None, "secret for /debug, /admin, resets and /server_info", metavar="KEY", secret=True
    )
    max_model_len: int | None = flag(
        None, "longest prompt and output together, tokens [the model's]", minimum=1
    )
    max_num_seqs: int = flag(16, "sequences decoded at once", minimum=1)
    max_num_queued_reqs: int = flag(
        256, "requests that may wait beyond those that run at once", minimum=1, metavar="N"
    )
    max_num_batched_tokens: int = flag(512, "tokens a prefill pass computes at most", minimum=64)
    kv_cache_memory_bytes: Size = flag(2 << 30, "memory for KV blocks, each node", minimum=1)
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = flag(
        "auto", "type of weights and KV"
    )
    block_size: int = flag(16, "tokens a KV block", minimum=1)
    decode_nodes: int = flag(1, "how many nodes generate tokens", minimum=1, metavar="N")
    prefill_nodes: int | None = flag(
        None, "0: decode nodes prefill by themselves [1; on one core 0]", minimum=0, metavar="N"
    )
    local_prefill: int = flag(
        128, "tokens up to which the decode node prefills by itself", minimum=0, metavar="N"
    )
    store_ram: Size | None = flag(
        None,
        "shared memory for KV blocks; 0: no store "
        "[a quarter of what is available beside the nodes' own, at most 4GiB]",
    )
    store_disk: Size | None = flag(
        None, "most bytes of KV blocks on disk; 0: none [half of what is free, at most 8GiB]"
    )
    store_dir: Path | None = flag(
        None, "where blocks outlive a restart [blocks in --cache-dir]", metavar="DIR"
    )
    arena_dir: Path = flag(Path("/dev/shm"), "where the shared memory is made", metavar="DIR")
    transfer: Literal["auto", "arena", "inline"] = flag(
        "auto", "how blocks travel on this host: by shared memory or in messages"
    )
    decode_cores: str | None = flag(None, "cores of decode nodes: 0,2 or 0-3 [the first half]")
    prefill_cores: str | None = flag(None, "cores of prefill nodes, at low priority [all]")
    curve_keys: Path | None = flag(
        None, "folder of `kvferry keys`: encrypt, and let nobody else connect", metavar="DIR"
    )
    cache_dir: Path = flag_from_environ(
        default_cache_dir, "converted models [$XDG_CACHE_HOME/kvferry or ~/.cache/kvferry]"
    )
    first_token_timeout: float = flag(
        0.0, "seconds a request may wait for its first token; 0: for ever", minimum=0, metavar="S"
    )
    request_timeout: float = flag(
        0.0, "seconds a request may take as a whole; 0: for ever", minimum=0, metavar="S"
    )
    shutdown_timeout: float = flag(
        30.0, "seconds that running requests get at the end", minimum=0, metavar="S"
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "least level shown")
    log_format: Literal["text", "json"] = flag("text", "form of log lines")
    enable_log_requests: bool = flag(False, "log the text and ids of prompts")
    max_log_len: int | None = flag(
        None, "characters or ids of a prompt that are logged [all]", minimum=0, metavar="N"
    )
    metrics_compat: Literal["vllm"] | None = flag(
        None, "export metrics under these names too", metavar="NAMES"
    )
    otlp_traces_endpoint: str | None = flag(
        None, "URL that gets OpenTelemetry spans, OTLP over HTTP", metavar="URL"
    )
    enable_debug: bool = flag(False, "serve GET /debug/ledger to the admin key")
    enable_test_hooks: bool = flag(
        False, "serve POST /debug/faults: for tests, never in production"
    )


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What the store of this host may take."""

    ram: int
    disk: int
    folder: Path


def plan_store(config: ServeConfig, cores: int) -> StorePlan | None:
    """The store's share of this host, looked up where it was not said; None: no store."""
    folder = (config.store_dir or config.cache_dir / "blocks").absolute()
    ram = config.store_ram
    if ram is None:
        count = config.decode_nodes + _prefill_nodes(config, cores)
        ram = default_ram(config.arena_dir, count * config.kv_cache_memory_bytes)
    if ram == 0:
        return None
    disk = default_disk(folder) if config.store_disk is None else config.store_disk
    return StorePlan(ram, disk, folder)


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
    keeps off the decode node's cores. A decode node that is alone gets every core. Several decode
    nodes share out that half, or as many cores as they are if that is more; with fewer cores than
    nodes each may use all. Several prefill nodes share theirs, and the system divides them.
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
    count = max(1, len(everywhere) // 2, min(config.decode_nodes, len(everywhere)))
    half = frozenset(sorted(everywhere)[:count])
    decode = parse_cores(config.decode_cores) if config.decode_cores else half
    prefill = parse_cores(config.prefill_cores) if config.prefill_cores else everywhere
    return Placement(
        Place(decode), Place(prefill, nice=19), Place((everywhere - decode) or everywhere)
    )


def _prefill_nodes(config: ServeConfig, cores: int) -> int:
    if config.prefill_nodes is None:
        return 0 if cores == 1 else 1
    return config.prefill_nodes


def shares(place: Place, count: int) -> list[Place]:
    """The places of `count` decode nodes that have `place` between them."""
    cores = sorted(place.cores)
    if count == 1 or len(cores) < count:
        return [place] * count
    return [Place(frozenset(cores[number::count]), place.nice) for number in range(count)]


# -- command lines ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """One supervised role: how to start it, but for what only the running supervisor knows."""

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    cores: frozenset[int] | None = None
    """Set from outside before it starts; a node pins itself."""

    @property
    def role(self) -> str:
        """`gateway`, `decode`, `prefill` or `store`: the name without the number."""
        return self.name.partition("-")[0]


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
    places: list[tuple[str, Place, tuple[str, ...]]] = [
        ("decode", where, DECODE_FLAGS) for where in shares(placement.decode, config.decode_nodes)
    ]
    if placement.prefill is not None:
        count = max(1, config.prefill_nodes or 1)
        places += [("prefill", placement.prefill, PREFILL_FLAGS)] * count
    totals = Counter(role for role, _, _ in places)
    numbers = {role: iter(range(total)) for role, total in totals.items()}

    def node(role: str, where: Place, flags: tuple[str, ...]) -> RoleSpec:
        name = role if totals[role] == 1 else f"{role}-{next(numbers[role])}"
        told = (f"--name={name}", *_place_flags(where), *to_argv(config, flags))
        return RoleSpec(name, (*_command(role), model_flag, *told), clean)

    return gateway, tuple(node(*one) for one in places)


def store_spec(
    config: ServeConfig, placement: Placement, plan: StorePlan, environ: Mapping[str, str]
) -> RoleSpec:
    """The store. It keeps off the decode node's cores, as the gateway does."""
    told = (
        f"--store-ram={plan.ram}",
        f"--store-disk={plan.disk}",
        f"--store-dir={plan.folder}",
        f"--cores={format_cores(placement.gateway.cores)}",
        *to_argv(config, STORE_FLAGS),
    )
    return RoleSpec("store", (*_command("store"), *told), without_settings(environ))


def _command(role: str) -> tuple[str, ...]:
    # -P: whatever the current folder holds, it is not imported.
    return (sys.executable, "-P", "-m", "kvferry", role)


def _place_flags(where: Place) -> tuple[str, ...]:
    cores, threads = format_cores(where.cores), where.threads
    return (f"--cores={cores}", f"--threads={threads}", f"--nice={where.nice}")
