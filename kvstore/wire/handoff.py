"""Messages of the hand-off: a decode node D asks a prefill node P for blocks, and P ships them.

A transfer is named by its number and its epoch. It starts with an `Offer`, which P accepts or
declines; blocks travel in frames behind `Blocks`, or are `Lent` in the arena, as far as D's credit
reaches; `Complete` or `TransferAborted` ends it. This module does not know the requests that the
blocks are for.

    D → P             Offer  Credit  AbortTransfer  Probe
    P → D             Accepted  Declined  Blocks  Lent  Complete  TransferAborted  Progress
"""

from __future__ import annotations

from kvferry.kvstore.keys import KEY_BYTES
from kvferry.kvstore.wire.message import (
    Count,
    Incarnation,
    Integer,
    Key,
    Message,
    Raw,
    Seconds,
    Slots,
    Sums,
    Text,
)


class Offer(Message, frozen=True, array_like=True, tag=30):
    """D has reserved blocks `[first, last)` of this prompt and asks P for them."""

    transfer: Count
    epoch: Count
    tokens: Raw
    """Token ids of blocks `[0, last)`, int32."""
    keys: Raw
    """Keys of blocks `[0, last)`."""
    first: Count
    last: Count
    credit: Count
    """Bytes that P may have in flight before D returns some."""
    priority: Integer = 0
    root: Key = bytes(KEY_BYTES)
    tenant: Key = bytes(KEY_BYTES)
    """As in `Generate`: what P puts into a store is chained from the root, and the tenant's."""
    store: Incarnation = 0
    """Of the store whose arena D has mapped: blocks may be `Lent`. 0: none."""


class Accepted(Message, frozen=True, array_like=True, tag=31):
    """P has reserved the whole span. Its own prefix reaches to block `prefix`."""

    transfer: Count
    epoch: Count
    prefix: Count
    expected_start_s: Seconds
    """Seconds until P expects to start computing."""
    store: Incarnation = 0
    """Of the store that P puts these blocks into, however they travel. 0: to none."""
    host: Count = 0
    disk: Count = 0
    """How many of the last blocks of its prefix P has only just fetched, from which tier."""


class Declined(Message, frozen=True, array_like=True, tag=32):
    """P will not do it: `too_large` (more blocks than P has), `busy`, `draining`, `invalid`."""

    transfer: Count
    epoch: Count
    reason: Text
    needed: Count
    available: Count


class Blocks(Message, frozen=True, array_like=True, tag=33):
    """Consecutive blocks from `first` on; their payloads are the frames behind this header."""

    transfer: Count
    epoch: Count
    first: Count
    checksums: Sums
    """xxh3-64 of each payload frame."""


class Credit(Message, frozen=True, array_like=True, tag=34):
    """D has taken over this many more bytes: P may send as many again and drop their blocks."""

    transfer: Count
    epoch: Count
    size: Count
    taken: Count = 0
    """All blocks before this one have been copied out of their slots."""


class Lent(Message, frozen=True, array_like=True, tag=40):
    """As `Blocks`, but the payloads lie in slots of the arena that both nodes have mapped."""

    transfer: Count
    epoch: Count
    first: Count
    store: Incarnation
    """Of the store whose arena it is."""
    slots: Slots
    checksums: Sums


class Complete(Message, frozen=True, array_like=True, tag=35):
    """P has shipped the last block of the transfer."""

    transfer: Count
    epoch: Count
    reused: Count
    """Blocks that came from P's own pool."""
    computed: Count
    started_at: Seconds
    """When P began to compute, on P's monotonic clock; equal to finished_at if it did not."""
    finished_at: Seconds
    """When P's last chunk ended."""


class AbortTransfer(Message, frozen=True, array_like=True, tag=36):
    transfer: Count
    epoch: Count


class TransferAborted(Message, frozen=True, array_like=True, tag=37):
    """P sends nothing more of this transfer: it acknowledges an abort, or gives up by itself.

    `reason` is `asked`, or what went wrong on P.
    """

    transfer: Count
    epoch: Count
    reason: Text


class Probe(Message, frozen=True, array_like=True, tag=38):
    """Nothing has come of this transfer for a while: `Progress`, or `TransferAborted`."""

    transfer: Count
    epoch: Count


class Progress(Message, frozen=True, array_like=True, tag=39):
    """How far a transfer is on P."""

    transfer: Count
    epoch: Count
    working: bool
    """P still has to accept it or to compute for it. Otherwise only credit can be missing."""
    sent: Count
    """The next block to ship."""


HandoffMessage = (
    Offer | Accepted | Declined | Blocks | Credit | Complete | AbortTransfer | TransferAborted
    | Probe | Progress | Lent
)  # fmt: skip
