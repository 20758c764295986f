"""What both ends of a link share: socket options, frames, incarnations, comparing fingerprints.

Owns no socket and no state.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import zmq

from kvferry.kvstore.errors import MalformedFrame, PeerMismatch
from kvferry.kvstore.wire.codec import AnyMessage, Envelope, decode, encode

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


def prepare(socket: zmq.Socket[bytes]) -> None:
    """Options that every socket of kvferry has."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HEARTBEAT_TIMEOUT_MS)


def to_frames(
    sender: int, receiver: int, message: AnyMessage, payloads: Sequence[bytes | memoryview]
) -> list[bytes | memoryview]:
    """A message as the frames of one multipart send."""
    return [encode(Envelope(sender, receiver, message)), *payloads]


def from_frames(frames: Sequence[zmq.Frame]) -> tuple[Envelope, tuple[memoryview, ...]]:
    """The inverse of `to_frames`; MalformedFrame when they are not a message."""
    if not frames:
        raise MalformedFrame("an empty message")
    payloads = tuple(frame.buffer for frame in frames[1:])
    return decode(frames[0].buffer, tuple(len(payload) for payload in payloads)), payloads


@dataclass(slots=True)
class LinkCounters:
    """What a socket refused to act on."""

    malformed: int = 0
    stale: int = 0
    strangers: int = 0
    refused: int = 0
