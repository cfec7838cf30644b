"""Ways to damage a checkpoint: whole files, members of JSON; and the class of the fuzzer's cases."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "CANARY",
    "FILES",
    "INDEX",
    "MANIFEST",
    "MAY_BE_UNSEEN",
    "Base",
    "Case",
    "FileEdit",
    "at_path",
    "hex_digest",
    "json_cases",
    "raw",
    "repack",
    "rows",
    "text_at",
    "with_manifest",
    "written",
]

CANARY = Path("/var/canary")
"""A directory outside of the checkpoint. Nothing may ever be written there."""
MANIFEST = "checkpoint/gpusnap/manifest.json"
INDEX = "checkpoint/gpusnap/index.json"
FileEdit = Callable[[Path], object]


@dataclass(frozen=True)
class Base:
    """One undamaged checkpoint in all its forms."""

    tar: Path
    unpacked: Path
    store: Path

    def images(self) -> list[str]:
        return sorted(path.name for path in (self.unpacked / "checkpoint").glob("*.img"))


@dataclass(frozen=True)
class Case:
    """A damaged checkpoint. `make` writes it to an empty directory, and returns its locator."""

    name: str
    make: Callable[[Path], str]
    unseen: bool = False
    """Whether the damage may be in data without a digest, so that verify cannot find it."""
    podman: bool = True
    """Whether Podman may restore it without gpusnap: with some archives it waits for ever."""


def repack(base: Base, edit: Callable[[Path], object]) -> Callable[[Path], str]:
    """Return a `make` that edits the unpacked checkpoint and packs it as an archive."""

    def make(folder: Path) -> str:
        tree = folder / "unpacked"
        shutil.copytree(base.unpacked, tree, symlinks=True)
        edit(tree)
        with tarfile.open(folder / "archive.tar", "w") as tar:
            tar.add(tree, ".")
        shutil.rmtree(tree)
        return str(folder / "archive.tar")

    return make


def written(data: Callable[[], bytes], name: str = "archive.tar") -> Callable[[Path], str]:
    """Return a `make` that writes a file with the result of `data`."""

    def make(folder: Path) -> str:
        (folder / name).write_bytes(data())
        return str(folder / name)

    return make


def at_path(path: str, edit: FileEdit) -> FileEdit:
    """Return an edit of one file in a directory."""
    return lambda folder: edit(folder / path)


def text_at(path: str, text: str) -> FileEdit:
    """Return an edit that replaces the text of one file in a directory."""
    return lambda folder: (folder / path).write_bytes(raw(text))


# Files


def _link_file(path: Path) -> None:
    other = path.with_name(path.name + ".other")
    path.rename(other)
    path.symlink_to(other.name)


def _replace_file(make: FileEdit) -> FileEdit:
    def edit(path: Path) -> None:
        path.unlink()
        make(path)

    return edit


FILES: dict[str, FileEdit] = {
    "a byte short": lambda path: os.truncate(path, max(0, path.stat().st_size - 1)),
    "emptied": lambda path: os.truncate(path, 0),
    "halved": lambda path: os.truncate(path, path.stat().st_size // 2),
    "doubled": lambda path: path.write_bytes(path.read_bytes() * 2),
    "a link": _link_file,
    "a link to elsewhere": _replace_file(lambda path: path.symlink_to("/etc/passwd")),
    "a FIFO": _replace_file(os.mkfifo),
    "a directory": _replace_file(Path.mkdir),
    "a device": _replace_file(lambda path: os.mknod(path, 0o020600, os.makedev(1, 5))),
    "missing": Path.unlink,
    "of zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "sparse": lambda path: os.truncate(path, path.stat().st_size + (1 << 30)),
}
# CRIU may accept files with this damage, and no digest detects it.
MAY_BE_UNSEEN = ("of zeros", "doubled", "missing")


# JSON

Walked = tuple[tuple[str | int, ...], Any]


def _walk(document: Any, at: tuple[str | int, ...] = ()) -> Iterator[Walked]:
    """Yield the path and value of every member; of a list, only the first item."""
    if at:
        yield at, document
    if isinstance(document, dict):
        for key, value in document.items():
            yield from _walk(value, (*at, key))
    elif isinstance(document, list) and document:
        yield from _walk(document[0], (*at, 0))


_OTHER: dict[str, Callable[[Any], Any]] = {
    "null": lambda value: None,
    "of another type": lambda value: [value] if not isinstance(value, list) else {"a": 1},
    "huge": lambda value: 10**40 if not isinstance(value, str) else value + "x" * (1 << 20),
    "negative": lambda value: -1 if isinstance(value, int) else "",
    "deep": lambda value: json.loads("[" * 500 + "]" * 500),
    "odd": lambda value: "../../\u0000\n" if isinstance(value, str) else 0.5,
}


def _edit_member(document: Any, at: tuple[str | int, ...], how: str) -> str:
    """Return the document with one member changed, as text."""
    made = json.loads(json.dumps(document))
    parent = made
    for key in at[:-1]:
        parent = parent[key]
    if how == "removed":
        del parent[at[-1]]
    elif how == "twice in its list":
        parent.append(parent[at[-1]])
    else:
        parent[at[-1]] = _OTHER[how](parent[at[-1]])
    return json.dumps(made)


def json_cases(document: Any) -> Iterator[tuple[str, str]]:
    """Yield names and texts of changed documents: each member changed in each way, and malformed JSON."""
    for at, _ in _walk(document):
        ways = ["removed", *_OTHER, *(["twice in its list"] if isinstance(at[-1], int) else [])]
        for how in ways:
            yield f"{'.'.join(map(str, at))} {how}", _edit_member(document, at, how)
    text = json.dumps(document)
    for key in document:
        yield f"{key} twice", text[:-1] + f', "{key}": 1}}'
    yield "no object", "[]"
    yield "NaN", text[:-1] + ', "more": NaN}'
    yield "no JSON", text[:-1]
    yield "deep brackets", "[" * 200_000
    yield "no UTF-8", '{"\udcff": 1}'
    yield "spaces", text + " " * (1 << 20)
    yield "a long number", text[:-1] + ', "more": ' + "9" * 100_000 + "}"


def hex_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def with_manifest(text: str, *, named: bool) -> FileEdit:
    """Return an edit that replaces the manifest. `named`: also put its new digest into index.json."""

    def edit(tree: Path) -> None:
        path, index = tree / MANIFEST, tree / INDEX
        before = hex_digest(path.read_bytes())
        path.write_bytes(raw(text))
        if named:
            assert before in index.read_text()
            index.write_text(index.read_text().replace(before, hex_digest(raw(text))))

    return edit


def rows(document: Any) -> Iterator[tuple[str, str]]:
    """Yield names and texts of documents with damaged or swapped rows of chunks."""

    def changed(edit: Callable[[list[Any]], object]) -> str:
        made = json.loads(json.dumps(document))
        edit(made["processes"][0]["regions"][0]["chunks"])
        return json.dumps(made)

    def swap(rows: list[Any]) -> None:
        rows[0], rows[1] = rows[1], rows[0]

    def swap_digests(rows: list[Any]) -> None:
        rows[0][2:], rows[1][2:] = rows[1][2:], rows[0][2:]

    yield "rows swapped", changed(swap)
    yield "digests of rows swapped", changed(swap_digests)
    yield "a row gone", changed(lambda rows: rows.pop(0))
    yield "a row twice", changed(lambda rows: rows.append(rows[0]))
    yield "no rows", changed(lambda rows: rows.clear())
    yield "a row too long", changed(lambda rows: rows[0].append(1))
    yield "an offset odd", changed(lambda rows: rows[0].__setitem__(0, 7))
    yield "an offset outside", changed(lambda rows: rows[0].__setitem__(0, 1 << 50))
    yield "a size huge", changed(lambda rows: rows[0].__setitem__(1, 1 << 50))
