"""gpusnap is killed (SIGKILL) at any moment, and the container loses nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import shimhost
from support import RUNTIME, STORAGE, Container, good, podman, run, until

COMMAND = "/usr/local/bin/gpusnap"
MOMENTS = 2
"""For each way, as parts of the time that an unharmed run takes."""
STEP = "gpusnap: step "

# Both ways under one runtime, and the other runtime.
every_way = pytest.mark.parametrize(
    ("real", "pages"), [("crun", "criu"), ("crun", "chunks"), ("runc", "chunks")], indirect=True
)
under_crun = pytest.mark.parametrize(("real", "pages"), [("crun", "criu"), ("crun", "chunks")], indirect=True)
leaving = pytest.mark.parametrize("options", [(), ("--leave-running",)], ids=["stop", "leave running"])


@pytest.fixture(params=["criu", "chunks"])
def pages(request: pytest.FixtureRequest, settings: shimhost.Writer) -> str:
    name: str = request.param
    settings(f'[memory]\npages = "{name}"\nchunk-size = "1M"\n')
    return name


def words(container: Container, folder: Path, *options: str) -> list[str]:
    paths = ["--image-path", str(folder / "image"), "--work-path", str(folder)]
    return [RUNTIME, "--debug", "checkpoint", *paths, *options, container.id]


def recover(*options: str) -> str:
    return good(run(COMMAND, "recover", *options))


@dataclass(frozen=True)
class Announced:
    """An unharmed run."""

    steps: tuple[str, ...]
    seconds: float


def announced(line: Sequence[str], out: Path) -> Announced:
    """Run gpusnap-runtime to its end; `out` is what a restored container writes to."""
    begin = time.monotonic()
    said = out.with_suffix(".err")
    with out.open("wb") as stdout, said.open("wb") as stderr:
        # Files, because a restored container keeps them.
        done = subprocess.run(line, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, check=False)
    text = said.read_text()
    assert done.returncode == 0, text
    steps = [step.removeprefix(STEP) for step in text.splitlines() if step.startswith(STEP)]
    return Announced(tuple(dict.fromkeys(steps)), time.monotonic() - begin)


def killed_at(line: Sequence[str], step: str) -> bool:
    """Kill gpusnap as it begins a step; whether it came to that."""
    with subprocess.Popen(
        line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as shim:
        assert shim.stderr is not None
        for text in shim.stderr:
            if text.rstrip("\n") == STEP + step:
                shim.kill()
                return True
    return False


def killed_after(line: Sequence[str], seconds: float) -> None:
    """Kill gpusnap after so long, if it has not ended."""
    with subprocess.Popen(
        line, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as shim:
        try:
            shim.wait(seconds)
        except subprocess.TimeoutExpired:
            shim.kill()


def nothing_left() -> None:
    """No note, no file for a moment, and nothing staged."""
    assert [name for name in os.listdir("/run") if name.startswith("gpusnap-")] == []
    left = [name for name in os.listdir("/run/gpusnap/journal") if not name.endswith(".lock")]
    assert left == []
    assert not os.path.ismount("/run/gpusnap/stage")


@contextmanager
def load() -> Iterator[None]:
    """Every core has something better to do."""
    with ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(busy.kill)
        yield


def right_or_whole(container: Container, init: int, folder: Path, when: str) -> bool:
    """After `gpusnap recover`: it goes on with every byte; or it was dumped, and its checkpoint is whole.

    Whether it goes on.
    """
    nothing_left()
    if Path(f"/proc/{init}").exists():
        container.goes_on()
        return True
    manifest = json.loads((folder / "image/gpusnap/manifest.json").read_text())
    assert manifest["container"]["id"] == container.id, when
    return False


@leaving
@under_crun
def test_checkpoint_killed_at_each_step(
    pages: str, real: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Wherever it says that it is, and at moments that it does not choose, on a busy machine."""
    first = Container.start("first", "--mib", "20", "--busy", "5")
    run_through = announced(words(first, tmp_path, *options), tmp_path / "out")
    assert {"inspect", "lock", "driver checkpoint", "pages", "dump", "sync"} <= {*run_through.steps}
    first.remove()
    container = Container.start("w0", "--mib", "20", "--busy", "5")
    init, line, number = container.pid, words(container, tmp_path, *options), 0

    def killed(kill: Callable[[list[str]], object], when: str) -> None:
        nonlocal container, init, line, number
        kill(line)
        recover()
        if not right_or_whole(container, init, tmp_path, when):
            container.remove()
            number += 1
            container = Container.start(f"w{number}", "--mib", "20", "--busy", "5")
            init, line = container.pid, words(container, tmp_path, *options)

    for step in run_through.steps:
        killed(lambda line, step=step: killed_at(line, step), step)  # type: ignore[misc]
    with load():
        for _ in range(MOMENTS):
            after = random.uniform(0.2, 2.0) * run_through.seconds
            killed(lambda line, after=after: killed_after(line, after), f"{after:.3f} s")  # type: ignore[misc]


@pytest.mark.parametrize(("real", "pages"), [("runc", "chunks")], indirect=True)
def test_killed_after_any_time(pages: str, real: str, tmp_path: Path) -> None:
    """With more to write, and the other runtime, whose children are others: it ends what it is at."""
    container = Container.start("w", "--mib", "60")
    init = container.pid
    for after in (0.35, 0.6, 1.0):
        killed_after(words(container, tmp_path, "--leave-running"), after)
        recover()
        assert right_or_whole(container, init, tmp_path, f"{after} s")


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


@under_crun
def test_the_next_checkpoint_puts_it_right(pages: str, real: str, tmp_path: Path) -> None:
    """Without `gpusnap recover`: a checkpoint of the same container first brings it back."""
    container = Container.start("w", "--mib", "20", "--busy", "5")
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
        for line in ([COMMAND, "recover"], words(container, tmp_path)):
            done = run(*line)
            assert done.code == 1
            assert "still at work on container" in done.err
    if pages == "chunks":
        done = run(COMMAND, "resume", str(init))
        assert done.code == 1
        assert f"gpusnap recover {container.id}" in done.err
    os.kill(init, signal.SIGCONT)  # as people do with a process that shows T; its GPU memory is still away
    recover()
    container.goes_on()


@dataclass(frozen=True)
class Dumped:
    """A container of Podman's that was checkpointed in place, to be restored by gpusnap-runtime itself."""

    container: Container
    id: str
    folder: Path
    real: str
    config: bytes
    """Its config.json, as Podman wrote it."""

    @property
    def bundle(self) -> Path:
        return STORAGE / self.id / "userdata"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def line(self) -> list[str]:
        paths = ["--bundle", self.bundle, "--image-path", self.bundle / "checkpoint"]
        paths += ["--work-path", self.folder, "--pid-file", self.folder / "pid"]
        return [RUNTIME, "--debug", "restore", "--detach", *map(str, paths), self.id]

    def known(self) -> bool:
        """Whether the real runtime has it."""
        return self.id in run(self.real, "list", "-q").out.split()

    def goes_on(self) -> None:
        """It ticks, with every byte right."""

        def ticks() -> list[str]:
            return [line for line in self.out.read_text().splitlines()[1:] if "tick=" in line]

        until(lambda: len(ticks()) > 3, "ticks of the restored container")
        assert [line for line in ticks() if " ok" not in line] == []

    def end(self) -> None:
        """Remove what was restored; the checkpoint stays."""
        good(run(self.real, "delete", "--force", self.id))
        until(lambda: not self.known(), "the end of the container")
        (self.bundle / "config.json").write_bytes(self.config)


@pytest.fixture
def dumped(pages: str, real: str, tmp_path: Path) -> Iterator[Dumped]:
    container = Container.start("w", "--mib", "20", "--busy", "5")
    good(podman("container", "checkpoint", "--keep", container.name))
    good(podman("mount", container.name))  # its root, which Podman takes away from one that ended
    config = (STORAGE / container.id / "userdata/config.json").read_bytes()
    found = Dumped(container, container.id, tmp_path, real, config)
    yield found
    if found.known():  # Podman would not remove what it does not know to run
        found.end()


@every_way
def test_restore_killed_at_each_step(dumped: Dumped) -> None:
    """The incomplete container is removed, nothing of it is left, and the checkpoint can be restored."""
    run_through = announced(dumped.line(), dumped.out)
    assert {"plan", "restore", "settle", "driver restore"} <= {*run_through.steps}
    dumped.goes_on()
    dumped.end()

    def removed(when: str) -> None:
        """Or it had come up in that moment, and nobody has touched it."""
        said = recover()
        nothing_left()
        if dumped.known():
            assert said == "" or "running: " in said, when
            dumped.end()
        else:
            assert (dumped.bundle / "config.json").read_bytes() == dumped.config, when

    for step in run_through.steps:
        assert killed_at(dumped.line(), step)
        removed(step)
    with load():
        for _ in range(MOMENTS):
            after = random.uniform(0.2, 2.0) * run_through.seconds
            killed_after(dumped.line(), after)
            removed(f"{after:.3f} s")
    assert json.loads(recover("--list", "--json")) == []
    announced(dumped.line(), dumped.out)
    dumped.goes_on()


@under_crun
def test_the_next_restore_takes_it_away(dumped: Dumped) -> None:
    """Without `gpusnap recover`: a restore of the same container first removes what a killed one left."""
    assert killed_at(dumped.line(), "driver restore")
    assert "its restore was cut off" in recover("--list")
    (waits,) = json.loads(recover("--list", "--json"))
    assert (waits["container"], waits["kind"], waits["at_work"]) == (dumped.id, "restore", False)
    announced(dumped.line(), dumped.out)
    said = dumped.out.with_suffix(".err").read_text()
    assert "an earlier restore was cut off; the incomplete container was removed" in said
    dumped.goes_on()
    nothing_left()


@contextmanager
def held_restore(folder: Path, real: str, pages: str, command: Sequence[str | Path]) -> Iterator[int]:
    """Podman restores, and its runtime has brought the processes back and waits; the PID of gpusnap."""
    flag, go, wrapper = folder / "flag", folder / "go", folder / real
    wrapper.write_text(
        "#!/bin/sh\n"
        f'case " $* " in *" restore "*) /usr/bin/{real} "$@"; code=$?\n'
        f"echo $PPID >{flag}.new; mv {flag}.new {flag}\n"
        f"while [ ! -e {go} ]; do sleep 0.02; done; exit $code;; esac\n"
        f'exec /usr/bin/{real} "$@"\n'
    )
    wrapper.chmod(0o755)
    memory = f'[memory]\npages = "{pages}"\nchunk-size = "1M"\n'
    shimhost.write_settings(f'runtime = "{wrapper}"\n{memory}')
    with subprocess.Popen(
        ["podman", "--runtime", "gpusnap-runtime", "container", "restore", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as engine:
        until(flag.exists, "CRIU's restore")
        try:
            yield int(flag.read_text())
        finally:
            go.touch()
            recover()  # else Podman would wait for the half container for good
            assert engine.wait(60) != 0
            shimhost.write_settings(f'runtime = "{real}"\n{memory}')


@pytest.mark.parametrize(
    ("real", "pages", "imported"),
    [("crun", "chunks", True), ("runc", "chunks", False)],
    ids=["crun, import", "runc, in place"],
    indirect=["real", "pages"],
)
def test_podman_after_a_killed_restore(pages: str, real: str, tmp_path: Path, imported: bool) -> None:
    """Podman waits for a container that never comes; `gpusnap recover` frees it, and it restores again."""
    container, archive = Container.start("w", "--mib", "8"), tmp_path / "w.tar"
    if imported:
        good(container.checkpoint(archive))
        container.remove()
    else:
        good(podman("container", "checkpoint", "w"))
    again: list[str | Path] = ["--import", archive] if imported else ["w"]
    with held_restore(tmp_path, real, pages, again) as shim:
        assert "gpusnap is at work on it" in recover("--list")
        done = run(COMMAND, "recover")
        assert done.code == 1
        assert "still at work on container" in done.err
        os.kill(shim, signal.SIGKILL)
        until(lambda: "its restore was cut off" in recover("--list"), "the end of gpusnap")
    nothing_left()
    assert container.id not in run(real, "list", "-q").out
    if imported:
        container.remove()
    good(podman("container", "restore", *again))
    container.goes_on()
