"""Where the command starts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from gpusnap.cli import exit_codes

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
if "late" in sys.orig_argv:
    import gpusnap.cli.main
    gpusnap.cli.main.forgive_closed_pipes = lambda: os.kill(os.getpid(), signal.SIGINT)
code = main()
print(repr(signal.getsignal(signal.SIGINT)))
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("words", "code", "handler"),
    [
        ([], 0, "ignore_once"),
        (["early"], -signal.SIGINT, ""),
        (["late"], -signal.SIGINT, ""),
        (["early", "nohup"], 0, "SIG_IGN"),
    ],
)
def test_ctrl_c_before_the_command_begins(words: list[str], code: int, handler: str) -> None:
    """It ends the command without a word, unless it is ignored."""
    done = subprocess.run(
        [sys.executable, "-c", _CODE, *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (code, "")
    assert handler in done.stdout


def test_a_module_is_missing() -> None:
    """One sentence, and what to do."""
    code = (
        "import sys; sys.modules['gpusnap.cli.streams'] = None; sys.argv = ['gpusnap', 'ls']\n"
        "from gpusnap.cli.entry import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (exit_codes.FAILED, "")
    assert done.stderr.startswith("gpusnap: a module of gpusnap is missing: import of gpusnap.cli.streams")
    assert done.stderr.endswith("[GPS-002]\n")


_END = """
import atexit, os, sys, threading

class Torn:
    def __del__(self):
        os.write(1, b"torn apart\\n")

sys.argv = ["gpusnap", *sys.orig_argv[sys.orig_argv.index("--") + 1 :]]
from gpusnap.cli.entry import main
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
torn = Torn()
code = main()
atexit.register(print, "registered")
print("main")
sys.exit(code)
"""


@pytest.mark.parametrize(("word", "code"), [("--version", 0), ("nosuch", 2)])
def test_the_end(word: str, code: int) -> None:
    """Threads have ended, what was to be done at exit is done, all is written; no module is taken apart."""
    line = [sys.executable, "-c", _END, "--", word]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert done.stdout.splitlines()[-3:] == ["main", "thread", "registered"]
    assert ("No such command" in done.stderr) == bool(code)


_SIGNALLED = """
import atexit, os, sys

sys.argv = ["gpusnap", "version", "--json"]
from gpusnap.cli.entry import main
code = main()
for _ in range(int(sys.orig_argv[-1])):
    atexit.register(lambda: os.kill(os.getpid(), int(sys.orig_argv[-2])))
atexit.register(print)
sys.exit(code)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("times", [1, 2])
def test_a_signal_at_the_end(number: signal.Signals, times: int) -> None:
    """The command is done, and its output is written; a second one ends it, whatever it waits for."""
    line = [sys.executable, "-c", _SIGNALLED, str(int(number)), str(times)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0 if times == 1 else -number, "")
    assert json.loads(done.stdout)["gpusnap"]
    assert done.stdout.endswith("\n\n") == (times == 1)


@pytest.mark.parametrize("words", [["ls", "--json"], ["ls", "--quiet"], ["ps", "--json"]])
def test_what_a_program_reads_needs_no_tables(words: list[str]) -> None:
    """Neither what draws tables nor what speaks HTTP is imported for JSON and names from this host."""
    program = (
        f"import sys; sys.argv = ['gpusnap', *{words}]; from gpusnap.cli.entry import main; main();"
        "print(*{'rich.console', 'rich.table', 'urllib3'} & {*sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr.splitlines()[-1] == ""
