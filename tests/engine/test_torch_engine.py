"""The torch engine against transformers itself: any chunking, any mix, any placement of blocks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.kernels.engine import Batch, Span
from kvferry.kernels.engines.torch import TorchEngine, load_torch_engine
from kvferry.kernels.errors import ModelError
from kvferry.tests.rigs.models.oracle import agree, greedy, load_oracle, logits_at
from kvferry.tests.rigs.models.sequences import CHUNK, B, Sequences, prompt, serve
from kvferry.tests.rigs.models.tiny import FAMILIES, VOCAB_SIZE, write_tiny_model

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 1041)


def load(folder: Path, **overrides: Any) -> TorchEngine:
    arguments: dict[str, Any] = {
        "dtype": "auto",
        "device": "cpu",
        "block_size": B,
        "num_blocks": 300,
        "max_model_len": None,
    }
    return load_torch_engine(folder, **{**arguments, **overrides})


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    write_tiny_model(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def engine(llama: Path) -> TorchEngine:
    return load(llama)


@pytest.fixture
def sequences(engine: TorchEngine) -> Iterator[Sequences]:
    yield Sequences(engine)


def test_every_length_equals_the_oracle(family: Path) -> None:
    ids = prompt(max(LENGTHS))
    expected = logits_at(load_oracle(family), ids, LENGTHS)
    engine = load(family)
    for row, length in enumerate(LENGTHS):
        sequences = Sequences(engine, seed=length)
        got = sequences.prefill(ids[:length], sequences.blocks(length), [CHUNK] * 3)
        np.testing.assert_allclose(got[0], expected[row], atol=1e-4, rtol=1e-4)


def test_every_chunking_equals_the_oracle(family: Path) -> None:
    ids = prompt(700)
    expected = logits_at(load_oracle(family), ids, [700])[0]
    engine = load(family)
    for chunks in (
        [700],
        [1, 699],
        [699, 1],
        [512, 188],
        [16] * 44,
        [64, 128, 508],
        [17, 33, 650],
        [600, 99, 1],
        [512, 128, 60],
    ):
        sequences = Sequences(engine, seed=len(chunks))
        got = sequences.prefill(ids, sequences.blocks(700), chunks)
        np.testing.assert_allclose(got[0], expected, atol=1e-4, rtol=1e-4)


def test_greedy_text_in_packed_mixes_equals_the_oracle(family: Path) -> None:
    """Prompts arrive one a step, in chunks, while those before them decode in the same pass."""
    oracle = load_oracle(family)
    engine = load(family)
    sequences = Sequences(engine)
    lengths = (1, 2, 15, 16, 17, 33, 100, 300)
    prompts = [prompt(length, seed=length) for length in lengths]
    n = 20
    texts = serve(sequences, prompts, n, chunk=48)
    for ids, text in zip(prompts, texts, strict=True):
        expected = greedy(oracle, ids, n)
        verdict = agree(expected.tokens, expected.margins, text)
        assert verdict.equal, (len(ids), verdict)


def test_kv_of_two_chunkings_is_the_same(sequences: Sequences) -> None:
    ids = prompt(640)
    tables = [sequences.blocks(640), sequences.blocks(640)]
    sequences.prefill(ids, tables[0], [640])
    sequences.prefill(ids, tables[1], [16, 48, 512, 64])
    for one, other in zip(*tables, strict=True):
        values = [np.frombuffer(sequences.engine.read(b), np.float32) for b in (one, other)]
        np.testing.assert_allclose(values[0], values[1], atol=1e-4)


def test_a_block_carries_its_kv_to_another_engine(llama: Path, sequences: Sequences) -> None:
    ids = prompt(100)
    blocks = sequences.blocks(140)
    expected = sequences.decode(sequences.prefill(ids, blocks, [100]), 100, blocks, 20)

    other = Sequences(load(llama), seed=9)
    table = other.blocks(140)
    for source, target in zip(blocks[:6], table[:6], strict=True):
        other.engine.write(target, bytes(sequences.engine.read(source)))
    logits = other.step(Span(ids[96:], 96, table, True))
    assert other.decode(logits, 100, table, 20) == expected


@pytest.mark.slow
def test_overwriting_one_block_changes_nearly_every_text(sequences: Sequences) -> None:
    changed = 0
    rounds = 40
    for seed in range(rounds):
        ids = prompt(64, seed=seed)
        blocks = sequences.blocks(96)
        logits = sequences.prefill(ids, blocks, [64])
        expected = sequences.decode(logits, 64, blocks, 16)
        sequences.engine.copy(blocks[2], blocks[1])
        changed += sequences.decode(logits, 64, blocks, 16) != expected
        sequences.free += blocks
    assert changed >= 0.95 * rounds


def test_what_a_block_held_before_never_shows(sequences: Sequences) -> None:
    engine = sequences.engine
    ids = prompt(37)
    blocks = sequences.blocks(60)
    expected = sequences.decode(sequences.prefill(ids, blocks, [37]), 37, blocks, 20)
    nan = np.full(engine.spec.block_bytes // 4, np.nan, np.float32).tobytes()
    for block in blocks:
        engine.write(block, nan)
    text = sequences.decode(sequences.prefill(ids, blocks, [20, 17]), 37, blocks, 20)
    assert text == expected


def test_a_pass_without_wanted_rows_returns_none(sequences: Sequences) -> None:
    logits = sequences.step(Span(prompt(20), 0, sequences.blocks(20), False))
    assert logits.shape == (0, VOCAB_SIZE)
    assert sequences.calls == sequences.engine.spec.num_layers


def test_what_between_layers_raises_ends_the_pass_only(engine: TorchEngine) -> None:
    class Abort(Exception):
        pass

    calls = 0

    def abort() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Abort

    sequences = Sequences(engine)
    ids, blocks = prompt(40), sequences.blocks(60)
    expected = sequences.decode(sequences.prefill(ids, blocks, [40]), 40, blocks, 8)
    with pytest.raises(Abort):
        engine.forward(Batch((Span(ids, 0, blocks, True),)), abort)
    assert sequences.decode(sequences.prefill(ids, blocks, [40]), 40, blocks, 8) == expected


def test_a_wrong_batch_is_refused(engine: TorchEngine) -> None:
    for span, reason in (
        (Span([], 0, [1], True), "needs tokens"),
        (Span([VOCAB_SIZE], 0, [1], True), "vocabulary"),
        (Span([1] * 17, 0, [1], True), "cannot hold"),
        (Span([1], 0, [300], True), "outside the pool"),
        (Span([1], 8192, [1] * 513, True), "max_model_len"),
    ):
        with pytest.raises(ValueError, match=reason):
            engine.forward(Batch((span,)), lambda: None)


def test_blocks_are_read_written_and_copied_whole(sequences: Sequences) -> None:
    engine = sequences.engine
    one, two = sequences.blocks(2 * B)
    payload = random.Random(0).randbytes(engine.spec.block_bytes)
    engine.write(one, payload)
    engine.copy(one, two)
    assert bytes(engine.read(two)) == payload
    for wrong in (payload[:-1], payload + b"\0", b""):
        with pytest.raises(ValueError, match="bytes"):
            engine.write(one, wrong)
    with pytest.raises(ValueError, match="outside"):
        engine.read(-1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_agrees_with_itself(llama: Path, dtype: str, engine: TorchEngine) -> None:
    half = load(llama, dtype=dtype)
    assert half.spec.block_bytes * 2 == engine.spec.block_bytes
    ids = prompt(200)
    texts = [Sequences(half, seed=seed).greedy(ids, 16) for seed in (1, 2)]
    assert texts[0] == texts[1]
    logits = []
    for chunks in ([200], [16, 100, 84]):
        sequences = Sequences(half)
        logits.append(sequences.prefill(ids, sequences.blocks(200), chunks)[0])
    exact = Sequences(engine)
    expected = exact.prefill(ids, exact.blocks(200), [200])[0]
    scale = np.abs(expected).max()
    np.testing.assert_allclose(logits[0], logits[1], atol=0.05 * scale)
    np.testing.assert_allclose(logits[0], expected, atol=0.05 * scale)


def test_the_identity_names_what_changes_a_block(llama: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    base = load(llama).spec
    assert load(llama, num_blocks=7).spec.identity == base.identity
    for other, field in (
        (load(llama, dtype="float16"), "kv_dtype"),
        (load(llama, block_size=32), "block_shape"),
        (load(tmp_path), "rope"),
    ):
        assert other.spec.identity[field] != base.identity[field]


def test_a_pass_says_how_far_its_blocks_reach(llama: Path) -> None:
    engine = load(llama)
    assert engine._pool._host is not None
    prefault = engine._pool._host._prefault
    assert prefault is not None and prefault.mapped == 0
    table = [2, 9, 5, 60]
    engine.forward(Batch((Span([3] * 20, 16, table, wants_logits=False),)), lambda: None)
    assert prefault.mapped == 10 * engine.spec.block_bytes, "block 60 is not written yet"
    prefault._populate = lambda *call: 0  # type: ignore[assignment]
    assert engine.prepare() and prefault.mapped > 10 * engine.spec.block_bytes


def test_room_for_the_longest_sequence_is_made_ahead(llama: Path) -> None:
    engine = load(llama, num_blocks=64, max_model_len=100)
    assert engine._pool._host is not None
    prefault = engine._pool._host._prefault
    assert prefault is not None and not prefault.mapped
    while engine.prepare():
        pass
    assert prefault.mapped == 7 * engine.spec.block_bytes


def test_an_unused_pool_costs_no_memory(llama: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    engine = load(llama, num_blocks=1 << 18)
    assert engine.spec.num_blocks * engine.spec.block_bytes == 2 << 30
    assert resident() - before < 300 << 20


def test_a_context_beyond_the_models_is_refused_with_both_numbers(llama: Path) -> None:
    with pytest.raises(ModelError, match=r"9000.*8192"):
        load(llama, max_model_len=9000)
    assert load(llama, max_model_len=100).spec.max_model_len == 100
