"""CRIU: whether it is installed, its version and own check, and the tools for its network lock."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence

from gpusnap.doctor.base.check import Check, failure, ok, warning
from gpusnap.doctor.base.sources import ask, program, text, version
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.runtime.child_process import Finished
from gpusnap.runtime_shim.runtime.criu.images import pycriu_package
from gpusnap.runtime_shim.snapshot.preflight.sockets import NEWER_CRIU

# The version that Podman requires (podman, pkg/criu), and one that gpusnap has been used with.
_LEAST = (3, 11)
_KNOWN = (4, 1)
# Linux 6.16 no longer answers getsockopt(1, 16) in the form that CRIU before 4.2 uses;
# docs/troubleshooting.md.
_SOCKETS = ((6, 16), (4, 2))
# A line of CRIU's configuration (criu(8), CONFIGURATION FILES).
_NETWORK_LOCK = compile_later(r"\s*(?:--)?network-lock[\s=]+(\w+)")

Find = Callable[[str], str | None]
Run = Callable[[list[str]], Finished | None]


def check_criu(found: str, release: str = "", *, find: Find = program) -> Iterator[Check]:
    """Report the CRIU that the runtime will start; `found` is its version, "unknown" if it reports none."""
    path = find("criu")
    if path is None:
        yield failure("criu", "CRIU is not installed", "install the package criu, version 4.1 or later")
        return
    numbers = version(found)
    facts = {"path": path, "version": found}
    if not numbers:
        yield failure("criu", f"{path} does not report its version", "run criu --version, and reinstall CRIU")
    elif numbers < _LEAST:
        yield failure("criu", f"CRIU {found} is too old for Podman", "install CRIU 4.1 or later", **facts)
    elif numbers < _KNOWN:
        yield warning(
            "criu",
            f"CRIU {found} is older than any version that was tested with gpusnap; 3.17 does not work on "
            "current kernels",
            "install CRIU 4.1 or later",
            **facts,
        )
    elif dumps_only_local_sockets(found, release):
        yield warning(
            "criu",
            f"CRIU {found} cannot dump TCP, UDP and packet sockets on Linux 6.16 and later: a container with "
            "a server that listens on a port cannot be checkpointed",
            NEWER_CRIU,
            **facts,
            except_for="a container with a server that listens on a port",
        )
    else:
        yield ok("criu", f"CRIU {found} ({path})", **facts)


def dumps_only_local_sockets(found: str, release: str = "") -> bool:
    """Return whether this CRIU can dump only Unix and netlink sockets: before 4.2, on Linux 6.16 and later.

    Seen with CRIU 4.1.1 on Linux 6.18: TCP, UDP, raw and packet sockets all fail.
    """
    numbers, linux = version(found), version(release or os.uname().release)
    return linux >= _SOCKETS[0] and bool(numbers) and numbers < _SOCKETS[1]


def run_own_check(*, find: Find = program, run: Run = ask) -> Iterator[Check]:
    """Report the result of `criu check` in one line; nothing if CRIU is not installed."""
    path = find("criu")
    if path is None:
        return
    done = run([path, "check"])
    if done is None:
        yield failure("criu check", f"{path} check did not finish", "run it manually")
        return
    said = (done.out + "\n" + done.err).splitlines()
    errors = [_strip_source(line) for line in said if re.match(r"Error\b", line)]
    notes = [_strip_source(line) for line in said if re.match(r"Warn\b", line)]
    signal = max(done.code - 128, 0)
    facts = {"code": -signal or done.code, "errors": errors, "warnings": notes}
    if signal:
        yield failure(
            "criu check",
            f"criu check was killed by signal {signal}: this CRIU does not work on this kernel",
            "install CRIU 4.1 or later",
            **facts,
        )
    elif done.code:
        # "exited, status=1" is about a program that CRIU called, and rarely the cause.
        telling = [each for each in errors if not each.startswith("exited, status")]
        rest = [_strip_source(line) for line in said if line.strip()]
        first = (telling or errors or notes or rest or ["nothing"])[0]
        more = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
        yield failure(
            "criu check",
            f"CRIU says: {first}{more}",
            "run criu check as root for the complete result",
            **facts,
        )
    else:
        more = f", with {len(notes)} notes" if len(notes) > 1 else ""
        yield ok("criu check", f"CRIU finds all that it needs{more}", **facts)


def _strip_source(line: str) -> str:
    """Return a line of CRIU's without its source file: "Error (criu/cr-check.c:57): no" becomes "no"."""
    return re.sub(r"^(?:Error|Warn) +\([^)]*\): *", "", line).strip()[:300]


def check_network_lock(
    options: Sequence[str] = (), kind: str = "", *, root: str = "/", find: Find = program, run: Run = ask
) -> Iterator[Check]:
    """Report how CRIU locks the container's network during a dump; nothing if CRIU is not installed.

    It does so for each network namespace that it dumps, under crun and runc. The default method was chosen
    when it was built (criu(8), --network-lock; Debian: iptables), and can be set: `options` are criu.options,
    and `kind` is the runtime's, whose file of options comes last.
    """
    path = find("criu")
    if path is None:
        return
    lines = [
        *(text(root, "/etc/criu/default.conf") or "").splitlines(),
        *options,
        *(text(root, f"/etc/criu/{kind}.conf") or "" if kind else "").splitlines(),
    ]
    named = [match[1] for line in lines if (match := _NETWORK_LOCK.match(line))]
    way = named[-1] if named else _default_lock(run([path, "--help"]))
    if way != "iptables":
        how = {"nftables": "by nftables", "skip": "not at all (network-lock skip)"}.get(way, f"by {way}")
        yield ok("network lock", f"CRIU blocks a container's network {how} during the dump", way=way)
        return
    says = "CRIU blocks a container's network with iptables during the dump"
    missing = [name for name in ("iptables-restore", "ip6tables-restore") if find(name) is None]
    without = ""
    if missing:
        without = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
    elif (tool := find("iptables")) is not None:
        # CRIU's rules match a mark (criu/netfilter.c), which is an extension in a file of its own.
        answer = run([tool, "-m", "mark", "--help"])
        if answer is not None and answer.code != 0:
            without = "iptables has no extension `mark` (libxt_mark.so) here"
    if without:
        yield failure(
            "network lock",
            f"{says}, but {without}: no container with its own network can be dumped",
            'install the package iptables, or set criu.options = ["network-lock nftables"] in the settings',
            way=way,
            missing=missing,
        )
    else:
        yield ok("network lock", says, way=way)


def _default_lock(said: Finished | None) -> str:
    """Return the default in `criu --help`: "'nftables' or 'iptables' (default)"."""
    shown = said.out + said.err if said is not None else ""
    match = re.search(r"--network-lock\b.{0,300}?'(\w+)'\s+\(default\)", shown, re.S)
    return match[1] if match else "iptables"


def check_pycriu() -> Iterator[Check]:
    """Check CRIU's Python package, which decodes the images that a restore checks."""
    try:
        found = pycriu_package.load()
    except Refused as error:
        yield failure("pycriu", str(error), error.hint, there=pycriu_package.is_there())
        return
    how = (
        ""
        if found.accelerated
        else "; protobuf uses its Python implementation, which slows a restore down by about 0.2 s"
    )
    yield ok("pycriu", f"CRIU's images can be decoded{how}", there=True, accelerated=found.accelerated)
