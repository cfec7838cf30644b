"""The codes of errors: what was published never changes, and `gpusnap explain` finds all of them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping

import pytest
from click.testing import CliRunner, Result

from gpusnap.base.user_errors import NotFound
from gpusnap.cli.main import command
from gpusnap.error_codes import CODES, GROUPS, find
from gpusnap.error_codes.entry import ErrorCode

# Add new ones. A line that is here is published: people search for it, and scripts compare it.
PUBLISHED: Mapping[str, str] = {
    "GPS-001": "internal-error",
    "GPS-002": "part-missing",
    "GPS-003": "no-thread",
    "GPS-004": "proc-unreadable",
    "GPS-005": "not-root",
    "GPS-007": "disk-full",
    "GPS-020": "at-work",
    "GPS-021": "checkpoint-cut-off",
    "GPS-022": "restore-cut-off",
    "GPS-023": "journal-unreadable",
    "GPS-025": "process-does-not-end",
    "GPS-026": "gpu-memory-lost",
    "GPS-027": "memory-not-given-back",
    "GPS-030": "container-replaced",
    "GPS-031": "images-not-mounted",
    "GPS-101": "runtime-lacks-option",
    "GPS-102": "not-a-checkpoint-name",
    "GPS-103": "file-in-the-way",
    "GPS-111": "setting-invalid",
    "GPS-114": "no-runtime",
    "GPS-201": "not-running",
    "GPS-202": "other-runtime",
    "GPS-203": "paused",
    "GPS-204": "depends-on-container",
    "GPS-205": "podman-option",
    "GPS-206": "suspended",
    "GPS-207": "process-stopped",
    "GPS-208": "io-uring",
    "GPS-209": "socket-protocol",
    "GPS-210": "tcp-connection",
    "GPS-211": "shared-pid-namespace",
    "GPS-212": "not-a-descendant",
    "GPS-213": "gpu-file-without-state",
    "GPS-214": "nccl",
    "GPS-215": "cuda-ipc",
    "GPS-216": "not-enough-memory",
    "GPS-217": "device-access",
    "GPS-218": "not-left-stopped",
    "GPS-219": "shared-gpus",
    "GPS-220": "removed-by-service",
    "GPS-224": "started-anew-by-systemd",
    "GPS-225": "does-not-stop",
    "GPS-226": "traced",
    "GPS-227": "vfork",
    "GPS-229": "code-changes",
    "GPS-231": "container-unreadable",
    "GPS-240": "command-in-container",
    "GPS-301": "driver-missing",
    "GPS-302": "driver-too-old",
    "GPS-303": "driver-mismatch",
    "GPS-304": "driver-not-ready",
    "GPS-305": "no-gpu",
    "GPS-306": "gpu-busy",
    "GPS-307": "gpu-out-of-memory",
    "GPS-308": "hardware-fault",
    "GPS-309": "permission-refused",
    "GPS-310": "no-gpu-state",
    "GPS-311": "illegal-state",
    "GPS-312": "lock-timeout",
    "GPS-313": "not-supported",
    "GPS-314": "mps",
    "GPS-315": "invalid-request",
    "GPS-316": "process-ended",
    "GPS-317": "workload-fault",
    "GPS-318": "driver-failed",
    "GPS-401": "no-gpu-fits",
    "GPS-402": "older-driver",
    "GPS-403": "gpu-map",
    "GPS-405": "other-driver-files",
    "GPS-406": "same-gpus-needed",
    "GPS-409": "cdi",
    "GPS-410": "nvidia-hook",
    "GPS-501": "dump-failed",
    "GPS-502": "restore-failed",
    "GPS-503": "no-images",
    "GPS-504": "failed-after-dump",
    "GPS-506": "plugin-missing",
    "GPS-508": "container-exists",
    "GPS-509": "ended-at-once",
    "GPS-511": "process-ended-by-itself",
    "GPS-512": "memory-not-written",
    "GPS-513": "region-not-copied",
    "GPS-514": "not-kept",
    "GPS-515": "no-manifest-yet",
    "GPS-516": "address-missing",
    "GPS-517": "pycriu-missing",
    "GPS-518": "volume",
    "GPS-519": "port-in-use",
    "GPS-520": "address-in-use",
    "GPS-521": "volume-as-it-is",
    "GPS-522": "pod",
    "GPS-523": "memory-not-copied",
    "GPS-524": "stopped-by-a-signal",
    "GPS-525": "open-files-not-on-disk",
    "GPS-526": "cgroup-in-use",
    "GPS-527": "shared-memory-in-use",
    "GPS-528": "file-changed",
    "GPS-529": "file-cut",
    "GPS-530": "file-may-be-newer",
    "GPS-531": "pod-not-running",
    "GPS-601": "damaged",
    "GPS-602": "incomplete",
    "GPS-603": "newer-format",
    "GPS-604": "untrusted",
    "GPS-605": "not-a-checkpoint",
    "GPS-606": "image-for-an-engine",
    "GPS-607": "other-engine",
    "GPS-608": "half-a-checkpoint",
    "GPS-609": "chunk-elsewhere",
    "GPS-701": "not-in-store",
    "GPS-703": "store-busy",
    "GPS-704": "store-unusable",
    "GPS-705": "gc-refused",
    "GPS-706": "memory-needed",
    "GPS-710": "not-pushed",
    "GPS-801": "not-allowed",
    "GPS-802": "not-in-registry",
    "GPS-803": "unreachable",
    "GPS-804": "plain-http",
    "GPS-805": "certificate",
    "GPS-806": "rejected",
    "GPS-807": "reference",
    "GPS-808": "registry-at-fault",
    "GPS-809": "token-without-tls",
    "GPS-812": "referrers-full",
    "GPS-813": "registries-conf",
    "GPS-820": "other-host-not-reached",
    "GPS-821": "other-host-not-understood",
    "GPS-822": "other-host-refuses",
    "GPS-823": "migration-unsettled",
    "GPS-824": "migration-failed",
    "GPS-901": "engine-not-run",
    "GPS-902": "podman-killed",
    "GPS-903": "containerd-failed",
    "GPS-904": "containerd-name",
    "GPS-906": "containerd-without-memory",
    "GPS-907": "podman-export",
    "GPS-908": "hook",
    "GPS-909": "cleanup-would-restart",
}


def explained(*words: str) -> Result:
    """What the command line prints."""
    return CliRunner().invoke(command, ["explain", *words])


def test_published() -> None:
    """None has gone, none has another name, and new ones are in the list above."""
    assert {code: each.name for code, each in CODES.items()} == PUBLISHED


def test_each_once() -> None:
    """No code and no name stands for two things: the table by code would hide one."""
    from gpusnap.error_codes import command_line, container, criu, engines, files, gpu, host, other_hosts
    from gpusnap.error_codes import stores as of_stores

    parts = (host, command_line, container, gpu, criu, files, of_stores, other_hosts, engines)
    all_of_them = [each for part in parts for each in part.CODES]
    assert len(all_of_them) == len(CODES) == len({each.name for each in CODES.values()})


@pytest.mark.parametrize("each", CODES.values(), ids=lambda each: each.code)
def test_form(each: ErrorCode) -> None:
    """GPS and three digits, a name that is no number, and sentences."""
    assert re.fullmatch(r"GPS-\d{3}", each.code)
    assert each.code[4] in GROUPS
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", each.name)
    for text in (each.cause, each.cure):
        assert text[0].isupper() or text.startswith(("gpusnap", "`", "crun", "containerd", "docs/"))
        assert text.endswith(".")
        assert text.count("`") % 2 == 0
        assert "  " not in text


@pytest.mark.parametrize("word", ["GPS-312", "gps-312", "GPS312", "312", "[GPS-312]", " lock-timeout "])
def test_find(word: str) -> None:
    """As it is printed, and as people type it."""
    found = find(word)
    assert found is not None
    assert (found.code, found.name) == ("GPS-312", "lock-timeout")


@pytest.mark.parametrize("word", ["GPS-999", "", "GPS-", "-", "lock", "GPS-3120", "٣١٢"])
def test_find_nothing(word: str) -> None:
    """What is no code, or none of ours."""
    assert find(word) is None


def test_low_numbers() -> None:
    """Zeros at the beginning may be left out."""
    assert find("7") is find("GPS-007") is CODES["GPS-007"]


@pytest.mark.parametrize("code", CODES)
def test_explain(code: str) -> None:
    """Cause and cure, whole."""
    done = explained(code)
    assert done.exit_code == 0
    words = done.output.split()
    assert words[:2] == [code, CODES[code].name]
    assert words[2:] == f"Cause: {CODES[code].cause} What to do: {CODES[code].cure}".split()


def test_explain_all() -> None:
    """Without a code, the list of all, by groups."""
    lines = explained().output.splitlines()
    assert [line.split() for line in lines if line.startswith("  ")] == [
        list(each) for each in PUBLISHED.items()
    ]
    assert [line for line in lines if line and not line.startswith("  ")] == list(GROUPS.values())


def test_explain_nothing() -> None:
    """A code that is none is not found, and the list is."""
    done = explained("GPS-999")
    assert isinstance(done.exception, NotFound)
    assert done.exception.sentence() == "there is no error code 'GPS-999'; gpusnap explain lists them"


def test_nothing_at_start() -> None:
    """Neither the runtime nor another command loads the texts."""
    program = (
        "import sys, gpusnap.cli.main, gpusnap.runtime_shim.shim.dispatch, gpusnap.hooks.main\n"
        "print([name for name in sys.modules if name.startswith('gpusnap.error_codes')])"
    )
    done = subprocess.run([sys.executable, "-B", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
