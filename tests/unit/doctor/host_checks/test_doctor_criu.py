"""Checks of CRIU: its version, what it says itself, its network lock."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from doctor_trees import Programs, only, tree

from gpusnap.doctor.host_checks import criu
from gpusnap.runtime_shim.runtime.child_process import Finished
from gpusnap.runtime_shim.runtime.criu.images import pycriu_package
from gpusnap.runtime_shim.runtime.criu.images.pycriu_package import Pycriu


@pytest.mark.parametrize(
    ("version", "release", "verdict", "said"),
    [
        ("4.1.1", "6.12.0", "ok", "4.1.1 (/usr/bin/criu)"),
        ("4.2", "6.18.0", "ok", "4.2"),
        ("4.1.1", "6.18.44-x", "warning", "cannot dump TCP"),
        ("3.17.1", "6.18.0", "warning", "older"),
        ("3.8", "6.12.0", "failure", "too old for Podman"),
        ("unknown", "6.12.0", "failure", "does not report its version"),
    ],
)
def test_version(version: str, release: str, verdict: str, said: str) -> None:
    """Too old, old, or not fit for this kernel."""
    found = only(criu.check_criu(version, release, find=Programs(criu="").find))
    assert found[0] == verdict
    assert said in found[1].says


def test_none() -> None:
    """A host without CRIU: one failure, and no `criu check`."""
    nothing = Programs()
    assert only(criu.check_criu("unknown", find=nothing.find))[0] == "failure"
    assert [*criu.run_own_check(find=nothing.find, run=nothing.run)] == []


OLD = """\
Error (criu/util.c:642): exited, status=1
Error (criu/vdso.c:381): vdso: Unexpected rt vDSO area bounds
Error (criu/crtools.c:260): Could not initialize kernel features detection.
"""


@pytest.mark.parametrize(
    ("answer", "verdict", "said"),
    [
        (Finished(0, "Looks good.\n", ""), "ok", "finds all that it needs"),
        (
            Finished(0, "Looks good.\n", "Warn  (criu/a.c:1): one\nWarn  (criu/a.c:2): two\n"),
            "ok",
            "with 2 notes",
        ),
        (Finished(1, "", OLD), "failure", "CRIU says: vdso: Unexpected rt vDSO area bounds, and 2 more"),
        (Finished(1, "", ""), "failure", "CRIU says: nothing"),
        (Finished(128 + 11, "", ""), "failure", "killed by signal 11"),
    ],
)
def test_own_check(answer: Finished, verdict: str, said: str) -> None:
    """What `criu check` prints, in one line."""
    programs = Programs(criu=answer)
    found = only(criu.run_own_check(find=programs.find, run=programs.run))
    assert found[0] == verdict
    assert said in found[1].says


def test_own_check_without_end() -> None:
    """One that is not done at the deadline."""
    assert only(criu.run_own_check(find=Programs(criu="").find, run=lambda argv: None))[0] == "failure"


HELP = """\
  --network-lock METHOD
                      network locking/unlocking method; argument
                      can be {}
* External resources support:
"""
DEBIAN = HELP.format("'nftables' or 'iptables' (default).")
NFT = HELP.format("'nftables' (default) or 'iptables'.")
BOTH = {"iptables_restore": "", "ip6tables_restore": ""}


@pytest.mark.parametrize(
    ("tools", "shown", "options", "verdict", "said"),
    [
        (BOTH, DEBIAN, (), "ok", "with iptables"),
        (
            {"iptables_restore": "", "nft": ""},
            DEBIAN,
            (),
            "failure",
            "but ip6tables-restore is not installed",
        ),
        ({"nft": ""}, DEBIAN, (), "failure", "iptables-restore and ip6tables-restore are not"),
        ({"nft": ""}, "", (), "failure", "with iptables"),
        ({**BOTH, "iptables": ""}, DEBIAN, (), "ok", "with iptables"),
        ({}, NFT, (), "ok", "by nftables"),
        ({}, NFT, ("network-lock iptables",), "failure", "with iptables"),
        ({}, DEBIAN, ("tcp-close", "network-lock nftables"), "ok", "by nftables"),
        ({}, DEBIAN, ("network-lock=nftables",), "ok", "by nftables"),
        ({}, DEBIAN, ("network-lock skip",), "ok", "not at all"),
    ],
)
def test_network_lock(
    tmp_path: Path, tools: dict[str, str], shown: str, options: tuple[str, ...], verdict: str, said: str
) -> None:
    """The way that CRIU was built for, or is told to go; nft's program is not what it uses."""
    programs = Programs(criu=shown, **tools)
    root = str(tmp_path)
    found = only(criu.check_network_lock(options, root=root, find=programs.find, run=programs.run))
    assert found[0] == verdict
    assert said in found[1].says
    assert verdict == "ok" or 'criu.options = ["network-lock nftables"]' in found[1].todo


def test_iptables_without_the_mark(tmp_path: Path) -> None:
    """CRIU's rules match a mark, which an image without iptables' extensions cannot do."""
    programs = Programs(criu=DEBIAN, iptables="", **BOTH)

    def run(argv: list[str]) -> Finished | None:
        if argv[1:] == ["-m", "mark", "--help"]:
            return Finished(2, "", "iptables: Couldn't load match `mark'")
        return programs.run(argv)

    verdict, found = only(criu.check_network_lock(root=str(tmp_path), find=programs.find, run=run))
    assert verdict == "failure"
    assert "no extension `mark`" in found.says
    assert "install the package iptables" in found.todo
    slow = partial(criu.check_network_lock, root=str(tmp_path), find=programs.find)
    assert only(slow(run=lambda argv: None if "mark" in argv else programs.run(argv)))[0] == "ok"


def test_network_lock_of_crius_own_files(tmp_path: Path) -> None:
    """The runtime's comes last; without CRIU there is nothing to say."""
    programs = Programs(criu=DEBIAN)
    root = tree(tmp_path, {"/etc/criu/default.conf": "# all\nnetwork-lock nftables\n"})
    assert only(criu.check_network_lock(root=root, find=programs.find, run=programs.run))[0] == "ok"
    tree(tmp_path, {"/etc/criu/runc.conf": "network-lock iptables\n"})
    options = ["network-lock nftables"]
    for kind, verdict in (("crun", "ok"), ("runc", "failure")):
        found = criu.check_network_lock(options, kind, root=root, find=programs.find, run=programs.run)
        assert only(found)[0] == verdict
    assert [*criu.check_network_lock(find=Programs().find)] == []


@pytest.mark.parametrize(
    ("accelerated", "said"), [(True, "can be decoded"), (False, "uses its Python implementation")]
)
def test_pycriu(monkeypatch: pytest.MonkeyPatch, accelerated: bool, said: str) -> None:
    """It is there, with protobuf in C or in Python."""
    found = Pycriu(None, {}, accelerated)
    monkeypatch.setattr(pycriu_package, "load", lambda: found)
    [check] = criu.check_pycriu()
    assert check.verdict == "ok"
    assert said in check.says


def test_no_pycriu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a restore would be refused, and the package is named."""

    def load() -> Pycriu:
        raise pycriu_package.make_missing_error("CRIU's images cannot be read without it")

    monkeypatch.setattr(pycriu_package, "load", load)
    [check] = criu.check_pycriu()
    assert check.verdict == "failure"
    assert "python3-pycriu" in check.todo


@pytest.mark.parametrize(
    ("version", "release", "local"),
    [("4.1.1", "6.16.0", True), ("4.2", "6.16.0", False), ("unknown", "6.18", False)],
)
def test_local_sockets_only(version: str, release: str, local: bool) -> None:
    """By both versions."""
    assert criu.dumps_only_local_sockets(version, release) is local
