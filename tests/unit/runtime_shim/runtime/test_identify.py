"""runtime/identify.py and runtime/find.py: where the real runtime is, and what it is."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusnap.runtime_shim.base.errors import RuntimeFailed, SettingsError
from gpusnap.runtime_shim.runtime import command_line
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime import identify as real
from gpusnap.runtime_shim.shim import dispatch

CRUN_1_21 = """\
crun version 1.21
commit: 10269840aa07fb7e6b7e1acff6198692d8ff5c88
rundir: /run/crun
spec: 1.0.0
+SYSTEMD +SELINUX +APPARMOR +CAP +SECCOMP +EBPF +CRIU +WASM:wasmedge +YAJL
"""
CRUN_DEBIAN_12 = """\
crun version 1.8.1
commit: f8a096be060b22ccd3d5f3ebe44108517fbf6c30
rundir: /run/crun
spec: 1.0.0
+SYSTEMD +SELINUX +APPARMOR +CAP +SECCOMP +EBPF +YAJL
"""
RUNC_1_1 = """\
runc version 1.1.15+ds1
commit: 1.1.15+ds1-2+b4
spec: 1.2.0
go: go1.24.4
libseccomp: 2.6.1
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Our program's file; nothing else is on PATH or in the system's directories."""
    path = program(tmp_path / "own" / "gpusnap-runtime", "ours")
    monkeypatch.setattr(locate, "_own_files", [str(path)])
    monkeypatch.setattr(locate, "SYSTEM_DIRECTORIES", (str(tmp_path / "system"),))
    monkeypatch.setenv("PATH", f"relative::{tmp_path}/a:{tmp_path}/b")
    return path


def program(path: Path, text: str = "true") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "kind", "version", "name"),
    [
        (CRUN_1_21, "crun", (1, 21), "crun 1.21"),
        (RUNC_1_1, "runc", (1, 1, 15), "runc 1.1.15"),
        ("runc version 1.2.0-rc.1+dev\n", "runc", (1, 2, 0), "runc 1.2.0"),
        ("crun version 1.29.1.0.52-ba38\n", "crun", (1, 29, 1, 0, 52), "crun 1.29.1.0.52"),
        ("crun version UNKNOWN\n", "crun", (), "crun"),
        ("youki version 0.5.3\n", "other", (0, 5, 3), "runtime 0.5.3"),
        ("runsc, of no known form", "other", (), "runtime"),
        ("", "other", (), "runtime"),
    ],
)
def test_version(text: str, kind: str, version: tuple[int, ...], name: str) -> None:
    found = real.parse_version(Path("/usr/bin/runtime"), text)
    assert (found.kind, found.version, found.name) == (kind, version, name)
    assert found.line == text.partition("\n")[0]


def test_crun_built_without_criu() -> None:
    path = Path("/usr/bin/crun")
    assert real.parse_version(path, CRUN_1_21).has_criu
    assert not real.parse_version(path, CRUN_DEBIAN_12).has_criu
    assert real.parse_version(path, RUNC_1_1).has_criu
    assert "WASM:wasmedge" in real.parse_version(path, CRUN_1_21).features


def test_identify(tmp_path: Path) -> None:
    path = program(tmp_path / "crun", f"cat <<'E'\n{CRUN_1_21}E")
    assert real.identify(path) == real.parse_version(path, CRUN_1_21)
    assert real.identify(path).version_text == "1.21"


def test_identify_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailed, match="failed with exit code 3 and printed: no good") as caught:
        real.identify(program(tmp_path / "crun", "echo bad >&2; echo no good >&2; exit 3"))
    assert caught.value.exit_code == 3
    with pytest.raises(RuntimeFailed, match="cannot be started: it does not exist"):
        real.identify(tmp_path / "nosuch")


def test_crun_before_runc_and_path_before_system(own: Path, tmp_path: Path) -> None:
    runc = program(tmp_path / "a" / "runc")
    assert real.find() == runc
    system = program(tmp_path / "system" / "crun")
    assert real.find("") == system
    on_path = program(tmp_path / "b" / "crun")
    assert real.find() == on_path
    assert real.find("runc") == runc
    assert real.find(str(system)) == system


@pytest.mark.parametrize(
    ("root", "name"),
    [(None, "crun"), ("/run/crun", "crun"), (locate.RUNC_ROOTS[0], "runc"), ("/run/crio-gpusnap/x", "runc")],
)
def test_runc_is_preferred_under_cri(own: Path, tmp_path: Path, root: str | None, name: str) -> None:
    crun, runc = program(tmp_path / "a" / "crun"), program(tmp_path / "a" / "runc")
    assert real.find(root=root).name == name
    assert real.find("crun", root=root) == crun
    assert real.find("runc", root=root) == runc
    runc.unlink()
    assert real.find(root=root) == crun


@pytest.mark.parametrize(
    ("text", "line", "name"),
    [
        ("", "--root {root} checkpoint by-runc", "runc"),
        ('runtime = "crun"', "--root {root} checkpoint by-runc", "runc"),
        ('runtime = "runc"\n[nosuch]', "--root {root} checkpoint by-crun", "crun"),
        ('runtime = "runc"\n[nosuch]', "--root {root} restore new", "runc"),
        ('runtime = "a/b"', "--root {root} restore new", "crun"),
        ("", "--root /run/containerd/runc/k8s.io restore new", "runc"),
        ("", "--root {root} restore new", "crun"),
    ],
)
def test_of_a_checkpoint(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, line: str, name: str
) -> None:
    """It goes where the container's other commands go, also to the next where one cannot be started."""
    for each, file in zip(locate.NAMES, locate.STATE_FILES, strict=True):
        program(tmp_path / "a" / each, f"echo {each} version 1")
        (tmp_path / "root" / f"by-{each}").mkdir(parents=True)
        (tmp_path / "root" / f"by-{each}" / file).touch()
    (tmp_path / "settings").write_text(text)
    monkeypatch.setattr(locate, "SETTINGS_FILE", str(tmp_path / "settings"))
    call = command_line.parse(line.format(root=tmp_path / "root").split())
    assert dispatch._find_real(call).kind == name
    (tmp_path / "a" / name).write_text("#!/nosuch\n")
    assert {dispatch._find_real(call).kind, name} == set(locate.NAMES)


WAYS: dict[str, Callable[[Path, Path], object]] = {
    "symlink": os.symlink,
    "hard link": os.link,
    "copy": shutil.copy,
}


@pytest.mark.parametrize("way", WAYS)
def test_never_itself(own: Path, tmp_path: Path, way: str) -> None:
    in_front = tmp_path / "a" / "crun"
    in_front.parent.mkdir()
    WAYS[way](own, in_front)
    crun = program(tmp_path / "b" / "crun")
    assert real.find() == crun
    with pytest.raises(SettingsError, match="is gpusnap-runtime itself"):
        real.find(str(in_front))


def test_one_that_cannot_be_read(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next on PATH is taken; one that was asked for is not replaced."""
    bad, good = program(tmp_path / "a" / "crun"), program(tmp_path / "b" / "crun")
    whole = locate._is_own

    def is_own(path: str) -> bool:
        if path == str(bad):
            raise OSError(errno.EIO, "Input/output error", path)
        return whole(path)

    monkeypatch.setattr(locate, "_is_own", is_own)
    assert real.find() == good
    with pytest.raises(SettingsError, match="/a/crun cannot be read: Input/output error"):
        real.find(str(bad))


def test_never_the_launcher(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = program(tmp_path / "a" / "crun", "launcher")
    crun = program(tmp_path / "b" / "crun")
    assert real.find() == launcher
    monkeypatch.setenv(locate.LAUNCHER_VARIABLE, str(launcher))
    locate.take_launcher()
    assert locate.LAUNCHER_VARIABLE not in os.environ
    assert real.find() == crun


def test_passes_over_what_is_no_program(own: Path, tmp_path: Path) -> None:
    (tmp_path / "a" / "crun").mkdir(parents=True)
    os.mkfifo(tmp_path / "a" / "runc")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "crun").write_text("not executable")
    (tmp_path / "b" / "runc").symlink_to("dangling")
    with pytest.raises(RuntimeFailed, match="there is no real runtime: neither crun nor runc"):
        real.find()


def test_names_what_is_missing(own: Path) -> None:
    with pytest.raises(SettingsError, match="the real runtime kata is neither in PATH") as caught:
        real.find("kata")
    assert "install it, or set runtime in /etc/gpusnap/gpusnap.toml" in caught.value.sentence()
    with pytest.raises(SettingsError, match="/opt/crun is not an executable program"):
        real.find("/opt/crun")


def test_setting(tmp_path: Path) -> None:
    path = tmp_path / "gpusnap.toml"
    assert locate.setting(str(path)) == ""
    path.write_text('[nvidia]\nruntime = "no"\n')
    assert locate.setting(str(path)) == ""
    path.write_text('retries = "bad, but not needed here"\nruntime = "/usr/bin/crun"\n')
    assert locate.setting(str(path)) == "/usr/bin/crun"
    path.write_bytes(b"runtime = 'a\\b'")
    with pytest.raises(SettingsError, match="must be a runtime's name or absolute path"):
        locate.setting(str(path))
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(SettingsError, match="cannot be read"):
        locate.setting(str(path))
    with pytest.raises(SettingsError, match="cannot be read"):
        locate.setting(str(tmp_path))
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SettingsError, match="is not a regular file"):
        locate.setting(str(tmp_path / "fifo"))


def test_one_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for without end."""
    hanging = tmp_path / "crun"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(real, "_DEADLINE", 0.2)
    with pytest.raises(RuntimeFailed, match=r"crun did not finish within 0\.2 s"):
        real.identify(hanging)
