"""The ctypes binding against cuda.h (through gcc), and against libraries made for the purpose."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusnap.runtime_shim.gpu.api.errors import DriverMissing, InvalidRequest
from gpusnap.runtime_shim.gpu.nvidia import cuda

CUDA_H = Path("/usr/local/cuda/include/cuda.h")

needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")

STRUCTS = {
    cuda.LockArgs: ("CUcheckpointLockArgs", {"timeout_ms": "timeoutMs", "reserved1": "reserved1"}),
    cuda.CheckpointArgs: ("CUcheckpointCheckpointArgs", {}),
    cuda.GpuPair: ("CUcheckpointGpuPair", {"old": "oldUuid", "new": "newUuid"}),
    cuda.RestoreArgs: ("CUcheckpointRestoreArgs", {"pairs": "gpuPairs", "count": "gpuPairsCount"}),
    cuda.UnlockArgs: ("CUcheckpointUnlockArgs", {}),
}


@pytest.mark.parametrize("struct", STRUCTS)
def test_sizes(struct: type[ctypes.Structure]) -> None:
    assert ctypes.sizeof(struct) == (32 if struct is cuda.GpuPair else 64)


@needs_gcc
@pytest.mark.skipif(not CUDA_H.exists(), reason="needs the CUDA toolkit's cuda.h")
@pytest.mark.parametrize("struct", STRUCTS)
def test_layout_is_that_of_cuda_h(struct: type[ctypes.Structure], tmp_path: Path) -> None:
    name, fields = STRUCTS[struct]
    checks = [f'_Static_assert(sizeof({name}) == {ctypes.sizeof(struct)}, "size");']
    for ours, theirs in fields.items():
        offset = getattr(struct, ours).offset
        checks.append(f'_Static_assert(offsetof({name}, {theirs}) == {offset}, "{theirs}");')
    source = tmp_path / "layout.c"
    source.write_text('#include <stddef.h>\n#include "cuda.h"\n' + "\n".join(checks) + "\n")
    command = ["gcc", "-fsyntax-only", "-I", str(CUDA_H.parent), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def library(folder: Path, source: str) -> str:
    """Build a shared library of C source; its path."""
    (folder / "lib.c").write_text(source)
    path = folder / "libfake.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(path), str(folder / "lib.c")], check=True)
    return str(path)


BASICS = """
int cuInit(unsigned flags) { return flags == 0 ? 0 : 1; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuGetErrorName(int result, const char **name) { *name = result == 801 ? "N" : 0; return !*name; }
"""

# Each call answers what it was given, so that the test sees how arguments arrive.
CHECKPOINT = """
#include <string.h>
int cuCheckpointProcessGetState(int pid, int *state) { *state = pid + 1; return 0; }
int cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) { *tid = pid + 2; return 3; }
int cuCheckpointProcessLock(int pid, unsigned *args) { return (int)args[0]; }
static int zero(const unsigned char *p, int n) { while (n--) if (*p++) return 0; return 1; }
int cuCheckpointProcessCheckpoint(int pid, void *args) { return zero(args, 64) ? pid : -1; }
int cuCheckpointProcessUnlock(int pid, void *args) { return zero(args, 64) ? pid : -1; }
struct restore { unsigned char *pairs; unsigned count; unsigned char rest[52]; };
int cuCheckpointProcessRestore(int pid, struct restore *args) {
    if (!zero(args->rest, 52)) return -1;
    if (!args->pairs) return args->count ? -2 : 0;
    int sum = 0;
    for (unsigned i = 0; i < args->count; i++) sum += args->pairs[32 * i] * 100 + args->pairs[32 * i + 31];
    return sum;
}
"""


@needs_gcc
def test_calls(tmp_path: Path) -> None:
    fake = cuda.Library(library(tmp_path, BASICS + CHECKPOINT))
    assert fake.list_missing() == ()
    assert fake.init() == 0
    assert fake.version() == (0, 12080)
    assert (fake.error_name(801), fake.error_name(4242)) == ("N", "")
    assert fake.state(7) == (0, 8)
    assert fake.restore_thread(7) == (3, 9)
    assert (fake.checkpoint(7), fake.unlock(7)) == (7, 7)
    assert fake.restore(7) == 0
    one, two = bytes([1]) + bytes(15), bytes(15) + bytes([2])
    assert fake.restore(7, [(one, two)]) == 102
    assert fake.restore(7, [(one, two)] * 3) == 306


@needs_gcc
def test_a_lock_always_has_a_timeout(tmp_path: Path) -> None:
    fake = cuda.Library(library(tmp_path, BASICS + CHECKPOINT))
    assert fake.lock(7, 1500) == 1500
    assert fake.lock(7, 0) == 1  # 0 would be "no timeout"
    assert fake.lock(7, 2**40) == -1  # 2**32 - 1, as the int that comes back


@needs_gcc
def test_symbols_are_asked_for(tmp_path: Path) -> None:
    old = cuda.Library(library(tmp_path, BASICS))
    assert old.list_missing() == tuple(cuda._CHECKPOINT)
    assert len(tuple(cuda._CHECKPOINT)) == 6


@needs_gcc
def test_another_library_by_that_name(tmp_path: Path) -> None:
    with pytest.raises(DriverMissing, match="is not the library of a CUDA driver"):
        cuda.Library(library(tmp_path, "int other;"))


def test_no_library() -> None:
    with pytest.raises(DriverMissing) as caught:
        cuda.Library("libcuda-that-is-not-here.so.1")
    assert "libcuda-that-is-not-here.so.1" in str(caught.value)
    assert "No such file" not in caught.value.sentence()
    assert caught.value.hint


@given(st.binary(min_size=16, max_size=16))
def test_uuids_there_and_back(raw: bytes) -> None:
    text = f"GPU-{uuid.UUID(bytes=raw)}"
    assert len(text) == 40
    assert cuda.uuid_bytes(text) == raw
    assert cuda.uuid_bytes("GPU-" + text[4:].upper()) == raw


def test_uuid_as_nvml_writes_it() -> None:
    text = "GPU-00112233-4455-6677-8899-aabbccddeeff"
    assert cuda.uuid_bytes(text).hex() == "00112233445566778899aabbccddeeff"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GPU-",
        "00112233-4455-6677-8899-aabbccddeeff",
        "MIG-00112233-4455-6677-8899-aabbccddeeff",
        "GPU-00112233-4455-6677-8899-aabbccddee",
        "GPU-001122334455-6677-8899-aabb-ccddeeff",
        "GPU-0011223g-4455-6677-8899-aabbccddeeff",
        "GPU-001 2233-4455-6677-8899-aabbccddeeff",
        "GPU-00112233-4455-6677-8899-aabbccddee\uff10\uff11",
    ],
)
def test_what_is_no_uuid(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not the UUID of a GPU"):
        cuda.uuid_bytes(text)
