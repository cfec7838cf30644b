"""A message as a template: its words as the code has them, and what is filled in, in angle brackets."""

from __future__ import annotations

import ast
import re

__all__ = ["bare", "called", "field", "has_words", "pattern"]

_PLAIN = (
    "str",
    "repr",
    "min",
    "max",
    "sorted",
    "next",
    "list",
    "dirname",
    "basename",
    "fromkeys",
    "make_printable",
    "quote",
    "fsdecode",
    "getattr",
)
_CALLS = {
    "reason": "reason",
    "human": "size",
    "binary_size": "size",
    "len": "number",
    "host_of": "host",
    "explain": "why",
    "_join": "list",
    "join_path": "path",
    "join_root": "path",
    "name_naturally": "path",
    "join": "path",
    "digest_of": "digest",
    "id_of": "container",
    "plural": "number",
}
_WORDS = {
    **dict.fromkeys(("abs", "count", "failures", "most", "more", "nbytes", "tries"), "number"),
    **dict.fromkeys(("deepest", "document_limit", "largest", "longest"), "limit"),
    **dict.fromkeys(("deadline", "ending", "patience", "silence", "timeout", "total_seconds"), "seconds"),
    **dict.fromkeys(("wait", "within"), "seconds"),
    **dict.fromkeys(("dump_error", "err", "failure", "sentence", "told_error"), "error"),
    **dict.fromkeys(("last", "last_line", "said"), "message"),
    **dict.fromkeys(("archive_path", "authfile", "dev", "filename", "image_path", "put", "stem"), "path"),
    **dict.fromkeys(("dying", "inner_pid", "moving"), "pid"),
    "argv": "command",
    "comm": "program",
    "container_id": "container",
    "folder": "directory",
    "folders": "directories",
    "returncode": "code",
    "strerror": "reason",
}
"""What a reader understands, for names of variables; those that begin with most_ or largest_ are limits."""
_LIMIT = re.compile("^(most|largest|highest|deepest|longest)_")
_VERB = re.compile("^(check|describe|find|format|make|name|read)_")
"""What a function that makes a text does, which says nothing of the text."""


def bare(template: str) -> str:
    """Without the names of its fields."""
    return re.sub("<[^>]*>", "<>", template)


def pattern(template: str) -> re.Pattern[str]:
    """What matches every form of the template, but for what stands last: a field there is only a field."""
    *parts, last = re.split("<[^>]*>", template)
    between = ".*".join(re.escape(each) for each in parts)
    if not parts:
        return re.compile(re.escape(last))
    return re.compile(f"{between}{'.*' if last else '<[^>]*>'}{re.escape(last)}")


def has_words(template: str) -> bool:
    """Whether there is more in it than what is filled in, which is another sentence handed on."""
    return re.search("[A-Za-z]{2}", re.sub("<[^>]*>", "", template)) is not None


def called(call: ast.Call) -> str:
    """The name of what is called, without what stands before its last dot; empty where it has none."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def field(expr: ast.AST) -> str:
    """What stands for an expression that is filled in."""
    name = _name(expr)
    return f"<{'limit' if _LIMIT.match(name) else _WORDS.get(name, name)}>"


def _name(expr: ast.AST) -> str:
    """A short name for what is filled in."""
    match expr:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_").lower()
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
        case ast.Subscript(value=inner) | ast.BinOp(left=inner) | ast.IfExp(body=inner):
            return _name(inner)
        case ast.GeneratorExp(elt=inner) | ast.FormattedValue(value=inner) | ast.BoolOp(values=[inner, *_]):
            return _name(inner)
        case (
            ast.Call(func=ast.Attribute(attr="join"), args=[inner])
            | ast.Call(func=ast.Name(id="map"), args=[_, inner])
        ):
            return _name(inner)
        case ast.Call(
            func=ast.Attribute(
                value=inner, attr="lower" | "strip" | "rstrip" | "removesuffix" | "hex" | "keys"
            )
        ):
            return _name(inner)
        case ast.Call(func=ast.Attribute(attr="get"), args=[inner, *_]):
            return _name(inner)
        case ast.Call(args=args):
            function = called(expr)
            name = function.strip("_")
            if args and name in _PLAIN:
                return _name(args[0])
            return _CALLS.get(function) or _CALLS.get(name) or _VERB.sub("", name)
        case ast.Constant(value=value):
            return str(value)
    return "…"
