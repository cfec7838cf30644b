"""Checkpoints as artifacts, of a real GPU: into a store, and back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shimhost
from realhost import Machine, Program
from support import STORAGE, Done, good, manifest, podman, run
from test_containers import FRAMEWORKS, NAMES, TORCH, needs, same_as_uninterrupted

GPUSNAP = "/usr/local/bin/gpusnap"
STORE = STORAGE.parent / "gpusnap-test-store"


@pytest.fixture(autouse=True)
def store() -> Iterator[Path]:
    """On the disk of Podman's storage; gone afterwards."""
    shutil.rmtree(STORE, ignore_errors=True)
    yield STORE
    shutil.rmtree(STORE, ignore_errors=True)


def gpusnap(*words: str) -> Done:
    return run(GPUSNAP, *words)


def made(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(good(gpusnap("checkpoint", "--json", *words)))
    return found


@pytest.mark.parametrize("load", FRAMEWORKS, ids=NAMES)
def test_checkpoint_and_restore(real: str, machine: Machine, load: Any) -> None:
    """Bit for bit as if nobody had interrupted it; each digest in the store is right."""
    needs(load)
    program = Program.begin("w", load, machine.options())
    said = made("--to", f"oci:{STORE}:one", "w")
    assert said["memory"] >= load.mib << 20
    program.remove()
    good(gpusnap("verify", f"oci:{STORE}:one"))
    good(gpusnap("restore", f"oci:{STORE}:one"))
    program.goes_on(more=5)
    same_as_uninterrupted(program, load)


def test_the_second_one_is_cheap(real: str, machine: Machine) -> None:
    """Of a container that runs on; the first is restored all the same, under another name."""
    needs(TORCH)
    program = Program.begin("w", TORCH, machine.options())
    first = made("--leave-running", "--to", f"oci:{STORE}:one", "w")
    program.goes_on()
    second = made("--leave-running", "--to", f"oci:{STORE}:two", "w")
    program.goes_on(more=5)
    same_as_uninterrupted(program, TORCH)
    assert second["new"] < first["new"]
    program.remove()
    good(gpusnap("restore", f"oci:{STORE}:one"))
    program.goes_on(more=5)
    same_as_uninterrupted(program, TORCH)


def test_a_small_archive(real: str, machine: Machine, archive: Path) -> None:
    """Podman alone, with memory.pages = "store"."""
    needs(TORCH)
    lines = f'runtime = "{real}"\nmemory.pages = "store"\nstore.path = "{STORE}"\n'
    shimhost.write_settings(lines)
    program = Program.begin("w", TORCH, machine.options())
    good(program.checkpoint(archive, "--compress", "none"))
    assert archive.stat().st_size < 128 << 20
    assert manifest(archive)["files"], "CRIU's images of memory are in the archive"
    program.remove()
    good(podman("container", "restore", "--import", archive))
    program.goes_on(more=5)
    same_as_uninterrupted(program, TORCH)
