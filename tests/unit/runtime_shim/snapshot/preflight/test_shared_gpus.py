"""A job of several ranks beside other processes on its GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gpusnap.runtime_shim.base.errors import Refused
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.settings import Nvidia
from gpusnap.runtime_shim.snapshot.preflight import nccl, shared_gpus

A, B, C = "GPU-a", "GPU-b", "GPU-c"
RANKS = (11, 12)


OURS = proc.process(os.getpid())


def process(pid: int) -> proc.Process:
    assert OURS is not None
    return replace(OURS, pid=pid)


def asked(
    monkeypatch: pytest.MonkeyPatch,
    used: Mapping[int, Iterable[str]],
    *,
    job: bool = True,
    vendor: str = "nvidia",
    settings: Nvidia = Nvidia(),  # noqa: B008
) -> None:
    """Ask about the ranks, while these processes use these GPUs."""
    found = {pid: dict.fromkeys(gpus, 1 << 20) for pid, gpus in used.items()}
    monkeypatch.setattr(proc, "pids", lambda: sorted(found))
    monkeypatch.setattr(proc, "process", process)
    monkeypatch.setattr(nccl, "is_job", lambda users: job)
    driver: Any = SimpleNamespace(
        vendor=vendor, memory_used=lambda pids: {pid: found[pid] for pid in pids if pid in found}
    )
    ranks = [process(pid) for pid in RANKS]
    shared_gpus.refuse_ranks_beside_others(driver, ranks, ranks, settings)


OWN = {11: (A,), 12: (B,)}


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process on another GPU does not matter."""
    asked(monkeypatch, {**OWN, 99: (C,)})


def test_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, with what would happen and what to do."""
    with pytest.raises(Refused, match=r"also used by process 99 \(\S+\); after the checkpoint") as raised:
        asked(monkeypatch, {**OWN, 99: (B, C)})
    assert raised.value.code == "GPS-219"
    assert "if you are sure, give gpusnap checkpoint --force" in raised.value.hint


def test_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match=r"process 5 \(\S+\), 6 \(\S+\), 7 \(\S+\) and 2 more; "):
        asked(monkeypatch, {**OWN, **dict.fromkeys(range(5, 10), (A,))})


def test_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, {**OWN, 99: (A,)}, settings=Nvidia(allow_nccl=True))


@pytest.mark.parametrize(("job", "vendor"), [(False, "nvidia"), (True, "amd")])
def test_others_take_turns(monkeypatch: pytest.MonkeyPatch, job: bool, vendor: str) -> None:
    """Processes that wait for no other rank, and GPUs of which this was not seen."""
    asked(monkeypatch, {**OWN, 99: (A,)}, job=job, vendor=vendor)


def test_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML counts in another PID namespace: then nothing can be said."""
    asked(monkeypatch, {99: (A,)})
