"""How `gpusnap ls` fits a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from gpusnap.checkpoints.list import describe
from gpusnap.cli.commands import ls
from gpusnap.listing.filters import lines


def shown(width: int, name: str) -> list[str]:
    notes = {
        "org.opencontainers.image.created": "2026-03-01T00:00:00Z",
        "org.criu.checkpoint.container.name": "server",
        "io.gpusnap.driver": "nvidia 580.65.06",
        "io.gpusnap.gpus": "8 H100",
        "io.gpusnap.memory": str(12 << 30),
    }
    row = describe("sha256:" + "5" * 64, (name,), "checkpoint", {"sha256:1": 11 << 30}, notes)
    text = io.StringIO()
    console = Console(file=text, width=width, highlight=False)
    ls.print_rows(console, lines([row]))
    return text.getvalue().splitlines()


def test_a_usual_name() -> None:
    """One row in 80 columns, with all that is needed; more where there is room."""
    narrow = shown(80, "server:20261122-155512")
    assert len(narrow) == 2
    assert max(map(len, narrow)) <= 80
    assert narrow[0].split() == ["name", "created", "driver", "memory", "size", "digest"]
    assert "580.65.06" in narrow[1]
    wide = shown(160, "server:20261122-155512")
    assert {"container", "GPUs", "own"} < {*wide[0].split()}


def test_a_long_name() -> None:
    """It has a line of its own, whole, and the rest is below."""
    name = "registry.example:5000/" + "a" * 80 + ":1"
    title, below, first, second = shown(80, name)
    assert (title, first) == ("name", name)
    assert below.split() == ["created", "driver", "memory", "size", "digest"]
    assert second.startswith("  ")
    assert len(second) <= 80
