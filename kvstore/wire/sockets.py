"""One end of a link, whichever: how a message leaves a socket, and how one comes out of it.

Owns the socket with its options, what was refused there, and what tests do to its messages; both
ends compare fingerprints by the same rule. `Server` and `Client` add who is at the other end: here
a message goes to an incarnation, and on a ROUTER to an identity.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import zmq

from kvferry.kvstore.errors import MalformedFrame, PeerMismatch
from kvferry.kvstore.process.logs import SparseLog
from kvferry.kvstore.wire.codec import AnyMessage, Envelope, decode, encode
from kvferry.kvstore.wire.faults import FaultInjector

PROBE_SECONDS = 1.0
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 4000
MAX_FRAME_BYTES = 256 << 20
MAX_SHOWN = 200
"""Characters of a differing value that are repeated to the peer and to the log."""
PARTIAL_ROLES = ("gateway", "admin")
"""Clients that compute nothing: they know some of a fingerprint, or none of it."""
HIGH_WATER = 100_000
"""Messages. Credits keep every queue far below it; reaching it means that the peer is stuck."""
TURN_MESSAGES = 1000
"""Read at once, so that no peer that floods a socket keeps its owner from everything else."""

_OPTIONS = {
    zmq.LINGER: 0,
    zmq.SNDHWM: HIGH_WATER,
    zmq.RCVHWM: HIGH_WATER,
    zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
    zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
    zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS,
    zmq.HEARTBEAT_TTL: HEARTBEAT_TIMEOUT_MS,
    zmq.HANDSHAKE_IVL: HEARTBEAT_TIMEOUT_MS,
}


def new_incarnation() -> int:
    """A number no other start of any process has."""
    return secrets.randbits(62) + 1


def first_difference(
    ours: Mapping[str, str], theirs: Mapping[str, str], *, partial: bool
) -> PeerMismatch | None:
    """The first field, by name, in which two fingerprints differ.

    With `partial` only fields that both state are compared: a gateway knows the tokenizer, but not
    the pool's shape.
    """
    names = ours.keys() & theirs.keys() if partial else ours.keys() | theirs.keys()
    for name in sorted(names):
        if ours.get(name) != theirs.get(name):
            mine, other = (side.get(name, "(absent)")[:MAX_SHOWN] for side in (ours, theirs))
            return PeerMismatch(name[:MAX_SHOWN], mine, other)
    return None


@dataclass(slots=True)
class SocketCounters:
    """What a socket refused to act on."""

    malformed: int = 0
    stale: int = 0
    strangers: int = 0
    refused: int = 0


class SocketEnd:
    """What `Server` and `Client` have in common."""

    def __init__(
        self, socket: zmq.Socket[bytes], incarnation: int, peer_log: SparseLog, *, routes: bool
    ) -> None:
        self.socket = socket
        self.incarnation = incarnation
        self.counters = SocketCounters()
        self.peer_log = peer_log
        """For lines that a peer can cause."""
        self.faults: FaultInjector | None = None
        """Set by tests only: damages and delays what is sent."""
        self._routes = routes
        """Whether each message has an identity before it: the socket is a ROUTER."""
        for option, value in _OPTIONS.items():
            socket.setsockopt(option, value)

    def _write(
        self,
        receiver: int,
        message: AnyMessage,
        payloads: Sequence[bytes | memoryview] = (),
        to: bytes = b"",
    ) -> bool:
        """Queues a message for an incarnation; False when it cannot be delivered."""
        frames = [encode(Envelope(self.incarnation, receiver, message)), *payloads]
        if self.faults is None:
            return self._queue(frames, to)
        sent = self.faults.outgoing(message, frames, time.monotonic(), to)
        return all([self._queue(it, to) for it in sent])

    def _queue(self, frames: Sequence[bytes | memoryview], to: bytes) -> bool:
        try:
            self.socket.send_multipart([to, *frames] if to else frames, zmq.NOBLOCK, copy=True)
        except zmq.ZMQError:
            return False
        return True

    def _queue_held(self) -> None:
        if self.faults is not None:
            for held in self.faults.due(time.monotonic()):
                self._queue(held.frames, held.to)

    def _read(self) -> Iterator[tuple[bytes, Envelope, tuple[memoryview, ...]]]:
        """What has come, until nothing is waiting or for one turn: identity, header, payloads."""
        self._queue_held()
        for _ in range(TURN_MESSAGES):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity = frames.pop(0).bytes if self._routes else b""
            header = frames[0].buffer if frames else b""
            payloads = tuple(frame.buffer for frame in frames[1:])
            try:
                envelope = decode(header, tuple(len(payload) for payload in payloads))
            except MalformedFrame as error:
                self.counters.malformed += 1
                self._malformed(identity, error)
                continue
            yield identity, envelope, payloads

    def _malformed(self, identity: bytes, error: MalformedFrame) -> None:
        """Something came that is no message: it has been counted and dropped."""
        raise NotImplementedError
