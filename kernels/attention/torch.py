"""Attention over the paged pool with torch operations: planned once a pass, run once a layer.

A pass first writes its new keys and values into the pool. Spans of one token (decoding) are then
gathered in groups of similar length and computed together; longer spans (prefill) one by one. It
knows nothing of models: it sees queries, keys and values after rope.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvferry.kernels.engine import Batch, Span
from kvferry.kernels.pool import BlockPool

SPLIT_FROM = 64
"""On a CPU a span of this many tokens is computed in two parts instead of under a mask."""
GROUP_BYTES = 3 << 20
"""Gathered keys and values of a group: what stays in a core's cache until they are used."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows ``[block_size, head_dim]`` of the pool to gather, as numbers within layer 0.

    Gathering gives keys and values ``[2, sequences, kv_heads, tokens, head_dim]``.
    """

    index: torch.Tensor
    sequences: int
    tokens: int


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Spans of one token each; shorter ones are padded by rows that the mask hides."""

    queries: torch.Tensor
    """Their places in the packed pass, ``[sequences]``."""
    rows: Rows
    mask: torch.Tensor
    """``[sequences, 1, 1, tokens]``: 0 or minus infinity."""


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """One span of several tokens: places ``[first, last)`` of the pass, positions from `start`."""

    first: int
    last: int
    start: int
    rows: Rows | None
    """What to gather: nothing at start 0, the past if there is no mask, else past and span."""
    mask: torch.Tensor | None
    """``[span tokens, gathered tokens]``: 0 or minus infinity."""


@dataclass(frozen=True, slots=True)
class Plan:
    slots: torch.Tensor
    """Where each new token's KV heads go, ``[tokens * kv_heads]``: numbers of rows ``[head_dim]``
    of the keys in layer 0."""
    groups: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillSpan, ...]


class TorchAttention:
    """Full causal attention with grouped queries, on any device and dtype that torch has.

    Positions of a block beyond its sequence's end are hidden by a mask, and a mask cannot hide a
    NaN; so a block that a pass enters and does not fill is set to zero first.
    """

    def __init__(self, pool: BlockPool, heads: int) -> None:
        _, self._layers, _, self._kv_heads, self._block_size, self._head_dim = pool.shape
        self._pool = pool
        self._heads = heads
        self._device = pool.tensor.device
        self._vectors = pool.tensor.view(-1, self._head_dim)
        self._rows = pool.tensor.view(-1, self._block_size * self._head_dim)
        self._workspace = pool.tensor.new_empty(0)
        self._on_cpu = self._device.type == "cpu"
        block = 2 * self._kv_heads * self._rows.shape[1] * self._rows.itemsize
        self._group_blocks = (GROUP_BYTES if self._on_cpu else GROUP_BYTES << 6) // block

    def plan(self, batch: Batch) -> Plan:
        """Everything about `batch` that is the same in all layers."""
        places: list[tuple[int, Span]] = []
        first = 0
        for span in batch.spans:
            places.append((first, span))
            first += len(span.tokens)
        self._clear_entered(batch)
        single = [place for place in places if len(place[1].tokens) == 1]
        longer = [place for place in places if len(place[1].tokens) > 1]
        return Plan(
            slots=self._slots(batch),
            groups=tuple(self._decode_group(group) for group in self._grouped(single)),
            prefills=tuple(self._prefill_span(place, span) for place, span in longer),
        )

    def run(
        self,
        plan: Plan,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Writes the pass's keys and values into the pool and attends.

        Parameters
        ----------
        query : ``[heads, tokens, head_dim]``
        key, value : ``[kv_heads, tokens, head_dim]``

        Returns
        -------
        ``[tokens, heads, head_dim]``
        """
        self._write(plan, layer, key, value)
        by_token = query.transpose(0, 1)
        if len(plan.groups) == 1 and not plan.prefills:
            return self._decode(plan.groups[0], layer, by_token, scaling)
        output = torch.empty_like(by_token, memory_format=torch.contiguous_format)
        for group in plan.groups:
            queries = by_token.index_select(0, group.queries)
            attended = self._decode(group, layer, queries, scaling)
            output.index_copy_(0, group.queries, attended)
        for span in plan.prefills:
            part = slice(span.first, span.last)
            attended = self._prefill(
                span, layer, query[:, part], key[:, part], value[:, part], scaling
            )
            output[part] = attended.transpose(0, 1)
        return output

    def _write(self, plan: Plan, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        per_layer = 2 * self._kv_heads * self._block_size
        slots = plan.slots + layer * per_layer
        for vectors, places in ((key, slots), (value, slots + per_layer // 2)):
            flat = vectors.transpose(0, 1).reshape(-1, self._head_dim)
            self._vectors.index_copy_(0, places, flat)

    def _gather(self, rows: Rows, layer: int) -> torch.Tensor:
        """``[2, sequences, kv_heads, tokens, head_dim]`` in the workspace, until the next call."""
        count = rows.index.numel()
        if self._workspace.shape[0] < count:
            self._workspace = self._rows.new_empty(count, self._rows.shape[1])
        gathered = self._workspace[:count]
        index = rows.index + layer * 2 * self._kv_heads
        torch.index_select(self._rows, 0, index, out=gathered)
        return gathered.view(2, rows.sequences, self._kv_heads, rows.tokens, self._head_dim)

    def _decode(
        self, group: DecodeGroup, layer: int, queries: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """``[sequences, heads, head_dim]`` for queries of that shape.

        The queries that share a KV head are the rows of one product: three times as fast in
        float16 as asking torch for grouped queries, and as fast as writing the products out.
        """
        keys, values = self._gather(group.rows, layer)
        shape = (group.rows.sequences, self._kv_heads, -1, self._head_dim)
        attended = scaled_dot_product_attention(
            queries.reshape(shape), keys, values, attn_mask=group.mask, scale=scaling
        )
        return attended.reshape(-1, self._heads, self._head_dim)

    def _prefill(
        self,
        span: PrefillSpan,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """``[heads, span tokens, head_dim]``."""
        if span.rows is None:
            return scaled_dot_product_attention(
                query[None], key[None], value[None], is_causal=True, scale=scaling, enable_gqa=True
            )[0]
        keys, values = self._gather(span.rows, layer)
        if span.mask is None:
            past = (keys[0, :, : span.start], values[0, :, : span.start])
            return self._split(query, past, (key, value), scaling)
        return scaled_dot_product_attention(
            query[None], keys, values, attn_mask=span.mask, scale=scaling, enable_gqa=True
        )[0]

    def _split(
        self,
        query: torch.Tensor,
        past: tuple[torch.Tensor, torch.Tensor],
        new: tuple[torch.Tensor, torch.Tensor],
        scaling: float,
    ) -> torch.Tensor:
        """Attends to past and new keys apart, without a mask, and joins both by their sums of
        exponentials (as in Dao et al., *FlashAttention*, 2022)."""
        heads, tokens, head_dim = query.shape
        queries = query.view(self._kv_heads, -1, tokens, head_dim)
        results = []
        for (key, value), causal in ((past, False), (new, True)):
            keys, values = (t[:, None].expand(-1, queries.shape[1], -1, -1) for t in (key, value))
            results.append(_flash(queries, keys, values, 0.0, causal, scale=scaling))
        (before, log_before), (within, log_within) = results
        share = torch.sigmoid(log_before - log_within)[..., None]
        joined = torch.lerp(within.float(), before.float(), share)
        return joined.view(heads, tokens, head_dim)

    def _clear_entered(self, batch: Batch) -> None:
        for span in batch.spans:
            last, filled = divmod(span.end, self._block_size)
            if filled and last * self._block_size >= span.start:
                self._pool.clear(span.blocks[last])

    def _slots(self, batch: Batch) -> torch.Tensor:
        heads, size = self._kv_heads, self._block_size
        per_block = self._layers * 2 * heads * size
        slots: list[torch.Tensor] = []
        for span in batch.spans:
            positions = torch.arange(span.start, span.end)
            table = torch.tensor(list(span.blocks[: self._count(span.end)]))
            slots.append(table[positions // size] * per_block + positions % size)
        by_head = torch.cat(slots)[:, None] + torch.arange(heads) * size
        return by_head.flatten().to(self._device)

    def _grouped(self, places: list[tuple[int, Span]]) -> list[list[tuple[int, Span]]]:
        """Groups of similar length, each in the order of the pass.

        A group is bounded in memory, and its padding to a quarter of its longest sequence.
        """
        groups: list[list[tuple[int, Span]]] = []
        longest = 0
        for place in sorted(places, key=lambda place: -place[1].end):
            blocks = self._count(place[1].end)
            fits = groups and longest * (len(groups[-1]) + 1) <= self._group_blocks
            if fits and longest - blocks <= max(2, longest // 4):
                groups[-1].append(place)
            else:
                groups.append([place])
                longest = blocks
        return [sorted(group, key=lambda place: place[0]) for group in groups]

    def _decode_group(self, places: list[tuple[int, Span]]) -> DecodeGroup:
        blocks = max(self._count(span.end) for _, span in places)
        tables: list[Sequence[int]] = []
        for _, span in places:
            used = list(span.blocks[: self._count(span.end)])
            # Padding repeats a block of the same sequence: no other's NaN can come in.
            tables.append(used + used[:1] * (blocks - len(used)))
        ends = torch.tensor([span.end for _, span in places])
        hidden = torch.arange(blocks * self._block_size) >= ends[:, None]
        return DecodeGroup(
            queries=torch.tensor([first for first, _ in places], device=self._device),
            rows=self._rows_of(tables),
            mask=self._mask(hidden)[:, None, None],
        )

    def _prefill_span(self, first: int, span: Span) -> PrefillSpan:
        last = first + len(span.tokens)
        if span.start == 0:
            return PrefillSpan(first, last, 0, None, None)
        if self._on_cpu and len(span.tokens) >= SPLIT_FROM:
            past = span.blocks[: self._count(span.start)]
            return PrefillSpan(first, last, span.start, self._rows_of([past]), None)
        rows = self._rows_of([span.blocks[: self._count(span.end)]])
        hidden = torch.arange(rows.tokens) > torch.arange(span.start, span.end)[:, None]
        return PrefillSpan(first, last, span.start, rows, self._mask(hidden))

    def _rows_of(self, tables: list[Sequence[int]]) -> Rows:
        table = torch.tensor([list(table) for table in tables])[
            None, :, None
        ]  # [1, sequences, 1, blocks]
        kind = torch.arange(2)[:, None, None, None]
        head = torch.arange(self._kv_heads)[:, None]
        rows = (table * self._layers * 2 + kind) * self._kv_heads + head
        tokens = len(tables[0]) * self._block_size
        return Rows(rows.flatten().to(self._device), len(tables), tokens)

    def _mask(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._pool.tensor.dtype)
        return mask.masked_fill_(hidden, -math.inf).to(self._device)

    def _count(self, tokens: int) -> int:
        return -(-tokens // self._block_size)
