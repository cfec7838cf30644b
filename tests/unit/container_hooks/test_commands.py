"""Commands that a container names: when each is run, how one fails, and what undoes it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_podman import ID, FakePodman
from kept_checkpoints import an_archive, keep

from gpusnap.base.progress import Progress
from gpusnap.checkpoints.locator import InFile, InStore, default_store
from gpusnap.container_hooks import commands
from gpusnap.container_hooks.pairs import CHECKPOINT, SUSPEND
from gpusnap.engines import podman
from gpusnap.oci.store.store import Store
from gpusnap.operations.checkpointing import checkpoint as checkpointing
from gpusnap.operations.checkpointing import places
from gpusnap.operations.restoring import restore as restoring
from gpusnap.operations.restoring.podman_restore import RestoreRequest
from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError, Interrupted, SettingsError
from gpusnap.runtime_shim.settings import OF_THE_COMMAND, Settings, apply_annotations
from gpusnap.runtime_shim.shim import overrides

QUIET = Progress(shown=False)
BOTH = {"io.gpusnap.pre-checkpoint": "sleep now", "io.gpusnap.post-restore": "wake up"}


@pytest.fixture(autouse=True)
def store(host_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """This host's."""
    monkeypatch.setattr(overrides, "FOLDER", str(tmp_path / "orders"))
    monkeypatch.setattr(places, "FOLDER", str(tmp_path / "in-progress"))
    return host_store


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    found = FakePodman(tmp_path / "podman", monkeypatch)
    found.exports(an_archive(tmp_path))
    return found


def has(
    fake: FakePodman,
    annotations: dict[str, str],
    labels: dict[str, str] | None = None,
    status: str = "running",
) -> None:
    fake.has(status=status, Config={"Annotations": annotations, "Labels": labels})


def made(**more: object) -> checkpointing.CheckpointResult:
    return checkpointing.checkpoint(checkpointing.CheckpointRequest(container="w", **more), QUIET)  # type: ignore[arg-type]


def order(fake: FakePodman) -> list[str]:
    """What Podman was asked to do, in short."""
    found = []
    for line in fake.calls():
        words = line.split()
        found.append(" ".join(words[-4:]) if words[0] == "exec" else words[1])
    return found


def test_around_a_checkpoint(fake: FakePodman) -> None:
    """The one before, in the container; it has ended, so nothing comes after."""
    has(fake, BOTH)
    made()
    assert order(fake) == ["sh -c sleep now", "checkpoint"]
    (call,) = [line for line in fake.calls() if line.startswith("exec ")]
    assert "--env GPUSNAP_EVENT=pre-checkpoint" in call
    assert f" {ID} sh -c" in call


def test_the_container_goes_on(fake: FakePodman) -> None:
    """Then the one after comes at once; of a label and an annotation, the annotation counts."""
    has(fake, {"io.gpusnap.pre-checkpoint": '["/app/s", "a b"]'}, {**BOTH, "io.gpusnap.pre-checkpoint": "x"})
    made(leave_running=True)
    assert order(fake)[1:] == ["checkpoint", "sh -c wake up"]
    assert fake.calls()[0].endswith(f" {ID} /app/s a b")


def test_none(fake: FakePodman) -> None:
    """Without a command before, none after is run in a container that goes on."""
    has(fake, {"io.gpusnap.post-restore": "wake up"})
    made(leave_running=True)
    assert order(fake) == ["checkpoint"]


def test_the_checkpoint_fails(fake: FakePodman) -> None:
    """The container runs still: what was done before is undone, and the error is that of the checkpoint."""
    has(fake, BOTH)
    fake.fails("Error: it broke")
    with pytest.raises(GpusnapError, match="it broke"):
        made()
    assert order(fake) == ["sh -c sleep now", "checkpoint", "sh -c wake up"]


def test_a_place_that_cannot_be_written(fake: FakePodman, tmp_path: Path) -> None:
    """Is refused before the command runs: an engine would drop its cache for nothing."""
    has(fake, BOTH)
    with pytest.raises(GpusnapError, match="it is a directory"):
        made(to=InFile(str(tmp_path)))
    assert order(fake) == []


def test_the_one_before_fails(fake: FakePodman) -> None:
    """Nothing is checkpointed; its last words are in the sentence, and it is undone."""
    has(fake, BOTH)
    (fake.folder / "exec.sh").write_text(
        "case \"$*\" in *now) echo first; echo 'no such model' >&2; exit 7;; esac\n"
    )
    with pytest.raises(ContainerError) as raised:
        made()
    assert (
        str(raised.value)
        == "the command pre-checkpoint of the container w ended with exit code 7: no such model"
    )
    assert raised.value.code == "GPS-240"
    assert raised.value.hint == "try it: podman exec w sh -c 'sleep now'"  # more time would not help
    assert order(fake) == ["sh -c sleep now", "sh -c wake up"]
    assert fake.status() == "running"


def test_others_meanwhile(fake: FakePodman, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other checkpoint or suspend begins while commands run: one would undo what the other prepared."""
    monkeypatch.setattr(overrides, "_SWEEPING", 0.0)
    busy = "another gpusnap checkpoint, suspend or resume of the container abababababab is in progress"
    has(fake, BOTH)
    with podman.Inspection("w") as asked:
        with commands.run_around_checkpoint(asked.container(), QUIET, leave_running=True):
            for attempt in (made, commands.run_around_suspend("podman", asked).__enter__):
                with pytest.raises(ContainerError, match=busy):
                    attempt()
        with commands.run_around_suspend("podman", asked), pytest.raises(ContainerError, match=busy):
            made()
    assert order(fake) == ["sh -c sleep now", "sh -c wake up"]
    made()
    has(fake, {})
    with overrides.keep_commands_alone(ID):
        made()


_COMMAND = """
import sys
from pathlib import Path
from gpusnap.base import privileges
from gpusnap.runtime_shim import settings
from gpusnap.runtime_shim.shim import overrides

folder = sys.argv.pop()
privileges.is_root = lambda: True
found = settings.Settings(store=settings.Store(path=f"{folder}/store"))
settings.load = settings.load_usable = lambda: found
overrides.FOLDER = f"{folder}/orders"
from gpusnap.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_checkpoint(fake: FakePodman, tmp_path: Path, number: signal.Signals) -> None:
    """While no checkpoint runs yet: what was done before is undone, and the signal named."""
    has(fake, BOTH)
    (fake.folder / "exec.sh").write_text(
        f'case "$*" in *now) kill -{number.value} $PPID; exec sleep 600;; esac\n'
    )
    heard = "".join(f"{each}," for each in ("HUP", "INT", "TERM"))[:-1]
    line = ["env", f"--default-signal={heard}", sys.executable, "-c", _COMMAND, "checkpoint", "w"]
    done = subprocess.run([*line, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 128 + number, done.stderr
    assert done.stderr.splitlines()[-1] == "gpusnap: pre-checkpoint of w was interrupted"
    assert order(fake) == ["sh -c sleep now", "sh -c wake up"]


def test_the_undoing_fails(fake: FakePodman, capsys: pytest.CaptureFixture[str]) -> None:
    """It is a note; the error stays that of the command before."""
    has(fake, BOTH)
    (fake.folder / "exec.sh").write_text('case "$*" in *now) exit 7;; *) exit 8;; esac\n')
    with pytest.raises(ContainerError, match="ended with exit code 7"):
        made()
    assert (
        "note: the command post-restore of the container w ended with exit code 8" in capsys.readouterr().err
    )


def test_the_one_after_fails(fake: FakePodman) -> None:
    """The sentence says that there is a checkpoint, or that the container was restored."""
    has(fake, BOTH)
    (fake.folder / "exec.sh").write_text('case "$*" in *up) echo why; exit 8;; esac\n')
    with pytest.raises(
        ContainerError, match=r"^the checkpoint is complete, but the command post-restore .* 8: why$"
    ) as raised:
        made(leave_running=True)
    (entry,) = default_store().entries()
    assert raised.value.hint.endswith(f"; the checkpoint is {entry.name} in {default_store().path}")


def test_a_deadline(fake: FakePodman) -> None:
    """What does not end is not waited for."""
    has(fake, {**BOTH, "io.gpusnap.hook-timeout": "0.2"})
    (fake.folder / "exec.sh").write_text('case "$*" in *now) exec sleep 60;; esac\n')
    began = time.monotonic()
    with pytest.raises(ContainerError, match=r"did not end within 0\.2 s") as raised:
        made()
    assert raised.value.hint.endswith("; the annotation io.gpusnap.hook-timeout gives it more time")
    assert time.monotonic() - began < 30
    assert order(fake)[-1] == "sh -c wake up"


def test_interrupted(fake: FakePodman) -> None:
    """Ctrl-C while the one before works: it is undone, and nothing is checkpointed."""
    has(fake, BOTH)
    at_work = fake.folder / "at-work"
    (fake.folder / "exec.sh").write_text(f'case "$*" in *now) : >{at_work}; exec sleep 60;; esac\n')

    def interrupt() -> None:
        end = time.monotonic() + 30
        while not at_work.exists() and time.monotonic() < end:
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupted, match="pre-checkpoint of w was interrupted"):
        made()
    thread.join()
    assert order(fake) == ["sh -c sleep now", "sh -c wake up"]


@pytest.mark.parametrize(
    ("annotations", "said"),
    [
        ({"io.gpusnap.pre-checkpoint": "[1]"}, "must be a shell command line"),
        ({**BOTH, "io.gpusnap.post-restore": "[a"}, "must be a shell command line"),
        ({**BOTH, "io.gpusnap.post-restore": r'["a\u0000b"]'}, "must be a shell command line"),
        ({**BOTH, "io.gpusnap.post-restore": r'["\ud800"]'}, "must be a shell command line"),
        ({**BOTH, "io.gpusnap.hook-timeout": "soon"}, "must be a number of seconds"),
        ({**BOTH, "io.gpusnap.hook-timeout": "nan"}, "must be a number of seconds"),
    ],
)
def test_wrong_values(fake: FakePodman, annotations: dict[str, str], said: str) -> None:
    """They are said before anything is run."""
    has(fake, annotations)
    with pytest.raises(SettingsError, match=said):
        made()
    assert fake.calls() == []


def test_others_after_a_restore_or_a_resume(fake: FakePodman, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands after these, too, run while no checkpoint or suspend begins; and not during one."""
    monkeypatch.setattr(overrides, "_SWEEPING", 0.0)
    has(fake, BOTH)
    found = podman.inspect_container("w")
    (fake.folder / "exec.sh").write_text(f"ls {overrides.FOLDER} >>$F/locked\n")
    commands.run_after_restore(found, QUIET)
    assert (fake.folder / "locked").read_text() == f"{ID}.commands.lock\n"
    with overrides.keep_commands_alone(ID), pytest.raises(ContainerError) as raised:
        commands.run_after_restore(found, QUIET)
    assert str(raised.value) == (
        "the container is restored, but another gpusnap checkpoint, suspend or resume of the container "
        "abababababab is in progress"
    )
    assert (
        "; a command of the container itself, such as pre-checkpoint, cannot do this; " in raised.value.hint
    )
    assert "gpusnap recover runs the command post-" in raised.value.hint
    assert order(fake) == ["sh -c wake up"]


def test_after_a_restore(fake: FakePodman, store: Store, tmp_path: Path) -> None:
    """In the restored container; where it fails, that is an error, and the container runs."""
    has(fake, BOTH, status="exited")
    (tmp_path / "kept").mkdir()
    keep(store, an_archive(tmp_path / "kept"), ["w"])
    restoring.restore(RestoreRequest(what=InStore(store, "w")), QUIET)
    assert order(fake) == ["restore", "sh -c wake up"]
    (fake.folder / "exec.sh").write_text("exit 9\n")
    has(fake, BOTH, status="exited")
    with pytest.raises(ContainerError, match="post-restore of the container w ended with exit code 9"):
        restoring.restore(RestoreRequest(what=InStore(store, "w")), QUIET)
    assert fake.status() == "running"


def test_the_runtime_does_not_take_them_for_settings() -> None:
    """Only the command reads them."""
    assert apply_annotations(Settings(), {f"io.gpusnap.{name}": "x" for name in OF_THE_COMMAND}) == Settings()
    assert {CHECKPOINT.before, SUSPEND.before, SUSPEND.after} < set(OF_THE_COMMAND)
