"""Where a chunk of prefill ends, and whose chunk comes first.

Pure arithmetic shared by both nodes; it knows neither requests nor pools.
"""

from __future__ import annotations

CHUNK_ALIGNMENT = 64
"""Chunk ends are absolute multiples of this, so that the same prompt is always cut alike."""

AGEING_TOKENS_PER_SECOND = 500
"""A second of waiting counts as much as this many tokens less to compute: no prompt starves."""


def chunk_end(start: int, budget: int, end: int) -> int:
    """The end of the chunk that begins at `start` and has at most `budget` tokens.

    It is `end` if that is within the budget, else the last multiple of 64 within it; `start` (an
    empty chunk) when not even one multiple of 64 is.
    """
    if end - start <= budget:
        return end
    return max(start, (start + budget) // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT)


def urgency(remaining: int, waited_s: float) -> float:
    """Sort key, lowest first: shortest remaining work, with ageing."""
    return remaining - AGEING_TOKENS_PER_SECOND * waited_s


def blocks_for(tokens: int, block_size: int) -> int:
    """How many blocks hold this many tokens."""
    return -(-tokens // block_size)
