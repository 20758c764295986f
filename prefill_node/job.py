"""One transfer as the prefill node sees it: what to compute, and what may be shipped of it.

Plain state; it holds no socket and no pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvferry.kvstore.keys import KEY_BYTES, split_keys, unpack_tokens
from kvferry.kvstore.wire.handoff import Offer
from kvferry.kvstore.wire.server import Peer

MAX_CREDIT_BYTES = 256 << 20
"""What one transfer may have under way, whatever its receiver says that it can take: what it does
not read is held here."""


class JobState(Enum):
    """The life of a transfer on the sender's side.

    OFFERED ─room─► ACCEPTED ─first chunk or reused block shipped─► STREAMING ─last one─► COMPLETE
       │               │                                               │
       └───────────────┴──────── abort, or its peer is lost ───────────┴──► ABORTED ─► DRAINED

    OFFERED waits unaccepted and holds nothing. An ABORTED job whose chunk is being computed keeps
    its blocks until that pass is over; then, like a COMPLETE one, it holds nothing.
    """

    OFFERED = "offered"
    ACCEPTED = "accepted"
    STREAMING = "streaming"
    COMPLETE = "complete"
    ABORTED = "aborted"
    DRAINED = "drained"


@dataclass(slots=True, eq=False)
class Job:
    """Blocks `[first, last)` of a prompt, wanted by `peer`."""

    peer: Peer
    number: int
    epoch: int
    tokens: list[int]
    keys: list[bytes]
    first: int
    last: int
    priority: int
    arrived: float
    credit: int
    """Bytes that may be sent now."""
    state: JobState = JobState.OFFERED
    blocks: list[int] = field(default_factory=list)
    prefix: int = 0
    """Leading blocks that were in the pool, or in the store, when the job was accepted."""
    from_host: int = 0
    from_disk: int = 0
    """How many of them came from the store for this job."""
    computed: int = 0
    """Tokens whose keys and values are in the blocks."""
    sent: int = 0
    """The next block to ship."""
    awaited: bytes = b""
    """Key of the block that another job was computing when this one was last looked at."""
    root: bytes = b""
    tenant: bytes = b""
    store: int = 0
    """Incarnation of the store whose arena the receiver has mapped."""
    fetching: bool = False
    """Blocks of it are on their way from the store: nothing of it is computed yet."""
    started_at: float = 0.0
    finished_at: float = 0.0

    def grant(self, size: int, block_bytes: int) -> None:
        """The receiver can take so many bytes more."""
        self.credit = min(self.credit + size, max(MAX_CREDIT_BYTES, 2 * block_bytes))

    @property
    def remaining(self) -> int:
        """Tokens to compute."""
        return len(self.tokens) - self.computed

    @property
    def order(self) -> tuple[int, float]:
        return (self.priority, self.arrived)


def open_job(peer: Peer, offer: Offer, block_size: int, now: float) -> Job:
    """Checks an offer's counts against each other; ValueError says which do not agree."""
    if len(offer.keys) != offer.last * KEY_BYTES:
        raise ValueError(f"{len(offer.keys)} bytes of keys for {offer.last} blocks")
    if len(offer.tokens) != 4 * offer.last * block_size:
        raise ValueError(f"{len(offer.tokens)} bytes of tokens for {offer.last} blocks")
    if not offer.first < offer.last:
        raise ValueError(f"blocks [{offer.first}, {offer.last}) are none")
    return Job(
        peer=peer,
        number=offer.transfer,
        epoch=offer.epoch,
        tokens=unpack_tokens(offer.tokens),
        keys=split_keys(offer.keys),
        root=offer.root,
        tenant=offer.tenant,
        store=offer.store,
        first=offer.first,
        last=offer.last,
        priority=offer.priority,
        arrived=now,
        credit=offer.credit,
        sent=offer.first,
    )
