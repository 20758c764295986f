"""Starting, restarting and ending the roles of one host, with roles that do no work.

The supervisor runs in a process of its own: its signals, its death and its children's are real.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.gateway.serve.restarts import Restarts
from kvferry.kvstore.process.listener import bind

LIMIT_S = 20
SERVE = """
import logging, sys
from kvferry.gateway.serve.placement import RoleSpec
from kvferry.gateway.serve.supervisor import Supervisor
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process.listener import bind
from kvferry.kvstore.process.logs import set_up_logging
from kvferry.kvstore.process.lifecycle import StopSignal

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
        role = Path(__file__).parents[1] / "rigs" / "servers" / "fake_role.py"
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
        found = [(int(pid), rest) for name, pid, rest in lines if name == role]
        return [(pid, re.sub(r" --busy-\S+", "", rest)) for pid, rest in found]

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


@pytest.mark.slow
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
