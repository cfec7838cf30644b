"""Resolves a word of the user's to a checkpoint, or to the place for a new one.

    oci:DIR[:NAME]              the store in the folder DIR, which has no colon; NAME in it
    FILE                        an archive: it is there, or begins with / ./ ../, or ends like an archive
    [http://]HOST/NAME[:TAG]    in a registry; HOST has a dot or a port or is localhost; http: without TLS
    NAME, DIGEST, ab12cd…       in this host's store (store.path): a name, a digest, or the beginning of one;
                                a name without a tag is the newest of that name

    oci-archive:FILE            an image layout in a file, as skopeo calls it; FILE alone means the same

They are tried in this order, the last one first; a word that is a file here and a name in the store is
refused. copy, push and pull know one more, before the others:

    containerd:[NAMESPACE/]IMAGE    an image in containerd. NAMESPACE has no dot and no colon and is not
                                    localhost, or is k8s.io; without one it is CONTAINERD_NAMESPACE, or
                                    default, as for ctr. So a/b:1 is b:1 in the namespace a, and
                                    default/a/b:1 the image a/b:1
"""

from __future__ import annotations

import os
import re
import shlex
from contextlib import suppress

from gpusnap.base.privileges import check_access
from gpusnap.base.user_errors import NotFound, convert_errors
from gpusnap.oci.base.dataclass import dataclass, replace
from gpusnap.oci.base.errors import LayoutError, NotThere, RegistryError, StoreError
from gpusnap.oci.base.files import no_file
from gpusnap.oci.base.patterns import compile_later
from gpusnap.oci.layout import reference
from gpusnap.oci.layout.graph import is_document
from gpusnap.oci.layout.reference import PLAIN_HTTP, TRANSPORT, Reference
from gpusnap.oci.store.index import check_name
from gpusnap.oci.store.referrers import subject_of
from gpusnap.oci.store.store import Store
from gpusnap.oci.store.tags import Entry, is_later
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim.base.errors import GpusnapError, UsageError

_STORE = "oci:"
_CONTAINERD = "containerd:"
_LAYOUT_FILE = "oci-archive:"
# containerd's grammars: pkg/identifiers of its namespaces; image names are not restricted, this covers all in
# use.
_NAMESPACE = compile_later(r"[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*", re.ASCII)
_IMAGE = compile_later(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,254}", re.ASCII)
_KUBERNETES = "k8s.io"
_ENDINGS = (".tar", ".tar.zst", ".tar.gz", ".tgz")
_BEGINNINGS = ("/", "./", "../")
_DIGESTS = "sha256:"
_DIGEST = compile_later(r"(?:sha256:)?[0-9a-f]{6,64}", re.ASCII)
# Files of a folder of CRIU images, and of its parent.
_IMAGES = ("inventory.img", "gpusnap", "checkpoint")


@dataclass(frozen=True, slots=True)
class InStore:
    """A place in a store; `wanted` is a name or a digest or its prefix, and may be empty in a destination."""

    store: Store
    wanted: str

    def entry(self) -> Entry:
        """Return the store's entry for it. Raises NotFound, GpusnapError."""
        path = self.store.path
        with convert_errors():
            if self.wanted:
                try:
                    return self.store.find(self.wanted)
                except NotThere as error:
                    if is_default(path):
                        raise
                    hint = f"gpusnap ls {format_place(path)} lists the checkpoints"
                    raise NotFound(str(error), hint=hint, code=error.code) from error
            entries = self.store.entries()
            # A referrer of another entry, such as its signature, is not meant.
            one = {each.descriptor.digest: each for each in entries if not self._is_referrer(each)}
            if len(one) == 1:
                return next(iter(one.values()))
        if not entries:
            raise NotFound(f"{path} contains no checkpoint", code="GPS-701")
        raise UsageError(
            f"{path} keeps {len(one)} checkpoints", hint=f"name one: oci:{path}:NAME", code="GPS-102"
        )

    def resolve(self) -> ResolvedName:
        """Resolve the word to a digest: a moment later it may refer to another one.

        Raises like `entry`.
        """
        open_store(self.store)
        entry = self.entry()
        with convert_errors():
            tags = self.store.list_tagged(self.wanted) if entry.name == self.wanted else ()
            later = [each.name for each in tags if is_later(each.created, entry.created)]
        return ResolvedName(replace(self, wanted=entry.descriptor.digest), entry, tuple(later))

    def _is_referrer(self, entry: Entry) -> bool:
        if entry.name or not is_document(entry.descriptor):
            return False
        try:
            return bool(subject_of(self.store.read(entry.descriptor)))
        except LayoutError:
            return False


@dataclass(frozen=True, slots=True)
class ResolvedName:
    """A word that was resolved in a store."""

    place: InStore
    """The place, by digest."""
    entry: Entry
    later: tuple[str, ...]
    """Names with a tag that are newer than the name without one."""


@dataclass(frozen=True, slots=True)
class InFile:
    """An archive, or a folder of images; as a destination, an archive to write."""

    path: str


@dataclass(frozen=True, slots=True)
class InLayoutFile:
    """An image layout in a file, to write; for reading it is InFile."""

    path: str


@dataclass(frozen=True, slots=True)
class InRegistry:
    """A place in a registry; `plain_http`: the word begins with http:."""

    reference: Reference
    plain_http: bool = False

    @property
    def repository(self) -> str:
        """Return the repository in the form of store.pull-from."""
        return (PLAIN_HTTP if self.plain_http else "") + self.reference.name


@dataclass(frozen=True, slots=True)
class InContainerd:
    namespace: str
    name: str


Place = InStore | InFile | InRegistry


def find(word: str, *, remote: bool = True) -> Place:
    """Find the place that a word refers to; does not check whether a store or registry has the checkpoint.

    Without `remote`, no word refers to a registry: one of that form may be a name in the store. A store must
    exist. Raises NotFound, UsageError, SettingsError.
    """
    _check_not_containerd(word, f"gpusnap copy {shlex.quote(word)} oci:DIR copies it into a store")
    if word.startswith(_STORE):
        return _in_folder(word)
    file, word = word.startswith(_LAYOUT_FILE), word.removeprefix(_LAYOUT_FILE)
    if file or _is_file(word):
        in_file(word)
        if os.path.isdir(word) and not _has_images(word):
            raise NotFound(
                f"{word} is a directory without a checkpoint",
                hint="a checkpoint in a store is named oci:DIR:NAME",
                code="GPS-102",
            )
        _check_no_name(word)
        return InFile(word)
    if remote and (found := registry_or_none(word)) is not None:
        return found
    return in_store(word)


def in_file(path: str) -> InFile:
    """Return a file or folder as a place. Raises NotFound, UsageError if it cannot be read."""
    check_access(path)
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise NotFound(
            f"there is no file {path}",
            hint="check the path; gpusnap ls lists the checkpoints in the store",
            code="GPS-102",
        ) from error
    if kind := no_file(status):
        raise UsageError(
            f"{path} is {kind}, not a file",
            hint="checkpoints are read from regular files: write it to one first",
            code="GPS-102",
        )
    return InFile(path)


def check_new_file(path: str, *, hint: str = "") -> None:
    """Raise GpusnapError if no new file can be written at the path; `hint`: if it is a directory."""
    if os.path.isdir(path):
        raise GpusnapError(
            f"{path} cannot be written: it is a directory",
            hint=hint
            or f"name a file in it, such as {os.path.join(path, 'checkpoint.tar.zst')}, or a store in it as "
            f"oci:{os.path.join(path, 'store')}",
            code="GPS-103",
        )
    if os.path.exists(path) and not os.path.isfile(path):
        raise GpusnapError(f"{path} cannot be written: it exists, and is not a file", code="GPS-103")
    if os.path.lexists(path):
        raise GpusnapError(
            f"{path} exists already",
            hint="gpusnap does not overwrite files: remove it, or give another name",
            code="GPS-103",
        )
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise GpusnapError(f"{path} cannot be written: {folder} is not a directory", code="GPS-103")
    if not os.access(folder, os.W_OK | os.X_OK):  # for root: a read-only file system
        raise GpusnapError(f"{path} cannot be written: {folder} is read-only", code="GPS-103")


def in_containerd(word: str) -> InContainerd | None:
    """Return an image in containerd; None if the word has another form. Raises UsageError."""
    if not word.startswith(_CONTAINERD):
        return None
    name = word.removeprefix(_CONTAINERD)
    namespace, slash, rest = name.partition("/")
    if slash and (
        namespace == _KUBERNETES or not ("." in namespace or ":" in namespace or namespace == "localhost")
    ):
        name = rest
    else:
        namespace = os.environ.get("CONTAINERD_NAMESPACE") or "default"
    if not _IMAGE.fullmatch(name) or not _NAMESPACE.fullmatch(namespace):
        raise UsageError(
            f"{word[:120]!r} does not name an image in containerd",
            hint="write it as containerd:NAMESPACE/IMAGE, such as containerd:default/w:v1",
            code="GPS-102",
        )
    return InContainerd(namespace, name)


def in_store(word: str) -> InStore:
    """Do the same as `find`, for a command that only reads stores. Raises like that."""
    if word.startswith(_STORE):
        return _in_folder(word)
    if word.startswith((PLAIN_HTTP, TRANSPORT)):
        raise UsageError(
            f"{word[:120]!r} is in a registry, and this command only takes checkpoints in a store",
            hint="gpusnap pull or gpusnap copy copies it into one",
            code="GPS-102",
        )
    if word.startswith(_BEGINNINGS) and os.path.lexists(word):
        raise UsageError(
            f"{word[:120]!r} is a file, and this command only takes checkpoints in a store",
            hint="gpusnap ls lists those; use rm or mv on the file itself",
            code="GPS-102",
        )
    return InStore(default_store(), parse_name_or_digest(word))


def parse_name_or_digest(word: str) -> str:
    """Parse a name in a store, a digest, or a prefix of one. Raises UsageError."""
    if not _DIGEST.fullmatch(word):
        if word.startswith(_DIGESTS):
            raise UsageError(
                f"{word[:120]!r} is not a digest: write sha256: and 6 to 64 digits of it, 0-9 and a-f",
                hint=_HINT,
                code="GPS-102",
            )
        try:
            check_name(word)
        except StoreError as error:
            raise UsageError(
                f"{word[:120]!r} is not a checkpoint: it is {_WHAT}", hint=_HINT, code="GPS-102"
            ) from error
    return word


def parse_name(word: str) -> str:
    """Parse a name in a store. Raises UsageError."""
    try:
        return check_name(word)
    except StoreError as error:
        raise UsageError(str(error)) from error


def destination(word: str) -> Place:
    """Return the place for a new checkpoint: a store, which may not exist yet, an archive, or a registry.

    Raises UsageError.
    """
    _check_not_containerd(word, "ctr container checkpoint --task makes a checkpoint there")
    if word.startswith(_LAYOUT_FILE):
        raise UsageError(
            f"{word[:120]!r} is an image layout in a file; only gpusnap copy writes those",
            hint="write the checkpoint to the store first, then run gpusnap copy NAME oci-archive:FILE",
            code="GPS-102",
        )
    if word.startswith(_STORE):
        return _in_folder(word, new=True)
    if _is_file(word, endings_only=True):
        return InFile(word)
    found = registry_or_none(word)
    if found is None:
        raise UsageError(
            f"{word[:120]!r} is not a valid destination for a checkpoint: write oci:DIR[:NAME], a file "
            "such as ./w.tar, or a reference in a registry such as registry.example/w:v1",
            hint="for a name in this host's store, use --name instead of --to",
            code="GPS-102",
        )
    return found


def copy_destination(word: str) -> Place | InLayoutFile | InContainerd:
    """Do the same for a copy: also oci-archive:FILE, containerd:IMAGE and a NAME in this host's store.

    Raises UsageError, SettingsError.
    """
    if word.startswith(_LAYOUT_FILE) and word != _LAYOUT_FILE:
        return InLayoutFile(word.removeprefix(_LAYOUT_FILE))
    if (image := in_containerd(word)) is not None:
        return image
    if word.startswith(_STORE) or _is_file(word, endings_only=True) or registry_or_none(word) is not None:
        return destination(word)
    return InStore(default_store(), parse_name(word))


def parse_registry(word: str) -> InRegistry:
    """Parse a word that must be a reference in a registry. Raises UsageError."""
    try:
        return InRegistry(*reference.parse_plain(word))
    except RegistryError as error:
        raise UsageError(str(error), code=error.code) from error


def default_store() -> Store:
    """Return this host's store, by the settings; it may not exist. Raises SettingsError."""
    return Store(settings_file.load().store.path)


def is_default(path: str) -> bool:
    """Return whether that is the store in this host's settings; False if these cannot be read."""
    with suppress(GpusnapError):
        return path == default_store().path
    return False


def add_place(command: str, path: str) -> str:
    """Return a command with the store that it is for; this host's needs no word."""
    return f"{command} {format_place(path)}".rstrip()


def format_place(path: str, name: str = "") -> str:
    """Return how a command names something in a store, or the store itself: empty for this host's."""
    if is_default(path):
        return shlex.quote(name) if name else ""
    return shlex.quote(f"oci:{path}:{name}" if name else f"oci:{path}")


def has_layout(store: Store) -> bool:
    """Return whether a store's directory is an image layout. Raises GpusnapError if access is denied."""
    layout = os.path.join(store.path, "oci-layout")
    check_access(layout)
    return os.path.exists(layout)


def open_store(store: Store, *, write: bool = False) -> Store:
    """Check that a store can be read, and return it.

    With `write`, a layout that another tool has made becomes a store; else it is not changed. Raises
    NotFound, GpusnapError.
    """
    if not has_layout(store):
        where = "" if is_default(store.path) else f"--to oci:{shlex.quote(store.path)} "
        raise NotFound(
            f"{store.path} is not a store, or has no checkpoint yet",
            hint=f"gpusnap checkpoint {where}CONTAINER makes one there",
        )
    with convert_errors():
        if write:
            store.create()
        else:
            store.layout.check()
            store.entries()
    return store


_HINT = "run gpusnap ls, or see gpusnap --help for how to name a checkpoint"
_WHAT = "neither a file, nor a name in a store or a registry, nor a digest"


def _check_not_containerd(word: str, hint: str) -> None:
    if word.startswith(_CONTAINERD):
        raise UsageError(
            f"{word[:120]!r} is an image in containerd; only gpusnap push, pull --to and copy handle those",
            hint=hint,
            code="GPS-102",
        )


def _in_folder(word: str, *, new: bool = False) -> InStore:
    path, _, wanted = word.removeprefix(_STORE).partition(":")
    if not path:
        raise UsageError(
            f"{word[:120]!r} does not name a directory",
            hint="a store is named oci:DIR or oci:DIR:NAME",
            code="GPS-102",
        )
    if new and wanted:
        parse_name(wanted)
    check_access(path)
    if new and os.path.exists(path) and not os.path.isdir(path):
        raise UsageError(
            f"{path} is a file, and a store is a directory", hint="write oci:DIR", code="GPS-102"
        )
    if not new and not os.path.isdir(path):
        raise NotFound(
            f"there is no store {path}: there is no such directory",
            hint=f"gpusnap checkpoint --to oci:{shlex.quote(path)} CONTAINER makes one",
        )
    return InStore(Store(path), wanted)


def registry_or_none(word: str) -> InRegistry | None:
    """Parse a reference; None if the word is none and does not have its form. Raises UsageError."""
    try:
        return parse_registry(word)
    except UsageError:
        host = word.removeprefix(PLAIN_HTTP).partition("/")
        if word.startswith((PLAIN_HTTP, TRANSPORT)) or (host[1] and ("." in host[0] or ":" in host[0])):
            raise
        return None


def _is_file(word: str, *, endings_only: bool = False) -> bool:
    if word.startswith(_BEGINNINGS) or word.endswith(_ENDINGS):
        return True
    if endings_only:
        return False
    if os.path.isdir(word):
        return _has_images(word)
    return os.path.exists(word)


def _check_no_name(word: str) -> None:
    """Raise UsageError for a file in the working directory if this host's store also has that name."""
    if word.startswith(_BEGINNINGS) or word.endswith(_ENDINGS):
        return
    try:
        place = InStore(default_store(), word)
        found = place.entry()
    except GpusnapError:
        return
    path = place.store.path
    raise UsageError(
        f"{word} is ambiguous: it may be the file ./{word}, or {found.name or found.descriptor.digest} in "
        f"{path}",
        hint=f"write ./{word} or oci:{path}:{word}",
        code="GPS-102",
    )


def _has_images(folder: str) -> bool:
    return any(os.path.exists(os.path.join(folder, name)) for name in _IMAGES)
