"""The launcher in C: that it decides as shim/entry.py does, and that nothing keeps it from a real runtime."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import command_lines as lines
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gpusnap.runtime_shim._version import __version__
from gpusnap.runtime_shim.base.errors import NotStarted, SettingsError
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime import options
from gpusnap.runtime_shim.runtime.command_line import probe
from gpusnap.runtime_shim.runtime.command_line_words import FALSE, HELP
from gpusnap.runtime_shim.runtime.options import Takes
from gpusnap.runtime_shim.shim import entry

SOURCE = Path(__file__).parents[4] / "runtime_shim" / "launcher"
OWN_VERSION = f"gpusnap-runtime version {__version__}\n"

pytestmark = pytest.mark.skipif(
    not shutil.which("make") or not shutil.which("cc"), reason="needs make and a C compiler"
)

# Words are written NUL-terminated, so that no word can look like two.
_REAL = '#!/bin/sh\nprintf \'%s\\0\' real "$0" "$@"\n'
_PYTHON = '#!/bin/sh\nprintf \'%s\\0\' python "$GPUSNAP_LAUNCHER" "$@"\n'


@dataclass(frozen=True)
class Launcher:
    """A launcher built for a directory: its own settings file, Python entry and real runtimes."""

    directory: Path

    @property
    def program(self) -> Path:
        return self.directory / "build" / "gpusnap-runtime"

    @property
    def settings(self) -> Path:
        return self.directory / "gpusnap.toml"

    @property
    def bin(self) -> Path:
        return self.directory / "bin"

    def real(self, name: str) -> list[str]:
        """What runs where that runtime does, before the words of the line."""
        return ["real", str(self.bin / name)]

    def remove_settings(self) -> None:
        if self.settings.is_dir() and not self.settings.is_symlink():
            self.settings.rmdir()
        else:
            self.settings.unlink(missing_ok=True)

    def write(self, path: Path, text: str) -> Path:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def done(
        self, *args: str, path: str | None = None, program: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [program or self.program, *args],
            env={"PATH": path or f"{self.bin}:/usr/bin:/bin"} | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=90,
        )

    def run(
        self, *args: str, end: str = "", path: str | None = None, program: Path | None = None, **env: str
    ) -> list[str]:
        """What was started, "real" or "python", and with what. `end` is printed after it; stderr is empty."""
        done = self.done(*args, path=path, program=program, **env)
        assert (done.returncode, done.stderr) == (0, b"")
        *words, last = os.fsdecode(done.stdout).split("\0")
        assert last == end
        return words


def build(directory: Path, *extra: str) -> Launcher:
    made = Launcher(directory)
    subprocess.run(
        [
            *("make", "-s", "-C", str(SOURCE), f"BUILD={directory}/build"),
            *(f"PYTHON_ENTRY={directory}/entry", f"SETTINGS_FILE={made.settings}", *extra),
        ],
        check=True,
        capture_output=True,
    )
    made.write(directory / "entry", _PYTHON)
    made.write(made.bin / "crun", _REAL)
    return made


@pytest.fixture(scope="module", params=["", "LIBC=1"], ids=["no C library", "glibc"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    return build(tmp_path_factory.mktemp("launcher"), *filter(None, [request.param]))


@pytest.fixture
def launcher(built: Launcher) -> Launcher:
    built.remove_settings()
    shutil.rmtree(built.bin)
    built.write(built.bin / "crun", _REAL)
    return built


def strings_of(name: str) -> tuple[str, ...]:
    text = "".join(path.read_text() for path in SOURCE.glob("*.[ch]"))
    found = re.search(rf"\*const {name}\[\] = {{(.*?)}};", text, re.DOTALL)
    assert found, name
    return tuple(re.findall(r'"((?:[^"\\]|\\.)*)"', found[1]))


def test_the_same_lists() -> None:
    assert strings_of("global_values") == entry.GLOBAL_VALUES
    assert strings_of("global_flags") == entry.GLOBAL_FLAGS
    assert strings_of("version_options") == entry.VERSION_OPTIONS
    assert strings_of("our_commands") == entry.OUR_COMMANDS
    assert strings_of("watched_commands") == entry.WATCHED_COMMANDS
    assert strings_of("commands") == entry.COMMANDS
    assert strings_of("help_options") == HELP
    assert strings_of("false_words") == FALSE
    assert strings_of("system_directories") == locate.SYSTEM_DIRECTORIES
    assert strings_of("runtime_names") == locate.NAMES
    assert strings_of("state_files") == locate.STATE_FILES
    assert strings_of("beginnings") == locate.BEGINNINGS
    assert strings_of("runc_roots") == locate.RUNC_ROOTS
    on_the_way = (each.decode() for each in entry._ON_THE_WAY)
    assert strings_of("on_the_way") == tuple(each.replace('"', '\\"') for each in on_the_way)
    for name, known in (("checkpoint", options.CHECKPOINT), ("restore", options.RESTORE)):
        taking = [each for each in known if each.takes is not Takes.NOTHING and each.name != "network-lock"]
        words = {word for each in taking for word in (each.name, each.short) if word}
        assert set(strings_of(f"{name}_values")) == words


@pytest.mark.parametrize("args", (lines.PASS | lines.UNCOMMON).values(), ids=lines.PASS | lines.UNCOMMON)
def test_passes_on(launcher: Launcher, args: list[str]) -> None:
    assert launcher.run(*args) == [*launcher.real("crun"), *args]


@pytest.mark.parametrize("args", lines.OURS.values(), ids=lines.OURS)
def test_leaves_to_python(launcher: Launcher, args: list[str]) -> None:
    assert launcher.run(*args) == ["python", str(launcher.program), *args]


@pytest.fixture(scope="module")
def watching(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """One that looks for suspended containers in a directory of its own."""
    directory = tmp_path_factory.mktemp("watching")
    named = {"WATCH": "suspended", "JOURNAL": "journal"}
    flags = [f'-D{name}_DIRECTORY=\\"{directory}/{folder}\\"' for name, folder in named.items()]
    return build(directory, f"CFLAGS={' '.join(flags)}")


@pytest.fixture
def suspended(watching: Launcher, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where there is a file for each suspended container; not there yet."""
    directory = watching.directory / "suspended"
    if directory.is_dir():
        shutil.rmtree(directory)
    directory.unlink(missing_ok=True)
    monkeypatch.setattr(entry, "WATCH", str(directory))
    monkeypatch.setattr(entry, "JOURNAL", str(watching.directory / "journal"))
    return directory


def record(stage: str, filler: int = 0) -> str:
    return json.dumps({"version": 1, "key": "ID@1", "name": "x" * filler, "stage": stage, "since": ""})


GONE = "-> nowhere"
"""A file that is listed, and not there any more when it is opened."""
RECORDS: dict[str, dict[str, str | None]] = {
    "no directory": {},
    "another one's": {
        "OTHER@1": record("suspended"),
        "ID2@1": record("suspended"),
        "I@1": record("suspended"),
    },
    "suspended": {"ID@1": record("suspended")},
    "without a root": {"ID": record("suspended")},
    "on the way there": {"ID@1": record("suspending")},
    "undone": {"ID@1": record("undone")},
    "resuming": {"ID@1": record("resuming")},
    "on the way back": {"ID@1": record("resumed")},
    "of two roots": {"ID@1": record("resumed"), "ID@2": record("suspended")},
    "the first is gone": {"ID@1": GONE, "ID@2": record("suspended")},
    "the second is gone": {"ID@2": GONE, "ID@1": record("suspended")},
    "gone": {"ID@1": GONE},
    "being written": {"ID@1.new": record("suspended")[:20]},
    "empty": {"ID@1": ""},
    "large": {"ID@1": record("suspending", 40000)},
    "a directory": {"ID@1": None},
    "many": {**{f"OTHER{at:060}@1": record("suspended") for at in range(900)}, "ID@1": record("resuming")},
}


@pytest.mark.parametrize("files", RECORDS.values(), ids=RECORDS)
@pytest.mark.parametrize("command", [*entry.WATCHED_COMMANDS, "state", "kill"])
def test_the_suspended(
    watching: Launcher, suspended: Path, command: str, files: Mapping[str, str | None]
) -> None:
    """Python is asked where it may have a say, and for that container alone."""
    for name, content in files.items():
        suspended.mkdir(exist_ok=True)
        if content is None:
            (suspended / name).mkdir()
        elif content == GONE:
            (suspended / name).symlink_to("nowhere")
        else:
            (suspended / name).write_text(content)
    words = ["--force", "ID"]
    asked = command in entry.WATCHED_COMMANDS and entry._is_watched(command, words)
    found = watching.run("--root", "/r", command, *words)
    assert found[0] == ("python" if asked else "real")
    if command in entry.WATCHED_COMMANDS and record("suspended") in files.values():
        assert asked == any(name.partition("@")[0] == "ID" for name in files)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("ID@1.restore", ["delete"]),
        ("ID@1.thawed", ["delete", "resume"]),
        ("ID.restore", []),
        ("ID@1.json", []),
        ("ID@1.restore.new", []),
        ("ID2@1.restore", []),
        (".restore", []),
    ],
)
def test_what_a_killed_one_left(watching: Launcher, suspended: Path, name: str, asked: Sequence[str]) -> None:
    """Python is asked for the commands that it concerns, and for that container alone."""
    journal = watching.directory / "journal"
    journal.mkdir()
    try:
        (journal / name).touch()
        for command in entry.WATCHED_COMMANDS:
            found = watching.run(command, "--force", "ID")[0] == "python"
            assert found == (command in asked)
            assert found == entry._is_watched(command, ["--force", "ID"])
    finally:
        shutil.rmtree(journal)


def test_what_is_watched_differs(watching: Launcher, suspended: Path) -> None:
    """The cases above are not all alike."""
    suspended.mkdir()
    answers = {}
    for stage in ("suspending", "undone", "suspended", "resuming", "resumed"):
        (suspended / "ID@1").write_text(record(stage))
        answers[stage] = [watching.run(each, "ID")[0] == "python" for each in ("delete", "pause", "resume")]
    assert answers == {
        "suspending": [True, False, True],
        "undone": [True, False, False],
        "suspended": [True, True, True],
        "resuming": [True, True, True],
        "resumed": [True, False, False],
    }


def test_the_suspended_cannot_be_told(watching: Launcher, suspended: Path) -> None:
    """Something else in the place of the directory, and a record that is too long: Python says."""
    suspended.write_text("")
    assert watching.run("pause", "ID")[0] == "python"
    suspended.unlink()
    suspended.mkdir()
    (suspended / "ID@1").write_text(record("suspending", 1 << 16))
    assert watching.run("pause", "ID")[0] == "python"
    assert watching.run("pause", "x" * 5000)[0] == "real"


def test_the_suspended_without_python(watching: Launcher, suspended: Path) -> None:
    """What stops and removes containers still does."""
    suspended.mkdir()
    (suspended / "ID@1").write_text(record("suspended"))
    kept = (watching.directory / "entry").rename(watching.directory / "entry.kept")
    try:
        found = watching.run("delete", "--force", "ID")
    finally:
        kept.rename(watching.directory / "entry")
    assert found == [*watching.real("crun"), "delete", "--force", "ID"]


def test_a_resume_without_python(watching: Launcher, suspended: Path) -> None:
    """No suspended container runs without its GPU memory; gpusnap's own resume passes."""
    suspended.mkdir()
    kept = (watching.directory / "entry").rename(watching.directory / "entry.kept")
    try:
        (suspended / "ID@1").write_text(record("suspended"))
        done = watching.done("resume", "ID")
        (suspended / "ID@1").write_text(record("resumed"))
        found = watching.run("resume", "ID")
    finally:
        kept.rename(watching.directory / "entry")
    assert done.returncode != 0
    assert b"so the suspended container is not resumed; reinstall gpusnap [GPS-002]" in done.stderr
    assert found == [*watching.real("crun"), "resume", "ID"]


@pytest.mark.parametrize("args", lines.VERSION.values(), ids=lines.VERSION)
def test_version(launcher: Launcher, args: list[str]) -> None:
    assert launcher.run(*args, end=OWN_VERSION) == [*launcher.real("crun"), *args]


@pytest.mark.parametrize(("code", "text"), [(3, "exit 3"), (137, "kill -9 $$")])
def test_version_fails_as_the_real_one(launcher: Launcher, code: int, text: str) -> None:
    launcher.write(launcher.bin / "crun", f"#!/bin/sh\necho crun version 1; {text}\n")
    done = launcher.done("--version")
    assert (done.returncode, done.stdout) == (code, b"crun version 1\n")


def test_nobody_reads_the_version(launcher: Launcher) -> None:
    """As in `gpusnap-runtime --version | head -0`: neither its pipe nor the real one's is an error."""
    for text in ("true", "kill -PIPE $$"):
        launcher.write(launcher.bin / "crun", f"#!/bin/sh\n{text}\n")
        reading, writing = os.pipe()
        os.close(reading)
        try:
            done = subprocess.run(
                [launcher.program, "--version"],
                env={"PATH": f"{launcher.bin}:/usr/bin:/bin"},
                stdout=writing,
                stderr=subprocess.PIPE,
                check=False,
                timeout=90,
            )
        finally:
            os.close(writing)
        assert (done.returncode, done.stderr) == (0, b"")


_PROBES = [
    *("-h", "--help", "--usage", "--help=true", "--network-lock", "--lsm-mount-context", "--lsm-profile=a"),
    *("--image-path", "-image-path", "--bundle", "-b", "--gpu-map", "--leave-running", "--status-fd"),
]
_PARTS = [
    *(
        "--",
        "-",
        "--root",
        "-root",
        "--root=/r",
        "--log",
        "--log-format=json",
        "--rootless",
        "--criu=",
        "--debug",
    ),
    *(
        "-systemd-cgroup",
        "--debug=false",
        "--cgroup-manager",
        "--log-level",
        "--version",
        "-v",
        "-V",
        "--help",
    ),
    *(
        "-h",
        "-?",
        "--usage",
        "--help=0",
        "--shiny",
        "--shiny=7",
        "-x",
        "---debug",
        "--roots",
        "--roo",
        "--=",
        "-=",
    ),
    *(
        "state",
        "kill",
        "checkpoint",
        "restore",
        "delete",
        "exec",
        "features",
        "checkpoints",
        "",
        "x",
        "é",
        "a b",
    ),
]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(args=st.lists(st.sampled_from(_PARTS), max_size=6))
def test_as_python(launcher: Launcher, args: list[str]) -> None:
    """Whose it is, and to what a question about checkpoint or restore is cut."""
    whose, at, _ = entry.read(args)
    if whose == entry.VERSION:
        assert launcher.run(*args, end=OWN_VERSION) == [*launcher.real("crun"), *args]
        return
    words = probe(args, at) if whose == entry.OURS else args
    first = ["python", str(launcher.program)] if words is None else launcher.real("crun")
    assert launcher.run(*args) == [*first, *(args if words is None else words)]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    command=st.sampled_from(["checkpoint", "restore"]),
    args=st.lists(st.sampled_from([*_PROBES, *_PARTS]), max_size=4),
)
def test_probes_as_python(launcher: Launcher, command: str, args: list[str]) -> None:
    words = probe([command, *args], 0)
    first = ["python", str(launcher.program)] if words is None else launcher.real("crun")
    assert launcher.run(command, *args) == [*first, *([command, *args] if words is None else words)]


# The file, and the runtime that it names to a pass-through; TOML or not.
WRITTEN = [
    ("", ""),
    ('runtime = "runc"', "runc"),
    ("# a comment, é\n\n\truntime='runc' # and another\r\nretries = 3\n", "runc"),
    ('retries = 0\nruntime = "runc"\n[nvidia]\nruntime = "nosuch"\n', "runc"),
    ('[nvidia]\nruntime = "nosuch"', ""),
    ("runtimes = 'runc'\nflag = true\n", ""),
    ("runtime = runc", "runc"),
    ("runtime = runc # why\n", "runc"),
    ("runtime=runc\r\n", "runc"),
    ('runtime = "runc\n', "runc"),
    ('runtime = "runc" x', "runc"),
    ('runtime = """runc"""', "runc"),
    ('"runtime" = "runc"', "runc"),
    ('list = [\n"x",\n]\nruntime = "runc"', "runc"),
    ('a = """\nb\nruntime = "runc"', "runc"),
    ('retries = 3 3\nmemory level = {\nruntime = "runc"\n[[[', "runc"),
    ('runtime = "runc"\nruntime = "crun"', "runc"),
    ('runtime = ""', ""),
    ("runtime", ""),
    ("runtime =", ""),
    ("runtime = '''\nrunc'''", ""),
    ("x\0\nruntime = runc", ""),
    ("\ufeffruntime = 'runc'", ""),
    ("#" * 70000 + "\nruntime = 'runc'\n", ""),
    ("#\n" * 30000 + "runtime = 'runc'\n", "runc"),
]
# Of these it can be told that the name is wrong.
BAD = [
    'runtime = "ru\\u006ec"',
    'runtime = "bin/runc"',
    "runtime = a/b",
    "runtime = '\x07'",
    'runtime = "' + "x" * 5000 + '"',
]
# These are names of what is not there.
MISSING = 'runtime = "nosuch"'
NOT_THERE = [MISSING, 'runtime = "/nosuch"', "runtime = 7", 'runtime = "rün"', "runtime = {", "runtime = /"]


@pytest.mark.parametrize(("text", "name"), WRITTEN)
def test_settings(launcher: Launcher, text: str, name: str) -> None:
    launcher.write(launcher.bin / "runc", _REAL)
    launcher.settings.write_text(text)
    assert locate.setting(str(launcher.settings)) == name
    assert launcher.run("state") == [*launcher.real(name or "crun"), "state"]


@pytest.mark.parametrize("name", ["crun", "runc"])
@pytest.mark.parametrize("text", [*BAD, *NOT_THERE])
def test_another_runs_where_the_settings_name_none(launcher: Launcher, text: str, name: str) -> None:
    """crun, or else runc. Nothing is said on either stream, which programs read."""
    (launcher.bin / "crun").rename(launcher.bin / name)
    launcher.settings.write_text(text)
    assert launcher.run("state", "x") == [*launcher.real(name), "state", "x"]
    if text in BAD:
        with pytest.raises(SettingsError, match="it must be a runtime's name or absolute path"):
            locate.setting(str(launcher.settings))


_TOML_PARTS = [
    *('runtime = "runc"', "runtime", " = ", "'runc'", '"crun"', '"""', "'''", "\n", "\r\n", "#", "[", "]"),
    *("\\", "x = 1", "y = true", '"', "'", " ", "\t", "é", "=", "[a]", "[[a]]", ",", "{", "}", ".", "\r"),
]
_TOML = st.lists(st.sampled_from(_TOML_PARTS), max_size=10).map("".join)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=_TOML)
def test_settings_as_python(launcher: Launcher, text: str) -> None:
    launcher.write(launcher.bin / "runc", _REAL)
    launcher.settings.write_bytes(text.encode())
    try:
        name = locate.setting(str(launcher.settings))
    except SettingsError:
        name = ""
    assume(name != "[")  # this machine has such a program
    assert launcher.run("state")[1] == str(launcher.bin / (name if name == "runc" else "crun"))


def _folder(path: Path) -> None:
    path.mkdir()


def _loop(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 4096)


@pytest.mark.parametrize("make", [_folder, _loop, _huge, _binary, os.mkfifo])
def test_settings_that_cannot_be_read(launcher: Launcher, make: Callable[[Path], object]) -> None:
    make(launcher.settings)
    assert launcher.run("state") == [*launcher.real("crun"), "state"]


def test_a_terminal_is_told(launcher: Launcher) -> None:
    """Once, and only where a person reads it and no program."""
    launcher.settings.write_text('runtime = "crunn"\n')
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [launcher.program, "state"],
        env={"PATH": str(launcher.bin)},
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    ) as process:
        os.close(theirs)
        said = os.read(ours, 4096).decode()
    os.close(ours)
    assert process.returncode == 0
    assert said == (
        f"gpusnap-runtime: the real runtime that {launcher.settings} names cannot be started; "
        f"{launcher.bin}/crun runs in its place: see gpusnap settings\r\n"
    )


CRI = "--root /run/containerd/runc/k8s.io --log /l --log-format json --systemd-cgroup"
NAMED = 'runtime = "{}"'
CRUN, RUNC, PATHS, OTHER = (NAMED.format(name) for name in ("crun", "runc", "{opt}/runc", "wrapper"))

# A settings file, a line, and which runtimes are tried for it, in order; {opt} has a runc of its own. The IDs
# say who made a container: below {root}, and {private}, where crun and runc keep theirs for a user.
ORDERS = [
    ("", "state x", "crun runc"),
    ("", "--root /run/crun state x", "crun runc"),
    ("", "--root", "crun runc"),
    ("", "--root= features", "crun runc"),
    # Under CRI.
    ("", f"{CRI} state x", "runc crun"),
    ("", f"{CRI} -- kill x 9", "runc crun"),
    ("", "--root=/run/containerd/runc/default delete --force x", "runc crun"),
    ("", "-root=/run/crio-gpusnap create --bundle /b x", "runc crun"),
    ("", "--root /run/containerd/runc --version", "runc crun"),
    ("", "--root /run/containerd/runc --root /r state x", "crun runc"),
    ("", "--log --root --cgroup-manager=/run/containerd/runc state x", "crun runc"),
    ("", "--root /run/containerd/runcs state x", "crun runc"),
    ("", "state --root /run/containerd/runc", "crun runc"),
    ("", "features", "runc crun"),
    ("", "--root /r features", "crun runc"),
    (CRUN, f"{CRI} state x", "crun runc"),
    (OTHER, f"{CRI} state x", "wrapper runc crun"),
    (MISSING, f"{CRI} create x", "runc crun"),
    ("runtime = a/b", f"{CRI} create x", "runc crun"),
    # The settings.
    (CRUN, "state x", "crun runc"),
    (RUNC, "state x", "runc crun"),
    (PATHS, "create x", "{opt}/runc crun runc"),
    (OTHER, "--version", "wrapper crun runc"),
    # A container stays with its runtime.
    ("", "--root {root} kill by-crun KILL", "crun runc"),
    ("", "--root {root} kill by-runc KILL", "runc crun"),
    ("", "--root={root} exec --process /by-crun -- by-runc", "runc crun"),
    ("", "--root /x -root {root} delete --force by-runc", "runc crun"),
    ("", "--root {root} -- state by-runc", "runc crun"),
    ("", "--root {root} exec " + "--env A=1 " * 200 + "by-runc sh", "runc crun"),
    ("", "--root {root} delete .by-runc", "runc crun"),
    ("", "delete --force by-runc", "runc crun"),
    (RUNC, "delete --force by-crun", "crun runc"),
    (CRUN, "--root {root} state by-runc", "runc crun"),
    (RUNC, "--root {root} state by-crun", "crun runc"),
    (MISSING, "--root {root} state by-runc", "runc crun"),
    ("runtime = a/b", "--root {root} state by-runc", "runc crun"),
    # The settings' runc is runc, wherever it is.
    (PATHS, "--root {root} state by-runc", "{opt}/runc runc crun"),
    (PATHS, "--root {root} state by-crun", "crun {opt}/runc runc"),
    # A wrapper may have made it by either.
    (OTHER, "--root {root} state by-runc", "wrapper runc crun"),
    (OTHER, "--root {root} state by-crun", "wrapper crun runc"),
    # Whose it is cannot be told.
    ("", "--root {root} state by-both", "crun runc"),
    (RUNC, "--root {root} state by-both", "runc crun"),
    (RUNC, "--root {root} state by-none", "runc crun"),
    (RUNC, "--root {root} state ../root/by-crun", "runc crun"),
    (RUNC, "--root {root} state -by-crun", "runc crun"),
    (RUNC, "--root {root} list", "runc crun"),
    (RUNC, "--root {root} state .", "runc crun"),
    (RUNC, "--root {root}/by-crun state ..", "runc crun"),
    # It begins, or is asked for nothing.
    (RUNC, "--root {root} create by-crun", "runc crun"),
    (RUNC, "--root {root} run by-crun", "runc crun"),
    (RUNC, "--root {root} checkpoint --help by-crun", "runc crun"),
]


@pytest.fixture
def places(launcher: Launcher, tmp_path: Path) -> dict[str, str]:
    """The directories that ORDERS names, with what is in them; the real runtimes, all of which run."""
    root, private = tmp_path / "root", tmp_path / "private"
    for name, file in zip(locate.NAMES, locate.STATE_FILES, strict=True):
        launcher.write(launcher.bin / name, _REAL)
        for where in (f"by-{name}", f".by-{name}", f"-by-{name}", "by-both"):
            (root / where).mkdir(parents=True, exist_ok=True)
            (root / where / file).touch()
        (private / name / f"by-{name}").mkdir(parents=True)
        (private / name / f"by-{name}" / file).touch()
    (root / "by-none" / "status").mkdir(parents=True)  # a directory is no state
    (root / "status").touch()
    launcher.write(launcher.bin / "wrapper", _REAL)
    launcher.write(tmp_path / "opt" / "runc", _REAL)
    return {"root": str(root), "private": str(private), "opt": str(tmp_path / "opt")}


def launcher_order(launcher: Launcher, args: list[str], private: str) -> list[str]:
    """What the launcher tries, in order: each that was started is made one that cannot be."""
    tried = list[str]()
    while True:
        done = launcher.done(*args, path=str(launcher.bin), XDG_RUNTIME_DIR=private)
        assert (done.returncode, done.stderr) == (0, b"")
        kind, path, *_ = os.fsdecode(done.stdout).split("\0")
        if kind == "python":
            return tried
        assert path not in tried
        tried.append(path)
        Path(path).write_text("#!/nosuch/interpreter\n")


def python_order(launcher: Launcher, args: list[str], private: str) -> list[str]:
    """What the Python entry tries, in order."""
    tried = list[str]()

    def fail(path: str, given: list[str]) -> NoReturn:
        tried.append(path)
        raise NotStarted("it cannot be started")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(locate, "SETTINGS_FILE", str(launcher.settings))
        patch.setattr(locate, "SYSTEM_DIRECTORIES", ())
        patch.setattr(locate, "_own_files", [str(launcher.program)])
        patch.setattr(locate, "become", fail)
        patch.setattr(entry, "_spawn", fail)
        patch.setenv("PATH", str(launcher.bin))
        patch.setenv("XDG_RUNTIME_DIR", private)
        with pytest.raises(NotStarted):
            entry._answer(args)
    return tried


@pytest.mark.parametrize(("text", "line", "order"), ORDERS)
def test_order(launcher: Launcher, places: dict[str, str], text: str, line: str, order: str) -> None:
    """The container's runtime, the settings', the one that is preferred, each where the one before fails."""
    launcher.settings.write_text(text.format(**places))
    args = line.format(**places).split()
    wanted = [str(launcher.bin / each) for each in order.format(**places).split()]  # an absolute one as it is
    assert python_order(launcher, args, places["private"]) == wanted
    assert launcher_order(launcher, args, places["private"]) == wanted


WAYS: dict[str, Callable[..., object]] = {
    "symlink": os.symlink,
    "hard link": os.link,
    "copy": shutil.copy,
}


@pytest.mark.parametrize("way", WAYS)
def test_never_itself(launcher: Launcher, way: str) -> None:
    (launcher.bin / "crun").unlink()
    in_front = launcher.bin / "crun"
    WAYS[way](launcher.program, in_front)
    real = launcher.write(launcher.directory / "second" / "crun", _REAL)
    assert launcher.run("state", path=f"{launcher.bin}:{real.parent}")[:2] == ["real", str(real)]
    launcher.settings.write_text(f'runtime = "{in_front}"')
    path = f"{launcher.bin}:{real.parent}"
    assert launcher.run("state", path=path)[:2] == ["real", str(real)]


def test_installed_as_crun_in_front_of_crun(launcher: Launcher) -> None:
    in_front = launcher.directory / "front" / "crun"
    in_front.parent.mkdir(exist_ok=True)
    shutil.copy(launcher.program, in_front)
    path = f"{in_front.parent}:{launcher.bin}"
    assert launcher.run("state", program=in_front, path=path)[1] == str(launcher.bin / "crun")
    assert launcher.run("checkpoint", program=in_front, path=path)[1] == str(in_front)


def test_looks_where_python_looks(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "_own_files", [str(launcher.program)])
    (launcher.bin / "crun").unlink()
    (launcher.bin / "crun").mkdir()
    runc = launcher.write(launcher.directory / "second" / "runc", _REAL)
    (launcher.bin / "runc").write_text("not executable")
    long = "/" + "d" * 5000
    for path in (f"{launcher.bin}:{runc.parent}", f"relative::{long}:{launcher.bin}/:{runc.parent}//"):
        monkeypatch.setenv("PATH", path)
        launcher.settings.write_text('runtime = "runc"')
        started, who, *_ = launcher.run("state", path=path)
        assert (started, who) == ("real", locate.find("runc"))


@pytest.mark.parametrize("text", ["#!/nosuch/interpreter\n", "no program of any kind\0"])
def test_a_runtime_that_cannot_run(launcher: Launcher, text: str) -> None:
    """The next one does; where there is none, Python says why."""
    launcher.write(launcher.bin / "crun", text)
    runc = launcher.write(launcher.bin / "runc", _REAL)
    assert launcher.run("state") == [*launcher.real("runc"), "state"]
    runc.unlink()
    for line in (["state"], ["--version"], ["checkpoint", "--help"]):
        assert launcher.run(*line)[0] == "python"


def test_arguments_and_environment_are_passed_as_they_are(launcher: Launcher) -> None:
    launcher.write(launcher.bin / "crun", "#!/bin/sh\ncat /proc/self/environ\n")
    env = {
        "B": "x=\xff\n",
        "GPUSNAP_LAUNCHER": "/forged",
        "PATH": str(launcher.bin),
        "GPUSNAP_LAUNCHERS": "kept",
    }
    launcher.write(launcher.bin / "cat", '#!/bin/sh\nexec /bin/cat "$@"\n')
    done = subprocess.run([launcher.program, "state"], env=env, capture_output=True, check=True)
    found = dict(word.split(b"=", 1) for word in done.stdout.split(b"\0")[:-1])
    assert found.pop(b"PWD", b"")
    found = {name: value for name, value in found.items() if name not in (b"_", b"OLDPWD", b"SHLVL")}
    del env["GPUSNAP_LAUNCHER"]
    assert found == {os.fsencode(name): os.fsencode(value) for name, value in env.items()}


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The path of a socket of its own; nobody listens there."""
    return tmp_path / "gate"


def ask(launcher: Launcher, gate: Path, stage: str, init: str = "0") -> int:
    """How the launcher ends where CRIU runs it at a stage."""
    return launcher.done(
        GPUSNAP_GATE=str(gate), CRTOOLS_SCRIPT_ACTION=stage, CRTOOLS_INIT_PID=init
    ).returncode


@pytest.mark.parametrize(
    ("answer", "code"),
    [(b"y", 0), (b".....y", 0), (b"n", 1), (b"..n", 1), (b"", 1), (b"..", 1), (b"x", 1)],
)
@pytest.mark.parametrize("stage", ["probe", "probe-dump", "post-dump", "pre-restore", "post-restore"])
def test_criu_waits_for_gpusnap(launcher: Launcher, gate: Path, stage: str, answer: bytes, code: int) -> None:
    """It goes on only where the answer is yes; without one, where gpusnap is killed, the launcher fails."""
    said = []
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(gate))
        listening.listen()
        listening.settimeout(30)

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                said.append(connection.recv(100))
                for at in range(len(answer)):
                    connection.send(answer[at : at + 1])

        thread = threading.Thread(target=serve)
        thread.start()
        assert ask(launcher, gate, stage, "4711") == code
        thread.join()
    assert said == [f"{stage} 4711\n".encode()]


def test_stages_that_need_no_gpusnap(launcher: Launcher, gate: Path) -> None:
    """At these nobody is asked."""
    for stage in ("setup-namespaces", "network-unlock", "pre-resume", "post-resume", "post"):
        assert ask(launcher, gate, stage) == 0


def test_nobody_listens(launcher: Launcher, gate: Path) -> None:
    assert ask(launcher, gate, "post-restore") == 1
    assert ask(launcher, gate.with_name("x" * 200), "post-restore") == 1
    assert ask(launcher, gate, "post-restore", "1" * 99) == 1


def test_a_command_that_a_script_of_criu_runs(launcher: Launcher, gate: Path) -> None:
    """With words it is what it always is, whatever the environment has."""
    found = launcher.run("state", "x", GPUSNAP_GATE=str(gate), CRTOOLS_SCRIPT_ACTION="post-restore")
    assert found == [*launcher.real("crun"), "state", "x"]


BROKEN_ENTRIES: dict[str, Callable[[Path], object]] = {
    "it or its interpreter does not exist": lambda path: path.unlink(),
    "access is refused": lambda path: path.chmod(0o644),
    "error 8": lambda path: path.write_text(""),
    "error 40": _loop,
}


@pytest.mark.parametrize("said", BROKEN_ENTRIES)
def test_without_the_python_entry(tmp_path: Path, said: str) -> None:
    """Everything goes on but checkpoint and restore, which say why not."""
    broken = build(tmp_path)
    BROKEN_ENTRIES[said](tmp_path / "entry")
    for text in ("", "runtime = crun", MISSING):
        broken.settings.write_text(text)
        for args in (lines.PASS | lines.UNCOMMON).values():
            assert broken.run(*args) == [*broken.real("crun"), *args]
        assert broken.run("--version", end=OWN_VERSION) == [*broken.real("crun"), "--version"]
        assert broken.run("checkpoint", "--help") == [*broken.real("crun"), "checkpoint", "--help"]
    for command in ("checkpoint", "restore"):
        done = broken.done(command, "x")
        assert (done.returncode, done.stdout) == (127, b"")
        assert done.stderr.decode() == (
            f"gpusnap-runtime: its Python program {tmp_path / 'entry'} cannot be started: {said}, so "
            "nothing is checkpointed or restored; reinstall gpusnap [GPS-002]\n"
        )


def test_without_anything(tmp_path: Path) -> None:
    """Neither a runtime nor Python."""
    broken = build(tmp_path)
    (tmp_path / "entry").unlink()
    (broken.bin / "crun").unlink()
    done = broken.done("state", "x", path=str(broken.bin))
    assert done.returncode == 127
    assert done.stderr.startswith(b"gpusnap-runtime: no real runtime can be started, neither crun nor runc")
