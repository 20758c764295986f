"""Messages between a gateway and any node about the node itself: its state and its care.

A node, be it a store, announces its status, its blocks and the steps that take long. A gateway
asks it to drain, to restate its keys, to forget its cache, or what it holds. No message here is
about a request or a transfer.

    gateway → node    Drain  Resync  ResetCache  DebugRequest
    node → gateway    Status  KeyBatch  CacheReset  DebugReply
    node → anyone     StepNotice
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvferry.kvstore.keys import KEY_BYTES
from kvferry.kvstore.wire.message import MAX_STEP_SECONDS, Count, Figure, Message, Name, Raw, Text


class Status(Message, frozen=True, array_like=True, tag=23):
    """A node's state, sent to every gateway about once a second and when it changes much."""

    running: Count
    waiting: Count
    blocks_used: Count
    blocks_cached: Count
    blocks_total: Count
    draining: bool
    counters: Annotated[dict[Name, Figure], Meta(max_length=256)]
    """Monotonic counters of this incarnation, by metric stem."""


class KeyBatch(Message, frozen=True, array_like=True, tag=24):
    """Blocks that a node's device pool gained and lost; `full` restates everything."""

    number: Count
    full: bool
    committed: Raw
    evicted: Raw

    def __post_init__(self) -> None:
        torn = len(self.committed) % KEY_BYTES or len(self.evicted) % KEY_BYTES
        if torn:
            raise ValueError(f"keys have {KEY_BYTES} bytes each, and {torn} are left over")


class StepNotice(Message, frozen=True, array_like=True, tag=25):
    """The node starts a step that it expects to take this long: silence until then is no stall."""

    predicted_s: Annotated[float, Meta(ge=0, le=MAX_STEP_SECONDS)]


class Drain(Message, frozen=True, array_like=True, tag=26):
    """Accept no new requests; end when the last one has."""


class Resync(Message, frozen=True, array_like=True, tag=27):
    """A gateway missed a `KeyBatch`: restate all keys."""


class ResetCache(Message, frozen=True, array_like=True, tag=15):
    """Forget every block that nobody uses; the answer is `CacheReset` with the same number."""

    number: Count


class CacheReset(Message, frozen=True, array_like=True, tag=16):
    number: Count
    evicted: Count
    """Blocks that were findable and are free now."""
    held: Count
    """Blocks that running requests or transfers use: they stay."""


class DebugRequest(Message, frozen=True, array_like=True, tag=28):
    """Asks a node that allows it: `ledger`, or `faults` with rules as JSON."""

    number: Count
    kind: Text
    body: Annotated[bytes, Meta(max_length=1 << 20)]


class DebugReply(Message, frozen=True, array_like=True, tag=29):
    number: Count
    body: Annotated[bytes, Meta(max_length=16 << 20)]
    """JSON; `{"error": …}` when it was refused."""


NodeMessage = (
    Status | KeyBatch | StepNotice | Drain | Resync | ResetCache | CacheReset | DebugRequest
    | DebugReply
)  # fmt: skip
