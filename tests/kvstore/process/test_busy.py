"""A line of the board is one node's, and everybody sees it at once."""

from __future__ import annotations

import os
import subprocess
import sys

from kvferry.kvstore.process.busy import LINE_BYTES, BusyBoard, make_board


def test_what_one_process_says_another_sees() -> None:
    fd = make_board(3)
    board = BusyBoard(fd)
    assert board.lines == 3 and len(board.memory) == 3 * LINE_BYTES
    code = (
        "import sys; from kvferry.kvstore.process.busy import BusyBoard;"
        "board = BusyBoard(int(sys.argv[1])); assert board.busy(0); board.set(2, True)"
    )
    board.set(0, True)
    os.set_inheritable(fd, True)
    subprocess.run([sys.executable, "-c", code, str(fd)], pass_fds=[fd], check=True, timeout=60)
    assert [board.busy(line) for line in range(3)] == [True, False, True]
    board.set(0, False)
    assert [board.busy(line) for line in range(3)] == [False, False, True]
    os.close(fd)
    board.set(1, True)
    assert board.busy(1), "the descriptor may be closed"
