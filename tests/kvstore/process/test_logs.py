"""Lines name their role; of those that a peer causes few come, and the others are counted."""

from __future__ import annotations

import logging
import time

import pytest
import zmq

from kvferry.kvstore.process.logs import (
    MAX_LINE,
    MAX_REMEMBERED,
    QUIET_SECONDS,
    SparseLog,
    set_up_logging,
)
from kvferry.kvstore.wire.client import Client, LinkState
from kvferry.kvstore.wire.codec import PROTOCOL
from kvferry.kvstore.wire.hello import Hello, Welcome
from kvferry.kvstore.wire.server import Server
from kvferry.kvstore.wire.sockets import TURN_MESSAGES, new_incarnation
from kvferry.tests.rigs.clock import Clock

FRAMES = 10_000


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def sparse(clock: Clock, caplog: pytest.LogCaptureFixture) -> SparseLog:
    caplog.set_level(logging.DEBUG)
    return SparseLog(logging.getLogger("test"), clock)


def test_the_first_is_said_and_the_rest_are_counted(
    sparse: SparseLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(FRAMES):
        sparse.warning("dropped", "peer", "dropped %d", number)
    assert caplog.messages == ["dropped 0"]
    sparse.tick()
    assert len(caplog.messages) == 1
    clock.now += QUIET_SECONDS
    sparse.warning("dropped", "peer", "dropped %d", FRAMES)
    assert caplog.messages[1:] == [f"dropped {FRAMES} (and {FRAMES - 1} more like it)"]


def test_a_count_is_told_even_if_nothing_comes_any_more(
    sparse: SparseLog, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        sparse.error("broken", "peer", "it is broken")
    clock.now += QUIET_SECONDS
    sparse.tick()
    assert caplog.messages == ["it is broken", "it is broken (and 2 more like it)"]
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    clock.now += QUIET_SECONDS
    sparse.tick()
    sparse.tick()
    assert len(caplog.messages) == 2
    sparse.error("broken", "peer", "it is broken")
    assert len(caplog.messages) == 3, "after a while it is news again"


def test_kinds_and_peers_are_told_apart_but_not_without_end(
    sparse: SparseLog, caplog: pytest.LogCaptureFixture
) -> None:
    sparse.warning("a", "one", "a one")
    sparse.warning("a", "two", "a two")
    sparse.warning("b", "one", "b one")
    assert caplog.messages == ["a one", "a two", "b one"]
    for number in range(FRAMES):
        sparse.warning("a", f"peer {number}", "again")
    assert len(caplog.messages) <= MAX_REMEMBERED + 2
    assert len(sparse._lines) <= MAX_REMEMBERED + 2


def test_a_peer_cannot_write_lines_of_its_own(
    sparse: SparseLog, caplog: pytest.LogCaptureFixture
) -> None:
    sparse.info("refused", "peer", "refused: %s", "x\nERROR all is lost\x1b[2J" + "y" * 10_000)
    (line,) = caplog.messages
    assert "\n" not in line and "\x1b" not in line and len(line) <= MAX_LINE


@pytest.mark.B5
@pytest.mark.parametrize("known", [True, False], ids=["peer", "stranger"])
def test_ten_thousand_malformed_frames_are_a_few_lines(
    known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = Server(context, "tcp://127.0.0.1:0", new_incarnation())
    server.open(Welcome("prefill", {}, 16, 100, 8192, 4))
    client = Client(context, server.address, Hello(PROTOCOL, "decode", {}), new_incarnation())
    deadline = time.monotonic() + 30
    try:
        while client.state is not LinkState.READY:
            assert time.monotonic() < deadline
            client.tick(time.monotonic())
            list(client.receive())
            list(server.receive())
        socket = client.socket
        if not known:
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(server.address)
        turns = 0
        for number in range(FRAMES):
            socket.send(b"nonsense %d" % number)
        while server.counters.malformed < FRAMES:
            assert time.monotonic() < deadline
            before = server.counters.malformed
            assert not list(server.receive())
            turns += server.counters.malformed > before
            assert server.counters.malformed - before <= TURN_MESSAGES, "a turn without end"
        clock = server.peer_log._clock
        server.peer_log._clock = lambda: clock() + QUIET_SECONDS
        server.tick(time.monotonic())
    finally:
        if not known:
            socket.close(0)
        client.close()
        server.close()
        context.destroy(0)
    dropped = [line for line in caplog.messages if "dropped a frame" in line]
    assert 2 <= len(dropped) <= 8, dropped
    told = sum(int(line.rpartition("(and ")[2].split()[0]) for line in dropped if "(and" in line)
    assert FRAMES - len(dropped) <= told < FRAMES, "each was either said or counted"
    assert turns >= FRAMES // TURN_MESSAGES


def test_log_lines_name_the_role(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers.clear()  # the capturing ones of pytest are not this test's to close
    try:
        set_up_logging("decode", "info")
        logging.getLogger("x").info("hello")
        logging.getLogger("x").debug("hidden")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    line = capsys.readouterr().err
    assert line.endswith(" decode INFO hello\n") and line.count("\n") == 1
