"""The command `gpusnap`: what it prints, and one sentence and an exit code where it cannot."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import click
import pytest
import zstandard
from fake_podman import ID, FakePodman
from fakes import POISON, FakeDriver, a_manifest, exporting, gpu, uuid
from kept_checkpoints import hand_over_pages, keep_pages, leave_export
from outgoing import outgoing
from rich.console import Console
from stopped_container import make_stopped

from gpusnap.checkpoints import migrations
from gpusnap.cli import exit_codes
from gpusnap.cli import main as cli
from gpusnap.cli import tables as show
from gpusnap.cli.commands import host as host_commands
from gpusnap.engines import podman
from gpusnap.oci.base.errors import (
    ArchiveError,
    BlobError,
    DiskFull,
    NotAnArchive,
    NotInRegistry,
    NotThere,
    Unreachable,
)
from gpusnap.oci.store.store import Store
from gpusnap.operations import driver as needed
from gpusnap.operations.checkpointing import places
from gpusnap.operations.open import load_manifest
from gpusnap.operations.restoring import in_podman
from gpusnap.operations.suspending import targets
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim._version import __version__
from gpusnap.runtime_shim.base.errors import GpusnapError, Interrupted, ManifestError, Refused, UsageError
from gpusnap.runtime_shim.base.transaction import Step
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.records import manifest, manifest_json
from gpusnap.runtime_shim.records.manifest import ChunkTotals, GpuProcess, Manifest, NeutralisedProcess
from gpusnap.runtime_shim.records.manifest_file import Draft
from gpusnap.runtime_shim.setting_keys import TABLE
from gpusnap.runtime_shim.settings import Memory, Settings, load
from gpusnap.runtime_shim.shim import overrides
from gpusnap.runtime_shim.snapshot.memory import chunk_cache
from gpusnap.runtime_shim.snapshot.memory.destination import StoreDestination
from gpusnap.runtime_shim.snapshot.memory.handover import Recipient
from gpusnap.runtime_shim.snapshot.records import journal, origin, reservations
from gpusnap.runtime_shim.snapshot.recovery import checkpoint as recovery
from gpusnap.runtime_shim.snapshot.recovery import restored_containers
from gpusnap.runtime_shim.snapshot.restoring import record as restore_record
from gpusnap.runtime_shim.snapshot.suspended_containers import spilled

ROOT = Path(__file__).parents[3]
Run = Callable[..., tuple[int, str, str]]


def directory(folder: Path, record: Manifest) -> Path:
    draft = Draft(str(folder))
    draft.begin()
    draft.prepare(record)
    draft.finish(record)
    return folder


def archive(folder: Path, record: Manifest) -> Path:
    """As `podman container checkpoint --export` writes it."""
    content, buffer = manifest_json.encode(record), io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo(f"checkpoint/{manifest.FOLDER}/{manifest.NAME}")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    path = folder / "export.tar.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(buffer.getvalue()))
    return path


def test_from_a_checkout() -> None:
    """`python -m gpusnap` is the command."""
    said = subprocess.run(
        [sys.executable, "-m", "gpusnap", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert said.stdout == f"gpusnap, version {__version__}\n"


# Where a checkpoint comes from.


def test_load_manifest(tmp_path: Path) -> None:
    """From an archive, from an image directory, and from one that was unpacked."""
    record = a_manifest()
    assert load_manifest(str(archive(tmp_path, record))) == record
    assert load_manifest(str(directory(tmp_path / "image", record))) == record
    directory(tmp_path / "unpacked" / "checkpoint", record)
    assert load_manifest(str(tmp_path / "unpacked")) == record


def test_load_manifest_of_something_else(tmp_path: Path) -> None:
    """What is no checkpoint of ours is named, with what it may be instead."""
    with tarfile.open(tmp_path / "plain.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("config.dump"))
    with pytest.raises(
        ManifestError, match=r"plain\.tar holds no checkpoint/gpusnap/manifest\.json"
    ) as caught:
        load_manifest(str(tmp_path / "plain.tar"))
    assert "without a GPU" in caught.value.hint
    (tmp_path / "text").write_text("text" * 500, "ascii")
    with pytest.raises(NotAnArchive, match="is not a checkpoint archive"):
        load_manifest(str(tmp_path / "text"))
    with pytest.raises(ManifestError, match="is incomplete"):
        load_manifest(str(tmp_path))


# The commands.


def test_inspect(tmp_path: Path, gpusnap: Run) -> None:
    """GPUs, processes and the timeline, one line each."""
    code, out, err = gpusnap("inspect", str(archive(tmp_path, a_manifest(pids=(1, 42)))))
    assert (code, err) == (0, "")
    assert "driver 580.159.04 (CUDA 13.0), CRIU 4.1.1, crun 1.21, Linux 6.18.0 x86_64" in out
    lines = out.splitlines()
    assert any(uuid(0) in line and "80.0 GiB" in line and "3.0 MiB" in line for line in lines)
    assert any(line.split()[:2] == ["42", "sleep"] for line in lines)
    assert any(line.startswith("dump") and "0.250" in line and "0.500" in line for line in lines)
    assert "timeline (0.75 s)" in out


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_a_file_that_is_no_archive(tmp_path: Path, gpusnap: Run, command: str) -> None:
    """Nothing is damaged."""
    (tmp_path / "text").write_text("text" * 500, "ascii")
    code, _, err = gpusnap(command, str(tmp_path / "text"))
    assert (code, err) == (
        1,
        f"gpusnap: {tmp_path}/text is not a checkpoint archive; check the path [GPS-605]\n",
    )


def test_inspect_of_chunks(tmp_path: Path, gpusnap: Run) -> None:
    """What was written, what a step has to say, and how long the processes were stopped."""
    steps = (Step("driver checkpoint", 0.0, 1.0, "process 7: no file for it"), Step("sync", 1.0, 0.5))
    record = replace(
        a_manifest(), pages="chunks", written=ChunkTotals(3 << 20, 2 << 30, 1 << 20), timing=steps
    )
    code, out, _ = gpusnap("inspect", str(archive(tmp_path, record)))
    assert code == 0
    assert "3.0 MiB written in chunks, 2.0 GiB already known, 1.0 MiB zero" in out
    assert "driver checkpoint: process 7: no file for it" in out
    assert "pause: " not in out
    steps = (Step("lock", 0.25, 0.5), Step("dump", 0.75, 0.5))
    _, out, _ = gpusnap("inspect", str(archive(tmp_path, replace(record, timing=steps))))
    assert "\npause: the processes were stopped for 1.00 s, until they had ended\n" in out
    for step, said in (
        ("resume", "the processes were stopped for 1.00 s, until they ran again"),
        ("adopt", "none, because the container was suspended"),
    ):
        timing = (*steps, Step(step, 1.25, 0.0))
        _, out, _ = gpusnap("inspect", str(archive(tmp_path, replace(record, timing=timing))))
        assert f"\npause: {said}\n" in out


def test_an_unknown_command(gpusnap: Run) -> None:
    """The nearest one is named, once; none where none is near."""
    for word, meant in (("chekpoint", "checkpoint"), ("restor", "restore")):
        code, _, err = gpusnap(word, "server")
        assert code == 2
        assert err.count("Did you mean") == 1
        assert f"'{meant}'?" in err
    assert "Did you mean" not in gpusnap("zzzzz")[2]


def test_inspect_of_neutralised_processes(tmp_path: Path, gpusnap: Run) -> None:
    """What a process inherited and has no more is shown, where there is one."""
    assert "inherited" not in gpusnap("inspect", str(archive(tmp_path, a_manifest())))[1]
    worker = NeutralisedProcess(41, "python3", ((4, "/dev/nvidia0"),), 2, 2 << 20)
    record = replace(a_manifest(), neutralised=(worker,))
    code, out, err = gpusnap("inspect", str(archive(tmp_path, record)))
    assert (code, err) == (0, "")
    assert "inherited files, now /dev/null" in out
    assert re.search(r"41 +python3 +1 open, 2 mapped \(2\.0 MiB\)", out)


def test_inspect_json(tmp_path: Path, gpusnap: Run) -> None:
    """--json prints the manifest itself."""
    code, out, err = gpusnap("inspect", "--json", str(archive(tmp_path, a_manifest())))
    assert (code, err) == (0, "")
    assert manifest_json.decode(out.encode(), "stdout") == a_manifest()


@pytest.mark.parametrize("text", ["[/bold]", "[red]x", "\x1b[2J", "a\udcffb", "\r\n", "[link=file:///]"])
def test_inspect_of_hostile_text(tmp_path: Path, gpusnap: Run, text: str) -> None:
    """Names from somebody's archive are shown as text: neither markup nor anything a terminal obeys."""
    process = GpuProcess(1, text, (text,), ((uuid(0), 1),))
    base = a_manifest()
    gpus = (replace(base.gpus[0], model=text),)
    host = replace(base.host, kernel=text)
    record = replace(base, processes=(process,), gpus=gpus, host=host, container=text, gpusnap=text)
    code, out, err = gpusnap("inspect", str(directory(tmp_path, record)))
    assert (code, err) == (0, "")
    assert not set(out) & {"\x1b", "\r", "\udcff"}
    if text.isprintable():
        assert out.count(text) >= 4


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": "2.0"}'])
def test_inspect_of_a_broken_manifest(tmp_path: Path, gpusnap: Run, content: bytes) -> None:
    """One sentence, and the exit code for what is damaged, but not for what a newer gpusnap made."""
    directory(tmp_path, a_manifest())
    (tmp_path / "gpusnap" / "manifest.json").write_bytes(content)
    code, out, err = gpusnap("inspect", str(tmp_path))
    assert (code, out) == (exit_codes.FAILED if b"2.0" in content else exit_codes.DAMAGED, "")
    assert err.startswith("gpusnap: ")
    assert err.count("\n") == 1
    assert not [words for words in POISON if words in err.lower()]


@pytest.mark.parametrize(
    "line", [("inspect",), ("inspect", "/", "/"), ("nonsense",), ("gpus", "--nonsense"), ("ls", "a", "b")]
)
def test_a_wrong_command_line(gpusnap: Run, line: tuple[str, ...]) -> None:
    """Exit code 2, and what is wrong on stderr."""
    code, out, err = gpusnap(*line)
    assert (code, out) == (2, "")
    assert "Error: " in err


@pytest.mark.parametrize("command", ["inspect", "plan", "verify"])
def test_a_file_that_is_not_there(gpusnap: Run, command: str) -> None:
    """Exit code 3, and its name."""
    code, out, err = gpusnap(command, "/none.tar")
    assert (code, out) == (exit_codes.NOT_FOUND, "")
    assert err.startswith("gpusnap: there is no file /none.tar; ")


def test_inspect_of_a_checkpoint_without_gpu(tmp_path: Path, gpusnap: Run) -> None:
    """An archive without a manifest may be sound: it is no damage."""
    with tarfile.open(tmp_path / "plain.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("config.dump"))
    code, _, err = gpusnap("inspect", str(tmp_path / "plain.tar"))
    assert code == exit_codes.FAILED
    assert "plain.tar holds no checkpoint/gpusnap/manifest.json" in err
    (tmp_path / "images").mkdir()
    code, _, err = gpusnap("inspect", str(tmp_path / "images"))
    assert (code, "is a directory without a checkpoint" in err) == (exit_codes.NOT_FOUND, True)
    (tmp_path / "images/inventory.img").touch()
    code, _, err = gpusnap("inspect", str(tmp_path / "images"))
    assert code == exit_codes.DAMAGED
    assert "is incomplete" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GpusnapError("x"), exit_codes.FAILED),
        (Refused("x"), exit_codes.FAILED),
        (UsageError("x"), exit_codes.USAGE),
        (Interrupted("x"), exit_codes.INTERRUPTED),
        (NotThere("x"), exit_codes.NOT_FOUND),
        (NotInRegistry("x"), exit_codes.NOT_FOUND),
        (BlobError("x"), exit_codes.DAMAGED),
        (ArchiveError("x"), exit_codes.DAMAGED),
        (DiskFull("x"), exit_codes.FAILED),
        (Unreachable("x"), exit_codes.FAILED),
        (BrokenPipeError(), exit_codes.FAILED),
        (click.Abort(), exit_codes.INTERRUPTED),
    ],
)
def test_exit_codes(gpusnap: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int) -> None:
    """Each kind of error has its code; all codes are documented."""

    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli.command, "main", fail)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert gpusnap()[0] == code
    assert code in exit_codes.MEANINGS


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, exit_codes.INTERRUPTED, "interrupted"),
        (signal.SIGTERM, exit_codes.TERMINATED, "interrupted by SIGTERM"),
        (signal.SIGHUP, exit_codes.HUNG_UP, "interrupted by SIGHUP"),
    ],
)
def test_signals(number: signal.Signals, code: int, said: str) -> None:
    """Each ends a command by an exception, which undoes; what has its own handler names it as well."""
    heard = ["env", "--default-signal=HUP,INT,TERM", sys.executable, "-B", "-c"]
    program = (
        "import os, signal, sys, click\n"
        "from gpusnap.cli import main as cli\n"
        "from gpusnap.runtime_shim.base.transaction import make_interruptible\n"
        "@click.command()\n"
        "@click.option('--inner', is_flag=True)\n"
        "def command(inner):\n"
        f"    send = lambda: os.kill(os.getpid(), {number.value})\n"
        "    try:\n"
        "        if inner:\n"
        "            with make_interruptible():\n"
        "                send()\n"
        "        send()\n"
        "    finally:\n"
        "        print('undone')\n"
        "cli.command = command\n"
        "sys.exit(cli.main())\n"
    )
    done = subprocess.run([*heard, program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (code, "undone\n"), done.stderr
    assert done.stderr.splitlines()[-1] == f"gpusnap: {said}; you can run the same command again"
    done = subprocess.run(
        [*heard, program, "--inner"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (code, "undone\n"), done.stderr
    assert f"stopped by {number.name}" in done.stderr
    assert code in exit_codes.MEANINGS


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (("--version",), exit_codes.DONE),
        (("checkpoint", "--help"), exit_codes.DONE),
        (("settings", "--file", "/nowhere/gpusnap.toml"), None),
        (("inspect", "/nowhere/x.tar"), exit_codes.NOT_FOUND),
    ],
)
@pytest.mark.parametrize("closed", ["stdout", "both"])
def test_closed_pipes(line: tuple[str, ...], code: int | None, closed: str) -> None:
    """As in `gpusnap ls | head -0`: the code is that of the work, and nothing is said of the pipe."""
    words = [sys.executable, "-B", "-m", "gpusnap.cli.main", *line]
    whole = subprocess.run(words, capture_output=True, check=False)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            words,
            stdout=writing,
            stderr=writing if closed == "both" else subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writing)
    assert done.returncode == whole.returncode
    assert code in (None, done.returncode)
    assert done.stderr in (None, whole.stderr)


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_a_full_disk_behind_stdout(word: str) -> None:
    """One sentence, and an exit code that says so; no traceback when Python flushes at its end."""
    with open("/dev/full", "wb") as full:
        words = [sys.executable, "-B", "-m", "gpusnap.cli.main", word]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "gpusnap: a file, or the output, cannot be used: No space left on device\n"
    assert (done.returncode, done.stderr) == (exit_codes.FAILED, said)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ImportError("libz.so.1: cannot map it"),
            "a module of gpusnap is missing: libz.so.1: cannot map it",
        ),
        (MemoryError(), "this host has no memory left for gpusnap; free some memory and try again"),
        (RuntimeError("can't start new thread"), "a thread cannot be started: .*; raise the limit on"),
    ],
)
def test_what_cannot_be_loaded(
    gpusnap: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    """A disk or a host that fails while a part of gpusnap is imported: one sentence, no traceback."""

    def fail() -> None:
        raise error

    monkeypatch.setattr(needed, "find_driver", fail)
    code, _, err = gpusnap("gpus")
    assert code == exit_codes.FAILED
    assert re.match(f"gpusnap: {said}", err)
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("empty", [True, False])
def test_a_module_with_nothing_in_it(gpusnap: Run, monkeypatch: pytest.MonkeyPatch, empty: bool) -> None:
    """Python takes one whose file it cannot look at for a folder. Any other lack is a fault of ours."""
    module = ModuleType("half")
    if not empty:
        module.__file__ = "/half.py"

    monkeypatch.setattr(needed, "find_driver", lambda: module.find)
    if not empty:
        with pytest.raises(AttributeError, match="find"):
            gpusnap("gpus")
        return
    module.__file__ = None
    code, _, err = gpusnap("gpus")
    assert code == exit_codes.FAILED
    assert err.startswith("gpusnap: a module of gpusnap is missing")


def test_modules_of_two_versions(gpusnap: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """During an upgrade, a module may need a name that one that was imported before does not have."""
    (tmp_path / "newer_part.py").write_text("from gpusnap.oci.base import errors\nerrors.Newer\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(needed, "find_driver", lambda: importlib.import_module("newer_part"))
    code, _, err = gpusnap("gpus")
    assert code == exit_codes.FAILED
    assert re.match(r"gpusnap: a module of gpusnap is missing: .* no attribute 'Newer'; try again", err)
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("line", [("--help",), ("-h",), ("inspect", "-h"), ("gpus", "--help")])
def test_help(gpusnap: Run, line: tuple[str, ...]) -> None:
    """Help is no error."""
    code, out, err = gpusnap(*line)
    assert (code, err) == (0, "")
    assert out.startswith("Usage: gpusnap")


def test_version(gpusnap: Run) -> None:
    """The version, which is the package's."""
    assert gpusnap("--version") == (0, f"gpusnap, version {__version__}\n", "")


def test_gpus(gpusnap: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """This host's GPUs with what is special about them, and as JSON."""
    odd = replace(gpu(1, used=1 << 30), mig=True, compute_mode="prohibited")
    driver = FakeDriver(gpus=(gpu(0), odd))
    monkeypatch.setattr(needed, "find_driver", lambda: driver)
    code, out, err = gpusnap("gpus")
    assert (code, err) == (0, "")
    assert "driver 580.159.04 (CUDA 13.0)" in out
    first, second = (line for line in out.splitlines() if line.startswith("GPU-"))
    assert uuid(0) in first
    assert "MIG" not in first
    assert "MIG, prohibited" in second
    assert "1.0 GiB" in second
    code, out, err = gpusnap("gpus", "--json")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(asdict(driver.host())))


def test_gpus_without_any(gpusnap: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without a GPU: one sentence and exit code 1."""
    monkeypatch.setattr(needed, "find_driver", lambda: None)
    code, out, err = gpusnap("gpus")
    assert (code, out) == (1, "")
    assert err.startswith("gpusnap: this host has no GPU driver")


@pytest.fixture
def crun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A real runtime on PATH, and none elsewhere."""
    path = tmp_path / "bin" / "crun"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\necho crun version 1.21\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    monkeypatch.setattr("gpusnap.runtime_shim.runtime.find.SYSTEM_DIRECTORIES", ())
    return path


def test_podman_of_this_host(tmp_path: Path, gpusnap: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever service the environment names for `podman`: orders count only below gpusnap itself."""
    told, program = tmp_path / "told", tmp_path / "podman"
    program.write_text(
        f'#!/bin/sh\necho "${{CONTAINER_HOST-}}${{CONTAINER_CONNECTION-}}." >>{told}\nexit 125\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CONTAINER_HOST", "unix:///run/podman/podman.sock")
    monkeypatch.setenv("CONTAINER_CONNECTION", "other")
    code, _, err = gpusnap("checkpoint", "w")
    assert (code, {*told.read_text().split()}) == (1, {"."}), err


def test_settings(tmp_path: Path, gpusnap: Run, crun: Path) -> None:
    """Every setting with its value, in a form that can be read back to the same settings."""
    path = tmp_path / "gpusnap.toml"
    path.write_text(
        'retries = 5\ngpu-map = "0=3,GPU-12ab=1"\n[criu]\nlibdir = "/usr/lib/criu"\nexternal = ["a[b]:c"]\n',
        "ascii",
    )
    code, out, err = gpusnap("settings", "--file", str(path))
    assert (code, err) == (0, "")
    assert [line.partition(" = ")[0] for line in out.splitlines()] == list(TABLE)
    again = tmp_path / "again.toml"
    again.write_text(out, "utf-8")
    assert load(str(again)) == load(str(path)) != Settings()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("retry = 5\n", "unknown setting retry"),
        ("runtime = crun\n", "is not TOML"),
        ('runtime = """\ncrun"""\n', "written in a form that only checkpoint and restore understand"),
        ("[store]\nmemory.level = 0\n", "write memory.level above the first [...]"),
        ('[store]\nruntime = "crun"\n', "write runtime above the first [...]"),
    ],
)
def test_settings_that_are_wrong(tmp_path: Path, gpusnap: Run, crun: Path, text: str, said: str) -> None:
    """What is wrong, and what to do; with exit code 1."""
    path = tmp_path / "gpusnap.toml"
    path.write_text(text, "ascii")
    code, out, err = gpusnap("settings", "--file", str(path))
    assert (code, out) == (1, "")
    assert said in err
    assert "; " in err


def test_settings_that_are_not_there(tmp_path: Path, gpusnap: Run, crun: Path) -> None:
    """A file that is named must exist; the defaults stand for the usual one only."""
    code, out, err = gpusnap("settings", "--file", f"{tmp_path}/none.toml")
    assert (code, out) == (exit_codes.NOT_FOUND, "")
    assert err == f"gpusnap: there is no settings file {tmp_path}/none.toml; check the path\n"


@pytest.mark.parametrize(
    ("text", "program", "said"),
    [
        ('runtime = "crunn"\n', "", "the real runtime crunn is neither in PATH nor in"),
        ('runtime = "/nowhere/crun"\n', "", "/nowhere/crun is not an executable program"),
        (
            "",
            "#!/bin/sh\necho no library >&2; exit 3\n",
            "--version failed with exit code 3 and printed: no library",
        ),
        ("", "#!/nosuch/interpreter\n", "cannot be started: it does not exist"),
        ("", None, "there is no real runtime"),
    ],
)
def test_settings_with_a_runtime_that_does_not_run(
    tmp_path: Path, gpusnap: Run, crun: Path, text: str, program: str | None, said: str
) -> None:
    """The values are shown, and the exit code is not 0."""
    path = tmp_path / "gpusnap.toml"
    path.write_text(text, "ascii")
    if program is None:
        crun.unlink()
    elif program:
        crun.write_text(program)
    code, out, err = gpusnap("settings", "--file", str(path))
    assert code != 0
    assert out.startswith("runtime = ")
    assert said in err


def test_nobody_reads_on(tmp_path: Path) -> None:
    """`gpusnap inspect … | head -0`: no traceback, and no complaint at exit."""
    directory(tmp_path, replace(a_manifest(), processes=tuple(a_manifest(pids=range(1, 3000)).processes)))
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-B", "-m", "gpusnap.cli.main", "inspect", "--json", str(tmp_path)],
            cwd=ROOT,
            stdout=closed,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_timeline_of_nothing() -> None:
    """Without a step, or with none that took any time, there is no division by zero."""
    console = Console(file=io.StringIO(), width=120)
    show.print_timeline(console, ())
    show.print_timeline(console, (replace(a_manifest().timing[0], start=0.0, seconds=0.0),))


# plan


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A host with GPU 1 and 2 of the checkpoint's kind, and no restore under way."""
    driver = FakeDriver(gpus=(replace(gpu(1), index=0), replace(gpu(2), index=1)))
    monkeypatch.setattr(needed, "find_driver", lambda: driver)
    monkeypatch.setattr(host_commands, "read_reserved", dict)
    monkeypatch.setattr("gpusnap.runtime_shim.settings.load", Settings)
    return driver


def test_plan(tmp_path: Path, gpusnap: Run, two_gpus: FakeDriver) -> None:
    """A row for each GPU here: the one chosen, and what speaks against another one."""
    two_gpus.gpus = (two_gpus.gpus[0], replace(two_gpus.gpus[1], mig=True))
    code, out, err = gpusnap("plan", str(archive(tmp_path, a_manifest())))
    assert (code, err) == (0, "")
    rows = {line.split()[1]: line for line in out.splitlines() if line[:1].isdigit()}
    assert rows[uuid(1)].rstrip().endswith("chosen")
    assert rows[uuid(2)].rstrip().endswith("in MIG mode")
    assert f"GPU 0 of the checkpoint, {uuid(0)}" in out
    assert not set(two_gpus.of("restore") + two_gpus.of("lock"))


def test_plan_of_a_registry_without_tls(gpusnap: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """--plain-http, which an error about TLS names, is an option here, too."""
    said: list[bool] = []

    def opened(what: str, *, plain_http: bool) -> None:
        said.append(plain_http)
        raise GpusnapError("enough")

    monkeypatch.setattr(host_commands, "open_checkpoint", opened)
    assert gpusnap("plan", "registry.example/w:v1", "--plain-http")[0] == exit_codes.FAILED
    assert said == [True]


@pytest.fixture
def nothing_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal and the records of restores are empty, and not those of this host."""
    for module in (journal, restore_record):
        monkeypatch.setattr(module, "entries", lambda *_: ())
    monkeypatch.setattr(restored_containers, "list_living", tuple)
    for module in (recovery, restored_containers, reservations):
        monkeypatch.setattr(module, "sweep", lambda: None)
    monkeypatch.setattr(chunk_cache, "remove_stale", lambda _: None)


@pytest.mark.parametrize("words", [[], ["--list"]])
def test_nothing_to_recover(
    gpusnap: Run, nothing_noted: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str]
) -> None:
    """That is said; programs get an empty list. What a killed command ordered is removed."""
    monkeypatch.setattr(overrides, "FOLDER", str(tmp_path))
    monkeypatch.setattr(places, "FOLDER", str(tmp_path / "in-progress"))
    (tmp_path / "w.json").write_text('{"owner": [1, 1]}')
    assert gpusnap("recover", *words) == (0, "", "nothing to recover\n")
    assert [path.name for path in tmp_path.iterdir()] == (["w.json"] if words else [])
    assert gpusnap("recover", "--list", "--json")[1] == "[]\n"


@pytest.fixture
def other_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Store, Path]:
    """The store of a killed command's order, which comes after this host's, and the order."""
    monkeypatch.setattr(overrides, "FOLDER", str(tmp_path / "orders"))
    monkeypatch.setattr(places, "FOLDER", str(tmp_path / "in-progress"))
    (tmp_path / "orders").mkdir()
    other, order = Store(tmp_path / "zz-another"), tmp_path / "orders/w.json"
    order.write_text(json.dumps({"owner": [1, 1], "store": other.path}))
    return other, order


def test_memory_that_a_killed_command_left(
    gpusnap: Run, nothing_noted: None, host_store: Store, other_order: tuple[Store, Path]
) -> None:
    """recover has this host's store name it, and the store of a killed command's order."""
    other, _ = other_order
    made = [hand_over_pages(store, "handed") for store in (host_store, other)]
    code, out, _ = gpusnap("recover")
    assert code == 0
    for store in (host_store, other):
        assert f"{made[0].container[:12]}  the memory of its checkpoint is in the store {store.path}\n" in out
        assert [each.name for each in store.entries()] == [""]
        assert store.list_handed_over() == {}


@pytest.mark.parametrize("word", ["w", ID[:12]])
def test_memory_that_a_killed_command_left_of_one_container(
    gpusnap: Run,
    nothing_noted: None,
    host_store: Store,
    stopped: FakePodman,
    other_order: tuple[Store, Path],
    monkeypatch: pytest.MonkeyPatch,
    word: str,
) -> None:
    """gc names the container and recover, which has the store name the memory; its list changes nothing."""
    monkeypatch.setattr(in_podman, "list_unnoticed", tuple)
    monkeypatch.setattr(podman, "full_id", lambda wanted, *, seconds: ID if wanted == "w" else "")
    hand_over_pages(host_store, "handed")
    _, out, _ = gpusnap("gc")
    said = f"the memory of the checkpoint of w ({ID[:12]}); gpusnap recover puts it into the store\n"
    assert f"left {host_store.path}/staging/handed: {said}" in out
    gpusnap("recover", "--list", word)
    gpusnap("recover", "v")
    assert host_store.entries() == ()
    code, out, err = gpusnap("recover", word)
    assert code == 0
    assert out == f"w ({ID[:12]})  the memory of its checkpoint is in the store {host_store.path}\n"
    assert err.endswith("its memory is in the store; to continue it: podman container restore w\n")
    assert [each.name for each in host_store.entries()] == [""]


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePodman:
    """Podman has a checkpoint of the container w, with its memory in a store."""
    return make_stopped(tmp_path, monkeypatch)


@pytest.mark.parametrize("rebooted", [False, True])
def test_a_stopped_container_with_memory_in_another_store(
    gpusnap: Run,
    nothing_noted: None,
    host_store: Store,
    stopped: FakePodman,
    other_order: tuple[Store, Path],
    monkeypatch: pytest.MonkeyPatch,
    rebooted: bool,
) -> None:
    """recover and its list print the command that continues it, until that has been done."""
    other, order = other_order
    monkeypatch.setattr(in_podman, "list_unnoticed", tuple)
    if rebooted:
        order.unlink()
        with monkeypatch.context() as before:
            before.setattr(state_files, "boot", lambda: "earlier")
            with places.remember(other.path, is_needed=lambda: True):
                pass
    keep_pages(other)
    command = f"GPUSNAP_STORE={other.path} podman container restore w"
    said = (
        f"w ({ID[:12]})  Podman has its checkpoint, and its memory is in the store {other.path}; "
        f"to continue it: {command}\n"
    )
    for words in (["--list"], [], []):
        assert gpusnap("recover", *words) == (0, "", said)
        assert list(Path(places.FOLDER).glob("*")) if rebooted else order.exists()
    for container in ((), ("w",)):
        (found,) = json.loads(gpusnap("recover", "--list", "--json", *container)[1])
        assert (found["kind"], found["container"], found["name"]) == ("stopped", ID, "w")
        assert found["why"].endswith(command)
    stopped.has(status="running")
    assert gpusnap("recover") == (0, "", "nothing to recover\n")
    assert not order.exists()
    assert not list(Path(places.FOLDER).glob("*"))


def test_another_store_while_podman_does_not_answer(
    gpusnap: Run,
    nothing_noted: None,
    host_store: Store,
    stopped: FakePodman,
    other_order: tuple[Store, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store is not forgotten: a container may need it."""
    other, order = other_order
    monkeypatch.setattr(in_podman, "list_unnoticed", tuple)
    monkeypatch.setattr(in_podman, "_DESCRIBING", 0.1)
    (stopped.folder / "podman").write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    keep_pages(other)
    code, _, err = gpusnap("recover")
    assert code == 0
    said = f"cannot determine whether a stopped container needs memory in {other.path}: Podman did"
    assert said in err
    assert order.exists()
    code, out, err = gpusnap("recover", "--list", "--json")
    assert (code, out, said in err) == (0, "[]\n", True)


@pytest.mark.parametrize("ending", ["leaving", "coming"])
def test_a_record_of_a_migration_that_cannot_be_read(
    gpusnap: Run,
    nothing_noted: None,
    host_store: Store,
    other_order: tuple[Store, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ending: str,
) -> None:
    """recover does the rest, and says what to do about that one; its list has the others."""
    monkeypatch.setattr(migrations, "FOLDER", str(tmp_path / "state" / "migrations"))
    monkeypatch.setattr(in_podman, "list_unnoticed", tuple)
    (tmp_path / "state").mkdir()
    w = outgoing(store=host_store.path)
    w.write()
    path = Path(migrations.FOLDER, f"{'1' * 32}.{ending}")
    path.write_text("{")
    made = hand_over_pages(host_store, "handed")
    for words in (["--list"], ["--list", "w"], []):
        code, out, err = gpusnap("recover", *words)
        assert code == ("w" not in words)
        assert f"{path} cannot be read, so gpusnap cannot determine wh" in err
        assert "w was not migrated to gpu2" in out or "w  the migration of w to gpu2 was interrupted\n" in out
    assert f"{made.container[:12]}  the memory of its checkpoint is in the store {host_store.path}\n" in out
    assert [each.name for each in Path(migrations.FOLDER).iterdir()] == [path.name]


@pytest.mark.parametrize("words", [[], ["--list"]])
def test_recover_of_one_container(
    gpusnap: Run,
    nothing_noted: None,
    host_store: Store,
    stopped: FakePodman,
    other_order: tuple[Store, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: list[str],
) -> None:
    """One that is healthy, one that only Podman can restore, one that never ran, and one that is missing."""
    monkeypatch.setattr(in_podman, "list_unnoticed", tuple)
    for status in ("running", "exited"):
        stopped.has(status=status, checkpointed=status == "exited")
        assert gpusnap("recover", *words, "w") == (0, "", "nothing to recover\n")
    keep_pages(host_store)
    _, _, err = gpusnap("recover", *words, "w")
    assert err.endswith("its memory is in the store; to continue it: podman container restore w\n")
    assert err.startswith("w (")
    assert gpusnap("recover", "--list", "--json", "w") == (0, "[]\n", "")  # as after podman checkpoint
    assert gpusnap("recover", "--list", "--json") == (0, "[]\n", "")
    stopped.has(status="created")
    code, _, err = gpusnap("recover", *words, "w")
    assert (code, err.startswith("nothing to recover; Podman lists w as created: ")) == (0, True)
    assert err.endswith("podman rm w removes it\n")
    assert gpusnap("recover", "--list", "--json", "w") == (0, "[]\n", "")
    (stopped.folder / "inspect.json").unlink()
    code, out, err = gpusnap("recover", *words, "nosuch")
    assert (code, out) == (exit_codes.NOT_FOUND, "")
    assert err.startswith("gpusnap: there is no container nosuch; ")
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = gpusnap("recover", *words, "nosuch")
    assert (code, "podman cannot be run" in err) == (exit_codes.FAILED, True)
    monkeypatch.setattr(targets, "_task", lambda _: ("default", "nosuch"))
    assert gpusnap("recover", *words, "nosuch") == (0, "", "nothing to recover\n")


def test_memory_that_no_container_needs(
    gpusnap: Run, nothing_noted: None, host_store: Store, other_order: tuple[Store, Path]
) -> None:
    """It is named, and it is not said that there is nothing at all."""
    keep_pages(host_store)
    for words in (["--list"], []):
        code, out, err = gpusnap("recover", *words)
        assert (code, out) == (0, "")
        first, second = err.splitlines()
        assert " of memory without a name is in the store, from a checkpoint that failed or " in first
        assert second == "no container needs recovery"


@pytest.mark.parametrize("words", [[], ["--list"]])
def test_an_export_that_is_all_that_is_left(
    gpusnap: Run,
    nothing_noted: None,
    host_store: Store,
    other_order: tuple[Store, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: list[str],
) -> None:
    """Of a container with --rm: its memory counts as needed, and its name, or its ID, finds the export."""
    monkeypatch.setattr(in_podman, "list_unnoticed", tuple)
    FakePodman(tmp_path / "podman", monkeypatch)
    archive = leave_export(host_store, tmp_path / "exported")
    keep_pages(host_store)
    said = f"what Podman exported of the container k: podman container restore --import {archive}\n"
    for container in ((), ("k",), (ID[:12],)):
        assert gpusnap("recover", *words, *container) == (0, "", said)
    assert gpusnap("recover", "--list", "--json", "k") == (0, "[]\n", "")
    assert gpusnap("recover", *words, "w")[0] == exit_codes.NOT_FOUND
    code, _, err = gpusnap("restore", "k")
    assert (code, "'k', but Podman's export of the container k is left" in err) == (3, True)
    assert "; gpusnap recover names it" in err


def test_memory_that_two_stores_have(
    gpusnap: Run,
    nothing_noted: None,
    host_store: Store,
    stopped: FakePodman,
    other_order: tuple[Store, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The container is named once, with this host's store, and the other store is not forgotten."""
    monkeypatch.setattr(in_podman, "list_unnoticed", tuple)
    other, order = other_order
    order.write_text(json.dumps({"owner": [1, 1], "store": f"{os.path.dirname(other.path)}/aa"}))
    for store in (host_store, Store(os.path.dirname(other.path) + "/aa")):
        keep_pages(store)
    said = "its memory is in the store; to continue it: podman container restore w\n"
    for words in (["--list"], [], ["w"]):
        code, out, err = gpusnap("recover", *words)
        assert (code, out, err.count("\n"), err.endswith(said)) == (0, "", 1, True)
    assert order.exists()
    assert gpusnap("recover", "--list", "--json") == (0, "[]\n", "")  # as after podman checkpoint


@pytest.mark.parametrize("kind", ["spilled", "checkpoint", "killed checkpoint"])
def test_memory_of_another_host(
    gpusnap: Run,
    nothing_noted: None,
    host_store: Store,
    other_order: tuple[Store, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
) -> None:
    """recover leaves it in each store, and says so as gc does."""
    stores = (host_store, other_order[0])
    with monkeypatch.context() as there:
        there.setattr(origin, "_identify_host", lambda: ("elsewhere", "0123"))
        there.setattr(state_files, "boot", lambda: "another")
        there.setattr(os, "uname", lambda: SimpleNamespace(nodename="elsewhere"))
        for store in stores:
            if kind == "checkpoint":
                hand_over_pages(store, "left")
            elif kind == "spilled":
                staging = store.create().stage("left")
                staging.mark_precious(spilled.make_mark("c0ffee@b"))
                staging.close()
            else:
                killed = StoreDestination(
                    store.path, str(tmp_path), "c0ffee", Memory(), recipient=Recipient("left", (1, 1))
                )
                killed.begin()
                killed.mark_needed()
                killed._require_staging().close(leave=True)
    lines = [
        next(line for line in gpusnap("gc", f"oci:{each.path}")[1].splitlines() if line.startswith("left "))
        for each in stores
    ]
    said = {
        "spilled": "c0ffee of another host, elsewhere: gpusnap resume or",
        "checkpoint": "for a test",
        "killed checkpoint": "the checkpoint of container c0ffee on elsewhere; gpusnap recover on that host",
    }
    assert said[kind] in lines[0]
    for words in (["--list"], []):
        code, out, err = gpusnap("recover", *words)
        assert (code, out) == (0, "")
        assert err.splitlines() == [*lines, "no container needs recovery"]
    assert all(os.path.exists(each.locate_staging("left")) for each in stores)


@pytest.mark.parametrize("known", [False, True])
def test_memory_of_a_checkpoint_that_a_restart_cut_off(
    gpusnap: Run,
    nothing_noted: None,
    host_store: Store,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    known: bool,
) -> None:
    """recover names it, as gc does: it has no journal entry any more. With one, it is repaired."""
    killed = StoreDestination(host_store.path, str(tmp_path), "c0ffee", Memory())
    killed.begin()
    killed.mark_needed()
    killed._require_staging().close(leave=True)
    layouts = frozenset([killed.layout.path] if known else [])
    monkeypatch.setattr(journal, "list_layouts", lambda: (layouts, frozenset()))
    for words in (["--list"], []):
        code, out, err = gpusnap("recover", *words)
        assert (code, out) == (0, "")
        assert (f"left {killed.layout.path}: the checkpoint of container c0ffee on " in err) is not known


def test_a_store_that_fails_keeps_no_other_one(
    gpusnap: Run, nothing_noted: None, host_store: Store, other_order: tuple[Store, Path]
) -> None:
    """recover does the others; the order stays, so that the next one finds that store again."""
    other, order = other_order
    for store in (host_store, other):
        hand_over_pages(store, "handed")
    (Path(host_store.path) / "staging/handed/complete").write_text("")
    code, out, err = gpusnap("recover")
    assert code
    assert f"is in the store {other.path}\n" in out
    assert "the manifest of the staging handed" in err
    assert [each.name for each in other.entries()] == [""]
    assert order.exists()


@pytest.mark.parametrize("mounted", [True, False])
def test_another_store_after_a_reboot(
    gpusnap: Run,
    nothing_noted: None,
    host_store: Store,
    other_order: tuple[Store, Path],
    monkeypatch: pytest.MonkeyPatch,
    mounted: bool,
) -> None:
    """No order is left in /run, but recover finds the store, or says that it is not mounted."""
    other, order = other_order
    order.unlink()
    hand_over_pages(other, "handed")
    with monkeypatch.context() as before:
        before.setattr(state_files, "boot", lambda: "earlier")
        if not mounted:
            elsewhere = proc.Mount("0:1", "/", other.path, (), (), "nfs4", "", "server:/x")
            before.setattr(proc, "find_mount", lambda _: elsewhere)
        with places.remember(other.path, is_needed=lambda: True):
            pass
    code, out, err = gpusnap("recover")
    assert code == 0
    assert (f"the memory of its checkpoint is in the store {other.path}\n" in out) == mounted
    assert ("which cannot be examined: its file system is not mounted" in err) == (not mounted)
    assert len(os.listdir(places.FOLDER)) == (not mounted)
    assert len(other.list_handed_over()) == (not mounted)


def test_an_export_that_podman_has_not_begun(
    gpusnap: Run, nothing_noted: None, host_store: Store, other_order: tuple[Store, Path], tmp_path: Path
) -> None:
    """recover names it, and keeps the order until Podman has ended: then it looks for what is left there."""
    other, order = other_order
    archive = f"{other.path}/staging/one/podman.tar"
    order.write_text(json.dumps({"owner": [1, 1], "store": other.path, "container": "c0ffee"}))
    with exporting(tmp_path, archive):
        for words in (["--list"], []):
            said = f"Podman is still exporting to {archive}: run gpusnap recover again when it has finished\n"
            assert gpusnap("recover", *words) == (0, "", said)
            assert order.exists()
    assert gpusnap("recover") == (0, "", "nothing to recover\n")
    assert not order.exists()


@pytest.mark.parametrize("kind", ["json", "restore", "suspended"])
def test_a_record_that_cannot_be_read(
    gpusnap: Run, host_store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """recover names it, keeps it, and does the rest; so does its list, also of that container alone."""
    monkeypatch.setattr(overrides, "FOLDER", str(tmp_path / "orders"))
    monkeypatch.setattr(places, "FOLDER", str(tmp_path / "in-progress"))
    monkeypatch.setattr(journal, "FOLDER", str(tmp_path / "run" / "journal"))
    monkeypatch.setattr("gpusnap.cli.commands.recover.needed_driver", FakeDriver)
    for module in (recovery, reservations):
        monkeypatch.setattr(module, "sweep", lambda: None)
    folder = tmp_path / "run" / ("suspended" if kind == "suspended" else "journal")
    folder.mkdir(parents=True)
    bad = folder / f"bad.{kind}"
    bad.write_text("[]")
    made = hand_over_pages(host_store, "handed")
    with monkeypatch.context() as patch:  # no process has this start time
        patch.setattr(state_files, "owner", lambda pid=1: (pid, 1))
        journal.write("gone", str(tmp_path), {1: ()})
    code, out, err = gpusnap("recover", "--list")
    assert (code, "gone  its checkpoint was interrupted" in out) == (1, True)
    assert "was not written by this version of gpusnap" in err
    code, out, err = gpusnap("recover", "--list", "--json")
    assert (code, [each["container"] for each in json.loads(out)]) == (1, ["gone"])
    code, out, err = gpusnap("recover")
    assert code == 1
    assert "gone  no process is left\n" in out
    assert f"{made.container[:12]}  the memory of its checkpoint is in the store {host_store.path}\n" in out
    assert "was not written by this version of gpusnap" in err
    assert bad.exists()
    assert "was not written by this version of gpusnap" in gpusnap("recover", "bad")[2]


def test_plan_by_map(tmp_path: Path, gpusnap: Run, two_gpus: FakeDriver) -> None:
    """--gpu-map chooses; JSON has the pairs and every verdict."""
    path = str(archive(tmp_path, a_manifest()))
    code, out, _ = gpusnap("plan", path, "--gpu-map", "0=1", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["pairs"] == [{"old": uuid(0), "new": uuid(2)}]
    assert [verdict["reason"] for verdict in found["verdicts"]] == ["", ""]
    code, _, err = gpusnap("plan", path, "--gpu-map", "zero")
    assert code == 2
    assert "--gpu-map is 'zero'; it must be" in err


def test_plan_refused(tmp_path: Path, gpusnap: Run, two_gpus: FakeDriver) -> None:
    """Exit code 1, and why, in the table, in JSON and in a sentence."""
    two_gpus.gpus = tuple(replace(each, model="Another") for each in two_gpus.gpus)
    path = str(archive(tmp_path, a_manifest()))
    code, out, err = gpusnap("plan", path)
    assert code == 1
    assert out.count("another model: Another") == 2
    assert err.startswith("gpusnap: no GPU of this host fits")
    code, out, _ = gpusnap("plan", path, "--json")
    assert code == 1
    assert json.loads(out)["refusal"]
    assert json.loads(out)["code"] == "GPS-401"
