"""The packages in clean trees of the distributions they are for; each script there says what it does.

Slow, and with the network: `make test-packages`, not `make test`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
DIST = CHECKOUT / "dist"
DEADLINE_S = 1800.0
IMAGE = "usr/share/gpusnap/base.oci.tar"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="trees are made and entered by root")


def enter(suite: str, *argv: str, binds: tuple[str, ...] = ()) -> str:
    """What a command in a tree prints; it has to succeed."""
    words = [
        word for bind in (f"{DIST}:/dist:ro", f"{CHECKOUT}:/src:ro", *binds) for word in ("--bind", bind)
    ]
    done = subprocess.run(
        [sys.executable, "-B", str(HERE / "trees.py"), *words, suite, *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def made() -> None:
    """`make wheel deb` has been run; one of each, so that the patterns in the scripts mean it."""
    for pattern in ("gpusnap-*.whl", "gpusnap-*.tar.gz", "gpusnap_*.deb"):
        assert len(list(DIST.glob(pattern))) == 1, f"{DIST} has not one {pattern}: run make clean wheel deb"


@pytest.mark.parametrize(
    ("suite", "more"), [("bookworm", ()), ("trixie", ()), ("trixie", ("system",)), ("noble", ())]
)
def test_pipx(suite: str, more: tuple[str, ...]) -> None:
    """Wheel and sdist; on a system that has pycriu, and without."""
    assert "== all is well" in enter(suite, "sh", "/src/tests/packages/wheel.sh", "/dist", *more)


def test_deb() -> None:
    """The README's way, from apt install to apt purge."""
    tree = subprocess.run(
        [str(CHECKOUT / "tests/host/host"), "build"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    bind = f"{tree}/{IMAGE}:/base.tar:ro"
    said = enter("trixie", "sh", "/src/tests/packages/deb.sh", "/dist", "/src", binds=(bind,))
    assert "== all is well" in said


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The checkout without what git ignores, links as links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        target = tmp_path / "copy" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(CHECKOUT / name, target, follow_symlinks=False)
    return tmp_path / "copy"


def held(wheel: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and content of each file in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {each.filename: (each.external_attr >> 16, archive.read(each)) for each in archive.infolist()}


def test_one_package(copy: Path, tmp_path: Path) -> None:
    """One import name; the wheel is the same from the sdist, which holds no links, and from the checkout."""
    (ours,), (sdist,) = DIST.glob("gpusnap-*.whl"), DIST.glob("gpusnap-*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert [each.name for each in members if not (each.isfile() or each.isdir())] == []
    python = str(CHECKOUT / "build/packaging/bin/python")
    subprocess.run([python, "-m", "build", "--wheel", "--outdir", tmp_path / "out", copy], check=True)
    (other,) = (tmp_path / "out").glob("*.whl")
    assert (other.name, held(other)) == (ours.name, held(ours))
    tops = {name.partition("/")[0] for name in held(ours)}
    assert {name for name in tops if not name.endswith((".dist-info", ".data"))} == {"gpusnap"}


def test_an_editable_install(copy: Path, tmp_path: Path) -> None:
    """It follows the links of the checkout, and has no other import name."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = str(environment / "bin/python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--editable", copy], check=True)
    program = (
        "import importlib.util as u; from gpusnap.hooks import main; from gpusnap.oci.base import json_text;"
        "from gpusnap.runtime_shim.shim import entry; print(json_text.__file__);"
        "print([name for name in ('hooks', 'oci', 'runtime_shim') if u.find_spec(name)])"
    )
    done = subprocess.run(
        [python, "-I", "-c", program], check=True, stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert done.stdout.splitlines() == [str(copy / "gpusnap/oci/base/json_text.py"), "[]"]


def test_lintian() -> None:
    """No errors, and no warnings but those that the package overrides and says why."""
    script = (
        "apt-get -q update >/dev/null; apt-get -q install -y --no-install-recommends lintian >/dev/null 2>&1;"
        "lintian --allow-root --fail-on error,warning /dist/gpusnap_*.deb"
    )
    enter("trixie", "sh", "-c", script)
