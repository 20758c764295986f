"""The loop of a process that owns a `Server`, whatever its role: wait, one turn, wait, end.

Owns how it sleeps, when it ends, and the messages that mean the same to every role: a drain, a
question of a debugger, keys to be told again. What a turn does beside that is the role's, which
derives from `NodeLoop`: a node that computes (`compute.py`) or the store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from math import inf

import zmq

from kvferry.kvstore.node.announce import Announcer
from kvferry.kvstore.node.debug import DebugEndpoint, DebugSwitches, StoreHooks
from kvferry.kvstore.process.collector import Collector
from kvferry.kvstore.tiers.device import BlockPool
from kvferry.kvstore.wire.client import Client
from kvferry.kvstore.wire.server import FromPeer, Peer, Server
from kvferry.kvstore.wire.status import DebugRequest, Drain, Resync, Status

IDLE_POLL_MS = 200
"""How long a loop sleeps when nothing but a message can bring it something to do."""


class NodeLoop(ABC):
    """Runs until `stopping` says so, or a gateway does, and nothing is under way any more."""

    def __init__(
        self,
        server: Server,
        clock: Callable[[], float],
        debug: DebugSwitches | None,
        pool: BlockPool | None = None,
        on_store: Callable[[StoreHooks], None] | None = None,
    ) -> None:
        self.counters: Counter[str] = Counter()
        """What happened in this incarnation, by metric stem."""
        self.draining = False
        self.debug = DebugEndpoint(
            server,
            debug or DebugSwitches(),
            ledger=self.ledger,
            check=self.check,
            clients=self.clients,
            on_store=on_store,
        )
        self._server = server
        self._clock = clock
        self._announcer = Announcer(server, pool, self.status)
        self._collector: Collector | None = None

    def run(
        self,
        stop_fd: int,
        stopping: Callable[[], bool],
        timeout: float = inf,
        collector: Collector | None = None,
    ) -> None:
        """Serves until a stop is asked for and nothing is under way any more, `timeout` seconds
        later at most: what still is then is given up."""
        self._collector = collector
        deadline = inf
        while True:
            self._wait(stop_fd)
            if stopping():
                self.draining = True
                deadline = min(deadline, self._clock() + timeout)
            if self._clock() >= deadline:
                self.give_up()
            if self.draining and self.may_end:
                self.finish(timeout)
                return
            self.turn()
            if collector is not None:
                collector.turn(idle=self.idle)

    def _wait(self, stop_fd: int) -> None:
        sleep_ms = self.sleep_ms()
        if not sleep_ms:
            return
        poller = zmq.Poller()
        poller.register(self._server.socket, zmq.POLLIN)
        for socket in self.sockets():
            poller.register(socket, zmq.POLLIN)
        if not self.draining:
            poller.register(stop_fd, zmq.POLLIN)
        poller.poll(sleep_ms)

    def receive(self) -> None:
        """Acts on what has come, and on who has left. Every turn calls it."""
        for received in self._server.receive():
            peer = received.peer
            match received.message:
                case DebugRequest() as message:
                    self._server.send(peer, self.debug.answer(message))
                case Resync():
                    self._announcer.resync(peer)
                case Drain() if peer.role == "gateway":
                    self.draining = True
                case message if not self.handle(received):
                    self.counters["messages_ignored"] += 1
                    self._server.ignored(peer, message)
        self._server.tick(self._clock())
        for peer in self._server.take_lost():
            self.lost(peer)

    # -- what a role does -----------------------------------------------------------------------

    @abstractmethod
    def turn(self) -> None:
        """One round of the loop."""

    @abstractmethod
    def handle(self, received: FromPeer) -> bool:
        """Acts on a message of its own; False when it has no business to come here."""

    @abstractmethod
    def lost(self, peer: Peer) -> None:
        """A peer has left, with all that it wanted."""

    @abstractmethod
    def sleep_ms(self) -> int:
        """How long to wait for a message at most; 0: there is something to do now."""

    def sockets(self) -> Iterable[zmq.Socket[bytes] | int]:
        """What wakes the loop beside its server, sockets and descriptors."""
        return ()

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether nobody waits for anything: a moment for work that nobody shall notice."""

    @property
    def may_end(self) -> bool:
        """Whether nothing is under way that a drain has to wait for."""
        return self.idle

    @abstractmethod
    def give_up(self) -> None:
        """The time to drain is over: ends what is still under way."""

    @abstractmethod
    def finish(self, timeout: float) -> None:
        """The last act, of `timeout` seconds at most: brings what is left to where it belongs."""

    # -- what a role says -----------------------------------------------------------------------

    @abstractmethod
    def status(self) -> Status:
        """What gateways are told twice a second."""

    def socket_counters(self) -> dict[str, float]:
        """What every role counts of its server, by metric stem."""
        counters = self._server.counters
        return {
            "frames_malformed": counters.malformed,
            "frames_stale": counters.stale,
            "peers_refused": counters.refused,
        }

    def clients(self) -> list[Client]:
        """Its links to other processes."""
        return []

    @abstractmethod
    def ledger(self) -> dict[str, object]:
        """Everything that is held here and by whom; all zero when nobody wants anything."""

    @abstractmethod
    def check(self) -> None:
        """Proves the invariants of everything this process owns."""
