"""containerd's CRI with gpusnap-runtime as a handler, and a registry with the images that pods need."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cri import Cri
from registryhost import Registry, running
from support import RUNTIME, good, podman, run

__all__ = ["HANDLER", "configure", "images", "pull_base"]

HANDLER = "gpusnap"
# As docs/kubernetes.md has it, but for the first two: a sandbox is a container of an image that waits; and a
# machine in a machine may not lower a process' oom_score_adj below its own.
_CONFIG = """\
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{registry}/pause:1"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{handler}]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{handler}.options]
BinaryName = "{runtime}"
"""
# Where version 1 of the cgroups has the cpu controller, version 2 has none, and sandboxes get a CPU weight.
_WITHOUT_CPU = """\
#!{python} -I
import json, os, sys
if "create" in sys.argv:
    path = os.path.join(sys.argv[sys.argv.index("--bundle") + 1], "config.json")
    with open(path) as file:
        spec = json.load(file)
    spec["linux"]["resources"].pop("cpu", None)
    with open(path, "w") as file:
        json.dump(spec, file)
os.execv("{runtime}", ["{runtime}", *sys.argv[1:]])
"""


@contextmanager
def images() -> Iterator[Registry]:
    """A registry with the base image, and one to make sandboxes of."""
    with running() as found:
        command = 'CMD ["/bin/sleep", "1000000"]'
        good(podman("create", "--name", "pause", "localhost/base", runtime="crun"))
        good(podman("commit", "--quiet", "--change", command, "pause", "localhost/pause:1"))
        good(podman("rm", "pause"))
        for name in ("base", "pause"):
            source = f"containers-storage:localhost/{name}:{'1' if name == 'pause' else 'latest'}"
            to = f"docker://{found.host}/{name}:1"
            good(run("skopeo", "copy", "--quiet", "--dest-tls-verify=false", source, to))
        yield found
        podman("rmi", "--force", "localhost/pause:1")


def configure(folder: Path, registry: Registry) -> str:
    """The configuration of a containerd in that folder: CRI with the handler."""
    Path("/etc/resolv.conf").touch()  # a pod has the host's
    return _CONFIG.format(registry=registry.host, handler=HANDLER, runtime=_runtime(folder))


def _runtime(folder: Path) -> str:
    """The launcher, behind what this machine's cgroups make necessary."""
    if "cpu" in Path("/sys/fs/cgroup/cgroup.controllers").read_text().split():
        return RUNTIME
    path = folder / "runtime"
    path.write_text(_WITHOUT_CPU.format(python=sys.executable, runtime=RUNTIME))
    path.chmod(0o755)
    return str(path)


def pull_base(cri: Cri, registry: Registry) -> str:
    """The image that containers are made of; it is pulled, as kubelet would have it."""
    image = f"{registry.host}/base:1"
    cri("PullImage", image={"image": image})
    return image
