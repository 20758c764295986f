"""Links to prefill nodes, and blocks on their way from them into the pool.

Owns one DEALER to each prefill node that a gateway named, and carries out what the inbox decides:
offers, verifies, writes, returns credits, aborts. A transfer that fails hands its sequence back to
be computed here from the first missing block on; nobody notices anything but time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import zmq

from kvferry.decode_node.inbox import LIVE, Inbox, Transfer
from kvferry.decode_node.request import Phase, Sequence
from kvferry.kernels.engine import Engine
from kvferry.kvstore.blocks import BlockPool
from kvferry.kvstore.keys import checksum, pack_tokens
from kvferry.kvstore.link import Client, LinkState
from kvferry.kvstore.wire import (
    AbortTransfer,
    Accepted,
    AnyMessage,
    Blocks,
    Complete,
    Credit,
    Declined,
    Offer,
    TransferAborted,
)

log = logging.getLogger(__name__)

CREDIT_BYTES = 32 << 20
"""What one transfer may have in flight."""

CONNECT_SECONDS = 2.0
"""How long an offer waits for a link to come up before its blocks are computed here."""

AVOID_SECONDS = 10.0
"""How long nothing is asked of a prefill node that could not be reached."""

MAX_ATTEMPTS = 3
"""Transfers of one sequence, counting the first, before damaged ones are given up."""


class Receiver:
    """The decode node's side of all hand-offs."""

    def __init__(
        self,
        connect: Callable[[str], Client],
        engine: Engine,
        pool: BlockPool,
        *,
        reuse: bool,
    ) -> None:
        self.inbox: Inbox[Sequence] = Inbox(engine.spec.block_bytes)
        self._connect = connect
        self._engine = engine
        self._pool = pool
        self._reuse = reuse
        self._credit = max(CREDIT_BYTES, 2 * engine.spec.block_bytes)
        self._links: dict[str, Client] = {}
        self._avoided: dict[str, float] = {}
        self._turn = 0
        self._unsent: dict[Transfer[Sequence], float] = {}
        self._attempts: dict[Sequence, int] = {}

    # -- asking -----------------------------------------------------------------------------------

    def usable(self, address: str) -> bool:
        """Whether this prefill node may be asked; connects to it if nobody has yet."""
        if not address or time.monotonic() < self._avoided.get(address, 0.0):
            return False
        link = self._links.get(address)
        if link is not None and link.state is LinkState.DEAD:
            self._lost(address)
            link = None
        if link is None:
            try:
                self._links[address] = link = self._connect(address)
            except zmq.ZMQError as error:
                self._avoid(address, f"cannot connect: {error}")
                return False
        if link.welcome is not None and link.welcome.role != "prefill":
            self._avoid(address, f"it is a {link.welcome.role} node")
            return False
        return link.state in (LinkState.CONNECTING, LinkState.READY)

    def _avoid(self, address: str, why: str) -> None:
        log.error("prefill node %s is not used for %g s: %s", address, AVOID_SECONDS, why)
        self._avoided[address] = time.monotonic() + AVOID_SECONDS
        if address in self._links:
            self._lost(address)

    def ask(self, sequence: Sequence, last: int, address: str) -> None:
        """Asks for the blocks from the sequence's first uncomputed one up to `last`."""
        first = sequence.computed // self._engine.spec.block_size
        transfer = self.inbox.open(sequence, first, last, address)
        sequence.phase = Phase.RECEIVING
        self._attempts[sequence] = self._attempts.get(sequence, 0) + 1
        self._unsent[transfer] = time.monotonic() + CONNECT_SECONDS
        self._offer(transfer)

    def _offer(self, transfer: Transfer[Sequence]) -> None:
        link = self._links[transfer.prefill_node]
        if link.state is not LinkState.READY:
            return
        if link.welcome is not None and link.welcome.role != "prefill":
            self._avoid(link.address, f"it is a {link.welcome.role} node")
            return
        sequence = transfer.owner
        tokens = sequence.tokens[: transfer.last * self._engine.spec.block_size]
        offer = Offer(
            transfer.number,
            transfer.epoch,
            pack_tokens(tokens),
            b"".join(sequence.keys[: transfer.last]),
            transfer.first,
            transfer.last,
            self._credit,
            sequence.request.message.priority,
        )
        if link.send(offer):
            self._unsent.pop(transfer, None)

    # -- receiving --------------------------------------------------------------------------------

    def sockets(self) -> Iterator[zmq.Socket[bytes]]:
        """What a poller has to watch."""
        for link in self._links.values():
            yield link.monitor
            if link.state in (LinkState.CONNECTING, LinkState.READY):
                yield link.socket

    def receive(self, seconds: float) -> None:
        """Handles what has arrived, until nothing is left or that much time was spent on it."""
        until = time.monotonic() + seconds
        for address, link in self._in_turn():
            for received in link.receive():
                self._handle(link, received.message, received.payloads)
                if time.monotonic() > until:
                    return
            self._give_up_if_over(address, link)

    def tick(self, now: float) -> None:
        """Probes links, sends offers that waited for one, gives up those that waited too long."""
        for address, link in list(self._links.items()):
            link.tick(now)
            self._give_up_if_over(address, link)
        for transfer, deadline in list(self._unsent.items()):
            if transfer in self._unsent and now > deadline:
                self._avoid(transfer.prefill_node, f"no answer in {CONNECT_SECONDS:g} s")
            elif transfer in self._unsent:
                self._offer(transfer)

    def _handle(self, link: Client, message: AnyMessage, payloads: tuple[memoryview, ...]) -> None:
        match message:
            case Blocks():
                self._take(link, message, payloads)
            case Accepted():
                transfer = self.inbox.accepted(message)
                if transfer is not None:
                    transfer.reused_to = message.prefix
            case Complete():
                completed = self.inbox.completed(message)
                if completed is not None:
                    completed.finished_at = link.to_local(message.finished_at)
                    self._finish_if_complete(completed)
                    if completed.state in LIVE:  # the link keeps order: what is missing is lost
                        self._retry(link, completed)
            case Declined():
                self._declined(message)
            case TransferAborted():
                self._aborted_there(message)
            case _:
                log.warning("ignored a %s from %s", type(message).__name__, link.address)

    def _take(self, link: Client, message: Blocks, payloads: tuple[memoryview, ...]) -> None:
        arriving = self.inbox.arriving(message, [len(payload) for payload in payloads])
        if arriving is None:
            if not self.inbox.is_known(message.transfer):
                link.send(AbortTransfer(message.transfer, message.epoch))
            return
        transfer = arriving.transfer
        if not arriving.sound:
            log.error("%s sent blocks that transfer %d cannot have", link.address, transfer.number)
            self._retry(link, transfer)
            return
        for index in arriving.fresh:
            block = message.first + index
            if checksum(payloads[index]) != message.checksums[index]:
                self.inbox.counters.damaged += 1
                log.error("block %d of transfer %d is damaged", block, transfer.number)
                self._retry(link, transfer)
                return
            self._land(transfer, block, payloads[index])
        size = sum(len(payload) for payload in payloads)
        link.send(Credit(transfer.number, transfer.epoch, size))
        self._finish_if_complete(transfer)

    def _land(self, transfer: Transfer[Sequence], index: int, payload: memoryview) -> None:
        sequence = transfer.owner
        block = sequence.blocks[index]
        self._engine.write(block, payload)
        if self._reuse:
            self._pool.commit(block, sequence.keys[index])
        self.inbox.landed(transfer, index)

    # -- ending -----------------------------------------------------------------------------------

    def _finish_if_complete(self, transfer: Transfer[Sequence]) -> None:
        if transfer.state in LIVE:
            return
        self._hand_back(transfer, transfer.last)
        transfer.owner.request.timeline.shipped_from = transfer.finished_at

    def _hand_back(self, transfer: Transfer[Sequence], reached: int) -> None:
        """The sequence goes on here behind block `reached`."""
        size = self._engine.spec.block_size
        sequence = transfer.owner
        sequence.computed = reached * size
        sequence.phase = Phase.PREFILLING
        sequence.sources.shipped(transfer.first, reached, transfer.reused_to)
        sequence.request.bytes_shipped += transfer.bytes_received
        self._unsent.pop(transfer, None)

    def _fail(self, transfer: Transfer[Sequence], *, acknowledged: bool) -> None:
        self.inbox.abort(transfer, acknowledged=acknowledged)
        self._hand_back(transfer, transfer.leading)

    def _retry(self, link: Client, transfer: Transfer[Sequence]) -> None:
        """Asks again for what is missing; after too many attempts it is computed here."""
        link.send(AbortTransfer(transfer.number, transfer.epoch))
        self._fail(transfer, acknowledged=False)
        if self._attempts[transfer.owner] < MAX_ATTEMPTS:
            self.ask(transfer.owner, transfer.last, transfer.prefill_node)

    def _declined(self, message: Declined) -> None:
        transfer = self.inbox.find(message.transfer, message.epoch)
        if transfer is not None:
            log.info(
                "declined (%s): %d blocks needed, %d available; prefilling here",
                message.reason,
                message.needed,
                message.available,
            )
            self._fail(transfer, acknowledged=True)

    def _aborted_there(self, message: TransferAborted) -> None:
        if message.reason == "asked":
            self.inbox.drained(message.transfer, message.epoch)
            return
        transfer = self.inbox.find(message.transfer, message.epoch)
        if transfer is not None:
            log.warning("the prefill node gave up: %s; prefilling here", message.reason)
            self._fail(transfer, acknowledged=True)

    def cancel(self, sequence: Sequence) -> None:
        """The sequence no longer wants its blocks, which may be reused at once."""
        self._attempts.pop(sequence, None)
        transfer = self.inbox.of_owner(sequence)
        if transfer is None:
            return
        unsent = self._unsent.pop(transfer, None) is not None
        link = self._links.get(transfer.prefill_node)
        told = link is not None and link.send(AbortTransfer(transfer.number, transfer.epoch))
        self.inbox.abort(transfer, acknowledged=unsent or not told)

    def _give_up_if_over(self, address: str, link: Client) -> None:
        if self._links.get(address) is not link:
            return
        if link.state is LinkState.DEAD:
            self._lost(address)
        elif link.state is LinkState.REFUSED and link.refusal is not None:
            refusal = link.refusal
            self._avoid(
                address,
                f"its {refusal.field} is {refusal.server_value!r}, ours {refusal.client_value!r}",
            )

    def _lost(self, address: str) -> None:
        for transfer in self.inbox.of_node(address):
            if transfer.state in LIVE:
                self._fail(transfer, acknowledged=True)
            else:
                self.inbox.drained(transfer.number, transfer.epoch)
        self._close(address)

    def _in_turn(self) -> list[tuple[str, Client]]:
        """All links, another one first each time, so that none starves the others."""
        links = list(self._links.items())
        self._turn += 1
        start = self._turn % len(links) if links else 0
        return links[start:] + links[:start]

    def _close(self, address: str) -> None:
        link = self._links.pop(address, None)
        if link is not None:
            link.close()

    def close(self) -> None:
        for address in list(self._links):
            self._close(address)
