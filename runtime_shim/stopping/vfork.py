"""Processes that wait for a child to begin its program: vfork(2), used by sh, posix_spawn and subprocess.

The child uses the parent's memory until then, and the parent sleeps in the kernel, where only SIGKILL reaches
it: no SIGSTOP, no tracer. If the child is stopped meanwhile, by a signal, a freezer or CRIU, the parent never
stops, and CRIU gives up after its timeout ("Timeout reached", "Unseizable non-zombie …, state D";
https://github.com/checkpoint-restore/criu/issues/423 has it in 4 % of all dumps, without a known cause). So a
container must be stopped at a moment when no process waits (snapshot/gpu_processes/dump_pause.py), or such
children must run until then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.process import proc
from gpusnap.runtime_shim.process.kcmp import EQUAL, VM, compare
from gpusnap.runtime_shim.process.ptrace.tracee import hold
from gpusnap.runtime_shim.stopping.stop import make_untraceable_error, wait_until_stopped

_LOOK = 0.0005
_FALLING_ASLEEP = 1.0
# Seconds for a child to stop, before it is traced and after it was released.
_STANDING = 1.0


@dataclass(frozen=True, slots=True)
class WaitingParent:
    """A waiting parent, and the child that it waits for."""

    parent: int
    child: int


def iterate_waiting(pids: Iterable[int]) -> Iterator[WaitingParent]:
    """Yield those of these stopped or frozen processes that wait for another of them.

    Parents are not found if their child has a memory of its own, or another parent (clone(2), CLONE_VFORK
    without CLONE_VM or with CLONE_PARENT); no known program does that.
    """
    among = set(pids)
    for child in sorted(among):
        parent = proc.parent(child)
        if parent in among and compare(parent, child, VM) == EQUAL and _is_asleep(parent):
            yield WaitingParent(parent, child)


def finish(pids: Iterable[int], *, timeout: float) -> None:
    """Let children among stopped processes run until they begin their programs, or end; none runs further.

    `timeout`: seconds for all. Raises GpusnapError; the child then stays stopped where it was.
    """
    pids = tuple(pids)
    deadline = time.monotonic() + timeout
    # A child may itself have such a child.
    while found := {each.child: each for each in iterate_waiting(pids)}:
        parents = {each.parent for each in found.values()}
        for each in (each for child, each in found.items() if child not in parents):
            _begin(each, deadline, timeout)


def make_too_long_error(each: WaitingParent, timeout: float) -> GpusnapError:
    """The error if a child does not begin its program in time."""
    return GpusnapError(
        f"process {each.parent} ({proc.comm(each.parent)}) waits for its child {each.child} to execute a "
        f"program (vfork), which took longer than {timeout:g} s",
        hint="CRIU cannot stop it during that time; try again when there is less activity",
        code="GPS-227",
    )


def make_for_good_error(each: WaitingParent) -> GpusnapError:
    """The error if a parent would wait for as long as the container is paused."""
    return GpusnapError(
        f"process {each.parent} ({proc.comm(each.parent)}) waits for its child {each.child} to execute a "
        "program (vfork), but that child is stopped",
        hint=f"let it continue (kill -CONT {each.child}), or kill it",
        code="GPS-227",
    )


def _is_asleep(pid: int) -> bool:
    """Whether a thread of the process waits in the kernel, and no signal wakes it.

    A thaw wakes it for no reason, and it takes a while until it sleeps again; a stopped or frozen process has
    no other running thread.
    """
    deadline = time.monotonic() + _FALLING_ASLEEP
    while True:
        states = set(proc.states(pid))
        if "D" in states or "R" not in states or time.monotonic() > deadline:
            return "D" in states
        time.sleep(_LOOK)


def _begin(each: WaitingParent, deadline: float, timeout: float) -> None:
    """Trace one child until it has begun its program; no instruction of that runs.

    It handles its own signals: posix_spawn makes it block them, and unblock them before the program. Signals
    that it gets meanwhile are delivered.
    """
    child = each.child
    wait_until_stopped([child], timeout=max(deadline - time.monotonic(), _STANDING))
    try:
        with hold(child, child, own_signals=True) as tracee:
            tracee.to_exec(deadline)
    except ProcessLookupError:
        pass  # it has ended instead
    except TimeoutError as error:
        raise make_too_long_error(each, timeout) from error
    except OSError as error:
        raise make_untraceable_error(child, child, error) from error
    wait_until_stopped([child], timeout=_STANDING)
