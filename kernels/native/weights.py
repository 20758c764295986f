"""The packed weights of one model: made once, kept in a file, mapped by every node.

Owns which form each matrix gets and the file: a header, the tensors one after the other, an index
of them at the end. It appears under its name when it is whole. What the forms look like is
`packing`'s to know, where tensors come from `sources`'.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from kvferry.kernels.errors import ModelError
from kvferry.kernels.native.library import FORMATS, LANES
from kvferry.kernels.native.packing import (
    COLUMNS,
    GROUPS,
    ROWS,
    pack_blocks,
    pack_floats,
    pad,
    quantise_q8_0,
)
from kvferry.kernels.native.sources import Source

PACKING = 2
"""Raised when the same weights are packed otherwise, so that old files are not used."""
_MAGIC = b"kvferry weights\0"
_ALIGNMENT = 64
_HEADER = len(_MAGIC) + 16

Shapes = Mapping[str, tuple[int, ...]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A packed matrix, or a vector of floats."""

    data: NDArray[np.uint8]
    format: str
    rows: int
    columns: int

    @property
    def panels(self) -> int:
        return self.rows // LANES


class Weights:
    """Mapped packed weights, by name; `close` unmaps nothing that is still referred to."""

    def __init__(self, path: Path) -> None:
        """Maps the file; ModelError if it is not whole."""
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: packed weights cannot be mapped: {error}") from error
        self.size = len(self._map)
        try:
            self.tensors = self._read_index()
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{path}: these packed weights are damaged: delete them") from error

    def _read_index(self) -> dict[str, Tensor]:
        start = int.from_bytes(self._map[len(_MAGIC) : len(_MAGIC) + 8], "little")
        length = int.from_bytes(self._map[len(_MAGIC) + 8 : _HEADER], "little")
        if self._map[: len(_MAGIC)] != _MAGIC or start + length != self.size:
            raise ValueError("no header, or another length than it says")
        whole = np.frombuffer(self._map, np.uint8)
        found = {}
        for name, (offset, size, format, rows, columns) in json.loads(self._map[start:]).items():
            if not _HEADER <= offset <= offset + size <= start or format not in FORMATS:
                raise ValueError(f"{name} is not within the file")
            found[name] = Tensor(whole[offset : offset + size], format, rows, columns)
        return found

    def formats(self) -> dict[str, int]:
        """How many matrices there are of each format."""
        return dict(Counter(it.format for it in self.tensors.values() if it.rows > 1))


def made_once(path: Path, make: Callable[[], None]) -> None:
    """Lets `make` write `path` unless it is there.

    Any number of processes may ask at once: one makes it, the others wait.
    """
    if path.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_file():
            make()


def pack_weights(path: Path, source: Source, shapes: Shapes, quantization: str) -> None:
    """Writes the packed weights `path`.

    Parameters
    ----------
    quantization : `float32`, `bfloat16`, `int8` (the form of GGUF's Q8_0) or `gguf`: as the file
        has them.

    Raises
    ------
    ModelError
        A weight is missing or of another shape, or the file cannot be written.
    """
    began = time.monotonic()
    log.info("packing weights as %s once, into %s", quantization, path)
    index: dict[str, tuple[int, int, str, int, int]] = {}
    others: Counter[str] = Counter()
    with _new_file(path) as file:
        file.write(bytes(_HEADER))
        for name, shape in shapes.items():
            if len(shape) == 1:
                made = Tensor(_vector(source, name, shape), "float32", 1, shape[0])
            else:
                made = _matrix(source, name, shape, quantization)
                if quantization == "gguf" and source.kind(name) != made.format.upper():
                    others[source.kind(name)] += 1
            file.write(bytes(-file.tell() % _ALIGNMENT))
            index[name] = (file.tell(), made.data.size, made.format, made.rows, made.columns)
            file.write(made.data.data)
        start, text = file.tell(), json.dumps(index).encode()
        file.write(text)
        file.seek(0)
        file.write(_MAGIC + start.to_bytes(8, "little") + len(text).to_bytes(8, "little"))
    for kind, count in others.items():
        log.warning(
            "%d matrices are %s, which has no kernel: they are computed with as Q8_0, which takes "
            "more memory and is not quite the same",
            count,
            kind,
        )
    size = path.stat().st_size
    log.info("packed %.0f MB of weights in %.1f s", size / 1e6, time.monotonic() - began)


def _vector(source: Source, name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(source.floats(name, shape)).view(np.uint8)


def _matrix(source: Source, name: str, shape: tuple[int, ...], quantization: str) -> Tensor:
    rows, columns = pad(shape[0], ROWS), pad(shape[1], COLUMNS)
    blocks = source.blocks(name, shape) if quantization == "gguf" else None
    if blocks is not None:
        data = pack_blocks(blocks.data, blocks.format)
        return Tensor(data, blocks.format, rows, columns)
    values = source.floats(name, shape)
    if quantization in ("gguf", "int8"):
        whole = np.zeros((shape[0], pad(shape[1], GROUPS["q8_0"])), np.float32)
        whole[:, : shape[1]] = values
        return Tensor(pack_blocks(quantise_q8_0(whole), "q8_0"), "q8_0", rows, columns)
    return Tensor(pack_floats(values, quantization), quantization, rows, columns)


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name when it is written and synced, or not at all."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
            try:
                yield file.file  # type: ignore[misc]
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise ModelError(f"{path}: packed weights cannot be written: {error}") from error
