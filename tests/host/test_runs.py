"""Runs of the test host: what comes through, and that nothing is left, however a run ends.

Needs root, and builds the tree if it is not there.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from testhost import cgroups
from testhost.cache import Cache

HOST = str(Path(__file__).resolve().parent / "host")
DEADLINE_S = 30.0
BEGINNING_S = 600.0  # the tree may have to be made first
# A container that outlives its podman, then a word on stdout, then nothing.
CONTAINER = "podman run -d localhost/base sleep 1000 >/dev/null && echo ready && exec sleep 1000"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="namespaces, mounts and cgroups need root")


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"still not so: {what}"
        time.sleep(0.01)


def enter(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    argv = [HOST, "enter", *words]
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=BEGINNING_S, check=False)


class Run:
    """A run with a container in it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        self.init = int(children[0])
        kinds = ("pid", "mnt", "net", "ipc")
        self.namespaces = {os.readlink(f"/proc/{self.init}/ns/{kind}") for kind in kinds}
        name = _run_name(self.init)
        self.groups = [group for h in cgroups.mounted() if (group := h.group(name)).exists()]

    def processes(self) -> list[str]:
        """Those that are in one of the run's namespaces."""
        found = []
        for link in Path("/proc").glob("[0-9]*/ns/*"):
            with contextlib.suppress(OSError):
                if os.readlink(link) in self.namespaces:
                    found.append(str(link))
        return found


def _run_name(pid: int) -> str:
    groups = Path(f"/proc/{pid}/cgroup").read_text()
    return next(part for part in groups.replace("\n", "/").split("/") if part.startswith(cgroups.PREFIX))


@pytest.fixture(params=["v2", "native"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    argv = [HOST, "enter", "--cgroup", request.param, "--", "sh", "-c", CONTAINER]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert select.select([process.stdout], [], [], BEGINNING_S)[0], "its container does not run"
        assert process.stdout.readline() == "ready\n"
        yield Run(process)
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        process.stdout.close()


@pytest.fixture(autouse=True)
def mounts_of_this_machine() -> Iterator[None]:
    before = Path("/proc/self/mountinfo").read_text()
    yield
    assert Path("/proc/self/mountinfo").read_text() == before


def test_exit_codes_and_streams_come_through() -> None:
    done = enter("--env", "A=b", "--", "sh", "-c", 'cat; echo "$A" >&2; exit 7', stdin="in\n")
    assert (done.returncode, done.stdout) == (7, "in\n")
    assert done.stderr.endswith("b\n")
    assert enter("sh", "-c", "kill -9 $$").returncode == 128 + signal.SIGKILL
    assert enter("no-such-command").returncode == 127
    assert enter("/etc/passwd").returncode == 126


def test_the_checkout_is_read_only_and_the_tree_pristine(tmp_path: Path) -> None:
    script = "! touch /src/x 2>/dev/null; touch /mark; mknod /dev/nvidia0 c 195 0; touch /out/x; touch /in/x"
    done = enter("--bind", f"{tmp_path}:/out", "--bind", f"{tmp_path}:/in:ro", "--", "sh", "-c", script)
    assert done.returncode != 0
    assert "/in/x" in done.stderr
    assert (tmp_path / "x").exists()
    assert enter("test", "-e", "/mark").returncode == 1
    assert not Path("/dev/nvidia0").exists() or Path("/dev/nvidia0").stat().st_rdev != os.makedev(195, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_stop_leaves_nothing(run: Run, number: signal.Signals) -> None:
    run.process.send_signal(number)
    assert run.process.wait(DEADLINE_S) == 128 + number
    assert run.processes() == []
    assert not [group for group in run.groups if group.exists()]


def test_a_run_that_is_killed_leaves_nothing_but_groups_that_the_next_clears(run: Run) -> None:
    assert run.groups
    run.process.kill()
    wait_for(lambda: run.processes() == [], "no process is left in the run's namespaces")
    assert enter("true").returncode == 0
    assert not [group for group in run.groups if group.exists()]
    assert not (Cache.default().runs / run.groups[0].name).exists()


def test_a_run_whose_init_is_killed_leaves_nothing(run: Run) -> None:
    os.kill(run.init, signal.SIGKILL)
    assert run.process.wait(DEADLINE_S) == 128 + signal.SIGKILL
    assert run.processes() == []
    assert not [group for group in run.groups if group.exists()]


def test_a_paused_container_dies_with_its_run() -> None:
    """A v1 freezer holds even what was sent SIGKILL."""
    script = "podman run -d --name c localhost/base sleep 1000 >/dev/null && podman pause c >/dev/null"
    done = enter("--cgroup", "native", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr


def test_two_runs_at_once() -> None:
    argv = [HOST, "enter", "--", "podman", "run", "--rm", "localhost/base", "echo", "hi"]
    processes = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [p.communicate(timeout=60)[0] for p in processes] == ["hi\n", "hi\n"]
