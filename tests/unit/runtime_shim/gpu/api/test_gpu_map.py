"""The GPU map: what a person may write, and what is wanted where it is something else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusnap.runtime_shim.gpu.api.gpu_map import PAIRS, is_meant, parse_map

UUID = "GPU-1f3a0000-0000-4000-8000-00000000000a"


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("", ()),
        ("  ", ()),
        ("0=3", (("0", "3"),)),
        ("0=3,1=2", (("0", "3"), ("1", "2"))),
        (" 0 = 3 ,\t1= 2\n", (("0", "3"), ("1", "2"))),
        ("00=3", (("0", "3"),)),
        ("0=0", (("0", "0"),)),
        (f"{UUID}=1", ((UUID, "1"),)),
        (f"1={UUID}", (("1", UUID),)),
        ("GPU-1F3A=gpu-77c0e2a1-", (("GPU-1f3a", "GPU-77c0e2a1-"),)),
        ("GPU-1f3a=GPU-1f3a", (("GPU-1f3a", "GPU-1f3a"),)),
    ],
)
def test_maps(text: str, pairs: tuple[tuple[str, str], ...]) -> None:
    """Numbers and UUIDs on either side, blanks around them, UUIDs in small letters."""
    assert parse_map(text) == pairs


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "0=",
        "=0",
        ",",
        "0=1,",
        "0=1=2",
        "0:1",
        "-1=0",
        "1.0=0",
        "²=0",
        "٣=0",
        "12345678=0",
        "all=0",
        "GPU-=0",
        "GPU-1f3=0",
        "GPU-1g3a=0",
        "GPU-1f3a-=0",
        "GPU-1f3a0000000000000=0",
        "GPU--1f3a=0",
        UUID + "0=1",
        "MIG-1f3a=0",
        "1f3a0000=0",
        "GPU 0=1",
    ],
)
def test_what_is_no_map(text: str) -> None:
    """The error says what is wanted, and gives an example."""
    with pytest.raises(ValueError, match=r"pairs of GPUs such as 0=3,1=2; a GPU is .* UUID \(GPU- and"):
        parse_map(text)


@pytest.mark.parametrize(
    ("text", "name", "side"),
    [
        ("0=1,0=2", "0", "left"),
        ("0=1,00=2", "0", "left"),
        ("0=2,1=2", "2", "right"),
        ("GPU-1f3a=1,gpu-1F3A=2", "GPU-1f3a", "left"),
    ],
)
def test_a_gpu_named_twice(text: str, name: str, side: str) -> None:
    """One GPU twice on one side is an error that names both."""
    with pytest.raises(ValueError, match=f"{name} is on the {side} twice"):
        parse_map(text)


def test_bounds() -> None:
    """64 pairs are taken, one more is not."""
    full = [f"{i}={i}" for i in range(PAIRS)]
    assert len(parse_map(",".join(full))) == PAIRS == 64
    with pytest.raises(ValueError, match="at most 64 pairs"):
        parse_map(",".join([*full, "64=64"]))


def test_means() -> None:
    """A number is a GPU's number, and the begin of a UUID its UUID."""
    assert is_meant("3", 3, UUID)
    assert not is_meant("3", 30, UUID)
    assert is_meant(UUID, 0, UUID)
    assert is_meant("GPU-1f3a", 0, UUID.replace("GPU", "gpu").upper())
    assert not is_meant("GPU-1f3b", 0, UUID)


@given(st.text(alphabet="0123456789=, GPU-gpuabcdefx\n²", max_size=60) | st.text(max_size=40))
def test_any_text(text: str) -> None:
    """Any text is a map or a ValueError; what was read, written again, reads as the same."""
    try:
        pairs = parse_map(text)
    except ValueError:
        return
    assert parse_map(",".join(f"{left}={right}" for left, right in pairs)) == pairs
