"""The gateway's settings: one frozen value, read once from flags and environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvferry.kvstore.process.roles import ModelRoleConfig
from kvferry.kvstore.process.settings import Size, flag


@dataclass(frozen=True, slots=True)
class GatewayConfig(ModelRoleConfig):
    """`kvferry gateway`."""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8000, "port to listen on; 0: any free one", minimum=0)
    decode_node: tuple[str, ...] = flag(
        (), "a decode node, tcp://HOST:PORT; repeatable", metavar="ADDRESS", own=True
    )
    prefill_node: tuple[str, ...] = flag(
        (), "a prefill node, tcp://HOST:PORT; repeatable", metavar="ADDRESS", own=True
    )
    store_node: tuple[str, ...] = flag(
        (), "the store of a host, tcp://HOST:PORT; repeatable", metavar="ADDRESS", own=True
    )
    served_model_name: tuple[str, ...] = flag((), "name in the API; repeatable [the folder's name]")
    api_key: tuple[str, ...] = flag(
        (), "NAME=SECRET or SECRET; repeatable [none: open to all]", metavar="KEY", secret=True
    )
    admin_api_key: str | None = flag(
        None, "secret for /debug, /admin, resets and /server_info", metavar="KEY", secret=True
    )
    chat_template: Path | None = flag(
        None, "file with another chat template", metavar="FILE", own=True
    )
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
        1.5, "seconds a request waits for another decode node", minimum=0, metavar="S", own=True
    )
    max_request_bytes: Size = flag(16 << 20, "longest body of a request", minimum=1, own=True)
    sse_keep_alive_interval: float = flag(
        10.0,
        "seconds of silence before a comment is sent; 0: never",
        minimum=0,
        metavar="S",
        own=True,
    )
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
    enable_test_hooks: bool = flag(
        False, "accept forced ids and POST /debug/faults: for tests, never in production"
    )
    fd: int | None = flag(None, "inherited listening socket", hidden=True, own=True)
