"""Podman's drop-in: what is built in, and what other files say, is not lost by it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from gpusnap.engines.install.podman import DROP_IN, items, notes
from gpusnap.hooks import hooksd
from gpusnap.runtime_shim.base.errors import GpusnapError

PROGRAM = "/usr/local/bin/gpusnap-runtime"
BUILT_IN = ["crun", "runc", "kata", "runsc", "youki", "krun"]


def engine(root: Path, **more: Any) -> dict[str, Any]:
    made = items(PROGRAM, root=str(root), **more)
    assert made[-1].path == DROP_IN
    document = tomllib.loads(made[-1].data.decode())
    assert set(document) == {"engine"}
    return dict(document["engine"])


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_plain(tmp_path: Path) -> None:
    assert engine(tmp_path) == {
        "runtime_supports_json": [*BUILT_IN, "gpusnap-runtime"],
        "runtimes": {"gpusnap-runtime": [PROGRAM]},
    }
    assert engine(tmp_path, default=True)["runtime"] == "gpusnap-runtime"
    assert notes(PROGRAM, root=str(tmp_path)) == []


def test_other_files(tmp_path: Path) -> None:
    """Their runtimes stay among those with JSON, also in the form that appends; ours is not read back."""
    write(tmp_path, "etc/containers/containers.conf", '[engine]\nruntime_supports_json = ["crun", "own"]\n')
    write(
        tmp_path,
        "etc/containers/containers.conf.d/10-a.conf",
        '[engine]\nruntime_supports_json = ["second", {append=true}]\nhooks_dir = ["/his"]\n',
    )
    write(tmp_path, DROP_IN[1:], '[engine]\nruntime_supports_json = ["old"]\n')
    write(tmp_path, "etc/containers/containers.conf.d/notes.txt", "no TOML")
    found = engine(tmp_path, hook="/usr/bin/gpusnap-hook")
    assert found["runtime_supports_json"] == [*BUILT_IN, "own", "second", "gpusnap-runtime"]
    assert found["hooks_dir"] == [*hooksd.SHARED_DIRECTORIES, "/his", "/etc/gpusnap/hooks.d"]


def test_hooks(tmp_path: Path) -> None:
    """The files of hooks.d come before the drop-in that names their folder."""
    made = items(PROGRAM, root=str(tmp_path), hook="/usr/bin/gpusnap-hook")
    assert [Path(each.path).name for each in made] == [
        "gpusnap-precreate.json",
        "gpusnap-create-runtime.json",
        "gpusnap-poststop.json",
        "90-gpusnap.conf",
    ]
    assert all(b"/usr/bin/gpusnap-hook" in each.data for each in made[:3])


def test_what_goes_against_it(tmp_path: Path) -> None:
    write(
        tmp_path,
        "etc/containers/containers.conf.d/99-b.conf",
        '[engine]\nruntime = "crun"\nruntime_supports_json = ["crun"]\n'
        '[engine.runtimes]\ngpusnap-runtime = ["/old/gpusnap-runtime"]\n',
    )
    said = notes(PROGRAM, root=str(tmp_path), default=True)
    assert [
        ("names gpusnap-runtime" in a, "add it there" in a, "not Podman's default" in a) for a in said
    ] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    assert all("99-b.conf" in each for each in said)
    assert "it takes precedence" in said[0]


def test_broken(tmp_path: Path) -> None:
    write(tmp_path, "etc/containers/containers.conf", "[engine\n")
    with pytest.raises(GpusnapError, match=r"containers\.conf is not TOML") as caught:
        items(PROGRAM, root=str(tmp_path))
    assert "Podman" in caught.value.hint
    write(tmp_path, "etc/containers/containers.conf", "engine = 1\n")
    assert engine(tmp_path)
