"""What whoever runs the server may ask, and what it is answered.

Owns the field names of these requests and answers: the cache, the drain, the end of a request, what
runs here, and what a test may do to it. What is done about them is for others.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType

from kvferry.gateway.protocols.common import Count, hint

BlockKey = Annotated[str, hint(pattern="^[0-9a-f]{32}$")]


# -- requests --------------------------------------------------------------------------------------


class AbortRequest(Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/abort`. `rid` is what SGLang calls it."""

    request_id: str | None = None
    rid: str | None = None


class CacheChain(Struct, frozen=True, kw_only=True):
    """The blocks of one prompt: the fields of a chat or completions request beside these."""

    tenant: str | None = None
    """Whose prompt it is: the name of an API key."""
    keys: list[BlockKey] | None = None
    """The blocks themselves, from the first one on, in place of a prompt."""
    ttl: float | None = None
    """Seconds: how long a pin lasts, or a prefetch may take."""


class CacheClear(Struct, frozen=True, kw_only=True):
    """The body of `POST /admin/cache/clear`."""

    tenant: str | None = None
    all: bool | None = None
    tiers: list[Literal["device", "store"]] | None = None
    """Those that forget; everything otherwise. `store` is memory and disk."""


class FaultsRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of `POST /debug/faults`."""

    node: str
    """`all` nodes, those of a role, one by its name or address, or `gateway`."""
    rules: list[dict[str, Any]] | None = None
    """Faults of the frames that it sends, in place of earlier ones."""
    hold: list[str] | None = None
    """Stages at which requests stop until another list is sent."""
    preempt: int = 0
    """Sequences that a decode node preempts, the youngest first."""
    seed: int = 0
    store: dict[str, Any] | None = None
    """Faults of a store's tiers."""
    clear: bool = False
    """Everything as it was."""


# -- answers ---------------------------------------------------------------------------------------


class Ledger(Struct):
    """What every process has in use."""

    gateway: dict[str, Any]
    nodes: list[dict[str, Any]]


class Injected(Struct):
    nodes: list[Any]
    gateway: dict[str, Any] | UnsetType = UNSET


class Difference(Struct):
    """Where a prompt leaves the caller's last one."""

    common_tokens: Count
    common_characters: Count
    previous_count: Count
    shared: str
    previous: str
    now: str


class Rendered(Struct):
    object: Literal["render"]
    model: str
    count: Count
    max_model_len: Count
    block_size: Count
    prompt: str
    token_ids: list[Count]
    difference: Difference | None


class AbortedRequests(Struct):
    aborted: Count


class ServerInfo(Struct):
    version: str
    model: str
    served_model_names: list[str]
    started: Count
    draining: bool
    requests: Count
    max_model_len: Count | None
    block_size: Count | None
    fingerprint: dict[str, str] | None
    nodes: list[dict[str, Any]]
    config: dict[str, Any]


class Cleared(Struct):
    evicted: Count
    """Blocks that were findable and are not any more."""
    held: Count
    """Blocks that requests or transfers use: they stay."""


class CacheReset(Struct):
    success: bool
    tiers: dict[str, Cleared]
    """The sums over all nodes and stores: `device`, `host`, `disk`."""
    nodes: list[dict[str, Any]]
    absent: list[str]


class CacheStats(Struct):
    nodes: list[dict[str, Any]]
    """Of a store: `tiers`, `gauges`, `counters`, or `error`."""


class BlockPlace(Struct):
    key: str
    device: list[str]
    """Nodes that have it."""
    store: Literal["host", "disk"] | None


class CacheSummary(Struct):
    """Counts of blocks."""

    blocks: Count
    device: Count
    host: Count
    disk: Count
    missing: Count
    prefix: Count
    """Without a gap, from the first one on."""


class CacheInspection(Struct):
    blocks: list[BlockPlace]
    summary: CacheSummary
    tenant: str | UnsetType = UNSET
    tokens: Count | UnsetType = UNSET
    block_size: Count | UnsetType = UNSET


class Pinned(Struct):
    blocks: Count
    pinned: Count
    ttl: float


class Unpinned(Struct):
    blocks: Count
    unpinned: Count


class Prefetched(Struct):
    blocks: Count
    host: Count
    disk: Count
    missing: Count


class Pause(Struct):
    draining: bool
    requests: Count
