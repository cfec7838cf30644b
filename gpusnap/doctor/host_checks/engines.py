"""Container engines and their configuration: the real runtime, gpusnap-runtime, Podman, containerd, CRI-O."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gpusnap.doctor.base.check import Check, failure, make_refused, ok, warning
from gpusnap.doctor.base.sources import ask, join_root, program, toml, version
from gpusnap.engines.install.containerd import CONFIG, FRAGMENT
from gpusnap.engines.install.containerd import files as containerd_files
from gpusnap.engines.install.hooks import takes_annotation
from gpusnap.runtime_shim._version import __version__
from gpusnap.runtime_shim.base.errors import GpusnapError
from gpusnap.runtime_shim.runtime.child_process import Finished
from gpusnap.runtime_shim.runtime.find import RUNC_ROOTS
from gpusnap.runtime_shim.runtime.identify import RealRuntime, identify
from gpusnap.runtime_shim.runtime.identify import find as find_runtime
from gpusnap.runtime_shim.shim.entry import CHECK
from gpusnap.runtime_shim.snapshot.preflight import checks as preflight

_OURS = "gpusnap-runtime"
# containers.conf(5): later files win; the folders' files by name.
_PODMAN = ("/usr/share/containers/containers.conf", "/etc/containers/containers.conf")
_CRIO = ("/etc/crio/crio.conf",)
_FOLDERS = {
    "Podman": ("/usr/share/containers/containers.conf.d", "/etc/containers/containers.conf.d"),
    "CRI-O": ("/usr/share/crio/crio.conf.d", "/etc/crio/crio.conf.d"),
}
_FILES = {"Podman": _PODMAN, "CRI-O": _CRIO}
_PROGRAMS = {"Podman": "podman", "containerd": "containerd", "CRI-O": "crio"}

Find = Callable[[str], str | None]
Run = Callable[[list[str]], Finished | None]


def find_real_runtime(wanted: str) -> RealRuntime:
    """Return the real runtime by the setting, or crun, or runc. Raises GpusnapError."""
    return identify(find_runtime(wanted))


def check_runtimes(wanted: str, criu: str) -> Iterator[Check]:
    """Check the real runtime: which it is, whether it can checkpoint, and how CRIU is configured."""
    try:
        real = find_real_runtime(wanted)
    except GpusnapError as error:
        yield make_refused("runtime", error)
        return
    facts: dict[str, Any] = {
        "path": str(real.path),
        "kind": real.kind,
        "version": real.version_text,
        "criu": real.has_criu,
        "takes_org_criu_config": takes_annotation(real, criu),
    }
    if not real.has_criu:
        yield failure(
            "runtime",
            f"{real.name} ({real.path}) was built without CRIU",
            "install a crun with +CRIU in crun --version, or runc, and set runtime in the settings to it",
            **facts,
        )
    elif (lacking := _check_library(real)) is not None:
        yield make_refused("runtime", lacking, **facts)
    elif real.kind == "other":
        yield warning(
            "runtime",
            f"{real.path} is neither crun nor runc, and is untested with gpusnap",
            "set runtime in the settings to crun or runc",
            **facts,
        )
    else:
        road = "also by org.criu.config" if facts["takes_org_criu_config"] else "not by org.criu.config"
        says = f"{real.name} ({real.path}); CRIU is configured with CRIU_CONFIG_FILE, {road}"
        yield ok("runtime", says, **facts)


def check_cri(wanted: str, root: str = "/", *, find: Find = program) -> Iterator[Check]:
    """If containerd or CRI-O use gpusnap, check that runc runs their containers; crun restores less."""
    here = [name for name in ("containerd", "CRI-O") if _list_known(name, root, find)]
    if not here:
        return
    real = identify(find_runtime(wanted, root=RUNC_ROOTS[0]))
    if real.kind != "crun":
        yield ok("runtime under CRI", f"{real.name} ({real.path})", path=str(real.path), kind=real.kind)
        return
    yield warning(
        "runtime under CRI",
        f"{real.name} ({real.path}) runs the containers of {' and '.join(here)}; containers that it "
        "restores there lose their TCP connections and keep the hostname of their old pod",
        "remove runtime from the settings" if wanted and find("runc") else "install runc",
        path=str(real.path),
        kind=real.kind,
    )


def _check_library(real: RealRuntime) -> GpusnapError | None:
    try:
        preflight.check_criu_library(real)
    except GpusnapError as error:
        return error
    return None


def check_launcher(root: str = "/", *, find: Find = program) -> Iterator[Check]:
    """Check gpusnap-runtime: the files in the engines' configuration, or else the one found by name."""
    path, named = find(_OURS), _list_configured(root, find)
    gone = [each for each in named if each.startswith("/") and not os.path.lexists(join_root(root, each))]
    if gone:
        yield failure(
            _OURS,
            f"an engine's configuration names {gone[0]}, which does not exist",
            "run gpusnap install, or give the full path of gpusnap-runtime",
            path=gone[0],
        )
    elif named:
        yield ok(_OURS, f"{', '.join(named)} in the engines' configuration", path=named[0])
    elif path is None:
        yield failure(
            _OURS,
            "gpusnap-runtime is neither in PATH nor in the system directories",
            "run gpusnap install, or give Podman and containerd its full path",
        )
    else:
        yield ok(
            _OURS, f"{path}, found in this command's PATH: no engine's configuration names one", path=path
        )


def check_complete(root: str = "/", *, find: Find = program, run: Run = ask) -> Iterator[Check]:
    """Check that gpusnap-runtime finds all of gpusnap when an engine starts it: with its own interpreter, and
    with no more environment than Podman gives it (libpod, CheckpointContainer)."""
    path = find(_OURS)
    for each in _list_configured(root, find) or ([path] if path else []):
        if not os.path.lexists(join_root(root, each)):
            continue  # `check_launcher` reports it
        alone = ["env", "-i", f"PATH={os.environ.get('PATH', os.defpath)}"]
        done, said = run([*alone, each, *CHECK]), run([*alone, each, "--version"])
        yield _judge_answer(each, done, said.out if said is not None else "")


def _judge_answer(path: str, done: Finished | None, versions: str) -> Check:
    again = "reinstall gpusnap where the engines find it, then run gpusnap install"
    if done is None:
        return failure("gpusnap's parts", f"{path} does not respond", again, path=path)
    told = (done.err.strip().splitlines() or ["nothing"])[-1]
    if done.code and CHECK[1] in told:
        says = f"{path} is from another version of gpusnap than this one, {__version__}"
        return failure("gpusnap's parts", says, again, path=path)
    if done.code:
        says = f"{path} cannot checkpoint or restore anything: {told.removeprefix('gpusnap: ')}"
        return failure("gpusnap's parts", says, again, path=path)
    number, _, interpreter = done.out.strip().partition(" ")
    facts = {"path": path, "version": number, "interpreter": interpreter}
    launcher = (versions.strip().splitlines() or [""])[-1].removeprefix(f"{_OURS} version ")
    others = sorted({each for each in (number, launcher) if each and each != __version__})
    if others:
        says = f"{path} is gpusnap {' and '.join(others)}, this command {__version__}"
        return warning("gpusnap's parts", says, "run gpusnap install again", **facts)
    return ok("gpusnap's parts", f"{path}, with {interpreter}, has all modules that it imports", **facts)


def _list_configured(root: str, find: Find) -> list[str]:
    """Return the paths of gpusnap-runtime in the configuration of the installed engines."""
    return sorted({path for name in _PROGRAMS for path in _list_known(name, root, find)})


def _list_known(name: str, root: str, find: Find) -> set[str]:
    """Return the paths of gpusnap-runtime in an engine's configuration; empty if that is not installed."""
    found = set[str]()
    if find(_PROGRAMS[name]) is not None:
        # A file that is no TOML is reported by `check_registered`.
        with suppress(ValueError):
            documents = _containerds(root) if name == "containerd" else _documents(root, name)
            found |= {path for each in documents for _, path in _entries(each, root)}
    return found


def check_engines(*, find: Find = program, run: Run = ask) -> Iterator[Check]:
    """Report the versions of Podman, containerd and CRI-O, as far as they are installed."""
    here = False
    for name, word in _PROGRAMS.items():
        path = find(word)
        if path is None:
            continue
        here = True
        done = run([path, "--version"])
        numbers = ".".join(map(str, version(done.out))) if done is not None and not done.code else ""
        if numbers:
            yield ok(name, f"{name} {numbers} ({path})", path=path, version=numbers)
        else:
            todo = f"run {word} --version"
            yield warning(name, f"{path} exists, but does not report its version", todo, path=path)
    if not here:
        yield failure(
            "engines", "Podman, containerd and CRI-O are not installed", "install Podman or containerd"
        )


def check_registered(root: str = "/", *, find: Find = program) -> Iterator[Check]:
    """Report which engines have gpusnap-runtime in their configuration, under which names.

    One line says which have it; another, which step `gpusnap install` left to the user for containerd.
    """
    here = [name for name, word in _PROGRAMS.items() if find(word) is not None]
    known: dict[str, list[str]] = {}
    for name in here:
        documents = _containerds(root) if name == "containerd" else _documents(root, name)
        for document in documents:
            known.setdefault(name, []).extend(key for key, _ in _entries(document, root))
    found = {name: sorted(set(names)) for name, names in known.items() if names}
    without = [name for name in here if name not in found]
    if not here:
        return
    unfinished = "containerd" in without and os.path.exists(join_root(root, FRAGMENT))
    if found:
        each = "; ".join(f"{name} as {', '.join(names)}" for name, names in found.items())
        others = [name for name in without if not unfinished or name != "containerd"]
        how = " ".join(f"--{_PROGRAMS[name]}" for name in others)
        but = f"; not for {' and '.join(others)} (to add it: gpusnap install {how})" if others else ""
        yield ok("registered", f"gpusnap is configured for {each}{but}", runtimes=found, without=without)
    if unfinished:
        yield warning(
            "registered",
            "gpusnap is not in containerd's configuration: gpusnap install does not change your "
            f"{CONFIG}, and wrote the lines to {FRAGMENT}",
            f"run cat {FRAGMENT} >>{CONFIG}, and restart containerd",
            runtimes=found,
            without=without,
        )
    elif not found:
        yield warning(
            "registered",
            f"gpusnap is not in the configuration of {' and '.join(here)}",
            f"run gpusnap install, or name it each time: podman --runtime PATH/{_OURS}, ctr run "
            f"--runc-binary PATH/{_OURS}",
            runtimes={},
            without=without,
        )


def _configuration(root: str, engine: str) -> Iterator[str]:
    yield from _FILES[engine]
    for folder in _FOLDERS[engine]:
        try:
            names = sorted(os.listdir(join_root(root, folder)))
        except OSError:
            continue
        yield from (
            f"{folder}/{name}" for name in names if name.endswith((".conf", ".toml")) or "." not in name
        )


def _documents(root: str, engine: str) -> Iterator[Mapping[str, Any]]:
    yield from (toml(root, path) for path in _configuration(root, engine))


def _containerds(root: str) -> Iterator[Mapping[str, Any]]:
    """Yield containerd's file and its imports, and their imports."""
    yield from (toml(root, path) for path in containerd_files(root))


def _entries(document: Mapping[str, Any], root: str, above: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield the names under which a document has gpusnap-runtime, with its paths.

    Podman: engine.runtimes.NAME = [paths], engine.runtime. containerd: ….runtimes.NAME.options.BinaryName.
    CRI-O: crio.runtime.runtimes.NAME.runtime_path.
    """
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _entries(value, root, (*above, key))
        elif isinstance(value, str | list):
            ours = [each for each in _texts(value) if _is_ours(each, root)]
            place = (*above, key)
            if ours and place == ("engine", "runtime"):
                yield "default", ours[0]
            elif ours and "runtimes" in above:  # and not runtime_supports_json and the like
                yield place[place.index("runtimes") + 1], ours[0]


def _texts(value: str | list[Any]) -> list[str]:
    return [value] if isinstance(value, str) else [each for each in value if isinstance(each, str)]


def _is_ours(path: str, root: str) -> bool:
    """Return whether it is ours by its own name, or by that of a runtime it replaces."""
    if os.path.basename(path) == _OURS:
        return True
    return path.startswith("/") and os.path.basename(os.path.realpath(join_root(root, path))) == _OURS
