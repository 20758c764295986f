"""From a model folder and a memory budget to an engine. Torch is imported only if it is needed.

Owns the choice of the engine and the arithmetic of the budget: how many blocks it holds, and that
one sequence of full length fits. It knows nothing of how a folder came about.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from kvferry.kernels.engine import Engine
from kvferry.kernels.engines.native import (
    GGUF_WEIGHTS,
    KV_BYTES,
    Borrowing,
    NativeEngine,
    NativeModel,
    NativeOptions,
)
from kvferry.kernels.engines.standin import MODEL_TYPE, load_standin_engine, read_standin_config
from kvferry.kernels.errors import ModelError, NotNative

BLOCK_SIZES = (8, 16, 32, 64)
NVIDIA_DEVICE = Path("/dev/nvidiactl")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is to be served.

    Parameters
    ----------
    dtype : `auto`, `float32`, `float16` or `bfloat16`, of weights that are not quantised.
    quantization : `none`, `int8`, `gguf` (as the file has them) or `auto`: `none` where a dtype
        is asked for, else `gguf` for what was a GGUF file and `int8` for safetensors. The torch
        engine has only `none`.
    kv_cache_dtype : `auto`, or a dtype: then KV is kept in it, whatever weights are.
    device : `auto`, `cpu` or `cuda`.
    kv_bytes : bytes for KV blocks.
    max_model_len : longest sequence in tokens; None: the model's own limit.
    threads : that compute; None: one a core.
    isa : `auto` or the instruction set that is forced.
    borrowing : which cores the native engine computes on, and when; None: on any.
    """

    dtype: str
    quantization: str
    kv_cache_dtype: str
    device: str
    block_size: int
    kv_bytes: int
    max_model_len: int | None
    threads: int | None
    isa: str = "auto"
    borrowing: Borrowing | None = None


def load_engine(folder: Path, options: LoadOptions, *, cache_dir: Path, digest: str) -> Engine:
    """Loads the model and allocates its pool.

    Parameters
    ----------
    cache_dir : where what is made once is kept.
    digest : names the content of `folder`.

    Raises
    ------
    ModelError
        The model cannot be served, or `kv_bytes` does not hold one sequence of full length.
    """
    if options.block_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES))
        raise ModelError(f"block size {options.block_size} is none of {sizes}")
    if _model_type(folder) == MODEL_TYPE:
        return _load_standin(folder, options)
    try:
        return _load_native(folder, options, cache_dir, digest)
    except NotNative as error:
        reason = str(error)
    if options.quantization not in ("auto", "none"):
        raise ModelError(
            f"{folder}: --quantization {options.quantization} needs the native engine: {reason}"
        )
    log.warning("the torch engine serves this model, several times slower on a CPU: %s", reason)
    return _load_torch(folder, options)


def _load_standin(folder: Path, options: LoadOptions) -> Engine:
    standin = read_standin_config(folder)
    blocks = _blocks(
        options,
        options.block_size * standin.kv_bytes_per_token,
        options.max_model_len or standin.max_position_embeddings,
    )
    return load_standin_engine(
        folder,
        block_size=options.block_size,
        num_blocks=blocks,
        max_model_len=options.max_model_len,
    )


def _load_native(folder: Path, options: LoadOptions, cache_dir: Path, digest: str) -> Engine:
    if options.device == "cuda" or (options.device == "auto" and NVIDIA_DEVICE.exists()):
        raise NotNative("it computes on the GPU")
    weights = _native_weights(folder, options)
    native = NativeOptions(
        weights=weights,
        kv_dtype=_native_kv(options, weights),
        block_size=options.block_size,
        threads=options.threads or len(os.sched_getaffinity(0)),
        isa=None if options.isa == "auto" else options.isa,
        borrowing=options.borrowing,
    )
    model = NativeModel(
        folder,
        native,
        max_model_len=options.max_model_len,
        cache_dir=cache_dir,
        digest=digest,
    )
    blocks = _blocks(options, model.block_bytes, model.architecture.max_model_len)
    engine = NativeEngine(model, blocks)
    log.info(
        "the native engine serves this model: weights %s, KV %s, %s, up to %d threads",
        weights,
        native.kv_dtype,
        model.isa,
        native.max_threads,
    )
    return engine


def _native_weights(folder: Path, options: LoadOptions) -> str:
    asked, there = options.quantization, (folder / GGUF_WEIGHTS).is_file()
    if asked == "auto":
        asked = "none" if options.dtype != "auto" else "gguf" if there else "int8"
    if asked == "gguf" and not there:
        raise ModelError(f"{folder}: --quantization gguf needs a model from a GGUF file")
    if asked != "none":
        return asked
    if options.dtype == "float16":
        raise NotNative("its float16 weights need torch")
    return "float32" if options.dtype == "auto" else options.dtype


def _native_kv(options: LoadOptions, weights: str) -> str:
    if options.kv_cache_dtype != "auto":
        return options.kv_cache_dtype
    return weights if weights in KV_BYTES else "float16"


def _load_torch(folder: Path, options: LoadOptions) -> Engine:
    from kvferry.kernels.engines.torch import load_torch_engine
    from kvferry.kernels.model_config import read_facts, resolve_device

    facts = read_facts(
        folder,
        dtype=options.dtype,
        device=resolve_device(options.device),
        max_model_len=options.max_model_len,
    )
    if options.kv_cache_dtype not in ("auto", facts.dtype_name):
        raise ModelError(
            f"{folder}: the torch engine keeps KV in the model's dtype {facts.dtype_name}, not in "
            f"--kv-cache-dtype {options.kv_cache_dtype}"
        )
    blocks = _blocks(options, facts.block_bytes(options.block_size), facts.max_model_len)
    return load_torch_engine(
        folder,
        dtype=options.dtype,
        device=options.device,
        block_size=options.block_size,
        num_blocks=blocks,
        max_model_len=options.max_model_len,
    )


def _model_type(folder: Path) -> str | None:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: config.json cannot be read: {error}") from error
    return config.get("model_type") if isinstance(config, dict) else None


def _blocks(options: LoadOptions, block_bytes: int, longest: int) -> int:
    needed = -(-longest // options.block_size)
    blocks = options.kv_bytes // block_bytes
    if blocks < needed:
        raise ModelError(
            f"one request of {longest} tokens needs {_size(needed * block_bytes)} of KV cache, but "
            f"--kv-cache-memory-bytes is {_size(options.kv_bytes)}; raise it or lower "
            "--max-model-len"
        )
    return blocks


def _size(size: int) -> str:
    return f"{size / (1 << 20):.0f}MiB" if size >= 10 << 20 else f"{size / (1 << 10):.1f}KiB"
