"""What config.json says of a model of the Llama kind, and every reason not to run it natively.

Reads one small file, with neither torch nor transformers, and computes the frequencies of rope. It
reads no weights. A model that it refuses is not refused by kvferry: the torch engine may serve it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.kernels.errors import ModelError, NotNative

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model of the Llama kind."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    epsilon: float
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    """The head is the embedding."""
    max_model_len: int
    frequencies: NDArray[np.float32]
    """Of rope, radians a position ``[head_dim / 2]``."""
    rope_scale: float
    """What cosines and sines are multiplied with."""
    rope: str
    """The rotary embedding's parameters as JSON with sorted keys."""


def read_architecture(folder: Path, max_model_len: int | None) -> Architecture:
    """Reads `folder`/config.json.

    `max_model_len` None stands for all positions of the model.

    Raises
    ------
    NotNative
        The model is of another kind, or does something that the native engine does not.
    ModelError
        The config cannot be read, or `max_model_len` exceeds its positions.
    """
    config = _read(folder)
    family = config.get("model_type")
    if family not in FAMILIES:
        raise NotNative(f"it is a {family}, not one of {', '.join(FAMILIES)}")
    limit = _limit(folder, config, max_model_len)
    try:
        found = _architecture(str(family), config, limit)
    except (KeyError, TypeError, ValueError) as error:
        raise NotNative(f"its config.json lacks or misstates {error}") from error
    for reason in _reasons_against(config, found):
        raise NotNative(reason)
    return found


def _read(folder: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{folder}: config.json holds no object")
    return config


def _limit(folder: Path, config: Mapping[str, Any], asked: int | None) -> int:
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int):
        raise NotNative("its config.json has no max_position_embeddings")
    if asked is not None and asked > positions:
        raise ModelError(f"{folder}: max_model_len {asked} exceeds the model's {positions}")
    return positions if asked is None else asked


def _architecture(family: str, config: Mapping[str, Any], limit: int) -> Architecture:
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    head_dim = int(config.get("head_dim") or (128 if family == "qwen3" else hidden // heads))
    rope = _rope_parameters(config)
    frequencies, scale = rope_frequencies(rope, head_dim, int(config["max_position_embeddings"]))
    return Architecture(
        family=family,
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate=int(config["intermediate_size"]),
        vocab_size=int(config["vocab_size"]),
        epsilon=float(config.get("rms_norm_eps", 1e-6)),
        qkv_bias=family == "qwen2" or bool(config.get("attention_bias")),
        qk_norm=family == "qwen3",
        tied=bool(config.get("tie_word_embeddings", False)),
        max_model_len=limit,
        frequencies=frequencies,
        rope_scale=scale,
        rope=json.dumps(rope, sort_keys=True),
    )


def _reasons_against(config: Mapping[str, Any], found: Architecture) -> list[str]:
    reasons = []
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        reasons.append(f"its activation is {config['hidden_act']}")
    if config.get("attention_bias") and found.family != "qwen2":
        reasons.append("its attention has an output bias")
    if config.get("mlp_bias"):
        reasons.append("its MLP has biases")
    if config.get("quantization_config") is not None:
        reasons.append("its checkpoint is quantised in a form of its own")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        reasons.append("it rotates a part of each head only")
    window = _window(config, found)
    if window is not None and window < found.max_model_len:
        reasons.append(f"its sliding window {window} is shorter than {found.max_model_len} tokens")
    for name, size, unit in (
        ("head dimension", found.head_dim, 32),
        ("hidden size", found.hidden, 64),
        ("query size", found.heads * found.head_dim, 64),
        ("key size", found.kv_heads * found.head_dim, 64),
    ):
        if size % unit != 0:
            reasons.append(f"its {name} {size} is no multiple of {unit}")
    if found.heads % found.kv_heads != 0:
        reasons.append(f"its {found.heads} heads do not share {found.kv_heads} KV heads evenly")
    return reasons


def _window(config: Mapping[str, Any], found: Architecture) -> int | None:
    """The sliding window, if any layer slides."""
    window = config.get("sliding_window", 4096 if found.family == "mistral" else None)
    if window is None:
        return None
    kinds = config.get("layer_types")
    if kinds is not None:
        return int(window) if "sliding_attention" in kinds else None
    if found.family in ("qwen2", "qwen3"):
        return int(window) if config.get("use_sliding_window") else None
    return int(window) if found.family == "mistral" else None


# -- rope ------------------------------------------------------------------------------------------


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters in today's form; older configs have `rope_theta` and `rope_scaling`."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in parameters.values()):
        raise NotNative("its layers have rotary embeddings of several kinds")
    kind = parameters.pop("type", None)
    parameters.setdefault("rope_type", kind or "default")
    parameters.setdefault("rope_theta", config.get("rope_theta") or DEFAULT_THETA)
    if parameters["rope_type"] not in ROPE_TYPES:
        raise NotNative(f"its rope type is {parameters['rope_type']}")
    return parameters


def rope_frequencies(
    rope: Mapping[str, Any], head_dim: int, positions: int
) -> tuple[NDArray[np.float32], float]:
    """Radians a position ``[head_dim / 2]``, and what cosines and sines are multiplied with.

    Su et al., "RoFormer" (2021); `linear`: Chen et al., "Extending Context Window" (2023);
    `llama3`: Llama 3.1's `apply_scaling`; `yarn`: Peng et al., "YaRN" (2023). float32 as in
    training, so that the same angles come out.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = np.float32(rope["rope_theta"])
    plain: NDArray[np.float32] = np.float32(1) / base**exponents
    match rope["rope_type"]:
        case "linear":
            return plain / np.float32(rope["factor"]), 1.0
        case "llama3":
            return _llama3(rope, plain), 1.0
        case "yarn":
            return _yarn(rope, head_dim, positions, base**exponents)
    return plain, 1.0


def _llama3(rope: Mapping[str, Any], plain: NDArray[np.float32]) -> NDArray[np.float32]:
    """High frequencies stay, low ones are divided by the factor, those between are blended."""
    factor, old = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    wavelengths = np.float32(2 * math.pi) / plain
    share = (np.float32(old) / wavelengths - np.float32(low)) / np.float32(high - low)
    divided = plain / np.float32(factor)
    blended = (1 - share) * divided + share * plain
    found = np.where(wavelengths > old / low, divided, plain)
    between = (wavelengths <= old / low) & (wavelengths >= old / high)
    return np.where(between, blended, found).astype(np.float32)


def _yarn(
    rope: Mapping[str, Any], head_dim: int, positions: int, powers: NDArray[np.float32]
) -> tuple[NDArray[np.float32], float]:
    """Dimensions that turn often stay, those that turn seldom are interpolated, with a ramp."""
    factor, theta = float(rope["factor"]), float(rope["rope_theta"])
    old = float(rope.get("original_max_position_embeddings") or positions)
    scale = rope.get("attention_factor")
    if scale is None:
        one, all_ = rope.get("mscale"), rope.get("mscale_all_dim")
        scale = _yarn_scale(factor, one) / _yarn_scale(factor, all_) if one and all_ else (
            _yarn_scale(factor, 1)
        )  # fmt: skip

    def dimension(turns: float) -> float:
        return head_dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = dimension(float(rope.get("beta_fast") or 32))
    last = dimension(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first if last != first else 0.001
    steps = np.arange(head_dim // 2, dtype=np.float32)
    stays = 1 - np.clip((steps - np.float32(first)) / np.float32(width), 0, 1)
    interpolated, plain = 1 / (np.float32(factor) * powers), 1 / powers
    blended = interpolated * (1 - stays) + plain * stays
    return blended.astype(np.float32), float(scale)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
