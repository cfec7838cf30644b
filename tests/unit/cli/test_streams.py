"""What is written where the terminal's encoding is another than UTF-8."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.dont_write_bytecode = True\n"
    "from gpusnap.cli.streams import forgive_closed_pipes\n"
    "forgive_closed_pipes()\n"
    "for file in (sys.stdout, sys.stderr):\n"
    "    print('a \\u2192 b\\u2026 \\u2588 \\xe9 \\u732b', file=file)\n"
)
ASCII = b"a -> b... # \\xe9 \\u732b\n"
UTF8 = "a → b… █ é 猫\n".encode()


def test_a_terminal_that_is_closed() -> None:
    """What would be written on it is dropped: the command goes on, as with a pipe that nobody reads."""
    ours, terminal = pty.openpty()
    reading, writing = os.pipe()
    program = f"import os\n{PROGRAM}os.write({writing}, b'first')\n".replace(
        "forgive_closed_pipes()\n", f"forgive_closed_pipes(); os.write({writing}, b'-'); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=terminal,
        stderr=terminal,
        pass_fds=[writing],
    ) as child:
        os.close(terminal)
        os.close(writing)
        assert os.read(reading, 1) == b"-"
        os.close(ours)
        child.communicate(timeout=60)
    assert os.read(reading, 5) == b"first"
    os.close(reading)
    assert child.returncode == 0


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"LANG": "C"}, ASCII),
        ({"LANG": "POSIX"}, ASCII),
        ({}, ASCII),
        ({"LC_ALL": "C", "LANG": "en_US.UTF-8"}, ASCII),
        ({"LC_ALL": "C.UTF-8", "LANG": "C"}, UTF8),
        ({"LANG": "C.UTF-8"}, UTF8),
        ({"LANG": "C", "PYTHONIOENCODING": "utf-8"}, UTF8),
        ({"LANG": "C", "PYTHONIOENCODING": "latin-1"}, b"a -> b... # \xe9 \\u732b\n"),
    ],
)
def test_encodings(environ: dict[str, str], expected: bytes) -> None:
    """Nothing fails; what the encoding does not have looks alike, or is escaped."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PATH": os.environ["PATH"], **environ},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, expected)
