"""Weights as files have them: safetensors folders and GGUF files, by the engine's own names.

Owns how a tensor is found and checked in a file: shapes must be what the architecture says, and
nothing is read beyond the end. It knows nothing of how the engine keeps weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import gguf
import numpy as np
from numpy.typing import NDArray

from kvferry.kernels.errors import ModelError
from kvferry.kernels.native.architecture import Architecture

Floats = NDArray[np.float32]

BLOCKS = {"Q8_0": "q8_0", "Q4_0": "q4_0", "Q4_1": "q4_1"}
"""Quantisations of GGUF that the engine computes with as they are."""
PROJECTIONS = ("query", "key", "value", "output", "gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised matrix as its file has it: ``[rows, bytes]``."""

    format: str
    data: NDArray[np.uint8]


class Source(Protocol):
    """Where the tensors of one model are read from."""

    def has(self, name: str) -> bool: ...

    def floats(self, name: str, shape: tuple[int, ...]) -> Floats:
        """The tensor's values; ModelError if it is missing or of another shape."""
        ...

    def blocks(self, name: str, shape: tuple[int, ...]) -> Blocks | None:
        """The matrix as it is quantised, where the engine computes with that; else None."""
        ...

    def kind(self, name: str) -> str:
        """What the tensor's values are called in its file."""
        ...


def shapes(found: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model and its shape, layers by ``{layer}.name``."""
    query, key = found.heads * found.head_dim, found.kv_heads * found.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attention_norm": (found.hidden,),
        "mlp_norm": (found.hidden,),
        "query": (query, found.hidden),
        "key": (key, found.hidden),
        "value": (key, found.hidden),
        "output": (found.hidden, query),
        "gate": (found.intermediate, found.hidden),
        "up": (found.intermediate, found.hidden),
        "down": (found.hidden, found.intermediate),
    }
    if found.qkv_bias:
        layer |= {"query_bias": (query,), "key_bias": (key,), "value_bias": (key,)}
    if found.qk_norm:
        layer |= {"query_norm": (found.head_dim,), "key_norm": (found.head_dim,)}
    whole = {"embedding": (found.vocab_size, found.hidden), "final_norm": (found.hidden,)}
    if not found.tied:
        whole["head"] = (found.vocab_size, found.hidden)
    return whole | {
        f"{number}.{name}": shape for number in range(found.layers) for name, shape in layer.items()
    }


def _within(names: Mapping[str, str], prefix: str, name: str) -> str:
    """The file's name of one of ours."""
    layer, _, rest = name.rpartition(".")
    return names[rest].format(prefix + layer) if layer else names[rest]


# -- safetensors -----------------------------------------------------------------------------------

_HF_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": "{}.input_layernorm.weight",
    "mlp_norm": "{}.post_attention_layernorm.weight",
    "query_norm": "{}.self_attn.q_norm.weight",
    "key_norm": "{}.self_attn.k_norm.weight",
    "query": "{}.self_attn.q_proj.weight",
    "key": "{}.self_attn.k_proj.weight",
    "value": "{}.self_attn.v_proj.weight",
    "query_bias": "{}.self_attn.q_proj.bias",
    "key_bias": "{}.self_attn.k_proj.bias",
    "value_bias": "{}.self_attn.v_proj.bias",
    "output": "{}.self_attn.o_proj.weight",
    "gate": "{}.mlp.gate_proj.weight",
    "up": "{}.mlp.up_proj.weight",
    "down": "{}.mlp.down_proj.weight",
}
_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_MOST_HEADER = 100 << 20


@dataclass(frozen=True, slots=True)
class _Tensor:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsSource:
    """A folder of safetensors files, as transformers writes them; nothing of them is executed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, _Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with _as_model_error(path):
                self._tensors |= _read_header(path)

    def has(self, name: str) -> bool:
        return _within(_HF_NAMES, "model.layers.", name) in self._tensors

    def kind(self, name: str) -> str:
        return self._tensors[_within(_HF_NAMES, "model.layers.", name)].dtype

    def floats(self, name: str, shape: tuple[int, ...]) -> Floats:
        theirs = _within(_HF_NAMES, "model.layers.", name)
        tensor = self._tensors.get(theirs)
        if tensor is None:
            raise ModelError(f"{self._folder}: weight {theirs} is missing")
        _check_shape(self._folder, theirs, tensor.shape, shape)
        raw: NDArray[Any] = np.fromfile(
            tensor.file, _DTYPES[tensor.dtype], count=math.prod(shape), offset=tensor.offset
        ).reshape(shape)
        if tensor.dtype == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32)

    def blocks(self, name: str, shape: tuple[int, ...]) -> Blocks | None:
        return None


def _read_header(path: Path) -> dict[str, _Tensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _MOST_HEADER):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header: dict[str, Any] = json.loads(file.read(length))
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        dtype, shape = str(entry["dtype"]), tuple(map(int, entry["shape"]))
        if not 0 <= first <= last <= size - 8 - length:
            raise ValueError(f"{name} ends at byte {8 + length + last} of {size}")
        if dtype not in _DTYPES:
            continue  # whoever asks for it is told that it is missing
        if last - first != math.prod(shape) * _DTYPES[dtype].itemsize:
            raise ValueError(f"{name} has {last - first} bytes for {list(shape)} {dtype}")
        found[name] = _Tensor(path, dtype, shape, 8 + length + first)
    return found


# -- GGUF ------------------------------------------------------------------------------------------

_GGUF_NAMES = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
    "attention_norm": "{}.attn_norm.weight",
    "mlp_norm": "{}.ffn_norm.weight",
    "query_norm": "{}.attn_q_norm.weight",
    "key_norm": "{}.attn_k_norm.weight",
    "query": "{}.attn_q.weight",
    "key": "{}.attn_k.weight",
    "value": "{}.attn_v.weight",
    "query_bias": "{}.attn_q.bias",
    "key_bias": "{}.attn_k.bias",
    "value_bias": "{}.attn_v.bias",
    "output": "{}.attn_output.weight",
    "gate": "{}.ffn_gate.weight",
    "up": "{}.ffn_up.weight",
    "down": "{}.ffn_down.weight",
}


class GgufSource:
    """A GGUF file.

    llama.cpp turns the pairs of rope, and with them the rows of queries and keys, for architecture
    `llama`; here they are turned back.
    """

    def __init__(self, path: Path, found: Architecture) -> None:
        self._path = path
        with _as_model_error(path):
            reader = gguf.GGUFReader(path)
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
            architecture = reader.fields["general.architecture"].contents()
        self._heads = {}
        if architecture == "llama":
            self._heads = {"query": found.heads, "key": found.kv_heads}

    def has(self, name: str) -> bool:
        return _within(_GGUF_NAMES, "blk.", name) in self._tensors

    def kind(self, name: str) -> str:
        return str(self._tensors[_within(_GGUF_NAMES, "blk.", name)].tensor_type.name)

    def floats(self, name: str, shape: tuple[int, ...]) -> Floats:
        tensor = self._checked(name, shape)
        with _as_model_error(self._path):
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        floats: Floats = self._turned_back(name, np.asarray(values, np.float32).reshape(shape))
        return floats

    def blocks(self, name: str, shape: tuple[int, ...]) -> Blocks | None:
        tensor = self._checked(name, shape)
        format = BLOCKS.get(tensor.tensor_type.name)
        if format is None or len(shape) != 2:
            return None
        data = np.asarray(tensor.data).reshape(shape[0], -1)
        return Blocks(format, self._turned_back(name, data))

    def _checked(self, name: str, shape: tuple[int, ...]) -> Any:
        theirs = _within(_GGUF_NAMES, "blk.", name)
        tensor = self._tensors.get(theirs)
        if tensor is None:
            raise ModelError(f"{self._path}: weight {theirs} is missing")
        _check_shape(self._path, theirs, tuple(map(int, reversed(tensor.shape))), shape)
        return tensor

    def _turned_back(self, name: str, rows: Any) -> Any:
        heads = self._heads.get(name.rpartition(".")[2])
        if heads is None:
            return rows
        pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _check_shape(where: Path, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise ModelError(f"{where}: {name} is {list(found)}, not {list(wanted)}")


@contextmanager
def _as_model_error(path: Path) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # the readers of a broken file raise whatever they stumble on
        raise ModelError(f"{path}: the weights cannot be read: {error}") from error
