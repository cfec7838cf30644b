"""A container comes back on other GPUs, on this host or on another one: Podman, both runtimes, softgpu.

One test host plays several: installing softgpu anew, from another description, makes it the next host.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import gpuhost
import pytest
import waiting
from conftest import SRC
from support import GPUS_CONF, Container, Done, containers_left, good, manifest, podman, run, sentence

WORK = ("--mib", "8")
UUID = "GPU-{}0000000-2222-3333-4444-00000000000{}"
# What busybox's shell says of a node that the device cgroup lets pass, though no driver is behind it, and of
# one that it does not.
PASSES, REFUSED, ABSENT = "No such device or address", "Operation not permitted", "no such file"


def host(
    name: str,
    minors: tuple[int, ...],
    *,
    driver: str = "560.35.03",
    major: int = 195,
    memory: str = "2GiB",
    model: str = "Soft H100",
) -> str:
    """gpus.conf of a host: its GPUs are numbered from 0 in the order of `minors`."""
    lines = [f"driver {driver}", "cuda 12.6", f"major {major}"]
    lines += [
        f"gpu uuid={UUID.format(name, index)} minor={minor} cc=9.0 memory={memory} name={model}"
        for index, minor in enumerate(minors)
    ]
    return "\n".join(lines) + "\n"


Become = Callable[[str], None]


@pytest.fixture
def become(host_: None) -> Iterator[Become]:
    """Make this test host another one; the usual one comes back after the test."""

    def install(conf: str) -> None:
        gpuhost.install(SRC / "softgpu" / "build", conf)

    yield install
    for name in containers_left():
        podman("rm", "--force", "--time", "0", name)
    install(GPUS_CONF)


@pytest.fixture
def host_(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("host")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.tar.zst"


FOUR = host("a", (0, 1, 2, 3))


def restore(archive: Path, gpu_map: str = "", *words: str) -> Done:
    env = {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    if gpu_map:
        env["GPUSNAP_GPU_MAP"] = gpu_map
    return run(
        "podman", "--runtime", "gpusnap-runtime", "container", "restore", "--import", archive, *words, env=env
    )


def nodes(container: Container) -> list[str]:
    """The GPU nodes that `ls /dev` shows inside, without those that every container has."""
    names = good(podman("exec", container.name, "ls", "/dev")).split()
    return [name for name in names if name.removeprefix("nvidia").isdigit()]


def opening(container: Container, path: str) -> str:
    """What the shell inside says when it opens a file."""
    return podman("exec", container.name, "sh", "-c", f": <{path}").err


def used() -> set[str]:
    """UUIDs of the GPUs that hold memory, by NVML."""
    done = good(run("/usr/local/bin/gpusnap", "gpus", "--json"))
    return {gpu["uuid"] for gpu in json.loads(done)["gpus"] if gpu["memory_used"]}


def exported(archive: Path, *gpus: str, words: tuple[str, ...] = WORK, options: tuple[str, ...] = ()) -> None:
    container = Container.start("w", *words, gpus=gpus, options=options)
    good(container.checkpoint(archive))
    container.remove()


@pytest.mark.parametrize(
    ("gpus", "gpu_map", "after"),
    [
        (("0",), "0=3", ["nvidia3"]),
        (("0", "1"), "0=2,1=3", ["nvidia2", "nvidia3"]),
        (("0", "1"), "0=1,1=0", ["nvidia0", "nvidia1"]),
    ],
    ids=["0 to 3", "0 1 to 2 3", "swapped"],
)
def test_other_gpus(
    real: str, become: Become, archive: Path, gpus: tuple[str, ...], gpu_map: str, after: list[str]
) -> None:
    """It runs on where the map says, sees those GPUs alone, and can be checkpointed and restored again."""
    become(FOUR)
    exported(archive, *gpus, options=("--cap-add", "MKNOD"))
    good(restore(archive, gpu_map))
    again = Container("w")
    again.goes_on()
    of = dict(pair.split("=") for pair in gpu_map.split(","))
    assert used() == {UUID.format("a", number) for number in of.values()}
    assert nodes(again) == after
    for number in range(4):
        said = opening(again, f"/dev/nvidia{number}")
        assert (PASSES if f"nvidia{number}" in after else ABSENT).lower() in said.lower()
    good(podman("exec", "w", "mknod", "/tmp/old", "c", "195", "0"))
    said = opening(again, "/tmp/old")
    assert (PASSES if "nvidia0" in after else REFUSED) in said

    good(again.checkpoint(archive))
    assert {gpu["uuid"] for gpu in manifest(archive)["gpus"]} == {UUID.format("a", n) for n in of.values()}
    again.remove()
    good(restore(archive))
    again.goes_on()
    assert nodes(again) == after


def test_two_at_once_get_one_each(real: str, become: Become, tmp_path: Path) -> None:
    """Two containers of another host, restored at the same time onto two free GPUs."""
    become(FOUR)
    archives = []
    for name in ("one", "two"):
        container = Container.start(name, "--mib", "128", gpus=("0",))
        archives.append(tmp_path / f"{name}.tar")
        good(container.checkpoint(archives[-1], "--compress", "none"))
        container.remove()
    become(host("b", (0, 1)))
    commands = [
        subprocess.Popen(
            ["podman", "--runtime", "gpusnap-runtime", "container", "restore", "--import", archive],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for archive in archives
    ]
    for command in commands:
        _, err = waiting.communicate(command, 180)
        assert command.returncode == 0, err
    seen = [nodes(Container(name)) for name in ("one", "two")]
    assert sorted(seen) == [["nvidia0"], ["nvidia1"]]
    for name in ("one", "two"):
        Container(name).goes_on()


@pytest.mark.parametrize(
    ("there", "why"),
    [
        (host("b", (0, 1), model="Soft A100"), "another model"),
        (host("b", (0, 1), memory="6MiB"), "needed"),
        (host("b", (0, 1), driver="550.54.15"), "560.35.03"),
    ],
    ids=["model", "memory", "driver"],
)
def test_no_gpu_fits(crun: None, become: Become, archive: Path, there: str, why: str) -> None:
    """Refused in one sentence that says why of each GPU; nothing is created, the archive is as it was."""
    become(FOUR)
    exported(archive, "0")
    before = archive.read_bytes()
    become(there)
    done = restore(archive)
    said = sentence(done)
    assert why in said
    assert good(podman("ps", "--quiet")) == "", "a container runs"
    assert archive.read_bytes() == before
    done = run("/usr/local/bin/gpusnap", "plan", archive)
    assert done.code == 1
    assert why in done.out + done.err


def test_another_host(real: str, become: Become, archive: Path) -> None:
    """Other UUIDs, minors, majors and driver version: export on host A, import on host B, and back."""
    become(FOUR)
    exported(archive, "0", "1")
    become(host("b", (4, 6, 7), driver="560.94.11", major=241, memory="4GiB"))
    good(restore(archive))
    again = Container("w")
    again.goes_on()
    assert nodes(again) == ["nvidia4", "nvidia6"]
    assert opening(again, "/dev/nvidia4").strip().endswith(PASSES)
    assert opening(again, "/dev/nvidia-uvm").strip().endswith(PASSES)
    found = good(podman("exec", "w", "sh", "-c", "cat /usr/bin/nvidia-smi"))
    assert "560.94.11" in found, "nvidia-smi is not this host's"
    good(again.checkpoint(archive))
    again.remove()
    become(host("c", (0, 1), driver="560.94.11"))
    good(restore(archive))
    again.goes_on()
    assert nodes(again) == ["nvidia0", "nvidia1"]


def test_keep_names(crun: None, become: Become, archive: Path) -> None:
    """With keep-names the old name stays, with the new GPU's number, beside the new one."""
    become(FOUR)
    exported(archive, "0", options=("--annotation", "io.gpusnap.keep-names=true"))
    good(restore(archive, "0=3"))
    again = Container("w")
    again.goes_on()
    assert nodes(again) == ["nvidia0", "nvidia3"]
    assert good(podman("exec", "w", "stat", "-c", "%T", "/dev/nvidia0")) == "3"
    assert opening(again, "/dev/nvidia0").strip().endswith(PASSES)
    good(again.checkpoint(archive))
    again.remove()
    good(restore(archive, "3=1"))
    again.goes_on()
    assert nodes(again) == ["nvidia0", "nvidia1", "nvidia3"]


def test_bind_mounted_nodes(real: str, become: Become, archive: Path) -> None:
    """Nodes that were given by -v rather than --device: the mount moves, and its name with it."""
    become(FOUR)
    options = [word for name in ("nvidia0", "nvidiactl") for word in ("-v", f"/dev/{name}:/dev/{name}")]
    state = ("-v", "/run/softgpu:/run/softgpu", "--device-cgroup-rule", "c 195:0 rwm")
    library = gpuhost.LIBRARY_DIR
    cuda = ("-v", f"{library}/libcuda.so.560.35.03:/usr/lib/libcuda.so.1:ro")
    rules = ("--device-cgroup-rule", "c 195:255 rwm")
    exported(archive, options=(*options, *state, *cuda, *rules))
    good(restore(archive, "0=2"))
    again = Container("w")
    again.goes_on()
    assert nodes(again) == ["nvidia2"]
    assert opening(again, "/dev/nvidia2").strip().endswith(PASSES)
    good(again.checkpoint(archive))
    again.remove()
    good(restore(archive, "2=1"))
    again.goes_on()
    assert nodes(again) == ["nvidia1"]


def test_the_plan_is_shown(crun: None, become: Become, archive: Path) -> None:
    """`gpusnap plan` says what would happen, as a table and as JSON, and touches nothing."""
    become(FOUR)
    exported(archive, "0", "1")
    become(host("b", (5, 6, 7)))
    table = good(run("/usr/local/bin/gpusnap", "plan", archive, "--gpu-map", "1=0"))
    assert UUID.format("b", 0) in table
    plan = json.loads(good(run("/usr/local/bin/gpusnap", "plan", archive, "--json")))
    assert plan["pairs"] == [
        {"old": UUID.format("a", 0), "new": UUID.format("b", 0)},
        {"old": UUID.format("a", 1), "new": UUID.format("b", 1)},
    ]
    assert not list(containers_left())


def test_a_user_namespace(real: str, archive: Path) -> None:
    """No runtime brings such a container back, so it is refused rather than lost; it runs on."""
    nodes = ("--device", "/dev/nvidia0", "--device", "/dev/nvidiactl", "-v", "/run/softgpu:/run/softgpu")
    library = f"{gpuhost.LIBRARY_DIR}/libcuda.so.560.35.03:/usr/lib/libcuda.so.1:ro"
    container = Container.start("w", gpus=(), options=("--uidmap", "0:100000:65536", *nodes, "-v", library))
    assert "has its own user namespace, which" in sentence(container.checkpoint(archive))
    container.unharmed()
