"""gpusnap in the place of podman container checkpoint and restore: pods, ports, several containers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from storehost import PLAIN, done, empty_store, gpusnap
from support import GPUWORK, GPUWORK_LINE, Container, good, podman, run, sentence

from gpusnap.oci.store.store import Store

PODMAN = ("podman", "--runtime", "gpusnap-runtime")

# busybox' sleep ends when CRIU interrupts it.
LOOP = "while :; do sleep 1; done"


@pytest.fixture(autouse=True)
def store(crun: None) -> Iterator[Store]:
    """An empty one; no pod and no container is left."""
    with empty_store(PLAIN) as made:
        yield made
    run("podman", "pod", "rm", "--all", "--force", "--time", "0")
    run("podman", "rm", "--all", "--force", "--time", "0")


def start(name: str, *options: str) -> Container:
    return Container.start(name, "--mib", "2", options=options)


def pod_of(container: str) -> str:
    pod = good(run("podman", "container", "inspect", "--format", "{{.Pod}}", container))
    return good(run("podman", "pod", "inspect", "--format", "{{.Name}}", pod))


def test_a_pod(store: Store) -> None:
    """Back into its own pod without a word; into another one by --pod; never out of one."""
    good(run("podman", "pod", "create", "--name", "p1"))
    container = start("w", "--pod", "p1")
    good(gpusnap("checkpoint", "w", "--name", "one"))
    container.remove()
    good(gpusnap("restore", "one"))
    container.goes_on()
    assert pod_of("w") == "p1"
    good(run("podman", "pod", "rm", "--force", "--time", "0", "p1"))
    assert sentence(gpusnap("restore", "one")).endswith("and name it with --pod POD [GPS-522]")
    good(run("podman", "pod", "create", "--name", "p3", "--share", "pid"))
    assert sentence(gpusnap("restore", "one", "--pod", "p3")).endswith("with --pod POD [GPS-522]")
    good(run("podman", "pod", "create", "--name", "p2"))
    good(gpusnap("restore", "one", "--pod", "p2"))
    container.goes_on()
    assert pod_of("w") == "p2"


def infra_of(pod: str) -> str:
    return good(run("podman", "pod", "inspect", "--format", "{{.InfraContainerID}}", pod))


def test_a_pod_was_stopped(store: Store) -> None:
    """A restore in place: with its infra container again, whose PID is another one; never without."""
    good(run("podman", "pod", "create", "--name", "p1"))
    container = start("w", "--pod", "p1")
    good(gpusnap("checkpoint", "w", "--name", "one"))
    good(run("podman", "pod", "create", "--name", "p2"))
    for pod in ("p1", "p2"):  # the second has an import, whose annotation is another one
        if pod == "p2":
            good(run("podman", "pod", "rm", "--force", "--time", "0", "p1"))
            good(gpusnap("restore", "one", "--pod", "p2"))
            container.goes_on()
            assert pod_of("w") == "p2"
            good(podman("container", "checkpoint", "w"))
        good(run("podman", "pod", "stop", "--time", "0", pod))
        infra = infra_of(pod)
        failed = podman("container", "restore", "w")
        assert f"infra container {infra[:12]} does not run" in failed.err
        assert "[GPS-531]" in failed.err
        good(run("podman", "start", infra))
        good(podman("container", "restore", "w"))
        container.goes_on()
        pids = [good(run("podman", "inspect", "--format", "{{.State.Pid}}", each)) for each in ("w", infra)]
        for kind in ("ipc", "uts"):
            assert len({os.readlink(f"/proc/{pid}/ns/{kind}") for pid in pids}) == 1


def test_a_second_copy_has_other_ports(store: Store) -> None:
    """Both run beside each other."""
    start("w", "--network", "bridge", "--publish", "18080:80")
    good(gpusnap("checkpoint", "-R", "w", "--name", "one"))
    assert sentence(gpusnap("restore", "one", "-n", "second")).endswith("[GPS-519]")
    good(gpusnap("restore", "one", "-n", "second", "-p", "18081:80"))
    Container("w").goes_on()
    Container("second").goes_on()
    assert run("podman", "port", "second").out.endswith(":18081\n")


def test_a_container_that_notifies(store: Store, tmp_path: Path) -> None:
    """With --sdnotify=container, as Quadlet's Notify=true: conmon has the directory for its socket."""
    words = [
        "--name",
        "w",
        "--sdnotify=container",
        "--device",
        "nvidia.com/gpu=0",
        "-v",
        f"{GPUWORK}:/gpuwork",
    ]
    line = ["podman", "--runtime", "gpusnap-runtime", "run", "-d", *words, "localhost/base", *GPUWORK_LINE]
    container, archive = Container("w"), tmp_path / "w.tar"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(tmp_path / "notify"))
        good(run(*line, env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}))
        container.goes_on()
        good(gpusnap("checkpoint", "w", "--name", "w:1"))
        container.remove()
        good(gpusnap("restore", "w:1"))
        container.goes_on()
        good(gpusnap("restore", "w:1", "--name", "second"))
        Container("second").goes_on()
        good(gpusnap("checkpoint", "w", "--to", archive))
        container.remove()
        assert f"run gpusnap copy {archive} NAME" in sentence(gpusnap("restore", archive))
        good(gpusnap("copy", archive, "w:2"))
        good(gpusnap("restore", "w:2"))
        container.goes_on()


def test_several(store: Store, tmp_path: Path) -> None:
    """All that run, with and without a GPU; a failure of one stops no other; and all back at once."""
    first, second = start("a"), start("b")
    good(podman("run", "-d", "--name", "plain", "localhost/base", "sh", "-c", LOOP))
    good(podman("run", "-d", "--name", "other", "localhost/base", "sleep", "1000", runtime="crun"))
    found = gpusnap("checkpoint", "--all", "--json")
    good(found)
    assert "skipped, because they do not use gpusnap-runtime: other" in found.err
    made = json.loads(found.out)["results"]
    assert [each["container"] for each in made] == ["a", "b", "plain"]
    assert [bool(each["memory"]) for each in made] == [True, True, False]
    for name in ("a", "b", "plain"):
        good(run("podman", "rm", name))
    again = gpusnap("restore", *(each["name"] for each in made), "none:1", "--json")
    assert again.code == 3
    assert "gpusnap: none:1: " in again.err
    assert [each.get("container", each.get("what")) for each in json.loads(again.out)["results"]] == [
        *("a", "b", "plain"),
        "none:1",
    ]
    first.goes_on()
    second.goes_on()
    assert done("checkpoint", "-l", "-e", str(tmp_path / "x"), "-R")["file"] == str(tmp_path / "x")


def test_what_podman_would_end_and_not_export(store: Store) -> None:
    """The container runs on."""
    start("a")
    container = start("b", "--pid", "container:a")
    assert "[GPS-204]" in sentence(gpusnap("checkpoint", "b"))
    container.goes_on()
    assert gpusnap("doctor", "b").code == 1


def test_what_podman_cannot_restore(store: Store, tmp_path: Path) -> None:
    """Said before, by doctor as well; --force makes it all the same."""
    (tmp_path / "f").touch()
    container = start("w", "-v", f"{tmp_path}:/over:O", "--health-cmd", "true")
    assert "has an overlay or image mount" in sentence(gpusnap("checkpoint", "w"))
    container.goes_on()
    told = json.loads(gpusnap("doctor", "w", "--json").out)["checks"]
    assert [each["verdict"] for each in told if each["name"] == "Podman's options"] == ["failure", "warning"]
    good(gpusnap("checkpoint", "w", "--force"))


def test_an_init_of_podman(store: Store) -> None:
    """catatonit, and what it has adopted, come back."""
    container = start("w", "--init")
    good(gpusnap("checkpoint", "w", "--name", "one"))
    container.remove()
    good(gpusnap("restore", "one"))
    container.goes_on()
    assert "/run/podman-init" in run("podman", "top", "w", "args").out


def test_output_in_a_file_of_the_host(store: Store, tmp_path: Path) -> None:
    """It is refused before anything is touched."""
    words = [
        "--device",
        "nvidia.com/gpu=0",
        "--log-driver",
        "passthrough",
        "localhost/base",
        "sh",
        "-c",
        LOOP,
    ]
    with open(tmp_path / "out.log", "wb") as file:
        subprocess.run([*PODMAN, "run", "--detach", "--name", "w", *words], stdout=file, check=True)
    said = sentence(gpusnap("checkpoint", "w", "--name", "one"))
    assert "the standard output of process" in said
    assert f"{tmp_path}/out.log, a file of the host" in said
