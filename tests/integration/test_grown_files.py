"""Files that a container had open for writing, and to which it has written after its checkpoint."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from storehost import empty_store, gpusnap
from support import GPUWORK_LINE, Container, Done, good, podman, sentence, until

from gpusnap.oci.store.store import Store

# The log is not open for appending, as a file of TensorBoard's or a CSV file.
WRITING = """
exec 5>{log}; n=0
while :; do n=$((n + 1)); echo "line $n" >&5; sleep 0.02; done &
exec {gpuwork}
"""


# A file like a database's, of which the memory knows all; and files that are renamed when they are whole.
CHANGING = """
n=0; exec 5<>/n; echo 0 >/n
while :; do
    read v </n; [ "$v" = $n ] || echo "memory $n, file $v"
    n=$((n + 1)); echo $n 1<>/n
done &
while :; do k=$((k + 1)); exec 6>/part$k; echo $k >&6; sleep 0.05; mv /part$k /whole; done &
exec {gpuwork}
""".format(gpuwork=" ".join(GPUWORK_LINE))


@pytest.fixture
def store(crun: None) -> Iterator[Store]:
    with empty_store() as found:
        yield found


def start(log: str, *options: str) -> Container:
    script = WRITING.format(log=log, gpuwork=" ".join(GPUWORK_LINE))
    return Container.start("w", options=options, script=script)


def checkpoint(way: str, archive: Path) -> None:
    """One that leaves it running, until it has written on."""
    if way == "podman":
        good(podman("container", "checkpoint", "--leave-running", "--export", archive, "w"))
    else:
        good(gpusnap("checkpoint", "--leave-running", "w"))


def restore(way: str, archive: Path) -> Done:
    if way == "podman":
        return podman("container", "restore", "--import", archive)
    return gpusnap("restore", "w")


def whole(log: Path) -> int:
    """The lines: none is missing, and none is there twice."""
    numbers = [int(number) for number in re.findall(r"line (\d+)\n", log.read_text())]
    assert numbers == list(range(1, len(numbers) + 1))
    return len(numbers)


@pytest.mark.parametrize("way", ["podman", "store"])
def test_in_the_container(store: Store, tmp_path: Path, way: str) -> None:
    """The engine has read it after the dump. It is cut to what the memory knows of."""
    container = start("/log", "-v", f"{tmp_path}:/other")
    checkpoint(way, tmp_path / "a.tar.zst")
    container.remove()
    done = restore(way, tmp_path / "a.tar.zst")
    good(done)
    container.goes_on()
    log = Path(f"/proc/{container.pid}/root/log")
    before = whole(log)
    until(lambda: whole(log) > before + 5, "it writes on")


def has_changed(file: Path, before: int) -> bool:
    """Whether there is another file of this name."""
    return file.stat().st_ino != before


@pytest.mark.parametrize("way", ["podman", "store"])
def test_files_that_change_and_files_that_go(store: Store, tmp_path: Path, way: str) -> None:
    """The engine reads them some moments after the dump; they come back as they were at the dump."""
    container = Container.start("w", script=CHANGING)
    for _ in range(3):
        checkpoint(way, tmp_path / "a.tar.zst")
        container.remove()
        good(restore(way, tmp_path / "a.tar.zst"))
        container.goes_on()
        renamed = Path(f"/proc/{container.pid}/root/whole")
        before = renamed.stat().st_ino
        until(partial(has_changed, renamed, before), "it renames files")
        assert re.findall(r"memory \d+, file \d*", container.log()) == []


def test_in_a_directory_of_the_host(store: Store, tmp_path: Path) -> None:
    """What it has written since is not removed by gpusnap; the message has the command."""
    log = tmp_path / "data/the log"
    log.parent.mkdir()
    container = start("'/data/the log'", "-v", f"{log.parent}:/data")
    checkpoint("store", tmp_path)
    before = whole(log)
    until(lambda: whole(log) > before + 5, "it writes on")
    container.remove()
    text, size = log.read_text(), log.stat().st_size
    said = sentence(gpusnap("restore", "w"))
    assert f"{log}, which the container has open for writing as /data/the log, has grown from" in said
    assert said.endswith("[GPS-528]")
    assert log.read_text() == text
    assert podman("container", "exists", "w").code == 1
    (command,) = re.findall(r"then: (truncate --size .*) \[GPS-528\]", said)
    subprocess.run(["sh", "-c", command], check=True)
    assert log.stat().st_size < size
    good(gpusnap("restore", "w"))
    container.goes_on()
    before = whole(log)
    until(lambda: whole(log) > before + 5, "it writes on")
    container.remove()
    log.write_text("line 1\n")
    assert "what a process has written to it is gone" in sentence(gpusnap("restore", "w"))


def test_with_the_setting(store: Store, tmp_path: Path) -> None:
    """As for a file of the container's own."""
    log = tmp_path / "data/log"
    log.parent.mkdir()
    annotation = ("--annotation", "io.gpusnap.criu.cut-files=true")
    container = start("/data/log", "-v", f"{log.parent}:/data", *annotation)
    checkpoint("store", tmp_path)
    before = whole(log)
    until(lambda: whole(log) > before + 5, "it writes on")
    container.remove()
    good(gpusnap("restore", "w"))
    container.goes_on()
    before = whole(log)
    until(lambda: whole(log) > before + 5, "it writes on")


def test_a_file_that_shrinks(store: Store) -> None:
    """Podman leaves out all later files, logs it and succeeds: no such checkpoint is stored."""
    script = (
        "mkdir /f; (while :; do truncate -s 300M /f/a; sleep 0.02; truncate -s 1K /f/a; done) & "
        f"echo kept >/f/b; exec {' '.join(GPUWORK_LINE)}"
    )
    container = Container.start("w", script=script)
    # Podman may read it between two changes.
    until(lambda: refused(gpusnap("checkpoint", "--leave-running", "w")), "a checkpoint that fails")
    container.goes_on()


def refused(done: Done) -> bool:
    """Whether a checkpoint failed, for this reason."""
    return bool(done.code) and "Podman's archive lacks files of the container" in sentence(done)
