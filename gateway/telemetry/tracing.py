"""OpenTelemetry spans: one for each request that generates, and one for each stage of it.

Owns the translation of a finished request into spans, by the names of the GenAI conventions, and
the exporter's thread. Spans are made when a request has ended, with the times that it had; whatever
goes wrong here is logged and harms no request. The packages are optional (`kvferry[otel]`), so
nothing is imported before an endpoint is configured. No span has a prompt's text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from threading import Thread
from typing import TYPE_CHECKING, Any

from kvferry.gateway.router.generation import Generation
from kvferry.gateway.telemetry.access_log import Record
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.wire.generation import STAGES

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

log = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""What the exporter gets for its last spans when the process ends."""


class Tracer:
    """Makes spans and hands them to an exporter on a thread of its own."""

    def __init__(self, exporter: SpanExporter, model: str) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        version = metadata.version("kvferry")
        ours = Resource({"service.name": "kvferry", "service.version": version})
        # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say comes first.
        self._provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvferry", version)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def finished(self, record: Record, headers: Mapping[str, str]) -> None:
        """Spans of a request that has just ended; its `traceparent` is their parent."""
        try:
            if record.operation:
                self._trace(record, headers)
        except Exception:
            log.exception("a span was not made")

    def _trace(self, record: Record, headers: Mapping[str, str]) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        offset = time.time_ns() - int(time.monotonic() * 1e9)
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span(
            f"{record.operation} {self._model}",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=offset + int(record.started * 1e9),
            attributes=_attributes(record, self._model),
        )
        if record.code and record.status >= 500:
            span.set_status(Status(StatusCode.ERROR, record.code))
        if record.generation is not None:
            inside = set_span_in_context(span)
            for name, start, end in _intervals(record.generation):
                child = self._tracer.start_span(name, inside, start_time=offset + int(start * 1e9))
                child.end(offset + int(end * 1e9))
        span.end(offset + int(time.monotonic() * 1e9))

    def flush(self) -> None:
        """Waits until everything so far was handed to the exporter."""
        self._provider.force_flush()

    def close(self) -> None:
        """Exports what is left, if that takes no longer than a moment."""
        closing = Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def open_tracer(endpoint: str | None, model: str) -> Tracer | None:
    """What exports to this URL (OTLP over HTTP); None without one.

    Raises
    ------
    ConfigError
        The optional packages are not there.
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs {error.name}: pip install 'kvferry[otel]'"
        ) from None
    return Tracer(OTLPSpanExporter(endpoint=endpoint), model)


def _attributes(record: Record, model: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": "kvferry",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "url.path": record.path,
        "kvferry.request.id": record.request_id,
        "kvferry.tenant": record.tenant,
    }
    if record.code:
        found["error.type"] = record.code
    if record.response_id:
        found["gen_ai.response.id"] = record.response_id
    if record.generation is not None:
        found |= _of_generation(record.generation)
    return found


def _of_generation(generation: Generation) -> dict[str, Any]:
    params, report = generation.params, generation.report
    found: dict[str, Any] = {
        "gen_ai.request.temperature": params.sampling.temperature,
        "gen_ai.request.top_p": params.sampling.top_p,
        "gen_ai.usage.input_tokens": generation.prompt_tokens,
        "gen_ai.usage.output_tokens": generation.completion_tokens,
        "gen_ai.response.finish_reasons": generation.finish_reasons,
    }
    if params.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = params.max_tokens
    if generation.timeline.ttft is not None:
        found["gen_ai.server.time_to_first_token"] = generation.timeline.ttft
    if report is not None:
        found["gen_ai.usage.cache_read.input_tokens"] = report.cached_tokens
    return found


def _intervals(generation: Generation) -> Iterator[tuple[str, float, float]]:
    """The stages that took time, as seconds of the monotonic clock, one after the other."""
    at = generation.timeline.submitted
    if generation.report is None:
        return
    for name in STAGES:
        seconds = getattr(generation.report.stages, name) / 1000
        if seconds > 0:
            yield name, at, at + seconds
            at += seconds
    if generation.timeline.last > generation.timeline.first:
        yield "decode", generation.timeline.first, generation.timeline.last
