"""Most checks that can refuse a checkpoint before anything is changed; some are for a restore too.

Each function returns nothing or raises Refused with one sentence: what is wrong, with which process, and what
to do about it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.base.log import note
from gpusnap.runtime_shim.gpu.api.driver import Host, ProcessState
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.runtime import container as containers
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime import loopback
from gpusnap.runtime_shim.runtime.command_line import CheckpointCall
from gpusnap.runtime_shim.runtime.container import Container
from gpusnap.runtime_shim.runtime.criu.config import Connections
from gpusnap.runtime_shim.runtime.criu.images import pycriu_package
from gpusnap.runtime_shim.runtime.criu.version import criu_version
from gpusnap.runtime_shim.runtime.identify import RealRuntime
from gpusnap.runtime_shim.settings import Nvidia
from gpusnap.runtime_shim.snapshot.preflight import sockets as open_sockets
from gpusnap.runtime_shim.snapshot.preflight.nccl import find_sharing

_Found = TypeVar("_Found")

# How long a process may look like something else: a process that is just starting CUDA holds device files
# before the driver calls it a CUDA process, and what podman exec starts joins one namespace after another.
_STARTING = 1.0
_RING = "anon_inode:[io_uring]"
_STANDARD = {0: "the standard input", 1: "the standard output", 2: "the standard error"}
# The runtime's /dev/null, terminals, which CRIU knows by other means, and memory.
_NOT_OF_MOUNT = ("/dev/", "/memfd:")
# In the path of a bundle of containerd's, whatever its state directory is (core/runtime/v2/bundle.go).
_OF_CONTAINERD = "/io.containerd.runtime.v2.task/"
_OWN_NAMESPACE = "run the container with its own PID namespace"
_IP = "CR_IP_TOOL"  # the environment variable of CRIU that names another program than ip
# The name that crun gives to dlopen(3) (src/libcrun/criu.c, load_wrapper), or that it is linked with.
_CRIU_LIBRARY = compile_later(rb"libcriu\.so\.\d+\0")


def refuse_options(wanted: CheckpointCall, container: Container) -> None:
    """Refuse options and states that cannot work for a container that uses a GPU."""
    if _has_user_namespace(container.pid):
        raise Refused(
            f"container {container.id} has its own user namespace, which no runtime can restore: crun "
            "cannot dump it, and runc can dump it but not restore it",
            hint="run it without --userns and --uidmap",
        )
    if containers.has_own_v1_freezer(container.pid, container.id):
        raise Refused(
            f"container {container.id} is in a cgroup v1 freezer, where CRIU would wait forever for a "
            "stopped process",
            hint="use a host with cgroup v2 (systemd.unified_cgroup_hierarchy=1)",
        )
    if container.status == "paused" and containers.find_freezer(container) is None:
        raise Refused(
            f"container {container.id} is paused, but not by its own cgroup, which could be thawed while "
            "the GPU is suspended",
            hint="unpause it first; containerd itself pauses containers for a checkpoint: run it in "
            "its own version 2 cgroup",
            code="GPS-203",
        )
    if wanted.image_path and not wanted.image_path.startswith("/") and _OF_CONTAINERD in container.bundle:
        raise Refused(
            f"the checkpoint of container {container.id} would be in {container.bundle}, which containerd "
            "removes with the task, because the path of its directory is relative",
            hint='give an absolute path, such as --image-path "$PWD/DIR"',
        )
    for name, given in (("--pre-dump", wanted.pre_dump), ("--lazy-pages", wanted.lazy_pages)):
        if given:
            raise Refused(
                f"container {container.id} uses a GPU, but {name} cannot include GPU memory",
                hint="make a full checkpoint instead, without it",
            )
    if wanted.page_server:
        raise Refused(
            f"container {container.id} uses a GPU, but --page-server would leave pages outside the "
            "checkpoint",
            hint="make a full checkpoint instead, without it",
        )


def check_criu_library(real: RealRuntime) -> None:
    """Refuse if crun cannot load CRIU's library, which it does only at a checkpoint; packages may omit it.

    The name is read from its program; a program without it has the library built in. runc runs the program
    criu.
    """
    if real.kind != "crun":
        return
    try:
        program = real.path.read_bytes()
    except OSError:
        return
    found = _CRIU_LIBRARY.search(program)
    if found is None:
        return
    name = os.fsdecode(program[program.rfind(b"\0", 0, found.start()) + 1 : found.end() - 1])
    try:
        ctypes.CDLL(name)
    except OSError as error:
        raise Refused(
            f"{real.name} ({real.path}) needs {name} for a checkpoint, but this host does not have it",
            hint="install libcriu2 (Debian, Ubuntu) or criu-libs (Fedora)",
        ) from error


def check_network_tool(real: RealRuntime, config: Mapping[str, Any]) -> None:
    """Refuse if CRIU needs `ip` and it is missing: with crun it saves the runtime's network (criu/net.c).

    runc makes it leave the network alone, and a network that an engine made does not concern CRIU. `config`:
    the container's config.json. (criu/net.c, run_ip_tool)
    """
    if real.kind != "crun" or not loopback.is_made(config):
        return
    environment = locate.environment()
    name = environment.get(_IP, "ip")
    if shutil.which(name, path=environment.get("PATH")) is None:
        raise Refused(
            f"the container has its own network, which CRIU saves and restores with the program {name}, "
            "but this host does not have it",
            hint="install iproute2 (Debian, Ubuntu) or iproute (Fedora)",
        )


def check_pycriu() -> None:
    """Say so if pycriu is missing: a checkpoint does not need it, but each restore does."""
    if not pycriu_package.is_there():
        said = pycriu_package.make_missing_error("this host cannot restore checkpoints without it")
        note(said.sentence())


def _has_user_namespace(init: int) -> bool:
    """Whether the container has a user namespace.

    CRIU 4.1.1 and 4.2.1 cannot dump one. With crun 1.21 and 1.28: "/dev/urandom doesn't have a proper root
    mount", because it declares none of the nodes that it binds there. With runc 1.1.15 and 1.3.6: "Unable to
    open timens-0.img: Permission denied", because CRIU opens the images as the container's root.
    """
    theirs = proc.namespace(init, "user")
    return bool(theirs) and theirs != proc.namespace(os.getpid(), "user")


def check_states(users: Mapping[proc.Process, ProcessState]) -> None:
    """Refuse unless all GPU processes run: somebody else, or a killed gpusnap, has suspended the others."""
    for process, state in users.items():
        if state is not ProcessState.RUNNING:
            raise Refused(
                f"the GPU state of process {process.pid} ({process.comm}) is already {state.name.lower()}",
                hint=f"restore it first: gpusnap recover, or gpusnap resume {process.pid}",
                code="GPS-021",
            )


def refuse_leftover(strangers: Callable[[], Mapping[proc.Process, Sequence[str]]]) -> None:
    """Refuse a process that holds device files but has no GPU state: CRIU cannot dump those files.

    `strangers` returns such processes, except those whose files `inherited_handles.clear` can replace. It is
    asked again for a moment, because a process that is just starting CUDA looks the same.
    """
    holders = find_lasting(strangers)
    for process, files in holders.items():
        raise Refused(
            f"process {process.pid} ({process.comm}) has {files[0]} open but no CUDA state of its own, "
            "and did not inherit that handle from a CUDA process: CRIU cannot dump it",
            hint="stop programs that only monitor the GPU (NVML, nvidia-smi) or draw on it; start "
            "workers with spawn",
            code="GPS-213",
        )


def refuse_adopted(container: Container) -> None:
    """Refuse processes of other containers that descend from the container's init.

    This happens if its init is the PID 1 of a namespace that they share. CRIU follows the tree from init on,
    and cannot stop one that is not frozen with the rest ("Unseizable non-zombie"; CRIU 4.1.1 with crun and
    runc).
    """

    def children() -> list[proc.Process]:
        found = containers.list_beside(container.pid, container.id)
        return [process for process in found if containers.is_descendant(process.pid, container.pid)]

    for process in find_lasting(children):
        raise Refused(
            f"process {process.pid} ({process.comm}) of another container became a child of container "
            f"{container.id} when its parent exited, and CRIU cannot dump one without the other",
            hint="run the other container with its own PID namespace, or both in a pod (--share pid)",
            code="GPS-211",
        )


def refuse_neighbours(wanted: CheckpointCall, container: Container) -> None:
    """Refuse if processes of other containers would end with this one, because its init is their PID 1."""
    if wanted.leave_running:
        return
    for process in find_lasting(lambda: containers.list_beside(container.pid, container.id)):
        raise Refused(
            f"process {process.pid} ({process.comm}) of another container shares the PID namespace of "
            f"container {container.id}, and would be killed as soon as this one exits",
            hint="checkpoint it with --leave-running, or stop the other container first",
            code="GPS-211",
        )


def check_complete(
    container: Container, members: Sequence[proc.Process], users: Sequence[proc.Process]
) -> None:
    """Refuse if processes would be lost: CRIU dumps only init and its descendants.

    Processes of `podman exec` are omitted as always, unless they are among `users`, which use a GPU.
    """
    lost = containers.list_left_out(container.pid, members)
    for process in lost:
        raise Refused(
            f"process {process.pid} ({process.comm}) of container {container.id} became a child of "
            "another container when its parent exited, and a dump would not include it",
            hint=_OWN_NAMESPACE,
            code="GPS-211",
        )
    for process in list_sessions(container, users):
        raise Refused(
            f"GPU process {process.pid} ({process.comm}) is not a descendant of the init of container "
            f"{container.id}, and a dump would not include it",
            hint="stop it: processes started by podman exec cannot be checkpointed",
            code="GPS-212",
        )


def list_sessions(container: Container, members: Sequence[proc.Process]) -> tuple[proc.Process, ...]:
    """Return the container's processes that a dump omits: those that exec has started in it.

    A process that has ended since it was listed is not among them.
    """

    def apart(process: proc.Process) -> bool:
        return not containers.is_descendant(process.pid, container.pid) and proc.is_same(
            process.pid, process.start
        )

    # Twice: if a process loses its parent at this moment, its path to init is interrupted once.
    return tuple(each for each in members if apart(each) and apart(each))


def find_lasting(ask: Callable[[], _Found]) -> _Found:
    """Return what is still found after a second; nothing if once nothing is found."""
    deadline = time.monotonic() + _STARTING
    while (found := ask()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def refuse_shared(users: Sequence[proc.Process], settings: Nvidia, host: Host) -> None:
    """Refuse processes that share GPU memory in a way that the driver can suspend but not restore."""
    if settings.allow_nccl:
        return
    found = find_sharing(users, host)
    if found is not None:
        raise Refused(
            f"process {found.process.pid} ({found.process.comm}) {found.why}",
            hint=f"{found.todo}; if you are sure, give gpusnap checkpoint --force, or set nvidia.allow-nccl",
            code=found.code,
        )


def refuse_rings(processes: Sequence[proc.Process]) -> None:
    """Refuse rings of io_uring(7), which CRIU cannot dump (4.2: criu/files.c, dump_one_file)."""
    for process in processes:
        if any(target == _RING for _, target in proc.open_files(process.pid)):
            raise Refused(
                f"process {process.pid} ({process.comm}) uses io_uring, which CRIU cannot dump",
                hint="start it without io_uring (USE_LIBUV=0 for PyTorch's rendezvous, "
                "UV_USE_IO_URING=0 for libuv)",
                code="GPS-208",
            )


def refuse_files_of_host(init: int) -> None:
    """Refuse an init whose standard streams are files of the host, as with --log-driver passthrough.

    CRIU finds a file by its mount, and looks only into the container's (4.2: criu/files-reg.c, "Can't lookup
    mount"). /dev/null is an exception. Only the kernel's own files are read: the file's disk may not answer.
    """
    mounts = {line.split(" ")[0] for line in proc.lines(f"/proc/{init}/mountinfo")}
    for number, name in _STANDARD.items():
        try:
            target = os.readlink(f"/proc/{init}/fd/{number}")
        except OSError:
            continue  # it is closed, or the process has ended
        if not target.startswith("/") or target.startswith(_NOT_OF_MOUNT):
            continue
        fields = dict(line.partition(":")[::2] for line in proc.lines(f"/proc/{init}/fdinfo/{number}"))
        if mounts and (mount := fields.get("mnt_id", "").strip()) and mount not in mounts:
            raise Refused(
                f"{name} of process {init} ({proc.comm(init)}) is {target}, a file of the host, "
                "which CRIU cannot dump",
                hint="run the container with its output in a log or a pipe: podman run with another "
                "--log-driver than passthrough",
            )


def refuse_sockets(processes: Sequence[proc.Process], real: RealRuntime, connections: Connections) -> None:
    """Refuse sockets that CRIU cannot dump on this kernel, and connections if no option says what to do.

    `processes`: all processes of the container, with a GPU or without.
    """
    found = tuple(open_sockets.iterate_open(processes))
    # If the runtime is wrapped in a script, it is not known which CRIU it starts.
    if _is_program(real):
        for name, first in {each.protocol: each for each in reversed(found)}.items():
            if not open_sockets.can_be_dumped(name):
                raise Refused(
                    f"process {first.process.pid} ({first.process.comm}) has a socket of the protocol "
                    f"{name}, which CRIU {criu_version()} cannot dump on this kernel",
                    hint=open_sockets.cure(name),
                    code="GPS-209",
                )
    if connections is Connections.REFUSED:
        _refuse_unconnected(found)


def _refuse_unconnected(found: Sequence[open_sockets.OpenSocket]) -> None:
    holders = {each.inode: each.process for each in found}
    for pid in {proc.namespace(process.pid, "net"): process.pid for process in holders.values()}.values():
        for each in open_sockets.connections(pid):
            if each.inode in holders:
                holder = holders[each.inode]
                raise Refused(
                    f"process {holder.pid} ({holder.comm}) has a TCP connection to {each.peer}, and CRIU "
                    "dumps it only if it is told what to do with it",
                    hint="give --tcp-established to keep it, or set criu.tcp-close so that a restore "
                    "closes it",
                    code="GPS-210",
                )


def _is_program(real: RealRuntime) -> bool:
    try:
        with open(real.path, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False
