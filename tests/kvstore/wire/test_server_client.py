"""Meeting, refusing, probing and losing each other, over real sockets in one thread."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from kvferry.kvstore.wire.client import Client, LinkState, Received
from kvferry.kvstore.wire.codec import PROTOCOL
from kvferry.kvstore.wire.generation import Abort
from kvferry.kvstore.wire.handoff import Blocks
from kvferry.kvstore.wire.hello import Hello, Ping, Welcome
from kvferry.kvstore.wire.server import FromPeer, Server
from kvferry.kvstore.wire.sockets import first_difference, new_incarnation
from kvferry.kvstore.wire.status import StepNotice

Context = zmq.Context[zmq.Socket[bytes]]
FINGERPRINT = {"dtype": "float32", "weights": "w1"}


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Iterator[Context]:
    made: Context = zmq.Context()
    ends: list[Server | Client] = []
    for kind in (Server, Client):
        start = kind.__init__

        def remembered(self: Server | Client, *args: object, start: object = start) -> None:
            start(self, *args)  # type: ignore[operator]
            ends.append(self)

        monkeypatch.setattr(kind, "__init__", remembered)
    yield made
    for end in ends:
        if not end.socket.closed:
            end.close()
    made.destroy(0)


def serve(context: Context, address: str = "tcp://127.0.0.1:0") -> Server:
    server = Server(context, address, new_incarnation())
    server.open(Welcome("prefill", FINGERPRINT, 16, 100, 8192, 4))
    return server


def connect(
    context: Context,
    server: Server,
    role: str = "decode",
    fingerprint: dict[str, str] | None = None,
    protocol: int = PROTOCOL,
) -> Client:
    hello = Hello(protocol, role, FINGERPRINT if fingerprint is None else fingerprint)
    return Client(context, server.address, hello, new_incarnation())


def turn(
    *ends: Server | Client, until: Callable[[], bool], seconds: float = 10.0
) -> list[FromPeer | Received]:
    """Drives all ends until the condition holds; what they received meanwhile."""
    got: list[FromPeer | Received] = []
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, "nothing happened for too long"
        for end in ends:
            end.tick(time.monotonic())
            got += end.receive()
        time.sleep(0.001)
    return got


def test_a_client_meets_a_server_and_both_can_speak(context: Context) -> None:
    server = serve(context)
    client = connect(context, server)
    turn(server, client, until=lambda: client.state is LinkState.READY)
    assert client.welcome is not None and client.welcome.num_blocks == 100
    assert client.send(Abort(7))
    inbound: list[FromPeer | Received] = []
    deadline = time.monotonic() + 5
    while not inbound and time.monotonic() < deadline:
        inbound += server.receive()
    received = inbound[0]
    assert isinstance(received, FromPeer) and received.message == Abort(7)
    assert server.send(received.peer, Blocks(1, 1, 0, (9,)), [b"payload"])
    outbound: list[Received] = []
    while not outbound and time.monotonic() < deadline:
        outbound += client.receive()
    assert outbound[0].message == Blocks(1, 1, 0, (9,))
    assert bytes(outbound[0].payloads[0]) == b"payload"


@pytest.mark.B5
@pytest.mark.parametrize("field", ["dtype", "weights", "layers"])
def test_a_peer_that_differs_is_refused_by_name_with_both_values(
    context: Context, field: str
) -> None:
    server = serve(context)
    client = connect(context, server, fingerprint={**FINGERPRINT, field: "other"})
    turn(server, client, until=lambda: client.state is LinkState.REFUSED)
    assert client.refusal is not None
    assert client.refusal.field == field and client.refusal.client_value == "other"
    assert client.refusal.server_value == FINGERPRINT.get(field, "(absent)")
    assert not server.peers and not client.send(Abort(1))
    good = connect(context, server)
    turn(server, good, until=lambda: good.state is LinkState.READY)


@pytest.mark.B5
def test_another_protocol_version_is_refused(context: Context) -> None:
    server = serve(context)
    client = connect(context, server, protocol=PROTOCOL + 1)
    turn(server, client, until=lambda: client.state is LinkState.REFUSED)
    assert client.refusal is not None and client.refusal.field == "protocol"


def test_a_gateway_is_compared_only_in_what_it_knows() -> None:
    assert first_difference({"a": "1", "b": "2"}, {"a": "1"}, partial=True) is None
    found = first_difference({"a": "1", "b": "2"}, {"a": "1"}, partial=False)
    assert found is not None and (found.field, found.theirs) == ("b", "(absent)")


@pytest.mark.B5
@pytest.mark.D9
def test_garbage_and_pickles_are_dropped_and_the_server_lives(
    context: Context, tmp_path: Path
) -> None:
    trap = tmp_path / "touched"

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str, ...]]:
            return Path.touch, (str(trap),)

    server = serve(context)
    attacker = context.socket(zmq.DEALER)
    attacker.connect(server.address)
    frames = [[pickle.dumps(Bomb())], [b""], [b"\x93\x01\x02"], [b"a", b"b", b"c"], [b"\xff" * 99]]
    for message in frames:
        attacker.send_multipart(message)
    turn(server, until=lambda: server.counters.malformed >= len(frames))
    client = connect(context, server)
    turn(server, client, until=lambda: client.state is LinkState.READY)
    assert not trap.exists()
    attacker.close(0)


def test_a_stranger_is_asked_for_its_hello(context: Context) -> None:
    server = serve(context)
    client = connect(context, server)
    turn(server, client, until=lambda: client.state is LinkState.READY)
    server.peers.clear()
    assert client.send(Abort(1))
    got = turn(server, client, until=lambda: client.state is LinkState.DEAD)
    assert not got and server.counters.strangers >= 1


@pytest.mark.B4
def test_a_restart_on_the_same_address_is_noticed_and_survived(context: Context) -> None:
    server = serve(context)
    client = connect(context, server)
    turn(server, client, until=lambda: client.state is LinkState.READY)
    address = server.address
    server.close()
    deadline = time.monotonic() + 10
    again = None
    while again is None:
        try:
            again = serve(context, address)
        except zmq.ZMQError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    turn(again, client, until=lambda: client.state is LinkState.DEAD)
    client.close()
    fresh = connect(context, again)
    turn(again, fresh, until=lambda: fresh.state is LinkState.READY)


def test_messages_of_another_incarnation_are_dropped(context: Context) -> None:
    server = serve(context)
    client = connect(context, server)
    turn(server, client, until=lambda: client.state is LinkState.READY)
    client.server_incarnation += 1
    assert client.send(Abort(1))
    got = turn(server, client, until=lambda: server.counters.stale == 1)
    assert not got


def test_a_server_notices_that_a_client_has_left(context: Context) -> None:
    server = serve(context)
    client = connect(context, server)
    turn(server, client, until=lambda: bool(server.peers))
    client.close()
    turn(server, until=lambda: not server.peers)
    assert [peer.role for peer in server.take_lost()] == ["decode"]


def test_a_server_that_still_loads_is_waited_for(context: Context) -> None:
    server = Server(context, "tcp://127.0.0.1:0", new_incarnation())
    client = connect(context, server)
    turn(server, client, until=lambda: server.counters.strangers == 0 and client._hello_sent)
    assert client.state is LinkState.CONNECTING
    server.open(Welcome("prefill", FINGERPRINT, 16, 100, 8192, 4))
    turn(server, client, until=lambda: client.state is LinkState.READY)


@pytest.mark.parametrize("address", ["inproc://zeromq.zap.01", "inproc://x", "pgm://x", "../", ""])
def test_an_address_that_does_not_lead_to_another_process_is_none(
    context: Context, address: str
) -> None:
    with pytest.raises(zmq.ZMQError):
        Client(context, address, Hello(PROTOCOL, "decode", {}), new_incarnation())


def test_clocks_are_compared_by_probes(context: Context) -> None:
    server = serve(context)
    client = connect(context, server)
    turn(server, client, until=lambda: client._clock.round_trip < 1)
    assert abs(client.to_local(100.0) - 100.0) < client._clock.round_trip + 0.01
    peer = next(iter(server.peers.values()))
    assert server.send(peer, Ping(1.0)) and server.send(peer, StepNotice(1.0))
    got: list[FromPeer | Received] = []
    deadline = time.monotonic() + 5
    while not got and time.monotonic() < deadline:
        got += client.receive()
    assert [one.message for one in got] == [StepNotice(1.0)]
