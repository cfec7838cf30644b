"""Messages read from the source."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tools.docs import error_messages

ERRORS = '''
class GpusnapError(Exception):
    """The base of all errors."""
class GpuError(GpusnapError):
    """What the driver refuses.

    And more."""
    advice: ClassVar[str] = "look into dmesg"
'''


def messages(folder: Path, **modules: str) -> dict[str, tuple[str, ...]]:
    """Template and hints of each message in modules of runtime_shim."""
    package = folder / "gpusnap" / "runtime_shim"
    package.mkdir(parents=True)
    (package / "errors.py").write_text(ERRORS)
    for name, text in modules.items():
        (package / f"{name}.py").write_text(dedent(text))
    return {each.template: each.hints for each in error_messages.read(folder).messages}


@pytest.mark.parametrize(
    ("code", "templates"),
    [
        ('raise GpusnapError("it broke")', ["it broke"]),
        ('raise GpusnapError(f"{path!r} is {len(x) >> 20} MiB")', ["<path> is <number> MiB"]),
        ('raise GpusnapError(f"{found.name} is {reason(error)}")', ["<name> is <reason>"]),
        (
            'raise GpusnapError(f"{told_error}: no answer in {_PATIENCE} s")',
            ["<error>: no answer in <seconds> s"],
        ),
        ('raise GpusnapError(f"no {id_of(x)} but {y.get(NOTE)}")', ["no <container> but <note>"]),
        ('raise GpusnapError(f"at most {_MOST_NAMES} of {len(x)}")', ["at most <limit> of <number>"]),
        ('raise GpusnapError("no " + what)', ["no <what>"]),
        ('raise GpusnapError("no way" if x else f"all of {y}")', ["no way", "all of <y>"]),
        ('said = "first one" if x else "other one"; raise GpusnapError(said)', ["first one", "other one"]),
        ('end = f" of {y}" if y else ""; raise GpusnapError(f"a lot{end}")', ["a lot of <y>", "a lot"]),
        ('with raise_as(GpusnapError, f"{path} broke", hint="mend it"): ...', ["<path> broke: <reason>"]),
        ("raise GpusnapError(str(error))", []),
        ('raise type(error)(f"and so {x}")', ["and so <x>"]),
        ('raise ValueError("not ours")', []),
    ],
)
def test_forms(tmp_path: Path, code: str, templates: list[str]) -> None:
    """Strings, f-strings, alternatives, and variables that hold them."""
    lines = code.replace("; ", "\n    ")
    assert list(messages(tmp_path, one=f"def f(x, y):\n    {lines}\n")) == templates


def test_codes(tmp_path: Path) -> None:
    """Given where the error is made, by its class, by a caller, or by the error that is passed on."""
    package = tmp_path / "gpusnap" / "runtime_shim"
    package.mkdir(parents=True)
    (package / "errors.py").write_text(
        ERRORS + 'class LockTimeout(GpuError):\n    code = "GPS-312"\nclass Deeper(LockTimeout): ...\n'
    )
    (package / "one.py").write_text(
        dedent("""
        def f(error):
            raise GpusnapError("plain words")
            raise GpusnapError("own words", code="GPS-001")
            raise LockTimeout("of a class")
            raise Deeper("of a class above")
            raise Deeper("of its own", code="GPS-002")
            raise GpusnapError(f"more words: {error}", code=error.code)
            raise GpusnapError(f"most words: {error}", code=error.code or "GPS-003")
        def make(what, *, code="GPS-004"):
            return GpusnapError(f"it {what}", code=code)
        make("breaks")
        make("is evil", code="GPS-005")
        """)
    )
    found = {each.template: each.code for each in error_messages.read(tmp_path).messages}
    assert found == {
        "plain words": "",
        "own words": "GPS-001",
        "of a class": "GPS-312",
        "of a class above": "GPS-312",
        "of its own": "GPS-002",
        "more words: <error>": error_messages.INHERITED,
        "most words: <error>": "GPS-003",
        "it breaks": "GPS-004",
        "it is evil": "GPS-005",
    }


def test_what_callers_give(tmp_path: Path) -> None:
    """A parameter is followed to the callers, in other modules too, and keeps company with its hint."""
    found = messages(
        tmp_path,
        maker="""
        from gpusnap.runtime_shim.base.errors import GpusnapError
        class Reader:
            def wrong(self, what, *, hint=""):
                return GpusnapError(f"{self.path}: {what}", hint=hint)
            def read(self):
                raise self.wrong("is cut short")
            def more(self):
                raise self.wrong("is too new", hint="take a newer one")
        def damaged(what):
            return GpusnapError(f"the image {what}")
        """,
        user="""
        from gpusnap.runtime_shim import maker
        def f():
            raise maker.damaged("ends too early")
        """,
    )
    assert found == {
        "<path>: is cut short": (),
        "<path>: is too new": ("take a newer one",),
        "the image ends too early": (),
    }


def test_constants_and_kinds(tmp_path: Path) -> None:
    """Constants of this and of other modules, and the strings of a class."""
    found = messages(
        tmp_path,
        names='FOLDER = "/run/x"\n__version__ = "1.0"\n',
        one="""
        from gpusnap.runtime_shim.base.errors import GpuError
        from gpusnap.runtime_shim.names import FOLDER, __version__
        def f():
            raise GpuError(f"{FOLDER} is not of {__version__}", hint=GpuError.advice)
        """,
    )
    assert found == {"/run/x is not of <version>": ("look into dmesg",)}
    kind = error_messages.read(tmp_path).kinds["GpuError"]
    assert (kind.sentence, kind.bases) == ("What the driver refuses.", ("GpusnapError",))


def test_one_form_of_another_is_left_out(tmp_path: Path) -> None:
    """A field that only some callers fill in with words of the code is one line, a last one is not."""
    found = messages(
        tmp_path,
        one="""
        from gpusnap.runtime_shim.base.errors import GpusnapError
        def wrong(what, why):
            return GpusnapError(f"{what} is broken: {why}")
        def f(path, error):
            raise wrong(path, error)
        def g():
            raise wrong("the index", "it is empty")
        """,
    )
    assert list(found) == ["<what> is broken: <why>", "the index is broken: it is empty"]
