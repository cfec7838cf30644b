"""The command lines of checkpoint, restore, push and pull, and what they print."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fake_podman import ID, FakePodman
from fake_registry import FakeRegistry, Say
from kept_checkpoints import an_archive
from oci_checkpoints import commit

from gpusnap import operations
from gpusnap.cli import main as cli
from gpusnap.oci.store.store import Store
from gpusnap.operations.checkpointing import places
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base.errors import GpusnapError, UsageError
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.shim import overrides


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[FakeRegistry]:
    with FakeRegistry(tmp_path / "registry") as found:
        yield found


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """This host's, and a container under a Podman that exports an archive with its chunks."""
    found = Settings(store=settings_file.Store(path=str(tmp_path / "store")))
    monkeypatch.setattr(settings_file, "load", lambda: found)
    monkeypatch.setattr(overrides, "FOLDER", str(tmp_path / "orders"))
    monkeypatch.setattr(places, "FOLDER", str(tmp_path / "in-progress"))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    (tmp_path / "auth.json").write_text("{}")
    fake = FakePodman(tmp_path / "podman", monkeypatch)
    fake.has()
    fake.exports(an_archive(tmp_path))
    return Store(tmp_path / "store")


def ran(*words: str) -> Result:
    return CliRunner().invoke(cli.command, words, catch_exceptions=False)


def document(*words: str) -> dict[str, object]:
    done = ran(*words, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_all_as_json(store: Store, registry: FakeRegistry, tmp_path: Path) -> None:
    """The shapes that the help describes."""
    ref = f"{registry.host}/team/app:v1"
    made = document("checkpoint", "w", "--to", f"http://{ref}", "--name", "mine")
    pushed = made.pop("pushed")
    assert made.keys() == {
        *("container", "containerId", "name", "digest", "store", "file", "memory", "size", "new", "seconds"),
    }
    assert (made["container"], made["containerId"], made["name"], made["store"]) == (
        "w",
        ID,
        "mine",
        store.path,
    )
    figures = {"reference", "digest", "blobs", "bytes", "skippedBlobs", "skippedBytes", "mounted"}
    assert isinstance(pushed, dict)
    assert pushed.keys() == figures
    again = document("push", "mine", ref, "--plain-http")
    assert again.keys() == figures
    assert again["blobs"] == 0
    pulled = document("pull", f"http://{ref}", "-o", str(tmp_path / "out.tar"))
    assert pulled.keys() == figures | {"store", "name", "file", "image", "baseImage"}
    restored = document("restore", "mine")
    assert restored.keys() == {"container", "containerId", "digest", "name", "newer", "kept", "seconds"}
    assert restored["digest"] == made["digest"]


def test_compression(registry: FakeRegistry, tmp_path: Path) -> None:
    """Of an image that is gzip, unless somebody chose; of an artifact there is none to choose."""
    ref, archive = f"http://{registry.host}/team/app:v1", str(tmp_path / "in.tar")
    for words, kind in (
        ((), "gzip"),
        (("--compression", "zstd"), "zstd"),
        (("--compression", "gzip"), "gzip"),
    ):
        document("push", archive, ref, "--format", "podman", *words)
        (layer,) = json.loads(registry.manifests["team/app", "v1"][1])["layers"]
        assert layer["mediaType"] == f"application/vnd.oci.image.layer.v1.tar+{kind}"
    with pytest.raises(UsageError, match="chunks of an artifact have their own"):
        ran("push", archive, ref, "--compression", "zstd")


def test_labels(store: Store, registry: FakeRegistry, tmp_path: Path) -> None:
    """Kept in the manifest: shown by ls, inspect and history, and carried to wherever it is copied."""
    wanted = {"step_no": "100", "best": "", "team/owner": "a b, c=d"}
    given = [f"{key}={value}" if value else key for key, value in wanted.items()]
    words = [word for each in given for word in ("--label", each)]
    ref = f"http://{registry.host}/team/app:v1"
    document("checkpoint", "w", "--name", "mine", "--to", ref, *words)
    there = f"oci:{tmp_path}/other:theirs"
    assert ran("pull", ref, "--to", there).output.startswith(f"{there}  sha256:")
    document("copy", f"oci:{tmp_path}/other:theirs", f"oci-archive:{tmp_path}/w.tar")
    document("copy", f"{tmp_path}/w.tar", f"oci:{tmp_path}/third:w")
    for place, name in (("store", "mine"), ("other", "theirs"), ("third", "w")):
        listed: Any = document("ls", f"oci:{tmp_path}/{place}")
        assert [row["labels"] for row in listed["checkpoints"]] == [wanted]
        shown: Any = document("inspect", f"oci:{tmp_path}/{place}:{name}")
        assert shown["artifact"]["labels"] == wanted
    found: Any = document("history", "mine")
    assert [row["labels"] for row in found["checkpoints"]] == [wanted]
    text = ran("inspect", "mine").stdout
    assert "\nlabels: best, step_no=100, team/owner=a b, c=d\n" in text
    assert "io.gpusnap.label" not in text


def test_lines(store: Store, registry: FakeRegistry, tmp_path: Path) -> None:
    """One line each on stdout, with the whole digest; what to do next is on stderr."""
    made = ran("checkpoint", "w", "--name", "mine")
    digest = store.find("mine").descriptor.digest
    assert made.stdout.startswith(f"mine  {digest}  GPU memory 1.0 MiB, ")
    assert made.stdout.count("\n") == 1
    assert made.stderr == "w has stopped; to continue it: gpusnap restore mine\n"
    ref = f"{registry.host}/team/app:v1"
    pushed = ran("push", "mine", f"http://{ref}")
    assert pushed.stdout.startswith(f"{ref}  {digest}  ")
    assert ran("pull", f"http://{ref}").stdout.startswith(f"{ref}  {digest}  transferred 0 B in 0 blobs; ")
    back = ran("restore", "mine")
    assert back.stdout.startswith(f"w  {ID}  ")
    assert back.stderr.startswith("restored from mine, made ")
    assert json.loads(ran("restore", "mine", "--json").stdout)["newer"] == []
    other = f"oci:{tmp_path}/other:mine"
    ran("copy", "mine", other)
    assert ran("restore", other).stderr.startswith(f"restored from {other}, made ")


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ([], "gpusnap restore w"),
        (["--name", "mine"], "gpusnap restore mine"),
        (["--name", "w:mine"], "gpusnap restore w:mine"),
        (["--to", "oci:{folder}/a b:c"], "gpusnap restore 'oci:{folder}/a b:c'"),
        (["--to", "{folder}/w.tar"], "gpusnap restore {folder}/w.tar"),
        (["--to", "http://{host}/app:v1"], "gpusnap restore http://{host}/app:v1"),
        (["--to", "{host}/app", "--plain-http"], "gpusnap restore http://{host}/app"),
        (["--to", "http://{host}/app:v1", "--name", "mine"], "gpusnap restore mine"),
    ],
)
def test_the_way_back(
    registry: FakeRegistry, tmp_path: Path, words: list[str], command: str, store: Store
) -> None:
    """The last line has the command that brings the container back, as it can be typed."""
    folder = tmp_path / "there"
    folder.mkdir()
    there = {"folder": folder, "host": registry.host}
    made = ran("checkpoint", "w", *(word.format(**there) for word in words))
    assert made.stderr == f"w has stopped; to continue it: {command.format(**there)}\n"


def test_the_way_back_where_a_name_is_taken(store: Store) -> None:
    """With the tag where the name alone means another one, as an exact name does."""
    commit(store.create(), b"x", names=("w",))
    said = ran("checkpoint", "w").stderr
    assert re.search(r"to continue it: gpusnap restore w:\d{8}-\d{6}$", said)


def test_the_way_back_of_what_runs_on(store: Store) -> None:
    """The container that runs is in the way; the whole name stays that of this checkpoint."""
    said = ran("checkpoint", "w", "--leave-running").stderr
    (name,) = (each.name for each in store.entries())
    back = f"podman rm --force --time 0 w && gpusnap restore {name}"
    assert said == f"w continues to run; to go back to this checkpoint: {back}\n"


def test_a_push_whose_module_is_gone(
    store: Store, registry: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpusnap was removed meanwhile: the sentence says where the checkpoint is, all the same."""
    monkeypatch.setitem(sys.modules, "gpusnap.operations.push_pull", None)
    monkeypatch.delattr(operations, "push_pull", raising=False)
    with pytest.raises(
        GpusnapError, match=r"the checkpoint is in .* but was not pushed: a module of gpusnap"
    ):
        ran("checkpoint", "w", "--to", f"{registry.host}/team/app:v1", "--plain-http")
    assert any(each.name.startswith("w:") for each in store.entries())


def test_a_push_that_fails(store: Store, registry: FakeRegistry) -> None:
    """The checkpoint is in the store, and the sentence says how to go on."""
    registry.rule("POST", "/blobs/uploads/", Say(403), times=99)
    ref = f"{registry.host}/team/app:v1"
    with pytest.raises(GpusnapError) as raised:
        ran("checkpoint", "w", "--to", ref, "--plain-http")
    text = raised.value.sentence()
    (name,) = {each.name for each in store.entries()} - {ref}
    assert f"the checkpoint is in {store.path} as {name}, but was not pushed: " in text
    assert text.endswith(f"; gpusnap push {name} {ref} --plain-http continues it [GPS-801]")
    registry.rules.clear()
    assert (
        ran(*text.rpartition("; gpusnap ")[2].removesuffix(" continues it [GPS-801]").split()).exit_code == 0
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["checkpoint", "w", "--to", "name"], "is not a valid destination for a checkpoint"),
        (["checkpoint", "w", "--to", "./w.tar", "--name", "x"], "an archive has no name"),
        (["checkpoint", "w", "--name", "a b"], "is not a valid name"),
        (["checkpoint", "w", "--label", "=x"], "is not a valid label"),
        (["checkpoint", "w", "--label", "a=1", "--label", "a=2"], "is given twice"),
        (["checkpoint", "w", "--to", "./w.tar", "--label", "a=1"], "cannot store labels"),
        (["checkpoint", "w", "--to", "oci:there:x", "--name", "y"], "are the same; give only one"),
        (["pull", "registry.example/w:v1", "--to", "./w.tar"], "is not a store"),
        (["pull", "registry.example/w:v1", "--to", "name"], "--to name is not a store"),
        (["pull", "./w.tar"], "for a store or a file, use gpusnap copy .GPS-807.$"),
        (["push", "w", "oci:DIR"], "for a store or a file, use gpusnap copy .GPS-807.$"),
        (["copy", "w", "oci:/etc/passwd"], "/etc/passwd is a file, and a store is a directory"),
        (["checkpoint", "w", "--to", f"registry.example/w@sha256:{'0' * 64}"], "names a digest"),
        (["pull", "w"], "names no registry"),
        (["push", "w", "x"], "names no registry"),
    ],
)
def test_wrong_lines(words: list[str], said: str, tmp_path: Path) -> None:
    """Said before anything is done."""
    with pytest.raises(UsageError) as caught:
        ran(*words)
    assert re.search(said, caught.value.sentence())
    calls = tmp_path / "podman/calls"
    assert not calls.exists() or calls.read_text() in ("", "container inspect -- w\n")


def test_a_wrong_gpu_map(store: Store, registry: FakeRegistry, tmp_path: Path) -> None:
    """It is named as it was given, and Podman is not asked."""
    document("checkpoint", "w")
    with pytest.raises(UsageError, match=r"^--gpu-map is '0-1'; it must be pairs of GPUs") as caught:
        ran("restore", "w", "--gpu-map", "0-1")
    assert caught.value.code == "GPS-403"
    assert "restore" not in (tmp_path / "podman/calls").read_text()
