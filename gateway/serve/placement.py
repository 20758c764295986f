"""Who gets what of this host: cores, threads and niceness of each role, and the store's share.

Owns these decisions, and the config and the command line that each role gets by them. All of it is
values in, values out, but for the size of a store that nobody has said: that is looked up. Nothing
here starts a process, opens a socket or reads a model.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvferry.gateway.serve.config import ServeConfig
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.node.config import NodeConfig
from kvferry.kvstore.process.cores import format_cores, parse_cores
from kvferry.kvstore.process.model_files import ModelFiles
from kvferry.kvstore.process.roles import RoleConfig
from kvferry.kvstore.process.settings import to_argv, to_environ, without_settings
from kvferry.kvstore.store.config import default_disk, default_ram


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What the store of this host may take."""

    ram: int
    disk: int
    folder: Path


def plan_store(config: ServeConfig, cores: int) -> StorePlan | None:
    """The store's share of this host, looked up where it was not said; None: no store."""
    folder = (config.store_dir or config.gateway.cache_dir / "blocks").absolute()
    ram, disk = config.store.store_ram, config.store.store_disk
    if ram is None:
        count = config.decode_nodes + _prefill_nodes(config, cores)
        ram = default_ram(config.store.arena_dir, count * config.decode.kv_cache_memory_bytes)
    if ram == 0:
        return None
    return StorePlan(ram, default_disk(folder) if disk is None else disk, folder)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one role runs. A prefill node gives way: its threads block, its priority is low."""

    cores: frozenset[int]
    nice: int = 0
    borrowed: frozenset[int] = frozenset()
    """Where it computes while no other node does; its own cores may be among `cores`."""

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
    operating system lends it what decoding leaves idle and decoding does not notice. An engine that
    can do it computes on the first half of the cores in the decode node and on the others in the
    prefill node, and on all of them while the other node does not, unless cores were asked for. The
    gateway keeps off the decode node's cores. A decode node that is alone gets every core. Several
    decode nodes share out that half, or as many cores as they are if that is more; with fewer cores
    than nodes each may use all. Several prefill nodes share theirs, and the system divides them.
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
    others = frozenset() if config.decode_cores else everywhere - decode
    lent = frozenset() if config.prefill_cores else decode & prefill
    return Placement(
        Place(decode, borrowed=others),
        Place(prefill, nice=19, borrowed=lent if lent < prefill else frozenset()),
        Place((everywhere - decode) or everywhere),
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
    parts = [frozenset(cores[number::count]) for number in range(count)]
    return [replace(place, cores=part) for part in parts]


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
    folder, waiting = str(model.folder), config.max_num_queued_reqs
    names = config.gateway.served_model_name or (model.name,)
    gateway = replace(
        config.gateway, model=folder, served_model_name=names, max_num_queued_reqs=waiting
    )
    decode = replace(config.decode, model=folder, max_num_queued_reqs=waiting)
    prefill = replace(config.prefill, model=folder, max_num_queued_reqs=waiting)
    nodes = _nodes("decode", decode, shares(placement.decode, config.decode_nodes), environ)
    if placement.prefill is not None:
        places = [placement.prefill] * (config.prefill_nodes or 1)
        nodes += _nodes("prefill", prefill, places, environ)
    return _spec("gateway", gateway, environ, placement.gateway.cores), tuple(nodes)


def _nodes(
    role: str, config: NodeConfig, places: Sequence[Place], environ: Mapping[str, str]
) -> list[RoleSpec]:
    """The nodes of one kind; several are numbered."""
    names = [role] if len(places) == 1 else [f"{role}-{number}" for number in range(len(places))]
    configs = [
        replace(
            config,
            name=name,
            cores=format_cores(at.cores),
            threads=at.threads,
            nice=at.nice,
            borrow_cores=format_cores(at.borrowed) or None,
        )
        for name, at in zip(names, places, strict=True)
    ]
    return [_spec(name, node, environ) for name, node in zip(names, configs, strict=True)]


def store_spec(
    config: ServeConfig, placement: Placement, plan: StorePlan, environ: Mapping[str, str]
) -> RoleSpec:
    """The store. It keeps off the decode node's cores, as the gateway does."""
    store = replace(
        config.store,
        store_ram=plan.ram,
        store_disk=plan.disk,
        store_dir=plan.folder,
        cores=format_cores(placement.gateway.cores),
    )
    return _spec("store", store, environ)


def _spec(
    name: str,
    config: RoleConfig,
    environ: Mapping[str, str],
    cores: frozenset[int] | None = None,
) -> RoleSpec:
    # -P: whatever the current folder holds, it is not imported.
    command = (sys.executable, "-P", "-m", "kvferry", name.partition("-")[0], *to_argv(config))
    # A role reads its flags and nothing else: what `serve` was told by environment is in them.
    return RoleSpec(name, command, without_settings(environ) | to_environ(config), cores)
