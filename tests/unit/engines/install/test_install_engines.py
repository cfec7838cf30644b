"""Which engines a host has, and which of their containers run by gpusnap-runtime."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpusnap.engines.install import detect as install_engines
from gpusnap.engines.install.detect import ShimContainer, containerd_version, find, list_used
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.runtime import find as locate


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host without containers; the folder of its programs."""
    monkeypatch.setattr(install_engines, "_BUNDLES", str(tmp_path / "tasks/*/*/options.json"))
    monkeypatch.setattr(install_engines, "_STORAGE", str(tmp_path))
    monkeypatch.setattr(locate, "SYSTEM_DIRECTORIES", ())
    monkeypatch.setattr(install_engines, "_list_monitored", list)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    return tmp_path / "bin"


def test_find(tmp_path: Path) -> None:
    """In a tree: what it has, wherever it keeps it, and nothing of this machine."""
    assert find(str(tmp_path)) == {}
    program(tmp_path / "usr/sbin/containerd", "")
    program(tmp_path / "usr/local/bin/crio", "")
    (tmp_path / "usr/bin").mkdir()
    (tmp_path / "usr/bin/podman").touch(0o644)
    assert find(str(tmp_path)) == {"containerd": "/usr/sbin/containerd", "crio": "/usr/local/bin/crio"}


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ("echo containerd github.com/containerd/containerd 1.7.24~ds1 1.7.24~ds1-6", 1),
        ("echo containerd github.com/containerd/containerd/v2 2.1.9+unknown", 2),
        ("echo containerd github.com/containerd/containerd v1.6.20 28", 1),
        ("echo what", 1),
        ("exit 1", 1),
    ],
)
def test_containerd_version(tmp_path: Path, says: str, version: int) -> None:
    path = program(tmp_path / "containerd", says)
    assert containerd_version(str(path)) == version
    assert containerd_version(str(path), str(tmp_path)) == 1
    assert containerd_version(str(tmp_path / "none")) == 1


def test_podmans_containers(nothing: Path) -> None:
    """Stopped ones too, whatever name or path the runtime has there."""
    program(
        nothing / "podman",
        'case "$2" in ls) printf "aaa\\nbbb\\nccc\\n";; inspect) '
        'printf "crun\\taaa\\tone\\ngpusnap-runtime\\tbbb\\ttwo\\n"; '
        'printf "/opt/gpusnap-runtime\\tccc\\tthree\\n"; exit 125;; esac',
    )
    assert list_used() == [ShimContainer("podman", "bbb", "two"), ShimContainer("podman", "ccc", "three")]


def test_podmans_containers_of_this_host(nothing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Podman has the environment of now, from which gpusnap has taken what names a service."""
    monkeypatch.setenv("GPUSNAP_MARK", "bbb")
    form = '"gpusnap-runtime\\t%s\\ttwo\\n"'
    program(
        nothing / "podman",
        f'case "$2" in ls) echo "$GPUSNAP_MARK";; *) printf {form} "$GPUSNAP_MARK";; esac',
    )
    assert list_used() == [ShimContainer("podman", "bbb", "two")]


def test_each_once(nothing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that Podman tells of and conmon watches, and one that only conmon does."""
    program(
        nothing / "podman",
        'case "$2" in ls) echo bbb;; *) printf "gpusnap-runtime\\tbbb\\ttwo\\n";; esac',
    )
    monkeypatch.setattr(
        install_engines,
        "_list_monitored",
        lambda: [ShimContainer("crio", "bbb"), ShimContainer("crio", "ddd")],
    )
    assert list_used() == [ShimContainer("podman", "bbb", "two"), ShimContainer("crio", "ddd")]


def test_podman_that_does_not_tell(nothing: Path) -> None:
    program(nothing / "podman", "echo broken storage >&2; exit 125")
    with pytest.raises(GpusnapError, match="Podman cannot list its containers: broken storage"):
        list_used()


def test_containerds_tasks(nothing: Path, tmp_path: Path) -> None:
    for name, options in (("a", '{"binary_name":"/usr/bin/gpusnap-runtime"}'), ("b", "{}")):
        bundle = tmp_path / "tasks/k8s.io" / name
        bundle.mkdir(parents=True)
        (bundle / "options.json").write_text(options)
    assert list_used() == [ShimContainer("containerd", "a")]


def test_monitors_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a pod, in a chroot to the node's root: /proc is the node's, and this process in a namespace below.

    An engine in a container of the node's has its own.
    """
    monkeypatch.setattr(install_engines, "_PROC", str(tmp_path))
    for process, namespace in (("self", 2), ("1", 1), ("77", 1), ("78", 3)):
        (tmp_path / process / "ns").mkdir(parents=True)
        (tmp_path / process / "ns/pid").symlink_to(f"pid:[{namespace}]")
        words = ("conmon", "-c", f"id-{process}", "-r", "/usr/local/bin/gpusnap-runtime")
        (tmp_path / process / "cmdline").write_bytes("\0".join(words).encode() + b"\0")
    (tmp_path / "1/cmdline").write_text("init")
    (tmp_path / "79").mkdir()
    assert list(install_engines._list_monitored()) == [ShimContainer("crio", "id-77")]


def test_monitors(tmp_path: Path) -> None:
    """What conmon watches, by its command line; a program of that name in another place is none."""
    conmon = tmp_path / "conmon"
    conmon.symlink_to(sys.executable)
    wait = "import sys; sys.stdin.read()"
    words = ["-c", wait, "-c", "the-id", "-r", "/usr/bin/gpusnap-runtime"]
    with subprocess.Popen([str(conmon), *words], stdin=subprocess.PIPE) as process:
        try:
            # The kernel shows a command line a moment after it lets the parent of a new program go on.
            deadline = time.monotonic() + 10
            wanted = ShimContainer("crio", "the-id")
            while wanted not in list(install_engines._list_monitored()):
                assert time.monotonic() < deadline
        finally:
            assert process.stdin is not None
            process.stdin.close()


@pytest.mark.parametrize(
    ("inspect", "patience", "said"),
    [
        (
            "echo broken >&2; exit 125",
            60.0,
            r"Podman does not report the runtime of the container aaa: broken",
        ),
        ("exec sleep 20", 0.5, r"podman did not finish within 0\.5 s"),
    ],
)
def test_podman_that_does_not_describe(
    nothing: Path, monkeypatch: pytest.MonkeyPatch, inspect: str, patience: float, said: str
) -> None:
    """One that it does not report may need the runtime; and nobody waits for ever."""
    monkeypatch.setattr(install_engines, "_PATIENCE", patience)
    monkeypatch.setenv("PATH", f"{nothing}:/usr/bin:/bin")
    program(nothing / "podman", f'case "$2" in ls) echo aaa;; inspect) {inspect};; esac')
    with pytest.raises(GpusnapError, match=said):
        list_used()


def test_one_that_is_removed_meanwhile(nothing: Path) -> None:
    """It needs no runtime any more."""
    gone = nothing / "gone"
    program(
        nothing / "podman",
        f'case "$2" in ls) [ -e {gone} ] || echo aaa;; inspect) : >{gone}; exit 125;; esac',
    )
    assert list_used() == []
