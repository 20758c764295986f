"""What is known of one HTTP request, and the log line that tells it.

Owns the facts of that line and their order. No text of a prompt and no key is among them; prompts
are told in a line of their own, and only where the operator asked for it. It knows no handler.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from kvferry.gateway.auth import DEFAULT_TENANT
from kvferry.gateway.router.generation import Generation
from kvferry.gateway.tokenizer.tokenizer import Tokenizer
from kvferry.kvstore.wire.generation import STAGES

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Record:
    """Handlers fill in what they learn."""

    method: str
    path: str
    request_id: str
    operation: str = ""
    """What OpenTelemetry calls what the path does, if that is to generate."""
    tenant: str = DEFAULT_TENANT
    status: int = 0
    code: str = ""
    response_id: str = ""
    """What the answer calls itself."""
    admin: bool = False
    """It came with the operator's key."""
    generation: Generation | None = None
    started: float = field(default_factory=time.monotonic)


def record_of(request: Request) -> Record:
    """The record of a request that came through the middleware."""
    record = request.scope["state"]["record"]
    assert isinstance(record, Record)
    return record


def log_request(record: Record, level: int) -> None:
    """The one line of a request that has ended."""
    if not log.isEnabledFor(level):
        return
    facts = _facts(record)
    path = record.path[:100].encode("unicode_escape").decode()
    told = " ".join(f"{name}={_told(value)}" for name, value in facts.items())
    line = f"{record.method} {path} {record.status} {told}"
    http = {"method": record.method, "path": path, "status": record.status}
    log.log(level, "%s", line, extra={"facts": http | facts})


def log_prompts(record: Record, tokenizer: Tokenizer, max_len: int | None) -> None:
    """What a request asks, its first `max_len` characters or ids of each prompt."""
    assert record.generation is not None
    for prompt in record.generation.prompts:
        ids = prompt.ids[:max_len].tolist()
        text = tokenizer.decode(ids, skip_special=False)[:max_len]
        facts = {"request": record.request_id, "prompt": text, "prompt_token_ids": ids}
        log.info(
            "request %s asks %r, %d ids: %s",
            record.request_id,
            text,
            prompt.size,
            ids,
            extra={"facts": facts},
        )


def _told(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _facts(record: Record) -> dict[str, Any]:
    facts: dict[str, Any] = {"request": record.request_id, "tenant": record.tenant}
    if record.response_id:
        facts["response"] = record.response_id
    if record.code:
        facts["code"] = record.code
    if record.generation is not None:
        facts |= _of_generation(record.generation)
    facts["total_ms"] = (time.monotonic() - record.started) * 1000
    return facts


def _of_generation(generation: Generation) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "stream": generation.params.stream,
        "prompt": generation.prompt_tokens,
        "completion": generation.completion_tokens,
    }
    if generation.finish_reasons:
        facts["finish"] = ",".join(sorted(set(generation.finish_reasons)))
    if generation.timeline.ttft is not None:
        facts["ttft_ms"] = generation.timeline.ttft * 1000
    report = generation.report
    if report is not None:
        facts["cached"] = report.cached_tokens
        for name in STAGES:
            facts[f"{name}_ms"] = float(getattr(report.stages, name))
        facts["handoff_ms"] = float(report.handoff_ms)
    return facts
