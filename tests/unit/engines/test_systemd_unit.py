"""What the unit of a container does; what systemctl says is a test's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest

from gpusnap.engines import podman, systemd_unit
from gpusnap.runtime_shim.base.errors import ContainerError, GpusnapError
from gpusnap.runtime_shim.runtime import child_process
from gpusnap.runtime_shim.runtime.child_process import Finished

Says = Callable[[str], None]
FOUND = podman.Container(
    "1" * 64, "w", "gpusnap-runtime", "running", conmon=7, labels={"PODMAN_SYSTEMD_UNIT": "w.service"}
)
CALM = "MainPID=7\nRestart=no\nRestartPreventExitStatus=\nWatchdogUSec=0\n"
STRICT = "MainPID=7\nRestart=always\nRestartPreventExitStatus=\nWatchdogUSec=4s\n"


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Says:
    def say(text: str) -> None:
        def run(words: Sequence[str], **_: object) -> Finished:
            assert words[0] == "systemctl"
            assert words[-1] == "w.service"
            if not text:
                raise GpusnapError("it does not answer")
            return Finished(0, text, "")

        monkeypatch.setattr(child_process, "run", run)

    return say


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (CALM, ""),
        (STRICT, "always"),
        (STRICT.replace("always", "on-failure"), "on-failure"),
        (STRICT.replace("always", "on-abnormal"), ""),
        (STRICT.replace("Status=", "Status=2 137"), ""),
        (STRICT.replace("=7", "=8"), ""),
        ("MainPID=7\nRestart=always\n", ""),
        ("", ""),
    ],
)
def test_restart(says: Says, capsys: pytest.CaptureFixture[str], text: str, told: str) -> None:
    """It is told if it is certain: conmon is the main process, and exits with 137."""
    says(text)
    systemd_unit.note_restart(FOUND)
    err = capsys.readouterr().err
    assert (f"w.service has Restart={told};" in err) if told else err == ""


@pytest.mark.parametrize(
    ("text", "refused"),
    [(CALM, False), (STRICT, True), (STRICT.replace("4s", "infinity"), False), ("", False)],
)
def test_watchdog(says: Says, text: str, refused: bool) -> None:
    """A suspended container cannot report to it."""
    says(text)
    with pytest.raises(ContainerError, match="would end it after 4s") if refused else nullcontext():
        systemd_unit.check_watchdog(FOUND)


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (CALM, "systemctl stop w.service"),
        (CALM.replace("=7", "=0"), "podman rm --force --time 0 w"),
        ("", "podman rm --force --time 0 w"),
    ],
)
def test_removal(says: Says, text: str, command: str) -> None:
    """By systemd, as long as the unit runs it: the unit would replace one that is restored later."""
    says(text)
    assert systemd_unit.make_removal(FOUND, "--time", "0") == command


def test_without_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked."""
    monkeypatch.setattr(child_process, "run", lambda *_, **__: pytest.fail("asked"))
    systemd_unit.check_watchdog(replace(FOUND, labels={}))
    systemd_unit.note_restart(replace(FOUND, conmon=0))
