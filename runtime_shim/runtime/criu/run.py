"""The real runtime as a child: CRIU's configuration, a log of its own, and what it said when it failed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import IO

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.errors import RuntimeFailed, reason
from gpusnap.runtime_shim.log import note, runtime_message, runtime_warnings
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime.child_process import Finished, run
from gpusnap.runtime_shim.runtime.command_line import CheckpointCall, RestoreCall, render, render_globals
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.runtime.criu.config import config_file
from gpusnap.runtime_shim.runtime.criu.log import first_error
from gpusnap.runtime_shim.runtime.criu.scratch_files import scratch
from gpusnap.runtime_shim.runtime.identify import RealRuntime


@dataclass(frozen=True, slots=True)
class Invocation:
    """A call of the real runtime that has ended."""

    code: int
    log: str
    err: str

    def explain(self, criu_log: str) -> str:
        """Why it failed: its own words and CRIU's first error, if there are any."""
        own = runtime_message(self.log, self.err)
        criu = first_error(criu_log)
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
    """Run the real runtime with a CRIU configuration, and with a log of its own in place of the caller's.

    `capture` and `started` as in `child_process.run`; without capture, why the runtime failed is only in that
    log. `environment` is added to the caller's own, and reaches CRIU, the runtime's child.
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
    """What the runtime said. Where that cannot be read, its exit code and CRIU's log have to do."""
    try:
        return log.read()
    except OSError as error:
        note(f"the log of the runtime cannot be read: {reason(error)}")
        return ""


@contextmanager
def _log_file() -> Iterator[tuple[IO[str], str]]:
    """A file for the runtime's log. One that cannot be closed or removed is no reason to fail."""
    try:
        descriptor, path = tempfile.mkstemp(prefix=scratch_files.prefix("log"), dir=scratch())
    except OSError as error:
        raise RuntimeFailed(f"no log can be created for the runtime: {reason(error)}") from error
    try:
        try:
            file = open(descriptor, encoding="utf-8", errors="replace")
        except OSError as error:
            raise RuntimeFailed(f"no log can be created for the runtime: {reason(error)}") from error
        try:
            yield file, path
        finally:
            with suppress(OSError):
                file.close()
    finally:
        with suppress(OSError):
            os.unlink(path)


def make_quiet_command(call: CheckpointCall | RestoreCall, real: RealRuntime) -> list[str]:
    """The real runtime with the caller's global options, but saying on stderr what it would write to its log.

    For commands beside the one that was asked for: the log takes one line of ours, see log.py.
    """
    return render_globals(replace(call.globals, log=None, log_format=None), real)


def control(argv: Sequence[str]) -> Finished:
    """A short command of the real runtime, such as kill or delete; its exit code is the caller's to judge.

    With our mark, so that who puts right what a killed gpusnap left waits for it; Ctrl-C does not reach it.
    """
    env = {**locate.environment(), scratch_files.CONFIG: scratch_files.prefix("criu") + "none"}
    return run(argv, env=env, own_session=True)
