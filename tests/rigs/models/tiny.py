"""Tiny random models of several families, for numerics: fast, and sensitive to every wrong block.

With an initializer range of 0.2 instead of the default, overwriting one block of KV changes the
greedy text nearly always. The weights depend on nothing but the family and the seed. Torch and
transformers, which take seconds to import, are imported by whoever makes one.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
VOCAB_SIZE = 49152
"""That of SmolLM2's tokenizer."""

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def tiny_config(family: str, **overrides: Any) -> Any:
    """The transformers configuration of a tiny `family`, with `overrides` of its fields."""
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    sizes: dict[str, Any] = {**_SIZES, **overrides}
    if family == "llama":
        return LlamaConfig(**sizes)
    if family == "qwen2":
        return Qwen2Config(**sizes)
    if family == "qwen3":
        return Qwen3Config(**{"head_dim": 16, **sizes})
    return MistralConfig(**{"sliding_window": None, **sizes})


def write_tiny_model(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    tokenizer_from: Path | None = None,
    **overrides: Any,
) -> None:
    """Writes config, weights and generation config, and copies the tokenizer of another folder."""
    import torch
    from transformers.models.auto import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = tiny_config(family, **overrides)
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES if tokenizer_from else ():
        shutil.copy(Path(str(tokenizer_from)) / name, folder / name)
