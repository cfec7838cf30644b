"""kubelet's way: containerd's CRI plugin checkpoints a container, and restores it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import shimhost
from containerdhost import Containerd, containerd, recorded, version
from cri import RUNNING, Cri, CriError, Pod, PodContainer, connected
from crihost import HANDLER, configure, images, pull_base
from registryhost import Registry
from support import GPUS_CONF, Done, faults, good, manifest, run, until

pytestmark = pytest.mark.skipif(
    not shutil.which("containerd") or version() < (2,), reason="containerd's CRI checkpoints from 2.0 on"
)

# For what does not depend on the runtime: the one that most nodes have.
RUNC = pytest.mark.parametrize("real", ["runc"], indirect=True)
RESTORES = pytest.mark.parametrize("real", ["runc", "crun"], indirect=True)
UUIDS = re.findall(r"uuid=(\S+)", GPUS_CONF)
WORK = ("/gpuwork", "--tick", "30", "--rest", "24", "--mib", "8")


@pytest.fixture(scope="module")
def registry(host: None) -> Iterator[Registry]:
    with images() as found:
        yield found


@pytest.fixture(scope="module")
def server(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    folder = tmp_path_factory.mktemp("containerd")
    with containerd(folder, config=configure(folder, registry)) as found:
        yield found


@pytest.fixture(scope="module")
def cri(server: Containerd) -> Iterator[Cri]:
    with connected(server.address) as found:
        yield found


@pytest.fixture
def base(cri: Cri, registry: Registry) -> str:
    return pull_base(cri, registry)


@pytest.fixture
def pod(cri: Cri, real: str, tmp_path: Path) -> Iterator[Pod]:
    found = Pod.run(cri, "pod", tmp_path / "logs", handler=HANDLER)
    yield found
    found.remove()


@pytest.fixture
def work(pod: Pod, base: str) -> PodContainer:
    """gpuwork in a container of the pod, after its first ticks."""
    container = pod.create("work", base, *WORK)
    container.start()
    container.goes_on()
    return container


def restored(
    pod: Pod,
    image: str | Path,
    *,
    gpus: str = "all",
    attempt: int = 1,
    volumes: Mapping[str, Path] = MappingProxyType({}),
) -> PodContainer:
    """A container made of a checkpoint, after some ticks of its own."""
    if not (2, 1) <= version()[:2] <= (2, 3):
        pytest.skip("this containerd restores no checkpoint in CreateContainer, as 2.1 to 2.3 do")
    container = pod.create("work", str(image), gpus=gpus, attempt=attempt, volumes=volumes)
    container.start()
    container.goes_on()
    return container


def gpusnap(*words: str | Path) -> str:
    return good(run("/usr/local/bin/gpusnap", *words))


def pushed(cri: Cri, what: str | Path, image: str) -> str:
    """What `gpusnap push --format cri` makes of a checkpoint, pulled as kubelet would."""
    gpusnap("push", "--plain-http", "--format", "cri", what, image)
    cri("PullImage", image={"image": image})
    return image


def test_checkpoint(work: PodContainer, tmp_path: Path) -> None:
    """CheckpointContainer's archive is whole, and the container runs on; twice."""
    for name in ("first.tar", "second.tar"):
        archive = tmp_path / name
        work.checkpoint(archive)
        work.goes_on()
        record = manifest(archive)
        assert record["pages"] == "chunks"
        assert len(record["gpus"]) == 2
        gpusnap("verify", archive)


@RESTORES
def test_restore(pod: Pod, work: PodContainer, tmp_path: Path) -> None:
    """The archive's path in the place of an image brings the container back, which is checkpointed again."""
    for attempt in (1, 2):
        archive = tmp_path / f"{attempt}.tar"
        work.checkpoint(archive)
        work.remove()
        work = restored(pod, archive, attempt=attempt)
        assert work.status().state == RUNNING


@RESTORES
def test_image(pod: Pod, work: PodContainer, tmp_path: Path, registry: Registry) -> None:
    """`gpusnap push --format cri` of the archive is an image that CreateContainer takes for a checkpoint."""
    work.checkpoint(tmp_path / "checkpoint.tar")
    work.remove()
    image = pushed(pod.cri, tmp_path / "checkpoint.tar", f"{registry.host}/checkpoint:1")
    restored(pod, image)


@RUNC
def test_image_of_an_artifact(pod: Pod, work: PodContainer, tmp_path: Path, registry: Registry) -> None:
    """An archive that went by chunks to a registry, and from there to a store, becomes such an image."""
    work.checkpoint(tmp_path / "checkpoint.tar")
    work.remove()
    artifact, store = f"{registry.host}/artifact:1", f"oci:{tmp_path / 'store'}:work"
    gpusnap("push", "--plain-http", tmp_path / "checkpoint.tar", artifact)
    gpusnap("pull", "--plain-http", artifact, "--to", store)
    restored(pod, pushed(pod.cri, store, f"{registry.host}/checkpoint:2"))


@RUNC
def test_another_gpu(pod: Pod, base: str, tmp_path: Path) -> None:
    """The GPUs are those of the new container's request, whichever they were before."""
    work = pod.create("work", base, *WORK, gpus="0")
    work.start()
    work.goes_on()
    work.checkpoint(tmp_path / "checkpoint.tar")
    work.remove()
    again = restored(pod, tmp_path / "checkpoint.tar", gpus="1")
    assert [*dict.fromkeys(re.findall(r"gpu=(GPU-\S+)", again.log()))] == UUIDS


# A log and a FIFO in an emptyDir, NCCL's and PyTorch's files in the pod's /dev/shm, a file without a name.
_FILES = """\
umask 027; mkdir -p /cache/inner; cd /cache/inner; mkfifo pipe
echo 'first line' >log; dd if=/dev/zero of=/dev/shm/nccl-a bs=1M count=2 2>/dev/null
printf torch >/dev/shm/torch_1; printf gone >/cache/gone
exec 5>>log 6<>/dev/shm/nccl-a 7</dev/shm/torch_1 8<>/cache/gone 9<>pipe
rm /cache/gone; touch /cache/closed
exec """


@pytest.fixture
def volume(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a folder where kubelet makes an emptyDir."""

    def make(name: str) -> Path:
        path = tmp_path / name / "volumes/kubernetes.io~empty-dir/cache"
        path.mkdir(parents=True)
        return path

    return make


@RUNC
def test_open_files_of_the_pods_volumes(
    pod: Pod, base: str, volume: Callable[[str], Path], tmp_path: Path
) -> None:
    """They come along into another pod, whose volumes are empty; what nobody has open does not."""
    first, second = volume("first"), volume("second")
    script = _FILES + " ".join(WORK)
    work = pod.create("work", base, "sh", "-c", script, volumes={"/cache": first})
    work.start()
    work.goes_on()
    work.checkpoint(tmp_path / "checkpoint.tar")
    work.goes_on()
    work.remove()
    other = Pod.run(pod.cri, "other", tmp_path / "others", handler=HANDLER)
    try:
        image = tmp_path / "checkpoint.tar"
        gpusnap("verify", image)
        restored(other, image, volumes={"/cache": second})
        assert sorted(path.name for path in second.iterdir()) == ["inner"]
        log, fifo = second / "inner/log", second / "inner/pipe"
        assert (log.read_text(), log.stat().st_mode & 0o777) == ("first line\n", 0o640)
        assert fifo.is_fifo()
        (init,) = (path.parent for path in Path("/proc").glob("[0-9]*/comm") if _text(path) == "gpuwork\n")
        assert (init / "fd/8").read_text() == "gone"
        assert (init / "fd/7").read_text() == "torch"
        assert (init / "root/dev/shm/nccl-a").stat().st_size == 2 << 20
    finally:
        other.remove()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@RUNC
def test_a_large_file_of_a_volume(pod: Pod, base: str, volume: Callable[[str], Path], tmp_path: Path) -> None:
    """It is refused before anything happens, with what can be done."""
    shimhost.write_settings('runtime = "runc"\n[criu]\nghost-limit = "1M"\n')
    work = pod.create("work", base, "sh", "-c", _FILES + " ".join(WORK), volumes={"/cache": volume("first")})
    work.start()
    work.goes_on()
    with pytest.raises(CriError, match=r"has /dev/shm/nccl-a of 2\.0 MiB open.*raise criu\.ghost-limit"):
        work.checkpoint(tmp_path / "checkpoint.tar")
    work.goes_on()


@RUNC
def test_store(pod: Pod, work: PodContainer, settings: shimhost.Writer, tmp_path: Path) -> None:
    """With memory.pages = "store" the GPU's bytes do not go through containerd, which copies them."""
    settings(f'[memory]\npages = "store"\n[store]\npath = "{tmp_path / "store"}"\n')
    archive = tmp_path / "checkpoint.tar"
    work.checkpoint(archive)
    work.remove()
    assert (
        archive.stat().st_size
        < 8 << 20
        < sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file())
    )
    restored(pod, archive)


@RUNC
def test_refused(work: PodContainer, tmp_path: Path) -> None:
    """kubelet gets our sentence, and the container runs on."""
    faults("checkpoint result=CUDA_ERROR_UNKNOWN")
    with pytest.raises(CriError, match="gpusnap: "):
        work.checkpoint(tmp_path / "checkpoint.tar")
    faults("")
    work.goes_on()


@RUNC
@pytest.mark.parametrize("moment", ["in gpusnap's part", "at its end"])
def test_a_caller_that_gives_up(server: Containerd, work: PodContainer, tmp_path: Path, moment: str) -> None:
    """containerd leaves the container paused; `gpusnap recover` says so, and how it is resumed."""
    ours = moment == "in gpusnap's part"
    faults("checkpoint hang=60000" if ours else "restore hang=6000")
    with pytest.raises(CriError, match=r"Deadline Exceeded|RST_STREAM"):  # by the client or the server
        work.pod.cri(
            "CheckpointContainer", deadline=4, container_id=work.id, location=str(tmp_path / "first.tar")
        )
    faults("")
    recovered = done_again(lambda: run("/usr/local/bin/gpusnap", "recover"))
    (resume,) = re.findall(rf"{work.id}  containerd has paused it.*: ctr (.+)", recovered)
    (listed,) = json.loads(gpusnap("recover", "--list", "--json"))
    assert (listed["container"], listed["kind"]) == (work.id, "paused")
    assert resume in gpusnap("recover", work.id)
    work.checkpoint(tmp_path / "second.tar")  # containerd leaves it paused once more
    assert resume in gpusnap("recover")
    server.ctr(*resume.split())
    work.goes_on()
    done = run("/usr/local/bin/gpusnap", "recover")
    assert (done.out, done.err) == ("", "nothing to recover\n")
    work.checkpoint(tmp_path / "third.tar")
    work.goes_on()


def done_again(command: Callable[[], Done]) -> str:
    """What a command says when the runtime that containerd kills has ended."""
    said: str = until(lambda: done.out if not (done := command()).code else "", "the end of gpusnap-runtime")
    return said


@RUNC
def test_what_was_cut_off_in_containerd(
    server: Containerd, work: PodContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime has resumed it, or paused it, and containerd has not noticed that."""
    monkeypatch.setenv("CONTAINERD_ADDRESS", str(server.address))
    server.ctr("--namespace", "k8s.io", "tasks", "pause", work.id)
    good(run("runc", "--root", "/run/containerd/runc/k8s.io", "resume", work.id))
    work.goes_on()

    def recover(*words: str) -> Done:
        return run("/usr/local/bin/gpusnap", "recover", *words, env=dict(os.environ))

    said = good(recover())
    (commands,) = re.findall(rf"{work.id}  it runs, but containerd has it as paused.*progress: (.+)", said)
    (listed,) = json.loads(recover("--list", "--json").out)
    assert (listed["container"], listed["kind"]) == (work.id, "paused")
    assert run("ctr", "--namespace", "k8s.io", "tasks", "resume", work.id, env=dict(os.environ)).code
    good(run("sh", "-c", commands, env=dict(os.environ)))
    assert server.tasks("k8s.io")[work.id][1] == "RUNNING"
    work.goes_on()
    assert (recover().out, recover().err) == ("", "nothing to recover\n")

    good(run("runc", "--root", "/run/containerd/runc/k8s.io", "pause", work.id))
    said = good(recover())
    (commands,) = re.findall(rf"{work.id}  it is frozen, but containerd has it as runn.*progress: (.+)", said)
    good(run("sh", "-c", commands, env=dict(os.environ)))
    work.goes_on()
    assert (recover().out, recover().err) == ("", "nothing to recover\n")


@RUNC
def test_python_starts_for_a_checkpoint_alone(pod: Pod, base: str, tmp_path: Path) -> None:
    """All else that containerd's CRI asks of the handler's BinaryName goes by the launcher."""
    with recorded(tmp_path / "starts") as starts:
        for attempt in (0, 1):
            work = pod.create("work", base, *WORK, attempt=attempt)
            work.start()
            work.goes_on()
            if not attempt:
                work.remove()
        assert starts() == []
        work.checkpoint(tmp_path / "checkpoint.tar")
        assert [" checkpoint " in line for line in starts()] == [True]


@pytest.fixture
def no_setting(real: str) -> Iterator[None]:
    """No setting `runtime` in the test, and the fixture's own after it."""
    shimhost.write_settings("")
    yield
    shimhost.write_settings(f'runtime = "{real}"\n')


@pytest.fixture
def crun_of_old(real: str, pod: Pod, base: str) -> PodContainer:
    """A container that crun runs in the pod, as gpusnap chose before it preferred runc."""
    shimhost.write_settings('runtime = "crun"\n')
    found = pod.create("old", base, *WORK)
    found.start()
    found.goes_on()
    return found


@RUNC
def test_runc_without_a_setting(
    pod: Pod, base: str, crun_of_old: PodContainer, no_setting: None, tmp_path: Path
) -> None:
    """runc runs what is new, with a crun beside it; and each keeps its containers to their end."""
    states = Path("/run/containerd/runc/k8s.io")
    work = pod.create("work", base, *WORK)
    work.start()
    assert (states / work.id / "state.json").exists()
    assert (states / crun_of_old.id / "status").exists()
    for name, each in (("runc", work), ("crun", crun_of_old)):
        each.goes_on()
        each.checkpoint(tmp_path / f"{name}.tar")
        each.goes_on()
        assert manifest(tmp_path / f"{name}.tar")["host"]["runtime"]["name"] == name
        each.remove()
    # And what crun dumped comes back under runc.
    again = restored(pod, tmp_path / "crun.tar", attempt=1)
    assert (states / again.id / "state.json").exists()


@RUNC
def test_without_gpu(pod: Pod, base: str, tmp_path: Path) -> None:
    """A container without a GPU under the same handler is the real runtime's."""
    script = "i=0; while :; do i=$((i+1)); echo pid=1 tick=$i ok; sleep 0.05; done"
    work = pod.create("work", base, "sh", "-c", script, gpus="")
    work.start()
    work.goes_on()
    work.checkpoint(tmp_path / "checkpoint.tar")
    work.goes_on()
    work.remove()
    restored(pod, tmp_path / "checkpoint.tar", gpus="")
