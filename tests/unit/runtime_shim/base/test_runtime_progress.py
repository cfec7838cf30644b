"""What the runtime writes for the command that waits: whole records or none, and never an error."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gpusnap.runtime_shim.base.progress import Board, Record, Reporter


def test_from_another_process() -> None:
    """Through /proc, by its path; nothing is read before something is written."""
    code = (
        "import sys; from gpusnap.runtime_shim.base.progress import Reporter\n"
        "r = Reporter(); r.report_to(sys.argv[1]); r.step('fill'); r.move(5, 5)"
    )
    with Board() as board:
        assert board.read() is None
        subprocess.run([sys.executable, "-c", code, board.path], check=True, timeout=60)
        assert board.read() == Record("fill", 5, 5)
    assert not os.path.exists(board.path)


def test_not_each_chunk() -> None:
    """A step of many chunks does not write for each of them; its last one counts."""
    reporter = Reporter()
    with Board() as board:
        reporter.report_to(board.path)
        reporter.step("write")
        for done in range(1, 1001):
            reporter.move(done, 1000)
            if done == 999:
                record = board.read()
                assert record is not None
                assert record.done < 999
        assert board.read() == Record("write", 1000, 1000)


def test_many_threads() -> None:
    """Each record is whole."""
    reporter = Reporter()
    with Board() as board:
        reporter.report_to(board.path)
        end = threading.Event()

        def write(name: str) -> None:
            while not end.is_set():
                reporter.step(name)

        writers = [threading.Thread(target=write, args=(letter * 100,)) for letter in "ab"]
        for each in writers:
            each.start()
        found = {record.step for _ in range(2000) if (record := board.read()) is not None}
        end.set()
        for each in writers:
            each.join()
    assert found <= {"a" * 100, "b" * 100}
    assert found


@pytest.mark.parametrize("kind", ["file", "missing", "fifo", "other memory", "gone"])
def test_what_is_no_board(tmp_path: Path, kind: str) -> None:
    """It is not written to, and nobody hears of it."""
    path, reporter = tmp_path / "board", Reporter()
    memory = os.memfd_create("gpusnap-progress")
    where = str(path)
    if kind == "file":
        path.write_bytes(b"0" * 1024)
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "other memory":
        where = f"/proc/self/fd/{memory}"
    elif kind == "gone":
        with Board() as board:
            where = board.path
    reporter.report_to(where)
    reporter.step("fill")
    reporter.move(1, 1)
    reporter.note_resumed()
    assert kind != "file" or path.read_bytes() == b"0" * 1024
    assert os.fstat(memory).st_size == 0
    os.close(memory)


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'{"step": "x"}', b'{"step":1,"done":"x","whole":0}'])
def test_half_a_record(data: bytes) -> None:
    with Board() as board:
        with open(board.path, "r+b") as file:
            file.write(data)
        assert board.read() is None
