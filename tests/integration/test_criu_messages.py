"""What unit tests have in place of CRIU's Python package is as the real one, which the test host has."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from gpusnap.runtime_shim.runtime.criu.images import pycriu_package
from gpusnap.runtime_shim.runtime.criu.images.messages import MAGIC

STANDIN = Path(__file__).parents[1] / "standins/pycriu/images"
# Enumerations are numbers to who reads them, and 14 is theirs.
_ENUM, _UINT32, _REPEATED = 14, 13, 3


def standin(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"standin_{name}", STANDIN / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_messages() -> None:
    """Each field has the number and the type that CRIU gives it, and each image its messages."""
    real, table = pycriu_package.load(), standin("pb")
    for name, fields in table.MESSAGES.items():
        theirs = getattr(real.pb, name).DESCRIPTOR.fields_by_name
        for field, (number, kind) in fields.items():
            found = theirs[field]
            plain = kind.removesuffix("*")
            assert (found.number, found.label == _REPEATED) == (number, plain != kind), f"{name}.{field}"
            if found.message_type is not None:
                assert found.message_type.name == plain, f"{name}.{field}"
            elif found.type == _ENUM:
                assert plain == "uint32", f"{name}.{field}"
            else:
                assert found.type == getattr(found, f"TYPE_{plain.upper()}"), f"{name}.{field}"


def test_magic_numbers() -> None:
    """Ours, and those of the stand-in, are pycriu's."""
    from pycriu.images import images, magic  # type: ignore[import-not-found, unused-ignore]

    table = standin("magic").by_name
    assert {name: magic.by_name[name] for name in table} == table
    missing = {kind for kind, number in MAGIC.items() if number not in magic.by_val}
    assert missing <= {"pidfd"}
    for name, handler in standin_handlers().items():
        assert images.handlers[name].payload.DESCRIPTOR.name == handler, name


def standin_handlers() -> dict[str, str]:
    text = (STANDIN / "images.py").read_text()
    names: dict[str, dict[str, str]] = {}
    start = text.index("_MESSAGES = ")
    exec(text[start : text.index("\n}", start) + 2], names)
    return names["_MESSAGES"]


def test_an_empty_image_of_each_kind() -> None:
    """pycriu decodes what an image of each kind consists of, but those with parts of several kinds."""
    known = {kind for kind, number in MAGIC.items() if number in pycriu_package.load().payloads}
    without = set(MAGIC) - known
    assert {"ghost-file", "pagemap", "pagemap-shmem"} <= without
    assert {"core", "mm", "pstree", "files", "fdinfo", "cgroup", "mountpoints", "inventory"} <= known
