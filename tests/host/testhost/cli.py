"""The command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from . import packages, recipe, runs
from .build import ensure_tree
from .cache import Cache
from .enter import CGROUP_LAYOUTS, Wish, enter
from .report import HostError, say
from .rootfs import Bind


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="host", description="A Debian host to run Podman, containerd and CRIU in, made for each run."
    )
    top.add_argument(
        "--suite", choices=recipe.SUITES, default=recipe.TRIXIE.name,
        help="the release of Debian that the host is made of (default: %(default)s)",
    )  # fmt: skip
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("tools", help="install what this machine lacks for all of this, and for the tests")
    commands.add_parser("build", help="make the tree, if it is not there, and print its path")
    commands.add_parser("clean", help="remove the cache and what killed runs left")
    for name, text in (("enter", "run a command in the host"), ("shell", "run a shell in it")):
        sub = commands.add_parser(name, help=text)
        sub.add_argument(
            "--cgroup", choices=CGROUP_LAYOUTS, default="v2",
            help="what is in /sys/fs/cgroup: v2 alone (default), v1 controllers beside v2, or whichever"
            " of the two this machine has",
        )  # fmt: skip
        sub.add_argument(
            "--bind",
            action="append",
            default=[],
            metavar="SRC:DST[:ro]",
            help="show this machine's SRC at DST",
        )
        sub.add_argument(
            "--env", action="append", default=[], metavar="NAME[=VALUE]", help="set, or pass on, a variable"
        )
        if name == "enter":
            sub.add_argument("argv", nargs=argparse.REMAINDER, metavar="COMMAND…")
    return top


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = parser().parse_args(words)
    try:
        if options.command == "tools":
            packages.ensure()
            return 0
        if os.geteuid() != 0:
            raise HostError("namespaces, mounts and cgroups need root", "Run it with sudo")
        cache, suite = Cache.default(), recipe.SUITES[options.suite]
        if options.command == "clean":
            return clean(cache)
        if options.command == "build":
            packages.ensure()  # a cached tree may be older than this machine
            print(ensure_tree(cache, suite)[0])
            return 0
        wish = _wish(options)
        tree, _keeps_it = ensure_tree(cache, suite)
        return enter(cache, tree, recipe.CHECKOUT, wish)
    except (HostError, OSError) as error:
        say(f"failed: {error}")
        return 1


def _wish(options: argparse.Namespace) -> Wish:
    argv = ["bash", "-l"] if options.command == "shell" else options.argv
    if argv[:1] == ["--"]:
        argv = argv[1:]
    if not argv:
        raise HostError("no command to run was given", "host enter [--cgroup v1|v2] [--bind …] [--] COMMAND…")
    env = []
    for text in options.env:
        name, equals, value = text.partition("=")
        if equals or name in os.environ:
            env.append((name, value if equals else os.environ[name]))
    return Wish(list(argv), options.cgroup, tuple(map(Bind.parse, options.bind)), tuple(env))


def clean(cache: Cache) -> int:
    """Remove the cache, except for what is in use."""
    if not cache.top.is_dir():
        return 0
    runs.clear_stale(cache.runs)
    with cache.locked():
        cache.clear_wrecks()
        busy = cache.prune()
        for tree in busy:
            say(f"{tree} is in use; stop the commands that run in it and clean again")
        if busy or any(cache.runs.glob("gpusnap-*")):
            return 1
        cache.remove()
    return 0
