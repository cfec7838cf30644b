"""The CDI files of this host: those of its two directories, and which of them has a device."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Sequence

from gpusnap.oci.base.dataclass import replace
from gpusnap.runtime_shim.base.errors import raise_as, reason
from gpusnap.runtime_shim.gpu.cdi.spec import LARGEST, CdiError, Spec, parse

FOLDERS = ("/etc/cdi", "/run/cdi")
"""The static directory and the dynamic one, which has precedence; CDI calls it /var/run/cdi."""


def load(
    folders: Iterable[str] = FOLDERS, *, report: Callable[[CdiError], None] | None = None
) -> tuple[Spec, ...]:
    """Return every spec of this host: *.json and *.yaml of each directory by name, not of subdirectories.

    If a later directory has the same device, it has precedence. If two files of one directory have it, that
    is an error, and neither counts. Raises CdiError at the first error; with `report`, the error is reported
    instead and the file omitted. A directory that does not exist counts as empty.
    """

    def failed(error: CdiError) -> None:
        if report is None:
            raise error
        report(error)

    ranks: list[list[Spec]] = []
    for folder in _drop_repeated(folders):
        specs = []
        for path in _files(folder, failed):
            try:
                specs.append(read(path))
            except CdiError as error:
                failed(error)
        ranks.append(specs)
    return _merge(ranks, failed)


def read(path: str) -> Spec:
    """Read the spec in one file. Raises CdiError."""
    with raise_as(CdiError, f"cannot read the CDI file {path}"):
        # Do not wait for the other end of a FIFO.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CdiError(f"{path}: is not a regular file")
            data = file.read(LARGEST + 1)
    return parse(data, path)


def _drop_repeated(folders: Iterable[str]) -> list[str]:
    """Return each directory once, where it has the highest precedence: /var/run/cdi is /run/cdi."""
    last = {os.path.realpath(folder): at for at, folder in enumerate(folders)}
    return sorted(last, key=last.__getitem__)


def _files(folder: str, failed: Callable[[CdiError], None]) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(e.path for e in entries if e.name.endswith((".json", ".yaml")) and not e.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        failed(CdiError(f"cannot read the CDI directory {folder}: {reason(error)}"))
        return []


def _merge(ranks: Sequence[Sequence[Spec]], failed: Callable[[CdiError], None]) -> tuple[Spec, ...]:
    owner: dict[tuple[str, str], Spec | None] = {}
    for specs in ranks:
        here: dict[tuple[str, str], Spec] = {}
        for spec in specs:
            for device in spec.devices:
                key = spec.kind, device.name
                if key in here:
                    first = here[key].path
                    failed(CdiError(f"{spec.path}: device {device.name!r} of {spec.kind} is also in {first}"))
                    owner[key] = None
                else:
                    owner[key] = here[key] = spec
    kept = []
    for spec in (each for specs in ranks for each in specs):
        devices = tuple(device for device in spec.devices if owner[spec.kind, device.name] is spec)
        if devices:
            kept.append(replace(spec, devices=devices))
    return tuple(kept)
