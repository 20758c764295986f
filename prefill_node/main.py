"""`kvferry prefill`: from the command line to a running prefill node."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvferry.kvstore.client.client import await_store, store_client
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.node.boot import boot
from kvferry.kvstore.node.config import PrefillConfig
from kvferry.kvstore.node.debug import DebugSwitches
from kvferry.kvstore.process.collector import Collector
from kvferry.kvstore.process.settings import parse


def run(argv: Sequence[str]) -> int:
    """Serves until a signal asks it to drain; the exit status."""
    config = parse(
        PrefillConfig,
        argv,
        os.environ,
        prog="kvferry prefill",
        description="A node that computes prompts and ships their KV blocks to decode nodes.",
    )
    with boot("prefill", config) as booted:
        # Only now: OpenMP reads the environment that boot has set when torch loads it.
        from kvferry.kernels.errors import ModelError
        from kvferry.kernels.load import load_engine
        from kvferry.prefill_node.node import PrefillNode

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
        store = store_client(
            config.store,
            booted.connector(engine.spec),
            engine.spec.block_bytes,
            config.transfer,
        )
        await_store(store, config.store)
        booted.open(engine.spec, 0)
        node = PrefillNode(
            engine,
            booted.server,
            config.max_num_batched_tokens,
            max_queued=config.max_num_queued_reqs,
            reuse=config.enable_prefix_caching,
            debug=DebugSwitches(config.enable_debug, config.enable_test_hooks),
            store=store,
            load_patience_s=config.load_patience,
        )
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
