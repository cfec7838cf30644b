"""Stores with damaged blobs, documents and index; also damage that leaves every digest right."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import zstandard
from mutations import FILES, Base, Case, FileEdit, at_path, hex_digest, json_cases, raw, rows, text_at

__all__ = ["NAME_IN_STORE", "in_store", "store_cases"]

NAME_IN_STORE = "fuzzed"


def in_store(base: Base, edit: FileEdit) -> Callable[[Path], str]:
    """Return a `make` that copies the store and edits the copy."""

    def make(folder: Path) -> str:
        shutil.copytree(base.store, folder / "store", symlinks=True)
        edit(folder / "store")
        return f"oci:{folder / 'store'}:{NAME_IN_STORE}"

    return make


def _at(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _blob(store: Path, digest: str) -> Path:
    return store / _at(digest)


def _replace_blob(text: str, _: bytes) -> bytes:
    return raw(text)


def _root(store: Path) -> dict[str, Any]:
    index = json.loads((store / "index.json").read_text())
    found: dict[str, Any] = json.loads(_blob(store, index["manifests"][0]["digest"]).read_text())
    return found


def _digest_again(store: Path, manifest: bytes) -> None:
    """Replace the first artifact manifest, and put the new digest and size into index.json."""
    index = json.loads((store / "index.json").read_text())
    entry = index["manifests"][0]
    entry["digest"], entry["size"] = f"sha256:{hex_digest(manifest)}", len(manifest)
    _blob(store, entry["digest"]).write_bytes(manifest)
    (store / "index.json").write_text(json.dumps(index))


def _with_layer(at: int | None, change: Callable[[bytes], bytes]) -> FileEdit:
    """Return an edit that changes the config (None) or a layer, with right digests in the manifest."""

    def edit(store: Path) -> None:
        manifest = _root(store)
        entry = manifest["config"] if at is None else manifest["layers"][at]
        data = change(_blob(store, entry["digest"]).read_bytes())
        entry["digest"], entry["size"] = f"sha256:{hex_digest(data)}", len(data)
        _blob(store, entry["digest"]).write_bytes(data)
        _digest_again(store, json.dumps(manifest).encode())

    return edit


def store_cases(base: Base) -> Iterator[Case]:
    """Yield cases with damaged files, and with changed documents that have the right digests."""
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
                in_store(base, at_path(_at(digest), edit)),
            )
    for file in ("index.json", "oci-layout", "known.json", "lock"):
        for name, edit in FILES.items():
            if (base.store / file).exists():
                yield Case(f"store: {file} {name}", in_store(base, at_path(file, edit)))
    for name, text in json_cases(index):
        yield Case(
            f"store: index.json: {name}",
            in_store(base, text_at("index.json", text)),
        )
    for name, text in json_cases(manifest):
        yield Case(
            f"store: manifest: {name}", in_store(base, partial(_digest_again, manifest=raw(text))), True
        )
    record = json.loads(_blob(base.store, manifest["config"]["digest"]).read_text())
    for name, text in (*json_cases(record), *rows(record)):
        yield Case(
            f"store: config: {name}",
            in_store(base, _with_layer(None, partial(_replace_blob, text))),
            True,
        )
    changes: dict[str, Callable[[bytes], bytes]] = {
        "halved": lambda data: data[: len(data) // 2],
        "empty": lambda data: b"",
        "noise": lambda data: random.Random(3).randbytes(len(data)),
        "zeros": lambda data: zstandard.ZstdCompressor().compress(bytes(1 << 20)),
    }
    for name, change in changes.items():
        for at in range(min(3, len(manifest["layers"]))):
            yield Case(f"store: layer {at} by its digest: {name}", in_store(base, _with_layer(at, change)))
