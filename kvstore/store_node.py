"""The store's process: one thread that owns the socket and the tiers, in one loop.

    receive ─► put, hand out ─► outcomes of the disk ─► deadlines, leases, write-behind ─┐
       ▲                                                                                 │
       └─────────────────────────────────────────────────────────────────────────────────┘

Owns the conversation with nodes: who has attached, over which lane, and how many slots each has to
write into. A node that is lost keeps its slots in quarantine until its lane proves that it cannot
write any more. What is decided about blocks is decided in `tiers`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from kvferry.kvstore.announce import REPORT_SECONDS
from kvferry.kvstore.arena import Block
from kvferry.kvstore.debug import DebugDesk, DebugSwitches, StoreHooks
from kvferry.kvstore.disk import DiskFaults
from kvferry.kvstore.disk_files import FileSystem
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.keys import checksum, split_keys
from kvferry.kvstore.link_messages import Hello, Refused, Welcome
from kvferry.kvstore.node_messages import DebugRequest, Drain, Load, Resync
from kvferry.kvstore.router import FromPeer, Peer, Server
from kvferry.kvstore.shared_memory import SharedMemory
from kvferry.kvstore.store_figures import GAUGES, by_tier, gauge_names, tier_figures
from kvferry.kvstore.store_messages import (
    Attach,
    Attached,
    CacheReply,
    CacheRequest,
    CancelFetch,
    Commit,
    Damaged,
    Delivered,
    Fetch,
    FetchEnded,
    GiveBack,
    Granted,
    Holding,
    Keeping,
    Leased,
    Locate,
    Located,
    Mapped,
    Release,
    Taken,
)
from kvferry.kvstore.store_space import Space, StoreSizes, open_files
from kvferry.kvstore.tiers import Handed

log = logging.getLogger(__name__)

NODE_ROLES = ("prefill", "decode")
GRANTED_BYTES = 32 << 20
"""Slots that a node has to write into, as far as a sixteenth of the arena allows."""
GRANTED_PART = 16
MESSAGE_BYTES = 4 << 20
BUSY_POLL_MS, IDLE_POLL_MS = 20, 200
BURIAL_SECONDS = 0.25
"""How often lost nodes are looked at."""
DRAIN_SECONDS = 10.0
LAST_WORDS_MS = 50
"""With nothing to read for so long, nodes that have ended have been heard to their end."""
MAX_DEADLINE_S = 3600.0
MAX_PIN_S = 7 * 86400.0


@dataclass(slots=True)
class _Member:
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


class StoreNode:
    """Runs until `stopping` says so.

    Raises
    ------
    ConfigError
        The arena cannot be made, or another store has the directory.
    """

    def __init__(
        self,
        server: Server,
        sizes: StoreSizes,
        *,
        clock: Callable[[], float] = time.monotonic,
        debug: DebugSwitches | None = None,
        files: FileSystem | None = None,
    ) -> None:
        self.debug = DebugDesk(
            server,
            debug or DebugSwitches(),
            ledger=lambda: self.ledger(),
            check=lambda: self.check(),
            clients=lambda: (),
            on_store=lambda hooks: self._inject(hooks),
        )
        self.space: Space | None = None
        self.faults = DiskFaults()
        self._server = server
        self._sizes = sizes
        self._clock = clock
        self._files = files
        if files is None and sizes.disk:
            self._files = open_files(sizes.folder)
        self._memory: SharedMemory | None = self._new_memory()
        self._fingerprint: dict[str, str] | None = None
        self._members: dict[bytes, _Member] = {}
        self._next_lane = 1
        self._early: dict[bytes, tuple[Peer, Attach]] = {}
        """Nodes that attach while the disk is still being read."""
        self._unburied: dict[bytes, int] = {}
        """Lost nodes with slots in quarantine, and their lanes."""
        self._bury_at = 0.0
        self._report_at = 0.0
        self._counters: Counter[str] = Counter()
        self._draining = False
        server.open_to(self._admit)

    def _new_memory(self) -> SharedMemory:
        return SharedMemory.create(
            self._sizes.arena_folder, self._sizes.ram, self._server.incarnation
        )

    # -- the loop -------------------------------------------------------------------------------

    def run(
        self, stop_fd: int, stopping: Callable[[], bool], drain_s: float = DRAIN_SECONDS
    ) -> None:
        """Serves until a stop is asked for; then writes what waits to be written.

        Nodes that ended before have said what they had to say: it is read first.
        """
        while not stopping() and not self._draining:
            self._wait(stop_fd)
            self.turn()
        began = self._clock()
        deadline = began + drain_s
        while self._server.socket.poll(LAST_WORDS_MS) and self._clock() < began + drain_s / 2:
            self.turn()
        if self.space is not None:
            self.space.drain(lambda: self._clock() > deadline, self._clock)
            disk = self.space.tiers.disk
            if disk is not None and disk.unwritten:
                unwritten = disk.unwritten * disk.index.span
                log.warning("%d bytes were not written in time: they are lost", unwritten)

    def _wait(self, stop_fd: int) -> None:
        poller = zmq.Poller()
        poller.register(self._server.socket, zmq.POLLIN)
        poller.register(stop_fd, zmq.POLLIN)
        if self.space is not None and self.space.disk is not None:
            poller.register(self.space.disk.fileno(), zmq.POLLIN)
        poller.poll(BUSY_POLL_MS if self._is_busy() else IDLE_POLL_MS)

    def _is_busy(self) -> bool:
        """Whether time alone may bring something to do."""
        if self.space is None:
            return False
        tiers = self.space.tiers
        writes = tiers.disk is not None and tiers.disk.wants_turn(self._clock())
        return bool(self._unburied or tiers.loads.active or writes)

    def turn(self) -> None:
        """One round of the loop."""
        now = self._clock()
        for received in self._server.receive():
            self._handle(received, now)
        now = self._clock()
        self._server.tick(now)
        for peer in self._server.take_lost():
            self._lost(peer)
        if self.space is not None:
            self._turn_space(self.space, now)
        self._report(now)

    def _turn_space(self, space: Space, now: float) -> None:
        if space.disk is not None:
            for job in space.disk.take_done():
                self._hand_out(space.tiers.disk_done(job, now))
        if self._early and not space.recovering:
            early, self._early = self._early, {}
            for peer, message in early.values():
                self._attached(peer, message)
        self._hand_out(space.tiers.tick(now))
        if now >= self._bury_at:
            self._bury_at = now + BURIAL_SECONDS
            self._bury(space)
        for member in self._members.values():
            self._grant(space, member)

    # -- meeting --------------------------------------------------------------------------------

    def _admit(self, hello: Hello) -> Welcome:
        """The first node of a model decides whose blocks are kept here, until its last one left."""
        others = any(peer.role in NODE_ROLES for peer in self._server.peers.values())
        if hello.role in NODE_ROLES and not others and hello.fingerprint != self._fingerprint:
            self._adopt(dict(hello.fingerprint))
        # It has no tokens: what it keeps are bytes, whose size comes with `Attach`.
        return Welcome("store", self._fingerprint or {}, 1, 1, 1, 0)

    def _adopt(self, fingerprint: dict[str, str]) -> None:
        if self.space is not None:
            log.info("another model comes: the arena is emptied, the disk keeps what it has")
            self.space.close()
            self.space, self._memory = None, None
            if self._sizes.disk:
                self._files = open_files(self._sizes.folder)
        self._members.clear()
        self._unburied.clear()
        self._fingerprint = fingerprint

    def _attached(self, peer: Peer, message: Attach) -> None:
        if peer.role not in NODE_ROLES:
            return
        space = self.space or self._open(message.block_bytes)
        if space is None or space.block_bytes != message.block_bytes:
            ours = "too few fit" if space is None else str(space.block_bytes)
            self._server.send(peer, Refused("block_bytes", ours, str(message.block_bytes)))
            return
        if space.recovering:  # until then it would be told that nothing is there
            self._early[peer.identity] = (peer, message)
            return
        member = self._members.get(peer.identity)
        if member is None:  # else the answer was lost on its way
            member = self._members[peer.identity] = _Member(peer, self._next_lane)
            self._next_lane += 1
        path = str(space.memory.path) if message.shared else ""
        self._server.send(
            peer,
            Attached(
                path,
                member.lane,
                space.slot_bytes,
                space.tiers.arena.num_slots,
                space.tiers.lease_s,
            ),
        )

    def _open(self, block_bytes: int) -> Space | None:
        try:
            memory = self._memory or self._new_memory()
            self._memory = memory
            space = Space(
                self._sizes,
                memory,
                self._fingerprint or {},
                block_bytes,
                self._files,
                self.faults,
            )
        except ConfigError as error:
            log.error("%s", error)
            return None
        log.info("%d slots of %d bytes", space.tiers.arena.num_slots, space.slot_bytes)
        self.space = space
        return space

    def _mapped(self, space: Space, member: _Member, shared: bool) -> None:
        member.shared = shared and space.memory.is_locked(member.lane)
        member.ready = True

    def _grant(self, space: Space, member: _Member) -> None:
        if not member.ready:
            return
        arena = space.tiers.arena
        most = min(GRANTED_BYTES // space.slot_bytes, arena.num_slots // GRANTED_PART)
        wanted = max(1, most) - len(member.slots)
        if wanted > max(1, most) // 4 or not member.slots:
            slots = space.tiers.grant(member.peer.identity, wanted)
            if slots:
                member.grants += 1
                member.slots |= dict.fromkeys(slots, member.grants)
                self._server.send(member.peer, Granted(member.grants, tuple(slots)))

    def _holding(self, space: Space, member: _Member, message: Holding) -> None:
        """A commit was lost on its way: its slots come back. Or a grant: it is sent again."""
        kept = set(message.slots)
        for slot, grant in list(member.slots.items()):
            if grant <= message.number and slot not in kept:
                self._counters["slots_mislaid"] += 1
                self._give_back(space, member, slot)
        for number in range(message.number + 1, member.grants + 1):
            slots = tuple(slot for slot, grant in member.slots.items() if grant == number)
            self._server.send(member.peer, Granted(number, slots))

    def _give_back(self, space: Space, member: _Member, slot: int) -> None:
        if space.tiers.arena.give_back(member.peer.identity, slot):
            del member.slots[slot]

    def _lost(self, peer: Peer) -> None:
        self._early.pop(peer.identity, None)
        member = self._members.pop(peer.identity, None)
        if member is None or self.space is None:
            return
        self._counters["peers_lost"] += 1
        quarantined = self.space.tiers.lost(peer.identity)
        if quarantined and member.shared:
            self._unburied[peer.identity] = member.lane
        else:  # it had mapped nothing
            self.space.tiers.buried(peer.identity)

    def _bury(self, space: Space) -> None:
        for identity, lane in list(self._unburied.items()):
            if not space.memory.is_locked(lane):
                space.tiers.buried(identity)
                del self._unburied[identity]

    # -- messages -------------------------------------------------------------------------------

    def _handle(self, received: FromPeer, now: float) -> None:
        peer, message = received.peer, received.message
        match message:
            case Attach():
                self._attached(peer, message)
            case CacheRequest():
                self._server.send(peer, CacheReply(message.number, self._care(message, now)))
            case DebugRequest():
                self.debug.answer(peer, message)
            case Drain():
                self._draining = True
            case Resync():
                pass  # of keys, which a store does not announce
            case _:
                self._of_member(received, now)

    def _of_member(self, received: FromPeer, now: float) -> None:
        message = received.message
        member = self._members.get(received.peer.identity)
        space = self.space
        if member is None or space is None:
            self._counters["messages_unattached"] += 1
            return
        owner = member.peer.identity
        try:
            match message:
                case Mapped(shared):
                    self._mapped(space, member, shared)
                case GiveBack(slots):
                    for slot in slots:
                        self._give_back(space, member, slot)
                case Holding():
                    self._holding(space, member, message)
                case Commit():
                    self._commit(space, member, message, received.payloads, now)
                case Keeping(slots):
                    space.tiers.keep_held(owner, frozenset(slots))
                case Release(slots):
                    for slot in slots:
                        space.tiers.release_held(owner, slot)
                case Locate(number, keys):
                    tiers = space.tiers.locate(split_keys(keys))
                    self._server.send(member.peer, Located(number, tiers))
                case Fetch():
                    self._fetch(space, member, message, now)
                case Taken(number, count):
                    handed = space.tiers.took(owner, number, count, now)
                    self._hand_out([handed] if handed else [])
                case CancelFetch(number):
                    space.tiers.cancel(owner, number)
                case Damaged(key):
                    space.tiers.damaged(key)
                case _:
                    log.warning("ignored a %s", type(message).__name__)
        except ValueError as error:
            self._counters["messages_invalid"] += 1
            log.warning("a %s makes no sense: %s", type(message).__name__, error)

    def _commit(
        self,
        space: Space,
        member: _Member,
        message: Commit,
        payloads: Sequence[memoryview],
        now: float,
    ) -> None:
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
        self, space: Space, member: _Member, slot: int, payload: memoryview, total: int
    ) -> bool:
        """Copies an inline block into a slot of the node's, if both are what they should be."""
        arena, owner = space.tiers.arena, member.peer.identity
        if len(payload) != space.block_bytes or checksum(payload) != total:
            self._counters["frames_damaged"] += 1
            self._give_back(space, member, slot)
            return False
        if arena.holds(owner, slot):
            view = space.view(slot)
            view[:] = payload
            view.release()
        return True

    def _fetch(self, space: Space, member: _Member, message: Fetch, now: float) -> None:
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
        self._hand_out([handed] if handed else [])

    def _hand_out(self, handed: Iterable[Handed]) -> None:
        for it in handed:
            member = self._members.get(it.load.owner) if isinstance(it.load.owner, bytes) else None
            if member is None:
                continue
            if it.blocks:
                self._send_blocks(member, it)
            if it.ended:
                self._server.send(member.peer, FetchEnded(it.load.number, it.ended))

    def _send_blocks(self, member: _Member, handed: Handed) -> None:
        space = self.space
        assert space is not None
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

    # -- care -----------------------------------------------------------------------------------

    def _care(self, request: CacheRequest, now: float) -> bytes:
        try:
            answer = self._cared(request, split_keys(request.keys), now)
        except ValueError as error:
            answer = {"error": str(error)}
        return msgspec.json.encode(answer)

    def _cared(self, request: CacheRequest, keys: list[bytes], now: float) -> dict[str, object]:
        if request.action == "stats":
            return self._stats()
        if self.space is None:
            return self._cared_unopened(request, keys)
        tiers = self.space.tiers
        match request.action:
            case "inspect":
                return {"tiers": tiers.inspect(keys).decode()}
            case "clear":
                if request.tenant and len(request.tenant) != 16:
                    raise ValueError(f"a tenant of {len(request.tenant)} bytes; it has 16")
                cleared = tiers.clear(request.tenant or None)
                held = tiers.arena.num_leased
                return {"cleared_host": cleared.host, "cleared_disk": cleared.disk, "held": held}
            case "pin":
                if not 0 < request.seconds <= MAX_PIN_S:
                    raise ValueError(f"a pin of {request.seconds} s; at most {MAX_PIN_S:g}")
                tiers.prefetch(keys, deadline=now + min(60.0, request.seconds), now=now)
                return {"pinned": tiers.pin(keys, request.seconds, now)}
            case "unpin":
                return {"unpinned": tiers.unpin(keys)}
            case "prefetch":
                deadline = now + min(MAX_DEADLINE_S, max(0.0, request.seconds) or 60.0)
                tiers.prefetch(keys, deadline=deadline, now=now)
                return {"tiers": tiers.inspect(keys).decode()}
        raise ValueError(f"no action is called {request.action[:100]!r}")

    def _stats(self) -> dict[str, object]:
        figures, gauges = self.figures(), gauge_names()
        ledger = {} if self.space is None else self.space.tiers.ledger()
        return {
            **ledger,
            "tiers": by_tier(figures),
            "gauges": {name: int(figures.get(name, 0)) for name in GAUGES},
            "counters": {name: it for name, it in figures.items() if name not in gauges},
            "well": self.space is None or self.space.tiers.well,
        }

    def _cared_unopened(self, request: CacheRequest, keys: list[bytes]) -> dict[str, object]:
        """Before the first node has come nothing is indexed, but files may be there."""
        match request.action:
            case "clear":
                cleared = self._clear_unopened(request)
                return {"cleared_host": 0, "cleared_disk": cleared, "held": 0}
            case "inspect" | "prefetch":
                return {"tiers": "-" * len(keys)}
            case "pin":
                return {"pinned": 0}
            case "unpin":
                return {"unpinned": 0}
        raise ValueError(f"no action is called {request.action[:100]!r}")

    def _clear_unopened(self, request: CacheRequest) -> int:
        if self._files is None:
            return 0
        try:
            numbers = list(self._files.list())
            if request.tenant and numbers:
                raise ValueError("no node has come yet, so nobody knows whose the blocks are")
            for number in numbers:
                self._files.delete(number)
        except OSError as error:
            raise ValueError(f"cannot clear {self._files.folder}: {error}") from None
        return len(numbers)

    def _inject(self, hooks: StoreHooks) -> None:
        if hooks.read_delay_ms is not None:
            self.faults.read_delay_s = max(0.0, hooks.read_delay_ms) / 1e3
            if hooks.read_delay_ms == 0:
                self.faults.damage_reads = self.faults.fail_reads = self.faults.fail_writes = 0
        self.faults.damage_reads += max(0, hooks.damage_reads)
        self.faults.fail_reads += max(0, hooks.fail_reads)
        self.faults.fail_writes += max(0, hooks.fail_writes)
        if self.space is not None:
            keys = [block.key for block in self.space.tiers.arena.blocks()]
            for key in keys[: max(0, hooks.damage_host)]:
                view = self.space.view(self.space.tiers.arena.slot_of(key))
                view[len(view) // 2] ^= 1
                view.release()

    # -- state ----------------------------------------------------------------------------------

    def _report(self, now: float) -> None:
        if now < self._report_at:
            return
        self._report_at = now + REPORT_SECONDS
        arena = None if self.space is None else self.space.tiers.arena
        load = Load(
            running=0 if self.space is None else len(self.space.tiers.loads.active),
            waiting=0,
            blocks_used=0 if arena is None else arena.num_resident,
            blocks_cached=0 if arena is None else arena.num_resident,
            blocks_total=0 if arena is None else arena.num_slots,
            draining=self._draining,
            counters=self.figures(),
        )
        for peer in list(self._server.peers.values()):
            if peer.role == "gateway":
                self._server.send(peer, load)

    def figures(self) -> dict[str, float]:
        """Counters and gauges by metric stem."""
        figures: dict[str, float] = {
            **self._counters,
            "frames_malformed": self._server.counters.malformed,
            "frames_stale": self._server.counters.stale,
            "peers_refused": self._server.counters.refused,
        }
        figures |= tier_figures(self.space, self._sizes.ram, self._sizes.disk)
        figures["attached_nodes"] = len(self._members)
        if self.space is not None:
            figures |= self.space.tiers.figures()
        return figures

    def ledger(self) -> dict[str, object]:
        """Everything that is held here and by whom."""
        tiers = {} if self.space is None else self.space.tiers.ledger()
        return {
            **tiers,
            "members": len(self._members),
            "unburied": len(self._unburied),
            "counters": self.figures(),
        }

    def check(self) -> None:
        """Proves the invariants of everything this process owns."""
        if self.space is None:
            return
        self.space.tiers.check()
        arena = self.space.tiers.arena
        for member in self._members.values():
            held = arena.reserved_by(member.peer.identity)
            assert held == member.slots.keys(), "grants disagree"

    def close(self) -> None:
        """Ends the disk's thread and takes the arena's name away. A second time does nothing."""
        if self.space is not None:
            self.space.close()
        else:
            if self._memory is not None:
                self._memory.remove()
                self._memory.close()
            if self._files is not None:
                self._files.close()
        self.space = self._memory = self._files = None
