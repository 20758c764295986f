"""Each kernel alone, of every instruction set of this CPU: against float64, and bit for bit against
the portable ones."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.kernels.native.library import (
    FORMATS,
    KV_TYPES,
    LANES,
    Attention,
    Kernels,
    Matrix,
    Partial,
    Rows,
)
from kvferry.kernels.native.packing import (
    GROUPS,
    pack_blocks,
    pack_floats,
    pad,
    quantise_q8_0,
)
from kvferry.tests.rigs.models.native import isas, library

Array = NDArray[Any]
ALL = isas()
TILE_KEYS = 64


def kernels(isa: str) -> Kernels:
    return library().kernels(isa)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def at(array: Array) -> int:
    return int(array.ctypes.data)


def near(found: Array, wanted: Array, within: float) -> None:
    """No further off than `within` of the largest."""
    assert np.isfinite(found).all()
    error = np.abs(found.astype(np.float64) - wanted).max()
    assert error <= within * max(np.abs(wanted).max(), 1e-30), error


def same_on_all(run: Callable[[str], tuple[Array, ...]]) -> tuple[Array, ...]:
    """What `run` makes of an instruction set, after a check that all make the same bits."""
    first = run(ALL[0])
    for isa in ALL[1:]:
        for one, other in zip(first, run(isa), strict=True):
            assert one.tobytes() == other.tobytes(), isa
    return first


def test_this_machine_has_what_it_is_tested_for() -> None:
    assert ALL[0] == "portable"
    assert library().isa(None) == ALL[-1]
    assert library().isa("avx9") is None


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [16, 32, 64, 576, 4096])
def test_norms(columns: int) -> None:
    x, weight = normal(columns, seed=1, scale=3), normal(columns, seed=2)

    def run(isa: str) -> tuple[Array, ...]:
        out = np.zeros(columns, np.float32)
        kernels(isa).normalise(at(x), at(weight), 1e-5, columns, at(out))
        return (out,)

    (out,) = same_on_all(run)
    wide = x.astype(np.float64)
    near(out, wide / np.sqrt((wide**2).mean() + 1e-5) * weight, 1e-6)


def quantised(isa: str, x: Array, group: int) -> tuple[Rows, dict[str, Array]]:
    rows, columns = x.shape
    groups = columns // group if group else 0
    arrays: dict[str, Array] = {
        "values": x,
        "bytes": np.zeros((rows, columns), np.int8),
        "scales": np.zeros((rows, groups), np.float32),
        "offsets": np.zeros((rows, groups), np.float32),
        "sums": np.zeros((rows, groups), np.int32),
    }
    struct = Rows(**{name: at(array) for name, array in arrays.items()})
    struct.columns, struct.group = columns, group
    for row in range(rows if group else 0):
        half = columns // 2 // group * group
        kernels(isa).quantise(ctypes.byref(struct), row, 0, half)
        kernels(isa).quantise(ctypes.byref(struct), row, half, columns - half)
    return struct, arrays


@pytest.mark.parametrize("group", [32, 64])
def test_activations_are_quantised_in_groups(group: int) -> None:
    x = normal(5, 320, seed=3) * np.float32(10) ** normal(5, 320, seed=4)
    x[1, :group] = 0
    x[2, 5] = 3e38

    def run(isa: str) -> tuple[Array, ...]:
        found = quantised(isa, x, group)[1]
        return found["bytes"], found["scales"], found["offsets"], found["sums"]

    made, scales, offsets, sums = same_on_all(run)
    grouped = x.reshape(5, -1, group).astype(np.float64)
    assert np.abs(made).max() == 127
    near(scales, np.abs(grouped).max(axis=2) / 127, 1e-6)
    back = made.reshape(grouped.shape) * scales[..., None].astype(np.float64)
    assert (np.abs(back - grouped) <= scales[..., None] * 0.5001).all()
    assert (sums == made.reshape(grouped.shape).sum(axis=2)).all()
    near(offsets, scales.astype(np.float64) * sums, 1e-6)


@pytest.mark.parametrize("count", [1, 15, 16, 17, 576])
def test_sums(count: int) -> None:
    x, y = normal(count, seed=5), normal(count, seed=6)

    def run(isa: str) -> tuple[Array, ...]:
        out = y.copy()
        kernels(isa).add(at(x), count, at(out))
        return (out,)

    assert (same_on_all(run)[0] == x + y).all()


def test_gates() -> None:
    x = np.concatenate(
        [normal(64, seed=7, scale=4), np.array([0, -0.0, 88, -88, 200, -200], np.float32)]
    )
    x = np.pad(x, (0, -len(x) % LANES)).astype(np.float32)
    up = normal(len(x), seed=8)

    def run(isa: str) -> tuple[Array, ...]:
        out = np.zeros(len(x), np.float32)
        kernels(isa).gate(at(x), at(up), len(x), at(out))
        return (out,)

    (out,) = same_on_all(run)
    wide = x.astype(np.float64)
    assert np.allclose(out, wide / (1 + np.exp(-wide)) * up, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize(("head_dim", "pairs"), [(32, 16), (64, 32), (96, 32), (128, 64)])
@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_rotations(head_dim: int, pairs: int, scale: float) -> None:
    head, angle = normal(head_dim, seed=9), normal(pairs, seed=10, scale=100)
    cosines, sines = np.cos(angle), np.sin(angle)

    def run(isa: str) -> tuple[Array, ...]:
        out = head.copy()
        kernels(isa).rotate(at(out), at(cosines), at(sines), pairs, scale, head_dim)
        return (out,)

    (out,) = same_on_all(run)
    x, y = head[:pairs].astype(np.float64), head[pairs : 2 * pairs].astype(np.float64)
    wanted = np.concatenate([x * cosines - y * sines, y * cosines + x * sines, head[2 * pairs :]])
    near(out, wanted * scale, 1e-6)


# -- products --------------------------------------------------------------------------------------


def packed(weights: Array, format: str) -> tuple[Array, Array]:
    """The bytes of a format and what they stand for."""
    rows, columns = weights.shape
    if format == "float32":
        return pack_floats(weights, format), weights
    if format == "bfloat16":
        bits = weights.view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
        return pack_floats(weights, format), rounded.astype(np.uint32).view(np.float32)
    draw = np.random.default_rng(11)
    if format == "q8_0":
        blocks = quantise_q8_0(weights).reshape(rows, -1, 34)
        blocks[..., 2:][draw.random(blocks[..., 2:].shape) < 0.05] = 0x80  # -128: GGUF may have it
        scale = blocks[..., :2].copy().view(np.float16).astype(np.float64)
        values = blocks[..., 2:].view(np.int8) * scale
    else:
        heads = 4 if format == "q4_1" else 2
        blocks = draw.integers(0, 256, (rows, columns // 32, heads + 16), np.uint8)
        numbers = draw.standard_normal((rows, columns // 32, heads // 2)).astype(np.float16)
        blocks[..., :heads] = numbers.view(np.uint8)
        halves = [blocks[..., heads:] & 15, blocks[..., heads:] >> 4]
        values = np.concatenate(halves, axis=2).astype(np.float64)
        wide = numbers.astype(np.float64)
        least = wide[..., 1:] if format == "q4_1" else -8 * wide
        values = values * wide[..., :1] + least
    return pack_blocks(blocks.reshape(rows, -1), format), values.reshape(rows, columns)


def matrix_of(data: Array, format: str, rows: int, columns: int) -> Matrix:
    return Matrix(at(data), None, FORMATS.index(format), -(-rows // 64) * 4, columns)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (50, 192), (200, 576)])
def test_products(format: str, rows: int, columns: int) -> None:
    weights, x = normal(rows, columns, seed=12), normal(7, columns, seed=13, scale=2)
    data, values = packed(weights, format)
    matrix = matrix_of(data, format, rows, columns)
    stride = matrix.panels * LANES
    group = GROUPS.get(format, 0)

    def run(isa: str) -> tuple[Array, ...]:
        struct, arrays = quantised(isa, x, group)
        outs = []
        for splits in ([7], [1] * 7, [2, 4, 1], [3, 3, 1]):  # rows at once
            out = np.full((7, stride), np.nan, np.float32)
            row = 0
            for count in splits:
                for panel in range(0, matrix.panels, 4 if len(splits) > 1 else matrix.panels):
                    panels = 4 if len(splits) > 1 else matrix.panels
                    kernels(isa).multiply(
                        ctypes.byref(matrix), panel, panels, ctypes.byref(struct), row, count,
                        at(out) + 4 * (row * stride + panel * LANES), stride,
                    )  # fmt: skip
                row += count
            outs.append(out)
        return (*outs, *arrays.values())

    first, *others = same_on_all(run)
    for out in others[:3]:
        assert out.tobytes() == first.tobytes()
    inputs = x.astype(np.float64)
    if group:
        made, scales = others[4], others[5]
        inputs = made.reshape(7, -1, group) * scales[..., None].astype(np.float64)
    wanted = inputs.reshape(7, columns) @ values.astype(np.float64).T
    near(first[:, :rows], wanted, 2e-6)
    assert (first[:, rows:] == 0).all()


@pytest.mark.parametrize("format", FORMATS)
def test_single_rows_of_weights(format: str) -> None:
    data, values = packed(normal(70, 192, seed=14), format)
    matrix = matrix_of(data, format, 70, 192)

    def run(isa: str) -> tuple[Array, ...]:
        out = np.zeros((70, 192), np.float32)
        for row in range(70):
            kernels(isa).embed(ctypes.byref(matrix), row, at(out[row]))
        return (out,)

    near(same_on_all(run)[0], values, 2e-7)


@pytest.mark.parametrize("value", [127, -128])
def test_the_largest_bytes_do_not_overflow(value: int) -> None:
    """Two products of 16 bits would: that is what `maddubs` saturates at."""
    blocks = np.zeros((64, 2, 34), np.uint8)
    blocks[..., :2] = np.array([1], np.float16).view(np.uint8)
    blocks[..., 2:] = np.int8(value).view(np.uint8)
    data = pack_blocks(blocks.reshape(64, -1), "q8_0")
    matrix = matrix_of(data, "q8_0", 64, 64)
    for sign in (1, -1):
        x = np.full((1, 64), 127 * sign, np.float32)

        def run(isa: str, x: Array = x) -> tuple[Array, ...]:
            out = np.zeros((1, 64), np.float32)
            struct, _arrays = quantised(isa, x, 32)
            kernels(isa).multiply(
                ctypes.byref(matrix), 0, 4, ctypes.byref(struct), 0, 1, at(out), 64
            )
            return (out,)

        assert (same_on_all(run)[0] == 64 * 127 * sign * value).all()


# -- attention -------------------------------------------------------------------------------------


class Pool:
    """Blocks of one layer and one KV head, filled by `store_kv`."""

    def __init__(self, isa: str, head_dim: int, block_size: int, kv_type: str, keys: int) -> None:
        self.size = 4 if kv_type == "float32" else 2
        self.head_dim, self.block_size, self.kv_type = head_dim, block_size, kv_type
        blocks = -(-keys // block_size)
        self.half = head_dim * block_size * self.size
        self.memory = np.full((blocks + 3, 2 * self.half), 0xFF, np.uint8)  # NaN where unwritten
        self.table = np.random.default_rng(15).permutation(blocks + 3)[:blocks].astype(np.int32)
        self.keys, self.values = normal(keys, head_dim, seed=16), normal(keys, head_dim, seed=17)
        self.values[0, 0] = 1e6  # beyond what float16 holds
        for key in range(keys):
            place = at(self.memory[self.table[key // block_size]])
            kernels(isa).store_kv(
                at(self.keys[key]), at(self.values[key]), head_dim, block_size,
                key % block_size, KV_TYPES.index(kv_type), place, place + self.half,
            )  # fmt: skip

    def rounded(self, values: Array) -> Array:
        if self.kv_type == "float32":
            return values.astype(np.float64)
        if self.kv_type == "float16":
            return np.clip(values, -65504, 65504).astype(np.float16).astype(np.float64)
        bits = values.view(np.uint32)
        wide = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32)
        return wide.view(np.float32).astype(np.float64)


def attend(isa: str, pool: Pool, query: Array, start: int, segments: int) -> Array:
    """Attention of queries ``[tokens, heads, head_dim]`` over all keys before each, and itself."""
    tokens, heads, head_dim = query.shape
    rows, end = tokens * heads, start + tokens
    scratch = np.zeros(TILE_KEYS * (2 * head_dim + rows) + rows, np.float32)
    attention = Attention(
        at(query), heads * head_dim, heads, head_dim, tokens, start,
        at(pool.memory), at(pool.table), 2 * pool.half, 0, pool.half,
        pool.block_size, KV_TYPES.index(pool.kv_type), at(scratch),
    )  # fmt: skip
    parts = []
    width = pad(-(-end // segments), TILE_KEYS)
    for first in range(0, end, width):
        largest, weight = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
        values = np.zeros((rows, head_dim), np.float32)
        part = Partial(at(largest), at(weight), at(values))
        kernels(isa).attend(ctypes.byref(attention), first, first + width, ctypes.byref(part))
        parts.append((part, largest, weight, values))
    total = parts[0][0]
    for part, *_ in parts[1:]:
        kernels(isa).join(ctypes.byref(total), ctypes.byref(part), rows, head_dim)
    out = np.zeros((rows, head_dim), np.float32)
    for row in range(rows):
        kernels(isa).divide(ctypes.byref(total), row, head_dim, at(out[row]))
    return out.reshape(query.shape)


def exact(pool: Pool, query: Array, start: int) -> Array:
    keys, values = pool.rounded(pool.keys), pool.rounded(pool.values)
    out = np.zeros(query.shape, np.float64)
    for token in range(len(query)):
        scores = query[token].astype(np.float64) @ keys[: start + token + 1].T
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[token] = weights / weights.sum(axis=1, keepdims=True) @ values[: start + token + 1]
    return out


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 32), (3, 64), (4, 128)])
def test_attention(kv_type: str, block_size: int, heads: int, head_dim: int) -> None:
    end = 333

    def run(isa: str) -> tuple[Array, ...]:
        pool = Pool(isa, head_dim, block_size, kv_type, end)
        outs = []
        for start, tokens in ((0, 1), (0, 70), (63, 2), (331, 2), (end - 1, 1), (300, 33)):
            query = normal(tokens, heads, head_dim, seed=18, scale=0.4)
            out = attend(isa, pool, query, start, 1)
            near(out, exact(pool, query, start), 3e-6)
            outs.append(out)
        return (*outs, pool.memory)

    same_on_all(run)


@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_a_query_sees_the_same_alone_and_among_others(block_size: int) -> None:
    pool = Pool(ALL[-1], 64, block_size, "float16", 333)
    query = normal(333, 3, 64, seed=19, scale=0.4)
    for isa in ALL:
        whole = attend(isa, pool, query, 0, 1)
        for start, tokens in ((0, 1), (5, 7), (63, 2), (64, 1), (300, 33), (332, 1)):
            part = attend(isa, pool, query[start : start + tokens].copy(), start, 1)
            assert part.tobytes() == whole[start : start + tokens].tobytes()


def test_segments_joined_are_the_whole() -> None:
    pool = Pool(ALL[-1], 64, 16, "float32", 700)
    query = normal(5, 3, 64, seed=20, scale=0.4)
    for segments in (2, 3, 11):
        near(attend(ALL[-1], pool, query, 695, segments), exact(pool, query, 695), 3e-6)
