"""Turn the test host into one with NVIDIA's driver installed, softgpu standing in for the driver.

For use inside the test host only, by tests and the demo. Afterwards the driver's libraries, device nodes and
CDI specification are where NVIDIA's installer and nvidia-ctk put them, so that

    podman run --device nvidia.com/gpu=0 …

works as on a real host. Install again to change the driver's version or the GPUs.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIBRARIES = ("libcuda", "libnvidia-ml")
LIBRARY_DIR = "/usr/lib/x86_64-linux-gnu"
STATE_DIR = "/run/softgpu"
CDI_SPEC = "/etc/cdi/nvidia.yaml"
FIRMWARE = "gsp_ga10x.bin"
HOOK = "/usr/bin/nvidia-cdi-hook"
SMI = "/usr/bin/nvidia-smi"
CTL_MINOR = 255  # Documentation/admin-guide/devices.txt of the kernel, major 195
UVM_MAJOR = 511  # given out dynamically by a real kernel; this one is usual
DRIVER_MOUNT = ["ro", "nosuid", "nodev", "rbind", "rprivate"]
# Any file in /proc: the one that the real hook covers exists only with the real kernel module.
PARAMS_FILE = "/proc/misc"


@dataclass(frozen=True, slots=True)
class Gpu:
    uuid: str
    minor: int


@dataclass(frozen=True, slots=True)
class Driver:
    """What gpus.conf says, as far as it matters here; softgpu/README.md has its grammar."""

    version: str
    major: int
    gpus: tuple[Gpu, ...]

    @classmethod
    def parse(cls, gpus_conf: str) -> Driver:
        words = [line.split() for line in gpus_conf.splitlines() if line.strip()]
        single = {word[0]: word[1] for word in words if word[0] in ("driver", "major") and len(word) > 1}
        gpus = []
        for _, *fields in (word for word in words if word[0] == "gpu"):
            of = dict(field.split("=", 1) for field in fields if "=" in field)
            gpus.append(Gpu(of["uuid"], int(of["minor"])))
        if "driver" not in single:
            raise ValueError("gpus.conf names no driver version: add a line `driver 580.159.04`")
        return cls(single["driver"], int(single.get("major", 195)), tuple(gpus))


def install(build_dir: str | os.PathLike[str], gpus_conf: str, *, modified_params: bool = False) -> Driver:
    """Install softgpu from its build directory as the driver that the text `gpus_conf` describes.

    `build_dir` holds lib/libcuda.so.1 and lib/libnvidia-ml.so.1 (or holds them itself).
    `modified_params`: let the CDI spec run the hook that mounts over a file in /proc too.
    """
    driver = Driver.parse(gpus_conf)
    libraries = _install_libraries(Path(build_dir), driver.version)
    _install_nodes(driver)
    state = Path(STATE_DIR)
    state.mkdir(mode=0o1777, parents=True, exist_ok=True)
    state.chmod(0o1777)  # any user's process may hold a GPU
    (state / "gpus.conf").write_text(gpus_conf)
    firmware = Path(f"/lib/firmware/nvidia/{driver.version}/{FIRMWARE}")
    firmware.parent.mkdir(parents=True, exist_ok=True)
    firmware.write_bytes(b"GSP")
    _write_program(SMI, f"#!/bin/sh\necho 'softgpu, driver {driver.version}'\n")
    _write_program(HOOK, (HERE / "nvidia-cdi-hook").read_text())
    spec = cdi_spec(driver, libraries, str(firmware), modified_params=modified_params)
    Path(CDI_SPEC).parent.mkdir(parents=True, exist_ok=True)
    Path(CDI_SPEC).write_text(json.dumps(spec, indent=2))  # JSON is YAML
    return driver


def _install_libraries(build_dir: Path, version: str) -> list[str]:
    source = build_dir / "lib" if (build_dir / "lib").is_dir() else build_dir
    installed = []
    for name in LIBRARIES:
        for old in Path(LIBRARY_DIR).glob(f"{name}.so.*"):
            old.unlink()
        path = f"{LIBRARY_DIR}/{name}.so.{version}"
        shutil.copyfile(source / f"{name}.so.1", path)
        os.chmod(path, 0o755)
        os.symlink(Path(path).name, f"{LIBRARY_DIR}/{name}.so.1")
        installed.append(path)
    subprocess.run(["ldconfig"], check=True)
    return installed


def _install_nodes(driver: Driver) -> None:
    wanted = {f"/dev/nvidia{gpu.minor}": os.makedev(driver.major, gpu.minor) for gpu in driver.gpus}
    wanted["/dev/nvidiactl"] = os.makedev(driver.major, CTL_MINOR)
    wanted["/dev/nvidia-uvm"] = os.makedev(UVM_MAJOR, 0)
    for old in Path("/dev").glob("nvidia*"):
        old.unlink()
    for path, number in wanted.items():
        os.mknod(path, stat.S_IFCHR | 0o666, number)
        os.chmod(path, 0o666)


def _write_program(path: str, text: str) -> None:
    Path(path).write_text(text)
    os.chmod(path, 0o755)


def cdi_spec(
    driver: Driver, libraries: Iterable[str], firmware: str, *, modified_params: bool
) -> dict[str, Any]:
    """The specification as `nvidia-ctk cdi generate` writes it: names by index, by UUID, and "all"."""
    nodes = {gpu: [{"path": f"/dev/nvidia{gpu.minor}"}] for gpu in driver.gpus}
    devices = [
        {"name": name, "containerEdits": {"deviceNodes": nodes[gpu]}}
        for index, gpu in enumerate(driver.gpus)
        for name in (str(index), gpu.uuid)
    ]
    every = [node for of_gpu in nodes.values() for node in of_gpu]
    devices.append({"name": "all", "containerEdits": {"deviceNodes": every}})
    # Last, the one mount that a real driver does without: softgpu keeps its device memory there.
    mounts = [_mount(path, DRIVER_MOUNT) for path in (*libraries, firmware, SMI)]
    mounts.append(_mount(STATE_DIR, ["nosuid", "nodev", "rbind", "rprivate"]))
    return {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": devices,
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void", f"NVIDIA_CTK_LIBCUDA_DIR={LIBRARY_DIR}"],
            "deviceNodes": [{"path": "/dev/nvidiactl"}, {"path": "/dev/nvidia-uvm"}],
            "mounts": mounts,
            "hooks": _hooks(driver, modified_params=modified_params),
        },
    }


def _mount(path: str, options: list[str]) -> dict[str, Any]:
    return {"hostPath": path, "containerPath": path, "options": options}


def _hooks(driver: Driver, *, modified_params: bool) -> list[dict[str, Any]]:
    links = [f"{name}.so.{driver.version}::{LIBRARY_DIR}/{name}.so.1" for name in LIBRARIES]
    links.append(f"libcuda.so.1::{LIBRARY_DIR}/libcuda.so")
    lines = [
        ["create-symlinks", *(word for link in links for word in ("--link", link))],
        ["update-ldcache", "--folder", LIBRARY_DIR],
    ]
    if modified_params:
        lines.append(["disable-device-node-modification", "--params-file", PARAMS_FILE])
    return [
        {"hookName": "createContainer", "path": HOOK, "args": ["nvidia-cdi-hook", *line]} for line in lines
    ]
