"""docs/errors.md, from the source: `python -m tools.docs.error_docs` writes it.

Each sentence that `error_messages` finds stands there with what to do about it: from `error_cures`, where it
has the sentence; else the hint that the code gives with it; else what holds for every error of its kind
(`error_kinds`). `uncured` names the sentences for which there is none of these: a test keeps that empty.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gpusnap.cli.exit_codes import exit_code
from gpusnap.oci.base.errors import OciError
from gpusnap.runtime_shim.errors import GpusnapError
from gpusnap.runtime_shim.gpu.api.errors import GpuError
from gpusnap.runtime_shim.gpu.nvidia.result_codes import CUDA_RESULTS, NVML_RESULTS
from gpusnap.user_errors import failure
from tools.docs import error_messages
from tools.docs.error_cures import CURES
from tools.docs.error_kinds import INTRODUCTION, KINDS, NAMES, REASONS, SENTENCES
from tools.docs.error_messages import Message, Messages
from tools.docs.error_templates import bare

__all__ = ["main", "markdown", "uncured", "unused"]

ROOT = Path(__file__).parents[2]
_HEAD = "Made by `python -m tools.docs.error_docs` from the source and tools/docs/error_cures.py; edit those."

# The first that a module's name begins with counts; a package stands at its end for all that is new.
SUBJECTS: Mapping[str, tuple[str, ...]] = {
    "Installing": ("gpusnap.engines.install", "gpusnap.cli.install", "gpusnap.hooks.hooksd"),
    "The command lines of gpusnap-runtime": (
        "gpusnap.runtime_shim.runtime.command_line",
        "gpusnap.runtime_shim.runtime.options",
    ),
    "Settings, and the runtime behind gpusnap-runtime": (
        "gpusnap.runtime_shim.settings",
        "gpusnap.runtime_shim.runtime.find",
        "gpusnap.runtime_shim.runtime.identify",
        "gpusnap.runtime_shim.shim.entry",
        "gpusnap.runtime_shim.runtime.child_process",
        "gpusnap.runtime_shim.runtime.criu.run",
        "gpusnap.runtime_shim.log",
    ),
    "Before a checkpoint: nothing has been touched": (
        "gpusnap.runtime_shim.snapshot.preflight.checks",
        "gpusnap.runtime_shim.snapshot.preflight.nccl",
        "gpusnap.runtime_shim.runtime.container",
        "gpusnap.runtime_shim.shim.overrides",
    ),
    "Which GPU takes which one's place": (
        "gpusnap.runtime_shim.gpu.assignment",
        "gpusnap.runtime_shim.gpu.api.gpu_map",
        "gpusnap.runtime_shim.gpu.api.device_nodes",
        "gpusnap.runtime_shim.snapshot.devices.reservations",
    ),
    "CDI files of this host": (
        "gpusnap.runtime_shim.gpu.cdi.spec",
        "gpusnap.runtime_shim.gpu.cdi.strict_yaml",
    ),
    "The GPU's driver": ("gpusnap.runtime_shim.gpu",),
    "A restore": (
        "gpusnap.runtime_shim.snapshot.restore",
        "gpusnap.runtime_shim.snapshot.devices.remap",
        "gpusnap.runtime_shim.snapshot.devices.bind_mounted_nodes",
        "gpusnap.runtime_shim.runtime.bundle",
        "gpusnap.runtime_shim.runtime.criu.images.dev",
        "gpusnap.runtime_shim.runtime.criu.images.check",
        "gpusnap.runtime_shim.runtime.criu.external_mounts",
        "gpusnap.runtime_shim.runtime.criu.images.dev_tar",
        "gpusnap.runtime_shim.runtime.criu.images.overlay",
        "gpusnap.runtime_shim.snapshot.memory.source",
        "gpusnap.runtime_shim.snapshot.memory.prefetch",
        "gpusnap.runtime_shim.runtime.criu.descendants",
        "gpusnap.runtime_shim.snapshot.foreground",
        "gpusnap.runtime_shim.snapshot.devices.nvidia_hooks",
        "gpusnap.runtime_shim.snapshot.restored_processes",
    ),
    "The manifest of a checkpoint": ("gpusnap.runtime_shim.records.manifest",),
    "After a gpusnap that was killed": (
        "gpusnap.runtime_shim.snapshot.records.journal",
        "gpusnap.runtime_shim.snapshot.recover_checkpoint",
        "gpusnap.runtime_shim.snapshot.recover_restore",
        "gpusnap.runtime_shim.snapshot.incomplete_restore",
        "gpusnap.runtime_shim.runtime.criu.scratch_files",
        "gpusnap.runtime_shim.shim.dispatch",
    ),
    "While a checkpoint is made": ("gpusnap.runtime_shim",),
    "Registries": (
        "gpusnap.oci.registry.repository",
        "gpusnap.oci.registry.client",
        "gpusnap.oci.registry.http",
        "gpusnap.oci.registry.auth",
        "gpusnap.oci.registry.credentials",
        "gpusnap.oci.registry.certificates",
        "gpusnap.oci.registry.responses",
        "gpusnap.oci.layout.reference",
        "gpusnap.oci.registry.upload",
        "gpusnap.oci.registry.copy",
        "gpusnap.oci.registry.proxies",
    ),
    "Archives": (
        "gpusnap.oci.tar.archive",
        "gpusnap.oci.layout.single_layer_image",
        "gpusnap.oci.tar.headers",
        "gpusnap.oci.tar.compression",
    ),
    "Stores and artifacts": ("gpusnap.oci",),
    "OCI hooks": ("gpusnap.hooks",),
    "The command gpusnap": ("gpusnap",),
}
_PROGRAMS = ("gpusnap", "podman", "ctr", "crun", "runc", "libcuda", "fuser")
_OWN = {bare(template): cure for template, cure in CURES.items()}
_ORDER = ("The command gpusnap", *(each for each in SUBJECTS if each != "The command gpusnap"))


def markdown(found: Messages | None = None) -> str:
    """docs/errors.md."""
    found = found or error_messages.read(ROOT)
    return "\n".join(_markdown(found)) + "\n"


def uncured(found: Messages | None = None) -> tuple[str, ...]:
    """A sentence for each message that says nothing of what to do: it names the message, and the remedy."""
    found = found or error_messages.read(ROOT)
    return tuple(
        f"{each.module} says {each.template!r} ({each.kind}) and not what to do: give it a hint there, "
        f"or an entry under that very text in CURES of tools/docs/error_cures.py"
        for each in found.messages
        if not _cure(each, found)
    )


def unused(found: Messages | None = None) -> tuple[str, ...]:
    """The entries of CURES for which there is no message any more."""
    found = found or error_messages.read(ROOT)
    said = {bare(each.template) for each in found.messages}
    drivers = {_answer(kind) for kind in _driver_kinds()}
    return tuple(each for each in CURES if bare(each) not in said and each not in drivers)


def _cure(message: Message, found: Messages) -> str:
    """What to do, and why it is said where that takes more words; empty where nothing is known."""
    if (own := _OWN.get(bare(message.template))) is not None:
        return own
    if message.hints:
        return "; or: ".join(message.hints)
    if re.search("<reason>[^<>]{0,2}$", message.template):
        return "see the [reason](#reasons) at its end"
    kinds = [found.kinds.get(each) for each in found.ancestry(message.kind)]
    advice = next((text for each in kinds if each and (text := each.texts.get("advice"))), "")
    general = next((KINDS[kind] for kind in found.ancestry(message.kind) if kind in KINDS), "")
    if general:
        return general
    if re.search(r"<(error|said|sentence|why|err|what)>[^<>]{0,2}$", message.template):
        return "what stands last is the reason, in the words of what failed: put that right"
    return advice or _hint(message.kind)


def _classes() -> Mapping[str, type[Exception]]:
    """All classes of errors, by name."""
    for name in ("gpusnap.runtime_shim.gpu.cdi.spec", "gpusnap.operations.open", "gpusnap.hooks.errors"):
        importlib.import_module(name)
    known: list[type[Exception]] = [GpusnapError, OciError]
    for each in known:
        known += each.__subclasses__()
    return {each.__name__: each for each in known}


def _shown(kind: str) -> GpusnapError | None:
    """An error of that kind as the command gpusnap shows it; None for what is no error by itself."""
    made = _classes().get(kind)
    error = made("") if made is not None else None
    return (
        failure(error) if isinstance(error, OciError) else error if isinstance(error, GpusnapError) else None
    )


def _hint(kind: str) -> str:
    error = _shown(kind)
    return error.hint if error is not None else ""


# Markdown


def _markdown(found: Messages) -> Iterator[str]:
    by_subject: dict[str, list[Message]] = {title: [] for title in _ORDER}
    for message in found.messages:
        by_subject[_subject(message.module)].append(message)
    yield from ("# Every message", "", f"<!-- {_HEAD} -->", "", INTRODUCTION.strip(), "")
    yield from ("| | messages |", "|---|---:|")
    for title, messages in by_subject.items():
        yield f"| [{title}](#{_anchor(title)}) | {len(messages)} |"
    yield from ("", "## Reasons", "")
    yield "A sentence that ends in one of these has it from the kernel, of the file or call that it names."
    yield from ("", "| reason | what to do |", "|---|---|")
    yield from (f"| `{words}` | {_sentence(cure)} |" for words, cure in REASONS.items())
    for title, messages in by_subject.items():
        yield from ("", f"## {title}")
        if title == "The GPU's driver":
            yield from _driver()
        for kind in dict.fromkeys(each.kind for each in messages):
            yield from ("", _heading(kind, found), "", "| it says | why, and what to do |", "|---|---|")
            rows = (
                f"| `{_cell(each.template)}` | {_sentence(_shown_plainly(_cure(each, found)))} |"
                for each in messages
                if each.kind == kind
            )
            yield from dict.fromkeys(rows)


def _heading(kind: str, found: Messages) -> str:
    if kind in NAMES:
        return f"**{kind.strip('_')}**. {NAMES[kind]}"
    said = SENTENCES.get(kind) or (found.kinds[kind].sentence if kind in found.kinds else "")
    error = _shown(kind)
    code = f" (exit code {exit_code(error)})" if error is not None else ""
    return f"**{kind}**{code}. {_sentence(said.replace('`', ''))}"


def _driver() -> Iterator[str]:
    """The sentences that are put together from a number of the driver's: by kind, with the driver's words."""
    yield from (
        "",
        "What the driver answers becomes one of these sentences. `…` says what was asked of it: to lock, "
        "checkpoint, restore or unlock a process, or to start. NVML's begin with `NVML could not …`.",
        "",
        "| it says | the driver's own words | why, and what to do |",
        "|---|---|---|",
    )
    for kind in _driver_kinds():
        codes = [
            name for table in (CUDA_RESULTS, NVML_RESULTS) for name, known in table.values() if known is kind
        ]
        advice = (
            f"{(kind.__doc__ or '').splitlines()[0]} {_sentence(CURES.get(_answer(kind)) or kind.advice)}"
        )
        names = ", ".join(f"`{each}`" for each in dict.fromkeys(codes))
        yield f"| `{_answer(kind)}` | {names} | {_sentence(_cell(advice))} |"


def _driver_kinds() -> list[type[GpuError]]:
    found = {kind for table in (CUDA_RESULTS, NVML_RESULTS) for _, kind in table.values()}
    return sorted(found, key=lambda each: each.__name__)


def _answer(kind: type[GpuError]) -> str:
    return f"the GPU driver could not …: {kind.because}"


def _subject(module: str) -> str:
    return next(
        title
        for title, prefixes in SUBJECTS.items()
        if any(module == each or module.startswith(each) for each in prefixes)
    )


def _anchor(title: str) -> str:
    """The anchor that a heading has on GitHub."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _sentence(text: str) -> str:
    """With a capital letter at its beginning, unless that is a name, and a full stop at its end."""
    words = text.strip()
    first = words.split(" ", 1)[0]
    plain = first.isalpha() and first.islower() and first not in _PROGRAMS
    words = words[0].upper() + words[1:] if plain else words
    return words if not words or words.endswith((".", "!", "?")) else f"{words}."


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def _shown_plainly(text: str) -> str:
    """With angle brackets as text, but for those within backquotes."""
    parts = _cell(text).split("`")
    return "`".join(part if at % 2 else part.replace("<", "&lt;") for at, part in enumerate(parts))


def _told(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr)


def main() -> int:
    """Write the file; 1, and a sentence for each, where messages say nothing of what to do."""
    found = error_messages.read(ROOT)
    if missing := uncured(found):
        _told(missing)
        return 1
    path = ROOT / "docs" / "errors.md"
    path.write_text(markdown(found), "utf-8")
    _told([str(path)])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
