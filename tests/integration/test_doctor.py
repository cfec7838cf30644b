"""`gpusnap doctor`, of the test host and of containers: what it says, and that a checkpoint bears it out."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpuhost
import pytest
import shimhost
from containerdhost import containerd, gpu_options
from support import GPUS_CONF, RUNTIME, Container, good, run, until

GPUSNAP = "/usr/local/bin/gpusnap"
# The machines that tests run on differ in these, and softgpu's persistence mode is off.
OF_THE_MACHINE = {"privileges", "criu", "criu check", "RAM", "huge pages", "Podman's limit", "persistence"}
# Not at /usr, where CDI's hooks write.
PYTHON = (
    "PYTHONHOME=/host /host/lib64/ld-linux-x86-64.so.2 --library-path /host/lib/x86_64-linux-gnu "
    "/host/bin/python3"
)


def doctor(*words: str) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """The exit code, and the checks by name."""
    done = run(GPUSNAP, "doctor", "--json", *words)
    assert "Traceback" not in done.err, done.err
    found: dict[str, list[dict[str, Any]]] = {}
    for each in json.loads(done.out)["checks"]:
        found.setdefault(each["name"], []).append(each)
    return done.code, found


def wrong(found: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """What is not OK; softgpu's own locks, which it gives up when it is suspended, are no workload's."""
    locks = found.get("file locks", [{"facts": {"locks": []}}])[0]["facts"]["locks"]
    if all(each["path"].startswith("/run/softgpu/") for each in locks):
        found = {name: all_ for name, all_ in found.items() if name != "file locks"}
    return {name: each["says"] for name, all_ in found.items() for each in all_ if each["verdict"] != "ok"}


@pytest.fixture
def registered(crun: None) -> Iterator[None]:
    """gpusnap in Podman's configuration, as `gpusnap install` would have it."""
    path = Path("/etc/containers/containers.conf.d/50-gpusnap.conf")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'[engine.runtimes]\ngpusnap-runtime = ["{RUNTIME}"]\n')
    yield
    path.unlink()


@pytest.fixture
def current_driver() -> Iterator[None]:
    """One that is new enough for everything."""
    newer = GPUS_CONF.replace("560.35.03", "580.65.06").replace("cuda 12.6", "cuda 13.0")
    gpuhost.install("/src/softgpu/build", newer)
    yield
    gpuhost.install("/src/softgpu/build", GPUS_CONF)


def test_an_older_driver(registered: None) -> None:
    """It has the calls, and NVIDIA does not say so of it."""
    code, found = doctor()
    assert "since driver 570" in wrong(found)["GPU driver"]
    assert code == 0, wrong(found)


def test_host(registered: None, current_driver: None) -> None:
    """This host has all it needs: no failure, and no warning but for what the machine is."""
    code, found = doctor()
    assert {name: says for name, says in wrong(found).items() if name not in OF_THE_MACHINE} == {}
    assert code == 0, wrong(found)
    assert found["GPU driver"][0]["facts"] == {
        "vendor": "nvidia",
        "version": "580.65.06",
        "cuda": "13.0",
        "gpus": 2,
    }
    assert found["registered"][0]["facts"]["runtimes"] == {"Podman": ["gpusnap-runtime"]}
    assert found["runtime"][0]["facts"]["kind"] == "crun"
    assert found["CDI"][0]["facts"]["path"] == "/etc/cdi/nvidia.yaml"


def test_nothing_is_changed(registered: None) -> None:
    """A second time it says the same, and no file is left anywhere that it looks into."""
    names = ("/etc", "/var/lib/containers", "/run/gpusnap", "/var/lib/gpusnap", "/tmp")
    watched = [Path(path) for path in names]

    def seen() -> set[tuple[Path, int]]:
        return {
            (file, file.lstat().st_mtime_ns) for path in watched for file in path.rglob("*") if path.exists()
        }

    doctor()
    before = seen()
    doctor()
    assert seen() == before


def test_in_another_pid_namespace(registered: None) -> None:
    """As in a pod that works in a chroot to its node: criu check would fail, for that alone."""
    done = run("unshare", "--pid", "--fork", GPUSNAP, "doctor", "--json")
    found = {each["name"]: each for each in json.loads(done.out)["checks"]}
    assert (done.code, found["PID namespace"]["verdict"]) == (0, "warning"), done.out
    assert "hostPID: true" in found["PID namespace"]["todo"]
    assert "criu check" not in found
    assert "PID namespace" not in doctor()[1]


def test_text(registered: None) -> None:
    """One line for each check; what to do is below it, and the last one counts."""
    done = run(GPUSNAP, "doctor")
    lines = done.out.splitlines()
    assert all(line.startswith(("OK ", "warning ", "failure ", " ")) for line in lines[:-3])
    assert lines[-2].startswith("0 failures, ")
    assert lines[-1].startswith("GPU containers can be checkpointed and restored on this host")


def test_a_host_with_nothing(crun: None, tmp_path: Path) -> None:
    """Without root, PATH, runtime, engine: useful lines, exit code 1, no traceback."""
    shimhost.write_settings('runtime = "/nowhere/runc"\n')
    code = (
        "import os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534); "
        "sys.argv = ['gpusnap', 'doctor']; from gpusnap.doctor.base import sources; "
        "sources._FOLDERS = '/nowhere'; "
        "from gpusnap.cli.main import main; sys.exit(main())"
    )
    done = run(sys.executable, "-B", "-c", code, env={"PATH": "/nowhere", "PYTHONPATH": "/src"})
    assert done.code == 1, done.out + done.err
    assert "Traceback" not in done.err
    assert "run it with sudo" in done.out
    assert "Podman, containerd and CRI-O are not installed" in done.out
    assert "the real runtime /nowhere/runc is not an executable program" in done.out


def test_container(real: str, tmp_path: Path) -> None:
    """One of GPU work alone: no failure, no warning, its bytes, an estimate; and its checkpoint succeeds."""
    container = Container.start("w", "--mib", "24", "--procs", "2", workers=2)
    code, found = doctor("w")
    assert (code, wrong(found)) == (0, {})
    facts = found["GPU processes"][0]["facts"]
    assert len(facts["processes"]) == 2
    assert facts["bytes"] == sum(each["bytes"] for each in facts["processes"])
    assert facts["bytes"] >= 24 << 20
    duration = found["duration"][0]["facts"]
    assert 0 < duration["low"] < duration["high"]
    container.goes_on()
    good(container.checkpoint(tmp_path / "checkpoint.tar.zst"))


URING = "import ctypes; ctypes.CDLL(None).syscall(425, 4, (ctypes.c_char * 120)())"
DELETED = "f = open('/gone', 'wb'); f.write(b'x' * (3 << 20)); f.flush(); import os; os.unlink('/gone')"
LOCK = "import fcntl; f = open('/lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX)"
TCP = (
    "import socket; s = socket.create_server(('127.0.0.1', 0)); "
    "c = socket.create_connection(s.getsockname()); a = s.accept()"
)
MPTCP = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)"
WATCH = (
    "import ctypes; libc = ctypes.CDLL(None); f = libc.inotify_init1(0); open('/watched', 'w').close(); "
    "assert libc.inotify_add_watch(f, b'/watched', 2) > 0"
)
DEVICE = "import os; os.mknod('/dev/strange', 0o20666, os.makedev(1, 3))"


@pytest.mark.parametrize(
    ("deed", "name", "verdict", "said"),
    [
        (URING, "io_uring", "failure", "io_uring"),
        (DELETED, "deleted files", "failure", "/gone open, 3.0 MiB"),
        (LOCK, "file locks", "warning", "/lock"),
        (TCP, "TCP connections", "warning", "2 TCP connections"),
        (MPTCP, "sockets", "failure", "MPTCP"),
        (WATCH, "inotify", "warning", "1 file of the container"),
        (DEVICE, "devices", "failure", "/dev/strange"),
    ],
    ids=["io_uring", "deleted", "lock", "tcp", "mptcp", "inotify", "device"],
)
def test_what_stops_a_checkpoint(
    crun: None, tmp_path: Path, deed: str, name: str, verdict: str, said: str
) -> None:
    """Doctor finds it, and a checkpoint fails or leaves it out; the container runs on meanwhile."""
    script = tmp_path / "deed.py"
    script.write_text(f"{deed}\nopen('/ready', 'w').close()\nimport time\ntime.sleep(600)\n")
    options = ["-v", "/usr:/host:ro", "-v", f"{script}:/deed.py:ro", "--security-opt", "seccomp=unconfined"]
    options += ["--cap-add", "MKNOD", "--annotation", "io.gpusnap.criu.ghost-limit=1M"]
    words = f"{PYTHON} -B /deed.py & exec /gpuwork --tick 30 --mib 4"
    container = Container.start("w", options=options, script=words)
    ready = Path(f"/proc/{container.pid}/root/ready")
    try:
        until(ready.exists, "the deed")
    except AssertionError:
        pytest.skip(f"this kernel does not let a program do it: {container.log()[-500:]}")
    code, found = doctor("w")
    # On Linux 6.16 and later CRIU 4.1 dumps no socket of the internet's at all.
    assert set(wrong(found)) - ({"sockets"} if deed == TCP else set()) == {name}
    assert [each["verdict"] for each in found[name]] == [verdict]
    assert said in json.dumps(found[name])
    assert found[name][0]["todo"]
    assert code == (1 if "failure" in {each["verdict"] for all_ in found.values() for each in all_} else 0)
    container.goes_on()
    done = container.checkpoint(tmp_path / "checkpoint.tar.zst")
    # Connections stop none, but the host's CRIU may dump no socket.
    assert (done.code == 0) == (deed == TCP and "sockets" not in wrong(found)), done.err
    container.goes_on()


@pytest.fixture
def no_iptables() -> Iterator[None]:
    """Nobody has the programs that CRIU would call."""
    found = [path for name in ("iptables-restore", "ip6tables-restore") if (path := shutil.which(name))]
    for path in found:
        os.rename(path, f"{path}.away")
    yield
    for path in found:
        os.rename(f"{path}.away", path)


@pytest.mark.parametrize("network", ["none", "bridge"])
def test_network_lock(real: str, no_iptables: None, tmp_path: Path, network: str) -> None:
    """Without iptables no container that has a network of its own is dumped; by nftables, as doctor says."""
    container = Container.start("w", "--mib", "4", options=["--network", network])
    check = doctor()[1]["network lock"][0]
    assert (check["verdict"], check["facts"]["way"]) == ("failure", "iptables")
    assert 'criu.options = ["network-lock nftables"]' in check["todo"]
    assert container.checkpoint(tmp_path / "checkpoint.tar.zst").code != 0
    container.goes_on()
    shimhost.write_settings(f'runtime = "{real}"\n[criu]\noptions = ["network-lock nftables"]\n')
    assert doctor()[1]["network lock"][0]["verdict"] == "ok"
    good(container.checkpoint(tmp_path / "checkpoint.tar.zst"))


def test_one_that_does_not_run(crun: None) -> None:
    """One sentence, and no check."""
    container = Container.start("w", "--mib", "4")
    good(run("podman", "kill", "w"))
    until(lambda: container.inspect()["State"]["Status"] == "exited", "its end")
    done = run(GPUSNAP, "doctor", "w")
    assert (done.code, done.out) == (1, "")
    assert "is not running" in done.err
    assert run(GPUSNAP, "doctor", "nobody").code == 3


def test_containerd(crun: None, tmp_path: Path) -> None:
    """A task of containerd's, found by its ID, and in its namespace."""
    tasks = "io.containerd.runtime.v2.task"
    link = Path("/run/containerd") / tasks
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(containerd(tmp_path))
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(tmp_path / "state" / tasks)
        stack.callback(link.unlink)
        server.start("task", "sleep", "600", options=gpu_options(GPUS_CONF))
        code, found = doctor("task")
        assert code == 0, wrong(found)
        assert found["container"][0]["facts"]["engine"] == "containerd"
        assert found["container"][0]["facts"]["processes"] == 1
        assert doctor("task", "--containerd", "default")[0] == 0
        assert run(GPUSNAP, "doctor", "task", "--containerd", "other").code == 3


def test_versions(crun: None) -> None:
    """`gpusnap version`: everything of the test host has one, and the driver is softgpu."""
    done = run(GPUSNAP, "version", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    every = [*found.pop("runtimes"), *found.pop("drivers"), *found.values()]
    assert {each["name"]: each["fault"] for each in every if each["fault"] or not each["version"]} == {}
    assert {"Podman", "crun", "runc", "CRIU", "pycriu", "NVIDIA driver"} <= {each["name"] for each in every}
