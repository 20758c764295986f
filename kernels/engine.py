"""The seam between a node and whatever computes: a packed batch in, logits out.

Owns the vocabulary of that seam: the batch, the engine's description of itself and the protocol
that both engines implement. It imports neither torch nor a model, and knows nothing of block keys,
sockets or requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive new tokens of one sequence.

    The keys and values of positions ``[0, start)`` are already in the blocks; this pass writes
    those of ``[start, start + len(tokens))``. ``blocks[i]`` holds positions
    ``[i * block_size, (i + 1) * block_size)``; the table covers at least ``start + len(tokens)``.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    wants_logits: bool
    """Whether the logits of the span's last token are wanted."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass: the spans are packed into a single row of tokens, in this order."""

    spans: tuple[Span, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(span.tokens) for span in self.spans)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine says of itself; constant over its life."""

    block_size: int
    """Tokens per block."""
    num_blocks: int
    block_bytes: int
    """Bytes of one block: keys and values of `block_size` tokens in all layers."""
    num_layers: int
    vocab_size: int
    max_model_len: int
    """The longest sequence in tokens, prompt and output together."""
    identity: Mapping[str, str]
    """Every property that changes the bytes of a block, by name: engine and numerics version,
    KV dtype, block shape and stride, layers, heads, head_dim, rope. Two engines that differ in one
    must never exchange blocks. The number of blocks is not among them."""


def check_batch(batch: Batch, spec: EngineSpec) -> None:
    """Raises ValueError unless every span is within the model's, its table's and the pool's limits.

    That no two spans write to one block, and that the KV before `start` is there, is the caller's
    promise.
    """
    if not batch.spans:
        raise ValueError("a batch needs at least one span")
    for span in batch.spans:
        used = span.blocks[: -(-span.end // spec.block_size)]
        if len(span.tokens) == 0 or span.start < 0:
            raise ValueError("a span needs tokens and a start of at least 0")
        if span.end > spec.max_model_len:
            raise ValueError(f"{span.end} tokens exceed max_model_len {spec.max_model_len}")
        if min(span.tokens) < 0 or max(span.tokens) >= spec.vocab_size:
            raise ValueError(f"a token id is outside the vocabulary of {spec.vocab_size}")
        if len(used) * spec.block_size < span.end:
            raise ValueError(f"{len(used)} blocks cannot hold {span.end} tokens")
        if min(used) < 0 or max(used) >= spec.num_blocks:
            raise ValueError(f"a block is outside the pool of {spec.num_blocks}")


class Engine(Protocol):
    """Runs the model over a paged pool of KV blocks that it owns. Not thread-safe."""

    @property
    def spec(self) -> EngineSpec: ...

    def forward(self, batch: Batch, between_layers: Callable[[], None]) -> Logits:
        """Runs one pass and writes the new tokens' KV into their blocks.

        `between_layers` is called once per layer; what it raises ends the pass and propagates, and
        the blocks of the batch's new tokens are then undefined.

        Raises ValueError for a batch that `check_batch` refuses.

        Returns float32 logits ``[rows, vocab_size]``, one row per span with `wants_logits`, in
        order. The array is valid until the next call.
        """
        ...

    def read(self, block: int) -> bytes | memoryview:
        """The block's `block_bytes` bytes. A view is valid until the block is written again."""
        ...

    def write(self, block: int, payload: bytes | memoryview) -> None:
        """Overwrites a whole block; ValueError unless `payload` has `block_bytes` bytes."""
        ...

    def copy(self, source: int, target: int) -> None:
        """Copies one whole block onto another."""
        ...

    def prepare(self) -> bool:
        """Does some milliseconds of work that later calls are spared, in a moment that nobody
        needs; False when there is none to do."""
        ...
