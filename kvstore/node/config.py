"""The settings of decode and prefill nodes: frozen values, read once from flags and environment.

Owns what both kinds are told, and what one of them is told beside it. What the values mean is for
the nodes to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvferry.kvstore.process.roles import ModelRoleConfig, ServerRoleConfig
from kvferry.kvstore.process.settings import Size, flag


@dataclass(frozen=True, slots=True)
class NodeConfig(ModelRoleConfig, ServerRoleConfig):
    """Both kinds of nodes."""

    max_model_len: int | None = flag(
        None, "longest prompt and output together, tokens [the model's]", minimum=1
    )
    max_num_batched_tokens: int = flag(512, "tokens computed in one pass at most", minimum=64)
    max_num_queued_reqs: int = flag(256, "requests that may wait for room", minimum=1)
    kv_cache_memory_bytes: Size = flag(2 << 30, "memory for KV blocks, each node", minimum=1)
    enable_prefix_caching: bool = flag(True, "reuse blocks of earlier requests", own=True)
    block_size: int = flag(16, "tokens per KV block: 8, 16, 32 or 64", minimum=1)
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = flag(
        "auto", "type of weights that are not quantised, and of their KV"
    )
    quantization: Literal["auto", "none", "int8", "gguf"] = flag(
        "auto", "weights on a CPU; auto: as a GGUF file has them, else int8; none with a --dtype"
    )
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16"] = flag(
        "auto", "type of KV; auto: --dtype, or float16 beside quantised weights"
    )
    isa: Literal["auto", "avx512", "avx2", "portable"] = flag(
        "auto", "instruction set of the native engine", hidden=True
    )
    device: str = flag("auto", "cpu or cuda; auto: cuda if there is one", own=True)
    threads: int | None = flag(None, "compute threads [one a core]", own=True)
    borrow_cores: str | None = flag(
        None, "cores to compute on while no other node does", hidden=True, own=True
    )
    busy_fd: int | None = flag(None, "board of the nodes that compute", hidden=True, own=True)
    busy_line: int = flag(0, "this node's line of that board", hidden=True, own=True)
    spin: bool = flag(False, "idle threads spin instead of blocking", own=True)
    store: str | None = flag(
        None, "the store of this host, tcp://HOST:PORT", metavar="ADDRESS", own=True
    )
    transfer: Literal["auto", "arena", "inline"] = flag(
        "auto", "how blocks travel on one host: by shared memory or in messages"
    )
    load_patience: float = flag(
        0.25, "seconds that a fetch from the store gets at least", minimum=0, hidden=True, own=True
    )
    name: str | None = flag(None, "what its log lines call it [decode or prefill]", own=True)


@dataclass(frozen=True, slots=True)
class PrefillConfig(NodeConfig):
    """`kvferry prefill`."""


@dataclass(frozen=True, slots=True)
class DecodeConfig(NodeConfig):
    """`kvferry decode`."""

    max_num_seqs: int = flag(16, "sequences decoded at once", minimum=1)
    local_prefill: int = flag(
        128, "tokens up to which the decode node prefills by itself", minimum=0
    )
