"""From the command line to a running node, the same for both roles.

Owns the order of the steps. What computes and what the node is are the role's own: it hands in
`Parts`, by a callable that imports them, because nothing here may know tensors, and because they
may be imported only after `boot` has set the environment of their threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from kvferry.kvstore.client.client import StoreClient, await_store, store_client
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.node.boot import Computes, boot
from kvferry.kvstore.node.compute import ComputeNode
from kvferry.kvstore.node.config import NodeConfig
from kvferry.kvstore.node.debug import DebugSwitches
from kvferry.kvstore.process.busy import BusyBoard
from kvferry.kvstore.process.collector import Collector
from kvferry.kvstore.process.cores import available_cores, cores_in
from kvferry.kvstore.process.model_files import content_digest
from kvferry.kvstore.process.settings import parse
from kvferry.kvstore.wire.client import Client
from kvferry.kvstore.wire.server import Server


class Loaded(Protocol):
    """An engine, as far as it is known here."""

    @property
    def spec(self) -> Computes: ...


Config = TypeVar("Config", bound=NodeConfig)
Engine = TypeVar("Engine", bound=Loaded)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a node has beside its engine."""

    server: Server
    connect: Callable[[str], Client]
    """Links to another node."""
    store: StoreClient | None
    debug: DebugSwitches
    busy: Callable[[bool], None] | None
    """Tells the other nodes of this host whether it computes."""


@dataclass(frozen=True, slots=True)
class Parts(Generic[Config, Engine]):
    """What one role's nodes are made of."""

    load: Callable[..., Engine]
    """`kernels.load.load_engine`."""
    options: Callable[..., object]
    """`kernels.load.LoadOptions`."""
    borrowing: Callable[..., object]
    """`kernels.engines.native.Borrowing`."""
    refusal: type[Exception]
    """What `load` raises of a model that cannot be served."""
    node: Callable[[Engine, Config, Surroundings], ComputeNode[Any]]
    max_num_seqs: Callable[[Config], int] = lambda config: 0
    """How many sequences it decodes at once."""


def run_node(
    role: str,
    description: str,
    kind: type[Config],
    argv: Sequence[str],
    imports: Callable[[], Parts[Config, Engine]],
) -> int:
    """Serves until a signal asks it to drain; the exit status.

    Raises
    ------
    ConfigError
        A flag, the model, the address or the keys cannot be used.
    """
    config = parse(kind, argv, os.environ, prog=f"kvferry {role}", description=description)
    with boot(role, config) as booted:
        parts = imports()  # only now: OpenMP reads the environment that boot has set
        board = BusyBoard(config.busy_fd) if config.busy_fd is not None else None
        try:
            engine = parts.load(
                booted.files.folder,
                parts.options(
                    dtype=config.dtype,
                    quantization=config.quantization,
                    kv_cache_dtype=config.kv_cache_dtype,
                    device=config.device,
                    block_size=config.block_size,
                    kv_bytes=config.kv_cache_memory_bytes,
                    max_model_len=config.max_model_len,
                    threads=config.threads,
                    isa=config.isa,
                    borrowing=_borrowing(config, board, parts),
                ),
                cache_dir=config.cache_dir,
                digest=content_digest(booted.files.folder, config.cache_dir),
            )
        except parts.refusal as error:
            raise ConfigError(str(error)) from error
        connect = booted.connector(engine.spec)
        store = store_client(config.store, connect, engine.spec.block_bytes, config.transfer)
        await_store(store, config.store)
        booted.open(engine.spec, parts.max_num_seqs(config))
        debug = DebugSwitches(config.enable_debug, config.enable_test_hooks)
        busy = partial(board.set, config.busy_line) if board is not None else None
        around = Surroundings(booted.server, connect, store, debug, busy)
        with closing(parts.node(engine, config, around)) as node:
            node.run(
                booted.stop.fileno(),
                lambda: booted.stop.requested,
                config.shutdown_timeout,
                collector=Collector(),
            )
    return 0


def _borrowing(
    config: NodeConfig, board: BusyBoard | None, parts: Parts[Any, Any]
) -> object | None:
    """The cores that are this node's own, and those that are it only while no other computes."""
    if board is None or config.borrow_cores is None:
        return None
    borrowed = cores_in(config.borrow_cores)
    own = (cores_in(config.cores) if config.cores else available_cores()) - borrowed
    if not own:
        return None
    return parts.borrowing(
        tuple(sorted(own)), tuple(sorted(borrowed)), board.memory, board.lines, config.busy_line
    )
