"""`gpusnap swap` of what was spilled: it is read into RAM while the other container is suspended.

That one has a command that is run before it is suspended, and which waits, so that a test can do something
while the swap is under way.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gpuhost
import pytest
import waiting
from conftest import SRC
from storehost import COMMAND, PLAIN, empty_store, gpusnap
from support import GPUS_CONF, Container, good, podman, run, sentence, until
from suspendhost import RUN, is_suspended, nothing_left, resumed, suspended, usage

from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.snapshot.records import journal, suspensions

MIB = 1 << 20
SIZE = 64 * MIB
WAIT = "--annotation", "io.gpusnap.pre-suspend=until [ -e /tmp/go ]; do sleep 0.1; done; rm /tmp/go"


@pytest.fixture
def store(crun: None) -> Iterator[Store]:
    """An empty store of this host's."""
    with empty_store(PLAIN) as store:
        yield store


@pytest.fixture
def small_gpus(store: Store) -> Iterator[None]:
    """GPUs with room for one container, and no more."""
    gpuhost.install(SRC / "softgpu" / "build", GPUS_CONF.replace("memory=2GiB", "memory=96MiB"))
    yield
    podman("rm", "--force", "--all", "--time", "0")
    gpuhost.install(SRC / "softgpu" / "build", GPUS_CONF)


def loaded() -> dict[str, int]:
    """Bytes of RAM behind the files into which something is read ahead."""
    return {str(path): path.stat().st_blocks * 512 for path in (RUN / "stage").glob("*/*.load.*")}


class Swap:
    """`gpusnap swap second first`, of which the first is spilled, while the second has not been suspended."""

    def __init__(self) -> None:
        self.first = Container.start("first", "--mib", "64", gpus=("0",))
        suspended(self.first, "--spill", "--wait")
        self.second = Container.start("second", "--mib", "64", gpus=("0",), options=WAIT)

    def __enter__(self) -> Swap:
        line = [COMMAND, "swap", "second", "first", "--json"]
        self._command = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        until(lambda: sum(loaded().values()) >= SIZE, "all of it in RAM")
        assert usage("first")["state"] == "suspended"
        assert usage("second")["state"] == "running"
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End it as it is."""
        self._command.kill()
        waiting.communicate(self._command, 60)

    def end(self) -> tuple[int, str, str]:
        """Have it go on; its exit code, and what it printed."""
        good(podman("exec", "second", "touch", "/tmp/go"))
        out, err = waiting.communicate(self._command, 120)
        return self._command.returncode, out, err


def test_it_is_read_ahead(small_gpus: None, store: Store) -> None:
    """The resume finds it in RAM; nothing is left there or in the store."""
    with Swap() as swap:
        code, out, err = swap.end()
        assert code == 0, err
        steps = [each["step"] for each in json.loads(out)["in"]["timing"]]
        assert steps.index("load") < steps.index("plan") < steps.index("driver restore")
        swap.first.goes_on()
        assert not loaded()
        assert usage("second")["state"] == "suspended"
        assert not list((Path(store.path) / "staging").iterdir())
        good(podman("rm", "--force", "--time", "0", "first"))
        resumed(swap.second)
        nothing_left()


def test_killed_meanwhile(small_gpus: None) -> None:
    """It is in the store as before, and the RAM is free after the next command."""
    with Swap() as swap:
        swap.kill()
        assert loaded()
        assert usage("first")["stored"] >= SIZE
        assert not loaded()
        swap.second.goes_on()
        good(podman("rm", "--force", "--time", "0", "second"))
        resumed(swap.first)
        nothing_left()


def test_resumed_meanwhile(store: Store) -> None:
    """By somebody else, who did not wait: the swap says how things are, and its own files are gone."""
    with Swap() as swap:
        resumed(swap.first)
        code, _, err = swap.end()
        assert code, err
        assert "is not suspended" in err
        assert "first runs, and second is suspended" in err
        assert not loaded()
        swap.first.goes_on()
        resumed(swap.second)
        nothing_left()


def test_suspended_again_meanwhile(store: Store) -> None:
    """What was read ahead is old, and is not used."""
    with Swap() as swap:
        resumed(swap.first)
        suspended(swap.first, "--spill", "--wait")
        code, out, err = swap.end()
        assert code == 0, err
        assert "load" not in [each["step"] for each in json.loads(out)["in"]["timing"]]
        swap.first.goes_on()
        good(podman("rm", "--force", "--time", "0", "second"))
        nothing_left()


def test_damage_meanwhile(store: Store) -> None:
    """A byte that is wrong is found before the driver sees it, and the second runs on."""
    first = Container.start("first", "--mib", "64", gpus=("0",))
    suspended(first, "--spill", "--wait")
    (folder,) = (Path(store.path) / "staging").iterdir()
    blob = max((each for each in folder.glob("blobs/*/*") if each.is_file()), key=os.path.getsize)
    blob.chmod(0o600)
    with blob.open("r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 1]))
    second = Container.start("second", "--mib", "64", gpus=("0",))
    said = sentence(gpusnap("swap", "second", "first"))
    assert "second continues to run" in said
    second.goes_on()
    assert usage("first")["state"] == "suspended"
    assert not loaded()
    with blob.open("r+b") as file:
        file.seek(100)
        file.write(byte)
    resumed(first)
    nothing_left()


def test_the_first_is_not_suspended(small_gpus: None) -> None:
    """The command before it fails: nothing was done, and what was read is gone."""
    first = Container.start("first", "--mib", "64", gpus=("0",))
    suspended(first, "--spill", "--wait")
    options = ("--annotation", "io.gpusnap.pre-suspend=exit 4")
    second = Container.start("second", "--mib", "64", gpus=("0",), options=options)
    assert "ended with exit code 4" in sentence(gpusnap("swap", "second", "first"))
    second.goes_on()
    assert not loaded()
    assert not (RUN / "stage").exists() or not list((RUN / "stage").iterdir())
    assert usage("first")["stored"] >= SIZE


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_between_the_two(store: Store, number: signal.Signals) -> None:
    """The second runs again, although the signal is still on record; the first stays suspended."""
    first = Container.start("first", gpus=("0",))
    suspended(first)
    second = Container.start("second", gpus=("0",))
    (found,) = suspensions.find()
    line = [COMMAND, "swap", "second", "first"]
    for _ in range(5):  # the resume waits for a moment only, which may be over before the signal
        with (
            waiting.Process(line, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as swap,
            journal.hold(found.key),  # which the resume of the first waits for
        ):
            until(lambda: is_suspended(second), "the suspend of the second")
            swap.send_signal(number)
            _, err = waiting.communicate(swap, 120)
        assert "second continues to run" in err
        second.goes_on()
        assert usage("first")["state"] == "suspended"
        if swap.returncode == 128 + number:
            break
        assert "another gpusnap is still working on" in err
    else:
        pytest.fail("the signal came too late each time")
    resumed(first)
    nothing_left()


def test_the_wrong_words(store: Store) -> None:
    """Each of them is answered with what would be right, and changes nothing."""
    first = Container.start("first")
    suspended(first)
    second = Container.start("second")
    said = sentence(gpusnap("swap", "first", "second"))
    assert "first is suspended and second is not" in said
    assert "gpusnap swap second first" in said
    assert "OUT and IN are both first" in sentence(gpusnap("swap", "first", "first"))
    assert "no container nobody is suspended" in sentence(gpusnap("swap", "second", "nobody"))
    assert "there is no container nobody" in sentence(gpusnap("swap", "nobody", "first"))
    assert "the container second is not suspended: it is running" in sentence(gpusnap("resume", "second"))
    assert "the container first is already suspended" in sentence(gpusnap("suspend", "first"))
    second.goes_on()
    resumed(first)
    suspended(first, "--spill", "--wait")
    assert (
        good(gpusnap("suspend", "--spill", "--wait", "first")) == "first  GPU memory is already in the store"
    )


def test_three_take_turns(small_gpus: None, tmp_path: Path) -> None:
    """Twelve swaps, two of them from the store, and nothing grows; bench/swaps.py makes hundreds."""
    line: list[str | Path] = [sys.executable, SRC / "bench" / "swaps.py", "--rounds", "12", "--mib", "16"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    said = good(run(*line, "--keep", tmp_path / "kept", env=environment, seconds=900))
    counts = json.loads(said.splitlines()[-1])
    assert (counts["swaps"], counts["good"], counts["of them from the store"]) == (12, 12, 2)
