"""Completion by the shell: what is offered, and that bash takes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import keep
from click.shell_completion import ShellComplete, ZshComplete

from gpusnap.cli import completion as completing
from gpusnap.cli import main as cli
from gpusnap.oci.store.store import Store
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.settings import Store as StoreSettings

ROOT = Path(__file__).parents[3]
Complete = Callable[[str], list[str]]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """This host's, with three checkpoints, one of them without a name."""
    made = Store(tmp_path / "store")
    for names in (("web:20260102-030405",), ("web:20260103-030405",), ()):
        keep(made, names=names, records={f"file-{len(names)}-{names}": b""}, gpu=False)
    mine = Settings(store=StoreSettings(path=made.path))
    monkeypatch.setattr("gpusnap.runtime_shim.settings.load", lambda: mine)
    return made


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch) -> Complete:
    """What click offers for a command line of zsh; the last word may be cut off."""

    def offered(line: str) -> list[str]:
        words = ["gpusnap", *line.split(" ")]
        monkeypatch.setenv("COMP_WORDS", " ".join(words).strip())
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        made: ShellComplete = ZshComplete(cli.command, {}, "gpusnap", "_GPUSNAP_COMPLETE")
        args, incomplete = made.get_completion_args()
        return [f"{item.type} {item.value}" for item in made.get_completions(args, incomplete)]

    return offered


def test_names(store: Store, complete: Complete) -> None:
    """Names, and digits of a digest where there is none."""
    (nameless,) = (each.descriptor.digest for each in store.entries() if not each.name)
    assert complete("rm web") == ["plain web:20260102-030405", "plain web:20260103-030405"]
    assert complete("tag web:20260103") == ["plain web:20260103-030405"]
    assert f"plain {nameless[7:19]}" in complete("rm ")
    assert complete("inspect web")[-1] == "file web"
    assert complete("ls o") == ["plain oci:"]


def test_another_store(store: Store, complete: Complete) -> None:
    """oci:DIR, then :NAME."""
    folder = os.path.dirname(store.path)
    assert complete(f"inspect oci:{folder}/st") == [f"plain oci:{store.path}"]
    assert complete(f"ls oci:{folder}/st") == [f"plain oci:{store.path}"]
    assert complete(f"rm oci:{store.path}:web:20260102") == [f"plain oci:{store.path}:web:20260102-030405"]
    assert complete("rm oci:/none:web") == []


def test_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complete: Complete) -> None:
    """Nothing to offer is no error."""
    mine = Settings(store=StoreSettings(path=str(tmp_path / "none")))
    monkeypatch.setattr("gpusnap.runtime_shim.settings.load", lambda: mine)
    assert complete("rm w") == []


def test_names_from_elsewhere(store: Store, complete: Complete) -> None:
    """A name with a line break in it, from another tool's index, is not offered."""
    index = Path(store.path, "index.json")
    index.write_text(index.read_text().replace("web:20260102-030405", r"web:a\nplain,rm"))
    assert complete("rm web") == ["plain web:20260103-030405"]


def test_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that Podman lists; none where it fails or is not there."""
    podman = tmp_path / "podman"
    podman.write_text(
        '#!/bin/sh\n[ "$*" = "container ps --format {{.Names}}" ] && printf "web\\nworker\\n"\n'
    )
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    context = cli.command.make_context("gpusnap", ["gpus"])
    parameter = cli.command.params[0]
    found = completing.complete_container(context, parameter, "wo")
    assert [item.value for item in found] == ["worker"]
    podman.write_text("#!/bin/sh\necho broken >&2\nexit 125\n")
    assert completing.complete_container(context, parameter, "") == []
    podman.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(completing, "_DEADLINE", 0.1)
    assert completing.complete_container(context, parameter, "") == []
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert completing.complete_container(context, parameter, "") == []


@pytest.mark.parametrize("shell", completing.SHELLS)
def test_the_script(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shell: str) -> None:
    """It is printed whatever shells are there, and calls gpusnap back."""
    monkeypatch.setenv("PATH", "/none")
    monkeypatch.setattr(sys, "argv", ["gpusnap", "completion", shell])
    assert cli.main() == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"_GPUSNAP_COMPLETE={shell}_complete" in out


@pytest.mark.parametrize(
    ("line", "replies"),
    [
        ("gpusnap ta", ["tag"]),
        ("gpusnap rm web", ["web:20260102-030405", "web:20260103-030405"]),
        # bash replaces what follows the last colon.
        ("gpusnap rm web:20260103", ["20260103-030405"]),
        # … but not within quotes.
        ("gpusnap rm  'web:20260103", ["web:20260103-030405"]),
        ("gpusnap rm web:20260102-030405 nothing", []),
    ],
)
def test_bash(tmp_path: Path, store: Store, line: str, replies: list[str]) -> None:
    """The script in a real bash, with words that have colons in them."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    # The settings of this host are not to be had otherwise in a process of its own.
    program = tmp_path / "bin" / "gpusnap"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable} -B\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from gpusnap.runtime_shim import settings\n"
        f"mine = settings.Settings(store=settings.Store(path={store.path!r}))\n"
        "settings.load = lambda: mine\nfrom gpusnap.cli.main import main\nraise SystemExit(main())\n"
    )
    program.chmod(0o755)
    script = (
        "source <(gpusnap completion bash); COMP_LINE=$1 COMP_POINT=${#1}; compopt() { :; }; "
        '_gpusnap_completion gpusnap; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        [bash, "--norc", "-c", script, "bash", line],
        env={"PATH": f"{program.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout.split() == replies
