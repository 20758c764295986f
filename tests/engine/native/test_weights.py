"""Packed weights: the values of the file, kept once, and refused when they are not whole."""

from __future__ import annotations

import ctypes
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from kvferry.kernels.engines.native import GGUF_WEIGHTS, NativeModel, NativeOptions
from kvferry.kernels.errors import ModelError
from kvferry.kernels.native.architecture import Architecture, read_architecture
from kvferry.kernels.native.library import FORMATS, Matrix
from kvferry.kernels.native.sources import GgufSource, SafetensorsSource, shapes
from kvferry.kernels.native.weights import Tensor, Weights, made_once, pack_weights
from kvferry.kvstore.process.model_files import default_gguf
from kvferry.tests.rigs.models.native import compiled_into, isas, library
from kvferry.tests.rigs.models.tiny import write_tiny_model

Floats = NDArray[np.float32]
OPTIONS = NativeOptions("float32", "float32", 16, 1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tiny_model(tmp_path, hidden_size=128, head_dim=32, vocab_size=250, intermediate_size=96)
    return tmp_path


def opened(folder: Path, weights: str = "float32") -> NativeModel:
    compiled_into(folder / "cache")
    options = NativeOptions(weights, "float32", 16, 1)
    return NativeModel(
        folder, options, max_model_len=None, cache_dir=folder / "cache", digest="d" * 32
    )


def values(tensor: Tensor, shape: tuple[int, ...]) -> Floats:
    """What a packed matrix stands for, row by row as the engine embeds tokens."""
    number = FORMATS.index(tensor.format)
    matrix = Matrix(tensor.data.ctypes.data, None, number, tensor.panels, tensor.columns)
    out = np.zeros((tensor.rows, tensor.columns), np.float32)
    for row in range(tensor.rows):
        library().kernels(isas()[-1]).embed(ctypes.byref(matrix), row, out[row].ctypes.data)
    assert not out[shape[0] :].any() and not out[:, shape[1] :].any(), "filled up with zeros"
    return out[: shape[0], : shape[1]]


def test_every_weight_is_the_files_own(model: Path) -> None:
    found = opened(model)
    theirs = load_file(model / "model.safetensors")
    wanted = shapes(found.architecture)
    assert found.weights.tensors.keys() == wanted.keys()
    assert len(theirs) == len(wanted)
    for ours, name in (
        ("embedding", "model.embed_tokens.weight"),
        ("head", "lm_head.weight"),
        ("1.down", "model.layers.1.mlp.down_proj.weight"),
        ("0.key", "model.layers.0.self_attn.k_proj.weight"),
    ):
        made = values(found.weights.tensors[ours], wanted[ours])
        assert (made == theirs[name]).all(), ours


def test_gguf_weights_are_the_files_own_but_for_the_order_of_ropes_pairs(smollm2: Path) -> None:
    tensors = {it.name: it for it in GGUFReader(default_gguf()).tensors}
    weights, found = Weights(smollm2 / GGUF_WEIGHTS), read_architecture(smollm2, None)
    wanted = shapes(found)
    assert weights.formats() == {"q8_0": 1, "q4_1": 210}
    hf = load_file(smollm2 / "model.safetensors")
    for ours, name, theirs in (
        ("29.down", "blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight"),
        ("7.value", "blk.7.attn_v.weight", "model.layers.7.self_attn.v_proj.weight"),
        ("3.query", "blk.3.attn_q.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("3.key", "blk.3.attn_k.weight", "model.layers.3.self_attn.k_proj.weight"),
    ):
        made = values(weights.tensors[ours], wanted[ours])
        np.testing.assert_allclose(made, hf[theirs], rtol=1e-6, atol=1e-7)
        moved = not np.allclose(made, dequantize(tensors[name].data, tensors[name].tensor_type))
        assert moved == (ours in ("3.query", "3.key"))
    assert weights.size < 1.02 * 97.4e6, "no larger than the file"


def write_gguf(path: Path, found: Architecture, kinds: dict[str, GGMLQuantizationType]) -> None:
    writer = GGUFWriter(path, "qwen2")
    draw = np.random.default_rng(1)
    names = {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down", "output": "attn_output"}
    names |= {"query": "attn_q", "key": "attn_k", "value": "attn_v"}
    names |= {"attention_norm": "attn_norm", "mlp_norm": "ffn_norm"}
    whole = {"embedding": "token_embd", "final_norm": "output_norm", "head": "output"}
    for name, shape in shapes(found).items():
        layer, _, rest = name.rpartition(".")
        theirs = f"blk.{layer}.{names[rest]}.weight" if layer else f"{whole[name]}.weight"
        data = draw.standard_normal(shape).astype(np.float32)
        kind = kinds.get(rest, GGMLQuantizationType.F32) if len(shape) == 2 else None
        if kind in (None, GGMLQuantizationType.F32):
            writer.add_tensor(theirs, data)
        else:
            writer.add_tensor(theirs, quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_every_gguf_format_keeps_its_values(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind = GGMLQuantizationType
    kinds = {"query": kind.Q4_0, "key": kind.Q4_1, "value": kind.Q8_0, "gate": kind.F16,
             "up": kind.BF16, "down": kind.Q5_0}  # fmt: skip
    found = read_architecture(model, None)
    path = tmp_path / "m.gguf"
    write_gguf(path, found, kinds)
    pack_weights(tmp_path / "w", GgufSource(path, found), shapes(found), "gguf")
    weights = Weights(tmp_path / "w")
    tensors = {it.name: it for it in GGUFReader(path).tensors}
    for ours, name, format, within in (
        ("0.query", "attn_q", "q4_0", 0.0),
        ("0.key", "attn_k", "q4_1", 1e-6),
        ("0.value", "attn_v", "q8_0", 0.0),
        ("0.gate", "ffn_gate", "q8_0", 0.02),
        ("0.up", "ffn_up", "q8_0", 0.02),
        ("0.down", "ffn_down", "q8_0", 0.02),
    ):
        theirs = tensors[f"blk.0.{name}.weight"]
        wanted = dequantize(theirs.data, theirs.tensor_type)
        made = values(weights.tensors[ours], wanted.shape)
        assert weights.tensors[ours].format == format
        assert np.abs(made - wanted).max() <= within * np.abs(wanted).max(), ours
    said = [it.message for it in caplog.records if "no kernel" in it.message]
    assert len(said) == 4 and any("2 matrices are Q5_0" in line for line in said), said


# -- bad files -------------------------------------------------------------------------------------


def test_a_missing_or_misshapen_weight_is_named(model: Path) -> None:
    path = model / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.self_attn.k_proj.weight"
    whole = weights.pop(name)
    save_file(weights, path)
    with pytest.raises(ModelError, match=f"{name} is missing"):
        opened(model)
    save_file({**weights, name: whole[:-1].copy()}, path)
    with pytest.raises(ModelError, match=rf"{name} is \[63, 128\], not \[64, 128\]"):
        opened(model)
    assert not list((model / "cache").rglob("*.weights")), "nothing half made stays"
    save_file({**weights, name: whole}, path)
    opened(model)


@pytest.mark.parametrize("kept", [0, 4, 1000, -1])
def test_truncated_safetensors_are_refused(model: Path, kept: int) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors: the weights cannot be read"):
        opened(model)


def test_a_header_that_lies_is_refused(model: Path) -> None:
    path = model / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    entry = header["model.norm.weight"]
    for change in ({"shape": [1 << 40]}, {"data_offsets": [-4, 508]}, {"data_offsets": "no"}):
        header["model.norm.weight"] = entry | change
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        with pytest.raises(ModelError, match="cannot be read"):
            SafetensorsSource(model)


def test_a_truncated_gguf_file_is_refused(model: Path, tmp_path: Path) -> None:
    found, path = read_architecture(model, None), tmp_path / "m.gguf"
    write_gguf(path, found, {})
    data = path.read_bytes()
    for kept in (3, 100, len(data) // 2, len(data) - 4):
        path.write_bytes(data[:kept])
        with pytest.raises(ModelError, match=r"m\.gguf"):
            pack_weights(tmp_path / "w", GgufSource(path, found), shapes(found), "gguf")
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("kept", [0, 10, 1000, -1])
def test_packed_weights_that_are_not_whole_are_refused(model: Path, kept: int) -> None:
    opened(model)
    (path,) = (model / "cache").rglob("*.weights")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match="packed weights"):
        opened(model)


def test_many_ask_and_one_makes(tmp_path: Path) -> None:
    made = []

    def make() -> None:
        made.append(1)
        (tmp_path / "w").write_text("x")

    threads = [threading.Thread(target=made_once, args=(tmp_path / "w", make)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]
