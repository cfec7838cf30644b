"""The manifest of a checkpoint: <image path>/gpusnap/manifest.json.

It is written last: a checkpoint of GPU processes without it is no checkpoint. Because the container is gone
once CRIU has dumped it (without --leave-running), nothing may be left to fail after that: `Draft` puts the
whole manifest on disk beforehand, under another name, and afterwards only renames it.

    gpusnap/                  made first: an image directory that has it belongs to gpusnap
    gpusnap/manifest.pending  while CRIU dumps
    gpusnap/manifest.json     the checkpoint is whole

Here is what it says. manifest_json.py has its form, manifest_file.py reads and writes the file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim._version import __version__
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
class ChunkTotals:
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
    written: ChunkTotals = ChunkTotals()
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
