"""Commands that a container names for before its checkpoint and after its restore, in real containers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from storehost import SETTINGS, empty_store, gpusnap
from support import Container, faults, good, members, podman, sentence

from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.process import proc

# It leaves something running, too, which must not be in the image.
BEFORE = "echo before $GPUSNAP_EVENT >>/log; sleep 1000 & exit 0"
AFTER = "echo after $GPUSNAP_EVENT >>/log"


@pytest.fixture
def store(real: str) -> Iterator[Store]:
    with empty_store(SETTINGS.replace('"crun"', f'"{real}"')) as found:
        yield found


def started(before: str = BEFORE, after: str = AFTER, *options: str) -> Container:
    named = (
        "--annotation",
        f"io.gpusnap.pre-checkpoint={before}",
        "--label",
        f"io.gpusnap.post-restore={after}",
    )
    return Container.start("w", options=(*named, *options))


def log() -> list[str]:
    return good(podman("exec", "w", "cat", "/log")).splitlines()


def test_checkpoint_and_restore(store: Store) -> None:
    """One before and one after; the image has no process of theirs."""
    container = started()
    good(gpusnap("checkpoint", "w"))
    good(gpusnap("restore", "w"))
    container.goes_on()
    assert log() == ["before pre-checkpoint", "after post-restore"]
    assert {proc.comm(pid) for pid in members(container)} == {"gpuwork"}


def test_a_container_that_goes_on(store: Store) -> None:
    """Both, one after the other, and again at the next one."""
    container = started()
    for _ in range(2):
        good(gpusnap("checkpoint", "--leave-running", "w"))
    container.goes_on()
    assert log() == ["before pre-checkpoint", "after post-restore"] * 2


def test_what_fails(store: Store) -> None:
    """The checkpoint, or the command before it: the one after undoes it, and the container runs."""
    container = started()
    faults("checkpoint result=CUDA_ERROR_UNKNOWN")
    try:
        sentence(gpusnap("checkpoint", "w"))
    finally:
        faults("")
    container.goes_on()
    assert log() == ["before pre-checkpoint", "after post-restore"]
    container.remove()
    container = started("echo before >>/log; echo 'it is busy' >&2; exit 3")
    assert "the command pre-checkpoint of the container w ended with exit code 3: it is busy" in sentence(
        gpusnap("checkpoint", "w")
    )
    container.goes_on()
    assert log() == ["before", "after post-restore"]


def test_suspend_and_resume(store: Store) -> None:
    """The other two; a failed one suspends nothing. A checkpoint of what is suspended runs none."""
    options = (
        "--annotation",
        "io.gpusnap.pre-suspend=" + BEFORE,
        "--label",
        "io.gpusnap.post-resume=" + AFTER,
    )
    container = started(BEFORE, AFTER, *options)
    good(gpusnap("suspend", "w"))
    good(gpusnap("checkpoint", "w"))
    good(gpusnap("resume", "w"))
    container.goes_on()
    assert log() == ["before pre-suspend", "after post-resume"]
    assert {proc.comm(pid) for pid in members(container)} == {"gpuwork"}
    container.remove()
    container = started(BEFORE, AFTER, "--annotation", "io.gpusnap.pre-suspend=echo no; exit 4")
    said = sentence(gpusnap("suspend", "w"))
    assert "the command pre-suspend of the container w ended with exit code 4: no" in said
    container.goes_on()


def test_a_deadline(store: Store, tmp_path: Path) -> None:
    """What does not end is killed in the container, with all that it started."""
    container = started("sleep 1000", AFTER, "--annotation", "io.gpusnap.hook-timeout=5")
    assert "pre-checkpoint of the container w did not end within 5 s" in sentence(gpusnap("checkpoint", "w"))
    container.goes_on()
    assert {proc.comm(pid) for pid in members(container)} == {"gpuwork"}
