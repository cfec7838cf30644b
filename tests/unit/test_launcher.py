"""The launcher in C: that it decides as entry.py does, or leaves the line to it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import command_lines as lines
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime_shim import entry, locate
from runtime_shim.errors import SettingsError
from runtime_shim.words import HELP

SOURCE = Path(__file__).parents[2] / "runtime_shim" / "launcher"

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

    def write(self, path: Path, text: str) -> Path:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def run(self, *args: str, path: str | None = None, program: Path | None = None) -> list[str]:
        """What was started, "real" or "python", and with what."""
        done = subprocess.run(
            [program or self.program, *args],
            env={"PATH": path or f"{self.bin}:/usr/bin:/bin"},
            capture_output=True,
            check=True,
        )
        return os.fsdecode(done.stdout).split("\0")[:-1]


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
    built.settings.unlink(missing_ok=True)
    shutil.rmtree(built.bin)
    built.write(built.bin / "crun", _REAL)
    return built


def strings_of(name: str) -> tuple[str, ...]:
    text = "".join(path.read_text() for path in SOURCE.glob("*.[ch]"))
    found = re.search(rf"{name}\[\] = {{(.*?)}};", text, re.DOTALL)
    assert found, name
    return tuple(re.findall(r'"([^"]*)"', found[1]))


def test_the_same_lists() -> None:
    assert strings_of("global_values") == entry.GLOBAL_VALUES
    assert strings_of("global_flags") == entry.GLOBAL_FLAGS
    assert strings_of("help_options") == HELP
    assert strings_of("system_directories") == locate.SYSTEM_DIRECTORIES
    assert strings_of("runc_roots") == locate.RUNC_ROOTS


@pytest.mark.parametrize("args", lines.PASS.values(), ids=lines.PASS)
def test_passes_on(launcher: Launcher, args: list[str]) -> None:
    assert launcher.run(*args) == ["real", str(launcher.bin / "crun"), *args]


OTHERS = lines.OURS | lines.VERSION | lines.UNCERTAIN


@pytest.mark.parametrize("args", OTHERS.values(), ids=OTHERS)
def test_leaves_to_python(launcher: Launcher, args: list[str]) -> None:
    assert launcher.run(*args) == ["python", str(launcher.program), *args]


_CRI = "--root /run/containerd/runc/k8s.io --log /l --log-format json --systemd-cgroup"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (f"{_CRI} state x", "runc"),
        (f"{_CRI} -- kill x 9", "runc"),
        ("--root=/run/containerd/runc/default delete --force x", "runc"),
        ("-root=/run/crio-gpusnap create --bundle /b x", "runc"),
        ("--root /run/containerd/runc --root /r state x", "crun"),
        ("--log --root --cgroup-manager=/run/containerd/runc state x", "crun"),
        ("--root /run/containerd/runcs state x", "crun"),
        ("state --root /run/containerd/runc", "crun"),
        ("features", "runc"),
        ("--root /r features", "crun"),
        ("--root", "crun"),
        ("state x", "crun"),
    ],
)
def test_runc_is_preferred_under_cri(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, line: str, name: str
) -> None:
    launcher.write(launcher.bin / "runc", _REAL)
    args = line.split()
    assert launcher.run(*args)[:2] == ["real", str(launcher.bin / name)]
    assert python_finds(launcher, monkeypatch, args) == str(launcher.bin / name)


def python_finds(launcher: Launcher, monkeypatch: pytest.MonkeyPatch, args: list[str]) -> str:
    """What the Python entry would become."""
    monkeypatch.setattr(locate, "SETTINGS_FILE", str(launcher.settings))
    monkeypatch.setattr(locate, "_own_files", [str(launcher.program)])
    monkeypatch.setenv("PATH", str(launcher.bin))
    became = list[str]()
    monkeypatch.setattr(locate, "become", lambda path, words: became.append(path))
    monkeypatch.setattr("sys.argv", ["gpusnap-runtime", *args])
    entry.main()
    return became[0]


@pytest.mark.parametrize("setting", ["", "crun", "runc", "{}/crun", "{}/runc", "wrapper"])
def test_a_container_stays_with_its_runtime(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str
) -> None:
    for name in ("runc", "wrapper"):
        launcher.write(launcher.bin / name, _REAL)
    if setting:
        launcher.settings.write_text(f'runtime = "{setting.format(launcher.bin)}"\n')
    for word, state in (("old", "status"), ("new", "state.json")):
        (tmp_path / word).mkdir()
        (tmp_path / word / state).touch()
    otherwise = Path(setting).name or "crun"
    for words, name in (
        (["state", "new"], "runc"),
        (["kill", "--all", "new", "9"], "runc"),
        (["exec", "--process", "/old", "new"], "runc"),
        (["state", "old"], "crun"),
        (["state", f"../{tmp_path.name}/new"], otherwise),
        (["state", "-new"], otherwise),
        (["list"], otherwise),
    ):
        args = [f"--root={tmp_path}", *words]
        found = str(launcher.bin / (name if setting != "wrapper" else setting))
        assert launcher.run(*args, path=str(launcher.bin))[:2] == ["real", found]
        assert python_finds(launcher, monkeypatch, args) == found


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
def test_never_against_python(launcher: Launcher, args: list[str]) -> None:
    whose = entry.classify(args)[0]
    started, who, *words = launcher.run(*args)
    assert words == args
    if started == "real":
        assert (whose, who) == (entry.PASS, str(launcher.bin / "crun"))
    else:
        assert who == str(launcher.program)
    if whose != entry.PASS:
        assert started == "python"


PLAIN = [
    ("", "crun"),
    ('runtime = "runc"', "runc"),
    ("# a comment, é\n\n\truntime='runc' # and another\r\nretries = 3\n", "runc"),
    ('retries = 0\nruntime = "runc"\n[nvidia]\nruntime = "nosuch"\n', "runc"),
    ('[nvidia]\nruntime = "nosuch"', "crun"),
    ("runtimes = 'runc'\nflag = true\n", "crun"),
]
UNCERTAIN = [
    'runtime = "ru\\u006ec"',
    'runtime = """runc"""',
    "runtime = '''\nrunc'''",
    'text = """\nruntime = "runc"\n"""',
    '"runtime" = "runc"',
    'a.b = 1\nruntime = "runc"',
    'list = [\n"x",\n]\nruntime = "runc"',
    'runtime = "runc',
    "runtime = runc",
    "runtime = 7",
    'runtime = ""',
    'runtime = "bin/runc"',
    'runtime = "runc" x',
    'runtime = "runc"\nruntime = "runc"',
    'runtime "runc"',
    'runtime = "nosuch"',
    'runtime = "/nosuch"',
    'runtime = "rün"',
    "retries = 007",
    "retries = 0x7",
    "x = trueish",
    "a = 1\0",
    'runtime = "' + "x" * 5000 + '"',
    "#" * 20000,
]


@pytest.mark.parametrize(("text", "name"), PLAIN)
def test_plain_settings(launcher: Launcher, text: str, name: str) -> None:
    launcher.write(launcher.bin / "runc", _REAL)
    launcher.settings.write_text(text)
    assert launcher.run("state")[:2] == ["real", str(launcher.bin / name)]
    assert locate.setting(str(launcher.settings)) in ("", name)


@pytest.mark.parametrize("text", UNCERTAIN)
def test_settings_for_python(launcher: Launcher, text: str) -> None:
    launcher.write(launcher.bin / "runc", _REAL)
    launcher.settings.write_text(text)
    assert launcher.run("state")[0] == "python"


_TOML_PARTS = [
    *('runtime = "runc"', "runtime", " = ", "'runc'", '"crun"', '"""', "'''", "\n", "\r\n", "#", "[", "]"),
    *("\\", "x = 1", "y = true", '"', "'", " ", "\t", "é", "=", "[a]", "[[a]]", ",", "{", "}", ".", "\r"),
]
_TOML = st.lists(st.sampled_from(_TOML_PARTS), max_size=10).map("".join)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=_TOML)
def test_settings_never_against_python(launcher: Launcher, text: str) -> None:
    launcher.write(launcher.bin / "runc", _REAL)
    launcher.settings.write_bytes(text.encode())
    started, who, *_ = launcher.run("state")
    if started == "python":
        return
    # What stands after the first table cannot change the setting, right or wrong.
    launcher.settings.write_bytes(re.split(rb"(?m)^[ \t]*\[", text.encode())[0])
    try:
        name = locate.setting(str(launcher.settings)) or "crun"
    except SettingsError as error:
        # Another key twice is no TOML, but nothing that passing a command on has to see.
        if "Cannot overwrite a value" not in str(error) or text.count("runtime") > 1:
            raise
        return
    assert who == str(launcher.bin / name)


def test_settings_that_cannot_be_read(launcher: Launcher) -> None:
    launcher.settings.mkdir()
    try:
        assert launcher.run("state")[0] == "python"
    finally:
        launcher.settings.rmdir()


WAYS: dict[str, Callable[[Path, Path], object]] = {
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
    assert launcher.run("state")[:2] == ["python", str(launcher.program)]


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


def test_a_runtime_that_cannot_run_is_left_to_python(launcher: Launcher) -> None:
    launcher.write(launcher.bin / "crun", "#!/nosuch/interpreter\n")
    assert launcher.run("state")[0] == "python"
    launcher.write(launcher.bin / "crun", "no program of any kind\0")
    assert launcher.run("state")[0] == "python"


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


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        (None, 0, "it or its interpreter does not exist"),
        (_PYTHON, 0o644, "access is refused"),
        ("", 0o755, "error 8"),
    ],
)
def test_without_the_python_entry(tmp_path: Path, text: str | None, mode: int, said: str) -> None:
    broken = build(tmp_path)
    entry_file = tmp_path / "entry"
    entry_file.unlink()
    if text is not None:
        entry_file.write_text(text)
        entry_file.chmod(mode)
    done = subprocess.run(
        [broken.program, "checkpoint", "x"], env={}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 127
    assert done.stderr == (
        f"gpusnap-runtime: its Python program {entry_file} cannot be started: {said}; install gpusnap anew\n"
    )
    assert done.stdout == ""


def test_a_name_that_python_does_not_find_either(launcher: Launcher) -> None:
    with pytest.raises(SettingsError):
        locate.find("nosuch-runtime")
    launcher.settings.write_text('runtime = "nosuch-runtime"')
    assert launcher.run("state")[0] == "python"
