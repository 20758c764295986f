"""Several nodes of each kind under one `serve`: real processes, deaths, stops and crowds."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvferry.kernels.engines.standin import standin_reply
from kvferry.kvstore.wire.generation import SOURCES
from kvferry.tests.rigs.gateway import web
from kvferry.tests.rigs.gateway.rig import wait_until
from kvferry.tests.rigs.servers.served import Served
from kvferry.tests.rigs.servers.streams import (
    ADMIN,
    Stream,
    at_once,
    clear_faults,
    hold,
    idle,
    ledger,
    prompt_of,
    serving,
)


def resumed(served: Served) -> float:
    return served.metric("kvferry_requests_resumed_total")


@pytest.mark.C7
def test_thirty_streams_survive_the_death_of_a_decode_node(tmp_path: Path) -> None:
    flags = ("--decode-nodes=2", "--prefill-nodes=1")
    with serving(tmp_path, *flags, seconds_per_pass=0.005) as (served, config):
        streams = [Stream(prompt_of(20 + 37 * (seed % 10), seed), 150) for seed in range(30)]
        threads = at_once([partial(it.read, served.url) for it in streams])
        wait_until(lambda: sum(len(it.ids) >= 5 for it in streams) >= 10, 30)
        os.kill(served.children()["decode-0"], signal.SIGKILL)
        for thread in threads:
            thread.join(60)
        for it in streams:
            assert it.ids == standin_reply(it.prompt, config, it.count), (it.error, len(it.ids))
            assert it.whole and it.reasons == ["length"]
        assert resumed(served) > 0
        wait_until(lambda: idle(served))
        served.wait_until_ready()
        wait_until(lambda: not served.http.get("/ready").json()["absent"], 30)
        assert "the decode-0 node ended (SIGKILL)" in served.log.read_text()


@pytest.mark.B3
@pytest.mark.C7
def test_thirty_streams_survive_the_death_of_a_prefill_node(tmp_path: Path) -> None:
    flags = ("--decode-nodes=1", "--prefill-nodes=2")
    with serving(tmp_path, *flags, seconds_per_token=0.0001) as (served, config):
        streams = [Stream(prompt_of(500 + 37 * (seed % 10), seed), 10) for seed in range(30)]
        threads = at_once([partial(it.read, served.url) for it in streams])
        wait_until(lambda: all(node["transfers"] for node in ledger(served)["nodes"]))
        os.kill(served.children()["prefill-0"], signal.SIGKILL)
        for thread in threads:
            thread.join(60)
        for it in streams:
            assert it.ids == standin_reply(it.prompt, config, it.count), (it.error, len(it.ids))
        assert resumed(served) == 0, "the decode node does not need the gateway for that"


@pytest.mark.slow
@pytest.mark.C7
@pytest.mark.D1
def test_a_stopped_decode_node_is_stalled_and_comes_back(tmp_path: Path) -> None:
    with serving(tmp_path, "--decode-nodes=2", seconds_per_pass=0.02) as (served, config):
        streams = [Stream(prompt_of(30, seed), 100) for seed in range(6)]
        threads = at_once([partial(it.read, served.url) for it in streams])
        wait_until(lambda: all(len(it.ids) >= 5 for it in streams), 30)
        stopped = served.children()["decode-1"]
        os.kill(stopped, signal.SIGSTOP)
        try:
            for thread in threads:
                thread.join(30)
            for it in streams:
                assert it.ids == standin_reply(it.prompt, config, it.count), it.error
            assert resumed(served) > 0
            assert served.http.get("/ready").json()["status"] == "degraded"
            before = resumed(served)
            assert served.ids([5], 3) == standin_reply([5], config, 3)
            assert resumed(served) == before, "it was sent to a stopped node"
        finally:
            os.kill(stopped, signal.SIGCONT)
        wait_until(lambda: served.http.get("/ready").json()["status"] == "ready")
        assert stopped in served.children().values(), "it was not restarted"
        wait_until(lambda: idle(served))


@pytest.mark.slow
@pytest.mark.D1
def test_readiness_while_the_only_decode_node_is_stopped(tmp_path: Path) -> None:
    with serving(tmp_path, "--prefill-nodes=0") as (served, config):
        pid = served.children()["decode"]
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: served.http.get("/ready").status_code == 503)
            assert served.http.get("/health").status_code == 200
            refused = served.post("/v1/completions", {"prompt": "x"})
            assert refused.status_code == 503 and 1 <= int(refused.headers["retry-after"]) <= 30
            time.sleep(5)  # until the link counts as dead, too
            assert served.http.get("/ready").status_code == 503
        finally:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: served.http.get("/ready").status_code == 200)
        assert served.ids([5], 3) == standin_reply([5], config, 3)


@pytest.mark.A8
@pytest.mark.parametrize("nodes", [1, 2])
def test_fifty_at_once_compute_a_shared_prefix_once(tmp_path: Path, nodes: int) -> None:
    flags = (f"--decode-nodes={nodes}", "--prefill-nodes=1", "--max-num-seqs=64")
    with serving(tmp_path, *flags, seconds_per_pass=0.002) as (served, config):
        shared, count = prompt_of(640, 1), 50
        prompts = [shared + prompt_of(17, seed + 2) for seed in range(count)]
        answers: list[dict[str, Any]] = []

        def ask(prompt: list[int]) -> None:
            body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True,
                    "return_token_ids": True}  # fmt: skip
            answer = web.post(served.url + "/v1/completions", json=body, timeout=60).json()
            assert answer["choices"][0]["token_ids"] == standin_reply(prompt, config, 3)
            answers.append(answer)

        for thread in at_once([partial(ask, it) for it in prompts]):
            thread.join(60)
        assert len(answers) == count
        totals = dict.fromkeys(SOURCES, 0)
        for answer in answers:
            usage, tokens = answer["usage"], answer["timings"]["prompt_tokens"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached == usage["prompt_tokens"] - tokens["prefill"] - tokens["decode"]
            assert sum(tokens.values()) == usage["prompt_tokens"]
            for name in SOURCES:
                totals[name] += tokens[name]
        for name in SOURCES:
            label = {"source": name}
            assert served.metric("kvferry_prompt_tokens_by_source_total", **label) == totals[name]
        assert served.metric("kvferry_prompt_tokens_cached_total") == totals["device"]
        assert served.metric("kvferry_prompt_tokens_total") == sum(totals.values())
        computed = totals["prefill"] + totals["decode"]
        # Each tail is computed; the shared part once, and once more for a second decode node
        # at most.
        assert 640 + count * 17 <= computed <= nodes * 640 + count * (17 + 16)
        wait_until(lambda: idle(served))


@pytest.mark.D3
def test_what_was_preempted_answers_as_if_it_had_run_alone(tmp_path: Path) -> None:
    """Room for four of sixteen sequences: texts, logprobs and usage as in a run of its own."""
    flags = ("--kv-cache-memory-bytes=17408", "--max-model-len=512", "--max-num-seqs=16")
    with serving(tmp_path, *flags) as (served, _):
        bodies = [
            {"prompt": prompt_of(20 + 5 * seed, seed), "max_tokens": 200, "seed": seed,
             "temperature": 0.8 * (seed % 2), "logprobs": 2, "ignore_eos": True,
             "return_token_ids": True, "cache_salt": "together"}
            for seed in range(16)
        ]  # fmt: skip

        def ask(body: dict[str, Any]) -> dict[str, Any]:
            answer = web.post(served.url + "/v1/completions", json=body, timeout=60).json()
            return {name: answer[name] for name in ("choices", "usage")}

        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(ask, bodies))
        assert served.metric("kvferry_num_preemptions_total") > 0
        assert together == [ask({**body, "cache_salt": "alone"}) for body in bodies]
        assert [it["usage"]["completion_tokens"] for it in together] == [200] * 16
        wait_until(lambda: idle(served))


@pytest.mark.slow
@pytest.mark.D8
def test_all_start_together_again_and_again(tmp_path: Path) -> None:
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        flags = ("--decode-nodes=2", "--prefill-nodes=2")
        with serving(folder, *flags) as (served, config):
            assert served.http.get("/ready").json() == {"status": "ready", "absent": []}
            log = served.log.read_text()
            for name in ("decode-0", "decode-1", "prefill-0", "prefill-1"):
                assert f" {name} INFO ready at tcp://" in log
            names = {"gateway", "decode-0", "decode-1", "prefill-0", "prefill-1"}
            assert set(served.children()) == names
            prompt = prompt_of(300, number)
            assert served.ids(prompt, 5) == standin_reply(prompt, config, 5)


@pytest.mark.D11
def test_a_full_queue_refuses_at_once(tmp_path: Path) -> None:
    flags = ("--max-num-queued-reqs=50", "--max-num-seqs=4", "--prefill-nodes=1")
    with serving(tmp_path, *flags, seconds_per_pass=0.01) as (served, _):
        statuses: list[tuple[int, float]] = []

        def ask(seed: int) -> None:
            begun = time.monotonic()
            body = {"prompt": prompt_of(300, seed), "max_tokens": 10, "temperature": 0}
            response = web.post(served.url + "/v1/completions", json=body, timeout=120)
            took = time.monotonic() - begun
            statuses.append((response.status_code, took))
            if response.status_code == 503:
                assert response.json()["error"]["code"] == "server_overloaded"
                assert response.json()["error"]["type"] == "service_unavailable_error"
                assert 1 <= int(response.headers["retry-after"]) <= 30

        hold(served, ["prefill"])
        threads = at_once([partial(ask, seed) for seed in range(200)])
        wait_until(lambda: len(statuses) >= 146, 30)
        hold(served, [])
        for thread in threads:
            thread.join(120)
        refused = [took for status, took in statuses if status == 503]
        assert len(refused) == 200 - 50 - 4
        assert [status for status, _ in statuses].count(200) == 54
        computed = served.metric("kvferry_node_computed_tokens_total", role="prefill")
        assert computed <= 54 * 300, "work for a refused request"


@pytest.mark.D7
def test_faults_between_gateway_and_nodes_change_no_answer(tmp_path: Path) -> None:
    rules = [
        {"action": "drop", "probability": 0.03},
        {"action": "duplicate", "probability": 0.05},
        {"action": "reorder", "probability": 0.05},
        {"action": "delay", "probability": 0.05, "seconds": 0.05},
        {"action": "corrupt", "probability": 0.01},
    ]
    flags = ("--decode-nodes=2", "--prefill-nodes=1")
    with serving(tmp_path, *flags) as (served, config):
        for node in ("all", "gateway"):
            body = {"node": node, "rules": rules, "seed": 3}
            assert served.http.post("/debug/faults", json=body, headers=ADMIN).status_code == 200
        streams = [Stream(prompt_of(20 + 61 * (seed % 9), seed), 30) for seed in range(24)]
        for thread in at_once([partial(it.read, served.url) for it in streams]):
            thread.join(60)
        for it in streams:
            assert it.ids == standin_reply(it.prompt, config, it.count), (it.error, len(it.ids))
            assert it.whole and it.reasons == ["length"]
        # The gateway first: what asks the nodes to stop losing frames is not lost itself then.
        clear_faults(served, "gateway")
        wait_until(lambda: clear_faults(served, "all"))
        wait_until(lambda: idle(served))
        found = ledger(served)
        assert found["gateway"]["check"] == {"nodes": "ok", "service": "ok"}
        assert all("error" not in node for node in found["nodes"])


def test_two_gateways_share_the_nodes(tmp_path: Path) -> None:
    with serving(tmp_path, "--decode-nodes=2", seconds_per_pass=0.005) as (served, config):
        links = ledger(served)["gateway"]["links"]
        flags = [f"--{link['role']}-node={link['address']}" for link in links]
        with second_gateway(tmp_path / "standin", flags) as (other, url):
            streams = [Stream(prompt_of(20 + 37 * seed, seed), 40) for seed in range(12)]
            lost = Stream(prompt_of(30, 77), 4000)
            servers = [served.url] * 6 + [url] * 6
            readers = [partial(it.read, at) for it, at in zip(streams, servers, strict=True)]
            (doomed,) = at_once([partial(lost.read, url)])
            for thread in at_once(readers):
                thread.join(60)
            for it in streams:
                assert it.ids == standin_reply(it.prompt, config, it.count), it.error
            assert len(lost.ids) > 0
            other.kill()
            doomed.join(60)
            assert lost.error and not lost.reasons
        wait_until(lambda: all(node["requests"] == 0 for node in ledger(served)["nodes"][:2]))
        assert served.ids([5], 3) == standin_reply([5], config, 3)


@contextmanager
def second_gateway(model: Path, flags: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    reader, writer = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "kvferry", "gateway", str(model), *flags,
             f"--fd={listener.fileno()}", f"--status-fd={writer}"],
            pass_fds=[listener.fileno(), writer],
        )  # fmt: skip
    os.close(writer)
    try:
        with open(reader) as reports:
            assert json.loads(reports.readline()) == {"ready": True}
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)


def test_the_ledger_needs_its_switch_and_the_admin_key(tmp_path: Path) -> None:
    with serving(tmp_path) as (served, _):
        assert served.http.get("/debug/ledger").status_code == 401
        wait_until(lambda: "kvferry_node_stalls_total" in served.http.get("/metrics").text)
        families = [
            line
            for line in served.http.get("/metrics").text.splitlines()
            if line.startswith("# TY")
        ]
        assert len(families) == len(set(families)), "two series of one name"
        wrong = {"x-api-key": "other"}
        assert served.http.get("/debug/ledger", headers=wrong).status_code == 401
        found = served.http.get("/debug/ledger", headers={"x-api-key": "root"}).json()
        assert {node["name"] for node in found["nodes"]} == {"decode-0", "prefill-0"}
        own = found["gateway"]
        assert own["requests"] == own["choices"] == 0 and own["process"]["open_fds"] > 0
        assert {link["state"] for link in own["links"]} == {"usable"}
        for body, param in (
            ({"node": "nobody"}, "node"),
            ({"node": "all", "rules": [{"action": "explode"}]}, "rules"),
            ({"node": "gateway", "preempt": 1}, "preempt"),
            ({}, "node"),
        ):
            refused = served.http.post("/debug/faults", json=body, headers=ADMIN)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == param
