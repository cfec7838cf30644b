"""Run a command in the test host."""

from __future__ import annotations

import os
import socket
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

from . import cgroups, kernel, namespaces, recipe, rootfs, runs
from .cache import Cache

NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWNET
CGROUP_LAYOUTS = ("v2", "v1", "native")
HOSTNAME = "testhost"
SOURCE = "/src"
PATH = f"{recipe.VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Podman, runc and ctr run for a moment; a tenth of it would be Go's collector, with nothing to collect yet.
# With 400 it begins at 16 MiB (runtime/debug.SetGCPercent), for containerd, too.
GO = {"GOGC": "400"}
PASSED_ON = ("TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "CI")


@dataclass(frozen=True, slots=True)
class Wish:
    """What the caller asks for."""

    argv: list[str]
    cgroup: str = "v2"  # one of CGROUP_LAYOUTS
    binds: tuple[rootfs.Bind, ...] = ()
    env: tuple[tuple[str, str], ...] = ()


def enter(cache: Cache, tree: Path, checkout: Path, wish: Wish) -> int:
    """Run `wish.argv` in a throw-away host over `tree` and return its exit code."""
    binds = [rootfs.Bind(str(checkout), SOURCE, read_only=True), *wish.binds]
    scripts = entry_points(checkout)
    with runs.registered(cache.runs) as (name, all_hierarchies):

        def setup() -> None:
            cgroups.enter(all_hierarchies, name)
            kernel.unshare(NAMESPACES)
            rootfs.assemble(tree, cache.mount_point, binds, all_hierarchies, cgroup=wish.cgroup)
            socket.sethostname(HOSTNAME)
            rootfs.loopback_up()
            unpack_images()
            write_entry_points(scripts)
            os.chdir(SOURCE)

        def thaw() -> None:
            for hierarchy in all_hierarchies:
                cgroups.thaw(hierarchy.group(name))

        env = environment(dict(wish.env))
        return namespaces.run(wish.argv, setup=setup, teardown=rootfs.thaw_all, thaw=thaw, env=env)


def environment(wished: dict[str, str]) -> dict[str, str]:
    """The command's environment: what a login on the host would have, not this machine's."""
    env = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", "USER": "root", "SHELL": "/bin/bash"}
    env["PYTHONDONTWRITEBYTECODE"] = "1"  # /src is read-only
    env |= GO
    env["PODMAN_IGNORE_CGROUPSV1_WARNING"] = "1"  # tests compare stderr
    env |= {key: os.environ[key] for key in PASSED_ON if key in os.environ}
    return env | wished


def unpack_images() -> None:
    """Put the prepared image store in place: 20 ms, where an import takes Podman ten times that."""
    if os.path.exists(recipe.IMAGE_STORE):
        subprocess.run(["tar", "-xf", recipe.IMAGE_STORE, "-C", "/var/lib/containers"], check=True)


def entry_points(checkout: Path) -> dict[str, str]:
    """The commands that the checkout installs: name to "module:function"."""
    try:
        project = tomllib.loads((checkout / "pyproject.toml").read_text()).get("project", {})
    except FileNotFoundError:
        return {}
    return dict(project.get("scripts", {}))


def write_entry_points(scripts: dict[str, str]) -> None:
    """Make the commands of the checkout runnable, as an installation would."""
    for name, reference in scripts.items():
        module, _, function = reference.partition(":")
        path = f"/usr/local/bin/{name}"
        with open(path, "w") as script:
            script.write(
                f"#!{recipe.VENV}/bin/python\nimport sys\n"
                f"from {module} import {function}\nsys.exit({function}())\n"
            )
        os.chmod(path, 0o755)
