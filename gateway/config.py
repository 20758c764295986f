"""The gateway's settings: one frozen value, read once from flags and environment."""

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
class GatewayConfig:
    """`kvferry gateway`."""

    model: str | None = positional(None, "folder, .gguf file or hub id [SmolLM2-135M-Instruct]")
    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8000, "port to listen on; 0: any free one", minimum=0)
    decode_node: tuple[str, ...] = flag(
        (), "a decode node, tcp://HOST:PORT; repeatable", metavar="ADDRESS"
    )
    prefill_node: tuple[str, ...] = flag(
        (), "a prefill node, tcp://HOST:PORT; repeatable", metavar="ADDRESS"
    )
    store_node: tuple[str, ...] = flag(
        (), "the store of a host, tcp://HOST:PORT; repeatable", metavar="ADDRESS"
    )
    served_model_name: tuple[str, ...] = flag((), "name in the API; repeatable [the folder's name]")
    api_key: tuple[str, ...] = flag(
        (), "NAME=SECRET or SECRET; repeatable [none: open to all]", metavar="KEY", secret=True
    )
    admin_api_key: str | None = flag(
        None, "secret for /debug, /admin, resets and /server_info", metavar="KEY", secret=True
    )
    chat_template: Path | None = flag(None, "file with another chat template", metavar="FILE")
    max_num_queued_reqs: int = flag(
        1024, "requests that may wait beyond those that run at once", minimum=1, metavar="N"
    )
    first_token_timeout: float = flag(
        0.0, "seconds a request may wait for its first token; 0: for ever", minimum=0, metavar="S"
    )
    request_timeout: float = flag(
        0.0, "seconds a request may take as a whole; 0: for ever", minimum=0, metavar="S"
    )
    resume_timeout: float = flag(
        1.5, "seconds a request waits for another decode node", minimum=0, metavar="S"
    )
    max_request_bytes: Size = flag(16 << 20, "longest body of a request", minimum=1)
    sse_keep_alive_interval: float = flag(
        10.0, "seconds of silence before a comment is sent; 0: never", minimum=0, metavar="S"
    )
    shutdown_timeout: float = flag(
        30.0, "seconds that running requests get at the end", minimum=0, metavar="S"
    )
    curve_keys: Path | None = flag(
        None, "folder of `kvferry keys`: encrypt, and let nobody else connect", metavar="DIR"
    )
    cache_dir: Path = flag_from_environ(
        default_cache_dir, "converted models [$XDG_CACHE_HOME/kvferry or ~/.cache/kvferry]"
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
    enable_test_hooks: bool = flag(False, "accept forced token ids: for tests, never in production")
    fd: int | None = flag(None, "inherited listening socket", hidden=True)
    status_fd: int | None = flag(None, "pipe to report to", hidden=True)
