"""The cost of reading CRIU's images before a restore: python3 bench/image_reading.py

Seconds of processor time to import pycriu, and to count the pages of a pagemap, with gpusnap's reader
(runtime_shim/runtime/criu/images/pagemap.py) and with pycriu's classes. With
PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python, protobuf decodes in Python, as it does if a distribution has
not built its C part. The test host has pycriu:

    tests/host/host enter -- python3 /src/bench/image_reading.py
"""

from __future__ import annotations

import io
import struct
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpusnap.runtime_shim.runtime.criu.images import pagemap, pycriu_package
from gpusnap.runtime_shim.runtime.criu.images.messages import Source

RUNS = 100_000
_SIZE = struct.Struct("<I")


def varint(value: int) -> bytes:
    """A number as protobuf has it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def main() -> None:
    """Print the figures, one a line."""
    runs = [b"\x08" + varint(0x7F00_0000_0000 + 8192 * at) + b"\x10\x01\x20\x04" for at in range(RUNS)]
    head = b"\x08\x01"
    data = b"".join(_SIZE.pack(len(each)) + each for each in (head, *runs))
    begin = time.process_time()
    found = pagemap.read(Source(io.BytesIO(data), len(data)))
    ours = time.process_time() - begin
    begin = time.process_time()
    pycriu = pycriu_package.load()
    imported = time.process_time() - begin
    begin = time.process_time()
    source = Source(io.BytesIO(data), len(data))
    source.message()
    read, present = pycriu.pb.pagemap_entry.FromString, 0
    while source.count_left:
        entry = read(source.message())
        # 4.1 calls the second field nr_pages, 4.2 compat_nr_pages.
        present += entry.nr_pages or getattr(entry, "compat_nr_pages", 0)
    theirs = time.process_time() - begin
    assert present == found.present == RUNS
    how = "C" if pycriu.accelerated else "Python"
    print(f"importing pycriu, protobuf in {how}: {imported:.3f} s")
    print(f"a pagemap of {RUNS} runs, by pycriu: {theirs:.3f} s; by gpusnap's reader: {ours:.3f} s")


if __name__ == "__main__":
    main()
