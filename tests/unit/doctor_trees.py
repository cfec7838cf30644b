"""Recorded trees of files for the checks of gpusnap.doctor."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from gpusnap.doctor.base.check import Check
from gpusnap.runtime_shim.process.proc import Process
from gpusnap.runtime_shim.runtime.child_process import Finished

__all__ = ["Programs", "a_process", "only", "tree"]


def tree(root: Path, files: dict[str, str | bytes]) -> str:
    """Files below a root by their absolute path; the root."""
    for path, content in files.items():
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(root)


def only(checks: Iterable[Check]) -> tuple[str, Check]:
    """The verdict and the check, where there is one; what every check must be."""
    (found,) = checks
    assert found.says
    assert not found.says.endswith(".")
    assert "\n" not in found.says + found.todo
    assert bool(found.todo) == (found.verdict.value != "ok")
    return found.verdict.value, found


def a_process(pid: int = 7, comm: str = "python3") -> Process:
    return Process(pid, (pid,), comm, (comm,), 1)


class Programs:
    """Programs of a host, by name, and what they answer."""

    def __init__(self, **answers: Finished | str) -> None:
        self._answers = answers

    def find(self, name: str) -> str | None:
        return f"/usr/bin/{name}" if name.replace("-", "_") in self._answers else None

    def run(self, argv: list[str]) -> Finished | None:
        found = self._answers[os.path.basename(argv[0]).replace("-", "_")]
        return Finished(0, found, "") if isinstance(found, str) else found
