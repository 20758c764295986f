"""The default model, real weights: greedy texts as transformers writes them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from kvferry.kernels.engine import Batch, Engine, Span
from kvferry.kernels.engines.torch import load_torch_engine
from kvferry.kernels.load import load_engine
from kvferry.kvstore.process.settings import default_cache_dir
from kvferry.tests.rigs.models.native import OPTIONS
from kvferry.tests.rigs.models.oracle import Judge, load_oracle, logits_at

pytestmark = pytest.mark.slow

N = 16
QUESTIONS = (
    "What is the capital of France?",
    "List the first ten prime numbers and explain how you found them.",
    "Summarise in one sentence: " + "The quick brown fox jumps over the lazy dog. " * 25,
)


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> Any:
    return load_oracle(smollm2)


@pytest.fixture(scope="module", params=["torch", "native"])
def engine(request: pytest.FixtureRequest, smollm2: Path) -> Engine:
    if request.param == "torch":
        return load_torch_engine(
            smollm2, dtype="auto", device="cpu", block_size=16, num_blocks=200, max_model_len=None
        )
    options = replace(OPTIONS, dtype="float32", kv_bytes=1 << 30, threads=2)
    return load_engine(
        smollm2, options, cache_dir=default_cache_dir(os.environ), digest="smollm2 of tests"
    )


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    frame = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return [tokenizer.encode(frame.format(question)).ids for question in QUESTIONS]


def tables(prompts: list[list[int]]) -> list[list[int]]:
    """Blocks that interleave: the first of every prompt, then the second of every prompt."""
    longest = max(map(len, prompts)) + N
    return [
        [block * len(prompts) + i for block in range(-(-longest // 16))]
        for i in range(len(prompts))
    ]


def test_texts_decoded_together_equal_the_oracles(
    oracle: Any, engine: Engine, prompts: list[list[int]]
) -> None:
    blocks = tables(prompts)
    batch = Batch(tuple(Span(ids, 0, t, True) for ids, t in zip(prompts, blocks, strict=True)))
    rows = engine.forward(batch, lambda: None)
    texts = [[int(row.argmax())] for row in rows]
    for step in range(N - 1):
        spans = [
            Span(text[-1:], len(ids) + step, table, True)
            for text, ids, table in zip(texts, prompts, blocks, strict=True)
        ]
        rows = engine.forward(Batch(tuple(spans)), lambda: None)
        for text, row in zip(texts, rows, strict=True):
            text.append(int(row.argmax()))
    for ids, text in zip(prompts, texts, strict=True):
        verdict = Judge(oracle)(ids, text)
        assert verdict.equal, (len(ids), verdict)


def test_chunks_of_a_long_prompt_equal_one_pass(
    oracle: Any, engine: Engine, prompts: list[list[int]]
) -> None:
    ids = prompts[-1]
    table = tables(prompts)[0]
    expected = logits_at(oracle, ids, [len(ids)])[0]
    for first in (16, 128, 200):
        engine.forward(Batch((Span(ids[:first], 0, table, False),)), lambda: None)
        rows = engine.forward(Batch((Span(ids[first:], first, table, True),)), lambda: None)
        np.testing.assert_allclose(rows[0], expected, atol=1e-3)
