"""What `kvferry serve` makes of its flags and this host: places, flags, the store's share."""

from __future__ import annotations

import os
import re
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import pytest

from kvferry.gateway.config import GatewayConfig
from kvferry.gateway.serve.config import ServeConfig
from kvferry.gateway.serve.placement import (
    Place,
    RoleSpec,
    StorePlan,
    place,
    plan_store,
    role_specs,
    shares,
    store_spec,
)
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.node.config import DecodeConfig, PrefillConfig
from kvferry.kvstore.process.model_files import ModelFiles
from kvferry.kvstore.process.roles import RoleConfig
from kvferry.kvstore.process.settings import parse, variable_name
from kvferry.kvstore.store.config import StoreConfig, default_disk
from kvferry.kvstore.tiers.shared_memory import SharedMemory, room_for_arena

Config = TypeVar("Config", bound=RoleConfig)

FOUR_CORES = frozenset(range(4))
DEFAULTS = "kvferry.kvstore.store.config"
MODEL = ModelFiles(Path("/models/m"), "m")


def serve(*argv: str, **environ: str) -> ServeConfig:
    return parse(ServeConfig, argv, environ, prog="serve", description="")


def read(config_class: type[Config], spec: RoleSpec) -> Config:
    """What a role makes of its command line and environment."""
    assert spec.command[1:5] == ("-P", "-m", "kvferry", spec.role)
    return parse(config_class, spec.command[5:], spec.environ, prog="role", description="")


def test_cores_by_default() -> None:
    two = place(ServeConfig(), frozenset({0, 1}))
    first, second = frozenset({0}), frozenset({1})
    assert two.decode == Place(first, borrowed=second) and two.decode.threads == 1
    assert two.prefill == Place(first | second, nice=19, borrowed=first)
    assert two.prefill.threads == 2
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
    assert not placement.decode.borrowed and not placement.prefill.borrowed


@pytest.mark.D8
def test_several_nodes_of_a_role_are_numbered_and_share_its_cores() -> None:
    config = ServeConfig(decode_nodes=2, prefill_nodes=3)
    _, nodes = role_specs(config, place(config, frozenset(range(8))), MODEL, {})
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
    config = serve("--api-key=a=top-secret", "--max-num-seqs=3", "--local-prefill=9")
    environ = {"KVFERRY_API_KEY": "x", "KVFERRY_PORT": "1", "HOME": "/h"}
    gateway, nodes = role_specs(config, place(config, FOUR_CORES), MODEL, environ)
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


TOLD = {
    "decode-nodes": "1",
    "prefill-nodes": "1",
    "decode-cores": "",
    "prefill-cores": "",
    "max-num-queued-reqs": "7",
    "store-dir": "/blocks",
    "host": "::1",
    "port": "1",
    "served-model-name": "named",
    "api-key": "a=secret",
    "admin-api-key": "secret",
    "first-token-timeout": "1.5",
    "request-timeout": "2.5",
    "enable-log-requests": "yes",
    "max-log-len": "3",
    "metrics-compat": "vllm",
    "otlp-traces-endpoint": "http://h",
    "enable-debug": "yes",
    "enable-test-hooks": "yes",
    "cache-dir": "/cache",
    "shutdown-timeout": "4.5",
    "curve-keys": "/keys",
    "log-level": "debug",
    "log-format": "json",
    "max-num-seqs": "5",
    "local-prefill": "6",
    "max-model-len": "8",
    "max-num-batched-tokens": "64",
    "kv-cache-memory-bytes": "1MiB",
    "block-size": "32",
    "dtype": "float32",
    "quantization": "int8",
    "kv-cache-dtype": "bfloat16",
    "transfer": "inline",
    "store-ram": "2MiB",
    "store-disk": "3MiB",
    "arena-dir": "/arena",
}
"""Every flag of `serve`, with what is no default where there is another value."""


def test_each_role_reads_what_serve_was_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve("--help")
    offered = re.findall(r"^  --([a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    assert sorted(offered) == sorted(TOLD)
    environ = {variable_name(name.replace("-", "_")): value for name, value in TOLD.items()}
    config = serve(**environ)
    placement, plan = place(config, FOUR_CORES), plan_store(config, 4)
    assert plan == StorePlan(2 << 20, 3 << 20, Path("/blocks"))
    gateway, (decode, prefill) = role_specs(config, placement, MODEL, environ)
    store = store_spec(config, placement, plan, environ)

    def alone(config_class: type[Config]) -> Config:
        """What the role makes of the same environment when it is started by hand."""
        return parse(config_class, (), environ, prog="role", description="")

    folder = "/models/m"
    assert read(GatewayConfig, gateway) == replace(alone(GatewayConfig), model=folder)
    assert read(DecodeConfig, decode) == replace(
        alone(DecodeConfig), model=folder, name="decode", cores="0-1", threads=2, borrow_cores="2-3"
    )
    assert read(PrefillConfig, prefill) == replace(
        alone(PrefillConfig),
        model=folder,
        name="prefill",
        cores="0-3",
        threads=4,
        nice=19,
        borrow_cores="0-1",
    )
    assert read(StoreConfig, store) == replace(alone(StoreConfig), cores="2-3")


def test_a_flag_that_roles_share_means_the_same_to_each() -> None:
    config, known = ServeConfig(), {item.name for item in fields(ServeConfig)}
    told: dict[str, set[str]] = {}
    for role in (config.gateway, config.decode, config.prefill, config.store):
        for item in fields(role):
            about = item.metadata["about"]
            if not about.own and item.name not in known:
                fact = (item.type, getattr(role, item.name), about.minimum)
                told.setdefault(item.name, set()).add(repr(fact))
    assert len(told) > 20 and all(len(facts) == 1 for facts in told.values()), told


def test_a_role_is_not_told_what_is_its_own_alone() -> None:
    environ = {
        "KVFERRY_SPIN": "1",
        "KVFERRY_LISTEN": "tcp://h:1",
        "KVFERRY_STORE_NODE": "tcp://h:2",
    }
    assert serve(**environ) == serve()
    with pytest.raises(ConfigError, match="unrecognized arguments: --spin"):
        serve("--spin")


def test_the_store_is_told_what_it_may_take(tmp_path: Path) -> None:
    config = serve(
        f"--cache-dir={tmp_path}", "--store-ram=1GiB", "--store-disk=0", "--transfer=inline"
    )
    plan = plan_store(config, 4)
    assert plan == StorePlan(1 << 30, 0, tmp_path / "blocks")
    placement = place(config, FOUR_CORES)
    spec = store_spec(config, placement, plan, {"KVFERRY_STORE_RAM": "5", "HOME": "/h"})
    assert spec.role == "store" and spec.environ == {"HOME": "/h"}
    for text in (f"--store-ram={1 << 30}", "--store-disk=0", f"--store-dir={tmp_path}/blocks"):
        assert text in spec.command
    assert "--cores=2-3" in spec.command, "the decode node's cores are its own"
    assert not any(text.startswith("--transfer") for text in spec.command)
    _, nodes = role_specs(config, placement, MODEL, {})
    assert all("--transfer=inline" in node.command for node in nodes)
    assert plan_store(serve("--store-ram=0"), 4) is None
    elsewhere = plan_store(serve("--store-ram=1", f"--store-dir={tmp_path}/else"), 4)
    assert elsewhere is not None and elsewhere.folder == tmp_path / "else"


def test_a_store_by_default_takes_no_more_than_the_host_can_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{DEFAULTS}.memory_left", lambda: 6 << 30)
    fits: dict[str, int] = {"fits": 8 << 30}
    monkeypatch.setattr(f"{DEFAULTS}.room_for_arena", lambda folder: SimpleNamespace(**fits))
    config = serve(f"--cache-dir={tmp_path}", f"--arena-dir={tmp_path}")

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
    missing = serve(f"--arena-dir={tmp_path}/missing")
    assert plan_store(missing, 4) is None


def test_the_disk_by_default_leaves_half_of_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(f_bavail=10, f_frsize=1 << 20)
    monkeypatch.setattr(f"{DEFAULTS}.os.statvfs", lambda place: disk)
    folder = tmp_path / "not" / "there"
    assert default_disk(folder) == 5 << 20
    folder.mkdir(parents=True)
    (folder / "slots-0000000001.kv").write_bytes(bytes(2 << 20))
    assert default_disk(folder) == 6 << 20, "what is its own counts as free"
    disk.f_bavail = 1 << 30
    assert default_disk(folder) == 8 << 30
