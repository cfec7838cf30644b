"""The annotations of an artifact about its checkpoint, from the engine's records and gpusnap's manifest.

Keys are those of checkpointctl (lib/annotations.go), of image-spec v1.1 (annotations.md), and io.gpusnap's.
The records may come from anybody: values are limited in length, and printable.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from gpusnap.oci.base.json_text import parse_json
from gpusnap.runtime_shim.records.artifact import make_annotations
from gpusnap.runtime_shim.records.manifest import Manifest

CREATED = "org.opencontainers.image.created"
CONTAINER_ID = "io.gpusnap.container.id"
VOLUMES = "io.gpusnap.volumes"
"""The names of the volumes whose files are in it."""
_CRIU = "org.criu.checkpoint."
_LONGEST = 256
# RFC 3339 has years of four digits.
_LAST = 253402300799


def annotations_of(config: bytes, spec: bytes, record: Manifest | None, *, written: float) -> dict[str, str]:
    """Return the annotations of a checkpoint, by the contents of config.dump and spec.dump (may be empty).

    written: the time of config.dump in seconds, for a checkpoint without a manifest. The name of the runtime
    is the engine's name for it, which `podman container restore IMAGE` compares with its own.
    """
    values = _object(config)
    ours = make_annotations(record) if record is not None else {}
    found = {
        CREATED: time_of(written),
        CONTAINER_ID: values.get("id"),
        **ours,
        f"{_CRIU}engine.name": _engine(_object(spec)),
        f"{_CRIU}container.name": values.get("name"),
        f"{_CRIU}pod.id": values.get("pod"),
        f"{_CRIU}rootfsImageName": values.get("rootfsImageName"),
        f"{_CRIU}rootfsImageID": values.get("rootfsImageID") or values.get("rootfsImageRef"),
        f"{_CRIU}rawImageName": values.get("RawImageName") or values.get("rootfsImage"),
    }
    if isinstance(values.get("runtime"), str) and values["runtime"]:
        found[f"{_CRIU}runtime.name"] = values["runtime"]
    return bounded(found)


def bounded(found: Mapping[str, object]) -> dict[str, str]:
    """Return the values that are strings, printable and not too long, without empty ones."""
    texts = {key: _make_printable(value) for key, value in found.items() if isinstance(value, str)}
    return {key: text for key, text in sorted(texts.items()) if text}


def _object(data: bytes) -> Mapping[str, object]:
    try:
        value: object = parse_json(data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _engine(spec: Mapping[str, object]) -> str:
    """Return which engine wrote a spec.dump, by the annotations that each leaves there."""
    notes = spec.get("annotations")
    if not isinstance(notes, dict):
        return "podman"
    # libpod, pkg/annotations; CRI-O, pkg/annotations (io.container.manager).
    if notes.get("io.container.manager") == "cri-o":
        return "cri-o"
    # containerd, internal/cri/annotations.
    return "containerd" if "io.kubernetes.cri.container-type" in notes else "podman"


def time_of(seconds: float) -> str:
    """Return seconds since 1970 in RFC 3339, UTC."""
    moment = datetime.fromtimestamp(min(max(seconds, 0), _LAST), UTC)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


def _make_printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text[:_LONGEST])
