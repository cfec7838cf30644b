"""What a container is called in gpusnap's own files: by its ID and its runtime's root."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusnap.runtime_shim.runtime import container_key
from gpusnap.runtime_shim.snapshot.records import journal


@pytest.mark.parametrize(
    ("given", "kind", "environment", "root"),
    [
        ("/run/containerd/runc/k8s.io", "runc", {}, "/run/containerd/runc/k8s.io"),
        (None, "runc", {"XDG_RUNTIME_DIR": "/run/user/0"}, "/run/runc"),
        (None, "crun", {}, "/run/crun"),
        (None, "crun", {"XDG_RUNTIME_DIR": "/run/user/0"}, "/run/user/0/crun"),
        ("/run/crun", "crun", {"XDG_RUNTIME_DIR": "/run/user/0"}, "/run/crun"),
    ],
)
def test_the_root(given: str | None, kind: str, environment: dict[str, str], root: str) -> None:
    """As the runtimes themselves find it."""
    assert container_key.root(given, kind, environment) == root


def test_keys_differ_by_root_and_id(tmp_path: Path) -> None:
    """Each of the two makes another container; a link to the root, or a slash at its end, does not."""
    (tmp_path / "root").mkdir()
    (tmp_path / "link").symlink_to("root")
    one = container_key.key(str(tmp_path / "root"), "w")
    assert one == container_key.key(f"{tmp_path}/link/", "w")
    assert (
        len({one, container_key.key(str(tmp_path), "w"), container_key.key(str(tmp_path / "root"), "v"), "w"})
        == 4
    )
    assert container_key.id_of(one) == container_key.id_of("w") == "w"
    assert container_key.key("", "w") == "w"


@pytest.mark.parametrize("name", ["w", "w@0123456789ab", "a.b-c+d_e", "ab" * 32])
def test_what_is_a_key(name: str) -> None:
    """An ID as engines make them, with or without a root."""
    assert container_key.is_key(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "w@", "w@xyz", "w@0123456789ab/../x", "@0123456789ab", "w\n"]
)
def test_what_is_none(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else becomes part of a file's name, or is looked for."""
    monkeypatch.setattr(journal, "FOLDER", str(tmp_path))
    assert not container_key.is_key(name)
    assert journal.read(name) is None
    assert journal.load(name, "restore") is None
