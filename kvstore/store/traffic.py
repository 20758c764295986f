"""Blocks between a store and its nodes: what nodes put, and what is handed out to them.

Owns which message asks what of the tiers, how a commit is checked, and how blocks leave: as leases
on slots, or as frames. What is decided about blocks is decided in `tiers`; who may write which slot
is `members`'.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from kvferry.kvstore.keys import checksum, split_keys
from kvferry.kvstore.store.members import Member, Members
from kvferry.kvstore.store.storage import ModelStorage
from kvferry.kvstore.tiers.block import Block
from kvferry.kvstore.tiers.fetches import HandedOut
from kvferry.kvstore.wire.server import FromPeer, Server
from kvferry.kvstore.wire.store import (
    CancelFetch,
    Commit,
    Damaged,
    Delivered,
    FetchEnded,
    FetchRequest,
    GiveBack,
    Holding,
    Keeping,
    Leased,
    Locate,
    Located,
    Mapped,
    Release,
    Taken,
)

log = logging.getLogger(__name__)

MESSAGE_BYTES = 4 << 20
MAX_DEADLINE_S = 3600.0


class Traffic:
    """Puts and fetches of all nodes."""

    def __init__(self, server: Server, members: Members, counters: Counter[str]) -> None:
        self._server = server
        self._members = members
        self._counters = counters

    def receive(
        self, storage: ModelStorage, member: Member, received: FromPeer, now: float
    ) -> bool:
        """Does what a node asks; False when it is nothing that a store does."""
        message, owner = received.message, member.peer.identity
        try:
            match message:
                case Mapped(shared):
                    self._members.mapped(storage, member, shared)
                case GiveBack(slots):
                    for slot in slots:
                        self._members.give_back(storage, member, slot)
                case Holding():
                    self._members.holding(storage, member, message)
                case Commit():
                    self._commit(storage, member, message, received.payloads, now)
                case Keeping(slots):
                    storage.tiers.keep_held(owner, frozenset(slots))
                case Release(slots):
                    for slot in slots:
                        storage.tiers.release_held(owner, slot)
                case Locate(number, keys):
                    tiers = storage.tiers.locate(split_keys(keys))
                    self._server.send(member.peer, Located(number, tiers))
                case FetchRequest():
                    self._fetch(storage, member, message, now)
                case Taken(number, count):
                    handed = storage.tiers.fetches.took(owner, number, count, now)
                    self.hand_out(storage, [handed] if handed else [])
                case CancelFetch(number):
                    storage.tiers.fetches.cancel(owner, number)
                case Damaged(key):
                    storage.tiers.damaged(key)
                case _:
                    return False
        except ValueError as error:
            self._counters["messages_invalid"] += 1
            log.warning("a %s makes no sense: %s", type(message).__name__, error)
        return True

    def _commit(
        self,
        storage: ModelStorage,
        member: Member,
        message: Commit,
        payloads: Sequence[memoryview],
        now: float,
    ) -> None:
        """Takes blocks into the arena. ValueError when the message contradicts itself."""
        keys = split_keys(message.keys)
        if not len(keys) == len(message.slots) == len(message.checksums):
            raise ValueError(f"{len(keys)} keys, {len(message.slots)} slots")
        parent = message.parent
        for index, (key, slot, total) in enumerate(
            zip(keys, message.slots, message.checksums, strict=True)
        ):
            block = Block(key, parent, message.tenant, message.depth + index, total)
            parent = key
            if message.inline and not self._filled(storage, member, slot, payloads[index], total):
                continue
            owner = member.peer.identity
            if storage.tiers.commit(owner, slot, block, hold=message.hold, now=now):
                del member.slots[slot]

    def _filled(
        self, storage: ModelStorage, member: Member, slot: int, payload: memoryview, total: int
    ) -> bool:
        """Copies an inline block into a slot of the node's, if both are what they should be."""
        host, owner = storage.tiers.host, member.peer.identity
        if len(payload) != storage.block_bytes or checksum(payload) != total:
            self._counters["frames_damaged"] += 1
            self._members.give_back(storage, member, slot)
            return False
        if host.holds(owner, slot):
            view = storage.view(slot)
            view[:] = payload
            view.release()
        return True

    def _fetch(
        self, storage: ModelStorage, member: Member, message: FetchRequest, now: float
    ) -> None:
        """Begins a fetch."""
        keys = split_keys(message.keys)
        window = min(message.window, max(1, storage.tiers.host.num_slots // 2))
        if not 0 <= message.first <= len(keys) or not 0 <= message.deadline_s <= MAX_DEADLINE_S:
            self._server.send(member.peer, FetchEnded(message.number, "refused"))
            return
        handed = storage.tiers.fetch(
            member.peer.identity,
            message.number,
            keys,
            message.first,
            deadline=now + message.deadline_s,
            window=window,
            now=now,
        )
        self.hand_out(storage, [handed] if handed else [])

    def hand_out(self, storage: ModelStorage, handed: Iterable[HandedOut]) -> None:
        """Tells each reader what it may copy now, and that nothing more comes."""
        for it in handed:
            member = self._members.attached.get(it.fetch.owner)
            if member is None:
                continue
            if it.blocks:
                self._send_blocks(storage, member, it)
            if it.ended:
                self._server.send(member.peer, FetchEnded(it.fetch.number, it.ended))

    def _send_blocks(self, storage: ModelStorage, member: Member, handed: HandedOut) -> None:
        blocks, number = handed.blocks, handed.fetch.number
        if member.shared:
            self._server.send(
                member.peer,
                Leased(
                    number,
                    blocks[0].index,
                    tuple(block.slot for block in blocks),
                    tuple(block.checksum for block in blocks),
                    b"".join(block.tier for block in blocks),
                ),
            )
            return
        most = max(1, MESSAGE_BYTES // storage.block_bytes)
        for start in range(0, len(blocks), most):
            part = blocks[start : start + most]
            views = [storage.view(block.slot) for block in part]
            header = Delivered(
                number,
                part[0].index,
                tuple(block.checksum for block in part),
                b"".join(block.tier for block in part),
            )
            self._server.send(member.peer, header, views)
            for view in views:
                view.release()
