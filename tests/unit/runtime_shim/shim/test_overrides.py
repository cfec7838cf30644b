"""What one command of the user's asks of the runtime that Podman runs for it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.settings import Memory, Nvidia, Settings
from gpusnap.runtime_shim.shim import overrides
from gpusnap.runtime_shim.snapshot.memory.handover import Recipient

ID = "c0ffee" * 10


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "run" / "orders"
    path.parent.mkdir()
    monkeypatch.setattr(overrides, "FOLDER", str(path))
    return path


def test_an_order_counts_while_it_stands(folder: Path) -> None:
    """For its container, for as long as the block runs, and for root's eyes only."""
    with overrides.order(ID, pages="store", store="/somewhere/else"):
        found = overrides.apply_orders(Settings(), ID)
        assert (found.memory.pages, found.store.path) == ("store", "/somewhere/else")
        assert overrides.apply_orders(Settings(), "another") == Settings()
        (path,) = folder.glob("*.json")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert overrides.apply_orders(Settings(), ID) == Settings()
    assert not list(folder.iterdir())


def test_the_store_of_the_settings_stays() -> None:
    """An order that names none means theirs."""
    with overrides.order(ID, pages="chunks"):
        found = overrides.apply_orders(Settings(), ID)
    assert (found.memory.pages, found.store) == ("chunks", Settings().store)


def test_who_gets_the_memory() -> None:
    """The process that ordered it, in the directory that it named; nobody without an order for that."""
    with overrides.order(ID, pages="store", store="/somewhere", staging="named"):
        assert overrides.find_recipient(ID) == Recipient("named", state_files.owner())
        assert overrides.find_recipient("another") is None
        assert overrides.list_stores() == {"/somewhere"}
    with overrides.order(ID, pages="chunks"):
        assert overrides.find_recipient(ID) is None
        assert overrides.list_stores() == set()
    assert overrides.find_recipient(ID) is None
    assert overrides.list_stores() == set()


@pytest.mark.parametrize("pages", ["store", "criu"])
def test_shared_gpu_memory_all_the_same(pages: str) -> None:
    """--force goes beyond the settings; without it they count, wherever the pages go."""
    settings = Settings(memory=Memory(pages=pages))
    with overrides.order(ID, pages="store", force=True):
        assert overrides.apply_orders(settings, ID).nvidia == Nvidia(allow_nccl=True)
    with overrides.order(ID, pages="store"):
        assert not overrides.apply_orders(settings, ID).nvidia.allow_nccl
        allowed = Settings(nvidia=Nvidia(allow_nccl=True))
        assert overrides.apply_orders(allowed, ID).nvidia.allow_nccl


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"owner": [1], "pages": "store", "store": ""}',
        b'{"owner": ["x", 2], "pages": "store", "store": ""}',
        b'{"owner": [OWN], "pages": "somewhere", "store": ""}',
        b'{"pages": "store", "store": ""}',
    ],
)
def test_a_broken_order_is_none(folder: Path, content: bytes) -> None:
    """Whatever is in the file, the settings stand."""
    folder.mkdir()
    own = proc.process(os.getpid())
    assert own is not None
    (folder / f"{ID}.json").write_bytes(content.replace(b"OWN", f"{os.getpid()}, {own.start}".encode()))
    assert overrides.apply_orders(Settings(), ID) == Settings()


def test_an_order_of_somebody_who_has_died_is_none(folder: Path) -> None:
    """A killed command must not decide where later checkpoints go."""
    with overrides.order(ID, pages="store"):
        path = folder / f"{ID}.json"
        document = json.loads(path.read_text())
        document["owner"][1] += 1
        path.write_text(json.dumps(document))
        assert overrides.apply_orders(Settings(), ID) == Settings()


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    """Only a file that is there itself counts."""
    with overrides.order(ID, pages="store"):
        (folder / f"{ID}.json").rename(tmp_path / "moved")
        (folder / f"{ID}.json").symlink_to(tmp_path / "moved")
        assert overrides.apply_orders(Settings(), ID) == Settings()


def test_what_is_no_id_is_refused() -> None:
    """No path can be made of it."""
    assert overrides.apply_orders(Settings(), "../../etc/passwd") == Settings()
    with (
        pytest.raises(GpusnapError, match="is not a container ID"),
        overrides.order("../x", pages="store"),
    ):
        pass


def test_no_room(folder: Path) -> None:
    """The sentence names the file."""
    folder.write_text("prevents it")
    with (
        pytest.raises(GpusnapError, match=r"c0ffee\.json cannot be written.*") as caught,
        overrides.order(ID, pages="store"),
    ):
        pass
    assert caught.value.hint


def test_one_at_a_time(folder: Path) -> None:
    """A second one for the same container is refused, and the first one's stays; not another container's."""
    with overrides.order(ID, pages="chunks"):
        with (
            pytest.raises(
                ContainerError, match=r"another gpusnap .* suspend or resume of the container c0ffeec0ffee is"
            ),
            overrides.order(ID, pages="store"),
        ):
            pass
        with overrides.order("another", pages="store"):
            assert overrides.apply_orders(Settings(), "another").memory.pages == "store"
        assert (folder / f"{ID}.json").exists()
        assert overrides.apply_orders(Settings(), ID).memory.pages == "chunks"
    with overrides.order(ID, pages="store"):
        assert overrides.apply_orders(Settings(), ID).memory.pages == "store"
    assert not list(folder.iterdir())


_OTHER = """\
import sys
from gpusnap.runtime_shim.shim import overrides as orders
from gpusnap.runtime_shim.settings import Settings
orders.FOLDER = sys.argv[1]
print(orders.apply_orders(Settings(), sys.argv[2]).memory.pages, flush=True)
"""
_ORDERING = """\
import sys
from gpusnap.runtime_shim.shim import overrides as orders
orders.FOLDER = sys.argv[1]
with orders.order(sys.argv[2], pages="store"):
    print("ordered", flush=True)
    sys.stdin.read()
"""


def test_an_order_is_for_those_below(folder: Path) -> None:
    """What the one who ordered starts follows it; a Podman that somebody else runs meanwhile does not."""
    with overrides.order(ID, pages="store"):
        words = [sys.executable, "-B", "-c", _OTHER, str(folder), ID]
        assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "store\n"
    with subprocess.Popen(
        [sys.executable, "-B", "-c", _ORDERING, str(folder), ID],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ordered\n"
        assert overrides.apply_orders(Settings(), ID) == Settings()
        other.communicate(b"")


def test_what_is_for_criu_stays_so() -> None:
    """memory.pages = criu is a way out where chunks do not work: an order says only where they go."""
    settings = Settings(memory=Memory(pages="criu"))
    with overrides.order(ID, pages="store", store="/somewhere/else"):
        found = overrides.apply_orders(settings, ID)
    assert (found.memory.pages, found.store.path) == ("criu", "/somewhere/else")


def test_what_killed_ones_leave_is_swept(folder: Path) -> None:
    """Orders and locks of those that are gone are removed; those of one that lives stay."""
    for name in ("dead.json", "dead.json.new", "dead.lock", "alone.lock"):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text('{"owner": [1, 1]}')
    with overrides.order(ID, pages="store"):
        overrides.sweep()
        assert sorted(path.name for path in folder.iterdir()) == [f"{ID}.json", f"{ID}.lock"]
    assert not list(folder.iterdir())


def killed(path: Path, **more: object) -> None:
    path.write_text(json.dumps({"owner": [1, 1], "store": "", **more}))


def test_a_later_order_loses_no_earlier_one(folder: Path, tmp_path: Path) -> None:
    """The store or the archive that a killed command named stays known, until nothing is left there."""
    archive = tmp_path / ".w.tar.1234"
    archive.touch()
    folder.mkdir()
    killed(folder / f"{ID}.json", store="/first")
    with overrides.order(ID, pages="store", store="/second"):
        assert overrides.list_stores() == {"/first", "/second"}
        killed(folder / "another.json", archive=str(archive), target="/w.tar")
        with overrides.order("another", pages="store", archive="/of/one/that/lives"):
            assert overrides.list_archives() == {str(archive): "/w.tar"}
    overrides.sweep({"/first"})
    assert overrides.list_stores() == {"/first"}
    assert overrides.list_archives() == {str(archive): "/w.tar"}
    archive.unlink()
    overrides.sweep()
    assert not list(folder.iterdir())
