"""Messages between a node and the store: slots of the arena, blocks put and blocks fetched.

A node attaches and maps the arena, or has none and sends bytes inline. It commits blocks in slots
that were granted to it, and fetches a chain whose blocks are leased to it, or sent, a window at a
time. This module knows neither the tiers nor the requests that the blocks are for.

    node → store      Attach  Mapped  Holding  Keeping  GiveBack  Commit  Release  Locate
                      FetchRequest  Taken  CancelFetch  Damaged
    store → node      Attached  Granted  Located  Leased  Delivered  FetchEnded
    gateway → store   CacheRequest
    store → gateway   CacheReply
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvferry.kvstore.wire.message import Count, Key, Message, Raw, Seconds, Slots, Sums, Text


class Attach(Message, frozen=True, array_like=True, tag=50):
    """A node wants to put and fetch blocks of this size."""

    block_bytes: Annotated[int, Meta(ge=1, le=1 << 31)]
    shared: bool
    """Whether it would map the arena."""


class Attached(Message, frozen=True, array_like=True, tag=51):
    """Where the arena is. The node maps it and locks its lane, and says so with `Mapped`."""

    path: Text
    """Empty: there is none to map, blocks travel inline."""
    lane: Count
    slot_bytes: Count
    num_slots: Count
    lease_s: Seconds
    """How long a handed-out block stays in its slot. A reader counts from when it asked."""


class Mapped(Message, frozen=True, array_like=True, tag=52):
    """False: the node cannot map the arena, and everything travels inline."""

    shared: bool


class Granted(Message, frozen=True, array_like=True, tag=53):
    """Slots that this node alone may write until it commits them or gives them back."""

    number: Count
    """Counts grants from 1; one that does not come next in order is ignored."""
    slots: Slots


class Holding(Message, frozen=True, array_like=True, tag=68):
    """Of all slots granted up to `number` the node has these left: it would have more.

    What it has not, it committed, gave back or never heard of.
    """

    number: Count
    slots: Slots


class Keeping(Message, frozen=True, array_like=True, tag=69):
    """Of all that the node committed with `hold`, these are still wanted: a lost `Release`."""

    slots: Slots


class GiveBack(Message, frozen=True, array_like=True, tag=54):
    slots: Slots


class Commit(Message, frozen=True, array_like=True, tag=55):
    """Consecutive blocks of one chain are in these granted slots, or in the frames behind."""

    tenant: Key
    parent: Key
    """Key of the block before the first one, or the root."""
    depth: Count
    """How many blocks come before the first one."""
    keys: Raw
    slots: Slots
    checksums: Sums
    """xxh3-64 of each block."""
    hold: bool
    """Keep the slots as they are until `Release`: another node will read them."""
    inline: bool


class Release(Message, frozen=True, array_like=True, tag=56):
    """What was committed with `hold` has been read, or will not be."""

    slots: Slots


class Locate(Message, frozen=True, array_like=True, tag=57):
    number: Count
    keys: Raw


class Located(Message, frozen=True, array_like=True, tag=58):
    """One byte a block for the longest prefix that is there: `h` in memory, `d` on disk."""

    number: Count
    tiers: Raw


class FetchRequest(Message, frozen=True, array_like=True, tag=59):
    """A request wants this chain, and the bytes of its blocks from `first` on."""

    number: Count
    keys: Raw
    """From the first block of the chain."""
    first: Count
    deadline_s: Seconds
    """Seconds from arrival; what is not there then is not sent."""
    window: Annotated[int, Meta(ge=1, le=1 << 31)]
    """How many blocks may be handed out and not taken."""


class Leased(Message, frozen=True, array_like=True, tag=60):
    """Blocks from `first` on lie in these slots."""

    number: Count
    first: Count
    slots: Slots
    checksums: Sums
    tiers: Raw
    """One byte a block, as in `Located`: where it came from."""


class Delivered(Message, frozen=True, array_like=True, tag=61):
    """Blocks from `first` on, in the frames behind."""

    number: Count
    first: Count
    checksums: Sums
    tiers: Raw


class Taken(Message, frozen=True, array_like=True, tag=62):
    """The node has copied this many more blocks of a fetch."""

    number: Count
    count: Count


class FetchEnded(Message, frozen=True, array_like=True, tag=63):
    """Nothing more comes: `complete`, `short` (no more is there), `deadline`, `refused`."""

    number: Count
    reason: Text


class CancelFetch(Message, frozen=True, array_like=True, tag=64):
    number: Count


class Damaged(Message, frozen=True, array_like=True, tag=65):
    """A copy made under a lease was not what its checksum says."""

    key: Key


class CacheRequest(Message, frozen=True, array_like=True, tag=66):
    """Administration of the cache: `stats`, `inspect`, `clear`, `pin`, `unpin`, `prefetch`."""

    number: Count
    action: Text
    tenant: Raw = b""
    """Of `clear`; empty: all tenants."""
    keys: Raw = b""
    """A chain, for `inspect`, `pin`, `unpin` and `prefetch`."""
    seconds: Seconds = 0.0
    """How long a pin lasts, or a prefetch may take."""


class CacheReply(Message, frozen=True, array_like=True, tag=67):
    number: Count
    body: Raw
    """JSON; `{"error": …}` when it was refused."""


StoreMessage = (
    Attach | Attached | Mapped | Granted | Holding | Keeping | GiveBack | Commit | Release
    | Locate | Located | FetchRequest | Leased | Delivered | Taken | FetchEnded | CancelFetch
    | Damaged | CacheRequest | CacheReply
)  # fmt: skip
