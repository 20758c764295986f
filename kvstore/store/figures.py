"""What a store says of its tiers in figures: bytes and blocks by tier, and what is not written yet.

Owns the names of the store's gauges; every other figure of a store is a counter, which only grows.
They travel in one flat dict, so whoever shows them has to know which are which.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.kvstore.store.storage import ModelStorage

TIERS = ("host", "disk")
TIER_GAUGES = {
    "bytes": "Bytes that blocks take.",
    "capacity_bytes": "Bytes that blocks may take.",
    "blocks": "Blocks that can be found.",
}
"""Each of them once a tier, as `host_bytes`."""
GAUGES = {
    "unwritten_bytes": "Bytes of blocks that are to be written to disk.",
    "pinned_blocks": "Blocks that are kept by a pin.",
    "leased_blocks": "Blocks that somebody is reading.",
    "quarantined_blocks": "Blocks whose slot a lost node may still write to.",
    "quarantine_spent": "1: so many that the store is not well.",
    "recovering_files": "Files of an earlier store that are not read yet.",
    "attached_nodes": "Nodes that put and fetch here.",
}


def tier_figures(storage: ModelStorage | None, ram: int, disk: int) -> dict[str, float]:
    """The gauges of a store that may take so many bytes; without a node so far it holds nothing."""
    if storage is None:
        empty = {f"{tier}_{name}": 0.0 for tier in TIERS for name in TIER_GAUGES}
        return empty | {"host_capacity_bytes": ram, "disk_capacity_bytes": disk}
    host, tier = storage.tiers.host.ledger(), storage.tiers.disk
    figures: dict[str, float] = {
        "host_bytes": host["resident"] * storage.slot_bytes,
        "host_capacity_bytes": host["total"] * storage.slot_bytes,
        "host_blocks": host["resident"],
        "disk_bytes": 0,
        "disk_capacity_bytes": 0,
        "disk_blocks": 0,
        "pinned_blocks": host["pinned"],
        "leased_blocks": host["leased"],
        "quarantined_blocks": host["quarantined"],
        "quarantine_spent": not storage.tiers.host.well,
    }
    if tier is not None:
        index = tier.index
        figures |= {
            "disk_bytes": index.held,
            "disk_capacity_bytes": index.cap,
            "disk_blocks": len(index),
            "unwritten_bytes": tier.unwritten * index.span,
            "recovering_files": tier.recovering,
        }
    return {name: float(value) for name, value in figures.items()}


def by_tier(figures: Mapping[str, float]) -> dict[str, dict[str, int]]:
    """The gauges of each tier by name, out of a store's figures."""
    return {
        tier: {name: int(figures.get(f"{tier}_{name}", 0)) for name in TIER_GAUGES}
        for tier in TIERS
    }


def gauge_names() -> frozenset[str]:
    """The figures that are no counters."""
    return frozenset(GAUGES) | {f"{tier}_{name}" for tier in TIERS for name in TIER_GAUGES}
