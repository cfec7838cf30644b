"""What pyproject.toml cannot say: what is in C is built, and comes with the wheel as files of their own.

The launcher (gpusnap/runtime_shim/launcher) is static, without a C library, and the inner loops of one
encoding (gpusnap/oci/chunks/native) need none, so a wheel with them runs on every Linux of its architecture,
and says so by its tags. Without a C compiler, or on another architecture, the wheel is one of Python alone:
all works, each command of a container engine takes 30 ms more, and chunks in planes are slow.
"""

from __future__ import annotations

import glob
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

LAUNCHER = Path("gpusnap/runtime_shim/launcher")
LOOPS = Path("gpusnap/oci/chunks/native")
# As gpusnap/engines/install/launcher.py has it, which makes this a link to the environment's console script.
ENTRY = "/usr/local/libexec/gpusnap/gpusnap-runtime"
# PEP 600 and PEP 656: what needs no C library runs with the oldest of both.
TAGS = {
    machine: f"manylinux_2_17_{machine}.manylinux2014_{machine}.musllinux_1_1_{machine}"
    for machine in ("x86_64", "aarch64")
}


def build_launcher(folder: Path) -> bool:
    """Build it into `folder`; whether there is what it takes, and it works."""
    tools = shutil.which("make") and (shutil.which("cc") or shutil.which("gcc"))
    if not tools or sys.platform != "linux" or platform.machine() not in TAGS:
        return False
    words = ["make", "-s", "-C", str(LAUNCHER), f"BUILD={folder}", f"PYTHON_ENTRY={ENTRY}"]
    built = subprocess.run(words, check=False).returncode == 0
    for path in folder.glob("flags*"):
        path.unlink()
    return built


class BuildWithLauncher(build_py):
    """The Python files, and the launcher among them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib).resolve() / LAUNCHER
            self.distribution.has_launcher = build_launcher(folder)
            if self.distribution.has_launcher:
                loops = Path(self.build_lib).resolve() / LOOPS
                subprocess.run(["make", "-s", "-C", str(LOOPS), f"BUILD={loops}"], check=True)
            if not self.distribution.has_launcher:
                print("gpusnap: the launcher in C is not built, and left out", file=sys.stderr)


class TaggedWheel(bdist_wheel):
    """Of any Python 3: for this architecture's Linux with the launcher, for any machine without."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # What is in it goes where pure Python goes; the launcher is no more than data to Python.
        self.root_is_pure = True

    def get_tag(self) -> tuple[str, str, str]:
        built = getattr(self.distribution, "has_launcher", False)
        return ("py3", "none", TAGS[platform.machine()] if built else "any")


setup(
    cmdclass={"build_py": BuildWithLauncher, "bdist_wheel": TaggedWheel},
    # pipx links man pages from there, and pip puts them where `man` of the environment looks.
    data_files=[("share/man/man1", sorted(glob.glob("docs/man/*.1")))],
)
