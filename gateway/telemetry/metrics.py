"""What the gateway measures, in Prometheus' form.

Owns a registry of its own. Names are vLLM's stems behind `kvferry_`. Recording never raises: a
request must not fail because it was counted. What nodes and stores report is `node_metrics`'.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from kvferry.gateway.router.generation import Generation
from kvferry.gateway.router.nodes import Nodes
from kvferry.gateway.router.report import Report
from kvferry.gateway.telemetry.node_metrics import NodeCollector, StoreCollector
from kvferry.gateway.telemetry.vllm_names import VllmNames
from kvferry.kvstore.wire.generation import SOURCES, STAGES

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
P = ParamSpec("P")

_SMALL = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5)
_TTFT: tuple[float, ...] = (*_SMALL, 10, 20, 40, 80, 160, 640, 2560)
_TINY = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
_ITL: tuple[float, ...] = (*_TINY, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LAG: tuple[float, ...] = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 1)
_LARGE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240)
_E2E: tuple[float, ...] = (*_LARGE, 480, 960, 1920, 7680)


def _never_raises(record: Callable[P, None]) -> Callable[P, None]:
    @functools.wraps(record)
    def safe(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            record(*args, **kwargs)
        except Exception:
            log.exception("a metric was not recorded")

    return safe


class Metrics:
    """All series of one gateway."""

    def __init__(
        self,
        model_name: str,
        nodes: Nodes,
        waiting: Callable[[], int],
        compat: str | None = None,
    ) -> None:
        self._registry = registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(f"kvferry_{name}", help, ("model_name", *labels), registry=registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            names = ("model_name", *labels)
            return Histogram(f"kvferry_{name}", help, names, registry=registry, buckets=buckets)

        success = counter("request_success", "Choices that ended.", "finished_reason")
        self._success = functools.partial(success.labels, model_name)
        failure = counter("request_failure", "Requests that did not end well.", "code")
        self._failure = functools.partial(failure.labels, model_name)
        resumed = counter(
            "requests_resumed", "Requests that went on elsewhere, or anew, by reason.", "reason"
        )
        self._resumed = functools.partial(resumed.labels, model_name)
        source = counter("prompt_tokens_by_source", "Where prompt tokens came from.", "source")
        self._source = {name: source.labels(model_name, name) for name in SOURCES}
        self._prompt = counter("prompt_tokens", "Prompt tokens.").labels(model_name)
        self._cached = counter("prompt_tokens_cached", "Not recomputed.").labels(model_name)
        self._generated = counter("generation_tokens", "Generated tokens.").labels(model_name)
        self._tools = counter("ignored_tools_requests", "Their tools had no parser.").labels(
            model_name
        )
        self._ttft = histogram(
            "time_to_first_token_seconds", "From hand-over to a node.", _TTFT
        ).labels(model_name)
        self._itl = histogram("inter_token_latency_seconds", "Within one choice.", _ITL).labels(
            model_name
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Whole requests.", _E2E).labels(
            model_name
        )
        stage = histogram("ttft_stage_seconds", "Time to first token by stage.", _TTFT, "stage")
        self._stage = {name: stage.labels(model_name, name) for name in STAGES}
        self._handoff = histogram(
            "handoff_seconds", "Prefill node's last chunk to first step.", _TTFT
        ).labels(model_name)
        self._lag = histogram(
            "event_loop_lag_seconds", "By how much the gateway's 50 ms tick came late.", _LAG
        ).labels(model_name)
        registry.register(NodeCollector(model_name, nodes, waiting))
        registry.register(StoreCollector(nodes))
        self._compat = CollectorRegistry()
        if compat == "vllm":
            self._compat.register(VllmNames(registry.collect, model_name))

    @_never_raises
    def succeeded(self, generation: Generation, report: Report, seconds: float) -> None:
        for reason in generation.finish_reasons:
            self._success(reason).inc()
        for name in SOURCES:
            self._source[name].inc(getattr(report.sources, name))
        self._prompt.inc(generation.prompt_tokens)
        self._cached.inc(report.cached_tokens or 0)
        for name in STAGES:
            self._stage[name].observe(getattr(report.stages, name) / 1000)
        if report.handoff_ms:
            self._handoff.observe(report.handoff_ms / 1000)
        self._e2e.observe(seconds)

    @_never_raises
    def generated(self, generation: Generation) -> None:
        """What a generation produced, however it ended."""
        for reason, count in generation.losses.items():
            self._resumed(reason).inc(count)
        self._generated.inc(generation.completion_tokens)
        if generation.timeline.ttft is not None:
            self._ttft.observe(generation.timeline.ttft)
        for gap in generation.timeline.gaps:
            self._itl.observe(gap)

    @_never_raises
    def failed(self, code: str) -> None:
        self._failure(code).inc()

    @_never_raises
    def ignored_tools(self) -> None:
        self._tools.inc()

    @_never_raises
    def lagged(self, seconds: float) -> None:
        self._lag.observe(seconds)

    def page(self) -> bytes:
        return generate_latest(self._registry) + generate_latest(self._compat)
