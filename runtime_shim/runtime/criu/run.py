"""Runs the real runtime as a child, with CRIU's configuration and a log; explains its failure."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import IO

from gpusnap.oci.base.dataclass import dataclass, replace
from gpusnap.oci.base.files import open_below
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import RuntimeFailed, raise_as, reason
from gpusnap.runtime_shim.base.log import note, runtime_message, runtime_warnings
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime.child_process import Finished, run
from gpusnap.runtime_shim.runtime.command_line import CheckpointCall, RestoreCall, render, render_globals
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.runtime.criu.config import config_file
from gpusnap.runtime_shim.runtime.criu.scratch_files import scratch
from gpusnap.runtime_shim.runtime.identify import RealRuntime

# Seconds for a short command of the real runtime.
_CONTROL = 120.0
# "(00.012345) Error (criu/files-ext.c:98): Can't dump file 5 of that type [20000] (chr 195:0)";
# a restored task's PID is before it as in "(00.012345)    123: Error …".
_ERROR = compile_later(r"^\(\d+\.\d+\)\s+(?:\d+:\s+)?Error \([^)]*\): (.*)$")
# Errors on hosts where CRIU then continues without harm.
_HARMLESS = ("Can't setup RLIMIT_NOFILE", "Can't raise limit", "Can't set file limit")
_TAIL = 4 << 20


@dataclass(frozen=True, slots=True)
class Invocation:
    """A finished call of the real runtime."""

    code: int
    log: str
    err: str

    def explain(self, criu_log: str) -> str:
        """Say why it failed: its own message and CRIU's first error, if there are any."""
        own = runtime_message(self.log, self.err)
        criu = _find_first_error(criu_log)
        parts = [own, f"CRIU says: {criu} ({criu_log})" if criu else ""]
        return "; ".join(filter(None, parts)) or f"exit code {self.code}"


def invoke(
    call: CheckpointCall | RestoreCall,
    real: RealRuntime,
    criu_text: str,
    *,
    capture: bool,
    started: Callable[[int], object] | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Invocation:
    """Run the real runtime with a CRIU configuration, and with a log of its own instead of the caller's.

    `capture` and `started` as in `child_process.run`; without capture, the reason of a failure is only in
    that log. `environment` is added to the caller's own, and reaches CRIU, the runtime's child.
    """
    with _log_file() as (own, path):
        own_log = replace(call.globals, log=path, log_format="json")
        argv = render(replace(call, globals=own_log), real)
        with config_file(criu_text) as env:
            status = call.status_fd if isinstance(call, CheckpointCall) else None
            keep = () if status is None else (status,)
            done: Finished = run(
                argv,
                env={**env, **environment},
                capture=capture,
                own_session=capture,
                keep=keep,
                started=started,
            )
        said = _read(own)
    if done.code == 0:
        for warning in runtime_warnings(said):
            note(warning)
    return Invocation(done.code, said, done.err)


def _read(log: IO[str]) -> str:
    """Read the runtime's log. If it cannot be read, its exit code and CRIU's log must be enough."""
    try:
        return log.read()
    except OSError as error:
        note(f"the log of the runtime cannot be read: {reason(error)}")
        return ""


@contextmanager
def _log_file() -> Iterator[tuple[IO[str], str]]:
    """Yield a file for the runtime's log. If it cannot be closed or removed, that is no reason to fail."""
    with raise_as(RuntimeFailed, "no log can be created for the runtime"):
        file = tempfile.NamedTemporaryFile(
            "r", encoding="utf-8", errors="replace", prefix=scratch_files.prefix("log"), dir=scratch()
        )
    try:
        yield file, file.name
    finally:
        with suppress(OSError):
            file.close()


def _find_first_error(path: str) -> str:
    """Return the first error that matters in CRIU's log; empty if its last 4 MiB have none."""
    try:
        file, size = open_below(*os.path.split(path))
        with file:
            file.seek(max(0, size - _TAIL))
            text = file.read(_TAIL).decode("utf-8", "backslashreplace")
    except (OSError, ValueError):
        return ""
    for line in text.splitlines():
        match = _ERROR.match(line)
        if match and not any(words in match[1] for words in _HARMLESS):
            return match[1].strip()[:300]
    return ""


def make_quiet_command(call: CheckpointCall | RestoreCall, real: RealRuntime) -> list[str]:
    """Return the real runtime with the caller's global options, but with stderr instead of its log.

    For commands other than the requested one: the log gets one line of gpusnap, see base/log.py.
    """
    return render_globals(replace(call.globals, log=None, log_format=None), real)


def control(argv: Sequence[str]) -> Finished:
    """Run a short command of the real runtime, such as pause or delete; the caller judges its exit code.

    It has gpusnap's mark, so that a recovery after a kill waits for it; Ctrl-C does not reach it. Raises
    RuntimeFailed if it is not done after two minutes: it only writes to control groups, and sends signals.
    """
    env = {**locate.environment(), scratch_files.CONFIG: scratch_files.prefix("criu") + "none"}
    return run(argv, env=env, own_session=True, seconds=_CONTROL)
