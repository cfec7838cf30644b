"""A manifest and its chunks as an OCI artifact without the records of an engine."""

from __future__ import annotations

from gpusnap.oci.chunks import artifact
from gpusnap.oci.chunks.table import Table
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.records.manifest import Manifest
from gpusnap.runtime_shim.records.manifest_json import encode


def label_tables(record: Manifest) -> list[tuple[str, Table]]:
    """Return the tables of a manifest, each with its label: PID and address, or the name of an image."""
    regions = [(f"{p.pid}:{r.start:x}", r.table) for p in record.processes for r in p.regions]
    return regions + [(each.name, each.table) for each in record.files]


def write_artifact(layout: Layout, record: Manifest) -> Descriptor:
    """Write an artifact of a manifest and its chunks, which exist already. Raises as Layout.add_blob does."""
    config = layout.add_blob(encode(record), media_type=artifact.CONFIG)
    chunks = artifact.chunk_layers(label_tables(record))
    return artifact.write(
        layout, artifact.Artifact(config, chunks=chunks, annotations=make_annotations(record))
    )


def make_annotations(record: Manifest) -> dict[str, str]:
    """The annotations with which an artifact describes its manifest to programs that read nothing else."""
    models = sorted({gpu.model for gpu in record.gpus})
    found = {
        "org.opencontainers.image.created": record.created,
        "org.criu.checkpoint.criu.version": record.host.criu_version,
        "org.criu.checkpoint.host.arch": record.host.architecture,
        "org.criu.checkpoint.host.kernel": record.host.kernel,
        "org.criu.checkpoint.runtime.name": record.host.runtime_name,
        "org.criu.checkpoint.runtime.version": record.host.runtime_version,
        "io.gpusnap.version": record.gpusnap,
        "io.gpusnap.container.id": record.container,
        "io.gpusnap.driver": f"{record.host.vendor} {record.host.driver_version}",
        "io.gpusnap.gpus": f"{len(record.gpus)} {', '.join(models)}".strip(),
        "io.gpusnap.memory": str(sum(gpu.memory_used for gpu in record.gpus)),
        "io.gpusnap.processes": str(len(record.processes)),
    }
    return {name: "".join(c if c.isprintable() else "?" for c in text)[:256] for name, text in found.items()}
