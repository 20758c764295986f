"""The server's end of a link: the one ROUTER that a process binds.

Owns the socket and the list of peers that have said hello. It refuses a peer whose fingerprint
differs, drops what carries another incarnation, and finds out who has left: libzmq has no message
for that, so it probes every peer once a second, and with ROUTER_MANDATORY a send to a vanished one
fails. It does not know what a message makes anybody do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import zmq

from kvferry.kvstore.errors import MalformedFrame, PeerMismatch
from kvferry.kvstore.process.logs import SparseLog
from kvferry.kvstore.wire.codec import PROTOCOL, AnyMessage
from kvferry.kvstore.wire.curve import CurveKeys
from kvferry.kvstore.wire.hello import Hello, HelloRequired, Ping, Pong, Refused, Welcome
from kvferry.kvstore.wire.sockets import (
    PARTIAL_ROLES,
    PROBE_SECONDS,
    SocketEnd,
    first_difference,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peer:
    """A client that has said hello."""

    identity: bytes
    role: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class FromPeer:
    peer: Peer
    message: AnyMessage
    payloads: tuple[memoryview, ...]


class Server(SocketEnd):
    """The ROUTER of one process. Raises zmq.ZMQError when the address cannot be bound."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        listen: str,
        incarnation: int,
        curve: CurveKeys | None = None,
    ) -> None:
        super().__init__(context.socket(zmq.ROUTER), incarnation, SparseLog(log), routes=True)
        self.peers: dict[bytes, Peer] = {}
        self._welcome: Welcome | None = None
        self._admit: Callable[[Hello], Welcome | None] | None = None
        self._lost: list[Peer] = []
        self._pongs: dict[bytes, float] = {}
        self._probe_at = 0.0
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        if curve is not None:
            curve.protect_server(self.socket)
        try:
            self.socket.bind(listen)
        except zmq.ZMQError:
            self.socket.close(0)
            raise
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def open(self, welcome: Welcome) -> None:
        """Starts answering hellos; before it the process is bound but still loading."""
        self._welcome = welcome

    def open_to(self, admit: Callable[[Hello], Welcome | None]) -> None:
        """Starts answering hellos, each with a welcome of its own; None: not yet."""
        self._admit = admit

    def receive(self) -> Iterator[FromPeer]:
        """Messages of peers that have said hello, until nothing is waiting or for one turn.

        Stop any time: what is left is read by the next call.
        """
        for identity, envelope, payloads in self._read():
            message, peer = envelope.body, self.peers.get(identity)
            if isinstance(message, Hello):
                self._meet(identity, envelope.sender, message)
            elif peer is None:
                self.counters.strangers += 1
                self._write(envelope.sender, HelloRequired(), to=identity)
            elif envelope.receiver != self.incarnation or envelope.sender != peer.incarnation:
                self.counters.stale += 1
                self._write(envelope.sender, HelloRequired(), to=identity)
            elif isinstance(message, Ping):
                self.send(peer, Pong(message.sent_at, time.monotonic()))
            elif isinstance(message, Pong):
                self._pongs[identity] = message.sent_at
            else:
                yield FromPeer(peer, message, payloads)

    def _malformed(self, identity: bytes, error: MalformedFrame) -> None:
        whose = identity.hex() if identity in self.peers else ""
        self.peer_log.warning("malformed", whose, "dropped a frame: %s", error)

    def _meet(self, identity: bytes, sender: int, hello: Hello) -> None:
        welcome = self._welcome if self._admit is None else self._admit(hello)
        if welcome is None:
            self._write(sender, HelloRequired(), to=identity)
            return
        difference = (
            PeerMismatch("protocol", str(PROTOCOL), str(hello.protocol))
            if hello.protocol != PROTOCOL
            else first_difference(
                welcome.fingerprint, hello.fingerprint, partial=hello.role in PARTIAL_ROLES
            )
        )
        if difference is not None:
            self.counters.refused += 1
            self.peer_log.error("refused", hello.role, "refused a %s: %s", hello.role, difference)
            refused = Refused(difference.field, difference.ours, difference.theirs)
            self._write(sender, refused, to=identity)
            return
        peer = Peer(identity, hello.role, sender)
        known = self.peers.get(identity)
        if known is not None and known != peer:
            self._lose(known)  # who it was before has nothing here any more
        self.peers[identity] = peer
        self._write(sender, welcome, to=identity)

    def send(
        self, peer: Peer, message: AnyMessage, payloads: Sequence[bytes | memoryview] = ()
    ) -> bool:
        """Queues a message; False (and the peer counts as lost) when it cannot be delivered."""
        if self._write(peer.incarnation, message, payloads, peer.identity):
            return True
        self._lose(peer)
        return False

    def _lose(self, peer: Peer) -> None:
        self._pongs.pop(peer.identity, None)
        if self.peers.pop(peer.identity, None) is not None:
            self._lost.append(peer)

    def tick(self, now: float) -> None:
        """Probes every peer once a second."""
        self._queue_held()
        self.peer_log.tick()
        if now < self._probe_at:
            return
        self._probe_at = now + PROBE_SECONDS
        for peer in list(self.peers.values()):
            self.send(peer, Ping(now))

    def ignored(self, peer: Peer, message: AnyMessage) -> None:
        """Logs that a peer said what somebody in its role has no business to say."""
        kind = type(message).__name__
        self.peer_log.warning(
            "ignored", peer.identity.hex(), "ignored a %s from a %s", kind, peer.role
        )

    def take_lost(self) -> list[Peer]:
        """Peers found gone since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def flush(self, seconds: float) -> bool:
        """Waits until every peer has read all that was sent to it; False when some did not.

        A peer answers a probe behind everything sent before it. Call it before `close`, which
        throws away what is still on its way. Messages that come meanwhile are not handled.
        """
        asked = time.monotonic()
        for peer in list(self.peers.values()):
            self.send(peer, Ping(asked))
        while any(self._pongs.get(identity, 0.0) < asked for identity in self.peers):
            left = asked + seconds - time.monotonic()
            if left <= 0:
                return False
            self.socket.poll(min(100, max(1, int(1e3 * left))))
            for _ in self.receive():
                pass
            self.tick(time.monotonic())
        return True

    def close(self) -> None:
        self.socket.close(0)
