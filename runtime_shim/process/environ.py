"""The current environment of a process, which may differ from the one it was started with.

/proc/PID/environ is what execve(2) put there. setenv(3), and with it Python's os.environ and NCCL's
configuration files, change the strings that libc's `environ` (environ(7)) points to. Its address is in the
dynamic symbol table of the libc that the process has mapped (elf(5)).
"""

from __future__ import annotations

import os
import struct

from gpusnap.runtime_shim.base import question_process
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.memory import copy as copies

# glibc, whose file had its version in the name before 2.34; musl's libc is its loader.
_LIBC = ("libc.so.6", "libc-2.", "ld-musl-")
_SYMBOL = b"environ"
_SHT_DYNSYM, _ET_EXEC = 11, 2  # elf.h
_MOST = 20_000  # variables, and bytes of one
_LONGEST = 128 << 10  # MAX_ARG_STRLEN of Linux
_ALL = 32 << 20  # bytes of all variables: a program with more is not examined
_PAGE = 4096
_TABLE = 16 << 20  # bytes of a table in an ELF file; libc's have 100 KiB


def live_environment(pid: int) -> dict[str, str] | None:
    """Return the variables that getenv(3) finds in the process; None if this cannot be determined.

    None for a program that is statically linked, is not 64-bit, or has ended. The process is only read
    (process_vm_readv(2)), and may change its variables meanwhile: a damaged string is omitted. Raises
    Unanswered if its memory, or its libc, is in a file whose server does not answer.
    """
    return question_process.ask(pid, "its variables", _read_live, pid)


def _read_live(pid: int) -> dict[str, str] | None:
    try:
        where = _find_pointer(pid)
        return _read_strings(pid, where) if where else None
    except (OSError, ValueError, IndexError, struct.error, OverflowError):
        return None


def _read_strings(pid: int, where: int) -> dict[str, str]:
    """Read the strings of an array of pointers that ends with a null pointer."""
    found: dict[str, str] = {}
    (array,) = struct.unpack("<Q", copies.peek(pid, where, 8))
    left = _ALL
    for number in range(_MOST if array else 0):
        (address,) = struct.unpack("<Q", copies.peek(pid, array + 8 * number, 8))
        if not address:
            break
        text = _read_string(pid, address)
        left -= len(text)
        if left < 0:
            raise ValueError("unterminated list of variables")
        name, equals, value = text.partition("=")
        if equals:
            found.setdefault(name, value)  # getenv returns the first one
    return found


def _read(file: int, offset: int, size: int) -> bytes:
    data = os.pread(file, size, offset)
    if len(data) != size:
        raise ValueError("the file is truncated")
    return data


def _read_string(pid: int, address: int) -> str:
    """Read a string up to its null byte, page by page: the next page may not be mapped."""
    text = bytearray()
    while len(text) < _LONGEST:
        part = copies.peek(pid, address + len(text), _PAGE - (address + len(text)) % _PAGE)
        end = part.find(b"\0")
        if end >= 0 or not part:
            text += part[: max(end, 0)]
            break
        text += part
    return text.decode("utf-8", "surrogateescape")


def _find_pointer(pid: int) -> int:
    """Return the address of `environ` in the process; 0 if it has no known libc.

    If a program that is not position-independent uses `environ`, its own copy is the valid one
    (R_X86_64_COPY).
    """
    firsts = [fields for fields in proc.named_mappings(pid) if fields[2] == "00000000"]
    program = os.readlink(f"{proc.PROC}/{pid}/exe")
    programs = [fields for fields in firsts if fields[5] == program]
    libraries = [fields for fields in firsts if fields[5].rpartition("/")[2].startswith(_LIBC)]
    if not libraries:
        return 0
    for fields in (*programs[:1], *libraries[:1]):
        start, end = (int(each, 16) for each in fields[0].split("-"))
        # By map_files, even if the file has been replaced, or is in another mount namespace.
        file = os.open(f"{proc.PROC}/{pid}/map_files/{start:x}-{end:x}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            value, relative = _read_value(file)
        finally:
            os.close(file)
        if value:
            return value + start * relative
    return 0


def _read_value(file: int) -> tuple[int, bool]:
    """Return the value of `environ` in a 64-bit ELF file, and whether it is relative to the file's start.

    0 if the file does not have it. Raises ValueError, IndexError or OverflowError if it is not such a file.
    The file belongs to the container, which may shorten it at any moment, so it is not mapped.
    """
    head = _read(file, 0, 64)
    if head[:6] != b"\x7fELF\2\1":
        raise ValueError("not a 64-bit little-endian file")
    relative = struct.unpack_from("<H", head, 16)[0] != _ET_EXEC
    (first,) = struct.unpack_from("<Q", head, 40)
    size, number = struct.unpack_from("<HH", head, 58)
    table = _read_table(file, first, size * number)
    headers = [struct.unpack_from("<IIQQQQIIQQ", table, size * at) for at in range(number)]
    dynamic = next((header for header in headers if header[1] == _SHT_DYNSYM), None)
    if dynamic is None:
        return 0, relative
    strings = headers[dynamic[6]]
    names = _read_table(file, strings[4], strings[5])
    symbols = _read_table(file, dynamic[4], dynamic[5])
    for name, _, _, section, value, _ in struct.iter_unpack("<IBBHQQ", symbols[: len(symbols) // 24 * 24]):
        if section and names[name : name + len(_SYMBOL) + 1] == _SYMBOL + b"\0":
            return int(value), relative
    return 0, relative


def _read_table(file: int, offset: int, size: int) -> bytes:
    if size > _TABLE:
        raise ValueError("larger than any")
    return _read(file, offset, size)
