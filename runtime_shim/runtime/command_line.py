"""The command lines of checkpoint and restore, read and written.

`parse` reads a line as Podman, conmon, containerd, CRI-O and people write it: global options first; then
options before or after the container's ID, with one dash or two, `--opt value` or `--opt=value`, any of them
more than once (the last one counts, lists are appended), and `--flag=false` as in Go programs. An unknown
option is an error and is never passed on: if options of a restore were misread, the container would come back
without its GPU.

`render` writes the line for one real runtime, with the tables of options.py. To change a call, change its
fields with `replace` and render it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpusnap.oci.base.dataclass import dataclass, field
from gpusnap.runtime_shim.base.errors import UsageError
from gpusnap.runtime_shim.runtime import options
from gpusnap.runtime_shim.runtime.command_line_words import FALSE, HELP
from gpusnap.runtime_shim.runtime.find import SETTINGS_FILE
from gpusnap.runtime_shim.runtime.identify import RealRuntime
from gpusnap.runtime_shim.runtime.options import Option, Takes

_TRUE = ("1", "t", "T", "TRUE", "true", "True")  # strconv.ParseBool, as FALSE


@dataclass(frozen=True, slots=True)
class Globals:
    """The options before the command; None if not given."""

    root: str | None = None
    log: str | None = None
    log_format: str | None = None
    log_level: str | None = None
    debug: bool = False
    systemd_cgroup: bool = False
    cgroup_manager: str | None = None
    rootless: str | None = None
    criu: str | None = None
    raw: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """The words as given; render() does not use them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The common part of checkpoint and restore. Paths as given; None if not given."""

    container_id: str
    globals: Globals = field(default_factory=Globals)
    image_path: str | None = None
    work_path: str | None = None
    parent_path: str | None = None
    tcp_established: bool = False
    ext_unix_sk: bool = False
    shell_job: bool = False
    file_locks: bool = False
    manage_cgroups_mode: str | None = None
    network_lock: str | None = None
    lazy_pages: bool = False
    auto_dedup: bool = False
    empty_ns: tuple[str, ...] = ()


def _make_absolute(path: str) -> Path:
    """Return a path as seen from the current directory, which an engine may have removed meanwhile.

    Raises OSError if it was removed and the path is relative.
    """
    return Path(path) if path.startswith("/") else Path.cwd() / path


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCall(Call):
    """`checkpoint [options] ID`."""

    pre_dump: bool = False
    leave_running: bool = False
    tcp_skip_in_flight: bool = False
    link_remap: bool = False
    status_fd: int | None = None
    page_server: str | None = None

    def images(self) -> Path:
        """The image directory, absolute: by default `checkpoint` in the current directory."""
        return _make_absolute(self.image_path or "checkpoint")

    def work(self) -> Path | None:
        """The directory for CRIU's logs, absolute; None for the runtime's default."""
        return _make_absolute(self.work_path) if self.work_path else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreCall(Call):
    """`restore [options] ID`."""

    bundle: str | None = None
    detach: bool = False
    pid_file: str | None = None
    console_socket: str | None = None
    tcp_close: bool = False
    lsm_profile: str | None = None
    lsm_mount_context: str | None = None
    no_subreaper: bool = False
    no_pivot: bool = False
    no_new_keyring: bool = False
    preserve_fds: int | None = None
    gpu_map: str | None = None
    """Which of this host's GPUs replace which: "0=3,1=2"; gpusnap's own option."""

    def bundle_dir(self) -> Path:
        """The bundle, absolute; the current directory by default."""
        return _make_absolute(self.bundle or "")

    def images(self, kind: str = "runc") -> Path:
        """The image directory, absolute, as a runtime of that kind finds it.

        Both runtimes change to the bundle before they open it, so a relative path starts there. The default
        is `checkpoint`: for runc in the current directory, determined before it changes
        (getDefaultImagePath); for crun in the bundle (src/restore.c).
        """
        if self.image_path or kind == "crun":
            return self.bundle_dir() / (self.image_path or "checkpoint")
        return _make_absolute("checkpoint")

    def work(self) -> Path | None:
        """The directory for CRIU's logs, absolute; None for the runtime's default."""
        return self.bundle_dir() / self.work_path if self.work_path else None


def parse(args: Sequence[str]) -> CheckpointCall | RestoreCall:
    """Read a command line without the program's name. Raises UsageError that names option and command."""
    given, rest = _read(args, options.GLOBAL, "gpusnap-runtime", before_command=True)
    shared = Globals(**given, raw=tuple(args[: len(args) - len(rest)]))
    command = rest[0] if rest else ""
    if command not in ("checkpoint", "restore"):
        raise UsageError(f"{command!r} is neither checkpoint nor restore")
    checkpoint = command == "checkpoint"
    values, names = _read(rest[1:], options.CHECKPOINT if checkpoint else options.RESTORE, command)
    if not names or not names[0]:
        raise UsageError(f"{command} was given no container ID", hint="put it after the options")
    if len(names) > 1:
        raise UsageError(f"{command} takes one container ID but was given {' '.join(map(repr, names))}")
    if checkpoint:
        return CheckpointCall(container_id=names[0], globals=shared, **values)
    return RestoreCall(container_id=names[0], globals=shared, **values)


def _read(
    words: Sequence[str], known: tuple[Option, ...], command: str, *, before_command: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Return the values by field, and the other words; before the command, all words from the command on."""
    table = options.table(known)
    values: dict[str, Any] = {}
    plain: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            return values, plain + left
        if word == "-" or not word.startswith("-"):
            if before_command:
                return values, [word, *left]
            plain.append(word)
            continue
        name, equals, text = word.removeprefix("-").removeprefix("-").partition("=")
        option = table.get(name)
        if option is None:
            raise UsageError(
                f"{command} has no option {word.partition('=')[0]}",
                hint="omit it, or report it if a runtime has it: gpusnap does not know what it means "
                "for a GPU",
                code="GPS-101",
            )
        if option.takes is not Takes.NOTHING and not equals:
            if not left:
                raise UsageError(f"{command} option --{option.name} requires an argument")
            text = left.pop(0)
        _store(values, option, text if equals or option.takes is not Takes.NOTHING else "true", command)
    return values, plain


def _store(values: dict[str, Any], option: Option, text: str, command: str) -> None:
    wanted = ""
    if option.takes is Takes.NOTHING:
        values[option.field] = text in _TRUE
        wanted = "" if text in _TRUE or text in FALSE else "true or false"
    elif option.takes is Takes.NUMBER:
        wanted = "" if re.fullmatch(r"-?[0-9]{1,9}", text) else "a whole number"
        values[option.field] = None if wanted or int(text) == option.idle else int(text)
    elif option.takes is Takes.LIST:
        values[option.field] = (*values.get(option.field, ()), text)
    else:
        wanted = (
            "one of " + ", ".join(option.choices) if option.choices and text not in option.choices else ""
        )
        values[option.field] = text
    if wanted:
        raise UsageError(f"{command} option --{option.name} is {text!r}; it must be {wanted}")


def probe(args: Sequence[str], at: int) -> list[str] | None:
    """Return the line for the real runtime if this one, whose command is at `at`, is only a question to it.

    Podman asks `checkpoint --help` (exit code 0) and `restore --lsm-mount-context` (the text "flag needs an
    argument" of runc or "requires an argument" of crun); libpod, pkg/checkpoint/crutils. The line is cut
    after the option in question, because crun takes options only before the ID: with `checkpoint ID --help`
    it would make a checkpoint.
    """
    command = args[at]
    table = options.table(options.CHECKPOINT if command == "checkpoint" else options.RESTORE)
    left = list(args[at + 1 :])
    while left:
        word = left.pop(0)
        if word == "--":
            return None
        if word == "-" or not word.startswith("-"):
            continue
        name, equals, _ = word.removeprefix("-").removeprefix("-").partition("=")
        if name in HELP and not equals:
            return [*args[: at + 1], word]
        option = table.get(name)
        if option is None or option.takes is Takes.NOTHING or equals:
            continue
        if left:
            left.pop(0)
        elif option.name != "network-lock":  # crun would read beyond its arguments and crash
            return [*args[: at + 1], word]
    return None


def render(call: CheckpointCall | RestoreCall, runtime: RealRuntime) -> list[str]:
    """Return the line for the real runtime, its path first.

    Every value is a separate word and the ID comes last, as crun requires. Raises UsageError for an option
    that this runtime does not support and that cannot be omitted.
    """
    checkpoint = isinstance(call, CheckpointCall)
    command = "checkpoint" if checkpoint else "restore"
    words = _words(call, options.CHECKPOINT if checkpoint else options.RESTORE, runtime, command)
    end = ["--"] if call.container_id.startswith("-") else []
    return [*render_globals(call.globals, runtime), command, *words, *end, call.container_id]


def render_globals(shared: Globals, runtime: RealRuntime) -> list[str]:
    """Return the real runtime's path and its global options, for before the command. Raises UsageError."""
    return [str(runtime.path), *_words(shared, options.GLOBAL, runtime, "")]


def _words(
    source: Call | Globals, known: tuple[Option, ...], runtime: RealRuntime, command: str
) -> list[str]:
    words: list[str] = []
    for option in known:
        value = getattr(source, option.field)
        if value is None or value is False or value == () or value == option.idle:
            continue
        rule = option.rule(runtime.kind)
        if not rule.takes(runtime.version, str(value)):
            if rule.drop:
                continue
            raise _refusal(option, value, runtime, command)
        if option.takes is Takes.NOTHING:
            words.append(f"--{option.name}")
        else:
            for each in value if isinstance(value, tuple) else (value,):
                words += [f"--{option.name}", str(each)]
    return words


def _refusal(option: Option, value: Any, runtime: RealRuntime, command: str) -> UsageError:
    rule = option.rule(runtime.kind)
    text = " ".join(value) if isinstance(value, tuple) else value
    given = f"--{option.name}" if value is True else f"--{option.name} {text}"
    first = rule.values.get(str(value), rule.since)
    came = f" (added in {runtime.kind} {'.'.join(map(str, first))})" if first else ""
    hint = f"omit it, or set runtime in {SETTINGS_FILE} to a runtime that has it"
    if option.criu:
        line = option.criu if value is True else f"{option.criu} {value}"
        hint = f'omit it, or add "{line}" to criu.options in {SETTINGS_FILE}'
    where = f" for {command}" if command else ""
    return UsageError(f"{runtime.name} takes no {given}{where}{came}", hint=hint, code="GPS-101")
