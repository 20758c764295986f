"""What a message is, and how large each kind of field may be.

A message is a frozen struct that msgspec encodes as a positional msgpack array with an integer tag.
Every number of it has its bounds, every text, tuple and dict its largest size, and no float is
infinite or no number: all that the decoder checks before anything acts on a message. What only a
receiver can know it checks where it acts. This module knows no single message.
"""

from __future__ import annotations

import sys
from typing import Annotated

from msgspec import Meta, Struct

from kvferry.kvstore.keys import KEY_BYTES

MAX_HEADER_BYTES = 64 << 20
"""A header larger than this is refused unread: 2 million prompt tokens fit."""

MAX_STEP_SECONDS = 60.0
"""No node announces, nor is believed, that a step takes longer."""
MAX_CHOICES = 128

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
"""Exact in JSON and as a float."""
Integer = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Incarnation = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Sum = Annotated[int, Meta(ge=0)]
"""64 bits, which is all that msgpack has for an integer."""
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Choice = Annotated[int, Meta(ge=0, le=MAX_CHOICES - 1)]
Real = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""Any number, but a number: bounds keep out infinities, and NaN, which is within none."""
Figure = Annotated[float, Meta(ge=0, le=1e18)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""A duration, or a reading of somebody's monotonic clock."""
Milliseconds = Annotated[float, Meta(ge=0, le=1e12)]
LogProb = Annotated[float, Meta(ge=-1e9, le=1.0)]
"""Minus infinity is sent as a large negative number; rounding may put a certain token above 0."""
Text = Annotated[str, Meta(max_length=4096)]
Name = Annotated[str, Meta(max_length=100, pattern=r"^[a-z][a-z0-9_]*\Z")]
"""Of a role, a counter or a fingerprint's field: harmless in a log line and as a metric's name."""
Slots = Annotated[tuple[Count, ...], Meta(max_length=1 << 20)]
Sums = Annotated[tuple[Sum, ...], Meta(max_length=1 << 20)]
Finish = Annotated[str, Meta(max_length=32, pattern=r"^(stop|length|stop:[0-9]{1,10})?\Z")]
Raw = Annotated[bytes, Meta(max_length=MAX_HEADER_BYTES)]
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Fingerprint = Annotated[dict[Name, Text], Meta(max_length=64)]
TokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=4096)]
Alternatives = Annotated[tuple[tuple[TokenId, LogProb], ...], Meta(max_length=1024)]


class Message(Struct, frozen=True, array_like=True):
    """Base of all messages; each has its own integer tag."""
