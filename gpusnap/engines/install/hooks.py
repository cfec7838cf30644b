"""`gpusnap install-hooks`: the files that make Podman run gpusnap's hooks."""

from __future__ import annotations

import os

import click

from gpusnap.hooks import hooksd
from gpusnap.hooks.main import STAGES
from gpusnap.runtime_shim.base.errors import GpusnapError, UsageError
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime import identify as real
from gpusnap.runtime_shim.runtime.criu.version import criu_version


@click.command("install-hooks")
@click.argument("directory", type=click.Path(file_okay=False), metavar="DIR")
@click.option(
    "--stage",
    "stages",
    type=click.Choice(STAGES),
    multiple=True,
    default=STAGES,
    help="Only this hook; may be repeated. [default: all]",
)
@click.option("--annotated", is_flag=True, help="Only for containers with an annotation io.gpusnap[.*].")
@click.option(
    "--criu-config",
    default="",
    metavar="PATH",
    help="Give containers with a GPU the annotation org.criu.config with this file.",
)
@click.option("--force", is_flag=True, help="Replace files that were modified.")
@click.option("--dry-run", is_flag=True, help="Print what would be done without doing it.")
@click.option("--remove", is_flag=True, help="Remove the files again, except modified ones.")
def install_hooks(
    directory: str,
    stages: tuple[str, ...],
    annotated: bool,
    criu_config: str,
    force: bool,
    dry_run: bool,
    remove: bool,
) -> None:
    """Write configuration files for gpusnap's OCI hooks into the directory DIR (oci-hooks(5)).

    DIR is then named by `podman --hooks-dir DIR …` or by hooks_dir in containers.conf; give it for gpusnap
    alone, such as /etc/gpusnap/hooks.d.
    """
    if not directory:
        raise UsageError("DIR is empty", hint="name a directory, such as /etc/gpusnap/hooks.d")
    directory = os.path.abspath(directory)
    if remove:
        _remove(directory, dry_run)
        return
    if "precreate" in stages and os.path.realpath(directory) in hooksd.SHARED_DIRECTORIES:
        raise GpusnapError(
            f"{directory} is also read by CRI-O and `podman build`, which refuse the stage precreate",
            hint="use a directory for gpusnap alone, or only --stage createRuntime --stage poststop",
        )
    if criu_config:
        _check_criu_config(criu_config)
    program = hooksd.find_program()
    made = hooksd.files(program, stages=stages, annotated=annotated, criu_config=criu_config)
    if dry_run:
        for name, data in made.items():
            click.echo(f"# {os.path.join(directory, name)}\n{data.decode()}", nl=False)
        return
    if not os.path.isdir(directory):
        click.echo(f"making {directory}", err=True)
    for done, path in hooksd.install(directory, made, force=force):
        click.echo(f"{done} {path}")


def _remove(directory: str, dry_run: bool) -> None:
    done, left = hooksd.remove(directory, dry_run=dry_run)
    for what, path in done:
        click.echo(f"would be {what}: {path}" if dry_run else f"{what} {path}")
    for path in left:
        click.echo(f"{path} was modified, and is kept", err=True)
    if not done and not left:
        click.echo(f"no file of gpusnap's is in {directory}")


def _check_criu_config(path: str) -> None:
    if not os.path.isabs(path) or not os.path.isfile(path):
        raise GpusnapError(
            f"--criu-config {path} is not the absolute path of a file", hint="write it first; see criu(8)"
        )
    runtime = real.identify(real.find(locate.setting()))
    criu = criu_version()
    if not takes_annotation(runtime, criu):
        raise GpusnapError(
            f"{runtime.name} with CRIU {criu} refuses to checkpoint a container with the annotation "
            "org.criu.config",
            hint="omit --criu-config: gpusnap-runtime passes CRIU its file in CRIU_CONFIG_FILE",
        )


def takes_annotation(runtime: real.RealRuntime, criu: str) -> bool:
    """Return whether a runtime accepts org.criu.config: every runc, and crun from 1.26 on with CRIU 4.2.

    Source: crun src/libcrun/criu.c, which needs libcriu's criu_set_config_file. Unknown runtimes do not.
    """
    if runtime.kind == "runc":
        return True
    numbers = tuple(int(part) for part in criu.split(".") if part.isdigit())
    return runtime.kind == "crun" and runtime.version >= (1, 26) and numbers >= (4, 2)
