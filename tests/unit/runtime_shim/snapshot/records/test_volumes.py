"""volumes.py and volume_image.py: open files of a container's volumes, out of one and into the next."""

from __future__ import annotations

import json
import mmap
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from socket import AF_UNIX, socket
from typing import Any

import pytest

from gpusnap.runtime_shim.base.errors import ImageError, Refused
from gpusnap.runtime_shim.process import open_files, proc
from gpusnap.runtime_shim.process.proc import Mount
from gpusnap.runtime_shim.records.cri_layout import OF_CRI
from gpusnap.runtime_shim.runtime.container_files import directory
from gpusnap.runtime_shim.snapshot.records import volume_image, volumes
from gpusnap.runtime_shim.snapshot.records.volume_image import Existing, Target
from gpusnap.runtime_shim.snapshot.records.volumes import Kind, Volume

ANNOTATIONS = {OF_CRI: "container"}
UID = "5f0e1a2b"
PODS = f"/var/lib/kubelet/pods/{UID}"
BUNDLE = "/var/lib/containers/storage/overlay-containers/0b/userdata"
PODMAN = {"io.container.manager": "libpod"}
SHM = "/run/containerd/io.containerd.grpc.v1.cri/sandboxes/0a1b/shm"


def bind(destination: str, source: str) -> dict[str, Any]:
    return {"destination": destination, "source": source, "type": "bind", "options": ["rbind", "rw"]}


@pytest.mark.parametrize(
    ("mount", "ours"),
    [
        (bind("/cache", f"{PODS}/volumes/kubernetes.io~empty-dir/cache"), True),
        (bind("/dev/shm", f"{PODS}/volumes/kubernetes.io~empty-dir/shm"), True),
        (bind("/dev/shm", SHM), True),
        (bind("/dev/shm", "/var/run/containers/storage/overlay-containers/0a/userdata/shm"), True),
        (bind("/data", SHM), False),
        (bind("/data", "/dev/shm"), False),
        (bind("/data", f"{PODS}/volumes/kubernetes.io~csi/data/mount"), False),
        (bind("/data", "/srv/data"), False),
        ({"destination": "/cache", "source": "tmpfs", "type": "tmpfs"}, False),
        ({"destination": 7, "options": ["bind"]}, False),
    ],
)
def test_which_mounts_end_with_the_pod(mount: dict[str, Any], ours: bool) -> None:
    config = {"annotations": ANNOTATIONS, "mounts": [mount]}
    assert bool(volumes.find(config, BUNDLE)) is ours
    assert volumes.find(config | {"annotations": {}}, BUNDLE) == ()
    crio = {"io.kubernetes.cri-o.ContainerType": "container"}
    assert bool(volumes.find(config | {"annotations": crio}, BUNDLE)) is ours


@pytest.mark.parametrize(
    ("annotations", "source", "kind"),
    [
        (PODMAN, f"{BUNDLE}/shm", Kind.OWN),
        (PODMAN, f"{BUNDLE}//shm/", Kind.OWN),
        (PODMAN, "/var/lib/containers/storage/overlay-containers/infra/userdata/shm", Kind.SHARED),
        (PODMAN, "/dev/shm", Kind.SHARED),
        (PODMAN, "/srv/shm", None),
        (ANNOTATIONS, "/dev/shm", Kind.SHARED),
        ({}, "/dev/shm", Kind.SHARED),
        ({}, f"{BUNDLE}/shm", None),
    ],
)
def test_whose_shared_memory(annotations: dict[str, str], source: str, kind: Kind | None) -> None:
    """Podman reads a container's own after the dump, when a container that goes on has changed it."""
    config = {"annotations": annotations, "mounts": [bind("/dev/shm", source)]}
    assert [each.kind for each in volumes.find(config, BUNDLE)] == ([kind] if kind else [])
    for runs_on in (False, True):
        copied = volumes.find_to_copy(config, BUNDLE, runs_on=runs_on)
        assert bool(copied) is (kind is Kind.SHARED or (kind is Kind.OWN and runs_on))


def test_a_folder_of_a_volume(tmp_path: Path) -> None:
    """kubelet mounts a subPath elsewhere, by the volume's name, whatever kind of volume that is."""
    for kind, name in (("empty-dir", "cache"), ("csi", "data")):
        (tmp_path / f"pod/volumes/kubernetes.io~{kind}/{name}").mkdir(parents=True)
    mounts = [
        bind(f"/{name}", f"{tmp_path}/pod/volume-subpaths/{name}/work/0") for name in ("cache", "data", "x")
    ]
    found = volumes.find({"annotations": ANNOTATIONS, "mounts": mounts}, BUNDLE)
    assert [each.destination for each in found] == ["/cache"]


@pytest.fixture
def old() -> Iterator[Path]:
    """Where a socket's whole name is no longer than unix(7) takes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as pod:
        yield made(Path(pod))


@pytest.fixture
def new(tmp_path: Path) -> Path:
    return made(tmp_path / "new")


def made(pod: Path) -> Path:
    path = pod / "volumes/kubernetes.io~empty-dir/cache"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image directory."""
    path = tmp_path / "image"
    path.mkdir()
    return path


@pytest.fixture
def seen(old: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    """What is opened is closed after the test. This process sees the volume by its path on the host."""
    mounts = [Mount("0:1", "/", path, (), (), "ext4") for path in ("/", str(old), str(old / "mounted"))]
    monkeypatch.setattr(proc, "mounts", lambda pid: tuple(mounts))
    with ExitStack() as stack:
        yield stack


def found(old: Path) -> tuple[volumes.OpenVolumeFile, ...]:
    """What this process has open in the volume."""
    process = proc.process(os.getpid())
    assert process is not None
    return volumes.list_open([process], [Volume(str(old), str(old))])


def restore(image: Path, old: Path, new: Path, *mounts: dict[str, Any]) -> None:
    config = {"annotations": ANNOTATIONS, "mounts": [bind(str(old), str(new)), *mounts]}
    volumes.put_back(str(image), config, BUNDLE)


def test_open_and_mapped(old: Path, new: Path, image: Path, seen: ExitStack) -> None:
    """Content, holes, modes and directories come back; what nobody has open, or CRIU carries, does not."""
    folder = old / "a/b c"
    folder.mkdir(parents=True, mode=0o750)
    log, shared, gone, hole = (folder / name for name in ("log", "shared\nname", "gone", "hole"))
    log.write_text("one\n")
    log.chmod(0o4640)
    seen.enter_context(log.open("a"))
    shared.write_bytes(b"x" * mmap.PAGESIZE)
    with shared.open("r+b") as file:
        memory = seen.enter_context(mmap.mmap(file.fileno(), 0))
    memory[:5] = b"words"
    gone.write_text("gone")
    seen.enter_context(gone.open())
    gone.unlink()
    with hole.open("wb") as file:
        file.seek(64 << 20)
        file.write(b"end")
        seen.callback(os.close, os.dup(file.fileno()))
    os.mkfifo(old / "fifo", 0o600)
    seen.callback(os.close, os.open(old / "fifo", os.O_RDWR))
    (old / "closed").touch()
    (old / "mounted").mkdir()
    (old / "mounted/file").touch()
    seen.enter_context((old / "mounted/file").open())

    opened = found(old)
    volumes.check(opened, 1 << 20)
    volumes.take(str(image), opened)
    assert (image / volume_image.IMAGE).stat().st_size < 1 << 20
    log.unlink()
    restore(image, old, new)
    inside = new / "a/b c"
    assert sorted(path.name for path in new.iterdir()) == ["a", "fifo"]
    assert sorted(path.name for path in inside.iterdir()) == ["hole", "log", "shared\nname"]
    assert (inside / "log").read_text() == "one\n"
    assert stat.S_IMODE((inside / "log").stat().st_mode) == 0o640
    assert stat.S_IMODE(inside.stat().st_mode) == 0o750
    assert (inside / "shared\nname").read_bytes()[:6] == b"wordsx"
    assert (inside / "hole").read_bytes() == bytes(64 << 20) + b"end"
    assert (inside / "hole").stat().st_blocks * 512 < 1 << 20
    assert (new / "fifo").is_fifo()


def test_link_in_the_place_of_a_socket(tmp_path: Path, old: Path, seen: ExitStack) -> None:
    """A name that leads out of the volume by now is not followed: what lies there is this host's."""
    host = tmp_path / "host"
    (host / "inner").mkdir(parents=True)
    (host / "secret").write_text("of this host")
    (host / "inner/secret").write_text("of this host")
    for path in (old / "a/secret", old / "b/inner/secret", old / "c/secret"):
        path.parent.mkdir(parents=True)
        seen.enter_context(socket(AF_UNIX)).bind(str(path))
    (old / "a").rename(old / "moved")
    (old / "a").symlink_to(host)
    (old / "b").rename(old / "moved too")
    (old / "b").symlink_to(host)
    (old / "c/secret").unlink()
    (old / "c/secret").symlink_to(host / "secret")
    assert [(each.path, stat.S_IFMT(each.info.st_mode)) for each in found(old)] == [("c", stat.S_IFDIR)]


def test_socket_by_a_roundabout_name(new: Path, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is bound by any name; the image has none that a restore refuses, nor one out of the volume."""
    process = proc.process(os.getpid())
    assert process is not None
    with ExitStack() as stack:
        # A socket's name is short.
        pod = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
        old = pod / "volume"
        mounts = [Mount("0:1", "/", path, (), (), "ext4") for path in ("/", str(old))]
        monkeypatch.setattr(proc, "mounts", lambda pid: tuple(mounts))
        (pod / "beside/inner").mkdir(parents=True)
        (old / "a/b").mkdir(parents=True)
        for name in (f"{old}/a/../a/./b/one", f"{old}/../beside/inner/two"):
            stack.enter_context(socket(AF_UNIX)).bind(name)
        volumes.take(str(image), volumes.list_open([process], [Volume(str(old), str(old))]))
    restore(image, old, new)
    assert sorted(each.relative_to(new) for each in new.rglob("*")) == [Path("a"), Path("a/b")]


def test_another_file_meanwhile(old: Path, image: Path, seen: ExitStack) -> None:
    """Neither copied nor waited for, should it be a FIFO."""
    (old / "log").touch()
    os.mkfifo(old / "fifo")
    descriptor = seen.enter_context((old / "log").open()).fileno()
    opened = found(old)
    fifo = os.open(old / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    os.dup2(fifo, descriptor)
    os.close(fifo)
    with pytest.raises(ImageError, match="open files of the container cannot be copied"):
        volumes.take(str(image), opened)


def test_nothing_open(old: Path, image: Path, seen: ExitStack) -> None:
    """Then there is no image, nor one of an earlier checkpoint, and a restore has nothing to do."""
    (image / volume_image.IMAGE).write_text("of an earlier one")
    volumes.take(str(image), found(old))
    assert list(image.iterdir()) == []
    volumes.put_back(str(image), {}, BUNDLE)


def test_too_large(old: Path, seen: ExitStack) -> None:
    """By what it takes, not by how long it is; the sentence has process, file and cure."""
    path = old / "weights"
    path.write_bytes(bytes(range(256)) * 8192)
    seen.enter_context(path.open())
    with pytest.raises(Refused) as caught:
        volumes.check(found(old), 1 << 20)
    said = caught.value.sentence()
    assert f"process {os.getpid()} (" in said
    assert f"has {path} of 2.0 MiB open" in said
    assert "raise criu.ghost-limit above 2.0 MiB" in said
    volumes.check(found(old), 2 << 20)


def test_removed_with_another_name(old: Path, seen: ExitStack) -> None:
    """CRIU would look in the new volume for a link that it makes in the old one."""
    path = old / "sem.a"
    path.touch()
    os.link(path, old / "sem.b")
    seen.enter_context(path.open())
    path.unlink()
    with pytest.raises(
        Refused, match=r"sem\.a open, .* this name was removed while the file has another one"
    ):
        found(old)


def test_all_of_the_memory_of_podman(
    old: Path, new: Path, image: Path, seen: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what no process has open, and a name that is not the one by which a file was opened."""
    (old / "inner").mkdir(mode=0o710)
    (old / "inner/closed").write_text("closed")
    (old / "inner/closed").chmod(0o640)
    path = old / "sem.a"
    path.write_text("two names")
    os.link(path, old / "sem.b")
    seen.enter_context(path.open())
    path.unlink()
    os.mkfifo(old / "fifo")
    (old / "link").symlink_to("sem.b")
    process = proc.process(os.getpid())
    assert process is not None
    opened = volumes.list_open([process], [Volume(str(old), str(old), Kind.OWN)])
    assert [each.path for each in opened] == ["fifo", "inner", "inner/closed", "sem.b"]
    volumes.take(str(image), opened)
    restore(image, old, new)
    assert (new / "inner/closed").read_text() == "closed"
    assert stat.S_IMODE((new / "inner/closed").stat().st_mode) == 0o640
    assert (new / "sem.b").read_text() == "two names"


@pytest.fixture
def root(old: Path, new: Path, seen: ExitStack, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The configuration of a container whose root is an overlay; this process sees that as its own root."""
    overlay = Mount("0:1", "/", str(new), (), (), "overlay")
    monkeypatch.setattr(proc, "mounts", lambda pid: (overlay,) if pid == "self" else (OWN_ROOT, HOST_ROOT))
    monkeypatch.setattr(open_files, "list_open", lambda pid: list_below(old, LIST_OPEN(pid)))
    monkeypatch.setattr(volumes, "directory", lambda pid, path: directory(pid, f"{old}{path}"))
    return {"root": {"path": str(new)}}


OWN_ROOT = Mount("0:1", "/", "/", (), (), "overlay")
HOST_ROOT = Mount("0:2", "/", "/outside", (), (), "ext4")
LIST_OPEN = open_files.list_open


def list_below(top: Path, found: Iterable[open_files.OpenFile]) -> Iterator[open_files.OpenFile]:
    """What is below a directory, by its path there; the rest is in another mount."""
    for each in found:
        inside = Path(each.path.removesuffix(" (deleted)")).is_relative_to(top)
        yield replace(each, path=each.path.removeprefix(str(top)) if inside else f"/outside{each.path}")


def list_root(root: dict[str, Any], limit: int = 1 << 30) -> tuple[volumes.OpenVolumeFile, ...]:
    """What a checkpoint that leaves the container running copies."""
    process = proc.process(os.getpid())
    assert process is not None
    found = volumes.list_open([process], volumes.find_to_copy(root, BUNDLE, runs_on=True))
    return volumes.leave_out(found, limit)


def test_files_that_change_later(
    old: Path, new: Path, image: Path, root: dict[str, Any], seen: ExitStack
) -> None:
    """What can be written to is restored as it was, if it is gone, longer, shorter or replaced by then."""
    names = ("inner/gone", "longer", "shorter", "same", "mapped", "replaced")
    (old / "inner").mkdir()
    (old / "read").write_text("read")
    seen.enter_context((old / "read").open())
    for name in names:
        (old / name).write_text("then")
        file = seen.enter_context((old / name).open("r+b"))
        if name == "mapped":
            seen.enter_context(mmap.mmap(file.fileno(), 4))
            file.close()
    opened = list_root(root)
    assert [f"/{each.path}" for each in opened] == sorted(["/inner", *(f"/{name}" for name in names)])
    volumes.take(str(image), opened)
    assert [path.name for path in image.iterdir()] == ["gpusnap-root.img"]
    for name, text in (("longer", "then and"), ("shorter", "th"), ("same", "then"), ("mapped", "now!")):
        (new / name).write_text(text)
    (new / "replaced").symlink_to("same")
    (new / "same").chmod(0o600)
    before = (new / "same").stat()
    assert volumes.list_restored(str(image), root, BUNDLE) == {f"/{name}" for name in names}
    volumes.put_back(str(image), root, BUNDLE)
    assert {name: (new / name).read_text() for name in names} == dict.fromkeys(names, "then")
    assert (new / "same").stat() == before
    assert not (new / "replaced").is_symlink()
    assert sorted(path.name for path in new.iterdir()) == sorted({name.split("/")[0] for name in names})


def test_a_root_of_the_host_s(
    old: Path, new: Path, image: Path, root: dict[str, Any], seen: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have what others have written since: nothing is copied, and nothing is written there."""
    (old / "log").write_text("then")
    seen.enter_context((old / "log").open("a"))
    volumes.take(str(image), list_root(root))
    monkeypatch.setattr(proc, "mounts", lambda pid: ())
    assert volumes.find_to_copy(root, BUNDLE, runs_on=True) == ()
    assert volumes.list_restored(str(image), root, BUNDLE) == frozenset()
    volumes.put_back(str(image), root, BUNDLE)
    assert list(new.iterdir()) == []


def test_it_ends_with_the_checkpoint(root: dict[str, Any]) -> None:
    assert volumes.find_to_copy(root, BUNDLE, runs_on=False) == ()


def test_more_than_is_copied(
    old: Path, root: dict[str, Any], seen: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    """The small ones are; a note has the largest of the others."""
    for name, size in (("a", 1 << 20), ("b", 1 << 16), ("c", 2 << 20), ("d", 1 << 12)):
        (old / name).write_bytes(bytes([1]) * size)
        seen.enter_context((old / name).open("ab"))
    assert [each.path for each in list_root(root, 1 << 17)] == ["b", "d"]
    said = capsys.readouterr().err
    assert "/c of the container, and 1 more of its files, can be newer in the checkpoint" in said
    assert f"process {os.getpid()} (" in said
    assert "it has 2.0 MiB" in said
    assert said.endswith("[GPS-530]\n")
    assert len(list_root(root)) == 4
    assert capsys.readouterr().err == ""


def test_a_name_that_looks_deleted(old: Path, new: Path, image: Path, seen: ExitStack) -> None:
    path = old / "odd (deleted)"
    path.write_text("odd")
    seen.enter_context(path.open())
    volumes.take(str(image), found(old))
    restore(image, old, new)
    assert (new / path.name).read_text() == "odd"


def test_what_is_there_is_replaced(old: Path, new: Path, image: Path, seen: ExitStack) -> None:
    """By a new file: whoever has the old one open keeps it as it is."""
    (old / "log").write_text("then")
    seen.enter_context((old / "log").open())
    volumes.take(str(image), found(old))
    (new / "log").write_text("later")
    with (new / "log").open() as another:
        restore(image, old, new)
        assert another.read() == "later"
    assert [path.read_text() for path in new.iterdir()] == ["then"]


def test_the_new_pod_lacks_the_volume(old: Path, new: Path, image: Path, seen: ExitStack) -> None:
    """Refused; but what is mounted there otherwise is not ours to fill."""
    (old / "log").write_text("then")
    seen.enter_context((old / "log").open())
    volumes.take(str(image), found(old))
    with pytest.raises(Refused, match="has nothing mounted at"):
        volumes.put_back(str(image), {"annotations": ANNOTATIONS, "mounts": []}, BUNDLE)
    with pytest.raises(Refused, match="has nothing mounted at"):
        restore(image, Path("/elsewhere"), new)
    other = new.parents[2] / "srv"
    other.mkdir()
    config = {"annotations": ANNOTATIONS, "mounts": [bind(str(old), str(other))]}
    volumes.put_back(str(image), config, BUNDLE)
    assert list(other.iterdir()) == []


@pytest.fixture
def memory(old: Path, image: Path, seen: ExitStack) -> Path:
    """Memory that is shared with others, in which a file and a directory were open; as it was then."""
    folder = old / "folder"
    folder.mkdir(mode=0o700)
    (folder / "segment").write_text("then")
    seen.enter_context((folder / "segment").open())
    volumes.take(str(image), found(old))
    folder.chmod(0o711)
    return folder / "segment"


def put_back_shared(image: Path, at: Path) -> None:
    targets = {str(at): Target(str(at), Existing.KEEP_USED)}
    volume_image.put_back(str(image), volume_image.IMAGE, targets, {str(at)})


def test_shared_memory_is_there(memory: Path, old: Path, image: Path, seen: ExitStack) -> None:
    """Those who share the file still do, and the directory is not ours to change."""
    before = memory.stat().st_ino
    put_back_shared(image, old)
    assert (memory.stat().st_ino, memory.read_text()) == (before, "then")
    assert stat.S_IMODE(memory.parent.stat().st_mode) == 0o711
    assert [each.name for each in memory.parent.iterdir()] == ["segment"]


def test_killed_while_it_is_written(
    memory: Path, old: Path, image: Path, seen: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left in the memory of the host."""
    seen.close()
    memory.unlink()
    listed: list[list[str]] = []

    def look(*_: object) -> None:
        listed.append(os.listdir(memory.parent))

    monkeypatch.setattr(volume_image, "_set_owner", look)
    put_back_shared(image, old)
    assert listed == [[]]
    assert memory.read_text() == "then"


def test_shared_memory_is_gone(memory: Path, old: Path, image: Path, seen: ExitStack) -> None:
    seen.close()
    memory.unlink()
    memory.parent.rmdir()
    put_back_shared(image, old)
    assert memory.read_text() == "then"
    assert stat.S_IMODE(memory.parent.stat().st_mode) == 0o700


def test_shared_memory_has_changed(memory: Path, old: Path, image: Path, seen: ExitStack) -> None:
    """Nobody has it open any more: the container itself has changed it after its checkpoint."""
    seen.close()
    memory.write_text("later")
    put_back_shared(image, old)
    assert memory.read_text() == "then"
    assert [each.name for each in memory.parent.iterdir()] == ["segment"]


@pytest.mark.parametrize("way", ["open", "mapped", "fifo"])
def test_shared_memory_is_of_another(memory: Path, old: Path, image: Path, seen: ExitStack, way: str) -> None:
    """It stays, and the restore is refused."""
    seen.close()
    memory.write_text("another")
    if way == "fifo":
        memory.unlink()
        os.mkfifo(memory)
    else:
        file = seen.enter_context(memory.open("r+b"))
        if way == "mapped":
            seen.enter_context(mmap.mmap(file.fileno(), 0))
            file.close()
    before = memory.stat().st_ino
    with pytest.raises(Refused, match="segment open, in memory that is shared with this host") as refused:
        put_back_shared(image, old)
    assert refused.value.code == "GPS-527"
    assert memory.stat().st_ino == before
    assert [each.name for each in memory.parent.iterdir()] == ["segment"]


ENTRY = {
    "volume": "/cache",
    "path": "a",
    "kind": "file",
    "mode": 0o644,
    "uid": os.getuid(),
    "gid": os.getgid(),
    "size": 4,
    "extents": [[0, 4]],
}


def write(image: Path, *entries: dict[str, Any], data: bytes = b"evil") -> None:
    document = {"version": 1, "entries": entries}
    (image / volume_image.IMAGE).write_bytes(json.dumps(document).encode() + b"\n" + data)


@pytest.mark.parametrize(
    "changed",
    [
        {"path": "../a"},
        {"path": "/a"},
        {"path": ""},
        {"path": "a//b"},
        {"path": "a/./b"},
        {"path": "a\0b"},
        {"path": 7},
        {"kind": "link"},
        {"kind": "directory"},
        {"kind": ["file"]},
        {"mode": -1},
        {"mode": True},
        {"mode": 1.5},
        {"uid": (1 << 32) - 1},
        {"size": 3},
        {"size": 1 << 62},
        {"extents": [[0, 5]]},
        {"extents": [[-1, 2]]},
        {"extents": [[0]]},
        {"extents": None},
        {"volume": None},
    ],
)
def test_an_image_that_is_none(new: Path, image: Path, changed: dict[str, Any]) -> None:
    write(image, ENTRY | changed)
    with pytest.raises(ImageError, match="is damaged, or was not written by gpusnap"):
        restore(image, Path("/cache"), new)
    assert list(new.iterdir()) == []


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]\n", b"{}\n", b'{"version": 2, "entries": []}\n', b"[" * 9999]
)
def test_no_image(new: Path, image: Path, text: bytes) -> None:
    (image / volume_image.IMAGE).write_bytes(text)
    with pytest.raises(ImageError, match="is damaged"):
        restore(image, Path("/cache"), new)


def test_an_image_that_is_cut_short(new: Path, image: Path) -> None:
    write(image, ENTRY, data=b"evi")
    with pytest.raises(ImageError, match="ends within /cache/a"):
        restore(image, Path("/cache"), new)
    assert list(new.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "directory", "fifo"])
def test_links_lead_nowhere(new: Path, image: Path, tmp_path: Path, kind: str) -> None:
    """Neither one in the volume, by whoever shares it, nor one in place of the image."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    (outside / "a").write_text("mine")
    (new / "out").symlink_to(outside)
    (new / "a").symlink_to(outside / "a")
    entry = ENTRY | {"kind": kind} | ({"extents": []} if kind != "file" else {})
    write(image, entry | {"path": "out/b"})
    with pytest.raises(ImageError, match="cannot be copied to the new container"):
        restore(image, Path("/cache"), new)
    write(image, entry)
    if kind == "file":
        restore(image, Path("/cache"), new)
        assert (new / "a").read_text() == "evil"
        assert not (new / "a").is_symlink()
    else:
        with pytest.raises(ImageError, match="cannot be copied to the new container"):
            restore(image, Path("/cache"), new)
    assert [path.name for path in outside.iterdir()] == ["a"]
    assert (outside / "a").read_text() == "mine"
    assert stat.S_IMODE(outside.stat().st_mode) == 0o700
    (image / volume_image.IMAGE).rename(tmp_path / "elsewhere")
    (image / volume_image.IMAGE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ImageError, match="cannot be read"):
        restore(image, Path("/cache"), new)


def test_no_setuid(new: Path, image: Path) -> None:
    write(
        image,
        ENTRY | {"mode": 0o6755},
        ENTRY | {"path": "d", "kind": "directory", "mode": 0o7777, "extents": []},
    )
    restore(image, Path("/cache"), new)
    assert stat.S_IMODE((new / "a").stat().st_mode) == 0o755
    assert stat.S_IMODE((new / "d").stat().st_mode) == 0o1777


def test_too_many_for_a_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = volume_image.Entry("/dev/shm", "a", "file", 0o600, 0, 0, 0, ())
    monkeypatch.setattr(volume_image, "_MOST", 2)
    assert volume_image.header([entry] * 2).count(b"/dev/shm") == 2
    with pytest.raises(ImageError, match=r"3 files in /dev/shm and its volumes.* at most 2"):
        volume_image.header([entry] * 3)
