"""Faults on purpose: each action over real sockets, its bounds, and the rules as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from kvferry.kvstore.keys import checksum
from kvferry.kvstore.wire.client import Client, LinkState
from kvferry.kvstore.wire.codec import PROTOCOL
from kvferry.kvstore.wire.faults import (
    MAX_HELD,
    REORDER_SECONDS,
    FaultInjector,
    FaultRule,
    rules_from_json,
    rules_to_json,
)
from kvferry.kvstore.wire.generation import Abort
from kvferry.kvstore.wire.handoff import Blocks, Complete, Credit
from kvferry.kvstore.wire.hello import Hello, Ping, Welcome
from kvferry.kvstore.wire.server import Server
from kvferry.kvstore.wire.sockets import new_incarnation
from kvferry.kvstore.wire.status import StepNotice


class Link:
    """One server and one client in a thread, and what each has got from the other."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.server = Server(self.context, "tcp://127.0.0.1:0", new_incarnation())
        self.server.open(Welcome("prefill", {}, 16, 100, 8192, 4))
        self.client = Client(
            self.context, self.server.address, Hello(PROTOCOL, "decode", {}), new_incarnation()
        )
        self.at_server: list[Any] = []
        self.at_client: list[Any] = []
        self.payloads: list[bytes] = []
        self.until(lambda: self.client.state is LinkState.READY)

    def turn(self) -> None:
        self.client.tick(time.monotonic())
        self.server.tick(time.monotonic())
        self.at_server += [received.message for received in self.server.receive()]
        for received in self.client.receive():
            self.at_client.append(received.message)
            self.payloads += map(bytes, received.payloads)

    def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "nothing happened for too long"
            self.turn()
            time.sleep(0.001)

    def settle(self) -> None:
        """Until a message that no rule here concerns has gone each way behind everything else."""
        (peer,) = self.server.peers.values()
        assert self.client.send(Credit(0, 0, 0)) and self.server.send(peer, StepNotice(0.0))
        self.until(lambda: Credit(0, 0, 0) in self.at_server and StepNotice(0.0) in self.at_client)
        self.at_server.remove(Credit(0, 0, 0))
        self.at_client.remove(StepNotice(0.0))

    def close(self) -> None:
        if not self.client.socket.closed:
            self.client.close()
        self.server.close()
        self.context.destroy(0)


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link()
    yield made
    made.close()


def abort_rule(action: Any, **fields: Any) -> FaultInjector:
    return FaultInjector([FaultRule(action, ("Abort",), **fields)])


# -- over sockets ----------------------------------------------------------------------------------


def test_dropped_messages_do_not_arrive_and_the_link_lives(link: Link) -> None:
    link.client.faults = abort_rule("drop", count=2)
    for number in range(4):
        assert link.client.send(Abort(number)), "nobody but the peer notices a loss"
    link.settle()
    assert link.at_server == [Abort(2), Abort(3)]
    assert link.client.faults.counters == {"drop": 2}
    assert link.client.state is LinkState.READY


def test_duplicated_messages_arrive_twice(link: Link) -> None:
    link.client.faults = abort_rule("duplicate", count=1)
    assert link.client.send(Abort(1)) and link.client.send(Abort(2))
    link.settle()
    assert link.at_server == [Abort(1), Abort(1), Abort(2)]


def test_a_reordered_message_is_overtaken_by_the_next(link: Link) -> None:
    link.client.faults = abort_rule("reorder")
    for number in range(4):
        assert link.client.send(Abort(number))
    link.settle()
    assert link.at_server == [Abort(1), Abort(0), Abort(3), Abort(2)]


def test_a_reordered_message_that_nothing_follows_goes_by_itself(link: Link) -> None:
    link.client.faults = abort_rule("reorder")
    sent_at = time.monotonic()
    assert link.client.send(Abort(1))
    link.until(lambda: link.at_server == [Abort(1)])
    assert time.monotonic() - sent_at >= REORDER_SECONDS


def test_a_delayed_message_is_late_and_others_overtake_it(link: Link) -> None:
    link.client.faults = abort_rule("delay", seconds=0.1, count=1)
    sent_at = time.monotonic()
    assert link.client.send(Abort(1)) and link.client.send(Abort(2))
    link.until(lambda: len(link.at_server) == 2)
    assert link.at_server == [Abort(2), Abort(1)]
    assert time.monotonic() - sent_at >= 0.1


def test_a_damaged_header_is_dropped_and_counted(link: Link) -> None:
    link.client.faults = abort_rule("corrupt", count=50)
    for number in range(51):
        assert link.client.send(Abort(number))
    link.settle()
    assert link.at_server == [Abort(50)] and link.server.counters.malformed == 50


def test_a_damaged_payload_arrives_and_its_checksum_shows_it(link: Link) -> None:
    link.server.faults = FaultInjector([FaultRule("corrupt", count=1, part="payload")])
    (peer,) = link.server.peers.values()
    memory = bytearray(b"a block's bytes")
    header = Blocks(1, 1, 0, (checksum(memoryview(memory)),))
    assert link.server.send(peer, StepNotice(1.0)), "no payload, nothing to damage"
    assert link.server.send(peer, header, [memoryview(memory)])
    assert link.server.send(peer, header, [memoryview(memory)])
    link.settle()
    assert link.at_client == [StepNotice(1.0), header, header]
    damaged, whole = link.payloads
    assert whole == memory == b"a block's bytes", "what is sent from is never touched"
    assert len(damaged) == len(whole)
    assert checksum(damaged) != checksum(whole)
    flipped = int.from_bytes(damaged, "big") ^ int.from_bytes(whole, "big")
    assert flipped.bit_count() == 1


def test_what_is_held_survives_the_memory_it_came_from(link: Link) -> None:
    link.server.faults = FaultInjector([FaultRule("delay", ("Blocks",), seconds=0.02)])
    (peer,) = link.server.peers.values()
    memory = bytearray(b"before")
    assert link.server.send(peer, Blocks(1, 1, 0, (0,)), [memoryview(memory)])
    memory[:] = b"after!"
    link.until(lambda: bool(link.payloads))
    assert link.payloads == [b"before"]


def test_a_peer_that_leaves_takes_its_held_messages_along(link: Link) -> None:
    link.server.faults = FaultInjector([FaultRule("delay", seconds=0.02)])
    (peer,) = link.server.peers.values()
    assert link.server.send(peer, Abort(1))
    link.client.close()
    deadline = time.monotonic() + 10
    while link.server.faults.num_held or link.server.peers:
        assert time.monotonic() < deadline
        link.server.tick(time.monotonic())
        time.sleep(0.001)


# -- by themselves ---------------------------------------------------------------------------------


def strike(injector: FaultInjector, *numbers: int, to: bytes = b"") -> list[bytes]:
    """The frames that go at once for messages that consist of one byte."""
    return [
        bytes(frames[0])
        for number in numbers
        for frames in injector.outgoing(Abort(number), [bytes([number])], 0.0, to)
    ]


def test_the_messages_of_meeting_are_spared_unless_named() -> None:
    everything = FaultInjector([FaultRule("drop")])
    hello = Hello(PROTOCOL, "decode", {})
    assert everything.outgoing(hello, [b"h"], 0.0) == [[b"h"]]
    assert everything.outgoing(Ping(0.0), [b"p"], 0.0) == [[b"p"]]
    assert everything.outgoing(Complete(1, 1, 0, 0, 0.0, 0.0), [b"c"], 0.0) == []
    assert FaultInjector([FaultRule("drop", ("Ping",))]).outgoing(Ping(0.0), [b"p"], 0.0) == []


def test_one_peers_messages_are_not_overtaken_by_anothers() -> None:
    injector = abort_rule("reorder")
    assert strike(injector, 1, to=b"a") == strike(injector, 2, to=b"b") == []
    assert strike(injector, 3, to=b"a") == [b"\3", b"\1"]
    assert [(held.to, held.frames) for held in injector.due(1.0)] == [(b"b", [b"\2"])]
    assert not injector.due(1.0)


def test_a_dropped_message_overtakes_nobody() -> None:
    injector = FaultInjector([FaultRule("reorder", count=1), FaultRule("drop", count=1)])
    assert strike(injector, 1, 2) == []
    assert strike(injector, 3) == [b"\3", b"\1"]


def test_the_first_rule_that_strikes_is_the_only_one() -> None:
    injector = FaultInjector([FaultRule("drop", count=1), FaultRule("duplicate", count=1)])
    assert strike(injector, 1, 2, 3) == [b"\2", b"\2", b"\3"]
    assert injector.counters == {"drop": 1, "duplicate": 1}


def test_held_messages_come_out_by_time() -> None:
    injector = FaultInjector(
        [FaultRule("delay", seconds=2, count=1), FaultRule("delay", seconds=1, count=1)]
    )
    assert strike(injector, 1, 2) == []
    assert [held.frames for held in injector.due(0.5)] == []
    assert [held.frames for held in injector.due(5.0)] == [[b"\2"], [b"\1"]]


def test_probability_and_seed() -> None:
    def run(seed: int) -> list[bytes]:
        rules = [FaultRule("drop", probability=0.1)]
        return strike(FaultInjector(rules, seed), *(number % 256 for number in range(5000)))

    assert run(1) == run(1) != run(2)
    assert 4300 < len(run(1)) < 4700
    assert len(strike(abort_rule("drop", probability=0.0), *range(256))) == 256


def test_what_one_socket_holds_is_bounded() -> None:
    injector = abort_rule("delay", seconds=1.0)
    assert strike(injector, *[0] * MAX_HELD) == []
    assert strike(injector, 7) == [b"\7"] and injector.num_held == MAX_HELD
    assert len(injector.due(1.0)) == MAX_HELD


def test_siblings_share_rules_and_counts_but_hold_their_own() -> None:
    injector = abort_rule("delay", seconds=1.0, count=2)
    sibling = injector.sibling()
    assert strike(injector, 1) == strike(sibling, 2) == []
    assert strike(sibling, 3) == [b"\3"], "twice for the process, not for each socket"
    assert [held.frames for held in sibling.due(2.0)] == [[b"\2"]]
    injector.replace([FaultRule("drop")])
    assert strike(sibling, 4) == [] and sibling.counters == {"delay": 2, "drop": 1}
    assert [held.frames for held in injector.due(2.0)] == [[b"\1"]]


# -- JSON ------------------------------------------------------------------------------------------


def test_rules_survive_json() -> None:
    text = b'[{"action": "delay", "messages": ["Blocks"], "seconds": 3}, {"action": "drop"}]'
    rules = rules_from_json(text)
    assert rules == (FaultRule("delay", ("Blocks",), seconds=3.0), FaultRule("drop"))
    assert rules_from_json(rules_to_json(rules)) == rules
    assert FaultInjector.from_json(FaultInjector(rules).to_json()).to_json() == rules_to_json(rules)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"{", "truncated"),
        (b'{"action": "drop"}', "array"),
        (b'[{"action": "burn"}]', "burn"),
        (b'[{"action": "drop", "messages": ["Nothing"]}]', "Nothing"),
        (b'[{"action": "drop", "probability": 1.5}]', "probability"),
        (b'[{"action": "delay", "seconds": -1}]', "seconds"),
        (b'[{"action": "delay", "seconds": 1e9}]', "seconds"),
        (b'[{"action": "drop", "count": -1}]', "count"),
        (b'[{"action": "corrupt", "part": "tail"}]', "tail"),
        (b'[{"action": "drop", "chance": 1}]', "chance"),
        (b"[" * 100_000, "recursion"),
        (b"[1]", "object"),
    ],
)
def test_rules_that_make_no_sense_are_refused_by_name(text: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=f"fault rules: .*{says}"):
        rules_from_json(text)


def test_a_rule_made_in_python_is_checked_too() -> None:
    for fields in ({"probability": float("nan")}, {"seconds": float("inf")}, {"count": -1}):
        with pytest.raises(ValueError):
            FaultRule("delay", **fields)
