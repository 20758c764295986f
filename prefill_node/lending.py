"""Blocks that lie in the arena for decode nodes to copy: what is lent to whom, and for how long.

Owns the slots of shipments that have not been copied yet. A slot returns to the store when its
receiver says so, is gone, has aborted, or has been silent about it for too long: a copy made later
does not match its checksum, and its receiver asks again. Without an arena nothing is lent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.kvstore.client.client import StoreClient
from kvferry.kvstore.client.puts import Read, SlotRef
from kvferry.kvstore.wire.handoff import Credit
from kvferry.kvstore.wire.server import Peer
from kvferry.prefill_node.job import Job

REMIND_SECONDS = 2.0
"""After that without a word a receiver is asked whether it still wants them."""
LENT_SECONDS = 60.0
"""After that without a word nobody will copy them any more."""

_Key = tuple[bytes, int, int]


@dataclass(slots=True)
class _Loan:
    peer: Peer
    since: float
    """When something was last heard of it."""
    reminded: float
    refs: deque[tuple[int, SlotRef]] = field(default_factory=deque)
    """By block, in order."""


class Lending:
    """All loans of one prefill node."""

    def __init__(self, store: StoreClient | None, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._loans: dict[_Key, _Loan] = {}

    @property
    def num_lent(self) -> int:
        return sum(len(loan.refs) for loan in self._loans.values())

    def lend(
        self, job: Job, first: int, parent: bytes, keys: Sequence[bytes], read: Read
    ) -> list[SlotRef]:
        """Copies the leading ones of these blocks into slots; none if the peer cannot read them."""
        store = self._store
        if store is None or not job.store or job.store != store.link.mapped:
            return []
        refs = store.puts.ship(job.tenant, parent, first, keys, read)
        if refs:
            key = (job.peer.identity, job.number, job.epoch)
            now = self._clock()
            loan = self._loans.setdefault(key, _Loan(job.peer, now, now))
            loan.refs += ((first + at, ref) for at, ref in enumerate(refs))
        return refs

    def taken(self, identity: bytes, credit: Credit) -> None:
        """The receiver has copied everything before a block."""
        key = (identity, credit.transfer, credit.epoch)
        loan = self._loans.get(key)
        if loan is None:
            return
        loan.since = loan.reminded = self._clock()
        done = []
        while loan.refs and loan.refs[0][0] < credit.taken:
            done.append(loan.refs.popleft()[1])
        self._let_go(done)
        if not loan.refs:
            del self._loans[key]

    def ended(self, identity: bytes, transfer: int) -> None:
        """Whatever was lent for a transfer is not wanted any more."""
        self._end(lambda key: key[:2] == (identity, transfer))

    def lost(self, identity: bytes) -> None:
        self._end(lambda key: key[0] == identity)

    def tick(self) -> list[tuple[Peer, int, int]]:
        """Ends what is too old, and says whom to ask about which transfer and epoch."""
        if not self._loans:
            return []
        now = self._clock()
        self._end(lambda key: self._loans[key].since < now - LENT_SECONDS)
        due = [
            (key, loan) for key, loan in self._loans.items() if loan.reminded < now - REMIND_SECONDS
        ]
        for _, loan in due:
            loan.reminded = now
        return [(loan.peer, transfer, epoch) for (_, transfer, epoch), loan in due]

    def _end(self, which: Callable[[_Key], bool]) -> None:
        for key in [key for key in self._loans if which(key)]:
            self._let_go([ref for _, ref in self._loans.pop(key).refs])

    def _let_go(self, refs: Sequence[SlotRef]) -> None:
        if refs and self._store is not None:
            self._store.puts.let_go(refs)
