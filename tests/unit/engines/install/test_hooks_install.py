"""`gpusnap install-hooks`: the files of hooks.d, and the terms on which they are written and removed."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from fakes import POISON

from gpusnap.engines.install import hooks as hooks_command
from gpusnap.engines.install.hooks import install_hooks, takes_annotation
from gpusnap.hooks import hooksd
from gpusnap.hooks.main import SECONDS
from gpusnap.runtime_shim.base.errors import GpusnapError, UsageError
from gpusnap.runtime_shim.runtime import identify as real
from gpusnap.runtime_shim.runtime.identify import parse_version

NAMES = ["gpusnap-create-runtime.json", "gpusnap-poststop.json", "gpusnap-precreate.json"]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed gpusnap-hook beside the program that runs."""
    path = tmp_path / "bin" / "gpusnap-hook"
    path.parent.mkdir()
    path.touch(0o755)
    monkeypatch.setattr("sys.argv", [str(path.parent / "gpusnap")])
    return str(path)


def run(*words: Any) -> str:
    """The command's output; its errors are raised."""
    done = CliRunner().invoke(install_hooks, [*map(str, words)], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.output


def test_files(tmp_path: Path, program: str) -> None:
    """One a stage, as oci-hooks(5) has them: absolute path, argument list, a timeout above our own."""
    folder = tmp_path / "new" / "hooks.d"
    assert f"making {folder}\n" in run(folder)
    assert sorted(os.listdir(folder)) == NAMES
    stages = []
    for path in folder.iterdir():
        document = json.loads(path.read_text())
        assert set(document) == {"version", "hook", "when", "stages"}
        assert document["version"] == "1.0.0"
        (stage,) = document["stages"]
        assert document["hook"] == {"path": program, "args": ["gpusnap-hook", stage], "timeout": 10}
        assert document["hook"]["timeout"] > SECONDS
        assert document["when"] == {"always": True}
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        stages.append(stage)
    assert sorted(stages) == ["createRuntime", "poststop", "precreate"]


def test_annotated(tmp_path: Path, program: str) -> None:
    """The condition holds for io.gpusnap and for our settings, and for no other annotation."""
    run("--annotated", "--stage", "precreate", tmp_path)
    (name,) = [name for name in os.listdir(tmp_path) if name.startswith("gpusnap")]
    ((key, value),) = json.loads((tmp_path / name).read_text())["when"]["annotations"].items()
    matching = [
        word
        for word in ("io.gpusnap", "io.gpusnap.retries", "io.gpusnapx", "xio.gpusnap")
        if re.search(key, word)
    ]
    assert matching == ["io.gpusnap", "io.gpusnap.retries"]
    assert re.search(value, "")


def test_again(tmp_path: Path, program: str) -> None:
    """Ours are left when they are right, and replaced when the choices are others, without --force."""
    run(tmp_path)
    assert [line.split()[0] for line in run(tmp_path).splitlines()] == ["unchanged"] * 3
    assert [line.split()[0] for line in run("--annotated", tmp_path).splitlines()] == ["replaced"] * 3


@pytest.mark.parametrize("change", ["edited", "other", "link"])
def test_a_file_that_is_not_ours(tmp_path: Path, program: str, change: str) -> None:
    """It stays, and nothing is written, without --force; --remove leaves it and says so."""
    folder = tmp_path / "d"
    run(folder)
    path = folder / NAMES[1]
    text = path.read_text()
    path.unlink()
    if change == "link":
        path.symlink_to(tmp_path / "x")
        (tmp_path / "x").write_text(text)
    else:
        path.write_text(text.replace("10", "9") if change == "edited" else "{}")
    with pytest.raises(GpusnapError, match=f"{NAMES[1]} already exists, and differs") as caught:
        run("--annotated", folder)
    assert "--force" in caught.value.hint
    assert "always" in (folder / NAMES[0]).read_text()
    assert f"{path} was modified, and is kept" in run("--remove", folder)
    assert os.listdir(folder) == [NAMES[1]]
    assert f"replaced {path}" in run("--force", folder)
    assert path.read_text() == text
    assert not path.is_symlink()


def test_remove(tmp_path: Path, program: str) -> None:
    """Exactly ours go, whatever choices they were written with; a missing folder has none."""
    run("--annotated", tmp_path / "d")
    (tmp_path / "d" / "other.json").touch()
    assert run("--remove", "--dry-run", tmp_path / "d").count("would be removed: ") == 3
    assert len(os.listdir(tmp_path / "d")) == 4
    assert run("--remove", tmp_path / "d").count("removed ") == 3
    assert os.listdir(tmp_path / "d") == ["other.json"]
    assert run("--remove", tmp_path / "none") == f"no file of gpusnap's is in {tmp_path}/none\n"
    with pytest.raises(UsageError, match="DIR is empty"):  # not the current directory
        run("")


def test_dry_run(tmp_path: Path, program: str) -> None:
    """Prints every file, and makes nothing."""
    out = run("--dry-run", tmp_path / "d")
    assert [line for line in out.splitlines() if line.startswith("# ")] == [
        f"# {tmp_path}/d/{name}" for name in (NAMES[2], NAMES[0], NAMES[1])
    ]
    assert not (tmp_path / "d").exists()


def test_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clear error, before a folder is made."""
    monkeypatch.setattr("sys.argv", [str(tmp_path / "gpusnap")])
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "scripts"))
    with pytest.raises(GpusnapError, match=f"gpusnap-hook is not in {tmp_path} or {tmp_path}/scripts"):
        run(tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_folder_that_cannot_be_written(tmp_path: Path, program: str) -> None:
    """One sentence, without the words that Podman rewrites."""
    (tmp_path / "file").touch()
    with pytest.raises((GpusnapError, click.ClickException)) as caught:
        run(tmp_path / "file" / "d")
    assert "cannot be written into" in str(caught.value)
    assert not [words for words in POISON if words in str(caught.value).lower()]


def test_shared_folder(program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CRI-O and podman build would fail there on precreate; the other two stages are welcome."""
    monkeypatch.setattr(hooksd, "SHARED_DIRECTORIES", (str(tmp_path),))
    with pytest.raises(GpusnapError, match="refuse the stage precreate"):
        run(tmp_path)
    run("--stage", "createRuntime", "--stage", "poststop", tmp_path)
    assert sorted(name for name in os.listdir(tmp_path) if name.endswith("json")) == NAMES[:2]


@pytest.mark.parametrize(
    ("version", "criu", "takes"),
    [
        ("crun version 1.21", "4.1.1", False),
        ("crun version 1.26", "4.1.1", False),
        ("crun version 1.26", "4.2", True),
        ("crun version 1.27", "unknown", False),
        ("runc version 1.1.15+ds1", "3.17", True),
        ("youki version 9.9", "9.9", False),
    ],
)
def test_takes_annotation(version: str, criu: str, takes: bool) -> None:
    """Every runc, crun from 1.26 on with CRIU 4.2, and none that is not known."""
    assert takes_annotation(parse_version(Path("/x"), version), criu) is takes


@pytest.mark.parametrize("takes", [True, False])
def test_criu_config(tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch, takes: bool) -> None:
    """Into precreate's arguments, where the file exists and this host's runtime takes the annotation."""
    file = tmp_path / "criu.conf"
    with pytest.raises(GpusnapError, match="is not the absolute path"):
        run("--criu-config", file, tmp_path / "d")
    file.touch()
    found = parse_version(Path("/usr/bin/crun"), "crun version 1.21")
    monkeypatch.setattr(real, "find", lambda name: found.path)
    monkeypatch.setattr(real, "identify", lambda path: found)
    monkeypatch.setattr(hooks_command, "takes_annotation", lambda *_: takes)
    if not takes:
        with pytest.raises(GpusnapError, match=r"crun 1\.21 with CRIU .* refuses"):
            run("--criu-config", file, tmp_path / "d")
        return
    run("--criu-config", file, tmp_path / "d")
    args = json.loads((tmp_path / "d" / NAMES[2]).read_text())["hook"]["args"]
    assert args == ["gpusnap-hook", "precreate", "--criu-config", str(file)]
    assert [line.split()[0] for line in run(tmp_path / "d").splitlines()] == [
        "replaced",
        "unchanged",
        "unchanged",
    ]
