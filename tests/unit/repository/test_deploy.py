"""deploy/kubernetes and examples/ci: files by the public schemas; checkpoint.py against a kubelet of ours."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpusnap.engines.install import containerd as install_containerd
from gpusnap.engines.install import crio as install_crio

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy" / "kubernetes"
MANIFESTS = sorted(DEPLOY.glob("*.yaml"))
CI = ROOT / "examples" / "ci"
ARCHIVE = "checkpoint-server_default-server-2026-01-01T00:00:00Z.tar"


def tool(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A checker of tests/requirements.txt, to its end."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    argv = [sys.executable, "-m", module, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_kubernetes_takes_them(version: str) -> None:
    """Each manifest by Kubernetes' own schemas, unknown fields refused: an old version's and a new one's."""
    done = tool("kubernetes_validate", "--strict", "-k", version, *map(str, MANIFESTS))
    assert done.returncode == 0, done.stdout + done.stderr
    resources = sum(len(documents(path.name)) for path in MANIFESTS)
    assert done.stdout.count(" passed ") == resources >= 9, done.stdout + done.stderr


def test_a_wrong_field_is_seen(tmp_path: Path) -> None:
    """The check above is one that can fail."""
    path = tmp_path / "pod.yaml"
    path.write_text((DEPLOY / "example-pod.yaml").read_text().replace("runtimeClassName", "runtimeClass"))
    assert tool("kubernetes_validate", "--strict", str(path)).returncode != 0


@pytest.mark.parametrize(
    "words",
    [
        ["--builtin-schema", "vendor.github-workflows", str(CI / "github-actions.yml")],
        ["--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci", str(CI / "gitlab-ci.yml")],
    ],
    ids=["github", "gitlab"],
)
def test_the_pipelines(words: list[str]) -> None:
    """Each file by its service's schema."""
    done = tool("check_jsonschema", *words)
    assert done.returncode == 0, done.stdout + done.stderr


def test_they_agree() -> None:
    """The handler is the installed one, and the nodes that get pods are those that get gpusnap."""
    (runtime_class,) = documents("runtimeclass.yaml")
    assert runtime_class["handler"] == install_containerd.HANDLER == install_crio.HANDLER
    (pod,) = documents("example-pod.yaml")
    assert pod["spec"]["runtimeClassName"] == runtime_class["metadata"]["name"]
    # node.sh ends with gpusnap doctor, which has to be in the PID namespace that the node's /proc is of.
    assert documents("install.yaml")[-1]["spec"]["template"]["spec"]["hostPID"] is True
    for name in ("install.yaml", "uninstall.yaml"):
        template = documents(name)[-1]["spec"]["template"]
        assert template["spec"]["nodeSelector"] == runtime_class["scheduling"]["nodeSelector"]


def test_what_they_run_is_in_the_image() -> None:
    """Each script that a manifest names is one that the Containerfile copies there."""
    copied = [
        line.split()[1:-1] for line in (DEPLOY / "Containerfile").read_text().splitlines() if "share/" in line
    ]
    image = {f"/opt/gpusnap/share/{Path(path).name}": ROOT / path for paths in copied for path in paths}
    found = []
    for path in MANIFESTS:
        for document in documents(path.name):
            template = document.get("spec", {}).get("template", {}).get("spec", {})
            for container in [*template.get("initContainers", []), *template.get("containers", [])]:
                found += [word for word in container["command"] if word.startswith("/opt/gpusnap/")]
    assert len(found) == 3
    assert all(image[word].is_file() for word in found)


def test_only_root_pods_in_the_own_namespace() -> None:
    """Privileged is the one container that writes to the node, and none of the example's."""
    privileged = []
    for path in MANIFESTS:
        for document in documents(path.name):
            spec = document.get("spec", {})
            spec = spec.get("template", {}).get("spec", spec)
            for container in [*spec.get("initContainers", []), *spec.get("containers", [])]:
                if container.get("securityContext", {}).get("privileged"):
                    privileged.append((path.name, container["name"], document["metadata"]["namespace"]))
    assert privileged == [
        ("install.yaml", "install", "gpusnap"),
        ("uninstall.yaml", "uninstall", "gpusnap"),
    ]


@dataclass
class Kubelet:
    """What it is asked, and what it answers."""

    code: int = 200
    body: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""


@contextmanager
def listening(kubelet: Kubelet) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            kubelet.asked.append((self.path, self.headers["Authorization"]))
            self.send_response(kubelet.code)
            self.end_headers()
            self.wfile.write(kubelet.body.encode())

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        kubelet.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@dataclass(frozen=True)
class Node:
    """A folder with an archive, a token, and a gpusnap that writes down how it was called."""

    folder: Path

    @property
    def archive(self) -> Path:
        return self.folder / ARCHIVE

    def run(
        self, kubelet: Kubelet, *words: str, push: int = 0, program: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """checkpoint.py with the arguments of checkpoint.yaml; `program`: what gpusnap is instead."""
        self.archive.write_text("archive")
        (self.folder / "token").write_text("secret\n")
        path = self.folder / "gpusnap"
        path.write_text(program or f'#!/bin/sh\necho "$@" > {self.folder}/pushed\nexit {push}\n')
        path.chmod(0o755)
        job = documents("checkpoint.yaml")[-1]["spec"]["template"]["spec"]["containers"][0]
        with listening(kubelet):
            return subprocess.run(
                [sys.executable, str(DEPLOY / "checkpoint.py"), *job["args"], *words],
                env={
                    "PATH": f"{self.folder}:/usr/bin:/bin",
                    "KUBELET": kubelet.url,
                    "TOKEN": f"{self.folder}/token",
                    "CA": "",
                },
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_checkpoint_by_kubelet(node: Node) -> None:
    """kubelet is asked with the token and the timeout; its archive is pushed, and then removed."""
    kubelet = Kubelet(body=json.dumps({"items": [str(node.archive)]}))
    done = node.run(kubelet)
    assert done.returncode == 0, done.stderr
    assert kubelet.asked == [("/checkpoint/default/server/server?timeout=900", "Bearer secret")]
    pushed = (node.folder / "pushed").read_text().split()
    assert pushed == [
        "push",
        str(node.archive),
        "registry.example/team/server-checkpoint:warm",
        "--format",
        "cri",
    ]
    assert not node.archive.exists()
    assert "secret" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "push", "code", "says"),
    [([], 1, 1, "was not pushed, and stays on this node"), (["--keep"], 0, 0, "kubelet wrote")],
)
def test_the_archive_stays(node: Node, words: list[str], push: int, code: int, says: str) -> None:
    """Where it was not pushed, and where --keep says so."""
    done = node.run(Kubelet(body=json.dumps({"items": [str(node.archive)]})), *words, push=push)
    assert (done.returncode, node.archive.exists()) == (code, True)
    assert says in done.stderr


@pytest.mark.parametrize(
    ("program", "code", "says"),
    [
        ("#!/bin/sh\nrm $2\nmkdir $2\n", 0, f"{ARCHIVE} was pushed, but cannot be removed from this node: "),
        ("#!/no/such/program\n", 1, "stays on this node: gpusnap cannot be run: No such file or directory"),
    ],
)
def test_the_rest_fails(node: Node, program: str, code: int, says: str) -> None:
    """One sentence says what is left; the exit code, whether the registry has it."""
    done = node.run(Kubelet(body=json.dumps({"items": [str(node.archive)]})), program=program)
    assert done.returncode == code
    assert says in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("code", "body", "says"),
    [
        (1, "", "there is no checkpoint of default/server"),
        (404, "", "kubelet answers 404"),
        (
            500,
            "checkpointing of default/server/server failed",
            "kubelet answers 500 Internal Server Error: check",
        ),
        (200, "{}", "there is no checkpoint of default/server"),
        (200, '{"items": ["relative"]}', "'relative' is no path"),
        (200, "not JSON", "there is no checkpoint of default/server"),
    ],
)
def test_no_checkpoint(node: Node, code: int, body: str, says: str) -> None:
    """One sentence says what kubelet answered; nothing is pushed."""
    done = node.run(Kubelet(code, body))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert says in line
    assert not (node.folder / "pushed").exists()


GPUSNAP = """\
#!/bin/sh
case "$1" in
gpus) echo '{"driver_version": "580", "gpus": [{"model": "H100"}]}';;
inspect) printf '%s\\n' '{"command": "a\\nb", "artifact": DIGEST}';;
esac
"""


@pytest.mark.parametrize(
    ("artifact", "code", "printed"),
    [('{"digest": "sha256:abc"}', 0, "registry.example/ci/server@sha256:abc\n"), ("{}", 1, "")],
)
def test_a_snapshot_that_is_there(tmp_path: Path, artifact: str, code: int, printed: str) -> None:
    """A newline in what gpusnap prints harms nothing; without a digest it fails, and prints nothing."""
    programs = {"id": "#!/bin/sh\necho 0\n", "podman": "#!/bin/sh\n[ $2 = exists ] || echo id\n"}
    programs["gpusnap"] = GPUSNAP.replace("DIGEST", artifact)
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    words = ["-r", "registry.example/ci/server", "-i", "server:1", "-w", "true", "--", "sh", "-c", "a\nb"]
    done = subprocess.run(
        ["sh", str(CI / "snapshot.sh"), *words],
        env={"PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (code, printed), done.stderr
