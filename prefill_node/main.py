"""`kvferry prefill`: what a prefill node is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.kvstore.node.config import PrefillConfig
from kvferry.kvstore.node.main import Parts, Surroundings, run_node

if TYPE_CHECKING:
    from kvferry.kernels.engine import Engine


def run(argv: Sequence[str]) -> int:
    """Serves until a signal asks it to drain; the exit status."""
    about = "A node that computes prompts and ships their KV blocks to decode nodes."
    return run_node("prefill", about, PrefillConfig, argv, _parts)


def _parts() -> Parts[PrefillConfig, Engine]:
    from kvferry.kernels.engines.native import Borrowing
    from kvferry.kernels.errors import ModelError
    from kvferry.kernels.load import LoadOptions, load_engine
    from kvferry.prefill_node.node import PrefillNode

    def node(engine: Engine, config: PrefillConfig, around: Surroundings) -> PrefillNode:
        return PrefillNode(
            engine,
            around.server,
            config.max_num_batched_tokens,
            max_queued=config.max_num_queued_reqs,
            reuse=config.enable_prefix_caching,
            debug=around.debug,
            store=around.store,
            busy=around.busy,
            load_patience_s=config.load_patience,
        )

    return Parts(load_engine, LoadOptions, Borrowing, ModelError, node)
