"""The series of the nodes and stores: what they have in use, and everything they count.

Owns their names: `kvferry_node_…` and `kvferry_link_…`, and `kvferry_store_…`. The figures are
theirs, as they last reported them, read from their links when the page is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvferry.gateway.router.link import NodeLink
from kvferry.gateway.router.nodes import Nodes
from kvferry.kvstore.store.figures import GAUGES, TIER_GAUGES, TIERS, gauge_names

_RENAMED = {"preemptions": "kvferry_num_preemptions"}
_TAKEN = ("kvferry_node_up",)
_COUNTED = {
    "key_gaps": "Lost batches of block keys.",
    "stalls": "Silences longer than the node's step explains.",
    "inquiries": "Questions after requests from which nothing came.",
    "offences": "Messages that no node sends that works.",
    "strays": "Requests that ran on although nobody waited for them.",
}
"""What the gateway itself counts of each node; `kvferry_node_…` are the nodes' own counts."""
_STORE_HELP = {
    "puts": "Blocks that nodes have put.",
    "puts_known": "Blocks that were put and were here already.",
    "commits_refused": "Blocks written to a slot that was not the writer's.",
    "blocks_asked": "Blocks that fetches have asked for.",
    "blocks_host": "Hits: blocks handed out from memory.",
    "blocks_disk": "Hits: blocks handed out that came from disk.",
    "fetches_short": "Fetches that ended at a block that is not here.",
    "host_damaged": "Blocks in memory that a reader found damaged.",
    "frames_damaged": "Blocks in messages whose checksum was wrong.",
    "disk_shed": "Blocks not written because writing was behind.",
    "evictions": "Blocks that gave way in memory.",
}
"""Told from the start, so that a rate over them has one; a store may count more than these."""


class NodeCollector(Collector):
    """Gauges and counters that are the nodes' own."""

    def __init__(self, model_name: str, nodes: Nodes, waiting: Callable[[], int]) -> None:
        self._model_name = model_name
        self._nodes = nodes
        self._waiting = waiting

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._blocks()
        yield from self._counters()

    def _requests(self) -> Iterator[Metric]:
        running = waiting = 0
        for node in self._nodes.decode:
            if node.status is not None:
                running += node.status.running
                waiting += node.status.waiting
        for name, value, help in (
            ("num_requests_running", running, "Sequences that decode."),
            ("num_requests_waiting", waiting, "Requests queued at decode nodes."),
            ("num_requests_unanswered", self._waiting(), "Requests without a first token."),
        ):
            gauge = GaugeMetricFamily(f"kvferry_{name}", help, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge

    def _blocks(self) -> Iterator[Metric]:
        labels = ["role", "node"]
        up = GaugeMetricFamily("kvferry_node_up", "The node is usable.", labels=labels)
        usage = GaugeMetricFamily(
            "kvferry_kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", labels=labels
        )
        cached = GaugeMetricFamily(
            "kvferry_kv_cache_blocks_cached", "Blocks kept for reuse.", labels=labels
        )
        counted = {
            name: CounterMetricFamily(f"kvferry_link_{name}", help, labels=labels)
            for name, help in _COUNTED.items()
        }
        for node in self._nodes:
            names = [node.role, node.address]
            up.add_metric(names, node.usable and not node.stalled)
            for name, family in counted.items():
                family.add_metric(names, node.counters[name])
            if node.status is not None and node.role != "store":
                usage.add_metric(names, node.status.blocks_used / max(1, node.status.blocks_total))
                cached.add_metric(names, node.status.blocks_cached)
        yield from (up, usage, cached, *counted.values())

    def _counters(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily] = {}
        told_by: dict[str, set[NodeLink]] = {}
        for node in self._nodes:
            if node.role == "store":  # see `StoreCollector`
                continue
            counters = node.status.counters if node.status is not None else {}
            for stem, value in counters.items():
                # The wire lets only harmless names through; two of them are told apart by this.
                stem = stem.removesuffix("_total")
                name = _RENAMED.get(stem) or f"kvferry_node_{stem}"
                told = told_by.setdefault(name, set())
                if name in _TAKEN or node in told:
                    continue
                told.add(node)
                if name not in families:
                    families[name] = CounterMetricFamily(
                        name, "Counted by the node.", labels=["role", "node"]
                    )
                families[name].add_metric([node.role, node.address], value)
        yield from families.values()


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
        yield from _store_counters(stores)


def _store_counters(stores: list[tuple[NodeLink, dict[str, float]]]) -> Iterator[Metric]:
    taken = gauge_names() | set(TIER_GAUGES)
    told = {stem.removesuffix("_total") for _, figures in stores for stem in figures}
    for stem in sorted((told | _STORE_HELP.keys()) - taken):
        family = CounterMetricFamily(
            f"kvferry_store_{stem}", _STORE_HELP.get(stem, "Counted by the store."), labels=["node"]
        )
        for store, figures in stores:
            value = figures.get(stem, figures.get(f"{stem}_total", 0))
            family.add_metric([store.address], value)
        yield family
