"""Podman's API service (podman-system-service(1)) checkpoints and restores containers for its clients."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import waiting
from holding import held
from storehost import COMMAND, PLAIN, empty_store
from support import DEADLINE, Container, Done, criu_errors, good, ids_of, podman, run, until

SOCKET = Path("/run/podman/gpusnap-test.sock")
URL = f"unix://{SOCKET}"
# Without /v5.0.0, a path is one of Docker's API.
CONTAINERS = "/v5.0.0/libpod/containers/"
ARCHIVE = {"Content-Type": "application/x-tar"}


class Client(http.client.HTTPConnection):
    """A connection to the service."""

    def __init__(self) -> None:
        super().__init__("podman", timeout=DEADLINE)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(SOCKET))

    def order(self, path: str, body: bytes | None = None) -> None:
        """Send a request, and wait for nothing."""
        self.request("POST", CONTAINERS + path, body=body, headers=ARCHIVE if body is not None else {})


class Service:
    """A running service, and what it has printed."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log

    def says(self) -> str:
        """What its journal would have: its own lines, and those of the runtimes that it starts."""
        return self._log.read_text(errors="replace")


@pytest.fixture
def service(crun: None, tmp_path: Path) -> Iterator[Service]:
    """Podman's, as systemd starts it: in a session of its own, with gpusnap-runtime as its default."""
    SOCKET.parent.mkdir(exist_ok=True)
    SOCKET.unlink(missing_ok=True)
    log = tmp_path / "service.log"
    line = [
        "podman",
        "--log-level=info",
        "--runtime",
        "gpusnap-runtime",
        "system",
        "service",
        "--time",
        "0",
        URL,
    ]
    with (
        log.open("wb") as out,
        waiting.Process(line, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True) as it,
    ):
        try:
            until(_answers, "Podman's service")
            yield Service(it, log)
        finally:
            it.kill()
    SOCKET.unlink(missing_ok=True)
    for left in Path("/var/tmp").glob("checkpoint[0-9]*"):  # of a service that was killed
        left.unlink()


def _answers() -> bool:
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(SOCKET))
        return True
    return False


def ask(path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """The status and the body of the service's answer."""
    client = Client()
    try:
        client.order(path, body)
        answer = client.getresponse()
        return answer.status, answer.read()
    finally:
        client.close()


def get(path: str, body: bytes | None = None) -> bytes:
    """The body of an answer that is no error."""
    status, found = ask(path, body)
    assert status == 200, f"{status}: {found[:2000]!r}\n{criu_errors()}"
    return found


def remote(*words: str | Path) -> Done:
    return run("podman", "--url", URL, *words)


def state(container: Container) -> str:
    return str(container.inspect()["State"]["Status"])


def test_in_place_and_by_an_archive(service: Service, tmp_path: Path) -> None:
    """As programs ask for it, and as `podman --remote` does: either restores the archive of the other."""
    container = Container.start("w")
    get("w/checkpoint?keep=true&printStats=true")
    assert state(container) == "exited"
    get("w/restore")
    container.goes_on()
    archive = tmp_path / "w.tar"
    good(remote("container", "checkpoint", "--leave-running", "--export", archive, "w"))
    container.goes_on()
    good(podman("rm", "--force", "--time", "0", "w"))
    get("w/restore?import=true", archive.read_bytes())
    container.goes_on()
    archive.write_bytes(get("w/checkpoint?export=true"))
    container.remove()
    good(remote("container", "restore", "--import", archive, "--name", "v"))
    Container("v").goes_on()


def test_several_clients_at_once(service: Service) -> None:
    """Of two that checkpoint one container, one succeeds; a third one has another container."""
    one, two = Container.start("w"), Container.start("v")
    for verb in ("checkpoint", "restore"):
        with ThreadPoolExecutor() as pool:
            found = [status for status, _ in pool.map(ask, [f"{name}/{verb}" for name in ("w", "w", "v")])]
        assert sorted(found[:2]) == [200, 500]
        assert found[2] == 200
    one.goes_on()
    two.goes_on()


@pytest.mark.parametrize(
    ("who", "stays"), [("client", "exited"), ("service", "running")], ids=["the client", "the service"]
)
def test_somebody_ends_during_an_export(service: Service, tmp_path: Path, who: str, stays: str) -> None:
    """The service goes on without its client. Without it, nobody exports, so the container runs on."""
    container = Container.start("w")
    client = Client()
    with held(tmp_path, "crun", "checkpoint", "") as crun:
        client.order("w/checkpoint?export=true")
        until(crun.met, "crun")
        caller = crun.caller
        if who == "service":
            service.process.kill()
        client.close()
    until(lambda: not Path(f"/proc/{caller}").exists(), "the end of gpusnap-runtime")
    until(lambda: state(container) == stays, f"Podman has it as {stays}")
    assert "nothing to recover" in run(COMMAND, "recover").err
    if who == "client":
        good(podman("container", "restore", "w"))
    container.goes_on()


def test_the_service_is_killed_during_a_restore(service: Service, tmp_path: Path) -> None:
    """conmon and gpusnap-runtime go on; `gpusnap recover` ends what Podman does not know of."""
    container = Container.start("w")
    get("w/checkpoint")
    client = Client()
    with held(tmp_path, "crun", "restore", "") as crun:
        client.order("w/restore")
        until(crun.met, "crun")
        caller = crun.caller
        service.process.kill()
        client.close()
    until(lambda: not Path(f"/proc/{caller}").exists(), "the end of gpusnap-runtime")
    assert "Podman lists it as exited; to end it" in good(run(COMMAND, "recover", "--list"))
    good(run(COMMAND, "recover", container.id))
    good(podman("container", "restore", "w"))
    container.goes_on()


def test_a_container_with_rm(service: Service, tmp_path: Path) -> None:
    """The service would lose it with a client that has gone away: it is refused, and runs on."""
    container, archive = Container.start("w", options=["--rm"]), tmp_path / "w.tar"
    assert remote("container", "checkpoint", "--export", archive, "w").code != 0
    status, told = ask("w/checkpoint?export=true")
    assert status == 500
    assert "exit status 1" in json.loads(told)["message"]
    assert service.says().count("Podman's API service keeps no copy") == 2
    container.unharmed()
    good(remote("container", "checkpoint", "--leave-running", "--export", archive, "w"))
    container.goes_on()
    good(remote("rm", "--force", "--time", "0", "w"))
    good(remote("container", "restore", "--import", archive))
    container.goes_on()


def test_gpusnap_beside_the_service(service: Service) -> None:
    """It uses a Podman of its own, also where the environment names the service: its orders count."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/root", "CONTAINER_HOST": URL}
    with empty_store(PLAIN):
        container = Container.start("w", options=["--rm"])
        good(run(COMMAND, "suspend", "w"))
        status, _ = ask("w/unpause")
        assert status == 500
        assert "gpusnap resume w" in service.says()
        # Only an order makes the runtime leave it suspended when Podman pauses and unpauses it.
        good(run(COMMAND, "checkpoint", "--leave-running", "w", env=environment))
        good(run(COMMAND, "resume", "w", env=environment))
        container.goes_on()
        good(run(COMMAND, "checkpoint", "w", env=environment))
        until(lambda: not ids_of("w"), "its removal")
        good(run(COMMAND, "restore", "w", env=environment))
        container.goes_on()
    assert "GPS-514" not in service.says()  # it has checkpointed nothing
