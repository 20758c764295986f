"""What is read of config.json, against what transformers makes of the same model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvferry.kernels.errors import ModelError, NotNative
from kvferry.kernels.native.architecture import read_architecture
from kvferry.tests.rigs.models.tiny import FAMILIES, tiny_config

SIZES = {"hidden_size": 128, "head_dim": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10_000.0},
    {"rope_type": "default", "rope_theta": 1_000_000.0},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0},
    {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 2048,
    },
    YARN | {"rope_theta": 1_000_000.0},
    YARN | {"rope_theta": 10_000.0, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5},
    YARN | {"rope_theta": 10_000.0, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
]  # fmt: skip


def folder_of(path: Path, config: Any, **changes: Any) -> Path:
    fields = json.loads(config.to_json_string(use_diff=False)) | changes
    kept = {name: value for name, value in fields.items() if value != "absent"}
    (path / "config.json").write_text(json.dumps(kept))
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes(family: str, tmp_path: Path) -> None:
    config = tiny_config(family, **SIZES)
    found = read_architecture(folder_of(tmp_path, config), None)
    assert (found.family, found.layers, found.hidden, found.heads) == (family, 2, 128, 4)
    assert (found.kv_heads, found.head_dim, found.intermediate) == (2, 32, 128)
    assert (found.vocab_size, found.max_model_len, found.tied) == (49152, 8192, False)
    assert (found.qkv_bias, found.qk_norm) == (family == "qwen2", family == "qwen3")
    assert found.epsilon == config.rms_norm_eps
    assert read_architecture(tmp_path, 100).max_model_len == 100
    with pytest.raises(ModelError, match="8193 exceeds the model's 8192"):
        read_architecture(tmp_path, 8193)


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("form", ["today's", "older"])
def test_rope(rope: dict[str, Any], form: str, tmp_path: Path) -> None:
    config = tiny_config("llama", **SIZES, rope_parameters=dict(rope))
    changes: dict[str, Any] = {}
    if form == "older":
        scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
        scaling["type"] = scaling.pop("rope_type")
        default = rope["rope_type"] == "default"
        changes = {"rope_parameters": "absent", "rope_theta": rope["rope_theta"]}
        changes |= {"rope_scaling": None if default else scaling}
    found = read_architecture(folder_of(tmp_path, config, **changes), None)
    if rope["rope_type"] == "default":
        plain = 1.0 / rope["rope_theta"] ** (np.arange(0, 32, 2) / 32)
        wanted, scale = plain, 1.0
    else:
        made, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, None)
        wanted = made.numpy()
    assert np.allclose(found.frequencies, wanted, rtol=3e-7, atol=0)
    assert found.rope_scale == pytest.approx(scale)
    assert found.frequencies.dtype == np.float32


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gpt2"}, "it is a gpt2"),
        ({"hidden_act": "gelu"}, "activation is gelu"),
        ({"attention_bias": True}, "output bias"),
        ({"mlp_bias": True}, "MLP has biases"),
        ({"quantization_config": {"bits": 4}}, "quantised in a form of its own"),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "rope type is longrope",
        ),
        ({"rope_parameters": {"full": {"rope_type": "default"}}}, "of several kinds"),
        ({"partial_rotary_factor": 0.5}, "a part of each head"),
        ({"head_dim": 24}, "head dimension 24 is no multiple of 32"),
        ({"hidden_size": 96}, "hidden size 96 is no multiple of 64"),
        ({"num_key_value_heads": 1}, "key size 32 is no multiple of 64"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "do not share"),
        ({"intermediate_size": "absent"}, "lacks or misstates 'intermediate_size'"),
        ({"max_position_embeddings": "absent"}, "no max_position_embeddings"),
    ],
    ids=str,
)
def test_what_is_left_to_torch(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, tiny_config("llama", **SIZES), **changes)
    with pytest.raises(NotNative, match=reason):
        read_architecture(folder, None)


def test_windows_that_are_shorter_than_the_longest_sequence(tmp_path: Path) -> None:
    mistral = tiny_config("mistral", **SIZES)
    for changes in ({"sliding_window": 1000}, {"sliding_window": "absent"}):
        folder_of(tmp_path, mistral, **changes)
        with pytest.raises(NotNative, match="sliding window"):
            read_architecture(tmp_path, None)
        assert read_architecture(tmp_path, 1000).max_model_len == 1000
    qwen = tiny_config("qwen2", **SIZES)
    unused = {"sliding_window": 1000, "use_sliding_window": False, "layer_types": "absent"}
    read_architecture(folder_of(tmp_path, qwen, **unused), None)
    with pytest.raises(NotNative, match="sliding window 1000"):
        read_architecture(folder_of(tmp_path, qwen, **unused | {"use_sliding_window": True}), None)


def test_a_config_that_is_none(tmp_path: Path) -> None:
    for text in ("", "[]", "{"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json"):
            read_architecture(tmp_path, None)
