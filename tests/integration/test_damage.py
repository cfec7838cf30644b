"""Archives that are damaged, or mean harm: refused by a restore and by verify alike, without a wait."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import waiting
from support import DEADLINE, RUNTIME, STORAGE, Container, Done, good, podman, run, sentence, until

from gpusnap.runtime_shim.process import proc

GPUSNAP = "/usr/local/bin/gpusnap"
Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(host: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An archive of a container with GPU 0, unpacked; each test takes a copy."""
    folder = tmp_path_factory.mktemp("whole")
    container = Container.start("w", "--mib", "4", gpus=("0",))
    good(container.checkpoint(folder / "whole.tar", "--compress", "none"))
    container.remove()
    (folder / "unpacked").mkdir()
    good(run("tar", "-C", folder / "unpacked", "-xpf", folder / "whole.tar"))
    yield folder / "unpacked"
    shutil.rmtree(folder)


@pytest.fixture
def unpacked(whole: Path, crun: None, tmp_path: Path) -> Path:
    good(run("cp", "-a", whole, tmp_path / "unpacked"))
    return tmp_path / "unpacked"


def packed(folder: Path) -> Path:
    archive = folder.parent / "changed.tar"
    good(run("tar", "-C", folder, "-cf", archive, "."))
    return archive


def nothing_left() -> None:
    assert good(podman("ps", "--quiet")) == ""
    # Podman's own clean-up calls the runtime behind a container that has ended.
    until(lambda: not run("pgrep", "-x", "gpuwork|criu|crun").out, "the end of every process of the restore")
    assert not list(Path("/run/gpusnap/journal").glob("*.restore"))


def both_refuse(folder: Path) -> tuple[str, Done]:
    """What the restore says of an archive, and verify, which has exit code 4."""
    archive = packed(folder)
    text = sentence(podman("container", "restore", "--import", archive))
    nothing_left()
    told = run(GPUSNAP, "verify", archive)
    assert told.code == 4, f"verify accepts it: {told.out}{told.err}"
    return text, told


def pages(folder: Path) -> Path:
    """The largest image of pages."""
    return max((folder / "checkpoint").glob("pages-*.img"), key=lambda path: path.stat().st_size)


def shorten(size: Callable[[int], int]) -> Edit:
    return lambda folder: os.truncate(pages(folder), size(pages(folder).stat().st_size))


def replaced(name: str, make: Callable[[Path], object]) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / "checkpoint" / name
        path.unlink(missing_ok=True)
        make(path)

    return edit


def linked(folder: Path) -> None:
    path = pages(folder)
    path.rename(folder / "elsewhere")
    path.symlink_to("../elsewhere")


def flip(folder: Path) -> None:
    """One bit in the middle of a page, where nobody but a digest sees it."""
    path = pages(folder)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


DAMAGE: dict[str, tuple[Edit, str]] = {
    "pages a page short": (shorten(lambda size: size - 4096), "pages-"),
    "pages emptied": (shorten(lambda size: 0), "pages-"),
    "pages halved": (shorten(lambda size: size // 2), "pages-"),
    "pages are a link": (linked, "a regular file"),
    "pages are a directory": (replaced("pages-1.img", Path.mkdir), "a regular file"),
    "a pagemap cut short": (lambda folder: os.truncate(folder / "checkpoint/pagemap-1.img", 30), "pagemap-1"),
    "a core cut short": (lambda folder: os.truncate(folder / "checkpoint/core-1.img", 200), "core-1.img"),
    "no pagemap": (lambda folder: (folder / "checkpoint/pagemap-1.img").unlink(), "pagemap-1.img"),
}


def test_a_bit_of_a_page(unpacked: Path) -> None:
    """CRIU restores it; before a GPU process goes on it is found, and nothing is left of the container."""
    flip(unpacked)
    text, told = both_refuse(unpacked)
    assert "has changed since the dump: its digest differs" in text
    assert "has changed since the dump: its digest differs" in told.out


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_images(unpacked: Path, name: str) -> None:
    """CRIU is not started, where it would loop; verify says the same."""
    edit, said = DAMAGE[name]
    edit(unpacked)
    text, told = both_refuse(unpacked)
    assert said in text
    assert said in told.out


def test_unchanged(unpacked: Path) -> None:
    """Packed again as it was, it is right to both."""
    archive = packed(unpacked)
    good(run(GPUSNAP, "verify", archive))
    Container.restore("w", archive).goes_on()


@pytest.mark.parametrize("name", ["core-1.img", "mountpoints-999.img"])
def test_a_fifo_is_not_waited_for(unpacked: Path, name: str) -> None:
    """`podman container restore --import` of an archive with a FIFO ends at once."""
    replaced(name, os.mkfifo)(unpacked)
    text, _ = both_refuse(unpacked)
    assert name in text
    assert "FIFO" in text


@pytest.mark.parametrize("name", ["config.dump", "spec.dump"])
def test_podman_does_not_wait_for_a_fifo(unpacked: Path, name: str) -> None:
    """`gpusnap restore` refuses an archive that Podman would open a FIFO of."""
    (unpacked / name).unlink()
    os.mkfifo(unpacked / name)
    done = run(GPUSNAP, "restore", packed(unpacked))
    assert done.code == 4
    text = sentence(done)
    assert name in text
    assert "FIFO" in text
    nothing_left()


def manifest_of(folder: Path) -> Path:
    return folder / "checkpoint/gpusnap/manifest.json"


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)


MANIFESTS: dict[str, Callable[[Path], object]] = {
    "none": lambda path: None,
    "pending": lambda path: path.with_name("manifest.pending").write_text("{}"),
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "directory": Path.mkdir,
    "too large": large,
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_without_a_manifest(unpacked: Path, name: str) -> None:
    """None, one that was not finished, a link, a directory, and one above 64 MiB."""
    path = manifest_of(unpacked)
    path.unlink()
    MANIFESTS[name](path)
    assert "manifest" in both_refuse(unpacked)[0]


def fewer(document: dict[str, Any]) -> str:
    document["processes"] = []
    return json.dumps(document)


def rows_swapped(document: dict[str, Any]) -> str:
    chunks = document["processes"][0]["regions"][0]["chunks"]
    assert len(chunks) > 0
    del chunks[0]
    return json.dumps(document)


def twice(document: dict[str, Any]) -> str:
    return json.dumps(document).removesuffix("}") + ', "processes": []}'


@pytest.mark.parametrize("change", [fewer, rows_swapped, twice])
def test_a_manifest_that_was_changed(unpacked: Path, change: Callable[[dict[str, Any]], str]) -> None:
    """It is none that the checkpoint was written with, though it is a right one."""
    path = manifest_of(unpacked)
    path.write_text(change(json.loads(path.read_text())))
    assert "manifest" in both_refuse(unpacked)[0]


@pytest.mark.parametrize("name", ["gpusnap-restore.json", "restore.log", "stats-restore"])
def test_no_link_is_followed_by_what_a_restore_writes(unpacked: Path, tmp_path: Path, name: str) -> None:
    """An archive with a link where gpusnap and CRIU write: the file that it leads to stays as it was."""
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    (unpacked / name).unlink(missing_ok=True)
    (unpacked / name).symlink_to(precious)
    again = Container.restore("w", packed(unpacked), "--keep")
    again.goes_on()
    assert precious.read_text() == "as it was"
    written = STORAGE / again.id / "userdata" / name
    assert not written.is_symlink()
    assert written.stat().st_size > 0
    if name == "gpusnap-restore.json":
        assert written.stat().st_mode & 0o777 == 0o600


# A runtime whose CRIU never ends. It has written some of its log, and started what a restore starts.
ENDLESS = """#!/bin/sh
case "$*" in
*\\ restore\\ *) ;;
*) exec /usr/bin/crun "$@" ;;
esac
setsid sleep 543 &
setsid sh -c 'sleep 542 & sleep 541' &
{log}
touch {started}
wait
"""


def endless(folder: Path, log: str = "") -> Path:
    runtime = folder / "crun"
    started = folder / "started"
    runtime.write_text(ENDLESS.format(started=started, log=log))
    runtime.chmod(0o755)
    return started


def sleepers() -> str:
    return run("pgrep", "-f", "^sleep 54[123]$").out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("detach", [True, False], ids=["detached", "in the foreground"])
def test_a_signal_ends_a_restore_that_makes_no_progress(
    unpacked: Path, tmp_path: Path, number: signal.Signals, detach: bool
) -> None:
    """At once, and nothing that the runtime started is left, whoever its parent has become."""
    from shimhost import write_settings

    started = endless(tmp_path)
    write_settings(f'runtime = "{tmp_path}/crun"\n')
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    shutil.copy(unpacked / "spec.dump", bundle / "config.json")
    images = unpacked / "checkpoint"
    words = ["--image-path", str(images), "--work-path", str(tmp_path), "--bundle", str(bundle)]
    words += ["--detach"] * detach
    with waiting.Process(
        [RUNTIME, "restore", *words, "c0ffee"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as shim:
        try:
            until(lambda: started.exists() and len(sleepers().split()) == 3, "all that the runtime starts")
        finally:
            shim.send_signal(number)
        assert shim.stderr is not None
        said = shim.stderr.read()
        assert waiting.end(shim, DEADLINE) != 0
    assert f"stopped by {number.name}" in said
    assert sleepers() == ""
    nothing_left()


def test_the_log_of_criu_is_bounded(unpacked: Path, tmp_path: Path) -> None:
    """A CRIU that writes without end is ended, and the sentence says why."""
    from shimhost import write_settings

    log = tmp_path / "restore.log"
    endless(tmp_path, f"truncate -s 257M {log}")
    write_settings(f'runtime = "{tmp_path}/crun"\n')
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    shutil.copy(unpacked / "spec.dump", bundle / "config.json")
    done = run(
        RUNTIME, "restore", "--detach", "--image-path", unpacked / "checkpoint", "--work-path", tmp_path,
        "--bundle", bundle, "c0ffee",
    )  # fmt: skip
    assert f"its log {log} exceeded 256 MiB" in done.err
    assert done.code != 0
    assert sleepers() == ""
    nothing_left()


def named(comm: str) -> list[int]:
    """The processes of that name."""
    return [pid for pid in proc.pids() if proc.comm(pid) == comm]


def runtimes() -> list[int]:
    """The processes of gpusnap-runtime."""
    ours = re.compile(r"^/opt/gpusnap/bin/python .*/gpusnap-runtime ")
    return [pid for pid in proc.pids() if ours.match(" ".join(proc.command(pid) or ()))]


# Three moments of a restore at which CRIU starts an action script (criu(8)): the first, and the last two.
MOMENTS = ("setup-namespaces", "post-restore", "pre-resume")
WAITS = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = {moment} ] || exit 0
touch {met}
exec sleep 600
"""


def test_a_signal_while_criu_restores(unpacked: Path, tmp_path: Path) -> None:
    """With the real runtime and the real CRIU: nothing is left, and the next restore works."""
    from shimhost import write_settings

    archive = packed(unpacked)
    for moment in MOMENTS:
        script, met = tmp_path / "script", tmp_path / moment
        script.write_text(WAITS.format(moment=moment, met=met))
        script.chmod(0o755)
        write_settings(f'runtime = "crun"\n[criu]\naction-script = "{script}"\n')
        with waiting.Process(
            ["podman", "--runtime", "gpusnap-runtime", "container", "restore", "--import", archive],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as restore:
            until(lambda met=met: met.exists() or restore.poll() is not None, moment)  # type: ignore[misc]
            assert named("criu")
            for pid in runtimes():
                os.kill(pid, signal.SIGTERM)
            assert restore.stderr is not None
            assert "stopped by SIGTERM" in restore.stderr.read()
            waiting.end(restore, DEADLINE)
        podman("rm", "--force", "--all", "--time", "0")
        nothing_left()
    write_settings('runtime = "crun"\n')
    Container.restore("w", archive).goes_on()
