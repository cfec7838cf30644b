"""`dataclass` of the standard library, with methods that are compiled when they are first needed.

The standard library writes the source of each class's methods and compiles it: 0.5 to 1.5 ms for each class
(Python 3.11 to 3.13). A command of gpusnap defines more than a hundred of them and makes instances of about
forty, and its user waits for its start. Here the class gets its slots at once. Its __init__ is made with the
first instance, and its fields when they are first used, each in a tenth of that time. The rest comes from the
standard library when an instance is first compared, hashed or printed. `replace`, `fields` and `asdict` of
`dataclasses` work as usual. `inspect.signature` of such a class returns nothing useful before that.

For a type checker, this is the standard library's decorator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls: type | None = None, /, *, slots: bool = False, **options: bool) -> Any:
        """As dataclasses.dataclass, with its options."""
        if cls is None:
            return partial(dataclass, slots=slots, **options)
        if slots and options.keys() <= _OPTIONS and _is_plain(cls):
            return _defer(cls, options)
        return dataclasses.dataclass(slots=slots, **options)(cls)


# With other options, the standard library makes the class at once.
_OPTIONS = {"frozen", "kw_only"}
_FIELDS, _PARAMS = "__dataclass_fields__", "__dataclass_params__"
_WRITTEN = "__written_fields__"
"""The fields of a class that is made here, own and inherited ones, as a _Field each."""
_Field = tuple[Any, bool]
"""The default, or a dataclasses.Field, or MISSING; and whether the argument is keyword-only."""
_NOT_FIELDS = ("ClassVar", "InitVar", "KW_ONLY")


def _is_plain(cls: type) -> bool:
    """Whether all its fields are arguments of __init__, and it inherits no others."""
    for name, annotation in cls.__annotations__.items():
        value = vars(cls).get(name)
        if not isinstance(annotation, str) or annotation.rpartition(".")[2].startswith(_NOT_FIELDS):
            return False
        if isinstance(value, dataclasses.Field) and not (value.init and value.kw_only is dataclasses.MISSING):
            return False
    return all(_FIELDS not in vars(base) or _WRITTEN in vars(base) for base in cls.__mro__[1:])


def _defer(cls: type, options: Mapping[str, bool]) -> type:
    """Return the class with slots, and with stubs of the methods that are made later."""
    fields: dict[str, _Field] = {}
    for base in reversed(cls.__mro__[1:]):
        fields |= vars(base).get(_WRITTEN, {})
    inherited = set(fields)
    written = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    frozen, kw_only = options.get("frozen", False), options.get("kw_only", False)
    for name in cls.__annotations__:
        fields[name] = written.get(name, dataclasses.MISSING), kw_only

    def complete(wanted: str) -> None:
        """Make the wanted method. Two threads may do so at once: the results are the same.

        Most classes are never compared or printed, and compiling the methods for that takes most of the time.
        """
        if wanted == "__init__":
            new.__init__ = _initializer(new, fields)  # type: ignore[misc]
            return
        if wanted == _FIELDS:
            setattr(new, _FIELDS, _make_fields(cls, written, kw_only=kw_only))
            return
        plain = type(cls)(cls.__name__, cls.__bases__, dict(written))
        plain.__qualname__ = cls.__qualname__
        made: type = dataclasses.dataclass(**options)(plain)
        for name in (*(each for each in stubs if each != "__init__"), _PARAMS):
            setattr(new, name, vars(made)[name])

    def stub(name: str) -> Callable[..., Any]:
        """Return a method that makes the real one, replaces itself by it, and calls it."""

        def method(self: object, *args: object, **keywords: object) -> Any:
            complete(name)
            return vars(new)[name](self, *args, **keywords)

        return method

    stubs = [name for name in ("__init__", "__repr__", "__eq__") if name not in written]
    if frozen and written.get("__hash__") is None:  # None: it has an __eq__ of its own
        stubs.append("__hash__")
    given = {name: value for name, value in written.items() if name not in cls.__annotations__}
    given |= {"__hash__": written.get("__hash__"), _WRITTEN: fields}
    given |= {"__slots__": tuple(name for name in cls.__annotations__ if name not in inherited)}
    given |= {"__match_args__": tuple(name for name, (_, named) in fields.items() if not named)}
    given |= _make_frozen_methods(tuple(fields)) if frozen else {}
    given |= {name: stub(name) for name in stubs}
    given |= {name: _Deferred(complete, name) for name in (_FIELDS, _PARAMS)}
    new = type(cls)(cls.__name__, cls.__bases__, given)
    new.__qualname__ = cls.__qualname__
    return new


def _make_fields(
    cls: type, written: Mapping[str, Any], *, kw_only: bool
) -> dict[str, dataclasses.Field[Any]]:
    """Return its fields as the standard library has them, from a class for which it compiles no methods.

    `dataclasses.replace` and `fields` use nothing else.
    """
    found: dict[str, dataclasses.Field[Any]] = {}
    for base in reversed(cls.__mro__[1:]):
        if _FIELDS in vars(base):
            found |= getattr(base, _FIELDS)
    # The standard library would make a docstring from the signature, if there is none.
    alone = type(cls.__name__, (), {**written, "__doc__": cls.__name__})
    no_methods = {"init": False, "repr": False, "eq": False, "match_args": False}
    dataclasses.dataclass(**no_methods, kw_only=kw_only)(alone)
    found |= vars(alone)[_FIELDS]
    return found


def _initializer(cls: type, fields: Mapping[str, _Field]) -> Callable[..., None]:
    """Return its __init__: like the standard library's, but it sets the slots directly, frozen or not."""
    scope: dict[str, Any] = {"_absent": object()}
    words, body = ["self"], []
    for name, (written, named) in sorted(fields.items(), key=lambda field: field[1][1]):
        default: Any = written
        factory: Any = dataclasses.MISSING
        if isinstance(written, dataclasses.Field):
            default, factory = written.default, written.default_factory
        value = name
        if factory is not dataclasses.MISSING:
            scope[f"_make_{name}"], default = factory, scope["_absent"]
            value = f"_make_{name}() if {name} is _absent else {name}"
        if named and "*" not in words:
            words.append("*")
        if default is not dataclasses.MISSING:
            scope[f"_default_{name}"] = default
        words.append(name if default is dataclasses.MISSING else f"{name}=_default_{name}")
        scope[f"_set_{name}"] = getattr(cls, name).__set__
        body.append(f"_set_{name}(self, {value})")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    exec(f"def __init__({', '.join(words)}): {'; '.join(body) or 'pass'}", scope)
    made: Callable[..., None] = scope["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__module__ = cls.__module__
    return made


class _Deferred:
    """An attribute of the class that `complete` replaces."""

    __slots__ = ("_complete", "_name")

    def __init__(self, complete: Callable[[str], None], name: str) -> None:
        self._complete, self._name = complete, name

    def __get__(self, instance: object, owner: type) -> Any:
        self._complete(self._name)
        return getattr(owner, self._name)


def _make_frozen_methods(names: tuple[str, ...]) -> dict[str, Callable[..., Any]]:
    """Return methods that refuse a change, and methods that can still copy and pickle an instance."""

    def refuse_to_set(self: object, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def refuse_to_delete(self: object, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def get_state(self: object) -> list[Any]:
        return [getattr(self, name) for name in names]

    def set_state(self: object, state: Iterable[Any]) -> None:
        for name, value in zip(names, state, strict=True):
            object.__setattr__(self, name, value)

    return {
        "__setattr__": refuse_to_set,
        "__delattr__": refuse_to_delete,
        "__getstate__": get_state,
        "__setstate__": set_state,
    }
