"""Spans of requests: what they say, whose children they are, and that they harm nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kvferry.gateway.telemetry.tracing import CLOSE_SECONDS, Tracer, open_tracer
from kvferry.kvstore.errors import ConfigError
from kvferry.tests.rigs.gateway.rig import Behaviour, Rig, running, wait_until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with running(tmp_path_factory.mktemp("model") / "standin") as rig:
        yield rig


@pytest.fixture
def exporter(shared: Rig) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    shared.gateway.tracer = Tracer(exporter, "standin")
    yield exporter
    shared.gateway.tracer.close()
    shared.gateway.tracer = None
    shared.decode.does = Behaviour()


def spans(rig: Rig, exporter: InMemorySpanExporter, count: int = 1) -> list[ReadableSpan]:
    """The spans of requests, once there are so many."""
    found: list[ReadableSpan] = []

    def there() -> bool:
        assert rig.gateway.tracer is not None
        rig.gateway.tracer.flush()
        finished = exporter.get_finished_spans()
        found[:] = [span for span in finished if span.kind is SpanKind.SERVER]
        return len(found) >= count

    wait_until(there)
    return found


def test_a_request_is_a_span_and_its_stages_are_children(
    shared: Rig, exporter: InMemorySpanExporter
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    shared.decode.does = Behaviour(cached=4)
    body = {"prompt": "a secret prompt", "max_tokens": 20, "temperature": 0.5, "top_p": 0.9}
    answer = shared.post(COMPLETIONS, body, headers=headers).json()
    (span,) = spans(shared, exporter)
    assert span.name == "text_completion standin"
    assert span.parent is not None and span.context is not None
    assert format(span.context.trace_id, "032x") == TRACE
    assert format(span.parent.span_id, "016x") == PARENT
    assert span.resource.attributes["service.name"] == "kvferry"
    told = dict(span.attributes or {})
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.response.id"] == answer["id"]
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (15, 8)
    assert told["gen_ai.usage.cache_read.input_tokens"] == 4
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.request.top_p"]) == (20, 0.9)
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["http.response.status_code"] == 200
    assert not any("secret" in str(value) for value in told.values())
    children = [it for it in exporter.get_finished_spans() if it.parent == span.context]
    names = [child.name for child in children]
    assert names[:6] == ["queue", "lookup", "load", "prefill", "transfer", "first_step"]
    for child, milliseconds in zip(children, (1, 2, 3, 4, 5, 6), strict=False):
        assert child.start_time is not None and child.end_time is not None
        assert abs(child.end_time - child.start_time - milliseconds * 10**6) < 1000
    assert span.start_time is not None and span.end_time is not None
    assert span.start_time < span.end_time


def test_a_request_without_a_parent_begins_a_trace(
    shared: Rig, exporter: InMemorySpanExporter
) -> None:
    for traceparent in (None, "nonsense", f"00-{'0' * 32}-{PARENT}-01"):
        shared.chat(stream=True) if traceparent is None else shared.post(
            COMPLETIONS, {"prompt": "x"}, headers={"traceparent": traceparent}
        )
    found = spans(shared, exporter, 3)
    assert all(span.parent is None for span in found)
    assert {span.name for span in found} == {"chat standin", "text_completion standin"}
    unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    assert shared.post(COMPLETIONS, {"prompt": "x"}, headers=unsampled).status_code == 200
    assert len(spans(shared, exporter, 3)) == 3, "the caller wants no trace of it"


def test_failures_are_told_and_other_paths_are_not(
    shared: Rig, exporter: InMemorySpanExporter
) -> None:
    shared.get("/v1/models")
    assert shared.post(COMPLETIONS, {"prompt": "x", "temperature": -1}).status_code == 400
    shared.decode.does = Behaviour(reject="engine_error")
    assert shared.post(COMPLETIONS, {"prompt": "x"}).status_code == 500
    refused, failed = spans(shared, exporter, 2)
    assert (refused.attributes or {})["error.type"] == "invalid_request_error"
    assert refused.status.status_code is StatusCode.UNSET, "the client's fault"
    assert (failed.attributes or {})["error.type"] == "engine_error"
    assert failed.status.status_code is StatusCode.ERROR


class Broken(SpanExporter):
    """Raises, or never comes back."""

    def __init__(self, stuck: bool) -> None:
        self._stuck = threading.Event() if stuck else None
        self.calls = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.calls += 1
        if self._stuck is not None:
            self._stuck.wait(30)
        raise OSError("the collector is gone")

    def shutdown(self) -> None:
        if self._stuck is not None:
            self._stuck.set()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return False


@pytest.mark.parametrize("stuck", [False, True])
def test_an_exporter_that_fails_harms_no_request(
    shared: Rig, stuck: bool, caplog: pytest.LogCaptureFixture
) -> None:
    exporter = Broken(stuck)
    shared.gateway.tracer = tracer = Tracer(exporter, "standin")
    try:
        for _ in range(5):
            assert shared.post(COMPLETIONS, {"prompt": "x"}).status_code == 200
        if not stuck:
            wait_until(lambda: tracer.flush() or exporter.calls > 0)  # type: ignore[func-returns-value]
        assert shared.post(COMPLETIONS, {"prompt": "x"}).status_code == 200
    finally:
        shared.gateway.tracer = None
        tracer.close()


def test_what_breaks_inside_harms_no_request(
    shared: Rig, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a span that cannot be")

    assert shared.gateway.tracer is not None
    monkeypatch.setattr(shared.gateway.tracer, "_trace", broken)
    assert shared.post(COMPLETIONS, {"prompt": "x"}).status_code == 200


def test_without_an_endpoint_nothing_is_traced(tmp_path: Path) -> None:
    assert open_tracer(None, "m") is None
    assert CLOSE_SECONDS <= 5


def test_an_endpoint_without_the_packages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(__import__("sys").modules, missing, None)
    with pytest.raises(ConfigError, match=r"kvferry\[otel\]"):
        open_tracer("http://127.0.0.1:4318/v1/traces", "m")
