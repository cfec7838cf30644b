"""Turns Podman's errors about names, ports and addresses in use into messages that say what to do.

The texts are those of libpod (bindPort, CRImportCheckpoint), of containers/storage, and of netavark's IPAM in
containers/common.
"""

from __future__ import annotations

from contextlib import suppress

from gpusnap.base.user_errors import NotFound
from gpusnap.engines import podman, systemd_unit
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import GpusnapError, UsageError
from gpusnap.runtime_shim.snapshot.records import suspensions

# Name of a container (libpod, define.NameRegex).
_NAME = compile_later(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")
_CONTAINER = compile_later(r"(?:name|ID)\b.* is already in use")
_VOLUME = compile_later(r"volume with name (\S+) already exists")
_PORT = compile_later(r"listen (tcp|udp|sctp)\S* (\S*):(\d+): bind: address already in use")
# CRIU's message (criu/sk-inet.c, inet_bind).
_BIND = compile_later(r"Can't bind inet socket .*Address already in use")
_ADDRESS = compile_later(r"requested ip address (\S+) is already allocated(?: to container ID ([0-9a-f]+))?")

# What continues a container whose processes are there, by its status.
_CONTINUES = {"running": "", "paused": "podman unpause {}"}


def is_name(text: str) -> bool:
    """Return whether a container may have that name."""
    return _NAME.fullmatch(text) is not None


def check_name(wanted: str) -> None:
    """Raise UsageError for a --name that no container can have.

    Podman checks it when it creates a container, but not at a restore from an archive (libpod,
    CRImportCheckpoint).
    """
    if wanted and not is_name(wanted):
        raise UsageError(
            f"{wanted!r} is not a valid container name",
            hint="a name consists of letters, digits, _, . and -, and begins with a letter or a digit",
        )


def is_container_in_use(error: BaseException) -> bool:
    """Return whether an error of Podman's says that a container already has the name or the ID."""
    return _CONTAINER.search(str(error)) is not None


def explain(error: GpusnapError, wanted: str) -> GpusnapError | None:
    """Return an error that names what is in use; None for other errors. wanted: the container's new name."""
    text = str(error)
    if found := _PORT.search(text):
        return _port(*found.groups())
    if _BIND.search(text):
        return GpusnapError(
            "a port on which the container listens is in use in the network where it is restored",
            hint="stop the program that listens there (ss --listening --processes --tcp shows it). A "
            "container in the host's network (podman run --network host) shares its ports, and "
            "--publish has no effect: a second copy needs its own network",
            code="GPS-519",
        )
    if found := _ADDRESS.search(text):
        return _address(found[1], found[2] or "")
    if found := _VOLUME.search(text):
        return GpusnapError(
            f"Podman already has a volume {found[1]}",
            hint="give --ignore-volumes to use it as it is, or remove it (podman volume rm "
            f"{found[1]}) to restore the files of the checkpoint",
            code="GPS-518",
        )
    if is_container_in_use(error) and is_name(wanted):
        return _container(wanted)
    return None


def _container(wanted: str) -> GpusnapError:
    try:
        there = podman.inspect_container(wanted)
    except NotFound:  # the same container, under another name
        return GpusnapError(
            "Podman already has the container of this checkpoint, under another name",
            hint="podman ps --all shows it; remove it, or give the restored one another name with --name",
            code="GPS-508",
        )
    except GpusnapError:
        there = None
    if there is not None and there.has_checkpoint():
        which = "which a checkpoint stopped" if there.checkpointed else "and a checkpoint of it"
        return GpusnapError(
            f"Podman already has a container {wanted}, {which}",
            hint=f"{podman.to_restore(there)} continues it from that checkpoint, and podman rm "
            f"{wanted} loses that checkpoint unless gpusnap ls shows it with a name; or give another name "
            "with --name",
            code="GPS-508",
        )
    if there is not None and there.status in _CONTINUES:
        suspended = suspensions.find_by_container(there.id) is not None
        state = "suspended" if suspended else there.status
        command = f"gpusnap resume {wanted}" if suspended else _CONTINUES[there.status].format(wanted)
        return GpusnapError(
            f"Podman already has a container {wanted}, and it is {state}",
            hint=f"{f'{command} continues it; ' if command else ''}give a second copy another name with "
            "--name; to return to the checkpoint, and lose what the container has done since, remove it "
            f"first: {systemd_unit.make_removal(there)}",
            code="GPS-508",
        )
    return GpusnapError(
        f"Podman already has a container {wanted}",
        hint=f"remove it with podman rm {wanted}, or give another name with --name",
        code="GPS-508",
    )


def _port(protocol: str, host: str, port: str) -> GpusnapError:
    where = f"{host}:{port}" if host else port
    look = "--udp" if protocol == "udp" else "--tcp"
    return GpusnapError(
        f"the {protocol.upper()} port {where} of this host, which the container publishes, is in use",
        hint="give other ports with --publish HOST-PORT:CONTAINER-PORT, or stop the program that "
        f"listens there (ss --listening --processes {look} 'sport = {port}' shows it)",
        code="GPS-519",
    )


def _address(address: str, owner: str) -> GpusnapError:
    who = f"the container {owner[:12]}" if owner else "another container"
    with suppress(GpusnapError):
        who = f"the container {podman.inspect_container(owner).name}" if owner else who
    return GpusnapError(
        f"the address {address} of the container is in use by {who}",
        hint="give --ignore-static-ip to use another one, or stop that container",
        code="GPS-520",
    )
