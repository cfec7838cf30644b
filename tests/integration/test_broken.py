"""Something of gpusnap is broken: the containers of the host go on all the same."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import shimhost
from support import RUNTIME, Container, containers_left, good, podman, run, sentence

INSTALLED = Path("/opt/broken/bin")
SETTINGS, ENTRY = shimhost.SETTINGS, shimhost.ENTRY

Break = Callable[[], object]


def _loop() -> None:
    SETTINGS.symlink_to(SETTINGS.name)


def _huge() -> None:
    with SETTINGS.open("wb") as file:
        file.truncate(1 << 33)


def _without_package() -> None:
    """As after an upgrade of the system's Python, whose environments have lost what was in them."""
    ENTRY.write_text(
        f"#!{sys.executable} -IS\n"
        "from gpusnap.runtime_shim.shim.entry import main\nraise SystemExit(main())\n"
    )


OF_THE_SETTINGS: dict[str, Break] = {
    "no quotes": lambda: SETTINGS.write_text("runtime = crun\n"),
    "misspelt": lambda: SETTINGS.write_text('runtime = "crunn"\n'),
    "no TOML": lambda: SETTINGS.write_text("[[[ retries = = 3\n"),
    "binary": lambda: SETTINGS.write_bytes(bytes(range(256)) * 64),
    "huge": _huge,
    "a directory": SETTINGS.mkdir,
    "a loop": _loop,
    "a FIFO": lambda: os.mkfifo(SETTINGS),
}
OF_PYTHON: dict[str, Break] = {
    "no script": ENTRY.unlink,
    "not executable": lambda: ENTRY.chmod(0o644),
    "no interpreter": lambda: ENTRY.write_text("#!/nosuch/python\n"),
    "no package": _without_package,
}
BREAKS = OF_THE_SETTINGS | OF_PYTHON


@contextmanager
def broken(name: str) -> Iterator[None]:
    """Break it, and put it right again."""
    with tempfile.TemporaryDirectory() as kept:
        entry = shutil.copy2(ENTRY, kept)
        if name in OF_THE_SETTINGS:
            SETTINGS.parent.mkdir(parents=True, exist_ok=True)
            SETTINGS.unlink(missing_ok=True)
        try:
            BREAKS[name]()
            yield
        finally:
            if SETTINGS.is_dir() and not SETTINGS.is_symlink():
                SETTINGS.rmdir()
            SETTINGS.unlink(missing_ok=True)
            ENTRY.unlink(missing_ok=True)
            shutil.copy2(entry, ENTRY)


def go_on(container: str, *options: str) -> None:
    """exec and stop and rm, and nothing is added to what programs read."""
    done = run("podman", *options, "exec", container, "sh", "-c", "echo out; echo err >&2")
    assert (done.code, done.out, done.err) == (0, "out\n", "err\n")
    good(run("podman", *options, "stop", "--time", "0", container))
    good(run("podman", *options, "start", container))
    good(run("podman", *options, "rm", "--force", "--time", "0", container))


def live(*options: str) -> None:
    """A container in front, whose output is its own, and one behind, from its beginning to its end."""
    shell = ["localhost/base", "sh", "-c", "echo out; echo err >&2; exit 7"]
    done = run("podman", *options, "run", "--rm", *shell)
    assert (done.code, done.out, done.err) == (7, "out\n", "err\n")
    good(run("podman", *options, "run", "-d", "--name", "behind", "localhost/base", "sleep", "600"))
    go_on("behind", *options)
    assert "gpusnap-runtime version" in good(run("podman", *options, "info"))


@pytest.fixture
def default(host: None) -> Iterator[None]:
    """gpusnap-runtime as Podman's default, by `gpusnap install --default`."""
    configuration = shimhost.PODMAN.read_text()
    shimhost.PODMAN.unlink()
    INSTALLED.mkdir(parents=True)
    text = f"#!{sys.executable}\nimport sys\nfrom gpusnap.cli.main import main\nsys.exit(main())\n"
    (INSTALLED / "gpusnap").write_text(text)
    (INSTALLED / "gpusnap").chmod(0o755)
    shutil.copy(RUNTIME, INSTALLED)
    try:
        good(run(INSTALLED / "gpusnap", "install", "--podman", "--default"))
        found = good(run("podman", "info", "--format", "{{.Host.OCIRuntime.Path}}"))
        assert found == str(INSTALLED / "gpusnap-runtime")
        yield
    finally:
        run(INSTALLED / "gpusnap", "uninstall", "--force")
        shutil.rmtree(INSTALLED.parent)
        shimhost.PODMAN.write_text(configuration)


@pytest.fixture(autouse=True)
def tidy(host: None) -> Iterator[None]:
    """No container is left, whatever became of the test."""
    shimhost.write_settings("")
    yield
    shimhost.write_settings("")
    for name in containers_left():
        podman("rm", "--force", "--time", "0", name)


@pytest.mark.parametrize("name", BREAKS)
def test_containers_go_on(name: str) -> None:
    """By the launcher: whatever is broken."""
    with broken(name):
        live("--runtime", RUNTIME)


@pytest.mark.parametrize("name", OF_THE_SETTINGS)
def test_containers_go_on_without_a_launcher(name: str) -> None:
    """By Python alone, as where no C compiler was."""
    with broken(name):
        live("--runtime", str(ENTRY))


@pytest.mark.parametrize("name", ["no quotes", "misspelt", "no script", "no package"])
def test_as_the_default(default: None, name: str) -> None:
    with broken(name):
        live()


@pytest.mark.parametrize("runtime", [RUNTIME, str(ENTRY)], ids=["launcher", "Python"])
@pytest.mark.parametrize("name", ["misspelt", "a directory"])
@pytest.mark.parametrize("first", ["crun", "runc"])
def test_what_was_there_before(first: str, name: str, runtime: str) -> None:
    """A container stays with the runtime that made it, which the settings do not tell any more."""
    shimhost.write_settings(f'runtime = "{first}"\n')
    good(
        run("podman", "--runtime", runtime, "run", "-d", "--name", "before", "localhost/base", "sleep", "600")
    )
    assert len(list(Path("/run", first).glob("[!.]*"))) == 1
    with broken(name):
        done = run("podman", "--runtime", runtime, "exec", "before", "sh", "-c", "echo out; echo err >&2")
        assert (done.code, done.out, done.err) == (0, "out\n", "err\n")
        good(run("podman", "--runtime", runtime, "stop", "--time", "0", "before"))
        good(run("podman", "--runtime", runtime, "rm", "--force", "--time", "0", "before"))
    assert not list(Path("/run", first).glob("[!.]*"))


@pytest.mark.parametrize(("first", "then"), [("crun", "runc"), ("runc", "crun")])
def test_another_runtime_in_the_settings(first: str, then: str, tmp_path: Path) -> None:
    """Nothing is broken: what one began, it ends, checkpoints included."""
    shimhost.write_settings(f'runtime = "{first}"\n')
    container = Container.start("changed")
    shimhost.write_settings(f'runtime = "{then}"\n')
    good(container.checkpoint(tmp_path / "a.tar.zst", "--leave-running"))
    go_on("changed", "--runtime", "gpusnap-runtime")


REASONS = {
    "no quotes": "is not TOML",
    "misspelt": "the real runtime crunn is neither in PATH nor in",
    "a directory": "cannot be read",
    "no script": "does not exist, so nothing is checkpointed or restored",
    "no package": "No module named",
}


@pytest.mark.parametrize("name", REASONS)
def test_checkpoint_and_restore_say_why_not(name: str, tmp_path: Path) -> None:
    """With a GPU; and the container runs on."""
    archive, other = tmp_path / "a.tar.zst", tmp_path / "b.tar.zst"
    container = Container.start("refused")
    good(container.checkpoint(archive, "--leave-running"))
    with broken(name):
        done = container.checkpoint(other)
        assert done.code != 0
        assert REASONS[name] in done.err
        assert "does not support checkpoint/restore" not in done.err
        assert not other.exists()
        container.goes_on()
        if name in OF_THE_SETTINGS:
            assert REASONS[name] in sentence(done)
            assert REASONS[name] in sentence(run("gpusnap", "checkpoint", "refused"))
            assert REASONS[name] in sentence(run("gpusnap", "restore", archive))
            assert run("gpusnap", "settings").code == 1
        container.remove()
        done = podman("container", "restore", "--import", archive)
        assert done.code != 0
        assert REASONS[name] in done.err


@pytest.mark.parametrize("name", ["no quotes", "misspelt"])
def test_a_container_without_a_gpu(name: str) -> None:
    """Of that gpusnap can tell, and it is checkpointed and restored as by the real runtime alone."""
    # busybox's sleep ends when its system call is interrupted, as it is by CRIU.
    loop = "while :; do sleep 0.2; done"
    good(podman("run", "-d", "--name", "plain", "localhost/base", "sh", "-c", loop))
    with broken(name):
        good(podman("container", "checkpoint", "plain"))
        good(podman("container", "restore", "plain"))
        go_on("plain", "--runtime", RUNTIME)


def test_doctor() -> None:
    """A package that the engines' interpreter lacks is a failure, whatever this command's has."""
    found = run("gpusnap", "doctor").out
    assert "has all modules that it imports" in found
    with broken("no package"):
        found = run("gpusnap", "doctor").out
        assert f"{RUNTIME} cannot checkpoint or restore anything" in found
