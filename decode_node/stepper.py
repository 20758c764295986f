"""One step of the decode node: the batch runs, tokens are drawn, choices grow, fork and end.

Owns nothing but the order of these acts; it turns a plan into tokens and tells the scheduler what
became of each sequence. It sends nothing: what a step produced is returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvferry.decode_node.request import Phase, Request, Sequence, prompt_sources
from kvferry.decode_node.scheduler import DecodeScheduler, Plan
from kvferry.kernels.engine import Batch, Engine, Logits, Span
from kvferry.kernels.sampling import sample
from kvferry.kvstore.wire.generation import Token


@dataclass(frozen=True, slots=True)
class Filled:
    """Consecutive blocks of a sequence that are whole now."""

    request: Request
    first: int
    parent: bytes
    """Key of the block before the first one, or the root."""
    keys: list[bytes]
    blocks: list[int]


def filled(sequence: Sequence, first: int, end: int) -> Filled:
    """Blocks `[first, end)`, whole as they are now: the sequence may end or lose them."""
    parent = sequence.keys[first - 1] if first else sequence.request.message.root
    keys, blocks = sequence.keys[first:end], sequence.blocks[first:end]
    return Filled(sequence.request, first, parent, keys, blocks)


@dataclass(slots=True)
class Produced:
    """What one step made."""

    started: list[Request] = field(default_factory=list)
    """Requests whose first token this is."""
    tokens: list[tuple[Request, Token]] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Request, str]] = field(default_factory=list)
    """Requests whose logits were not numbers, with what is to be said of it."""
    filled: list[Filled] = field(default_factory=list)


class Stepper:
    def __init__(
        self, engine: Engine, scheduler: DecodeScheduler, clock: Callable[[], float]
    ) -> None:
        self._clock = clock
        self._engine = engine
        self._block_size = engine.spec.block_size
        self._scheduler = scheduler

    def run(self, plan: Plan) -> Produced:
        """Runs the plan's slices in one pass."""
        started = self._clock()
        for sequence, _, _ in (one for one in plan.slices if one.is_last):
            if not sequence.request.timeline.first_step:
                sequence.request.timeline.first_step = started
        batch = Batch(
            tuple(
                Span(
                    one.sequence.tokens[one.start : one.end],
                    one.start,
                    one.sequence.blocks,
                    one.is_last,
                )
                for one in plan.slices
            )
        )
        logits = self._engine.forward(batch, lambda: None)
        produced = Produced()
        row = 0
        for one in plan.slices:
            chooses = one.is_last
            first = one.sequence.computed // self._block_size
            self._scheduler.advance(one.sequence, one.end)
            if one.end // self._block_size > first:
                produced.filled.append(filled(one.sequence, first, one.end // self._block_size))
            if chooses:
                try:
                    self._choose(one.sequence, logits[row], produced)
                except ValueError as error:
                    produced.failed.append((one.sequence.request, str(error)))
                row += 1
        return produced

    def _choose(self, sequence: Sequence, row: Logits, produced: Produced) -> None:
        request = sequence.request
        first = sequence.phase is Phase.PREFILLING
        choices = list(sequence.choices)
        sequence.phase = Phase.DECODING
        sequences = [sequence]
        for fork in self._scheduler.fork(sequence):
            if fork.copy is not None:
                self._engine.copy(*fork.copy)
            sequences.append(fork.sequence)
        now = 0.0
        for one, choice in zip(sequences, choices, strict=True):
            token = self._append(one, choice, row)
            now = self._clock()
            produced.tokens.append((request, token))
            if token.finish:
                produced.ended.append(one)
        if first and not request.timeline.first_token:
            request.timeline.first_token = now
            request.sources = prompt_sources(sequence, self._block_size)
            produced.started.append(request)
        request.timeline.last_token = now

    def _append(self, sequence: Sequence, choice: int, row: Logits) -> Token:
        """Draws the next token of a choice; a forced one, as long as there are some."""
        request = sequence.request
        output, params = request.outputs[choice], request.params
        index = len(output)
        if index < len(request.forced):
            params = replace(params, temperature=0.0, logit_bias=((request.forced[index], 1e9),))
        drawn = sample(
            row,
            params,
            seed=request.message.seed,
            choice=choice,
            position=index,
            prompt=request.prompt,
            output=output,
            suppressed=request.message.eos_ids + request.message.stop_token_ids,
        )
        output.append(drawn.token)
        sequence.tokens.append(drawn.token)
        finish = request.finish_reason(choice, drawn.token)
        number, logprob = request.message.request, drawn.logprob or 0.0
        return Token(number, choice, index, drawn.token, finish, logprob, drawn.top)
