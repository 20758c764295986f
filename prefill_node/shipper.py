"""How finished blocks leave a prefill node: behind a header, or lent in the arena.

Owns the shipments and their figures. Which blocks may be shipped the scheduler decides; which of
those lent are still to be copied, `Lending` knows. Only whole blocks are shipped. A shipment is
copied into ZeroMQ's own memory when it is sent, so a block may be evicted as soon as its transfer
is complete.
"""

from __future__ import annotations

from collections import Counter

from kvferry.kernels.engine import Engine
from kvferry.kvstore.keys import checksum
from kvferry.kvstore.wire.handoff import Blocks, Complete, Lent
from kvferry.kvstore.wire.server import Server
from kvferry.prefill_node.job import Job, JobState
from kvferry.prefill_node.lending import Lending
from kvferry.prefill_node.scheduler import PrefillScheduler

MESSAGE_BYTES = 4 << 20
"""Payload of one `Blocks` message at most; one block is sent whatever its size."""


class Shipper:
    """All shipments of one prefill node."""

    def __init__(
        self,
        engine: Engine,
        server: Server,
        scheduler: PrefillScheduler,
        lending: Lending,
        counters: Counter[str],
    ) -> None:
        self._lending = lending
        self._counters = counters
        self._engine = engine
        self._server = server
        self._scheduler = scheduler
        self._message_blocks = max(1, MESSAGE_BYTES // engine.spec.block_bytes)

    def ship(self) -> None:
        """Ships all that may be shipped now, and completes the jobs of which it was the last."""
        for job in list(self._scheduler.running):
            if job.state is JobState.ABORTED:
                continue
            while self._ship_some(job):
                pass
            if job.sent == job.last:
                self._complete(job)

    def _ship_some(self, job: Job) -> bool:
        """False when nothing more of the job can be shipped now."""
        block_bytes = self._engine.spec.block_bytes
        indices = self._scheduler.sendable(job, block_bytes, self._message_blocks)
        return bool(indices) and (self._lend(job, indices) or self._send(job, indices))

    def _send(self, job: Job, indices: range) -> bool:
        payloads = [self._engine.read(job.blocks[index]) for index in indices]
        checksums = tuple(checksum(payload) for payload in payloads)
        header = Blocks(job.number, job.epoch, indices.start, checksums)
        if not self._server.send(job.peer, header, payloads):
            return False
        self._shipped(job, len(indices))
        return True

    def _lend(self, job: Job, indices: range) -> bool:
        """Ships what the arena has room for without sending it; False when it has none."""
        first = indices.start
        parent = job.keys[first - 1] if first else job.root
        keys = job.keys[first : indices.stop] if self._scheduler.reuse else []
        blocks = job.blocks[first : indices.stop]

        def read(at: int) -> bytes | memoryview:
            return self._engine.read(blocks[at])

        refs = self._lending.lend(job, first, parent, keys, read)
        if not refs:
            return False
        slots, sums = zip(*((ref.slot, ref.checksum) for ref in refs), strict=True)
        header = Lent(job.number, job.epoch, first, refs[0].store, slots, sums)
        if not self._server.send(job.peer, header):
            return False
        self._shipped(job, len(refs))
        self._counters["lent_bytes"] += len(refs) * self._engine.spec.block_bytes
        return True

    def _shipped(self, job: Job, count: int) -> None:
        block_bytes = self._engine.spec.block_bytes
        self._scheduler.shipped(job, count, block_bytes)
        self._counters["shipped_bytes"] += count * block_bytes

    def _complete(self, job: Job) -> None:
        reused = max(0, min(job.prefix, job.last) - job.first)
        self._server.send(
            job.peer,
            Complete(
                job.number,
                job.epoch,
                reused,
                job.last - job.first - reused,
                job.started_at or job.finished_at,
                job.finished_at,
            ),
        )
        self._scheduler.complete(job)
