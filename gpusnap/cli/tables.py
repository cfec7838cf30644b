"""Records as tables for people."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from gpusnap.oci.base.dataclass import list_fields
from gpusnap.runtime_shim.base.transaction import Step
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.gpu.api.driver import Host
from gpusnap.runtime_shim.gpu.assignment import Plan
from gpusnap.runtime_shim.records.manifest import Manifest, NeutralisedProcess
from gpusnap.runtime_shim.settings import Settings

if TYPE_CHECKING:
    # Imported where it is used: it takes 35 ms, and what prints JSON or names does without.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_WIDTH = 40
# Of tables: below it, what is left for some columns are a few letters.
_NARROWEST = 80
# No row of a table comes near it.
_WIDEST = 100_000
_NUMBERS = {
    *(
        "PID",
        "descriptor",
        "threads",
        "mapped",
        "GPU memory",
        "minor",
        "memory",
        "used",
        "free",
        "seconds",
        "start",
        "size",
        "own",
        "GPUs",
    ),
    *(
        "age",
        "new",
        "pause",
        "zero",
        "chunks",
        "stored",
        "share",
        "same",
        "changed",
        "only A",
        "only B",
        "size in A",
        "size in B",
    ),
}


def output() -> Console:
    """Return a console to print results on.

    If neither COLUMNS nor a terminal says how wide it is, no row is folded. Tables are never folded to less
    than 80 columns; a narrower terminal breaks the lines itself.
    """
    from rich.console import Console

    if "COLUMNS" not in os.environ and not (sys.stdout is not None and sys.stdout.isatty()):
        return Console(width=_WIDEST, highlight=False)
    console = Console(highlight=False)
    console.width = max(console.width, _NARROWEST)
    return console


def table(title: str, *columns: str, fixed: Collection[str] = ("UUID",)) -> Table:
    """Make a table without lines; what does not fit is folded, except in columns that are `fixed`."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in columns:
        made.add_column(
            column,
            justify="right" if column in _NUMBERS else "left",
            overflow="fold",
            no_wrap=column in fixed,
        )
    return made


def make_plain(text: str) -> Text:
    """Return a text from a checkpoint without markup of rich's, and nothing that a terminal would obey."""
    from rich.text import Text

    return Text("".join(c if c.isprintable() else "�" for c in text))


def say(to: Console, text: str) -> None:
    """Print a line, as `make_plain` makes it; it is not broken to fit a terminal."""
    to.print(make_plain(text), soft_wrap=True)


def print_manifest(console: Console, record: Manifest) -> None:
    """Print the GPUs, processes and timeline of a checkpoint."""
    host = record.host
    for line in (
        f"container {record.container[:12]}, checkpointed {record.created} by gpusnap {record.gpusnap}",
        f"driver {host.driver_version} (CUDA {host.cuda_version}), CRIU {host.criu_version}, "
        f"{host.runtime_name} {host.runtime_version}, Linux {host.kernel} {host.architecture}",
        "",
    ):
        say(console, line)
    rows = table("GPUs", "UUID", "minor", "model", "memory", "used")
    for gpu in record.gpus:
        rows.add_row(
            gpu.uuid, str(gpu.minor), make_plain(gpu.model), human(gpu.memory_total), human(gpu.memory_used)
        )
    console.print(rows, "")
    rows = table("GPU processes", "PID", "command", "used")
    for process in record.processes:
        used = sum(used for _, used in process.gpus)
        command = " ".join(process.command)[:200] or process.name
        rows.add_row(str(process.pid), make_plain(command), human(used))
    console.print(rows, "")
    if record.neutralised:
        print_neutralised(console, record.neutralised)
    if record.plugin:
        console.print(make_plain(f"GPU state: in CRIU's images, by its plugin {record.plugin}"), "", sep="\n")
    if record.pages == "chunks":
        written = record.written
        said = f"{human(written.stored)} written in chunks, {human(written.known)} already known"
        console.print(
            make_plain(f"GPU memory: {said}, {human(written.zero)} zero"), "", sep="\n", highlight=False
        )
    print_timeline(console, record.timing)


def print_neutralised(console: Console, processes: tuple[NeutralisedProcess, ...]) -> None:
    """Processes whose inherited GPU files were replaced by /dev/null."""
    rows = table("inherited files, now /dev/null", "PID", "command", "files")
    for process in processes:
        files = f"{len(process.descriptors)} open, {process.mappings} mapped ({human(process.mapped)})"
        rows.add_row(str(process.pid), make_plain(process.name), files)
    console.print(rows, "")


def print_timeline(console: Console, steps: tuple[Step, ...]) -> None:
    """Print when each step began, how long it took, and a bar of both."""
    end = max((step.start + step.seconds for step in steps), default=0.0) or 1.0
    rows = table(f"timeline ({end:.2f} s)", "step", "start", "seconds", "")
    for step in steps:
        left = round(step.start / end * _WIDTH)
        bar = "█" * max(1, round(step.seconds / end * _WIDTH)) if step.seconds / end > 0.01 else "▏"
        rows.add_row(make_plain(step.name), f"{step.start:.3f}", f"{step.seconds:.3f}", " " * left + bar)
    console.print(rows)
    for step in steps:
        if step.note:
            console.print(make_plain(f"{step.name}: {step.note}"), highlight=False)


def print_inventory(console: Console, host: Host) -> None:
    console.print(f"driver {host.driver_version} (CUDA {host.cuda_version})\n", highlight=False)
    rows = table("GPUs", "UUID", "minor", "model", "memory", "used", "notes")
    for gpu in host.gpus:
        notes = ["MIG"] * gpu.mig + [gpu.compute_mode] * (gpu.compute_mode != "default")
        row = (gpu.uuid, str(gpu.minor), f"{gpu.model} ({gpu.compute_capability})")
        rows.add_row(*row, human(gpu.memory_total), human(gpu.memory_used), ", ".join(notes))
    console.print(rows)


def print_plan(console: Console, record: Manifest, host: Host, chosen: Plan) -> None:
    """For each GPU of the checkpoint every GPU of this host: the one that it goes to, or why not there."""
    here = {gpu.uuid: gpu for gpu in host.gpus}
    pairs = dict(chosen.pairs)
    taken = set(pairs.values())
    for gpu in record.gpus:
        needs = human(gpu.memory_used)
        title = f"GPU {gpu.index} of the checkpoint, {gpu.uuid}: {gpu.model}, {needs} used"
        console.print(make_plain(title), highlight=False)
        rows = table("", "GPU here", "UUID", "free", "")
        rows.title = None
        for verdict in (v for v in chosen.verdicts if v.wanted == gpu.uuid):
            target = here[verdict.gpu]
            said = verdict.reason or ("fits, but is taken by another one" if verdict.gpu in taken else "fits")
            if pairs.get(gpu.uuid) == verdict.gpu:
                said = "chosen"
            free = human(max(0, target.memory_total - target.memory_used))
            rows.add_row(str(target.index), target.uuid, free, make_plain(said))
        console.print(rows, "")


def plan_document(chosen: Plan) -> dict[str, Any]:
    """Return a plan for JSON."""
    return {
        "pairs": [{"old": old, "new": new} for old, new in chosen.pairs],
        "verdicts": [{"old": v.wanted, "new": v.gpu, "reason": v.reason} for v in chosen.verdicts],
        "refusal": chosen.refusal,
        "hint": chosen.hint,
        "code": chosen.code,
    }


def print_settings(console: Console, values: Settings, prefix: str = "") -> None:
    """Print every setting with its value, one a line, as dotted TOML keys."""
    from dataclasses import is_dataclass

    for field in list_fields(values):
        value = getattr(values, field)
        name = prefix + field.replace("_", "-")
        if is_dataclass(value):
            print_settings(console, value, prefix=f"{name}.")  # type: ignore[arg-type]
        else:
            if field == "gpu_map":
                value = ",".join(f"{old}={new}" for old, new in value)
            text = str(value).lower() if isinstance(value, bool) else value
            text = (
                f'"{text}"' if isinstance(value, str) else list(value) if isinstance(value, tuple) else text
            )
            console.print(f"{name} = {text}", highlight=False, markup=False, soft_wrap=True)
