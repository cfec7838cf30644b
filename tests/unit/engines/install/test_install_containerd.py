"""containerd's handler: by a file of ours where that costs nobody's settings, and else by hand."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gpusnap.engines.install.containerd import CONFIG, DROP_IN, FRAGMENT, HandlerPlan, files, plan_handler
from gpusnap.runtime_shim.base.errors import GpusnapError

PROGRAM = "/usr/local/bin/gpusnap-runtime"
V2, V3 = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"
OURS = {"runtime_type": "io.containerd.runc.v2", "options": {"BinaryName": PROGRAM}}
RUNC = {"runtime_type": "io.containerd.runc.v2"}
# As Debian's package has it, 1.7 and 2.1 alike.
DEBIAN = """\
version = 2

[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    [plugins."io.containerd.grpc.v1.cri".cni]
      bin_dir = "/usr/lib/cni"
"""
IMPORTING = 'version = {0}\nimports = ["/etc/containerd/conf.d/*.toml"]\n'


def plan(root: Path, config: str | None, version: int, **more: Any) -> HandlerPlan:
    if config is not None:
        (root / CONFIG[1:]).parent.mkdir(parents=True, exist_ok=True)
        (root / CONFIG[1:]).write_text(config)
    return plan_handler(PROGRAM, version=version, root=str(root), **more)


def table(text: str, plugin: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(text)["plugins"][plugin]["containerd"]
    return found


def test_no_file_1(tmp_path: Path) -> None:
    """One file of ours; runc is named, as 1.7 forgets it otherwise, and then does not load its CRI plugin."""
    (item,) = plan(tmp_path, None, 1).items
    assert item.path == CONFIG
    assert table(item.data.decode(), V2) == {"runtimes": {"runc": RUNC, "gpusnap": OURS}}
    (item,) = plan(tmp_path, None, 1, default=True).items
    assert table(item.data.decode(), V2)["default_runtime_name"] == "gpusnap"


def test_no_file_2(tmp_path: Path) -> None:
    """The handler in conf.d, before the file that imports it."""
    drop_in, config = plan(tmp_path, None, 2).items
    assert (drop_in.path, config.path) == (DROP_IN, CONFIG)
    assert table(drop_in.data.decode(), V3) == {"runtimes": {"gpusnap": OURS}}
    assert tomllib.loads(config.data.decode()) == {"version": 3, "imports": ["/etc/containerd/conf.d/*.toml"]}


def test_ours_from_before(tmp_path: Path) -> None:
    """What an earlier call wrote is written again, and not added to by hand."""
    first = plan(tmp_path, None, 1)
    assert plan(tmp_path, first.items[0].data.decode(), 1, ours=True) == first


@pytest.mark.parametrize("form", [2, 3])
def test_imports(tmp_path: Path, form: int) -> None:
    """An import has to be of the version of the file that imports it."""
    (item,) = plan(tmp_path, IMPORTING.format(form), 2, default=True).items
    assert item.path == DROP_IN
    assert tomllib.loads(item.data.decode())["version"] == form
    found = table(item.data.decode(), V2 if form == 2 else V3)
    assert found == {"default_runtime_name": "gpusnap", "runtimes": {"gpusnap": OURS}}


@pytest.mark.parametrize("imports", ['["conf.d/*.toml"]', '["/x", "/etc/containerd/*/gpusnap.toml"]'])
def test_imports_otherwise(tmp_path: Path, imports: str) -> None:
    assert plan(tmp_path, f"version = 3\nimports = {imports}\n", 2).items[0].path == DROP_IN


@pytest.mark.parametrize(
    ("config", "version"), [(DEBIAN, 1), (DEBIAN, 2), (IMPORTING.format(2), 1), ("version = 3\n", 2)]
)
def test_by_hand(tmp_path: Path, config: str, version: int) -> None:
    """His file stays; what to append is TOML with it, has runc, and loses nothing of it."""
    found = plan(tmp_path, config, version)
    (item,) = found.items
    assert item.path == FRAGMENT
    (note,) = found.notes
    assert f"cat {tmp_path}{FRAGMENT} >>{tmp_path}{CONFIG}" in note
    whole = config + item.data.decode()
    form = tomllib.loads(config)["version"]
    assert table(whole, V2 if form == 2 else V3)["runtimes"] == {"runc": RUNC, "gpusnap": OURS}
    if config is DEBIAN:
        assert tomllib.loads(whole)["plugins"][V2]["cni"] == {"bin_dir": "/usr/lib/cni"}
    # Appended, it is found to be there.
    again = plan(tmp_path, whole, version, default=True)
    assert "already has the handler gpusnap" in again.notes[0]
    assert "default_runtime_name" in again.notes[1]


def test_another_program(tmp_path: Path) -> None:
    whole = DEBIAN + plan(tmp_path, DEBIAN, 1).items[0].data.decode().replace("/local/", "/")
    assert "for /usr/bin/gpusnap-runtime: replace it" in plan(tmp_path, whole, 1).notes[0]


def test_systemd(tmp_path: Path) -> None:
    """The kubelet wants systemd's cgroups of every handler or of none; runc is not named twice."""
    config = IMPORTING.format(2) + (
        f'[plugins."{V2}".containerd.runtimes.runc]\n  runtime_type = "io.containerd.runc.v2"\n'
        f'[plugins."{V2}".containerd.runtimes.runc.options]\n  SystemdCgroup = true\n'
    )
    for version in (1, 2):
        text = plan(tmp_path, config, version).items[0].data.decode()
        handlers = table(text, V2)["runtimes"]
        assert list(handlers) == ["gpusnap"]
        assert handlers["gpusnap"]["options"] == {"BinaryName": PROGRAM, "SystemdCgroup": True}


@pytest.mark.parametrize(
    ("main", "imported", "systemd"),
    [
        ("", "SystemdCgroup = true", True),
        ("SystemdCgroup = true", "", True),
        ("SystemdCgroup = true", "SystemdCgroup = false", False),
        ("", "", False),
    ],
)
def test_systemd_in_an_import(tmp_path: Path, main: str, imported: str, systemd: bool) -> None:
    """As kubeadm's nodes have it in a file of conf.d; the later file counts, and ours does not."""
    runc = f'[plugins."{V3}".containerd.runtimes.runc.options]\n'
    folder = tmp_path / DROP_IN[1:]
    folder.parent.mkdir(parents=True)
    (folder.parent / "10-runc.toml").write_text(f"version = 3\n{runc}{imported}\n")
    ours = f'version = 3\n[plugins."{V3}".containerd]\ndefault_runtime_name = "gpusnap"\n'
    folder.write_text(ours)
    (item,) = plan(tmp_path, IMPORTING.format(3) + f"{runc}{main}\n", 2).items
    options = table(item.data.decode(), V3)["runtimes"]["gpusnap"]["options"]
    assert options.get("SystemdCgroup", False) is systemd
    assert files(str(tmp_path)) == [CONFIG, "/etc/containerd/conf.d/10-runc.toml", DROP_IN]


def test_files(tmp_path: Path) -> None:
    """Imports of imports, each once, however they go round."""
    for name, imports in (("conf.d/a.toml", "../b.toml"), ("b.toml", "config.toml"), ("c.toml", "x")):
        path = tmp_path / "etc/containerd" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'imports = ["{imports}"]\n')
    (tmp_path / CONFIG[1:]).write_text('imports = ["/etc/containerd/conf.d/*.toml"]\n')
    assert [os.path.normpath(path) for path in files(str(tmp_path))][:3] == [
        CONFIG,
        "/etc/containerd/conf.d/a.toml",
        "/etc/containerd/b.toml",
    ]


@pytest.mark.parametrize("config", ["", "version = 1\n", "version = 4\n"])
def test_other_versions(tmp_path: Path, config: str) -> None:
    with pytest.raises(GpusnapError, match="which gpusnap cannot extend"):
        plan(tmp_path, config, 1)


def test_odd_files(tmp_path: Path) -> None:
    """What containerd would not take either must not be a traceback."""
    for rest in ("plugins = 1", 'plugins = {"io.containerd.grpc.v1.cri" = []}', "imports = 3"):
        assert plan(tmp_path, f"version = 2\n{rest}\n", 2).items[0].path == FRAGMENT
    with pytest.raises(GpusnapError, match="is not TOML"):
        plan(tmp_path, "x", 2)
