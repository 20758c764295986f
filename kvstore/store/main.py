"""`kvferry store`: from the command line to a running store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing

import zmq

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.node.boot import bind
from kvferry.kvstore.node.debug import DebugSwitches
from kvferry.kvstore.process.collector import Collector
from kvferry.kvstore.process.cores import apply_cores
from kvferry.kvstore.process.lifecycle import StatusPipe, StopSignal
from kvferry.kvstore.process.logs import set_up_logging
from kvferry.kvstore.process.settings import parse
from kvferry.kvstore.store.config import StoreConfig, default_disk, default_ram
from kvferry.kvstore.store.node import StoreNode
from kvferry.kvstore.store.storage import StoreSizes
from kvferry.kvstore.wire.curve import guarded, load_keys


def run(argv: Sequence[str]) -> int:
    """Serves until a signal ends it; the exit status."""
    config = parse(
        StoreConfig,
        argv,
        os.environ,
        prog="kvferry store",
        description="Keeps the KV blocks of all nodes of this host, in shared memory and on disk.",
    )
    sizes = _sizes(config)
    set_up_logging("store", config.log_level, config.log_format)
    apply_cores(config.cores, None, config.nice, spin=False)
    status = StatusPipe(config.status_fd)
    curve = load_keys(config.curve_keys) if config.curve_keys else None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with guarded(context, curve), StopSignal() as stop:
            server = bind(context, config.listen, curve)
            status.report(address=server.address)
            debug = DebugSwitches(config.enable_debug, config.enable_test_hooks)
            with closing(StoreNode(server, sizes, debug=debug)) as node:
                status.report(ready=True)
                node.run(
                    stop.fileno(),
                    lambda: stop.requested,
                    config.shutdown_timeout,
                    # The blocks that it knows only grow in number: each is walked once.
                    collector=Collector(keeps=True),
                )
    finally:
        context.destroy(0)
    return 0


def _sizes(config: StoreConfig) -> StoreSizes:
    folder = config.store_dir.absolute()
    ram, disk = config.store_ram, config.store_disk
    if ram == 0:
        raise ConfigError("--store-ram 0 turns the store off: there is nothing to start")
    if ram is None:
        ram = default_ram(config.arena_dir)
        if ram == 0:
            raise ConfigError(
                f"there is too little memory, or none to share, at --arena-dir {config.arena_dir}: "
                "say with --store-ram what it may take"
            )
    return StoreSizes(ram, default_disk(folder) if disk is None else disk, folder, config.arena_dir)
