"""Files by their paths in a container, and what the manifest says of the driver's among them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpusnap.runtime_shim.runtime.container_files import directory
from gpusnap.runtime_shim.snapshot import describe as description


def test_no_link_is_followed(tmp_path: Path) -> None:
    """A directory by its names; a link on the way, and what is none, is an error."""
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "file").touch()
    with directory(os.getpid(), f"{tmp_path}/a/b") as found:
        assert os.path.samestat(os.fstat(found), (tmp_path / "a/b").stat())
    for name in ("link", "link/b", "file", "none"):
        with (
            pytest.raises(OSError, match=name.partition("/")[0]),
            directory(os.getpid(), f"{tmp_path}/{name}"),
        ):
            pass


def test_the_drivers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Size and mode of those that are files there; of what a link leads to nothing is told."""
    (tmp_path / "secret").write_bytes(b"of this host")
    library = tmp_path / "libcuda.so.1"
    library.write_bytes(b"a library")
    library.chmod(0o755)
    (tmp_path / "libcuda.so.2").symlink_to(tmp_path / "secret")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libcuda.so.3").write_bytes(b"of this host, too")
    (tmp_path / "lib64").symlink_to(tmp_path / "lib")
    os.mkfifo(tmp_path / "libcuda.so.4")
    names = ("libcuda.so.1", "libcuda.so.2", "lib64/libcuda.so.3", "libcuda.so.4")
    monkeypatch.setattr(description, "mapped_files", lambda _: tuple(f"{tmp_path}/{name}" for name in names))
    monkeypatch.setattr(description, "is_driver_file", lambda _: True)
    (found,) = description._libraries([os.getpid()])
    assert (found.path, found.size, found.mode) == (str(library), 9, 0o100755)
