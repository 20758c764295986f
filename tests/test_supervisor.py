"""Starting, restarting and ending the roles of one host, with roles that do no work.

The supervisor runs in a process of its own: its signals, its death and its children's are real.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.gateway import serve_config
from kvferry.gateway.serve_config import (
    Place,
    ServeConfig,
    StorePlan,
    place,
    plan_store,
    role_specs,
    shares,
    store_spec,
)
from kvferry.gateway.supervision import Report, ReportReader, Restarts
from kvferry.gateway.supervisor import bind, url
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.model_files import ModelFiles
from kvferry.kvstore.shared_memory import SharedMemory, room_for_arena
from kvferry.kvstore.store_defaults import default_disk

LIMIT_S = 20
FOUR_CORES = frozenset(range(4))
DEFAULTS = "kvferry.kvstore.store_defaults"
SERVE = """
import logging, sys
from kvferry.gateway.serve_config import RoleSpec
from kvferry.gateway.supervisor import Supervisor, bind
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.logs import set_up_logging
from kvferry.kvstore.process import StopSignal

role, diary, timeout, *lives = sys.argv[1:]
lives = dict(life.split("=") for life in lives)

def spec(name):
    command = (sys.executable, role, name, "--diary", diary, "--life", lives.get(name, "serve"))
    return RoleSpec(name, command, {})

set_up_logging("serve", "info")
with bind("127.0.0.1", 0) as listener:
    supervisor = Supervisor(
        spec("gateway"), [spec("decode"), spec("prefill")], listener,
        shutdown_timeout=float(timeout), on_ready=lambda: print("serves", flush=True),
        store=spec("store") if "store" in lives else None,
    )
    with StopSignal(on_second=supervisor.insist) as stop:
        try:
            sys.exit(supervisor.run(stop))
        except ConfigError as error:
            sys.exit(f"error: {error}")
"""


class Cluster:
    """A supervisor and the fake roles that it runs."""

    def __init__(self, folder: Path, *lives: str, timeout: float = 10) -> None:
        self._diary = folder / "diary"
        self._diary.touch()
        role = Path(__file__).with_name("fake_role.py")
        self._log = folder / "log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SERVE, str(role), str(self._diary), str(timeout), *lives],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def starts(self, role: str) -> list[tuple[int, str]]:
        """The pid and the rest of the command line of every start of a role so far."""
        lines = [line.split(" ", 2) for line in self._diary.read_text().splitlines()]
        return [(int(pid), rest) for name, pid, rest in lines if name == role]

    def pid(self, role: str) -> int:
        return self.starts(role)[-1][0]

    def pids(self) -> list[int]:
        lines = [line.split() for line in self._diary.read_text().splitlines()]
        return [int(pid) for name, pid, *_ in lines if not name.endswith("-ends")]

    def ends(self) -> list[str]:
        """The roles that have ended as they were asked to, in that order."""
        names = [line.split()[0] for line in self._diary.read_text().splitlines()]
        return [name.removesuffix("-ends") for name in names if name.endswith("-ends")]

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "serves\n", self.log()

    def end(self) -> int:
        return self.process.wait(LIMIT_S)

    def log(self) -> str:
        return self._log.read_text()


Start = Callable[..., Cluster]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    clusters: list[Cluster] = []

    def start(*lives: str, timeout: float = 10) -> Cluster:
        clusters.append(Cluster(tmp_path, *lives, timeout=timeout))
        return clusters[-1]

    yield start
    for cluster in clusters:
        cluster.process.kill()
        cluster.process.communicate()
        until(lambda cluster=cluster: not any(map(alive, cluster.pids())))  # type: ignore[misc]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- processes -------------------------------------------------------------------------------------


def test_nodes_start_first_and_the_gateway_learns_their_addresses(start: Start) -> None:
    cluster = start()
    cluster.wait_ready()
    decode, prefill = cluster.pid("decode"), cluster.pid("prefill")
    ((_, arguments),) = cluster.starts("gateway")
    assert f"--decode-node=tcp://127.0.0.1:{decode}" in arguments
    assert f"--prefill-node=tcp://127.0.0.1:{prefill}" in arguments
    assert "--fd=" in arguments
    assert os.getpgid(decode) == decode, "a terminal's Ctrl-C must not reach it"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(start: Start, number: signal.Signals) -> None:
    cluster = start()
    cluster.wait_ready()
    cluster.process.send_signal(number)
    assert cluster.end() == 0
    assert not any(map(alive, cluster.pids()))


@pytest.mark.parametrize("role", ["decode", "prefill", "gateway"])
def test_a_role_that_dies_comes_back_where_it_was(start: Start, role: str) -> None:
    cluster = start()
    cluster.wait_ready()
    dead = cluster.pid(role)
    os.kill(dead, signal.SIGKILL)
    until(lambda: len(cluster.starts(role)) == 2)
    (_, first), (again, second) = cluster.starts(role)
    assert again != dead
    assert second == (first if role == "gateway" else f"tcp://127.0.0.1:{dead}")
    assert len(cluster.pids()) == 4, "the others did not notice"
    title = role if role == "gateway" else f"{role} node"
    assert f"the {title} ended (SIGKILL): again in 0.1 s" in cluster.log()


@pytest.mark.parametrize("role", ["decode", "gateway"])
def test_a_configuration_error_ends_all_with_one_line(start: Start, role: str) -> None:
    cluster = start(
        f"{role}=config-error", "prefill=silent" if role == "decode" else "decode=serve"
    )
    assert cluster.end() == 1, "the test's own status for an error"
    errors = [line for line in cluster.log().splitlines() if "INFO" not in line]
    title = role if role == "gateway" else f"{role} node"
    assert errors == [f"error: {title}: the sky is 3 m high, but 5 m are needed"]
    assert not any(map(alive, cluster.pids()))


def test_a_role_that_cannot_start_is_given_up(start: Start) -> None:
    cluster = start("prefill=crash")
    assert cluster.end() == 1
    assert len(cluster.starts("prefill")) == Restarts.FIRST_TRIES
    assert "the prefill node never became ready (status 1): giving up" in cluster.log()


def test_a_third_signal_kills(start: Start) -> None:
    cluster = start("gateway=stubborn")
    cluster.wait_ready()
    for said in ("stopping: ", "stopping now"):
        cluster.process.send_signal(signal.SIGINT)
        until(lambda said=said: said in cluster.log())  # type: ignore[misc]
    assert cluster.process.poll() is None
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.end() == 130
    until(lambda: not any(map(alive, cluster.pids())))


@pytest.mark.D5
def test_a_second_signal_shortens_a_drain(start: Start) -> None:
    """The gateway hears it too, and does not get the rest of the time for its requests."""
    cluster = start("gateway=stubborn", timeout=3600)
    cluster.wait_ready()
    for said in ("stopping: ", "stopping now"):
        cluster.process.send_signal(signal.SIGTERM)
        until(lambda said=said: said in cluster.log())  # type: ignore[misc]
    assert cluster.end() == 1
    assert "the gateway did not end in time: killed" in cluster.log()
    assert not any(map(alive, cluster.pids()))


def test_a_drain_is_bounded(start: Start) -> None:
    cluster = start("gateway=stubborn", timeout=-4.9)  # plus 5 s that every role gets
    cluster.wait_ready()
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.end() == 1
    assert "the gateway did not end in time: killed" in cluster.log()


def test_no_orphan_outlives_a_killed_supervisor(start: Start) -> None:
    cluster = start("decode=stubborn")
    cluster.wait_ready()
    watched = [os.pidfd_open(pid) for pid in cluster.pids()]
    cluster.process.kill()
    for fd in watched:
        assert select.select([fd], [], [], LIMIT_S)[0], "a role outlived its supervisor"
        os.close(fd)


def test_a_store_is_started_first_and_everybody_learns_its_address(start: Start) -> None:
    cluster = start("store=serve")
    cluster.wait_ready()
    at = f"=tcp://127.0.0.1:{cluster.pid('store')}"
    for role in ("decode", "prefill"):
        ((_, arguments),) = cluster.starts(role)
        assert arguments == f"tcp://127.0.0.1:0 --store{at}"
    ((_, arguments),) = cluster.starts("gateway")
    assert f"--store-node{at}" in arguments
    assert cluster.pids()[0] == cluster.pid("store")


@pytest.mark.D5
def test_the_store_ends_last_when_nobody_puts_blocks_any_more(start: Start) -> None:
    cluster = start("store=serve")
    cluster.wait_ready()
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.end() == 0
    first, *nodes, last = cluster.ends()
    assert (first, sorted(nodes), last) == ("gateway", ["decode", "prefill"], "store")


def test_a_store_that_dies_comes_back_where_it_was_and_ends_nobody(start: Start) -> None:
    cluster = start("store=serve")
    cluster.wait_ready()
    dead = cluster.pid("store")
    os.kill(dead, signal.SIGKILL)
    until(lambda: len(cluster.starts("store")) == 2)
    assert cluster.starts("store")[-1][1] == f"tcp://127.0.0.1:{dead}"
    assert len(cluster.pids()) == 5, "the others did not notice"
    assert "the store ended (SIGKILL): again in 0.1 s" in cluster.log()
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.end() == 0


def test_a_second_signal_ends_a_store_that_still_writes(start: Start) -> None:
    cluster = start("store=stubborn", timeout=3600)
    cluster.wait_ready()
    cluster.process.send_signal(signal.SIGTERM)
    until(lambda: {"gateway", "decode", "prefill"} <= set(cluster.ends()))
    time.sleep(0.1)
    assert alive(cluster.pid("store")) and cluster.process.poll() is None
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.end() == 1
    assert "what is not on disk yet is given up" in cluster.log()
    assert "the store did not end in time: killed" in cluster.log()


def test_a_store_that_cannot_work_is_one_line(start: Start) -> None:
    cluster = start("store=config-error")
    assert cluster.end() == 1
    errors = [line for line in cluster.log().splitlines() if "INFO" not in line]
    assert errors == ["error: store: the sky is 3 m high, but 5 m are needed"]
    assert len(cluster.pids()) == 1, "nobody else was started"


def kvferry(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "kvferry", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env=environ, check=False
    )


def test_a_port_in_use_is_one_line_before_anything_slow() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        done = kvferry("serve", "no-such-model", KVFERRY_PORT=port)
    line = "kvferry serve: error: port {} on 127.0.0.1 is in use: stop what listens there, "
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == line.format(port) + "or choose --port\n"


def test_a_bad_model_is_one_line() -> None:
    done = kvferry("serve", "no-such-model", "--port=0")
    assert done.returncode == 2
    assert done.stderr.startswith("kvferry serve: error: model 'no-such-model': no such folder")
    assert done.stderr.count("\n") == 1


def test_real_roles_that_all_refuse_to_start_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "kvferry-standin"}')
    flags = ["--port=0", "--prefill-nodes=1", "--kv-cache-memory-bytes=1", "--log-level=warning",
             "--store-ram=0"]  # fmt: skip
    done = kvferry("serve", str(tmp_path), *flags, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("kvferry serve: error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--help"], 0, "kvferry COMMAND"),
        ([], 0, "kvferry COMMAND"),
        (["--version"], 0, "kvferry 0."),
        (["nonsense"], 2, "kvferry: error: no command 'nonsense': choose serve, gateway"),
        (["serve", "--nonsense"], 2, "kvferry serve: error: unrecognized arguments: --nonsense"),
    ],
)
def test_the_command_line(arguments: list[str], status: int, text: str) -> None:
    done = kvferry(*arguments)
    assert done.returncode == status
    assert text in (done.stderr if status else done.stdout)


# -- values ----------------------------------------------------------------------------------------


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
