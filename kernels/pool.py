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
from kvferry.kernels.host_pool import HostPool


class BlockPool:
    """``tensor``: ``[num_blocks, layers, 2, kv_heads, block_size, head_dim]``, all zero at first.

    On a CPU it lies in a `HostPool`.
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
        self._host = None
        if device.type == "cpu":
            self._host = HostPool(num_blocks, self.block_bytes, num_ahead)
            self._bytes = torch.from_numpy(self._host.bytes)
        else:
            self._bytes = _on_device(num_blocks, self.block_bytes, device)
        self.tensor = self._bytes.view(-1).view(dtype).view(self.shape)

    @property
    def num_blocks(self) -> int:
        return self.shape[0]

    def read(self, block: int) -> bytes | memoryview:
        """The block's bytes: on a CPU a read-only view of them, else a copy."""
        if self._host is not None:
            return self._host.read(block)
        self._check(block)
        return bytes(self._bytes[block].cpu().numpy().data)

    def write(self, block: int, payload: bytes | memoryview) -> None:
        """Overwrites the block; ValueError unless `payload` has `block_bytes` bytes."""
        if self._host is not None:
            self._host.write(block, payload)
            return
        self._check(block)
        data = np.frombuffer(payload, np.uint8)
        if data.size != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {data.size}")
        self._bytes[block].copy_(torch.from_numpy(data.copy()))

    def reached(self, last: int) -> None:
        """Blocks up to `last` are in use: `prepare` begins behind it."""
        if self._host is not None:
            self._host.reached(last)

    def prepare(self) -> bool:
        """Makes a little of the memory ready that is used next; False when it all is."""
        return self._host is not None and self._host.prepare()

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


def _on_device(num_blocks: int, block_bytes: int, device: torch.device) -> torch.Tensor:
    try:
        return torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        size = f"{num_blocks} blocks of {block_bytes} bytes"
        raise ModelError(f"no memory for a KV cache of {size}") from error
