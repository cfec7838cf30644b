"""gpusnap restore of a container with named volumes: none is overwritten, and none becomes empty unasked."""

from __future__ import annotations

import fcntl
import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest
from archives import CONFIG_DUMP, listed, record, regions, written
from checkpoints import tar_of
from fake_podman import FakePodman
from fake_registry import FakeRegistry
from kept_checkpoints import keep
from oci_regions import save, text

from gpusnap.base.progress import Progress
from gpusnap.checkpoints import locator
from gpusnap.checkpoints import volumes as volumes_in_chunks
from gpusnap.checkpoints.locator import InFile, InStore
from gpusnap.oci.chunks.table import CHUNK_SIZE
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.store import Store
from gpusnap.operations import pull, push_pull
from gpusnap.operations.restoring import restore as restoring
from gpusnap.operations.restoring.podman_restore import RestoreRequest
from gpusnap.runtime_shim.base.errors import GpusnapError

QUIET = Progress(shown=False)
# When Podman created the container, and a volume that it created for the container, in another time zone.
BEGUN, LATER = "2026-01-02T03:04:05.123456789Z", "2026-01-02T04:04:05.2+01:00"
DATA = {name: tar_of({"data": name.encode() * 5000}) for name in ("cache", "weights")}


@pytest.fixture(autouse=True)
def store(host_store: Store) -> Store:
    """This host's."""
    return host_store


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    found = FakePodman(tmp_path / "podman", monkeypatch)
    found.has(status="exited")
    return found


def an_archive(folder: Path, *inside: str, named: tuple[str, ...] = ("cache", "weights")) -> str:
    """Of a container with volumes, with the files of some."""
    source = Layout(folder / "source").create()
    config = {**CONFIG_DUMP, "namedVolumes": [{"volumeName": name, "dest": f"/{name}"} for name in named]}
    more = {"config.dump": json.dumps(config).encode()}
    more |= {f"volumes/{name}.tar": DATA[name] for name in inside}
    return written(folder / "in.tar", source, record(regions(source)), more=more)


def restored(what: locator.Place, **more: object) -> None:
    restoring.restore(RestoreRequest(what=what, **more), QUIET)  # type: ignore[arg-type]


def place(kind: str, archive: str, store: Store) -> locator.Place:
    if kind == "file":
        return InFile(archive)
    keep(store, archive, ["w"])
    return InStore(store, "w")


def given(fake: FakePodman) -> dict[str, bytes]:
    """The volumes in what Podman was given."""
    found = listed(str(fake.imported))
    return {name: data for name, data in found.items() if name.startswith("volumes/")}


@pytest.mark.parametrize("kind", ["file", "store"])
class TestWhatBecomesOfThem:
    def test_podman_has_none(self, fake: FakePodman, store: Store, tmp_path: Path, kind: str) -> None:
        """All come out of the checkpoint."""
        fake.has_volumes("other")
        restored(place(kind, an_archive(tmp_path, "cache", "weights"), store))
        assert given(fake) == {f"volumes/{name}.tar": data for name, data in DATA.items()}
        assert "--ignore-volumes" not in fake.calls()[-1]

    def test_podman_has_them(
        self, fake: FakePodman, store: Store, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """They are used as they are, and a note says so; a store does not even write them."""
        fake.has_volumes("cache", "weights", users="one\ntwo\n")
        restored(place(kind, an_archive(tmp_path, "cache", "weights"), store))
        assert fake.calls()[-1].endswith(" --ignore-volumes")
        assert (given(fake) == {}) == (kind == "store")
        said = capsys.readouterr().err
        assert said == "".join(
            (
                f"gpusnap: note: the existing volume {name} (also used by one and two) is used as it is, "
                "and may be newer than the memory in the checkpoint [GPS-521]\n"
            )
            for name in ("cache", "weights")
        )

    def test_podman_has_one(
        self, fake: FakePodman, store: Store, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Podman can only ignore all or none: the other one is made from the checkpoint before."""
        fake.has_volumes("cache")
        what = place(kind, an_archive(tmp_path, "cache", "weights"), store)
        restored(what)
        assert fake.calls()[-1].endswith(" --ignore-volumes")
        assert fake.volumes() == ["cache", "weights"]
        assert fake.filled("weights") == DATA["weights"]
        assert capsys.readouterr().err.count("[GPS-521]") == 1
        assert not (fake.folder / "filled-cache").exists()

    @pytest.mark.parametrize("ignore", [False, True])
    @pytest.mark.parametrize("alive", [False, True])
    def test_one_lacks_files(
        self, fake: FakePodman, store: Store, tmp_path: Path, kind: str, alive: bool, ignore: bool
    ) -> None:
        """It is not used, not even on request: gpusnap was killed while it filled it, or still does."""
        fake.has_volumes("cache", "weights")
        mark = fake.has_made("cache", ".gpusnap-incomplete", "half") / ".gpusnap-incomplete"
        what = place(kind, an_archive(tmp_path, "cache", "weights"), store)
        with open(mark) as file:
            fcntl.flock(file, fcntl.LOCK_EX if alive else fcntl.LOCK_UN)
            with pytest.raises(GpusnapError) as raised:
                restored(what, ignore_volumes=ignore)
        killed = (
            "the volume cache lacks files: gpusnap was killed while it filled it from a checkpoint; podman "
            "volume rm cache removes it, and the next restore makes it again; or complete its files, and "
            f"remove {mark} [GPS-518]"
        )
        said = "another gpusnap restore is filling the volume cache; wait until it has ended [GPS-518]"
        assert raised.value.sentence() == (said if alive else killed)
        assert fake.calls() == []
        mark.unlink()
        restored(what)
        assert not (fake.folder / "filled-cache").exists()

    def test_one_was_never_filled(self, fake: FakePodman, store: Store, tmp_path: Path, kind: str) -> None:
        """gpusnap was killed just when it had made it: its files come from the checkpoint, as all others."""
        fake.has_volumes("cache")
        fake.has_made("cache")
        restored(place(kind, an_archive(tmp_path, "cache", "weights"), store))
        assert fake.volumes() == ["cache", "weights"]
        assert {name: fake.filled(name) for name in DATA} == DATA
        assert fake.calls()[-1].endswith(" --ignore-volumes")

    def test_one_was_never_filled_and_the_checkpoint_has_none(
        self, fake: FakePodman, store: Store, tmp_path: Path, kind: str
    ) -> None:
        """Then it is used as it is, like any other that is there."""
        fake.has_volumes("cache", "weights")
        fake.has_made("cache")
        restored(place(kind, an_archive(tmp_path), store))
        assert fake.calls()[-1].endswith(" --ignore-volumes")

    def test_an_empty_one_on_request(self, fake: FakePodman, store: Store, tmp_path: Path, kind: str) -> None:
        """Podman makes it then."""
        fake.has_volumes("cache")
        restored(place(kind, an_archive(tmp_path, "cache", "weights"), store), ignore_volumes=True)
        (call,) = fake.calls()
        assert call.endswith(" --ignore-volumes")

    def test_one_was_made_and_the_restore_fails(
        self, fake: FakePodman, store: Store, tmp_path: Path, kind: str
    ) -> None:
        """It is removed again: the next attempt makes it anew."""
        fake.has_volumes("cache")
        fake.fails("Error: no such device")
        with pytest.raises(GpusnapError, match="no such device"):
            restored(place(kind, an_archive(tmp_path, "cache", "weights"), store))
        assert fake.volumes() == ["cache"]

    def test_the_checkpoint_has_none(
        self, fake: FakePodman, store: Store, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """One that was made with --ignore-volumes: the volumes are there, or have to be made."""
        what = place(kind, an_archive(tmp_path), store)
        with pytest.raises(GpusnapError, match=r"Podman has no volumes cache and weights, and") as raised:
            restored(what)
        assert raised.value.code == "GPS-518"
        assert fake.calls() == []
        fake.has_volumes("cache", "weights")
        restored(what)
        assert capsys.readouterr().err.count("[GPS-521]") == 2
        assert fake.calls()[-1].endswith(" --ignore-volumes")

    def test_without_volumes(self, fake: FakePodman, store: Store, tmp_path: Path, kind: str) -> None:
        """Podman is not asked."""
        restored(place(kind, an_archive(tmp_path, named=()), store))
        assert "volume ls" not in (fake.folder / "calls").read_text()

    def test_a_restore_that_fails(self, fake: FakePodman, store: Store, tmp_path: Path, kind: str) -> None:
        """Volumes that Podman made for it go with its container, others stay."""
        fake.has_volumes("other")
        fake.has(status="created", Created=BEGUN, volumes={"cache": "/c", "weights": "/w"})
        fake.describes_volume("cache", LATER)
        fake.describes_volume("weights", LATER)
        fake.first('printf "cache\nweights\n" >>$F/volumes')
        fake.fails("gpusnap: no GPU fits\n")
        with pytest.raises(GpusnapError) as raised:
            restored(place(kind, an_archive(tmp_path, "cache", "weights"), store))
        assert raised.value.sentence() == "no GPU fits"
        assert fake.volumes() == ["other"]

    @pytest.mark.parametrize("how", ["no container", "older", "labelled", "unknown", "in use"])
    def test_a_volume_of_somebody_else(
        self, fake: FakePodman, store: Store, tmp_path: Path, kind: str, how: str
    ) -> None:
        """Whoever created it: if it is not certain that it was this restore, it stays, and is named."""
        if how != "no container":
            fake.has(status="created", Created=BEGUN, volumes={"cache": "/c", "weights": "/w"})
        if how == "in use":
            fake.has_volumes(users="other")
        labels = {"of": "them"} if how == "labelled" else {}
        fake.describes_volume("cache", LATER if labels else "2026-01-02T03:04:05Z", **labels)
        fake.describes_volume("weights", LATER if how != "unknown" else "")
        fake.first('printf "cache\nweights\n" >>$F/volumes')
        fake.fails("gpusnap: no GPU fits\n")
        with pytest.raises(GpusnapError) as raised:
            restored(place(kind, an_archive(tmp_path, "cache", "weights"), store))
        both = how in ("no container", "unknown")
        assert fake.volumes() == (["cache", "weights"] if both else ["cache"])
        named = "volumes cache and weights" if both else "volume cache"
        hint = (
            f"somebody else may have created the {named} during the restore; if nobody needs what is in "
            f"there, podman volume rm {'cache weights removes them' if both else 'cache removes it'}"
        )
        assert raised.value.hint == ("" if how == "in use" else hint)

    def test_somebody_else_makes_one_meanwhile(
        self, fake: FakePodman, store: Store, tmp_path: Path, kind: str
    ) -> None:
        """It is not of this restore, and stays with all that is in it."""
        fake.first('printf "cache\n" >>$F/volumes')
        fake.fails(
            "Error: volume with name cache already exists. Use --ignore-volumes to not restore content of "
            "volumes\n"
        )
        with pytest.raises(GpusnapError, match="Podman already has a volume cache"):
            restored(place(kind, an_archive(tmp_path, "cache", "weights"), store))
        assert fake.volumes() == ["cache"]


def test_from_a_registry(
    fake: FakePodman, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of volumes come before Podman is asked, also those that memory has as well."""
    source = Layout(tmp_path / "source").create()
    data = tar_of({"weights": text(300_000)})
    group = bytearray(next(volumes_in_chunks.cut(io.BytesIO(data))))
    tables = save(source, group, bytearray(text(5000, 7)), chunk_size=CHUNK_SIZE)
    config = {**CONFIG_DUMP, "namedVolumes": [{"volumeName": "cache"}]}
    more = {"config.dump": json.dumps(config).encode(), "volumes/cache.tar": data}
    archive = written(tmp_path / "in.tar", source, record(tables), more=more)
    seen: list[int] = []

    def may_wait(away: dict[str, int], *_: object) -> bool:
        seen.append(len(away))
        return True

    monkeypatch.setattr(pull, "_may_wait", may_wait)
    with FakeRegistry(tmp_path / "registry") as registry:
        ref = locator.parse_registry(f"http://{registry.host}/team/app:v1")
        push_pull.push(InFile(archive), ref, progress=QUIET)
        shutil.rmtree(store.path)
        restored(ref)
    assert seen == [2]
    assert given(fake) == {"volumes/cache.tar": data}


def test_archives_that_others_take(store: Store, tmp_path: Path) -> None:
    """pull -o gives Podman its own names and bytes."""
    archive = an_archive(tmp_path, "cache", "weights")
    with FakeRegistry(tmp_path / "registry") as registry:
        ref = locator.parse_registry(f"http://{registry.host}/team/app:v1")
        push_pull.push(InFile(archive), ref, progress=QUIET)
        push_pull.pull(ref, file=f"{tmp_path}/out.tar", progress=QUIET)
    with tarfile.open(f"{tmp_path}/out.tar") as tar:
        for name, data in DATA.items():
            content = tar.extractfile(f"volumes/{name}.tar")
            assert content is not None
            assert content.read() == data
            assert tarfile.open(fileobj=io.BytesIO(data)).getnames() == ["data"]
        assert not [each for each in tar.getnames() if each.endswith(".chunks")]


@pytest.mark.parametrize(
    ("was_in", "wanted", "there", "into"),
    [("", "", "", ""), ("p1", "", "p1", "p1"), ("p1", "p2", "p2", "p2")],
)
def test_pods(fake: FakePodman, tmp_path: Path, was_in: str, wanted: str, there: str, into: str) -> None:
    """Into the pod that is named, or the one that it was in, if Podman still has it."""
    source = Layout(tmp_path / "source").create()
    more = {"config.dump": json.dumps({**CONFIG_DUMP, "pod": was_in}).encode()}
    archive = written(tmp_path / "in.tar", source, record(regions(source)), more=more)
    fake.has_pods(there)
    restored(InFile(archive), pod=wanted)
    (call,) = fake.calls()
    assert call.endswith(f" --pod {into}" if into else "in.tar")


@pytest.mark.parametrize(
    ("was_in", "wanted", "said"),
    [
        ("p1", "", "the container was in the pod p1, which Podman no longer has"),
        ("", "p1", "the container was in no pod, and Podman cannot restore it into the pod p1"),
        ("p1", "p2", "Podman has no pod p2"),
    ],
)
def test_no_such_pod(fake: FakePodman, tmp_path: Path, was_in: str, wanted: str, said: str) -> None:
    """Nothing is begun."""
    source = Layout(tmp_path / "source").create()
    more = {"config.dump": json.dumps({**CONFIG_DUMP, "pod": was_in}).encode()}
    archive = written(tmp_path / "in.tar", source, record(regions(source)), more=more)
    with pytest.raises(GpusnapError) as raised:
        restored(InFile(archive), pod=wanted)
    assert str(raised.value) == said
    assert raised.value.code == "GPS-522"
    assert fake.calls() == []


@pytest.mark.parametrize("wanted", ["", "p2"])
def test_podman_cannot_say_whether_there_is_a_pod(fake: FakePodman, tmp_path: Path, wanted: str) -> None:
    """That is said, and not that there is none."""
    source = Layout(tmp_path / "source").create()
    more = {"config.dump": json.dumps({**CONFIG_DUMP, "pod": "p1"}).encode()}
    archive = written(tmp_path / "in.tar", source, record(regions(source)), more=more)
    (fake.folder / "broken").write_text("Error: database is locked\n")
    with pytest.raises(GpusnapError) as raised:
        restored(InFile(archive), pod=wanted)
    what = f"Podman cannot determine whether there is a pod {wanted or 'p1'}"
    assert str(raised.value) == f"{what}: Podman failed: database is locked"
    assert fake.calls() == []
