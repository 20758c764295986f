"""The start and the end of a role's process: reports, signals, a supervisor's death."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys

import pytest

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process.lifecycle import StatusPipe, StopSignal

LIMIT_S = 20


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
        "import time; from kvferry.kvstore.process.lifecycle import StopSignal\n"
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
        "from kvferry.kvstore.process.lifecycle import die_with_parent;"
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
