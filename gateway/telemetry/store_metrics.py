"""The series of the stores: bytes by tier, what is not written yet, and everything they count.

Owns their names, `kvferry_store_…`. The figures are the stores' own, as they last reported them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvferry.gateway.router.link import NodeLink
from kvferry.gateway.router.nodes import Nodes
from kvferry.kvstore.store.figures import GAUGES, TIER_GAUGES, TIERS, gauge_names

_HELP = {
    "puts": "Blocks that nodes have put.",
    "puts_known": "Blocks that were put and were here already.",
    "commits_refused": "Blocks written to a slot that was not the writer's.",
    "blocks_asked": "Blocks that loads have asked for.",
    "blocks_host": "Hits: blocks handed out from memory.",
    "blocks_disk": "Hits: blocks handed out that came from disk.",
    "loads_short": "Loads that ended at a block that is not here.",
    "host_damaged": "Blocks in memory that a reader found damaged.",
    "frames_damaged": "Blocks in messages whose checksum was wrong.",
    "disk_shed": "Blocks not written because writing was behind.",
    "evictions": "Blocks that gave way in memory.",
}
"""Told from the start, so that a rate over them has one; a store may count more than these."""


class StoreCollector(Collector):
    """Figures of all stores that are linked."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        stores = [(it, it.status.counters) for it in self._nodes.stores if it.status is not None]
        if not stores:
            return
        for name, help in TIER_GAUGES.items():
            gauge = GaugeMetricFamily(f"kvferry_store_{name}", help, labels=["node", "tier"])
            for store, figures in stores:
                for tier in TIERS:
                    gauge.add_metric([store.address, tier], figures.get(f"{tier}_{name}", 0))
            yield gauge
        for name, help in GAUGES.items():
            gauge = GaugeMetricFamily(f"kvferry_store_{name}", help, labels=["node"])
            for store, figures in stores:
                gauge.add_metric([store.address], figures.get(name, 0))
            yield gauge
        yield from _counters(stores)


def _counters(stores: list[tuple[NodeLink, dict[str, float]]]) -> Iterator[Metric]:
    taken = gauge_names() | set(TIER_GAUGES)
    told = {stem.removesuffix("_total") for _, figures in stores for stem in figures}
    for stem in sorted((told | _HELP.keys()) - taken):
        family = CounterMetricFamily(
            f"kvferry_store_{stem}", _HELP.get(stem, "Counted by the store."), labels=["node"]
        )
        for store, figures in stores:
            value = figures.get(stem, figures.get(f"{stem}_total", 0))
            family.add_metric([store.address], value)
        yield family
