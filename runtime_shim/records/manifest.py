"""The manifest of a checkpoint: <image path>/gpusnap/manifest.json.

It is written last: without it, there is no checkpoint of GPU processes. The container is gone once CRIU has
dumped it (without --leave-running), so nothing may fail after that. Therefore `Draft` writes the whole
manifest to disk before, under another name, and afterwards only renames it.

    gpusnap/                  made first: an image directory that has it belongs to gpusnap
    gpusnap/manifest.pending  while CRIU dumps
    gpusnap/manifest.json     the checkpoint is complete

This module has its content. manifest_json.py has its format, manifest_file.py reads and writes the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim._version import __version__
from gpusnap.runtime_shim.base.transaction import Step

if TYPE_CHECKING:
    from gpusnap.oci.chunks.table import Table
    from gpusnap.runtime_shim.gpu.api.driver import Node
    from gpusnap.runtime_shim.gpu.nvidia.driver_files import MappedFile

FOLDER = "gpusnap"
INVENTORY = "inventory.img"
"""The last file that CRIU writes and that a restore needs; Podman refuses an archive without it."""
NAME = "manifest.json"
VERSION = "1.0"
PENDING = "manifest.pending"
INDEX = "index.json"
"""The index of the layout beside it (image-spec, image-layout.md)."""
DIGEST = "io.gpusnap.manifest.digest"
"""An annotation of that index: the digest of manifest.json."""
LARGEST_INDEX = 4 << 20
# Far above any real one (4096 processes make about 1 MiB), and still harmless to parse.
LARGEST = 64 << 20


@dataclass(frozen=True, slots=True)
class GpuRecord:
    """A GPU on the host of the checkpoint; sizes in bytes."""

    uuid: str
    minor: int
    index: int
    model: str
    compute_capability: str
    memory_total: int
    memory_used: int
    """Bytes used by this container's processes."""
    pci: str = ""
    """Address in sysfs's format; empty if it is not known."""


@dataclass(frozen=True, slots=True)
class RegionRecord:
    """Memory of a process that is beside CRIU's images, in chunks."""

    start: int
    """Its address."""
    table: Table


@dataclass(frozen=True, slots=True)
class FileRecord:
    """An image of CRIU that is in chunks, and not in the image's directory."""

    name: str
    table: Table


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """An image of CRIU in the image directory."""

    name: str
    size: int
    """Bytes."""
    digest: str
    """sha256:<64 hex> of the content."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process whose GPU state is in the checkpoint."""

    pid: int
    """In the container's PID namespace; unchanged by a restore."""
    name: str
    command: tuple[str, ...]
    gpus: tuple[tuple[str, int], ...]
    """(UUID, bytes used) of every GPU that it could see, unused ones too."""
    regions: tuple[RegionRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class NeutralisedProcess:
    """A process that held inherited GPU files; in the checkpoint it has /dev/null instead."""

    pid: int
    """In the container's PID namespace."""
    name: str
    descriptors: tuple[tuple[int, str], ...]
    """Number, and the path of its old target."""
    mappings: int
    """The number of replaced mappings."""
    mapped: int
    """Their bytes."""


@dataclass(frozen=True, slots=True)
class DriverMount:
    """A mount of the driver that config.json does not list; its name in CRIU is `key`."""

    key: str
    destination: str
    source: str


@dataclass(frozen=True, slots=True)
class ChunkTotals:
    """The GPUs' memory that went into chunks; bytes."""

    stored: int = 0
    """Bytes of new blobs, compressed."""
    known: int = 0
    """Bytes of memory that was linked, because an earlier checkpoint had it."""
    zero: int = 0
    """Bytes of zeros, which are not stored."""


@dataclass(frozen=True, slots=True)
class HostRecord:
    """The host of the checkpoint."""

    architecture: str
    kernel: str
    vendor: str
    driver_version: str
    cuda_version: str
    criu_version: str
    runtime_name: str
    runtime_version: str


def parse_time(created: str) -> float:
    """Return a time of RFC 3339 as time.time() has it; 0 if it is none."""
    from datetime import datetime  # a millisecond, and most who import this module do not need it

    try:
        return datetime.fromisoformat(created).timestamp()
    except (ValueError, OverflowError):
        return 0.0


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a checkpoint's manifest."""

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
    nodes: tuple[Node, ...] = ()
    """The GPUs' device nodes in the container's /dev."""
    libraries: tuple[MappedFile, ...] = ()
    """The driver's files that GPU processes have mapped, by their paths there: CRIU needs them unchanged."""
    written: ChunkTotals = ChunkTotals()
    peak_memory: int = 0
    """The most RAM that gpusnap used, in bytes, with the memory in files; 0 if it is not known."""
    dev: str = ""
    """The name of CRIU's image of the container's /dev; empty if that is no tmpfs of its own."""
    neutralised: tuple[NeutralisedProcess, ...] = ()
    """At this checkpoint, not at earlier ones."""
    files: tuple[FileRecord, ...] = ()
    """If `pages` is store."""
    images: tuple[ImageRecord, ...] = ()
    """CRIU's images in the image directory; earlier versions of gpusnap wrote none of these."""
    plugin: str = ""
    """The plugin of CRIU that suspended the processes, and restores them; empty if gpusnap does."""
    gpusnap: str = __version__
    version: str = VERSION

    @property
    def tables(self) -> list[Table]:
        """Return the tables of everything in chunks: regions of memory, and images."""
        regions = [region.table for process in self.processes for region in process.regions]
        return regions + [each.table for each in self.files]

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes in bytes of images in chunks, by name."""
        return {each.name: each.table.size for each in self.files}
