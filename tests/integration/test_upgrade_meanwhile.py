"""gpusnap's modules are removed while it works, as an upgrade or a removal of its package does for a moment.

They go when the real runtime has dumped the container. What is imported later than that cannot be found.
"""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import shimhost
from storehost import SETTINGS_BUT_RUNTIME, STORE, empty_store, gpusnap
from support import Container, Done, good, run, sentence
from test_recover import nothing_left

SRC = Path(__file__).resolve().parents[2]
COPY = Path("/opt/upgraded")
MODULES = COPY / "gpusnap"
RUNTIME = COPY / "crun"
INDEX = STORE / "index.json"
SPOIL = COPY / "spoil"
_RUNTIME = f"""\
#!/bin/sh
/usr/bin/crun "$@"
code=$?
case "$*" in *--image-path*)
    mv {MODULES} {COPY}/gone
    [ ! -e {SPOIL} ] || {{ mv {INDEX} {INDEX}.kept; mkdir {INDEX}; }}
esac
exit $code
"""


@pytest.fixture(scope="module")
def copy(host: None) -> Iterator[None]:
    """A copy of gpusnap in place of the checkout, and a runtime that removes it after a dump."""
    shutil.copytree(SRC / "gpusnap", MODULES, ignore=shutil.ignore_patterns("__pycache__"))
    launcher = Path("runtime_shim/launcher/build/gpusnap-runtime")
    (COPY / launcher).parent.mkdir(parents=True)
    shutil.copy(SRC / launcher, COPY / launcher)
    RUNTIME.write_text(_RUNTIME)
    RUNTIME.chmod(0o755)
    path = (sysconfig.get_path("purelib"),)
    shimhost.install(COPY, path=path)
    yield
    shimhost.install(SRC, path=path)
    shutil.rmtree(COPY)


@pytest.fixture(autouse=True)
def store(crun: None, copy: None) -> Iterator[None]:
    with empty_store(f'runtime = "crun"\n{SETTINGS_BUT_RUNTIME}'):
        yield
        install_again()
        SPOIL.unlink(missing_ok=True)


def install_again() -> None:
    gone = COPY / "gone"
    if gone.exists():
        gone.rename(MODULES)


def removed_during(*words: str | Path) -> Done:
    """Run a command whose runtime removes gpusnap; it is there again afterwards."""
    shimhost.write_settings(f'runtime = "{RUNTIME}"\n{SETTINGS_BUT_RUNTIME}')
    done = gpusnap(*words)
    assert not MODULES.exists(), f"the runtime was not called:\n{done.out}{done.err}"
    install_again()
    shimhost.write_settings(f'runtime = "crun"\n{SETTINGS_BUT_RUNTIME}')
    return done


def nothing_to_recover() -> None:
    said = gpusnap("recover")
    assert (said.code, said.err) == (0, "nothing to recover\n")
    nothing_left()


@pytest.mark.parametrize("options", [(), ("--rm",)], ids=["", "rm"])
@pytest.mark.parametrize("to", ["store", "archive", "stays"])
def test_a_checkpoint(tmp_path: Path, options: tuple[str, ...], to: str) -> None:
    """It is complete: what follows the dump was imported before."""
    container = Container.start("w", options=options)
    archive = tmp_path / "w.tar"
    words: dict[str, list[str | Path]] = {
        "archive": ["--to", archive],
        "store": ["--name", "w"],
        "stays": ["--leave-running", "--name", "w"],
    }
    done = removed_during("checkpoint", "w", *words[to])
    good(done)
    assert "GPS-525" not in done.err, "what syncs its open files was imported, too"
    nothing_to_recover()
    if to == "stays":
        container.goes_on()
        container.remove()
    good(gpusnap("restore", archive if to == "archive" else "w"))
    container.goes_on()
    container.remove()


def test_a_checkpoint_that_fails_after_its_dump() -> None:
    """A container that was left stopped runs on, though nothing can be imported any more."""
    container = Container.start("w", options=("--rm",))
    SPOIL.touch()
    assert "continues to run" in sentence(removed_during("checkpoint", "w"))
    INDEX.rmdir()
    INDEX.with_name("index.json.kept").rename(INDEX)
    container.goes_on()
    nothing_to_recover()
    container.remove()


@pytest.mark.parametrize("missing", ["shim/suspended.py", "shim/entry.py", ""])
def test_a_suspended_container(missing: str) -> None:
    """Without a module, or with a record of another version, it does not run without its GPU memory."""
    container = Container.start("w")
    good(gpusnap("suspend", "w"))
    (record,) = Path("/run/gpusnap/suspended").iterdir()
    whole = record.read_text()
    module = MODULES / "runtime_shim" / missing
    if missing:
        module.rename(COPY / "missing.py")
    else:
        record.write_text(json.dumps({**json.loads(whole), "engine": None, "gpus": None}))
    refused = run("podman", "unpause", "w")
    if missing:
        (COPY / "missing.py").rename(module)
    else:
        record.write_text(whole)
    assert refused.code != 0
    assert container.inspect()["State"]["Status"] == "paused"
    good(gpusnap("resume", "w"))
    container.goes_on()
    nothing_to_recover()
    container.remove()
