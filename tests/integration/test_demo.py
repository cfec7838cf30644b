"""The demo's story, once on softgpu and once as on a machine with a driver of its own."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import gpuhost
import pytest
from support import GPUS_CONF, Done, good, podman, run, until

SRC = Path(__file__).resolve().parents[2]
STORY = SRC / "demo" / "story.py"
FOLDER = Path("/var/lib/gpusnap-demo")


@pytest.fixture
def tidied(crun: None) -> Iterator[None]:
    """What holds after each way the story may end; the GPUs of the other tests are put back."""
    yield
    gpuhost.install(SRC / "softgpu" / "build", GPUS_CONF)
    assert not FOLDER.exists()
    assert "gpusnap-demo" not in good(podman("ps", "--all", "--format", "{{.Names}}"))
    assert "gpusnap-demo" not in good(podman("images", "--format", "{{.Repository}}"))


def story(*words: str) -> Done:
    environment = {"PATH": os.environ["PATH"], "HOME": "/root", "PYTHONDONTWRITEBYTECODE": "1"}
    return run(sys.executable, STORY, *words, env=environment)


@pytest.mark.parametrize("where", ["--software", "--here"])
def test_the_story(tidied: None, where: str) -> None:
    """It ends well, shows the commands and the ticks before and after, and says so."""
    done = story(where, "--mib", "8")
    assert (done.code, done.err) == (0, "")
    for command in ("podman import", "podman --runtime /"):
        assert f"\n$ {command}" in done.out
    joined = re.sub(" +", " ", done.out.replace(" \\\n", ""))
    for words in ("run", "container checkpoint --export", "rm", "container restore --import"):
        assert re.search(rf"\$ podman --runtime \S*gpusnap-runtime {words} ", joined), words
    used = re.findall(r"in use on that GPU: (\S+)", done.out)
    assert [amount == "0" for amount in used] == [False, True, False]
    assert re.search(r"tick=\d+ ok .*\n *… \d+\.\d s …\n.* tick=\d+ ok", done.out)
    assert "none missing, every word right in each" in done.out
    assert "driver checkpoint" in done.out
    assert re.search(r"\n\d+\.\d s in all; container, image and files are removed\.\n$", done.out)


def test_a_gpu_that_fails(tidied: None) -> None:
    """One sentence, and exit code 1."""
    done = story("--here", "--mib", "4096")  # the GPUs of these tests have less
    assert done.code == 1
    (line,) = done.err.splitlines()
    assert "CUDA_ERROR_OUT_OF_MEMORY" in line


def test_a_killed_one_is_cleared(tidied: None) -> None:
    """Of one that could not tidy up, the next one removes container, image and folder."""
    FOLDER.mkdir()
    (FOLDER / "checkpoint.tar.zst").touch()
    good(podman("run", "--detach", "--name", "gpusnap-demo", "localhost/base", "sleep", "1000"))
    assert story("--tidy").code == 0
    until(lambda: not FOLDER.exists(), "the folder's end")
