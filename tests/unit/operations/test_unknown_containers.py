"""Containers that run without their Podman's knowledge: on file, named, and ended by nobody but who asks."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from criu_images import INVENTORY
from fakes import ID, KEY, Scene, a_manifest

from gpusnap.cli import main as cli
from gpusnap.cli.commands import recover as recover_commands
from gpusnap.engines import podman_command
from gpusnap.operations import unknown_containers
from gpusnap.operations.checkpointing import places
from gpusnap.operations.unknown_containers import choose_id, list_unknown
from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError
from gpusnap.runtime_shim.gpu.api.driver import ProcessState
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import tmpfs as stage
from gpusnap.runtime_shim.records.manifest_file import Draft
from gpusnap.runtime_shim.runtime import command_line
from gpusnap.runtime_shim.runtime.criu import scratch_files
from gpusnap.runtime_shim.runtime.identify import identify
from gpusnap.runtime_shim.runtime.podman import conmon
from gpusnap.runtime_shim.shim import overrides
from gpusnap.runtime_shim.snapshot.memory import chunk_cache
from gpusnap.runtime_shim.snapshot.records import journal, reservations
from gpusnap.runtime_shim.snapshot.recovery import restored_containers
from gpusnap.runtime_shim.snapshot.restoring import record as restore_record
from gpusnap.runtime_shim.snapshot.restoring.record import Restore, Stage

ARGUMENTS = ("--root", "/s", "--network-config-dir", "", "--transient-store=false", "container", "cleanup")
CONMON = [
    *("/usr/bin/conmon", "-c", "c0ffee", "-u", "c0ffee", "-r", "/usr/local/bin/gpusnap-runtime", "-b", "/b"),
    *("--runtime-arg", "--log-format=json", "--exit-command", "/opt/podman"),
    *(word for each in (*ARGUMENTS, "--stopped-only", "c0ffee") for word in ("--exit-command-arg", each)),
    *("--restore", "/b/checkpoint"),
]


@pytest.fixture
def scene(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Scene]:
    monkeypatch.setattr(scratch_files, "sweep", lambda _: None)
    monkeypatch.setattr(stage, "FOLDER", str(tmp_path / "stage"))
    monkeypatch.setattr(reservations, "FOLDER", str(tmp_path / "gpusnap" / "room"))
    monkeypatch.setattr(chunk_cache, "remove_stale", lambda _: None)
    with Scene(tmp_path, monkeypatch, capfd) as found:
        yield found


class Podman:
    """One that says what it is told to say, and notes how it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "podman"
        self.folder.mkdir()
        self.path = self.folder / "podman"

    def has(self, status: str) -> Podman:
        """The container is in that state; without a name there is none."""
        said = f"echo {status}" if status else f"echo 'Error: no such container {ID}' >&2; exit 125"
        return self.does(said)

    def does(self, lines: str) -> Podman:
        self.path.write_text(f'#!/bin/sh\nprintf "<%s>" "$@" >>{self.folder}/asked\n{lines}\n', "ascii")
        self.path.chmod(0o755)
        return self

    def asked(self) -> str:
        return (self.folder / "asked").read_text()


@pytest.fixture
def podman(tmp_path: Path) -> Podman:
    return Podman(tmp_path)


def came_up(scene: Scene, podman: Podman, *, told: bool = True, **changed: object) -> Restore:
    """A container that a Podman had restored, and that runs; what is on file of it."""
    init = proc.process(scene.family.init)
    assert init is not None
    scene.runtime.knows(scene.state(), [*scene.family.pids, scene.family.init])
    scene.image.mkdir(exist_ok=True)
    (scene.image / "inventory.img").touch()
    entry = Restore(
        key=KEY,
        image=str(scene.image),
        owner=(4194000, 77),
        command=(str(scene.runtime.path), "--root", "/r"),
        bundle=str(scene.bundle),
        pid_file="",
        detach=True,
        processes=(),
        stage=Stage.GPUS,
        init=(init.pid, init.start),
        config="{}",
        podman=(str(podman.path), "--root", "/s", "--network-config-dir", ""),
    )
    entry = replace(entry, **changed)  # type: ignore[arg-type]
    restore_record.record_start(entry)
    if told:
        restored_containers.record_report(KEY)
    (found,) = restored_containers.list_living()
    assert found == replace(entry, config=None, told=told)
    return found


def test_of_conmon() -> None:
    """Podman's path and its global options, with those that are empty; of another container none."""
    found = ("/opt/podman", "--root", "/s", "--network-config-dir", "", "--transient-store=false")
    assert conmon.podman_of(CONMON, "c0ffee") == found


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["conmon", "-c", "c0ffee"],
        ["c0ffe" if word == "c0ffee" else word for word in CONMON],
        ["/opt/docker" if word == "/opt/podman" else word for word in CONMON],
        ["prune" if word == "cleanup" else word for word in CONMON],
    ],
    ids=["none", "another engine's", "another container", "another program", "another command"],
)
def test_of_no_podman(words: list[str]) -> None:
    """Whoever cannot be asked for certain is not asked."""
    assert conmon.podman_of(words, "c0ffee") == ()


def test_whose_parent_is_no_conmon() -> None:
    """As of a restore by hand, or by containerd's shim."""
    assert conmon.podman_above(ID) == ()


@pytest.mark.parametrize("by_podman", [True, False], ids=["Podman", "another"])
def test_a_restore_is_on_file(scene: Scene, monkeypatch: pytest.MonkeyPatch, *, by_podman: bool) -> None:
    """From when the container runs: at first as one that its engine has not been told of."""
    asks = ("/opt/podman", "--root", "/s") if by_podman else ()
    monkeypatch.setattr(conmon, "podman_above", lambda container: asks if container == ID else ("?",))
    seen: list[bool] = []
    tell = restored_containers.record_report

    def told(key: str) -> None:
        seen.extend(entry.told for entry in restored_containers.list_living())
        tell(key)

    monkeypatch.setattr(restored_containers, "record_report", told)
    pid = scene.driver.use(scene.family.spawn(), state=ProcessState.CHECKPOINTED)
    scene.image.mkdir()
    draft = Draft(str(scene.image))
    draft.begin()
    draft.prepare(a_manifest(pids=[pid]))
    draft.finish(a_manifest(pids=[pid]))
    (scene.image / "inventory.img").write_bytes(INVENTORY)
    assert scene.restore("--detach").code == 0
    assert restore_record.entries() == ()
    found = restored_containers.list_living()
    assert [(each.podman, each.told) for each in found] == ([(asks, True)] if by_podman else [])
    assert seen == ([False] if by_podman else [])
    assert all(each.init and each.init[0] == scene.family.init for each in found)
    if by_podman:
        assert f"gpusnap recover {ID}" in scene.restore("--detach").sentence()


def test_no_room_on_file(scene: Scene, podman: Podman, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container runs all the same; nothing wrong stays on file."""
    came_up(scene, podman, told=False)

    def full(*_: object) -> None:
        raise GpusnapError("no room")

    monkeypatch.setattr(journal, "write_document", full)
    restored_containers.record_report(KEY)
    assert restored_containers.list_living() == ()


def test_swept(scene: Scene, podman: Podman) -> None:
    """What is on file of a container that has ended, and of no other."""
    came_up(scene, podman)
    restored_containers.sweep()
    assert len(restored_containers.list_living()) == 1
    scene.family.end(scene.family.init)
    restored_containers.sweep()
    assert journal.list_noted(journal.RESTORED) == ()


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("created", "Podman lists it as created"),
        ("exited", "Podman lists it as exited"),
        ("", "Podman knows no such container"),
        ("running", ""),
        ("paused", ""),
        ("stopping", ""),
        ("initialized", ""),
    ],
)
def test_what_podman_says(scene: Scene, podman: Podman, status: str, said: str) -> None:
    """It is asked with its own options; what it is at work on, or knows, is named and ended by nobody."""
    entry = came_up(scene, podman.has(status))
    found, lines = list_unknown(restored_containers.list_living())
    assert lines == ()
    assert podman.asked().startswith("<--root></s><--network-config-dir><><container><inspect>")
    if not said:
        assert found == ()
        assert unknown_containers.end_container(entry) is None
        assert scene.runtime.calls("delete") == []
        assert proc.is_running(scene.family.init)
        return
    (one,) = found
    assert (one.container, one.processes) == (ID, (scene.family.init,))
    assert one.why == (
        f"it was restored and runs under crun (process {scene.family.init}), but {said}; to end it: "
        f"gpusnap recover {ID}"
    )
    assert proc.is_running(scene.family.init), "saying so ended it"
    assert unknown_containers.end_container(entry) == f"it was killed: {said}"
    assert scene.runtime.calls("delete") == [f"--root /r delete --force {ID}"]
    assert journal.list_noted(journal.RESTORED) == ()


def test_its_checkpoint_is_gone(scene: Scene, podman: Podman) -> None:
    """Podman was killed after it had removed the checkpoint: `recover` says so beforehand."""
    came_up(scene, podman.has("exited"))
    (scene.image / "inventory.img").unlink()
    ((one,), _) = list_unknown(restored_containers.list_living())
    assert one.why.endswith(
        "but Podman lists it as exited; Podman has removed its checkpoint, so ending the container loses "
        f"its work unless another copy exists; to end it: gpusnap recover {ID}"
    )


@pytest.mark.parametrize("told", [True, False])
def test_no_answer(scene: Scene, podman: Podman, monkeypatch: pytest.MonkeyPatch, *, told: bool) -> None:
    """Nothing is certain then, unless gpusnap-runtime was killed before Podman could hear of a success."""
    for name in ("_PATIENCE", "_SHORT"):
        monkeypatch.setattr(unknown_containers, name, 0.2)
    entry = came_up(scene, podman.does("exec sleep 600"), told=told)
    found, lines = list_unknown(restored_containers.list_living())
    if told:
        assert found == ()
        (line,) = lines
        assert "cannot determine whether Podman knows it: Podman did not respond within 0.2 s" in line
        with pytest.raises(GpusnapError, match="did not respond"):
            unknown_containers.end_container(entry)
        assert proc.is_running(scene.family.init)
    else:
        assert "gpusnap-runtime was killed before it could report it to Podman" in found[0].why
        assert unknown_containers.end_container(entry) is not None
        assert scene.runtime.calls("delete") != []


def test_another_error_of_podmans(scene: Scene, podman: Podman) -> None:
    """Such as of its storage: nobody can tell."""
    came_up(scene, podman.does("echo 'Error: the storage is gone' >&2; exit 125"))
    found, (line,) = list_unknown(restored_containers.list_living())
    assert found == ()
    assert "Podman failed: the storage is gone" in line


def test_it_ends_meanwhile(scene: Scene, podman: Podman) -> None:
    """While Podman is asked, which says then that it does not run: that is no news."""
    init = scene.family.init
    podman.does(f"kill -9 {init}; while [ -e /proc/{init}/root/. ]; do :; done; echo exited")
    entry = came_up(scene, podman)
    assert list_unknown([entry]) == ((), ())
    assert scene.runtime.calls("delete") == []


def test_while_a_gpusnap_is_at_work(scene: Scene, podman: Podman) -> None:
    """It is left to that one, and Podman, which may have the lock, is not asked."""
    entry = came_up(scene, podman.has("created"))
    with journal.hold(KEY):
        assert list_unknown([entry]) == ((), ())
        with pytest.raises(GpusnapError, match="another gpusnap is still working"):
            unknown_containers.end_container(entry)
    assert not (podman.folder / "asked").exists()
    own = proc.process(os.getpid())
    assert own is not None
    assert list_unknown([replace(entry, owner=(own.pid, own.start))]) == ((), ())


def test_another_of_that_id(scene: Scene, podman: Podman) -> None:
    """Restored again since, or known to the runtime by another init: it is left alone."""
    entry = came_up(scene, podman.has("created"))
    assert entry.init is not None
    scene.runtime.knows(scene.state(pid=scene.family.spawn()), [])
    with pytest.raises(ContainerError, match="is now another one"):
        unknown_containers.end_container(entry)
    restore_record.write(replace(entry, owner=(4194001, 78)), journal.RESTORED)
    assert unknown_containers.end_container(entry) == "it has exited"
    assert scene.runtime.calls("delete") == []


def test_the_command(
    scene: Scene,
    podman: Podman,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """`recover` names it, also as JSON; with its ID it ends it; of one that Podman knows it says nothing."""
    monkeypatch.setattr(overrides, "FOLDER", str(tmp_path / "orders"))
    monkeypatch.setattr(places, "FOLDER", str(tmp_path / "in-progress"))
    monkeypatch.setattr(reservations, "sweep", lambda: None)

    def recover(*words: str) -> tuple[str, str]:
        cli.command.main(["recover", *words], standalone_mode=False)
        said = capfd.readouterr()
        return said.out, said.err

    came_up(scene, podman.has("running"))
    assert recover() == ("", "nothing to recover\n")
    assert recover("--list", "--json") == ("[]\n", "")
    assert recover(ID) == ("", "nothing to recover\n")
    podman.has("exited")
    runs = f"it was restored and runs under crun (process {scene.family.init})"
    line = f"{ID}  {runs}, but Podman lists it as exited"
    for words in ((), ("--list",)):
        out, err = recover(*words)
        assert (out.startswith(line), err) == (True, "")
    (found,) = json.loads(recover("--list", "--json")[0])
    assert (found["container"], found["kind"], found["at_work"]) == (ID, "unknown", False)
    assert recover(ID[:6])[0] == f"{ID}  it was killed: Podman lists it as exited\n"
    assert not proc.is_running(scene.family.init)
    assert recover() == ("", "nothing to recover\n")


def test_the_list_of_one_container(
    scene: Scene, podman: Podman, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is in the store is listed for all containers, not for one."""
    monkeypatch.setattr(overrides, "FOLDER", str(tmp_path / "orders"))
    monkeypatch.setattr(places, "FOLDER", str(tmp_path / "in-progress"))
    asked: list[object] = []

    def tell(store: object, stopped: object) -> bool:
        asked.append(store)
        return False

    monkeypatch.setattr(recover_commands, "_tell_memory", tell)
    came_up(scene, podman.has("exited"))
    cli.command.main(["recover", "--list", ID], standalone_mode=False)
    assert asked == []
    cli.command.main(["recover", "--list"], standalone_mode=False)
    assert len(asked) == 1


def test_cut_off_at_its_end(
    scene: Scene, podman: Podman, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """gpusnap-runtime was killed when all ran: the same command says so, and ends nothing."""
    monkeypatch.setattr(recover_commands, "find_driver", lambda: scene.driver)
    monkeypatch.setattr(reservations, "sweep", lambda: None)
    entry = came_up(scene, podman.has("created"))
    restore_record.write(replace(entry, told=False))
    cli.command.main(["recover", ID], standalone_mode=False)
    first, second = capfd.readouterr().out.splitlines()
    assert first == f"{ID}  running: {scene.family.init}"
    assert second.endswith(f"but Podman lists it as created; to end it: gpusnap recover {ID}")
    assert restore_record.entries() == ()
    assert [entry.told for entry in restored_containers.list_living()] == [False]
    assert proc.is_running(scene.family.init)


DB1, DB2, CAFE = ("db1" + "0" * 61), ("db2" + "0" * 61), ("cafe" + "0" * 60)


def named(podman: Podman, monkeypatch: pytest.MonkeyPatch, **ids: str) -> None:
    """Have a Podman in PATH that knows containers by name, and another whose ID begins with de."""
    monkeypatch.setenv("PATH", f"{podman.folder}:{os.environ['PATH']}")
    cases = "".join(f'*" {name}") echo {ident} {name};; ' for name, ident in ids.items())
    cases += f'*" de") echo {"de" * 32} other;; '
    podman.does(f'case "$*" in {cases} *) echo "Error: no such container x" >&2; exit 125;; esac')


def test_which_is_meant(podman: Podman, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its ID, a name that Podman knows, or the beginning of its ID."""
    ids = [DB1, DB2, CAFE, "web-2"]
    named(podman, monkeypatch, w=DB1, other="f" * 64)
    assert choose_id(DB1, ids) == DB1
    assert choose_id("web-2", ids) == "web-2"
    assert choose_id("w", ids) == DB1
    assert choose_id("c", ids) == CAFE
    assert choose_id("x", ids) == "x"
    assert choose_id("de", [*ids, "de" + "1" * 62]) == "de" + "1" * 62
    with pytest.raises(GpusnapError, match="the IDs of several containers begin with db"):
        choose_id("db", ids)


def test_which_is_not_meant(podman: Podman, monkeypatch: pytest.MonkeyPatch) -> None:
    """None by nothing; none by the name of another container, of which its ID or name is the beginning."""
    named(podman, monkeypatch, cafe="f" * 64)
    assert choose_id("", [CAFE]) == ""
    assert choose_id("cafe", [CAFE]) == "cafe"
    assert choose_id("web", ["web-2"]) == "web"


def test_whether_it_is_a_name_is_open(podman: Podman, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Podman's answer a few digits may be a name; an ID as Podman prints it is none."""
    named(podman, monkeypatch)
    podman.does("echo 'Error: the storage is gone' >&2; exit 125")
    with pytest.raises(
        GpusnapError, match="cannot determine whether a container has the name cafe"
    ) as raised:
        choose_id("cafe", [CAFE])
    assert raised.value.hint == f"give the ID: {CAFE}"
    assert choose_id(CAFE[:12], [CAFE]) == CAFE


def test_a_podman_that_says_nothing(scene: Scene, podman: Podman) -> None:
    """It has not said that it knows no such container."""
    entry = came_up(scene, podman.does("exit 0"))
    with pytest.raises(GpusnapError, match="Podman reports nothing about the container"):
        unknown_containers.end_container(entry)
    assert proc.is_running(scene.family.init)


def test_a_podman_that_does_not_go(scene: Scene, podman: Podman, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was killed, and waits in the kernel: nobody waits for it for ever."""
    monkeypatch.setattr(podman_command, "DYING", 0.1)
    monkeypatch.setattr(unknown_containers, "_PATIENCE", 0.1)
    started: list[subprocess.Popen[bytes]] = []

    def kill(child: subprocess.Popen[bytes]) -> None:
        started.append(child)

    entry = came_up(scene, podman.does("exec sleep 600"))
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "kill", kill)
        with pytest.raises(GpusnapError, match="did not respond"):
            unknown_containers.end_container(entry)
    for child in started:
        child.kill()
        child.wait()
    assert len(started) == 1


def test_before_podman_is_told(scene: Scene, podman: Podman, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpusnap-runtime is about to say that it runs, and a busy Podman does not answer: it is not ended."""
    monkeypatch.setattr(unknown_containers, "_SHORT", 0.1)
    own = proc.process(os.getpid())
    assert own is not None
    entry = came_up(scene, podman.does("exec sleep 600"), told=False, owner=(own.pid, own.start))
    with pytest.raises(GpusnapError, match="has not reported"):
        unknown_containers.end_container(entry)
    assert proc.is_running(scene.family.init)
    assert scene.runtime.calls("delete") == []


def test_a_file_that_cannot_be_read(scene: Scene, podman: Podman, capfd: pytest.CaptureFixture[str]) -> None:
    """It keeps nobody from the others, nor from what waits to be recovered."""
    entry = came_up(scene, podman.has("exited"))
    path = Path(journal.FOLDER).parent / "restored" / "abc.restored"
    path.write_text("{", encoding="ascii")
    assert restored_containers.list_living() == (entry,)
    assert "the record of a restored container is ignored" in capfd.readouterr().err
    assert not restored_containers.is_on_file("abc", scene.family.init)


def test_who_only_looks_is_waited_for(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep, or a `recover --list`, does not make a restore or a checkpoint fail that begins just then."""
    with ExitStack() as looking:
        looking.enter_context(journal.hold(KEY))
        monkeypatch.setattr(time, "sleep", lambda _: looking.close())
        with pytest.raises(GpusnapError, match="another gpusnap"), journal.hold(KEY, patience=0):
            pass
        with journal.hold(KEY):
            pass


def test_the_root_is_on_file(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who recovers may have another XDG_RUNTIME_DIR than Podman gives, by which crun finds its containers."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/0")
    call = command_line.parse(["restore", "--image-path", "/i", "--bundle", str(scene.bundle), ID])
    assert isinstance(call, command_line.RestoreCall)
    entry = restore_record.make_record(call, identify(Path(scene.runtime.path)), a_manifest(), {})
    assert entry.command == (str(scene.runtime.path), "--root", "/run/user/0/crun")


def test_where_criu_works(scene: Scene, tmp_path: Path) -> None:
    """containerd gives a link in the bundle, which it removes together with that."""
    (tmp_path / "work").mkdir()
    (tmp_path / "link").symlink_to("work")
    words = ["--image-path", "/i", "--work-path", str(tmp_path / "link"), "--bundle", str(scene.bundle)]
    call = command_line.parse(["restore", *words, ID])
    assert isinstance(call, command_line.RestoreCall)
    entry = restore_record.make_record(call, identify(Path(scene.runtime.path)), a_manifest(), {})
    assert entry.work == str(tmp_path / "work")


def test_room_is_swept(tmp_path: Path) -> None:
    """What a killed restore had claimed; nothing is made where there was nothing."""
    folder = tmp_path / "gpusnap" / "room"
    reservations.sweep(str(folder))
    assert not folder.exists()
    folder.mkdir(parents=True, mode=0o700)
    (folder / "1-abc.json").write_text('{"pid": 4194000, "start": 1, "bytes": {}}')
    reservations.sweep(str(folder))
    assert os.listdir(folder) == []
