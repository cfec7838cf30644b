"""What registries.conf says of a reference."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from gpusnap.oci.base.errors import RegistryError
from gpusnap.oci.layout.reference import parse
from gpusnap.oci.registry import registries_conf
from gpusnap.oci.registry.registries_conf import endpoints

CONF = """\
unqualified-search-registries = ["docker.io"]
[[registry]]
location = "plain.example:5000"
insecure = true
[[registry]]
prefix = "old.example/team"
location = "new.example/moved/team"
[[registry]]
location = "bad.example"
blocked = true
[[registry]]
prefix = "*.corp.example"
insecure = true
[[registry]]
location = "hub.example"
[[registry.mirror]]
location = "mirror.example:5000/hub"
insecure = true
[[registry.mirror]]
location = "digests.example"
pull-from-mirror = "digest-only"
"""
DIGEST = "@sha256:" + "0" * 64


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A host with these files, and a user with none."""
    monkeypatch.setattr(registries_conf, "FOLDER", str(tmp_path))
    (tmp_path / "registries.conf").write_text(CONF)
    return {"HOME": str(tmp_path / "home")}


def found(word: str, environ: dict[str, str], *, mirrors: bool = True) -> list[tuple[str, bool]]:
    every = endpoints(parse(word), mirrors=mirrors, environ=environ)
    return [(str(each.reference), each.insecure) for each in every]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("other.example/a:1", [("other.example/a:1", False)]),
        ("plain.example:5000/a:1", [("plain.example:5000/a:1", True)]),
        ("plain.example/a:1", [("plain.example/a:1", False)]),
        ("plain.example:50001/a", [("plain.example:50001/a", False)]),
        ("old.example/team/a:1", [("new.example/moved/team/a:1", False)]),
        ("old.example/teams/a:1", [("old.example/teams/a:1", False)]),
        ("a.corp.example/a:1", [("a.corp.example/a:1", True)]),
        ("corp.example/a:1", [("corp.example/a:1", False)]),
        ("hub.example/a:1", [("mirror.example:5000/hub/a:1", True), ("hub.example/a:1", False)]),
        (
            f"hub.example/a{DIGEST}",
            [
                (f"mirror.example:5000/hub/a{DIGEST}", True),
                (f"digests.example/a{DIGEST}", False),
                (f"hub.example/a{DIGEST}", False),
            ],
        ),
    ],
)
def test_endpoints(environ: dict[str, str], word: str, expected: list[tuple[str, bool]]) -> None:
    """By the longest prefix that ends where a part of the name ends; mirrors first, but for a push."""
    assert found(word, environ) == expected
    assert found(word, environ, mirrors=False) == expected[-1:]


def test_blocked(environ: dict[str, str]) -> None:
    """It is refused, with the file that says so."""
    with pytest.raises(RegistryError, match=r"bad.example/a is blocked on this host, .*registries.conf"):
        found("bad.example/a:1", environ)


def test_files(environ: dict[str, str], tmp_path: Path) -> None:
    """Drop-ins replace what the file says of a prefix; a user's file takes the system's place."""
    drop = tmp_path / "registries.conf.d"
    drop.mkdir()
    (drop / "50-a.conf").write_text('[[registry]]\nlocation = "bad.example"\n')
    (drop / "60-b.conf").write_text('[[registry]]\nlocation = "bad.example"\ninsecure = true\n')
    assert found("bad.example/a:1", environ) == [("bad.example/a:1", True)]
    own = tmp_path / "home/.config/containers"
    own.mkdir(parents=True)
    (own / "registries.conf").write_text("")
    assert found("plain.example:5000/a:1", environ) == [("plain.example:5000/a:1", False)]
    given = tmp_path / "given.conf"
    given.write_text('[[registry]]\nlocation = "given.example"\ninsecure = true\n')
    assert found("given.example/a", {**environ, "CONTAINERS_REGISTRIES_CONF": str(given)})[0][1]


def test_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a file everything is as it is named."""
    monkeypatch.setattr(registries_conf, "FOLDER", str(tmp_path / "none"))
    assert found("a.example/b:1", {"HOME": "/none"}) == [("a.example/b:1", False)]


@pytest.mark.parametrize(
    "text",
    [
        "x = [",
        "registry = 1",
        "[[registry]]\ninsecure = true",
        '[[registry]]\nlocation = "a.example"\nblocked = "yes"',
        '[[registry]]\nlocation = "a.example"\n[[registry.mirror]]\ninsecure = true',
    ],
)
def test_broken(environ: dict[str, str], tmp_path: Path, text: str) -> None:
    """The file is named, and nobody is asked anything."""
    (tmp_path / "registries.conf").write_text(text)
    with pytest.raises(RegistryError, match=rf"^{tmp_path}/registries.conf "):
        found("a.example/b:1", environ)
    with pytest.raises(RegistryError, match="CONTAINERS_REGISTRIES_CONF names /none: it does not exist"):
        found("a.example/b:1", {**environ, "CONTAINERS_REGISTRIES_CONF": "/none"})


def test_a_file_that_nobody_can_look_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The user's own may block a registry: the system's is not taken in its place."""

    def fail(path: str) -> bool:
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(registries_conf, "exists", fail)
    with pytest.raises(RegistryError, match=r"registries\.conf cannot be read: Input/output error"):
        list(registries_conf._files({"HOME": str(tmp_path)}))
