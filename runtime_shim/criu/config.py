"""The configuration file that we give CRIU, through the real runtime.

Which road reaches CRIU depends on the versions. crun 1.21 with CRIU 4.1 reads no /etc/criu/crun.conf and
refuses the annotation org.criu.config; crun from 1.26 on with CRIU 4.2, and every runc, take the annotation
or a file in /etc/criu, which then override the runtime's own requests. One road reaches all of them: the
environment variable CRIU_CONFIG_FILE, which CRIU reads also as `criu swrk` (criu(8), CONFIGURATION FILES),
and which crun and runc hand down. It ranks below the options that the runtime itself sets, so what a runtime
sets goes by its command line (`--manage-cgroups-mode`, runc's `--link-remap`), and the administrator's
/etc/criu/*.conf keep the last word.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from runtime_shim import leavings, locate, options
from runtime_shim.argv import CheckpointCall, RestoreCall
from runtime_shim.criu import scratch
from runtime_shim.errors import ImageError, SettingsError, reason
from runtime_shim.manifest import DriverMount
from runtime_shim.real import RealRuntime
from runtime_shim.settings import Criu

__all__ = ["VARIABLE", "config_file", "dump_text", "restore_text", "with_flags"]

Call = TypeVar("Call", CheckpointCall, RestoreCall)

VARIABLE = leavings.CONFIG

_RUNC_FILE = "/etc/criu/runc.conf"
"""Read by every runc for a container without the annotation org.criu.config (libcontainer/criu_linux.go)."""


def dump_text(criu: Criu, mounts: Sequence[DriverMount], *, masters: bool) -> str:
    """The file for a dump; `mounts` are the driver's, which CRIU shall not look into.

    `masters`: one of them is in a peer group with the host, which CRIU refuses unless told.
    """
    lines = [*_common(criu)]
    lines += [f"external mnt[{_plain(mount.destination)}]:{mount.key}" for mount in mounts]
    if masters:
        lines.append("enable-external-masters")
    return _text([*lines, *criu.options])


def restore_text(criu: Criu, mounts: Sequence[DriverMount]) -> str:
    """The file for a restore; each of `mounts` comes from its source on this host."""
    lines = [*_common(criu)]
    lines += [f"external mnt[{mount.key}]:{_plain(mount.source)}" for mount in mounts]
    return _text([*lines, *criu.options])


def with_flags(call: Call, real: RealRuntime, criu: Criu) -> Call:
    """The call with those of the settings that the runtime itself would override, where it takes them.

    What the caller's own line says of them stays.
    """
    table = options.table(options.CHECKPOINT if isinstance(call, CheckpointCall) else options.RESTORE)
    mode = criu.manage_cgroups
    if mode and not call.manage_cgroups_mode:
        if table["manage-cgroups-mode"].rule(real.kind).takes(real.version, mode):
            call = replace(call, manage_cgroups_mode=mode)
        elif not _told(mode):
            raise SettingsError(
                f"{real.name} takes no --manage-cgroups-mode {mode}, as criu.manage-cgroups asks",
                hint=f'put the line "manage-cgroups={mode}" into {_RUNC_FILE}',
            )
    if isinstance(call, CheckpointCall) and criu.link_remap:
        takes = table["link-remap"].rule(real.kind).takes(real.version)
        call = replace(call, link_remap=call.link_remap or takes)
    return call


def _told(mode: str) -> bool:
    """Whether the administrator's file for runc says the same."""
    try:
        with open(_RUNC_FILE, encoding="utf-8") as file:
            return any(line.split() == [f"manage-cgroups={mode}"] for line in file)
    except (OSError, UnicodeDecodeError):
        return False


def _common(criu: Criu) -> Iterator[str]:
    if criu.link_remap:
        yield "link-remap"
    yield f"ghost-limit {criu.ghost_limit}"
    yield f"timeout {criu.timeout}"
    if criu.manage_cgroups:
        # An option with an optional argument: CRIU takes it only with the equals sign.
        yield f"manage-cgroups={criu.manage_cgroups}"
    if criu.libdir:
        yield f"libdir {criu.libdir}"
    if criu.action_script:
        yield f"action-script {criu.action_script}"
    yield from (f"external {line}" for line in criu.external)


def _plain(path: str) -> str:
    """A path that CRIU's parser takes as one word."""
    if any(c.isspace() or c in "#\"'\\" for c in path):
        raise ImageError(
            f"the driver's mount {path!r} cannot be named to CRIU: its path holds blanks or quotes"
        )
    return path


def _text(lines: Sequence[str]) -> str:
    return "".join(line + "\n" for line in lines)


@contextmanager
def config_file(text: str) -> Iterator[dict[str, str]]:
    """The environment for the real runtime, with the file in place while the block runs.

    A file that the caller's CRIU_CONFIG_FILE names comes first, so that nothing of it is lost.
    """
    before = os.environ.get(VARIABLE, "")
    try:
        inherited = ""
        if before:
            inherited = Path(before).read_text("utf-8").rstrip("\n") + "\n"
        file = tempfile.NamedTemporaryFile("w", prefix=leavings.prefix("criu"), suffix=".conf", dir=scratch())
        try:
            file.write(inherited + text)
            file.flush()
        except BaseException:
            with contextlib.suppress(OSError):  # closing writes once more
                file.close()
            raise
    except (OSError, UnicodeDecodeError) as error:
        said = reason(error) if isinstance(error, OSError) else str(error)
        raise ImageError(f"CRIU's configuration cannot be prepared: {said}") from error
    with file:
        yield {**locate.environment(), VARIABLE: file.name}
