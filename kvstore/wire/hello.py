"""Messages of every connection: how two processes meet, and how each knows that the other lives.

A client says `Hello` and gets `Welcome`, or `Refused`; whoever says anything else first is told
`HelloRequired`. `Ping` and `Pong` go both ways at any time. This module does not know what the
connection is for.

    client → server   Hello
    server → client   Welcome  HelloRequired  Refused
    anyone            Ping  Pong
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvferry.kvstore.wire.message import Fingerprint, Integer, Message, Name, Seconds, Text


class Hello(Message, frozen=True, array_like=True, tag=1):
    """The first message of a client. A gateway sends the fingerprint fields it can know."""

    protocol: Integer
    role: Name
    fingerprint: Fingerprint


class Welcome(Message, frozen=True, array_like=True, tag=2):
    """The server's answer to a Hello it accepts."""

    role: Name
    fingerprint: Fingerprint
    block_size: Annotated[int, Meta(ge=1, le=1 << 16)]
    num_blocks: Annotated[int, Meta(ge=1, le=1 << 24)]
    max_model_len: Annotated[int, Meta(ge=1, le=1 << 31)]
    max_num_seqs: Annotated[int, Meta(ge=0, le=1 << 20)]


class HelloRequired(Message, frozen=True, array_like=True, tag=3):
    """The only answer to an identity that has not said hello to this incarnation."""


class Refused(Message, frozen=True, array_like=True, tag=4):
    """The peers differ in `field`: they must not exchange blocks."""

    field: Text
    server_value: Text
    client_value: Text


class Ping(Message, frozen=True, array_like=True, tag=5):
    sent_at: Seconds
    """The sender's monotonic clock, seconds."""


class Pong(Message, frozen=True, array_like=True, tag=6):
    sent_at: Seconds
    """Echo of the Ping."""
    answered_at: Seconds
    """The answerer's monotonic clock, seconds: the pair gives the offset of the two clocks."""


HelloMessage = Hello | Welcome | HelloRequired | Refused | Ping | Pong
