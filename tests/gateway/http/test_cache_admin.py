"""What an operator can ask about blocks: a gateway over HTTP, in front of a real store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.kvstore.keys import tenant_key
from kvferry.kvstore.wire.status import KeyBatch
from kvferry.tests.rigs.gateway.cache import (
    ADMIN,
    ALICE,
    DISK,
    Store,
    ask,
    emptied,
    keys_of,
    text,
)
from kvferry.tests.rigs.gateway.rig import Behaviour, Rig, running, wait_until


@pytest.fixture
def rig(both: tuple[Rig, Store]) -> Iterator[Rig]:
    with emptied(*both) as rig:
        yield rig


# -- looking ---------------------------------------------------------------------------------------


def test_inspect_says_where_each_block_is(rig: Rig, store: Store) -> None:
    body = {"prompt": text("inspect ", 6), "tenant": "alice", "add_special_tokens": False}
    before = ask(rig, "inspect", **body)
    assert (before["tenant"], before["tokens"], before["block_size"]) == ("alice", 96, 16)
    assert before["summary"] == {
        "blocks": 6, "device": 0, "host": 0, "disk": 0, "missing": 6, "prefix": 0
    }  # fmt: skip
    keys = [bytes.fromhex(block["key"]) for block in before["blocks"]]
    store.put(keys[:4], "alice")
    rig.decode.say(KeyBatch(1, True, keys[0] + keys[1], b""))
    wait_until(lambda: ask(rig, "inspect", **body)["summary"]["device"] == 2)
    after = ask(rig, "inspect", **body)
    assert [block["device"] for block in after["blocks"][:3]] == [["decode-0"], ["decode-0"], []]
    assert [block["store"] for block in after["blocks"]] == ["host"] * 4 + [None] * 2
    assert (after["summary"]["prefix"], after["summary"]["missing"]) == (4, 2)
    assert ask(rig, "inspect", keys=[key.hex() for key in keys])["summary"] == after["summary"]
    rig.decode.say(KeyBatch(2, True, b"", b""))


@pytest.mark.A1
def test_a_prompt_of_another_tenant_or_salt_has_other_blocks(rig: Rig, store: Store) -> None:
    body = {"messages": [{"role": "user", "content": "the same for all" * 8}]}
    alice = keys_of(rig, tenant="alice", **body)
    store.put(alice, "alice")
    assert ask(rig, "inspect", tenant="alice", **body)["summary"]["host"] == len(alice)
    for other in ({"tenant": "bob"}, {}, {"tenant": "alice", "cache_salt": "x"}):
        summary = ask(rig, "inspect", **body, **other)["summary"]
        assert summary["missing"] == summary["blocks"] == len(alice)


def test_what_inspect_names_is_what_a_request_sends(rig: Rig, store: Store) -> None:
    body = {"prompt": text("sent ", 5), "max_tokens": 2}
    keys = keys_of(rig, tenant="alice", **body)
    rig.decode.generates.clear()
    assert rig.post("/v1/completions", body, headers=ALICE).status_code == 200
    (generate,) = rig.decode.generates
    assert generate.keys.startswith(b"".join(keys)) and keys


def test_stats_metrics_and_the_ledger_know_the_store(rig: Rig, store: Store) -> None:
    keys = keys_of(rig, prompt=text("stats ", 8), tenant="alice")
    store.put(keys, "alice")
    decode, kept = ask_get(rig, "/admin/cache/stats")["nodes"]
    assert (decode["role"], kept["role"], kept["state"]) == ("decode", "store", "usable")
    host, disk = kept["tiers"]["host"], kept["tiers"]["disk"]
    assert host == {"bytes": len(keys) * 4096, "capacity_bytes": 64 * 4096, "blocks": len(keys)}
    assert disk["blocks"] == len(keys) and disk["capacity_bytes"] == DISK
    assert disk["bytes"] == store.rig.bytes_on_disk()
    assert kept["gauges"]["unwritten_bytes"] == 0 and kept["gauges"]["attached_nodes"] == 1
    assert kept["counters"]["puts"] >= len(keys) and kept["well"]
    counted = {name: float(count) for name, count in kept["counters"].items()}

    def told() -> bool:
        page = rig.get("/metrics").text.splitlines()
        at = f'node="{store.address}"'
        return {
            f'kvferry_store_blocks{{{at},tier="host"}} {len(keys)}.0',
            f'kvferry_store_bytes{{{at},tier="disk"}} {float(disk["bytes"])}',
            f"kvferry_store_unwritten_bytes{{{at}}} 0.0",
            f"kvferry_store_host_damaged_total{{{at}}} {counted.get('host_damaged', 0.0)}",
            f"kvferry_store_puts_total{{{at}}} {counted['puts']}",
        } <= set(page)

    wait_until(told)  # a store reports once a second
    (row,) = [row for row in ask_get(rig, "/debug/ledger")["nodes"] if row["role"] == "store"]
    assert row["arena"]["resident"] == len(keys) and row["check"] == {"node": "ok"}
    (info,) = [row for row in ask_get(rig, "/server_info")["nodes"] if row["role"] == "store"]
    assert info["tiers"]["host"]["blocks"] == len(keys)


@pytest.mark.A6
def test_damage_that_a_test_hook_makes_is_found_and_counted(rig: Rig, store: Store) -> None:
    keys = keys_of(rig, prompt=text("damage ", 4), tenant="alice")
    store.put(keys, "alice")
    before = store.rig.counters.get("host_damaged", 0)
    faults = {"node": "store-0", "store": {"damage_host": 1}}
    told = rig.post("/debug/faults", faults, headers=ADMIN).json()
    assert "error" not in told["nodes"][0], told
    fetch, _ = store.do(lambda: store.rig.fetch(store.node, keys))
    assert fetch.ended == "damaged" and fetch.taken < len(keys)
    store.do(store.rig.settle)
    (kept,) = [row for row in ask_get(rig, "/admin/cache/stats")["nodes"] if "gauges" in row]
    assert kept["counters"]["host_damaged"] == before + 1
    assert ask(rig, "inspect", keys=[key.hex() for key in keys])["summary"]["missing"] == 1


def ask_get(rig: Rig, path: str) -> dict[str, Any]:
    response = rig.get(path, headers=ADMIN)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.A8
def test_what_stores_had_is_cached_and_told_by_tier(rig: Rig) -> None:
    rig.decode.does = Behaviour(cached=16, from_host=32, from_disk=48)
    before = {name: tokens_from(rig, name) for name in ("device", "host", "disk", "prefill")}
    body = {"prompt": "x" * 100, "max_tokens": 2, "add_special_tokens": False}
    answer = rig.post("/v1/completions", body, headers=ALICE).json()
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 96}
    sources = answer["timings"]["prompt_tokens"]
    assert (sources["device"], sources["host"], sources["disk"]) == (16, 32, 48)
    added = {name: tokens_from(rig, name) - count for name, count in before.items()}
    assert added == {"device": 16, "host": 32, "disk": 48, "prefill": 4}


def tokens_from(rig: Rig, source: str) -> float:
    start = "kvferry_prompt_tokens_by_source_total{"
    lines = [line for line in rig.get("/metrics").text.splitlines() if line.startswith(start)]
    (line,) = [line for line in lines if f'source="{source}"' in line]
    return float(line.rpartition(" ")[2])


# -- keeping ---------------------------------------------------------------------------------------


def test_a_pin_keeps_blocks_while_others_come_and_ends_with_its_time(
    rig: Rig, store: Store
) -> None:
    pinned = keys_of(rig, prompt=text("pinned ", 4), tenant="alice")
    store.put(pinned, "alice")
    hexes = [key.hex() for key in pinned]
    assert ask(rig, "pin", keys=hexes, ttl=3600) == {"blocks": 4, "pinned": 4, "ttl": 3600}
    crowd(rig, store)
    assert ask(rig, "inspect", keys=hexes)["summary"]["host"] == 4
    assert ask(rig, "unpin", keys=hexes) == {"blocks": 4, "unpinned": 4}
    assert ask(rig, "unpin", keys=hexes) == {"blocks": 4, "unpinned": 0}
    crowd(rig, store)
    assert ask(rig, "inspect", keys=hexes)["summary"]["host"] < 4
    assert ask(rig, "pin", keys=hexes, ttl=0.01)["pinned"] == 4
    wait_until(lambda: pins(rig) == 0)


def crowd(rig: Rig, store: Store) -> None:
    """Blocks of many other prompts, more than the arena holds."""
    for at in range(16):
        keys = keys_of(rig, prompt=f"{time.monotonic_ns()} {at} " + text("x", 9), tenant="bob")
        store.put(keys, "bob")


def pins(rig: Rig) -> int:
    (kept,) = [row for row in ask_get(rig, "/admin/cache/stats")["nodes"] if "gauges" in row]
    count: int = kept["gauges"]["pinned_blocks"]
    return count


def test_prefetch_and_pin_bring_blocks_back_from_disk(rig: Rig, store: Store) -> None:
    for action in ("prefetch", "pin"):
        keys = keys_of(rig, prompt=action + text(" again", 6), tenant="alice")
        store.put(keys, "alice")
        hexes = [key.hex() for key in keys]
        crowd(rig, store)
        summary = ask(rig, "inspect", keys=hexes)["summary"]
        assert summary["disk"] > 0 and summary["missing"] == 0
        told = ask(rig, action, keys=hexes, ttl=60)
        assert told["blocks"] == len(keys)
        wait_until(lambda h=hexes: ask(rig, "inspect", keys=h)["summary"]["disk"] == 0)  # type: ignore[misc]
        if action == "pin":
            assert told["pinned"] == pins(rig) == len(keys)
        else:
            assert told["host"] + told["disk"] == len(keys)


# -- forgetting ------------------------------------------------------------------------------------


def test_a_tenant_is_cleared_from_memory_and_disk_and_no_other(rig: Rig, store: Store) -> None:
    alice = keys_of(rig, prompt=text("alice ", 6), tenant="alice")
    bob = keys_of(rig, prompt=text("bob ", 7), tenant="bob")
    store.put(alice, "alice")
    store.put(bob, "bob")
    rig.post("/render", {"prompt": "a prompt of alice's"}, headers=ALICE)
    answer = ask(rig, "clear", tenant="alice")
    assert answer["tiers"] == {
        "device": {"evicted": 5, "held": 2},
        "host": {"evicted": len(alice), "held": 0},
        "disk": {"evicted": len(alice), "held": 0},
    }
    assert [row["name"] for row in answer["nodes"]] == ["decode-0", "store-0"]
    for keys, left in ((alice, 0), (bob, len(bob))):
        assert ask(rig, "inspect", keys=[key.hex() for key in keys])["summary"]["host"] == left
    store.do(store.rig.settle)  # slots with bytes of the tenant have been erased
    needle = tenant_key("alice")
    files = list((store.rig.folder / "blocks").glob("*.kv"))
    assert files and not any(needle in path.read_bytes() for path in files)
    rendered = rig.post("/render", {"prompt": "a prompt of alice's"}, headers=ALICE).json()
    assert rendered["difference"] is None, "the gateway still remembers her last prompt"


def test_a_reset_clears_every_tier_and_says_what_went(rig: Rig, store: Store) -> None:
    keys = keys_of(rig, prompt=text("reset ", 6), tenant="alice")
    store.put(keys, "alice")
    answer = httpx.post(rig.url + "/reset_prefix_cache", headers=ADMIN).json()  # without any body
    assert answer["success"] and answer["absent"] == []
    assert answer["tiers"]["device"] == {"evicted": 5, "held": 2}
    assert answer["tiers"]["host"] == answer["tiers"]["disk"] == {"evicted": len(keys), "held": 0}
    store.do(store.rig.settle)
    assert store.rig.bytes_on_disk() == 0


def test_one_tier_is_cleared_and_the_other_keeps_what_it_has(rig: Rig, store: Store) -> None:
    keys = keys_of(rig, prompt=text("tiers ", 6), tenant="alice")
    named = [key.hex() for key in keys]
    store.put(keys, "alice")
    answer = ask(rig, "clear", all=True, tiers=["device"])
    assert answer["tiers"] == {"device": {"evicted": 5, "held": 2}}
    assert ask(rig, "inspect", keys=named)["summary"]["host"] == len(keys)
    answer = ask(rig, "clear", tenant="alice", tiers=["store"])
    assert set(answer["tiers"]) == {"host", "disk"}
    assert ask(rig, "inspect", keys=named)["summary"]["host"] == 0


@pytest.mark.parametrize(
    ("action", "body", "param"),
    [
        ("clear", {}, "tenant"),
        ("clear", {"all": True, "tiers": []}, "tiers"),
        ("clear", {"all": True, "tiers": ["disk"]}, "tiers[0]"),
        ("clear", {"tenant": ""}, "tenant"),
        ("clear", {"tenant": "a", "all": True}, "tenant"),
        ("pin", {"keys": ["0" * 32]}, "ttl"),
        ("pin", {"keys": ["0" * 32], "ttl": 0}, "ttl"),
        ("pin", {"keys": ["0" * 32], "ttl": 1e9}, "ttl"),
        ("inspect", {"keys": ["0" * 31]}, "keys"),
        ("inspect", {"keys": ["g" * 32]}, "keys"),
        ("inspect", {"prompt": ["a", "b"]}, "prompt"),
        ("inspect", {}, "prompt"),
    ],
)
def test_a_question_that_makes_no_sense_names_its_field(
    rig: Rig, action: str, body: dict[str, Any], param: str
) -> None:
    refused = rig.post(f"/admin/cache/{action}", body, headers=ADMIN)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_only_the_operator_asks(rig: Rig) -> None:
    for action in ("inspect", "pin", "unpin", "prefetch", "clear"):
        for headers in ({}, ALICE):
            refused = rig.post(f"/admin/cache/{action}", {"all": True}, headers=headers)
            assert refused.status_code == 401
    assert rig.get("/admin/cache/stats", headers=ALICE).status_code == 401


# -- without a store -------------------------------------------------------------------------------


def test_a_store_that_is_gone_leaves_the_server_ready_and_is_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with running(tmp_path / "m", admin_api_key="root", store_node=(store.address,)) as rig:
        wait_until(lambda: rig.get("/ready").json() == {"status": "ready", "absent": []})
        store.close()
        degraded = {"status": "degraded", "absent": [store.address]}
        wait_until(lambda: rig.get("/ready").json() == degraded)
        assert rig.get("/ready").status_code == 200
        assert rig.chat().status_code == 200
        for path, body in (
            ("/reset_prefix_cache", {}),
            ("/admin/cache/clear", {"tenant": "alice"}),
            ("/admin/cache/pin", {"keys": [], "ttl": 1}),
        ):
            refused = rig.post(path, body, headers=ADMIN)
            assert refused.status_code == 503 and "store-0" in refused.json()["error"]["message"]
        (_, kept) = ask_get(rig, "/admin/cache/stats")["nodes"]
        assert "error" in kept


def test_without_a_store_there_is_nothing_to_keep(tmp_path: Path) -> None:
    with running(tmp_path / "m", admin_api_key="root") as rig:
        for action in ("pin", "unpin", "prefetch"):
            refused = rig.post(f"/admin/cache/{action}", {"keys": [], "ttl": 1}, headers=ADMIN)
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == "no_store"
        assert ask(rig, "inspect", prompt="x" * 40)["summary"]["missing"] == 2
        assert ask(rig, "clear", tenant="a")["tiers"] == {"device": {"evicted": 5, "held": 2}}


def test_a_store_that_falls_silent_is_named(
    rig: Rig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.gateway.router.cache.ANSWER_SECONDS", 0.2)
    with store._lock:
        refused = rig.post("/admin/cache/clear", {"all": True}, headers=ADMIN)
    assert refused.status_code == 503 and "store-0" in refused.json()["error"]["message"]
