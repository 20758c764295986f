"""What the prefill node does next: which offers to accept, which chunks to compute together.

Owns the pool's accounting and the list of jobs. It is pure: it never touches a tensor, a socket or
a clock. Rules:

* An offer is accepted with blocks for its whole span, or it waits and holds nothing.
* A step takes chunks of several jobs up to a token budget, shortest remaining work first with
  ageing: a long prompt never blocks short ones, and is never starved.
* A job whose next block is being computed for another one waits for that block.
* Only whole, committed blocks are shipped, in order, within the receiver's credit.
"""

from __future__ import annotations

from typing import NamedTuple

from kvferry.kvstore.node.chunks import chunk_end, urgency
from kvferry.kvstore.tiers.device import BlockPool
from kvferry.prefill_node.job import Job, JobState


class Chunk(NamedTuple):
    job: Job
    start: int
    end: int


class PrefillScheduler:
    """Decides over one pool of `pool.num_blocks` blocks of `block_size` tokens."""

    def __init__(
        self, pool: BlockPool, block_size: int, max_num_batched_tokens: int, *, reuse: bool = True
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.reuse = reuse
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        """Accepted ones: they have their blocks."""
        self._computing: list[Job] = []

    # -- entering -------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        self.waiting.append(job)
        self.waiting.sort(key=lambda waiting: waiting.order)

    def accept(self) -> list[Job]:
        """Moves what fits from the queue to the running jobs, with its blocks."""
        accepted = []
        for job in list(self.waiting):
            if self._awaits_other(job):
                continue
            if not self._reserve(job):
                break
            self.waiting.remove(job)
            self.running.append(job)
            accepted.append(job)
        return accepted

    def _awaits_other(self, job: Job) -> bool:
        if not self.reuse:
            return False
        if self.pool.is_pending(job.awaited):
            return True
        found = self._found(job)
        job.awaited = job.keys[found] if found < job.last else b""
        return self.pool.is_pending(job.awaited)

    def _found(self, job: Job) -> int:
        return self.pool.match_length(job.keys) if self.reuse else 0

    def _reserve(self, job: Job) -> bool:
        found = self._found(job)
        room = self.pool.num_available - self.pool.pinned_cost(job.keys[:found])
        if job.last - found > room:
            return False
        job.blocks = self.pool.match(job.keys[:found])
        reserved = self.pool.reserve(job.last - found)
        assert reserved is not None, "the room was counted above"
        job.blocks += reserved
        job.prefix = found
        job.computed = found * self.block_size
        job.state = JobState.ACCEPTED
        if self.reuse:
            for index in range(found, job.last):
                self.pool.claim(job.blocks[index], job.keys[index])
        return True

    def tokens_ahead(self, job: Job) -> int:
        """Tokens that other running jobs still have to compute."""
        return sum(other.remaining for other in self.running if other is not job)

    # -- fetching ---------------------------------------------------------------------------------

    def fetched(self, job: Job, index: int) -> None:
        """A block of it came from the store."""
        job.computed = (index + 1) * self.block_size
        if self.reuse:
            self.pool.commit(job.blocks[index], job.keys[index])

    # -- computing -------------------------------------------------------------------------------

    def plan(self, now: float) -> list[Chunk]:
        """The chunks of the next pass; tell `computed` or `abandoned` when it is over."""
        budget = self.max_num_batched_tokens
        chunks = []
        jobs = [job for job in self.running if job.remaining and not job.fetching]
        for job in sorted(jobs, key=lambda job: urgency(job.remaining, now - job.arrived)):
            end = chunk_end(job.computed, budget, len(job.tokens))
            if end > job.computed:
                budget -= end - job.computed
                chunks.append(Chunk(job, job.computed, end))
        self._computing = [chunk.job for chunk in chunks]
        return chunks

    @property
    def all_aborted(self) -> bool:
        """Whether nobody wants the pass that is being computed any more."""
        return all(job.state is JobState.ABORTED for job in self._computing)

    def computed(self, chunks: list[Chunk]) -> None:
        """The pass is over and its blocks are whole."""
        self._computing = []
        for job, start, end in chunks:
            job.computed = end
            if self.reuse:
                for index in range(start // self.block_size, end // self.block_size):
                    self.pool.commit(job.blocks[index], job.keys[index])
            if job.state is JobState.ABORTED:
                self._let_go(job)

    def abandoned(self) -> None:
        """The pass ended early: all its jobs were aborted, and their new blocks are garbage."""
        jobs, self._computing = self._computing, []
        for job in jobs:
            self._let_go(job)

    # -- shipping --------------------------------------------------------------------------------

    def sendable(self, job: Job, block_bytes: int, max_blocks: int) -> range:
        """Indices of the next blocks that may be shipped now."""
        whole = job.computed // self.block_size
        end = min(whole, job.last, job.sent + job.credit // block_bytes, job.sent + max_blocks)
        return range(job.sent, max(job.sent, end))

    def shipped(self, job: Job, count: int, block_bytes: int) -> None:
        job.sent += count
        job.credit -= count * block_bytes
        job.state = JobState.STREAMING

    def complete(self, job: Job) -> None:
        """Everything was sent: the receiver has its own copy, ours stays findable."""
        assert job.sent == job.last
        job.state = JobState.COMPLETE
        self.running.remove(job)
        self.pool.release(job.blocks)
        job.blocks = []

    # -- leaving ---------------------------------------------------------------------------------

    def find(self, identity: bytes, number: int, epoch: int) -> Job | None:
        for job in self.running + self.waiting:
            same = job.number == number and job.epoch == epoch
            if same and job.peer.identity == identity and job.state is not JobState.ABORTED:
                return job
        return None

    def of_peer(self, identity: bytes) -> list[Job]:
        jobs = self.running + self.waiting
        return [
            job
            for job in jobs
            if job.peer.identity == identity and job.state is not JobState.ABORTED
        ]

    def abort(self, job: Job) -> None:
        """Nobody wants it any more. Its blocks are free at once, or when its pass is over."""
        if job.state is JobState.OFFERED:
            self.waiting.remove(job)
            job.state = JobState.DRAINED
            return
        job.state = JobState.ABORTED
        if job not in self._computing:
            self._let_go(job)

    def _let_go(self, job: Job) -> None:
        self.running.remove(job)
        self.pool.release(job.blocks)
        job.blocks = []
        job.state = JobState.DRAINED

    def check(self) -> None:
        """Proves that the running jobs hold exactly what the pool says is held."""
        self.pool.check()
        held = {block for job in self.running for block in job.blocks}
        assert len(held) == self.pool.num_held, "blocks are held by nobody"
        assert all(not job.blocks for job in self.waiting)
        assert all(len(job.blocks) == job.last for job in self.running)
        assert all(job in self.running for job in self._computing)
