"""Sequences over shuffled blocks of an engine, as tests of engines prefill and decode them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from kvferry.kernels.engine import Batch, Engine, Span
from kvferry.tests.rigs.models.tiny import VOCAB_SIZE

B = 16
CHUNK = 512


class Sequences:
    """Sequences over shuffled blocks of one engine."""

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        self.engine = engine
        self.free = list(range(engine.spec.num_blocks))
        random.Random(seed).shuffle(self.free)
        self.calls = 0

    def blocks(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // B))]

    def step(self, *spans: Span) -> Any:
        return self.engine.forward(Batch(spans), self._between).copy()

    def prefill(self, ids: Sequence[int], blocks: Sequence[int], chunks: Sequence[int]) -> Any:
        """The logits of the last token; `chunks` add up to at least the length."""
        start = 0
        logits = None
        for chunk in chunks:
            tokens = ids[start : start + chunk]
            logits = self.step(Span(tokens, start, blocks, start + len(tokens) == len(ids)))
            start += len(tokens)
            if start == len(ids):
                break
        return logits

    def greedy(self, ids: Sequence[int], n: int) -> list[int]:
        blocks = self.blocks(len(ids) + n)
        logits = self.prefill(ids, blocks, [CHUNK] * 99)
        return self.decode(logits, len(ids), blocks, n)

    def decode(self, logits: Any, start: int, blocks: Sequence[int], n: int) -> list[int]:
        tokens = [int(logits[0].argmax())]
        for position in range(start, start + n - 1):
            logits = self.step(Span(tokens[-1:], position, blocks, True))
            tokens.append(int(logits[0].argmax()))
        return tokens

    def _between(self) -> None:
        self.calls += 1


def prompt(length: int, seed: int = 1) -> list[int]:
    return [random.Random(f"{seed} {i}").randrange(VOCAB_SIZE) for i in range(length)]


def serve(sequences: Sequences, prompts: list[list[int]], n: int, chunk: int) -> list[list[int]]:
    """Greedy texts: prompts arrive one a step, in chunks, while those before them decode in the
    same pass."""
    ids = [list(tokens) for tokens in prompts]
    tables = [sequences.blocks(len(tokens) + n) for tokens in prompts]
    done = [0] * len(prompts)
    shuffler = random.Random(3)
    steps = 0
    while any(len(ids[i]) < len(prompts[i]) + n for i in range(len(prompts))):
        steps += 1
        running = [i for i in range(min(steps, len(prompts))) if len(ids[i]) < len(prompts[i]) + n]
        shuffler.shuffle(running)
        spans = []
        for i in running:
            tokens = ids[i][done[i] :][:chunk]
            spans.append(Span(tokens, done[i], tables[i], done[i] + len(tokens) == len(ids[i])))
            done[i] += len(tokens)
        logits = sequences.step(*spans)
        wanted = [i for i, span in zip(running, spans, strict=True) if span.wants_logits]
        assert logits.shape == (len(wanted), VOCAB_SIZE)
        for row, i in zip(logits, wanted, strict=True):
            ids[i].append(int(row.argmax()))
    return [ids[i][len(prompts[i]) :] for i in range(len(prompts))]
