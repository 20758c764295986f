"""The decode node's links to prefill nodes: made when a gateway names one, given up when it fails.

Owns one DEALER to each address, which addresses are avoided for a while and why, and telling a
stalled node from a busy one: a node answers probes between the layers of a pass, and says
beforehand when a step will be long. It knows no transfer; who has some is told of each loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import zmq

from kvferry.kvstore.process.logs import SparseLog
from kvferry.kvstore.wire.client import Client, LinkState
from kvferry.kvstore.wire.codec import AnyMessage
from kvferry.kvstore.wire.status import StepNotice

AVOID_SECONDS = 10.0
"""How long nothing is asked of a prefill node that failed without dying."""

CONNECT_SECONDS = 10.0
"""How long a link may take to come up before it is given up."""

STALL_SECONDS = 2.0
"""Silence after which a node counts as stalled, or three times the step it announced."""


class PrefillLinks:
    """Links by address. `on_lost` is called before a link is closed for whatever reason."""

    def __init__(
        self,
        connect: Callable[[str], Client],
        clock: Callable[[], float],
        on_lost: Callable[[str], None],
        peer_log: SparseLog,
    ) -> None:
        self.stalls = 0
        self._connect = connect
        self._clock = clock
        self._on_lost = on_lost
        self._peer_log = peer_log
        self._links: dict[str, Client] = {}
        self._avoided: dict[str, float] = {}
        self._announced: dict[str, float] = {}
        self._made: dict[str, float] = {}
        self._turn = 0

    def usable(self, address: str) -> bool:
        """Whether this node may be asked; connects to it if nobody has yet."""
        if self._clock() < self._avoided.get(address, 0.0):
            return False
        link = self._links.get(address)
        if link is not None and link.state is LinkState.DEAD:
            self.lose(address)
            link = None
        if link is None:
            try:
                link = self._links[address] = self._connect(address)
                self._made[address] = self._clock()
            except zmq.ZMQError as error:
                self.avoid(address, f"cannot connect: {error}")
                return False
        return self._is_prefill(link) and link.state in (LinkState.CONNECTING, LinkState.READY)

    def ready(self, address: str) -> Client | None:
        """The link, if it can carry an offer now."""
        link = self._links.get(address)
        if link is None or link.state is not LinkState.READY or not self._is_prefill(link):
            return None
        return link

    def _is_prefill(self, link: Client) -> bool:
        if link.welcome is None or link.welcome.role == "prefill":
            return True
        self.avoid(link.address, f"it is a {link.welcome.role} node")
        return False

    def send(self, address: str, message: AnyMessage) -> bool:
        link = self._links.get(address)
        return link is not None and link.send(message)

    def avoid(self, address: str, why: str) -> None:
        """Gives the link up, and asks nothing of this node for a while."""
        text = "prefill node %s is not used for %g s: %s"
        self._peer_log.error("avoided", address, text, address, AVOID_SECONDS, why)
        self._avoided[address] = self._clock() + AVOID_SECONDS
        self.lose(address)

    def lose(self, address: str) -> None:
        if address in self._links:
            self._on_lost(address)
            self._links.pop(address).close()
            del self._made[address]
            self._announced.pop(address, None)

    def noticed(self, link: Client, notice: StepNotice) -> None:
        """The node announced a long step: its silence means nothing for three times that."""
        if self._links.get(link.address) is link:
            self._announced[link.address] = self._clock() + 3 * notice.predicted_s

    # -- driving --------------------------------------------------------------------------------

    def sockets(self) -> Iterator[zmq.Socket[bytes]]:
        """What a poller has to watch."""
        for link in self._links.values():
            yield link.monitor
            if link.state in (LinkState.CONNECTING, LinkState.READY):
                yield link.socket

    def in_turn(self) -> list[Client]:
        """All links, another one first each time, so that none starves the others."""
        links = list(self._links.values())
        self._turn += 1
        start = self._turn % len(links) if links else 0
        return links[start:] + links[:start]

    def tick(self, now: float) -> None:
        """Probes every link; gives up those that died, were refused or stalled."""
        over = [address for address, until in self._avoided.items() if until <= now]
        for address in over:  # it may never come back
            del self._avoided[address]
        for link in list(self._links.values()):
            link.tick(now)
            self.judge(link, now)

    def judge(self, link: Client, now: float) -> None:
        address = link.address
        if self._links.get(address) is not link:
            return
        if link.state is LinkState.DEAD:
            self.lose(address)
        elif link.state is LinkState.REFUSED and link.refusal is not None:
            refused = link.refusal
            self.avoid(
                address,
                f"its {refused.field} is {refused.server_value!r}, ours {refused.client_value!r}",
            )
        elif not self._is_prefill(link):
            return
        elif link.state is LinkState.CONNECTING and now > self._made[address] + CONNECT_SECONDS:
            self.avoid(address, f"no answer in {CONNECT_SECONDS:g} s")
        elif link.silence(now) > STALL_SECONDS and now > self._announced.get(address, 0.0):
            self.stalls += 1
            self.avoid(address, f"it has said nothing for {link.silence(now):.1f} s")

    def all(self) -> list[Client]:
        return list(self._links.values())

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
