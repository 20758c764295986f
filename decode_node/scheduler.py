"""What the decode node does next: admission, growth, preemption, the spans of a step.

Owns the pool's accounting, the waiting queue and the running list. It is pure: it never touches a
tensor, a socket or a clock. Rules:

* A sequence is admitted with blocks for all its tokens and for min(max_tokens, 64) more, of every
  choice, or not at all: no pool is ever filled with halves.
* The queue is served in order; only a sequence whose next block is being computed for another one
  (single flight) steps aside. It takes that block when it is committed, or computes it itself when
  the other one ended.
* A running sequence that needs a block when none is left preempts the youngest, which starts over
  from its tokens: its committed blocks stay findable, and sampling is pure, so nothing changes but
  time.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.decode_node.request import Phase, Request, Sequence
from kvferry.kvstore.keys import matchable_blocks, next_key
from kvferry.kvstore.node.chunks import blocks_for, chunk_end, urgency
from kvferry.kvstore.tiers.device import BlockPool

GROWTH_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Limits:
    max_num_seqs: int
    max_num_batched_tokens: int
    step_slice: int = 64
    """Local prefill in a step that also decodes, tokens."""


class Slice(NamedTuple):
    """The part of a sequence that runs in the next step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether its last logits choose a token."""
        return self.end == len(self.sequence.tokens)


class Plan(NamedTuple):
    slices: list[Slice]
    preempted: list[Sequence]


class Fork(NamedTuple):
    sequence: Sequence
    copy: tuple[int, int] | None
    """The block to copy from and to, if the last one is not full."""


class DecodeScheduler:
    """Decides over one pool of `pool.num_blocks` blocks of `block_size` tokens."""

    def __init__(
        self, pool: BlockPool, block_size: int, limits: Limits, *, reuse: bool = True
    ) -> None:
        self.pool = pool
        self.reuse = reuse
        self.block_size = block_size
        self.limits = limits
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    # -- room ------------------------------------------------------------------------------------

    def blocks_needed(self, sequence: Sequence) -> int:
        """Blocks for the sequence and the first growth of all its choices."""
        request = sequence.request
        left = request.message.max_tokens - len(request.outputs[sequence.choices[0]])
        growth = max(0, min(left, GROWTH_TOKENS))
        return self._blocks_with_growth(len(sequence.tokens), growth, len(sequence.choices))

    def _blocks_with_growth(self, tokens: int, growth: int, choices: int) -> int:
        full = blocks_for(tokens + growth, self.block_size)
        shared = tokens // self.block_size
        return full + (choices - 1) * (full - shared)

    def never_fits(self, request: Request) -> str:
        """Why the request could not run even alone; empty when it could."""
        choices = request.message.choices
        if choices > self.limits.max_num_seqs:
            return f"n={choices} exceeds the limit of {self.limits.max_num_seqs} sequences at once"
        longest = len(request.prompt) + request.message.max_tokens
        first = self._blocks_with_growth(
            len(request.prompt), min(request.message.max_tokens, GROWTH_TOKENS), choices
        )
        needed = max(first, blocks_for(longest, self.block_size))
        if needed > self.pool.num_blocks:
            return (
                f"the request needs {needed * self.block_size} tokens of KV cache at once, "
                f"this node has {self.pool.num_blocks * self.block_size}"
            )
        return ""

    # -- entering ----------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queues it behind those of the same priority that arrived earlier."""
        insort(self.waiting, sequence, key=lambda waiting: waiting.request.order)

    def admit(self) -> list[Sequence]:
        """Moves what fits from the queue to the running list, with its blocks."""
        admitted = []
        choices = sum(len(running.choices) for running in self.running)
        for sequence in list(self.waiting):
            if choices + len(sequence.choices) > self.limits.max_num_seqs:
                break
            if self._awaits_other(sequence):
                continue
            if not self._reserve(sequence):
                break
            self.waiting.remove(sequence)
            self.running.append(sequence)
            admitted.append(sequence)
            choices += len(sequence.choices)
        return admitted

    def _matchable(self, sequence: Sequence) -> list[bytes]:
        if not self.reuse:
            return []
        return sequence.keys[: matchable_blocks(len(sequence.tokens), self.block_size)]

    def _awaits_other(self, sequence: Sequence) -> bool:
        if self.pool.is_pending(sequence.awaited):
            return True
        keys = self._matchable(sequence)
        found = self.pool.match_length(keys)
        sequence.awaited = keys[found] if found < len(keys) else b""
        return self.pool.is_pending(sequence.awaited)

    def _reserve(self, sequence: Sequence) -> bool:
        keys = self._matchable(sequence)
        found = self.pool.match_length(keys)
        fresh = self.blocks_needed(sequence) - found
        if fresh > self.pool.num_available - self.pool.pinned_cost(keys[:found]):
            return False
        sequence.blocks = self.pool.match(keys)
        reserved = self.pool.reserve(fresh)
        assert reserved is not None, "the room was counted above"
        own = blocks_for(len(sequence.tokens), self.block_size) - found
        sequence.blocks += reserved[:own]
        sequence.spare = reserved[own:]
        sequence.computed = found * self.block_size
        sequence.phase = Phase.PREFILLING
        sequence.sources.found(found)
        for index in range(found, len(sequence.keys) if self.reuse else found):
            self.pool.claim(sequence.blocks[index], sequence.keys[index])
        return True

    # -- a step ------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """The spans of the next step, after making room for every decoding sequence."""
        preempted = self._make_room()
        slices = [
            Slice(sequence, sequence.computed, len(sequence.tokens))
            for sequence in self.running
            if sequence.phase is Phase.DECODING
        ]
        # Never below one slice, or a prompt could starve behind a full batch.
        budget = max(self.limits.max_num_batched_tokens - len(slices), self.limits.step_slice)
        if slices:
            budget = self.limits.step_slice
        slices += self._prefill_slices(budget, now)
        return Plan(slices, preempted)

    def _prefill_slices(self, budget: int, now: float) -> Iterator[Slice]:
        def key(sequence: Sequence) -> float:
            return urgency(sequence.remaining, now - sequence.request.timeline.arrived)

        candidates = [one for one in self.running if one.phase is Phase.PREFILLING]
        for sequence in sorted(candidates, key=key):
            end = chunk_end(sequence.computed, budget, len(sequence.tokens))
            if end > sequence.computed:
                budget -= end - sequence.computed
                yield Slice(sequence, sequence.computed, end)

    def _make_room(self) -> list[Sequence]:
        preempted: list[Sequence] = []
        for sequence in sorted(self.running, key=lambda running: running.request.order):
            while sequence.phase is Phase.DECODING and not self._grow(sequence):
                preempted.append(self.preempt_youngest())
        return preempted

    def _grow(self, sequence: Sequence) -> bool:
        if blocks_for(len(sequence.tokens), self.block_size) <= len(sequence.blocks):
            return True
        if sequence.spare:
            sequence.blocks.append(sequence.spare.pop())
            return True
        taken = self.pool.reserve(1)
        if taken is not None:
            sequence.blocks += taken
        return taken is not None

    def advance(self, sequence: Sequence, end: int) -> None:
        """The keys and values of the tokens before `end` are in the sequence's blocks now."""
        first = sequence.computed // self.block_size
        sequence.computed = end
        sequence.sources.computed(end // self.block_size)
        for index in range(first, end // self.block_size):
            if index == len(sequence.keys):
                parent = sequence.keys[-1] if sequence.keys else sequence.request.message.root
                start = index * self.block_size
                sequence.keys.append(
                    next_key(parent, sequence.tokens[start : start + self.block_size])
                )
            if self.reuse:
                self.pool.commit(sequence.blocks[index], sequence.keys[index])

    def fork(self, sequence: Sequence) -> list[Fork]:
        """Splits a sequence whose prompt has just been computed into one per choice.

        Whole blocks are shared; the unfilled last one must be copied for each new sequence.
        """
        forks = []
        others = sequence.choices[1:]
        del sequence.choices[1:]
        for done, choice in enumerate(others):
            share = len(sequence.spare) // (len(others) - done + 1)
            share = max(share, min(1, len(sequence.spare)))
            spare = [sequence.spare.pop() for _ in range(share)]
            forks.append(self._fork_one(sequence, choice, spare))
        return forks

    def _fork_one(self, sequence: Sequence, choice: int, spare: list[int]) -> Fork:
        shared = sequence.computed // self.block_size
        fork = Sequence(
            request=sequence.request,
            choices=[choice],
            tokens=list(sequence.tokens),
            keys=sequence.keys[:shared],
            phase=Phase.DECODING,
            blocks=sequence.blocks[:shared],
            computed=sequence.computed,
            spare=spare,
        )
        for block in fork.blocks:
            self.pool.share(block)
        self.running.append(fork)
        if sequence.computed % self.block_size == 0:
            return Fork(fork, None)
        assert spare, "a block for each fork was reserved at admission"
        fork.blocks.append(spare.pop())
        return Fork(fork, (sequence.blocks[shared], fork.blocks[shared]))

    # -- leaving -----------------------------------------------------------------------------------

    def preempt_youngest(self) -> Sequence:
        """Takes everything from the running sequence that came last, and queues it again."""
        sequence = max(self.running, key=lambda running: running.request.order)
        self._let_go(sequence)
        sequence.phase = Phase.WAITING
        sequence.request.preemptions += 1
        self.add(sequence)
        return sequence

    def end(self, sequence: Sequence) -> None:
        """The sequence is over, wherever it was; its committed blocks stay findable."""
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        else:
            self._let_go(sequence)
        sequence.phase = Phase.ENDED

    def _let_go(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.blocks + sequence.spare)
        sequence.blocks, sequence.spare, sequence.computed = [], [], 0

    def sequences(self, request: Request) -> list[Sequence]:
        """All sequences of a request that have not ended."""
        return [one for one in self.waiting + self.running if one.request is request]

    def check(self) -> None:
        """Proves that the running sequences hold exactly what the pool says is held."""
        self.pool.check()
        held = {block for one in self.running for block in one.blocks + one.spare}
        assert len(held) == self.pool.num_held, "blocks are held by nobody"
        assert all(not (one.blocks or one.spare) for one in self.waiting)
        for one in self.running:
            assert one.computed <= len(one.blocks) * self.block_size
