"""The native engine: a model of the Llama kind on a CPU, one call of the library a pass.

Joins architecture, packed weights, pool and library into an `Engine`. It imports neither torch nor
transformers, and knows nothing of what its blocks mean to anyone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvferry.kernels.engine import Batch, EngineSpec, Logits, check_batch
from kvferry.kernels.errors import ModelError
from kvferry.kernels.host_pool import HostPool
from kvferry.kernels.native import library as c
from kvferry.kernels.native.architecture import Architecture, read_architecture
from kvferry.kernels.native.build import find_library
from kvferry.kernels.native.packing import GROUPS
from kvferry.kernels.native.sources import PROJECTIONS, SafetensorsSource, shapes
from kvferry.kernels.native.weights import PACKING, Tensor, Weights, made_once, pack_weights

NUMERICS = "1"
"""Raised whenever the engine's results change in a bit, or a block's layout does."""
GGUF_WEIGHTS = f"gguf-{PACKING}.weights"
"""In a folder that was converted from GGUF: the weights as the file had them, packed."""
KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Borrowing:
    """Cores that are an engine's own, and others that it uses while no other process computes.

    Parameters
    ----------
    busy : `lines` lines of 64 bytes, one for each such process: its first four bytes are not 0
        while it computes. `line` is the one of this process.
    """

    own: tuple[int, ...]
    borrowed: tuple[int, ...]
    busy: memoryview
    lines: int
    line: int


@dataclass(frozen=True, slots=True)
class NativeOptions:
    """How a model is computed with.

    Parameters
    ----------
    weights : `float32`, `bfloat16`, `int8` or `gguf`.
    kv_dtype : one of `KV_BYTES`.
    isa : the instruction set that is forced; None: the fastest of this CPU.
    borrowing : where threads run, in whose place `threads` is; None: anywhere.
    """

    weights: str
    kv_dtype: str
    block_size: int
    threads: int
    isa: str | None = None
    borrowing: Borrowing | None = None

    @property
    def max_threads(self) -> int:
        """With those on borrowed cores."""
        at = self.borrowing
        return self.threads if at is None else len(at.own) + len(at.borrowed)


class NativeModel:
    """A model that can be computed with here, before there is a pool."""

    def __init__(
        self,
        folder: Path,
        options: NativeOptions,
        *,
        max_model_len: int | None,
        cache_dir: Path,
        digest: str,
    ) -> None:
        """Reads config, library and weights, each made first if need be.

        `digest` names the content of the folder.

        Raises
        ------
        NotNative
            The model, or this machine, needs another engine.
        ModelError
            The model cannot be served by any.
        """
        self.architecture = read_architecture(folder, max_model_len)
        self.library = c.Library(find_library(cache_dir))
        isa = self.library.isa(options.isa)
        if isa is None:
            raise ModelError(f"KVFERRY_ISA: this CPU does not run {options.isa}")
        self.isa = isa
        self.options = options
        path = folder / GGUF_WEIGHTS
        if options.weights != "gguf":
            path = cache_dir / "native" / f"{digest[:16]}-{options.weights}-{PACKING}.weights"
            made_once(path, lambda: self._pack(folder, path))
        self.weights = Weights(path)

    def _pack(self, folder: Path, path: Path) -> None:
        source = SafetensorsSource(folder)
        pack_weights(path, source, shapes(self.architecture), self.options.weights)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: keys and values of its tokens in all layers."""
        found, options = self.architecture, self.options
        values = found.layers * 2 * found.kv_heads * found.head_dim * options.block_size
        return values * KV_BYTES[options.kv_dtype]


class NativeEngine:
    """An `Engine`; used by one thread."""

    def __init__(self, model: NativeModel, num_blocks: int) -> None:
        found, options = model.architecture, model.options
        longest = -(-found.max_model_len // options.block_size)
        self._pool = HostPool(num_blocks, model.block_bytes, longest)
        self._kept = _Kept(found, model.weights, options)
        self._handle = c.Handle(model.library, self._kept.model, model.isa, self._kept.place)
        self._between_layers: Callable[[], None] = _nothing
        self._raised: BaseException | None = None
        self._callback = c.BetweenLayers(self._between)
        self._logits = np.empty((0, self._kept.stride), np.float32)
        self._spec = EngineSpec(
            block_size=options.block_size,
            num_blocks=num_blocks,
            block_bytes=model.block_bytes,
            num_layers=found.layers,
            vocab_size=found.vocab_size,
            max_model_len=found.max_model_len,
            identity=_identity(model),
        )

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    def forward(self, batch: Batch, between_layers: Callable[[], None]) -> Logits:
        check_batch(batch, self._spec)
        spans = (c.Span * len(batch.spans))()
        tables: list[NDArray[np.int32]] = []
        last = rows = 0
        for span, struct in zip(batch.spans, spans, strict=True):
            first, end = span.start // self._spec.block_size, -(-span.end // self._spec.block_size)
            table = np.array(span.blocks[:end], np.int32)
            tables.append(table)
            struct.blocks, struct.start = table.ctypes.data, span.start
            struct.tokens, struct.wants_logits = len(span.tokens), span.wants_logits
            last = max(last, int(table[first:].max()))
            rows += span.wants_logits
        tokens = np.fromiter(
            (token for span in batch.spans for token in span.tokens), np.int32, batch.num_tokens
        )
        if len(self._logits) < rows:
            self._logits = np.empty((rows, self._kept.stride), np.float32)
        self._pool.reached(last)
        self._between_layers = between_layers
        status = self._handle.forward(
            self._pool.bytes.ctypes.data,
            tokens.ctypes.data,
            spans,
            self._callback,
            self._logits.ctypes.data,
        )
        if status == c.STOPPED and self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised
        if status != c.DONE:
            raise MemoryError(f"no memory for a pass of {batch.num_tokens} tokens")
        return self._logits[:rows, : self._spec.vocab_size]

    def _between(self) -> int:
        try:
            self._between_layers()
        except BaseException as error:  # it must not pass through C: it is raised behind it
            self._raised = error
            return 1
        return 0

    def read(self, block: int) -> bytes | memoryview:
        return self._pool.read(block)

    def write(self, block: int, payload: bytes | memoryview) -> None:
        self._pool.write(block, payload)

    def copy(self, source: int, target: int) -> None:
        self._pool.copy(source, target)

    def prepare(self) -> bool:
        return self._pool.prepare()

    def close(self) -> None:
        """Ends the engine's threads and frees its memory; it must not be used any more."""
        self._handle.close()


def _nothing() -> None:
    pass


class _Kept:
    """The structures that an open engine goes on reading, and all they point to."""

    def __init__(self, found: Architecture, weights: Weights, options: NativeOptions) -> None:
        self._weights = weights
        self._frequencies = np.ascontiguousarray(found.frequencies)
        self._layers = (c.Layer * found.layers)()
        for number, layer in enumerate(self._layers):
            self._fill(layer, f"{number}.")
        self.place = self._place(options)
        groups = {GROUPS[it.format] for it in weights.tensors.values() if it.format in GROUPS}
        assert len(groups) <= 1, "one pass quantises its activations in one way"
        tensors = weights.tensors
        embedding = tensors["embedding"]
        head = tensors.get("head", embedding)
        self.stride = head.rows
        """Floats from one row of logits to the next."""
        self.model = c.Model(
            layers=found.layers,
            hidden=found.hidden,
            heads=found.heads,
            kv_heads=found.kv_heads,
            head_dim=found.head_dim,
            intermediate=tensors["0.down"].columns,
            vocabulary=head.rows,
            group=next(iter(groups), 0),
            rope_pairs=found.head_dim // 2,
            epsilon=found.epsilon,
            query_scale=found.head_dim**-0.5,
            rope_scale=found.rope_scale,
            block_size=options.block_size,
            kv_type=c.KV_TYPES.index(options.kv_dtype),
            frequencies=self._frequencies.ctypes.data,
            final_norm=_address(tensors["final_norm"]),
            layer=self._layers,
            embedding=_matrix(embedding),
            head=_matrix(head),
        )

    def _place(self, options: NativeOptions) -> c.Place:
        at = options.borrowing
        if at is None:
            return c.Place(options.threads, options.threads, None, None, 0, 0)
        os.sched_setaffinity(0, at.own)  # of this thread, which is the first of those that compute
        self._cores = np.array([*at.own, *at.borrowed], np.int32)
        self._busy = np.frombuffer(at.busy, np.uint8)
        return c.Place(
            len(self._cores),
            len(at.own),
            self._cores.ctypes.data,
            self._busy.ctypes.data,
            at.lines,
            at.line,
        )

    def _fill(self, layer: c.Layer, prefix: str) -> None:
        tensors = self._weights.tensors
        for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm"):
            if (tensor := tensors.get(prefix + name)) is not None:
                setattr(layer, name, _address(tensor))
        for name in PROJECTIONS:
            matrix = _matrix(tensors[prefix + name])
            if (bias := tensors.get(f"{prefix}{name}_bias")) is not None:
                matrix.bias = _address(bias)
            setattr(layer, name, matrix)


def _address(tensor: Tensor) -> int:
    return int(tensor.data.ctypes.data)


def _matrix(tensor: Tensor) -> c.Matrix:
    number = c.FORMATS.index(tensor.format)
    return c.Matrix(_address(tensor), None, number, tensor.panels, tensor.columns)


def _identity(model: NativeModel) -> Mapping[str, str]:
    """No instruction set is among them: all give the same bits."""
    found, options = model.architecture, model.options
    formats = ",".join(sorted(model.weights.formats()))
    return {
        "engine": "native",
        "numerics": f"{NUMERICS}.{PACKING}",
        "device": "cpu",
        "attention": "full",
        "kv_dtype": options.kv_dtype,
        "weights_format": f"{options.weights}:{formats}",
        "block_shape": "layer,kv_head,kv,dim/token="
        + ",".join(map(str, (found.layers, found.kv_heads, 2, found.head_dim, options.block_size))),
        "layers": str(found.layers),
        "heads": str(found.heads),
        "kv_heads": str(found.kv_heads),
        "head_dim": str(found.head_dim),
        "rope": found.rope,
    }
