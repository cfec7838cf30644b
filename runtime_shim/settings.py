"""The settings: /etc/gpusnap/gpusnap.toml, and a container's io.gpusnap.* annotations on top of it.

Podman runs the runtime with an almost empty environment at checkpoint (libpod, CheckpointContainer), so there
is no environment variable for any of these. An annotation comes with the container, and after an import from
somebody's archive, so it can set only what grants nothing on this host: no program, no path, no mount.

setting_keys.py has the keys, and what each may be.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gpusnap.oci.base.dataclass import dataclass, field, replace
from gpusnap.runtime_shim.base.errors import SettingsError
from gpusnap.runtime_shim.gpu.api.gpu_map import GpuMap
from gpusnap.runtime_shim.runtime import find as locate
from gpusnap.runtime_shim.runtime.find import SETTINGS_FILE
from gpusnap.runtime_shim.setting_keys import TABLE

if TYPE_CHECKING:
    from gpusnap.oci.registry.pace import Limits

ANNOTATION_PREFIX = "io.gpusnap."

OF_THE_COMMAND = ("pre-checkpoint", "post-restore", "pre-suspend", "post-resume", "hook-timeout")
"""Annotations that are no settings: the command gpusnap reads them, before it asks an engine."""

_LARGEST = 1 << 20
_HINT = "correct it, then check it with gpusnap settings"


@dataclass(frozen=True, slots=True)
class Nvidia:
    """[nvidia]: how processes are suspended."""

    lock_timeout: float = 10.0
    """Seconds that a process may take to finish its current GPU work, or to return from vfork(2)."""
    allow_nccl: bool = False
    """Checkpoint processes that may share GPU memory through NCCL, which the driver cannot restore; and, with
    --leave-running, ranks whose GPUs another process uses, too."""
    driver: str = "native"
    """Who suspends the processes. native: gpusnap, by the driver's API. criu-plugin: CRIU's CUDA plugin."""
    libdir: str = ""
    """Directory of cuda_plugin.so; empty: where packages install it."""
    cuda_checkpoint: str = ""
    """NVIDIA's program that CRIU's CUDA plugin runs; empty: the one in PATH."""


@dataclass(frozen=True, slots=True)
class Amd:
    """[amd]: CRIU's plugin for AMD's GPUs, see criu-amdgpu-plugin(1)."""

    libdir: str = ""
    """Directory of amdgpu_plugin.so; empty: where packages install it."""
    skip_checks: tuple[str, ...] = ()
    """Properties that the plugin does not compare before it restores onto another GPU."""
    buffer: int = 0
    """Bytes of RAM that the plugin may take for copying GPU memory; 0: the size of the largest buffer."""


@dataclass(frozen=True, slots=True)
class Criu:
    """[criu]: options for CRIU, see criu(8)."""

    link_remap: bool = True
    """CRIU's link-remap: deleted files that are still linked elsewhere, such as POSIX semaphores."""
    ghost_limit: int = 300 << 20
    """Largest deleted but open file, in bytes, that CRIU includes, and that gpusnap includes from a pod's
    emptyDir or /dev/shm; PyTorch uses such files for shared memory. Also the most that gpusnap copies in all
    of the container's own files that are open for writing, if the container continues."""
    cut_files: bool = False
    """At a restore, cut files in volumes and directories of the host that processes have open for writing,
    and that have grown since the checkpoint. What was written to them since is lost. false: the restore is
    refused."""
    timeout: int = 60
    """Seconds that CRIU may take to stop the container's tasks."""
    skip_in_flight: bool = True
    """Leave out TCP connections that the container has not accepted yet; CRIU refuses them otherwise."""
    tcp_close: bool = True
    """Without --tcp-established, close open TCP connections at a restore; otherwise they are refused."""
    manage_cgroups: str = ""
    """How CRIU treats cgroups: ignore, soft, full, strict; empty: the runtime's default."""
    libdir: str = ""
    """Directory of CRIU's plugins."""
    action_script: str = ""
    """A script that CRIU runs at each of its stages."""
    external: tuple[str, ...] = ()
    """Resources to declare to CRIU as external, such as "mnt[/data]:data"."""
    options: tuple[str, ...] = ()
    """More lines for CRIU's configuration file, as they are, such as "network-lock nftables"."""


@dataclass(frozen=True, slots=True)
class Memory:
    """[memory]: how the GPUs' memory travels."""

    pages: str = "chunks"
    """Where GPU memory is written. chunks: next to CRIU's images, in several threads, as chunks of an OCI
    layout. store: to this host's store instead, with CRIU's pages. criu: to CRIU's own images."""
    chunk_size: int = 8 << 20
    """Bytes of a chunk."""
    level: int = 1
    """zstd's level for chunks, 1 to 19; 0 does not compress. Planes of numbers do not depend on it."""
    ceiling: int = 0
    """Bytes of RAM that gpusnap may use, including the memory that it stages. 0: it stages what the driver
    would have put into the process, and uses at most a quarter of the available RAM for chunks."""
    threads: int = 0
    """Threads that copy, compress and check; 0: one for each core. At most 4 of them fill memory while CRIU
    restores."""
    demand_paging: bool = True
    """Let the driver start restoring before all memory has been read, if the kernel supports it."""
    parallel_restore: bool = True
    """Write large private memory of the processes in many threads while CRIU waits; CRIU itself uses one.
    It has no effect if memory.ceiling is set."""
    sync: bool = True
    """Flush the checkpoint to disk before it is reported as complete; otherwise a host crash may lose it."""
    keep: bool = True
    """Keep the chunks of a container that continues after its checkpoint, for its next one."""
    keep_folder: str = "/var/lib/gpusnap/kept"
    """Where they are kept; must be on the same file system as the checkpoints' images."""


@dataclass(frozen=True, slots=True)
class Store:
    """[store]: where checkpoints are kept as OCI artifacts."""

    path: str = "/var/lib/gpusnap"
    """Directory of this host's store."""
    pull_from: tuple[str, ...] = ()
    """Repositories that a restore may fetch missing chunks from, in this order: host[:port]/name, with
    http:// before it for a registry without TLS."""
    read_rate: int = 0
    """Bytes per second that the store's disk delivers; 0: what earlier restores from it have measured. It
    decides which encoding of a new chunk makes a restore shortest."""


@dataclass(frozen=True, slots=True)
class Suspend:
    """[suspend]: containers whose GPU memory is kept in RAM."""

    ram: int = 0
    """Bytes of RAM for the GPU memory of all suspended containers together; 0: as much as is available."""
    over: str = "refuse"
    """What to do if a suspend does not fit into suspend.ram, or into the available RAM if that is 0. refuse:
    refuse it. spill: write the GPU memory that was suspended first to the store."""


@dataclass(frozen=True, slots=True)
class Registry:
    """[registry]: how slow a registry may be, before a connection to it is given up and made anew."""

    timeout: float = 60.0
    """Seconds that a registry may be silent or too slow, and may take to start a response; at least 180 at
    the end of an upload."""
    minimum_speed: int = 1024
    """Minimum average transfer rate in bytes per second, over registry.timeout; 0: one byte is enough."""

    @property
    def limits(self) -> Limits:
        """The same for gpusnap.oci.registry.repository."""
        from gpusnap.oci.registry.pace import Limits

        return Limits(self.timeout, self.minimum_speed)


@dataclass(frozen=True, slots=True)
class Metrics:
    """[metrics]: what the command gpusnap records of its checkpoints and restores."""

    textfile: str = ""
    """Directory for gpusnap.prom, read by node_exporter's textfile collector; empty: not written."""
    journal: bool = False
    """Write a line of JSON for each checkpoint and restore to the system's log."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings, with their defaults."""

    runtime: str = ""
    """The real runtime, a name or an absolute path; empty: the one that created the container, else crun
    before runc, and under containerd and CRI-O runc before crun."""
    retries: int = 3
    """How often a dump is retried if a process started to use a GPU in the meantime."""
    gpu_map: GpuMap = ()
    """Which of this host's GPUs replace which GPUs of a checkpoint; the others are assigned automatically."""
    keep_names: bool = False
    """Keep the old names of device nodes after a restore onto other GPUs, in addition to the new ones."""
    hooks: tuple[str, ...] = ("update-ldcache", "create-symlinks")
    """NVIDIA's createContainer hooks to run again if a restore uses other driver libraries."""
    nvidia: Nvidia = field(default_factory=Nvidia)
    amd: Amd = field(default_factory=Amd)
    memory: Memory = field(default_factory=Memory)
    criu: Criu = field(default_factory=Criu)
    registry: Registry = field(default_factory=Registry)
    suspend: Suspend = field(default_factory=Suspend)
    store: Store = field(default_factory=Store)
    metrics: Metrics = field(default_factory=Metrics)


def load(path: str = SETTINGS_FILE) -> Settings:
    """Read the settings file; without one, the defaults. Raises SettingsError that names key and file."""
    data = locate.content(path, _LARGEST + 1)
    settings = _apply(Settings(), _values(data, path), path)
    if data is not None and locate.parse_setting(data, path) != settings.runtime:
        # What stops and removes containers reads no TOML; see locate.written.
        raise SettingsError(
            f"runtime in {path} is written in a form that only checkpoint and restore understand",
            hint='write it on one line, before all other settings: runtime = "NAME"',
        )
    return settings


def load_only(key: str, path: str = SETTINGS_FILE) -> tuple[Settings, tuple[SettingsError, ...]]:
    """The settings for what needs one key alone, and what is wrong with the others, which have defaults.

    Raises SettingsError if the file is no TOML, the key's value is wrong, or the key may be meant by
    another one.
    """
    settings, wrong = Settings(), list[SettingsError]()
    meant = (key, f"[{key.partition('.')[0]}]")
    for name, value in _values(locate.content(path, _LARGEST + 1), path).items():
        try:
            settings = _apply(settings, {name: value}, path)
        except SettingsError as error:
            if name == key or any(each in meant for each in _list_near(name)):
                raise
            wrong.append(error)
    return settings, tuple(wrong)


def _values(data: bytes | None, path: str) -> dict[str, Any]:
    """What a file has, by whole names; an unknown table as "[NAME]". Raises SettingsError."""
    if data is None:
        return {}
    if len(data) > _LARGEST:
        raise SettingsError(f"the settings file {path} is larger than {_LARGEST >> 20} MiB", hint=_HINT)
    try:
        document = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"the settings file {path} is not TOML: {error}", hint=_HINT) from error
    values: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            known = any(key.startswith(f"{name}.") for key in TABLE)
            values |= dict(_iterate_dotted(name, value)) if known else {f"[{name}]": value}
        else:
            values[name] = value
    return values


def load_usable() -> Settings:
    """This host's settings, whose real runtime is there. Raises SettingsError."""
    settings = load()
    if settings.runtime:
        locate.find(settings.runtime)
    return settings


def _iterate_dotted(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The keys of a table and those below it, such as [store] with memory.level, each with its whole name."""
    for key, value in table.items():
        name = f"{prefix}.{key}"
        if isinstance(value, dict) and name not in TABLE:
            yield from _iterate_dotted(name, value)
        else:
            yield name, value


def apply_annotations(settings: Settings, annotations: Mapping[str, str]) -> Settings:
    """The settings with a container's io.gpusnap.* annotations on top.

    Raises SettingsError for an unknown key, a bad value, and for a key that only the host's file may set.
    """
    own = {
        name.removeprefix(ANNOTATION_PREFIX): value
        for name, value in annotations.items()
        if name.startswith(ANNOTATION_PREFIX) and name.removeprefix(ANNOTATION_PREFIX) not in OF_THE_COMMAND
    }
    for name in own:
        if name in TABLE and not TABLE[name].annotation:
            raise SettingsError(
                f"the annotation {ANNOTATION_PREFIX}{name} cannot be set by a container",
                hint=f"set {name} in {SETTINGS_FILE}",
            )
    return _apply(settings, own, "an annotation", prefix=ANNOTATION_PREFIX)


_ALL = f"the settings are {', '.join(sorted(TABLE))}"


def _make_unknown_error(name: str, where: str) -> SettingsError:
    table, _, rest = name.partition(".")
    if rest in TABLE and any(key.startswith(f"{table}.") for key in TABLE):
        hint = (
            f"it is below [{table}], and therefore belongs to that table: write {rest} above the first [...]"
        )
    elif (meant := _find_misspelt_below(name)) is not None:
        hint = (
            f"did you mean {meant}? It is below [{table}], and therefore belongs to that table: write "
            f"{meant} above the first [...]"
        )
    else:
        near = _list_near(name.removeprefix(ANNOTATION_PREFIX))
        hint = f"did you mean {near[0]}? See docs/settings.md for all settings" if near else _ALL
    return SettingsError(f"unknown setting {name} in {where}", hint=hint)


def _find_misspelt_below(name: str) -> str | None:
    """The key that `name`, below a [table], is a misspelling of, and that belongs to no table."""
    table, _, rest = name.partition(".")
    if not any(key.startswith(f"{table}.") for key in TABLE) or _list_closest(name, TABLE):
        return None
    return next(iter(_list_closest(rest, [key for key in TABLE if "." not in key])), None)


def _list_closest(name: str, keys: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name.lower().replace("_", "-"), list(keys), cutoff=0.8)


def _list_near(name: str) -> list[str]:
    """Keys, or tables for a [table], that may be meant by a name that is none, the nearest first."""
    if name.startswith("["):
        tables = dict.fromkeys(f"[{key.partition('.')[0]}]" for key in TABLE if "." in key)
        return difflib.get_close_matches(name, tables)
    plain = name.lower().replace("_", "-")
    # A key that stands below another table, or below none.
    last = plain.rpartition(".")[2]
    same = [key for key in TABLE if key.rpartition(".")[2] == last]
    return [*_list_closest(name, TABLE), *same, *difflib.get_close_matches(plain, TABLE)]


def _apply(settings: Settings, values: Mapping[str, Any], where: str, prefix: str = "") -> Settings:
    for name, value in values.items():
        if name not in TABLE:
            raise _make_unknown_error(prefix + name, where)
        try:
            checked = TABLE[name].check(TABLE[name].parse(value) if prefix else value)
        except ValueError as error:
            said = f"{prefix}{name} in {where} is {value!r}; it must be {error}"
            if not prefix and isinstance(value, str) and TABLE[name].parse(value) != value:
                said += ", without quotes"
            raise SettingsError(said, hint="" if prefix else _HINT) from None
        section, _, key = name.rpartition(".")
        changes = {key.replace("-", "_"): checked}
        if section:
            changes = {section: replace(getattr(settings, section), **changes)}
        settings = replace(settings, **changes)
    return settings
