"""Lines of the engines' files that name gpusnap-runtime, or make it the default."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpusnap.engines.install import containerd as install_containerd
from gpusnap.engines.install import crio as install_crio
from gpusnap.engines.install import podman as install_podman
from gpusnap.engines.install.references import lines

PROGRAMS = ("/usr/local/bin/gpusnap-runtime", "/usr/bin/gpusnap-runtime")
PODMAN = "/etc/containers/containers.conf"
CONTAINERD = "/etc/containerd/conf.d/10-own.toml"
CRIO = "/etc/crio/crio.conf"


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A host whose containerd imports conf.d."""
    write(tmp_path, install_containerd.CONFIG, 'imports = ["/etc/containerd/conf.d/*.toml"]\n')
    return str(tmp_path)


def write(root: Path | str, path: str, text: str) -> None:
    place = Path(root, path[1:])
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


@pytest.mark.parametrize("path", [PODMAN, CONTAINERD, CRIO])
@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('runtime = "gpusnap-runtime"', True),
        ('gpusnap-runtime = ["/usr/local/bin/gpusnap-runtime"]', True),
        ("  BinaryName = '/usr/bin/gpusnap-runtime'", True),
        ('  default_runtime_name = "gpusnap"', True),
        ("default_runtime='gpusnap'", True),
        ('containerd = { default_runtime_name = "gpusnap" }', True),
        ('default_runtime_name = "runc"', False),
        ('# runtime = "gpusnap-runtime"', False),
        ('runtime_supports_json = ["crun", "gpusnap-runtime"]', False),
        ('gpusnap-runtime = ["/opt/other/usr/bin/gpusnap-runtime"]', False),
        ('gpusnap-runtime = ["/usr/bin/gpusnap-runtime.old"]', False),
        ('[engine]\nruntime = "crun"', False),
    ],
)
def test_lines(root: str, path: str, text: str, named: bool) -> None:
    """By file and number; what is a comment, or a list of names, harms nobody."""
    write(root, path, f"\n{text}\n")
    assert [str(each) for each in lines(root, PROGRAMS, ())] == (
        [f"{path}:2: {text.strip()}"] if named else []
    )
    assert lines(root, PROGRAMS, [path]) == []


def test_all_files(root: str) -> None:
    """Those of each engine, and ours, too, where they stay."""
    paths = (install_podman.DROP_IN, install_containerd.DROP_IN, install_crio.DROP_IN)
    for path in paths:
        write(root, path, f"{PROGRAMS[1]}\n")
    assert [each.path for each in lines(root, PROGRAMS, ())] == list(paths)
    assert [each.path for each in lines(root, PROGRAMS, paths[:2])] == [paths[2]]
    assert lines(root, (), ()) == []
