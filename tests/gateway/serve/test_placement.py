"""What `kvferry serve` makes of its flags and this host: places, flags, the store's share."""

from __future__ import annotations

import os
import socket
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.gateway.serve import config as serve_config
from kvferry.gateway.serve.config import (
    Place,
    ServeConfig,
    StorePlan,
    place,
    plan_store,
    role_specs,
    shares,
    store_spec,
)
from kvferry.gateway.serve.restarts import Report, ReportReader, Restarts
from kvferry.gateway.serve.supervisor import bind, url
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process.model_files import ModelFiles
from kvferry.kvstore.store.defaults import default_disk
from kvferry.kvstore.tiers.shared_memory import SharedMemory, room_for_arena

FOUR_CORES = frozenset(range(4))
DEFAULTS = "kvferry.kvstore.store.defaults"


def test_cores_by_default() -> None:
    two = place(ServeConfig(), frozenset({0, 1}))
    assert two.decode == Place(frozenset({0})) and two.decode.threads == 1
    assert two.prefill == Place(frozenset({0, 1}), nice=19) and two.prefill.threads == 2
    assert two.gateway.cores == {1}
    eight = place(ServeConfig(), frozenset(range(8)))
    assert eight.decode.cores == {0, 1, 2, 3} and eight.gateway.cores == {4, 5, 6, 7}


def test_one_core_or_no_prefill_node_leaves_the_decode_node_alone() -> None:
    assert place(ServeConfig(), frozenset({3})).prefill is None
    assert place(ServeConfig(prefill_nodes=1), frozenset({3})).prefill is not None
    alone = place(ServeConfig(prefill_nodes=0), FOUR_CORES)
    assert alone.prefill is None and alone.decode.cores == FOUR_CORES


def test_cores_as_told() -> None:
    core = min(os.sched_getaffinity(0))
    config = ServeConfig(prefill_nodes=1, decode_cores=str(core), prefill_cores=str(core))
    placement = place(config, FOUR_CORES)
    assert placement.prefill is not None
    assert placement.decode.cores == placement.prefill.cores == {core}


@pytest.mark.D8
def test_several_nodes_of_a_role_are_numbered_and_share_its_cores() -> None:
    config = ServeConfig(decode_nodes=2, prefill_nodes=3)
    model = ModelFiles(Path("/models/m"), "m")
    _, nodes = role_specs(config, place(config, frozenset(range(8))), model, {})
    assert [node.name for node in nodes] == [
        "decode-0",
        "decode-1",
        "prefill-0",
        "prefill-1",
        "prefill-2",
    ]
    assert [node.role for node in nodes[1:3]] == ["decode", "prefill"]
    assert "--cores=0,2" in nodes[0].command and "--cores=1,3" in nodes[1].command
    assert all("--cores=0-7" in node.command for node in nodes[2:])
    assert shares(Place(frozenset({0})), 2) == [Place(frozenset({0}))] * 2


def test_what_serve_refuses() -> None:
    with pytest.raises(ConfigError, match="--prefill-cores 1 without a prefill node"):
        place(ServeConfig(prefill_nodes=0, prefill_cores="1"), FOUR_CORES)


def test_each_role_is_told_its_flags_and_no_secret_is_on_a_command_line() -> None:
    config = ServeConfig(api_key=("a=top-secret",), max_num_seqs=3, local_prefill=9)
    model = ModelFiles(Path("/models/m"), "m")
    environ = {"KVFERRY_API_KEY": "x", "KVFERRY_PORT": "1", "HOME": "/h"}
    gateway, nodes = role_specs(config, place(config, FOUR_CORES), model, environ)
    decode, prefill = nodes
    assert gateway.command[-1:] and "--served-model-name=m" in gateway.command
    assert not any("top-secret" in text for spec in (gateway, *nodes) for text in spec.command)
    assert gateway.environ == {"HOME": "/h", "KVFERRY_API_KEY": "a=top-secret"}
    assert decode.environ == prefill.environ == {"HOME": "/h"}
    for text in ("--model=/models/m", "--max-num-seqs=3", "--cores=0-1", "--threads=2"):
        assert text in decode.command
    assert "--local-prefill=9" in decode.command
    assert "--nice=19" in prefill.command
    assert not any(text.startswith("--local-prefill") for text in prefill.command)


@pytest.mark.parametrize(
    ("module", "config_class", "handed_on"),
    [
        ("gateway.config", "GatewayConfig", serve_config.GATEWAY_FLAGS),
        ("decode_node.config", "DecodeConfig", serve_config.DECODE_FLAGS),
        ("prefill_node.config", "PrefillConfig", serve_config.PREFILL_FLAGS),
        ("kvstore.store_config", "StoreConfig", serve_config.STORE_FLAGS),
    ],
)
def test_a_role_is_handed_exactly_the_flags_it_shares_with_serve(
    module: str, config_class: str, handed_on: tuple[str, ...]
) -> None:
    role = getattr(import_module(f"kvferry.{module}"), config_class)
    shared = {item.name for item in fields(role)} & {item.name for item in fields(ServeConfig)}
    # These the supervisor states itself, from what it resolved.
    stated = {"model", "served_model_name", "store_ram", "store_disk", "store_dir"}
    assert set(handed_on) == shared - stated


def test_the_store_is_told_what_it_may_take(tmp_path: Path) -> None:
    config = ServeConfig(cache_dir=tmp_path, store_ram=1 << 30, store_disk=0, transfer="inline")
    plan = plan_store(config, 4)
    assert plan == StorePlan(1 << 30, 0, tmp_path / "blocks")
    placement = place(config, FOUR_CORES)
    spec = store_spec(config, placement, plan, {"KVFERRY_STORE_RAM": "5", "HOME": "/h"})
    assert spec.role == "store" and spec.environ == {"HOME": "/h"}
    for text in (f"--store-ram={1 << 30}", "--store-disk=0", f"--store-dir={tmp_path}/blocks"):
        assert text in spec.command
    assert "--cores=2-3" in spec.command, "the decode node's cores are its own"
    assert not any(text.startswith("--transfer") for text in spec.command)
    _, nodes = role_specs(config, placement, ModelFiles(Path("/models/m"), "m"), {})
    assert all("--transfer=inline" in node.command for node in nodes)
    assert plan_store(ServeConfig(store_ram=0), 4) is None
    elsewhere = plan_store(ServeConfig(store_ram=1, store_dir=tmp_path / "else"), 4)
    assert elsewhere is not None and elsewhere.folder == tmp_path / "else"


def test_a_store_by_default_takes_no_more_than_the_host_can_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{DEFAULTS}.memory_left", lambda: 6 << 30)
    fits: dict[str, int] = {"fits": 8 << 30}
    monkeypatch.setattr(f"{DEFAULTS}.room_for_arena", lambda folder: SimpleNamespace(**fits))
    config = ServeConfig(cache_dir=tmp_path, arena_dir=tmp_path)

    def ram() -> int:
        plan = plan_store(config, 4)
        return 0 if plan is None else plan.ram

    assert ram() == 512 << 20, "a quarter of what two nodes of 2 GiB leave"
    monkeypatch.setattr(f"{DEFAULTS}.memory_left", lambda: 4 << 30)
    assert ram() == 256 << 20, "a sixteenth, although the nodes may use all of it in time"
    monkeypatch.setattr(f"{DEFAULTS}.memory_left", lambda: 1 << 50)
    assert ram() == 4 << 30, "the cap"
    left = SharedMemory.create(tmp_path, 1 << 20, 7)
    left.close()  # as a kill does: the file stays
    assert ram() == 4 << 30 and not left.path.exists()
    fits["fits"] = 48 << 20
    assert ram() == 48 << 20, "a small /dev/shm"
    fits["fits"] = 4 << 20
    assert ram() == 0, "too small to be of use"
    monkeypatch.setattr(f"{DEFAULTS}.room_for_arena", room_for_arena)
    missing = ServeConfig(arena_dir=tmp_path / "missing")
    assert plan_store(missing, 4) is None


def test_the_disk_by_default_leaves_half_of_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(f_bavail=10, f_frsize=1 << 20)
    monkeypatch.setattr(f"{DEFAULTS}.os.statvfs", lambda place: disk)
    folder = tmp_path / "not" / "there"
    assert default_disk(folder) == 5 << 20
    folder.mkdir(parents=True)
    (folder / "segment-0000000001.kv").write_bytes(bytes(2 << 20))
    assert default_disk(folder) == 6 << 20, "what is its own counts as free"
    disk.f_bavail = 1 << 30
    assert default_disk(folder) == 8 << 30


def test_restarts_come_ever_later_until_a_role_was_steady() -> None:
    restarts = Restarts()
    restarts.became_ready(0.0)
    assert [restarts.ended(1, 1.0) for _ in range(8)] == [0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    restarts.became_ready(10.0)
    assert restarts.ended(-9, 10.0 + Restarts.STEADY_S) == 0.1


def test_what_was_never_ready_is_given_up() -> None:
    assert Restarts().ended(2, 0.0) is None, "a configuration error is never retried"
    restarts = Restarts()
    delays = [restarts.ended(1, 0.0) for _ in range(Restarts.FIRST_TRIES)]
    assert None not in delays[:-1] and delays[-1] is None


def test_reports_come_whole_however_they_are_cut() -> None:
    data = b'{"address": "tcp://h:1"}\n{"ready": true}\n{"error": "no"}\n'
    whole = [Report("tcp://h:1"), Report(ready=True), Report(error="no")]
    for cut in range(len(data)):
        reader = ReportReader()
        assert reader.feed(data[:cut]) + reader.feed(data[cut:]) == whole


def test_urls() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    if socket.has_ipv6:
        with bind("::1", 0) as listener:
            assert url(listener).startswith("http://[::1]:")
