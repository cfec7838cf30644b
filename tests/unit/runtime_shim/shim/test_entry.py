"""shim/entry.py: whose command line it is, and what becomes of those that are not ours."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import command_lines as lines
import pytest

from gpusnap.runtime_shim._version import __version__
from gpusnap.runtime_shim.runtime import options
from gpusnap.runtime_shim.runtime.options import Takes
from gpusnap.runtime_shim.shim import entry, parts

ROOT = Path(__file__).parents[4]

# Runs the entry on another settings file, as if it had been installed; its own file is named by argv[0].
_PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from gpusnap.runtime_shim.runtime import find as locate
locate.SETTINGS_FILE = {settings!r}
locate.SYSTEM_DIRECTORIES = ()
locate.SYSTEM_LOG = {log!r}
{before}
from gpusnap.runtime_shim.shim import entry
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
        self.log = directory / "log"
        self.bin.mkdir()
        self.real("crun")

    def real(self, name: str, text: str = _REAL) -> Path:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run(self, *args: str, before: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        program = _PROGRAM.format(
            root=str(ROOT), settings=str(self.settings), log=str(self.log), before=before
        )
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
    whose, at, _ = entry.read(args)
    assert whose == entry.OURS
    assert args[at] in ("checkpoint", "restore")


@pytest.mark.parametrize("args", (lines.PASS | lines.UNCOMMON).values(), ids=lines.PASS | lines.UNCOMMON)
def test_pass(args: list[str]) -> None:
    whose, at, _ = entry.read(args)
    assert whose == (entry.WATCHED if args[at : at + 1] in (["delete"], ["kill"]) else entry.PASS)


@pytest.mark.parametrize("args", lines.VERSION.values(), ids=lines.VERSION)
def test_version(args: list[str]) -> None:
    assert entry.read(args)[0] == entry.VERSION


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
    ours = [name for name in sys.modules if name.startswith("gpusnap")]
    print(*sorted([name for name in heavy if name in sys.modules] + ours), flush=True)
    os._exit(0)
os.execve = show
"""
    done = host.run("state", "x", before=watch)
    assert done.stdout.split() == [
        *("gpusnap", "gpusnap.runtime_shim", "gpusnap.runtime_shim._version"),
        *("gpusnap.runtime_shim.base", "gpusnap.runtime_shim.base.errors"),
        *(
            "gpusnap.runtime_shim.runtime",
            "gpusnap.runtime_shim.runtime.command_line_words",
            "gpusnap.runtime_shim.runtime.find",
        ),
        *("gpusnap.runtime_shim.shim", "gpusnap.runtime_shim.shim.entry"),
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


MISSING = 'runtime = "nosuch"'
WRONG = [
    MISSING,
    "runtime = 7",
    'runtime = "bin/crun"',
    "runtime = ",
    'runtime = "/"',
    "runtime = crun",
    "[[[",
]


@pytest.mark.parametrize("settings", WRONG)
def test_another_runs_where_the_settings_are_wrong(host: Host, tmp_path: Path, settings: str) -> None:
    """Nothing is said where programs read it."""
    host.settings.write_text(settings)
    log = tmp_path / "log.json"
    done = host.run("--log", str(log), "--log-format=json", "state", "x")
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.splitlines()[0] == str(host.bin / "crun")
    assert not log.exists()
    assert host.run("--version").stdout == f"crun version 1.21\ngpusnap-runtime version {__version__}\n"
    assert host.run("checkpoint", "--help").stdout.splitlines()[1] == "<checkpoint><--help>"


@pytest.mark.parametrize("error", ["ZeroDivisionError()", "MemoryError()", "RecursionError()"])
@pytest.mark.parametrize("what", ["setting", "creator"])
def test_no_exception_stops_it(host: Host, what: str, error: str) -> None:
    before = f"""
def fail(*given):
    raise {error}
locate.{what} = fail
"""
    done = host.run("state", "x", before=before)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.splitlines()[0] == str(host.bin / "crun")


@pytest.mark.parametrize("settings", [MISSING, 'runtime = "bin/crun"'])
@pytest.mark.parametrize(("command", "count"), [("create", 1), ("run", 1), ("exec", 0), ("state", 0)])
def test_the_system_log_is_told(host: Host, settings: str, command: str, count: int) -> None:
    """Of a container that begins; not each time that an engine looks at it."""
    host.settings.write_text(settings)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(host.log))
        log.setblocking(False)
        assert host.run(command, "x").stderr == ""
        said = []
        with contextlib.suppress(BlockingIOError):
            while True:
                said.append(log.recv(4096).decode())
    assert len(said) == count
    for each in said:
        assert each.startswith("<28>gpusnap-runtime: ")
        assert each.endswith(f"; {host.bin}/crun runs in its place: see gpusnap settings")


def test_a_container_stays_with_its_runtime(host: Host, tmp_path: Path) -> None:
    runc = host.real("runc")
    (tmp_path / "root" / "x").mkdir(parents=True)
    (tmp_path / "root" / "x" / "state.json").touch()
    for settings in ("", 'runtime = "crun"', MISSING):
        host.settings.write_text(settings)
        done = host.run("--root", str(tmp_path / "root"), "kill", "x", "KILL")
        assert done.stdout.splitlines()[0] == str(runc)


def test_no_real_runtime(host: Host) -> None:
    (host.bin / "crun").unlink()
    done = host.run("state", "x", PATH=str(host.bin))
    assert done.returncode == 127
    assert "neither crun nor runc" in done.stderr
    assert "install one of them" in done.stderr


def test_a_program_that_cannot_run(host: Host) -> None:
    """The next one does; without one, that is said."""
    host.real("crun", "#!/nosuch/interpreter\n")
    runc = host.real("runc")
    assert host.run("state", "x").stdout.splitlines()[0] == str(runc)
    assert "crun version 1.21" in host.run("--version").stdout
    runc.unlink()
    for line in (["state", "x"], ["--version"]):
        done = host.run(*line)
        assert done.returncode == 127
        assert "cannot be started: it does not exist" in done.stderr


@pytest.mark.parametrize("args", [["--version"], ["checkpoint", "--gpusnap-check"]])
def test_nobody_reads_the_version(host: Host, args: list[str]) -> None:
    """As in `gpusnap-runtime --version | head -0`: that is no error."""
    reading, writing = os.pipe()
    os.close(reading)
    program = _PROGRAM.format(root=str(ROOT), settings=str(host.settings), log="", before="")
    flags = ["-I", "-S"] if args == ["--version"] else ["-I"]
    done = subprocess.run(
        [sys.executable, *flags, "-c", program, *args],
        env={"PATH": f"{host.bin}:/usr/bin:/bin"},
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_all_parts(host: Host) -> None:
    """What gpusnap doctor asks: with the packages that this interpreter has, and without."""
    done = host.run(*entry.CHECK)
    assert done.returncode == 1
    assert "a module of gpusnap is missing" in done.stderr
    line = [sys.executable, "-m", "gpusnap.runtime_shim.shim.entry", *entry.CHECK]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{__version__} {sys.executable}\n")


def test_required_parts_are_those_that_the_package_requires() -> None:
    """Those of the command line alone, and NVML's binding, of which there is one of our own, aside."""
    names = {"PyYAML": "yaml"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split("[><=]", each)[0] for each in project["dependencies"]} - {
        "click",
        "rich",
        "nvidia-ml-py",
    }
    assert {names.get(each, each) for each in required} == set(parts.REQUIRED)


def test_a_probe_is_answered_by_the_real_runtime(host: Host) -> None:
    done = host.run("restore", "--lsm-mount-context")
    assert done.stdout.splitlines()[1] == "<restore><--lsm-mount-context>"


def test_checkpoint_goes_to_the_shim(host: Host) -> None:
    stand_in = """
import types
shim = types.ModuleType("gpusnap.runtime_shim.shim.dispatch")
shim.main = lambda args: print("shim", *args) or 5
sys.modules["gpusnap.runtime_shim.shim.dispatch"] = shim
"""
    done = host.run("--debug", "checkpoint", "--leave-running", "x", before=stand_in)
    assert (done.returncode, done.stdout) == (5, "shim --debug checkpoint --leave-running x\n")


@pytest.mark.parametrize(
    ("command", "stage", "passes"),
    [
        ("resume", "suspended", False),
        ("resume", "resumed", True),
        ("pause", "suspended", True),
        ("delete", "suspended", True),
    ],
)
def test_a_suspended_container_and_a_missing_module(
    host: Host, tmp_path: Path, command: str, stage: str, passes: bool
) -> None:
    """It does not run without its GPU memory, and can be removed."""
    records = tmp_path / "suspended"
    records.mkdir()
    (records / "x@1").write_text(json.dumps({"stage": stage}))
    before = f"""
from gpusnap.runtime_shim.shim import entry as watching
watching.WATCH, watching.JOURNAL = {str(records)!r}, {str(tmp_path / "journal")!r}
sys.modules["gpusnap.runtime_shim.shim.suspended"] = None
"""
    done = host.run(command, "x", before=before)
    if passes:
        assert (done.returncode, done.stdout.splitlines()[1]) == (7, f"<{command}><x>")
    else:
        assert (done.returncode, done.stdout) == (1, "")
        assert "a module of gpusnap is missing" in done.stderr
