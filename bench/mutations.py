"""Checkpoints that are damaged or mean harm: archives, compressed ones, and stores, by hand and at random.

A case makes its checkpoint in a folder, and says whether its damage is one that nothing can see: content of
CRIU's images and of the engine's files has no digest in an archive (docs/format.md).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

__all__ = ["CANARY", "NAME_IN_STORE", "Base", "Case", "at_random", "by_hand"]

CANARY = Path("/var/canary")
"""A folder outside; nothing may ever be written there."""
NAME_IN_STORE = "fuzzed"
_MANIFEST = "checkpoint/gpusnap/manifest.json"
_INDEX = "checkpoint/gpusnap/index.json"
_BLOCK = 512


@dataclass(frozen=True)
class Base:
    """One right checkpoint in all its forms."""

    tar: Path
    unpacked: Path
    store: Path

    def images(self) -> list[str]:
        return sorted(path.name for path in (self.unpacked / "checkpoint").glob("*.img"))


@dataclass(frozen=True)
class Case:
    """`make` writes the checkpoint in an empty folder, and gives its locator."""

    name: str
    make: Callable[[Path], str]
    unseen: bool = False
    """Whether its damage may be in what has no digest, so that verify cannot find it."""


def _repacked(base: Base, edit: Callable[[Path], object]) -> Callable[[Path], str]:
    """An archive of the unpacked one after an edit."""

    def make(folder: Path) -> str:
        tree = folder / "unpacked"
        shutil.copytree(base.unpacked, tree, symlinks=True)
        edit(tree)
        with tarfile.open(folder / "archive.tar", "w") as tar:
            tar.add(tree, ".")
        shutil.rmtree(tree)
        return str(folder / "archive.tar")

    return make


def _of_bytes(data: Callable[[], bytes], name: str = "archive.tar") -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        (folder / name).write_bytes(data())
        return str(folder / name)

    return make


# Files

FileEdit = Callable[[Path], object]


def _linked(path: Path) -> None:
    other = path.with_name(path.name + ".other")
    path.rename(other)
    path.symlink_to(other.name)


def _replaced(make: FileEdit) -> FileEdit:
    def edit(path: Path) -> None:
        path.unlink()
        make(path)

    return edit


FILES: dict[str, FileEdit] = {
    "a byte short": lambda path: os.truncate(path, max(0, path.stat().st_size - 1)),
    "emptied": lambda path: os.truncate(path, 0),
    "halved": lambda path: os.truncate(path, path.stat().st_size // 2),
    "doubled": lambda path: path.write_bytes(path.read_bytes() * 2),
    "a link": _linked,
    "a link to elsewhere": _replaced(lambda path: path.symlink_to("/etc/passwd")),
    "a FIFO": _replaced(os.mkfifo),
    "a directory": _replaced(Path.mkdir),
    "a device": _replaced(lambda path: os.mknod(path, 0o020600, os.makedev(1, 5))),
    "missing": Path.unlink,
    "of zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "sparse": lambda path: os.truncate(path, path.stat().st_size + (1 << 30)),
}
# Of these CRIU may still make something, and no digest says otherwise.
_MAY_BE_UNSEEN = ("of zeros", "doubled", "missing")


# JSON

Walked = tuple[tuple[str | int, ...], Any]


def _walk(document: Any, at: tuple[str | int, ...] = ()) -> Iterator[Walked]:
    """Every member, of lists the first."""
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


def _edited(document: Any, at: tuple[str | int, ...], how: str) -> str:
    """The document with one member changed, as text."""
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


def _json_cases(document: Any) -> Iterator[tuple[str, str]]:
    """Its name and text: each member changed in each way; and texts that are hardly JSON."""
    for at, _ in _walk(document):
        ways = ["removed", *_OTHER, *(["twice in its list"] if isinstance(at[-1], int) else [])]
        for how in ways:
            yield f"{'.'.join(map(str, at))} {how}", _edited(document, at, how)
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


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _with_manifest(text: str, *, named: bool) -> FileEdit:
    """Another manifest; `named`: index.json has its digest, as if gpusnap had written it."""

    def edit(tree: Path) -> None:
        path, index = tree / _MANIFEST, tree / _INDEX
        before = _digest(path.read_bytes())
        path.write_bytes(_raw(text))
        if named:
            assert before in index.read_text()
            index.write_text(index.read_text().replace(before, _digest(_raw(text))))

    return edit


def _rows(document: Any) -> Iterator[tuple[str, str]]:
    """Rows of chunks that are moved about."""

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


# Tar

Member = tuple[tarfile.TarInfo, bytes]


def _members(base: Base) -> list[Member]:
    with tarfile.open(base.tar) as tar:
        found = []
        for info in tar:
            file = tar.extractfile(info) if info.isreg() else None
            found.append((info, file.read() if file is not None else b""))
        return found


def _written(members: list[Member], form: int = tarfile.GNU_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return out.getvalue()


def _info(name: str, kind: bytes = tarfile.REGTYPE, *, data: bytes = b"", link: str = "") -> Member:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = kind, len(data), link
    info.devmajor, info.devminor = 1, 5
    return info, data


_X = b"written by an archive"
ADDED: dict[str, list[Member]] = {
    "an absolute name": [_info(f"{CANARY}/x", data=_X)],
    "a name with ..": [_info(f"checkpoint/../../../../../../../..{CANARY}/x", data=_X)],
    "a link out, and a file in it": [
        _info("checkpoint/out", tarfile.SYMTYPE, link=str(CANARY)),
        _info("checkpoint/out/x", data=_X),
    ],
    "a link to a file outside": [_info("config.dump", tarfile.SYMTYPE, link=f"{CANARY}/x")],
    "a hard link outside": [_info("checkpoint/h", tarfile.LNKTYPE, link="/etc/passwd")],
    "a hard link with ..": [_info("checkpoint/h", tarfile.LNKTYPE, link="../../../etc/passwd")],
    "a hard link to nothing": [_info("checkpoint/h", tarfile.LNKTYPE, link="checkpoint/nothing")],
    "a device": [_info("checkpoint/device", tarfile.CHRTYPE)],
    "a block device": [_info("checkpoint/device", tarfile.BLKTYPE)],
    "a FIFO": [_info("checkpoint/fifo", tarfile.FIFOTYPE)],
    "the manifest again": [_info(_MANIFEST, data=b"{}")],
    "an image again": [_info("checkpoint/core-1.img", data=b"")],
    "config.dump again": [_info("config.dump", data=b"{}")],
    "gpusnap/ a link": [_info("checkpoint/gpusnap", tarfile.SYMTYPE, link="/etc")],
    "checkpoint/ a link": [_info("checkpoint", tarfile.SYMTYPE, link=str(CANARY))],
    "gpusnap/ a file": [_info("checkpoint/gpusnap", data=b"")],
    "a long name": [_info("checkpoint/" + "x/" * 5000, tarfile.DIRTYPE)],
    "a name of 300 bytes": [_info("checkpoint/" + "x" * 300, data=b"")],
    "a newline in a name": [_info("checkpoint/a\nb.img", data=_X)],
    "an empty name": [_info("", data=b"")],
    "an unknown type": [_info("checkpoint/odd", b"Z", data=_X)],
    "a contiguous file": [_info("checkpoint/odd", tarfile.CONTTYPE, data=_X)],
    "40000 empty files": [_info(f"checkpoint/many/{at}") for at in range(40_000)],
}


def _header_at(data: bytes, name: str) -> int:
    """Where the header of a member stands."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return next(info.offset for info in tar if info.name.removeprefix("./") == name)


def _patched(data: bytes, at: int, fields: dict[int, bytes], *, checksum: bool = True) -> bytes:
    """A header with other bytes at offsets in it."""
    header = bytearray(data[at : at + _BLOCK])
    for offset, value in fields.items():
        header[offset : offset + len(value)] = value
    if checksum:
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
    return data[:at] + bytes(header) + data[at + _BLOCK :]


def _size(value: int) -> dict[int, bytes]:
    return {124: b"%011o\0" % value}


# Offsets of fields in a header: tar(5), POSIX.1-1988 and GNU
HEADERS: dict[str, dict[int, bytes]] = {
    "a size of 8 GiB": _size((8 << 30) - 1),
    "a size of 2^70": {124: b"\x80\0\0\x40" + bytes(8)},
    "a negative size": {124: b"\xff" * 12},
    "a size that is no number": {124: b"zzzzzzzzzzz\0"},
    "a size without digits": {124: b" " * 12},
    "an odd mode": {100: b"77777777"},
    "huge owners": {108: b"\x80\xff\xff\xff\xff\xff\xff\xff", 116: b"\x80\xff\xff\xff\xff\xff\xff\xff"},
    "a time of 2^80": {136: b"\x80\x7f" + b"\xff" * 10},
    "of type sparse": {156: b"S"},
    "of type PAX": {156: b"x"},
    "of type PAX, global": {156: b"g"},
    "of type long name": {156: b"L"},
    "of type long link": {156: b"K"},
    "of type volume": {156: b"V"},
    "of type continued": {156: b"M"},
    "a directory with a size": {156: b"5"},
    "no magic": {257: bytes(8)},
    "a prefix": {345: b"/var/canary/" + bytes(20)},
}
PAX: dict[str, dict[str, str]] = {
    "size": {"size": str(1 << 60)},
    "size no number": {"size": "many"},
    "size negative": {"size": "-5"},
    "path": {"path": f"{CANARY}/x"},
    "a sparse file": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 50)},
    "a sparse map": {"GNU.sparse.map": "0,1,5", "GNU.sparse.size": str(1 << 40)},
    "a long value": {"comment": "x" * (1 << 21)},
}


def _pax_header(values: dict[str, str]) -> bytes:
    """An extended header as it stands before a member."""
    body = b""
    for key, value in values.items():
        text = f" {key}={value}\n".encode()
        length = len(text) + len(str(len(text)))
        length = len(text) + len(str(length))
        body += str(length).encode() + text
    info = tarfile.TarInfo("PaxHeaders/x")
    info.type, info.size = tarfile.XHDTYPE, len(body)
    return info.tobuf(tarfile.USTAR_FORMAT) + body + bytes(-len(body) % _BLOCK)


TARGETS = (_MANIFEST, "checkpoint/core-1.img", "config.dump")


def _tar_cases(base: Base) -> Iterator[Case]:
    members, data = _members(base), base.tar.read_bytes()
    for name, added in ADDED.items():
        for where in ("first", "last"):
            made = [*added, *members] if where == "first" else [*members, *added]
            unseen = "again" in name or "config.dump" in name or name == "an image again"
            yield Case(f"tar: {name}, {where}", _of_bytes(lambda made=made: _written(made)), unseen)
    for target in TARGETS:
        at = _header_at(data, target)
        for name, fields in HEADERS.items():
            changed = _patched(data, at, fields)
            unseen = target != _MANIFEST
            yield Case(f"tar: {target}: {name}", _of_bytes(lambda changed=changed: changed), unseen)
        wrong = _patched(data, at, {148: b"0000000\0"}, checksum=False)
        yield Case(f"tar: {target}: a wrong checksum", _of_bytes(lambda wrong=wrong: wrong))
        for name, values in PAX.items():
            changed = data[:at] + _pax_header(values) + data[at:]
            unseen = target != _MANIFEST or name == "a long value"
            yield Case(f"tar: {target}: PAX {name}", _of_bytes(lambda changed=changed: changed), unseen)
    ends: dict[str, bytes] = {
        "empty": b"",
        "zeros": bytes(1 << 20),
        "noise": random.Random(1).randbytes(1 << 16),
        "without its end": data.rstrip(b"\0"),
        "cut in a header": data[: _header_at(data, "checkpoint/core-1.img") + 100],
        "cut in data": data[: len(data) // 2],
        "twice": data + data,
        "noise behind its end": data + random.Random(2).randbytes(1 << 16),
        "zeros before it": bytes(1024) + data,
    }
    for name, changed in ends.items():
        yield Case(f"tar: {name}", _of_bytes(lambda changed=changed: changed))


# Compressed


def _compressed_cases(base: Base) -> Iterator[Case]:
    data = base.tar.read_bytes()
    import gzip

    for kind, made in (
        ("tar.zst", zstandard.ZstdCompressor(level=1, write_checksum=True).compress(data)),
        ("tar.gz", gzip.compress(data, 1)),
    ):
        chance = random.Random(kind)
        edits: dict[str, bytes] = {
            "as it was": made,
            "halved": made[: len(made) // 2],
            "a byte short": made[:-1],
            "its header alone": made[:10],
            "an empty one behind it": made
            + (zstandard.ZstdCompressor().compress(b"") if "zst" in kind else gzip.compress(b"")),
            "itself behind it": made + made,
            "noise behind it": made + chance.randbytes(5000),
            "noise before it": chance.randbytes(100) + made,
        }
        for at in range(6):
            place = chance.randrange(len(made))
            edits[f"bit {at} flipped"] = (
                made[:place] + bytes([made[place] ^ 1 << chance.randrange(8)]) + made[place + 1 :]
            )
        for name, changed in edits.items():
            yield Case(f"{kind}: {name}", _of_bytes(lambda changed=changed: changed, f"archive.{kind}"))
    # RFC 8878: a frame with the largest window, and a skippable frame of 4 GiB
    window = b"\x28\xb5\x2f\xfd\x00\xff" + b"\x01\x00\x00"
    yield Case("tar.zst: a huge window", _of_bytes(lambda: window, "archive.tar.zst"))
    skipped = b"\x50\x2a\x4d\x18\xff\xff\xff\xff"
    yield Case("tar.zst: a huge frame to skip", _of_bytes(lambda: skipped, "archive.tar.zst"))


# Stores


def _in_store(base: Base, edit: Callable[[Path], object]) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        shutil.copytree(base.store, folder / "store", symlinks=True)
        edit(folder / "store")
        return f"oci:{folder / 'store'}:{NAME_IN_STORE}"

    return make


def _blob(store: Path, digest: str) -> Path:
    return store / "blobs/sha256" / digest.removeprefix("sha256:")


def _root(store: Path) -> dict[str, Any]:
    index = json.loads((store / "index.json").read_text())
    found: dict[str, Any] = json.loads(_blob(store, index["manifests"][0]["digest"]).read_text())
    return found


def _again(store: Path, manifest: bytes) -> None:
    """Another artifact manifest in place of the first, with index.json naming it by its digest and size."""
    index = json.loads((store / "index.json").read_text())
    entry = index["manifests"][0]
    entry["digest"], entry["size"] = f"sha256:{_digest(manifest)}", len(manifest)
    _blob(store, entry["digest"]).write_bytes(manifest)
    (store / "index.json").write_text(json.dumps(index))


def _with_layer(at: int | None, change: Callable[[bytes], bytes]) -> FileEdit:
    """A config (None) or a layer that is something else, by its right digest."""

    def edit(store: Path) -> None:
        manifest = _root(store)
        entry = manifest["config"] if at is None else manifest["layers"][at]
        data = change(_blob(store, entry["digest"]).read_bytes())
        entry["digest"], entry["size"] = f"sha256:{_digest(data)}", len(data)
        _blob(store, entry["digest"]).write_bytes(data)
        _again(store, json.dumps(manifest).encode())

    return edit


def _store_cases(base: Base) -> Iterator[Case]:
    manifest = _root(base.store)
    digests = {"config": manifest["config"]["digest"]}
    digests |= {f"layer {at}": each["digest"] for at, each in enumerate(manifest["layers"][:3])}
    digests["the last layer"] = manifest["layers"][-1]["digest"]
    index = json.loads((base.store / "index.json").read_text())
    digests["manifest"] = index["manifests"][0]["digest"]
    for what, digest in digests.items():
        for name, edit in FILES.items():
            yield Case(
                f"store: {what} {name}",
                _in_store(base, lambda s, edit=edit, digest=digest: edit(_blob(s, digest))),
            )
    for file in ("index.json", "oci-layout", "known.json", "lock"):
        for name, edit in FILES.items():
            if (base.store / file).exists():
                yield Case(
                    f"store: {file} {name}", _in_store(base, lambda s, edit=edit, file=file: edit(s / file))
                )
    for name, text in _json_cases(index):
        yield Case(
            f"store: index.json: {name}",
            _in_store(base, lambda s, text=text: (s / "index.json").write_bytes(_raw(text))),
        )
    for name, text in _json_cases(manifest):
        yield Case(
            f"store: manifest: {name}", _in_store(base, lambda s, text=text: _again(s, _raw(text))), True
        )
    record = json.loads(_blob(base.store, manifest["config"]["digest"]).read_text())
    for name, text in (*_json_cases(record), *_rows(record)):
        yield Case(
            f"store: config: {name}", _in_store(base, _with_layer(None, lambda data, text=text: _raw(text))), True
        )
    for name, change in {
        "halved": lambda data: data[: len(data) // 2],
        "empty": lambda data: b"",
        "noise": lambda data: random.Random(3).randbytes(len(data)),
        "zeros": lambda data: zstandard.ZstdCompressor().compress(bytes(1 << 20)),
    }.items():
        for at in range(min(3, len(manifest["layers"]))):
            yield Case(f"store: layer {at} by its digest: {name}", _in_store(base, _with_layer(at, change)))


def by_hand(base: Base) -> dict[str, list[Case]]:
    """All that was thought of, by what is damaged."""
    found: dict[str, list[Case]] = {"images": [], "other files": []}
    for image in base.images():
        for name, edit in FILES.items():
            made = _repacked(base, lambda tree, edit=edit, image=image: edit(tree / "checkpoint" / image))
            found["images"].append(Case(f"{image} {name}", made, name in _MAY_BE_UNSEEN))
    blobs = sorted(path.name for path in (base.unpacked / "checkpoint/gpusnap/blobs/sha256").iterdir())
    others = [_INDEX, "checkpoint/gpusnap/oci-layout", _MANIFEST, "config.dump", "spec.dump"]
    for path in [*(f"checkpoint/gpusnap/blobs/sha256/{name}" for name in blobs[:2]), *others]:
        for name, edit in FILES.items():
            made = _repacked(base, lambda tree, edit=edit, path=path: edit(tree / path))
            unseen = path in ("config.dump", "spec.dump")
            found["other files"].append(Case(f"{Path(path).name[:12]} {name}", made, unseen))
    record = json.loads((base.unpacked / _MANIFEST).read_text())
    found["manifest"] = [
        Case(f"manifest: {name}", _repacked(base, _with_manifest(text, named=True)), True)
        for name, text in (*_json_cases(record), *_rows(record))
    ]
    text = json.dumps(record) + " "
    unnamed = _repacked(base, _with_manifest(text, named=False))
    found["manifest"].append(Case("manifest: not the named one", unnamed))
    for file, group in ((_INDEX, "index"), ("config.dump", "engine's files"), ("spec.dump", "engine's files")):
        for name, text in _json_cases(json.loads((base.unpacked / file).read_text())):
            made = _repacked(base, lambda tree, text=text, file=file: (tree / file).write_bytes(_raw(text)))
            found.setdefault(group, []).append(Case(f"{Path(file).name}: {name}", made, True))
    found["tar"], found["compressed"] = [*_tar_cases(base)], [*_compressed_cases(base)]
    found["store, its files"], found["store, its JSON"] = [], []
    for case in _store_cases(base):
        found["store, its JSON" if ": " in case.name[7:] else "store, its files"].append(case)
    return found


# At random


def at_random(base: Base, number: int) -> Case:
    """The archive, or a store, with some bits flipped, pieces cut out, or pieces put elsewhere."""
    chance = random.Random(number)
    how = chance.choice(["flips", "cut", "out", "over", "in"])
    if chance.random() < 0.3:
        path = chance.choice(sorted((base.store / "blobs/sha256").iterdir()))

        def edit(store: Path) -> None:
            target = store / "blobs/sha256" / path.name
            target.chmod(0o600)
            target.write_bytes(_mangled(target.read_bytes(), how, random.Random(number)))

        return Case(f"random {number}: store, {how}", _in_store(base, edit))
    data = _mangled(base.tar.read_bytes(), how, chance)
    return Case(f"random {number}: tar, {how}", _of_bytes(lambda: data), True)


def _mangled(data: bytes, how: str, chance: random.Random) -> bytes:
    made = bytearray(data)
    if not made:
        return b"x"
    start = chance.randrange(len(made))
    length = min(chance.choice([1, 7, 512, 5120, 100_000]), len(made) - start)
    other = chance.randrange(len(made))
    if how == "flips":
        for _ in range(chance.choice([1, 1, 2, 8, 100])):
            made[chance.randrange(len(made))] ^= 1 << chance.randrange(8)
    elif how == "cut":
        del made[start:]
    elif how == "out":
        del made[start : start + length]
    elif how == "over":
        made[start : start + length] = made[other : other + length]
    else:
        made[start:start] = made[other : other + length]
    return bytes(made)
