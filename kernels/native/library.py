"""The native library as Python calls it: structures, functions, and the engine handle.

Owns the mirror of `csrc/engine.h` and `csrc/kernels.h` and nothing else: who calls has checked what
it passes. It knows nothing of files or models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

from kvferry.kernels.errors import NotNative

INTERFACE = 3
LANES = 16
PANELS = 4
"""Panels of 16 rows come in multiples of so many."""
FORMATS = ("float32", "bfloat16", "q8_0", "q4_0", "q4_1")
"""Of weights, in the order of their numbers; `csrc/kernels.h` says how they lie in memory."""
KV_TYPES = ("float32", "bfloat16", "float16")
DONE, STOPPED, NO_MEMORY = range(3)


class Matrix(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("bias", c_void_p),
        ("format", c_int32),
        ("panels", c_int32),
        ("columns", c_int32),
    )


class Layer(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("query", Matrix),
        ("key", Matrix),
        ("value", Matrix),
        ("output", Matrix),
        ("gate", Matrix),
        ("up", Matrix),
        ("down", Matrix),
    )


class Model(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("intermediate", "vocabulary", "group", "rope_pairs")),
        ("epsilon", c_float),
        ("query_scale", c_float),
        ("rope_scale", c_float),
        ("block_size", c_int32),
        ("kv_type", c_int32),
        ("frequencies", c_void_p),
        ("final_norm", c_void_p),
        ("layer", POINTER(Layer)),
        ("embedding", Matrix),
        ("head", Matrix),
    )


class Span(Structure):
    _fields_ = (
        ("blocks", c_void_p),
        ("start", c_int32),
        ("tokens", c_int32),
        ("wants_logits", c_int32),
    )


class Place(Structure):
    _fields_ = (
        ("threads", c_int32),
        ("own", c_int32),
        ("cores", c_void_p),
        ("busy", c_void_p),
        ("lines", c_int32),
        ("line", c_int32),
    )


BetweenLayers = ctypes.CFUNCTYPE(c_int)


class Rows(Structure):
    """What products multiply with; for those who call a kernel alone."""

    _fields_ = (
        ("values", c_void_p),
        ("bytes", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("sums", c_void_p),
        ("columns", c_int32),
        ("group", c_int32),
    )


class Attention(Structure):
    _fields_ = (
        ("query", c_void_p),
        ("query_stride", c_int64),
        *((name, c_int32) for name in ("heads", "head_dim", "tokens", "start")),
        ("pool", c_void_p),
        ("blocks", c_void_p),
        *((name, c_int64) for name in ("block_bytes", "keys_offset", "values_offset")),
        ("block_size", c_int32),
        ("kv_type", c_int32),
        ("scratch", c_void_p),
    )


class Partial(Structure):
    _fields_ = (("largest", c_void_p), ("weight", c_void_p), ("values", c_void_p))


def _kernel(*arguments: type) -> type:
    return ctypes.CFUNCTYPE(None, *arguments)


class Kernels(Structure):
    """The functions of one instruction set, for those who call a kernel alone."""

    _fields_ = (
        ("name", c_char_p),
        ("normalise", _kernel(c_void_p, c_void_p, c_float, c_int, c_void_p)),
        ("quantise", _kernel(POINTER(Rows), c_int, c_int, c_int)),
        (
            "multiply",
            _kernel(POINTER(Matrix), c_int, c_int, POINTER(Rows), c_int, c_int, c_void_p, c_int64),
        ),
        ("embed", _kernel(POINTER(Matrix), c_int, c_void_p)),
        ("add", _kernel(c_void_p, c_int, c_void_p)),
        ("gate", _kernel(c_void_p, c_void_p, c_int, c_void_p)),
        ("rotate", _kernel(c_void_p, c_void_p, c_void_p, c_int, c_float, c_int)),
        (
            "store_kv",
            _kernel(c_void_p, c_void_p, c_int, c_int, c_int, c_int, c_void_p, c_void_p),
        ),
        ("attend", _kernel(POINTER(Attention), c_int, c_int, POINTER(Partial))),
        ("join", _kernel(POINTER(Partial), POINTER(Partial), c_int, c_int)),
        ("divide", _kernel(POINTER(Partial), c_int, c_int, c_void_p)),
    )


class Library:
    """The loaded library.

    Parameters
    ----------
    path : as `build.find_library` says it.

    Raises
    ------
    NotNative
        The file cannot be loaded, or has another interface.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.functions = functions = ctypes.CDLL(str(path))
        except OSError as error:
            raise NotNative(f"the native library cannot be loaded: {error}") from error
        found = functions.kvferry_interface()
        if found != INTERFACE:
            raise NotNative(f"{path} has interface {found}, not {INTERFACE}: delete it")
        functions.kvferry_isa.restype = c_char_p
        functions.kvferry_isa.argtypes = (c_char_p,)
        functions.kvferry_open.restype = c_void_p
        functions.kvferry_open.argtypes = (POINTER(Model), c_char_p, POINTER(Place))
        functions.kvferry_close.argtypes = (c_void_p,)
        functions.kvferry_forward.argtypes = (
            *(c_void_p, c_void_p, c_void_p, POINTER(Span), c_int, BetweenLayers, c_void_p),
        )

    def isa(self, asked: str | None) -> str | None:
        """The instruction set `asked`, or the fastest of this CPU; None if it has it not."""
        found: bytes | None = self.functions.kvferry_isa(asked.encode() if asked else None)
        return found.decode() if found is not None else None

    def kernels(self, isa: str) -> Kernels:
        """The kernels of an instruction set that `isa` has confirmed."""
        return Kernels.in_dll(self.functions, f"kernels_{isa}")


class Handle:
    """An open engine of the library; `close` it, and keep alive what its arguments point to."""

    def __init__(self, library: Library, model: Model, isa: str, place: Place) -> None:
        self._functions = library.functions
        self._engine = self._functions.kvferry_open(
            ctypes.byref(model), isa.encode(), ctypes.byref(place)
        )
        if not self._engine:
            raise MemoryError(f"no memory for a native engine of {place.threads} threads")

    def forward(
        self,
        pool: int,
        tokens: int,
        spans: ctypes.Array[Span],
        between_layers: Callable[[], int],
        logits: int,
    ) -> int:
        """One pass, by addresses; DONE, STOPPED or NO_MEMORY."""
        count = len(spans)
        status: int = self._functions.kvferry_forward(
            self._engine, pool, tokens, spans, count, between_layers, logits
        )
        return status

    def close(self) -> None:
        self._functions.kvferry_close(self._engine)
        self._engine = None
