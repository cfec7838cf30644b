"""The configuration file that gpusnap gives CRIU, through the real runtime.

Which way reaches CRIU depends on the versions. crun 1.21 with CRIU 4.1 reads no /etc/criu/crun.conf and
refuses the annotation org.criu.config. crun 1.26 and later with CRIU 4.2, and every runc, use the annotation
or a file in /etc/criu, which then override the runtime's own requests. One way reaches all of them: the
environment variable CRIU_CONFIG_FILE, which CRIU also reads as `criu swrk` (criu(8), CONFIGURATION FILES),
and which crun and runc pass on. Options that the runtime itself sets override it. So such options are set on
the runtime's command line (`--manage-cgroups-mode`, runc's `--link-remap`). The administrator's
/etc/criu/*.conf override everything.

TCP: without --tcp-established, CRIU gets `tcp-close`. It then dumps open connections without their state, and
the processes find them closed after a restore; a container that continues to run keeps them. CRIU has both
options for a dump since 3.15, and `skip-in-flight` since 2.4 (criu/sk-inet.c, can_dump_inet_sk). CRIU
restores a dump that was made with tcp-close only with tcp-close (criu/image.c, check_img_inventory).
"""

from __future__ import annotations

import contextlib
import enum
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from gpusnap.oci.base.dataclass import replace
from gpusnap.runtime_shim.base.errors import ImageError, SettingsError, raise_as
from gpusnap.runtime_shim.records.manifest import DriverMount
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime import options
from gpusnap.runtime_shim.runtime.command_line import CheckpointCall, RestoreCall
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.runtime.criu.scratch_files import scratch
from gpusnap.runtime_shim.runtime.identify import RealRuntime
from gpusnap.runtime_shim.settings import Criu

Call = TypeVar("Call", CheckpointCall, RestoreCall)

VARIABLE = scratch_files.CONFIG

_RUNC_FILE = "/etc/criu/runc.conf"
"""Read by every runc for a container without the annotation org.criu.config (libcontainer/criu_linux.go)."""
_CRUN_FILE = "/etc/criu/crun.conf"
"""Read by crun, or else runc's, if libcriu has criu_set_config_file (crun, src/libcrun/criu.c)."""
_ANNOTATION = "org.criu.config"
_ESTABLISHED, _CLOSE = "tcp-established", "tcp-close"


def dump_text(
    criu: Criu,
    mounts: Sequence[DriverMount],
    *,
    masters: bool,
    skip_in_flight: bool = True,
    drop_connections: bool = False,
    script: str = "",
) -> str:
    """Return the file for a dump; `mounts` are the driver's, which CRIU must not examine.

    `masters`: one of them is in a peer group with the host, which CRIU refuses without an option.
    `skip_in_flight`: omit connections that no process has accepted yet.
    `drop_connections`: dump open TCP connections without their state. `script`: as in `restore_text`.
    """
    lines = [*_iterate_common(criu)]
    if skip_in_flight:
        lines.append("skip-in-flight")
    if drop_connections:
        lines.append(_CLOSE)
    lines += [f"external mnt[{_check_path(mount.destination)}]:{mount.key}" for mount in mounts]
    if masters:
        lines.append("enable-external-masters")
    return _text([*lines, *criu.options, *_script(script)])


def restore_text(
    criu: Criu, mounts: Sequence[DriverMount], *, drop_connections: bool = False, script: str = ""
) -> str:
    """Return the file for a restore; each of `mounts` gets its source on this host.

    `drop_connections`: the image's TCP connections are restored as closed. `script`: a program that CRIU runs
    at each of its stages, before that of the settings (criu/action-scripts.c, add_script).
    """
    lines = [*_iterate_common(criu)]
    if drop_connections:
        lines.append(_CLOSE)
    lines += [f"external mnt[{mount.key}]:{_check_path(mount.source)}" for mount in mounts]
    return _text([*lines, *criu.options, *_script(script)])


def _script(path: str) -> Sequence[str]:
    return [f"action-script {path}"] if path else []


def with_flags(call: Call, real: RealRuntime, criu: Criu) -> Call:
    """Add settings to the call that the runtime itself would override, if it supports them.

    Options in the caller's own line stay. criu.options can contain "tcp-established" for callers that cannot
    set it, such as containerd at a restore: in the file alone it would have no effect.
    """
    table = options.table(options.CHECKPOINT if isinstance(call, CheckpointCall) else options.RESTORE)
    mode = criu.manage_cgroups
    if mode and not call.manage_cgroups_mode:
        if table["manage-cgroups-mode"].rule(real.kind).takes(real.version, mode):
            call = replace(call, manage_cgroups_mode=mode)
        elif not _has_option(_lines(_RUNC_FILE), f"manage-cgroups={mode}"):  # nor does the host set it
            raise SettingsError(
                f"{real.name} does not support --manage-cgroups-mode {mode}, which criu.manage-cgroups "
                "requires",
                hint=f'add the line "manage-cgroups={mode}" to {_RUNC_FILE}',
            )
    if _has_option(criu.options, _ESTABLISHED):
        call = replace(call, tcp_established=True)
    if isinstance(call, CheckpointCall):
        if criu.link_remap and table["link-remap"].rule(real.kind).takes(real.version):
            call = replace(call, link_remap=True)
        if criu.skip_in_flight and table["tcp-skip-in-flight"].rule(real.kind).takes(real.version):
            call = replace(call, tcp_skip_in_flight=True)
    return call


class Connections(enum.Enum):
    """What happens to open TCP connections at a dump."""

    KEPT = "kept"
    """They are open after a restore: --tcp-established."""
    DROPPED = "dropped"
    """They are closed after a restore: CRIU's tcp-close."""
    REFUSED = "refused"
    """CRIU refuses to dump a process that has any."""


def connections(
    call: CheckpointCall, real: RealRuntime, criu: Criu, annotations: Mapping[str, str]
) -> Connections:
    """Determine it from the settings, the caller and the administrator's files for CRIU.

    If these ask for established ones, CRIU does not get tcp-close, with which it would drop them in any case.
    `call` is the result of with_flags().
    """
    if _ANNOTATION in annotations:
        paths: tuple[str, ...] = (annotations[_ANNOTATION],)
    else:
        paths = (_CRUN_FILE, _RUNC_FILE) if real.kind == "crun" else (_RUNC_FILE,)
    lines = [line for path in paths for line in _lines(path)]
    if call.tcp_established or _has_option(lines, _ESTABLISHED):
        return Connections.KEPT
    if criu.tcp_close or _has_option([*criu.options, *lines], _CLOSE):
        return Connections.DROPPED
    return Connections.REFUSED


def _lines(path: str) -> Sequence[str]:
    """Return a file's lines; none if there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()
    except (OSError, ValueError):
        return ()


def _has_option(lines: Sequence[str], option: str) -> bool:
    """Whether CRIU reads this option in one of the lines (criu/config.c, parse_statement)."""
    return any(line.split("#", 1)[0].strip().removeprefix("--") == option for line in lines)


def _iterate_common(criu: Criu) -> Iterator[str]:
    if criu.link_remap:
        yield "link-remap"
    yield f"ghost-limit {criu.ghost_limit}"
    yield f"timeout {criu.timeout}"
    if criu.manage_cgroups:
        # An option with an optional argument: CRIU accepts it only with the equals sign.
        yield f"manage-cgroups={criu.manage_cgroups}"
    if criu.libdir:
        yield f"libdir {criu.libdir}"
    if criu.action_script:
        yield f"action-script {criu.action_script}"
    yield from (f"external {line}" for line in criu.external)


def _check_path(path: str) -> str:
    """Check that CRIU's parser reads a path as one word; return it."""
    if any(c.isspace() or c in "#\"'\\" for c in path):
        raise ImageError(
            f"the driver's mount {path!r} cannot be passed to CRIU: its path contains blanks or quotes"
        )
    return path


def _text(lines: Sequence[str]) -> str:
    return "".join(line + "\n" for line in lines)


@contextmanager
def config_file(text: str) -> Iterator[dict[str, str]]:
    """Yield the environment for the real runtime; the file exists while the block runs.

    A file that the caller's CRIU_CONFIG_FILE names is included first, so that nothing of it is lost.
    """
    before = os.environ.get(VARIABLE, "")
    with raise_as(
        ImageError, "CRIU's configuration cannot be prepared", errors=(OSError, UnicodeDecodeError)
    ):
        inherited = ""
        if before:
            inherited = Path(before).read_text("utf-8").rstrip("\n") + "\n"
        file = tempfile.NamedTemporaryFile(
            "w", prefix=scratch_files.prefix("criu"), suffix=".conf", dir=scratch()
        )
        try:
            file.write(inherited + text)
            file.flush()
        except BaseException:
            with contextlib.suppress(OSError):  # closing writes once more
                file.close()
            raise
    try:
        yield {**locate.environment(), VARIABLE: file.name}
    finally:
        with contextlib.suppress(OSError):  # it is of no more use, and the container may have ended
            file.close()
