"""Models that the paged cache cannot serve are refused by name, with the reason."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvferry.kernels.errors import ModelError
from kvferry.kernels.load import load_engine
from kvferry.kernels.model import load_model
from kvferry.kernels.model_config import ModelFacts, read_facts, resolve_device
from kvferry.tests.rigs.models.native import OPTIONS
from kvferry.tests.rigs.models.tiny import tiny_config, write_tiny_model

CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
}


def facts_of(folder: Path, config: Any, **overrides: Any) -> ModelFacts:
    config.save_pretrained(folder)
    arguments: dict[str, Any] = {"dtype": "auto", "device": CPU, "max_model_len": None}
    return read_facts(folder, **{**arguments, **overrides})


def write_model(folder: Path, config: Any) -> None:
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # type: ignore[no-untyped-call]


def other(name: str, **overrides: Any) -> Any:
    return getattr(transformers, name)(**{**SMALL, **overrides})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (other("FalconConfig"), "does not support attention backends"),
        (other("BloomConfig"), "does not support attention backends"),
        (transformers.T5Config(vocab_size=64), "not a causal language model"),
        (other("Gemma2Config", head_dim=8), "soft-capped|sliding window"),
        (other("GptOssConfig", head_dim=8, sliding_window=64), "sliding window 64 is shorter"),
        (other("MistralConfig", sliding_window=100), "sliding window 100 is shorter than 128"),
        (
            other(
                "LlamaConfig",
                rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            ),
            "rope type dynamic",
        ),
        (
            other(
                "Phi3Config",
                pad_token_id=0,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 4,
                    "long_factor": [2.0] * 4,
                    "original_max_position_embeddings": 64,
                },
            ),
            "rope type longrope",
        ),
        (other("Lfm2Config", layer_types=["conv", "full_attention"]), "layers of type conv"),
        (other("DeepseekV3Config"), "latent attention"),
        (
            other("LlamaConfig", quantization_config={"quant_method": "awq", "bits": 4}),
            "quantised",
        ),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_config_is_refused_by_name(tmp_path: Path, config: Any, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as refusal:
        facts_of(tmp_path, config)
    assert config.model_type in str(refusal.value)


def test_attention_that_is_not_causal_is_found_in_a_pass(tmp_path: Path) -> None:
    config = other("BertConfig")
    write_model(tmp_path, config)
    with pytest.raises(ModelError, match=r"bert.*not causal"):
        load_model(facts_of(tmp_path, config), CPU)


def test_sinks_are_found_in_a_pass(tmp_path: Path) -> None:
    config = other(
        "GptOssConfig", head_dim=8, sliding_window=128, num_local_experts=2, num_experts_per_tok=1
    )
    write_model(tmp_path, config)
    with pytest.raises(ModelError, match=r"gpt_oss.*sinks"):
        load_model(facts_of(tmp_path, config), CPU)


def test_a_window_that_holds_the_whole_context_is_served(tmp_path: Path) -> None:
    config = other("MistralConfig", sliding_window=100, num_key_value_heads=2)
    write_model(tmp_path, config)
    assert load_model(facts_of(tmp_path, config, max_model_len=100), CPU)
    with pytest.raises(ModelError, match="shorter than 101"):
        facts_of(tmp_path, config, max_model_len=101)


def test_facts_are_read_without_weights(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, tiny_config("qwen3", rope_parameters=YARN), max_model_len=100)
    assert (facts.num_layers, facts.heads, facts.kv_heads, facts.head_dim) == (2, 4, 2, 16)
    assert facts.block_bytes(16) == 2 * 2 * 16 * 2 * 16 * 4
    assert facts.max_model_len == 100
    assert json.loads(facts.rope)["rope_type"] == "yarn"


@pytest.mark.parametrize(
    ("dtype", "stored", "device", "expected"),
    [
        ("auto", torch.bfloat16, "cpu", torch.float32),
        ("auto", torch.bfloat16, "cuda", torch.bfloat16),
        ("auto", torch.float16, "cuda", torch.float16),
        ("auto", None, "cuda", torch.float32),
        ("float16", torch.bfloat16, "cpu", torch.float16),
    ],
)
def test_dtype(
    tmp_path: Path, dtype: str, stored: torch.dtype | None, device: str, expected: torch.dtype
) -> None:
    config = tiny_config("llama", dtype=stored)
    facts = facts_of(tmp_path, config, dtype=dtype, device=torch.device(device))
    assert facts.dtype == expected


def test_an_unknown_dtype_or_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"int3.*bfloat16"):
        facts_of(tmp_path, tiny_config("llama"), dtype="int3")
    for device in ("warp", "meta0"):
        with pytest.raises(ModelError, match=device):
            resolve_device(device)
    assert resolve_device("auto").type in ("cpu", "cuda")


@pytest.mark.parametrize("content", [None, "", "{}", '{"model_type": "no-such"}', "[1]", "{"])
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_engine(tmp_path, OPTIONS, cache_dir=tmp_path, digest="d")


def test_missing_or_misshapen_weights_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, vocab_size=64)
    facts = read_facts(tmp_path, dtype="auto", device=CPU, max_model_len=None)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.self_attn.k_proj.weight"
    whole = weights.pop(name)
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ModelError, match=name):
        load_model(facts, CPU)
    save_file({**weights, name: whole[:-1].clone()}, path, {"format": "pt"})
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(facts, CPU)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_model(facts, CPU)
    path.unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(facts, CPU)


def test_loading_is_quiet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_tiny_model(tmp_path, vocab_size=64)
    capfd.readouterr()
    load_model(read_facts(tmp_path, dtype="auto", device=CPU, max_model_len=None), CPU)
    assert capfd.readouterr() == ("", "")


def test_a_budget_below_one_request_is_refused_with_both_numbers(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, vocab_size=64)
    with pytest.raises(ModelError, match=r"4096\.0KiB.*2048\.0KiB"):
        load_engine(tmp_path, replace(OPTIONS, kv_bytes=2 << 20), cache_dir=tmp_path, digest="d")
