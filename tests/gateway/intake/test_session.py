"""Sessions: read from what clients send, and how little they decide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.gateway.intake.reader import SESSION_HEADERS, session_name, session_of
from kvferry.gateway.protocols.common import decode
from kvferry.gateway.protocols.options import Options
from kvferry.gateway.router.policy import (
    DecodeView,
    PrefillView,
    affinity,
    best_decode,
    order_prefill,
)
from kvferry.kvstore.wire.status import Status
from kvferry.tests.rigs.gateway.rig import FakeDecode, Rig, several, wait_until

NODES = [f"tcp://10.0.0.{number}:7000" for number in range(5)]


@pytest.mark.parametrize("header", SESSION_HEADERS)
def test_every_header_names_a_session(header: str) -> None:
    assert session_name({header: "s1"}) == "s1"
    assert session_name({header: ""}) == session_name({}) == ""


def test_the_better_name_counts() -> None:
    assert session_name({"session-id": "h", "x-session-affinity": "first"}) == "first"
    bodies = {b'{"prompt_cache_key": null, "session_id": "body"}': "body",
              b'{"prompt_cache_key": "key", "session_id": "body"}': "key",
              b'{"prompt_cache_key": 7, "session_id": ""}': "", b"{}": ""}  # fmt: skip
    for body, name in bodies.items():
        assert decode(body, Options).session == name


def test_sessions_of_tenants_are_told_apart() -> None:
    assert session_of("t", "s1") != session_of("t", "s2")
    assert session_of("t", "s1") != session_of("u", "s1")
    assert session_of("t", "") == b""
    assert len(session_of("t", "x" * 1_000_000 + "\ud800")) == 16


def views(session: bytes, addresses: list[str]) -> list[DecodeView]:
    return [DecodeView(0, 0, 0, 16, at, affinity(session, it)) for at, it in enumerate(addresses)]


def test_a_session_stays_where_it_is_among_equals() -> None:
    homes = []
    for number in range(200):
        session = session_of("t", f"s{number}")
        home = NODES[best_decode(views(session, NODES), 500)]
        homes.append(home)
        turned = NODES[2:] + NODES[:2]
        assert turned[best_decode(views(session, turned), 500)] == home, "order decides nothing"
        without = [it for it in NODES if it != NODES[0]]
        if home != NODES[0]:  # a node that goes moves no other's sessions
            assert without[best_decode(views(session, without), 500)] == home
    assert all(homes.count(node) > 15 for node in NODES)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 999)), min_size=2, max_size=5))
def test_a_session_never_outweighs_load_or_prefix(loads: list[tuple[int, int]]) -> None:
    plain = [DecodeView(prefix, 0, requests, 16, 0) for requests, prefix in loads]
    best = min(view.cost(1000) for view in plain)
    for number in range(8):
        session = session_of("t", str(number))
        hinted = [
            replace(view, affinity=affinity(session, NODES[at])) for at, view in enumerate(plain)
        ]
        assert plain[best_decode(hinted, 1000)].cost(1000) == best


def test_prefill_nodes_follow_the_session_only_between_equals() -> None:
    equal = [PrefillView(0, 0, 0, 5), PrefillView(0, 0, 1, 9), PrefillView(0, 0, 2, 7)]
    assert order_prefill(equal) == [1, 2, 0]
    busy = [PrefillView(0, 1, 0, 9), PrefillView(16, 0, 1, 1), PrefillView(0, 0, 2, 5)]
    assert order_prefill(busy) == [1, 2, 0]


def homes(rig: Rig, nodes: list[FakeDecode], **options: Any) -> set[int]:
    """To which nodes requests one after the other go."""
    before = [len(node.generates) for node in nodes]
    for number in range(6):
        body = {"prompt": f"p{number}", "max_tokens": 1} | options.get("json", {})
        headers = options.get("headers", {})
        assert rig.post("/v1/completions", body, headers=headers).status_code == 200
        wait_until(rig.idle)
    return {at for at, node in enumerate(nodes) if len(node.generates) > before[at]}


def test_requests_of_a_session_go_to_one_node_while_it_is_there(tmp_path: Path) -> None:
    with several(tmp_path / "m") as (rig, nodes):
        assert homes(rig, nodes) == {0, 1}, "without a session they take turns"
        found = [homes(rig, nodes, headers={"session-id": f"s{it}"}) for it in range(8)]
        assert {len(one) for one in found} == {1} and set().union(*found) == {0, 1}
        keyed = homes(rig, nodes, json={"prompt_cache_key": "s3"})
        assert keyed == found[3], "the field means what the header does"
        other = next(f"s{at}" for at, home in enumerate(found) if home != found[3])
        both = {"json": {"prompt_cache_key": "s3"}, "headers": {"session-id": other}}
        assert homes(rig, nodes, **both) == found[3], "the body comes before the headers"
        (home,) = found[0]
        nodes[home].say(Status(0, 0, 0, 0, 64, True, {}))
        wait_until(lambda: rig.gateway.nodes.decode[home].draining)
        assert homes(rig, nodes, headers={"session-id": "s0"}) == {1 - home}
        nodes[home].say(Status(0, 0, 0, 0, 64, False, {}))
        wait_until(lambda: not rig.gateway.nodes.decode[home].draining)
