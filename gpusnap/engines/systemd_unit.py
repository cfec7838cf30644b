"""What the unit of systemd that runs a Podman container does when the container is suspended, or has ended.

Podman labels a container that it creates for a unit with the name of the unit (Quadlet, podman generate
systemd --new). A unit controls a container while its main process is the container's conmon; a restored
container is controlled by no unit.
"""

from __future__ import annotations

import os
import shlex

from gpusnap.engines.podman import Container
from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.runtime import child_process

_LABEL = "PODMAN_SYSTEMD_UNIT"
_PROPERTIES = ("MainPID", "Restart", "RestartPreventExitStatus", "WatchdogUSec")
_KILLED = "137"  # 128 + SIGKILL
_SECONDS = 5.0  # for systemctl


def has_created(found: Container) -> bool:
    """Return whether a unit has created the container, as Quadlet's do."""
    return _LABEL in found.labels


def make_removal(found: Container, *options: str) -> str:
    """Return the command that ends and removes a running container.

    If a unit runs it, systemd ends it: otherwise, it may start the container anew, and Quadlet's then replace
    the one that was restored meanwhile (podman run --replace).
    """
    if _ask(found):
        return shlex.join(("systemctl", "stop", found.labels[_LABEL]))
    return shlex.join(("podman", "rm", "--force", *options, found.name))


def check_watchdog(found: Container) -> None:
    """Raise ContainerError if systemd would end the container while it is suspended."""
    properties = _ask(found)
    if properties.get("WatchdogUSec", "0") not in ("0", "infinity"):
        raise ContainerError(
            f"the container {found.name} cannot be suspended: it would not report to systemd, which would "
            f"end it after {properties['WatchdogUSec']} (WatchdogSec= of {found.labels[_LABEL]})",
            hint=f"gpusnap checkpoint {found.name}, or remove WatchdogSec=",
            code="GPS-206",
        )


def note_restart(found: Container) -> None:
    """Say that systemd starts the container anew when a checkpoint has ended it."""
    properties = _ask(found)
    restart = properties.get("Restart", "no")
    # The dump kills the container, and conmon exits with that (systemd.service(5), Restart=).
    if restart in ("always", "on-failure") and _KILLED not in properties["RestartPreventExitStatus"].split():
        note(
            f"systemd starts {found.name} anew when the checkpoint has ended it: {found.labels[_LABEL]} has "
            f"Restart={restart}; RestartPreventExitStatus={_KILLED} in it prevents that",
            code="GPS-224",
        )


def _ask(found: Container) -> dict[str, str]:
    """Return properties of the unit that controls a container; empty if none does, or there is no answer."""
    unit = found.labels.get(_LABEL, "")
    if not unit or not found.conmon:
        return {}
    words = ("systemctl", "show", f"--property={','.join(_PROPERTIES)}", "--", unit)
    try:
        done = child_process.run(words, env=os.environ, seconds=_SECONDS)
    except GpusnapError:
        return {}
    properties = dict(line.split("=", 1) for line in done.out.splitlines() if "=" in line)
    ours = properties.get("MainPID") == str(found.conmon) and properties.keys() >= {*_PROPERTIES}
    return properties if ours else {}
