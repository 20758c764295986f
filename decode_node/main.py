"""`kvferry decode`: what a decode node is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.kvstore.node.config import DecodeConfig
from kvferry.kvstore.node.main import Parts, Surroundings, run_node

if TYPE_CHECKING:
    from kvferry.kernels.engine import Engine


def run(argv: Sequence[str]) -> int:
    """Serves until a signal asks it to drain; the exit status."""
    about = "A node that generates tokens; gateways and prefill nodes find it by address."
    return run_node("decode", about, DecodeConfig, argv, _parts)


def _parts() -> Parts[DecodeConfig, Engine]:
    from kvferry.decode_node.node import DecodeLimits, DecodeNode
    from kvferry.kernels.engines.native import Borrowing
    from kvferry.kernels.errors import ModelError
    from kvferry.kernels.load import LoadOptions, load_engine

    def node(engine: Engine, config: DecodeConfig, around: Surroundings) -> DecodeNode:
        limits = DecodeLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_queued=config.max_num_queued_reqs,
            local_prefill=config.local_prefill,
            reuse=config.enable_prefix_caching,
            forced_ids=config.enable_test_hooks,
            load_patience_s=config.load_patience,
        )
        return DecodeNode(
            engine,
            around.server,
            around.connect,
            limits,
            debug=around.debug,
            store=around.store,
            busy=around.busy,
        )

    return Parts(
        load_engine, LoadOptions, Borrowing, ModelError, node, lambda config: config.max_num_seqs
    )
