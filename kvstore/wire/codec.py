"""How a message becomes bytes and comes back: the header frame, and what is checked of it.

The messages are defined by conversation:

    every connection            `hello`
    gateway ↔ decode node       `generation`
    gateway ↔ any node          `status`
    decode ↔ prefill node       `handoff`
    node, gateway ↔ store       `store`

The header frame is an `Envelope` that carries both sides' incarnations; raw bytes (KV blocks)
follow in frames of their own and never pass through msgpack. Nothing is ever unpickled. The header
frame ends with the xxh3-64 of its other bytes: a header that was damaged on its way is dropped like
one that was lost, and never acted on. This module knows neither sockets nor what a message makes
somebody do.
"""

from __future__ import annotations

import msgspec
import xxhash
from msgspec import Struct

from kvferry.kvstore.errors import MalformedFrame
from kvferry.kvstore.wire.generation import GenerationMessage
from kvferry.kvstore.wire.handoff import Blocks, HandoffMessage
from kvferry.kvstore.wire.hello import HelloMessage
from kvferry.kvstore.wire.message import MAX_HEADER_BYTES, Incarnation
from kvferry.kvstore.wire.status import NodeMessage
from kvferry.kvstore.wire.store import Commit, Delivered, StoreMessage

PROTOCOL = 6

AnyMessage = HelloMessage | GenerationMessage | NodeMessage | HandoffMessage | StoreMessage


class Envelope(Struct, frozen=True, array_like=True):
    """The header frame."""

    sender: Incarnation
    """Incarnation of the sending process: random, new with every start."""
    receiver: Incarnation
    """Incarnation that the sender believes it speaks to; 0 before it knows one."""
    body: AnyMessage


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)

_SUM_BYTES = 8


def encode(envelope: Envelope) -> bytes:
    """The header frame: the envelope and its checksum."""
    encoded = _encoder.encode(envelope)
    return encoded + xxhash.xxh3_64_digest(encoded)


def decode(frame: bytes | memoryview, payload_sizes: tuple[int, ...]) -> Envelope:
    """The header of a message whose raw frames have these sizes in bytes.

    Raises
    ------
    MalformedFrame
        The header does not decode, or it announces another number of payload frames.
    """
    if len(frame) > MAX_HEADER_BYTES:
        raise MalformedFrame(f"a header of {len(frame)} bytes; the limit is {MAX_HEADER_BYTES}")
    view = memoryview(frame)
    if xxhash.xxh3_64_digest(view[:-_SUM_BYTES]) != bytes(view[-_SUM_BYTES:]):
        raise MalformedFrame(f"a header of {len(frame)} bytes whose checksum does not hold")
    try:
        envelope = _decoder.decode(view[:-_SUM_BYTES])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MalformedFrame(f"not a message: {str(error)[:200]}") from error
    match envelope.body:
        case (
            Blocks(checksums=checksums)
            | Delivered(checksums=checksums)
            | Commit(checksums=checksums, inline=True)
        ):
            announced = len(checksums)
        case _:
            announced = 0
    if announced != len(payload_sizes):
        raise MalformedFrame(
            f"{type(envelope.body).__name__} announces {announced} payloads, "
            f"{len(payload_sizes)} came"
        )
    return envelope
