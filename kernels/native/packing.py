"""Weights in the order in which the kernels read them.

Owns the layouts that `csrc/kernels.h` describes: panels of 16 rows, groups of columns with their
scales first. Pure functions over arrays; it knows nothing of files or of what a matrix is for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.kernels.native.library import LANES, PANELS

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

GROUPS = {"q8_0": 32, "q4_0": 32, "q4_1": 32}
"""Columns that share a scale, by format."""
ROWS = LANES * PANELS
COLUMNS = 64
"""Rows and columns are filled up with zeros to a multiple of so many."""
BLOCK_BYTES = {"q8_0": 34, "q4_0": 18, "q4_1": 20}
"""Of 32 weights of a row, as GGUF has them: a scale, for Q4_1 a minimum, both float16, weights."""


def pad(size: int, unit: int) -> int:
    """The least multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


def pack_floats(weights: Floats, dtype: str) -> Bytes:
    """``[rows, columns]`` as float32 or bfloat16, rounded to nearest, ties to even."""
    panels = _panels(_padded(weights, 0.0)).transpose(0, 2, 1)
    if dtype == "float32":
        return _bytes(panels)
    assert dtype == "bfloat16"
    bits = np.ascontiguousarray(panels).view(np.uint32)
    return _bytes(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16))


def quantise_q8_0(weights: Floats) -> Bytes:
    """``[rows, columns]`` as GGUF's Q8_0 blocks, ``[rows, bytes]``: of each 32 columns the largest
    magnitude becomes 127. Columns fill whole groups."""
    rows, columns = weights.shape
    scales, whole = _quantised(weights.reshape(rows, columns // 32, 32))
    blocks = np.concatenate([scales[..., None].view(np.uint8), whole.view(np.uint8)], axis=2)
    return blocks.reshape(rows, -1)


def pack_blocks(blocks: Bytes, format: str) -> Bytes:
    """GGUF's blocks of Q8_0, Q4_0 or Q4_1, ``[rows, bytes]``, without a change of any value."""
    size = BLOCK_BYTES[format]
    rows, groups = blocks.shape[0], blocks.shape[1] // size
    whole = np.zeros((pad(rows, ROWS), pad(groups, COLUMNS // 32), size), np.uint8)
    whole[:rows, :groups] = blocks.reshape(rows, groups, size)
    heads = 4 if format == "q4_1" else 2
    weights = whole[..., heads:]
    if format == "q8_0":
        weights = weights ^ np.uint8(128)  # adds 128
    return _joined([whole[..., at : at + 2].copy().view(np.float16)[..., 0]
                    for at in range(0, heads, 2)], weights)  # fmt: skip


def _quantised(groups: Floats) -> tuple[NDArray[np.float16], NDArray[np.int8]]:
    """Scales and whole numbers from -127 to 127 of ``[rows, groups, group]``."""
    scales = (np.abs(groups).max(axis=2) / np.float32(127)).astype(np.float16)
    wide = scales.astype(np.float32)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = np.where(wide > 0, np.rint(groups / wide), np.float32(0))
    return scales, np.clip(whole, -127, 127).astype(np.int8)


def _padded(weights: Floats, value: float) -> Floats:
    rows, columns = weights.shape
    whole = np.full((pad(rows, ROWS), pad(columns, COLUMNS)), value, np.float32)
    whole[:rows, :columns] = weights
    return whole


def _panels(values: NDArray[Any]) -> NDArray[Any]:
    """Rows ``[rows, ...]`` as ``[panels, 16, ...]``."""
    return values.reshape(len(values) // LANES, LANES, *values.shape[1:])


def _joined(heads: list[NDArray[Any]], weights: Bytes) -> Bytes:
    """Units of scales (and minima), each ``[rows, groups]``, and weights ``[rows, groups, bytes]``:
    for each panel and group 16 times each head, then for every 4 bytes those of 16 rows."""
    panels, groups = len(weights) // LANES, weights.shape[1]
    quads = _panels(weights).reshape(panels, LANES, groups, -1, 4).transpose(0, 2, 3, 1, 4)
    parts = [_panels(head).transpose(0, 2, 1) for head in heads]
    units = [np.ascontiguousarray(part).view(np.uint8).reshape(panels, groups, -1)
             for part in (*parts, quads)]  # fmt: skip
    return _bytes(np.concatenate(units, axis=2))


def _bytes(values: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
