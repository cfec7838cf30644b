"""`dataclass` of the standard library, with methods that are compiled when they are first needed.

The standard library writes the source of each class's methods and compiles it: 0.5 to 1.5 ms for each class
(Python 3.11 to 3.13). A command of gpusnap defines more than a hundred of them and makes instances of about
forty, and its user waits for its start. Here the class gets its slots at once, and its __init__ is made with
the first instance, in a tenth of that time. What compares instances is not compiled. The rest comes from
the standard library when an instance is first printed, or when a function of `dataclasses` gets the class.
`inspect.signature` of such a class returns nothing useful before that.

The module `dataclasses` takes 6 ms to import, nearly all of it for `inspect`. So `field`, `replace` and
`asdict` are here too, and do without it for most classes. For a type checker, all are the standard library's.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import asdict as asdict
    from dataclasses import dataclass as dataclass
    from dataclasses import field as field
    from dataclasses import replace as replace
else:

    def dataclass(cls: type | None = None, /, *, slots: bool = False, **options: bool) -> Any:
        """As dataclasses.dataclass, with its options."""
        if cls is None:
            return partial(dataclass, slots=slots, **options)
        if slots and options.keys() <= _OPTIONS and _is_plain(cls):
            return _defer(cls, options)
        for name, value in [*vars(cls).items()]:
            if isinstance(value, _Field):
                setattr(cls, name, value.convert())
        return _import_library().dataclass(slots=slots, **options)(cls)

    def field(**options: Any) -> Any:
        """As dataclasses.field, with its options."""
        return _Field(options)

    def replace(record: Any, /, **changes: Any) -> Any:
        """As dataclasses.replace."""
        if (names := vars(type(record)).get(_WRITTEN)) is None:
            return _import_library().replace(record, **changes)
        return type(record)(**{name: getattr(record, name) for name in names} | changes)

    def asdict(record: Any) -> dict[str, Any]:
        """As dataclasses.asdict."""
        if (names := vars(type(record)).get(_WRITTEN)) is None:
            return _import_library().asdict(record)
        return {name: _make_plain(getattr(record, name)) for name in names}


def list_fields(of: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass or of an instance."""
    kind = of if isinstance(of, type) else type(of)
    if (names := vars(kind).get(_WRITTEN)) is None:
        return tuple(each.name for each in _import_library().fields(kind))
    return tuple(names)


# With other options, the standard library makes the class at once.
_OPTIONS = {"frozen", "kw_only", "order"}
_FIELD_OPTIONS = {"default", "default_factory", "compare", "repr"}
_FIELDS, _PARAMS = "__dataclass_fields__", "__dataclass_params__"
_WRITTEN = "__written_fields__"
"""The fields of a class that is made here, own and inherited ones, as a _Described each."""
_Described = tuple[Any, bool]
"""The default, or a _Field, or _MISSING; and whether the argument is keyword-only."""
_NOT_FIELDS = ("ClassVar", "InitVar", "KW_ONLY")
_MISSING = object()


class _Field:
    """What `field` was given."""

    __slots__ = ("options",)

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def convert(self) -> Any:
        """Return the standard library's field."""
        return _import_library().field(**self.options)


def _import_library() -> Any:
    import dataclasses

    return dataclasses


def _make_plain(value: Any) -> Any:
    """Return the value as dataclasses.asdict does it."""
    if any(_WRITTEN in vars(base) or _FIELDS in vars(base) for base in type(value).__mro__):
        return asdict(value)
    if isinstance(value, (list, tuple)):
        made = map(_make_plain, value)
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)  # a named tuple
    if isinstance(value, dict):
        return {_make_plain(key): _make_plain(each) for key, each in value.items()}
    return copy.deepcopy(value)


def _is_plain(cls: type) -> bool:
    """Whether all its fields are arguments of __init__, and it inherits no others."""
    for name, annotation in cls.__annotations__.items():
        value = vars(cls).get(name)
        if not isinstance(annotation, str) or annotation.rpartition(".")[2].startswith(_NOT_FIELDS):
            return False
        if isinstance(value, _Field) and not value.options.keys() <= _FIELD_OPTIONS:
            return False
        if hasattr(value, "default_factory"):  # a field by the standard library's function
            return False
    return all(_FIELDS not in vars(base) or _WRITTEN in vars(base) for base in cls.__mro__[1:])


def _defer(cls: type, options: Mapping[str, bool]) -> type:
    """Return the class with slots, and with stubs of the methods that are made later."""
    fields: dict[str, _Described] = {}
    for base in reversed(cls.__mro__[1:]):
        fields |= vars(base).get(_WRITTEN, {})
    inherited = set(fields)
    written = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    frozen, kw_only = options.get("frozen", False), options.get("kw_only", False)
    for name in cls.__annotations__:
        fields[name] = written.get(name, _MISSING), kw_only

    def complete(wanted: str) -> None:
        """Make the wanted method. Two threads may do so at once: the results are the same.

        Most classes are never printed, and compiling the methods of the standard library takes long.
        """
        if wanted == "__init__":
            new.__init__ = _initializer(new, fields)  # type: ignore[misc]
            return
        converted = {
            name: value.convert() if isinstance(value, _Field) else value for name, value in written.items()
        }
        plain = type(cls)(cls.__name__, cls.__bases__, converted)
        plain.__qualname__ = cls.__qualname__
        made: type = _import_library().dataclass(**options)(plain)
        for name in (*({"__repr__"} - written.keys()), _FIELDS, _PARAMS):
            setattr(new, name, vars(made)[name])

    def stub(name: str) -> Callable[..., Any]:
        """Return a method that makes the real one, replaces itself by it, and calls it."""

        def method(self: object, *args: object, **keywords: object) -> Any:
            complete(name)
            return vars(new)[name](self, *args, **keywords)

        return method

    own = {name for name, value in written.items() if value is not None or name != "__hash__"}
    given = {name: value for name, value in written.items() if name not in cls.__annotations__}
    given |= {"__hash__": written.get("__hash__"), _WRITTEN: fields}
    given |= {"__slots__": tuple(name for name in cls.__annotations__ if name not in inherited)}
    given |= {"__match_args__": tuple(name for name, (_, named) in fields.items() if not named)}
    given |= _make_frozen_methods(tuple(fields)) if frozen else {}
    compared = [name for name, (value, _) in fields.items() if _is_compared(value)]
    made = _make_comparisons(compared, order=options.get("order", False), hashed=frozen)
    given |= {name: method for name, method in made.items() if name not in own}
    given |= {name: stub(name) for name in ("__init__", "__repr__") if name not in own}
    given |= {name: _Deferred(complete, name) for name in (_FIELDS, _PARAMS)}
    new = type(cls)(cls.__name__, cls.__bases__, given)
    new.__qualname__ = cls.__qualname__
    return new


def _initializer(cls: type, fields: Mapping[str, _Described]) -> Callable[..., None]:
    """Return its __init__: like the standard library's, but it sets the slots directly, frozen or not."""
    scope: dict[str, Any] = {"_absent": object()}
    words, body = ["self"], []
    for name, (written, named) in sorted(fields.items(), key=lambda field: field[1][1]):
        default: Any = written
        factory: Any = None
        if isinstance(written, _Field):
            default = written.options.get("default", _MISSING)
            factory = written.options.get("default_factory")
        value = name
        if factory is not None:
            scope[f"_make_{name}"], default = factory, scope["_absent"]
            value = f"_make_{name}() if {name} is _absent else {name}"
        if named and "*" not in words:
            words.append("*")
        if default is not _MISSING:
            scope[f"_default_{name}"] = default
        words.append(name if default is _MISSING else f"{name}=_default_{name}")
        scope[f"_set_{name}"] = getattr(cls, name).__set__
        body.append(f"_set_{name}(self, {value})")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    exec(f"def __init__({', '.join(words)}): {'; '.join(body) or 'pass'}", scope)
    made: Callable[..., None] = scope["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__module__ = cls.__module__
    return made


def _is_compared(written: Any) -> bool:
    return not isinstance(written, _Field) or bool(written.options.get("compare", True))


def _make_comparisons(names: Sequence[str], *, order: bool, hashed: bool) -> dict[str, Callable[..., Any]]:
    """Return methods that compare the values of these fields."""

    def get_few(self: object) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in names)

    # attrgetter is faster, but of one name, it returns the value alone.
    get = attrgetter(*names) if len(names) > 1 else get_few

    def compare_by(operation: Callable[[Any, Any], Any]) -> Callable[[object, object], Any]:
        def compare(self: object, other: object) -> Any:
            return operation(get(self), get(other)) if type(other) is type(self) else NotImplemented

        return compare

    made: dict[str, Callable[..., Any]] = {"__eq__": compare_by(operator.eq)}
    if order:
        made |= {f"__{name}__": compare_by(getattr(operator, name)) for name in ("lt", "le", "gt", "ge")}
    if hashed:
        made["__hash__"] = lambda self: hash(get(self))
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
        raise _import_library().FrozenInstanceError(f"cannot assign to field {name!r}")

    def refuse_to_delete(self: object, name: str) -> None:
        raise _import_library().FrozenInstanceError(f"cannot delete field {name!r}")

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
