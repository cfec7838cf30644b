"""The manifest of a checkpoint: <image path>/gpusnap/manifest.json.

It is written last: a checkpoint of GPU processes without it is no checkpoint. Because the container is gone
once CRIU has dumped it (without --leave-running), nothing may be left to fail after that: `Draft` puts the
whole manifest on disk beforehand, under another name, and afterwards only renames it.

    gpusnap/                  made first: an image directory that has it belongs to gpusnap
    gpusnap/manifest.pending  while CRIU dumps
    gpusnap/manifest.json     the checkpoint is whole

The schema is manifest.schema.json beside this file. What it cannot say (a GPU listed twice, a process with a
GPU that is not in the list) is checked here. A manifest may come from anywhere, so each number has a bound.
"""

from __future__ import annotations

import errno
import functools
import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.files import exists, is_folder, read_below
from gpusnap.oci.base.json_text import parse_json
from gpusnap.oci.layout.digests import digest_of
from gpusnap.runtime_shim._version import __version__
from gpusnap.runtime_shim.errors import (
    GpusnapError,
    ImageError,
    ManifestError,
    ManifestVersion,
    own_file_unreadable,
    reason,
)
from gpusnap.runtime_shim.transaction import Step

if TYPE_CHECKING:
    from gpusnap.oci.chunks.table import Table

FOLDER = "gpusnap"
INVENTORY = "inventory.img"
"""CRIU writes it last of what a restore cannot do without; Podman refuses an archive without it."""
NAME = "manifest.json"
VERSION = "1.0"
PENDING = "manifest.pending"
INDEX = "index.json"
"""Of the layout beside it (image-spec, image-layout.md)."""
DIGEST = "io.gpusnap.manifest.digest"
"""An annotation of that index: the digest of manifest.json."""
LARGEST_INDEX = 4 << 20
# Far above any real one (4096 processes make about 1 MiB), far below what could hurt to parse.
LARGEST = 64 << 20


@dataclass(frozen=True, slots=True)
class GpuRecord:
    """A GPU as it was on the host of the checkpoint; sizes in bytes."""

    uuid: str
    minor: int
    index: int
    model: str
    compute_capability: str
    memory_total: int
    memory_used: int
    """By this container's processes."""
    pci: str = ""
    """Address as sysfs writes it; empty where it is not known."""


@dataclass(frozen=True, slots=True)
class RegionRecord:
    """Memory of a process that is beside CRIU's images, in chunks."""

    start: int
    """Its address."""
    table: Table


@dataclass(frozen=True, slots=True)
class FileRecord:
    """An image of CRIU's that is in chunks, too, and not in the image's directory."""

    name: str
    table: Table


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """One of CRIU's images that lies in the image directory."""

    name: str
    size: int
    """Bytes."""
    digest: str
    """sha256:<64 hex>, of the content."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process whose GPU state is in the checkpoint."""

    pid: int
    """In the container's PID namespace: the same after a restore."""
    name: str
    command: tuple[str, ...]
    gpus: tuple[tuple[str, int], ...]
    """(UUID, bytes used) of every GPU that it could see, unused ones too."""
    regions: tuple[RegionRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class NeutralisedProcess:
    """A process that held GPU files which it had inherited; in the checkpoint it has /dev/null instead."""

    pid: int
    """In the container's PID namespace."""
    name: str
    descriptors: tuple[tuple[int, str], ...]
    """Number, and the path of the file that was behind it."""
    mappings: int
    """How many were replaced."""
    mapped: int
    """Bytes that these take."""


@dataclass(frozen=True, slots=True)
class DriverMount:
    """A mount of the driver's that config.json does not list; CRIU calls it by `key`."""

    key: str
    destination: str
    source: str


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A GPU's device node in the container's /dev."""

    path: str
    major: int
    minor: int
    gpu: str
    """UUID; empty where all GPUs share it."""


@dataclass(frozen=True, slots=True)
class DriverLibrary:
    """A file of the driver's that a GPU process has mapped, which CRIU wants back as it was."""

    path: str
    """In the container."""
    size: int
    """Bytes."""
    build_id: str
    """NT_GNU_BUILD_ID in hexadecimal; empty where the file has none."""
    mode: int
    """st_mode, with the type."""


@dataclass(frozen=True, slots=True)
class Written:
    """What became of the GPUs' memory that went into chunks; bytes."""

    stored: int = 0
    """Of new blobs, compressed."""
    known: int = 0
    """Of memory that was linked, because an earlier checkpoint had it."""
    zero: int = 0
    """Of memory that was left out."""


@dataclass(frozen=True, slots=True)
class HostRecord:
    """Where the checkpoint was made."""

    architecture: str
    kernel: str
    vendor: str
    driver_version: str
    cuda_version: str
    criu_version: str
    runtime_name: str
    runtime_version: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that a checkpoint says of its GPUs."""

    created: str
    """RFC 3339, UTC."""
    container: str
    """Full ID."""
    host: HostRecord
    gpus: tuple[GpuRecord, ...]
    processes: tuple[GpuProcess, ...]
    mounts: tuple[DriverMount, ...] = ()
    timing: tuple[Step, ...] = ()
    pages: str = "criu"
    nodes: tuple[DeviceNode, ...] = ()
    libraries: tuple[DriverLibrary, ...] = ()
    written: Written = Written()
    peak_memory: int = 0
    """Bytes of RAM that gpusnap had at most, what it staged included; 0 where that is not known."""
    dev: str = ""
    """The name of CRIU's image of the container's /dev; empty where that is no tmpfs of its own."""
    neutralised: tuple[NeutralisedProcess, ...] = ()
    """At this checkpoint, not at earlier ones."""
    files: tuple[FileRecord, ...] = ()
    """Where `pages` is store."""
    images: tuple[ImageRecord, ...] = ()
    """CRIU's images in the image directory; earlier versions of gpusnap wrote none of these."""
    plugin: str = ""
    """CRIU's plugin that suspended the processes, and brings them back; empty where gpusnap does."""
    gpusnap: str = __version__
    version: str = VERSION

    @property
    def tables(self) -> list[Table]:
        """Of all that is in chunks: regions of memory, and images."""
        regions = [region.table for process in self.processes for region in process.regions]
        return regions + [each.table for each in self.files]

    @property
    def sizes(self) -> dict[str, int]:
        """Of the images that are in chunks, by name; bytes."""
        return {each.name: each.table.size for each in self.files}


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON, checked against the schema; raises ManifestError."""
    document = _to_json(manifest)
    _check(document, "the new manifest")
    compact = any(process["regions"] for process in document["processes"]) or "files" in document
    data = json.dumps(document, indent=None if compact else 1).encode() + b"\n"
    if len(data) > LARGEST:
        raise ManifestError(
            f"the new manifest has {len(data) >> 20} MiB, and none above {LARGEST >> 20} is read",
            hint="set a larger memory.chunk-size",
        )
    return data


def decode(data: bytes, where: str) -> Manifest:
    """The manifest in `data`. Raises ManifestError, ManifestVersion; `where` names it in the message."""
    try:
        document = parse_json(data)
    except ValueError as error:
        raise ManifestError(
            f"{where} is cut short or not JSON: {error}", hint="take another copy of the checkpoint"
        ) from error
    _check_version(document, where)
    _check(document, where)
    from gpusnap.oci.base.errors import ChunkError

    try:
        return _from_json(document)
    except ChunkError as error:
        raise ManifestError(f"{where} is not a gpusnap manifest: {error}") from error


def belongs(image_path: str) -> bool:
    """Whether gpusnap made this image: it has our folder, complete or not. Raises ImageError.

    One that is taken for another tool's is restored without its GPU memory.
    """
    try:
        return is_folder(os.path.join(image_path, FOLDER))
    except OSError as error:
        raise ImageError(
            f"it cannot be told whether gpusnap made the images in {image_path}: {reason(error)}",
            hint="see that the directory can be read, and try again",
        ) from error


def has(image_path: str, *names: str) -> bool:
    """Whether a file is in the image directory, given by the parts of its path.

    Raises ImageError where nobody can tell: what is taken for missing would be removed, or done again.
    """
    path = os.path.join(image_path, *names)
    try:
        return exists(path)
    except OSError as error:
        raise ImageError(
            f"it cannot be told whether {path} is there: {reason(error)}",
            hint="see that the directory can be read, and try again",
        ) from error


def read(image_path: str) -> Manifest:
    """The manifest of an image, compared with the digest that the layout's index has of it.

    Raises ManifestError where it is missing, broken, or another than was written; ManifestVersion.
    """
    path = os.path.join(image_path, FOLDER, NAME)
    try:
        data = read_below(image_path, f"{FOLDER}/{NAME}", limit=LARGEST)
    except FileNotFoundError:
        raise missing(image_path, _what_is_left(image_path)) from None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    try:
        index: bytes | None = read_below(image_path, f"{FOLDER}/{INDEX}", limit=LARGEST_INDEX)
    except FileNotFoundError:
        index = None
    except (OSError, ValueError) as error:
        raise unreadable(os.path.join(image_path, FOLDER, INDEX), error) from error
    record = decode(data, path)  # first: what is wrong with it says more than that it is another
    check_digest(data, index, path)
    return record


def missing(where: str, hint: str = "take another copy of it") -> ManifestError:
    """The error for a checkpoint of gpusnap's that has no manifest."""
    return ManifestError(
        f"the checkpoint in {where} is not complete: it has no {FOLDER}/{NAME}", hint=hint, code="GPS-602"
    )


def unreadable(path: str, error: OSError | ValueError) -> ManifestError:
    """The error for a manifest, or an index, that is no plain file, too large, or cannot be read."""
    why = reason(error) if isinstance(error, OSError) else str(error)
    if isinstance(error, OSError) and error.errno == errno.ELOOP:
        why = "it is a symbolic link"
    return ManifestError(f"{path} cannot be read: {why}", hint="do not restore from it")


def digested(index: bytes, digest: str) -> bytes:
    """The index of a layout with the digest of the manifest beside it. Raises ManifestError."""
    document = _index(index, INDEX)
    document["annotations"] = {**document.get("annotations", {}), DIGEST: digest}
    return json.dumps(document, separators=(",", ":")).encode("ascii")


def check_digest(data: bytes, index: bytes | None, where: str) -> None:
    """Raise ManifestError where the index of the layout beside a manifest has another digest of it.

    `index` is None where there is none. Layouts that were written before gpusnap noted it have no digest.
    """
    if index is None:
        return
    wanted = _index(index, f"the {INDEX} beside {where}").get("annotations", {}).get(DIGEST)
    if wanted is not None and wanted != digest_of(data):
        raise ManifestError(
            f"{where} is not the manifest that was written with this checkpoint: its digest is "
            f"{digest_of(data)}, and the layout's {INDEX} has {str(wanted)[:80]}",
            hint="take another copy of the checkpoint",
        )


def _index(data: bytes, where: str) -> dict[str, Any]:
    try:
        document = parse_json(data)
    except ValueError as error:
        raise ManifestError(f"{where} is cut short or not JSON: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("annotations", {}), dict):
        raise ManifestError(f"{where} is not the index of a layout")
    return document


def _what_is_left(image_path: str) -> str:
    """What may be done about an image without a manifest."""
    pending = os.path.join(image_path, FOLDER, PENDING)
    if not os.path.exists(pending):
        return "take another copy of it"
    if not os.path.getsize(pending) or not os.path.exists(os.path.join(image_path, INVENTORY)):
        return "the checkpoint was cut off while it was written"
    # CRIU writes that file last: gpusnap was killed between the end of the dump and the renaming.
    return (
        "the checkpoint was cut off while it was written, but CRIU had finished: gpusnap recover completes "
        f"it; where that knows nothing of it (after a reboot, say), rename {FOLDER}/{PENDING} to {NAME}"
    )


def prepare() -> None:
    """Import what a manifest is checked with, which takes 0.05 s. Whoever needs it says what fails."""
    with suppress(GpusnapError, ImportError):
        _validator()


@functools.cache
def _validator() -> Any:
    # Imported here: it takes 0.1 s, and a container without a GPU must not pay for it.
    import jsonschema

    path = os.path.join(os.path.dirname(__file__), "manifest.schema.json")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise own_file_unreadable(path, error) from error
    return jsonschema.Draft202012Validator(parse_json(text))


def _check_version(document: Any, where: str) -> None:
    version = document.get("version") if isinstance(document, dict) else None
    major = VERSION.partition(".")[0]
    if isinstance(version, str) and version.partition(".")[0] != major:
        raise ManifestVersion(
            f"{where} has version {version[:20]!r}, and gpusnap {__version__} reads {major}.x",
            hint="restore it with the gpusnap that made it, or a newer one",
        )


def _check(document: Any, where: str) -> None:
    error = min(
        _validator().iter_errors(document), key=lambda e: list(map(str, e.absolute_path)), default=None
    )
    if error is not None:
        place = "/".join(map(str, error.absolute_path)) or "the top level"
        raise ManifestError(f"{where} is not a gpusnap manifest: at {place}, {error.message[:200]}")
    for what, names in (
        ("GPU", [gpu["uuid"] for gpu in document["gpus"]]),
        ("process", [process["pid"] for process in document["processes"]]),
        ("neutralised process", [process["pid"] for process in document.get("neutralised", ())]),
        ("device", [node["path"] for node in document["nodes"]]),
        ("library", [library["path"] for library in document["libraries"]]),
        ("mount", [mount["destination"] for mount in document["mounts"]]),
        ("mount key", [mount["key"] for mount in document["mounts"]]),
        ("image", [each["name"] for key in ("files", "images") for each in document.get(key, ())]),
    ):
        _once(what, names, where)
    known = {gpu["uuid"] for gpu in document["gpus"]}
    for node in document["nodes"]:
        if node["gpu"] and node["gpu"] not in known:
            raise ManifestError(
                f"{where}: device {node['path']} is of a GPU {node['gpu']} that is not listed"
            )
    for process in document["processes"]:
        _once(f"GPU of process {process['pid']},", [gpu["uuid"] for gpu in process["gpus"]], where)
        for gpu in process["gpus"]:
            if gpu["uuid"] not in known:
                raise ManifestError(
                    f"{where}: process {process['pid']} has a GPU {gpu['uuid']} that is not listed"
                )


def _once(what: str, names: list[Any], where: str) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ManifestError(f"{where} lists the {what} {twice} twice")


def _to_json(manifest: Manifest) -> dict[str, Any]:
    from gpusnap.oci.chunks.table import to_json

    host = manifest.host
    document: dict[str, Any] = {
        "version": manifest.version,
        "gpusnap": manifest.gpusnap,
        "created": manifest.created,
        "container": {"id": manifest.container},
        "pages": manifest.pages,
        "host": {
            "architecture": host.architecture,
            "kernel": host.kernel,
            "driver": {"vendor": host.vendor, "version": host.driver_version, "cuda": host.cuda_version},
            "criu": host.criu_version,
            "runtime": {"name": host.runtime_name, "version": host.runtime_version},
        },
        "gpus": [
            {
                "uuid": gpu.uuid,
                "minor": gpu.minor,
                "index": gpu.index,
                "model": gpu.model,
                "computeCapability": gpu.compute_capability,
                "memoryTotal": gpu.memory_total,
                "memoryUsed": gpu.memory_used,
                "pci": gpu.pci,
            }
            for gpu in manifest.gpus
        ],
        "processes": [
            {
                "pid": process.pid,
                "name": process.name,
                "command": list(process.command),
                "gpus": [{"uuid": uuid, "memoryUsed": used} for uuid, used in process.gpus],
                "regions": [{"start": r.start, **to_json(r.table)} for r in process.regions],
            }
            for process in manifest.processes
        ],
        "mounts": [{"key": m.key, "destination": m.destination, "source": m.source} for m in manifest.mounts],
        "nodes": [{"path": n.path, "major": n.major, "minor": n.minor, "gpu": n.gpu} for n in manifest.nodes],
        "libraries": [
            {"path": x.path, "size": x.size, "buildId": x.build_id, "mode": x.mode}
            for x in manifest.libraries
        ],
        "dev": manifest.dev,
        "written": {
            "bytes": manifest.written.stored,
            "known": manifest.written.known,
            "zero": manifest.written.zero,
        },
        "peakMemory": manifest.peak_memory,
        "timing": [
            {"step": step.name, "start": round(step.start, 6), "seconds": round(step.seconds, 6)}
            | ({"note": step.note} if step.note else {})
            for step in manifest.timing
        ],
    }
    if manifest.plugin:
        document["plugin"] = manifest.plugin
    if manifest.files:
        document["files"] = [{"name": each.name, **to_json(each.table)} for each in manifest.files]
    if manifest.images:
        document["images"] = [
            {"name": each.name, "size": each.size, "digest": each.digest} for each in manifest.images
        ]
    if manifest.neutralised:
        document["neutralised"] = [
            {
                "pid": process.pid,
                "name": process.name,
                "descriptors": [list(each) for each in process.descriptors],
                "mappings": {"count": process.mappings, "bytes": process.mapped},
            }
            for process in manifest.neutralised
        ]
    return document


def _from_json(document: dict[str, Any]) -> Manifest:
    # Imported here, as above: whether an image is ours is asked without reading its manifest.
    from gpusnap.oci.chunks.table import from_json

    # int(): to JSON Schema 7.0 is an integer too
    host = document["host"]
    return Manifest(
        version=document["version"],
        gpusnap=document["gpusnap"],
        created=document["created"],
        container=document["container"]["id"],
        pages=document["pages"],
        host=HostRecord(
            architecture=host["architecture"],
            kernel=host["kernel"],
            vendor=host["driver"]["vendor"],
            driver_version=host["driver"]["version"],
            cuda_version=host["driver"]["cuda"],
            criu_version=host["criu"],
            runtime_name=host["runtime"]["name"],
            runtime_version=host["runtime"]["version"],
        ),
        gpus=tuple(
            GpuRecord(
                gpu["uuid"],
                int(gpu["minor"]),
                int(gpu["index"]),
                gpu["model"],
                gpu["computeCapability"],
                int(gpu["memoryTotal"]),
                int(gpu["memoryUsed"]),
                gpu["pci"],
            )
            for gpu in document["gpus"]
        ),
        processes=tuple(
            GpuProcess(
                int(process["pid"]),
                process["name"],
                tuple(process["command"]),
                tuple((gpu["uuid"], int(gpu["memoryUsed"])) for gpu in process["gpus"]),
                tuple(RegionRecord(int(r["start"]), from_json(r)) for r in process["regions"]),
            )
            for process in document["processes"]
        ),
        mounts=tuple(DriverMount(m["key"], m["destination"], m["source"]) for m in document["mounts"]),
        nodes=tuple(
            DeviceNode(n["path"], int(n["major"]), int(n["minor"]), n["gpu"]) for n in document["nodes"]
        ),
        libraries=tuple(
            DriverLibrary(x["path"], int(x["size"]), x["buildId"], int(x["mode"]))
            for x in document["libraries"]
        ),
        dev=document["dev"],
        written=Written(*(int(document["written"][key]) for key in ("bytes", "known", "zero"))),
        peak_memory=int(document["peakMemory"]),
        timing=tuple(
            Step(t["step"], t["start"], t["seconds"], t.get("note", "")) for t in document["timing"]
        ),
        neutralised=tuple(
            NeutralisedProcess(
                int(process["pid"]),
                process["name"],
                tuple((int(number), path) for number, path in process["descriptors"]),
                int(process["mappings"]["count"]),
                int(process["mappings"]["bytes"]),
            )
            for process in document.get("neutralised", ())
        ),
        files=tuple(FileRecord(each["name"], from_json(each)) for each in document.get("files", ())),
        images=tuple(
            ImageRecord(each["name"], int(each["size"]), each["digest"])
            for each in document.get("images", ())
        ),
        plugin=document.get("plugin", ""),
    )
