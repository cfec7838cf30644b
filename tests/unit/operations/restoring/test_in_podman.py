"""A checkpoint that Podman completed after the command for it was killed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from fake_podman import ID, FakePodman
from kept_checkpoints import an_archive, hand_over_pages, keep, keep_pages
from stopped_container import make_stopped

from gpusnap.base.user_errors import NotFound
from gpusnap.checkpoints.locator import InStore
from gpusnap.oci.store.store import Store
from gpusnap.operations.restoring import in_podman
from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError
from gpusnap.runtime_shim.snapshot.recovery import restored_containers
from gpusnap.runtime_shim.snapshot.restoring.record import Restore

# One more than a PID can be (proc_sys_kernel(5), pid_max).
_NOBODY = 4194304


@pytest.fixture
def store(host_store: Store) -> Store:
    """This host's."""
    return host_store


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    """It has a container w that a checkpoint ended, whose memory went to a store."""
    return make_stopped(tmp_path, monkeypatch)


def refused(store: Store, wanted: str = "w") -> NotFound:
    with pytest.raises(NotFound) as caught:
        in_podman.resolve(InStore(store, wanted))
    assert caught.value.code == "GPS-701"
    return caught.value


def test_its_memory_is_in_the_store(store: Store, fake: FakePodman) -> None:
    """The error has the command that continues it, and `left` finds it."""
    keep_pages(store)
    error = refused(store)
    assert str(error).endswith("'w', but Podman has a checkpoint of the container w")
    assert error.hint.startswith("podman container restore w continues it")
    assert [each.container.id for each in in_podman.list_restorable(store)] == [ID]


def test_podman_was_killed_too(store: Store, fake: FakePodman) -> None:
    """It has noted no checkpoint, and not cleaned up; what is whole on disk can be restored all the same."""
    keep_pages(store)
    fake.has(status="stopped", checkpointed=False)
    assert refused(store).hint.startswith(
        "podman container cleanup w && podman container restore w continues it"
    )
    assert [each.container.id for each in in_podman.list_restorable(store)] == [ID]
    for image in (fake.folder / "checkpoint").glob("inventory.img"):
        image.unlink()
    assert "Podman" not in str(refused(store))
    assert in_podman.list_restorable(store) == ()


def test_its_memory_is_gone(store: Store, tmp_path: Path, fake: FakePodman) -> None:
    """Podman could not restore it, so nothing is promised."""
    (tmp_path / "other").mkdir()
    keep(store, an_archive(tmp_path / "other"), ["other"])
    assert refused(store).hint == "gpusnap ls lists the checkpoints"
    assert in_podman.list_restorable(store) == ()


def test_memory_of_an_earlier_checkpoint(store: Store, fake: FakePodman) -> None:
    """The store has memory of that container, but not all that Podman's checkpoint needs."""
    keep_pages(store, salt=7)
    assert in_podman.list_restorable(store) == ()
    assert "Podman" not in str(refused(store))
    keep_pages(store)
    assert [each.container.id for each in in_podman.list_restorable(store)] == [ID]


def test_memory_that_a_killed_command_was_to_take(store: Store, fake: FakePodman) -> None:
    """It counts as what is in the store: a restore takes it over."""
    hand_over_pages(store, "handed")
    assert [each.container.id for each in in_podman.list_restorable(store)] == [ID]


def test_podman_does_not_answer(
    store: Store, fake: FakePodman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is an error, in time: nobody can say that no container needs the memory. No Podman is none."""
    keep_pages(store)
    monkeypatch.setattr(in_podman, "_DESCRIBING", 0.2)
    program = fake.folder / "podman"
    works = program.read_text()
    for name in ("ps", "container"):
        program.write_text(works.replace("F=", f'[ "$1" != {name} ] || exec tail -f /dev/null\nF=', 1))
        with pytest.raises(GpusnapError, match="did not respond within"):
            in_podman.list_restorable(store)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert in_podman.list_restorable(store) == ()


def test_others(store: Store, fake: FakePodman) -> None:
    """Not one that runs, one of another name, or one for which another store was named."""
    keep_pages(store)
    assert "Podman" not in str(refused(store, "v"))
    elsewhere = Store(os.path.dirname(store.path) + "/elsewhere")
    keep_pages(elsewhere)
    assert "Podman" not in str(refused(elsewhere))
    fake.has(status="running", checkpointed=True)
    assert "Podman" not in str(refused(store))
    assert in_podman.list_restorable(store) == ()
    assert in_podman.list_restorable(Store(store.path + "-none")) == ()


def test_without_a_gpu(store: Store, fake: FakePodman) -> None:
    """All of it is with Podman."""
    keep_pages(store)
    (fake.folder / "checkpoint/gpusnap").rename(fake.folder / "gone")
    assert refused(store).hint.startswith("podman container restore w")


def test_one_that_is_there(store: Store, tmp_path: Path, fake: FakePodman) -> None:
    """It is restored from the store, whatever Podman has."""
    (tmp_path / "other").mkdir()
    digest = keep(store, an_archive(tmp_path / "other"), ["w"])
    assert in_podman.resolve(InStore(store, "w")).entry.descriptor.digest == digest


def not_cleaned_up(fake: FakePodman, runtime: str = "gpusnap-runtime") -> None:
    """Both Podmans were killed: that of the checkpoint, and that which cleans up."""
    fake.has(status="stopped", runtime=runtime)
    fake.first(
        f"case \"$1 $2\" in 'container cleanup') sed -i s/stopped/exited/ {fake.folder}/inspect.json;; esac\n"
    )
    (fake.folder / "ids").write_text(
        json.dumps([{"Id": ID, "State": "stopped"}, {"Id": "x", "State": "exited"}])
    )


def test_an_end_that_podman_has_not_noticed(fake: FakePodman) -> None:
    """recover has Podman notice it, and says how the container goes on."""
    not_cleaned_up(fake)
    (found,) = in_podman.list_unnoticed()
    assert in_podman.note_end(found).endswith(" from its checkpoint: podman container restore w")
    assert f"container cleanup {ID}\n" in (fake.folder / "calls").read_text()
    assert in_podman.list_unnoticed() == ()


def listed_as_running(fake: FakePodman, *, init: int, conmon: int, auto_remove: bool = False) -> None:
    """Podman was killed when it had removed the file of its end, and not yet recorded it."""
    state = {"Status": "running", "Pid": init, "ConmonPid": conmon}
    fake.has(auto_remove=auto_remove, State=state)
    ends = f"sed -i s/running/exited/ {fake.folder}/inspect.json"
    fake.first(f"case $1 in stop) {ends}; echo no exit code >&2; exit 125;; esac\n")
    (fake.folder / "ids").write_text(json.dumps([{"Id": ID, "State": "running", "Pid": init}]))


def test_an_end_that_podman_cannot_notice(fake: FakePodman) -> None:
    """Stopping it has Podman record the end, though that fails."""
    listed_as_running(fake, init=_NOBODY, conmon=_NOBODY)
    (found,) = in_podman.list_unnoticed()
    assert in_podman.note_end(found).endswith(" from its checkpoint: podman container restore w")
    assert f"stop --time 0 {ID}\n" in (fake.folder / "calls").read_text()
    assert in_podman.list_unnoticed() == ()


@pytest.mark.parametrize("why", ["it runs", "conmon runs", "--rm"])
def test_one_that_podman_may_notice(fake: FakePodman, why: str) -> None:
    """conmon may be about to tell of the end. Podman would remove one with --rm."""
    me = os.getpid()
    pids = {"it runs": (me, _NOBODY), "conmon runs": (_NOBODY, me), "--rm": (_NOBODY, _NOBODY)}
    init, conmon = pids[why]
    listed_as_running(fake, init=init, conmon=conmon, auto_remove=why == "--rm")
    assert in_podman.list_unnoticed() == ()


def test_the_store_of_an_end_that_podman_has_not_noticed(
    tmp_path: Path, fake: FakePodman, store: Store
) -> None:
    """The command names the store that has its memory, if that is not this host's."""
    not_cleaned_up(fake)
    other = Store(tmp_path / "other")
    keep_pages(other)
    (found,) = in_podman.list_unnoticed()
    (fake.folder / "ids").write_text(f"{ID} w")
    said = in_podman.note_end(found, [store.path, other.path])
    assert said.endswith(f" from its checkpoint: GPUSNAP_STORE={other.path} podman container restore w")


@pytest.mark.parametrize("why", ["it runs", "another runtime", "no checkpoint", "restored", "no answer"])
def test_one_that_is_left_alone(fake: FakePodman, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """One that runs, also if Podman does not know that; and one that no checkpoint has ended."""
    not_cleaned_up(fake, "crun" if why == "another runtime" else "gpusnap-runtime")
    if why == "it runs":
        fake.has(status="running")
    elif why == "no checkpoint":
        (fake.folder / "checkpoint/inventory.img").unlink()
    elif why == "restored":
        entry = Restore("k", "/image", (1, 1), ("crun",), "/bundle", "", True, ())
        monkeypatch.setattr(restored_containers, "list_living", lambda: [replace(entry, key=ID)])
    elif why == "no answer":
        (fake.folder / "ids").write_text("")
    assert in_podman.list_unnoticed() == ()


def test_it_would_be_started_anew(fake: FakePodman) -> None:
    """A clean-up applies the restart policy, which would cost the container its memory."""
    fake.has(status="stopped", HostConfig={"RestartPolicy": {"Name": "always"}})
    (fake.folder / "ids").write_text(json.dumps([{"Id": ID, "State": "stopped"}]))
    (found,) = in_podman.list_unnoticed()
    with pytest.raises(ContainerError, match="would start it again without its memory") as caught:
        in_podman.note_end(found)
    assert caught.value.code == "GPS-909"
    assert "podman update --restart=no w && podman container cleanup w && podman" in caught.value.hint
    assert "container cleanup" not in (fake.folder / "calls").read_text()
