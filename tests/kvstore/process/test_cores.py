"""Where a process runs: how cores are written, and what is applied before torch is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process.cores import available_cores, format_cores, parse_cores

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
        "import os, sys; from kvferry.kvstore.process.cores import apply_cores;"
        f"before = os.nice(0); apply_cores('{core}', None, 3, False);"
        "print(os.sched_getaffinity(0), os.nice(0) - before, os.environ['OMP_NUM_THREADS'],"
        " os.environ['MKL_NUM_THREADS'], os.environ['OMP_WAIT_POLICY'],"
        " os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    )
    assert run_python(code) == f"{{{core}}} 3 1 1 passive 0 False"
