"""Its runtime, CRIU, Podman, or all of them at once are killed during a restore."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import shimhost
import waiting
from support import GPUWORK, Container, faults, good, podman, run, until

from gpusnap.runtime_shim.process import proc

COMMAND = "/usr/local/bin/gpusnap"
WORK = "gpuwork"
# Large enough that CRIU is at it for a while.
MIB = "100"


def processes(name: str) -> list[int]:
    """The processes of that name that are no zombies, by PID."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            named = entry.name.isdigit() and (entry / "comm").read_text().strip() == name
            if named and (entry / "stat").read_text().rpartition(") ")[2][0] not in "ZX":
                found.append(int(entry.name))
    return sorted(found)


def inside() -> list[int]:
    """What CRIU has made of the container so far: it is in the container's PID namespace."""
    found = []
    for pid in (*processes(WORK), *processes("criu")):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            if any(line.startswith("NSpid:") and len(line.split()) > 2 for line in lines):
                found.append(pid)
    return found


def outside(*names: str) -> list[int]:
    """The processes of these names on the host."""
    return [pid for name in names for pid in processes(name) if pid not in inside()]


def kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def stopped(name: str) -> list[int]:
    """The processes of that name on the host, stopped: none of them can end by itself from here on."""
    found = outside(name)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    return [pid for pid in found if pid in processes(name)]


def nothing_left() -> None:
    """No process, no note, nothing for a moment, nothing mounted."""
    assert processes(WORK) == []
    assert processes("criu") == []
    assert [name for name in os.listdir("/run") if name.startswith("gpusnap-")] == []
    assert [name for name in os.listdir("/run/gpusnap/journal") if not name.endswith(".lock")] == []
    mounts = Path("/proc/self/mountinfo").read_text()
    assert "criu-root" not in mounts
    assert ".criu." not in mounts


def checkpointed(pages: str, mib: str = MIB) -> Container:
    """A container that has a file of its own in its root, and ended with its checkpoint."""
    container = Container.start("w", "--mib", mib)
    good(podman("exec", "w", "sh", "-c", "echo precious >/mark"))
    good(podman("container", "checkpoint", "w"))
    return container


def restored(container: Container) -> None:
    """It can be restored, has all of its files, and goes on."""
    good(podman("container", "restore", "w"))
    container.goes_on()
    assert good(podman("exec", "w", "cat", "/mark")) == "precious"


@contextmanager
def restoring() -> Iterator[subprocess.Popen[str]]:
    """Podman restores; it is not waited for."""
    with waiting.Process(
        ["podman", "--runtime", "gpusnap-runtime", "container", "restore", "w"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as engine:
        try:
            yield engine
        finally:
            engine.kill()
            kill(*inside())  # a failed test's: Podman's pipe ends with them


def kill_podman(engine: subprocess.Popen[str]) -> None:
    """Kill it when the container runs, before it has removed the checkpoint: it is stopped until then."""
    # conmon waits for Podman before it starts the runtime.
    until(
        lambda: {proc.parent(pid) for pid in processes("gpusnap-runtime")} & {*processes("conmon")},
        "conmon's runtime",
    )
    engine.send_signal(signal.SIGSTOP)
    until(lambda: processes(WORK), "a restored process")
    until(lambda: not processes("gpusnap-runtime"), "the end of gpusnap-runtime")
    engine.kill()


def settings(real: str, pages: str) -> None:
    shimhost.write_settings(f'runtime = "{real}"\n[memory]\npages = "{pages}"\nchunk-size = "1M"\n')


@pytest.mark.parametrize("with_criu", [False, True], ids=["alone", "with CRIU"])
def test_the_runtime(real: str, *, with_criu: bool) -> None:
    """gpusnap lives: it ends what CRIU has brought back, and nobody has to recover anything."""
    settings(real, "criu")
    container = checkpointed("criu")
    with restoring() as engine:
        until(inside, "a process of the container")
        runtimes = stopped(real)
        assert runtimes, "it had ended already"
        kill(*runtimes, *(outside("criu") if with_criu else ()))
        _, said = waiting.communicate(engine, 60)
        assert engine.returncode != 0
        assert "could not restore container" in said
        nothing_left()
        assert "nothing to recover" in run(COMMAND, "recover").err
    restored(container)


@pytest.mark.parametrize(
    ("real", "early"), [("crun", False), ("crun", True), ("runc", True)], indirect=["real"]
)
def test_all_at_once(real: str, *, early: bool) -> None:
    """Nobody lives: `recover` ends what stands there, and says so; of what was not there it says nothing.

    Early: before it has its own name and environment back.
    """
    settings(real, "criu")
    container = checkpointed("criu")
    # Some end with CRIU, by themselves, and then there is nothing to see; or the runtime has ended before.
    assert any(_killed_all(real, early=early) for _ in range(8)), "nothing stood there, in eight restores"
    restored(container)


def _killed_all(real: str, *, early: bool) -> bool:
    """Kill all that restores, and have `recover` put it right; whether there was something to put right."""
    with restoring() as engine:
        until(inside if early else lambda: processes(WORK), "a process of the container")
        runtimes = stopped(real)
        if not runtimes:
            _, failed = waiting.communicate(engine, 60)
            assert engine.returncode == 0, failed
            good(podman("container", "checkpoint", "w"))
            return False
        kill(*processes("gpusnap-runtime"), *runtimes, *outside("criu"))
        until(lambda: not outside("criu"), "the end of CRIU")
        stood = inside()
        said = good(run(COMMAND, "recover"))
        nothing_left()
        found = re.search(rf"{real} knows no such container, but .* were killed: ([\d ]+);", said)
        # A runtime that was killed late had written the container down; a process may end when CRIU does.
        otherwise = ("the incomplete container was removed", "no process of it was found")
        assert found is not None or any(each in said for each in otherwise), said
        # A helper of CRIU's may end by itself before `recover` looks; that nobody is left was seen above.
        assert found is None or not stood or set(stood) & {int(pid) for pid in found[1].split()}
        assert waiting.end(engine, 60) != 0
        assert engine.stderr is not None
        engine.stderr.close()
    return found is not None or (not early and "the incomplete container was removed" in said)


def test_nothing_stood(real: str) -> None:
    """Where nothing of it is there any more, that is what `recover` says."""
    settings(real, "criu")
    container = checkpointed("criu")
    with restoring() as engine:
        until(lambda: processes(WORK), "a restored process")
        kill(*processes("gpusnap-runtime"), *outside(real, "criu"))
        kill(*until(lambda: processes(WORK), "what is left"))
        until(lambda: not processes(WORK), "their end")
        assert waiting.end(engine, 60) != 0
        assert engine.stderr is not None
        engine.stderr.close()
        said = good(run(COMMAND, "recover"))
        assert f"{real} knows no such container, and no process of it was found" in said
        nothing_left()
    restored(container)


def unknown(said: str) -> list[str]:
    """The containers that `recover` says run without their Podman's knowledge."""
    return re.findall(r"to end it: gpusnap recover ([0-9a-f]{64})", said)


def ended(wanted: str) -> None:
    """`recover` ends it, and conmon goes by itself; then there is nothing to recover."""
    assert "it was killed: " in good(run(COMMAND, "recover", wanted))
    assert processes(WORK) == []
    until(lambda: not processes("conmon"), "the end of conmon")
    nothing_left()
    assert os.listdir("/run/gpusnap/restored") == []
    assert "nothing to recover" in run(COMMAND, "recover").err


def test_podman(real: str) -> None:
    """The container comes up, and Podman does not know: `recover` says so, and ends it when it is named."""
    settings(real, "chunks")
    container = checkpointed("chunks", "8")
    with restoring() as engine:
        kill_podman(engine)
        (before,) = processes(WORK)
        said = good(run(COMMAND, "recover"))
        assert unknown(said) == [container.id]
        assert f"runs under {real} (process {before}), but Podman lists it as exited" in said
        (listed,) = json.loads(good(run(COMMAND, "recover", "--list", "--json")))
        assert (listed["container"], listed["kind"]) == (container.id, "unknown")
        assert listed["processes"] == [before]
        assert unknown(good(run(COMMAND, "recover", "--list"))) == [container.id]
        assert processes(WORK) == [before], "saying so ended it"
        ended("w")
        assert engine.stderr is not None
        engine.stderr.close()
    restored(container)


def test_podman_and_again(real: str) -> None:
    """The next restore is refused, and names what ends it; Podman's clean-up behind it does so as well."""
    settings(real, "chunks")
    container = checkpointed("chunks", "8")
    with restoring() as engine:
        kill_podman(engine)
        done = podman("container", "restore", "w")
        assert "already exists, and it is running" in done.err
        assert f"gpusnap recover {container.id}" in done.err
        run(COMMAND, "recover", container.id)
        until(lambda: not processes(WORK), "the end of the container")
        assert engine.stderr is not None
        engine.stderr.close()
    until(lambda: not processes("conmon"), "the end of conmon")
    restored(container)


def test_podman_and_its_record(real: str) -> None:
    """`podman rm` has removed all that it knew: the container is still found, and ended."""
    settings(real, "chunks")
    container = checkpointed("chunks", "8")
    ident = container.id
    with restoring() as engine:
        kill_podman(engine)
        good(podman("rm", "--force", "--time", "0", "w"))
        assert processes(WORK), "Podman ended it by itself"
        said = good(run(COMMAND, "recover"))
        assert unknown(said) == [ident]
        assert "Podman knows no such container" in said
        ended(ident[:12])
        assert engine.stderr is not None
        engine.stderr.close()


def test_one_that_podman_knows(real: str) -> None:
    """A container that its Podman has as running or paused is never named and never ended."""
    settings(real, "chunks")
    container = checkpointed("chunks", "8")
    restored(container)
    before = processes(WORK)
    assert before
    for change in ("", "pause", "unpause"):
        if change:
            good(podman(change, "w"))
        assert "nothing to recover" in run(COMMAND, "recover").err
        assert json.loads(good(run(COMMAND, "recover", "--list", "--json"))) == []
        for wanted in ("w", container.id):
            done = run(COMMAND, "recover", wanted)
            assert (done.code, "nothing to recover" in done.err) == (0, True)
        assert run(COMMAND, "recover", "nosuch").code == 3
    assert processes(WORK) == before
    container.goes_on()


def test_from_a_login_shell(real: str) -> None:
    """Podman gives its runtime an empty XDG_RUNTIME_DIR, a login shell another: what runs is found.

    gpusnap was killed when all was done, just before it removed its note.
    """
    settings(real, "chunks")
    container = checkpointed("chunks", "8")
    restored(container)
    before = processes(WORK)
    (path,) = Path("/run/gpusnap/restored").glob("*.restored")
    shutil.copy(path, Path("/run/gpusnap/journal", path.name).with_suffix(".restore"))
    said = good(run("env", "XDG_RUNTIME_DIR=/run/user/0", COMMAND, "recover"))
    assert f"running: {before[0]}" in said
    assert notes() == []
    assert processes(WORK) == before
    container.goes_on()


def test_another_storage(crun: None, tmp_path: Path) -> None:
    """The Podman that is asked is the one that had it restored, with its own storage."""
    settings("crun", "chunks")
    own = ("--root", str(tmp_path / "root"), "--runroot", str(tmp_path / "runroot"))
    image = tmp_path / "image.tar"
    good(podman("save", "-o", image, "localhost/base"))
    try:
        good(podman(*own, "load", "-i", image))
        gpu = ("--device", "nvidia.com/gpu=all", "-v", f"{GPUWORK}:/gpuwork:ro")
        good(podman(*own, "run", "-d", "--name", "v", *gpu, "localhost/base", "/gpuwork", "--tick", "30"))
        good(podman(*own, "container", "checkpoint", "v"))
        good(podman(*own, "container", "restore", "v"))
        assert podman("container", "exists", "v").code == 1
        before = processes(WORK)
        assert len(before) == 1
        assert "nothing to recover" in run(COMMAND, "recover").err
        assert processes(WORK) == before
    finally:
        podman(*own, "rm", "--force", "--all", "--time", "0")
        podman(*own, "system", "reset", "--force")


def test_told_to_nobody(real: str) -> None:
    """gpusnap is killed when all is done, before its exit code says so: Podman waits, and `recover` helps."""
    settings(real, "chunks")
    container = checkpointed("chunks", "8")
    ident = container.id  # later nobody can ask: Podman waits, and holds its lock
    folder = Path("/run/gpusnap/restored")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Whoever looks for files that are no longer needed reads all of these, one after another.
    long = folder / "x.restored"
    long.write_text(json.dumps("x" * (60 << 20)))
    for at in range(100):
        os.link(long, folder / f"x{at}.restored")
    with restoring() as engine:
        until(lambda: [*folder.glob(f"{ident}*.restored")] and not notes(), "that all is restored")
        kill(*processes("gpusnap-runtime"))
        for path in folder.glob("x*.restored"):
            path.unlink()
        said = good(run(COMMAND, "recover"))
        assert unknown(said) == [ident]
        assert (
            "gpusnap-runtime was killed before it could report it to Podman" in said
            or "Podman lists it as" in said
        )
        ended(ident)
        assert waiting.end(engine, 60) != 0
        assert engine.stderr is not None
        engine.stderr.close()
    restored(container)


def notes() -> list[str]:
    """What the journal has of a restore that is under way."""
    return [path.name for path in Path("/run/gpusnap/journal").glob("*.restore")]


def test_the_podman_of_gpusnap_restore(crun: None, tmp_path: Path) -> None:
    """gpusnap says that it was killed, and what to do; what Podman had begun is not touched meanwhile."""
    settings("crun", "chunks")
    container = checkpointed("chunks", "8")
    restored(container)
    archive = tmp_path / "w.tar"
    good(podman("container", "checkpoint", "--export", archive, "w"))
    container.remove()
    faults("restore hang=1500 count=1")
    with waiting.Process([COMMAND, "restore", archive], stderr=subprocess.PIPE, text=True) as command:
        until(lambda: processes(WORK), "a restored process")
        kill(*(pid for pid in processes("podman") if proc.parent(pid) == command.pid))
        _, said = waiting.communicate(command, 60)
    faults("")
    assert command.returncode == 1
    assert "podman container restore was killed by SIGKILL" in said
    assert "run gpusnap recover" in said
    assert podman("container", "exists", "w").code == 0, "it was removed while gpusnap-runtime worked in it"
    until(lambda: not processes("gpusnap-runtime"), "the end of gpusnap-runtime")
    assert unknown(good(run(COMMAND, "recover"))) == [container.id]
    ended(container.id)


def test_gpusnap_at_its_end(crun: None, tmp_path: Path) -> None:
    """All has been restored, but Podman is never told: `recover` leaves it, and names what ends it."""
    settings("crun", "chunks")
    container = checkpointed("chunks", "8")
    ident = container.id  # later nobody can ask: Podman waits, and holds its lock
    faults("unlock hang=3000")
    with restoring() as engine:

        def runs() -> bool:
            notes = Path("/run/gpusnap/journal").glob("*.restore")
            if [json.loads(note.read_text())["stage"] for note in notes] != ["gpus"]:
                return False
            states = {state for pid in processes(WORK) for state in proc.states(pid)}
            return bool(states) and not states & set("TtX")

        until(runs, "that it runs")
        kill(*processes("gpusnap-runtime"))
        faults("")
        said = run(COMMAND, "recover")
        assert "running: " in said.out, said
        assert unknown(said.out) == [ident], said
        assert processes(WORK)
        ended(ident)
        assert waiting.end(engine, 60) != 0
        assert engine.stderr is not None
        engine.stderr.close()
    restored(container)
