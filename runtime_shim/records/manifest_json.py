"""The manifest as JSON: writes it, and reads it if it follows the schema and gpusnap's own rules.

The schema is manifest.schema.json beside this file. What it cannot express (a GPU listed twice, a process
with a GPU that is not in the list) is checked here. A manifest may come from anywhere, so each number has a
limit.

Importing jsonschema takes as long as all of a small restore's own modules. So a document is compared with the
schema in another process, a Companion, if question_process has one.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from gpusnap.oci.base.json_text import parse_json
from gpusnap.runtime_shim._version import __version__
from gpusnap.runtime_shim.base.errors import GpusnapError, ManifestError, ManifestVersion, own_file_unreadable
from gpusnap.runtime_shim.base.import_ahead import import_meanwhile
from gpusnap.runtime_shim.base.question_process import Companion
from gpusnap.runtime_shim.base.transaction import Step
from gpusnap.runtime_shim.records.manifest import (
    LARGEST,
    VERSION,
    ChunkTotals,
    DriverMount,
    FileRecord,
    GpuProcess,
    GpuRecord,
    HostRecord,
    ImageRecord,
    Manifest,
    NeutralisedProcess,
    RegionRecord,
)

_COMPANION = Companion()
_DECODED_INTO = (
    "gpusnap.oci.base.errors",
    "gpusnap.oci.chunks.table",
    "gpusnap.runtime_shim.gpu.api.driver",
    "gpusnap.runtime_shim.gpu.nvidia.driver_files",
)
"""What `decode` imports late."""
# Seconds for its import there, and for an answer; after that it is done here.
_PATIENCE = 30.0


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as JSON, checked against the schema; raises ManifestError."""
    document = _to_json(manifest)
    _check(document, "the new manifest")
    files = document.get("files", [])
    compact = bool(files) or any(process["regions"] for process in document["processes"])
    data = json.dumps(document, indent=None if compact else 1).encode() + b"\n"
    if len(data) > LARGEST:
        # It only makes a restore faster.
        for table in (*(each for process in document["processes"] for each in process["regions"]), *files):
            table.pop("blake3", None)
        data = json.dumps(document).encode() + b"\n"
    if len(data) > LARGEST:
        raise ManifestError(
            f"the new manifest has {len(data) >> 20} MiB, but at most {LARGEST >> 20} MiB can be read",
            hint="set a larger memory.chunk-size",
        )
    return data


def decode(data: bytes, where: str) -> Manifest:
    """Parse the manifest in `data`. Raises ManifestError, ManifestVersion, which name it by `where`."""
    try:
        document = parse_json(data)
    except ValueError as error:
        raise ManifestError(
            f"{where} is cut short or not JSON: {error}", hint="use another copy of the checkpoint"
        ) from error
    _check_version(document, where)
    _check(document, where)
    from gpusnap.oci.base.errors import ChunkError

    try:
        return _from_json(document)
    except ChunkError as error:
        raise ManifestError(f"{where} is not a gpusnap manifest: {error}") from error


def prepare() -> None:
    """Import what `decode` and the check of a manifest need: 0.05 s, in a Companion if there is one.

    Errors are reported by these themselves.
    """
    with import_meanwhile(*_DECODED_INTO), suppress(GpusnapError, ImportError, TimeoutError):
        _COMPANION.ask(_load, within=_PATIENCE)


def _load() -> None:
    _validator()


@functools.cache
def _validator() -> Any:
    # Imported here, because a container without a GPU must not wait for it.
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
            f"{where} has version {version[:20]!r}, but gpusnap {__version__} reads {major}.x",
            hint="restore it with the gpusnap that made it, or a newer one",
        )


def _fault(document: Any) -> str:
    """Return where and why a document violates the schema; "" if it does not."""
    error = min(
        _validator().iter_errors(document), key=lambda e: list(map(str, e.absolute_path)), default=None
    )
    if error is None:
        return ""
    place = "/".join(map(str, error.absolute_path)) or "the top level"
    return f"at {place}, {error.message[:200]}"


def _check(document: Any, where: str) -> None:
    if _validator.cache_info().currsize:
        fault = _fault(document)
    else:
        try:
            fault = _COMPANION.ask(_fault, document, within=_PATIENCE)
        except (GpusnapError, TimeoutError, RecursionError):  # killed twice; or it is too deep for a message
            fault = _fault(document)
    if fault:
        raise ManifestError(f"{where} is not a gpusnap manifest: {fault}")
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
        _refuse_repeated(what, names, where)
    known = {gpu["uuid"] for gpu in document["gpus"]}
    for node in document["nodes"]:
        if node["gpu"] and node["gpu"] not in known:
            raise ManifestError(
                f"{where}: device {node['path']} belongs to a GPU {node['gpu']} that is not listed"
            )
    for process in document["processes"]:
        _refuse_repeated(f"GPU of process {process['pid']},", [gpu["uuid"] for gpu in process["gpus"]], where)
        for gpu in process["gpus"]:
            if gpu["uuid"] not in known:
                raise ManifestError(
                    f"{where}: process {process['pid']} has a GPU {gpu['uuid']} that is not listed"
                )


def _refuse_repeated(what: str, names: list[Any], where: str) -> None:
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
        "gpus": _rows(manifest.gpus),
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
        "mounts": _rows(manifest.mounts),
        "nodes": _rows(manifest.nodes),
        "libraries": _rows(manifest.libraries),
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
        document["images"] = _rows(manifest.images)
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
    # Imported here, as above: whether an image belongs to gpusnap is checked without reading its manifest.
    from gpusnap.oci.chunks.table import from_json
    from gpusnap.runtime_shim.gpu.api.driver import Node
    from gpusnap.runtime_shim.gpu.nvidia.driver_files import MappedFile

    # int(): for JSON Schema, 7.0 is an integer too
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
        gpus=_records(GpuRecord, document["gpus"]),
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
        mounts=_records(DriverMount, document["mounts"]),
        nodes=_records(Node, document["nodes"]),
        libraries=_records(MappedFile, document["libraries"]),
        dev=document["dev"],
        written=ChunkTotals(*(int(document["written"][key]) for key in ("bytes", "known", "zero"))),
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
        images=_records(ImageRecord, document.get("images", ())),
        plugin=document.get("plugin", ""),
    )


def _name(field: str) -> str:
    """Return the name in JSON of a field: computeCapability for compute_capability."""
    first, *others = field.split("_")
    return first + "".join(map(str.capitalize, others))


def _rows(records: Iterable[Any]) -> list[dict[str, Any]]:
    """Return records whose fields are texts and numbers as objects, with the fields in their order."""
    return [{_name(field): getattr(each, field) for field in each.__slots__} for each in records]


def _records(kind: Any, rows: Iterable[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Return the records, of a dataclass with slots, of such objects."""
    names = {field: _name(field) for field in kind.__slots__}
    each = ({field: row[name] for field, name in names.items()} for row in rows)
    return tuple(kind(**{field: _whole(value) for field, value in fields.items()}) for fields in each)


def _whole(value: str | float) -> str | int:
    """Return a number as an integer: for JSON Schema, 7.0 is one too."""
    return int(value) if isinstance(value, float) else value
