"""Which CRIU the real runtime will start, and how that CRIU handles a socket on this kernel."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator

from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import GpusnapError, RuntimeFailed
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime.child_process import Child, run
from gpusnap.runtime_shim.runtime.command_line import CheckpointCall, RestoreCall
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.runtime.criu.scratch_files import scratch
from gpusnap.runtime_shim.runtime.identify import RealRuntime

# Podman's environment has a PATH, but a service's may lack the sbin directories where Debian keeps criu.
_FOLDERS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@functools.cache
def criu_version(named: str = "") -> str:
    """Return its version, e.g. 4.1.1; "unknown" if it cannot be asked: the runtime will report that better.

    `named`: the program that the runtime's caller has named, if the runtime uses that.
    """
    program = shutil.which(named) if named else _program()
    if program is None:
        return "unknown"
    try:
        out = run([program, "--version"], seconds=_PATIENCE).out
    except RuntimeFailed:
        return "unknown"
    words = out.split()
    return words[1][:64] if len(words) > 1 and words[0] == "Version:" else "unknown"


def find_named(call: CheckpointCall | RestoreCall, real: RealRuntime) -> str:
    """Return the CRIU that the runtime's caller has named, if the runtime uses that; else "".

    See runtime/options.py: crun takes none, and runc ignores it from 1.2 on.
    """
    return call.globals.criu or "" if real.kind == "runc" and real.version < (1, 2) else ""


def _program() -> str | None:
    return shutil.which("criu") or shutil.which("criu", path=_FOLDERS)


# Its messages about a socket that it cannot dump (criu/sockets.c, do_dump_opt; criu/sk-inet.c,
# can_dump_ipproto): 1:16 is SOL_SOCKET's SO_PASSCRED.
_REFUSALS = compile_later(r"Can't get 1:16 opt|Unsupported proto ")
# Seconds; it takes about 20 ms.
_PATIENCE = 10


@functools.cache
def refuses(family: int, kind: int, protocol: int) -> bool:
    """Whether CRIU refuses a socket of this family, type and protocol; see socket(2).

    Tested on a child process with such a socket, because versions do not show it: distributions backport
    fixes. False if it cannot be tested, or fails for another reason.
    """
    program = _program()
    if program is None:
        return False
    with contextlib.ExitStack() as stack:
        try:
            one = stack.enter_context(socket.socket(family, kind, protocol))
            images = stack.enter_context(
                tempfile.TemporaryDirectory(prefix=scratch_files.prefix("probe"), dir=scratch())
            )
            process = stack.enter_context(_sleeper(one.fileno()))
            options = ["--no-default-config", "--leave-running", "--manage-cgroups=ignore", "--log-file=log"]
            run(
                [program, "dump", f"--tree={process.pid}", f"--images-dir={images}", *options],
                env=_environment(),
                seconds=_PATIENCE,
            )
            with open(os.path.join(images, "log"), encoding="utf-8", errors="replace") as log:
                return _REFUSALS.search(log.read()) is not None
        except (OSError, GpusnapError):
            return False


@contextlib.contextmanager
def _sleeper(descriptor: int) -> Iterator[Child]:
    """Yield a process that has the descriptor and does nothing; in a session of its own, as CRIU requires."""
    process = Child(
        ["sleep", str(2 * _PATIENCE)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_environment(),
        pass_fds=(descriptor,),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.end()


def _environment() -> dict[str, str]:
    """Return the environment without CRIU_CONFIG_FILE, which --no-default-config does not ignore."""
    return {name: value for name, value in locate.environment().items() if name != scratch_files.CONFIG}
