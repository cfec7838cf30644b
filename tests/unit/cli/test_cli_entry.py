"""Where the command starts."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

_CODE = """
import os, signal, sys

class Finder:
    def find_spec(self, name, *_):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)

sys.argv = ["gpusnap", "--version"]
if "nohup" in sys.orig_argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if "early" in sys.orig_argv:
    sys.meta_path.insert(0, Finder())
from gpusnap.cli.entry import main
code = main()
print(repr(signal.getsignal(signal.SIGINT)))
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("words", "code", "handler"),
    [
        ([], 0, "default_int_handler"),
        (["early"], -signal.SIGINT, ""),
        (["early", "nohup"], 0, "SIG_IGN"),
    ],
)
def test_ctrl_c_while_modules_are_imported(words: list[str], code: int, handler: str) -> None:
    """It ends the command without a word, unless it is ignored; afterwards it is Python's again."""
    done = subprocess.run(
        [sys.executable, "-c", _CODE, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (code, "")
    assert handler in done.stdout
