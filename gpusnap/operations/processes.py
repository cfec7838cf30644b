"""Reads the processes of a checkpoint in any place, from CRIU's images and the manifest.

An archive is read as a stream, once; nothing is unpacked. Of the images of pages, only the few bytes that are
command lines are kept. For that, the images that locate them must come first, which is the order in which
engines write them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator

from gpusnap.checkpoints import processes
from gpusnap.checkpoints.formats.entries import entries
from gpusnap.checkpoints.processes import Place, Process
from gpusnap.oci.base.dataclass import replace
from gpusnap.oci.base.files import open_below
from gpusnap.oci.tar.compression import Readable
from gpusnap.operations.open import Checkpoint
from gpusnap.runtime_shim.base.errors import ImageError, reason
from gpusnap.runtime_shim.records.manifest import Manifest
from gpusnap.runtime_shim.runtime.criu.images.messages import kind_of

_FOLDER = "checkpoint/"
_PIECE = 1 << 20
# Limits on the bytes of images in memory, for one and for all. The pagemap of 16 GiB in single pages takes
# 64 MiB; those of containers are much smaller.
_LARGEST, _ALL = 64 << 20, 256 << 20
# A few of them for each process.
_MOST_IMAGES = 1 << 16


def read(checkpoint: Checkpoint) -> tuple[Process, ...]:
    """Return each process after its parent. Raises OciError, RegistryError, ImageError, Refused."""
    images: dict[str, bytes] = {}
    commands: dict[int, tuple[str, ...]] = {}
    wanted: dict[int, Place] | None = None
    total = 0
    for name, size, content in _images(checkpoint):
        if kind_of(name) in processes.KINDS:
            total += size
            if size > _LARGEST or total > _ALL or len(images) >= _MOST_IMAGES:
                raise ImageError(
                    f"CRIU's image {name} in {checkpoint.word} has {size} bytes, and the {len(images)} "
                    f"before it {total - size}: too much to show here",
                    hint="gpusnap inspect without --processes shows the rest",
                )
            images[name] = _read_all(content, size)
        elif name.startswith("pages-"):
            wanted = processes.arguments(images) if wanted is None else wanted
            places = {pid: place for pid, place in wanted.items() if place.image == name}
            commands |= _commands(content, places)
    found = processes.read(images, checkpoint.word)
    return tuple(_with_command(each, commands, checkpoint.manifest) for each in found)


def _with_command(process: Process, commands: dict[int, tuple[str, ...]], record: Manifest | None) -> Process:
    command = commands.get(process.pid, ())
    if not command and record is not None:
        command = next((each.command for each in record.processes if each.pid == process.pid), ())
    return replace(process, command=command)


def _images(checkpoint: Checkpoint) -> Iterator[tuple[str, int, Readable]]:
    """Yield name, size and content of CRIU's images; each must be read before the next one is requested."""
    if checkpoint.stored is not None:
        records = checkpoint.stored.artifact.records
        if records is None:
            raise ImageError(
                f"{checkpoint.word} is only the memory of a checkpoint, without CRIU's images",
                hint="its records are in a Podman archive: inspect that",
            )
        with checkpoint.stored.blobs.open_blob(records.digest, records.size) as file:
            yield from _in_archive(file, f"{checkpoint.word}: {records.digest}")
    elif os.path.isdir(checkpoint.path):
        yield from _in_folder(checkpoint.path)
    else:
        yield from _in_archive(checkpoint.path, checkpoint.path)


def _in_archive(archive: str | Readable, where: str) -> Iterator[tuple[str, int, Readable]]:
    for entry in entries(archive, where=where):
        name = entry.name.removeprefix(_FOLDER)
        if name != entry.name and "/" not in name and entry.content is not None:
            yield name, entry.info.size, entry.content


def _in_folder(path: str) -> Iterator[tuple[str, int, Readable]]:
    inner = os.path.join(path, _FOLDER)
    top = inner if os.path.isdir(inner) else path
    try:
        for name in sorted(os.listdir(top)):
            if not (kind_of(name) in processes.KINDS or name.startswith("pages-")):
                continue
            try:
                file, size = open_below(top, name)
            except ValueError as error:
                raise ImageError(
                    f"CRIU's image {name} in {top} is not a regular file",
                    hint="do not use it: no dump contains such a file",
                ) from error
            with io.BufferedReader(file, _PIECE) as reader:
                yield name, size, reader
    except OSError as error:
        raise ImageError(f"the images in {top} cannot be read: {reason(error)}") from error


def _read_all(content: Readable, size: int) -> bytes:
    pieces = []
    while size and (piece := content.read(min(size, _PIECE))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _commands(content: Readable, places: dict[int, Place]) -> dict[int, tuple[str, ...]]:
    """Return the command lines in an image of pages; reads no further than the last of them."""
    found: dict[int, tuple[str, ...]] = {}
    at = 0
    for pid, place in sorted(places.items(), key=lambda item: item[1].offset):
        if place.offset < at:
            continue  # two processes with one page: these images are not CRIU's
        while at < place.offset and (piece := content.read(min(_PIECE, place.offset - at))):
            at += len(piece)
        data = _read_all(content, place.size) if at == place.offset else b""
        at += len(data)
        if data:
            words = data.rstrip(b"\0").split(b"\0")
            found[pid] = tuple(word.decode("utf-8", "backslashreplace") for word in words)
    return found
