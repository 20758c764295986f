"""A role without any work, for tests of the supervisor: it reports, waits, and ends as told.

`--life`: `serve` (until SIGTERM), `stubborn` (ignores SIGTERM), `config-error`, `crash` (at once),
`silent` (never reports). Every start appends a line `role pid listen …` to the file `--diary`, and
every end that was asked for a line `role-ends pid`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

from kvferry.kvstore.process.lifecycle import StatusPipe, StopSignal


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("--life", default="serve")
    parser.add_argument("--diary", required=True)
    parser.add_argument("--status-fd", type=int)
    parser.add_argument("--listen", default="")
    known, rest = parser.parse_known_args()
    pipe = StatusPipe(known.status_fd)
    with StopSignal() as stop:
        with open(known.diary, "a") as diary:
            said = " ".join([known.listen, *rest]).strip()
            diary.write(f"{known.role} {os.getpid()} {said}\n")
        if known.life == "config-error":
            pipe.report(error="the sky is 3 m high, but 5 m are needed")
            return 2
        if known.life == "crash":
            return 1
        if known.life != "silent":
            fresh = known.listen.endswith(":0")
            pipe.report(address=f"tcp://127.0.0.1:{os.getpid()}" if fresh else known.listen)
            pipe.report(ready=True)
        if known.life == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while not stop.requested or known.life == "stubborn":
            time.sleep(0.01)
        with open(known.diary, "a") as diary:
            diary.write(f"{known.role}-ends {os.getpid()} \n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
