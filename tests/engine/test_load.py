"""Which engine serves a model, and what is said of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvferry.kernels.native.build as build
from kvferry.kernels.engine import Engine
from kvferry.kernels.engines.native import NativeEngine
from kvferry.kernels.engines.torch import TorchEngine
from kvferry.kernels.errors import ModelError
from kvferry.kernels.load import LoadOptions, load_engine
from kvferry.tests.rigs.models.native import OPTIONS, compiled_into
from kvferry.tests.rigs.models.tiny import write_tiny_model

KV = 64 << 20
ROOMY: LoadOptions = replace(OPTIONS, kv_bytes=KV)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, hidden_size=128, head_dim=32, vocab_size=256)
    return folder


def load(folder: Path, **changes: Any) -> Engine:
    cache = folder / "cache"
    compiled_into(cache)
    return load_engine(folder, replace(ROOMY, **changes), cache_dir=cache, digest="d")


@pytest.mark.parametrize(
    ("changes", "weights", "kv"),
    [
        ({}, "int8", "float16"),
        ({"quantization": "none"}, "float32", "float32"),
        ({"dtype": "float32"}, "float32", "float32"),
        ({"dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"dtype": "float16", "quantization": "int8"}, "int8", "float16"),
        ({"kv_cache_dtype": "float32"}, "int8", "float32"),
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, "float32", "bfloat16"),
    ],
    ids=str,
)
def test_weights_and_kv_of_the_native_engine(
    changes: dict[str, Any], weights: str, kv: str, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        engine = load(model, **changes)
    assert isinstance(engine, NativeEngine)
    identity = engine.spec.identity
    assert identity["weights_format"].partition(":")[0] == weights
    assert identity["kv_dtype"] == kv
    assert engine.spec.num_blocks == KV // engine.spec.block_bytes
    (line,) = [it.message for it in caplog.records if "native engine serves" in it.message]
    assert f"weights {weights}, KV {kv}" in line


def test_what_the_native_engine_does_not_serve_torch_does_and_says_why(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_model(tmp_path)
    for folder, changes, reason in (
        (tmp_path, {}, "head dimension 16"),
        (model, {"dtype": "float16"}, "float16"),
    ):
        caplog.clear()
        assert isinstance(load(folder, **changes), TorchEngine)
        (line,) = [it.message for it in caplog.records if it.levelno == logging.WARNING]
        assert "torch engine serves" in line and reason in line
    with pytest.raises(ModelError, match=r"--quantization int8 needs the native engine.*head dim"):
        load(tmp_path, quantization="int8")
    with pytest.raises(
        ModelError, match=r"keeps KV in the model's dtype float32, not in.*bfloat16"
    ):
        load(tmp_path, kv_cache_dtype="bfloat16")


def test_without_a_compiler_torch_serves_and_one_line_says_what_is_missing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(build, "ZIG", "no_such_module")
    engine = load_engine(model, ROOMY, cache_dir=tmp_path, digest="d")
    assert isinstance(engine, TorchEngine)
    (line,) = [it.message for it in caplog.records if it.levelno == logging.WARNING]
    assert "no C compiler" in line and "kvferry[compiler]" in line and "slower" in line


def test_a_compiler_that_fails_is_no_end_either(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'x.c: error: nothing works' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "COMPILERS", (str(compiler),))
    engine = load_engine(model, ROOMY, cache_dir=tmp_path / "cache", digest="d")
    assert isinstance(engine, TorchEngine)
    assert "nothing works" in caplog.text
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_gguf_file_is_taken_as_it_is(smollm2: Path, tmp_path: Path) -> None:
    compiled_into(tmp_path)
    engine = load_engine(smollm2, replace(ROOMY, kv_bytes=1 << 30), cache_dir=tmp_path, digest="d")
    assert isinstance(engine, NativeEngine)
    assert engine.spec.identity["weights_format"] == "gguf:q4_1,q8_0"
    assert engine.spec.block_bytes == 16 * 23_040
    assert not list(tmp_path.rglob("*.weights")), "they lie beside the model"


def test_gguf_is_refused_where_there_is_none(model: Path) -> None:
    with pytest.raises(ModelError, match="--quantization gguf needs a model from a GGUF file"):
        load(model, quantization="gguf")
