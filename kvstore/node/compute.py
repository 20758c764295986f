"""What prefill and decode nodes have in common beside their loop: a pool, a store to fetch from.

Owns the rule by which such a node sleeps, what it prepares in idle moments, the reset of its prefix
cache and its last words. It measures how fast tokens are computed, and notices a standstill. What
computes is an engine of which only bytes and idle work are known here; what is computed next is
decided by the role's scheduler.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import zmq

from kvferry.kvstore.client.client import StoreClient
from kvferry.kvstore.client.connector import BlockBytes, Connector, Fetched
from kvferry.kvstore.node.debug import DebugSwitches
from kvferry.kvstore.node.loop import IDLE_POLL_MS, NodeLoop
from kvferry.kvstore.tiers.device import BlockPool
from kvferry.kvstore.tiers.shared_memory import memory_is_short
from kvferry.kvstore.wire.client import Client
from kvferry.kvstore.wire.server import FromPeer, Server
from kvferry.kvstore.wire.status import CacheReset, ResetCache, Status

log = logging.getLogger(__name__)

FLUSH_SECONDS = 2.0
"""How long a node that has nothing more to do waits for its peers to read what it sent."""

STALL_SECONDS = 2.0
"""A standstill of so long, with work and room for it, is one that nobody foresaw."""

Owner = TypeVar("Owner")
"""Who waits for blocks: a sequence or a job."""


class Computes(BlockBytes, Protocol):
    """What is known here of an engine."""

    def prepare(self) -> bool: ...


class Scheduler(Protocol):
    """What is known here of a scheduler: who has blocks, and who waits for some."""

    @property
    def running(self) -> Sequence[object]: ...
    @property
    def waiting(self) -> Sequence[object]: ...


class StepClock:
    """Predicts how long a step of so many tokens takes: a moving average of seconds a token."""

    def __init__(self) -> None:
        self._per_token = 0.0

    def predict(self, tokens: int) -> float:
        return self._per_token * tokens

    def observe(self, tokens: int, seconds: float) -> None:
        measured = seconds / max(1, tokens)
        self._per_token = (
            measured if not self._per_token else 0.8 * self._per_token + 0.2 * measured
        )


class StallWatch:
    """Notices that work waits, room is free, and yet nothing moves: call `observe` every turn.

    A deadlock that nobody foresaw shows here, in the log and in the metrics, and not as a server
    that is healthy and silent.
    """

    def __init__(self, role: str) -> None:
        self.stalls = 0
        self._role = role
        self._moved: object = None
        self._since = 0.0
        self._told = False

    def observe(self, now: float, *, work: bool, moved: object, reason: str) -> None:
        """`work`: something could be done now. `moved`: any value that changes with progress."""
        if not work or moved != self._moved:
            self._moved, self._since, self._told = moved, now, False
        elif not self._told and now - self._since > STALL_SECONDS:
            self._told = True
            self.stalls += 1
            log.error(
                "%s: work waits, nothing moves for %g s: %s", self._role, STALL_SECONDS, reason
            )


class ComputeNode(NodeLoop, Generic[Owner]):
    """A node with a pool of blocks, some of which may come from a store."""

    def __init__(
        self,
        role: str,
        server: Server,
        engine: Computes,
        pool: BlockPool,
        scheduler: Scheduler,
        *,
        store: StoreClient | None,
        load_patience_s: float,
        clock: Callable[[], float],
        debug: DebugSwitches | None,
        busy: Callable[[bool], None] | None,
    ) -> None:
        super().__init__(server, clock, debug, pool)
        self._busy = busy
        self._computing = False
        self.pool = pool
        self.connector: Connector[Owner] = Connector(
            store,
            engine,
            pool,
            landed=self.block_fetched,
            ended=self.fetch_ended,
            clock=clock,
            least_patience_s=load_patience_s,
        )
        self.stall_watch = StallWatch(role)
        self._engine = engine
        self._queue = scheduler
        self._step_clock = StepClock()
        self._releases_seen = -1
        """Of the pool, when it was last tried to give blocks to those who wait."""

    # -- what a role does -----------------------------------------------------------------------

    @property
    @abstractmethod
    def can_compute(self) -> bool:
        """Whether the next turn has something to compute."""

    @abstractmethod
    def block_fetched(self, owner: Owner, index: int) -> None:
        """A block came from the store, verified, into the owner's block of this index."""

    @abstractmethod
    def fetch_ended(self, owner: Owner, fetched: Fetched) -> None:
        """The store sends nothing more for it."""

    # -- the loop -------------------------------------------------------------------------------

    def handle(self, received: FromPeer) -> bool:
        match received.message:
            case ResetCache(number) if received.peer.role == "gateway":
                held, evicted = self.pool.num_held, self.pool.evict_cached()
                self._server.send(received.peer, CacheReset(number, evicted, held))
                log.info("the prefix cache was reset: %d blocks evicted, %d in use", evicted, held)
                return True
        return False

    def sleep_ms(self) -> int:
        room_appeared = self.pool.releases != self._releases_seen
        if self.can_compute or (self._queue.waiting and room_appeared):
            return 0
        self.computing(False)
        prepared = self.idle and not memory_is_short() and self._engine.prepare()
        return 0 if prepared else IDLE_POLL_MS

    def computing(self, busy: bool) -> None:
        """Tells the other nodes of this host, who borrow its cores while it does not compute."""
        if self._busy is not None and busy != self._computing:
            self._computing = busy
            self._busy(busy)

    def sockets(self) -> Iterable[zmq.Socket[bytes] | int]:
        return self.connector.sockets

    def finish(self, timeout: float) -> None:
        """Gives the store what it has not yet, and peers a moment to read what was sent."""
        self.connector.deliver()
        self._server.flush(FLUSH_SECONDS)

    def close(self) -> None:
        """Closes the links to others."""
        self.connector.close()

    # -- state ----------------------------------------------------------------------------------

    def status(self) -> Status:
        return Status(
            running=len(self._queue.running),
            waiting=len(self._queue.waiting),
            blocks_used=self.pool.num_held,
            blocks_cached=self.pool.num_cached,
            blocks_total=self.pool.num_blocks,
            draining=self.draining,
            counters=self.figures(),
        )

    def figures(self) -> dict[str, float]:
        """All that is counted here, by metric stem."""
        return {
            **self.counters,
            **self.connector.counters,
            "stalls": self.stall_watch.stalls,
            **self.socket_counters(),
        }

    def clients(self) -> list[Client]:
        return self.connector.clients
