"""The store's process: one thread that owns the socket and the tiers, in one loop.

    receive ─► put, hand out ─► outcomes of the disk ─► deadlines, leases, write-behind ─┐
       ▲                                                                                 │
       └─────────────────────────────────────────────────────────────────────────────────┘

Owns the order of a round and its end, and whose blocks are kept here: nodes come and go in
`members`, what they ask goes through `traffic`, operators are answered by `admin`. What is decided
about blocks is decided in `tiers`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import zmq

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.node.debug import DebugSwitches, StoreHooks
from kvferry.kvstore.node.loop import IDLE_POLL_MS, NodeLoop
from kvferry.kvstore.store.admin import answer_admin
from kvferry.kvstore.store.figures import tier_figures
from kvferry.kvstore.store.members import Members
from kvferry.kvstore.store.storage import ModelStorage, StoreSizes, open_files
from kvferry.kvstore.store.traffic import Traffic
from kvferry.kvstore.tiers.disk.files import FileSystem
from kvferry.kvstore.tiers.disk.worker import DiskFaults
from kvferry.kvstore.tiers.shared_memory import SharedMemory
from kvferry.kvstore.wire.hello import Hello, Refused, Welcome
from kvferry.kvstore.wire.server import FromPeer, Peer, Server
from kvferry.kvstore.wire.status import Status
from kvferry.kvstore.wire.store import (
    Attach,
    CacheReply,
    CacheRequest,
)

log = logging.getLogger(__name__)

NODE_ROLES = ("prefill", "decode")
BUSY_POLL_MS = 20
"""While time alone may bring something to do."""
LAST_WORDS_MS = 250
"""With nothing to read for so long, nodes that have ended have been heard to their end."""


class StoreNode(NodeLoop):
    """Runs until a stop is asked for; nodes do without it from then on.

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
        super().__init__(server, clock, debug, on_store=self._inject)
        self.storage: ModelStorage | None = None
        self.faults = DiskFaults()
        self._sizes = sizes
        self._files = files
        if files is None and sizes.disk:
            self._files = open_files(sizes.folder)
        self._memory: SharedMemory | None = self._new_memory()
        self._fingerprint: dict[str, str] | None = None
        self._early: dict[bytes, tuple[Peer, Attach]] = {}
        """Nodes that attach while the disk is still being read."""
        self._members = Members(server, self.counters)
        self._traffic = Traffic(server, self._members, self.counters)
        server.open_to(self._admit)

    def _new_memory(self) -> SharedMemory:
        return SharedMemory.create(
            self._sizes.arena_folder, self._sizes.ram, self._server.incarnation
        )

    # -- the loop -------------------------------------------------------------------------------

    def turn(self) -> None:
        """One round of the loop."""
        self.receive()
        now, storage = self._clock(), self.storage
        if storage is not None:
            if storage.disk is not None:
                for job in storage.disk.take_done():
                    self._traffic.hand_out(storage, storage.tiers.disk_done(job, now))
            if self._early and not storage.recovering:
                early, self._early = self._early, {}
                for peer, message in early.values():
                    self._attached(peer, message)
            self._traffic.hand_out(storage, storage.tiers.tick(now))
            self._members.tick(storage, now)
        self._announcer.tick(now)

    def sleep_ms(self) -> int:
        return IDLE_POLL_MS if self.idle else BUSY_POLL_MS

    def sockets(self) -> Iterable[zmq.Socket[bytes] | int]:
        disk = None if self.storage is None else self.storage.disk
        return () if disk is None else (disk.fileno(),)

    @property
    def idle(self) -> bool:
        """Whether only a message can bring something to do."""
        if self.storage is None:
            return True
        tiers = self.storage.tiers
        writes = tiers.disk is not None and tiers.disk.wants_turn(self._clock())
        return not (self._members.quarantined or tiers.fetches.active or writes)

    @property
    def may_end(self) -> bool:
        """Nobody is waited for: nodes that still read compute what they do not get."""
        return True

    def give_up(self) -> None:
        """Nothing: `finish` keeps to its time."""

    def finish(self, timeout: float) -> None:
        """Writes what waits to be written.

        Nodes that ended before have said what they had to say: it is read first.
        """
        began = self._clock()
        deadline = began + timeout
        while self._server.socket.poll(LAST_WORDS_MS) and self._clock() < began + timeout / 2:
            self.turn()
        if self.storage is not None:
            self.storage.drain(lambda: self._clock() > deadline, self._clock)
            disk = self.storage.tiers.disk
            if disk is not None and disk.unwritten:
                unwritten = disk.unwritten * disk.index.span
                log.warning("%d bytes were not written in time: they are lost", unwritten)

    # -- meeting --------------------------------------------------------------------------------

    def _admit(self, hello: Hello) -> Welcome:
        """The first node of a model decides whose blocks are kept here, until its last one left."""
        others = any(peer.role in NODE_ROLES for peer in self._server.peers.values())
        if hello.role in NODE_ROLES and not others and hello.fingerprint != self._fingerprint:
            self._adopt(dict(hello.fingerprint))
        # It has no tokens: what it keeps are bytes, whose size comes with `Attach`.
        return Welcome("store", self._fingerprint or {}, 1, 1, 1, 0)

    def _adopt(self, fingerprint: dict[str, str]) -> None:
        if self.storage is not None:
            log.info("another model comes: the arena is emptied, the disk keeps what it has")
            disk = self.storage.tiers.disk
            if disk is not None:
                self.storage.drain(lambda: not disk.index.to_erase, self._clock)
            self.storage.close()
            self.storage, self._memory = None, None
            if self._sizes.disk:
                self._files = open_files(self._sizes.folder)
            if self._collector is not None:
                self._collector.let_go()
        self._members.forget()
        self._fingerprint = fingerprint

    def _attached(self, peer: Peer, message: Attach) -> None:
        if peer.role not in NODE_ROLES:
            return
        storage = self.storage or self._open(message.block_bytes)
        if storage is None or storage.block_bytes != message.block_bytes:
            ours = "too few fit" if storage is None else str(storage.block_bytes)
            self._server.send(peer, Refused("block_bytes", ours, str(message.block_bytes)))
            return
        if storage.recovering:  # until then it would be told that nothing is there
            self._early[peer.identity] = (peer, message)
            return
        self._members.attach(peer, storage, shared=message.shared)

    def _open(self, block_bytes: int) -> ModelStorage | None:
        try:
            memory = self._memory or self._new_memory()
            self._memory = memory
            storage = ModelStorage(
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
        log.info("%d slots of %d bytes", storage.tiers.host.num_slots, storage.slot_bytes)
        self.storage = storage
        return storage

    def lost(self, peer: Peer) -> None:
        self._early.pop(peer.identity, None)
        if self.storage is not None:
            self._members.lost(self.storage, peer)

    # -- messages -------------------------------------------------------------------------------

    def handle(self, received: FromPeer) -> bool:
        peer, message, now = received.peer, received.message, self._clock()
        match message:
            case Attach():
                self._attached(peer, message)
            case CacheRequest():
                body = answer_admin(message, self.storage, self._files, self.figures, now)
                self._server.send(peer, CacheReply(message.number, body))
            case _:
                member = self._members.attached.get(peer.identity)
                if member is not None and self.storage is not None:
                    return self._traffic.receive(self.storage, member, received, now)
                self.counters["messages_unattached"] += 1
        return True

    def _inject(self, hooks: StoreHooks) -> None:
        if hooks.read_delay_ms is not None:
            self.faults.read_delay_s = max(0.0, hooks.read_delay_ms) / 1e3
            if hooks.read_delay_ms == 0:
                self.faults.damage_reads = self.faults.fail_reads = self.faults.fail_writes = 0
        self.faults.damage_reads += max(0, hooks.damage_reads)
        self.faults.fail_reads += max(0, hooks.fail_reads)
        self.faults.fail_writes += max(0, hooks.fail_writes)
        if self.storage is not None:
            keys = [block.key for block in self.storage.tiers.host.blocks()]
            for key in keys[: max(0, hooks.damage_host)]:
                view = self.storage.view(self.storage.tiers.host.slot_of(key))
                view[len(view) // 2] ^= 1
                view.release()

    # -- state ----------------------------------------------------------------------------------

    def status(self) -> Status:
        tiers = None if self.storage is None else self.storage.tiers
        resident = 0 if tiers is None else tiers.host.num_resident
        return Status(
            running=0 if tiers is None else len(tiers.fetches.active),
            waiting=0,
            blocks_used=resident,
            blocks_cached=resident,
            blocks_total=0 if tiers is None else tiers.host.num_slots,
            draining=self.draining,
            counters=self.figures(),
        )

    def figures(self) -> dict[str, float]:
        """Counters and gauges by metric stem."""
        figures: dict[str, float] = {
            **self.counters,
            **self.socket_counters(),
        }
        figures |= tier_figures(self.storage, self._sizes.ram, self._sizes.disk)
        figures["attached_nodes"] = len(self._members.attached)
        if self.storage is not None:
            figures |= self.storage.tiers.figures()
        return figures

    def ledger(self) -> dict[str, object]:
        tiers = {} if self.storage is None else self.storage.tiers.ledger()
        return {
            **tiers,
            "members": len(self._members.attached),
            "quarantined_nodes": len(self._members.quarantined),
            "counters": self.figures(),
        }

    def check(self) -> None:
        if self.storage is None:
            return
        self.storage.tiers.check()
        self._members.check(self.storage)

    def close(self) -> None:
        """Ends the disk's thread and takes the arena's name away. A second time does nothing."""
        if self.storage is not None:
            self.storage.close()
        else:
            if self._memory is not None:
                self._memory.remove()
                self._memory.close()
            if self._files is not None:
                self._files.close()
        self.storage = self._memory = self._files = None
