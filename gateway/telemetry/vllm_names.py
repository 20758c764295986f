"""The same figures under the names that vLLM gives them, for dashboards made for it.

Owns the table of names. Families are taken from what is exported anyway and renamed; a node's
become vLLM's `engine`, numbered in the order of the decode nodes. It measures nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

NAMES: Mapping[str, tuple[str, ...]] = {
    "num_requests_running": ("num_requests_running",),
    "num_requests_waiting": ("num_requests_waiting",),
    "kv_cache_usage_perc": ("kv_cache_usage_perc",),
    "num_preemptions": ("num_preemptions",),
    "request_success": ("request_success",),
    "prompt_tokens": ("prompt_tokens", "prefix_cache_queries"),
    "prompt_tokens_cached": ("prefix_cache_hits",),
    "prompt_tokens_by_source": ("prompt_tokens_by_source",),
    "generation_tokens": ("generation_tokens",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds",),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds",),
}
"""Ours to vLLM's, both without their prefix."""
STAGE_NAMES: Mapping[str, str] = {
    "queue": "request_queue_time_seconds",
    "prefill": "request_prefill_time_seconds",
}
"""Stages of the time to the first token that vLLM has a histogram for."""
SOURCE_NAMES: Mapping[str, str] = {
    "device": "local_cache_hit",
    "host": "local_cache_hit",
    "disk": "local_cache_hit",
    "remote": "external_kv_transfer",
    "prefill": "local_compute",
    "decode": "local_compute",
}
"""Seen from the server as a whole: what a prefill node computes was computed here."""
OURS, THEIRS = "kvferry_", "vllm:"


class VllmNames(Collector):
    """Renames what `collect` exports."""

    def __init__(self, collect: Callable[[], Iterable[Metric]], model_name: str) -> None:
        self._collect = collect
        self._model_name = model_name

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        for metric in self._collect():
            stem = metric.name.removeprefix(OURS)
            for name in NAMES.get(stem, ()):
                yield self._renamed(metric, name, {})
            if stem == "ttft_stage_seconds":
                for stage, name in STAGE_NAMES.items():
                    yield self._renamed(metric, name, {"stage": stage})

    def _renamed(self, metric: Metric, name: str, only: Mapping[str, str]) -> Metric:
        """The family as `name`, with the samples that have the labels `only`."""
        family = Metric(THEIRS + name, metric.documentation, metric.type)
        engines: dict[str, str] = {}
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in metric.samples:
            labels = dict(sample.labels)
            if any(labels.pop(label, None) != value for label, value in only.items()):
                continue
            if labels.pop("role", "decode") != "decode":
                continue
            engine = engines.setdefault(labels.pop("node", ""), str(len(engines)))
            if "source" in labels:
                labels["source"] = SOURCE_NAMES[labels["source"]]
            labels |= {"model_name": self._model_name, "engine": engine}
            key = (sample.name.removeprefix(metric.name), tuple(labels.items()))
            sums[key] = sums.get(key, 0.0) + sample.value
        for (suffix, pairs), value in sums.items():
            family.add_sample(THEIRS + name + suffix, dict(pairs), value)
        return family
