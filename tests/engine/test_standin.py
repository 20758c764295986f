"""The stand-in engine: exact, quick, and sensitive to every byte of KV that it reads."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvferry.kernels.engine import Batch, Span
from kvferry.kernels.engines.standin import (
    StandinConfig,
    StandinEngine,
    load_standin_engine,
    read_standin_config,
    standin_logits,
    standin_reply,
    write_standin_model,
)
from kvferry.kernels.errors import ModelError
from kvferry.kernels.load import load_engine
from kvferry.tests.rigs.models.native import OPTIONS

B = 16


def engine_of(**overrides: Any) -> StandinEngine:
    return StandinEngine(StandinConfig(**overrides), block_size=B, num_blocks=80)


def prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(259) for _ in range(length)]


def run(engine: StandinEngine, *spans: Span) -> Any:
    return engine.forward(Batch(spans), lambda: None)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_any_chunking_over_any_blocks_gives_the_definition(data: st.DataObject) -> None:
    ids = prompt(data.draw(st.integers(1, 200)))
    blocks = data.draw(st.permutations(range(80)))
    engine = engine_of()
    start = 0
    while start < len(ids):
        tokens = ids[start : start + data.draw(st.integers(1, 64))]
        rows = run(engine, Span(tokens, start, blocks, True))
        start += len(tokens)
        np.testing.assert_array_equal(rows[0], standin_logits(ids[:start], StandinConfig()))


def test_sequences_in_one_pass_do_not_mix() -> None:
    engine = engine_of()
    prompts = [prompt(n, seed=n) for n in (1, 16, 17, 40)]
    spans = [Span(ids, 0, range(i * 10, i * 10 + 10), i != 1) for i, ids in enumerate(prompts)]
    rows = run(engine, *spans)
    expected = [standin_logits(ids, StandinConfig()) for i, ids in enumerate(prompts) if i != 1]
    np.testing.assert_array_equal(rows, expected)
    assert rows.dtype == np.float32 and rows.shape == (3, 259)


def test_the_reply_is_what_the_engine_decodes() -> None:
    engine = engine_of(salt="x", vocab_size=1000)
    ids, blocks = prompt(30), range(10)
    text: list[int] = []
    rows = run(engine, Span(ids, 0, blocks, True))
    for position in range(30, 50):
        text.append(int(rows[0].argmax()))
        rows = run(engine, Span(text[-1:], position, blocks, True))
    assert text == standin_reply(ids, StandinConfig(salt="x", vocab_size=1000), 20)


def test_every_byte_read_changes_the_logits() -> None:
    engine = engine_of()
    ids, blocks = prompt(40), (7, 3, 5)
    expected = run(engine, Span(ids, 0, blocks, True))[0]
    used = 40 * engine.spec.block_bytes // B
    for place in range(0, 3 * engine.spec.block_bytes, 13):
        block, offset = divmod(place, engine.spec.block_bytes)
        whole = bytearray(engine.read(blocks[block]))
        whole[offset] ^= 1
        engine.write(blocks[block], bytes(whole))
        # The last token is written again, so its own bytes are right again.
        rows = run(engine, Span(ids[39:], 39, blocks, True))
        harmless = place >= used - engine.spec.block_bytes // B
        assert (rows[0] == expected).all() == harmless
        assert harmless or np.mean(rows[0] == expected) < 0.01
        whole[offset] ^= 1
        engine.write(blocks[block], bytes(whole))


def test_blocks_out_of_order_change_the_logits() -> None:
    engine = engine_of()
    ids = prompt(48)
    expected = run(engine, Span(ids, 0, (1, 2, 3), True))[0]
    rows = run(engine, Span(ids[47:], 47, (2, 1, 3), True))
    assert (rows[0] != expected).any()


def test_a_salt_is_another_model() -> None:
    engines = [engine_of(salt=salt) for salt in ("", "w2")]
    rows = [run(engine, Span(prompt(20), 0, (0, 1), True)) for engine in engines]
    assert (rows[0] != rows[1]).any()
    assert bytes(engines[0].read(0)) != bytes(engines[1].read(0))


def test_blocks_move_whole() -> None:
    engine = engine_of()
    ids = prompt(32)
    expected = run(engine, Span(ids, 0, (0, 1), True))[0].copy()
    engine.copy(0, 5)
    engine.write(6, engine.read(1))
    assert (run(engine, Span(ids[31:], 31, (5, 6), True))[0] == expected).all()
    assert len(engine.read(0)) == engine.spec.block_bytes
    with pytest.raises(ValueError, match="bytes"):
        engine.write(0, b"short")


def test_a_broken_pass_leaves_nothing_to_rely_on() -> None:
    engine = engine_of()

    def abort() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        engine.forward(Batch((Span(prompt(16), 0, (0,), True),)), abort)
    assert not any(engine.read(0))


def test_between_layers_is_called_once_a_layer_in_the_time_asked() -> None:
    engine = engine_of(num_hidden_layers=3, seconds_per_pass=0.03, seconds_per_token=0.003)
    stamps = [time.monotonic()]
    spans = (Span(prompt(10), 0, (0,), False),)
    rows = engine.forward(Batch(spans), lambda: stamps.append(time.monotonic()))
    assert rows.shape == (0, 259)
    assert len(stamps) == 4
    assert all(later - earlier >= 0.02 for earlier, later in pairwise(stamps))


def test_a_wrong_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        run(engine_of(), Span(prompt(17), 0, (0,), True))
    with pytest.raises(ValueError, match="at least one span"):
        run(engine_of())


def test_a_folder_selects_it(tmp_path: Path) -> None:
    config = write_standin_model(tmp_path, salt="s", max_position_embeddings=1000)
    assert read_standin_config(tmp_path) == config
    engine = load_engine(tmp_path, OPTIONS, cache_dir=tmp_path, digest="d")
    assert isinstance(engine, StandinEngine)
    assert engine.spec.max_model_len == 1000
    with pytest.raises(ModelError, match=r"1001.*1000"):
        load_standin_engine(tmp_path, block_size=B, num_blocks=1, max_model_len=1001)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0),
        ("vocab_size", 258),
        ("kv_bytes_per_token", 12),
        ("seconds_per_token", -1.0),
        ("num_hidden_layers", 0),
    ],
)
def test_a_bad_field_is_named(tmp_path: Path, field: str, value: float) -> None:
    with pytest.raises(ModelError, match=field.split("_")[0]):
        write_standin_model(tmp_path, **{field: value})


@given(st.text(st.characters(exclude_categories=["Cs"])))
@settings(max_examples=200, deadline=None)
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("standin")
    write_standin_model(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_a_byte_is_a_token_and_specials_are_whole(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 259
    assert tokenizer.encode("aé").ids == [3 + byte for byte in "aé".encode()]
    assert tokenizer.encode("<|im_start|>x<|im_end|><|endoftext|>").ids == [1, 3 + 120, 2, 0]
    assert [tokenizer.decode([3 + byte]) for byte in b" ~\n"] == [" ", "~", "\n"]


def test_the_folder_is_a_model_folder(tmp_path: Path) -> None:
    write_standin_model(tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    write_standin_model(tmp_path, salt="other")
    assert (tmp_path / "model.safetensors").read_bytes() != weights
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 2
    from transformers import AutoTokenizer

    chat = [{"role": "user", "content": "hi"}]
    text = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_it_never_imports_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from kvferry.kernels.load import LoadOptions, load_engine;"
        "from kvferry.kernels.engines.standin import write_standin_model;"
        "folder = Path(sys.argv[1]);"
        "write_standin_model(folder);"
        "options = LoadOptions('auto', 'auto', 'auto', 'auto', 16, 1 << 20, None, None);"
        "load_engine(folder, options, cache_dir=folder, digest='d');"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code, tmp_path], check=True, timeout=30)
