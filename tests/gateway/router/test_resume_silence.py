"""Decode nodes that fall silent, are full or too slow: another goes on, or one error says so."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvferry.tests.rigs.gateway.resume import TEXT, answer, stream, text_of
from kvferry.tests.rigs.gateway.rig import running, several, wait_until

# -- a node falls silent ---------------------------------------------------------------------------


@pytest.mark.D1
@pytest.mark.C7
def test_a_stalled_nodes_requests_go_on_elsewhere_and_it_comes_back(tmp_path: Path) -> None:
    with several(tmp_path / "m") as (rig, (first, second)):
        first.does.pace = 0.05
        got: list[str] = []
        thread = threading.Thread(target=lambda: got.append(text_of(stream(rig))))
        thread.start()
        wait_until(lambda: first.emitted(1))
        first.does.deaf = True
        thread.join(60)
        assert got == [TEXT]
        assert second.generates[0].outputs
        (stalled, _) = rig.gateway.nodes.decode
        assert stalled.stalled and rig.get("/ready").json()["absent"] == [first.address]
        for _ in range(3):
            assert answer(rig)["choices"][0]["text"] == TEXT
        assert len(first.generates) == 1, "a stalled node was chosen"
        first.does.deaf = False
        wait_until(lambda: not stalled.stalled)
        wait_until(lambda: bool(first.aborts))
        for _ in range(2):
            answer(rig)
        assert len(first.generates) > 1
        assert "kvferry_link_stalls_total" in rig.get("/metrics").text


@pytest.mark.D1
def test_the_last_node_stalls_and_goes_on(tmp_path: Path) -> None:
    with several(tmp_path / "m", 1) as (rig, (only,)):
        only.does.pace = 0.05
        got: list[str] = []
        thread = threading.Thread(target=lambda: got.append(text_of(stream(rig))))
        thread.start()
        wait_until(lambda: bool(only.generates))
        only.does.deaf = True
        wait_until(lambda: rig.get("/ready").status_code == 503)
        refused = rig.chat()
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert rig.get("/health").status_code == 200
        only.does.deaf = False
        wait_until(lambda: rig.get("/ready").status_code == 200)
        thread.join(60)
        assert got == [TEXT] and len(only.generates) == 1


@pytest.mark.D1
def test_a_node_that_stays_silent_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.gateway.router.link.ABANDON_SECONDS", 0.3)
    with several(tmp_path / "m", 1) as (rig, (only,)):
        only.does.deaf = True
        refused = rig.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
        only.does.deaf = False
        wait_until(lambda: rig.get("/ready").status_code == 200)
        assert answer(rig)["choices"][0]["text"] == TEXT


@pytest.mark.C7
@pytest.mark.D1
def test_the_only_node_falls_silent_within_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known to be lost after `ABANDON_SECONDS` more than a stall takes; then the error is soon."""
    monkeypatch.setattr("kvferry.gateway.router.link.ABANDON_SECONDS", 0.5)
    with several(tmp_path / "m", 1) as (rig, (only,)):
        only.does.pace = 0.05
        (node,) = rig.gateway.nodes.decode
        got: list[str] = []
        thread = threading.Thread(target=lambda: got.extend(stream(rig, n=2)))
        thread.start()
        wait_until(lambda: only.emitted(1))
        only.does.deaf = True
        wait_until(lambda: not node.usable)
        known = time.monotonic()
        thread.join(30)
        assert time.monotonic() - known <= 8.0, "as long as one waits for others"
        assert [line for line in got if "error" in line] == got[-1:]
        assert json.loads(got[-1])["error"]["code"] == "engine_lost"
        only.does.deaf = False
        wait_until(lambda: node.usable)


# -- refusals and deadlines ------------------------------------------------------------------------


@pytest.mark.D11
def test_a_full_node_is_no_full_server(tmp_path: Path) -> None:
    with several(tmp_path / "m") as (rig, (first, second)):
        first.does.reject = "server_overloaded"
        assert answer(rig)["choices"][0]["text"] == TEXT
        assert len(first.generates) == len(second.generates) == 1
        second.does.reject = "server_overloaded"
        refused = rig.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_overloaded")


def test_a_resumed_request_waits_for_room(tmp_path: Path) -> None:
    with several(tmp_path / "m") as (rig, (first, second)):
        first.does.dies_at = 3
        second.does.reject = "server_overloaded"
        got: list[Any] = []
        thread = threading.Thread(target=lambda: got.append(answer(rig)))
        thread.start()
        wait_until(lambda: len(second.generates) >= 2)
        second.does.reject = ""
        thread.join(60)
        assert got[0]["choices"][0]["text"] == TEXT


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("which", ["first_token_timeout", "request_timeout"])
def test_deadlines(tmp_path: Path, which: str, streamed: bool) -> None:
    timeouts: dict[str, Any] = {which: 0.3}
    with running(tmp_path / "m", **timeouts) as rig:
        rig.decode.does.hold = True
        refused = rig.chat(stream=streamed)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "deadline_exceeded")
        assert "0.3 s" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        wait_until(lambda: bool(rig.decode.aborts))
        if which == "request_timeout":
            assert 0 < rig.decode.generates[0].deadline_s <= 0.3
        rig.decode.does.hold = False
        assert rig.chat().status_code == 200
        page = rig.get("/metrics").text
        assert 'kvferry_request_failure_total{code="deadline_exceeded"' in page


def test_a_first_token_in_time_is_enough(tmp_path: Path) -> None:
    with running(tmp_path / "m", first_token_timeout=0.3) as rig:
        rig.decode.does.pace = 0.1
        assert answer(rig)["choices"][0]["text"] == TEXT
