"""`/metrics`: by GET and HEAD, and under vLLM's names where that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.gateway.telemetry.vllm_names import NAMES, STAGE_NAMES
from kvferry.kvstore.wire.status import Status
from kvferry.tests.rigs.gateway.rig import Rig, running, wait_until

STATUS = Status(3, 2, 25, 10, 100, False, {"preemptions": 4})


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("model") / "standin"
    with running(folder, metrics_compat="vllm") as rig:
        yield rig


def samples(rig: Rig) -> dict[tuple[str, str], float]:
    """Values by name and what tells samples of one name apart."""
    found = {}
    for family in text_string_to_metric_families(rig.get("/metrics").text):
        for sample in family.samples:
            if not sample.name.startswith("vllm:"):
                continue
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "standin" and labels.pop("engine") == "0"
            key = (sample.name, ",".join(labels.values()))
            assert key not in found, "a sample is there twice"
            found[key] = sample.value
    return found


def test_every_name_is_there_with_our_figures(rig: Rig) -> None:
    rig.decode.does.cached = 16
    assert rig.post("/v1/completions", {"prompt": "x" * 40}).status_code == 200
    rig.decode.say(STATUS)
    wait_until(lambda: ("vllm:num_preemptions_total", "") in samples(rig))
    found = samples(rig)
    expected = {
        ("vllm:num_requests_running", ""): 3,
        ("vllm:num_requests_waiting", ""): 2,
        ("vllm:kv_cache_usage_perc", ""): 0.25,
        ("vllm:num_preemptions_total", ""): 4,
        ("vllm:request_success_total", "stop"): 1,
        ("vllm:prompt_tokens_total", ""): 40,
        ("vllm:prefix_cache_queries_total", ""): 40,
        ("vllm:prefix_cache_hits_total", ""): 16,
        ("vllm:prompt_tokens_by_source_total", "local_cache_hit"): 16,
        ("vllm:prompt_tokens_by_source_total", "local_compute"): 24,
        ("vllm:prompt_tokens_by_source_total", "external_kv_transfer"): 0,
        ("vllm:generation_tokens_total", ""): 8,
        ("vllm:time_to_first_token_seconds_count", ""): 1,
        ("vllm:inter_token_latency_seconds_count", ""): 7,
        ("vllm:e2e_request_latency_seconds_count", ""): 1,
        ("vllm:request_queue_time_seconds_count", ""): 1,
        ("vllm:request_queue_time_seconds_sum", ""): 0.001,
        ("vllm:request_prefill_time_seconds_sum", ""): 0.004,
        ("vllm:time_to_first_token_seconds_bucket", "+Inf"): 1,
    }
    assert {key: found.get(key) for key in expected} == expected
    stems = {name.removeprefix("vllm:") for name, _ in found}
    for wanted in (*(name for names in NAMES.values() for name in names), *STAGE_NAMES.values()):
        assert any(stem.startswith(wanted) for stem in stems), wanted


def test_head_is_get_without_the_body(rig: Rig) -> None:
    head, get = httpx.head(rig.url + "/metrics"), rig.get("/metrics")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert int(head.headers["content-length"]) > 1000


def test_our_own_names_stay_and_theirs_are_optional(rig: Rig, tmp_path: Path) -> None:
    assert "kvferry_prompt_tokens_total" in rig.get("/metrics").text
    with running(tmp_path / "m") as plain:
        page = plain.get("/metrics").text
    assert "kvferry_prompt_tokens_total" in page and "vllm:" not in page
