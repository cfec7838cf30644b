"""Dataclasses whose methods are compiled when they are needed: the same as the standard library's."""

from __future__ import annotations

import collections
import copy
import dataclasses
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import pytest

from gpusnap.oci.base import dataclass as module

T = TypeVar("T")


def make(decorator: Callable[..., Any]) -> dict[str, Any]:
    """The same classes by either decorator."""
    field: Any = module.field if decorator is module.dataclass else dataclasses.field

    @decorator(frozen=True, slots=True)
    class Point:
        """Two numbers."""

        x: int
        """A field's docstring."""
        y: int = 2
        more: tuple[int, ...] = ()

        @property
        def sum(self) -> int:
            return self.x + self.y

    @decorator(slots=True)
    class Bag:
        items: list[int] = field(default_factory=list)
        by_name: dict[str, int] = field(default_factory=dict)

    @decorator(frozen=True, slots=True, kw_only=True)
    class Named:
        name: str
        size: int = 0

    @decorator(frozen=True, slots=True)
    class Own:  # noqa: PLW1641 - the hash that a dataclass makes is what is tested
        value: int

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Own) and other.value % 10 == self.value % 10

        def __repr__(self) -> str:
            return f"<{self.value}>"

    @decorator(frozen=True, slots=True)
    class Box(Generic[T]):
        content: T

    @decorator(frozen=True, slots=True)
    class Child(Point):
        z: int = 3

    @decorator(frozen=True, slots=True, order=True)
    class Ordered:
        x: int

    @decorator(frozen=True, slots=True)
    class Hidden:
        x: int
        secret: str = field(default="", compare=False, repr=False)

    @decorator(frozen=True, slots=True)
    class Constant:
        LIMIT: ClassVar[int] = 5
        x: int = 1

    @decorator(frozen=True, slots=True, kw_only=True)
    class Longer(Named):
        """A parent's field with another default, and one before those without."""

        size: int = 7
        kind: str

        @property
        def both(self) -> str:
            return f"{self.name} {self.kind}"

    @decorator(slots=True)
    class Checked:
        x: int
        seen: list[int] = field(default_factory=list, repr=False)

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError("negative")
            self.seen.append(self.x)

    @decorator(frozen=True, slots=True)
    class Same(Point):
        """No fields of its own."""

        def twice(self) -> int:
            return 2 * self.sum

    @decorator(frozen=True, slots=True, repr=False)
    class Quiet:
        """The standard library makes it."""

        x: int

    @decorator(slots=True)
    class Late:
        """The standard library makes it: one of its fields is no argument."""

        x: int
        more: list[int] = field(default_factory=list)
        twice: int = field(init=False)

        def __post_init__(self) -> None:
            self.twice = 2 * self.x

    every = (
        Point,
        Bag,
        Named,
        Own,
        Box,
        Child,
        Ordered,
        Hidden,
        Constant,
        Longer,
        Checked,
        Same,
        Quiet,
        Late,
    )
    return {each.__name__: each for each in every}


@pytest.fixture(params=[dataclasses.dataclass, module.dataclass], ids=["the standard library's", "ours"])
def classes(request: pytest.FixtureRequest) -> dict[str, Any]:
    return make(request.param)


def test_instances(classes: dict[str, Any]) -> None:
    Point: Any = classes["Point"]
    one = Point(1)
    assert (one.x, one.y, one.more, one.sum) == (1, 2, (), 3)
    assert one == Point(1, y=2)
    assert one != Point(1, 3)
    assert one != (1, 2, ())
    assert len({one, Point(1), Point(2)}) == 2
    assert repr(one).endswith("Point(x=1, y=2, more=())")
    assert Point.__doc__ == "Two numbers."
    assert Point.__name__ == "Point"
    assert Point.__slots__ == Point.__match_args__ == ("x", "y", "more")
    assert not hasattr(one, "__dict__")
    match one:
        case Point(x=x):
            assert x == 1


@pytest.mark.parametrize("first", ["repr", "==", "hash", "fields"])
def test_what_is_asked_first(classes: dict[str, Any], first: str) -> None:
    """Whatever needs the methods first gets them."""
    Point = classes["Point"]
    if first == "fields":
        assert [each.name for each in dataclasses.fields(Point)] == ["x", "y", "more"]
        return
    one, other = object.__new__(Point), object.__new__(Point)
    for each in (one, other):
        for name, value in (("x", 1), ("y", 2), ("more", ())):
            object.__setattr__(each, name, value)
    if first == "repr":
        assert repr(one).endswith("Point(x=1, y=2, more=())")
    elif first == "==":
        assert one == other
    else:
        assert hash(one) == hash(other)
    assert Point(1) == one


def test_frozen(classes: dict[str, Any]) -> None:
    one = classes["Point"](1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'x'"):
        one.x = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'x'"):
        del one.x
    with pytest.raises((dataclasses.FrozenInstanceError, TypeError)):
        one.other = 2


def test_changeable(classes: dict[str, Any]) -> None:
    Bag = classes["Bag"]
    one, other = Bag(), Bag()
    one.items.append(1)
    assert (one.items, other.items, other.by_name) == ([1], [], {})
    one.items = []
    assert one == other
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)
    with pytest.raises(AttributeError):
        one.other = 2


def test_arguments(classes: dict[str, Any]) -> None:
    """What is wrong about them is said in the same words."""
    with pytest.raises(TypeError, match=r"Point\.__init__\(\) missing 1 required positional argument: 'x'"):
        classes["Point"]()
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'z'"):
        classes["Point"](1, z=2)
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        classes["Named"]("n")
    named = classes["Named"](name="n")
    assert (named.name, named.size, classes["Named"].__match_args__) == ("n", 0, ())


def test_own_methods(classes: dict[str, Any]) -> None:
    Own = classes["Own"]
    assert Own(1) == Own(11) != Own(2)
    assert repr(Own(3)) == "<3>"
    assert hash(Own(1)) != hash(Own(11)), "the hash is made of the fields"


def test_kinds(classes: dict[str, Any]) -> None:
    """A generic class, one that inherits fields, an order, a hidden field, a constant."""
    assert classes["Box"](1) == classes["Box"](1) != classes["Box"](2)
    child = classes["Child"](1, z=4)
    assert (child.x, child.y, child.z) == (1, 2, 4)
    assert [each.name for each in dataclasses.fields(child)] == ["x", "y", "more", "z"]
    assert child != classes["Point"](1)
    Ordered = classes["Ordered"]
    assert Ordered(1) < Ordered(2) <= Ordered(2) > Ordered(1) <= Ordered(1) >= Ordered(1)
    assert sorted([Ordered(2), Ordered(1)]) == [Ordered(1), Ordered(2)]
    with pytest.raises(TypeError, match="not supported between instances"):
        sorted([Ordered(1), classes["Point"](1)])
    assert classes["Hidden"](1, "a") == classes["Hidden"](1, "b")
    assert "secret" not in repr(classes["Hidden"](1, "a"))
    assert (classes["Constant"].LIMIT, classes["Constant"](2).x) == (5, 2)


def test_inherited(classes: dict[str, Any]) -> None:
    """What a parent has: its fields, their order and defaults, and whether they have names only."""
    Longer, Same, Child = classes["Longer"], classes["Same"], classes["Child"]
    one = Longer(name="n", kind="k")
    assert (one.name, one.size, one.kind, one.both) == ("n", 7, "k", "n k")
    assert [each.name for each in dataclasses.fields(Longer)] == ["name", "size", "kind"]
    assert one == Longer(name="n", kind="k", size=7) != Longer(name="n", kind="k", size=8)
    assert repr(one).endswith("Longer(name='n', size=7, kind='k')")
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'kind'"):
        Longer(name="n")
    assert (Same(1).twice(), Same.__match_args__) == (6, ("x", "y", "more"))
    assert (Child.__slots__, Child.__match_args__) == (("z",), ("x", "y", "more", "z"))
    assert not hasattr(Child(1), "__dict__")
    assert copy.deepcopy(Child(1, z=5)) == Child(1, z=5) == dataclasses.replace(Child(1), z=5)
    assert hash(Child(1)) == hash(Child(1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Child(1).x = 2
    assert isinstance(Same(1), classes["Point"])


def test_what_follows_the_arguments(classes: dict[str, Any]) -> None:
    Checked = classes["Checked"]
    assert (Checked(1).seen, Checked(2, seen=[5]).seen) == ([1], [5, 2])
    assert repr(Checked(3)).endswith("Checked(x=3)")
    with pytest.raises(ValueError, match="negative"):
        Checked(-1)


def test_functions_of_dataclasses(classes: dict[str, Any]) -> None:
    Point = classes["Point"]
    one = Point(1)
    assert [dataclasses.is_dataclass(each) for each in (Point, one, classes)] == [True, True, False]
    assert dataclasses.replace(one, y=5) == Point(1, 5)
    assert dataclasses.asdict(classes["Box"](one)) == {"content": {"x": 1, "y": 2, "more": ()}}
    assert dataclasses.astuple(one) == (1, 2, ())
    (x, *_) = dataclasses.fields(Point)
    assert (x.name, x.type, x.default) == ("x", "int", dataclasses.MISSING)
    with pytest.raises(TypeError, match="unexpected keyword argument 'q'"):
        dataclasses.replace(one, q=1)


def test_names_of_fields(classes: dict[str, Any]) -> None:
    Child = classes["Child"]
    assert module.list_fields(Child) == module.list_fields(Child(1)) == ("x", "y", "more", "z")
    assert module.list_fields(classes["Late"]) == ("x", "more", "twice")


@pytest.mark.parametrize("source", [dataclasses, module], ids=["the standard library's", "ours"])
def test_changed_copies(classes: dict[str, Any], source: Any) -> None:
    """Those of a parent's fields too; __post_init__ sees them."""
    Child, Checked, Late = classes["Child"], classes["Checked"], classes["Late"]
    assert source.replace(Child(1, z=5), y=4) == Child(1, 4, z=5)
    assert source.replace(classes["Longer"](name="n", kind="k"), kind="q").kind == "q"
    assert source.replace(Checked(1), x=2).seen == [1, 2]
    assert source.replace(Late(1, [3]), x=4).twice == 8
    with pytest.raises(TypeError, match="unexpected keyword argument 'q'"):
        source.replace(Child(1), q=1)
    with pytest.raises(ValueError, match="negative"):
        source.replace(Checked(1), x=-1)


@pytest.mark.parametrize("source", [dataclasses, module], ids=["the standard library's", "ours"])
def test_plain_values(classes: dict[str, Any], source: Any) -> None:
    """Records in lists, dicts and named tuples; a copy of all else."""
    Point, Box = classes["Point"], classes["Box"]
    Pair: Any = collections.namedtuple("Pair", "a b")
    plain = {"x": 1, "y": 2, "more": ()}

    class Undecorated(Point):  # type: ignore[valid-type,misc]
        pass

    numbers = {1}
    content = [Point(1), {"p": Point(1)}, (Point(1), None), Pair(Point(1), "text"), Undecorated(1), numbers]
    found = source.asdict(Box(content))
    assert found == {"content": [plain, {"p": plain}, (plain, None), Pair(plain, "text"), plain, {1}]}
    assert isinstance(found["content"][3], Pair)
    assert found["content"][5] is not numbers
    assert source.asdict(classes["Late"](1)) == {"x": 1, "more": [], "twice": 2}
    assert source.asdict(classes["Longer"](name="n", kind="k")) == {"name": "n", "size": 7, "kind": "k"}


@pytest.mark.parametrize("name", sorted(make(module.dataclass)))
def test_fields(name: str) -> None:
    """All that the standard library says of them."""
    ours, theirs = make(module.dataclass)[name], make(dataclasses.dataclass)[name]
    assert list(map(repr, dataclasses.fields(ours))) == list(map(repr, dataclasses.fields(theirs)))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies(classes: dict[str, Any], copied: Callable[[Any], Any]) -> None:
    one = classes["Point"](1, more=(3,))
    assert copied(one) == one
    bag = classes["Bag"]([1])
    assert copied(bag) == bag


@module.dataclass(frozen=True, slots=True)
class Pickled:
    """At the top of its module, where pickle finds it."""

    x: int


def test_pickle() -> None:
    assert pickle.loads(pickle.dumps(Pickled(4))) == Pickled(4)


def test_a_subclass_by_the_standard_library() -> None:
    Point = make(module.dataclass)["Point"]

    @dataclasses.dataclass(frozen=True, slots=True)
    class Sub(Point):  # type: ignore[valid-type,misc]
        z: int = 9

    assert dataclasses.astuple(Sub(1)) == (1, 2, (), 9)
    assert [each.name for each in dataclasses.fields(Point)] == ["x", "y", "more"]


def test_several_threads() -> None:
    """They make the first instances at the same moment."""
    for _ in range(50):
        Bag = make(module.dataclass)["Bag"]
        barrier = threading.Barrier(4)
        found: list[Any] = []

        def first(Bag: Any = Bag, barrier: threading.Barrier = barrier, found: list[Any] = found) -> None:
            barrier.wait(30)
            found.append(Bag([1]))

        threads = [threading.Thread(target=first) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert found == [Bag([1])] * 4


def test_nothing_is_compiled_before() -> None:
    """That is what the module is for; what compares comes after what makes an instance."""
    program = """
from __future__ import annotations
import sys
from gpusnap.oci.base.dataclass import asdict, dataclass, field, replace
@dataclass(frozen=True, slots=True)
class A:
    x: int
    more: list[int] = field(default_factory=list)
assert A(1).x == A(x=1).x == 1
@dataclass(frozen=True, slots=True)
class B(A):
    y: int = 2
assert (B(1).x, B(1).y) == (1, 2)
assert replace(B(1), x=3).x == 3
assert asdict(B(1)) == {"x": 1, "more": [], "y": 2}
assert "dataclasses" not in sys.modules and "inspect" not in sys.modules
import dataclasses
made = []
process = dataclasses._process_class
dataclasses._process_class = lambda cls, *given: made.append(cls.__name__) or process(cls, *given)
assert A(1) == A(1) and repr(A(1)) == "A(x=1, more=[])"
assert made == ["A"], made
"""
    subprocess.run([sys.executable, "-c", program], check=True)
