"""A node's link to the store: it attaches and maps the arena, and does so again after a death.

Owns the link, the mapping and the copy of one block into or out of a slot. It knows the store of
the moment by its incarnation, and nothing of what is put or fetched there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import zmq

from kvferry.kvstore.keys import checksum
from kvferry.kvstore.tiers.shared_memory import ArenaUnavailable, SharedMemory
from kvferry.kvstore.wire.client import Client, LinkState, Received
from kvferry.kvstore.wire.codec import AnyMessage
from kvferry.kvstore.wire.store import Attach, Attached, Mapped

log = logging.getLogger(__name__)

Write = Callable[[memoryview], "bytes | memoryview"]
"""Copies a block to its place and returns a view of the copy, which is what gets verified."""

RETRY_SECONDS = 1.0
"""Between a link's end and the next one."""
ATTACH_AGAIN_SECONDS = 2.0
"""Unless there was an answer by then. A store that reads its disk answers when it has."""


class StoreLink:
    """`connect` makes a link to the store; it is called again after each link's death.

    `may_map`: whether the store's arena may be used; `must_map`: whether nothing else may.
    """

    def __init__(
        self, connect: Callable[[], Client], block_bytes: int, *, may_map: bool, must_map: bool
    ) -> None:
        self.block_bytes = block_bytes
        self.client: Client | None = None
        self.attached: Attached | None = None
        """What the store has said of its slots; None: no store takes blocks."""
        self.incarnation = 0
        """Of the store that takes blocks, whichever way; 0: none does."""
        self.mapped = 0
        """The same if its arena is mapped; 0: blocks travel in messages."""
        self._connect = connect
        self._may_map = may_map
        self._must_map = must_map
        self._retry_at = 0.0
        self._attach_at = 0.0
        self._arena: SharedMemory | None = None
        self._unmapped: list[SharedMemory] = []
        """Arenas of dead stores of which somebody still holds a view."""

    # -- driving --------------------------------------------------------------------------------

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to poll for reading; another list after each turn."""
        return [] if self.client is None else [self.client.socket, self.client.monitor]

    def receive(self, now: float) -> Iterator[Received]:
        """What has come. A link is made when one is due, and attaches until there is an answer."""
        if self.client is None:
            if now < self._retry_at:
                return
            self.client = self._connect()
        self.client.tick(now)
        yield from self.client.receive()
        ready = self.client.state is LinkState.READY
        if ready and self.attached is None and now >= self._attach_at:
            self._attach_at = now + ATTACH_AGAIN_SECONDS
            self.send(Attach(self.block_bytes, shared=self._may_map))

    @property
    def over(self) -> bool:
        """Whether the link has ended: `drop` it."""
        return self.client is not None and self.client.state in (LinkState.DEAD, LinkState.REFUSED)

    def send(self, message: AnyMessage, payloads: Sequence[bytes | memoryview] = ()) -> bool:
        """False when there is nobody to send it to."""
        return self.client is not None and self.client.send(message, payloads)

    def map(self, attached: Attached) -> None:
        """The store has answered: maps its arena if it may and can be had."""
        assert self.client is not None
        incarnation, arena = self.client.server_incarnation, None
        if attached.path:
            try:
                arena = SharedMemory.attach(
                    Path(attached.path), incarnation, attached.slot_bytes, attached.lane
                )
            except ArenaUnavailable as error:
                say = log.error if self._must_map else log.info
                say("blocks travel inline: %s", error)
        if arena is None and self._must_map:
            return  # not available: inline was not allowed
        if arena is not None:
            arena.prefault()
        self._arena, self.attached = arena, attached
        self.incarnation, self.mapped = incarnation, 0 if arena is None else incarnation
        self.send(Mapped(arena is not None))

    # -- one block ------------------------------------------------------------------------------

    def copy_in(self, slot: int, payload: bytes | memoryview) -> int:
        """The checksum is of the source: it is what the copy will be compared with."""
        assert self._arena is not None and self.attached is not None
        view = self._arena.slot(slot, self.attached.slot_bytes, self.block_bytes)
        view[:] = payload
        total = checksum(payload)
        view.release()
        return total

    def copy_out(self, slot: int, total: int, write: Write) -> bool:
        """False when the copy is not what it should be, or nothing is mapped any more."""
        if self._arena is None or self.attached is None:
            return False
        view = self._arena.slot(slot, self.attached.slot_bytes, self.block_bytes)
        try:
            return checksum(write(view)) == total
        finally:
            view.release()

    # -- ending ---------------------------------------------------------------------------------

    def drop(self, now: float, linger_ms: int = 0) -> None:
        """Ends the link and the mapping; `linger_ms`: how long what was sent may be on its way."""
        if self.client is not None:
            if self.client.refusal is not None:
                log.error("the store refuses this node: %s", self.client.refusal)
            self.client.close(linger_ms)
        self.client, self.attached = None, None
        self.incarnation = self.mapped = 0
        self._attach_at, self._retry_at = 0.0, now + RETRY_SECONDS
        if self._arena is not None:
            self._unmapped.append(self._arena)
            self._arena = None
        # A store that is gone gets its slots back when this has succeeded.
        for arena in list(self._unmapped):
            try:
                arena.close()
            except BufferError:  # a view of it is still out there
                continue
            self._unmapped.remove(arena)

    def close(self) -> None:
        """Unmaps what is left."""
        for arena in self._unmapped:
            arena.close()
