"""Checks of runtimes and engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor_trees import Programs, only, tree

from gpusnap.doctor.host_checks import engines
from gpusnap.runtime_shim._version import __version__
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime.child_process import Finished

OURS = "/usr/bin/gpusnap-runtime"


def runtime(folder: Path, text: str, name: str = "crun") -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\ncat <<'E'\n{text}\nE\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "verdict", "said"),
    [
        ("crun version 1.21\n+SYSTEMD +CRIU", "ok", "not by org.criu.config"),
        ("runc version 1.1.15+ds1", "ok", "runc 1.1.15"),
        ("crun version 1.8.1\n+SYSTEMD", "failure", "built without CRIU"),
        ("youki version 0.5", "warning", "neither crun nor runc"),
    ],
)
def test_runtime(tmp_path: Path, text: str, verdict: str, said: str) -> None:
    """Which it is, and whether it can."""
    found = only(engines.check_runtimes(runtime(tmp_path, text), "4.1.1"))
    assert found[0] == verdict
    assert said in found[1].says


def test_configuration_of_a_newer_crun(tmp_path: Path) -> None:
    """From 1.26 on with CRIU 4.2 it takes the annotation."""
    path = runtime(tmp_path, "crun version 1.28\n+CRIU")
    assert only(engines.check_runtimes(path, "4.2"))[1].facts["takes_org_criu_config"] is True


def test_a_crun_without_crius_library(tmp_path: Path) -> None:
    """crun would say so only when it has been asked for a checkpoint."""
    path = runtime(tmp_path, "crun version 1.21\n+CRIU")
    with open(path, "ab") as file:
        file.write(b"exit\n\0libcriu.so.999\0")
    verdict, found = only(engines.check_runtimes(path, "4.1.1"))
    assert verdict == "failure"
    assert "needs libcriu.so.999 for a checkpoint" in found.says
    assert "libcriu2" in found.todo


def test_no_runtime() -> None:
    """gpusnap's own sentence."""
    assert "/nowhere/crun" in only(engines.check_runtimes("/nowhere/crun", "4.1.1"))[1].says


@pytest.mark.parametrize(
    ("names", "wanted", "verdict", "said"),
    [
        (["crun", "runc"], "", "ok", "runc 1.1.15"),
        (["crun"], "", "warning", "install runc"),
        (["crun", "runc"], "crun", "warning", "remove runtime from the settings"),
        (["crun"], "crun", "warning", "install runc"),
        (["crun", "runc"], "runc", "ok", "runc 1.1.15"),
    ],
)
def test_under_cri(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], wanted: str, verdict: str, said: str
) -> None:
    """crun does for Podman; where containerd or CRI-O know of gpusnap, runc is wanted beside it."""
    versions = {"crun": "crun version 1.21\n+CRIU", "runc": "runc version 1.1.15"}
    for name in names:
        runtime(tmp_path, versions[name], name)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(locate, "SYSTEM_DIRECTORIES", ())
    programs = Programs(containerd="", podman="", **dict.fromkeys(names, ""))
    root = tree(tmp_path, {"/etc/containers/containers.conf.d/50.conf": PODMAN})
    assert list(engines.check_cri(wanted, root, find=programs.find)) == []
    tree(tmp_path, {"/etc/containerd/config.toml": CONTAINERD})
    found = only(engines.check_cri(wanted, root, find=programs.find))
    assert found[0] == verdict
    assert said in found[1].says + found[1].todo
    assert list(engines.check_cri(wanted, root, find=Programs(podman="").find)) == []


def test_launcher(tmp_path: Path) -> None:
    """gpusnap-runtime as the engines' configuration names it; else where a shell finds it."""
    root = tree(tmp_path, {"/etc/containers/containers.conf.d/50.conf": PODMAN})
    programs = Programs(podman="", gpusnap_runtime="")
    found = only(engines.check_launcher(root, find=programs.find))
    assert (found[0], found[1].facts["path"]) == ("failure", OURS)
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / OURS[1:]).touch()
    found = only(engines.check_launcher(root, find=programs.find))
    assert (found[0], found[1].says) == ("ok", f"{OURS} in the engines' configuration")
    empty = str(tmp_path / "usr")
    assert "PATH" in only(engines.check_launcher(empty, find=programs.find))[1].says
    assert only(engines.check_launcher(empty, find=Programs().find))[0] == "failure"


@pytest.mark.parametrize(
    ("code", "out", "err", "launcher", "verdict", "said"),
    [
        (0, f"{__version__} /opt/bin/python", "", __version__, "ok", "with /opt/bin/python, has all"),
        (
            1,
            "",
            "gpusnap: a part is missing: No module named 'yaml'",
            "",
            "failure",
            "No module named 'yaml'",
        ),
        (1, "", "gpusnap: checkpoint has no option --gpusnap-check", "", "failure", "from another version"),
        (0, "0.0.9 /opt/bin/python", "", __version__, "warning", "is gpusnap 0.0.9"),
        (0, f"{__version__} /opt/bin/python", "", "0.0.8", "warning", "is gpusnap 0.0.8"),
        (127, "", "", "", "failure", "nothing"),
    ],
)
def test_parts(tmp_path: Path, code: int, out: str, err: str, launcher: str, verdict: str, said: str) -> None:
    """What gpusnap-runtime tells of itself as an engine starts it."""
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / OURS[1:]).touch()
    root = tree(tmp_path, {"/etc/containers/containers.conf.d/50.conf": PODMAN})

    def run(argv: list[str]) -> Finished:
        assert argv[:2] == ["env", "-i"]
        if argv[-1] == "--version":
            return Finished(0, f"crun version 1\ngpusnap-runtime version {launcher}\n", "")
        return Finished(code, f"{out}\n", f"{err}\n")

    found = only(engines.check_complete(root, find=Programs(podman="").find, run=run))
    assert found[0] == verdict
    assert said in found[1].says


def test_what_is_left_to_do_for_containerd(tmp_path: Path) -> None:
    """gpusnap install left a file to be appended: a line that Podman knows gpusnap, and one that does it."""
    files: dict[str, str | bytes] = {
        "/etc/containers/containers.conf.d/50.conf": PODMAN,
        "/etc/gpusnap/containerd.toml": CONTAINERD,
    }
    root = tree(tmp_path, files)
    fine, unfinished = engines.check_registered(root, find=Programs(podman="", containerd="").find)
    assert (fine.verdict.value, fine.says) == ("ok", "gpusnap is configured for Podman as gpusnap")
    assert unfinished.verdict.value == "warning"
    assert unfinished.todo.startswith("run cat /etc/gpusnap/containerd.toml >>/etc/containerd/config.toml")
    assert fine.facts["without"] == unfinished.facts["without"] == ["containerd"]
    assert only(engines.check_registered(root, find=Programs(containerd="").find))[0] == "warning"
    assert only(engines.check_registered(root, find=Programs(podman="").find))[0] == "ok"


def test_engines() -> None:
    """Those that are there, with their versions; none is a failure."""
    programs = Programs(podman="podman version 5.4.2\n", containerd=Finished(1, "", "broken"))
    found = [*engines.check_engines(find=programs.find, run=programs.run)]
    assert [(each.name, each.verdict.value) for each in found] == [
        ("Podman", "ok"),
        ("containerd", "warning"),
    ]
    assert found[0].facts["version"] == "5.4.2"
    assert only(engines.check_engines(find=Programs().find))[0] == "failure"


PODMAN = f"""
[engine]
runtime_supports_json = ["crun", "gpusnap-runtime"]
[engine.runtimes]
gpusnap = ["{OURS}"]
crun = ["/usr/bin/crun"]
"""
CONTAINERD = f"""
version = 2
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.gpu.options]
BinaryName = "{OURS}"
"""
CRIO = f"""
[crio.runtime.runtimes.gpusnap]
runtime_path = "{OURS}"
"""


@pytest.mark.parametrize(
    ("files", "runtimes"),
    [
        ({"/etc/containers/containers.conf.d/50.conf": PODMAN}, {"Podman": ["gpusnap"]}),
        ({"/etc/containers/containers.conf": f'[engine]\nruntime = "{OURS}"\n'}, {"Podman": ["default"]}),
        ({"/etc/containerd/config.toml": CONTAINERD}, {"containerd": ["gpu"]}),
        ({"/etc/crio/crio.conf.d/50.conf": CRIO}, {"CRI-O": ["gpusnap"]}),
    ],
)
def test_registered(tmp_path: Path, files: dict[str, str | bytes], runtimes: dict[str, list[str]]) -> None:
    """Under which names the engines know it; the others are named."""
    programs = Programs(podman="", containerd="", crio="")
    verdict, found = only(engines.check_registered(tree(tmp_path, files), find=programs.find))
    assert verdict == "ok"
    assert found.facts["runtimes"] == runtimes
    assert {*found.facts["without"], *runtimes} == {"Podman", "containerd", "CRI-O"}


def test_registered_with_one_engine_of_two(tmp_path: Path) -> None:
    """That containerd is not told of gpusnap is fine: the line says so, and how it would be told."""
    root = tree(tmp_path, {"/etc/containers/containers.conf.d/50.conf": PODMAN})
    verdict, found = only(
        engines.check_registered(root, find=Programs(podman="", containerd="", crio="").find)
    )
    assert (verdict, found.todo) == ("ok", "")
    assert found.says == (
        "gpusnap is configured for Podman as gpusnap; not for containerd and CRI-O (to add it: gpusnap "
        "install --containerd --crio)"
    )


def test_what_containerd_imports(tmp_path: Path) -> None:
    """What its file imports, and that in turn; a folder that it does not name is not read."""
    files: dict[str, str | bytes] = {
        "/etc/containerd/config.toml": 'version = 2\nimports = ["/etc/containerd/conf.d/*.toml", 7]\n',
        "/etc/containerd/conf.d/a.toml": 'imports = ["../more/*", "/etc/containerd/conf.d/*.toml"]\n',
        "/etc/containerd/more/gpu.toml": CONTAINERD,
    }
    programs = Programs(containerd="")
    root = tree(tmp_path, files)
    found = only(engines.check_registered(root, find=programs.find))[1]
    assert found.facts["runtimes"] == {"containerd": ["gpu"]}
    other = tree(tmp_path / "other", {"/etc/containerd/conf.d/gpu.toml": CONTAINERD})
    assert only(engines.check_registered(other, find=programs.find))[0] == "warning"


def test_registered_in_anothers_place(tmp_path: Path) -> None:
    """A link of another name to gpusnap-runtime is gpusnap."""
    root = tree(
        tmp_path, {"/etc/containers/containers.conf": '[engine.runtimes]\ncrun = ["/opt/crun"]\n', OURS: ""}
    )
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt/crun").symlink_to(tmp_path / OURS[1:])
    assert only(engines.check_registered(root, find=Programs(podman="").find))[1].facts["runtimes"] == {
        "Podman": ["crun"]
    }


def test_not_registered(tmp_path: Path) -> None:
    """A warning with both ways; nothing to say without an engine."""
    found = only(engines.check_registered(str(tmp_path), find=Programs(podman="").find))
    assert found[0] == "warning"
    assert "gpusnap install" in found[1].todo
    assert [*engines.check_registered(str(tmp_path), find=Programs().find)] == []


def test_broken_configuration(tmp_path: Path) -> None:
    """The file is named."""
    root = tree(tmp_path, {"/etc/containers/containers.conf": "engine = ["})
    with pytest.raises(ValueError, match=r"/etc/containers/containers\.conf is not TOML"):
        list(engines.check_registered(root, find=Programs(podman="").find))
