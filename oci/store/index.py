"""The index.json of a store: its content by name and by digest. Another tool may have written it.

image-spec v1.1, image-layout.md: the index lists descriptors; the name of one is its annotation
`org.opencontainers.image.ref.name`. Podman, skopeo and oras write such files, with other members too. So
gpusnap edits the parsed JSON: everything that a change does not concern keeps its value and place.

- A name belongs to one digest. A digest may have several names, each in an entry of its own, or none.
- A name without a tag, such as "server", also means the newest server:TAG; see gpusnap.oci.store.tags.
- If a name moves and its old digest has no other name, an entry without a name remains: nothing is lost.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from gpusnap.oci.base import dataclass
from gpusnap.oci.base.errors import Ambiguous, DiskFull, LayoutError, NotThere, StoreError, disk_error, reason
from gpusnap.oci.base.files import open_nested_folder, read_regular, replace
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.layout.documents import DOCUMENT_LIMIT, Descriptor, Index, encode_document
from gpusnap.oci.store.tags import Entry, base, format_names, newest, select_tagged

REF_NAME = "org.opencontainers.image.ref.name"
CREATED = "org.opencontainers.image.created"

# image-spec, annotations.md, org.opencontainers.image.ref.name.
_NAME = compile_later(r"[A-Za-z0-9]+(?:(?:--|[-._:@/+])[A-Za-z0-9]+)*", re.ASCII)
_LONGEST_NAME = 255
_PREFIX = compile_later(r"(?:sha256:)?([0-9a-f]{6,64})", re.ASCII)
_NEAR = 3


def check_name(name: str) -> str:
    """Return `name`, if it is a valid new name. Raises StoreError."""
    if len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
        raise StoreError(
            f"{name[:80]!r} is not a valid name: use up to {_LONGEST_NAME} letters and digits, with "
            "single - . _ : @ / + between them"
        )
    if _PREFIX.fullmatch(name) or re.match(r"sha(256|384|512):", name):
        raise StoreError(f"{name[:80]!r} is not a valid name: it looks like a digest; add another letter")
    return name


class Catalog:
    """An index as it was read; `write` writes it back. Not thread-safe."""

    def __init__(self, path: str) -> None:
        """Read that of the layout at `path`. Raises LayoutError."""
        self.path = path
        self._removing = False
        try:
            with open_nested_folder(path) as folder:
                data = read_regular("index.json", folder, limit=DOCUMENT_LIMIT)
            self._value: dict[str, Any] = parse_json(data)
        except OSError as error:
            raise LayoutError(f"{path}/index.json cannot be read: {reason(error)}") from error
        except (ValueError, RecursionError) as error:
            raise LayoutError(f"{path}/index.json cannot be read: {error}") from error
        Index.from_json(self._value)
        self._entries: list[dict[str, Any]] = self._value["manifests"]

    def entries(self) -> tuple[Entry, ...]:
        """Return all entries, in their order."""
        found = [(Descriptor.from_json(each), _notes(each)) for each in self._entries]
        return tuple(Entry(notes.get(REF_NAME, ""), at, notes.get(CREATED, "")) for at, notes in found)

    def find(self, wanted: str, created: Callable[[Entry], str] = lambda entry: entry.created) -> Entry:
        """Return the entry of a name, a digest, or the first digits of one (6 or more).

        A name comes first, then a digest, and then, for a name without a tag, the newest that has one. If the
        start of a digest is also such a name, neither is used. created: returns when an entry was made (RFC
        3339). Raises NotThere, Ambiguous.
        """
        entries = self.entries()
        found, tags = self._find_exact(wanted, entries), select_tagged(wanted, entries)
        if tags and not found:
            return newest(wanted, tags, created, self.path)
        one = self._get_one(wanted, found, entries)
        digest = one.descriptor.digest
        if tags and wanted not in (one.name, digest, digest.partition(":")[2]):
            names = format_names([digest, *(each.name for each in tags)])
            raise Ambiguous(
                f"{wanted!r} in {self.path} is ambiguous, both a name and the beginning of a digest: {names}"
            )
        return one

    def find_exactly(self, wanted: str) -> Entry:
        """The same, but a name without a tag only means itself. Raises NotThere, Ambiguous."""
        entries = self.entries()
        return self._get_one(wanted, self._find_exact(wanted, entries), entries)

    def _find_exact(self, wanted: str, entries: Sequence[Entry]) -> list[Entry]:
        """Return all with that name; if there is none, with that digest, or one that begins so."""
        found = [each for each in entries if each.name == wanted] if wanted else []
        begin = _PREFIX.fullmatch(wanted)
        if not found:
            digest = f"sha256:{begin[1]}" if begin else wanted
            found = [each for each in entries if each.descriptor.digest == digest]
            if not found and begin:
                found = [each for each in entries if each.descriptor.digest.startswith(digest)]
        return found

    def _get_one(self, wanted: str, found: Sequence[Entry], entries: Iterable[Entry]) -> Entry:
        """Return the first, if all have one digest. Raises NotThere, Ambiguous."""
        if not found:
            raise self._not_there(wanted, entries)
        digests = sorted({each.descriptor.digest for each in found})
        if len(digests) > 1:
            raise Ambiguous(
                f"{wanted!r} matches {len(digests)} checkpoints in {self.path}: {', '.join(digests[:8])}"
            )
        return found[0]

    def add(self, root: Descriptor, names: Iterable[str]) -> None:
        """Add what is below `root`, under these names; without names, only under its digest."""
        notes = {key: value for key, value in root.annotations.items() if key != REF_NAME}
        new = dataclass.replace(root, annotations=notes).to_json()
        if not self._find_by_digest(root.digest):
            self._entries.append(new)
        for name in names:
            self._give(name, root.digest, new)

    def drop_incomplete(self, digest: str) -> None:
        """Remove the entry of something that another one completes, unless somebody has named it."""
        self._entries[:] = [e for e in self._entries if e["digest"] != digest or _notes(e).get(REF_NAME)]

    def tag(self, wanted: str, name: str) -> None:
        """Give a name to an entry. Raises NotThere, Ambiguous, StoreError."""
        digest = self.find_exactly(wanted).descriptor.digest
        self._give(check_name(name), digest, self._find_by_digest(digest)[0])

    def remove(self, wanted: str, checked: Sequence[Entry] | None = None) -> tuple[str, ...]:
        """Remove a name, or, by its digest, something with all its names; return the removed names.

        A name without a tag only means itself here. `checked`: all entries of its digest, as the caller has
        seen them; StoreError if they are others now. Raises NotThere, Ambiguous.
        """
        self._removing = True
        found = self.find_exactly(wanted)
        now = {each.name for each in self.entries() if each.descriptor.digest == found.descriptor.digest}
        seen = {(each.descriptor.digest, each.name) for each in checked or ()}
        if checked is not None and seen != {(found.descriptor.digest, name) for name in now}:
            raise StoreError(
                f"{wanted[:80]} is not removed, because another command has just changed what it names in "
                f"{self.path}, or the other names of that. Now it is {found.descriptor.digest} "
                f"({format_names(now - {''}) or 'no name'}); remove it again if that may go",
                code="GPS-703",
            )
        by_name = found.name == wanted

        def meant(entry: dict[str, Any]) -> bool:
            same = entry["digest"] == found.descriptor.digest
            return same and (not by_name or _notes(entry).get(REF_NAME) == wanted)

        gone = [_notes(each).get(REF_NAME, "") for each in self._entries if meant(each)]
        self._entries[:] = [each for each in self._entries if not meant(each)]
        return tuple(dict.fromkeys(name for name in gone if name))

    def remove_all(self, digests: Collection[str]) -> None:
        """Remove these digests with all their names."""
        self._removing = True
        self._entries[:] = [each for each in self._entries if each["digest"] not in digests]

    def write(self) -> None:
        """Replace index.json, atomically and synced. Raises DiskFull, DiskError, StoreError."""
        content = encode_document(self._value)
        if len(content) > DOCUMENT_LIMIT:
            raise StoreError(
                f"the index of {self.path} would have {len(content)} bytes, but at most {DOCUMENT_LIMIT} "
                "are allowed; remove some of its checkpoints"
            )
        try:
            with open_nested_folder(self.path) as folder:
                replace("index.json", content, folder)
        except OSError as error:
            failed = disk_error(error, self.path, "the index", len(content))
            if isinstance(failed, DiskFull):
                failed.removing = self._removing
            raise failed from error

    def _find_by_digest(self, digest: str) -> list[dict[str, Any]]:
        return [each for each in self._entries if each["digest"] == digest]

    def _give(self, name: str, digest: str, model: Mapping[str, Any]) -> None:
        """Name an entry of that digest; a further one is made like `model`."""
        for each in list(self._entries):
            if _notes(each).get(REF_NAME) == name and each["digest"] != digest:
                self._unname(each)
        same = self._find_by_digest(digest)
        if any(_notes(each).get(REF_NAME) == name for each in same):
            return
        entry = next((each for each in same if not _notes(each).get(REF_NAME)), None)
        if entry is None:
            entry = dict(copy.deepcopy(model))
            self._entries.append(entry)
        entry["annotations"] = {**_notes(entry), REF_NAME: name}

    def _unname(self, entry: dict[str, Any]) -> None:
        if len(self._find_by_digest(entry["digest"])) > 1:
            self._entries[:] = [each for each in self._entries if each is not entry]
        else:
            del entry["annotations"][REF_NAME]

    def _not_there(self, wanted: str, entries: Iterable[Entry]) -> NotThere:
        whole = [each.name for each in entries if each.name]
        names = [each for each in dict.fromkeys((*whole, *map(base, whole))) if each != wanted]
        pushed = [each for each in whole if base(each).rpartition("/")[2] == wanted != base(each)]
        near = pushed[-_NEAR:] or difflib.get_close_matches(wanted, names, _NEAR)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        return NotThere(f"nothing in {self.path} has the name or digest {wanted[:80]!r}{hint}")


def _notes(entry: Mapping[str, Any]) -> dict[str, str]:
    return entry.get("annotations") or {}
