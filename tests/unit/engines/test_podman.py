"""Podman as a child: what it says, and how it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from fake_podman import ID, FakePodman
from fakes import Signalled, signals_raise, wait_for

from gpusnap.base.user_errors import NotFound
from gpusnap.engines import podman, podman_command, podman_objects
from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    found = FakePodman(tmp_path / "podman", monkeypatch)
    (tmp_path / "archive").write_bytes(b"archive")
    found.exports(tmp_path / "archive")
    return found


@pytest.mark.parametrize(
    "ask",
    [
        podman.ids,
        podman_objects.volumes,
        lambda: podman_objects.users_of("v"),
        lambda: podman_objects.remove_volume("v"),
        lambda: podman.inspect_container("w"),
    ],
)
def test_a_podman_that_does_not_answer(
    fake: FakePodman, monkeypatch: pytest.MonkeyPatch, ask: Callable[[], object]
) -> None:
    """A lock that nobody gives back, a plugin of volumes that is dead: it is asked for so long, and ends."""
    (fake.folder / "podman").write_text(f"#!/bin/sh\necho $$ >{fake.folder}/pid\nexec sleep 1000\n")
    monkeypatch.setattr(podman_command, "PATIENCE", 0.5)
    with pytest.raises(GpusnapError, match=r"Podman did not respond within 0.5 s"):
        ask()
    assert not Path("/proc", (fake.folder / "pid").read_text().strip()).exists()


def test_a_container(fake: FakePodman) -> None:
    """What is needed of it."""
    fake.has()
    found = podman.Container(ID, "w", "gpusnap-runtime", "running", f"{fake.folder}/checkpoint")
    assert podman.inspect_container("w") == found
    fake.has(init=7, auto_remove=True, upper="/upper")
    assert podman.inspect_container("w") == replace(found, init=7, auto_remove=True, upper="/upper")


def test_no_container(fake: FakePodman) -> None:
    """Told from other failures."""
    with pytest.raises(NotFound, match="there is no container w"):
        podman.inspect_container("w")


def test_asked_ahead(fake: FakePodman) -> None:
    """Podman runs before the answer is needed; the answer is the same each time; one in vain is killed."""
    fake.has()
    with podman.Inspection("w") as asked:
        assert asked.container().id == ID
        assert asked.container() is asked.container()
    assert (fake.folder / "calls").read_text() == "container inspect -- w\n"
    program = fake.folder / "podman"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    with podman.Inspection("w") as asked:
        assert asked._question is not None
        child = asked._question._child
    assert child.returncode == -signal.SIGKILL
    with (
        podman.Inspection("w", seconds=0.05) as asked,
        pytest.raises(GpusnapError, match=r"Podman did not respond within 0\.05 s"),
    ):
        asked.container()
    program.write_text("no program")
    with podman.Inspection("w") as asked, pytest.raises(GpusnapError, match="podman cannot be run"):
        asked.container()


@pytest.mark.parametrize("late", [False, True])
def test_a_list_that_is_old(fake: FakePodman, monkeypatch: pytest.MonkeyPatch, *, late: bool) -> None:
    """What was made since it was asked for is not new to the restore that comes next."""
    monkeypatch.setattr(podman, "_FRESH", 0.0 if late else 60.0)
    fake.lists("a" * 64)
    calls = fake.folder / "calls"
    with podman.Listing() as asked:
        wait_for(lambda: calls.exists() and calls.read_text(), "the question")
        found = asked.ids()
    assert found == {"a" * 64}
    assert calls.read_text().splitlines() == ["ps --all --quiet --no-trunc"] * (1 + late)


def test_a_list_twice(fake: FakePodman) -> None:
    """The second time it is asked for anew."""
    fake.lists("a" * 64)
    with podman.Listing() as asked:
        assert asked.ids() == {"a" * 64}
        fake.lists("b" * 64)
        assert asked.ids() == {"b" * 64}


@pytest.mark.parametrize(
    ("action", "said"), [("none", ""), ("kill", ""), ("stop", "=stop"), ("restart", "=restart")]
)
def test_a_health_check_that_would_end_it(fake: FakePodman, action: str, said: str) -> None:
    """A suspended container is not shown as running to Podman, where only a kill can be refused."""
    fake.has(status="paused", Config={"HealthcheckOnFailureAction": action})
    found = podman.inspect_container("w")
    assert found.on_failure == ("" if action == "none" else action)
    failing = pytest.raises(ContainerError, match=rf"would end it \(--health-on-failure{said}\)")
    with failing if said else nullcontext():
        podman.check(found, asleep=True)
    podman.check(replace(found, status="running"))


def test_no_podman(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One sentence."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GpusnapError, match="podman cannot be run: it does not exist"):
        podman.inspect_container("w")


@pytest.mark.parametrize(
    ("runtime", "status", "said"),
    [
        ("gpusnap-runtime", "paused", "podman unpause w"),
        ("gpusnap-runtime", "exited", "is not running: it is exited; podman start w"),
        (
            "crun",
            "running",
            "; if it uses no GPU, run podman container checkpoint w;",
        ),
        ("/usr/bin/runc", "running", "uses the runtime /usr/bin/runc"),
    ],
)
def test_what_cannot_be_checkpointed(fake: FakePodman, runtime: str, status: str, said: str) -> None:
    """Each says what to do."""
    (fake.folder / "path").write_text("/usr/bin/crun\n")
    fake.has(runtime=runtime, status=status)
    with pytest.raises(ContainerError) as raised:
        podman.check(podman.inspect_container("w"))
    assert said in raised.value.sentence()


def test_one_that_a_checkpoint_ended(fake: FakePodman) -> None:
    """podman start would begin it from nothing, so that is not what is said to do."""
    fake.has(status="exited", checkpointed=True)
    with pytest.raises(ContainerError) as raised:
        podman.check(podman.inspect_container("w"))
    assert "a checkpoint stopped it; podman container restore w restores it" in raised.value.sentence()


def test_one_whose_host_was_restarted(fake: FakePodman) -> None:
    """Podman forgets then that a checkpoint ended it; the images are still there."""
    fake.has(status="exited")
    (fake.folder / "checkpoint").mkdir()
    (fake.folder / "checkpoint/inventory.img").touch()
    with pytest.raises(ContainerError) as raised:
        podman.check(podman.inspect_container("w"))
    assert "Podman has a checkpoint of it; podman container restore w continues it" in raised.value.sentence()


def test_in_the_place_of_another(fake: FakePodman, tmp_path: Path) -> None:
    """gpusnap-runtime may go by another runtime's name, or by a path."""
    (tmp_path / "gpusnap-runtime").touch()
    (tmp_path / "crun").symlink_to("gpusnap-runtime")
    (fake.folder / "path").write_text(f"{tmp_path}/crun\n")
    for runtime in ("crun", f"{tmp_path}/crun", "/opt/gpusnap-runtime"):
        fake.has(runtime=runtime)
        podman.check(podman.inspect_container("w"))


def test_a_command_that_prints_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it prints does not fill the disk of the host: only the end of it is kept, while it runs."""
    program = tmp_path / "podman"
    program.write_text(
        "#!/bin/sh\nhead -c 20000000 /dev/zero\n"
        'until [ "$(stat -L -c %b /proc/$$/fd/1)" -lt 100 ]; do sleep 0.02; done\necho last; exit 3\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert podman.execute("w", ["noise"], {}, seconds=180) == (3, "last\n\n")


def test_those_with_processes(fake: FakePodman) -> None:
    """One that is being stopped has them until they end."""
    states = ["created", "exited", "paused", "running", "stopping"]
    listed = [{"Id": at, "Names": [state], "Pid": 7, "State": state} for at, state in enumerate(states)]
    fake.lists(json.dumps(listed))
    found = podman_objects.with_processes()
    assert [(each.name, each.paused) for each in found] == [
        ("paused", True),
        ("running", False),
        ("stopping", False),
    ]
    fake.lists('[{"Id": 1}]')
    with pytest.raises(GpusnapError, match="cannot be parsed"):
        podman_objects.with_processes()


_PAUSES = """\
#!/bin/sh
F={folder}
case "$1" in
pause) until [ -e $F/begin ]; do sleep 0.02; done; echo paused >$F/status;;
unpause)
    echo >>$F/unpauses
    [ "$(cat $F/status)" = paused ] || {{ {then}; echo 'Error: it is not paused' >&2; exit 125; }}
    echo running >$F/status;;
container) cat $F/status;;
esac
"""


@contextmanager
def late_pause(fake: FakePodman, then: str, *, whom: str = ID) -> Iterator[subprocess.Popen[bytes]]:
    """A Podman that pauses the container once there is a file `begin`; `then`: what an early unpause does."""
    (fake.folder / "podman").write_text(_PAUSES.format(folder=fake.folder, then=then))
    (fake.folder / "status").write_text("running\n")
    with subprocess.Popen(["podman", "pause", whom]) as child:
        try:
            yield child
        finally:
            child.kill()


def test_a_pause_that_comes_after_the_unpause(fake: FakePodman) -> None:
    """A killed gpusnap has left it: the container goes on in the end."""
    with late_pause(fake, "touch $F/begin") as pause:
        podman.go_on(ID)
        assert pause.wait(60) == 0
    assert (fake.folder / "status").read_text() == "running\n"


def test_a_pause_that_does_not_end(fake: FakePodman, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for so long, and named."""
    monkeypatch.setattr(podman, "_PAUSING", 0.2)
    with late_pause(fake, ":") as pause, pytest.raises(GpusnapError) as caught:
        podman.go_on(ID)
    assert f"(process {pause.pid}) has not ended within 0.2 s" in str(caught.value)


def test_one_that_is_not_paused(fake: FakePodman) -> None:
    """Nobody is waited for: what people pause by its name they pause on purpose."""
    with late_pause(fake, ":", whom="w") as other:
        podman.go_on(ID)
        assert other.poll() is None
    assert (fake.folder / "unpauses").read_text() == "\n"


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
@pytest.mark.parametrize("ends", [True, False])
def test_an_interrupted_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """Podman has done it when the caller undoes it, unless it does not end; it is not killed."""
    stand_in, done = tmp_path / "podman", tmp_path / "done"
    seconds = 0.3 if ends else 60
    stand_in.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid; kill -TERM $PPID\nsleep {seconds}; : >{done}\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if not ends:
        monkeypatch.setattr(podman_command, "DYING", 0.2)
    with signals_raise(), pytest.raises(Signalled):
        podman.pause(ID)
    assert done.exists() == ends
    if not ends:
        os.killpg(int((tmp_path / "pid").read_text()), signal.SIGKILL)
