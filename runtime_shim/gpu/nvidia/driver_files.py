"""NVIDIA's driver as files of this host: which files belong to it, and their version and build.

A container's config.json mounts driver files of the host that it was made on: libcuda.so.560.35.03, firmware,
nvidia-smi. On a host with another driver, the same mounts need this host's files. An archive from elsewhere
names the paths, so only the driver's files are searched, and every result is a regular file that this host's
CDI specs, its loader's cache or the driver's own directories list.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import reason

if TYPE_CHECKING:
    from gpusnap.runtime_shim.gpu.cdi.spec import Spec

_VERSION = r"[0-9]{3,4}(?:\.[0-9]{1,3}){1,2}"
# The files that nvidia-ctk (internal/discover, pkg/nvcdi) and libnvidia-container (nvc_info.c) mount.
_LIBRARY = r"""(?: lib(?: cuda | cudadebugger | nvcuvid | nvoptix | nvidia-(?!container)[\w-]+
    | (?:EGL|GLX|GLESv1_CM|GLESv2|vdpau|glxserver)_nvidia )\.so(?:\.[0-9]+){0,4}
    | nvidia_drv\.so | nvidia-drm_gbm\.so )"""
_FIRMWARE = r"gsp[\w-]*\.bin"
_PROGRAM = r"""(?: nvidia-(?: smi | debugdump | persistenced | cuda-mps-(?:control|server) | imex(?:-ctl)? )
    | nv-fabricmanager )"""

_CONFIG = r"""(?: [\w.-]*nvidia[\w.-]*\.json | nvoptix\.bin | nvidia-application-profiles-[\w.-]+
    | 10-nvidia\.conf | nvidia-drm-outputclass\.conf )"""
_CONFIGS = r"""(?: glvnd/egl_vendor\.d | egl/egl_external_platform\.d | nvidia | X11/xorg\.conf\.d
    | vulkan/(?:icd|(?:im|ex)plicit_layer)\.d )"""
# Where the driver may have a root of its own: NVIDIA's GPU operator, Google's nodes, NixOS.
_ROOT = r"""(?: /run/nvidia/driver | /home/kubernetes/bin/nvidia | /run/opengl-driver
    | /nix/store/[0-9a-z]{32}-nvidia-x11-[\w.+-]+ )?"""
_NAME = compile_later(rf"(?x) {_LIBRARY} | {_FIRMWARE} | {_PROGRAM} | {_CONFIG}", re.ASCII)
_DRIVER = compile_later(
    rf"""(?x)
    {_ROOT}(?:/usr)?/(?:lib|lib32|lib64)/(?:[\w.+-]+/){{0,4}} {_LIBRARY} |
    {_ROOT}(?:/usr)?/lib/firmware/(?:updates/)?(?:[\w.+-]+/)?nvidia/{_VERSION}(?:/{_FIRMWARE})? |
    {_ROOT}(?:/usr)?/s?bin/{_PROGRAM} | /usr/lib/nvidia/(?:[\w.-]+/){{0,2}}{_PROGRAM} |
    {_ROOT}(?:/usr/share|/etc)/{_CONFIGS}/{_CONFIG} |
    /(?:var/)?run/nvidia-(?:persistenced|fabricmanager)/socket |
    /proc/driver/nvidia(?:/[\w.:-]+)*
    """,
    re.ASCII,
)
_NUMBERED = compile_later(rf"(?P<stem>.+\.so)\.(?P<version>{_VERSION}|(?P<major>[0-9]+)(?:\.[0-9]+)*)")
_WIDE = compile_later(r"/(?:usr/)?(?:lib64|(?:lib/)?(?:x86_64|aarch64|powerpc64le|riscv64)-linux-gnu)/")
_NARROW = compile_later(r"/(?:lib32|i[36]86-linux-gnu|arm-linux-gnueabihf)/")

_LIBRARY_FOLDERS = tuple(
    f"/usr/{folder}"
    for folder in (
        "lib/x86_64-linux-gnu",
        "lib/aarch64-linux-gnu",
        "lib64",
        "lib",
        "lib/i386-linux-gnu",
        "lib32",
    )
)
_WITHIN = (
    *("", "/vdpau", "/gbm", "/nvidia", "/nvidia/current", "/nvidia/xorg"),
    *("/xorg/modules/drivers", "/xorg/modules/extensions"),
)
_OTHER_FOLDERS = (
    *("/usr/bin", "/usr/sbin", "/usr/lib/nvidia", "/usr/lib/nvidia/current"),
    *(
        f"{base}/{folder}"
        for base in ("/usr/share", "/etc")
        for folder in (
            *("glvnd/egl_vendor.d", "egl/egl_external_platform.d", "nvidia", "X11/xorg.conf.d"),
            *("vulkan/icd.d", "vulkan/implicit_layer.d", "vulkan/explicit_layer.d"),
        )
    ),
)
_LOADER_CACHE = "/etc/ld.so.cache"
_LOADER_CACHE_BYTES = 64 << 20
_PT_NOTE, _NT_GNU_BUILD_ID = 4, 3  # elf.h
_PROGRAM_HEADERS = 256


@dataclass(frozen=True, slots=True)
class File:
    """A regular file of this host's driver."""

    path: str
    """The path as listed; may be a symbolic link."""
    real: str
    bits: int
    """64 or 32 for an ELF file, else 0."""
    rank: int
    """The source: 0 a CDI spec, 1 the loader's cache, 2 one of the driver's directories."""


@dataclass(frozen=True, slots=True)
class DriverFiles:
    """The driver's files on this host."""

    version: str
    files: tuple[File, ...]


@dataclass(frozen=True, slots=True)
class MappedFile:
    """A file that a process has mapped, with what CRIU compares."""

    path: str
    size: int
    build_id: str
    mode: int
    """st_mode, with the type."""


def is_driver_file(path: str) -> bool:
    """Whether `path` is a place of NVIDIA's driver for its files, or its sockets or directories in /proc."""
    return bool(_DRIVER.fullmatch(path)) and not {".", ".."} & {*path.split("/")}


def replace_version(path: str, old: str, new: str) -> str:
    """Return `path` with each driver version `old` replaced by `new`; never a part of another version."""
    if not all(re.fullmatch(_VERSION, version) for version in (old, new)):
        return path
    return re.sub(rf"(?<![0-9])(?<![0-9]\.){re.escape(old)}(?![0-9]|\.[0-9])", new, path)


def find_files(specs: Iterable[Spec], version: str, *, root: str = "/") -> DriverFiles:
    """Return the driver's files here, from CDI specs, the loader's cache and its directories, in that order.

    `version`: the driver's. Everything is searched below `root`. What cannot be read is omitted.
    """
    files = list(_iterate_regular(_iterate_mounted(specs), 0, root))
    files += _iterate_regular((path for _, path in loader_cache(_content(_LOADER_CACHE, root))), 1, root)
    folders = [os.path.dirname(each.real) for each in files if _get_stem(each.real) == "libcuda.so"]
    for folder in dict.fromkeys((*folders, *_folders(version))):
        files += _iterate_regular(_list_folder(folder, root), 2, root)
    return DriverFiles(version, tuple(files))


def find_counterpart(
    source: str, old: str, new: str, known: DriverFiles, *, among: Iterable[str] = ()
) -> str | None:
    """Return this host's file to mount for `source`, a file of driver version `old`, or None.

    `source` itself if this host has it. `new`: the version of this host's driver. `among`: the sources of the
    container's other mounts, because only a /usr/lib64 shows whether /usr/lib has 64-bit files. Reads only
    `known`.
    """
    wanted = replace_version(source, old, new)
    listed = any(each.path == wanted and each.rank == 0 for each in known.files)
    if not is_driver_file(source) and not listed:
        return None
    if any(each.path == source for each in known.files):
        return source
    bits = _bits(source, among) if _get_stem(source) else 0
    fits = [each for each in known.files if _matches(each, wanted, new, bits)]
    fits.sort(key=lambda each: (each.rank, os.path.dirname(each.path) != os.path.dirname(wanted)))
    if fits:
        return fits[0].real
    return _find_own_version(wanted, bits, known) if source == wanted else None


def loader_cache(data: bytes) -> tuple[tuple[str, str], ...]:
    """Return (name, path) of each library in /etc/ld.so.cache; () if its format is not known.

    glibc, sysdeps/generic/dl-cache.h: struct cache_file_new and file_entry_new, alone or after the old
    cache_file; strings are counted from the start of cache_file_new. Entries that lead out of the file are
    omitted.
    """
    if data.startswith(b"ld.so-1.7.0") and len(data) >= 16:
        data = data[(16 + 12 * struct.unpack_from("=I", data, 12)[0] + 7) // 8 * 8 :]
    if not data.startswith(b"glibc-ld.so.cache1.1") or len(data) < 48:
        return ()
    count = min(struct.unpack_from("=I", data, 20)[0], (len(data) - 48) // 24)
    rows = (struct.unpack_from("=iII", data, 48 + 24 * each) for each in range(count))
    texts = ((_read_string(data, name), _read_string(data, path)) for _, name, path in rows)
    return tuple((name, path) for name, path in texts if name and path.startswith("/"))


def build_id(path: str) -> str:
    """Return the build-id of an ELF file in hex, as CRIU finds it; "" if there is none.

    CRIU reads the first MiB, and takes the first note of the type NT_GNU_BUILD_ID whatever its owner
    (criu/files-reg.c, get_build_id). Raises OSError.
    """
    with open(path, "rb") as file:
        return _note(file.read(1 << 20)).hex()


def describe_mapped(path: str, file: str = "") -> MappedFile:
    """Return what CRIU will compare for `path`; read from `file` if this process knows it by another name.

    Raises OSError.
    """
    status = os.stat(file or path)
    build = build_id(file or path) if stat.S_ISREG(status.st_mode) else ""
    return MappedFile(path, status.st_size, build, status.st_mode)


def explain_difference(path_here: str, size: int, build_id: str, *, mode: int | None = None) -> str:
    """Say why CRIU would refuse this host's file in place of a mapped one; "" if it would not.

    criu/files-reg.c, open_path and validate_file: always the size, then st_mode, and the build-id if both
    files have one. `mode` is omitted if it is not known.
    """
    try:
        here = describe_mapped(path_here)
    except OSError as error:
        return f"{path_here} cannot be read here: {reason(error)}"
    if not stat.S_ISREG(here.mode):
        return f"{path_here} is not a regular file here"
    if here.size != size:
        return f"{path_here} has {here.size} bytes here but had {size} at the checkpoint"
    if build_id and here.build_id and here.build_id != build_id.lower():
        return (
            f"{path_here} here is another build ({here.build_id}) than at the checkpoint ({build_id:.1024})"
        )
    if mode is not None and here.mode != mode:
        return f"{path_here} has the mode {here.mode:o} here but had {mode:o} at the checkpoint"
    return ""


# Which file matches


def _get_stem(path: str) -> str:
    """Return libcuda.so for libcuda.so.560.35.03; "" if it is no library."""
    name = os.path.basename(path)
    at = name.find(".so")
    return name[: at + 3] if at > 0 and name[at + 3 : at + 4] in ("", ".") else ""


def _matches(file: File, wanted: str, new: str, bits: int) -> bool:
    name = os.path.basename(wanted)
    if name not in (os.path.basename(file.path), os.path.basename(file.real)) or not _as_wide(file, bits):
        return False
    numbered = _NUMBERED.fullmatch(os.path.basename(file.real))
    if numbered and not numbered["major"]:
        # Not a libcuda.so.1 of a compatibility package, nor one that another driver left.
        return numbered["version"] == new
    if _get_stem(name) or re.fullmatch(_PROGRAM, name, re.VERBOSE):
        return True
    # Firmware and settings: their directory says for which version, or purpose (icd.d), they are.
    folder = os.path.basename(os.path.dirname(wanted))
    return folder in (os.path.basename(os.path.dirname(path)) for path in (file.path, file.real))


def _find_own_version(wanted: str, bits: int, known: DriverFiles) -> str | None:
    """Return the one library of the same name and first number: libnvidia-egl-gbm.so.1.1.2 for 1.1.1."""
    own = _NUMBERED.fullmatch(os.path.basename(wanted))
    if not own or not own["major"]:
        return None
    for rank in range(3):
        fits = set()
        for file in known.files:
            theirs = _NUMBERED.fullmatch(os.path.basename(file.real))
            same = theirs and (theirs["stem"], theirs["major"]) == (own["stem"], own["major"])
            if same and file.rank == rank and _as_wide(file, bits):
                fits.add(file.real)
        if fits:
            return fits.pop() if len(fits) == 1 else None
    return None


def _as_wide(file: File, bits: int) -> bool:
    return not bits or (file.bits or _bits(file.path, ())) == bits


def _bits(path: str, among: Iterable[str]) -> int:
    """By the directory. A bare /usr/lib is for 32 bits on distributions that have /usr/lib64 as well."""
    if _NARROW.search(path):
        return 32
    if _WIDE.search(path):
        return 64
    name = os.path.basename(path)
    return 32 if any(os.path.basename(each) == name and _WIDE.search(each) for each in among) else 64


# Which files exist


def _join_root(root: str, path: str) -> str:
    return f"{root.rstrip('/')}{path}"


def _iterate_mounted(specs: Iterable[Spec]) -> Iterator[str]:
    for spec in specs:
        if spec.kind.startswith("nvidia.com/"):
            for edits in (spec.edits, *(device.edits for device in spec.devices)):
                yield from (mount.host_path for mount in edits.mounts)


def _folders(version: str) -> Iterator[str]:
    for folder in _LIBRARY_FOLDERS:
        yield from (f"{folder}{within}" for within in _WITHIN)
    for base in ("/lib/firmware", "/usr/lib/firmware"):
        for within in ("updates", f"updates/{os.uname().release}", os.uname().release, "."):
            yield os.path.normpath(f"{base}/{within}/nvidia/{version}")
    yield from _OTHER_FOLDERS


def _list_folder(folder: str, root: str) -> list[str]:
    try:
        return [f"{folder}/{name}" for name in sorted(os.listdir(_join_root(root, folder)))]
    except OSError:
        return []


def _iterate_regular(paths: Iterable[str], rank: int, root: str) -> Iterator[File]:
    """Yield those of `paths` that have a driver file's name and are, or lead to, such regular files."""
    top = os.path.realpath(root).rstrip("/")
    for path in dict.fromkeys(paths):
        if not path.startswith("/") or ".." in path.split("/") or not _NAME.fullmatch(os.path.basename(path)):
            continue
        real = os.path.realpath(_join_root(root, path))
        if not real.startswith(f"{top}/") or not _NAME.fullmatch(os.path.basename(real)):
            continue
        try:
            if stat.S_ISREG(os.stat(real).st_mode):
                yield File(path, real[len(top) :], _elf_bits(real), rank)
        except OSError:
            continue


def _content(path: str, root: str) -> bytes:
    try:
        with open(_join_root(root, path), "rb") as file:
            return file.read(_LOADER_CACHE_BYTES)
    except OSError:
        return b""


def _read_string(data: bytes, at: int) -> str:
    end = data.find(b"\0", at, at + 4096)
    return os.fsdecode(data[at:end]) if end > at else ""


# ELF: elf(5)


def _elf_bits(path: str) -> int:
    with open(path, "rb") as file:
        start = file.read(5)
    return {b"\x7fELF\1": 32, b"\x7fELF\2": 64}.get(start, 0)


def _note(data: bytes) -> bytes:
    """Return the first NT_GNU_BUILD_ID note in `data`, the start of an ELF file; or b""."""
    if len(data) < 64 or data[:4] != b"\x7fELF" or data[4] not in (1, 2) or data[5] not in (1, 2):
        return b""
    order = "<" if data[5] == 1 else ">"
    # Elf32_Ehdr, Elf32_Phdr or Elf64_Ehdr, Elf64_Phdr: e_phoff, e_phnum; p_type, p_offset, p_filesz.
    wide = data[4] == 2
    table = struct.unpack_from(f"{order}Q" if wide else f"{order}I", data, 32 if wide else 28)[0]
    count = struct.unpack_from(f"{order}H", data, 56 if wide else 44)[0]
    header = struct.Struct(f"{order}I4xQ16xQ16x" if wide else f"{order}II8xI12x")
    for each in range(min(count, _PROGRAM_HEADERS) if table else 0):
        if table + (each + 1) * header.size > len(data):
            break
        kind, offset, size = header.unpack_from(data, table + each * header.size)
        if kind == _PT_NOTE and offset and (note := _in_notes(data, offset, size, f"{order}III")) is not None:
            return note
    return b""


def _in_notes(data: bytes, at: int, size: int, header: str) -> bytes | None:
    """None if no note here has the type; b"" if one has it and cannot be used, as in CRIU."""
    end = min(at + size, len(data) - 12)
    while at <= end:
        name, length, kind = struct.unpack_from(header, data, at)
        start = at + 12 + (name + 3) // 4 * 4
        if kind == _NT_GNU_BUILD_ID:
            return data[start : start + length] if length <= 512 and start + length <= len(data) else b""
        at = start + (length + 3) // 4 * 4
    return None
