"""`gpusnap`: the command line. gpusnap.cli.exit_codes has the exit codes, docs/commands.md all commands."""

from __future__ import annotations

import os
import sys

import click

from gpusnap.base import privileges
from gpusnap.base.user_errors import failure
from gpusnap.cli import debugging, exit_codes
from gpusnap.cli.group import Group
from gpusnap.cli.streams import forgive_closed_pipes
from gpusnap.oci.base.errors import OciError
from gpusnap.runtime_shim._version import __version__
from gpusnap.runtime_shim.base import stop_signals, threads
from gpusnap.runtime_shim.base.errors import (
    GpusnapError,
    is_of_no_module,
    is_of_no_thread,
    make_unforeseen,
    reason,
)

MODULES = {
    "checkpoint": "gpusnap.cli.commands.checkpoint",
    "completion": "gpusnap.cli.completion",
    "copy": "gpusnap.cli.commands.push_pull",
    "diff": "gpusnap.cli.commands.stores.contents",
    "doctor": "gpusnap.cli.commands.doctor",
    "explain": "gpusnap.cli.commands.explain",
    "gc": "gpusnap.cli.commands.stores.upkeep",
    "gpus": "gpusnap.cli.commands.host",
    "history": "gpusnap.cli.commands.history",
    "inspect": "gpusnap.cli.commands.stores.contents",
    "install": "gpusnap.cli.commands.install",
    "install-hooks": "gpusnap.engines.install.hooks",
    "ls": "gpusnap.cli.commands.ls",
    "migrate": "gpusnap.cli.commands.migrate",
    "plan": "gpusnap.cli.commands.host",
    "prune": "gpusnap.cli.commands.prune",
    "ps": "gpusnap.cli.commands.suspending.ps",
    "pull": "gpusnap.cli.commands.push_pull",
    "push": "gpusnap.cli.commands.push_pull",
    "recover": "gpusnap.cli.commands.recover",
    "report": "gpusnap.cli.commands.report",
    "restore": "gpusnap.cli.commands.checkpoint",
    "resume": "gpusnap.cli.commands.suspending.suspend",
    "rm": "gpusnap.cli.commands.stores.upkeep",
    "schedule": "gpusnap.cli.commands.schedule",
    "settings": "gpusnap.cli.commands.host",
    "suspend": "gpusnap.cli.commands.suspending.suspend",
    "swap": "gpusnap.cli.commands.suspending.suspend",
    "tag": "gpusnap.cli.commands.stores.upkeep",
    "uninstall": "gpusnap.cli.commands.install",
    "verify": "gpusnap.cli.commands.stores.upkeep",
    "version": "gpusnap.cli.commands.version",
}

# They make podman(1) ask a service, perhaps on another host. What that starts is no child of gpusnap's, so it
# would not do what gpusnap orders for one checkpoint, nor find the memory that gpusnap loads for a restore.
_SERVICES = ("CONTAINER_HOST", "CONTAINER_CONNECTION")


def main() -> int:
    """The entry point: every error becomes one sentence and an exit code."""
    forgive_closed_pipes()
    threads.bound_thread_starts()
    for name in _SERVICES:
        os.environ.pop(name, None)
    if "_GPUSNAP_COMPLETE" in os.environ:
        import gpusnap.cli.completion  # noqa: F401 (our own way for bash is in place then)
    with stop_signals.raise_interrupts():
        return _run()


def _run() -> int:
    try:
        command.main(prog_name="gpusnap", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # what fails only here fails as well
    except click.exceptions.Exit as done:
        return done.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _report_error(stop_signals.make_interrupted(hint="you can run the same command again"))
    except GpusnapError as error:
        return _report_error(error)
    except OciError as error:
        debugging.show(error)
        said = failure(error)
        said.__cause__ = error
        return _report_error(said)
    except OSError as error:
        debugging.show(error)
        # Nobody below made a sentence of it: no folder for temporary files, say, or stdout on a full disk.
        what = error.filename or "a file, or the output,"
        said = GpusnapError(f"{what} cannot be used: {reason(error)}")
        said.__cause__ = error
        return _report_error(said)
    except (AttributeError, ImportError, MemoryError, RuntimeError) as error:
        # A disk or a host's memory that fails while a part of gpusnap is loaded; no thread to be had.
        if isinstance(error, RuntimeError) and not is_of_no_thread(error):
            raise
        if isinstance(error, AttributeError) and not is_of_no_module(error):
            raise
        debugging.show(error)
        said = make_unforeseen(error)
        said.__cause__ = error
        return _report_error(said)
    return exit_codes.DONE


def _report_error(error: GpusnapError) -> int:
    debugging.show(error)
    error = privileges.explain_error(error)
    print(f"gpusnap: {error.sentence()}", file=sys.stderr)
    return exit_codes.exit_code(error)


@click.group(cls=Group, modules=MODULES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gpusnap")
@click.option("--debug", is_flag=True, help="Print each program that is run, and the tracebacks of errors.")
def command(debug: bool) -> None:
    """Checkpoint and restore containers that use GPUs.

    A checkpoint (WHAT) is written as one of:

    \b
    NAME or DIGEST        in this host's store; NAME without a tag is the newest of that
                          name, and the first 6 digits of a digest are enough
    oci:DIR:NAME          in the store in the directory DIR
    ./FILE.tar.zst        an archive of Podman, or a directory of CRIU images
    HOST/REPOSITORY:TAG   in a registry

    Start with `gpusnap doctor`, which checks this host. Containers must be started with gpusnap-runtime,
    which Podman and containerd run in place of crun or runc. A message that ends with a code, such as
    [GPS-312], is explained by `gpusnap explain GPS-312`.
    """
    if debug:
        debugging.begin()


if __name__ == "__main__":
    raise SystemExit(main())
