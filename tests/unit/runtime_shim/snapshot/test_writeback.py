"""Blobs are handed to the disk while others are written, by as many threads as there are."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from gpusnap.oci.layout.layout import Layout
from gpusnap.runtime_shim.snapshot.memory import writeback


@pytest.mark.parametrize("most", [0, 1, 4])
def test_threads_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """With fewer, or none, all goes on, and nothing waits for one that never began."""
    begun: list[threading.Thread] = []
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if len(begun) >= most:
            raise RuntimeError("can't start new thread")
        begun.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    layout = Layout(tmp_path / "layout").create()
    flushing = writeback.Flusher(layout)
    for text in (b"one", b"two"):
        flushing.add(layout.add_blob(text).digest)
    flushing.close()
    flushing.close()
    assert len(begun) == most
    assert not any(thread.is_alive() for thread in begun)
