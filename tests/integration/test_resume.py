"""What a killed gpusnap leaves, and how it is brought back."""

from __future__ import annotations

import subprocess
from pathlib import Path

import waiting
from holding import held
from support import RUNTIME, Container, faults, good, run, until


def test_resume_after_a_kill(crun: None, tmp_path: Path) -> None:
    """SIGKILL to the shim while its processes are suspended: `gpusnap resume` brings them back, with all."""
    container = Container.start("w", "--mib", "8")
    init, image = container.pid, tmp_path / "image"
    words = [RUNTIME, "checkpoint", "--image-path", str(image), "--work-path", str(tmp_path), container.id]
    with held(tmp_path, "crun", "checkpoint", '[memory]\npages = "criu"\n') as runtime:
        with waiting.Process(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as shim:
            until(runtime.met, "the dump")
            shim.kill()
        runtime.kill()
    assert "stopped" in Path(f"/proc/{init}/status").read_text()
    assert f"running: {init}" in good(run("/usr/local/bin/gpusnap", "resume", str(init)))
    container.goes_on()
    good(run("/usr/local/bin/gpusnap", "resume", str(init)))  # it runs already: nothing happens
    container.goes_on()
    faults("")


def test_resume_of_what_is_no_gpu_process(crun: None) -> None:
    """One sentence, and exit code 1."""
    done = run("/usr/local/bin/gpusnap", "resume", "1")
    assert done.code == 1
    assert "process 1 is not a GPU process" in done.err
