"""What wheels and the Debian package hold; tests/packages installs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
DEBIAN = ROOT / "packaging/debian"
# The Debian package that has a module of ours to import, by the name of the dependency in pyproject.toml.
# nvidia-ml-py is in contrib there, and not needed: see gpusnap.runtime_shim.gpu.nvidia.nvml.
OF_DEBIAN = {
    "jsonschema": "python3-jsonschema",
    "click": "python3-click",
    "rich": "python3-rich",
    "zstandard": "python3-zstandard",
    "urllib3": "python3-urllib3",
    "PyYAML": "python3-yaml",
    "nvidia-ml-py": "",
}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_listed(project: dict[str, Any]) -> None:
    """A package that gpusnap/ has no link to is missing from wheels and from the Debian package."""
    assert project["tool"]["setuptools"]["packages"]["find"]["include"] == ["gpusnap*"]
    tops = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tools"}
    links = {path.name: os.readlink(path) for path in (ROOT / "gpusnap").iterdir() if path.is_symlink()}
    assert links == {top: f"../{top}" for top in tops - {"gpusnap"}}
    inside = {path.parent for top in tops for path in (ROOT / top).rglob("*.py")}
    assert [path for path in inside if not (path / "__init__.py").exists()] == []


def test_every_dependency_is_debians_too(project: dict[str, Any]) -> None:
    """With the same versions, or higher ones."""
    control = (DEBIAN / "control").read_text()
    for requirement in project["project"]["dependencies"]:
        name, _, version = requirement.partition(">=")
        if OF_DEBIAN[name]:
            assert f"{OF_DEBIAN[name]} (>= {version})" in control


@pytest.mark.parametrize("name", ["postinst", "prerm", "postrm"])
def test_maintainer_scripts(name: str) -> None:
    """They stop at the first error, and are sh."""
    text = (DEBIAN / name).read_text()
    assert text.startswith("#!/bin/sh\nset -e\n")
    subprocess.run(["sh", "-n", DEBIAN / name], check=True)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Debian package, unpacked, with its control files in DEBIAN."""
    missing = [tool for tool in ("dpkg-deb", "make", "cc") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("deb")
    script = str(ROOT / "packaging/make_deb.py")
    done = subprocess.run([sys.executable, script, folder], check=True, stdout=subprocess.PIPE, text=True)
    target = folder / "tree"
    subprocess.run(["dpkg-deb", "--raw-extract", done.stdout.strip(), target], check=True)
    return target


def test_the_debian_package(tree: Path) -> None:
    control = (tree / "DEBIAN/control").read_text()
    assert "@" not in control.replace("authors@", "")
    # crun loads it as it runs; nothing of Debian's says so.
    assert "libcriu2" in control
    for command in ("gpusnap", "gpusnap-hook", "gpusnap-runtime"):
        assert (tree / "usr/bin" / command).stat().st_mode & 0o777 == 0o755
    launcher = (tree / "usr/bin/gpusnap-runtime").read_bytes()
    assert launcher.startswith(b"\x7fELF")
    assert b"/usr/libexec/gpusnap/gpusnap-runtime\0" in launcher
    for module in (
        "gpusnap/cli/main.py",
        "gpusnap/runtime_shim/gpu/nvidia/nvml.py",
        "gpusnap/runtime_shim/records/manifest.schema.json",
    ):
        assert (tree / "usr/lib/gpusnap" / module).is_file()
    assert os.listdir(tree / "usr/lib/gpusnap") == ["gpusnap"]
    assert not [path for path in tree.rglob("*") if path.is_symlink()]
    assert not list(tree.rglob("__pycache__"))
    # What an engine reads is not a package's to write.
    assert not (tree / "etc").exists()


def test_its_commands_find_their_modules(tree: Path) -> None:
    """By the path alone that is written into them."""
    text = (tree / "usr/libexec/gpusnap/gpusnap-runtime").read_text()
    assert text.startswith("#!/usr/bin/python3 -I\n")
    assert 'sys.path.insert(0, "/usr/lib/gpusnap")' in text
    code = text.replace("/usr/lib/gpusnap", str(tree / "usr/lib/gpusnap"))
    done = subprocess.run(
        [sys.executable, "-I", "-B", "-c", code, "features-of-no-runtime"], capture_output=True, check=False
    )
    assert b"Traceback" not in done.stderr
