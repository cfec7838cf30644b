"""CRIU's plugins for GPUs: the right one is given to CRIU, alone, with what it wants; none where none is."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import POISON

from gpusnap.runtime_shim.base.errors import ImageError, Refused
from gpusnap.runtime_shim.gpu.api.criu_plugin import AMDGPU, CUDA
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime.criu import plugins
from gpusnap.runtime_shim.runtime.criu.plugins import VARIABLE, find, inject
from gpusnap.runtime_shim.settings import Amd, Criu, Nvidia, Settings


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plugin anywhere, and an environment without any of the variables."""
    monkeypatch.setattr(plugins, "FOLDERS", (str(tmp_path / "default"), str(tmp_path / "other")))
    monkeypatch.setattr(plugins, "scratch", lambda: str(tmp_path))
    monkeypatch.setattr(locate, "environment", lambda: {"PATH": str(tmp_path / "bin")})
    monkeypatch.setattr(locate, "SYSTEM_DIRECTORIES", (str(tmp_path / "sbin"),))


def library(folder: Path, name: str, content: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content)
    return folder / name


def program(folder: Path) -> Path:
    path = library(folder, "cuda-checkpoint")
    path.chmod(0o755)
    return path


def loaded(folder: str) -> dict[str, str]:
    """What CRIU would load: paths by name."""
    return {name: os.path.realpath(f"{folder}/{name}") for name in os.listdir(folder)}


def test_nothing_to_do() -> None:
    """Without a plugin, and without one in CRIU's folder, CRIU is told nothing."""
    settings = Settings(criu=Criu(libdir="/opt/somewhere"))
    with inject(None, settings) as found:
        assert (found.criu, found.environment) == (settings.criu, {})


def test_a_folder_with_the_plugin_alone(tmp_path: Path) -> None:
    """It is used as it is, and named both ways."""
    library(tmp_path / "default", "amdgpu_plugin.so")
    with inject(AMDGPU, Settings()) as found:
        assert found.criu.libdir == str(tmp_path / "default")
        assert found.environment == {VARIABLE: str(tmp_path / "default")}


def test_others_of_the_site_stay(tmp_path: Path) -> None:
    """What is in CRIU's folder and not for GPUs is loaded as ever; another vendor's is not."""
    site = library(tmp_path / "site", "inet.so")
    library(tmp_path / "site", "cuda_plugin.so")
    library(tmp_path / "site", "README")
    amd = library(tmp_path / "other", "amdgpu_plugin.so")
    with inject(AMDGPU, Settings(criu=Criu(libdir=str(site.parent)))) as found:
        assert loaded(found.criu.libdir) == {"inet.so": str(site), "amdgpu_plugin.so": str(amd)}
        assert found.environment[VARIABLE] == found.criu.libdir
    assert not os.path.exists(found.criu.libdir)


def test_none_is_kept_out(tmp_path: Path) -> None:
    """Where gpusnap suspends by the driver, a plugin for GPUs in CRIU's own folder is not loaded."""
    site = library(tmp_path / "default", "inet.so")
    library(tmp_path / "default", "cuda_plugin.so")
    with inject(None, Settings()) as found:
        assert loaded(found.criu.libdir) == {"inet.so": str(site)}


def test_none_is_kept_out_of_another_default(tmp_path: Path) -> None:
    """CRIU's own folder is a choice of whoever built it: that is the one that has a plugin for GPUs."""
    site = library(tmp_path / "other", "inet.so")
    library(tmp_path / "other", "cuda_plugin.so")
    with inject(None, Settings()) as found:
        assert loaded(found.criu.libdir) == {"inet.so": str(site)}


def test_by_the_callers_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$CRIU_LIBS_DIR of the caller is where CRIU would look."""
    library(tmp_path / "theirs", "cuda_plugin.so")
    monkeypatch.setattr(locate, "environment", lambda: {VARIABLE: str(tmp_path / "theirs")})
    with inject(None, Settings()) as found:
        assert loaded(found.criu.libdir) == {}


@pytest.mark.parametrize("section", ["nvidia", "amd"])
def test_where_a_plugin_is(tmp_path: Path, section: str) -> None:
    """The vendor's setting alone, or else CRIU's folder and those of packages, in this order."""
    plugin = CUDA if section == "nvidia" else AMDGPU
    with pytest.raises(Refused) as caught:
        find(plugin, Settings())
    assert f"there is no {plugin.file} in {tmp_path}/default, {tmp_path}/other" in str(caught.value)
    assert f"{section}.libdir" in caught.value.hint
    assert not [words for words in POISON if words in caught.value.sentence().lower()]
    last = library(tmp_path / "other", plugin.file)
    assert find(plugin, Settings()) == str(last)
    criu = library(tmp_path / "criu", plugin.file)
    settings = Settings(criu=Criu(libdir=str(criu.parent)))
    assert find(plugin, settings) == str(criu)
    own = str(tmp_path / "own")
    settings = replace(settings, nvidia=Nvidia(libdir=own), amd=Amd(libdir=own))
    with pytest.raises(Refused, match="own"):
        find(plugin, settings)
    library(tmp_path / "own", plugin.file)
    assert find(plugin, settings) == f"{own}/{plugin.file}"


def test_amds_environment(tmp_path: Path) -> None:
    """What the settings say goes by the names of criu-amdgpu-plugin(1); what they do not say is not said."""
    library(tmp_path / "default", "amdgpu_plugin.so")
    checks = ("firmware", "sdma-firmware", "caches", "gws", "vram", "numa", "capability")
    with inject(AMDGPU, Settings(amd=Amd(skip_checks=checks, buffer=1 << 20))) as found:
        assert found.environment == {
            VARIABLE: str(tmp_path / "default"),
            "KFD_FW_VER_CHECK": "0",
            "KFD_SDMA_FW_VER_CHECK": "0",
            "KFD_CACHES_COUNT_CHECK": "0",
            "KFD_NUM_GWS_CHECK": "0",
            "KFD_VRAM_SIZE_CHECK": "0",
            "KFD_NUMA_CHECK": "0",
            "KFD_CAPABILITY_CHECK": "0",
            "KFD_MAX_BUFFER_SIZE": "1048576",
        }


def test_the_program_on_path(tmp_path: Path) -> None:
    """Nothing is said where CRIU's plugin finds it anyway, and its folder is added where not."""
    library(tmp_path / "default", "cuda_plugin.so")
    program(tmp_path / "sbin")
    with inject(CUDA, Settings()) as found:
        assert found.environment["PATH"] == f"{tmp_path}/bin:{tmp_path}/sbin"
    program(tmp_path / "bin")
    with inject(CUDA, Settings()) as found:
        assert "PATH" not in found.environment


def test_the_program_of_the_settings(tmp_path: Path) -> None:
    """The one that somebody asked for comes first."""
    library(tmp_path / "default", "cuda_plugin.so")
    program(tmp_path / "bin")
    chosen = program(tmp_path / "nv")
    with inject(CUDA, Settings(nvidia=Nvidia(cuda_checkpoint=str(chosen)))) as found:
        assert found.environment["PATH"] == f"{tmp_path}/nv:{tmp_path}/bin"
    none = Settings(nvidia=Nvidia(cuda_checkpoint="/none/cuda-checkpoint"))
    with pytest.raises(Refused, match="has none at /none/cuda-checkpoint"), inject(CUDA, none):
        pass


def test_no_program(tmp_path: Path) -> None:
    """Refused; but a plugin that calls the driver by itself needs none."""
    library(tmp_path / "default", "cuda_plugin.so")
    with pytest.raises(Refused) as caught, inject(CUDA, Settings()):
        pass
    assert f"this host has none in {tmp_path}/bin, {tmp_path}/sbin" in str(caught.value)
    assert "nvidia.cuda-checkpoint" in caught.value.hint
    library(tmp_path / "default", "cuda_plugin.so", "…cuCheckpointProcessLock…")
    with inject(CUDA, Settings()) as found:
        assert "PATH" not in found.environment


def test_time_for_the_locks(tmp_path: Path) -> None:
    """CRIU's timeout covers the locks of all processes, one after the other, and is not made shorter."""
    library(tmp_path / "default", "cuda_plugin.so")
    program(tmp_path / "bin")
    settings = Settings(nvidia=Nvidia(lock_timeout=20.5), criu=Criu(timeout=60))
    for processes, seconds in ((1, 60), (4, 92)):
        with inject(CUDA, settings, processes=processes) as found:
            assert found.criu.timeout == seconds


def test_no_place_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(tmp_path / "default", "cuda_plugin.so")
    monkeypatch.setattr(plugins, "scratch", lambda: str(tmp_path / "none"))
    with pytest.raises(ImageError, match="the directory for CRIU's plugins"), inject(None, Settings()):
        pass
