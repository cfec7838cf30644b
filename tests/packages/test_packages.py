"""The packages in clean trees of the distributions they are for; each script there says what it does.

Slow, and with the network: `make test-packages`, not `make test`.
"""

from __future__ import annotations

import os
import subprocess
import sys
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


def test_lintian() -> None:
    """No errors, and no warnings but those that the package overrides and says why."""
    script = (
        "apt-get -q update >/dev/null; apt-get -q install -y --no-install-recommends lintian >/dev/null 2>&1;"
        "lintian --allow-root --fail-on error,warning /dist/gpusnap_*.deb"
    )
    enter("trixie", "sh", "-c", script)
