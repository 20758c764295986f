"""What quantisation costs: perplexity and agreement with float32, of each form of weights and KV.

    python -m kvferry.bench.quality [--tokens 20000]

Real chats, cut into windows; every token but a window's first is guessed from all before it in the
window. Agreement is the share of tokens where the best guess is that of float32.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from kvferry.bench.client.prompts import load_chats
from kvferry.bench.document import table
from kvferry.kernels.engine import Batch, Engine, Span
from kvferry.kernels.load import LoadOptions, load_engine
from kvferry.kvstore.process.model_files import content_digest, resolve_model
from kvferry.kvstore.process.settings import default_cache_dir

WINDOW = 1024
ROWS = 64
"""Tokens of one pass: each wants logits, so each is a span of its own."""
FORMS = (
    ("none", "float32"),
    ("none", "float16"),
    ("none", "bfloat16"),
    ("int8", "float32"),
    ("int8", "float16"),
    ("gguf", "float32"),
    ("gguf", "float16"),
)
"""Weights and KV; the first is what the others are compared with."""


@dataclass(frozen=True, slots=True)
class Guesses:
    losses: NDArray[np.float64]
    """Negative logarithms of what the right token was given."""
    best: NDArray[np.int64]

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.losses.mean()))


def windows(folder: Path, tokens: int) -> list[list[int]]:
    """Windows of real chats, `tokens` in all, one after another."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = []
    for text in load_chats():
        ids += tokenizer.encode(text + "\n\n").ids
        if len(ids) >= tokens:
            break
    ids = ids[:tokens]
    return [ids[at : at + WINDOW] for at in range(0, len(ids), WINDOW)]


def guesses(engine: Engine, texts: list[list[int]]) -> Guesses:
    rows = [row for ids in texts for row in _rows(engine, ids)]
    return Guesses(np.array([loss for loss, _ in rows]), np.array([best for _, best in rows]))


def _rows(engine: Engine, ids: list[int]) -> Iterator[tuple[float, int]]:
    """Of each token but the last: what the next one costs, and which was expected."""
    blocks = list(range(-(-len(ids) // engine.spec.block_size)))
    for first in range(0, len(ids) - 1, ROWS):
        at = range(first, min(first + ROWS, len(ids) - 1))
        spans = tuple(Span([ids[i]], i, blocks, True) for i in at)
        for i, row in zip(at, engine.forward(Batch(spans), lambda: None), strict=True):
            wide = row.astype(np.float64)
            top = wide.max()
            yield (
                float(np.log(np.exp(wide - top).sum()) + top - wide[ids[i + 1]]),
                int(row.argmax()),
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="kvferry.bench.quality", description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("model", nargs="?", help="folder, GGUF file or hub id (default: SmolLM2)")
    asked = parser.parse_args()
    cache = default_cache_dir(os.environ)
    files = resolve_model(asked.model, cache, lambda text: None)
    texts = windows(files.folder, asked.tokens)
    rows = []
    exact: Guesses | None = None
    for weights, kv in FORMS:
        sys.stderr.write(f"{weights}, KV {kv} …\n")
        options = LoadOptions(
            dtype="auto",
            quantization=weights,
            kv_cache_dtype=kv,
            device="cpu",
            block_size=16,
            kv_bytes=1 << 30,
            max_model_len=4 * WINDOW,
            threads=None,
        )
        digest = content_digest(files.folder, cache)
        found = guesses(load_engine(files.folder, options, cache_dir=cache, digest=digest), texts)
        exact = exact or found
        same = float((found.best == exact.best).mean())
        change = found.perplexity / exact.perplexity - 1
        name = "float32" if weights == "none" else weights
        rows.append([name, kv, f"{found.perplexity:.4f}", f"{change:+.2%}", f"{same:.1%}"])
    print(f"{sum(map(len, texts)):,} tokens, windows of {WINDOW}\n")
    print(table(("weights", "KV", "perplexity", "against float32", "same best token"), rows))


if __name__ == "__main__":
    main()
