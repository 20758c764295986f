"""Products and attention of the native engine alone: how fast, and how far from the peak.

    python -m kvferry.bench.kernels [--isa avx2]

One thread. Products: multiplications a second, by format and rows at once, for the size of a
matrix of the default model and for one that no cache holds. Attention: the same over keys of
float16, a token that decodes and a chunk of a prompt.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry.kernels.native.build import find_library
from kvferry.kernels.native.library import (
    FORMATS,
    KV_TYPES,
    LANES,
    PANELS,
    Attention,
    Kernels,
    Library,
    Matrix,
    Partial,
    Rows,
)
from kvferry.kernels.native.packing import BLOCK_BYTES, GROUPS
from kvferry.kvstore.process.settings import default_cache_dir

ROWS = (1, 2, 4, 16, 64)
SIZES = ((1536, 576), (49152, 576))
HEADS, HEAD_DIM, BLOCK = 3, 64, 16
SECONDS = 0.15
REPEATS = 5
TILE_KEYS = 64


def best(run: Callable[[], None]) -> float:
    """Seconds of one call, the best of some rounds."""
    run()
    began = time.perf_counter()
    run()
    calls = max(1, int(SECONDS / REPEATS / max(time.perf_counter() - began, 1e-7)))
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(calls):
            run()
        found.append((time.perf_counter() - began) / calls)
    return min(found)


def at(array: Any) -> int:
    return int(array.ctypes.data)


def bytes_of(format: str, rows: int, columns: int) -> int:
    if format in BLOCK_BYTES:
        return rows * columns // 32 * BLOCK_BYTES[format]
    return rows * columns * {"float32": 4, "bfloat16": 2}[format]


def products(kernels: Kernels, format: str, size: tuple[int, int]) -> list[float]:
    """GMAC/s for each of ROWS."""
    outs, columns = size
    data = np.zeros(bytes_of(format, outs, columns), np.uint8)
    matrix = Matrix(at(data), None, FORMATS.index(format), outs // LANES, columns)
    group = GROUPS.get(format, 0)
    most = max(ROWS)
    x = np.ones((most, columns), np.float32)
    groups = columns // group if group else 0
    kept = [
        x,
        np.ones((most, columns), np.int8),
        np.ones((most, groups), np.float32),
        np.ones((most, groups), np.float32),
        np.ones((most, groups), np.int32),
    ]
    rows = Rows(*map(at, kept), columns, group)
    out = np.zeros((most, outs), np.float32)
    found = []
    for count in ROWS:

        def run(count: int = count) -> None:
            for panel in range(0, matrix.panels, 16 * PANELS):
                kernels.multiply(
                    ctypes.byref(matrix), panel, min(16 * PANELS, matrix.panels - panel),
                    ctypes.byref(rows), 0, count, at(out) + 4 * LANES * panel, outs,
                )  # fmt: skip

        found.append(count * outs * columns / best(run) / 1e9)
    return found


def attention(kernels: Kernels, kv_type: str, tokens: int, keys: int) -> float:
    """GMAC/s, scores and values together."""
    width = 4 if kv_type == "float32" else 2
    half = HEAD_DIM * BLOCK * width
    blocks = keys // BLOCK
    pool = np.zeros((blocks, 2 * half), np.uint8)
    table = np.arange(blocks, dtype=np.int32)
    rows = tokens * HEADS
    query = np.zeros((rows, HEAD_DIM), np.float32)
    scratch = np.zeros(TILE_KEYS * (2 * HEAD_DIM + rows) + rows, np.float32)
    parts = [np.zeros(rows, np.float32), np.zeros(rows, np.float32),
             np.zeros((rows, HEAD_DIM), np.float32)]  # fmt: skip
    asked = Attention(
        at(query), HEADS * HEAD_DIM, HEADS, HEAD_DIM, tokens, keys - tokens,
        at(pool), at(table), 2 * half, 0, half, BLOCK, KV_TYPES.index(kv_type), at(scratch),
    )  # fmt: skip
    part = Partial(*map(at, parts))
    took = best(lambda: kernels.attend(ctypes.byref(asked), 0, keys, ctypes.byref(part)))
    return 2 * rows * keys * HEAD_DIM / took / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(prog="kvferry.bench.kernels", description=__doc__)
    parser.add_argument("--isa", default=None)
    library = Library(find_library(default_cache_dir(os.environ)))
    isa = library.isa(parser.parse_args().isa)
    if isa is None:
        parser.error("this CPU does not run it")
    kernels = library.kernels(isa)
    print(f"{isa}: GMAC/s by rows at once")
    print("| matrix | format | " + " | ".join(map(str, ROWS)) + " |")
    print("| --- | --- |" + " --- |" * len(ROWS))
    for size in SIZES:
        for format in FORMATS:
            figures = " | ".join(f"{it:.1f}" for it in products(kernels, format, size))
            print(f"| {size[0]} x {size[1]} | {format} | {figures} |")
    print("\n| attention | 1 token, 4,096 keys | 16 tokens, 4,096 keys |")
    print("| --- | --- | --- |")
    for kv_type in KV_TYPES:
        one, many = (attention(kernels, kv_type, tokens, 4096) for tokens in (1, 16))
        print(f"| {kv_type} | {one:.1f} | {many:.1f} |")


if __name__ == "__main__":
    main()
