"""`make test-arm`: the native engine built for aarch64 computes the same bits as here.

    python -m kvferry.tests.engine.native.arm

Needs the extra `kvferry[compiler]` (`ziglang`), and `qemu-aarch64` of Debian's `qemu-user` to run
what it has built.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kvferry.kernels.native.build import FLAGS, SOURCES, units

PROGRAM = Path(__file__).with_name("pass.c")
SECONDS = 600
ZIG = (sys.executable, "-m", "ziglang", "cc")


def build(folder: Path, machine: str, target: tuple[str, ...]) -> Path:
    """The program for a machine."""
    objects = []
    sources = {name: (str(SOURCES / source), flags) for name, (source, flags)
               in units(machine).items()}  # fmt: skip
    for name, (source, flags) in {**sources, "pass": (str(PROGRAM), ())}.items():
        made = str(folder / f"{machine}-{name}.o")
        command = [*ZIG, *target, *FLAGS, *flags, f"-I{SOURCES}", "-c", source, "-o", made]
        subprocess.run(command, check=True, timeout=SECONDS)
        objects.append(made)
    program = folder / machine
    command = [*ZIG, *target, "-o", str(program), *objects, "-lm", "-lpthread"]
    subprocess.run(command, check=True, timeout=SECONDS)
    return program


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode != 0:
        raise SystemExit(f"FAIL: {command[-1]} ended with {done.returncode}: {done.stdout}")
    return done.stdout


def main() -> None:
    emulator = shutil.which("qemu-aarch64")
    if emulator is None:
        raise SystemExit("error: qemu-aarch64 is missing: apt-get install qemu-user")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        here = output(str(build(folder, platform.machine(), ())))
        static = ("-target", "aarch64-linux-musl")
        there = output(emulator, str(build(folder, "aarch64", static)))
    print(f"{platform.machine()}:\n{here}aarch64:\n{there}", end="")
    if here != there:
        raise SystemExit("FAIL: they differ")
    print("the same bits")


if __name__ == "__main__":
    main()
