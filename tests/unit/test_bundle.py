"""The bundle's config.json before a restore."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from runtime_shim.bundle import prepare
from runtime_shim.errors import ContainerError


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return tmp_path


def write(bundle: Path, *mounts: Any) -> dict[str, Any]:
    config: dict[str, Any] = {"ociVersion": "1.2.0", "mounts": list(mounts)}
    (bundle / "config.json").write_text(json.dumps(config))
    (bundle / "config.json").chmod(0o640)
    return config


def read(bundle: Path) -> Any:
    return json.loads((bundle / "config.json").read_text())["mounts"]


def test_bind_mount_gets_its_type(bundle: Path) -> None:
    """As CDI's mounts need it for crun 1.21; other mounts stay as they are."""
    proc = {"destination": "/proc", "type": "proc", "source": "proc"}
    odd = {"destination": "/odd"}
    config = write(bundle, proc, odd, {"destination": "/a", "source": "/etc", "options": ["ro", "rbind"]})
    prepare(str(bundle), config)
    assert read(bundle)[:2] == [proc, odd]
    assert read(bundle)[2]["type"] == "bind"
    assert stat.S_IMODE((bundle / "config.json").stat().st_mode) == 0o640


def test_link_is_followed(bundle: Path) -> None:
    """A source that is a symbolic link becomes what it points to; a relative one is the runtime's matter."""
    (bundle / "lib.so.1.2").touch()
    os.symlink("lib.so.1.2", bundle / "lib.so.1")
    linked = {"destination": "/l", "type": "bind", "source": str(bundle / "lib.so.1"), "options": ["bind"]}
    relative = {"destination": "/r", "type": "bind", "source": "lib.so.1", "options": ["bind"]}
    prepare(str(bundle), write(bundle, linked, relative))
    assert read(bundle)[0]["source"] == str(bundle / "lib.so.1.2")
    assert read(bundle)[1] == relative


def test_undo(bundle: Path) -> None:
    """What prepare returns puts the very same file back."""
    config = write(bundle, {"destination": "/a", "source": "/etc", "options": ["bind"]})
    before = (bundle / "config.json").read_bytes()
    undo = prepare(str(bundle), config)
    assert (bundle / "config.json").read_bytes() != before
    undo()
    assert (bundle / "config.json").read_bytes() == before
    assert os.listdir(bundle) == ["config.json"]


@pytest.mark.parametrize("mounts", [[], ["text"], [{"options": "rbind"}], [{"destination": "/a"}]])
def test_nothing_to_mend(bundle: Path, mounts: list[Any]) -> None:
    """A file that needs nothing is not written."""
    before = os.stat(bundle / "config.json") if write(bundle, *mounts) else None
    prepare(
        str(bundle), {"mounts": [m for m in mounts if not isinstance(m, dict) or m.get("options") is None]}
    )
    assert before is not None
    assert os.stat(bundle / "config.json").st_ino == before.st_ino


def test_bundle_that_cannot_be_written(bundle: Path) -> None:
    """One sentence that names the file."""
    config = write(bundle, {"destination": "/a", "source": "/etc", "options": ["bind"]})
    (bundle / "config.json").unlink()
    with pytest.raises(ContainerError, match=r"config\.json cannot be prepared"):
        prepare(str(bundle), config)
