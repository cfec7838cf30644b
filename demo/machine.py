"""Whether the demo can use this machine's own GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from report import DemoError, say
from testhost import packages

PROBE_DEADLINE_S = 60.0
FIRST_CRIU = 4  # the first release that runs on kernels since 6.13, and knows what the driver leaves behind
# What gpusnap imports: module names of the dependencies in pyproject.toml.
MODULES = ("click", "jsonschema", "pynvml", "rich", "zstandard")
_SYSTEM = ("/usr/local/sbin", "/usr/sbin", "/sbin")

# In a process of its own: this one shall not keep the driver open, nor hang with it.
_PROBE = """
import ctypes, json
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    print(json.dumps({"missing": str(error)}))
else:
    count = ctypes.c_int()
    result = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    api = hasattr(cuda, "cuCheckpointProcessLock")
    print(json.dumps({"result": result, "count": count.value, "api": api}))
"""


def search_path() -> str:
    """PATH, and where system programs are, which `su` and `sudo` may leave out."""
    path = os.environ.get("PATH", os.defpath)
    return ":".join([path, *(place for place in _SYSTEM if place not in path.split(":"))])


def obstacle() -> str:
    """Why this machine's GPU cannot be used, in a few words; empty if it can."""
    return _no_node() or _no_program() or _no_criu() or _no_driver()


def _no_node() -> str:
    if any(re.fullmatch(r"nvidia\d+", name) for name in os.listdir("/dev")):
        return ""
    return "No NVIDIA GPU here (there is no /dev/nvidia0)"


def _no_program() -> str:
    if not shutil.which("podman"):
        return "There is a GPU, but Podman is not installed"
    if not shutil.which("crun") and not shutil.which("runc"):
        return "There is a GPU, but neither crun nor runc is installed"
    return ""


def _no_criu() -> str:
    if not shutil.which("criu"):
        return "There is a GPU, but CRIU is not installed"
    done = subprocess.run(["criu", "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"Version: (\d+)[.\d]*", done.stdout)
    if not version or int(version[1]) < FIRST_CRIU:
        found = (
            f"{version[0].split()[1]}, which is older than {FIRST_CRIU}.0"
            if version
            else "one that does not run"
        )
        return f"There is a GPU, but CRIU is {found}"
    return ""


def _no_driver() -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            check=False,
            timeout=PROBE_DEADLINE_S,
        )
        found = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return "There is a GPU, but its driver does not answer"
    if "missing" in found:
        return f"There is a GPU, but its driver's library does not load ({found['missing']})"
    if found["result"] or not found["count"]:
        return f"There is a GPU, but CUDA cannot use it (cuInit: {found['result']}, GPUs: {found['count']})"
    if not found["api"]:
        return "There is a GPU, but its driver cannot checkpoint: it is older than 570"
    return ""


def interpreter(checkout: Path) -> str:
    """A Python that has what gpusnap imports: this one, or that of a virtual environment, made if need be."""
    own = checkout / "build" / "demo-venv"
    for python in (sys.executable, str(own / "bin/python")):
        if os.path.exists(python) and _imports(python):
            return python
    packages.ensure({"python3-venv": packages.NEEDED["python3-venv"]})
    needed = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["dependencies"]
    say(f"Setting up: a virtual environment in {own} with {', '.join(MODULES)} …")
    pip = [str(own / "bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", *needed]
    for argv in ([sys.executable, "-m", "venv", "--clear", str(own)], pip):
        if subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode:
            raise DemoError(
                f"gpusnap needs the Python packages {', '.join(MODULES)}, and `{' '.join(argv[:4])}` failed; "
                "install them for this python3, or run `python3 demo/demo.py --software`"
            )
    return str(own / "bin/python")


def _imports(python: str) -> bool:
    argv = [python, "-c", f"import {', '.join(MODULES)}"]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0
