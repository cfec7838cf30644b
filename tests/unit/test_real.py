"""real.py and locate.py: where the real runtime is, and what it is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime_shim import locate, real, settings
from runtime_shim.errors import RuntimeFailed, SettingsError

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
    with pytest.raises(RuntimeFailed, match="failed with exit code 3 and said: no good") as caught:
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


@pytest.fixture
def both(own: Path, tmp_path: Path) -> Path:
    """A folder with a crun and a runc, on PATH."""
    program(tmp_path / "a" / "crun")
    program(tmp_path / "a" / "runc")
    return tmp_path / "a"


@pytest.mark.parametrize(
    ("root", "words", "name"),
    [
        ("", ["state", "x"], "crun"),
        ("/run/crun", ["state", "x"], "crun"),
        ("/run/containerd/runc", ["state", "x"], "runc"),
        ("/run/containerd/runc/k8s.io", ["create", "--bundle", "/b", "x"], "runc"),
        ("/run/containerd/runcs/k8s.io", ["state", "x"], "crun"),
        ("/run/crio-gpusnap", ["state", "x"], "runc"),
        ("", ["features"], "runc"),
        ("/run/crun", ["features"], "crun"),
        ("", [], "crun"),
    ],
)
def test_runc_is_preferred_under_cri(both: Path, root: str, words: list[str], name: str) -> None:
    assert real.find(root=root, words=words) == both / name
    assert real.find("crun", root=root, words=words) == both / "crun"
    assert real.find("runc", root=root, words=words) == both / "runc"
    (both / "runc").unlink()
    assert real.find(root=root, words=words) == both / "crun"


def test_a_container_stays_with_its_runtime(
    both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade, a setting, or a runc that is installed later change what is preferred, not its runtime."""
    root = str(tmp_path / "k8s.io")
    for word, state in (("old", "status"), ("new", "state.json")):
        (tmp_path / "k8s.io" / word).mkdir(parents=True)
        (tmp_path / "k8s.io" / word / state).touch()
    for roots, other in (((str(tmp_path),), "runc"), ((), "crun")):
        monkeypatch.setattr(locate, "RUNC_ROOTS", roots)
        for setting in (None, "crun", "runc", str(both / "crun"), str(both / "runc")):
            for words, name in (
                (["kill", "--all", "old", "9"], "crun"),
                (["exec", "--process", "/p.json", "old"], "crun"),
                (["kill", "new", "9"], "runc"),
            ):
                assert real.find(setting, root=root, words=words) == both / name
        for word in ("another", "-old", "../k8s.io/old", ".", "..", ""):
            assert real.find(root=root, words=["state", word]) == both / other
    wrapper = program(tmp_path / "b" / "wrapper")
    assert real.find(str(wrapper), root=root, words=["state", "old"]) == wrapper
    (both / "crun").unlink()
    assert real.find("runc", root=root, words=["state", "old"]) == both / "runc"


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
    with pytest.raises(SettingsError, match="the real runtime kata is neither on PATH") as caught:
        real.find("kata")
    assert "install it, or set runtime in /etc/gpusnap/gpusnap.toml" in caught.value.sentence()
    with pytest.raises(SettingsError, match="/opt/crun is not a program that can be run"):
        real.find("/opt/crun")


def test_setting(tmp_path: Path) -> None:
    path = tmp_path / "gpusnap.toml"
    assert locate.setting(str(path)) == ""
    path.write_text('[nvidia]\nruntime = "no"\n')
    assert locate.setting(str(path)) == ""
    path.write_text('retries = "bad, but not needed here"\nruntime = "/usr/bin/crun"\n')
    assert locate.setting(str(path)) == "/usr/bin/crun"
    path.write_bytes(b"runtime = '\xff'")
    with pytest.raises(SettingsError, match="is not TOML"):
        locate.setting(str(path))
    with pytest.raises(SettingsError, match="cannot be read"):
        locate.setting(str(tmp_path))


def test_same_settings_file() -> None:
    assert locate.SETTINGS_FILE == settings.SETTINGS_FILE


def test_all() -> None:
    assert all(hasattr(real, name) for name in real.__all__)
    assert all(hasattr(locate, name) for name in locate.__all__)
