"""The machine of the integration tests: the Debian 13 test host, softgpu as its driver, gpusnap installed."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(SRC), str(SRC / "tests" / "host"), str(Path(__file__).parent)]

import gpuhost  # noqa: E402
import shimhost  # noqa: E402
from servers import runtimes  # noqa: E402
from support import GPUS_CONF, GPUWORK, faults, podman, remove_left_groups, run, until  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("GPUSNAP_TESTHOST") != "1":
        skip = pytest.mark.skip(reason="only inside the test host: run `make integration`")
        for item in items:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def host() -> None:
    """gpusnap and softgpu, installed once."""
    # Without what `site` of an environment adds at each start, which the packages of a host have not.
    shimhost.install(SRC, path=(sysconfig.get_path("purelib"),))
    gpuhost.install(SRC / "softgpu" / "build", GPUS_CONF)
    # A copy: a file that is built anew while a container has it mounted is a deleted one to CRIU.
    shutil.copy(SRC / "softgpu" / "build" / "bin" / "gpuwork", GPUWORK)


NEWER = Path("/opt/newer/bin")


@pytest.fixture(params=["crun", "runc"])
def real(request: pytest.FixtureRequest, host: None) -> Iterator[str]:
    """Each real runtime in turn, by the settings file; no container is left after the test."""
    name: str = request.param
    shimhost.write_settings(f'runtime = "{name}"\n')
    yield name
    _tidy(name)


@pytest.fixture(params=["crun", "runc"])
def newer(request: pytest.FixtureRequest, host: None) -> Iterator[str]:
    """The next releases of crun, runc and CRIU, where they run on this kernel."""
    path = NEWER / request.param
    if not path.exists() or run(path, "--version").code:
        pytest.skip(f"the test host has no newer {request.param} that runs here")
    shimhost.write_settings(f'runtime = "{path}"\n')
    yield request.param
    _tidy(str(path))


@pytest.fixture(params=["crun", "runc"])
def serving(request: pytest.FixtureRequest, host: None) -> Iterator[shimhost.Writer]:
    """Each real runtime whose CRIU dumps TCP sockets on this kernel; adds to the settings file."""
    path = next((each for each in runtimes() if Path(each).name == request.param), "")
    if not path:
        pytest.skip(f"the test host has no {request.param} whose CRIU dumps TCP sockets on this kernel")
    write = shimhost.Writer(f'runtime = "{path}"\n')
    write("")
    yield write
    _tidy(path)


@pytest.fixture
def crun(host: None) -> Iterator[None]:
    """crun alone, for what does not depend on the runtime."""
    shimhost.write_settings('runtime = "crun"\n')
    yield
    _tidy("crun")


def _tidy(runtime: str) -> None:
    """Remove the containers by the runtime that made them; a test's own in its place has gone by now."""
    faults("")
    shimhost.write_settings(f'runtime = "{runtime}"\n')
    until(_no_container_is_left, "all containers are removed")
    shimhost.write_settings("")
    remove_left_groups()


def _no_container_is_left() -> bool:
    """Remove them; again where Podman could not, as a mount of one may be busy for a moment yet."""
    removed = podman("rm", "--force", "--all", "--time", "0")
    if removed.code:
        print(removed.err, file=sys.stderr)
    return removed.code == 0


@pytest.fixture
def settings(real: str) -> shimhost.Writer:
    """Adds to the settings file of this test."""
    return shimhost.Writer(f'runtime = "{real}"\n')
