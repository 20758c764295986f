"""The nodes that have attached to a store: over which lane, and what each may write.

Owns the granted slots of every node, and the lanes of those that were lost: their slots stay in
quarantine until the lane proves that they cannot write any more.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvferry.kvstore.store.storage import ModelStorage
from kvferry.kvstore.tiers.host import Owner
from kvferry.kvstore.wire.server import Peer, Server
from kvferry.kvstore.wire.store import Attached, Granted, Holding

GRANTED_BYTES = 32 << 20
"""Slots that a node has to write into, as far as a sixteenth of the arena allows."""
GRANTED_PART = 16
PROOF_SECONDS = 0.25
"""How often lost nodes are looked at."""


@dataclass(slots=True)
class Member:
    """A node that has attached."""

    peer: Peer
    lane: int
    shared: bool = False
    ready: bool = False
    """It has said how blocks travel: it may be granted slots."""
    grants: int = 0
    """How many times it was granted slots."""
    slots: dict[int, int] = field(default_factory=dict)
    """Slots that it may write, and in which grant it got them."""


class Members:
    """All nodes of one store."""

    def __init__(self, server: Server, counters: Counter[str]) -> None:
        self._server = server
        self._counters = counters
        self.attached: dict[Owner, Member] = {}
        """By identity, which is also the owner of what they hold in the tiers."""
        self.quarantined: dict[Owner, int] = {}
        """Lost nodes with slots in quarantine, and their lanes."""
        self._next_lane = 1
        self._prove_at = 0.0

    def forget(self) -> None:
        """Their arena is gone."""
        self.attached.clear()
        self.quarantined.clear()

    def attach(self, peer: Peer, storage: ModelStorage, *, shared: bool) -> None:
        """A node is there; it may write once it has said how its blocks travel."""
        member = self.attached.get(peer.identity)
        if member is None:  # else the answer was lost on its way
            member = self.attached[peer.identity] = Member(peer, self._next_lane)
            self._next_lane += 1
        path = str(storage.memory.path) if shared else ""
        self._server.send(
            peer,
            Attached(
                path,
                member.lane,
                storage.slot_bytes,
                storage.tiers.host.num_slots,
                storage.tiers.lease_s,
            ),
        )

    def mapped(self, storage: ModelStorage, member: Member, shared: bool) -> None:
        """It has said whether it has mapped the arena."""
        member.shared = shared and storage.memory.is_locked(member.lane)
        member.ready = True

    def _grant(self, storage: ModelStorage, member: Member) -> None:
        if not member.ready:
            return
        host = storage.tiers.host
        most = min(GRANTED_BYTES // storage.slot_bytes, host.num_slots // GRANTED_PART)
        wanted = max(1, most) - len(member.slots)
        if wanted > max(1, most) // 4 or not member.slots:
            slots = storage.tiers.host.grant(member.peer.identity, wanted)
            if slots:
                member.grants += 1
                member.slots |= dict.fromkeys(slots, member.grants)
                self._server.send(member.peer, Granted(member.grants, tuple(slots)))

    def holding(self, storage: ModelStorage, member: Member, message: Holding) -> None:
        """A commit was lost on its way: its slots come back. Or a grant: it is sent again."""
        kept = set(message.slots)
        for slot, grant in list(member.slots.items()):
            if grant <= message.number and slot not in kept:
                self._counters["slots_mislaid"] += 1
                self.give_back(storage, member, slot)
        for number in range(message.number + 1, member.grants + 1):
            slots = tuple(slot for slot, grant in member.slots.items() if grant == number)
            self._server.send(member.peer, Granted(number, slots))

    def give_back(self, storage: ModelStorage, member: Member, slot: int) -> None:
        """It will not write this slot."""
        if storage.tiers.host.give_back(member.peer.identity, slot):
            del member.slots[slot]

    def lost(self, storage: ModelStorage, peer: Peer) -> None:
        """A node is gone. What it may still write to stays in quarantine."""
        member = self.attached.pop(peer.identity, None)
        if member is None:
            return
        self._counters["peers_lost"] += 1
        quarantined = storage.tiers.lost(peer.identity)
        if quarantined and member.shared:
            self.quarantined[peer.identity] = member.lane
        else:  # it had mapped nothing
            storage.tiers.host.proven_dead(peer.identity)

    def tick(self, storage: ModelStorage, now: float) -> None:
        """Frees the slots of who can write no more, and grants slots to who has few."""
        if now >= self._prove_at:
            self._prove_at = now + PROOF_SECONDS
            self._prove_dead(storage)
        for member in self.attached.values():
            self._grant(storage, member)

    def _prove_dead(self, storage: ModelStorage) -> None:
        for identity, lane in list(self.quarantined.items()):
            if not storage.memory.is_locked(lane):
                storage.tiers.host.proven_dead(identity)
                del self.quarantined[identity]

    def check(self, storage: ModelStorage) -> None:
        """Proves that the arena and the members agree about who may write what."""
        for member in self.attached.values():
            held = storage.tiers.host.reserved_by(member.peer.identity)
            assert held == member.slots.keys(), "grants disagree"
