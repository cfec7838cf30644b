"""`gpusnap install` and `gpusnap uninstall`: what they say, refuse and leave behind, on a tree."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpusnap.cli.commands import install as commands_install
from gpusnap.cli.commands.install import install, uninstall
from gpusnap.cli.exit_codes import exit_code
from gpusnap.engines.install import detect as install_engines
from gpusnap.engines.install import installer, record
from gpusnap.engines.install import launcher as install_runtime
from gpusnap.engines.install import permissions as install_trust
from gpusnap.engines.install import references as install_mentions
from gpusnap.engines.install.detect import ShimContainer
from gpusnap.runtime_shim.base.errors import GpusnapError

PODMAN = "/etc/containers/containers.conf.d/90-gpusnap.conf"
CONTAINERD = "/etc/containerd/config.toml"
FRAGMENT = "/etc/gpusnap/containerd.toml"
LAUNCHER = install_runtime.LAUNCHER
CRIO = "/etc/crio/crio.conf.d/90-gpusnap.conf"
SETTINGS = "/etc/gpusnap/gpusnap.toml"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with gpusnap and all three engines."""
    programs = tmp_path / "usr/bin"
    programs.mkdir(parents=True)
    (tmp_path / "etc").mkdir()
    for name in ("gpusnap", "gpusnap-runtime", "gpusnap-hook", "podman", "containerd", "crio"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    monkeypatch.setattr("sys.argv", [str(programs / "gpusnap")])
    return tmp_path


def run(command: Any, tree: Path, *words: str) -> str:
    """The command's stdout; its errors are raised."""
    done = CliRunner().invoke(command, [f"--root={tree}", *words], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    return done.output


def changes(text: str) -> dict[str, str]:
    return {each["path"]: each["what"] for each in json.loads(text)["changes"]}


def files(tree: Path) -> set[str]:
    return {str(path) for path in tree.rglob("*")}


def test_there_and_back(tree: Path) -> None:
    """All engines of the host, in the order in which nobody is told of what is not there yet."""
    before = files(tree)
    found = json.loads(run(install, tree, "--json"))
    assert found["program"] == "/usr/bin/gpusnap-runtime"
    assert found["engines"] == ["podman", "containerd", "crio"]
    assert [each["path"] for each in found["changes"]] == [SETTINGS, PODMAN, CONTAINERD, CRIO]
    assert {each["what"] for each in found["changes"]} == {"written"}
    assert set(changes(run(install, tree, "--json")).values()) == {"unchanged"}
    assert set(changes(run(uninstall, tree, "--json")).values()) == {"removed"}
    assert files(tree) == before
    assert "gpusnap install has installed nothing on this host" in run(uninstall, tree)


def test_chosen_engines(tree: Path) -> None:
    """One after the other they add up; one that is not there yet may be named."""
    (tree / "usr/bin/podman").unlink()
    assert list(changes(run(install, tree, "--podman", "--json"))) == [SETTINGS, PODMAN]
    assert list(changes(run(install, tree, "--crio", "--json"))) == [SETTINGS, CRIO]
    assert list(changes(run(uninstall, tree, "--json"))) == [CRIO, PODMAN, SETTINGS]


def test_no_engine(tree: Path) -> None:
    for name in install_engines.ENGINES:
        (tree / "usr/bin" / name).unlink()
    with pytest.raises(GpusnapError, match=f"Podman, containerd and CRI-O .* in {tree}$") as caught:
        run(install, tree)
    assert "--podman" in caught.value.hint


def test_words(tree: Path) -> None:
    """For people: what, and where; a dry run shows the files."""
    said = run(install, tree, "--podman", "--dry-run")
    assert f"to be written {PODMAN}\n" in said
    assert '    gpusnap-runtime = ["/usr/bin/gpusnap-runtime"]\n' in said
    assert not (tree / "etc/gpusnap").exists()
    assert f"written {PODMAN}\n" in run(install, tree, "--podman")
    assert f"to be removed {PODMAN}\n" in run(uninstall, tree, "--dry-run")
    assert (tree / PODMAN[1:]).exists()


def test_hooks_and_default(tree: Path) -> None:
    """Taken back by another call without them."""
    found = changes(run(install, tree, "--podman", "--hooks", "--default", "--json"))
    assert "/etc/gpusnap/hooks.d/gpusnap-precreate.json" in found
    text = (tree / PODMAN[1:]).read_text()
    assert 'runtime = "gpusnap-runtime"' in text
    assert "/etc/gpusnap/hooks.d" in text
    # The hook's path is the tree's, and not this machine's.
    hook = json.loads((tree / "etc/gpusnap/hooks.d/gpusnap-precreate.json").read_text())["hook"]
    assert hook["path"] == "/usr/bin/gpusnap-hook"
    found = changes(run(install, tree, "--podman", "--json"))
    assert found["/etc/gpusnap/hooks.d/gpusnap-precreate.json"] == "removed"
    assert found[PODMAN] == "replaced"
    assert "hooks" not in (tree / PODMAN[1:]).read_text()
    with pytest.raises(GpusnapError, match="--hooks applies to Podman"):
        run(install, tree, "--crio", "--hooks")


def test_containerd_of_somebody(tree: Path) -> None:
    """His file stays, before and after; he is told what to add, and what to take out again."""
    config = tree / CONTAINERD[1:]
    config.parent.mkdir()
    config.write_text("version = 2\n")
    found = json.loads(run(install, tree, "--containerd", "--json"))
    assert [each["path"] for each in found["changes"]] == [SETTINGS, FRAGMENT]
    assert any("add the handler to it" in note for note in found["notes"])
    config.write_text(config.read_text() + (tree / FRAGMENT[1:]).read_text())
    before = config.read_text()
    line = 'config.toml:8: BinaryName = "/usr/bin/gpusnap-runtime"'
    with pytest.raises(
        GpusnapError, match="other configuration files still refer to gpusnap-runtime"
    ) as caught:
        run(uninstall, tree)
    assert line in str(caught.value)
    assert "--force" in caught.value.hint
    assert (tree / FRAGMENT[1:]).exists()
    with pytest.raises(GpusnapError, match="other configuration files still refer to gpusnap-runtime"):
        run(uninstall, tree, "--dry-run")
    found = json.loads(run(uninstall, tree, "--force", "--json"))
    assert any(note.startswith("remove this line:") and line in note for note in found["notes"])
    assert config.read_text() == before


def test_a_default_that_stays(tree: Path) -> None:
    """No engine is left with a default runtime that is gone: by our file, which he changed, or by his own."""
    run(install, tree, "--podman", "--containerd", "--default")
    drop_in, config = tree / PODMAN[1:], tree / CONTAINERD[1:]
    drop_in.write_text(drop_in.read_text() + "# his\n")
    before = files(tree)
    with pytest.raises(GpusnapError, match=r'90-gpusnap\.conf:3: runtime = "gpusnap-runtime"') as caught:
        run(uninstall, tree)
    assert "runtime_supports_json" not in str(caught.value)
    drop_in.unlink()
    config.write_text('version = 2\n[a]\n  default_runtime_name = "gpusnap"\n')
    with pytest.raises(
        GpusnapError, match=r'refer to gpusnap-runtime: .*config\.toml:3: default_runtime_name = "gpusnap"$'
    ):
        run(uninstall, tree)
    assert files(tree) == before - {str(drop_in)}
    config.write_text("version = 2\n")
    run(uninstall, tree)
    assert (drop_in.exists(), config.read_text()) == (False, "version = 2\n")


def test_force_leaves_containerds_file(tree: Path) -> None:
    """One that gpusnap wrote and he has filled since is his, whatever is forced in an installation."""
    run(install, tree, "--containerd")
    config = tree / CONTAINERD[1:]
    config.write_text(config.read_text() + "\n[metrics]\n")
    found = json.loads(run(install, tree, "--containerd", "--force", "--json"))
    assert {each["path"]: each["what"] for each in found["changes"]}[CONTAINERD] == "left"
    assert any("already has the handler gpusnap" in note for note in found["notes"])
    assert "[metrics]" in config.read_text()


@pytest.fixture
def wheel(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The launcher of a wheel, which is installed for CRI-O; and then there is a package."""
    (tree / "venv/bin").mkdir(parents=True)
    for name in ("gpusnap", "gpusnap-runtime"):
        (tree / "venv/bin" / name).write_text("#!/usr/bin/python3\n")
        (tree / "venv/bin" / name).chmod(0o755)
    launcher = tree / "launcher"
    launcher.write_bytes(b"\x7fELF")
    plain = install_runtime.program
    with monkeypatch.context() as patch:
        patch.setattr("sys.argv", [str(tree / "venv/bin/gpusnap")])
        patch.setattr(install_runtime, "program", lambda root: plain(root, launcher))
        run(install, tree, "--crio")
    assert LAUNCHER in (tree / CRIO[1:]).read_text()
    return launcher


def test_from_a_wheel_to_a_package(tree: Path, wheel: Path) -> None:
    """Its launcher goes once no engine is told of it."""
    found = json.loads(run(install, tree, "--podman", "--json"))
    assert any(LAUNCHER in note and CRIO in note and "is kept" in note for note in found["notes"])
    assert (tree / LAUNCHER[1:]).exists()
    found = json.loads(run(install, tree, "--crio", "--json"))
    assert found["program"] == "/usr/bin/gpusnap-runtime"
    gone = {each["path"] for each in found["changes"] if each["what"] == "removed"}
    assert gone == {LAUNCHER, install_runtime.ENTRY}
    assert not any("is kept" in note for note in found["notes"])
    assert not (tree / LAUNCHER[1:]).exists()


def test_a_launcher_in_use(tree: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it go under a container that is run by it."""
    plan = commands_install._Plan([], [], "")
    plain = record.load
    monkeypatch.setattr(record, "load", lambda root: plain(str(tree)))
    monkeypatch.setattr(install_mentions, "lines", lambda *_: [])
    monkeypatch.setattr(install_engines, "list_used", lambda: [ShimContainer("crio", "0123", "server")])
    parts, notes = commands_install._parts(plan, "/")
    assert "runtime" not in parts
    assert [note.partition(" of an earlier")[0] for note in notes] == [install_runtime.ENTRY, LAUNCHER]
    assert "as their runtime: server; run gpusnap install again" in notes[0]
    monkeypatch.setattr(install_engines, "list_used", list)
    assert commands_install._parts(plan, "/") == ({"runtime"}, [])


def test_a_program_of_others(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root is not bound to what others can write; with force it is, and told so."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(install_trust, "fault", lambda path: f"every user can write to {path}")
    reached: list[bool] = []

    def put(items: Any, **given: Any) -> list[Any]:
        reached.append(given["force"])
        return []

    monkeypatch.setattr(installer, "install", put)
    monkeypatch.setattr(record, "load", lambda root: record.Record())
    done = CliRunner().invoke(install, ["--crio"], standalone_mode=False)
    with pytest.raises(
        GpusnapError, match=r"would run .*/gpusnap-runtime as root, but every user can"
    ) as caught:
        raise done.exception or AssertionError
    assert "sudo pipx install" in caught.value.hint
    assert reached == []
    done = CliRunner().invoke(install, ["--crio", "--force", "--json"], standalone_mode=False)
    assert any("every user can write" in note for note in json.loads(done.stdout)["notes"])
    assert reached == [True]


def test_changed_by_somebody(tree: Path) -> None:
    run(install, tree, "--podman")
    (tree / PODMAN[1:]).write_text("[engine]\n")
    with pytest.raises(GpusnapError, match="differs from what gpusnap would write"):
        run(install, tree, "--podman")
    said = run(uninstall, tree)
    assert f"left {PODMAN}\n" in said
    assert f"{PODMAN} was modified, and is kept" in said
    assert (tree / PODMAN[1:]).exists()


def test_schedules_that_stay(tree: Path) -> None:
    """An uninstall keeps them, and says how they are removed: without gpusnap, their runs would fail."""
    run(install, tree)
    units = tree / "etc/systemd/system"
    units.mkdir(parents=True)
    (units / r"gpusnap-checkpoint-a\x2db.timer").write_text("")
    (units / "gpusnap-checkpoint-x.service").write_text("")
    (note,) = json.loads(run(uninstall, tree, "--json"))["notes"]
    assert note == "the schedule of a-b is kept; before gpusnap is removed: gpusnap schedule a-b --remove"


@pytest.mark.parametrize("command", [install, uninstall])
def test_not_root(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    done = CliRunner().invoke(command, [], standalone_mode=False)
    assert isinstance(done.exception, GpusnapError)
    assert "which requires root" in str(done.exception)
    assert "--dry-run" in done.exception.hint


def test_containers_that_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is touched while there are containers of its; with force it is gone all the same."""
    reached: list[dict[str, Any]] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    def taken(**given: Any) -> list[Any]:
        reached.append(given)
        return []

    monkeypatch.setattr(installer, "uninstall", taken)
    monkeypatch.setattr(record, "load", lambda root: record.Record())
    one = ShimContainer("podman", "0123", "server")
    many = [one, *(ShimContainer("containerd", f"task{number}") for number in range(6))]
    for found, names in (([one], "of Podman .*: server$"), (many, "of Podman and containerd .* and 2 more$")):
        monkeypatch.setattr(install_engines, "list_used", lambda found=found: found)
        done = CliRunner().invoke(uninstall, [], standalone_mode=False)
        assert isinstance(done.exception, GpusnapError)
        with pytest.raises(GpusnapError, match=names) as caught:
            raise done.exception
        assert "--force" in caught.value.hint
    assert reached == []
    done = CliRunner().invoke(uninstall, ["--force"], standalone_mode=False)
    assert all(given["force"] for given in reached)
    assert [given["dry_run"] for given in reached] == [True, False]


@pytest.mark.parametrize("json_", [False, True])
def test_a_dry_run_of_what_would_be_refused(monkeypatch: pytest.MonkeyPatch, json_: bool) -> None:
    """It shows what would go, says the refusal, and fails as the real one; with force neither does."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(installer, "uninstall", lambda **given: [installer.Change("removed", PODMAN)])
    monkeypatch.setattr(record, "load", lambda root: record.Record())
    monkeypatch.setattr(install_mentions, "lines", lambda *_: [])
    monkeypatch.setattr(install_engines, "list_used", lambda: [ShimContainer("podman", "0123", "server")])
    words = ["--dry-run", *(["--json"] if json_ else [])]
    done = CliRunner().invoke(uninstall, words, standalone_mode=False)
    said = "containers of Podman use gpusnap-runtime as their runtime: server; remove them first"
    assert isinstance(done.exception, GpusnapError)
    assert done.exception.sentence().startswith(said)
    assert exit_code(done.exception) == 1
    if json_:
        assert json.loads(done.stdout)["refused"].startswith(said)
    else:
        assert f"to be removed {PODMAN}\n" in done.stdout
    done = CliRunner().invoke(uninstall, [*words, "--force"], standalone_mode=False)
    assert done.exception is None
