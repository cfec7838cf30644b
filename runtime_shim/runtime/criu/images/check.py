"""Checks that CRIU's images are complete before CRIU reads them, for a restore and for `gpusnap verify`.

CRIU trusts its images. It waits for a FIFO and follows a link. If a pages-N.img ends before its pagemap says
so, it reads at its end forever, and logs each try (criu/pie/restorer.c, preadv_limited).

messages.py describes the layout of an image of messages. Images of other formats (the pages, tars, what
iproute2 and nft dump) have no magic number, and only their size is checked.
"""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gpusnap.oci.base.files import open_below
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import ImageError, raise_as
from gpusnap.runtime_shim.runtime.criu.images import pagemap
from gpusnap.runtime_shim.runtime.criu.images.messages import Damage, Source, decode, kind_of
from gpusnap.runtime_shim.runtime.criu.images.written_file import WrittenFile

if TYPE_CHECKING:
    from gpusnap.oci.tar.compression import Readable

_PAGES = compile_later(r"pages-([0-9]{1,10})\.img", re.ASCII)
_PAGEMAP = compile_later(r"pagemap-([0-9]{1,10})\.img", re.ASCII)
"""The pagemap of a task, by its PID; those of shared memory have other names."""
# Files that CRIU and the runtime read beside images.
_OTHERS = ("descriptors.json", "stats-dump")
PARENT = "parent"
"""The link to the directory of an earlier dump (CR_PARENT_LINK in criu/include/image.h)."""
LINK = "a symbolic link"
_MOST_PARENTS = 64
_PIECE = 1 << 20
_PAGE_SIZES = {"x86_64": (4096,)}
_OTHER_PAGE_SIZES = (4096, 16384, 65536)


def is_image(name: str) -> bool:
    """Whether CRIU wrote a file of that name as an image: of messages, or of pages."""
    return bool(kind_of(name)) or _PAGES.fullmatch(name) is not None


def _is_read(name: str) -> bool:
    """Whether CRIU or the runtime may open a file of that name in the image directory."""
    return name.endswith(".img") or name in _OTHERS


class Checker:
    """The images of one directory, added in any order; `finish` compares them. It raises ImageErrors."""

    def __init__(self, where: str) -> None:
        """`where`: names the directory in messages."""
        self._where = where
        self._sizes: dict[str, int] = {}
        self._pagemaps: dict[str, pagemap.Pagemap] = {}
        self._tasks: set[int] = set()
        self.written: list[WrittenFile] = []

    def add_special(self, name: str, what: str) -> None:
        """Add a file that is not regular; `what` describes it."""
        if _is_read(name):
            raise self._make_error(name, f"is {what}, not a regular file")
        if name == PARENT and what != LINK:
            raise self._make_error(name, f"is {what}, not a link to the images of an earlier dump")

    def add_size(self, name: str, size: int) -> None:
        """Add an image of pages, whose content is not needed."""
        self._sizes[name] = size

    def add(self, name: str, size: int, content: Readable) -> None:
        """Add a regular file. If it is no image of messages, only its size is used."""
        self._sizes[name] = size
        kind = kind_of(name)
        if not kind:
            return
        try:
            self._read(name, kind, Source(content, size))
        except Damage as damage:
            raise self._make_error(name, str(damage)) from None

    def finish(self, architecture: str) -> None:
        """After all images were added: check that none is missing, and that the pages fit the pagemaps.

        `architecture`: of the host of the dump; it determines the size of a page.
        """
        if "inventory.img" not in self._sizes:
            raise self._make_error("inventory.img", "is missing")
        for pid in sorted(self._tasks):
            if f"core-{pid}.img" not in self._sizes:
                raise self._make_error(f"core-{pid}.img", "is missing")
        for pid in sorted(self._tasks):
            its = f"pagemap-{pid}.img"
            if f"mm-{pid}.img" in self._sizes and its not in self._sizes:
                raise self._make_error(its, "is missing")
        self.finish_pages(architecture)

    def finish_pages(self, architecture: str) -> None:
        """The same for a directory with pages only: that of an earlier dump."""
        sizes = _PAGE_SIZES.get(architecture, _OTHER_PAGE_SIZES)
        for number, names in sorted(self._readers().items()):
            pages = f"pages-{number}.img"
            size = self._sizes.get(pages)
            wrong = [name for name in names if not self._has_right_size(name, size, sizes)]
            # For those that are not a task's, it is not known which one CRIU reads.
            if wrong and (self._is_task(wrong[0]) or len(wrong) == len(names)):
                how = "is missing" if size is None else f"has {size} bytes"
                listed = self._pagemaps[wrong[0]].present
                raise self._make_error(pages, f"{how}, but {wrong[0]} lists {listed} pages in it")

    def _readers(self) -> dict[int, list[str]]:
        """Return, by the number of a pages-N.img, the pagemaps whose pages CRIU may read there.

        A dump into a directory with an earlier one (Podman's, of a container that continues to run) writes
        other pages under the same number, and the pagemap of an ended process stays. CRIU reads those of the
        tasks in pstree.img, and those of shared memory that belong to them.
        """
        found: dict[int, list[str]] = {}
        for name, each in sorted(self._pagemaps.items()):
            found.setdefault(each.pages, []).append(name)
        if not self._tasks:
            return found
        return {number: self._in_use(names) for number, names in found.items()}

    def _in_use(self, names: list[str]) -> list[str]:
        tasks = [name for name in names if self._is_task(name)]
        return tasks or [name for name in names if _PAGEMAP.fullmatch(name) is None]

    def _is_task(self, name: str) -> bool:
        match = _PAGEMAP.fullmatch(name)
        return match is not None and int(match[1]) in self._tasks

    def _has_right_size(self, name: str, size: int | None, sizes: tuple[int, ...]) -> bool:
        present = self._pagemaps[name].present
        return not present if size is None else size in [present * each for each in sizes]

    def _read(self, name: str, kind: str, source: Source) -> None:
        source.begin(kind)
        if kind.startswith("pagemap"):
            self._pagemaps[name] = pagemap.read(source)
        elif kind == "ghost-file":
            _read_ghost(source)
        else:
            for message in _messages(source, kind):
                if kind == "files":
                    self._note_written(message)
                elif kind == "pstree":
                    # CRIU also records a thread for a zombie, and leaves its number unset (seen with 4.1.1).
                    self._tasks |= {message.pid, *(message.threads if message.pid in message.threads else ())}

    def _note_written(self, message: Any) -> None:
        if message is None or not message.HasField("reg"):
            return
        file = message.reg
        if file.HasField("size") and file.flags & os.O_ACCMODE != os.O_RDONLY:
            self.written.append(WrittenFile(f"/{file.name.lstrip('/')}", file.size))

    def _make_error(self, name: str, why: str) -> ImageError:
        return ImageError(
            f"CRIU's image {name} in {self._where} {why}",
            hint="use another copy of the checkpoint",
            code="GPS-601",
        )


def check(
    image_path: str, architecture: str, elsewhere: Mapping[str, int] = MappingProxyType({})
) -> tuple[WrittenFile, ...]:
    """Check the images of a directory. `elsewhere`: the sizes of images of pages that will be put there.

    Return the files that processes had open for writing. Raises ImageError for the first image that is not a
    regular file, is truncated or cannot be decoded, for more or fewer pages than the pagemap lists, for a
    missing image, and if an earlier dump's images are not in a directory beside it.
    """
    top = os.path.realpath(image_path)
    beside = os.path.dirname(top)
    written: tuple[WrittenFile, ...] = ()
    for depth in range(_MOST_PARENTS):
        checker = Checker(top)
        with raise_as(ImageError, f"the images in {top} cannot be read"):
            parent = _add_all(checker, top)
        for name, size in elsewhere.items():
            if depth == 0:
                checker.add_size(name, size)
        if depth == 0:
            checker.finish(architecture)
            written = tuple(checker.written)
        else:
            checker.finish_pages(architecture)
        if parent is None:
            return written
        # CRIU would give the container the memory that it finds there, which may be another container's.
        if os.path.dirname(parent) != beside:
            raise _make_leads_out_error(top)
        top = parent
    raise ImageError(
        f"the images in {image_path} have more than {_MOST_PARENTS} parent dumps",
        hint="do not restore from them: no engine creates that many",
        code="GPS-604",
    )


def check_parent(link: str, where: str) -> None:
    """Check that the link to an earlier dump leads to a directory beside; `where` names its own directory.

    Raises ImageError.
    """
    parts = os.path.normpath(os.path.join("images", link)).split("/")
    if len(parts) != 1 or parts[0] in ("", ".", ".."):
        raise _make_leads_out_error(where)


def _make_leads_out_error(where: str) -> ImageError:
    return ImageError(
        f"the link {PARENT} in {where} does not point to a directory next to it, so CRIU would read "
        "memory from elsewhere",
        hint="do not restore from it, or put the images of the earlier dump next to the others yourself",
        code="GPS-604",
    )


def _add_all(checker: Checker, top: str) -> str | None:
    """Add the files of a directory; return where an earlier dump's images are, if they are needed."""
    parent = None
    with os.scandir(top) as found:
        for entry in found:
            if entry.name == PARENT and entry.is_symlink():
                check_parent(os.readlink(entry.path), top)
                parent = os.path.realpath(entry.path)
            elif not entry.is_file(follow_symlinks=False):
                checker.add_special(entry.name, _kind_in_words(entry.stat(follow_symlinks=False).st_mode))
            elif _is_read(entry.name):
                try:
                    file, size = open_below(top, entry.name)
                except ValueError:
                    continue  # it was replaced since; gpusnap cannot guard CRIU's own open
                with io.BufferedReader(file, _PIECE) as reader:
                    checker.add(entry.name, size, reader)
    return parent


def _kind_in_words(mode: int) -> str:
    words: tuple[tuple[Callable[[int], bool], str], ...] = (
        (stat.S_ISLNK, LINK),
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((text for test, text in words if test(mode)), "a device")


# Messages


def _read_ghost(source: Source) -> None:
    """Read the record of a deleted file: its content follows, in chunks or as a whole."""
    entry = _read_whole(source, "ghost_file_entry")
    while entry.chunks and source.count_left:
        source.skip(_read_whole(source, "ghost_chunk_entry").len)


def _messages(source: Source, kind: str) -> Iterator[Any]:
    """Yield each message of an image, and skip what follows it. None for a message that is not decoded."""
    while source.count_left:
        if kind not in _FOLLOWED and kind != "pstree":
            yield decode(source.message(), kind)
            continue
        message = _read_whole(source, kind)
        yield message
        source.skip(_FOLLOWED[kind](message) if kind in _FOLLOWED else 0)
        for _ in range(message.qnum if kind == "ipcns-msg" else 0):
            source.skip(_round_up(_read_whole(source, "ipc_msg").msize, 8))


def _read_whole(source: Source, kind: str) -> Any:
    """Read the next message, part of which is needed."""
    data = source.message()
    message = decode(data, kind)
    if message is None:
        raise Damage(f"has a message of {len(data)} bytes that cannot be decoded")
    return message


# The size of the data behind a message.
_FOLLOWED: Mapping[str, Callable[[Any], int]] = {
    "pipes-data": lambda message: message.bytes,
    "fifo-data": lambda message: message.bytes,
    "sk-queues": lambda message: message.length,
    "tcp-stream": lambda message: message.inq_len + message.outq_len,
    "ipcns-sem": lambda message: _round_up(2 * message.nsems, 8),
    "ipcns-shm": lambda message: 0 if message.in_pagemaps else _round_up(message.size, 4),
    "ipcns-msg": lambda message: 0,
    "bpfmap-data": lambda message: message.keys_bytes + message.values_bytes,
}


def _round_up(size: int, to: int) -> int:
    return -(-size // to) * to
