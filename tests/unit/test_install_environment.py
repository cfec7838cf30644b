"""Other packages with import names of gpusnap's, as Oracle's SDK has `oci`."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from gpusnap.cli import install
from gpusnap.doctor.base.check import Verdict
from gpusnap.doctor.host_checks import site
from gpusnap.engines.install import environment
from gpusnap.engines.install.environment import strangers


@pytest.fixture
def oracle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which the two were installed, one over the other."""
    for name, packages in (("oci-2.150.0", "oci"), ("gpusnap-0.1.0", "gpusnap\nhooks\noci\nruntime_shim")):
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: {}\nVersion: {}\n".format(*name.split("-"))
        )
        (folder / "top_level.txt").write_text(packages + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_an_environment_of_its_own() -> None:
    """gpusnap's own distribution is no stranger, whatever its name is written like; other names are free."""
    installed = {"oci": ["gpusnap"], "hooks": ["GPUsnap"], "click": ["click"]}
    assert strangers(lambda: installed) == {}


def test_oracle(oracle: None) -> None:
    """Found by the metadata of what is installed."""
    assert strangers() == {"oci": "oci 2.150.0"}
    (check,) = site.environment(strangers())
    assert check.verdict is Verdict.FAILURE
    assert "oci 2.150.0" in check.says


def test_install_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is looked for or written."""
    monkeypatch.setattr(environment, "strangers", lambda: {"oci": "oci 2.150.0"})
    (tmp_path / "etc").mkdir()
    done = CliRunner().invoke(install.install, ["--root", str(tmp_path), "--podman"])
    assert "oci 2.150.0 is in the same Python environment" in str(done.exception)
    assert [*tmp_path.rglob("*")] == [tmp_path / "etc"]
