"""The pages in docs/tasks: each command in them is run, in the order of the page, and succeeds."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import registryhost
import shimhost
from support import GPUWORK, good, podman, run

DOCS = Path(__file__).parents[2] / "docs" / "tasks"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
IMAGE = "quay.io/example/server"
STORE = Path("/var/lib/gpusnap-tasks")
_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_CONTAINERFILE = """\
FROM localhost/base
COPY gpuwork /gpuwork
CMD ["/gpuwork", "--tick", "30", "--rest", "24", "--mib", "8"]
"""


def commands(page: str) -> list[tuple[str, list[str]]]:
    """The commands of a page, each with the lines of its output that the page shows."""
    found: list[tuple[str, list[str]]] = []
    for block in _BLOCK.findall((DOCS / page).read_text("utf-8")):
        for line in block.splitlines():
            if line.startswith("# "):
                found.append((line.removeprefix("# "), []))
            else:
                found[-1][1].append(line)
    return found


@pytest.fixture(scope="module")
def image(host: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with the workload, called as in the pages."""
    context = tmp_path_factory.mktemp("image")
    shutil.copy(GPUWORK, context / "gpuwork")
    (context / "Containerfile").write_text(_CONTAINERFILE)
    good(podman("build", "--quiet", "--tag", IMAGE, str(context)))
    return IMAGE


@pytest.fixture
def registry() -> Iterator[str]:
    with registryhost.running() as found:
        yield f"http://{found.host}"


@pytest.fixture(autouse=True)
def place(crun: None, image: str) -> Iterator[None]:
    """A store of its own, and a stick to carry."""
    stick = Path("/mnt/usb")
    for folder in (STORE, stick):
        shutil.rmtree(folder, ignore_errors=True)
    stick.mkdir(parents=True)
    shimhost.write_settings(f'runtime = "crun"\n[memory]\nchunk-size = "1M"\n[store]\npath = "{STORE}"\n')
    yield
    for folder in (STORE, stick):
        shutil.rmtree(folder, ignore_errors=True)


def run_as_told(command: str, registry: str) -> str:
    """Run a command as somebody would who reads the page; what it printed. It must succeed."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/root", "COLUMNS": "80"}
    done = run("bash", "-c", command.replace("REGISTRY", registry), env=environment, seconds=120)
    assert done.code == 0, f"{command}: exit code {done.code}\n{done.out}{done.err}"
    return done.out + done.err


@pytest.mark.parametrize("page", PAGES)
def test_a_page(page: str, registry: str) -> None:
    """From a host that has no container and an empty store; what the page shows of the output is in it.

    Where the page goes to another host, the container of the first one is removed: this host is both.
    """
    found = commands(page)
    assert found, f"{page} has no command"
    started = ""
    for command, shown in found:
        if re.match(r"gpusnap restore (REGISTRY|moved)", command):
            good(podman("rm", "--force", "--time", "0", "server"))
        said = run_as_told(command, registry).splitlines()
        for line in shown:
            assert line in said, f"{command} does not print {line!r} but\n" + "\n".join(said)
        if command.startswith(("gpusnap restore", "podman --runtime")):
            name = re.search(r"--name (\w+)", command)
            started = name[1] if name is not None else started
            assert good(podman("inspect", "--format", "{{.State.Running}}", started)) == "true"


def test_what_a_page_has() -> None:
    """The commands of each block, in order, with the output below each."""
    (first, *_), last = commands("first-checkpoint.md"), commands("when-it-fails.md")[-1]
    assert first == (
        "podman --runtime gpusnap-runtime run -d --name server --device nvidia.com/gpu=0 " + IMAGE,
        [],
    )
    assert last == ("gpusnap report server --output /root/report.txt", [])
    shown = dict(commands("first-checkpoint.md"))["gpusnap checkpoint server"]
    assert shown == ["server has stopped; to continue it: gpusnap restore server"]
