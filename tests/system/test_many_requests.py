"""A shorter form of what `make acceptance` does twenty thousand times."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.tests.rigs.servers.many_requests import growth, small_server


@pytest.mark.slow
@pytest.mark.D4
def test_short_requests_over_failing_tiers_leave_nothing(tmp_path: Path) -> None:
    with small_server(tmp_path) as rush:
        rush.run(600, seed=0)
        before = rush.figures()
        rush.run(900, seed=1)
        after = rush.figures()
        assert not rush.wrong, rush.wrong[:3]
        assert set(rush.counts) == {"200", "400", "left", "tier failures"}
        assert min(rush.counts.values()) >= 10
        for name, limit in (("open_fds", 8), ("threads", 4), ("rss_bytes", 16 << 20)):
            assert growth(before, after, name) <= limit, (name, before, after)
        sources = {
            source: rush.served.metric("kvferry_prompt_tokens_by_source_total", source=source)
            for source in ("device", "host", "disk")
        }
        assert all(sources.values()), sources
        damaged = [
            rush.served.metric(f"kvferry_store_{name}_total")
            for name in ("host_damaged", "disk_damaged_payload")
        ]
        assert any(damaged), damaged
