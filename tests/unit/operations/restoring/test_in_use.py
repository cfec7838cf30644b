"""What is in use already at a restore: container, volume, port and address have sentences of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_podman import FakePodman

from gpusnap.operations.restoring import in_use
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.snapshot.records import suspensions


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    found = FakePodman(tmp_path / "podman", monkeypatch)
    found.has(name="other")
    return found


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "cannot listen on the TCP port: listen tcp4 :8080: bind: address already in use",
            (
                "the TCP port 8080 of this host, which the container publishes, is in use; give other ports "
                "with --publish HOST-PORT:CONTAINER-PORT, or stop the program that listens there (ss "
                "--listening --processes --tcp 'sport = 8080' shows it) [GPS-519]"
            ),
        ),
        (
            "cannot listen on the UDP port: listen udp4 127.0.0.1:53: bind: address already in use",
            (
                "the UDP port 127.0.0.1:53 of this host, which the container publishes, is in use; give "
                "other ports with --publish HOST-PORT:CONTAINER-PORT, or stop the program that listens there "
                "(ss --listening --processes --udp 'sport = 53' shows it) [GPS-519]"
            ),
        ),
        (
            "CRIU says: inet: Can't bind inet socket (id 8): Address already in use (/restore.log)",
            (
                "a port on which the container listens is in use in the network where it is restored; stop "
                "the program that listens there (ss --listening --processes --tcp shows it). A container in "
                "the host's network (podman run --network host) shares its ports, and --publish has no "
                "effect: a second copy needs its own network [GPS-519]"
            ),
        ),
        (
            "IPAM error: requested ip address 10.99.0.7 is already allocated to container ID 4b5b",
            (
                "the address 10.99.0.7 of the container is in use by the container other; give "
                "--ignore-static-ip to use another one, or stop that container [GPS-520]"
            ),
        ),
        (
            "IPAM error: requested ip address fd00::7 is already allocated",
            (
                "the address fd00::7 of the container is in use by another container; give "
                "--ignore-static-ip to use another one, or stop that container [GPS-520]"
            ),
        ),
        (
            "volume with name vol already exists. Use --ignore-volumes to not restore content of volumes",
            (
                "Podman already has a volume vol; give --ignore-volumes to use it as it is, or remove it "
                "(podman volume rm vol) to restore the files of the checkpoint [GPS-518]"
            ),
        ),
        (
            'creating container storage: the container name "w" is already in use by 0bccc8f81a37. You',
            (
                "Podman already has a container w, and it is running; give a second copy another name with "
                "--name; to return to the checkpoint, and lose what the container has done since, remove it "
                "first: podman rm --force other [GPS-508]"
            ),
        ),
    ],
)
def test_each_its_own(fake: FakePodman, text: str, sentence: str) -> None:
    found = in_use.explain(GpusnapError(f"Podman failed: {text}"), "w")
    assert found is not None
    assert found.sentence() == sentence


def test_the_same_container_under_another_name(fake: FakePodman) -> None:
    """Its ID is in use, and its name is not."""
    (fake.folder / "inspect.json").unlink()
    found = in_use.explain(GpusnapError("creating container storage: that ID is already in use"), "w")
    assert found is not None
    assert str(found) == "Podman already has the container of this checkpoint, under another name"


@pytest.mark.parametrize(
    ("asleep", "sentence"),
    [
        (True, "w, and it is suspended; gpusnap resume w continues it; give a second copy another name "),
        (False, "w, and it is paused; podman unpause w continues it; give a second copy another name "),
    ],
)
def test_one_that_waits(
    fake: FakePodman, monkeypatch: pytest.MonkeyPatch, asleep: bool, sentence: str
) -> None:
    """Its processes are there: nobody is told only to remove it."""
    fake.has(status="paused")
    monkeypatch.setattr(suspensions, "find_by_container", lambda _: object() if asleep else None)
    found = in_use.explain(GpusnapError('the container name "w" is already in use by 0bccc8f81a37'), "w")
    assert found is not None
    assert found.sentence().startswith(f"Podman already has a container {sentence}")


def test_one_that_a_checkpoint_has_ended(fake: FakePodman) -> None:
    """Its memory may be nowhere else: how it continues comes first."""
    fake.has(status="exited", checkpointed=True)
    found = in_use.explain(GpusnapError('the container name "w" is already in use by 0bccc8f81a37'), "w")
    assert found is not None
    assert found.sentence() == (
        "Podman already has a container w, which a checkpoint stopped; podman container restore w "
        "continues it from that checkpoint, and podman rm w loses that checkpoint unless gpusnap ls shows "
        "it with a name; or give another name with --name [GPS-508]"
    )


def test_one_whose_podman_was_killed(fake: FakePodman) -> None:
    """Podman has noted no checkpoint, but has a complete one: nobody is told to remove it."""
    fake.has(status="stopped")
    (fake.folder / "checkpoint").mkdir()
    (fake.folder / "checkpoint/inventory.img").touch()
    found = in_use.explain(GpusnapError('the container name "w" is already in use by 0bccc8f81a37'), "w")
    assert found is not None
    assert found.hint.startswith("podman container cleanup w && podman container restore w continues it")


def test_one_whose_host_was_restarted(fake: FakePodman) -> None:
    """Podman forgets then that a checkpoint has ended it: nobody is told only to remove it."""
    fake.has(status="exited")
    (fake.folder / "checkpoint").mkdir()
    (fake.folder / "checkpoint/inventory.img").touch()
    found = in_use.explain(GpusnapError('the container name "w" is already in use by 0bccc8f81a37'), "w")
    assert found is not None
    assert found.sentence() == (
        "Podman already has a container w, and a checkpoint of it; podman container restore w continues it "
        "from that checkpoint, and podman rm w loses that checkpoint unless gpusnap ls shows it with a name; "
        "or give another name with --name [GPS-508]"
    )


@pytest.mark.parametrize("text", ["no such image", "address already in use", "the device is already in use"])
def test_others_are_left_alone(fake: FakePodman, text: str) -> None:
    assert in_use.explain(GpusnapError(text), "w") is None
