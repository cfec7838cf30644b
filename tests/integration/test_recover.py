"""gpusnap is killed (SIGKILL) at any moment, and the container loses nothing."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import shimhost
import waiting
from holding import held
from support import DEADLINE, RUNTIME, STORAGE, Container, Done, good, kill_at, podman, run, until

from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.process import proc

COMMAND = "/usr/local/bin/gpusnap"
MOMENTS = 2
"""For each way, within the time that an unharmed run takes under the same load."""
STEP = "gpusnap: step "
BEFORE_GPU = "settle"
"""A step of a restore before GPU memory comes back: killed here, a restore is always incomplete.

At "driver restore", the container may run before the kill: no line follows that gpusnap would wait with.
"""
STORE = Path("/var/lib/gpusnap-test")

# Both ways under one runtime, and the other runtime.
every_way = pytest.mark.parametrize(
    ("real", "pages"), [("crun", "criu"), ("crun", "store"), ("runc", "chunks")], indirect=True
)
under_crun = pytest.mark.parametrize(("real", "pages"), [("crun", "criu"), ("crun", "chunks")], indirect=True)
# Without criu and --leave-running: it has no step that these do not have.
each_order = pytest.mark.parametrize(
    ("real", "pages", "options"),
    [
        ("crun", "criu", ()),
        ("crun", "chunks", ()),
        ("crun", "chunks", ("--leave-running",)),
        ("crun", "store", ()),
        ("crun", "store", ("--leave-running",)),
    ],
    indirect=["real", "pages"],
    ids=["criu, stop", "chunks, stop", "chunks, leave running", "store, stop", "store, leave running"],
)


@pytest.fixture(params=["criu", "chunks"])
def pages(request: pytest.FixtureRequest, settings: shimhost.Writer) -> str:
    name: str = request.param
    settings(f'[memory]\npages = "{name}"\nchunk-size = "1M"\n[store]\npath = "{STORE}"\n')
    return name


@pytest.fixture(autouse=True, scope="module")
def store() -> Iterator[None]:
    yield
    shutil.rmtree(STORE, ignore_errors=True)


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


def killed_at(line: Sequence[str], step: str, out: Path) -> None:
    """Kill gpusnap as it begins a step. `out` as for `announced`."""
    with out.open("wb") as stdout:
        kill_at(step, line, stdout=stdout)


def killed_after(line: Sequence[str], seconds: float, out: Path) -> bool:
    """Kill gpusnap after so long; whether it was still at work. `out` as for `announced`."""
    with (
        out.open("wb") as stdout,
        waiting.Process(line, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.DEVNULL) as shim,
    ):
        try:
            shim.wait(seconds)
        except subprocess.TimeoutExpired:
            shim.kill()
            return True
    return False


def kill_at_moments(
    seconds: float, kill: Callable[[float], bool], put_right: Callable[[str], object]
) -> None:
    """Call `kill` with moments of a run that takes so long, until it has met some of them; then `put_right`.

    A run that was over by then is as long as the next one is taken for.
    """
    met = 0
    while met < MOMENTS:
        after = random.uniform(0, 0.9) * seconds
        if kill(after):
            met += 1
        else:
            seconds = after
        put_right(f"{after:.3f} s")


def nothing_left() -> None:
    """No note, no file for a moment, and nothing staged."""
    assert [name for name in os.listdir("/run") if name.startswith("gpusnap-")] == []
    # One that was being written has no name that anybody reads, and the next one takes its place.
    left = [name for name in os.listdir("/run/gpusnap/journal") if not name.endswith((".lock", ".new"))]
    assert left == []
    assert not os.path.ismount("/run/gpusnap/stage")
    if STORE.exists():
        # One that was killed before anybody needed it leaves a folder that gc may take.
        collected = Store(STORE).collect()
        assert list((STORE / "staging").iterdir()) == [], collected


@contextmanager
def load() -> Iterator[None]:
    """Every core has something better to do, as all other tests are where these run beside them."""
    busy_already = int(os.getloadavg()[0])
    with ExitStack() as stack:
        for _ in range(2 * (os.cpu_count() or 1) - busy_already):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(busy.kill)
        yield


def right_or_whole(container: Container, init: int, folder: Path, real: str, when: str) -> bool:
    """After `gpusnap recover`: it goes on with every byte; or it was dumped, and its checkpoint restores so.

    Whether it goes on.
    """
    nothing_left()
    if Path(f"/proc/{init}").exists():
        container.goes_on()
        return True
    manifest = json.loads((folder / "image/gpusnap/manifest.json").read_text())
    assert manifest["container"]["id"] == container.id, when
    until(lambda: container.inspect()["State"]["Status"] == "exited", "the end of the container")
    dumped = Dumped.of(container, folder, real, folder / "image")
    announced(dumped.line(), dumped.out)
    dumped.goes_on()
    dumped.end()
    return False


@each_order
def test_checkpoint_killed_at_each_step(
    pages: str, real: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Wherever it says that it is, and at moments that it does not choose, on a busy machine."""
    first, out = Container.start("first", "--mib", "8", "--busy", "5"), tmp_path / "out"
    with load():
        run_through = announced(first.line(tmp_path, *options, debug=True), out)
    assert {"inspect", "lock", "driver checkpoint", "pages", "dump", "sync"} <= {*run_through.steps}
    first.remove()
    container = Container.start("w0", "--mib", "8", "--busy", "5")
    init, line, number = container.pid, container.line(tmp_path, *options, debug=True), 0

    def recovered(when: str) -> None:
        nonlocal container, init, line, number
        recover()
        if not right_or_whole(container, init, tmp_path, real, when):
            container.remove()
            number += 1
            container = Container.start(f"w{number}", "--mib", "8", "--busy", "5")
            init, line = container.pid, container.line(tmp_path, *options, debug=True)

    for step in run_through.steps:
        killed_at(line, step, out)
        recovered(step)

    def kill(after: float) -> bool:
        with load():
            return killed_after(line, after, out)

    kill_at_moments(run_through.seconds, kill, recovered)


@pytest.mark.parametrize(("real", "pages"), [("runc", "chunks")], indirect=True)
def test_killed_after_any_time(pages: str, real: str, tmp_path: Path) -> None:
    """With more to write, and the other runtime, whose children are others: it ends what it is at."""
    container = Container.start("w", "--mib", "30")
    init = container.pid
    line, out = container.line(tmp_path, "--leave-running", debug=True), tmp_path / "out"

    def put_right(when: str) -> None:
        recover()
        assert right_or_whole(container, init, tmp_path, real, when)

    seconds = announced(line, out).seconds
    kill_at_moments(seconds, lambda after: killed_after(line, after, out), put_right)


@contextmanager
def at_the_dump(container: Container, folder: Path, pages: str) -> Iterator[subprocess.Popen[bytes]]:
    """A checkpoint whose runtime never begins to dump; it is over, and that runtime gone, after the block."""
    memory = f'[memory]\npages = "{pages}"\nchunk-size = "1M"\n[store]\npath = "{STORE}"\n'
    line = container.line(folder, "--leave-running", debug=True)
    with held(folder, "crun", "checkpoint", memory) as crun:
        with waiting.Process(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as shim:
            until(crun.met, "the dump")
            yield shim
            shim.kill()
        crun.kill()


@under_crun
def test_the_next_checkpoint_puts_it_right(pages: str, real: str, tmp_path: Path) -> None:
    """Without `gpusnap recover`: a checkpoint of the same container first brings it back."""
    container = Container.start("w", "--mib", "8", "--busy", "5")
    with at_the_dump(container, tmp_path, pages):
        pass
    done = run(*container.line(tmp_path, "--leave-running", debug=True))
    assert done.code == 0, done.err
    assert "an earlier checkpoint was interrupted; running: " in done.err
    container.goes_on()
    assert (tmp_path / "image/gpusnap/manifest.json").exists()


@under_crun
def test_somebody_is_at_work(pages: str, real: str, tmp_path: Path) -> None:
    """A second gpusnap does not touch a container that a first one has in its hands."""
    container = Container.start("w", "--mib", "8")
    init = container.pid
    with at_the_dump(container, tmp_path, pages):
        assert "gpusnap is working on it" in recover("--list")
        for line in ([COMMAND, "recover"], container.line(tmp_path, debug=True)):
            done = run(*line)
            assert done.code == 1
            assert "still working on container" in done.err
    if pages == "chunks":
        done = run(COMMAND, "resume", str(init))
        assert done.code == 1
        assert f"gpusnap recover {container.id}" in done.err
    os.kill(init, signal.SIGCONT)  # as people do with a process that shows T; its GPU memory is still away
    recover()
    container.goes_on()


@pytest.mark.parametrize("options", [(), ("--rm",)], ids=["stays", "--rm"])
@pytest.mark.parametrize(("real", "pages"), [("crun", "chunks")], indirect=True)
def test_podman_is_killed_as_its_runtime_begins(
    pages: str, real: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Nobody would export the checkpoint, and one with --rm would be lost with it: the container runs on."""
    container = Container.start("w", "--mib", "8", options=options)
    words = ("podman", "--runtime", RUNTIME, "container", "checkpoint", "--export", tmp_path / "w.tar", "w")
    with (
        held(tmp_path, "crun", "state", f'[memory]\npages = "{pages}"\n') as crun,
        waiting.Process(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as engine,
    ):
        until(crun.met, "its runtime asks crun about the container")
        caller = crun.caller
        assert "checkpoint" in proc.command(caller)
        engine.kill()
    until(lambda: not proc.comm(caller), "its runtime has ended")
    assert container.inspect()["State"]["Status"] == "running"
    container.goes_on()
    assert "nothing to recover" in run(COMMAND, "recover", "--list").err


def at_once(*lines: Sequence[str]) -> list[Done]:
    """Run commands, all at the same moment, to their ends."""
    with ThreadPoolExecutor(len(lines)) as pool:
        return list(pool.map(lambda line: run(*line), lines))


def harmless(dones: Sequence[Done]) -> None:
    """At least one did what it was to do, and the others were told that it did."""
    for done in dones:
        assert done.code == 0 or "still working on" in done.err or "nothing to recover" in done.err, done.err
    assert 0 in {done.code for done in dones}


@pytest.mark.parametrize("other", ["recover", "checkpoint"])
@pytest.mark.parametrize(("real", "pages"), [("crun", "chunks")], indirect=True)
def test_two_put_it_right_at_once(pages: str, real: str, tmp_path: Path, other: str) -> None:
    """Two recover, or one does and one checkpoints: one of them has it, and no byte is lost by the other."""
    container = Container.start("w", "--mib", "8", "--busy", "5")
    line = container.line(tmp_path, "--leave-running", debug=True)
    recovers = [COMMAND, "recover", container.id]
    killed_at(line, "dump", tmp_path / "out")
    harmless(at_once(recovers, recovers if other == "recover" else line))
    nothing_left()
    container.goes_on()


@dataclass(frozen=True)
class Dumped:
    """A container of Podman's that was checkpointed, to be restored by gpusnap-runtime itself."""

    container: Container
    id: str
    folder: Path
    real: str
    config: bytes
    """Its config.json, as Podman wrote it."""
    image: Path

    @classmethod
    def of(cls, container: Container, folder: Path, real: str, image: Path) -> Dumped:
        """One that has ended; its root is mounted again, which Podman takes away then."""
        good(podman("mount", container.name))
        config = (STORAGE / container.id / "userdata/config.json").read_bytes()
        return cls(container, container.id, folder, real, config, image)

    @property
    def bundle(self) -> Path:
        return STORAGE / self.id / "userdata"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def line(self) -> list[str]:
        paths = ["--bundle", self.bundle, "--image-path", self.image]
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
    container = Container.start("w", "--mib", "8", "--busy", "5")
    good(podman("container", "checkpoint", "--keep", container.name))
    found = Dumped.of(container, tmp_path, real, container.image_path)
    yield found
    if found.known():  # Podman would not remove what it does not know to run
        found.end()


@every_way
def test_restore_killed_at_each_step(dumped: Dumped) -> None:
    """The incomplete container is removed, nothing of it is left, and the checkpoint can be restored."""
    with load():
        run_through = announced(dumped.line(), dumped.out)
    assert {"plan", "restore", "settle", "driver restore"} <= {*run_through.steps}
    dumped.goes_on()
    dumped.end()

    def removed(when: str) -> None:
        """Or it had come up in that moment, and goes on."""
        said = recover()
        nothing_left()
        if dumped.known():
            assert said == "" or "running: " in said, when
            dumped.goes_on()
            dumped.end()
        else:
            assert (dumped.bundle / "config.json").read_bytes() == dumped.config, when

    for step in run_through.steps:
        killed_at(dumped.line(), step, dumped.out)
        removed(step)

    def kill(after: float) -> bool:
        with load():
            return killed_after(dumped.line(), after, dumped.out)

    kill_at_moments(run_through.seconds, kill, removed)
    assert json.loads(recover("--list", "--json")) == []
    announced(dumped.line(), dumped.out)
    dumped.goes_on()


@under_crun
def test_the_next_restore_takes_it_away(dumped: Dumped) -> None:
    """Without `gpusnap recover`: a restore of the same container first removes what a killed one left."""
    killed_at(dumped.line(), BEFORE_GPU, dumped.out)
    assert "its restore was interrupted" in recover("--list")
    (waits,) = json.loads(recover("--list", "--json"))
    assert (waits["container"], waits["kind"], waits["at_work"]) == (dumped.id, "restore", False)
    announced(dumped.line(), dumped.out)
    said = dumped.out.with_suffix(".err").read_text()
    assert "an earlier restore was interrupted; the incomplete container was removed" in said
    dumped.goes_on()
    nothing_left()


@pytest.mark.parametrize(("real", "pages"), [("crun", "chunks")], indirect=True)
def test_two_take_it_away_at_once(dumped: Dumped) -> None:
    """Two recover: it is removed; two more leave alone what is restored after that."""
    recovers = [COMMAND, "recover", dumped.id]
    killed_at(dumped.line(), BEFORE_GPU, dumped.out)
    harmless(at_once(recovers, recovers))
    nothing_left()
    assert not dumped.known()
    announced(dumped.line(), dumped.out)
    assert ["nothing to recover" in done.err for done in at_once(recovers, recovers)] == [True, True]
    dumped.goes_on()


@contextmanager
def held_restore(folder: Path, real: str, pages: str, command: Sequence[str | Path]) -> Iterator[int]:
    """Podman restores, and its runtime has brought the processes back and waits; the PID of gpusnap."""
    memory = f'[memory]\npages = "{pages}"\nchunk-size = "1M"\n'
    with (
        held(folder, real, "restore", memory, after=True) as runtime,
        waiting.Process(
            ["podman", "--runtime", "gpusnap-runtime", "container", "restore", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as engine,
    ):
        until(runtime.met, "CRIU's restore")
        try:
            yield runtime.caller
        finally:
            runtime.let_go()
            recover()  # else Podman would wait for the half container for good
            assert waiting.end(engine, DEADLINE) != 0


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
        assert "gpusnap is working on it" in recover("--list")
        done = run(COMMAND, "recover")
        assert done.code == 1
        assert "still working on container" in done.err
        os.kill(shim, signal.SIGKILL)
        until(lambda: "its restore was interrupted" in recover("--list"), "the end of gpusnap")
    nothing_left()
    assert container.id not in run(real, "list", "-q").out
    if imported:
        container.remove()
    good(podman("container", "restore", *again))
    container.goes_on()
