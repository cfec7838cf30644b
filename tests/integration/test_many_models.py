"""examples/many-models: three model servers on a GPU with room for one, behind the front."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gpuhost
import pytest
import waiting
from conftest import SRC
from storehost import gpusnap
from support import GPUS_CONF, good, podman, until
from suspendhost import usage

EXAMPLE = SRC / "examples" / "many-models"
NAMES = ("llama", "qwen", "mistral")
FIRST_PORT, FRONT = 8101, 8100
MIB = 64


def ask(model: str) -> tuple[int, Any]:
    """Status and answer of a request to the front."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{FRONT}/v1/completions", json.dumps({"model": model}).encode(), method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=110) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def digest(model: str) -> str:
    """Of what the model has on the GPU."""
    size = MIB << 20
    return hashlib.sha256((model.encode() * (size // len(model) + 1))[:size]).hexdigest()


def answers(port: int) -> bool:
    """Whether somebody answers there."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


@pytest.fixture
def front(crun: None, tmp_path: Path) -> Iterator[None]:
    """The three servers, of which the last one runs, and the front."""
    pytest.importorskip("starlette")
    gpuhost.install(SRC / "softgpu" / "build", GPUS_CONF.replace("memory=2GiB", "memory=96MiB"))
    tables = []
    for port, name in enumerate(NAMES, FIRST_PORT):
        server = SRC / "tests" / "workload" / "model_server.py"
        options = [
            "--network",
            "host",
            "--device",
            "nvidia.com/gpu=0",
            "-v",
            "/usr:/usr",
            "-v",
            f"{server}:/server.py:ro",
        ]
        line = ["/usr/bin/python3", "/server.py", name, str(port), str(MIB)]
        good(podman("run", "-d", "--name", name, *options, "localhost/base", *line))
        until(partial(answers, port), f"the server {name}")
        tables.append(f'[models.{name}]\ncontainer = "{name}"\nurl = "http://127.0.0.1:{port}"\n')
        if name != NAMES[-1]:
            good(gpusnap("suspend", name))
    config = tmp_path / "models.toml"
    config.write_text("\n".join(tables))
    words = [sys.executable, str(EXAMPLE / "front.py"), str(config), "--port", str(FRONT)]
    with waiting.Process(words, stdin=subprocess.DEVNULL) as process:
        try:
            until(lambda: answers(FRONT), "the front")
            yield
        finally:
            process.terminate()
            waiting.end(process, 90)
    podman("rm", "--force", "--all", "--time", "0")
    gpuhost.install(SRC / "softgpu" / "build", GPUS_CONF)


def test_each_request_has_its_model(front: None) -> None:
    """In turn, twice the same, and all at once: each answer is from the memory of the named model."""
    counts = dict.fromkeys(NAMES, 0)
    for model in (*NAMES, "qwen", "qwen"):
        status, answer = ask(model)
        counts[model] += 1
        assert (status, answer["model"], answer["digest"]) == (200, model, digest(model))
        assert answer["answers"] == counts[model]
        assert usage(model)["state"] == "running"
    assert [usage(model)["state"] for model in NAMES] == ["suspended", "running", "suspended"]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ask, NAMES * 2))
    assert [(status, answer["model"]) for status, answer in found] == [(200, model) for model in NAMES * 2]
    status, answer = ask("none")
    assert status == 404
    assert "there is no model" in answer["error"]["message"]
