"""Several checkpoints of a container that goes on: labels, history, prune, and a restore of what stayed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shimhost
from support import Container, good, run

from gpusnap.oci.store.store import Store

COMMAND = "/usr/local/bin/gpusnap"
STORE = Path("/var/lib/gpusnap-test")


@pytest.fixture(autouse=True)
def store(crun: None) -> Iterator[Store]:
    """This host's, empty, gone afterwards."""
    shutil.rmtree(STORE, ignore_errors=True)
    shimhost.write_settings(f'runtime = "crun"\n[store]\npath = "{STORE}"\n')
    yield Store(STORE)
    shutil.rmtree(STORE, ignore_errors=True)


def done(*words: str) -> Any:
    """What the command says as JSON."""
    return json.loads(good(run(COMMAND, *words, "--json")))


def test_keep_the_last(store: Store) -> None:
    """Of three checkpoints the first goes, with its blobs, and the last one is restored byte by byte."""
    container = Container.start("w", "--mib", "8")
    for step in ("1", "2", "3"):
        done("checkpoint", "w", "--leave-running", "--name", f"w:{step}", "--label", f"step={step}")
        container.goes_on()
    found = done("history", "w")["checkpoints"]
    assert [each["labels"] for each in found] == [{"step": "1"}, {"step": "2"}, {"step": "3"}]
    assert all(0 < each["pause"] < 60 and each["driver"].startswith("nvidia ") for each in found)
    assert found[0]["new"] == found[0]["size"]
    assert 0 < found[1]["new"] <= found[1]["size"]
    pruned = done("prune", "w", "--keep-last", "2", "--gc")
    assert [each["reasons"] for each in pruned["checkpoints"]] == [[], ["last"], ["last"]]
    assert pruned["collected"]["blobs"] > 0
    assert done("prune", "w", "--keep-last", "2", "--dry-run")["collected"] is None
    assert [each["damaged"] for each in done("verify", "--all")] == [[]]
    container.remove()
    good(run(COMMAND, "restore", "w:3"))
    restored = Container("w")
    restored.goes_on()
    restored.remove()
