"""Pre-flight: each reason not to begin, in a sentence, with what to do."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import POISON, Family, a_manifest, unshare_works, wait_for

from gpusnap.oci.chunks.table import Table
from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.gpu.api.driver import Host, ProcessState
from gpusnap.runtime_shim.process import mount_namespace, proc
from gpusnap.runtime_shim.records.manifest import FileRecord, RegionRecord
from gpusnap.runtime_shim.runtime import find
from gpusnap.runtime_shim.runtime.command_line import CheckpointCall
from gpusnap.runtime_shim.runtime.container import Container
from gpusnap.runtime_shim.runtime.criu.config import Connections
from gpusnap.runtime_shim.runtime.identify import Kind, RealRuntime
from gpusnap.runtime_shim.settings import Memory, Nvidia
from gpusnap.runtime_shim.snapshot.preflight import checks as preflight
from gpusnap.runtime_shim.snapshot.preflight import sockets, space
from gpusnap.runtime_shim.snapshot.preflight.nccl import Sharing

GIB = 1 << 30
CONTAINER = Container("c0ffee", 1, "running", "/b", {})


def process(pid: int) -> proc.Process:
    return proc.Process(pid, (pid,), "python3", ("python3",), 1)


# The runtime.


@pytest.mark.parametrize(
    ("kind", "content", "missing"),
    [
        ("crun", b"\0libcriu.so.999\0", "libcriu.so.999"),
        ("crun", b"could not load `libcriu.so.2`\0/nix/lib/libcriu.so.2\0", "/nix/lib/libcriu.so.2"),
        ("crun", b"\0libcrun.so\0", ""),
        ("crun", None, ""),
        ("runc", b"\0libcriu.so.999\0", ""),
    ],
)
def test_crius_library(tmp_path: Path, kind: Kind, content: bytes | None, missing: str) -> None:
    """The one that crun's program names has to be there; a crun without, and runc, need none."""
    path = tmp_path / "crun"
    if content is not None:
        path.write_bytes(content)
    real = RealRuntime(path, kind, (1, 21))
    if not missing:
        preflight.check_criu_library(real)
        return
    with pytest.raises(Refused, match=f"needs {missing} for a checkpoint"):
        preflight.check_criu_library(real)


# Sockets.


@pytest.fixture
def program(tmp_path: Path) -> RealRuntime:
    """A runtime that is no script."""
    path = tmp_path / "crun"
    path.write_bytes(b"\x7fELF")
    return RealRuntime(path, "crun", (1, 28))


@contextlib.contextmanager
def holder(*sockets: socket.socket) -> Iterator[proc.Process]:
    """A process that has these sockets and no other; this one may have some of other tests."""
    numbers = [each.fileno() for each in sockets]
    with subprocess.Popen(["sleep", "600"], pass_fds=numbers, stdin=subprocess.DEVNULL) as started:
        try:
            wait_for(lambda: proc.comm(started.pid) == "sleep", "the start of sleep")
            found = proc.process(started.pid)
            assert found is not None
            yield found
        finally:
            started.kill()


def test_sockets_that_criu_cannot_dump(program: RealRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process and the protocol are named; a script around the runtime may start another CRIU."""
    monkeypatch.setattr(sockets, "can_be_dumped", lambda name: name != "TCP")
    monkeypatch.setattr(preflight, "criu_version", lambda: "4.1.1")
    with holder() as without:
        preflight.refuse_sockets([without], program, Connections.KEPT)
    with socket.socket() as one, holder(one) as process:
        with pytest.raises(Refused) as caught:
            preflight.refuse_sockets([process], program, Connections.KEPT)
        said = caught.value.sentence()
        assert f"process {process.pid} (sleep) has a socket of the protocol TCP, which CRIU 4.1.1" in said
        assert "install CRIU 4.2" in said
        assert not [words for words in POISON if words in said.lower()]
        program.path.write_text("#!/bin/sh\n")
        preflight.refuse_sockets([process], program, Connections.KEPT)


def test_connections(program: RealRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is refused only where CRIU is not told what to do with it, and a socket that listens never."""
    monkeypatch.setattr(sockets, "can_be_dumped", lambda name: True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with holder(server) as listening:
            preflight.refuse_sockets([listening], program, Connections.REFUSED)
        with socket.create_connection(server.getsockname()) as one, holder(one) as connected:
            preflight.refuse_sockets([connected], program, Connections.KEPT)
            preflight.refuse_sockets([connected], program, Connections.DROPPED)
            preflight.refuse_sockets([process(1)], program, Connections.REFUSED)
            with pytest.raises(Refused) as caught:
                preflight.refuse_sockets([connected], program, Connections.REFUSED)
            peer = f"127.0.0.1:{one.getpeername()[1]}"
            assert f"has a TCP connection to {peer}, " in caught.value.sentence()
            assert "--tcp-established" in caught.value.sentence()


# Options and states.


@pytest.mark.parametrize(("kind", "refused"), [("crun", True), ("runc", False)])
def test_the_program_that_saves_a_network(
    program: RealRuntime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: Kind, refused: bool
) -> None:
    """CRIU runs ip for a network that crun makes; before anything is changed one must be there."""

    def refusal(said: str) -> contextlib.AbstractContextManager[object]:
        return pytest.raises(Refused, match=said) if refused else contextlib.nullcontext()

    real = replace(program, kind=kind)
    made = {"linux": {"namespaces": [{"type": "network"}]}}
    environment = {"PATH": str(tmp_path)}
    monkeypatch.setattr(find, "environment", lambda: environment)
    with refusal("CRIU saves and restores with the program ip,"):
        preflight.check_network_tool(real, made)
    preflight.check_network_tool(
        real, {"linux": {"namespaces": [{"type": "network", "path": "/run/netns/a"}]}}
    )
    preflight.check_network_tool(real, {})
    (tmp_path / "ip").touch(0o755)
    preflight.check_network_tool(real, made)
    environment["CR_IP_TOOL"] = "other-ip"
    with refusal("the program other-ip,"):
        preflight.check_network_tool(real, made)


def test_a_freezer_of_version_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU would hang there, so it is refused; one for all, or beside version 2, is in nobody's way."""
    here = {"": "/libpod-c0ffee", "freezer": "/", "cpu,cpuacct": "/libpod-c0ffee"}
    monkeypatch.setattr(proc, "cgroups", lambda pid: here)
    preflight.refuse_options(CheckpointCall(container_id="c"), CONTAINER)
    here["freezer"] = "/libpod_parent/libpod-c0ffee"
    preflight.refuse_options(CheckpointCall(container_id="c"), CONTAINER)
    here[""] = "/"
    with pytest.raises(Refused, match="a cgroup v1 freezer"):
        preflight.refuse_options(CheckpointCall(container_id="c"), CONTAINER)


@pytest.mark.skipif(not unshare_works("--user"), reason="making a user namespace is not allowed here")
def test_a_user_namespace() -> None:
    """A container with one is refused: runc would dump it, and never restore it."""
    with Family("unshare", "--user", "--fork", "--kill-child") as family:
        container = Container("c0ffee", family.init, "running", "/b", {})
        with pytest.raises(Refused, match="has its own user namespace, which"):
            preflight.refuse_options(CheckpointCall(container_id="c"), container)


def test_call() -> None:
    """Nothing is in the way of a plain checkpoint of a running container."""
    preflight.refuse_options(
        CheckpointCall(container_id="c", tcp_established=True, leave_running=True), CONTAINER
    )


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (CheckpointCall(container_id="c", pre_dump=True), "--pre-dump"),
        (CheckpointCall(container_id="c", lazy_pages=True), "--lazy-pages"),
        (CheckpointCall(container_id="c", page_server="10.0.0.1:1"), "--page-server"),
    ],
    ids=["pre-dump", "lazy-pages", "page-server"],
)
def test_options_that_cannot_work(call: CheckpointCall, named: str) -> None:
    """What would leave GPU memory outside of the image is refused by name."""
    with pytest.raises(Refused, match=named) as caught:
        preflight.refuse_options(call, CONTAINER)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("path", "bundle", "refused"),
    [
        ("images", "/run/containerd/io.containerd.runtime.v2.task/default/w", True),
        ("/var/images", "/run/containerd/io.containerd.runtime.v2.task/default/w", False),
        ("images", "/b", False),
        (None, "/b", False),
    ],
)
def test_a_relative_path(path: str | None, bundle: str, refused: bool) -> None:
    """containerd's shim works in the bundle, which goes with the task; elsewhere it is as asked for."""
    container = Container("c0ffee", 1, "running", bundle, {})
    with pytest.raises(Refused, match=f"would be in {bundle}") if refused else nullcontext():
        preflight.refuse_options(CheckpointCall(container_id="c0ffee", image_path=path), container)


def test_paused() -> None:
    """A frozen process cannot answer the driver."""
    with pytest.raises(Refused, match="c0ffee is paused") as caught:
        preflight.refuse_options(CheckpointCall(container_id="c"), Container("c0ffee", 1, "paused", "/b", {}))
    assert "unpause" in caught.value.hint


def test_states() -> None:
    """All have to be running; the one that is not is named, with its state."""
    preflight.check_states({process(1): ProcessState.RUNNING})
    preflight.check_states({})
    for state in set(ProcessState) - {ProcessState.RUNNING}:
        with pytest.raises(Refused, match=rf"process 2 \(python3\) is already {state.name.lower()}"):
            preflight.check_states({process(1): ProcessState.RUNNING, process(2): state})


def answers(*each: Mapping[proc.Process, Sequence[str]]) -> Iterator[Mapping[proc.Process, Sequence[str]]]:
    yield from each
    while True:
        yield each[-1]


def test_leftover(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that opened the GPU's files by itself is refused, with the first of them."""
    monkeypatch.setattr(preflight, "_STARTING", 0.0)
    held = answers({process(7): ("/dev/nvidia0", "/dev/nvidiactl")})
    with pytest.raises(Refused, match=r"process 7 \(python3\) has /dev/nvidia0 open but") as caught:
        preflight.refuse_leftover(lambda: next(held))
    assert "spawn" in caught.value.hint
    assert "NVML" in caught.value.hint


def test_a_process_that_is_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is only starting CUDA looks the same for a moment, and is waited for."""
    monkeypatch.setattr(preflight, "_STARTING", 600.0)
    held = answers({process(7): ("/dev/nvidia0",)}, {process(7): ("/dev/nvidia0",)}, {})
    preflight.refuse_leftover(lambda: next(held))
    assert next(held) == {}


# Rings of io_uring.


def test_io_uring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has one is refused by name, with what starts it without; other files are not."""
    reader, writer = os.pipe()
    try:
        preflight.refuse_rings([process(os.getpid())])
        asked = os.readlink
        monkeypatch.setattr(
            os,
            "readlink",
            lambda path: "anon_inode:[io_uring]" if path.endswith(f"/{reader}") else asked(path),
        )
        with pytest.raises(Refused, match=r"uses io_uring, which CRIU cannot dump") as caught:
            preflight.refuse_rings([process(os.getpid())])
        assert "USE_LIBUV=0" in caught.value.hint
    finally:
        os.close(reader)
        os.close(writer)


# Files of the host.


@pytest.mark.skipif(not unshare_works("--mount"), reason="making a mount namespace is not allowed here")
@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr", ""])
def test_file_of_another_mount_namespace(tmp_path: Path, name: str) -> None:
    """As a standard stream it is refused by its name; in its own mount namespace, or elsewhere, it is not."""
    preflight.refuse_files_of_host(os.getpid())
    path = tmp_path / "out.log"
    with open(path, "wb+") as file:
        streams: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        streams |= {name: file} if name else {"pass_fds": [file.fileno()]}
        command = ["unshare", "--mount", "sleep", "1000"]
        with subprocess.Popen(command, **streams) as process:
            try:
                wait_for(lambda: proc.comm(process.pid) == "sleep", "the start of sleep")
                if name:
                    with pytest.raises(Refused, match=rf"is {path}, a file of the host") as caught:
                        preflight.refuse_files_of_host(process.pid)
                    assert "passthrough" in caught.value.hint
                else:
                    preflight.refuse_files_of_host(process.pid)
            finally:
                process.kill()


# Shared GPU memory; what counts as such is test_nccl_checks.py's.

HOST = Host("nvidia", "580.1", "13.0", ())


def test_shared_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver could not restore is refused by name, with what to do and how to override it."""
    opened = "has memory of another process open"
    said = Sharing(process(7), opened, "share it through host memory", "GPS-215")
    asked: list[Host] = []

    def found(users: Sequence[proc.Process], host: Host) -> Sharing:
        asked.append(host)
        return said

    monkeypatch.setattr(preflight, "find_sharing", found)
    with pytest.raises(Refused, match=r"process 7 \(python3\) has memory of another") as caught:
        preflight.refuse_shared([process(7)], Nvidia(), HOST)
    assert caught.value.hint.startswith(
        "share it through host memory; if you are sure, give gpusnap checkpoint"
    )
    assert caught.value.code == "GPS-215"
    preflight.refuse_shared([process(7)], Nvidia(allow_nccl=True), HOST)
    assert asked == [HOST]


def test_nothing_shared() -> None:
    """An ordinary process is none of that."""
    preflight.refuse_shared([process(os.getpid())], Nvidia(), HOST)


# Memory.


@pytest.fixture
def plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with memory enough."""
    monkeypatch.setattr(space, "_measure_available", lambda: 1 << 50)


def test_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs' bytes and what a process' heap grows by have to fit in RAM, for all processes together."""
    monkeypatch.setattr(space, "_limit", lambda _: None)
    monkeypatch.setattr(space, "_measure_available", lambda: 4 * GIB)
    space.check_memory({1: 3 * GIB}, 1)
    space.check_memory({}, 1)
    for too_much in ({1: 4 * GIB}, {1: 2 * GIB, 2: 2 * GIB - 1}):
        with pytest.raises(
            Refused, match=r"4\.\d GiB of GPU memory .* this host leaves only 4\.0 GiB"
        ) as caught:
            space.check_memory(too_much, 1)
        assert caught.value.hint == "free some memory"


@pytest.mark.parametrize(
    ("need", "hint"),
    [
        (2, "other checkpoints and restores are about to take 3.0 GiB: try again when they are done"),
        (5, "free some memory"),
    ],
)
def test_memory_that_others_are_about_to_take(monkeypatch: pytest.MonkeyPatch, need: int, hint: str) -> None:
    """It is short for a moment only, where there would be enough without them."""
    monkeypatch.setattr(space, "_limit", lambda _: None)
    monkeypatch.setattr(space, "_measure_available", lambda: 4 * GIB)
    with pytest.raises(Refused, match=r"this host leaves only 1\.0 GiB") as caught:
        space.check_memory({1: need * GIB}, 1, reserved=3 * GIB)
    assert caught.value.hint == hint


def test_available() -> None:
    """This host's own figure is a number that can be true."""
    available = space._measure_available()
    assert available is not None
    assert 0 < available <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Cgroups:
    """A tree of cgroups in a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._patch = monkeypatch

    def lie(self, kind: str, groups: Mapping[str, str], root: str = "/") -> None:
        mount = proc.Mount("0:1", root, str(self.folder), (), (), kind)
        self._patch.setattr(proc, "mounts", lambda _: (mount,))
        self._patch.setattr(proc, "cgroups", lambda _: groups)

    def make(self, path: str, **files: str) -> None:
        folder = self.folder / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text + "\n", "ascii")


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plenty: None) -> Cgroups:
    return Cgroups(tmp_path, monkeypatch)


def left(need: int) -> str:
    with pytest.raises(Refused) as caught:
        space.check_memory({1: need}, 1)
    assert caught.value.hint == "raise the container's memory limit"
    return str(caught.value).partition("leaves only ")[2]


def test_limit_of_version_2(cgroups: Cgroups) -> None:
    """The tightest limit counts, of the container's own cgroup or of one above it."""
    cgroups.lie("cgroup2", {"": "/pod/c"})
    cgroups.make("", memory__stat="inactive_file 0")
    cgroups.make("pod", memory__max=str(8 * GIB), memory__current=str(6 * GIB), memory__stat="anon 1")
    cgroups.make("pod/c", memory__max="max", memory__current=str(5 * GIB))
    assert left(3 * GIB) == "2.0 GiB"
    cgroups.make("pod/c", memory__max=str(6 * GIB))
    assert left(3 * GIB) == "1.0 GiB"
    space.check_memory({1: GIB // 2}, 1)


def test_what_the_kernel_can_drop(cgroups: Cgroups) -> None:
    """File pages that nobody used lately are no obstacle; a cgroup over its limit leaves nothing."""
    cgroups.lie("cgroup2", {"": "/c"})
    stat = f"anon 7\ninactive_file {2 * GIB}\nactive_file 9"
    cgroups.make("c", memory__max=str(4 * GIB), memory__current=str(4 * GIB), memory__stat=stat)
    assert left(4 * GIB) == "2.0 GiB"
    cgroups.make("c", memory__current=str(8 * GIB))
    assert left(4 * GIB) == "0 B"


def test_limit_of_version_1(cgroups: Cgroups) -> None:
    """The memory controller of version 1, beside others, mounted from within a cgroup."""
    cgroups.lie("cgroup", {"": "/", "cpu,memory": "/top/c", "pids": "/x"}, root="/top")
    files = {"memory__usage_in_bytes": str(GIB), "memory__stat": f"total_inactive_file {GIB}"}
    cgroups.make("c", memory__limit_in_bytes=str(2 * GIB), **files)
    assert left(3 * GIB) == "2.0 GiB"


def test_the_limit_of_what_is_staged(monkeypatch: pytest.MonkeyPatch, plenty: None) -> None:
    """What is staged counts as ours: over our own limit the kernel would kill us."""
    monkeypatch.setattr(space, "_limit", lambda pid: GIB if pid == os.getpid() else None)
    space.check_memory({1: GIB // 2}, 1, Memory())
    with pytest.raises(Refused, match=r"limit of gpusnap's own cgroup leaves only 1\.0 GiB") as caught:
        space.check_memory({1: GIB}, 1, Memory())
    assert caught.value.hint == (
        "raise the memory limit of gpusnap's own cgroup, or set memory.ceiling below it"
    )
    space.check_memory({1: 8 * GIB}, 1, Memory(ceiling=GIB // 2))  # what is above it is not staged
    space.check_memory({1: 8 * GIB}, 1, Memory(pages="criu"))


def test_room_to_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beside CRIU's images has to fit in RAM; what is in them is CRIU's business."""
    record = a_manifest()
    monkeypatch.setattr(space, "_limit", lambda _: None)
    monkeypatch.setattr(space, "_measure_available", lambda: 4 * GIB)
    space.check_memory_to_restore(record, Memory())
    region = RegionRecord(4096, Table(3 * GIB, ()))
    process = replace(record.processes[0], regions=(region,))
    space.check_memory_to_restore(replace(record, processes=(process,)), Memory())
    process = replace(process, regions=(region, region))
    with pytest.raises(Refused, match=r"6\.0 GiB of GPU memory must pass through RAM, but this host"):
        space.check_memory_to_restore(replace(record, processes=(process,)), Memory())


@pytest.mark.parametrize(
    ("here", "ours", "ceiling", "fits"),
    [
        (7 * GIB, None, 0, True),
        (7 * GIB - 1, None, 0, False),
        (9 * GIB, 7 * GIB - 1, 0, False),
        (None, None, 0, True),
        (9 * GIB, None, 9 * GIB, False),
    ],
)
def test_room_for_images(
    monkeypatch: pytest.MonkeyPatch, here: int | None, ours: int | None, ceiling: int, *, fits: bool
) -> None:
    """The GPUs' memory, the images, and what CRIU makes of these; whoever sets a ceiling gets no more."""
    monkeypatch.setattr(space, "_limit", lambda _: ours)
    monkeypatch.setattr(space, "_measure_available", lambda: here)
    process = replace(a_manifest().processes[0], regions=(RegionRecord(4096, Table(3 * GIB, ())),))
    files = (FileRecord("pages-1.img", Table(2 * GIB, ())),)
    record = replace(a_manifest(), processes=(process,), files=files)
    assert space.has_memory_for_images(record, Memory(ceiling=ceiling)) is fits
    monkeypatch.setattr(mount_namespace, "is_lasting", lambda: False)
    assert not space.has_memory_for_images(record, Memory(ceiling=ceiling))


def test_room_is_made_before_it_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who can free something is asked for it once, and only where it is needed."""
    free, asked = [10], list[int]()

    def make_room(need: int) -> None:
        asked.append(need)
        free[0] = 30

    monkeypatch.setattr(space, "_free", lambda _: free[0])
    space.check_disk(str(tmp_path), 10, [], make_room)
    assert asked == []
    space.check_disk(str(tmp_path), 20, [], make_room)
    assert asked == [20]
    with pytest.raises(Refused, match="needs up to 40 B"):
        space.check_disk(str(tmp_path), 40, [], make_room)


@pytest.mark.parametrize("path", ["/../../elsewhere", "/none"])
def test_without_a_limit(cgroups: Cgroups, path: str) -> None:
    """A cgroup that we cannot see, or that has no limit, limits nothing."""
    cgroups.lie("cgroup2", {"": path})
    cgroups.make("", memory__max="max", memory__current="1")
    space.check_memory({1: 100 * GIB}, 1)


def test_our_own_limit(plenty: None) -> None:
    """The real files are read without an error."""
    limit = space._limit(os.getpid())
    assert limit is None or limit >= 0


# Disk.


def test_disk(tmp_path: Path) -> None:
    """The GPUs' bytes and the processes' own have to fit; what is needed and what is free is said."""
    free = shutil.disk_usage(tmp_path).free
    with Family() as family:
        found = proc.process(family.spawn())
        assert found is not None
        space.check_disk(str(tmp_path), 0, [found])
        with pytest.raises(Refused, match=rf"in {tmp_path}, but only .* is free") as caught:
            space.check_disk(str(tmp_path), free * 2, [found])
        assert "free some space there" in caught.value.hint


def test_disk_counts_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU's part counts too, for every process."""
    free = shutil.disk_usage(tmp_path).free
    monkeypatch.setattr(proc, "memory", lambda pid: free)
    with pytest.raises(Refused):
        space.check_disk(str(tmp_path), 0, [process(1), process(2)])


def test_disk_that_is_not_there(tmp_path: Path) -> None:
    """A directory that cannot be used is named, in words that Podman leaves alone."""
    with pytest.raises(Refused) as caught:
        space.check_disk(str(tmp_path / "none"), 1, [])
    assert str(tmp_path / "none") in str(caught.value)
    assert not [words for words in POISON if words in caught.value.sentence().lower()]
