"""`kvferry decode`: from the command line to a running decode node."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvferry.kvstore.client.client import await_store, store_client
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.node.boot import boot
from kvferry.kvstore.node.config import DecodeConfig
from kvferry.kvstore.node.debug import DebugSwitches
from kvferry.kvstore.process.collector import Collector
from kvferry.kvstore.process.settings import parse


def run(argv: Sequence[str]) -> int:
    """Serves until a signal asks it to drain; the exit status."""
    config = parse(
        DecodeConfig,
        argv,
        os.environ,
        prog="kvferry decode",
        description="A node that generates tokens; gateways and prefill nodes find it by address.",
    )
    with boot("decode", config) as booted:
        # Only now: OpenMP reads the environment that boot has set when torch loads it.
        from kvferry.decode_node.node import DecodeLimits, DecodeNode
        from kvferry.kernels.errors import ModelError
        from kvferry.kernels.load import load_engine

        try:
            engine = load_engine(
                booted.files.folder,
                dtype=config.dtype,
                device=config.device,
                block_size=config.block_size,
                kv_bytes=config.kv_cache_memory_bytes,
                max_model_len=config.max_model_len,
            )
        except ModelError as error:
            raise ConfigError(str(error)) from error
        connect = booted.connector(engine.spec)
        store = store_client(config.store, connect, engine.spec.block_bytes, config.transfer)
        await_store(store, config.store)
        booted.open(engine.spec, config.max_num_seqs)
        limits = DecodeLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_queued=config.max_num_queued_reqs,
            local_prefill=config.local_prefill,
            reuse=config.enable_prefix_caching,
            forced_ids=config.enable_test_hooks,
            load_patience_s=config.load_patience,
        )
        debug = DebugSwitches(config.enable_debug, config.enable_test_hooks)
        node = DecodeNode(engine, booted.server, connect, limits, debug=debug, store=store)
        try:
            node.run(
                booted.stop.fileno(),
                lambda: booted.stop.requested,
                config.shutdown_timeout,
                collector=Collector(),
            )
        finally:
            node.close()
    return 0
