"""What /proc tells of a process' device files: real processes, real nodes, of no driver in particular."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpusnap.runtime_shim import gpu
from gpusnap.runtime_shim.gpu.api import device_files as handles
from gpusnap.runtime_shim.gpu.api.driver import Node
from gpusnap.runtime_shim.gpu.api.errors import PermissionRefused
from gpusnap.runtime_shim.process import proc

# Opening a node by O_PATH needs no driver behind it.
HOLD = """
import mmap, os, sys
keep = [os.open(path, os.O_PATH) for path in sys.argv[1:]]
print("ready", flush=True)
sys.stdin.read()
"""

# In a mount namespace of its own, with a /dev that has what the test asks for.
PRIVATE_DEV = """
set -e
mount -t tmpfs tmpfs /dev
mknod /dev/nvidia3 c 195 1
mknod /dev/nvidia9 c 1 5
mknod /dev/nvidiactl c 195 255
mknod /dev/nvidia-modeset c 195 254
mknod /dev/renamed c 195 6
mknod /dev/null c 1 3
ln -s /dev/nvidia9 /dev/nvidia7
mkdir /dev/nvidia5
: > /dev/nvidia4
exec "$0" -c "$1"
"""

MAPPING = """
import mmap, os, sys
held = [os.open(p, os.O_PATH) for p in ("/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia4", "/dev/nvidia5")]
zero = os.open("/dev/nvidia9", os.O_RDWR)
memory = [mmap.mmap(zero, size, flags=mmap.MAP_PRIVATE) for size in (4096, 8192)]
os.close(zero)
os.unlink("/dev/nvidia3")
print("ready", flush=True)
sys.stdin.read()
"""

Start = Callable[..., int]


def can_mknod() -> bool:
    return os.geteuid() == 0


needs_root = pytest.mark.skipif(not can_mknod(), reason="needs root, to make device nodes")


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a command that prints "ready" and then holds on until its stdin closes; its PID."""
    children: list[subprocess.Popen[str]] = []

    def begin(*argv: str) -> int:
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
        return child.pid

    yield begin
    for child in children:
        child.kill()
        child.communicate()


@pytest.fixture
def majors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The majors of a host without the kernel driver, wherever the tests run."""
    fixed = (frozenset({195}), frozenset({195, 511}))
    monkeypatch.setattr(handles, "nvidia_majors", lambda: fixed)


@pytest.mark.parametrize("name", ["a\rb", "a\x0cb", "a\u2028b"])
def test_mappings_of_any_name(tmp_path: Path, name: str) -> None:
    """What a program calls its files, it cannot make two lines of /proc/PID/maps of one."""
    path = tmp_path / name
    path.write_bytes(b"x")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        assert str(path) in [each for *_, each in handles.mappings(os.getpid())]


def both(gpus: set[int], all_of_them: set[int]) -> tuple[frozenset[int], frozenset[int]]:
    return frozenset(gpus), frozenset(all_of_them)


def test_majors_of_a_host_with_the_driver(tmp_path: Path) -> None:
    table = tmp_path / "devices"
    table.write_text(
        "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n195 nvidia-modeset\n235 nvidia-caps\n"
        "511 nvidia-uvm\n\nBlock devices:\n  8 sd\n 77 nvidia-none\n"
    )
    assert handles.nvidia_majors(str(table)) == both({195}, {195, 235, 511})
    table.write_text("Character devices:\n240 nvidia-frontend\n511 nvidia-uvm\n")
    assert handles.nvidia_majors(str(table)) == both({240}, {240, 511})


def test_majors_of_a_host_without(tmp_path: Path) -> None:
    table = tmp_path / "devices"
    table.write_text("Character devices:\n  1 mem\n\nBlock devices:\n  8 sd\n")
    assert handles.nvidia_majors(str(table)) == both({195}, {195})
    assert handles.nvidia_majors(str(tmp_path / "none")) == both({195}, {195})


@needs_root
@pytest.mark.usefixtures("majors")
def test_renamed_nodes_are_known_by_their_device(start: Start, tmp_path: Path) -> None:
    paths = []
    for name, major, minor in [("gpu", 195, 2), ("ctl", 195, 255), ("uvm", 511, 0), ("null", 1, 3)]:
        paths.append(str(tmp_path / name))
        os.mknod(paths[-1], 0o600 | 0o020000, os.makedev(major, minor))
    pid = start(sys.executable, "-c", HOLD, *paths, str(tmp_path))
    assert handles.nodes(pid) == (Node(paths[1], 195, 255), Node(paths[0], 195, 2), Node(paths[2], 511, 0))
    assert handles.gpu_minors(pid) == (2,)
    os.unlink(paths[0])
    assert handles.gpu_minors(pid) == (2,)
    assert paths[0] in [node.path for node in handles.nodes(pid)]


@needs_root
@pytest.mark.usefixtures("majors")
def test_a_process_with_its_own_dev(start: Start) -> None:
    pid = start("unshare", "-m", "--propagation", "private", "sh", "-c", PRIVATE_DEV, sys.executable, MAPPING)
    # nvidia9 is another device by its name only, mapped and not open; files and folders are no devices.
    held = handles.list_held(pid)
    assert [path for _, path in held.descriptors if path != "/dev/nvidia9"] == [
        "/dev/nvidia3",
        "/dev/nvidiactl",
    ]
    assert all(os.path.exists(f"/proc/{pid}/fd/{number}") for number, _ in held.descriptors)
    assert sorted((end - start, path) for start, end, path in held.mappings) == [
        (4096, "/dev/nvidia9"),
        (8192, "/dev/nvidia9"),
    ]
    assert handles.nodes(pid) == (
        Node("/dev/nvidia3", 195, 1),
        Node("/dev/nvidia9", 1, 5),
        Node("/dev/nvidiactl", 195, 255),
    )
    with pytest.MonkeyPatch.context() as patched:
        with pytest.MonkeyPatch.context() as none_mapped:
            none_mapped.setattr(handles, "_iterate_mapped_nodes", lambda *_: pytest.fail("some are open"))
            assert handles.holds(pid)
        patched.setattr(handles, "_open_nodes", lambda *_: {})
        assert handles.holds(pid)
    # The minor is the node's, not the number in its name; nvidia3 is deleted by now.
    assert handles.gpu_minors(pid) == (1, 5)
    assert handles.dev_minors(pid) == (5, 6)


def test_nothing_held(start: Start) -> None:
    pid = start(sys.executable, "-c", HOLD, "/dev/null")
    assert handles.nodes(pid) == ()
    assert not handles.holds(pid)
    assert handles.gpu_minors(pid) == ()
    assert not handles.maps_libcuda(pid)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("libcuda.so.1", True),
        ("libcuda.so.580.159.04", True),
        ("libcudart.so.13", False),
        ("libcuda.txt", False),
    ],
)
def test_the_library_is_seen(start: Start, tmp_path: Path, name: str, expected: bool) -> None:
    path = tmp_path / name
    path.write_bytes(bytes(4096))
    hold = (
        f"import mmap; f = open({str(path)!r}, 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)\n"
        + HOLD
    )
    pid = start(sys.executable, "-c", hold)
    assert handles.maps_libcuda(pid) is expected
    path.unlink()  # "(deleted)" in /proc/PID/maps
    assert handles.maps_libcuda(pid) is expected


def test_a_process_that_is_gone() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not proc.is_alive(child.pid)  # a zombie
    assert handles.nodes(child.pid) == ()
    child.wait()
    assert not proc.is_alive(child.pid)
    assert handles.comm(child.pid) == "?"
    assert handles.nodes(child.pid) == ()
    assert handles.gpu_minors(child.pid) == ()
    assert handles.dev_minors(child.pid) == ()
    assert not handles.maps_libcuda(child.pid)


def test_a_process_that_is_about_to_end(start: Start) -> None:
    pid = start(sys.executable, "-c", HOLD)
    assert not handles.has_ended(pid, within=0.01)
    os.kill(pid, signal.SIGKILL)
    assert handles.has_ended(pid, within=10)
    os.waitpid(pid, 0)
    assert handles.has_ended(pid, within=10)


def test_a_stopped_process_is_alive(start: Start) -> None:
    pid = start(sys.executable, "-c", HOLD)
    os.kill(pid, signal.SIGSTOP)
    assert proc.is_alive(pid)
    assert proc.is_alive(os.getpid())


def test_a_process_that_cannot_be_read_is_alive(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """This host lacks descriptors, or memory, for a moment: nobody has ended, and the GPU is in use."""
    pid = start(sys.executable, "-c", HOLD)
    failures = [errno.EMFILE, errno.ENOMEM]
    real = os.open

    def failing(path: Any, *words: Any, **options: Any) -> Any:
        if str(path) == f"/proc/{pid}/stat" and failures:
            raise OSError(failures.pop(), "injected")
        return real(path, *words, **options)

    monkeypatch.setattr(os, "open", failing)
    assert not handles.has_ended(pid, within=0)
    assert not failures


def test_names_that_try_to_confuse(start: Start) -> None:
    name = ") Z 1 (x\n"
    hold = f"open('/proc/self/comm', 'w').write({name!r})\n" + HOLD
    pid = start(sys.executable, "-c", hold)
    assert proc.is_alive(pid)
    assert handles.comm(pid) in (") Z 1 (x", ") Z 1 (x?")


@needs_root
def test_a_process_that_is_not_ours_to_see(start: Start) -> None:
    pid = start(sys.executable, "-c", HOLD)
    script = f"""
import os
from gpusnap.runtime_shim.gpu.api import device_files as handles
from gpusnap.runtime_shim.gpu.api.errors import PermissionRefused
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
try:
    handles.nodes({pid})
except PermissionRefused as error:
    print(error.sentence())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert f"process {pid}" in done.stdout
    assert "access is refused" in done.stdout
    assert PermissionRefused.__name__ not in done.stderr


class Held:
    """Of the Driver protocol, what `holders` asks."""

    vendor = "none"

    def holds(self, pid: int) -> bool:
        return pid % 2 == 1


def test_holders_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proc, "is_alive", lambda pid: pid != 5)
    assert gpu.holders(Held(), [3, 2, 5, 1]) == (3, 1)  # type: ignore[arg-type]
