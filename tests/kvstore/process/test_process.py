"""The start and the end of a role's process: cores, reports, signals, a supervisor's death."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys

import pytest

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process.logs import set_up_logging
from kvferry.kvstore.process.process import (
    StatusPipe,
    StopSignal,
    available_cores,
    format_cores,
    parse_cores,
)

LIMIT_S = 20


def run_python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return done.stdout.strip()


def test_cores_read_and_written() -> None:
    cores = available_cores()
    assert parse_cores(format_cores(cores)) == cores
    assert format_cores({0, 1, 2, 5, 7, 8}) == "0-2,5,7-8"
    first = min(cores)
    assert parse_cores(f"{first},{first}-{first}") == {first}


@pytest.mark.parametrize("text", ["a", "1-", "-", "3-1", "", "0;1"])
def test_cores_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="write them as"):
        parse_cores(text)


def test_cores_this_process_may_not_use() -> None:
    with pytest.raises(ConfigError, match=r"cores '4000': this process may not use '4000', only"):
        parse_cores("4000")


def test_place_is_applied_before_torch_reads_it() -> None:
    core = min(available_cores())
    code = (
        "import os, sys; from kvferry.kvstore.process.process import apply_cores;"
        f"before = os.nice(0); apply_cores('{core}', None, 3, False);"
        "print(os.sched_getaffinity(0), os.nice(0) - before, os.environ['OMP_NUM_THREADS'],"
        " os.environ['MKL_NUM_THREADS'], os.environ['OMP_WAIT_POLICY'],"
        " os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    )
    assert run_python(code) == f"{{{core}}} 3 1 1 passive 0 False"


def test_reports_are_json_lines_and_a_lost_supervisor_is_no_error() -> None:
    reader, writer = os.pipe()
    pipe = StatusPipe(writer)
    pipe.report(address="tcp://127.0.0.1:5")
    pipe.report(ready=True)
    pipe.report()
    lines = os.read(reader, 4096).splitlines()
    assert [json.loads(line) for line in lines] == [
        {"address": "tcp://127.0.0.1:5"},
        {"ready": True},
    ]
    os.close(reader)
    pipe.report(error="too late")
    os.close(writer)


def test_reports_without_a_supervisor_go_nowhere(capfd: pytest.CaptureFixture[str]) -> None:
    before = os.listdir("/proc/self/fd")
    StatusPipe(None).report(ready=True)
    assert capfd.readouterr() == ("", "") and os.listdir("/proc/self/fd") == before


def test_a_status_fd_that_is_not_open() -> None:
    with pytest.raises(ConfigError, match="--status-fd 987 is not open"):
        StatusPipe(987)


def test_the_first_signal_wakes_a_poller_and_the_second_calls_back() -> None:
    seconds: list[int] = []
    with StopSignal(on_second=lambda: seconds.append(1)) as stop:
        assert not stop.requested
        assert select.select([stop], [], [], 0)[0] == []
        os.kill(os.getpid(), signal.SIGINT)
        assert select.select([stop], [], [], LIMIT_S)[0] == [stop]
        assert stop.requested and not seconds
        stop.acknowledge()
        assert select.select([stop], [], [], 0)[0] == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert select.select([stop], [], [], LIMIT_S)[0] == [stop]
        assert seconds == [1]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_second_signal_ends_a_process_that_is_busy() -> None:
    code = (
        "import time; from kvferry.kvstore.process.process import StopSignal\n"
        "with StopSignal() as stop:\n"
        "    print('up', flush=True)\n"
        "    while True: time.sleep(0.01) if not stop.requested else print('draining', flush=True)"
        " or time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        child.send_signal(signal.SIGTERM)
        assert child.stdout.readline() == b"draining\n"
        child.send_signal(signal.SIGTERM)
        assert child.wait(LIMIT_S) == -signal.SIGTERM


def test_a_child_dies_with_its_parent() -> None:
    # The pipe's end is the event: it comes when the grandchild, its last holder, is gone.
    code = (
        "import os, subprocess, sys; from functools import partial;"
        "from kvferry.kvstore.process.process import die_with_parent;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " pass_fds=[int(sys.argv[1])], preexec_fn=partial(die_with_parent, os.getpid()));"
        "print(child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    reader, writer = os.pipe()
    command = [sys.executable, "-c", code, str(writer)]
    with subprocess.Popen(command, pass_fds=[writer], stdout=subprocess.DEVNULL) as child:
        os.close(writer)
        assert child.wait(LIMIT_S) == -signal.SIGKILL
    assert select.select([reader], [], [], LIMIT_S)[0] == [reader]
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_log_lines_name_the_role(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers.clear()  # the capturing ones of pytest are not this test's to close
    try:
        set_up_logging("decode", "info")
        logging.getLogger("x").info("hello")
        logging.getLogger("x").debug("hidden")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    line = capsys.readouterr().err
    assert line.endswith(" decode INFO hello\n") and line.count("\n") == 1
