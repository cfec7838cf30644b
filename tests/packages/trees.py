"""Clean trees of distributions, each run in a throw-away copy, to install packages in.

    trees.py [--bind SRC:DST[:ro]]... SUITE [--] COMMAND...

The tree is the smallest that debootstrap makes, in $GPUSNAP_CACHE/packages/SUITE. A run sees it with
everything that it writes in memory, below an init of its own, as tests/host does it; other than there with
this machine's network, as apt and pip are to fetch what the packages ask for.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "host"))

from testhost import cgroups, kernel, namespaces, packages, rootfs, runs
from testhost.cache import Cache
from testhost.report import HostError, say

CHECKOUT = Path(__file__).resolve().parents[2]
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
APT_CONFIG = """\
Acquire::Check-Valid-Until "false";
Acquire::Languages "none";
"""
POLICY = "#!/bin/sh\nexit 101\n"
# Not the network's: apt and pip are to fetch.
NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
# Of this machine's environment, what its pip needs to reach an index.
PASSED_ON = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_DEFAULT_TIMEOUT", "CI")


@dataclass(frozen=True, slots=True)
class Suite:
    """A release of a distribution."""

    mirror: str
    """Empty: the first of this machine's own that has it."""
    components: str = "main"
    script: str = ""
    """Of debootstrap, where this machine's is older than the release."""
    signed: bool = True
    """Whether this machine has the keys to it; apt within the tree has them in any case."""


SUITES = {
    "bookworm": Suite(""),
    "trixie": Suite(""),
    "noble": Suite("http://archive.ubuntu.com/ubuntu", "main,universe", "gutsy", signed=False),
}


def tree(name: str) -> Path:
    """The tree of a suite, made where it is not there. Raises HostError."""
    top = Cache.default().top.parent / "packages"
    top.mkdir(parents=True, exist_ok=True)
    with open(top / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = top / name
        if not path.is_dir():
            wreck = top / f"building-{name}"
            shutil.rmtree(wreck, ignore_errors=True)
            say(f"making the tree {path} (a minute or two, once)")
            _make(name, SUITES[name], wreck, top / f"{name}.log")
            wreck.rename(path)
        return path


def _make(name: str, suite: Suite, path: Path, log: Path) -> None:
    packages.ensure()
    words = [
        "debootstrap",
        "--variant=minbase",
        "--include=ca-certificates",
        f"--components={suite.components}",
    ]
    words += [] if suite.signed else ["--no-check-gpg"]
    words += [name, str(path), suite.mirror or packages.mirror(name)]
    words += [f"/usr/share/debootstrap/scripts/{suite.script}"] if suite.script else []
    environment = {"PATH": os.environ["PATH"] + ":/usr/sbin:/sbin", "LANG": "C.UTF-8"} | packages.proxies()
    with open(log, "wb") as output:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, check=False
        )
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
        raise HostError(f"debootstrap {name} failed, whose output is in {log}:\n{tail}")
    (path / "etc/apt/apt.conf.d/90gpusnap").write_text(APT_CONFIG)
    (path / "usr/sbin/policy-rc.d").write_text(POLICY)
    (path / "usr/sbin/policy-rc.d").chmod(0o755)


def enter(name: str, argv: list[str], binds: list[rootfs.Bind]) -> int:
    """Run a command in the tree; its exit code."""
    path = tree(name)
    cache = Cache.default()
    cache.prepare()
    shown = [*binds, *(rootfs.Bind(each, each, True) for each in (BUNDLE, "/etc/resolv.conf", "/etc/hosts"))]
    with runs.registered(cache.runs) as (run, hierarchies):

        def setup() -> None:
            cgroups.enter(hierarchies, run)
            kernel.unshare(NAMESPACES)
            rootfs.assemble(path, cache.mount_point, shown, hierarchies, cgroup="v2")
            os.chdir("/root")

        def thaw() -> None:
            for hierarchy in hierarchies:
                cgroups.thaw(hierarchy.group(run))

        return namespaces.run(argv, setup=setup, teardown=rootfs.thaw_all, thaw=thaw, env=_environment())


def _environment() -> dict[str, str]:
    found = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    found |= {
        "LANG": "C.UTF-8",
        "DEBIAN_FRONTEND": "noninteractive",
        "PIP_CERT": BUNDLE,
        "SSL_CERT_FILE": BUNDLE,
    }
    found |= {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return found | packages.proxies()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="trees.py")
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--bind", action="append", default=[], metavar="SRC:DST[:ro]")
    parser.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND…")
    options = parser.parse_args()
    argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
    try:
        return enter(
            options.suite, argv or ["bash", "-l"], [rootfs.Bind.parse(each) for each in options.bind]
        )
    except (HostError, OSError) as error:
        say(f"failed: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
