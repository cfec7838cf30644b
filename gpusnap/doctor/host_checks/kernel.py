"""The kernel: its options, our capabilities, and its settings."""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterator, Mapping

from gpusnap.doctor.base.check import Check, failure, ok, warning
from gpusnap.doctor.base.sources import join_root, text
from gpusnap.runtime_shim.process.memory import userfault

# criu.org, "Linux kernel configuration": without these CRIU dumps nothing.
_NEEDED = ("CHECKPOINT_RESTORE", "NAMESPACES", "UTS_NS", "IPC_NS", "PID_NS", "NET_NS", "FHANDLE")
# Without these, or the modules of the same names, it dumps no container with such a file or socket.
_USEFUL = {
    "EVENTFD": "eventfd",
    "EPOLL": "epoll",
    "INOTIFY_USER": "inotify",
    "UNIX_DIAG": "Unix sockets",
    "INET_DIAG": "TCP sockets",
    "INET_UDP_DIAG": "UDP sockets",
    "PACKET_DIAG": "packet sockets",
    "NETLINK_DIAG": "netlink sockets",
}

# linux/capability.h
_CAPABILITIES = {"NET_ADMIN": 12, "SYS_PTRACE": 19, "SYS_ADMIN": 21, "SYS_RESOURCE": 24}
_CHECKPOINT_RESTORE = 40
_PTRACE_NEVER = 3  # Documentation/admin-guide/LSM/Yama.rst: no attach


def read_configuration(root: str, release: str) -> Mapping[str, str] | None:
    """Return the kernel's set options ("y", "m") without CONFIG_; None if it does not publish them."""
    found: str | None = None
    try:
        with gzip.open(join_root(root, "/proc/config.gz"), "rt", errors="replace") as file:
            found = file.read()
    except (OSError, EOFError, zlib.error):
        for path in (f"/boot/config-{release}", f"/usr/lib/modules/{release}/config"):
            found = found or text(root, path)
    if not found:
        return None
    return dict(re.findall(r"^CONFIG_(\w+)=(\S+)", found, re.M))


def check_pid_namespace(root: str = "/", pid: int | None = None) -> Iterator[Check]:
    """Check that /proc shows this process by its own PID; no result if it does (proc(5), /proc/self).

    In a chroot to a node's root, as in a pod, /proc may show the host's PID namespace while this process is
    in a nested one. A program that reads about itself by its PID, such as CRIU, then reads about another
    process.
    """
    pid = os.getpid() if pid is None else pid
    try:
        shown = os.readlink(join_root(root, "/proc/self"))
    except OSError:
        shown = ""
    if shown != str(pid):
        yield warning(
            "PID namespace",
            "/proc belongs to another PID namespace than gpusnap doctor, so its process IDs mean other "
            "processes; criu check is skipped",
            "run it in the host's PID namespace: hostPID: true for a pod, --pid=host for a container",
            pid=pid,
            shown=shown,
        )


def check_kernel(root: str = "/", release: str = "") -> Iterator[Check]:
    """Check the options that CRIU needs; if the kernel does not publish them, by its behaviour."""
    release = release or os.uname().release
    options = read_configuration(root, release)
    if options is None:
        # kernel/pid_namespace.c has this file only with CONFIG_CHECKPOINT_RESTORE.
        if os.path.exists(join_root(root, "/proc/sys/kernel/ns_last_pid")):
            yield ok("kernel", f"Linux {release} can checkpoint and restore", release=release)
        else:
            yield failure(
                "kernel",
                f"Linux {release} probably cannot checkpoint: there is no /proc/sys/kernel/ns_last_pid",
                "use a kernel with CONFIG_CHECKPOINT_RESTORE",
                release=release,
            )
        return
    missing = [name for name in _NEEDED if name not in options]
    lacks = {name: what for name, what in _USEFUL.items() if name not in options}
    if missing:
        yield failure(
            "kernel",
            f"Linux {release} was built without CONFIG_{', CONFIG_'.join(missing)}",
            "use your distribution's kernel, or one built with these options",
            release=release,
            missing=missing,
        )
    elif lacks:
        yield warning(
            "kernel",
            f"Linux {release} was built without CONFIG_{', CONFIG_'.join(lacks)}, so containers with "
            f"{', '.join(lacks.values())} cannot be dumped",
            "use a kernel with these options",
            release=release,
            missing=list(lacks),
        )
    else:
        yield ok("kernel", f"Linux {release} has all that CRIU asks for", release=release)


def check_capabilities(root: str = "/", user: int | None = None) -> Iterator[Check]:
    """Check the capabilities of this process; Podman and containerd run gpusnap-runtime as root."""
    user = os.geteuid() if user is None else user
    status = text(root, "/proc/self/status") or ""
    match = re.search(r"^CapEff:\s*([0-9a-fA-F]+)", status, re.M)
    mask = int(match[1], 16) if match else 0
    missing = [name for name, bit in _CAPABILITIES.items() if not mask & 1 << bit]
    # SYS_ADMIN includes it (capabilities(7)).
    if not mask & (1 << _CHECKPOINT_RESTORE | 1 << _CAPABILITIES["SYS_ADMIN"]):
        missing.append("CHECKPOINT_RESTORE")
    if user:
        yield failure(
            "privileges",
            f"this is user {user}, but only root can checkpoint containers; what only root can see is not "
            "checked",
            "run it with sudo",
            user=user,
            missing=missing,
        )
    elif set(missing) - {"SYS_RESOURCE"}:
        yield failure(
            "privileges",
            f"root here lacks CAP_{', CAP_'.join(missing)}",
            "run it outside a container, or in a privileged one",
            user=user,
            missing=missing,
        )
    elif missing:
        yield warning(
            "privileges",
            "root here lacks CAP_SYS_RESOURCE, so limits above the hard limits are not restored",
            "run it outside a container, or in a privileged one",
            user=user,
            missing=missing,
        )
    else:
        yield ok("privileges", "root, with all capabilities that CRIU needs", user=user)


def check_ptrace_scope(root: str = "/") -> Iterator[Check]:
    """Check Yama: whether root may attach to processes."""
    scope = (text(root, "/proc/sys/kernel/yama/ptrace_scope") or "").strip()
    if scope == str(_PTRACE_NEVER):
        yield failure(
            "ptrace",
            "kernel.yama.ptrace_scope is 3: no user, not even root, may attach to a process",
            "set kernel.yama.ptrace_scope to 2 or less in /etc/sysctl.d and restart the host: it cannot "
            "be lowered otherwise",
            scope=3,
        )
    else:
        yield ok(
            "ptrace", f"root may attach to processes (ptrace_scope {scope or 'does not exist'})", scope=scope
        )


def check_userfaultfd(user: int | None = None) -> Iterator[Check]:
    """Check whether a driver can wait for memory that is still being loaded; else a restore takes longer."""
    why = userfault.explain_missing()
    if not why:
        yield ok("userfaultfd", "a restore fills GPU memory while the driver reads it", there=True)
    elif os.geteuid() if user is None else user:
        yield ok("userfaultfd", f"only root can determine it: {why}", there=False)
    else:
        yield warning(
            "userfaultfd",
            f"{why}: a restore fills all GPU memory before the driver begins, which takes longer",
            "use Linux 6.1 or later with CONFIG_USERFAULTFD and /dev/userfaultfd",
            there=False,
        )


def check_cgroups(root: str = "/") -> Iterator[Check]:
    """Check for version 2, and whether containers also get into a freezer of version 1."""
    second, freezer, top = "", "", ""
    for line in (text(root, "/proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        words, kind = left.split(" "), right.split(" ")
        if len(words) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            second = words[4]
            top = top or ("v2" if words[4] == "/sys/fs/cgroup" else "")
        elif kind[0] == "cgroup" and "freezer" in kind[2].split(","):
            freezer = words[4]
    facts = {"v2": second, "v1_freezer": freezer}
    todo = "start the host with systemd.unified_cgroup_hierarchy=1"
    if top:
        yield ok("cgroups", "version 2", **facts)
    elif second and not freezer:
        yield ok("cgroups", f"version 2, in {second}", **facts)
    elif freezer:
        beside = f", and version 2 in {second}" if second else ""
        yield warning(
            "cgroups",
            f"version 1, with a freezer in {freezer}{beside}: a GPU container in that freezer is refused, "
            "because CRIU would wait forever for a stopped process",
            todo,
            **facts,
        )
    else:
        yield warning("cgroups", "no version 2 hierarchy is mounted", todo, **facts)


def check_huge_pages(root: str = "/") -> Iterator[Check]:
    """Check transparent huge pages: with never, the driver's checkpoint takes about twice as long."""
    found = text(root, "/sys/kernel/mm/transparent_hugepage/enabled") or ""
    match = re.search(r"\[(\w+)\]", found)
    mode = match[1] if match else ""
    if mode in ("madvise", "always"):
        yield ok("huge pages", f"transparent huge pages: {mode}", mode=mode)
    else:
        yield warning(
            "huge pages",
            f"transparent huge pages: {mode or 'missing'}; the driver needs twice as long for a checkpoint",
            "run echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            mode=mode,
        )
