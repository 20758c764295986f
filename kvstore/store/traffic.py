"""Blocks between a store and its nodes: commits that come, loads that are handed out.

Owns how a commit is checked and how blocks leave: as leases on slots, or as frames. What is decided
about blocks is decided in `tiers`; who may write which slot is `store_members`'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvferry.kvstore.keys import checksum, split_keys
from kvferry.kvstore.store.members import Member, Members
from kvferry.kvstore.store.space import Space
from kvferry.kvstore.tiers.cache import Handed
from kvferry.kvstore.tiers.host import Block
from kvferry.kvstore.wire.server import Server
from kvferry.kvstore.wire.store import Commit, Delivered, Fetch, FetchEnded, Leased

MESSAGE_BYTES = 4 << 20
MAX_DEADLINE_S = 3600.0


class Traffic:
    """Puts and loads of all nodes."""

    def __init__(self, server: Server, members: Members, counters: Counter[str]) -> None:
        self._server = server
        self._members = members
        self._counters = counters

    def commit(
        self,
        space: Space,
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
            if message.inline and not self._filled(space, member, slot, payloads[index], total):
                continue
            owner = member.peer.identity
            if space.tiers.commit(owner, slot, block, hold=message.hold, now=now):
                del member.slots[slot]

    def _filled(
        self, space: Space, member: Member, slot: int, payload: memoryview, total: int
    ) -> bool:
        """Copies an inline block into a slot of the node's, if both are what they should be."""
        arena, owner = space.tiers.arena, member.peer.identity
        if len(payload) != space.block_bytes or checksum(payload) != total:
            self._counters["frames_damaged"] += 1
            self._members.give_back(space, member, slot)
            return False
        if arena.holds(owner, slot):
            view = space.view(slot)
            view[:] = payload
            view.release()
        return True

    def fetch(self, space: Space, member: Member, message: Fetch, now: float) -> None:
        """Begins a load."""
        keys = split_keys(message.keys)
        window = min(message.window, max(1, space.tiers.arena.num_slots // 2))
        if not 0 <= message.first <= len(keys) or not 0 <= message.deadline_s <= MAX_DEADLINE_S:
            self._server.send(member.peer, FetchEnded(message.number, "refused"))
            return
        handed = space.tiers.load(
            member.peer.identity,
            message.number,
            keys,
            message.first,
            deadline=now + message.deadline_s,
            window=window,
            now=now,
        )
        self.hand_out(space, [handed] if handed else [])

    def hand_out(self, space: Space, handed: Iterable[Handed]) -> None:
        """Tells each reader what it may copy now, and that nothing more comes."""
        for it in handed:
            member = self._members.find(it.load.owner)
            if member is None:
                continue
            if it.blocks:
                self._send_blocks(space, member, it)
            if it.ended:
                self._server.send(member.peer, FetchEnded(it.load.number, it.ended))

    def _send_blocks(self, space: Space, member: Member, handed: Handed) -> None:
        blocks, number = handed.blocks, handed.load.number
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
        most = max(1, MESSAGE_BYTES // space.block_bytes)
        for start in range(0, len(blocks), most):
            part = blocks[start : start + most]
            views = [space.view(block.slot) for block in part]
            header = Delivered(
                number,
                part[0].index,
                tuple(block.checksum for block in part),
                b"".join(block.tier for block in part),
            )
            self._server.send(member.peer, header, views)
            for view in views:
                view.release()
