"""NVIDIA's hooks run again after a restore: only those, only so, and never to the restore's harm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fakes import DEADLINE, unshare_works, wait_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.mount_namespace import show_mounts
from gpusnap.runtime_shim.runtime import child_process
from gpusnap.runtime_shim.runtime.child_process import Child
from gpusnap.runtime_shim.runtime.container import Container
from gpusnap.runtime_shim.snapshot.devices import nvidia_hooks as rerun

LDCACHE = ["nvidia-cdi-hook", "update-ldcache", "--folder", "/usr/lib64"]
LINK = "../libcuda.so.1::/usr/lib64/libcuda.so"


class Host:
    """A host with NVIDIA's program in a folder of the test's, which keeps what it was called with."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capfd = folder, capfd
        self.places = folder / "bin"
        self.places.mkdir(mode=0o755)
        self.root = folder / "bundle" / "rootfs"
        self.root.mkdir(parents=True)
        self.container = Container("c0ffee", os.getpid(), "running", str(folder / "bundle"), {"a": "b"})
        self.config: dict[str, Any] = {"root": {"path": "rootfs"}}

    def program(self, script: str = "", name: str = "nvidia-cdi-hook") -> Path:
        path = self.places / name
        lines = [
            f'echo "$0 $*" >>{self.folder}/calls',
            f"cat >{self.folder}/state",
            f"env >{self.folder}/env",
        ]
        path.write_text("\n".join(["#!/bin/sh", *lines, script]))
        path.chmod(0o755)
        return path

    def rerun(self, *hooks: Any, **options: Any) -> str:
        """Run them; what was said on stderr."""
        self.config["hooks"] = {"createContainer": list(hooks)}
        options = {"show": lambda pid, path: None} | options
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rerun, "_PLACES", (str(self.places),))
            patch.setattr(rerun, "_OWNERS", (0, os.getuid()))
            patch.setattr(rerun, "show_mounts", options.pop("show"))
            rerun.rerun(self.config, self.container, **options)
        return self._capfd.readouterr().err

    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def mounts(self) -> list[str]:
        """Where something is mounted below its folder; other tests mount elsewhere meanwhile."""
        return [
            each.destination for each in proc.mounts("self") if each.destination.startswith(f"{self.folder}/")
        ]

    def words(self) -> list[str]:
        """The lines that it was called with, without the program's path."""
        return [line.split(" ", 1)[1] for line in self.calls()]


@pytest.fixture
def host(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Host:
    tmp_path.chmod(0o755)
    return Host(tmp_path, capfd)


def hook(args: list[Any], path: str = "/usr/bin/nvidia-cdi-hook", **more: Any) -> dict[str, Any]:
    return {"path": path, "args": args, **more}


def test_both_hooks_run_in_order(host: Host) -> None:
    """With their own words, the state on stdin, and without a note where all went well."""
    host.program()
    links = ["nvidia-cdi-hook", "nvidia-cdi-hook", "create-symlinks", "--link", LINK, f"--link={LINK}"]
    assert host.rerun(hook(links), hook(LDCACHE)) == ""
    assert host.words() == [
        f"create-symlinks --link {LINK} --link {LINK}",
        "update-ldcache --folder /usr/lib64",
    ]
    state = json.loads((host.folder / "state").read_text())
    assert state == {
        "ociVersion": "1.0.2",
        "id": "c0ffee",
        "status": "created",
        "pid": os.getpid(),
        "bundle": str(host.folder / "bundle"),
        "annotations": {"a": "b"},
    }


def test_nvidia_ctk(host: Host) -> None:
    """The older program has a word more; each takes the other's place where that is missing."""
    old = hook(["nvidia-ctk", "hook", *LDCACHE[1:]], "/usr/bin/nvidia-ctk")
    program = host.program()
    host.rerun(old)
    assert host.words() == ["update-ldcache --folder /usr/lib64"]
    program.rename(host.places / "nvidia-ctk")
    host.rerun(hook(LDCACHE))
    assert host.words()[1:] == ["hook update-ldcache --folder /usr/lib64"]


def test_environment_is_not_ours_and_not_theirs(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library to preload comes neither from the archive nor from us."""
    host.program()
    monkeypatch.setenv("OURS", "1")
    host.rerun(hook(LDCACHE, env=["LD_PRELOAD=/x.so", "NVIDIA_CTK_DEBUG=true", "NVIDIA_CTK_CONFIG=/x", 7]))
    names = {line.partition("=")[0] for line in (host.folder / "env").read_text().splitlines()}
    assert names - {"PWD", "_", "SHLVL", "OLDPWD"} == {"NVIDIA_CTK_DEBUG"}


@pytest.mark.parametrize(
    "args",
    [
        ["x", "update-ldcache", "--folder", "../../etc"],
        ["x", "update-ldcache", "--folder", "/usr/../../etc"],
        ["x", "update-ldcache", "--folder", "/a\nhwcap"],
        ["x", "update-ldcache", "--folder", "/a\n"],
        ["x", "update-ldcache", "--folder"],
        ["x", "update-ldcache", "/usr/lib64"],
        ["x", "update-ldcache", "--ldconfig-path", "/tmp/evil"],
        ["x", "update-ldcache", "--container-spec", "/etc/shadow"],
        ["x", "update-ldcache", "--folder", "/lib", "--link", LINK],
        ["x", "create-symlinks", "--link", "a"],
        ["x", "create-symlinks", "--link", "a::b"],
        ["x", "create-symlinks", "--link", "a::/b::/c"],
        ["x", "create-symlinks", "--link", "::/b"],
        ["x", "create-symlinks", "--link", "a::/../b"],
        ["x", "create-symlinks", "--link", "a b::/b"],
        ["x", "create-symlinks", "--link", "a::/" + "b" * 2000],
        ["x", "create-symlinks", *["--link=a::/b"] * 2000],
    ],
)
def test_hostile_words(host: Host, args: list[str]) -> None:
    """Whatever these hooks do not take is refused as a whole, with one note that says so."""
    host.program()
    said = host.rerun(hook(args))
    assert host.calls() == []
    assert said.startswith("gpusnap: note: a hook of the container was not run again: ")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "entry",
    [
        hook(["sh", "-c", "update-ldcache"], "/bin/sh"),
        hook(["nvidia-cdi-hook", "chmod", "--mode", "777"]),
        hook(["nvidia-cdi-hook", "disable-device-node-modification"]),
        hook(["nvidia-cdi-hook"]),
        hook([]),
        hook([1, "update-ldcache"]),
        {"path": "/usr/bin/nvidia-cdi-hook"},
        {"args": LDCACHE},
        None,
        7,
    ],
)
def test_other_hooks(host: Host, entry: Any) -> None:
    """They are not run again, and there is nothing to say about them."""
    host.program()
    assert host.rerun(entry) == ""
    assert host.calls() == []


def test_the_path_in_the_archive_is_not_run(host: Host) -> None:
    """A program of the right name in another place is nothing but a name."""
    theirs = host.folder / "nvidia-cdi-hook"
    theirs.write_text(f"#!/bin/sh\ntouch {host.folder}/theirs\n")
    theirs.chmod(0o755)
    said = host.rerun(hook(LDCACHE, str(theirs)))
    assert "was not run again: this host has no nvidia-cdi-hook in " in said
    assert not (host.folder / "theirs").exists()


@pytest.mark.parametrize("what", ["program", "folder"])
def test_a_program_that_others_can_change(host: Host, what: str) -> None:
    """It is not run, wherever it lies."""
    program = host.program()
    (program if what == "program" else host.places).chmod(0o777)
    assert "can be modified by users other than root" in host.rerun(hook(LDCACHE))
    assert host.calls() == []


def test_a_link_to_a_program_that_others_can_change(host: Host) -> None:
    """What counts is the file behind it."""
    other = host.program().rename(host.folder / "nvidia-ctk")
    other.chmod(0o757)
    (host.places / "nvidia-cdi-hook").symlink_to(other)
    assert "can be modified by users other than root" in host.rerun(hook(LDCACHE))
    other.chmod(0o755)
    assert host.rerun(hook(LDCACHE)) == ""
    assert host.words() == ["hook update-ldcache --folder /usr/lib64"]


def test_timeout(host: Host) -> None:
    """A hook that hangs is killed with what it started, by its own timeout."""
    host.program(f"sleep {DEADLINE * 9} & echo $! >{host.folder}/child; wait")
    assert "did not end within 1 s and was killed" in host.rerun(hook(LDCACHE, timeout=1))
    child = int((host.folder / "child").read_text())
    wait_for(lambda: not proc.is_running(child), "the end of what the hook started")


def test_a_hook_that_the_kernel_does_not_let_end(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a file system that does not respond, and is left behind: the restore goes on."""
    waits, left = Child.wait, set[int]()

    def wait(self: Child, timeout: float | None = None) -> int:
        assert timeout is not None or self.returncode is not None, "a wait without a deadline"
        left.add(self.pid)
        return waits(self, timeout)

    host.program("exec sleep 60")
    with monkeypatch.context() as patch:
        patch.setattr(Child, "wait", wait)
        patch.setattr(Child, "kill", lambda self: None)
        patch.setattr(os, "killpg", lambda group, number: None)
        patch.setattr(child_process, "_PATIENCE", 0.1)
        assert "did not end within 1 s and was killed" in host.rerun(hook(LDCACHE, timeout=1))
    (pid,) = left
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_failure_is_a_note(host: Host) -> None:
    """What it said is in the note, and the next hook runs all the same."""
    host.program("echo broken >&2; exit 3")
    said = host.rerun(hook(LDCACHE), hook(LDCACHE)).splitlines()
    assert (
        said == ["gpusnap: note: NVIDIA's hook update-ldcache failed with exit code 3: broken [GPS-410]"] * 2
    )


def test_program_that_cannot_start(host: Host) -> None:
    """A note, as for one that fails."""
    host.program().write_text("#!/no/such/interpreter\n")
    assert "cannot be started: it does not exist" in host.rerun(hook(LDCACHE))


def test_nothing_allowed(host: Host) -> None:
    """Nothing runs, whatever the configuration says; nor does what only the settings name."""
    host.program()
    assert host.rerun(hook(LDCACHE), allowed=()) == ""
    assert host.rerun(hook(["x", "chmod"]), allowed=("chmod",)) == ""
    assert host.calls() == []


@pytest.mark.parametrize("path", [None, 7, "", "/", "../" * 40, "no", "a\0b"])
def test_no_root(host: Host, path: Any) -> None:
    """Without a folder that is the container's root, and not the host's, no hook runs."""
    host.program()
    host.config["root"] = {"path": path}
    assert "because the container's root cannot be passed to them" in host.rerun(hook(LDCACHE))
    assert host.calls() == []


def test_mounts_that_cannot_be_shown(host: Host) -> None:
    """No hook runs in a root without its mounts: ldconfig would forget the libraries."""
    host.program()

    def refuse(pid: int, path: str) -> None:
        raise PermissionError(1, "x")

    assert "cannot be passed to them: it is not allowed" in host.rerun(hook(LDCACHE), show=refuse)
    assert host.calls() == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.sampled_from(LDCACHE),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=9,
)


@given(entries=st.lists(st.fixed_dictionaries({"path": JSON, "args": JSON | st.lists(JSON)}), max_size=4))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_configuration(host: Host, entries: list[Any]) -> None:
    """Nothing in a configuration makes this raise, or the program run with other words than its own."""
    (host.folder / "calls").unlink(missing_ok=True)
    host.program()
    host.rerun(*entries)
    assert {line.split()[0] for line in host.words()} <= {"update-ldcache"}


def test_the_mounts_are_shown(host: Host) -> None:
    """The hook finds the container's mounts below its root; this process and its namespace see none."""
    if not unshare_works("--mount"):
        pytest.skip("needs the right to make a mount namespace")
    host.program(f"cat {host.root}/{host.folder}/inside/file; echo made >{host.root}/{host.folder}/new")
    (host.folder / "inside").mkdir()
    script = f"mount -t tmpfs t {host.folder}/inside && echo seen >{host.folder}/inside/file; echo; read x"
    line = ["unshare", "--mount", "sh", "-c", script]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as init:
        assert init.stdout is not None
        init.stdout.readline()
        host.container = Container("c0ffee", init.pid, "running", str(host.folder / "bundle"), {})
        before = list[str](), os.getcwd(), proc.namespace(os.getpid(), "mnt")
        said = host.rerun(hook(LDCACHE), show=show_mounts)
        assert (host.mounts(), os.getcwd(), proc.namespace(os.getpid(), "mnt")) == before
        init.communicate(b"\n", timeout=DEADLINE)
    assert said == "gpusnap: note: NVIDIA's hook update-ldcache printed: seen\n"
    assert (host.folder / "new").read_text() == "made\n"
    assert list(host.root.iterdir()) == []


def test_process_that_is_gone(host: Host) -> None:
    """A note, and no hook."""
    host.program()
    with subprocess.Popen(["true"]) as gone:
        pass
    host.container = Container("c0ffee", gone.pid, "running", str(host.folder / "bundle"), {})
    said = host.rerun(hook(LDCACHE), show=show_mounts)
    assert "cannot be passed to them: it does not exist" in said
    assert host.calls() == []
