"""The command lines of checkpoint, restore, push and pull, and what they print."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_podman import ID, FakePodman
from fake_registry import FakeRegistry, Say
from kept_checkpoints import an_archive

from gpusnap.cli import main as cli
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.errors import GpusnapError, UsageError
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
    assert restored.keys() == {"container", "containerId", "digest", "kept", "seconds"}
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


def test_lines(store: Store, registry: FakeRegistry, tmp_path: Path) -> None:
    """One line each on stdout, with the whole digest; what to do next is on stderr."""
    made = ran("checkpoint", "w", "--name", "mine")
    digest = store.find("mine").descriptor.digest
    assert made.stdout.startswith(f"mine  {digest}  GPU memory 1.0 MiB, ")
    assert made.stdout.count("\n") == 1
    assert made.stderr == "w has ended; run podman rm w before a restore under the same name\n"
    ref = f"{registry.host}/team/app:v1"
    pushed = ran("push", "mine", f"http://{ref}")
    assert pushed.stdout.startswith(f"{ref}  {digest}  ")
    assert ran("pull", f"http://{ref}").stdout.startswith(f"{ref}  {digest}  transferred 0 B in 0 blobs; ")
    assert ran("restore", "mine").stdout.startswith(f"w  {ID}  ")


def test_a_push_that_fails(store: Store, registry: FakeRegistry) -> None:
    """The checkpoint is in the store, and the sentence says how to go on."""
    registry.rule("POST", "/blobs/uploads/", Say(403), times=99)
    ref = f"{registry.host}/team/app:v1"
    with pytest.raises(GpusnapError) as raised:
        ran("checkpoint", "w", "--to", ref, "--plain-http")
    text = raised.value.sentence()
    assert f"the checkpoint is in {store.path} as {ref}, and was not pushed: " in text
    assert text.endswith(f"; gpusnap push {ref} {ref} --plain-http goes on [GPS-801]")
    registry.rules.clear()
    assert ran(*text.rpartition("; gpusnap ")[2].removesuffix(" goes on [GPS-801]").split()).exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["checkpoint", "w", "--to", "name"], "is no destination for a checkpoint"),
        (["checkpoint", "w", "--to", "./w.tar", "--name", "x"], "an archive has no name"),
        (["checkpoint", "w", "--name", "a b"], "cannot be a name"),
        (["checkpoint", "w", "--to", "oci:there:x", "--name", "y"], "are the same thing"),
        (["pull", "registry.example/w:v1", "--to", "./w.tar"], "is no store"),
        (["checkpoint", "w", "--to", f"registry.example/w@sha256:{'0' * 64}"], "names a digest"),
        (["pull", "w"], "names no registry"),
        (["push", "w", "x"], "names no registry"),
    ],
)
def test_wrong_lines(words: list[str], said: str, tmp_path: Path) -> None:
    """Said before anything is done."""
    with pytest.raises(UsageError, match=said):
        ran(*words)
    assert not (tmp_path / "podman/calls").exists()
