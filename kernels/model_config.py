"""What a model folder's config.json says, and every reason in it not to serve the model.

Reads no weights and builds no model, so a node can size its pool, or refuse, in the time that
reading a small file takes. It knows nothing of the pool's inner layout beyond its size.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from kvferry.kernels.errors import ModelError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_MOVING_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the pool, the attention and the identity of a block need to know of a model."""

    folder: Path
    config: Any
    """The transformers configuration of the text model."""
    model_class: Any
    dtype: torch.dtype
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rope: str
    """The rotary embedding's parameters as JSON with sorted keys."""

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def block_bytes(self, block_size: int) -> int:
        """Bytes of a block: keys and values of `block_size` tokens in all layers."""
        values = self.num_layers * 2 * block_size * self.kv_heads * self.head_dim
        return values * self.dtype.itemsize


def read_facts(
    folder: Path, *, dtype: str, device: torch.device, max_model_len: int | None
) -> ModelFacts:
    """Reads `folder`/config.json.

    `dtype` is "float32", "float16", "bfloat16" or "auto": float32 on a CPU, else the checkpoint's.
    ModelError names the model and the reason if it cannot be served exactly by paged attention, or
    if `max_model_len` exceeds its positions; None stands for all of them.
    """
    config = _read_config(folder)
    model_class = _model_class(folder, config)
    limit = _resolve_max_model_len(folder, config, max_model_len)
    for reason in _reasons_against(config, limit):
        raise ModelError(f"{folder}: {config.model_type} cannot be served: {reason}")
    heads = int(config.num_attention_heads)
    return ModelFacts(
        folder=folder,
        config=config,
        model_class=model_class,
        dtype=_resolve_dtype(config, dtype, device),
        num_layers=int(config.num_hidden_layers),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        vocab_size=int(config.vocab_size),
        max_model_len=limit,
        rope=json.dumps(getattr(config, "rope_parameters", None), sort_keys=True),
    )


def resolve_device(device: str) -> torch.device:
    """The device named `device`; "auto" is CUDA where there is one. ModelError if unusable."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device {device!r} cannot be used: {error}") from error


def _read_config(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder}: config.json cannot be used: {error}") from error
    return config


def _model_class(folder: Path, config: Any) -> Any:
    name = config.model_type
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{folder}: {name} cannot be served: it is not a causal language model")
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelError(
            f"{folder}: {name} cannot be served: {model_class.__name__} does not support attention "
            "backends (it would silently ignore the paged cache)"
        )
    if "logits_to_keep" not in inspect.signature(model_class.forward).parameters:
        raise ModelError(f"{folder}: {name} cannot be served: no choice of logit rows")
    return model_class


def _resolve_dtype(config: Any, dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        stored = getattr(config, "dtype", None)
        usable = device.type != "cpu" and stored in DTYPES.values()
        return DTYPES[str(stored).removeprefix("torch.")] if usable else torch.float32
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is none of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _resolve_max_model_len(folder: Path, config: Any, asked: int | None) -> int:
    positions: Any = getattr(config, "max_position_embeddings", None)
    if positions is None and asked is None:
        raise ModelError(f"{folder}: the config has no max_position_embeddings; set max_model_len")
    if asked is None:
        return int(positions)
    if positions is not None and asked > positions:
        raise ModelError(f"{folder}: max_model_len {asked} exceeds the model's {positions}")
    if asked < 1:
        raise ModelError(f"max_model_len {asked} must be at least 1")
    return asked


def _reasons_against(config: Any, max_model_len: int) -> list[str]:
    """Why paged full attention would compute something else than the model means."""
    reasons: list[str] = []
    if config.is_encoder_decoder:
        reasons.append("it is an encoder-decoder")
    if getattr(config, "quantization_config", None) is not None:
        reasons.append("its weights are quantised; dequantise the checkpoint first")
    if getattr(config, "kv_lora_rank", None):
        reasons.append("it uses multi-head latent attention")
    if getattr(config, "use_bidirectional_attention", None):
        reasons.append("its attention is bidirectional")
    for name in ("attn_logit_softcapping", "attn_logit_softcap", "attention_logit_cap"):
        if getattr(config, name, None):
            reasons.append(f"its attention is soft-capped ({name} {getattr(config, name)})")
    kinds = set(getattr(config, "layer_types", None) or ())
    for kind in sorted(kinds - {"full_attention", "sliding_attention"}):
        reasons.append(f"it has layers of type {kind}")
    for window in _windows(config):
        if window < max_model_len:
            reasons.append(f"its sliding window {window} is shorter than {max_model_len} tokens")
    for kind in _rope_types(config):
        if kind in _MOVING_ROPE:
            reasons.append(f"its rope type {kind} depends on the longest sequence in a pass")
    return reasons


def _windows(config: Any) -> list[int]:
    """The sliding window, if any layer slides."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or (kinds is not None and "sliding_attention" not in kinds):
        return []
    return [int(window)]


def _rope_types(config: Any) -> list[str]:
    """The rope types, of which some families have one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    groups = [parameters, *(group for group in parameters.values() if isinstance(group, dict))]
    return [str(group["rope_type"]) for group in groups if "rope_type" in group]
