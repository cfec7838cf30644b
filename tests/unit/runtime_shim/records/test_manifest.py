"""The manifest: what is written comes back, what is not one is refused, and the last step cannot fail."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import POISON, a_manifest, uuid
from hypothesis import given
from hypothesis import strategies as st

from gpusnap.oci.chunks.table import Chunk, Table
from gpusnap.oci.layout.digests import digest_of
from gpusnap.oci.layout.documents import Index
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.base.errors import GpusnapError, ImageError, ManifestError, ManifestVersion
from gpusnap.runtime_shim.base.transaction import Step
from gpusnap.runtime_shim.records import manifest, manifest_file, manifest_json
from gpusnap.runtime_shim.records.manifest import (
    DriverMount,
    FileRecord,
    GpuProcess,
    GpuRecord,
    HostRecord,
    Manifest,
    NeutralisedProcess,
    RegionRecord,
)
from gpusnap.runtime_shim.records.manifest_file import Draft
from gpusnap.runtime_shim.records.manifest_json import decode, encode

TEXT = st.text(min_size=1, max_size=20)
SIZES = st.integers(0, 1 << 50)
SECONDS = st.floats(0, 1e6).map(lambda value: round(value, 6))


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Any manifest that gpusnap may write."""
    uuids = draw(st.lists(st.integers(0, 255).map(uuid), min_size=1, max_size=4, unique=True))
    gpus = [
        GpuRecord(each, draw(st.integers(0, 255)), at, draw(TEXT), "9.0", draw(SIZES), draw(SIZES))
        for at, each in enumerate(uuids)
    ]
    pids = draw(st.lists(st.integers(1, 4194304), min_size=1, max_size=4, unique=True))
    processes = [
        GpuProcess(
            pid,
            draw(st.text(max_size=15)),
            tuple(draw(st.lists(st.text(st.characters(), max_size=8), max_size=3))),
            tuple((each, draw(SIZES)) for each in draw(st.permutations(uuids))[: draw(st.integers(0, 4))]),
        )
        for pid in pids
    ]
    mounts = [
        DriverMount(f"gpusnap-{at}", f"/d{at}", f"/s/{draw(TEXT)}") for at in range(draw(st.integers(0, 2)))
    ]
    return Manifest(
        created="2026-01-02T03:04:05Z",
        container=draw(TEXT),
        host=HostRecord("x86_64", draw(TEXT), "nvidia", draw(TEXT), "13.0", draw(TEXT), "crun", draw(TEXT)),
        gpus=tuple(gpus),
        processes=tuple(processes),
        mounts=tuple(mounts),
        timing=tuple(Step(draw(TEXT), draw(SECONDS), draw(SECONDS)) for _ in range(draw(st.integers(0, 3)))),
    )


@given(manifests())
def test_round_trip(record: Manifest) -> None:
    """What is encoded is decoded again, whatever it holds."""
    assert decode(encode(record), "here") == record


def test_a_name_that_is_no_utf8_comes_back() -> None:
    """A command line with undecodable bytes, as proc.command gives it, survives."""
    process = GpuProcess(1, "a\udcff", ("a\udcff", "\udc80"), ((uuid(0), 1),))
    record = replace(a_manifest(), processes=(process,))
    assert decode(encode(record), "here") == record


NEUTRALISED = (
    NeutralisedProcess(41, "python3", ((4, "/dev/nvidiactl"), (5, "/dev/nvidia0")), 2, 8192),
    NeutralisedProcess(42, "python3", (), 0, 0),
)


def document() -> dict[str, Any]:
    record = replace(a_manifest(pids=(1, 2)), neutralised=NEUTRALISED)
    found: dict[str, Any] = json.loads(encode(record))
    return found


def test_neutralised_twice() -> None:
    """A process stands there once."""
    whole = document()
    whole["neutralised"] = [whole["neutralised"][0]] * 2
    assert "lists the neutralised process 41 twice" in refused(whole)


def test_neutralised_may_be_left_out() -> None:
    """Nothing is written where there was none, and a manifest without it is read."""
    plain: dict[str, Any] = json.loads(encode(a_manifest()))
    assert "neutralised" not in plain
    assert decode(json.dumps(plain).encode(), "here").neutralised == ()
    record = replace(a_manifest(), neutralised=NEUTRALISED)
    assert decode(encode(record), "here").neutralised == NEUTRALISED


def refused(changed: Any) -> str:
    with pytest.raises(ManifestError) as caught:
        decode(json.dumps(changed).encode(), "here")
    assert str(caught.value).startswith("here")
    return str(caught.value)


def test_a_schema_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a file of gpusnap's own."""
    manifest_json._validator.cache_clear()
    monkeypatch.setattr(os.path, "dirname", lambda _: "/nowhere")
    with pytest.raises(GpusnapError, match=r"its own file /nowhere/manifest\.schema\.json: it does not"):
        decode(encode(a_manifest()), "here")


def members(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of everything in a document."""
    if path:
        yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from members(inner, (*path, key))


def changed(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """The document with one value replaced."""
    whole = document()
    place: Any = whole
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return whole


@pytest.mark.parametrize("path", list(members(document())), ids=lambda path: "/".join(map(str, path)))
@pytest.mark.parametrize("wrong", [None, True, 1.5, -1, "", "\n", [], [None], {}], ids=repr)
def test_a_wrong_type_is_refused(path: tuple[str | int, ...], wrong: Any) -> None:
    """At every place, a value of another type is refused, or means something that can be written again."""
    text = json.dumps(changed(path, wrong)).encode()
    try:
        record = decode(text, "here")
    except ManifestError:
        return
    assert decode(encode(record), "here") == record
    if wrong is None or wrong is True or wrong == {}:
        pytest.fail(f"{path} may be {wrong!r}")


@pytest.mark.parametrize(
    "path",
    [path for path in members(document()) if not isinstance(path[-1], int) and path != ("neutralised",)],
    ids=str,
)
def test_a_missing_member_is_refused(path: tuple[str | int, ...]) -> None:
    """Every member but one is required."""
    whole = document()
    place: Any = whole
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    assert repr(path[-1]) in refused(whole)


@pytest.mark.parametrize(
    "path",
    [
        ("version",),
        ("created",),
        ("gpus", 0, "uuid"),
        ("gpus", 0, "computeCapability"),
        ("processes", 0, "gpus", 0, "uuid"),
    ],
    ids=str,
)
def test_a_trailing_newline_is_refused(path: tuple[str | int, ...]) -> None:
    """Python's $ matches before a newline at the end; the schema's patterns do not."""
    place: Any = document()
    for key in path:
        place = place[key]
    refused(changed(path, place + "\n"))


@pytest.mark.parametrize("number", [1 << 51, 10**400, float("inf"), float("nan"), -0.5], ids=repr)
@pytest.mark.parametrize("path", [("gpus", 0, "memoryTotal"), ("timing", 0, "seconds")], ids=str)
def test_numbers_have_bounds(path: tuple[str | int, ...], number: float) -> None:
    """A number that nothing real has is refused, the ones that only Python reads as JSON included."""
    refused(changed(path, number))


def test_an_integer_written_as_a_float() -> None:
    """7.0 is an integer to JSON Schema, and so it is to us."""
    record = decode(json.dumps(changed(("gpus", 0, "memoryUsed"), 7.0)).encode(), "here")
    assert type(record.gpus[0].memory_used) is int


def test_duplicates_are_refused() -> None:
    """A GPU, a process, a mount twice; and a GPU twice in one process."""
    for key, what in (("gpus", "GPU"), ("processes", "process")):
        whole = document()
        whole[key] = [whole[key][0]] * 2
        assert f"lists the {what} " in refused(whole)
    whole = document()
    whole["processes"][0]["gpus"] *= 2
    assert "GPU of process 1" in refused(whole)
    whole = document()
    whole["mounts"] = [{"key": f"gpusnap-{at}", "destination": "/a", "source": "/b"} for at in range(2)]
    assert "lists the mount /a twice" in refused(whole)
    whole["mounts"] = [{"key": "gpusnap-0", "destination": f"/{at}", "source": "/b"} for at in range(2)]
    assert "lists the mount key gpusnap-0 twice" in refused(whole)


def with_blake3() -> tuple[Manifest, Manifest]:
    """A manifest with chunks in a region and in an image, with BLAKE3 and without."""

    def made(blake3: str) -> Manifest:
        digest = digest_of(b"a")
        table = Table(4096, (Chunk(0, 4096, digest, digest, 4096, "plain", blake3),))
        plain = a_manifest()
        processes = (replace(plain.processes[0], regions=(RegionRecord(4096, table),)),)
        return replace(plain, pages="store", processes=processes, files=(FileRecord("pages-1.img", table),))

    return made("ab" * 32), made("")


def test_blake3() -> None:
    """It comes back, of regions and images; a list that cannot be right is refused."""
    record, _ = with_blake3()
    assert decode(encode(record), "here") == record
    for owner in (("processes", 0, "regions", 0), ("files", 0)):
        for wrong, words in (([], "not have as many"), (["AB" * 32], "BLAKE3 digest that is none"), ({}, "")):
            whole = json.loads(encode(record))
            found = whole
            for step in owner:
                found = found[step]
            found["blake3"] = wrong
            assert words in refused(whole)


def test_a_large_manifest_leaves_blake3_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fitted before fits now; it only makes a restore quicker."""
    record, without = with_blake3()
    most = len(encode(without))
    monkeypatch.setattr(manifest_json, "LARGEST", most)
    assert decode(encode(record), "here") == without
    monkeypatch.setattr(manifest_json, "LARGEST", most - 1)
    with pytest.raises(ManifestError, match="the new manifest has"):
        encode(record)


def test_a_process_with_an_unknown_gpu() -> None:
    """A process may only have GPUs that are listed."""
    said = refused(changed(("processes", 1, "gpus", 0, "uuid"), uuid(9)))
    assert said == f"here: process 2 has a GPU {uuid(9)} that is not listed"


@pytest.mark.parametrize(
    ("path", "most"), [(("gpus",), 256), (("timing",), 4096), (("mounts",), 4096)], ids=str
)
def test_lists_have_a_longest_length(path: tuple[str, ...], most: int) -> None:
    """No list may be longer than anything real."""
    refused(changed(path, [{}] * (most + 1)))


@pytest.mark.parametrize("text", [b"[]", b"1", b'"1.0"', b"null", b"{}"])
def test_other_json(text: bytes) -> None:
    """JSON that is no object, or an empty one, is refused."""
    with pytest.raises(ManifestError):
        decode(text, "here")


def test_cut_short_at_every_byte() -> None:
    """However much of the end is missing, it is a ManifestError."""
    text = encode(a_manifest())
    for end in range(len(text.rstrip())):
        with pytest.raises(ManifestError, match=r"here is cut short or not JSON"):
            decode(text[:end], "here")


def test_deep_nesting() -> None:
    """A document that is nested too deep for the parser is refused."""
    with pytest.raises(ManifestError):
        decode(b"[" * 100_000, "here")


@pytest.mark.parametrize("version", ["2.0", "0.9", "10.0", "next"])
def test_unknown_major_version(version: str) -> None:
    """Another major version is refused by name, whatever else has changed in it."""
    with pytest.raises(ManifestVersion) as caught:
        decode(json.dumps({"version": version}).encode(), "here")
    assert f"version '{version}'" in str(caught.value)
    assert "1.x" in str(caught.value)


def test_a_later_minor_version_and_unknown_members() -> None:
    """What a later 1.x adds is ignored."""
    whole = document()
    whole["version"] = "1.42"
    for place in (whole, whole["host"], whole["gpus"][0], whole["processes"][0]):
        place["new"] = {"x": [1]}
    record = decode(json.dumps(whole).encode(), "here")
    assert replace(record, version="1.0") == replace(a_manifest(pids=(1, 2)), neutralised=NEUTRALISED)


# On disk.


def folder_of(image: Path) -> Path:
    return image / manifest.FOLDER


def names(image: Path) -> list[str]:
    return sorted(path.name for path in folder_of(image).iterdir()) if folder_of(image).exists() else []


def test_draft_becomes_the_manifest(tmp_path: Path) -> None:
    """It is not there before the end, and then it is, whole and alone."""
    draft = Draft(str(tmp_path))
    draft.begin()
    assert manifest_file.is_ours(str(tmp_path))
    with pytest.raises(ManifestError, match="incomplete"):
        manifest_file.read(str(tmp_path))
    draft.prepare(a_manifest())
    with pytest.raises(ManifestError, match="incomplete") as caught:
        manifest_file.read(str(tmp_path))
    assert caught.value.hint == "the checkpoint was interrupted while it was being written"
    (tmp_path / "inventory.img").touch()
    with pytest.raises(ManifestError, match="incomplete") as caught:
        manifest_file.read(str(tmp_path))
    assert "rename gpusnap/manifest.pending to manifest.json" in caught.value.hint
    (tmp_path / "inventory.img").unlink()
    better = replace(a_manifest(), timing=(Step("dump", 0.0, 1.0),))
    draft.finish(better)
    assert manifest_file.read(str(tmp_path)) == better
    assert names(tmp_path) == ["manifest.json"]


def test_discard_leaves_nothing(tmp_path: Path) -> None:
    """Taken back, the image has no folder of ours; taking it back again does no harm."""
    draft = Draft(str(tmp_path))
    draft.begin()
    draft.prepare(a_manifest())
    draft.discard()
    draft.discard()
    assert list(tmp_path.iterdir()) == []
    assert not manifest_file.is_ours(str(tmp_path))


def test_an_earlier_manifest_stays_until_the_dump(tmp_path: Path) -> None:
    """begin and discard keep it; prepare, right before the dump overwrites its images, takes it away."""
    first = Draft(str(tmp_path))
    first.begin()
    first.prepare(a_manifest())
    first.finish(a_manifest())
    draft = Draft(str(tmp_path))
    draft.begin()
    assert manifest_file.read(str(tmp_path)) == a_manifest()
    draft.discard()
    assert manifest_file.read(str(tmp_path)) == a_manifest()
    draft.prepare(a_manifest())
    with pytest.raises(ManifestError, match="incomplete"):
        manifest_file.read(str(tmp_path))


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """A disk that is full after so many bytes of a file (setrlimit(2), RLIMIT_FSIZE)."""
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN  # Python's default: EFBIG, and no death
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_found_before_the_dump(tmp_path: Path) -> None:
    """prepare raises, and the manifest of an earlier checkpoint is still there."""
    draft = Draft(str(tmp_path))
    draft.begin()
    draft.prepare(a_manifest())
    draft.finish(a_manifest())
    with largest_file(100), pytest.raises(ImageError, match=r"manifest\.pending cannot be written"):
        draft.prepare(a_manifest(pids=(7,)))
    assert manifest_file.read(str(tmp_path)) == a_manifest()


def test_a_full_disk_after_the_dump(tmp_path: Path) -> None:
    """finish falls back to the manifest that is on disk already."""
    draft = Draft(str(tmp_path))
    draft.begin()
    draft.prepare(a_manifest())
    with largest_file(100):
        draft.finish(replace(a_manifest(), timing=()))
    assert manifest_file.read(str(tmp_path)) == a_manifest()
    assert names(tmp_path) == ["manifest.json"]


@pytest.mark.parametrize("step", ["begin", "prepare", "finish"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, step: str) -> None:
    """A file in the place of the folder: an ImageError that names it, in words that Podman leaves alone."""
    image = tmp_path / "image"
    draft = Draft(str(image))
    image.touch()
    steps: dict[str, Callable[[], object]] = {
        "begin": draft.begin,
        "prepare": lambda: draft.prepare(a_manifest()),
        "finish": lambda: draft.finish(a_manifest()),
    }
    with pytest.raises(ImageError) as caught:
        steps[step]()
    assert str(image) in str(caught.value)
    assert not [words for words in POISON if words in caught.value.sentence().lower()]


def test_a_link_in_the_place_of_the_draft(tmp_path: Path) -> None:
    """A symbolic link in an image from elsewhere is not followed, but replaced."""
    target = tmp_path / "precious"
    target.write_text("as it was", "ascii")
    folder_of(tmp_path).mkdir()
    os.symlink(target, folder_of(tmp_path) / "manifest.pending")
    Draft(str(tmp_path)).begin()
    assert target.read_text("ascii") == "as it was"
    assert not (folder_of(tmp_path) / "manifest.pending").is_symlink()


def with_layout(folder: Path, record: manifest.Manifest) -> Path:
    """An image whose manifest was written beside a layout; its index."""
    draft = Draft(str(folder))
    draft.begin()
    layout = Layout(folder_of(folder)).create()
    layout.write_index(Index())
    draft.prepare(record)
    draft.finish(record)
    return folder_of(folder) / "index.json"


def test_the_digest_is_in_the_index(tmp_path: Path) -> None:
    """The index beside a manifest names its digest; another manifest is refused, though it is a right one."""
    index = with_layout(tmp_path, a_manifest())
    path = folder_of(tmp_path) / "manifest.json"
    digest = json.loads(index.read_text())["annotations"][manifest.DIGEST]
    assert digest == digest_of(path.read_bytes())
    assert Layout(folder_of(tmp_path)).read_index().manifests == ()
    assert manifest_file.read(str(tmp_path)) == a_manifest()
    path.write_bytes(encode(replace(a_manifest(), processes=())))
    with pytest.raises(ManifestError, match="is not the manifest that was written with this checkpoint"):
        manifest_file.read(str(tmp_path))


def test_an_index_without_the_digest(tmp_path: Path) -> None:
    """Checkpoints that were made before it was noted are read as ever."""
    with_layout(tmp_path, a_manifest())
    Layout(folder_of(tmp_path)).write_index(Index())
    assert manifest_file.read(str(tmp_path)) == a_manifest()


def test_a_name_that_stands_twice(tmp_path: Path) -> None:
    """Which of two lists of processes counts is not left to the parser."""
    text = encode(a_manifest()).decode().rstrip().removesuffix("}")
    with pytest.raises(ManifestError, match="has the member 'processes' twice"):
        manifest_json.decode(f'{text}, "processes": []}}'.encode(), "m")


def test_read_refuses_what_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest beyond all measure is not even parsed."""
    folder_of(tmp_path).mkdir()
    (folder_of(tmp_path) / "manifest.json").write_bytes(encode(a_manifest()))
    assert manifest_file.read(str(tmp_path)) == a_manifest()
    monkeypatch.setattr(manifest_file, "LARGEST", 100)
    with pytest.raises(ManifestError, match="100 are allowed"):
        manifest_file.read(str(tmp_path))


def test_read_without_a_manifest(tmp_path: Path) -> None:
    """No manifest, or a directory in its place: a ManifestError."""
    with pytest.raises(ManifestError, match=r"has no gpusnap/manifest\.json"):
        manifest_file.read(str(tmp_path))
    (folder_of(tmp_path) / "manifest.json").mkdir(parents=True)
    with pytest.raises(ManifestError, match="cannot be read"):
        manifest_file.read(str(tmp_path))


# From anywhere.

CORPUS = Path(__file__).parents[2] / "corpus" / "manifest"
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: str(path.stem))
def test_corpus(path: Path) -> None:
    """What was once found, or thought of: refused where its name says bad, read where it says good."""
    if path.name.startswith("good-"):
        assert decode(path.read_bytes(), "here").gpus
    else:
        with pytest.raises(ManifestError, match=r"^here"):
            decode(path.read_bytes(), "here")


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    """Whatever a file holds, it is a manifest or a ManifestError."""
    with contextlib.suppress(ManifestError):
        decode(data, "here")


@given(st.data())
def test_any_value_anywhere(data: st.DataObject) -> None:
    """A valid document with one value replaced by anything: a manifest that can be written, or refused."""
    whole = document()
    path = data.draw(st.sampled_from(list(members(whole))))
    try:
        record = decode(json.dumps(changed(path, data.draw(ANY))).encode(), "here")
    except ManifestError:
        return
    assert decode(encode(record), "here") == record
