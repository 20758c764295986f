"""The decode node's links to prefill nodes: what they remember, and for how long."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import zmq

from kvferry.decode_node.links import AVOID_SECONDS, CONNECT_SECONDS, PrefillLinks
from kvferry.kvstore.process.logs import SparseLog
from kvferry.kvstore.wire.client import Client
from kvferry.kvstore.wire.codec import PROTOCOL
from kvferry.kvstore.wire.hello import Hello
from kvferry.kvstore.wire.sockets import new_incarnation
from kvferry.kvstore.wire.status import StepNotice


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(0)


def remembered(links: PrefillLinks) -> int:
    """Entries of all maps by address."""
    return sum(len(value) for value in vars(links).values() if isinstance(value, dict))


def test_addresses_that_never_come_back_are_forgotten(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    now = 100.0

    def connect(address: str) -> Client:
        if address.endswith("1"):
            raise zmq.ZMQError(zmq.EINVAL)
        return Client(context, address, Hello(PROTOCOL, "decode", {}), new_incarnation())

    lost: list[str] = []
    peer_log = SparseLog(logging.getLogger(__name__))
    links = PrefillLinks(connect, lambda: now, lost.append, peer_log)
    addresses = [f"tcp://127.0.0.1:{port}" for port in range(1, 40)]
    usable = [address for address in addresses if links.usable(address)]
    assert len(usable) == 35
    for link in links.all():
        links.noticed(link, StepNotice(1.0))
    now += CONNECT_SECONDS + 1
    links.tick(now)
    assert sorted(lost) == sorted(usable) and not links.all()
    assert not any(links.usable(address) for address in usable), "they are avoided"
    now += AVOID_SECONDS
    links.tick(now)
    assert remembered(links) == 0
    assert links.usable(usable[0]), "and tried again when somebody names them again"
    links.close()
