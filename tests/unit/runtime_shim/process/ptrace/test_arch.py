"""Registers as bytes, and what a machine makes of them."""

from __future__ import annotations

import ctypes
import os
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.process.ptrace.arch import X86_64, this_machine

WORDS = st.integers(min_value=0, max_value=2**64 - 1)
SETS = st.lists(WORDS, min_size=27, max_size=27).map(lambda words: struct.pack("=27Q", *words))


@given(SETS, st.sampled_from(X86_64.registers), st.integers(min_value=-(2**63), max_value=2**64 - 1))
def test_one_register_is_changed(registers: bytes, name: str, value: int) -> None:
    """It reads as it was set, and no other one differs."""
    changed = X86_64.replace_values(registers, {name: value})
    assert len(changed) == X86_64.size == 216
    assert X86_64.value(changed, name) == value % 2**64
    others = [each for each in X86_64.registers if each != name]
    assert [X86_64.value(changed, each) for each in others] == [
        X86_64.value(registers, each) for each in others
    ]


@given(SETS, st.lists(WORDS, max_size=6).map(tuple))
def test_a_call(registers: bytes, arguments: tuple[int, ...]) -> None:
    """Number and arguments are where the kernel looks for them, missing ones zero; none is under way."""
    made = X86_64.call(registers, 0x1000, 9, arguments)
    assert X86_64.value(made, "rip") == 0x1000
    assert X86_64.value(made, "rax") == 9
    assert X86_64.get_call(made) == (-1, arguments + (0,) * (6 - len(arguments)))
    for kept in ("rsp", "rbp", "fs_base", "eflags", "cs", "r15"):
        assert X86_64.value(made, kept) == X86_64.value(registers, kept)


@pytest.mark.parametrize(
    ("word", "outcome"),
    [
        (0, 0),
        (2**47 - 4096, 2**47 - 4096),
        (2**64 - 1, -1),
        (2**64 - 4095, -4095),
        (2**64 - 4096, 2**64 - 4096),
    ],
)
def test_outcomes(word: int, outcome: int) -> None:
    """Only the last 4095 values are errors."""
    assert X86_64.outcome(X86_64.replace_values(bytes(X86_64.size), {"rax": word})) == outcome


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are x86-64's")
def test_numbers() -> None:
    """The kernel knows each of the calls by its number: it refuses our arguments, and not the call."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    assert this_machine() is X86_64
    refusals = {"close": 9, "dup3": 22, "madvise": 22, "mmap": 22, "mremap": 22, "munmap": 22}
    refusals |= {"openat": 14, "tgkill": 22, "recvmsg": 22, "socketpair": 22, "kcmp": 3, "pidfd_getfd": 22}
    refusals |= {"ioctl": 9}
    looked_for = {"brk", "clone", "clone3", "fork", "futex", "mprotect", "sched_yield", "vfork"}
    assert {*refusals, *looked_for} == set(X86_64.calls)
    for name, error in refusals.items():
        # Descriptors, addresses and sizes of -1; a dup3 onto itself.
        assert libc.syscall(*map(ctypes.c_long, (X86_64.calls[name], -1, -1, -1, -1, -1, -1))) == -1
        assert (name, ctypes.get_errno()) == (name, error)


def test_numbers_in_the_kernels_header() -> None:
    """All of them are those of asm/unistd_64.h."""
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("the kernel's headers are not installed (linux-libc-dev)")
    numbers = dict(re.findall(r"#define __NR_(\w+) (\d+)", header.read_text()))
    assert {name: int(numbers[name]) for name in X86_64.calls} == dict(X86_64.calls)


def test_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence that names it, and what there is."""
    name = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((*name[:4], "riscv64")))
    with pytest.raises(GpusnapError, match="on riscv64") as caught:
        this_machine()
    assert "x86_64" in caught.value.hint
