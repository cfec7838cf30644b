"""CRIU's configuration: what the settings ask for reaches it, by file or by the runtime's options."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import POISON

from gpusnap.runtime_shim.base.errors import ImageError, SettingsError
from gpusnap.runtime_shim.records.manifest import DriverMount
from gpusnap.runtime_shim.runtime.command_line import CheckpointCall, RestoreCall
from gpusnap.runtime_shim.runtime.criu import config
from gpusnap.runtime_shim.runtime.criu.config import (
    VARIABLE,
    Connections,
    config_file,
    connections,
    dump_text,
    restore_text,
    with_flags,
)
from gpusnap.runtime_shim.runtime.identify import parse_version
from gpusnap.runtime_shim.settings import Criu

CRUN = parse_version(Path("/usr/bin/crun"), "crun version 1.21\n+CRIU")
OLD_RUNC = parse_version(Path("/usr/bin/runc"), "runc version 1.1.15+ds1")
NEW_RUNC = parse_version(Path("/usr/bin/runc"), "runc version 1.3.0")
CHECKPOINT = CheckpointCall(container_id="c")
RESTORE = RestoreCall(container_id="c")
LIBRARY = "/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04"
MOUNT = DriverMount("gpusnap-0", LIBRARY, "/host" + LIBRARY)
FULL = Criu(
    link_remap=True,
    ghost_limit=5 << 20,
    timeout=7,
    manage_cgroups="ignore",
    libdir="/usr/lib/criu",
    action_script="/opt/act.sh",
    external=("mnt[/data]:data",),
    options=("network-lock nftables", "weak-sysctls"),
)
COMMON = [
    "link-remap",
    "ghost-limit 5242880",
    "timeout 7",
    "manage-cgroups=ignore",
    "libdir /usr/lib/criu",
    "action-script /opt/act.sh",
    "external mnt[/data]:data",
]


def test_dump_text() -> None:
    """Every setting has its line; the driver's mounts are external by where they are in the container."""
    assert dump_text(FULL, [MOUNT], masters=True, drop_connections=True).splitlines() == [
        *COMMON,
        "skip-in-flight",
        "tcp-close",
        f"external mnt[{LIBRARY}]:gpusnap-0",
        "enable-external-masters",
        "network-lock nftables",
        "weak-sysctls",
    ]


def test_restore_text() -> None:
    """At restore the driver's mounts come by key from where they are on the host."""
    assert restore_text(FULL, [MOUNT], drop_connections=True).splitlines() == [
        *COMMON,
        "tcp-close",
        f"external mnt[gpusnap-0]:/host{LIBRARY}",
        "network-lock nftables",
        "weak-sysctls",
    ]


def test_a_script_of_ours() -> None:
    """It comes last: CRIU runs the last one first (criu/action-scripts.c, add_script)."""
    found = restore_text(FULL, [], script="/usr/bin/gpusnap-runtime").splitlines()
    assert [line for line in found if line.startswith("action-script")] == [
        "action-script /opt/act.sh",
        "action-script /usr/bin/gpusnap-runtime",
    ]


def test_defaults() -> None:
    """What is not set has no line, except where CRIU's own default is too low."""
    assert dump_text(Criu(), [], masters=False).splitlines() == [
        "link-remap",
        f"ghost-limit {300 << 20}",
        "timeout 60",
        "skip-in-flight",
    ]
    assert "skip-in-flight" not in dump_text(Criu(), [], masters=False, skip_in_flight=False)
    assert "tcp-close" not in restore_text(Criu(), [])
    assert "link-remap" not in dump_text(Criu(link_remap=False), [], masters=False)


@pytest.mark.parametrize("path", ["/usr/lib/a b", "/usr/lib/a#b", "/a\nlibdir /x", '/a"b', "/a'b", "/a\\b"])
def test_a_path_that_is_no_word(path: str) -> None:
    """A path that CRIU's parser would take apart, or for another line, is refused."""
    with pytest.raises(ImageError, match="cannot be passed to CRIU"):
        dump_text(Criu(), [DriverMount("gpusnap-0", path, LIBRARY)], masters=False)
    with pytest.raises(ImageError, match="cannot be passed to CRIU"):
        restore_text(Criu(), [DriverMount("gpusnap-0", LIBRARY, path)])


def test_manage_cgroups_by_option() -> None:
    """A runtime that takes it gets --manage-cgroups-mode, which overrides the file; a caller's own stays."""
    criu = Criu(manage_cgroups="ignore")
    assert with_flags(CHECKPOINT, CRUN, criu).manage_cgroups_mode == "ignore"
    assert with_flags(RESTORE, NEW_RUNC, criu).manage_cgroups_mode == "ignore"
    assert with_flags(CHECKPOINT, OLD_RUNC, Criu(manage_cgroups="soft")).manage_cgroups_mode == "soft"
    own = replace(CHECKPOINT, manage_cgroups_mode="soft")
    assert with_flags(own, CRUN, criu).manage_cgroups_mode == "soft"
    assert with_flags(CHECKPOINT, CRUN, Criu()).manage_cgroups_mode is None


def test_manage_cgroups_where_the_runtime_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """runc 1.1 knows no "ignore": refused, unless the administrator's file for runc says it."""
    file = tmp_path / "runc.conf"
    monkeypatch.setattr(config, "_RUNC_FILE", str(file))
    criu = Criu(manage_cgroups="ignore")
    for text in (None, "manage-cgroups=soft\n", "# manage-cgroups=ignore\n"):
        if text is not None:
            file.write_text(text, "ascii")
        with pytest.raises(SettingsError) as caught:
            with_flags(CHECKPOINT, OLD_RUNC, criu)
        assert "manage-cgroups=ignore" in caught.value.hint
        assert str(file) in caught.value.hint
    file.write_text("tcp-close\nmanage-cgroups=ignore\n", "ascii")
    assert with_flags(CHECKPOINT, OLD_RUNC, criu).manage_cgroups_mode is None


def test_link_remap_by_option() -> None:
    """Only a runtime that takes --link-remap gets it; the file asks the others' CRIU."""
    assert with_flags(CHECKPOINT, NEW_RUNC, Criu()).link_remap
    assert not with_flags(CHECKPOINT, CRUN, Criu()).link_remap
    assert not with_flags(CHECKPOINT, NEW_RUNC, Criu(link_remap=False)).link_remap
    assert with_flags(replace(CHECKPOINT, link_remap=True), NEW_RUNC, Criu(link_remap=False)).link_remap


def test_skip_in_flight_by_option() -> None:
    """runc 1.3 says no for itself unless its option is given; the others leave it to the file."""
    assert with_flags(CHECKPOINT, NEW_RUNC, Criu()).tcp_skip_in_flight
    assert not with_flags(CHECKPOINT, NEW_RUNC, Criu(skip_in_flight=False)).tcp_skip_in_flight
    assert not with_flags(CHECKPOINT, OLD_RUNC, Criu()).tcp_skip_in_flight
    assert not with_flags(CHECKPOINT, CRUN, Criu()).tcp_skip_in_flight


def test_established_by_option() -> None:
    """In criu.options it stands for the option, which both runtimes set and which overrides the file."""
    criu = Criu(options=("tcp-established",))
    assert with_flags(CHECKPOINT, CRUN, criu).tcp_established
    assert with_flags(RESTORE, NEW_RUNC, criu).tcp_established
    assert not with_flags(
        RESTORE, NEW_RUNC, Criu(options=("no-tcp-established", "#tcp-established"))
    ).tcp_established


def test_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed by a restore, unless established ones are asked for; refused where the setting is off."""
    runc, crun, own = tmp_path / "runc.conf", tmp_path / "crun.conf", tmp_path / "own.conf"
    monkeypatch.setattr(config, "_RUNC_FILE", str(runc))
    monkeypatch.setattr(config, "_CRUN_FILE", str(crun))
    off = Criu(tcp_close=False)
    established = replace(CHECKPOINT, tcp_established=True)
    assert connections(CHECKPOINT, CRUN, Criu(), {}) is Connections.DROPPED
    assert connections(CHECKPOINT, CRUN, off, {}) is Connections.REFUSED
    assert connections(established, CRUN, Criu(), {}) is Connections.KEPT
    assert connections(CHECKPOINT, CRUN, replace(off, options=("tcp-close",)), {}) is Connections.DROPPED
    crun.write_text("tcp-established\n", "ascii")
    assert connections(CHECKPOINT, CRUN, Criu(), {}) is Connections.KEPT
    assert connections(CHECKPOINT, NEW_RUNC, Criu(), {}) is Connections.DROPPED
    runc.write_text("# it is\ntcp-established # for the server\n", "ascii")
    assert connections(CHECKPOINT, NEW_RUNC, Criu(), {}) is Connections.KEPT
    assert connections(CHECKPOINT, NEW_RUNC, Criu(), {"org.criu.config": str(own)}) is Connections.DROPPED
    own.write_text("tcp-established", "ascii")
    assert connections(CHECKPOINT, NEW_RUNC, off, {"org.criu.config": str(own)}) is Connections.KEPT


def test_config_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is there, named in the environment, while the block runs, and gone after it."""
    monkeypatch.delenv(VARIABLE, raising=False)
    with config_file("timeout 7\n") as environment:
        path = Path(environment[VARIABLE])
        assert path.read_text("utf-8") == "timeout 7\n"
        assert path.stat().st_mode & 0o077 == 0
    assert not path.exists()


def test_it_cannot_be_closed() -> None:
    """The container may have ended by then, and its checkpoint be whole: that is no reason to fail."""
    with config_file("tcp-close\n") as environment:
        path = environment[VARIABLE]
        (number,) = [
            int(name)
            for name in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{name}") and os.path.samefile(f"/proc/self/fd/{name}", path)
        ]
        os.close(number)
    assert not os.path.exists(path)


def test_the_callers_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the caller's CRIU_CONFIG_FILE says comes first, and none of it is lost."""
    own = tmp_path / "own.conf"
    own.write_text("tcp-close", "ascii")
    monkeypatch.setenv(VARIABLE, str(own))
    with config_file("timeout 7\n") as environment:
        assert environment[VARIABLE] != str(own)
        assert Path(environment[VARIABLE]).read_text("utf-8") == "tcp-close\ntimeout 7\n"
    assert own.read_text("ascii") == "tcp-close"


def test_the_callers_file_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be read is an error, not left out, in words that Podman leaves alone."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    with pytest.raises(ImageError) as caught, config_file(""):
        pass
    assert not [words for words in POISON if words in caught.value.sentence().lower()]


@contextmanager
def no_room() -> Iterator[None]:
    """No file may grow (setrlimit(2), RLIMIT_FSIZE)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_for_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it cannot be written there is an ImageError, and nothing is left behind."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(config, "scratch", lambda: str(tmp_path))
    with no_room(), pytest.raises(ImageError, match="cannot be prepared"), config_file("timeout 7\n"):
        pass
    assert os.listdir(tmp_path) == []
