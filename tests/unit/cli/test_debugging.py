"""`gpusnap --debug`, in processes of its own: an audit hook cannot be taken back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[3]
# What a command runs, and an error of a kind of its own.
_PROGRAM = """
import subprocess, sys
from gpusnap.cli import main as cli
from gpusnap.runtime_shim.base.errors import GpusnapError

@cli.command.command()
def fail():
    subprocess.run(["true", "a b"], check=True)
    raise GpusnapError("it is odd", hint="do something")

sys.exit(cli.main())
"""


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-B", "-c", _PROGRAM, *words]
    return subprocess.run(
        line, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, capture_output=True, text=True, check=False
    )


def test_it_is_quiet() -> None:
    """Without it: one sentence."""
    done = ran("fail")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "gpusnap: it is odd; do something\n"


def test_what_it_shows() -> None:
    """Each program's command line as a shell takes it, the traceback, and the same sentence at the end."""
    done = ran("--debug", "fail")
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[0] == "gpusnap: debug: run true 'a b'"
    assert "Traceback (most recent call last):" in lines
    assert "in fail" in done.stderr
    assert lines[-1] == "gpusnap: it is odd; do something"
