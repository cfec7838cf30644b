"""Checks a configuration quickly for a GPU, before anything is imported to parse it."""

from __future__ import annotations

# A part of a node's or of a library's path, in every configuration of a container with a GPU.
_MARKS = (b"nvidia", b"kfd", b"libcuda")


def may_have_gpu(config: bytes) -> bool:
    """Whether a configuration as JSON could be one of a container with a GPU; given.has_gpu knows."""
    return any(mark in config for mark in _MARKS)
