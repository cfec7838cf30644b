"""What is kept of a checkpoint for the next one: links of the right blobs, or nothing; never an error."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from oci_regions import CEILING, PAGE, blobs, fill, load, save

from gpusnap.oci.chunks.buffers import Buffer
from gpusnap.oci.chunks.index import Known
from gpusnap.oci.chunks.table import Progress, Table
from gpusnap.oci.chunks.writer import write
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.settings import Memory
from gpusnap.runtime_shim.snapshot.memory import chunk_cache
from gpusnap.runtime_shim.snapshot.memory.chunk_cache import ChunkCache, make_room, remove_stale

ROOT = Path(__file__).parents[5]
REGION = bytearray(b"".join(fill(PAGE, kind, at) for at in range(6) for kind in ("text", "random")))
CHANGED = REGION[:-PAGE] + fill(PAGE, "random", 99)
TIGHT = os.statvfs_result((PAGE, PAGE, 10000, 400, 400, 9, 9, 9, 0, 255))


@pytest.fixture
def settings(tmp_path: Path) -> Memory:
    return Memory(pages="chunks", keep_folder=str(tmp_path / "state/kept"))


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "bundle"
    path.mkdir()
    return path


def kept_folder(settings: Memory, container: str = "c") -> Path:
    return Path(settings.keep_folder, container)


def checkpoint(
    folder: Path, settings: Memory, bundle: Path, region: bytearray = REGION, container: str = "c"
) -> tuple[Layout, tuple[Table, ...], int]:
    """What a checkpoint with --leave-running does; its layout, its tables, and bytes of new blobs."""
    said: list[Progress] = []
    with ChunkCache.open(settings, container, str(bundle)) as kept:
        layout = Layout(folder).create()
        tables = write(
            [Buffer(region)],
            layout,
            threads=2,
            ceiling=CEILING,
            chunk_size=PAGE,
            known=kept.known,
            progress=said.append,
        )
        layout.sync()
        kept.keep(layout, tables)
    return layout, tables, said[-1].written


def names(tables: tuple[Table, ...]) -> set[str]:
    return {chunk.blob.removeprefix("sha256:") for table in tables for chunk in table.chunks}


def blob_of(settings: Memory, at: int = 0) -> Path:
    """One of the blobs that are kept."""
    return sorted((kept_folder(settings) / "blobs/sha256").iterdir())[at]


def test_a_second_checkpoint_writes_nothing(tmp_path: Path, settings: Memory, bundle: Path) -> None:
    """The image is removed, as Podman does it, and the next one has all blobs again by links alone."""
    _, _, first = checkpoint(tmp_path / "1", settings, bundle)
    shutil.rmtree(tmp_path / "1")
    layout, tables, second = checkpoint(tmp_path / "2", settings, bundle)
    assert (first > 0, second) == (True, 0)
    shutil.rmtree(kept_folder(settings))
    assert load(layout, tables) == [REGION]


def test_no_byte_is_written(tmp_path: Path, settings: Memory, bundle: Path) -> None:
    """What is kept are the image's own files, for their owner alone; nothing unfinished lies about."""
    layout, tables, _ = checkpoint(tmp_path / "1", settings, bundle)
    assert set(blobs(kept_folder(settings))) == names(tables)
    for name in names(tables):
        mine = kept_folder(settings) / "blobs/sha256" / name
        assert os.path.samefile(mine, Path(layout.path, "blobs/sha256", name))
    for path in [kept_folder(settings), *kept_folder(settings).rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE(os.stat(settings.keep_folder).st_mode) == 0o700


def test_only_the_last_checkpoint_is_kept(tmp_path: Path, settings: Memory, bundle: Path) -> None:
    """One chunk that changed is written, and what it held before is not kept any longer."""
    _, before, _ = checkpoint(tmp_path / "1", settings, bundle)
    shutil.rmtree(tmp_path / "1")
    _, after, written = checkpoint(tmp_path / "2", settings, bundle, CHANGED)
    assert written == PAGE
    assert names(before) != names(after)
    assert set(blobs(kept_folder(settings))) == names(after)


def test_known_chunks_need_no_fsync(
    tmp_path: Path, settings: Memory, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeping syncs no blob: they are durable by then."""
    layout = Layout(tmp_path / "1").create()
    tables = save(layout, REGION)
    layout.sync()
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    )
    with ChunkCache.open(settings, "c", str(bundle)) as kept:
        kept.keep(layout, tables)
    assert synced
    assert not [path for path in synced if Path(path).name in names(tables)]


def bump(path: Path) -> None:
    """Have it changed at another time: the kernel's clock may not have ticked on since it was written."""
    now = path.stat().st_mtime_ns
    os.utime(path, ns=(now, now + 1))


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    bump(path)


def other_file(path: Path) -> None:
    """The same bytes, size and time, in a file that nobody has made durable."""
    copy = path.with_name("copy")
    shutil.copy2(path, copy)
    copy.rename(path)


def first(path: Path) -> Path:
    return min((path / "blobs/sha256").iterdir())


def record_of_another(path: Path) -> None:
    (path / "kept.json").write_text('{"version": 1, "bundle": "/other"}')


def record_a_folder(path: Path) -> None:
    (path / "kept.json").unlink()
    (path / "kept.json").mkdir()


def index_in_a_pipe(path: Path) -> None:
    (path / "known.json").unlink()
    os.mkfifo(path / "known.json")


def blobs_elsewhere(path: Path) -> None:
    away = path.parent.parent / "away"
    (path / "blobs").rename(away)
    (path / "blobs").symlink_to(away)


def all_flipped(path: Path) -> None:
    for each in (path / "blobs/sha256").iterdir():
        flipped(each)


def plain_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("mine")


# What may have happened to it, and whether the checkpoint after it is kept again.
HARM: dict[str, tuple[Callable[[Path], object], bool]] = {
    "all of it gone": (shutil.rmtree, True),
    "not one": (lambda path: (path / "kept.json").rename(path.parent / "x"), True),
    "record cut off": (lambda path: os.truncate(path / "kept.json", 9), True),
    "record of another": (record_of_another, True),
    "record the directory": (record_a_folder, False),
    "not an index": (lambda path: (path / "known.json").rename(path.parent / "x"), True),
    "index of nonsense": (lambda path: (path / "known.json").write_bytes(b"\xff{"), True),
    "index in a pipe": (index_in_a_pipe, True),
    "no blobs": (lambda path: shutil.rmtree(path / "blobs"), True),
    "blobs elsewhere": (blobs_elsewhere, False),
    "a blob gone": (lambda path: first(path).rename(path.parent / "x"), True),
    "a blob cut off": (lambda path: os.truncate(first(path), 5), True),
    "a blob flipped": (lambda path: flipped(first(path)), True),
    "all blobs flipped": (all_flipped, True),
    "a blob in another file": (lambda path: other_file(first(path)), True),
    "no marker": (lambda path: (path / "oci-layout").rename(path.parent / "x"), True),
    "marker of nonsense": (lambda path: (path / "oci-layout").write_text("[]"), False),
    "a plain file": (plain_file, False),
    "open to others": (lambda path: path.chmod(0o777), False),
    "open to others above": (lambda path: path.parent.chmod(0o777), False),
}


@pytest.mark.parametrize("harm", HARM)
def test_whatever_happens_to_it(tmp_path: Path, settings: Memory, bundle: Path, harm: str) -> None:
    """The next checkpoint is right without any of it, and so is the one after, which links to it."""
    do, again = HARM[harm]
    checkpoint(tmp_path / "1", settings, bundle)
    shutil.rmtree(tmp_path / "1")
    do(kept_folder(settings))
    layout, tables, _ = checkpoint(tmp_path / "2", settings, bundle)
    assert load(layout, tables) == [REGION]
    shutil.rmtree(tmp_path / "2")
    layout, tables, written = checkpoint(tmp_path / "3", settings, bundle)
    assert load(layout, tables) == [REGION]
    assert (written == 0) == again


def test_a_damaged_blob_does_not_stay(tmp_path: Path, settings: Memory, bundle: Path) -> None:
    """A blob of the right size and the wrong bytes is replaced, and not taken for a good one afterwards."""
    checkpoint(tmp_path / "1", settings, bundle)
    shutil.rmtree(tmp_path / "1")
    path = blob_of(settings)
    flipped(path)
    _, _, written = checkpoint(tmp_path / "2", settings, bundle)
    assert written == path.stat().st_size
    assert digest_of(path.read_bytes()) == f"sha256:{path.name}"


def steps(monkeypatch: pytest.MonkeyPatch, end_at: int) -> None:
    """End this process, as SIGKILL does, before the n-th change of a folder."""
    left = [end_at]

    def before(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    for name in ("mkdir", "link", "rename", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, before(getattr(os, name)))


def killed_at(step: int, do: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a process that does it was killed before it had done that many steps."""
    child = os.fork()
    if not child:
        code = 1
        try:
            steps(monkeypatch, step)
            do()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("what", ["first", "next", "drop"])
def test_killed_at_every_step(
    tmp_path: Path, settings: Memory, bundle: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Whenever it is: what is found is right, and the next `keep` leaves no trace."""
    small = bytearray(REGION[: 4 * PAGE])
    step = 0
    while True:
        one, _, _ = checkpoint(tmp_path / f"one-{step}", settings, bundle, small)
        if what == "first":
            shutil.rmtree(settings.keep_folder)
        two = Layout(tmp_path / f"two-{step}").create()
        tables = save(two, CHANGED)
        two.sync()

        def do(two: Layout = two, tables: tuple[Table, ...] = tables) -> None:
            kept = ChunkCache.open(settings, "c", str(bundle))
            if what == "drop":
                kept.drop()
            else:
                kept.keep(two, tables)

        killed = killed_at(step, do, monkeypatch)
        for region in (small, CHANGED):
            layout, found, _ = checkpoint(tmp_path / f"after-{step}", settings, bundle, region)
            assert load(layout, found) == [region]
            assert set(blobs(kept_folder(settings))) == names(found)
            shutil.rmtree(layout.path)
        assert not [path for path in kept_folder(settings).iterdir() if path.name.startswith(".")]
        shutil.rmtree(one.path)
        shutil.rmtree(two.path)
        if not killed:
            break
        step += 1
    assert step > 5


def test_on_another_file_system(
    tmp_path: Path, small_disk: Path, settings: Memory, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is copied there, and the one sentence about it names the setting; what was kept goes."""
    checkpoint(tmp_path / "1", settings, bundle)
    layout, tables, _ = checkpoint(small_disk / "2", settings, bundle)
    assert load(layout, tables) == [REGION]
    assert not kept_folder(settings).exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{settings.keep_folder} is on another file system than {layout.path}" in line
    assert "container c is not kept" in line
    assert "set memory.keep-folder to" in line


def test_on_another_mount(
    tmp_path: Path,
    settings: Memory,
    bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No link leads from one mount of a file system to another (EXDEV), though the device is the same."""

    def link(*_args: object, **_options: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    layout = Layout(tmp_path / "1").create()
    tables = save(layout, REGION)
    monkeypatch.setattr(os, "link", link)
    with ChunkCache.open(settings, "c", str(bundle)) as kept:
        kept.keep(layout, tables)
    assert "is on another file system than" in capsys.readouterr().err
    assert not kept_folder(settings).exists()


def test_a_tight_disk(
    tmp_path: Path,
    settings: Memory,
    bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where little is free nothing is kept, and what was kept is removed."""
    checkpoint(tmp_path / "1", settings, bundle)
    assert kept_folder(settings).exists()
    monkeypatch.setattr(os, "statvfs", lambda _path: TIGHT)
    checkpoint(tmp_path / "2", settings, bundle)
    assert not kept_folder(settings).exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert "has only 1.6 MiB free, but 2.0 MiB must remain free" in line


def test_a_full_disk(small_disk: Path, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A disk without a byte left is no error either."""
    settings = Memory(keep_folder=str(small_disk / "kept"))
    layout = Layout(small_disk / "1").create()
    tables = save(layout, REGION)
    with suppress(OSError), (small_disk / "fill").open("wb", buffering=0) as file:
        while file.write(bytes(PAGE)):
            pass
    with ChunkCache.open(settings, "c", str(bundle)) as kept:
        kept.keep(layout, tables)
    assert "has only 0 B free" in capsys.readouterr().err
    assert not (small_disk / "kept/c").exists()
    assert load(layout, tables) == [REGION]


@pytest.mark.parametrize("folder", ["/proc/none/kept", "/dev/null/kept"])
def test_no_folder_can_be_made(
    tmp_path: Path, bundle: Path, capsys: pytest.CaptureFixture[str], folder: str
) -> None:
    """A folder that cannot be is said to be so, in one sentence."""
    checkpoint(tmp_path / "1", Memory(keep_folder=folder), bundle)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{folder}/c cannot be used: " in line


def test_the_folder_may_be_a_link(tmp_path: Path, settings: Memory, bundle: Path) -> None:
    """An administrator may have it elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    linked = replace(settings, keep_folder=str(tmp_path / "link"))
    checkpoint(tmp_path / "1", linked, bundle)
    assert checkpoint(tmp_path / "2", linked, bundle)[2] == 0


@pytest.mark.parametrize("container", ["../c", "", ".c", "a/b", "x" * 300])
def test_an_id_that_names_no_folder(tmp_path: Path, settings: Memory, bundle: Path, container: str) -> None:
    """Nothing is kept for it, and nothing is made outside the folder."""
    checkpoint(tmp_path / "1", settings, bundle, container=container)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "bundle", "state"]
    assert list(Path(settings.keep_folder).iterdir()) == []


def test_a_container_that_is_gone(tmp_path: Path, settings: Memory, bundle: Path) -> None:
    """The checkpoint of another container removes what is kept of it, also one that ends its container."""
    other = tmp_path / "other"
    other.mkdir()
    checkpoint(tmp_path / "1", settings, other, container="gone")
    checkpoint(tmp_path / "2", settings, bundle, container="there")
    assert sorted(os.listdir(settings.keep_folder)) == ["gone", "there"]
    other.rmdir()
    with ChunkCache.open(settings, "third", str(bundle)) as kept:
        assert sorted(os.listdir(settings.keep_folder)) == ["gone", "there"]
        kept.drop()
    assert os.listdir(settings.keep_folder) == ["there"]


def test_two_containers_at_once(tmp_path: Path, settings: Memory, bundle: Path) -> None:
    """Neither is in the other's way, and what one uses the other does not remove."""
    other = tmp_path / "other"
    other.mkdir()
    checkpoint(tmp_path / "1", settings, bundle, container="a")
    checkpoint(tmp_path / "2", settings, other, container="b")
    with (
        ChunkCache.open(settings, "a", str(bundle)) as one,
        ChunkCache.open(settings, "b", str(other)) as two,
    ):
        assert one.known is not None
        assert two.known is not None
        other.rmdir()
        remove_stale(settings)
        make_room(settings, str(tmp_path), 1 << 62, container="c")
        assert sorted(os.listdir(settings.keep_folder)) == ["a", "b"]
    remove_stale(settings)
    assert os.listdir(settings.keep_folder) == ["a"]


def test_the_same_container_twice_at_once(
    tmp_path: Path, settings: Memory, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The journal keeps them apart; if it did not, the second would find nothing, and keep nothing."""
    layout, tables, _ = checkpoint(tmp_path / "1", settings, bundle)
    with (
        ChunkCache.open(settings, "c", str(bundle)) as one,
        ChunkCache.open(settings, "c", str(bundle)) as two,
    ):
        assert one.known is not None
        assert two.known is None
        two.keep(layout, tables)
        assert "another gpusnap is working on" in capsys.readouterr().err
        assert set(blobs(kept_folder(settings))) == names(tables)
    with ChunkCache.open(settings, "c", str(bundle)) as three:
        assert three.known is not None


def test_the_lock_of_one_that_was_killed(tmp_path: Path, settings: Memory, bundle: Path) -> None:
    """It ends with its process."""
    checkpoint(tmp_path / "1", settings, bundle)
    program = (
        "import sys; from gpusnap.runtime_shim.snapshot.memory.chunk_cache import ChunkCache; "
        "from gpusnap.runtime_shim.settings import Memory\n"
        "kept = ChunkCache.open(Memory(keep_folder=sys.argv[1]), 'c', sys.argv[2])\n"
        "print(kept.known is not None, flush=True); sys.stdin.read()"
    )
    words = [sys.executable, "-B", "-c", program, settings.keep_folder, str(bundle)]
    with subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        with ChunkCache.open(settings, "c", str(bundle)) as kept:
            assert kept.known is None
        holder.kill()
    with ChunkCache.open(settings, "c", str(bundle)) as kept:
        assert kept.known is not None


def test_removed_while_it_is_used(
    tmp_path: Path, settings: Memory, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`rm -r` is safe at any moment: what is missing is written, and the checkpoint is kept."""
    checkpoint(tmp_path / "1", settings, bundle)
    layout = Layout(tmp_path / "2").create()
    with ChunkCache.open(settings, "c", str(bundle)) as kept:
        shutil.rmtree(settings.keep_folder)
        tables = write(
            [Buffer(REGION)], layout, threads=2, ceiling=CEILING, chunk_size=PAGE, known=kept.known
        )
        layout.sync()
        kept.keep(layout, tables)
    assert load(layout, tables) == [REGION]
    assert capsys.readouterr().err == ""
    assert checkpoint(tmp_path / "3", settings, bundle)[2] == 0


def test_dropped(tmp_path: Path, settings: Memory, bundle: Path) -> None:
    """After a checkpoint that ends the container nothing is kept of it, and of others all."""
    checkpoint(tmp_path / "1", settings, bundle)
    checkpoint(tmp_path / "2", settings, bundle, container="other")
    with ChunkCache.open(settings, "c", str(bundle)) as kept:
        kept.drop()
    assert os.listdir(settings.keep_folder) == ["other"]


def test_only_zeros(tmp_path: Path, settings: Memory, bundle: Path) -> None:
    """A checkpoint without chunks has nothing to be kept, and ends what was."""
    checkpoint(tmp_path / "1", settings, bundle)
    checkpoint(tmp_path / "2", settings, bundle, bytearray(9 * PAGE))
    assert not kept_folder(settings).exists()


def test_switched_off(
    tmp_path: Path, settings: Memory, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With memory.keep = false nothing is used or kept, and all that was is removed, without a word."""
    checkpoint(tmp_path / "1", settings, bundle)
    checkpoint(tmp_path / "2", settings, bundle, container="other")
    _, _, written = checkpoint(tmp_path / "3", replace(settings, keep=False), bundle)
    assert written > 0
    assert os.listdir(settings.keep_folder) == []
    assert capsys.readouterr().err == ""


def test_what_is_not_ours_stays(tmp_path: Path, settings: Memory, bundle: Path) -> None:
    """Other folders there, other files in ours, and layouts of other people are never removed."""
    checkpoint(tmp_path / "1", settings, bundle)
    folder = Path(settings.keep_folder)
    theirs = Layout(folder / "model").create()
    theirs.add_blob(b"weights")
    (folder / "c/notes.txt").write_text("mine")
    (folder / "c/blobs/sha256/README").write_text("mine too")
    (folder / "file").write_text("and this")
    (folder / "link").symlink_to("/")
    off = replace(settings, keep=False)
    make_room(off, str(tmp_path), 1 << 62, container="c")
    with ChunkCache.open(off, "c", str(bundle)) as kept:
        kept.drop()
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    marker = ["c/blobs/sha256/README", "c/notes.txt", "file"]
    blob = digest_of(b"weights").removeprefix("sha256:")
    assert left == [*marker, f"model/blobs/sha256/{blob}", "model/oci-layout"]


def test_make_room(tmp_path: Path, settings: Memory, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go until there is room, the container's own last; none where there is enough."""
    for at, container in enumerate(("own", "old", "new")):
        checkpoint(tmp_path / container, settings, bundle, container=container)
        os.utime(kept_folder(settings, container) / "known.json", ns=(at, at))
    make_room(settings, str(tmp_path), 1, container="own")
    assert sorted(os.listdir(settings.keep_folder)) == ["new", "old", "own"]
    # As much is free as sets are gone.
    monkeypatch.setattr(chunk_cache, "_count_free", lambda _path: 3 - len(os.listdir(settings.keep_folder)))
    make_room(settings, str(tmp_path), 1, container="own")
    assert sorted(os.listdir(settings.keep_folder)) == ["new", "own"]
    make_room(settings, str(tmp_path), 2, container="own")
    assert os.listdir(settings.keep_folder) == ["own"]
    make_room(settings, str(tmp_path), 3, container="own")
    assert os.listdir(settings.keep_folder) == []


def test_no_room_is_made_elsewhere(tmp_path: Path, small_disk: Path, settings: Memory, bundle: Path) -> None:
    """For an image on another file system nothing is removed; without the folder nothing happens at all."""
    make_room(settings, str(small_disk), 1 << 62, container="c")
    checkpoint(tmp_path / "1", settings, bundle)
    make_room(settings, str(small_disk), 1 << 62, container="c")
    make_room(settings, str(tmp_path / "none"), 1 << 62, container="c")
    assert kept_folder(settings).exists()


def test_a_blob_of_the_image_that_changed(
    tmp_path: Path, settings: Memory, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that has another size than its chunk by now is not kept, and said to be so."""
    layout = Layout(tmp_path / "1").create()
    tables = save(layout, REGION)
    name = min(names(tables))
    os.truncate(Path(layout.path, "blobs/sha256", name), 3)
    with ChunkCache.open(settings, "c", str(bundle)) as kept:
        kept.keep(layout, tables)
    assert f"the blob {name} has changed since it was written" in capsys.readouterr().err
    assert not kept_folder(settings).exists()


def test_no_descriptor_is_left(tmp_path: Path, settings: Memory, bundle: Path) -> None:
    """Whether it went well or not, and though `close` is called twice."""
    before = len(os.listdir("/proc/self/fd"))
    checkpoint(tmp_path / "1", settings, bundle)
    with ChunkCache.open(settings, "c", str(bundle)) as kept:
        kept.keep(Layout(tmp_path / "none"), save(Layout(tmp_path / "1"), CHANGED))
        kept.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_index_is_this_containers(tmp_path: Path, settings: Memory, bundle: Path) -> None:
    """All that is known lies in the container's own folder."""
    _, tables, _ = checkpoint(tmp_path / "1", settings, bundle)
    known = Known(kept_folder(settings) / "known.json")
    for chunk in tables[0].chunks:
        place = known.find(chunk.plain)
        assert place is not None
        assert place.layout == str(kept_folder(settings))
