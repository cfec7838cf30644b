"""Device nodes that are mounts of their own, replaced in a container's mount namespace.

The container is a process with mounts and a root of its own, and its GPU nodes are nodes that every host has:
/dev/full, /dev/zero and others stand in for /dev/nvidia0 and the like.
"""

from __future__ import annotations

import errno
import functools
import gc
import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.base.errors import ContainerError
from gpusnap.runtime_shim.gpu.api.device_nodes import Change
from gpusnap.runtime_shim.gpu.api.driver import Node
from gpusnap.runtime_shim.process import mount_namespace, proc
from gpusnap.runtime_shim.process.memory import tmpfs
from gpusnap.runtime_shim.snapshot.devices.bind_mounted_nodes import (
    device_nodes,
    mounted_nodes,
    replace_nodes,
)

DEADLINE = 90.0
ROOT = Path(__file__).parents[5]
# Becomes a container: argv is its root, "user" for a user namespace of its own or "", the source of /dev or
# "", and the nodes that are bind-mounted in /dev. Each further line is a statement that it executes.
CONTAINER = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def done(result):
    if result:
        raise OSError(ctypes.get_errno(), "in the container")
def mount(source, target, kind=None, flags=0, data=None):
    words = [word and word.encode() for word in (source, target, kind)]
    done(libc.mount(*words, ctypes.c_ulong(flags), data and data.encode()))
BIND = 1 << 12
root, user, source, *nodes = sys.argv[1:]
done(libc.unshare(0x20000 | (0x10000000 if user else 0)))  # CLONE_NEWNS, CLONE_NEWUSER
print("unshared", flush=True)
sys.stdin.readline()
if user:
    os.setgid(0), os.setuid(0)
mount(None, "/", None, (1 << 14) | (1 << 18))  # MS_REC | MS_PRIVATE
mount("tmpfs", root, "tmpfs")
os.mkdir(root + "/dev")
os.mkdir(root + "/elsewhere")
if source:
    mount(source, root + "/dev", None, BIND)
else:
    mount("tmpfs", root + "/dev", "tmpfs", 0, "mode=755")
for node in nodes:
    os.makedirs(os.path.dirname(root + node), exist_ok=True)
    open(root + node, "w").close()
    mount(node, root + node, None, BIND)
os.chdir(root)
os.chroot(".")
print("ready", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Container:
    """A process with a root and a /dev of its own; nothing of it is left when it ends."""

    def __init__(self, root: Path, *nodes: str, user: bool = False, source: str = "") -> None:
        root.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTAINER, str(root), "user" if user else "", source, *nodes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid
        try:
            self._expect("unshared")
            if user:
                for kind in ("uid_map", "gid_map"):
                    Path(f"/proc/{self.pid}/{kind}").write_text("0 100000 65536", "ascii")
            self.tell("")
            self._expect("ready")
        except BaseException:
            self.end()
            raise

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def do(self, line: str) -> None:
        """Have the container do something."""
        self.tell(line)
        self._expect("done")

    def _expect(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == word + "\n"

    def nodes(self) -> dict[str, tuple[int, int] | str]:
        """What lies in its /dev: numbers of devices, and what else there is."""
        top, found = Path(f"/proc/{self.pid}/root/dev"), dict[str, tuple[int, int] | str]()
        for path in sorted(top.rglob("*")):
            info = path.lstat()
            if stat.S_ISCHR(info.st_mode):
                found[str(path.relative_to(top))] = os.major(info.st_rdev), os.minor(info.st_rdev)
            else:
                found[str(path.relative_to(top))] = stat.filemode(info.st_mode)[0]
        return found

    def mounts(self) -> dict[str, tuple[str, ...]]:
        return {each.destination: each.tags for each in proc.mounts(self.pid)}

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=DEADLINE)


@functools.cache
def lacking() -> str:
    """What this machine lacks for a container with mounts of its own; empty where it has all."""
    for flags, what in ((["--mount"], "CAP_SYS_ADMIN"), (["--mount", "--user"], "user namespaces")):
        if subprocess.run(["unshare", *flags, "true"], capture_output=True, check=False).returncode:
            return f"needs {what}"
    if os.geteuid():
        return "needs root"
    try:
        os.close(mount_namespace.open_tree("/dev/null"))
    except OSError as error:
        if error.errno == errno.ENOSYS:
            return "needs open_tree(2)"
    return ""


pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking() or "-")

Make = Callable[..., Container]


def host_mounts() -> tuple[proc.Mount, ...]:
    """This machine's, but for those that other tests have meanwhile: in their folders, and gpusnap's own."""
    others = ("/pytest-", tmpfs.FOLDER)
    return tuple(each for each in proc.mounts("self") if not any(map(each.destination.__contains__, others)))


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes containers, and sees that this machine's own mounts are as they were."""
    made: list[Container] = []
    before = host_mounts()

    def one(*nodes: str, user: bool = False, source: str = "") -> Container:
        made.append(Container(Path(top) / f"root{len(made)}", *nodes, user=user, source=source))
        return made[-1]

    def own() -> tuple[str, int, int]:
        return os.getcwd(), threading.active_count(), len(os.listdir("/proc/self/fd"))

    gc.collect()  # what other tests have left open is not to be closed in between
    ours = own()
    # Neither in tmp_path nor in tox's folder, which a user namespace's root may not enter.
    with tempfile.TemporaryDirectory(prefix="gpusnap-inside-", dir="/tmp") as top:
        os.chmod(top, 0o755)
        try:
            yield one
            assert host_mounts() == before
        finally:
            for container in made:
                container.end()
        question_process.end()
        assert own() == ours


NUMBERS = {
    "full": (1, 7),
    "zero": (1, 5),
    "random": (1, 8),
    "null": (1, 3),
}


def node(name: str) -> Node:
    return Node(f"/dev/{name}", *NUMBERS[name])


def change(old: str, *new: str) -> Change:
    return Change(node(old), tuple(map(node, new)))


def works(container: Container, name: str) -> bool:
    """Whether the device can be opened in the container (as a mount with nodev could not)."""
    try:
        os.close(os.open(f"/proc/{container.pid}/root/dev/{name}", os.O_RDONLY))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("user", [False, True])
def test_replace(make: Make, user: bool) -> None:
    """The new node is there and opens, the old one is gone, and the others are untouched."""
    container = make("/dev/full", "/dev/null", user=user)
    assert container.nodes() == {"full": (1, 7), "null": (1, 3)}
    replace_nodes(container.pid, [change("full", "zero")])
    assert container.nodes() == {"null": (1, 3), "zero": (1, 5)}
    assert works(container, "zero")
    assert set(container.mounts()) == {"/", "/dev", "/dev/null", "/dev/zero"}
    root = 100000 if user else 0
    container.do("import ctypes; done(libc.umount2(b'/dev/zero', 0))")
    info = os.lstat(f"/proc/{container.pid}/root/dev/zero")
    assert (info.st_uid, info.st_gid, info.st_size) == (root, root, 0)


@pytest.mark.parametrize("user", [False, True])
def test_there_and_back(make: Make, user: bool) -> None:
    """What was put there can be replaced again, and the first node comes back."""
    container = make("/dev/full", user=user)
    for _ in range(3):
        replace_nodes(container.pid, [change("full", "zero")])
        assert container.nodes() == {"zero": (1, 5)}
        replace_nodes(container.pid, [change("zero", "full")])
        assert container.nodes() == {"full": (1, 7)}
    assert set(container.mounts()) == {"/", "/dev", "/dev/full"}


def test_swap(make: Make) -> None:
    """Three nodes change places at once; one of them takes a name that another one leaves."""
    container = make("/dev/full", "/dev/zero", "/dev/random")
    replace_nodes(container.pid, [change("full", "zero"), change("zero", "random"), change("random", "null")])
    assert container.nodes() == {"zero": (1, 5), "random": (1, 8), "null": (1, 3)}
    assert set(container.mounts()) == {"/", "/dev", "/dev/zero", "/dev/random", "/dev/null"}


def test_no_peer_of_the_hosts(make: Make) -> None:
    """Where this host's mounts are shared, as systemd makes them, the container's new one still is not."""
    container = make("/dev/full")
    program = (
        "from gpusnap.runtime_shim.snapshot.devices import bind_mounted_nodes as inside; "
        "from gpusnap.runtime_shim.process import proc; "
        "from gpusnap.runtime_shim.gpu.api.device_nodes import Change, Node;"
        "assert all(mount.tags for mount in proc.mounts('self') if mount.destination == '/dev');"
        "change = Change(Node('/dev/full', 1, 7), (Node('/dev/zero', 1, 5),));"
        f"inside.replace_nodes({container.pid}, [change])"
    )
    words = ["unshare", "--mount", "--propagation", "shared", sys.executable, "-c", program]
    subprocess.run(words, cwd=ROOT, check=True)
    assert container.nodes() == {"zero": (1, 5)}
    assert container.mounts()["/dev/zero"] == ()


def test_two_names_and_none(make: Make) -> None:
    """One node becomes two, and another one none."""
    container = make("/dev/full", "/dev/zero")
    replace_nodes(container.pid, [change("full", "full", "random"), change("zero")])
    assert container.nodes() == {"full": (1, 7), "random": (1, 8)}


def test_a_folder(make: Make) -> None:
    """A node in a folder of /dev, as those of /dev/dri; the folder stays."""
    folder = next((path for path in ("/dev/shm", "/dev/mqueue") if os.access(path, os.W_OK)), None)
    if folder is None:
        pytest.skip("needs a folder in /dev that can be written to")
    paths = [f"{folder}/gpusnap-test-{os.getpid()}-{number}" for number in (128, 129)]
    try:
        for number, path in enumerate(paths):
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(226, 128 + number))
    except OSError:
        pytest.skip("needs mknod(2) of a device (CAP_MKNOD)")
    try:
        container = make(paths[0])
        first, second = (Node(path, 226, 128 + number) for number, path in enumerate(paths))
        assert mounted_nodes(container.pid) == ((first.path, 226, 128),)
        replace_nodes(container.pid, [Change(first, (second,))])
        inner = folder.removeprefix("/dev/")
        assert container.nodes() == {inner: "d", second.path.removeprefix("/dev/"): (226, 129)}
    finally:
        for path in paths:
            os.unlink(path)


def test_the_hosts_dev(make: Make) -> None:
    """A container that has this host's /dev has its nodes, and nothing is done there."""
    container = make(source="/dev")
    before = container.mounts()
    replace_nodes(container.pid, [change("full", "zero")])
    assert container.mounts() == before
    assert os.path.exists("/dev/full")


def refused(container: Container, words: str, *changes: Change) -> None:
    """The change is refused with these words, and nothing has been changed."""
    before = container.nodes(), container.mounts()
    with pytest.raises(ContainerError, match=words):
        replace_nodes(container.pid, changes or [change("full", "zero")])
    assert (container.nodes(), container.mounts()) == before


def test_no_mount(make: Make) -> None:
    """An old node that is not there, or is no mount, is refused before anything is done."""
    container = make("/dev/null")
    refused(container, r"\(stat /dev/full\): it does not exist")
    container.do("open('/dev/full', 'w').close()")
    refused(container, "/dev/full is not a device mounted there")
    refused(container, "/dev/full is not a device", change("null", "zero"), change("full", "random"))
    container.do("os.unlink('/dev/full'); os.mknod('/dev/full', 0o20600, os.makedev(1, 7))")
    refused(container, "/dev/full is not a device mounted there")


def test_the_new_name_is_taken(make: Make) -> None:
    """Whatever has the new name already is left as it is, and no link is followed."""
    container = make("/dev/full")
    for line in ("open('/dev/zero', 'w').close()", "os.symlink('/elsewhere/x', '/dev/zero')"):
        container.do(line)
        refused(container, r"\(open /dev/zero\): File exists")
        container.do("os.unlink('/dev/zero')")
    assert os.listdir(f"/proc/{container.pid}/root/elsewhere") == []


def test_hostile_links(make: Make) -> None:
    """A link in the place of /dev, of a folder or of a node leads nowhere."""
    container = make("/dev/full")
    container.do("os.symlink('/elsewhere', '/dev/dri')")
    elsewhere = Node("/dev/dri/zero", 1, 5)
    # The host has no such node either, but the folder is looked at for an old one as well.
    refused(container, r"open_tree /dev/dri/zero", Change(node("full"), (elsewhere,)))
    refused(container, r"\(open dri\): Not a directory", Change(elsewhere, (node("zero"),)))
    container.do("done(libc.umount2(b'/dev/full', 0)); os.unlink('/dev/full')")
    container.do("os.symlink('/elsewhere/x', '/dev/full')")
    refused(container, "/dev/full is not a device mounted there")
    container.do("done(libc.umount2(b'/dev', 0)); os.rmdir('/dev'); os.symlink('/elsewhere', '/dev')")
    with pytest.raises(ContainerError, match=r"\(open dev\): Not a directory"):
        replace_nodes(container.pid, [change("full", "zero")])
    assert os.listdir(f"/proc/{container.pid}/root/elsewhere") == []


def test_another_file_system(make: Make) -> None:
    """A folder of /dev that is a mount may be anybody's: nothing is made in it."""
    container = make("/dev/full")
    container.do("os.mkdir('/dev/shm'); mount('tmpfs', '/dev/shm', 'tmpfs')")
    container.do("open('/dev/shm/x', 'w').close(); mount('/dev/full', '/dev/shm/x', None, BIND)")
    refused(container, "/dev/shm is another file system", Change(Node("/dev/shm/x", 1, 7), ()))


def test_what_a_mount_lies_on(make: Make) -> None:
    """Only an empty file is taken away or mounted on."""
    container = make("/dev/null")
    container.do("open('/dev/full', 'w').write('mine'); mount('/dev/null', '/dev/full', None, BIND)")
    for changes in ([change("full", "zero")], [change("full", "full")]):
        with pytest.raises(
            ContainerError, match="/dev/full is mounted on something other than an empty file"
        ):
            replace_nodes(container.pid, changes)
        assert Path(f"/proc/{container.pid}/root/dev/full").read_text() == "mine"
        container.do("mount('/dev/null', '/dev/full', None, BIND)")


def test_the_hosts_node(make: Make, tmp_path: Path) -> None:
    """A node that is not what the plan says on this host, or is a link there, is not given away."""
    container = make("/dev/full")
    (tmp_path / "link").symlink_to("/dev/zero")
    link = Node(str(tmp_path / "link"), 1, 5)
    refused(container, "link is not the device 1:5", Change(node("full"), (link,)))
    refused(
        container, "/dev/zero is not the device 195:0", Change(node("full"), (Node("/dev/zero", 195, 0),))
    )
    refused(
        container, r"open_tree /dev/gpusnap-none\)", Change(node("full"), (Node("/dev/gpusnap-none", 1, 5),))
    )
    refused(
        container,
        "/etc/x is not a valid location for a device",
        Change(Node("/etc/x", 1, 5), (node("zero"),)),
    )


def test_a_process_that_is_gone(make: Make) -> None:
    """One sentence, with what to do left to the caller; and it has no nodes."""
    container = make("/dev/full")
    container.end()
    with pytest.raises(ContainerError, match="device nodes in the restored container cannot be replaced"):
        replace_nodes(container.pid, [change("full", "zero")])
    assert mounted_nodes(container.pid) == ()
    replace_nodes(container.pid, [])


def test_an_old_kernel(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without the calls is told as such."""
    container = make("/dev/full")
    monkeypatch.setattr(mount_namespace, "_OPEN_TREE", 100_000)
    with pytest.raises(ContainerError, match="open_tree") as caught:
        replace_nodes(container.pid, [change("full", "zero")])
    assert "Linux 5.2" in caught.value.hint


def test_mounted_nodes(make: Make) -> None:
    """The devices that are mounts, and neither folders, files nor nodes of the tmpfs itself."""
    container = make("/dev/full", "/dev/null")
    container.do("os.mkdir('/dev/shm'); mount('tmpfs', '/dev/shm', 'tmpfs')")
    container.do("open('/dev/file', 'w').close(); mount('/dev/file', '/dev/file', None, BIND)")
    container.do("open('/elsewhere/x', 'w').close(); mount('/dev/full', '/elsewhere/x', None, BIND)")
    container.do("os.symlink('/elsewhere', '/dev/link')")
    assert mounted_nodes(container.pid) == (("/dev/full", 1, 7), ("/dev/null", 1, 3))


def test_device_nodes_are_not_missed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in /dev is found; where this host lacks something to look, that is said."""
    container = make()
    container.do("os.mknod('/dev/x', 0o020600, os.makedev(10, 229))")
    assert device_nodes(container.pid) == (("c", 10, 229, "/dev/x"),)
    for number in (errno.EIO, errno.EMFILE):

        def fail(path: object, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            question_process.end()  # the next child has what is put in place now
            patch.setattr(os, "scandir", fail)
            with pytest.raises(ContainerError, match=r"/dev of the container .* cannot be read"):
                device_nodes(container.pid)
    container.end()
    assert device_nodes(container.pid) == ()
