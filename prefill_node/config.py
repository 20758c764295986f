"""The prefill node's settings: one frozen value, read once from flags and environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvferry.kvstore.process.settings import (
    Size,
    default_cache_dir,
    flag,
    flag_from_environ,
    positional,
)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """`kvferry prefill`."""

    model: str | None = positional(None, "folder, .gguf file or hub id [SmolLM2-135M-Instruct]")
    listen: str = flag("tcp://127.0.0.1:0", "address to bind; port 0 picks one")
    max_num_batched_tokens: int = flag(512, "tokens computed in one pass", minimum=64)
    max_num_queued_reqs: int = flag(256, "offers that may wait for room", minimum=1)
    max_model_len: int | None = flag(None, "longest prompt and output, tokens [the model's]")
    kv_cache_memory_bytes: Size = flag(2 << 30, "memory for KV blocks")
    enable_prefix_caching: bool = flag(True, "reuse blocks of earlier prompts")
    block_size: int = flag(16, "tokens per KV block: 8, 16, 32 or 64")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = flag("auto", "weights and KV")
    device: str = flag("auto", "cpu or cuda; auto: cuda if there is one")
    cores: str | None = flag(None, "cores to run on, as 0-1,3 [all]")
    threads: int | None = flag(None, "compute threads [one a core]")
    nice: int = flag(0, "added to the process's niceness")
    spin: bool = flag(False, "idle threads spin instead of blocking")
    shutdown_timeout: float = flag(
        30.0, "seconds that running work gets at the end", minimum=0, metavar="S"
    )
    store: str | None = flag(None, "the store of this host, tcp://HOST:PORT", metavar="ADDRESS")
    transfer: Literal["auto", "arena", "inline"] = flag(
        "auto", "how blocks travel on one host: by shared memory or in messages"
    )
    curve_keys: Path | None = flag(
        None, "folder of `kvferry keys`: encrypt, and let nobody else connect", metavar="DIR"
    )
    cache_dir: Path = flag_from_environ(default_cache_dir, "where converted models are kept")
    status_fd: int | None = flag(None, "pipe to report to", hidden=True)
    load_patience: float = flag(
        0.25, "seconds that a load from the store gets at least", minimum=0, hidden=True
    )
    enable_debug: bool = flag(False, "let gateways ask for the ledger", hidden=True)
    enable_test_hooks: bool = flag(False, "accept injected faults", hidden=True)
    name: str | None = flag(None, "what its log lines call it [prefill]")
    log_level: Literal["debug", "info", "warning", "error"] = flag("info", "least level to log")
    log_format: Literal["text", "json"] = flag("text", "form of log lines")
