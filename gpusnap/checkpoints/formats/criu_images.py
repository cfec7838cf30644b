"""Checks CRIU's images in an archive, or in the records of a stored checkpoint, as a restore does."""

from __future__ import annotations

from gpusnap.checkpoints.formats.entries import entries
from gpusnap.oci.base.errors import ArchiveError, LayoutError
from gpusnap.oci.chunks.artifact import Artifact
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.tar.archive import Entry
from gpusnap.oci.tar.compression import Observed
from gpusnap.runtime_shim.base.errors import ImageError
from gpusnap.runtime_shim.records.manifest import ImageRecord, Manifest
from gpusnap.runtime_shim.runtime.criu.images.check import LINK, PARENT, Checker, check_parent
from gpusnap.runtime_shim.runtime.criu.images.digests import Digester, first_other, make_differs_error
from gpusnap.runtime_shim.runtime.podman import dev_shm

_FOLDER = "checkpoint/"
_PIECE = 1 << 20


class Images:
    """The images among the entries of an archive, which are added one by one."""

    def __init__(self, where: str) -> None:
        """`where` names the archive in messages."""
        self._checker, self._links = Checker(where), Links(where)
        self._fault = ""
        self._where = where
        self._records: list[ImageRecord] = []

    def add(self, entry: Entry) -> None:
        """Check an entry, and read it if it is an image. Raises ArchiveError."""
        if self._fault:
            return
        try:
            self._links.check(entry)
            self._look(entry)
        except ImageError as error:
            self._fault = str(error)

    def _look(self, entry: Entry) -> None:
        name = entry.name.removeprefix(_FOLDER)
        if name.startswith(f"{PARENT}/"):
            name = PARENT  # a directory, for which an archive need not have an entry
        if not entry.name.startswith(_FOLDER) or "/" in name:
            return
        if name == PARENT:
            self._checker.add_special(name, LINK if entry.info.issym() else "a directory or a file")
        elif entry.content is None:
            self._checker.add_special(name, "a directory" if entry.info.isdir() else "a link")
        else:
            digester = Digester(name)
            content = Observed(entry.content, digester.add)
            self._checker.add(name, entry.info.size, content)
            while content.read(_PIECE):  # the rest
                pass
            self._records.append(digester.record())

    def fault(self, record: Manifest | None) -> str:
        """Return the fault of the first image that a restore would refuse; empty if there is none."""
        if self._fault:
            return self._fault
        for each in record.files if record is not None else ():
            self._checker.add_size(each.name, each.table.size)
        try:
            self._checker.finish(record.host.architecture if record is not None else "")
        except ImageError as error:
            return str(error)
        other = first_other(record.images if record is not None else (), self._records)
        return str(make_differs_error(other, self._where)) if other else ""


class Links:
    """The links among the entries of an archive, which are added one by one."""

    def __init__(self, where: str) -> None:
        """`where` names the archive in messages."""
        self._where = where
        self._symbolic: set[str] = set()

    def check(self, entry: Entry) -> None:
        """Raise ImageError for a link in place of a file that Podman or CRIU reads: both would follow it.

        A hard link is a file, unless it is one to a symbolic link. `checkpoint/parent` is a link that CRIU
        makes itself, to a directory beside, and gpusnap-runtime makes one in place of a shared /dev/shm.
        """
        info = entry.info
        if not info.issym() and not (info.islnk() and info.linkname.strip("/") in self._symbolic):
            return
        self._symbolic.add(entry.name)
        folder, _, name = entry.name.rpartition("/")
        if f"{folder}/" == _FOLDER:
            Checker(self._where).add_special(name, LINK)
            if name == PARENT:
                check_parent(info.linkname, f"{self._where}: {folder}")
        elif not folder and (entry.name, info.linkname) != dev_shm.LINK:
            raise ImageError(
                f"{entry.name} in {self._where} is a link, which Podman would follow",
                hint="do not restore from it: no engine makes such an archive",
                code="GPS-604",
            )


def records_fault(artifact: Artifact, record: Manifest | None, layout: Layout) -> str:
    """Return the same for the records of an artifact in a layout; empty if it has none."""
    records = artifact.records
    if records is None:
        return ""
    images = Images(f"the records {records.digest}")
    try:
        with layout.open_blob(records.digest, records.size) as file:
            for entry in entries(file, where=f"the records {records.digest}"):
                images.add(entry)
    except (ArchiveError, LayoutError) as error:
        return str(error)
    return images.fault(record)
