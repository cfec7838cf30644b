"""A GPU map: which GPU of the checkpoint goes to which GPU of this host, in the format of the user.

    0=3,1=2                 numbers as in nvidia-smi: the left ones are of the checkpoint's host
    GPU-1f3a=GPU-77c0e2     UUIDs, whole or shortened as in CUDA_VISIBLE_DEVICES; for AMD's GPUs as in
                            ROCR_VISIBLE_DEVICES

Blanks around a pair and around a GPU are ignored. A blank text is an empty map.
"""

from __future__ import annotations

GpuMap = tuple[tuple[str, str], ...]
"""Pairs of (a GPU of the checkpoint, a GPU of this host); each is a number or the start of a UUID."""

GPU_MAP = "GPUSNAP_GPU_MAP"
"""A variable of the caller's environment, which reaches a restore (conmon passes it on), no checkpoint."""

PAIRS = 64
"""More than any host has GPUs."""
_DIGITS = 7
_PREFIX = "GPU-"
# A UUID in NVML's format, without its prefix (nvmlDeviceGetUUID): x stands for a hexadecimal digit.
_SHAPE = "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"
_PLAIN = 16
"""The digits of AMD's, which have no dashes (rocminfo)."""
_SHORTEST = 4
_WANTED = (
    "pairs of GPUs such as 0=3,1=2; a GPU is its number or its UUID (GPU- and at least the first "
    f"{_SHORTEST} digits)"
)


def parse_map(text: str) -> GpuMap:
    """Return the pairs in `text`, with UUIDs in lower case; ValueError says what the text must be.

    A map names no GPU twice on one side, as far as that can be checked without knowing the GPUs.
    """
    if not text.strip():
        return ()
    pairs = text.split(",", PAIRS)
    if len(pairs) > PAIRS:
        raise ValueError(f"at most {PAIRS} pairs of GPUs")
    found = tuple(_pair(pair) for pair in pairs)
    for side, names in (("left", [left for left, _ in found]), ("right", [right for _, right in found])):
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"pairs in which no GPU is named twice, but {name} is on the {side} twice")
    return found


def _pair(text: str) -> tuple[str, str]:
    left, _, right = text.partition("=")
    return _word(left.strip()), _word(right.strip())


def _word(text: str) -> str:
    if text.isascii() and text.isdigit() and len(text) <= _DIGITS:
        return str(int(text))
    digits = text[len(_PREFIX) :].lower()
    if (
        not text.upper().startswith(_PREFIX)
        or not _SHORTEST <= len(digits) <= len(_SHAPE)
        or not (_has_shape(digits, _SHAPE) or _has_shape(digits, "x" * _PLAIN))
    ):
        raise ValueError(_WANTED)
    return _PREFIX + digits


def _has_shape(digits: str, shape: str) -> bool:
    """Whether the digits are the start of such a UUID."""
    return len(digits) <= len(shape) and all(
        _matches_digit(digit, place) for digit, place in zip(digits, shape, strict=False)
    )


def _matches_digit(digit: str, place: str) -> bool:
    return digit in "0123456789abcdef" if place == "x" else digit == place


def is_meant(word: str, index: int, uuid: str) -> bool:
    """Whether a word of a map denotes the GPU with this number and UUID."""
    if word.isdigit():
        return int(word) == index
    # lower(): NVML writes lower case, but other makers of UUIDs may not.
    return uuid.lower().startswith(word.lower())
