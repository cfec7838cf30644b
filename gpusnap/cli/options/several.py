"""Runs a command on several containers or checkpoints: each on its own, and no failure stops the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import click

from gpusnap.base.user_errors import failure
from gpusnap.cli import debugging, exit_codes
from gpusnap.cli.json_output import print_json
from gpusnap.oci.base.errors import OciError
from gpusnap.runtime_shim.base import stop_signals
from gpusnap.runtime_shim.base.errors import GpusnapError, Interrupted

T = TypeVar("T")


def run_each(
    wanted: Sequence[str],
    work: Callable[[str], T],
    *,
    show: Callable[[T], None],
    document: Callable[[T], dict[str, object]],
    as_json: bool,
    key: str,
    listed: bool = False,
) -> None:
    """Do the work for each; one alone as it is, with its errors raised, unless a list was asked for.

    Of several, failures are told as they come, and what is raised in the end has their exit code, if that
    is the same for all. As JSON it is one list, `results`, in which a failure has error, code and exitCode;
    the member `key` says who it is of. A signal ends the rest: what is done and what was not begun is said.
    Raises what `work` raises, GpusnapError, Interrupted.
    """
    if len(wanted) == 1 and not listed:
        done = work(wanted[0])
        if as_json:
            print_json(document(done))
        else:
            show(done)
        return
    results: list[dict[str, object]] = []
    failures: dict[str, GpusnapError] = {}
    ready: list[str] = []
    for at, one in enumerate(wanted):
        try:
            done = work(one)
        except (KeyboardInterrupt, Interrupted) as error:
            stopped = error if isinstance(error, Interrupted) else stop_signals.make_interrupted()
            if as_json:
                results.append(_make_failed_document(key, one, stopped))
                print_json({"results": results})
            before, left = ", ".join(ready) or "none", ", ".join(wanted[at + 1 :]) or "none"
            raise Interrupted(
                f"{one}: {stopped}; done before: {before}; not started: {left}",
                hint=stopped.hint,
                code=stopped.code,
            ) from error
        except (GpusnapError, OciError) as error:
            debugging.show(error)
            said = error if isinstance(error, GpusnapError) else failure(error)
            failures[one] = said
            results.append(_make_failed_document(key, one, said))
            # Most sentences about a container name it.
            whose = "" if f"container {one} " in f"{said} " else f"{one}: "
            click.echo(f"gpusnap: {whose}{said.sentence()}", err=True)
        else:
            ready.append(one)
            results.append(document(done))
            if not as_json:
                show(done)
    if as_json:
        print_json({"results": results})
    if failures:
        same = len({exit_codes.exit_code(error) for error in failures.values()}) == 1
        kind = type(next(iter(failures.values()))) if same else GpusnapError
        raise kind(
            f"{len(failures)} of {len(wanted)} failed: {', '.join(failures)}",
            hint="see above for each of them",
        )


def _make_failed_document(key: str, one: str, error: GpusnapError) -> dict[str, object]:
    return {
        key: one,
        "error": str(error),
        "code": error.code,
        "exitCode": exit_codes.exit_code(error),
    }
