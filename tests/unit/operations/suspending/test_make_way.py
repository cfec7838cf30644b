"""What the refusal of a resume proposes where other containers use the GPU."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import pytest
from fakes import FakeDriver

from gpusnap.operations.suspending import make_way, usage
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused
from gpusnap.runtime_shim.gpu.api.driver import Driver, Gpu
from gpusnap.runtime_shim.records.manifest import GpuRecord
from gpusnap.runtime_shim.snapshot.records.suspensions import Stage, Suspension
from gpusnap.runtime_shim.snapshot.suspended_containers import resume

GIB = 1 << 30
GPU = GpuRecord("GPU-1", 0, 0, "Soft", "9.0", 80 * GIB, 40 * GIB, "0000:01:00.0")


def asleep() -> Suspension:
    """A suspended container that needs 40 GiB of GPU 0 and sees no other."""
    owner = state_files.owner()
    since, version = "2026-11-22T19:00:00Z", "1.0"
    return Suspension(
        *("a@b", "qwen", "podman", "", Stage.SUSPENDED, owner, owner, since, "crun"),
        driver_version=version,
        gpus=(GPU,),
    )


def refused(
    monkeypatch: pytest.MonkeyPatch, used: int, users: Mapping[str, Mapping[str, int]], other: int = 80 * GIB
) -> str:
    """The sentence where GPU 0 has so many bytes in use, by these containers among others."""
    driver = FakeDriver(
        gpus=tuple(
            Gpu(f"GPU-{number + 1}", number, number, "Soft", "9.0", 80 * GIB, size, False, "default")
            for number, size in enumerate((used, other))
        )
    )
    monkeypatch.setattr(usage, "map_running", lambda _: users)
    with pytest.raises(resume.NoRoom) as caught:
        resume.check(asleep(), driver.host(), ())
    make_way.propose(caught.value, asleep(), driver, ())
    return caught.value.sentence()


def test_a_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is on the GPU, how much is free and needed, and the command."""
    users = {"llama": {"GPU-1": 60 * GIB}, "elsewhere": {"GPU-2": 30 * GIB}}
    assert refused(monkeypatch, 61 * GIB, users, other=30 * GIB) == (
        "no GPU that container qwen can see fits its GPU 0 (Soft): GPU 0: 19.0 GiB free, 40.0 GiB needed; "
        "container llama uses 60.0 GiB of GPU 0: gpusnap swap llama qwen [GPS-401]"
    )


def test_the_least_that_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several containers that one is proposed that is disturbed for the least, and does make room."""
    users = {name: {"GPU-1": size * GIB} for name, size in (("a", 5), ("b", 30), ("c", 35))}
    said = refused(monkeypatch, 70 * GIB, users)
    assert "; container b uses 30.0 GiB of GPU 0; container c uses 35.0 GiB of GPU 0; " in said
    assert said.endswith(": gpusnap swap b qwen [GPS-401]")


def test_none_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap would be refused."""
    users = {name: {"GPU-1": size * GIB} for name, size in (("a", 24), ("b", 25), ("c", 26))}
    assert refused(monkeypatch, 75 * GIB, users).endswith(": gpusnap suspend c b a frees memory [GPS-401]")


def test_no_container_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of the host do; and another GPU, which it does not see, has room."""
    assert refused(monkeypatch, 75 * GIB, {"a": {"GPU-1": GIB}}, other=0).partition("needed; ")[2] == (
        "stop the other programs on those GPUs: nvidia-smi lists it; to move it to GPU 1 of this host: "
        "gpusnap checkpoint qwen && podman rm --force qwen && gpusnap restore --gpu-map 0=1 qwen [GPS-401]"
    )


def test_who_uses_it_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal stays as it is."""

    def fail(_: Driver) -> Mapping[str, Mapping[str, int]]:
        raise GpusnapError("Podman does not respond")

    driver = FakeDriver()
    monkeypatch.setattr(usage, "map_running", fail)
    error = resume.NoRoom("no GPU", hint="gpusnap swap OTHER qwen", code="GPS-401")
    make_way.propose(error, asleep(), driver, ())
    assert error.hint == "gpusnap swap OTHER qwen"


class Reporting(FakeDriver):
    """A driver that reports this memory of processes, or None, of one GPU with 60 of 80 GiB in use."""

    def __init__(self, used: Mapping[int, int | None]) -> None:
        super().__init__(gpus=(Gpu("GPU-1", 0, 0, "Soft", "9.0", 80 * GIB, 60 * GIB, False, "default"),))
        self.reported = used

    def memory_used(self, pids: Iterable[int]) -> Mapping[int, Mapping[str, int | None]]:  # type: ignore[override]
        return {pid: {"GPU-1": self.reported[pid]} for pid in pids if pid in self.reported}


def check_swap(out: int | None, other: int | None) -> str:
    """Return why a container that needs 40 GiB is not swapped in for this process, of which 20 are free."""
    me, another = os.getpid(), os.getppid()
    driver = Reporting({me: out, another: other})
    try:
        make_way.check_swap(asleep(), "llama", driver, driver.host(), driver.memory_used([me]), ())
    except Refused as error:
        return error.sentence()
    return ""


@pytest.mark.parametrize(
    ("out", "other"),
    [
        pytest.param(20 * GIB, None, id="enough, whatever others use"),
        pytest.param(None, 40 * GIB, id="what is not of the other one"),
    ],
)
def test_a_swap_that_fits(out: int | None, other: int | None) -> None:
    assert check_swap(out, other) == ""


@pytest.mark.parametrize(("out", "other"), [(19 * GIB, None), (None, 41 * GIB)])
def test_a_swap_that_does_not_fit(out: int | None, other: int | None) -> None:
    """Not even if all that the driver does not report is the first one's."""
    assert "no GPU that container qwen can see fits" in check_swap(out, other)


def test_a_swap_of_which_nobody_knows() -> None:
    """Is refused before anything is done: the first one would be interrupted, maybe for nothing."""
    assert check_swap(None, None) == (
        "the driver does not report how much memory of GPU 0 container llama and other programs use, so "
        "whether qwen fits in place of llama is not known; gpusnap suspend llama; then gpusnap resume qwen "
        "says whether it fits, and changes nothing if it does not [GPS-401]"
    )
