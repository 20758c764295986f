"""Blocks on their way in: the decode node's side of every transfer.

Owns transfer ids, epochs, credits and what has landed. It is pure: it says where a payload belongs
or that it must be dropped; the node verifies, writes and answers. Only this node writes its pool,
so an abort frees the blocks at once: what arrives later carries a dead epoch and is dropped.

    OFFERED ─accepted─► ACCEPTED ─first block─► STREAMING ─last block and Complete─► COMPLETE
       │                    │                       │
       └────────────────────┴───────── abort ───────┴──► ABORTED ─TransferAborted─► DRAINED
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from kvferry.kvstore.wire.handoff import Accepted, Blocks, Complete, Lent

Owner = TypeVar("Owner")


class TransferState(Enum):
    OFFERED = "offered"
    ACCEPTED = "accepted"
    STREAMING = "streaming"
    COMPLETE = "complete"
    ABORTED = "aborted"
    DRAINED = "drained"


LIVE = frozenset({TransferState.OFFERED, TransferState.ACCEPTED, TransferState.STREAMING})


@dataclass(slots=True, eq=False)
class Transfer(Generic[Owner]):
    """Blocks `[first, last)` of one sequence, asked of one prefill node."""

    number: int
    epoch: int
    first: int
    last: int
    owner: Owner
    prefill_node: str
    moved_at: float
    """When it last moved, or its prefill node was last asked about it."""
    leading: int
    """Up to which block everything from `first` on has landed."""
    offered: bool = False
    """Whether the offer has left."""
    unanswered: int = 0
    """Questions since the prefill node last said how far it is."""
    standing: tuple[int, int] | None = None
    """Blocks sent and landed when the prefill node last said how far it is."""
    state: TransferState = TransferState.OFFERED
    landed: set[int] = field(default_factory=set)
    complete: Complete | None = None
    accepted: Accepted | None = None
    """What the prefill node had of them already, and which store it puts them into."""
    finished_at: float = 0.0
    """When the prefill node's last chunk ended, on our clock."""
    bytes_received: int = 0
    window: int = 0
    """Bytes that the sender may have in flight: granted, and not landed yet."""


@dataclass(frozen=True, slots=True)
class Windows:
    """How many bytes may be in flight: of one transfer, and of all from one prefill node together.

    A stopped reader finds no more than that waiting for it, and a sender keeps no more for it.
    `least` is what every transfer gets, however many there are: at least one block.
    """

    transfer: int
    node: int
    least: int


class Arrival(NamedTuple, Generic[Owner]):
    """What to make of a `Blocks` message of a live transfer."""

    transfer: Transfer[Owner]
    fresh: list[int]
    """Which of its payloads to take, by index."""
    sound: bool
    """False: its indices or sizes are wrong, and the sender is not to be trusted with the rest."""


@dataclass(slots=True)
class TransferCounters:
    dropped: int = 0
    """Frames of unknown, ended or older transfers, and of blocks that nobody asked for."""
    duplicates: int = 0
    damaged: int = 0
    """Payloads whose checksum did not hold."""


class Transfers(Generic[Owner]):
    """All transfers of one decode node; `Owner` is whatever waits for the blocks."""

    def __init__(self, block_bytes: int, windows: Windows) -> None:
        self.block_bytes = block_bytes
        self.windows = windows
        self.counters = TransferCounters()
        self._transfers: dict[int, Transfer[Owner]] = {}
        self._next = 1
        self._epoch = 0
        self.num_landed = 0
        """Blocks landed since the start."""

    def open(
        self, owner: Owner, first: int, last: int, prefill_node: str, now: float = 0.0
    ) -> Transfer[Owner]:
        """A new transfer, with an id and an epoch of its own, not offered to anybody yet."""
        self._epoch += 1
        transfer = Transfer(
            self._next, self._epoch, first, last, owner, prefill_node, now, leading=first
        )
        self._transfers[transfer.number] = transfer
        self._next += 1
        return transfer

    def first_credit(self, transfer: Transfer[Owner]) -> int:
        """Credit to offer with: none of an earlier try has reached the sender."""
        transfer.window = 0
        return self.credit(transfer, 0)

    def credit(self, transfer: Transfer[Owner], landed: int) -> int:
        """Credit to send now that `landed` more bytes have; moves the window to its fair share."""
        sharing = sum(
            one.state in LIVE and one.prefill_node == transfer.prefill_node
            for one in self._transfers.values()
        )
        fair = max(self.windows.node // max(1, sharing), self.windows.least)
        still_out = transfer.window - landed
        credit = max(0, min(fair, self.windows.transfer) - still_out)
        transfer.window = still_out + credit
        return credit

    def find(self, number: int, epoch: int) -> Transfer[Owner] | None:
        """The transfer a message speaks of, if it is live; else the message is counted."""
        transfer = self._transfers.get(number)
        if transfer is None or transfer.epoch != epoch or transfer.state not in LIVE:
            self.counters.dropped += 1
            return None
        return transfer

    def accepted(self, message: Accepted) -> Transfer[Owner] | None:
        transfer = self.find(message.transfer, message.epoch)
        if transfer is not None and transfer.state is TransferState.OFFERED:
            transfer.state = TransferState.ACCEPTED
        return transfer

    def arriving(self, message: Blocks | Lent, sizes: Items[int]) -> Arrival[Owner] | None:
        """What to do with the message's payloads; None: the transfer is not live, drop them."""
        transfer = self.find(message.transfer, message.epoch)
        if transfer is None:
            return None
        last = message.first + len(sizes)
        outside = message.first < transfer.first or last > transfer.last
        if outside or any(size != self.block_bytes for size in sizes):
            self.counters.damaged += 1
            return Arrival(transfer, [], sound=False)
        fresh = [
            index for index in range(len(sizes)) if message.first + index not in transfer.landed
        ]
        self.counters.duplicates += len(sizes) - len(fresh)
        return Arrival(transfer, fresh, sound=True)

    def is_known(self, number: int) -> bool:
        """Whether the sender may still speak of this transfer: it is live or being drained."""
        return number in self._transfers

    def landed(self, transfer: Transfer[Owner], block: int) -> None:
        """The block's bytes were verified and are in the pool."""
        transfer.state = TransferState.STREAMING
        transfer.landed.add(block)
        self.num_landed += 1
        while transfer.leading in transfer.landed:
            transfer.leading += 1
        transfer.bytes_received += self.block_bytes
        self._settle(transfer)

    def completed(self, message: Complete) -> Transfer[Owner] | None:
        """The sender says that everything is on its way; blocks may still be missing."""
        transfer = self.find(message.transfer, message.epoch)
        if transfer is not None:
            transfer.complete = message
            self._settle(transfer)
        return transfer

    def _settle(self, transfer: Transfer[Owner]) -> None:
        if transfer.complete is not None and len(transfer.landed) == transfer.last - transfer.first:
            transfer.state = TransferState.COMPLETE
            del self._transfers[transfer.number]

    def abort(self, transfer: Transfer[Owner], *, acknowledged: bool) -> None:
        """Ends a live transfer. Unless the sender already knows, it stays until `drained`."""
        assert transfer.state in LIVE, f"transfer {transfer.number} is {transfer.state.value}"
        transfer.state = TransferState.ABORTED
        if acknowledged:
            self._drop(transfer)

    def drained(self, number: int, epoch: int) -> None:
        """The sender acknowledged: nothing more of this transfer comes."""
        transfer = self._transfers.get(number)
        if transfer is None or transfer.epoch != epoch:
            self.counters.dropped += 1
        elif transfer.state is TransferState.ABORTED:
            self._drop(transfer)

    def _drop(self, transfer: Transfer[Owner]) -> None:
        transfer.state = TransferState.DRAINED
        del self._transfers[transfer.number]

    def is_aborted(self, number: int, epoch: int) -> bool:
        transfer = self._transfers.get(number)
        aborted = transfer is not None and transfer.state is TransferState.ABORTED
        return aborted and transfer is not None and transfer.epoch == epoch

    def all(self) -> list[Transfer[Owner]]:
        """Every transfer that is live or being drained."""
        return list(self._transfers.values())

    def of_node(self, prefill_node: str) -> list[Transfer[Owner]]:
        """All transfers with one prefill node, aborted ones included."""
        return [one for one in self._transfers.values() if one.prefill_node == prefill_node]

    def of_owner(self, owner: Owner) -> Transfer[Owner] | None:
        """The live transfer that `owner` waits for."""
        for transfer in self._transfers.values():
            if transfer.owner is owner and transfer.state in LIVE:
                return transfer
        return None

    @property
    def num_live(self) -> int:
        return sum(one.state in LIVE for one in self._transfers.values())

    @property
    def num_draining(self) -> int:
        return len(self._transfers) - self.num_live

    def check(self) -> None:
        """Proves that no ended transfer is kept and nothing landed outside its span."""
        for number, one in self._transfers.items():
            assert number == one.number
            assert one.state not in (TransferState.COMPLETE, TransferState.DRAINED)
            assert all(one.first <= block < one.last for block in one.landed)
