"""The replay of traces: what it counts, and that the store keeps at least what plain LRU keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.bench.replay import Replay, compare, ideal, plain_lru, read_trace

TRACES = Path(__file__).parents[2] / "bench" / "traces"


def test_plain_lru_counts_prefixes_only() -> None:
    a, b, c, d = (bytes([n]) * 16 for n in range(4))
    assert plain_lru([[a, b], [a, b]], 2) == 0.5
    assert plain_lru([[a, b], [c], [a, b]], 2) == 0.2, "the deepest block went first"
    assert plain_lru([[a, b], [b, a]], 4) == 0.5
    assert ideal([[a, b], [c, d], [a, b]]) == pytest.approx(2 / 6)


@pytest.mark.parametrize(
    ("name", "tokens", "share"),
    [
        ("conversation_trace_cut", 512, 0.1346),
        ("synthetic_trace_cut", 512, 0.0606),
        ("claude_code_agent_sample_blk64_cut", 64, 0.8856),
    ],
)
def test_the_cuts_are_what_they_say(name: str, tokens: int, share: float) -> None:
    trace = read_trace(TRACES / f"{name}.jsonl")
    assert trace.block_tokens == tokens
    assert ideal(trace.requests) == pytest.approx(share, abs=1e-4)


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"input_length": 3}\n')
    with pytest.raises(ValueError, match="row 1"):
        read_trace(path)


@pytest.mark.parametrize(
    ("name", "capacity"),
    [
        pytest.param("conversation_trace_cut", 1500, marks=pytest.mark.slow),
        ("synthetic_trace_cut", 1500),
    ],
)
def test_the_store_keeps_what_plain_lru_keeps(name: str, capacity: int) -> None:
    trace = read_trace(TRACES / f"{name}.jsonl")
    rows = list(compare(trace, ("ram", "disk"), (capacity,)))
    assert [row.tier for row in rows] == ["ram", "disk"]
    for row in rows:
        assert row.store >= row.lru, row.line


def test_a_chain_longer_than_the_arena_passes_through_it(tmp_path: Path) -> None:
    """Its end is all that could make room: what is being read, or is still to be written."""
    chains = [[bytes([n]) + at.to_bytes(15, "big") for at in range(500)] for n in range(3)]
    with Replay(tmp_path, 64, disk_records=4000) as replay:
        assert replay.run(chains) == 0.0
        assert replay.run(chains) == 1.0
        replay.tiers.host.check()
        counters = replay.tiers.counters + (replay.tiers.disk or replay.tiers).counters
    assert counters["disk_reads"] >= 3 * 400
    for name in ("disk_evicted_unwritten", "reads_without_slot", "disk_shed"):
        assert counters[name] == 0, counters


def test_a_store_that_holds_everything_hits_what_can_be_hit() -> None:
    trace = read_trace(TRACES / "claude_code_agent_sample_blk64_cut.jsonl")
    (ram,) = compare(trace, ("ram",), (8000,))
    assert ram.store == ideal(trace.requests)
