"""What the refusal of a resume proposes where other containers use the GPU."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from fakes import FakeDriver

from gpusnap.operations.suspending import make_way, usage
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.errors import GpusnapError
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
        "stop the other programs on those GPUs: nvidia-smi lists it; it needs a GPU that container qwen "
        "cannot see: gpusnap checkpoint qwen, podman rm and gpusnap restore --gpu-map move it there "
        "[GPS-401]"
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
