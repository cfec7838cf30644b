"""The network lock of a killed CRIU: what is removed, and what is not touched."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest

from gpusnap.runtime_shim.base.errors import NotStarted
from gpusnap.runtime_shim.process import network_namespace, proc
from gpusnap.runtime_shim.runtime.child_process import Finished
from gpusnap.runtime_shim.snapshot.records import journal
from gpusnap.runtime_shim.snapshot.records.journal import Entry, JournalProcess
from gpusnap.runtime_shim.snapshot.recovery import network_lock

KEY = "0" * 64
LOCK = ["-N CRIU", "-A INPUT -j CRIU", "-A INPUT -j CRIU", "-A OUTPUT -j CRIU", "-A CRIU -j DROP"]


class Host:
    """A network namespace with rules, and the programs that change them."""

    def __init__(self) -> None:
        self.rules = {"iptables": [*LOCK, "-A INPUT -j ACCEPT"], "ip6tables": list(LOCK)}
        self.tables = ["inet CRIU-7", "inet other"]
        self.missing: set[str] = set()
        self.stuck = False

    def run(self, argv: Sequence[str], *, seconds: float) -> Finished:
        assert seconds > 0
        program, *words = argv
        if program in self.missing:
            raise NotStarted(f"{program} cannot be started")
        if program == "nft":
            if words == ["list", "tables"]:
                return Finished(0, "".join(f"table {each}\n" for each in self.tables), "")
            assert words[:2] == ["delete", "table"]
            self.tables.remove(" ".join(words[2:]))
            return Finished(0, "", "")
        rules = self.rules[program]
        assert words[:2] == ["-w", "5"]
        match words[2:]:
            case ["-S", "CRIU"]:
                return Finished(0 if "-N CRIU" in rules else 1, "", "")
            case ["-D", chain, "-j", "CRIU"]:
                return Finished(0 if self._drop(rules, f"-A {chain} -j CRIU") else 1, "", "")
            case ["-F", "CRIU"]:
                self._drop(rules, "-A CRIU -j DROP")
                return Finished(0, "", "")
            case ["-X", "CRIU"]:
                if self.stuck:
                    return Finished(4, "", "Resource temporarily unavailable.\n")
                assert not [rule for rule in rules if "CRIU" in rule and rule != "-N CRIU"]
                return Finished(0 if self._drop(rules, "-N CRIU") else 1, "", "")
        raise AssertionError(argv)

    @staticmethod
    def _drop(rules: list[str], rule: str) -> bool:
        if rule in rules:
            rules.remove(rule)
            return True
        return False


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    """That of the process 7, in another namespace than gpusnap's."""
    made = Host()

    def joined(path: str, work: Callable[[], None]) -> None:
        assert path == f"{proc.PROC}/7/ns/net"
        work()

    monkeypatch.setattr(network_lock, "run", made.run)
    monkeypatch.setattr(network_namespace, "run_joined", joined)
    monkeypatch.setattr(proc, "namespace", lambda pid, kind: "net:[1]" if pid == os.getpid() else "net:[2]")
    monkeypatch.setattr(journal, "entries", lambda unreadable: ())
    return made


def test_all_of_it(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """The rules of others stay; a CRIU that was killed twice has left two jumps."""
    network_lock.remove_left_lock(7, KEY)
    assert host.rules == {"iptables": ["-A INPUT -j ACCEPT"], "ip6tables": []}
    assert host.tables == ["inet other"]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("missing", ["iptables", "ip6tables", "nft"])
def test_a_program_that_is_missing(host: Host, missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    """CRIU has not used it."""
    host.missing.add(missing)
    network_lock.remove_left_lock(7, KEY)
    cleaned = {name: not any("CRIU" in rule for rule in rules) for name, rules in host.rules.items()}
    assert {name for name, done in cleaned.items() if not done} == {missing} - {"nft"}
    assert capsys.readouterr().err == ""


def test_it_cannot_be_removed(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """A note says why, and how to look."""
    host.stuck = True
    network_lock.remove_left_lock(7, KEY)
    said = capsys.readouterr().err
    assert "iptables cannot remove the chain CRIU: Resource temporarily unavailable." in said
    assert "nsenter --target 7 --net iptables -S" in said


def test_its_own_namespace(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """CRIU locks nothing there; neither there nor of a process that has ended is anything touched."""
    for network in ("net:[1]", ""):
        monkeypatch.setattr(proc, "namespace", lambda pid, kind, network=network: network)
        network_lock.remove_left_lock(7, KEY)
    assert host.rules["ip6tables"] == LOCK


@pytest.mark.parametrize(
    ("key", "at_work", "used"), [("1" * 64, True, True), ("1" * 64, False, False), (KEY, True, False)]
)
def test_a_neighbour_is_being_dumped(
    host: Host, monkeypatch: pytest.MonkeyPatch, key: str, at_work: bool, used: bool
) -> None:
    """The lock may be that of its CRIU."""
    entry = Entry(key, "", (1 << 22, 1), (JournalProcess(8, 1, ()),))
    monkeypatch.setattr(Entry, "at_work", at_work)
    monkeypatch.setattr(journal, "entries", lambda unreadable: (entry,))
    network_lock.remove_left_lock(7, KEY)
    assert (host.rules["ip6tables"] == LOCK) == used
