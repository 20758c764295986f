"""The native engine: against transformers in float32, and the same bits however it is asked."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.kernels.engine import Batch, Span
from kvferry.kernels.engines.native import Borrowing, NativeEngine, NativeModel, NativeOptions
from kvferry.kernels.errors import ModelError
from kvferry.kvstore.process.busy import BusyBoard, make_board
from kvferry.tests.rigs.gateway.rig import wait_until
from kvferry.tests.rigs.models.native import compiled_into, isas
from kvferry.tests.rigs.models.oracle import agree, greedy, load_oracle, logits_at
from kvferry.tests.rigs.models.sequences import CHUNK, B, Sequences, prompt, serve
from kvferry.tests.rigs.models.tiny import FAMILIES, VOCAB_SIZE, write_tiny_model

SIZES: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 200}
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 1041, 2100)
WEIGHTS = ("float32", "bfloat16", "int8")
CHUNKINGS = ([700], [1, 699], [699, 1], [512, 188], [16] * 44, [17, 33, 650], [64] * 11)


def write(folder: Path, family: str, **overrides: Any) -> Path:
    write_tiny_model(folder, family, **{**SIZES, **overrides})
    return folder


def load(
    folder: Path,
    weights: str = "float32",
    *,
    kv_dtype: str = "float32",
    threads: int = 2,
    isa: str | None = None,
    borrowing: Borrowing | None = None,
) -> NativeEngine:
    cache = folder / "cache"
    compiled_into(cache)
    options = NativeOptions(weights, kv_dtype, B, threads, isa, borrowing)
    model = NativeModel(folder, options, max_model_len=None, cache_dir=cache, digest="d" * 32)
    return NativeEngine(model, 300)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"), "llama", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def engine(llama: Path) -> NativeEngine:
    return load(llama)


@pytest.fixture
def sequences(engine: NativeEngine) -> Iterator[Sequences]:
    yield Sequences(engine)


# -- against the oracle ----------------------------------------------------------------------------


def test_every_length_equals_the_oracle(family: Path) -> None:
    ids = prompt(max(LENGTHS))
    expected = logits_at(load_oracle(family), ids, LENGTHS)
    engine = load(family)
    for row, length in enumerate(LENGTHS):
        sequences = Sequences(engine, seed=length)
        got = sequences.prefill(ids[:length], sequences.blocks(length), [CHUNK] * 5)
        np.testing.assert_allclose(got[0], expected[row], atol=1e-4, rtol=1e-4)


def test_greedy_text_in_packed_mixes_equals_the_oracle(family: Path) -> None:
    oracle = load_oracle(family)
    sequences = Sequences(load(family))
    prompts = [prompt(length, seed=length) for length in (1, 2, 15, 16, 17, 33, 100, 300)]
    texts = serve(sequences, prompts, 20, chunk=48)
    for ids, text in zip(prompts, texts, strict=True):
        expected = greedy(oracle, ids, 20)
        verdict = agree(expected.tokens, expected.margins, text)
        assert verdict.equal, (len(ids), verdict)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
        {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True},
        {"vocab_size": 49_151, "intermediate_size": 64, "hidden_size": 64},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
                             "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 256}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                             "original_max_position_embeddings": 256}},
    ],
    ids=["wide", "tied", "odd", "llama3", "yarn"],
)  # fmt: skip
def test_other_shapes_equal_the_oracle(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path, "llama", **changes)
    ids = [id % 49_000 for id in prompt(600)]
    expected = logits_at(load_oracle(folder), ids, [600])
    sequences = Sequences(load(folder))
    got = sequences.prefill(ids, sequences.blocks(600), [100] * 6)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("weights", "within"), [("bfloat16", 0.06), ("int8", 0.2)])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
def test_what_rounds_is_near_the_oracle(
    llama: Path, weights: str, within: float, kv_dtype: str
) -> None:
    ids = prompt(300)
    expected = logits_at(load_oracle(llama), ids, [300])[0]
    sequences = Sequences(load(llama, weights, kv_dtype=kv_dtype))
    got = sequences.prefill(ids, sequences.blocks(300), [300])[0]
    error = np.sqrt(((got - expected) ** 2).mean() / expected.var())
    assert error < within, error


# -- the same bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_chunks_threads_and_instructions_change_no_bit(
    llama: Path, weights: str, kv_dtype: str
) -> None:
    ids = prompt(700)
    seen = set()
    for isa in isas():
        for threads in (1, 2, 3) if isa == isas()[-1] else (2,):
            engine = load(llama, weights, kv_dtype=kv_dtype, threads=threads, isa=isa)
            for chunks in CHUNKINGS if isa != "portable" else CHUNKINGS[-1:]:
                sequences = Sequences(engine, seed=len(chunks))
                blocks = sequences.blocks(700)
                logits = sequences.prefill(ids, blocks, chunks)
                kept = b"".join(bytes(engine.read(block)) for block in blocks[:43])
                seen.add((logits.tobytes(), kept))
            engine.close()
    assert len(seen) == 1


@pytest.mark.parametrize("weights", WEIGHTS)
def test_neighbours_in_a_batch_change_no_bit(llama: Path, weights: str) -> None:
    dice = random.Random(weights)
    engines = [load(llama, weights, threads=threads) for threads in (1, 2)]
    prompts = [prompt(dice.choice([1, 7, 64, 65, 300, 1100]), seed=n) for n in range(8)]
    alone = []
    for ids in prompts:
        sequences = Sequences(engines[0])
        blocks = sequences.blocks(len(ids))
        alone.append(sequences.prefill(ids, blocks, [CHUNK] * 3)[0].tobytes())
    for round in range(6):
        sequences = Sequences(engines[round % 2], seed=round)
        tables = [sequences.blocks(len(ids)) for ids in prompts]
        done = [0] * len(prompts)
        found: list[bytes] = [b""] * len(prompts)
        while any(at < len(ids) for at, ids in zip(done, prompts, strict=True)):
            open_ = [i for i in range(len(prompts)) if done[i] < len(prompts[i])]
            chosen = dice.sample(open_, dice.randint(1, len(open_)))
            spans = []
            for i in chosen:
                tokens = prompts[i][done[i] :][: dice.choice([1, 3, 50, 200, 1100])]
                end = done[i] + len(tokens)
                spans.append(Span(tokens, done[i], tables[i], end == len(prompts[i])))
                done[i] = end
            logits = iter(sequences.step(*spans))
            for i, span in zip(chosen, spans, strict=True):
                if span.wants_logits:
                    found[i] = next(logits).tobytes()
        assert found == alone, round


def test_long_contexts_are_split_over_threads_and_change_no_bit(llama: Path) -> None:
    ids = prompt(3300)
    seen = set()
    for threads in (1, 2, 4):
        engine = load(llama, "int8", threads=threads)
        sequences = Sequences(engine)
        blocks = sequences.blocks(3310)
        logits = [sequences.prefill(ids, blocks, [CHUNK] * 7)]
        for position in range(3300, 3305):
            logits.append(sequences.step(Span([position], position, blocks, True)))
        seen.add(b"".join(row.tobytes() for row in logits))
        engine.close()
    assert len(seen) == 1


# -- the seam --------------------------------------------------------------------------------------


def test_only_wanted_rows_have_logits(sequences: Sequences) -> None:
    tables = [sequences.blocks(20) for _ in range(3)]
    spans = [Span([5, 6, 7], 0, table, n != 1) for n, table in enumerate(tables)]
    assert sequences.step(*spans).shape == (2, VOCAB_SIZE)
    assert sequences.step(Span([8], 3, tables[1], False)).shape == (0, VOCAB_SIZE)


def test_between_layers_is_called_for_each_and_may_end_the_pass(
    engine: NativeEngine, sequences: Sequences
) -> None:
    ids, blocks = prompt(70), sequences.blocks(80)
    expected = sequences.prefill(ids, blocks, [70])
    assert sequences.calls == engine.spec.num_layers

    def fails() -> None:
        raise KeyboardInterrupt("now")

    with pytest.raises(KeyboardInterrupt, match="now"):
        engine.forward(Batch((Span(ids, 0, blocks, True),)), fails)
    again = sequences.prefill(ids, blocks, [70])
    assert again.tobytes() == expected.tobytes()


def test_a_block_carries_its_kv_to_another_engine(llama: Path, sequences: Sequences) -> None:
    ids = prompt(100)
    blocks = sequences.blocks(140)
    expected = sequences.decode(sequences.prefill(ids, blocks, [100]), 100, blocks, 20)
    other = Sequences(load(llama, threads=1), seed=9)
    table = other.blocks(140)
    for source, target in zip(blocks[:6], table[:6], strict=True):
        other.engine.write(target, bytes(sequences.engine.read(source)))
    logits = other.step(Span(ids[96:], 96, table, True))
    assert other.decode(logits, 100, table, 20) == expected
    other.engine.copy(table[0], table[8])
    assert bytes(other.engine.read(table[8])) == bytes(other.engine.read(table[0]))


def test_who_differs_in_what_blocks_hold_differs_in_identity(llama: Path) -> None:
    engines = [
        load(llama, weights, kv_dtype=kv_dtype)
        for weights in WEIGHTS
        for kv_dtype in ("float32", "bfloat16", "float16")
    ]
    assert len({str(engine.spec.identity) for engine in engines}) == len(engines)
    for isa in isas():
        for threads in (1, 2):
            same = load(llama, isa=isa, threads=threads)
            assert same.spec.identity == engines[0].spec.identity
    sizes = {engine.spec.block_bytes for engine in engines}
    assert sizes == {2 * 2 * 2 * 32 * B * width for width in (2, 4)}


def test_a_forced_instruction_set_that_is_not_there_is_refused(llama: Path) -> None:
    with pytest.raises(ModelError, match="does not run avx9"):
        load(llama, isa="avx9")


def test_neither_torch_nor_transformers_is_imported(llama: Path) -> None:
    load(llama)
    code = f"""
import sys
from pathlib import Path
from kvferry.kernels.engines.native import NativeEngine, NativeModel, NativeOptions
from kvferry.kernels.engine import Batch, Span
folder = Path({str(llama)!r})
options = NativeOptions("float32", "float32", 16, 1)
model = NativeModel(
    folder, options, max_model_len=None, cache_dir=folder / "cache", digest="d" * 32
)
engine = NativeEngine(model, 10)
assert engine.forward(Batch((Span([1], 0, [0], True),)), lambda: None).shape == (1, {VOCAB_SIZE})
assert not {{"torch", "transformers"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# -- borrowed cores --------------------------------------------------------------------------------


def on_cpu_ns(tid: int) -> int:
    """How long a thread of this process has run."""
    return int(Path(f"/proc/self/task/{tid}/schedstat").read_text().split()[0])


def test_borrowed_cores_are_used_while_nobody_else_computes(llama: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    board = BusyBoard(make_board(3))
    at = Borrowing((cores[0],), (cores[-1],), board.memory, board.lines, line=1)
    before = {int(path.name) for path in Path("/proc/self/task").iterdir()}
    try:
        engine = load(llama, "int8", borrowing=at)
        (worker,) = {int(path.name) for path in Path("/proc/self/task").iterdir()} - before
        assert os.sched_getaffinity(0) == {cores[0]}
    finally:
        os.sched_setaffinity(0, cores)
    sequences, ids = Sequences(engine), prompt(400)
    blocks = sequences.blocks(400)
    wait_until(lambda: os.sched_getaffinity(worker) == {cores[-1]})

    def worked() -> tuple[bytes, int]:
        """The logits of a pass, and how long the borrowed thread has run in it."""
        time.sleep(0.01)  # it looks for work for a moment before it sleeps
        began = on_cpu_ns(worker)
        return sequences.prefill(ids, blocks, [400]).tobytes(), on_cpu_ns(worker) - began

    board.set(1, True)  # its own line does not count
    logits, alone = worked()
    assert alone > 100_000
    for other in (0, 2):
        board.set(other, True)
        again, beside = worked()
        assert again == logits and beside == 0
        board.set(other, False)
        again, alone = worked()
        assert again == logits and alone > 100_000
    engine.close()
