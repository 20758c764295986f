"""The native library, compiled once for all tests, and the instruction sets that this CPU has."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from kvferry.kernels.load import LoadOptions
from kvferry.kernels.native.build import find_library
from kvferry.kernels.native.library import Library
from kvferry.kvstore.process.settings import default_cache_dir

OPTIONS = LoadOptions(
    dtype="auto",
    quantization="auto",
    kv_cache_dtype="auto",
    device="cpu",
    block_size=16,
    kv_bytes=1 << 20,
    max_model_len=None,
    threads=1,
)

ISAS = ("portable", "avx2", "avx512")


def compiled_into(cache_dir: Path) -> None:
    """Puts the library that is compiled already into another cache folder."""
    made = find_library(default_cache_dir(os.environ))
    (cache_dir / "native").mkdir(parents=True, exist_ok=True)
    if not (cache_dir / "native" / made.name).exists():
        (cache_dir / "native" / made.name).symlink_to(made)


@cache
def library() -> Library:
    return Library(find_library(default_cache_dir(os.environ)))


@cache
def isas() -> tuple[str, ...]:
    """The instruction sets that this CPU has, the plainest first."""
    return tuple(isa for isa in ISAS if library().isa(isa) == isa)
