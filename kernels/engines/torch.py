"""The torch engine: a transformers model run on packed batches over the paged pool.

Joins model, pool and attention into an `Engine`. It knows nothing of what its blocks mean to
anyone, and keeps nothing of a pass but what the pass wrote into the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvferry.kernels.attention.torch import Plan, TorchAttention
from kvferry.kernels.engine import Batch, EngineSpec, Logits, check_batch
from kvferry.kernels.model import CausalModel, load_model
from kvferry.kernels.model_config import ModelFacts, read_facts, resolve_device
from kvferry.kernels.pool import BlockPool

NUMERICS = "1"
"""Raised whenever the engine's results change by more than rounding, or a block's layout does."""


def load_torch_engine(
    folder: Path,
    *,
    dtype: str,
    device: str,
    block_size: int,
    num_blocks: int,
    max_model_len: int | None,
) -> TorchEngine:
    """Loads the model folder `folder`.

    `dtype` is "auto", "float32", "float16" or "bfloat16", for weights, activations and KV alike;
    `device` as torch names it, or "auto". ModelError if the model cannot be served, saying why.
    """
    place = resolve_device(device)
    facts = read_facts(folder, dtype=dtype, device=place, max_model_len=max_model_len)
    pool = BlockPool(
        num_blocks=num_blocks,
        layers=facts.num_layers,
        block_size=block_size,
        kv_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        dtype=facts.dtype,
        device=place,
        num_ahead=-(-facts.max_model_len // block_size),  # the longest sequence may be the next one
    )
    return TorchEngine(facts, load_model(facts, place), pool)


class TorchEngine:
    """An `Engine`; one for each pool, used by one thread."""

    def __init__(self, facts: ModelFacts, model: CausalModel, pool: BlockPool) -> None:
        self._model = model
        self._pool = pool
        self._attention = TorchAttention(pool, facts.heads)
        num_blocks, layers, _, _, block_size, _ = pool.shape
        self._spec = EngineSpec(
            block_size=block_size,
            num_blocks=num_blocks,
            block_bytes=pool.block_bytes,
            num_layers=layers,
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            identity=_identity(facts, pool),
        )

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    @torch.inference_mode()
    def forward(self, batch: Batch, between_layers: Callable[[], None]) -> Logits:
        check_batch(batch, self._spec)
        self._pool.reached(_last_written(batch, self._spec.block_size))
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for span in batch.spans:
            tokens += span.tokens
            positions += range(span.start, span.end)
            if span.wants_logits:
                rows.append(len(tokens) - 1)
        layers = _Pass(self._attention, self._attention.plan(batch), between_layers)
        logits = self._model.forward(tokens, positions, rows, layers)
        return np.asarray(logits.float().cpu().numpy(), np.float32)

    def read(self, block: int) -> bytes | memoryview:
        return self._pool.read(block)

    def write(self, block: int, payload: bytes | memoryview) -> None:
        self._pool.write(block, payload)

    def copy(self, source: int, target: int) -> None:
        self._pool.copy(source, target)

    def prepare(self) -> bool:
        return self._pool.prepare()


def _last_written(batch: Batch, block_size: int) -> int:
    """The highest block that the pass writes to."""
    return max(
        max(span.blocks[span.start // block_size : -(-span.end // block_size)])
        for span in batch.spans
    )


@dataclass(frozen=True, slots=True)
class _Pass:
    """The layers of one pass, as the model's attention sees them."""

    attention: TorchAttention
    plan: Plan
    between_layers: Callable[[], None]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        output = self.attention.run(self.plan, layer, query, key, value, scaling)
        self.between_layers()
        return output


def _identity(facts: ModelFacts, pool: BlockPool) -> Mapping[str, str]:
    return {
        "engine": "torch",
        "numerics": NUMERICS,
        "device": pool.tensor.device.type,
        "attention": "full",
        "kv_dtype": facts.dtype_name,
        "activation_dtype": facts.dtype_name,
        "block_shape": "layer,kv,kv_head,token,dim=" + ",".join(map(str, pool.shape[1:])),
        "block_stride": ",".join(map(str, pool.tensor.stride())),
        "layers": str(facts.num_layers),
        "heads": str(facts.heads),
        "kv_heads": str(facts.kv_heads),
        "head_dim": str(facts.head_dim),
        "rope": facts.rope,
    }
