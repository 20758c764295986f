"""`kvferry gateway` as a process: its socket, its report, its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.kernels.engines.standin import write_standin_model
from kvferry.tests.rigs.gateway import web
from kvferry.tests.rigs.gateway.rig import Behaviour, FakeDecode, wait_until

COMMAND = (sys.executable, "-P", "-m", "kvferry", "gateway")


@dataclass
class Running:
    decode: FakeDecode
    process: subprocess.Popen[bytes]
    url: str

    def stream(self, client: httpx.Client) -> Any:
        body = {"prompt": "x", "stream": True, "max_tokens": 400, "ignore_eos": True}
        return client.stream("POST", f"{self.url}/v1/completions", json=body)


@contextmanager
def gateway(folder: Path, *flags: str) -> Iterator[Running]:
    write_standin_model(folder)
    decode = FakeDecode()
    reader, writer = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        process = subprocess.Popen(
            [*COMMAND, str(folder), f"--fd={listener.fileno()}", f"--status-fd={writer}",
             f"--decode-node={decode.address}", f"--cache-dir={folder}", *flags],
            pass_fds=[listener.fileno(), writer],
        )  # fmt: skip
    os.close(writer)
    try:
        with open(reader) as reports:
            assert json.loads(reports.readline()) == {"ready": True}
        yield Running(decode, process, f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait(10)
        decode.close()


@pytest.mark.D5
def test_a_signal_lets_running_streams_finish(tmp_path: Path) -> None:
    with gateway(tmp_path / "m") as running, web.Client(timeout=20) as client:
        running.decode.does = Behaviour(pace=0.002)
        with running.stream(client) as response:
            lines = response.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGTERM)
            wait_until(lambda: web.get(running.url + "/ready").status_code == 503)
            refused = web.post(running.url + "/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert refused.headers["connection"] == "close"
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert running.process.wait(10) == 0


@pytest.mark.D5
@pytest.mark.parametrize("seconds", ["0.3", "60"], ids=["time-out", "second-signal"])
def test_streams_that_outlast_the_drain_get_one_error(tmp_path: Path, seconds: str) -> None:
    with (
        gateway(tmp_path / "m", f"--shutdown-timeout={seconds}") as running,
        web.Client(timeout=20) as client,
    ):
        running.decode.does = Behaviour(pace=0.05)
        with running.stream(client) as response:
            lines = response.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGTERM)
            if seconds == "60":
                wait_until(lambda: web.get(running.url + "/ready").status_code == 503)
                running.process.send_signal(signal.SIGTERM)
            got = []
            with pytest.raises(httpx.RemoteProtocolError):
                for line in lines:
                    got.append(line)
        errors = [line for line in got if '"error"' in line]
        assert len(errors) == 1 and '"code":"shutting_down"' in errors[0]
        assert not any("[DONE]" in line for line in got)
        assert running.process.wait(10) == 0
        wait_until(lambda: bool(running.decode.aborts))


@pytest.mark.parametrize(
    ("flags", "said"),
    [((), "--decode-node"), (("--decode-node=tcp://x:1", "--port={port}"), "is in use")],
    ids=["no-node", "port"],
)
def test_a_gateway_that_cannot_work_says_why(
    tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    write_standin_model(tmp_path / "m")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*COMMAND, str(tmp_path / "m"), *(flag.format(port=port) for flag in flags)],
            capture_output=True,
            text=True,
            timeout=30,
        )
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]
