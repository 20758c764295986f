"""The client's end of a link: one DEALER to one server process.

Owns the socket and what the two must agree on before they talk: hello, fingerprint, incarnations,
the offset of their clocks, and noticing that the server is gone. Everything is non-blocking, so
that a node's loop, a callback between two layers and asyncio can all drive it. It does not know
what a message makes anybody do.

A client watches its socket's monitor. ZeroMQ's own heartbeats close the connection of a peer whose
I/O thread is gone or stopped, and are answered while a node computes: a busy node is not dead. A
dead client is never revived: its owner makes a new one, whose new identity cannot replay old
messages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvferry.kvstore.errors import MalformedFrame
from kvferry.kvstore.process.logs import SparseLog
from kvferry.kvstore.wire.codec import AnyMessage
from kvferry.kvstore.wire.curve import CurveKeys
from kvferry.kvstore.wire.hello import Hello, HelloRequired, Ping, Pong, Refused, Welcome
from kvferry.kvstore.wire.sockets import (
    PARTIAL_ROLES,
    PROBE_SECONDS,
    SocketEnd,
    first_difference,
)

log = logging.getLogger(__name__)

TRANSPORTS = ("tcp://", "ipc://")
"""Between processes. An address may come from a peer, and inproc would reach into this one."""
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class LinkState(Enum):
    """CONNECTING ─► READY ─► DEAD;  CONNECTING ─► REFUSED | DEAD. Never backwards."""

    CONNECTING = "connecting"
    READY = "ready"
    REFUSED = "refused"
    DEAD = "dead"


_LIVE = (LinkState.CONNECTING, LinkState.READY)


@dataclass(frozen=True, slots=True)
class Received:
    message: AnyMessage
    payloads: tuple[memoryview, ...]


@dataclass(slots=True)
class _Clock:
    """Offset between two monotonic clocks, from the probe with the shortest round trip (as NTP)."""

    offset: float = 0.0
    round_trip: float = field(default=float("inf"))

    def observe(self, sent: float, answered: float, now: float) -> None:
        round_trip = now - sent
        if round_trip <= self.round_trip:
            self.offset = answered - (sent + now) / 2
            self.round_trip = round_trip
        else:
            self.round_trip *= 1.05  # so that an old, lucky probe does not hide a drift for ever


class Client(SocketEnd):
    """The DEALER of one process to one server. Dies once; make a new one then.

    Log lines that the server can cause go to `peer_log`, which outlives the client.

    Raises zmq.ZMQError when `address` is none.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        hello: Hello,
        incarnation: int,
        curve: CurveKeys | None = None,
        peer_log: SparseLog | None = None,
    ) -> None:
        super().__init__(
            context.socket(zmq.DEALER), incarnation, peer_log or SparseLog(log), routes=False
        )
        self.address = address
        self.state = LinkState.CONNECTING
        self.welcome: Welcome | None = None
        self.refusal: Refused | None = None
        self.server_incarnation = 0
        self._hello = hello
        self._hello_sent = False
        self._probe_at = self._pinged_at = 0.0
        self._unanswered_since: float | None = None
        self._clock = _Clock()
        self._encrypted = curve is not None
        if curve is not None:
            curve.protect_client(self.socket)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED
        )
        """Becomes readable when the connection comes up or ends: then call `tick`."""
        try:
            if not address.startswith(TRANSPORTS):
                raise zmq.ZMQError(zmq.EPROTONOSUPPORT)
            self.socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def fd(self) -> int:
        """ZeroMQ's edge-triggered descriptor: if it is readable, `receive` until not `waiting`."""
        fd = self.socket.getsockopt(zmq.FD)
        assert isinstance(fd, int)
        return fd

    @property
    def waiting(self) -> bool:
        """Whether something has come that `receive` has not read."""
        return self.socket.poll(0, zmq.POLLIN) != 0

    def silence(self, now: float) -> float:
        """Seconds for which a probe has gone unanswered and nothing else has come either.

        Ask only after `receive` has been called to its end: what waits unread is no silence.
        """
        return 0.0 if self._unanswered_since is None else now - self._unanswered_since

    def to_local(self, server_time: float) -> float:
        """A reading of the server's monotonic clock on ours, good to half a round trip."""
        return server_time - self._clock.offset

    # -- what goes and comes --------------------------------------------------------------------

    def send(self, message: AnyMessage, payloads: Sequence[bytes | memoryview] = ()) -> bool:
        """Queues a message; False when the link is not ready or has just been found dead."""
        if self.state is not LinkState.READY:
            return False
        sent = self._write(self.server_incarnation, message, payloads)
        if not sent:
            self._die("its queue is full or its connection is gone")
        return sent

    def receive(self) -> Iterator[Received]:
        """The server's messages, until nothing is waiting or it has had its turn. Stop any time."""
        for _, envelope, payloads in self._read() if self.state in _LIVE else ():
            message = envelope.body
            self._unanswered_since = None
            if envelope.receiver != self.incarnation:
                self.counters.stale += 1
            elif isinstance(message, Welcome):
                self._welcomed(envelope.sender, message)
            elif isinstance(message, HelloRequired):
                self._asked_for_hello()
            elif isinstance(message, Refused):
                self.refusal, self.state = message, LinkState.REFUSED
            elif self.state is not LinkState.READY or envelope.sender != self.server_incarnation:
                self.counters.stale += 1
            elif isinstance(message, Ping):
                self.send(Pong(message.sent_at, time.monotonic()))
            elif not isinstance(message, Pong):
                yield Received(message, payloads)
            elif message.sent_at == self._pinged_at:  # else it is late, or made up
                self._clock.observe(message.sent_at, message.answered_at, time.monotonic())
            if self.state not in _LIVE:
                break
        self._watch()

    def _malformed(self, identity: bytes, error: MalformedFrame) -> None:
        self.peer_log.warning(
            "malformed", self.address, "dropped a frame from %s: %s", self.address, error
        )

    def _welcomed(self, sender: int, welcome: Welcome) -> None:
        if self.state is LinkState.READY:
            self.counters.stale += 1
            return
        difference = first_difference(
            self._hello.fingerprint, welcome.fingerprint, partial=self._hello.role in PARTIAL_ROLES
        )
        if difference is not None:
            self.refusal = Refused(difference.field, difference.theirs, difference.ours)
            self.state = LinkState.REFUSED
            return
        self.welcome = welcome
        self.server_incarnation = sender
        self.state = LinkState.READY
        self._ping(time.monotonic())

    def _asked_for_hello(self) -> None:
        """Before the welcome the server was loading: ask again. After it, it is another process."""
        if self.state is LinkState.READY:
            self._die("it was restarted")
        else:
            self._hello_sent = False

    # -- how it lives and dies --------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Says hello until it is answered, probes once a second, notices a death."""
        self._watch()
        if self.state in _LIVE:
            self._queue_held()
        if self.state is LinkState.CONNECTING and not self._hello_sent:
            if now >= self._probe_at and self._write(0, self._hello):
                self._hello_sent = True
                self._probe_at = now + PROBE_SECONDS / 5
        elif self.state is LinkState.READY and now >= self._probe_at:
            self._ping(now)

    def _ping(self, now: float) -> None:
        self._probe_at = now + PROBE_SECONDS
        self._pinged_at = now
        if self.send(Ping(now)) and self._unanswered_since is None:
            self._unanswered_since = now

    def _watch(self) -> None:
        while self.state is not LinkState.DEAD:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            met = self.state is LinkState.READY or self._hello_sent
            if met and event["event"] == zmq.EVENT_DISCONNECTED:
                self._die("its connection is gone")
            elif event["event"] & _HANDSHAKE_FAILED and not met:
                self._shut_out(event["event"])

    def _shut_out(self, event: int) -> None:
        """ZeroMQ itself refused one of the two. After some of these it would not try again."""
        if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL or self._encrypted:
            theirs, ours = ("off, or by other keys", "on") if self._encrypted else ("on", "off")
            self.refusal = Refused("encryption", theirs, ours)
            self.state = LinkState.REFUSED

    def _die(self, why: str) -> None:
        if self.state is not LinkState.DEAD:
            self.peer_log.warning("lost", self.address, "lost %s: %s", self.address, why)
            self.state = LinkState.DEAD

    def close(self, linger_ms: int = 0) -> None:
        """`linger_ms`: how long what was sent may still be on its way."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)
