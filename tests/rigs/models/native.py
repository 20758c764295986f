"""The native library, compiled once for all tests, and the instruction sets that this CPU has."""

from __future__ import annotations

import os
from functools import cache

from kvferry.kernels.native.build import find_library
from kvferry.kernels.native.library import Library
from kvferry.kvstore.process.settings import default_cache_dir


@cache
def library() -> Library:
    return Library(find_library(default_cache_dir(os.environ)))


ISAS = ("portable", "avx2", "avx512")


@cache
def isas() -> tuple[str, ...]:
    """The instruction sets that this CPU has, the plainest first."""
    return tuple(isa for isa in ISAS if library().isa(isa) == isa)
