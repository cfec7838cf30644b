"""Steps that are timed, and undone in reverse order if one of them fails.

    with Transaction() as transaction:
        with transaction.step("lock"):
            transaction.undo("unlock", unlock)      # before or after the action: an undo must work in both
            cases lock() … transaction.commit()                        # from here on nothing is undone, and
            no signal raises

If the block ends without commit, by an exception or not, what was registered is undone. An undo that fails
does not keep the others from running; its message replaces the hint in the error that the user sees, because
a hint such as "the container continues to run" may then be wrong.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from gpusnap.oci.base.dataclass import dataclass
from gpusnap.runtime_shim.base.errors import GpusnapError, Interrupted, make_unforeseen, reason
from gpusnap.runtime_shim.base.stop_signals import STOPPING, handle_signals, note_signal

# Characters of a step's notes: the manifest's schema allows no more.
_NOTE = 4096
_RECOVER = "gpusnap recover"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a timeline; in seconds, from the transaction's own start."""

    name: str
    start: float
    seconds: float
    note: str = ""
    """Unusual events."""


class _Announced:
    """The function that is called with each step when it begins."""

    to: Callable[[str], object] | None = None


def announce(to: Callable[[str], object] | None) -> None:
    """Call `to` with the name of every step, of every transaction, before it begins; None calls nobody."""
    _Announced.to = to


def _announce_step(name: str) -> None:
    if _Announced.to is not None:
        _Announced.to(name)


class Transaction:
    """The steps of one checkpoint or restore; `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begin = clock()
        self._undo: list[tuple[str, Callable[[], object]]] = []
        self._current = ""
        self._note = ""
        self.steps: list[Step] = []
        self.committed = False
        self.failed: tuple[str, ...] = ()
        """What could not be undone, one sentence each."""

    def __enter__(self) -> Transaction:
        return self

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step; several steps may have the same name.

        Raises Interrupted if a signal was raised in the step before, and was taken for something else there.
        """
        if _Signals.raised and not _Signals.held:
            stop_if_asked()
        _announce_step(name)
        start, outer = self._clock(), self._current
        self._current = name
        try:
            yield
        finally:
            self._current = outer
            if outer:
                _announce_step(outer)
            note, self._note = self._note, ""
            self.steps.append(Step(name, start - self._begin, self._clock() - start, note))

    def note(self, text: str) -> None:
        """Add a note to the current step."""
        self._note = "; ".join(filter(None, [self._note, text]))[:_NOTE]

    def undo(self, name: str, action: Callable[[], object]) -> None:
        """Register the undo of the current step."""
        self._undo.append((name, action))

    def commit(self) -> None:
        """What has been done stays.

        No signal says otherwise from here on (see `make_interruptible`): an engine told of a failure takes
        a container away that was restored. Whoever can still stop half-way asks with `stop_if_asked`.
        """
        self._undo.clear()
        self.committed = _Signals.committed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = self._roll_back()
        self.failed = tuple(failed)
        if failed and isinstance(error, GpusnapError):
            error.hint = "; ".join(failed)
        elif failed and error is None:
            raise GpusnapError("; ".join(failed))
        elif failed and error is not None:
            error.add_note("; ".join(failed))

    def _roll_back(self) -> list[str]:
        """Run the undo list in reverse; returns a sentence for each that failed."""
        failed = []
        with hold_signals(), _note_undoing():
            while self._undo:
                name, action = self._undo.pop()
                _announce_step(f"undo: {name}")
                start = self._clock()
                try:
                    action()
                except Exception as error:  # whatever an undo raises, the rest must still be undone
                    failed.append(f"while undoing, {name} failed: {_words(error)}")
                self.steps.append(Step(f"undo: {name}", start - self._begin, self._clock() - start))
        return failed


@contextmanager
def name_recover(container: str) -> Iterator[None]:
    """Where the block cannot take something back, have its error name the command that tries again.

    `container`: its ID. Raises GpusnapError, whatever the block raises: it may be an import that fails late.
    """
    again = f"{_RECOVER} {container} tries again"
    try:
        yield
    except OSError as error:
        raise GpusnapError(reason(error), hint=again) from error
    except Exception as error:
        found = error if isinstance(error, GpusnapError) else make_unforeseen(error)
        if _RECOVER not in found.sentence():
            found.add_hint(again)
        if found is error:
            raise
        raise found from error


def _words(error: Exception) -> str:
    if isinstance(error, GpusnapError):
        return error.sentence()
    return reason(error) if isinstance(error, OSError) else repr(error)


@contextmanager
def _note_undoing() -> Iterator[None]:
    _Signals.undoing += 1
    try:
        yield
    finally:
        _Signals.undoing -= 1


class _Signals:
    """What the handler needs to know: it can only raise where stopping half-way does no harm."""

    depth = 0
    """Blocks of `make_interruptible` that we are in."""
    held = 0
    pending = 0
    committed = False
    """What has been done stays: nobody is to be told that it was left as it was."""
    stopping = False
    """One signal has been raised, and the steps are being undone: a second must not break into that."""
    raised = 0
    """The signal that was raised in this block of `make_interruptible`: somebody may have swallowed it."""
    undoing = 0
    """Transactions that are being undone."""


def _make_interrupted(number: int) -> Interrupted:
    return Interrupted(
        f"stopped by {signal.Signals(number).name}", hint="the container was left in its original state"
    )


def _handler(number: int, frame: FrameType | None) -> None:
    note_signal(number)
    if _Signals.held or _Signals.committed or _Signals.stopping or _is_ending(frame):
        _Signals.pending = number
    else:
        _Signals.stopping, _Signals.raised = True, number
        raise _make_interrupted(number)


def _is_ending(frame: FrameType | None) -> bool:
    """Whether a transaction is about to undo its steps: it does not hold signals back yet."""
    while frame is not None:
        if frame.f_code is Transaction.__exit__.__code__:
            return True
        frame = frame.f_back
    return False


@contextmanager
def make_interruptible() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into Interrupted, so that a transaction undoes its steps.

    Until the transaction commits. A signal that is ignored (nohup) stays ignored. One block may be within
    another: a suspend that has to make room spills another container first, and a swap resumes the first
    container after a signal.
    """
    outer, raised = _Signals.committed, _Signals.raised
    _Signals.committed, _Signals.raised = False, 0
    if not _Signals.depth:
        _Signals.pending, _Signals.stopping = 0, False
    _Signals.depth += 1
    try:
        with handle_signals(_handler):
            yield
    finally:  # when this handler is gone: it must not say of what is committed that it was left as it was
        _Signals.depth -= 1
        _Signals.committed = outer
        _Signals.raised = (_Signals.raised or raised) if _Signals.depth else 0


@contextmanager
def hold_signals() -> Iterator[None]:
    """Keep those signals back while something runs that must not be stopped half-way.

    By a flag and not by the signal mask, which the real runtime would inherit. One that came in stops us at
    the next `stop_if_asked`.
    """
    _Signals.held += 1
    try:
        yield
    finally:
        _Signals.held -= 1


@contextmanager
def allow_signals() -> Iterator[None]:
    """Within a block of `hold_signals`: let a signal stop us again while something runs that can be stopped.

    One that came in before stops us here.
    """
    held, _Signals.held = _Signals.held, 0
    try:
        stop_if_asked()
        yield
    finally:
        _Signals.held = held


@contextmanager
def forward_signals(send: Callable[[int], object]) -> Iterator[None]:
    """Hand those signals on to a child that stands for us, and go on; one that was held back, too.

    `send` gives it a signal. The child may have ended, and another process may have its PID.
    """

    def forward(number: int, _frame: FrameType | None) -> None:
        send(number)

    before = {number: signal.signal(number, forward) for number in STOPPING}
    number, _Signals.pending = _Signals.pending, 0
    try:
        if number:
            forward(number, None)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def is_asked_to_stop() -> bool:
    """Whether such a signal came in: raised, held back, or blocked and not ignored."""
    # One that is ignored (nohup) is pending as well while it is blocked.
    blocked = (number for number in signal.sigpending() if number in STOPPING)
    came = _Signals.stopping or bool(_Signals.pending)
    return came or any(signal.getsignal(number) is not signal.SIG_IGN for number in blocked)


def stop_if_asked() -> None:
    """Raise Interrupted for a signal that came in while it was held back.

    Also for one that has been raised, if somebody took that for the failure of something that may fail.
    """
    number, _Signals.pending = _Signals.pending, 0
    if not number and not _Signals.undoing and not _Signals.committed:
        number = _Signals.raised
    if number:
        _Signals.stopping, _Signals.raised = True, number
        raise _make_interrupted(number)
