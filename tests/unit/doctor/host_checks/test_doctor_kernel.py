"""Checks of the kernel, on recorded trees."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
from doctor_trees import only, tree

from gpusnap.doctor.host_checks import kernel
from gpusnap.runtime_shim.process.memory import userfault

OPTIONS = (*kernel._NEEDED, *kernel._USEFUL)
RELEASE = "6.18.1"
ALL = 0x1FFFFFFFFFF
SYS_RESOURCE, SYS_ADMIN, SYS_PTRACE = 1 << 24, 1 << 21, 1 << 19


def config(*without: str) -> str:
    lines = [f"CONFIG_{name}=y" if name not in without else f"# CONFIG_{name} is not set" for name in OPTIONS]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("without", "verdict", "said"),
    [
        ((), "ok", "all that CRIU asks for"),
        (("PACKET_DIAG",), "warning", "CONFIG_PACKET_DIAG, so containers with packet sockets"),
        (("CHECKPOINT_RESTORE", "UNIX_DIAG"), "failure", "without CONFIG_CHECKPOINT_RESTORE"),
    ],
)
@pytest.mark.parametrize(
    "where", ["/proc/config.gz", f"/boot/config-{RELEASE}", f"/usr/lib/modules/{RELEASE}/config"]
)
def test_options(tmp_path: Path, where: str, without: tuple[str, ...], verdict: str, said: str) -> None:
    """What the kernel was built with, wherever it is written."""
    text = config(*without).encode()
    root = tree(tmp_path, {where: gzip.compress(text) if where.endswith("gz") else text})
    found = only(kernel.check_kernel(root, RELEASE))
    assert found[0] == verdict
    assert said in found[1].says


def test_no_options(tmp_path: Path) -> None:
    """A kernel that keeps them to itself is judged by a file that only a fit one has."""
    assert only(kernel.check_kernel(str(tmp_path), RELEASE))[0] == "failure"
    root = tree(tmp_path, {"/proc/sys/kernel/ns_last_pid": "1", "/proc/config.gz": b"broken"})
    assert only(kernel.check_kernel(root, RELEASE))[0] == "ok"


@pytest.mark.parametrize(
    ("mask", "user", "verdict", "said"),
    [
        (ALL, 0, "ok", "root"),
        (ALL & ~SYS_RESOURCE, 0, "warning", "CAP_SYS_RESOURCE"),
        (ALL & ~SYS_PTRACE, 0, "failure", "CAP_SYS_PTRACE"),
        (SYS_PTRACE | SYS_RESOURCE | 1 << 12, 0, "failure", "CAP_SYS_ADMIN, CAP_CHECKPOINT_RESTORE"),
        (0, 1000, "failure", "user 1000"),
    ],
)
def test_capabilities(tmp_path: Path, mask: int, user: int, verdict: str, said: str) -> None:
    """What this process may do, and who it is."""
    root = tree(tmp_path, {"/proc/self/status": f"Name:\tx\nCapPrm:\t0\nCapEff:\t{mask:016x}\n"})
    found = only(kernel.check_capabilities(root, user))
    assert found[0] == verdict
    assert said in found[1].says


@pytest.mark.parametrize(("scope", "verdict"), [("", "ok"), ("0\n", "ok"), ("2\n", "ok"), ("3\n", "failure")])
def test_ptrace_scope(tmp_path: Path, scope: str, verdict: str) -> None:
    """Only 3 keeps root from attaching."""
    root = tree(tmp_path, {"/proc/sys/kernel/yama/ptrace_scope": scope} if scope else {})
    assert only(kernel.check_ptrace_scope(root))[0] == verdict


@pytest.mark.parametrize(
    ("why", "user", "verdict", "said"),
    [
        ("", 0, "ok", "while the driver reads it"),
        ("there is no /dev/userfaultfd", 0, "warning", "there is no /dev/userfaultfd: a restore fills all"),
        (
            "/dev/userfaultfd gives none",
            1000,
            "ok",
            "only root can determine it: /dev/userfaultfd gives none",
        ),
    ],
)
def test_userfaultfd(monkeypatch: pytest.MonkeyPatch, why: str, user: int, verdict: str, said: str) -> None:
    """It is no failure to lack it: a restore takes longer."""
    monkeypatch.setattr(userfault, "explain_missing", lambda: why)
    found = only(kernel.check_userfaultfd(user))
    assert found[0] == verdict
    assert said in found[1].says
    assert found[1].facts["there"] is not bool(why)


V2 = "25 20 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V2_BESIDE = "25 20 0:22 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
FREEZER = "26 20 0:23 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer"
CPU = "27 20 0:24 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"


@pytest.mark.parametrize(
    ("lines", "verdict", "said"),
    [
        ([V2], "ok", "version 2"),
        ([V2, FREEZER], "ok", "version 2"),
        ([CPU, V2_BESIDE], "ok", "version 2, in /sys/fs/cgroup/unified"),
        ([FREEZER, V2_BESIDE], "warning", "freezer in /sys/fs/cgroup/freezer, and version 2"),
        ([FREEZER], "warning", "version 1"),
        ([], "warning", "no"),
    ],
)
def test_cgroups(tmp_path: Path, lines: list[str], verdict: str, said: str) -> None:
    """Version 2, with or without version 1, or the other way round."""
    root = tree(tmp_path, {"/proc/self/mountinfo": "\n".join(lines)})
    found = only(kernel.check_cgroups(root))
    assert found[0] == verdict
    assert said in found[1].says


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("always [madvise] never", "ok"),
        ("[always] madvise never", "ok"),
        ("always madvise [never]", "warning"),
    ],
)
def test_huge_pages(tmp_path: Path, text: str, verdict: str) -> None:
    """The mode in brackets counts."""
    root = tree(tmp_path, {"/sys/kernel/mm/transparent_hugepage/enabled": text + "\n"})
    found = only(kernel.check_huge_pages(root))
    assert found[0] == verdict
    assert found[1].facts["mode"] == re.findall(r"\[(\w+)\]", text)[0]
    assert only(kernel.check_huge_pages(str(tmp_path / "other")))[0] == "warning"


def test_pid_namespace(tmp_path: Path) -> None:
    """In the host's /proc a process of a pod has another PID, or none where that namespace is not below."""
    (tmp_path / "proc").mkdir()
    link = tmp_path / "proc/self"
    verdict, found = only(kernel.check_pid_namespace(str(tmp_path), 7))
    assert (verdict, found.facts["shown"]) == ("warning", "")
    link.symlink_to("4711")
    verdict, found = only(kernel.check_pid_namespace(str(tmp_path), 7))
    assert verdict == "warning"
    assert "hostPID: true" in found.todo
    assert list(kernel.check_pid_namespace(str(tmp_path), 4711)) == []
    assert list(kernel.check_pid_namespace()) == []
