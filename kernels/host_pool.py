"""Blocks in the memory of the host: bytes by number, mapped a little ahead of their use.

Owns the memory and its bounds. It knows nothing of what lies in a block, nor of torch, so that an
engine without torch has the same pool.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry.kernels.errors import ModelError
from kvferry.kernels.prefault import Prefault

_ALIGNMENT = 64


class HostPool:
    """``bytes``: ``[num_blocks, block_bytes]`` uint8, aligned to 64 bytes.

    All zero at first; no more memory is touched than has been written, and what `prepare` maps
    ahead of it: `num_ahead` blocks, or less (see `prefault`).

    Raises
    ------
    ModelError
        There is no memory for it.
    """

    def __init__(self, num_blocks: int, block_bytes: int, num_ahead: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        try:
            # Fresh pages of the system are zero by nature, and none is touched here.
            raw = np.zeros(num_blocks * block_bytes + _ALIGNMENT, np.uint8)
        except MemoryError as error:
            size = f"{num_blocks} blocks of {block_bytes} bytes"
            raise ModelError(f"no memory for a KV cache of {size}") from error
        offset = -raw.ctypes.data % _ALIGNMENT
        flat = raw[offset : offset + num_blocks * block_bytes]
        self.bytes: NDArray[np.uint8] = flat.reshape(num_blocks, block_bytes)
        self._prefault = Prefault(flat, num_ahead * block_bytes)

    def read(self, block: int) -> memoryview:
        """A read-only view of the block's bytes."""
        self._check(block)
        return memoryview(self.bytes[block]).toreadonly()

    def write(self, block: int, payload: bytes | memoryview) -> None:
        """Overwrites the block; ValueError unless `payload` has `block_bytes` bytes."""
        self._check(block)
        self.reached(block)
        data = np.frombuffer(payload, np.uint8)
        if data.size != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {data.size}")
        self.bytes[block] = data

    def copy(self, source: int, target: int) -> None:
        """Copies one whole block onto another."""
        self._check(source)
        self._check(target)
        self.bytes[target] = self.bytes[source]

    def reached(self, last: int) -> None:
        """Blocks up to `last` are in use: `prepare` begins behind it."""
        self._prefault.reached((last + 1) * self.block_bytes)

    def prepare(self) -> bool:
        """Makes a little of the memory ready that is used next; False when it all is."""
        return self._prefault.step()

    def _check(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} is outside the pool of {self.num_blocks}")
