"""Blocks on their way from prefill nodes into the pool.

Carries out what `Transfers` decides: offers, verifies, writes, returns credits, aborts, and asks
again for what was lost. A transfer that fails hands its sequence back, to be asked of another
prefill node or computed here from the first missing block on: nobody notices anything but time.
"""

from __future__ import annotations

from collections.abc import Callable

from kvferry.decode_node.links import PrefillLinks
from kvferry.decode_node.request import Phase, Sequence
from kvferry.decode_node.transfers import LIVE, Transfer, Transfers, TransferState, Windows
from kvferry.kernels.engine import Engine
from kvferry.kvstore.client.client import StoreClient
from kvferry.kvstore.client.puts import SlotRef
from kvferry.kvstore.keys import checksum, pack_tokens
from kvferry.kvstore.process.logs import SparseLog
from kvferry.kvstore.tiers.device import BlockPool
from kvferry.kvstore.wire.client import Client
from kvferry.kvstore.wire.codec import AnyMessage
from kvferry.kvstore.wire.handoff import (
    AbortTransfer,
    Accepted,
    Blocks,
    Complete,
    Credit,
    Declined,
    Lent,
    Offer,
    Probe,
    Progress,
    TransferAborted,
)
from kvferry.kvstore.wire.status import StepNotice

TRANSFER_WINDOW = 32 << 20
NODE_WINDOW = 64 << 20
"""Bytes that one transfer, and all from one prefill node together, may have in flight."""

CONNECT_SECONDS = 2.0
"""How long an offer waits for a link to come up before another way is taken."""

PROBE_SECONDS = 1.0
"""How long a transfer may stand still before its prefill node is asked about it."""

MAX_UNANSWERED = 5
"""Questions about one transfer without an answer before its prefill node is given up."""

MAX_ATTEMPTS = 3
"""Transfers of one sequence from one prefill node before another way is taken."""


class Receiver:
    """The decode node's side of all hand-offs.

    `handed_back` is told of failed transfers, `to_put` of blocks `[first, last)` of a sequence
    that have landed and that no other node puts into the store of this one.
    """

    def __init__(
        self,
        connect: Callable[[str], Client],
        engine: Engine,
        pool: BlockPool,
        *,
        reuse: bool,
        clock: Callable[[], float],
        handed_back: Callable[[Sequence], None],
        to_put: Callable[[Sequence, int, int], None],
        peer_log: SparseLog,
        store: StoreClient | None = None,
    ) -> None:
        least = 2 * engine.spec.block_bytes
        windows = Windows(max(TRANSFER_WINDOW, least), NODE_WINDOW, least)
        self.transfers: Transfers[Sequence] = Transfers(engine.spec.block_bytes, windows)
        self.links = PrefillLinks(connect, clock, self._lost, peer_log)
        self.retries = 0
        self.heard = 0
        """How often a prefill node said that it is still working for us."""
        self._engine = engine
        self._pool = pool
        self._reuse = reuse
        self._clock = clock
        self._handed_back = handed_back
        self._to_put = to_put
        self._peer_log = peer_log
        self._store = store

    # -- asking -----------------------------------------------------------------------------------

    def candidate(self, sequence: Sequence) -> str | None:
        """The best prefill node that may still be asked for this sequence."""
        for address in sequence.request.message.prefill_nodes:
            if sequence.attempts[address] < MAX_ATTEMPTS and self.links.usable(address):
                return address
        return None

    def ask(self, sequence: Sequence, last: int, address: str) -> None:
        """Asks for the blocks from the sequence's first uncomputed one up to `last`."""
        first = sequence.computed // self._engine.spec.block_size
        sequence.phase = Phase.RECEIVING
        sequence.attempts[address] += 1
        self._offer(self.transfers.open(sequence, first, last, address, self._clock()))

    def _offer(self, transfer: Transfer[Sequence]) -> None:
        link = self.links.ready(transfer.prefill_node)
        if link is None:
            return
        sequence = transfer.owner
        tokens = sequence.tokens[: transfer.last * self._engine.spec.block_size]
        arena = 0 if self._store is None or sequence.inline else self._store.link.mapped
        offer = Offer(
            transfer.number,
            transfer.epoch,
            pack_tokens(tokens),
            b"".join(sequence.keys[: transfer.last]),
            transfer.first,
            transfer.last,
            self.transfers.first_credit(transfer),
            sequence.request.message.priority,
            sequence.request.message.root,
            sequence.request.message.tenant,
            arena,
        )
        if link.send(offer):
            transfer.offered = True
            transfer.moved_at = self._clock()

    # -- receiving --------------------------------------------------------------------------------

    def receive(self, seconds: float) -> None:
        """Handles what has arrived, until nothing is left or that much time was spent on it."""
        until = self._clock() + seconds
        for link in self.links.in_turn():
            for received in link.receive():
                self._handle(link, received.message, received.payloads)
                if self._clock() > until:
                    return
            self.links.judge(link, self._clock())

    def tick(self, now: float) -> None:
        """Sends offers that waited for a link, asks about transfers that stand still."""
        self.links.tick(now)
        for transfer in self.transfers.all():
            if transfer.state is TransferState.ABORTED:
                if now > transfer.moved_at + PROBE_SECONDS:  # the abort or its answer was lost
                    transfer.moved_at = now
                    self._send(transfer, AbortTransfer(transfer.number, transfer.epoch))
            elif transfer.state not in LIVE:
                continue  # it ended while others were looked after
            elif not transfer.offered:
                if now > transfer.moved_at + CONNECT_SECONDS:
                    why = f"no answer in {CONNECT_SECONDS:g} s"
                    self.links.avoid(transfer.prefill_node, why)
                else:
                    self._offer(transfer)
            elif now > transfer.moved_at + PROBE_SECONDS:
                transfer.moved_at = now
                transfer.unanswered += 1
                if transfer.unanswered > MAX_UNANSWERED:
                    self.links.avoid(transfer.prefill_node, "it leaves questions unanswered")
                else:
                    self._send(transfer, Probe(transfer.number, transfer.epoch))

    def _send(self, transfer: Transfer[Sequence], message: AnyMessage) -> bool:
        return self.links.send(transfer.prefill_node, message)

    def _handle(self, link: Client, message: AnyMessage, payloads: tuple[memoryview, ...]) -> None:
        match message:
            case Blocks() | Lent():
                self._take(link, message, payloads)
            case Accepted():
                transfer = self.transfers.accepted(message)
                if transfer is not None:
                    transfer.accepted = message
                    transfer.moved_at = self._clock()
            case Complete():
                completed = self.transfers.completed(message)
                if completed is not None:
                    completed.finished_at = link.to_local(message.finished_at)
                    self._finish_if_complete(completed)
            case Progress():
                self._progress(link, message)
            case Declined():
                self._declined(message)
            case TransferAborted():
                self._aborted_there(message)
            case StepNotice():
                self.links.noticed(link, message)
            case _:
                kind = type(message).__name__
                self._peer_log.warning(
                    "ignored", link.address, "ignored a %s from %s", kind, link.address
                )

    def _take(self, link: Client, message: Blocks | Lent, payloads: tuple[memoryview, ...]) -> None:
        if isinstance(message, Lent):
            sizes = [self.transfers.block_bytes] * min(len(message.slots), len(message.checksums))
        else:
            sizes = [len(payload) for payload in payloads]
        arriving = self.transfers.arriving(message, sizes)
        if arriving is None:
            if not self.transfers.is_known(message.transfer):
                link.send(AbortTransfer(message.transfer, message.epoch))
            return
        transfer = arriving.transfer
        if not arriving.sound:
            self._peer_log.error(
                "unsound",
                link.address,
                "%s sent blocks that transfer %d cannot have",
                link.address,
                transfer.number,
            )
            self._retry(transfer)
            return
        before = transfer.leading
        damaged = self._write_all(transfer, message, arriving.fresh, payloads)
        if transfer.leading > before and not self._is_in_store(transfer, message):
            self._to_put(transfer.owner, before, transfer.leading)
        if damaged is not None:
            self.transfers.counters.damaged += 1
            self._peer_log.error(
                "damaged",
                link.address,
                "block %d of transfer %d from %s is damaged",
                damaged,
                transfer.number,
                link.address,
            )
            transfer.owner.inline |= isinstance(message, Lent)
            self._retry(transfer)
            return
        credit = self.transfers.credit(transfer, len(arriving.fresh) * self.transfers.block_bytes)
        if credit or isinstance(message, Lent):
            taken = transfer.leading
            link.send(Credit(transfer.number, transfer.epoch, credit, taken))
        self._finish_if_complete(transfer)

    def _is_in_store(self, transfer: Transfer[Sequence], message: Blocks | Lent) -> bool:
        """Whether what a message brought comes to our store without us: it was lent from there,
        or the prefill node puts it there. Without a store everything is where it can be."""
        ours = 0 if self._store is None else self._store.link.incarnation
        if not ours or isinstance(message, Lent):
            return True
        return transfer.accepted is not None and transfer.accepted.store == ours

    def _write_all(
        self,
        transfer: Transfer[Sequence],
        message: Blocks | Lent,
        fresh: list[int],
        payloads: tuple[memoryview, ...],
    ) -> int | None:
        """Takes over these payloads up to one that is not what was sent; which block that is.

        Blocks become findable in order only: what lies behind a gap may still be computed here,
        and a findable block is never written again.
        """
        sequence = transfer.owner
        for index in fresh:
            block = message.first + index
            if not self._write(sequence.blocks[block], message, index, payloads):
                return block
            before = transfer.leading
            self.transfers.landed(transfer, block)
            transfer.moved_at = self._clock()
            if self._reuse:
                for done in range(before, transfer.leading):
                    self._pool.commit(sequence.blocks[done], sequence.keys[done])
        return None

    def _write(
        self, to: int, message: Blocks | Lent, index: int, payloads: tuple[memoryview, ...]
    ) -> bool:
        """Puts a payload into this block of the pool; False unless it is what was sent."""
        expected = message.checksums[index]
        if isinstance(message, Blocks):
            if checksum(payloads[index]) != expected:
                return False
            self._engine.write(to, payloads[index])
            return True
        if self._store is None:
            return False

        def write(view: memoryview) -> bytes | memoryview:
            self._engine.write(to, view)
            return self._engine.read(to)

        lent = SlotRef(message.store, message.slots[index], expected)
        return self._store.fetches.copy(lent, write)

    def _progress(self, link: Client, message: Progress) -> None:
        """The prefill node says how far it is. If all it waits for is credit or nothing at all,
        and nothing has landed since it said so before, then frames were lost."""
        transfer = self.transfers.find(message.transfer, message.epoch)
        if transfer is None:
            if not self.transfers.is_known(message.transfer):  # it ended, but not for its sender
                link.send(AbortTransfer(message.transfer, message.epoch))
            return
        transfer.moved_at = self._clock()
        transfer.unanswered = 0
        standing = (message.sent, len(transfer.landed))
        if not message.working and transfer.standing == standing:
            whose = transfer.prefill_node
            self._peer_log.warning(
                "holes",
                whose,
                "transfer %d from %s has lost frames; asking again",
                transfer.number,
                whose,
            )
            self._retry(transfer)
        else:
            transfer.standing = standing
            self.heard += message.working

    @property
    def in_flight_bytes(self) -> int:
        """Bytes that live transfers still wait for."""
        size = self._engine.spec.block_bytes
        return sum(
            (one.last - one.first - len(one.landed)) * size
            for one in self.transfers.all()
            if one.state in LIVE
        )

    # -- ending -----------------------------------------------------------------------------------

    def _finish_if_complete(self, transfer: Transfer[Sequence]) -> None:
        if transfer.state not in LIVE:
            self._release(transfer, transfer.last)
            transfer.owner.request.timeline.shipped_from = transfer.finished_at

    def _release(self, transfer: Transfer[Sequence], reached: int) -> None:
        """The sequence goes on behind block `reached`."""
        sequence = transfer.owner
        sequence.computed = reached * self._engine.spec.block_size
        sequence.phase = Phase.PREFILLING
        sequence.sources.shipped(transfer.first, reached, transfer.accepted)
        sequence.request.bytes_shipped += transfer.bytes_received

    def _fail(
        self, transfer: Transfer[Sequence], *, acknowledged: bool, again: bool = False
    ) -> None:
        """Ends a transfer early. Unless `again`, this prefill node has had its chance."""
        self.transfers.abort(transfer, acknowledged=acknowledged)
        transfer.moved_at = self._clock()
        if not again:
            transfer.owner.attempts[transfer.prefill_node] = MAX_ATTEMPTS
        self._release(transfer, transfer.leading)
        self._handed_back(transfer.owner)

    def _retry(self, transfer: Transfer[Sequence]) -> None:
        self.retries += 1
        told = self._send(transfer, AbortTransfer(transfer.number, transfer.epoch))
        self._fail(transfer, acknowledged=not told, again=True)

    def _declined(self, message: Declined) -> None:
        transfer = self.transfers.find(message.transfer, message.epoch)
        if transfer is not None:
            self._peer_log.info(
                "declined",
                transfer.prefill_node,
                "%s declined (%.100s): %d blocks needed, %d available",
                transfer.prefill_node,
                message.reason,
                message.needed,
                message.available,
            )
            self._fail(transfer, acknowledged=True)

    def _aborted_there(self, message: TransferAborted) -> None:
        """An abort was acknowledged, or the prefill node gave up, or knows nothing of it."""
        if self.transfers.is_aborted(message.transfer, message.epoch):
            self.transfers.drained(message.transfer, message.epoch)
            return
        transfer = self.transfers.find(message.transfer, message.epoch)
        if transfer is not None:
            whose = transfer.prefill_node
            self._peer_log.warning("gave up", whose, "%s gave up: %.100s", whose, message.reason)
            self._fail(transfer, acknowledged=True, again=True)

    def cancel(self, sequence: Sequence) -> None:
        """The sequence no longer wants its blocks, which may be reused at once."""
        transfer = self.transfers.of_owner(sequence)
        if transfer is None:
            return
        told = transfer.offered and self._send(
            transfer, AbortTransfer(transfer.number, transfer.epoch)
        )
        self.transfers.abort(transfer, acknowledged=not told)
        transfer.moved_at = self._clock()
        sequence.sources.shipped(transfer.first, transfer.leading, transfer.accepted)

    def _lost(self, address: str) -> None:
        for transfer in self.transfers.of_node(address):
            if transfer.state in LIVE:
                self._fail(transfer, acknowledged=True)
            else:
                self.transfers.drained(transfer.number, transfer.epoch)
