"""A client of the container runtime interface (CRI), as kubelet is one; see cri.proto.

Messages are compiled by protoc when the tests run, for the protobuf that is installed.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict, Unpack

from support import GPUWORK, until

__all__ = ["RUNNING", "Cri", "CriError", "Pod", "PodContainer", "connected"]

_PROTOCOL = Path(__file__).with_name("cri.proto")
_SERVICES = ("RuntimeService", "ImageService")
_DEADLINE = 120.0
"""Seconds for a call."""
# kubelet's defaults for a pod with hostNetwork, which needs no CNI plugin; see NamespaceMode in cri.proto.
_NAMESPACES = {"network": 2, "pid": 1, "ipc": 0}
_TICK = re.compile(r"pid=(\d+) tick=(\d+) (ok|BAD)")
RUNNING = 1
"""The state of a container (ContainerState of cri.proto)."""


class CriError(Exception):
    """A call that the server refused, in its words."""


class Cri:
    """Calls by name: `cri("StartContainer", container_id="…")` gives the response."""

    def __init__(self, address: Path, messages: Any) -> None:
        self._grpc = importlib.import_module("grpc")
        self._channel = self._grpc.insecure_channel(
            f"unix://{address}", options=[("grpc.max_reconnect_backoff_ms", 500)]
        )
        self._calls = {}
        for service in _SERVICES:
            described = messages.DESCRIPTOR.services_by_name[service]
            for method in described.methods:
                request, response = (
                    getattr(messages, each.name) for each in (method.input_type, method.output_type)
                )
                call = self._channel.unary_unary(
                    f"/{described.full_name}/{method.name}",
                    request_serializer=request.SerializeToString,
                    response_deserializer=response.FromString,
                )
                self._calls[method.name] = request, call

    def __call__(
        self, method: str, /, *, deadline: float = _DEADLINE, wait: bool = True, **fields: Any
    ) -> Any:
        """Make a call; with `wait` a server that does not listen yet is waited for. Raises CriError."""
        request, call = self._calls[method]
        try:
            return call(request(**fields), timeout=deadline, wait_for_ready=wait)
        except self._grpc.RpcError as error:
            raise CriError(f"{method}: {error.details()}") from error

    def close(self) -> None:
        self._channel.close()


@contextmanager
def connected(address: Path) -> Iterator[Cri]:
    """A client of the server at this socket, until the context ends."""
    with tempfile.TemporaryDirectory(prefix="cri-") as folder, ExitStack() as stack:
        words = ["protoc", f"--python_out={folder}", f"--proto_path={_PROTOCOL.parent}", _PROTOCOL.name]
        subprocess.run(words, check=True)
        sys.path.insert(0, folder)
        stack.callback(sys.path.remove, folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of protobuf's own code
            messages = importlib.import_module(f"{_PROTOCOL.stem}_pb2")
        cri = Cri(address, messages)
        stack.callback(cri.close)
        yield cri


class _Options(TypedDict, total=False):
    """Options of a container: see `Pod.request`."""

    gpus: str
    attempt: int
    volumes: Mapping[str, Path]


@dataclass(frozen=True)
class Pod:
    """A pod sandbox, and the folder of its containers' logs."""

    cri: Cri
    id: str
    config: dict[str, Any]
    logs: Path

    @classmethod
    def run(cls, cri: Cri, name: str, logs: Path, *, handler: str) -> Pod:
        """Run a pod sandbox with the runtime of that handler, in the network of the host."""
        logs.mkdir(exist_ok=True)
        config = {
            "metadata": {"name": name, "uid": f"uid-of-{name}", "namespace": "default"},
            "log_directory": str(logs),
            "linux": {"security_context": {"namespace_options": _NAMESPACES}},
        }
        made = cri("RunPodSandbox", config=config, runtime_handler=handler)
        return cls(cri, made.pod_sandbox_id, config, logs)

    def create(
        self,
        name: str,
        image: str,
        *command: str,
        **options: Unpack[_Options],
    ) -> PodContainer:
        """Create a container of an image, of a checkpoint in an image, or of one in an archive."""
        fields = self.request(name, image, *command, **options)
        return self.made(fields, self.cri("CreateContainer", **fields).container_id)

    def request(
        self,
        name: str,
        image: str,
        *command: str,
        gpus: str = "all",
        attempt: int = 0,
        volumes: Mapping[str, Path] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Return the fields of the CreateContainer that `create` calls.

        `volumes` are folders of this host by the path where it has them.
        """
        mounts: list[dict[str, Any]] = [
            {"container_path": "/gpuwork", "host_path": GPUWORK, "readonly": True},
            *({"container_path": path, "host_path": str(folder)} for path, folder in volumes.items()),
        ]
        config = {
            "metadata": {"name": name, "attempt": attempt},
            "image": {"image": image},
            "command": command,
            "mounts": mounts,
            "log_path": f"{name}-{attempt}.log",
            "linux": {"security_context": {"namespace_options": _NAMESPACES}},
            "CDI_devices": [{"name": f"nvidia.com/gpu={gpus}"}] if gpus else [],
        }
        return {"pod_sandbox_id": self.id, "config": config, "sandbox_config": self.config}

    def made(self, fields: dict[str, Any], identity: str) -> PodContainer:
        """The container that a CreateContainer with these fields has made."""
        return PodContainer(self, identity, self.logs / fields["config"]["log_path"])

    def remove(self) -> None:
        """Remove it with all its containers."""
        self.cri("StopPodSandbox", pod_sandbox_id=self.id)
        self.cri("RemovePodSandbox", pod_sandbox_id=self.id)


@dataclass(frozen=True)
class PodContainer:
    """A container of a pod."""

    pod: Pod
    id: str
    log_file: Path

    def start(self) -> None:
        self.pod.cri("StartContainer", container_id=self.id)

    def checkpoint(self, location: Path) -> None:
        """Write an archive there; the container runs on."""
        self.pod.cri("CheckpointContainer", container_id=self.id, location=str(location))

    def status(self) -> Any:
        """ContainerStatus of cri.proto."""
        return self.pod.cri("ContainerStatus", container_id=self.id).status

    def remove(self) -> None:
        self.pod.cri("StopContainer", container_id=self.id)
        self.pod.cri("RemoveContainer", container_id=self.id)

    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    def ticks(self) -> list[int]:
        """The ticks of gpuwork's one process; fails on one that found a wrong byte or left one out."""
        numbers: list[int] = []
        for match in _TICK.finditer(log := self.log()):
            assert match[3] == "ok", f"wrong bytes: {match[0]}"
            # containerd copies the log after the container ran on: a restored one's goes back once.
            numbers = [each for each in numbers if each < int(match[2])] + [int(match[2])]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True, log
        return numbers

    def goes_on(self, *, more: int = 3) -> None:
        """Wait until it has ticked on, with no tick left out and every byte right."""
        until(self.ticks, f"ticks of {self.id}: {self.log()[-2000:]}")
        last = self.ticks()[-1]
        until(lambda: self.ticks()[-1] >= last + more, f"{more} more ticks: {self.log()[-2000:]}")
