"""gpusnap is killed (SIGKILL) at any moment, and the container loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import shimhost
from support import RUNTIME, Container, good, run, until

JOURNAL = Path("/run/gpusnap/journal")
SECONDS = [0.35, 0.6, 1.0]


# Both ways under one runtime; and the other runtime, whose children are others.
every_way = pytest.mark.parametrize(
    ("real", "pages"), [("crun", "criu"), ("crun", "chunks"), ("runc", "chunks")], indirect=True
)


@pytest.fixture(params=["criu", "chunks"])
def pages(request: pytest.FixtureRequest, settings: shimhost.Writer) -> str:
    name: str = request.param
    settings(f'[memory]\npages = "{name}"\nchunk-size = "1M"\n')
    return name


def words(container: Container, folder: Path, *options: str) -> list[str]:
    paths = ["--image-path", str(folder / "image"), "--work-path", str(folder)]
    return [RUNTIME, "checkpoint", *paths, *options, container.id]


def killed(line: list[str], after: float) -> None:
    """Run a checkpoint and kill gpusnap after so long; wait for what it started."""
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as shim:
        try:
            shim.wait(after)
        except subprocess.TimeoutExpired:
            shim.kill()
    until(lambda: not run("pgrep", "-x", "criu").out, "the end of CRIU")


def recover(*options: str) -> str:
    return good(run("/usr/local/bin/gpusnap", "recover", *options))


@every_way
@pytest.mark.parametrize("options", [(), ("--leave-running",)], ids=["stop", "leave running"])
def test_killed_after_any_time(pages: str, real: str, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Afterwards it runs on, every byte right; or it was dumped, and its checkpoint is whole."""
    container = Container.start("w", "--mib", "60")
    init = container.pid
    for after in SECONDS:
        killed(words(container, tmp_path, *options), after)
        waits = recover("--list")
        recover()
        assert recover("--list") == ""
        if not Path(f"/proc/{init}").exists():
            manifest = json.loads((tmp_path / "image/gpusnap/manifest.json").read_text())
            assert manifest["container"]["id"] == container.id, waits
            return
        container.goes_on()


@contextmanager
def at_the_dump(container: Container, folder: Path, pages: str) -> Iterator[subprocess.Popen[bytes]]:
    """A checkpoint whose runtime never begins to dump; it is over, and that runtime gone, after the block."""
    flag, wrapper = folder / "flag", folder / "crun"
    wrapper.write_text(
        "#!/bin/sh\n"
        'case " $* " in *" checkpoint --image-path"*)\n'
        f"echo $$ >{flag}.new; mv {flag}.new {flag}; exec sleep 600;; esac\n"
        'exec /usr/bin/crun "$@"\n'
    )
    wrapper.chmod(0o755)
    memory = f'[memory]\npages = "{pages}"\nchunk-size = "1M"\n'
    shimhost.write_settings(f'runtime = "{wrapper}"\n{memory}')
    line = words(container, folder, "--leave-running")
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as shim:
        until(flag.exists, "the dump")
        yield shim
        shim.kill()
    os.kill(int(flag.read_text()), signal.SIGKILL)
    shimhost.write_settings(f'runtime = "crun"\n{memory}')


under_crun = pytest.mark.parametrize(("real", "pages"), [("crun", "criu"), ("crun", "chunks")], indirect=True)


@under_crun
def test_the_next_checkpoint_puts_it_right(pages: str, real: str, tmp_path: Path) -> None:
    """Without `gpusnap recover`: a checkpoint of the same container first brings it back."""
    container = Container.start("w", "--mib", "20")
    with at_the_dump(container, tmp_path, pages):
        pass
    done = run(*words(container, tmp_path, "--leave-running"))
    assert done.code == 0, done.err
    assert "an earlier checkpoint was cut off; running: " in done.err
    container.goes_on()
    assert (tmp_path / "image/gpusnap/manifest.json").exists()


@under_crun
def test_somebody_is_at_work(pages: str, real: str, tmp_path: Path) -> None:
    """A second gpusnap does not touch a container that a first one has in its hands."""
    container = Container.start("w", "--mib", "8")
    init = container.pid
    with at_the_dump(container, tmp_path, pages):
        assert "gpusnap is at work on it" in recover("--list")
        for line in (["/usr/local/bin/gpusnap", "recover"], words(container, tmp_path)):
            done = run(*line)
            assert done.code == 1
            assert "still at work on container" in done.err
    if pages == "chunks":
        done = run("/usr/local/bin/gpusnap", "resume", str(init))
        assert done.code == 1
        assert f"gpusnap recover {container.id}" in done.err
    os.kill(init, signal.SIGCONT)  # as people do with a process that shows T; its GPU memory is still away
    recover()
    container.goes_on()
