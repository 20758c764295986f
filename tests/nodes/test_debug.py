"""What a process says of itself: figures that follow what happens, and who may ask."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from kvferry.kvstore.node.debug import (
    MAX_BODY_BYTES,
    DebugEndpoint,
    DebugSwitches,
    check_figures,
    process_figures,
    socket_figures,
)
from kvferry.kvstore.wire.client import Client, LinkState
from kvferry.kvstore.wire.codec import PROTOCOL
from kvferry.kvstore.wire.faults import FaultInjector, FaultRule
from kvferry.kvstore.wire.generation import Abort
from kvferry.kvstore.wire.hello import Hello, Welcome
from kvferry.kvstore.wire.server import Server
from kvferry.kvstore.wire.sockets import new_incarnation
from kvferry.kvstore.wire.status import DebugRequest

# -- of the process --------------------------------------------------------------------------------


def test_figures_of_the_process_follow_what_it_does() -> None:
    before = process_figures()
    assert before["pid"] == os.getpid() and before["uptime_seconds"] > 0
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    reader, writer = os.pipe()
    memory = bytearray(os.urandom(1 << 20) * 64)
    during = process_figures()
    assert during["threads"] == before["threads"] + 1
    assert during["open_fds"] == before["open_fds"] + 2
    assert during["rss_bytes"] >= before["rss_bytes"] + len(memory) // 2
    assert during["cpu_seconds"] > before["cpu_seconds"]
    assert during["uptime_seconds"] >= before["uptime_seconds"]
    done.set()
    thread.join()
    os.close(reader)
    os.close(writer)
    deadline = time.monotonic() + 5
    while process_figures()["threads"] > before["threads"]:  # join does not wait for its very end
        assert time.monotonic() < deadline
    assert process_figures()["open_fds"] == before["open_fds"]


def test_asking_again_and_again_leaves_nothing_behind() -> None:
    before = process_figures()
    for _ in range(200):
        process_figures()
    assert process_figures()["open_fds"] == before["open_fds"]


# -- of the sockets --------------------------------------------------------------------------------


def test_figures_of_sockets_say_who_is_connected() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = Server(context, "tcp://127.0.0.1:0", new_incarnation())
    server.open(Welcome("prefill", {"w": "1"}, 16, 100, 8192, 4))
    clients = [
        Client(context, server.address, Hello(PROTOCOL, role, {"w": weights}), new_incarnation())
        for role, weights in (("decode", "1"), ("decode", "1"), ("gateway", "1"), ("decode", "2"))
    ]
    ends: list[Server | Client] = [server, *clients]
    try:
        deadline = time.monotonic() + 10
        while any(client.state is LinkState.CONNECTING for client in clients):
            assert time.monotonic() < deadline
            for end in ends:
                end.tick(time.monotonic())
                assert not list(end.receive())
        server.faults = FaultInjector([FaultRule("drop")])
        assert server.send(next(iter(server.peers.values())), Abort(1))
        figures = json.loads(json.dumps(socket_figures(server, clients)))
        assert figures["server"] == {
            "address": server.address,
            "incarnation": server.incarnation,
            "peers": {"decode": 2, "gateway": 1},
            "counters": {"malformed": 0, "stale": 0, "strangers": 0, "refused": 1},
            "faults": {"drop": 1},
        }
        states = [(link["role"], link["state"]) for link in figures["links"]]
        assert states == [("prefill", "ready")] * 3 + [(None, "refused")]
        assert figures["links"][0]["incarnation"] == server.incarnation
        assert socket_figures(None, []) == {"server": None, "links": []}
    finally:
        for end in ends:
            end.close()
        context.destroy(0)


def test_checks_are_told_by_name() -> None:
    def broken() -> None:
        raise AssertionError("block 3 has two owners")

    assert check_figures({"pool": lambda: None, "transfers": broken}) == {
        "pool": "ok",
        "transfers": "broken: block 3 has two owners",
    }


# -- answering -------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Server]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = Server(context, "tcp://127.0.0.1:0", new_incarnation())
    yield server
    server.close()
    context.destroy(0)


def ask(
    server: Server, kind: str, body: bytes = b"", *, ledger: bool = True, hooks: bool = True
) -> dict[str, Any]:
    endpoint = DebugEndpoint(
        server,
        DebugSwitches(ledger, hooks),
        ledger=lambda: {"blocks": {"used": 3}},
        check=lambda: None,
        clients=list,
    )
    reply = endpoint.answer(DebugRequest(7, kind, body))
    assert reply.number == 7
    answer: dict[str, Any] = json.loads(reply.body)
    return answer


def test_the_ledger_is_told_only_where_debugging_is_on(server: Server) -> None:
    told = ask(server, "ledger", hooks=False)
    assert told["blocks"] == {"used": 3} and told["check"] == {"node": "ok"}
    assert told["process"]["pid"] == os.getpid()
    assert list(ask(server, "ledger", ledger=False)) == ["error"]


def test_faults_are_taken_only_where_test_hooks_are_on(server: Server) -> None:
    body = b'{"rules": [{"action": "drop", "count": 2}]}'
    assert "--enable-test-hooks" in ask(server, "faults", body, hooks=False)["error"]
    assert server.faults is None
    assert ask(server, "faults", body, ledger=False)["rules"] == 1
    assert server.faults is not None
    (rule,) = server.faults.to_json()
    assert (rule["action"], rule["count"]) == ("drop", 2)


@pytest.mark.parametrize(
    ("kind", "body", "says"),
    [
        ("faults", b'{"rules": [{}]}', "action"),
        ("faults", b"\xff", "hooks"),
        ("faults", b'{"store": {}}', "no store"),
        ("faults", b'{"hold": ["lunch"]}', "'lunch'"),
        ("faults", b" " * (MAX_BODY_BYTES + 1), str(MAX_BODY_BYTES)),
        ("shell", b"", "'shell'"),
        ("x" * 4096, b"", "nothing is known"),
    ],
)
def test_a_wrong_question_is_answered_with_an_error(
    server: Server, kind: str, body: bytes, says: str
) -> None:
    answer = ask(server, kind, body)
    assert list(answer) == ["error"] and says in answer["error"]
    assert len(answer["error"]) < 300
