"""From a model folder and a memory budget to an engine. Torch is imported only if it is needed.

Owns the arithmetic of the budget: how many blocks it holds, and that one sequence of full length
fits. It knows nothing of how a folder came about.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvferry.kernels.engine import Engine
from kvferry.kernels.engines.standin import MODEL_TYPE, load_standin_engine, read_standin_config
from kvferry.kernels.errors import ModelError

BLOCK_SIZES = (8, 16, 32, 64)


def load_engine(
    folder: Path,
    *,
    dtype: str,
    device: str,
    block_size: int,
    kv_bytes: int,
    max_model_len: int | None,
) -> Engine:
    """Loads the model and allocates its pool.

    Parameters
    ----------
    dtype : `auto`, `float32`, `float16` or `bfloat16`; `auto` is float32 on a CPU.
    device : `auto`, `cpu` or `cuda`.
    kv_bytes : bytes for KV blocks.
    max_model_len : longest sequence in tokens; None: the model's own limit.

    Raises
    ------
    ModelError
        The model cannot be served, or `kv_bytes` does not hold one sequence of full length.
    """
    if block_size not in BLOCK_SIZES:
        raise ModelError(f"block size {block_size} is none of {', '.join(map(str, BLOCK_SIZES))}")
    if _model_type(folder) == MODEL_TYPE:
        standin = read_standin_config(folder)
        blocks = _blocks(
            kv_bytes,
            block_size * standin.kv_bytes_per_token,
            block_size,
            max_model_len or standin.max_position_embeddings,
        )
        return load_standin_engine(
            folder, block_size=block_size, num_blocks=blocks, max_model_len=max_model_len
        )
    from kvferry.kernels.engines.torch import load_torch_engine
    from kvferry.kernels.model_config import read_facts, resolve_device

    facts = read_facts(
        folder, dtype=dtype, device=resolve_device(device), max_model_len=max_model_len
    )
    blocks = _blocks(kv_bytes, facts.block_bytes(block_size), block_size, facts.max_model_len)
    return load_torch_engine(
        folder,
        dtype=dtype,
        device=device,
        block_size=block_size,
        num_blocks=blocks,
        max_model_len=max_model_len,
    )


def _model_type(folder: Path) -> str | None:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: config.json cannot be read: {error}") from error
    return config.get("model_type") if isinstance(config, dict) else None


def _blocks(kv_bytes: int, block_bytes: int, block_size: int, longest: int) -> int:
    needed = -(-longest // block_size)
    blocks = kv_bytes // block_bytes
    if blocks < needed:
        raise ModelError(
            f"one request of {longest} tokens needs {_size(needed * block_bytes)} of KV cache, but "
            f"--kv-cache-memory-bytes is {_size(kv_bytes)}; raise it or lower --max-model-len"
        )
    return blocks


def _size(size: int) -> str:
    return f"{size / (1 << 20):.0f}MiB" if size >= 10 << 20 else f"{size / (1 << 10):.1f}KiB"
