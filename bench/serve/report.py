"""The report in Markdown: verdicts, tables, and all that a reader needs to repeat them.

Owns wording and form only; every figure comes from elsewhere.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.bench.client.figures import gaps, spread
from kvferry.bench.document import Verdict, machine_lines, milliseconds, table
from kvferry.bench.machine import Machine
from kvferry.bench.serve.scenarios import (
    SHORT_PROMPT,
    STREAMS,
    DecodeRounds,
    Interference,
    TtftRounds,
)
from kvferry.bench.serve.tiers import NEW_TOKENS, PAUSE_S, TIERS, TierResults
from kvferry.bench.serve.verdicts import Results, cold_ttft, handoff, repeat_ttft
from kvferry.bench.server import Arrangement
from kvferry.bench.store_speed import checksum_cost
from kvferry.kvstore.wire.generation import STAGES


@dataclass(frozen=True, slots=True)
class Conditions:
    """How the figures came about."""

    command: str
    model: str
    seed: int
    client_core: int
    others: float
    """Cores that other processes kept busy before a server started, at worst."""
    arrangements: tuple[Arrangement, ...]
    quick: bool


def markdown(
    results: Results,
    tiers: TierResults | None,
    store: Mapping[str, float] | None,
    verdicts: Sequence[Verdict],
    machine: Machine,
    conditions: Conditions,
) -> str:
    parts = [
        describe(machine, conditions),
        *(_verdicts(verdicts) if verdicts else ()),
        *(_plain(results) if results.ttft else ()),
        *(["### The next turn, by tier", _tiers(tiers)] if tiers is not None else ()),
        *(["### The store alone", _store(store)] if store is not None else ()),
    ]
    return "\n\n".join(parts) + "\n"


def _plain(results: Results) -> list[str]:
    """What is measured without a store."""
    return [
        "### Time to first token",
        _ttft(results.ttft),
        _stages(results.ttft),
        "### The hand-off",
        _handoff(results.ttft),
        "### Decoding",
        _decode(results.decode),
        "### While a long prompt arrives",
        _interference(results.interference),
    ]


# -- the conditions --------------------------------------------------------------------------------


def describe(machine: Machine, conditions: Conditions) -> str:
    lines = [
        f"* Command: `{conditions.command}`",
        f"* Model: {conditions.model}, seed {conditions.seed}",
        *machine_lines(machine),
        f"* The load client runs on core {conditions.client_core}. Before each start of a server "
        f"other processes used up to {conditions.others:.2f} cores.",
        *(_describe(one) for one in conditions.arrangements),
    ]
    if conditions.quick:
        lines.insert(0, "* **A quick run: not for quoting**")
    return "\n".join(lines)


def _describe(arrangement: Arrangement) -> str:
    if arrangement.url:
        return f"* *{arrangement.name}*: {arrangement.url}"
    flags = re.sub(r"--store-dir=\S+", "--store-dir=DIR", " ".join(arrangement.told))
    return f"* *{arrangement.name}*: `kvferry serve {flags}`"


def _verdicts(verdicts: Sequence[Verdict]) -> list[str]:
    rows = [
        (one.what, f"{one.value:.3f}", f"≤ {one.limit:g}", "PASS" if one.holds else "**FAIL**")
        for one in verdicts
    ]
    return ["### Verdicts", table(("ratio", "measured", "must be", ""), rows)]


# -- the tables ------------------------------------------------------------------------------------


def _ttft(all_rounds: Sequence[TtftRounds]) -> str:
    rows = [
        (
            one.arrangement,
            f"{one.size:,}",
            milliseconds(cold_ttft(one)),
            milliseconds(repeat_ttft(one)),
            f"{statistics.median(each.repeat.cached_tokens for each in one.rounds):,.0f}",
            str(len(one.rounds)),
        )
        for one in all_rounds
    ]
    head = ("arrangement", "tokens", "cold, ms", "repeated, ms", "of them cached", "rounds")
    return "Median (least to most).\n\n" + table(head, rows)


def _stages(all_rounds: Sequence[TtftRounds]) -> str:
    rows = []
    for one in all_rounds:
        for name, answers in (
            ("cold", [each.cold for each in one.rounds]),
            ("repeated", [each.repeat for each in one.rounds]),
        ):
            parts = [answer.timings["ttft_ms"] for answer in answers]
            medians = [statistics.median(part[stage] for part in parts) for stage in STAGES]
            server = statistics.median(sum(part[stage] for stage in STAGES) for part in parts)
            client = statistics.median(1e3 * answer.ttft for answer in answers)
            figures = [f"{value:,.1f}" for value in (*medians, server, client)]
            rows.append((one.arrangement, f"{one.size:,}", name, *figures))
    stages = [stage.replace("_", " ") for stage in STAGES]
    head = ("arrangement", "tokens", "", *stages, "all, by the server", "all, by the client")
    return "The server's own split, medians in ms:\n\n" + table(head, rows)


def _handoff(all_rounds: Sequence[TtftRounds]) -> str:
    rows = []
    for one in all_rounds:
        if not one.shipped_bytes:
            continue
        shipped = sum(each.cold.timings["prompt_tokens"]["prefill"] for each in one.rounds)
        each_prompt = one.shipped_bytes / (one.size * len(one.rounds))
        rows.append(
            (
                f"{one.size:,}",
                milliseconds(handoff(one)),
                f"{100 * handoff(one).median / cold_ttft(one).median:.2f} %",
                f"{each_prompt:,.0f}",
                f"{one.shipped_bytes / max(1, shipped):,.0f}",
                str(len(one.rounds)),
            )
        )
    head = ("tokens", "hand-off, ms", "of cold TTFT", "bytes a prompt token",
            "bytes a token computed apart", "rounds")  # fmt: skip
    return table(head, rows) if rows else "No prefill node, nothing shipped."


def _decode(all_rounds: Sequence[DecodeRounds]) -> str:
    rows = []
    for one in all_rounds:
        rate = spread(one.rates)
        figures = f"{rate.median:.1f} ({rate.low:.1f} to {rate.high:.1f})"
        rows.append(
            (one.arrangement, str(one.streams), figures, f"{one.client_us:.0f}", str(rate.rounds))
        )
    head = ("arrangement", "streams", "tokens/s, all streams", "load client, µs an event", "rounds")
    return (
        f"Prompts of {SHORT_PROMPT} tokens; while all streams run. Median (least to most).\n\n"
        + table(head, rows)
    )


def _interference(runs: Sequence[Interference]) -> str:
    rows = []
    for one in runs:
        for name, values in (("quiet", one.quiet), ("busy", one.busy)):
            found = gaps(values)
            figures = [f"{1e3 * value:.1f}" for value in (found.p50, found.p99, found.most)]
            ttft = f"{statistics.median(one.newcomers):.2f}" if name == "busy" else ""
            rows.append(
                (one.arrangement, name, *figures, f"{found.count:,}", ttft, str(one.rounds))
            )
    head = ("arrangement", "", "ITL p50, ms", "p99, ms", "most, ms", "gaps",
            "newcomer's TTFT, s", "rounds")  # fmt: skip
    size = f"{runs[0].size:,}" if runs else "no"
    return (
        f"{STREAMS} streams decode; busy is from the sending of a prompt of {size} tokens to its "
        "first token. Gaps of all rounds together.\n\n" + table(head, rows)
    )


def _tiers(results: TierResults) -> str:
    rows = []
    for one in results.rounds:
        cold = spread(one.cold)
        rows.append((f"{one.size:,}", "cold", milliseconds(cold), "", "", "100.0 %"))
        for tier in TIERS:
            floor = results.floor(one, tier)
            rows.append(
                (
                    f"{one.size:,}",
                    tier,
                    milliseconds(one.spread(tier)),
                    f"{1e3 * floor:,.0f}",
                    f"{one.median(tier) / floor:.2f}",
                    f"{100 * one.median(tier) / cold.median:.1f} %",
                )
            )
    head = ("tokens", "from", "TTFT, ms", "floor, ms", "of the floor", "of cold")
    host, killed, disk = (results.speeds[tier] / 1e9 for tier in ("host", "killed", "disk"))
    return (
        f"A turn adds {NEW_TOKENS} tokens to a prompt of so many and its reply, {PAUSE_S:g} s "
        "after the last one. *host*: after the devices forgot. *killed*: everything was killed "
        "with SIGKILL and started again, so that the blocks come from the store's files. *disk*: "
        "killed and started again, and the kernel forgets the files' pages before each turn. The "
        "floor is the device's TTFT and the blocks' bytes at the speed of a plain copy out of "
        f"shared memory ({host:.2f} GB/s), or of a read of the same files with their pages in "
        f"memory ({killed:.2f} GB/s) or not ({disk:.2f} GB/s). {len(results.rounds[0].cold)} "
        "rounds, median (least to most).\n\n" + table(head, rows)
    )


def _store(figures: Mapping[str, float]) -> str:
    rows = [(name, f"{it / 1e9:.2f}") for name, it in figures.items() if name != "fetch of memcpy"]
    return (
        "One thread of one node puts and fetches blocks, each one verified; medians. *memcpy* is "
        "a plain copy of the same blocks. A checksum costs "
        f"{100 * checksum_cost(figures):.0f} % of a copy's time out of shared memory; a fetch from "
        f"the host tier reaches {100 * figures['fetch of memcpy']:.0f} % of that copy.\n\n"
        + table(("", "GB/s"), rows)
    )
