"""Clients that leave, at every stage of a request and in every way: 200 rounds leave nothing."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import pytest

from kvferry.kernels.engines.standin import standin_reply, write_standin_model
from kvferry.tests.rigs.gateway.rig import wait_until
from kvferry.tests.rigs.servers.served import Served
from kvferry.tests.rigs.servers.streams import ADMIN, DEBUG, hold, idle, ledger, prompt_of
from kvferry.tests.rigs.slow import slow_but

ROUNDS = 25
"""For each stage, streamed or not: 200 in all."""
Figures = Mapping[str, Any]
Reached = Callable[[Figures, Figures], bool]
STAGES: Mapping[str, Reached] = {
    "queue": lambda decode, prefill: decode["queued"] == 1,
    "prefill": lambda decode, prefill: bool(prefill["transfers"]) and not prefill["outbox_blocks"],
    "transfer": lambda decode, prefill: prefill["outbox_blocks"] > 0,
    "decode": lambda decode, prefill: decode["sequences"] == {"prefilling": 1},
}
"""How the ledgers of the nodes show that a request is held at a stage."""


@pytest.fixture(scope="module", params=slow_but(["open", "with keys"], "with keys"))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    write_standin_model(folder / "standin")
    keys = ["--api-key=a=secret"] if request.param == "with keys" else []
    served = Served(folder / "standin", folder / "log", *DEBUG, *keys, "--prefill-nodes=1")
    served.http.headers["authorization"] = "Bearer secret"
    yield served
    assert served.stop() == 0, (folder / "log").read_text()


def send(served: Served, prompt: list[int], stream: bool) -> socket.socket:
    """A request over a connection of its own."""
    host, port = served.url.removeprefix("http://").split(":")
    body = {"prompt": prompt, "max_tokens": 4000, "stream": stream, "ignore_eos": True}
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer secret\r\nX-Request-Id: the-same\r\n"
        f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection = socket.create_connection((host, int(port)))
    connection.sendall(head.encode() + content)
    return connection


def nodes(served: Served) -> tuple[Figures, Figures]:
    decode, prefill = ledger(served)["nodes"]
    return decode, prefill


def is_at(served: Served, reached: Reached) -> bool:
    return reached(*nodes(served))


def empty(served: Served) -> bool:
    """Nothing is held, anywhere, and every owner's proof holds."""
    decode, prefill = nodes(served)
    assert decode["check"] == prefill["check"] == {"node": "ok"}
    held = decode["blocks"]["held"] or prefill["blocks"]["held"] or prefill["outbox_blocks"]
    return not (held or decode["requests"] or decode["transfers"] or prefill["transfers"])


def descriptors(served: Served) -> list[tuple[int, int]]:
    found = ledger(served)
    processes = [found["gateway"]["process"], *(node["process"] for node in found["nodes"])]
    return [(one["open_fds"], one["threads"]) for one in processes]


@pytest.mark.C3
def test_whoever_leaves_leaves_nothing(served: Served) -> None:
    standin_prompt = prompt_of(300, 0)
    config = write_standin_model(served.log.parent / "again")
    assert served.ids(standin_prompt, 3) == standin_reply(standin_prompt, config, 3)
    seed, before = 1, descriptors(served)
    gone = partial(served.metric, "kvferry_request_failure_total", code="client_gone")
    aborted = partial(served.metric, "kvferry_node_requests_aborted_total")
    time.sleep(1)  # nodes report their counters twice a second
    gone_before, aborted_before = gone(), aborted()
    for (stage, reached), stream in product(STAGES.items(), (True, False)):
        hold(served, [stage])
        # Half of the rounds here, half with the other fixture.
        for number in range((ROUNDS + 1) // 2):
            connection = send(served, prompt_of(300, seed), stream)
            wait_until(partial(is_at, served, reached))
            if number % 2:
                assert served.metric("kvferry_num_requests_unanswered") == 1
            connection.close()
            wait_until(lambda: empty(served))
            seed += 1
        hold(served, [])
    wait_until(lambda: idle(served))
    after = descriptors(served)
    for (fds, threads), (more_fds, more_threads) in zip(before, after, strict=True):
        assert more_fds <= fds + 2 and more_threads <= threads
    wait_until(lambda: gone() == gone_before + seed - 1)
    prompt = prompt_of(700, 3)
    assert served.ids(prompt, 5) == standin_reply(prompt, config, 5)
    wait_until(lambda: aborted() == aborted_before + seed - 1)


@pytest.mark.C3
@pytest.mark.parametrize("stream", [True, False])
def test_leaving_while_tokens_come_stops_the_compute(served: Served, stream: bool) -> None:
    before = served.metric("kvferry_node_requests_aborted_total")
    for seed in range(5):
        connection = send(served, prompt_of(40, 100 + seed), stream)
        wait_until(lambda: nodes(served)[0]["sequences"] == {"decoding": 1})
        connection.close()
        wait_until(lambda: empty(served))
    wait_until(lambda: served.metric("kvferry_node_requests_aborted_total") >= before + 5)


GAUGES = ("running", "waiting", "unanswered")


def gauges(served: Served) -> list[float]:
    return [served.metric(f"kvferry_num_requests_{name}") for name in GAUGES]


@pytest.mark.D10
@pytest.mark.parametrize("way", ["leave", "abort"])
def test_a_hundred_aborts_at_once(served: Served, way: str) -> None:
    """Some run, some wait; then nothing does, and nobody had to ask for anything more."""
    prompts = [prompt_of(60, 1000 + seed) for seed in range(100)]
    connections = [send(served, prompt, seed % 2 == 0) for seed, prompt in enumerate(prompts)]
    wait_until(lambda: nodes(served)[0]["requests"] == 100, 30)
    assert nodes(served)[0]["sequences"]["waiting"] > 50
    wait_until(lambda: sum(gauges(served)) > 0)
    if way == "leave":
        for connection in connections:
            connection.close()
    else:
        told = served.post("/v1/abort", {"request_id": "the-same"}, headers=ADMIN)
        assert told.json() == {"aborted": 100}
    wait_until(lambda: gauges(served) == [0, 0, 0])
    wait_until(lambda: empty(served))
    for connection in connections:
        if way == "abort":
            assert b"request_aborted" in connection.makefile("rb").read()
        connection.close()
    wait_until(lambda: idle(served))
