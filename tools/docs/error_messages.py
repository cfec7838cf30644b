"""Every sentence that gpusnap may say when something goes wrong, read from the source by its syntax tree.

Whatever makes an error of ours (a class below GpusnapError or OciError), or a note on stderr, names its
sentence right there: a string, an f-string, a variable that holds one, or a parameter that the callers give.
The words that stand in the code are kept as they are, so that a page of them can be searched for a sentence
that was seen; what is filled in stands in angle brackets. Nothing is imported or run.
"""

from __future__ import annotations

import ast
import gc
import itertools
import math
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from tools.docs.error_templates import bare, called, has_words, pattern
from tools.docs.error_templates import field as field_of

__all__ = ["INHERITED", "Kind", "Message", "Messages", "read"]

_BASES = ("GpusnapError", "OciError")
INHERITED = "that of the error that is passed on"
"""The code of a message that only adds words to another error."""
# What says part of a sentence, or one that is no error, and at which of its arguments words and hint stand.
_OTHERS: Mapping[str, tuple[int, int | None]] = {
    "_Impossible": (0, 1),
    "_Misfit": (0, 1),
    "Sharing": (1, 2),
    "_Unfit": (0, None),
    "_NotCached": (0, None),
    "HeaderFault": (0, None),
    "Broken": (0, None),
    "note": (0, None),
}
_CONTEXT = "raise_as"
"""The function whose arguments are a class of errors and a sentence, to which it adds the reason."""
_REASON = ast.JoinedStr([ast.Constant(": "), ast.FormattedValue(ast.Name("reason"), -1)])
_CODE = re.compile(r"GPS-\d{3}")
_MOST = 48
"""Forms of one sentence; where there are more, what differs is left in angle brackets."""
_DEEPEST = 3
"""Calls through which a part of a sentence is followed back."""


_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Bound = Mapping[str, tuple[str, ...] | None]


@dataclass(frozen=True, slots=True)
class Message:
    """One sentence."""

    module: str
    """Where it is said first, such as gpusnap.runtime_shim.snapshot.preflight.checks."""
    kind: str
    """The class of the error; `note` for what is no error."""
    template: str
    hints: tuple[str, ...]
    """What may follow the sentence after a semicolon; empty where the source has nothing."""
    code: str = ""
    """Such as GPS-312: given where it is made, or its class's; INHERITED; empty where it has none."""


# The one sentence that is said in C, and its words there.
_IN_C = ("gpusnap-runtime: its Python program", "cannot be started: ", "reinstall gpusnap", "GPS-002")
_OF_THE_LAUNCHER = Message(
    "gpusnap.runtime_shim.shim.entry",
    "RuntimeFailed",
    f"{_IN_C[0]} <entry> {_IN_C[1]}<reason>",
    (f"gpusnap's environment or its Python interpreter is missing: {_IN_C[2]}",),
    _IN_C[3],
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of errors."""

    name: str
    bases: tuple[str, ...]
    sentence: str
    """The first of its docstring."""
    texts: Mapping[str, str]
    """Its own strings, such as `because` and `advice`."""


@dataclass(frozen=True, slots=True)
class Messages:
    """All that was found."""

    messages: tuple[Message, ...]
    kinds: Mapping[str, Kind]

    def ancestry(self, kind: str) -> tuple[str, ...]:
        """The class and those that it is derived from, nearest first."""
        return _ancestry(self.kinds, kind)


def _ancestry(kinds: Mapping[str, Kind], kind: str) -> tuple[str, ...]:
    found = [kind]
    for name in found:
        found += kinds[name].bases if name in kinds else ()
    return tuple(dict.fromkeys(found))


@dataclass(eq=False)
class _Module:
    name: str
    tree: ast.Module
    constants: dict[str, str] = field(default_factory=dict)
    imported: dict[str, str] = field(default_factory=dict)
    """The full name of what an import binds."""
    inside: dict[ast.Call, _Function | None] = field(default_factory=dict)
    """The function around each call."""
    classes: list[ast.ClassDef] = field(default_factory=list)
    methods: set[_Function] = field(default_factory=set)
    calls: list[ast.Call] = field(default_factory=list)
    """In the order of lines."""


def read(root: Path) -> Messages:
    """All messages of gpusnap in the checkout `root`, in the order of modules and lines."""
    # Among the trees of all modules, the search for garbage would take as long as all else together.
    searches = gc.isenabled()
    gc.disable()
    try:
        found = _Reading(tuple(_modules(root))).messages()
    finally:
        if searches:
            gc.enable()
    launcher = root / "runtime_shim" / "launcher" / "launcher.c"
    if launcher.exists() and all(words in launcher.read_text("utf-8") for words in _IN_C):
        return replace(found, messages=(*found.messages, _OF_THE_LAUNCHER))
    return found


def _modules(root: Path) -> Iterator[_Module]:
    # Unlike rglob, os.walk can follow the links in gpusnap/.
    walk = os.walk(root / "gpusnap", followlinks=True)
    for path in sorted(Path(folder, name) for folder, _, names in walk for name in names):
        if path.suffix == ".py":
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            module = _Module(name, ast.parse(path.read_text("utf-8")))
            _survey(module)
            yield module


def _survey(module: _Module) -> None:
    queue: deque[tuple[ast.AST, _Function | None]] = deque([(module.tree, None)])
    while queue:
        node, around = queue.popleft()
        match node:
            case ast.ImportFrom(module=str(source)):
                module.imported |= {(a.asname or a.name): f"{source}.{a.name}" for a in node.names}
            case ast.Call():
                module.calls.append(node)
                module.inside[node] = around
            case ast.ClassDef():
                module.classes.append(node)
                module.methods |= {each for each in node.body if isinstance(each, _Function)}
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                around = node
        queue.extend((child, around) for child in ast.iter_child_nodes(node))
    module.calls.sort(key=lambda each: (each.lineno, each.col_offset))
    for statement in module.tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                # A version is another one in the next release.
                module.constants |= {} if name == "__version__" else {name: text}
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(text))):
                module.constants[name] = text


class _Reading:
    """The modules together: constants and calls are followed from one to another."""

    def __init__(self, modules: Sequence[_Module]) -> None:
        self._modules = modules
        self._constants = {f"{m.name}.{name}": text for m in modules for name, text in m.constants.items()}
        self._kinds = self._classes()
        self._calls: dict[str, list[tuple[_Module, ast.Call]]] = {}
        for module in modules:
            for node in module.calls:
                self._calls.setdefault(called(node), []).append((module, node))

    def messages(self) -> Messages:
        """All of them, each once."""
        found: dict[tuple[str, str, str, str], list[Message]] = {}  # by module, kind, code and template
        for module in self._modules:
            for call in module.calls:
                for message in self._made(module, call):
                    key = (module.name, message.kind, message.code, bare(message.template))
                    found.setdefault(key, []).append(message)
        each = (
            replace(same[0], hints=tuple(dict.fromkeys(hint for one in same for hint in one.hints)))
            for same in found.values()
        )
        return Messages(tuple(_general(tuple(each))), self._kinds)

    def _classes(self) -> dict[str, Kind]:
        found: dict[str, Kind] = {}
        for module in self._modules:
            for node in module.classes:
                bases = tuple(each.id for each in node.bases if isinstance(each, ast.Name))
                said = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                found[node.name] = Kind(node.name, bases, said, dict(self._strings(module, node)))
        ours = {*_BASES}
        while more := {k for k, kind in found.items() if k not in ours and ours.intersection(kind.bases)}:
            ours |= more
        return {name: kind for name, kind in found.items() if name in ours or name in _OTHERS}

    def _strings(self, module: _Module, node: ast.ClassDef) -> Iterator[tuple[str, str]]:
        for each in node.body:
            match each:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                    yield name, text
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(text))):
                    yield name, text

    # One call

    def _made(self, module: _Module, call: ast.Call) -> Iterator[Message]:
        kind = called(call)
        adds_reason = kind == _CONTEXT and bool(call.args)
        if adds_reason:
            kind = ast.unparse(call.args[0]).rpartition(".")[2]
        if kind == "note" and not _is_said(call):
            return
        if kind == "type" or (kind not in self._kinds and kind not in _OTHERS):
            inner = call.func
            if not (isinstance(inner, ast.Call) and called(inner) == "type" and call.args):
                return
            kind = _BASES[0]
        at, after = (1, None) if adds_reason else _OTHERS.get(kind, (0, None))
        if len(call.args) <= at or any(isinstance(each, ast.Starred) for each in call.args):
            return
        said = ast.BinOp(call.args[at], ast.Add(), _REASON) if adds_reason else call.args[at]
        advice = next((k.value for k in call.keywords if k.arg == "hint"), None)
        advice = advice or (call.args[after] if after is not None and len(call.args) > after else None)
        code = next((k.value for k in call.keywords if k.arg == "code"), None)
        wanted = frozenset().union(*(_names(each) for each in (said, advice, code) if each is not None))
        around = module.inside[call]
        for bound in self._bindings(module, around, wanted, _DEEPEST):
            hints = self._alternatives(advice, module, around, bound) if advice else ("",)
            given = self._alternatives(code, module, around, bound) if code else (self._code(kind),)
            found = next((each for each in given if _CODE.fullmatch(each)), INHERITED if code else "")
            for template in self._alternatives(said, module, around, bound):
                for each in hints:
                    if has_words(template):
                        hint = (each,) if has_words(each) else ()
                        yield Message(module.name, kind, " ".join(template.split()), hint, found)

    def _code(self, kind: str) -> str:
        """Of a class, its own or inherited."""
        known = [self._kinds[each] for each in _ancestry(self._kinds, kind) if each in self._kinds]
        return next((code for each in known if (code := each.texts.get("code"))), "")

    def _bindings(
        self, module: _Module, function: _Function | None, names: frozenset[str], depth: int
    ) -> list[_Bound]:
        """What the callers of `function` give for those of its parameters that are among `names`."""
        if function is None or not depth:
            return [{}]
        own = names & {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}
        found: list[_Bound] = []
        for where, call in self._callers(module, function) if own else ():
            given = _given(function, call, method=function in module.methods)
            exprs = {name: given[name] for name in own if name in given}
            used = frozenset().union(*(_names(each) for each in exprs.values()))
            around = where.inside[call]
            for bound in self._bindings(where, around, used, depth - 1):
                one = {name: self._texts(expr, where, around, bound) for name, expr in exprs.items()}
                one = {name: texts for name, texts in one.items() if texts}
                if one not in found:
                    found.append(one)
        return found if any(found) and len(found) <= _MOST else [{}]

    def _callers(self, module: _Module, function: _Function) -> Iterator[tuple[_Module, ast.Call]]:
        for where, call in self._calls.get(function.name, ()):
            match call.func:
                case ast.Name(id=name):
                    here = where.imported.get(name, f"{where.name}.{name}") == f"{module.name}.{name}"
                case ast.Attribute(value=ast.Name(id=base)) if function not in module.methods:
                    here = where.imported.get(base) == module.name
                case _:
                    here = where is module and function in module.methods
            if here and where.inside[call] is not function:
                yield where, call

    # What an expression may say

    def _alternatives(
        self, expr: ast.expr, module: _Module, function: _Function | None, bound: _Bound
    ) -> tuple[str, ...]:
        texts = self._texts(expr, module, function, bound, loose=True)
        return texts if texts is not None else (field_of(expr),)

    def _texts(
        self,
        expr: ast.expr,
        module: _Module,
        function: _Function | None,
        bound: _Bound,
        *,
        loose: bool = False,
        seen: frozenset[str] = frozenset(),
    ) -> tuple[str, ...] | None:
        """All texts that `expr` may be; None where that is not to be seen here.

        Where `loose`, an alternative that cannot be seen is left in angle brackets.
        """

        def inner(each: ast.expr) -> tuple[str, ...] | None:
            found = self._texts(each, module, function, bound, loose=loose, seen=seen)
            return (field_of(each),) if found is None and loose else found

        match expr:
            case ast.Constant(value=str(text)):
                return (text,)
            case ast.JoinedStr(values=values):
                return self._filled(values, module, function, bound, seen)
            case ast.IfExp(body=body, orelse=other):
                return _together([inner(body), inner(other)])
            case ast.BoolOp(op=ast.Or(), values=values):
                return _together([inner(each) for each in values])
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                first, second = inner(left), inner(right)
                both = first is not None and second is not None
                return tuple(a + b for a in first or () for b in second or ()) if both else None
            case ast.Attribute(value=ast.Name(id=base), attr=name):
                own = self._kinds[base].texts.get(name) if base in self._kinds else None
                own = own or self._constants.get(f"{module.imported.get(base)}.{name}")
                return (own,) if own else None
            case ast.Name(id=name):
                if name in bound:
                    return bound[name]
                expressions = _assigned(function, name) if function is not None and name not in seen else []
                if expressions is None:
                    return None
                seen |= {name}
                found = _together([inner(each) for each in expressions])
                return found if expressions else self._constant(module, name)
        return None

    def _filled(
        self,
        values: Sequence[ast.expr],
        module: _Module,
        function: _Function | None,
        bound: _Bound,
        seen: frozenset[str],
    ) -> tuple[str, ...]:
        """What an f-string may say."""
        parts: list[tuple[str, ...]] = []
        for each in values:
            if isinstance(each, ast.FormattedValue):
                texts = self._texts(each.value, module, function, bound, seen=seen)
                parts.append(texts or (field_of(each.value),))
            else:
                parts.append((str(getattr(each, "value", "")),))
        while math.prod(len(each) for each in parts) > _MOST:
            at = max(range(len(parts)), key=lambda each: len(parts[each]))
            parts[at] = (field_of(values[at]),)
        return tuple("".join(each) for each in itertools.product(*parts))

    def _constant(self, module: _Module, name: str) -> tuple[str, ...] | None:
        full = module.imported.get(name, f"{module.name}.{name}")
        return (self._constants[full],) if full in self._constants else None


def _is_said(call: ast.Call) -> bool:
    """Whether it is the function of gpusnap.runtime_shim.base.log, and no note of a manifest."""
    match call.func:
        case ast.Name() | ast.Attribute(value=ast.Name(id="log")):
            return True
    return False


@cache
def _binding(function: _Function) -> tuple[ast.Name | ast.ExceptHandler | ast.Assign, ...]:
    """What binds a name in the function; it is asked for each of its names."""
    found = (
        node for node in ast.walk(function) if isinstance(node, ast.Name | ast.ExceptHandler | ast.Assign)
    )
    return tuple(node for node in found if not isinstance(node, ast.Name) or isinstance(node.ctx, ast.Store))


def _assigned(function: _Function, name: str) -> list[ast.expr] | None:
    """The expressions that `name` stands for in the function; None where it is more than that."""
    arguments = function.args
    if name in {each.arg for each in (*arguments.args, *arguments.kwonlyargs, *arguments.posonlyargs)}:
        return None
    found: list[ast.expr] = []
    stored = 0
    for node in _binding(function):
        match node:
            case ast.Name(id=id) if id == name:
                stored += 1
            case ast.ExceptHandler(name=id) if id == name:
                return None
            case ast.Assign(targets=[ast.Name(id=id)], value=value) if id == name:
                found.append(value)
            case ast.Assign(targets=[ast.Tuple(elts=left)], value=ast.Tuple(elts=right)):
                pairs = zip(left, right, strict=False)
                found += [b for a, b in pairs if isinstance(a, ast.Name) and a.id == name]
    return found if len(found) == stored else None


def _given(function: _Function, call: ast.Call, *, method: bool) -> dict[str, ast.expr]:
    """What a call gives for each parameter, defaults included."""
    arguments = function.args
    names = [each.arg for each in arguments.args][1 if method else 0 :]
    found: dict[str, ast.expr] = dict(zip(names[::-1], arguments.defaults[::-1], strict=False))
    keyword = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found |= {each.arg: default for each, default in keyword if default is not None}
    if not any(isinstance(each, ast.Starred) for each in call.args):
        found |= dict(zip(names, call.args, strict=False))
    return found | {each.arg: each.value for each in call.keywords if each.arg}


def _names(expr: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(expr) if isinstance(each, ast.Name)}


def _together(parts: Sequence[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    if any(each is None for each in parts):
        return None
    return tuple(dict.fromkeys(text for each in parts for text in each or ()))


def _general(messages: Sequence[Message]) -> Iterator[Message]:
    """Without those that are another one of the same module with a field of it filled in.

    What stands last, mostly a reason, is no such field: there each of its forms is worth a line.
    """
    alike: dict[object, list[Message]] = {}
    for each in messages:
        alike.setdefault((each.module, each.kind, each.hints, each.code), []).append(each)
    for one in messages:
        others = alike[one.module, one.kind, one.hints, one.code]
        if not any(
            bare(each.template) != bare(one.template) and pattern(each.template).fullmatch(one.template)
            for each in others
        ):
            yield one
