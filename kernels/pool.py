"""The paged pool: one tensor that holds every block's keys and values of all layers.

The block is the outermost dimension, so a block is one contiguous run of bytes that can be sent,
stored and checked as it lies. Inside it the order is layer, key or value, KV head, token, head
dimension: one head's tokens of one block are contiguous, which lets attention gather them as rows.
The pool knows nothing of sequences, keys or who uses a block.
"""

from __future__ import annotations

import numpy as np
import torch

from kvferry.kernels.errors import ModelError
from kvferry.kernels.prefault import Prefault

_ALIGNMENT = 64


class BlockPool:
    """``tensor``: ``[num_blocks, layers, 2, kv_heads, block_size, head_dim]``.

    All zero at first; on a CPU no more memory is touched than has been written, and what `prepare`
    maps ahead of it: `num_ahead` blocks, or less (see `prefault`).
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        layers: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        num_ahead: int = 0,
    ) -> None:
        self.shape = (num_blocks, layers, 2, kv_heads, block_size, head_dim)
        self.block_bytes = int(np.prod(self.shape[1:])) * dtype.itemsize
        try:
            flat = _zeros(num_blocks * self.block_bytes, device)
        except (MemoryError, torch.OutOfMemoryError) as error:
            size = f"{num_blocks} blocks of {self.block_bytes} bytes"
            raise ModelError(f"no memory for a KV cache of {size}") from error
        self._bytes = flat.view(num_blocks, self.block_bytes)
        self.tensor = flat.view(dtype).view(self.shape)
        self._host = self._bytes.numpy() if device.type == "cpu" else None
        self._prefault = None
        if self._host is not None:
            self._prefault = Prefault(self._host.reshape(-1), num_ahead * self.block_bytes)

    @property
    def num_blocks(self) -> int:
        return self.shape[0]

    def read(self, block: int) -> bytes | memoryview:
        """The block's bytes: on a CPU a read-only view of them, else a copy."""
        self._check(block)
        if self._host is None:
            return bytes(self._bytes[block].cpu().numpy().data)
        return memoryview(self._host[block]).toreadonly()

    def write(self, block: int, payload: bytes | memoryview) -> None:
        """Overwrites the block; ValueError unless `payload` has `block_bytes` bytes."""
        self._check(block)
        self.reached(block)
        data = np.frombuffer(payload, np.uint8)
        if data.size != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {data.size}")
        if self._host is None:
            self._bytes[block].copy_(torch.from_numpy(data.copy()))
        else:
            self._host[block] = data

    def reached(self, last: int) -> None:
        """Blocks up to `last` are in use: `prepare` begins behind it."""
        if self._prefault is not None:
            self._prefault.reached((last + 1) * self.block_bytes)

    def prepare(self) -> bool:
        """Makes a little of the memory ready that is used next; False when it all is."""
        return self._prefault is not None and self._prefault.step()

    def copy(self, source: int, target: int) -> None:
        self._check(source)
        self._check(target)
        self._bytes[target].copy_(self._bytes[source])

    def clear(self, block: int) -> None:
        """Sets the block to zero."""
        self._bytes[block].zero_()

    def _check(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block {block} is outside the pool of {self.num_blocks}")


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    # torch.zeros would write every page; numpy takes fresh ones from the system, zero by nature.
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[offset : offset + size])
