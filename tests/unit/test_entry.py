"""entry.py: whose command line it is, and what becomes of those that are not ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import command_lines as lines
import pytest

from runtime_shim import entry, options
from runtime_shim._version import __version__
from runtime_shim.options import Takes

ROOT = Path(__file__).parents[2]

# Runs the entry on another settings file, as if it had been installed; its own file is named by argv[0].
_PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from runtime_shim import locate
locate.SETTINGS_FILE = {settings!r}
locate.SYSTEM_DIRECTORIES = ()
{before}
from runtime_shim import entry
sys.exit(entry.main())
"""

_REAL = r"""#!/bin/sh
case "$*" in *--version*) echo "crun version 1.21"; exit ${CODE:-0};; esac
echo "$0"
for word in "$@"; do printf '<%s>' "$word"; done
echo
grep SigIgn /proc/$$/status
env
exit 7
"""


class Host:
    """A directory with a real runtime on PATH, and the entry to run beside it."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "bin"
        self.settings = directory / "gpusnap.toml"
        self.bin.mkdir()
        self.real("crun")

    def real(self, name: str, text: str = _REAL) -> Path:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run(self, *args: str, before: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        program = _PROGRAM.format(root=str(ROOT), settings=str(self.settings), before=before)
        return subprocess.run(
            [sys.executable, "-I", "-S", "-c", program, *args],
            env={"PATH": f"{self.bin}:/usr/bin:/bin"} | env,
            capture_output=True,
            text=True,
            check=False,
        )


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.mark.parametrize("args", lines.OURS.values(), ids=lines.OURS)
def test_ours(args: list[str]) -> None:
    whose, at = entry.classify(args)
    assert whose == entry.OURS
    assert args[at] in ("checkpoint", "restore")


@pytest.mark.parametrize("args", (lines.PASS | lines.UNCERTAIN).values(), ids=lines.PASS | lines.UNCERTAIN)
def test_pass(args: list[str]) -> None:
    assert entry.classify(args)[0] == entry.PASS


@pytest.mark.parametrize("args", lines.VERSION.values(), ids=lines.VERSION)
def test_version(args: list[str]) -> None:
    assert entry.classify(args)[0] == entry.VERSION


def test_global_options_are_those_of_the_table() -> None:
    values = {option.name for option in options.GLOBAL if option.takes is not Takes.NOTHING}
    assert set(entry.GLOBAL_VALUES) == values
    assert set(entry.GLOBAL_FLAGS) == {option.name for option in options.GLOBAL} - values


def test_passes_the_line_on(host: Host) -> None:
    done = host.run("--root", "/r", "kill", "a b", "", "9")
    assert done.returncode == 7
    assert done.stdout.splitlines()[:2] == [str(host.bin / "crun"), "<--root></r><kill><a b><><9>"]


def test_passes_the_environment_and_signals_on_as_they_were(host: Host) -> None:
    # Debian 12's make has its children ignore the C library's own two signals.
    bare = subprocess.run(["grep", "SigIgn", "/proc/self/status"], capture_output=True, text=True, check=True)
    done = host.run("state", "x", LANG="C", GPUSNAP_LAUNCHER="/usr/bin/gpusnap-runtime", ODD="a=b\nc")
    words = done.stdout.splitlines()[2:]
    assert words[0] == bare.stdout.strip()
    assert "LANG=C" in words
    assert "ODD=a=b" in words
    assert not [word for word in words if word.startswith(("LC_CTYPE", "GPUSNAP"))]


def test_imports_nothing_heavy_to_pass_on(host: Host) -> None:
    watch = """
import os
def show(path, argv, env):
    heavy = "argparse dataclasses enum inspect json pathlib re signal subprocess tomllib typing".split()
    ours = [name for name in sys.modules if name.startswith("runtime_shim")]
    print(*sorted([name for name in heavy if name in sys.modules] + ours), flush=True)
    os._exit(0)
os.execve = show
"""
    done = host.run("state", "x", before=watch)
    assert done.stdout.split() == [
        *("runtime_shim", "runtime_shim._version", "runtime_shim.entry", "runtime_shim.errors"),
        *("runtime_shim.locate", "runtime_shim.words"),
    ]


def test_version_comes_after_the_real_one(host: Host) -> None:
    done = host.run("--version")
    assert done.stdout == f"crun version 1.21\ngpusnap-runtime version {__version__}\n"
    assert done.returncode == 0


def test_version_fails_as_the_real_one(host: Host) -> None:
    done = host.run("--version", CODE="3")
    assert (done.returncode, done.stdout) == (3, "crun version 1.21\n")


def test_settings_name_the_real_runtime(host: Host) -> None:
    other = host.real("other")
    host.settings.write_text('runtime = "other"\nunknown = "no matter here"\n')
    assert host.run("state", "x").stdout.splitlines()[0] == str(other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ('runtime = "nosuch"', "the real runtime nosuch is neither on PATH"),
        ("runtime = 7", "is 7; it must be a runtime's name or absolute path"),
        ('runtime = "bin/crun"', "it must be a runtime's name or absolute path"),
        ("runtime = ", "is not TOML"),
        ('runtime = "/"', "the real runtime / is not a program that can be run"),
    ],
)
def test_errors_go_to_stderr_and_log(host: Host, tmp_path: Path, settings: str, message: str) -> None:
    host.settings.write_text(settings)
    log = tmp_path / "log.json"
    done = host.run("--log", str(log), "--log-format=json", "state", "x")
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert message in json.loads(log.read_text())["msg"]


def test_no_real_runtime(host: Host) -> None:
    (host.bin / "crun").unlink()
    done = host.run("state", "x", PATH=str(host.bin))
    assert done.returncode == 127
    assert "neither crun nor runc" in done.stderr
    assert "install one of them" in done.stderr


def test_a_program_that_cannot_run(host: Host) -> None:
    host.real("crun", "#!/nosuch/interpreter\n")
    for line in (["state", "x"], ["--version"]):
        done = host.run(*line)
        assert done.returncode == 127
        assert "cannot be started: it does not exist" in done.stderr


def test_a_probe_is_answered_by_the_real_runtime(host: Host) -> None:
    done = host.run("restore", "--lsm-mount-context")
    assert done.stdout.splitlines()[1] == "<restore><--lsm-mount-context>"


def test_checkpoint_goes_to_the_shim(host: Host) -> None:
    stand_in = """
import types
shim = types.ModuleType("runtime_shim.shim")
shim.main = lambda args: print("shim", *args) or 5
sys.modules["runtime_shim.shim"] = shim
"""
    done = host.run("--debug", "checkpoint", "--leave-running", "x", before=stand_in)
    assert (done.returncode, done.stdout) == (5, "shim --debug checkpoint --leave-running x\n")


def test_all() -> None:
    assert all(hasattr(entry, name) for name in entry.__all__)
    assert os.path.samefile(entry.__file__, ROOT / "runtime_shim" / "entry.py")
