"""Private names stay in their modules, and each layer imports only what is below it."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import gpusnap
from gpusnap.cli.main import MODULES as MODULES_OF_COMMANDS
from gpusnap.oci.base import dataclass, patterns

ROOT = Path(__file__).parents[3]
# From the top down; a module may import from its own layer and from those below.
LAYERS = ["gpusnap", "gpusnap.hooks", "gpusnap.runtime_shim", "gpusnap.oci"]
# Directories at the top of the repository; each is imported by the link to it in gpusnap/ alone.
LINKED = ("hooks", "oci", "runtime_shim")
_ANY = "|".join(LINKED)
# `import oci`, `from oci.tar import archive`, also in a program within a string; and oci.tar.archive.
BARE_IMPORT = re.compile(rf"(?<![\w.])(?:from ({_ANY})(?:\.\w+)* import|(?<!\w )import ({_ANY}))(?![\w/-])")
BARE_NAME = re.compile(rf"(?<![\w./\\-])({_ANY})\.([a-z_]\w*)")
TEXTS = (".py", ".sh", ".toml", ".ini", ".yaml", ".yml", ".in", ".md", ".1")
# Of what is outside of them, these need no more than COMMON.
SELF_CONTAINED = (
    "gpusnap.runtime_shim.gpu",
    "gpusnap.runtime_shim.process.memory",
    "gpusnap.runtime_shim.process.ptrace",
)
COMMON = {
    "gpusnap.oci.base.dataclass",
    "gpusnap.oci.base.files",
    "gpusnap.oci.base.json_text",
    "gpusnap.oci.base.patterns",
    "gpusnap.runtime_shim.base.deadlines",
    "gpusnap.runtime_shim.base.errors",
    "gpusnap.runtime_shim.process.proc",
    "gpusnap.runtime_shim.base.question_process",
    "gpusnap.runtime_shim.base.stop_signals",
    "gpusnap.runtime_shim.base.threads",
    "gpusnap.runtime_shim.base.units",
}
TRACING = "gpusnap.runtime_shim.process.ptrace"
# By click.
CALLED_BY_OTHERS = {
    "gpusnap.cli.completion.Bash",
    "gpusnap.cli.completion.get_completion_args",
    "gpusnap.cli.group.format_commands",
}
HEAVY = (
    "argparse",
    "tomllib",
    "json",
    "ctypes",
    "jsonschema",
    "dataclasses",
    "re",
    "typing",
    "subprocess",
    "pathlib",
)


def modules() -> Iterator[str]:
    yield "gpusnap"
    for found in pkgutil.walk_packages(gpusnap.__path__, "gpusnap."):
        yield found.name


MODULES = sorted(modules())
PACKAGES = {name for name in MODULES if hasattr(importlib.import_module(name), "__path__")}


class Source(NamedTuple):
    """What is asked of a module here: read once, and much smaller than its syntax tree."""

    imported: frozenset[str]
    """Every module that it imports, anywhere in it."""
    imported_at_once: frozenset[str]
    """What is imported with it, and not later in a function."""
    private: tuple[str, ...]
    """Names with an underscore that it imports from modules of ours."""
    mentioned: frozenset[str]
    """Every name that is read in it, or imported by it."""
    attributes: frozenset[str]
    """Every name behind a dot in it."""
    defined: frozenset[str]
    """Its functions, methods and classes."""


@functools.cache
def source(name: str) -> Source:
    """Read a module."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    module = ast.parse(Path(spec.origin).read_text("utf-8"))
    nodes = [*ast.walk(module)]
    at_once = ast.Module([node for node in module.body if not isinstance(node, ast.FunctionDef)], [])
    attributes = frozenset(node.attr for node in nodes if isinstance(node, ast.Attribute))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return Source(
        imported=imported(nodes),
        imported_at_once=imported(ast.walk(at_once)),
        private=tuple(private(nodes)),
        mentioned=attributes | names | {node.name for node in nodes if isinstance(node, ast.alias)},
        attributes=attributes,
        defined=frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)),
    )


def imported(nodes: Iterable[ast.AST]) -> frozenset[str]:
    """Every module that these nodes import."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in inner}
    return frozenset(found)


def private(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names with an underscore that these nodes import from modules of ours, as MODULE.NAME."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "") in MODULES:
            names = [alias.name for alias in node.names if re.match("_(?!_)", alias.name)]
            yield from (f"{node.module}.{name}" for name in names if f"{node.module}.{name}" not in MODULES)


def layer(name: str) -> int:
    """The layer of a module, from the top; -1 if it is not ours."""
    # From the bottom up: the top one is around all others.
    return next((at for at in reversed(range(len(LAYERS))) if f"{name}.".startswith(LAYERS[at] + ".")), -1)


def test_modules_were_found() -> None:
    """The other tests here look at something."""
    assert {
        "gpusnap.runtime_shim.snapshot.checkpoint",
        "gpusnap.runtime_shim.runtime.criu.config",
        "gpusnap.oci.tar.archive",
        "gpusnap.cli.main",
    } <= {*MODULES}


@pytest.mark.parametrize("name", MODULES)
def test_private_names_stay_in_their_modules(name: str) -> None:
    """What begins with an underscore is nobody else's; what does not is public, and no list repeats it."""
    assert not hasattr(importlib.import_module(name), "__all__")
    assert source(name).private == ()


def test_what_is_defined_is_used() -> None:
    """A function, method or class that no module names serves nobody; tests alone do not count."""
    named = {word for name in MODULES for word in source(name).mentioned}
    unused = {
        f"{name}.{defined}"
        for name in MODULES
        for defined in source(name).defined
        if defined not in named and not defined.startswith("__")
    }
    by_click = {f"{module}.{name.replace('-', '_')}" for name, module in MODULES_OF_COMMANDS.items()}
    assert unused - by_click == CALLED_BY_OTHERS


@pytest.mark.parametrize("name", MODULES)
def test_layers(name: str) -> None:
    """No module imports from a layer above its own."""
    own = layer(name)
    assert own >= 0, f"{name} is in no layer"
    for other in source(name).imported:
        assert layer(other) in (-1, *range(own, len(LAYERS))), f"{name} imports {other}, which is above it"


@pytest.mark.parametrize(
    ("own", "name"), [(own, name) for own in SELF_CONTAINED for name in MODULES if name.startswith(own)]
)
def test_self_contained(own: str, name: str) -> None:
    """What a GPU driver offers, and what is done to processes, is known without what it is for."""
    home = ".".join(own.split(".")[:3])
    for other in source(name).imported:
        if layer(other) >= 0 and not other.startswith(home):
            assert other in COMMON, f"{name} imports {other}"


def test_one_place_traces() -> None:
    """ptrace(2) is called by its calls' module alone, and these are made for a held thread or by a tracer."""
    calls = f"{TRACING}.calls"
    assert {name for name in MODULES if calls in source(name).imported} == {
        f"{TRACING}.tracee",
        f"{TRACING}.tracer",
    }
    assert {name for name in MODULES if "ptrace" in source(name).attributes} == {calls}


@pytest.mark.parametrize("name", [name for name in MODULES if name != "gpusnap.oci.base.dataclass"])
def test_dataclasses(name: str) -> None:
    """They are made by our decorator: the standard library's takes 6 ms to import, and compiles."""
    assert "dataclasses" not in source(name).imported_at_once


def test_dataclasses_can_be_made() -> None:
    """What the standard library refuses when a class is defined, nobody would find before it is used."""
    found = 0
    for name in MODULES:
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, type) and dataclass._WRITTEN in vars(value):
                given = [field.name for field in dataclasses.fields(value)]
                made = inspect.signature(dataclass._initializer(value, vars(value)[dataclass._WRITTEN]))
                assert [each for each in made.parameters if each != "self"] == given
                found += 1
    assert found > 200


def test_every_pattern() -> None:
    """Each that is compiled later is one: nobody would find out before it is used."""
    found = 0
    for name in MODULES:
        module = importlib.import_module(name)
        places = [module, *(value for value in vars(module).values() if isinstance(value, type))]
        for value in [value for place in places for value in vars(place).values()]:
            if type(value) is patterns._Later:
                assert value.pattern
                found += 1
    assert found > 80


def package(name: str) -> str:
    """The package that a module is in; a module at the top of its layer is one by itself."""
    parent = name.rpartition(".")[0]
    return name if name in PACKAGES or parent in LAYERS else parent


def test_packages_need_one_another_in_one_direction() -> None:
    """A package may use another one, or be used by it, not both; nor in a circle."""
    needs: dict[str, set[str]] = {}
    for name in MODULES:
        own = package(name)
        others = {other for other in source(name).imported if layer(other) >= 0 and other not in PACKAGES}
        needs.setdefault(own, set()).update({package(other) for other in others} - {own})
    while free := [name for name, others in needs.items() if not others & set(needs)]:
        for name in free:
            del needs[name]
    assert needs == {}


def test_no_package_is_crowded() -> None:
    """Somebody who looks for a module or a package finds it in a list of a dozen or so."""
    parents = [name.rpartition(".")[0] for name in MODULES if name not in LAYERS]
    assert {name: parents.count(name) for name in parents if parents.count(name) > 16} == {}


def test_no_circles() -> None:
    """No module needs itself to be imported."""
    needs = {name: source(name).imported_at_once & set(MODULES) - {name} for name in MODULES}
    while free := [name for name, others in needs.items() if not others & set(needs)]:
        for name in free:
            del needs[name]
    assert needs == {}


def texts() -> Iterator[Path]:
    """The files of the checkout that may name a module; no link is followed."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in ("build", "dist")]
        yield from (Path(folder, name) for name in files if name.endswith(TEXTS) or name == "Makefile")


def bare_names(text: str) -> list[str]:
    """What imports `oci` instead of gpusnap.oci, or names a module of it so."""
    named = (
        each[0]
        for each in BARE_NAME.finditer(text)
        if (ROOT / each[1] / each[2]).is_dir() or (ROOT / each[1] / f"{each[2]}.py").is_file()
    )
    return [each[0] for each in BARE_IMPORT.finditer(text)] + [*named]


def test_all_that_is_installed_is_in_gpusnap() -> None:
    """In a checkout `import oci` finds the directory, too: a second copy of each module."""
    others = [path for path in texts() if path != Path(__file__)]
    found = {path: bare_names(path.read_text("utf-8", "replace")) for path in others}
    assert ROOT / "oci/tar/archive.py" in found
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("import oci\n", True),
        ("    from oci import tar", True),
        ("from hooks.main import main", True),
        ("import runtime_shim.gpu as gpu", True),
        ('"import sys; from runtime_shim import log"', True),
        ('monkeypatch.setattr("oci.tar.archive.x", 1)', True),
        ("`hooks.record.read(ID)`", True),
        ("from gpusnap import oci\n", False),
        ("from gpusnap.hooks.main import main", False),
        ("gpusnap.oci.tar.archive", False),
        ("hooks.d, base.oci.tar, vnd.oci.image.manifest, oci/tar/archive.py", False),
    ],
)
def test_bare_names(text: str, bare: bool) -> None:
    assert bool(bare_names(text)) == bare


def test_no_module_is_loaded_twice() -> None:
    """Under two names it would have each class and each global twice."""
    assert [name for name in sys.modules if name.partition(".")[0] in LINKED] == []
    files: dict[str, list[str]] = {}
    for name in MODULES:
        files.setdefault(os.path.realpath(sys.modules[name].__file__ or ""), []).append(name)
    assert {file: names for file, names in files.items() if len(names) > 1} == {}
    assert {os.path.relpath(file, ROOT).split("/")[0] for file in files} == {"gpusnap", *LINKED}


@pytest.mark.parametrize("heavy", HEAVY)
def test_a_pass_through_imports_nothing_heavy(heavy: str) -> None:
    """Every `state` and `kill` of every container pays for what gpusnap.runtime_shim.shim.entry imports."""
    program = f"import sys; import gpusnap.runtime_shim.shim.entry; print({heavy!r} in sys.modules)"
    # -S -E: without what this environment's own site packages import at start.
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_finding_a_driver_loads_no_library() -> None:
    """Whether this host has a GPU is asked before every checkpoint: no ctypes, no NVML for that."""
    program = (
        "import sys; from gpusnap.runtime_shim import gpu; gpu.find_driver();"
        "print(sorted({'ctypes', 'pynvml'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["suspend", "resume"])
def test_a_suspend_begins_with_few_modules(command: str) -> None:
    """What it needs when its container is paused is imported then; a resume needs no checkpoint's modules."""
    heavy = [
        "gpusnap.runtime_shim.snapshot.memory.capture",
        "gpusnap.oci.chunks.artifact",
        "concurrent.futures",
    ]
    program = (
        f"import sys; import gpusnap.operations.suspending.{command};"
        f"print(sorted({{*{heavy!r}}} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
