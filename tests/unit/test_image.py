"""The image directory: what it takes until its images are on disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from runtime_shim import image
from runtime_shim.errors import ImageError


@pytest.mark.parametrize("call", ["fsync", "open_below"])
def test_only_what_was_lost_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """An fsync that failed may have lost pages for good; where no file could be opened, nothing is lost."""
    (tmp_path / "pages-1.img").write_bytes(b"x")
    noted: list[str] = []

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os if call == "fsync" else image, call, fail)
        with pytest.raises(ImageError, match="cannot be brought to disk: Too many open files"):
            image.sync(str(tmp_path), failed=noted.append)
    assert noted == (["Too many open files"] if call == "fsync" else [])
    image.sync(str(tmp_path), failed=noted.append)
