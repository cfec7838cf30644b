"""CDI files: what vendors write is read, and what is wrong is named by file and field."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import find, given
from hypothesis import strategies as st

from gpusnap.runtime_shim.gpu.cdi import spec as cdi
from gpusnap.runtime_shim.gpu.cdi.folders import load, read
from gpusnap.runtime_shim.gpu.cdi.spec import (
    CdiError,
    Device,
    DeviceNode,
    Edits,
    Hook,
    Mount,
    parse,
)

CORPUS = sorted((Path(__file__).parents[3] / "corpus" / "cdi").iterdir())
UUID = "GPU-5067b0de-0000-4000-8000-000000000000"

# As nvidia-ctk 1.17 writes it for one GPU, shortened.
NVIDIA = f"""---
cdiVersion: 0.5.0
containerEdits:
  deviceNodes:
  - path: /dev/nvidiactl
  - path: /dev/nvidia-uvm
  env:
  - NVIDIA_VISIBLE_DEVICES=void
  hooks:
  - args:
    - nvidia-cdi-hook
    - create-symlinks
    - --link
    - libcuda.so.1::/usr/lib/x86_64-linux-gnu/libcuda.so
    hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
  mounts:
  - containerPath: /usr/lib/x86_64-linux-gnu/libcuda.so.560.35.03
    hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.560.35.03
    options:
    - ro
    - nosuid
    - nodev
    - bind
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
    - path: /dev/dri/renderD128
      hostPath: /dev/dri/renderD129
  name: "0"
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
  name: {UUID}
- containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
  name: all
kind: nvidia.com/gpu
"""

# As AMD's container toolkit writes it: JSON, device nodes alone.
AMD = """{
  "cdiVersion": "0.6.0",
  "kind": "amd.com/gpu",
  "devices": [
    {"name": "0", "containerEdits": {"deviceNodes": [
      {"path": "/dev/kfd", "hostPath": "/dev/kfd", "type": "c", "major": 234, "minor": 0},
      {"path": "/dev/dri/renderD128", "type": "c", "major": 226, "minor": 128, "permissions": "rw"}]}},
    {"name": "all", "containerEdits": {"deviceNodes": [{"path": "/dev/kfd"}]}}
  ],
  "containerEdits": {}
}
"""


def a_spec(**changes: Any) -> dict[str, Any]:
    """A small sound spec, as JSON has it."""
    device = {"name": "one", "containerEdits": {"env": ["A=b"]}}
    return {"cdiVersion": "1.1.0", "kind": "vendor.com/gpu", "devices": [device], **changes}


def parsed(**changes: Any) -> cdi.Spec:
    return parse(json.dumps(a_spec(**changes)).encode(), "/etc/cdi/x.json")


def said_of(content: Any) -> str:
    """What is wrong with it; "" where nothing is."""
    try:
        parse(json.dumps(content).encode(), "x.json")
    except CdiError as error:
        return str(error)
    return ""


def wrong(**changes: Any) -> str:
    """What is said of the small spec with these changes."""
    with pytest.raises(CdiError) as caught:
        parsed(**changes)
    assert str(caught.value).startswith("/etc/cdi/x.json: ")
    return str(caught.value).removeprefix("/etc/cdi/x.json: ")


def edits(**fields: Any) -> dict[str, Any]:
    return {"containerEdits": fields}


def with_node(**fields: Any) -> dict[str, Any]:
    return edits(deviceNodes=[{"path": "/dev/a", **fields}])


def with_hook(**fields: Any) -> dict[str, Any]:
    return edits(hooks=[{"hookName": "poststop", "path": "/a", **fields}])


def node(name: str, **fields: Any) -> DeviceNode:
    empty = dict.fromkeys(("major", "minor", "file_mode", "uid", "gid"))
    return DeviceNode(**{"path": name, "host_path": name, "type": "", "permissions": "", **empty, **fields})


def test_nvidia() -> None:
    """A file as nvidia-ctk writes it, field by field."""
    spec = parse(NVIDIA.encode(), "/etc/cdi/nvidia.yaml")
    path = "/usr/lib/x86_64-linux-gnu/libcuda.so.560.35.03"
    assert (spec.path, spec.version, spec.kind) == ("/etc/cdi/nvidia.yaml", "0.5.0", "nvidia.com/gpu")
    link = "libcuda.so.1::/usr/lib/x86_64-linux-gnu/libcuda.so"
    args = ("nvidia-cdi-hook", "create-symlinks", "--link", link)
    assert spec.edits == Edits(
        env=("NVIDIA_VISIBLE_DEVICES=void",),
        nodes=(node("/dev/nvidiactl"), node("/dev/nvidia-uvm")),
        mounts=(Mount(path, path, "", ("ro", "nosuid", "nodev", "bind")),),
        hooks=(Hook("createContainer", "/usr/bin/nvidia-cdi-hook", args, (), None),),
    )
    assert [device.name for device in spec.devices] == ["0", UUID, "all"]
    render = node("/dev/dri/renderD128", host_path="/dev/dri/renderD129")
    assert spec.devices[0] == Device("0", Edits(nodes=(node("/dev/nvidia0"), render)))


def test_amd() -> None:
    """A file as AMD's toolkit writes it."""
    spec = parse(AMD.encode(), "/run/cdi/amd.json")
    assert (spec.version, spec.kind, spec.edits) == ("0.6.0", "amd.com/gpu", Edits())
    assert spec.devices[0].edits.nodes == (
        node("/dev/kfd", type="c", major=234, minor=0),
        node("/dev/dri/renderD128", type="c", major=226, minor=128, permissions="rw"),
    )


def test_json_in_a_yaml_file() -> None:
    """JSON is YAML, and gives the same."""
    assert parse(AMD.encode(), "x.yaml").devices == parse(AMD.encode(), "x.json").devices


def test_what_came_later() -> None:
    """Version 1.1.0 with all that it has."""
    spec = parsed(
        annotations={"a": "b"},
        containerEdits={
            "additionalGids": [44, 109],
            "intelRdt": {"closID": "x", "schemata": ["L3:0=f"], "enableMonitoring": True},
            "netDevices": [{"hostInterfaceName": "eth1", "name": "eth0"}],
            "hooks": [{"hookName": "poststop", "path": "/bin/x", "env": ["A="], "timeout": 3}],
            "mounts": [{"hostPath": "tmpfs", "containerPath": "/t", "type": "tmpfs", "options": None}],
        },
    )
    assert spec.edits.additional_gids == (44, 109)
    assert spec.edits.hooks == (Hook("poststop", "/bin/x", (), ("A=",), 3),)
    assert spec.edits.mounts == (Mount("tmpfs", "/t", "tmpfs", ()),)


@pytest.mark.parametrize("written", ["0666", "0o666", "438", "0x1b6"])
def test_numbers_in_yaml(written: str) -> None:
    """A file mode may be written as YAML 1.1 writes octal numbers."""
    text = NVIDIA.replace("- path: /dev/nvidiactl", f"- path: /dev/nvidiactl\n    fileMode: {written}")
    assert parse(text.encode(), "x.yaml").edits.nodes[0].file_mode == 0o666


@pytest.mark.parametrize("written", ["0", "1:0", "0:0", "2024-01-01", "yes"])
def test_names_in_yaml_without_quotes(written: str) -> None:
    """A name is what is written, not the number, date or truth that YAML makes of it."""
    assert parse(NVIDIA.replace('"0"', written).encode(), "x.yaml").devices[0].name == written


@pytest.mark.parametrize(
    ("where", "changes"),
    [
        ("", {"foo": 1}),
        ("containerEdits", edits(foo=1)),
        ("devices[0]", {"devices": [{"name": "a", "foo": 1}]}),
        ("devices[1].containerEdits", {"devices": [*a_spec()["devices"], {"name": "b", **edits(foo=1)}]}),
        ("containerEdits.deviceNodes[0]", edits(deviceNodes=[{"path": "/dev/a", "foo": 1}])),
        ("containerEdits.mounts[0]", edits(mounts=[{"hostPath": "/a", "foo": 1}])),
        ("containerEdits.hooks[0]", edits(hooks=[{"foo": 1}])),
        ("containerEdits.intelRdt", edits(intelRdt={"foo": 1})),
        ("containerEdits.netDevices[0]", edits(netDevices=[{"foo": 1}])),
    ],
)
def test_an_unknown_field(where: str, changes: dict[str, Any]) -> None:
    """It is named, with where it is."""
    assert wrong(**changes) == (f"{where}: " if where else "") + "unknown field 'foo'"


@pytest.mark.parametrize(
    ("since", "where", "changes"),
    [
        ("0.4.0", "containerEdits.mounts[0].type", edits(mounts=[{"type": "bind"}])),
        ("0.5.0", "containerEdits.deviceNodes[0].hostPath", edits(deviceNodes=[{"hostPath": "/dev/a"}])),
        ("0.5.0", "devices[0].name", {"devices": [{"name": "0", **edits(env=["A=b"])}]}),
        ("0.6.0", "annotations", {"annotations": {"a": "b"}}),
        ("0.6.0", "devices[0].annotations", {"devices": [{"name": "a", "annotations": {"a": "b"}}]}),
        ("0.6.0", "kind", {"kind": "vendor.com/a.b"}),
        ("0.7.0", "containerEdits.additionalGids", edits(additionalGids=[1])),
        ("0.7.0", "containerEdits.intelRdt", edits(intelRdt={"closID": "a"})),
        ("1.1.0", "containerEdits.netDevices", edits(netDevices=[{"name": "a"}])),
        ("1.1.0", "containerEdits.intelRdt.schemata", edits(intelRdt={"schemata": ["a"]})),
    ],
)
def test_a_field_newer_than_the_file(since: str, where: str, changes: dict[str, Any]) -> None:
    """It is refused, and the version that it needs is told; in a file of that version it is not."""
    before = cdi._VERSIONS[cdi._VERSIONS.index(since) - 1]
    with pytest.raises(CdiError, match=f"was added in CDI {since}") as caught:
        parsed(cdiVersion=before, **changes)
    assert str(caught.value).startswith(f"/etc/cdi/x.json: {where}: ")
    assert since in caught.value.hint
    assert "was added in" not in said_of(a_spec(cdiVersion=since, **changes))


def test_empty_values_need_no_version() -> None:
    """As in CDI's own library, a field that says nothing is as good as none."""
    spec = parsed(cdiVersion="v0.3.0", annotations={}, containerEdits={"additionalGids": [], "env": None})
    assert spec.version == "0.3.0"


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ("cdiVersion: is missing (0.3.0 to 1.1.0)", {"cdiVersion": None}),
        ("cdiVersion: '1.2.0' is not a known version (0.3.0 to 1.1.0)", {"cdiVersion": "1.2.0", "new": 1}),
        ("cdiVersion: 1 is not a known version (0.3.0 to 1.1.0)", {"cdiVersion": 1}),
        ("kind: is missing", {"kind": None}),
        ("kind: 'gpu' is not in the form vendor/class (nvidia.com/gpu)", {"kind": "gpu"}),
        ("kind: 'a/b/c' is not in the form vendor/class (nvidia.com/gpu)", {"kind": "a/b/c"}),
        ("kind: 'a/b\\n' is not in the form vendor/class (nvidia.com/gpu)", {"kind": "a/b\n"}),
        ("devices: lists no device", {"devices": []}),
        ("devices: is not a list", {"devices": {}}),
        ("devices[0]: is not an object with fields", {"devices": ["0"]}),
        ("devices: the device 'one' is listed twice", {"devices": a_spec()["devices"] * 2}),
        ("devices[0].name: '../a' is not a valid name for a device", {"devices": [{"name": "../a"}]}),
        ("devices[0].containerEdits: does not edit the container", {"devices": [{"name": "a"}]}),
        ("annotations: is not a map of strings", {"annotations": {"a": 1}}),
        ("containerEdits.env[1]: '=b' is not in the form NAME=VALUE", edits(env=["A=b", "=b"])),
        ("containerEdits.env[0]: is not a string", edits(env=[None])),
        ("containerEdits.deviceNodes[0].path: is missing", edits(deviceNodes=[{}])),
        ("containerEdits.deviceNodes[0].major: is not an integer", with_node(major=-1)),
        ("containerEdits.deviceNodes[0].minor: is not an integer", with_node(minor=1.5)),
        ("containerEdits.deviceNodes[0].uid: is not an integer", with_node(uid=True)),
        ("containerEdits.deviceNodes[0].type: 'x' is not a valid type", with_node(type="x")),
        (
            "containerEdits.deviceNodes[0].permissions: 'rwx' must be",
            with_node(permissions="rwx"),
        ),
        ("containerEdits.mounts[0].hostPath: is missing", edits(mounts=[{"containerPath": "/a"}])),
        ("containerEdits.mounts[0].containerPath: is missing", edits(mounts=[{"hostPath": "/a"}])),
        ("containerEdits.hooks[0].hookName: 'x' is not one of", with_hook(hookName="x")),
        ("containerEdits.hooks[0].path: 'a' is not an absolute", with_hook(path="a")),
        (
            "containerEdits.hooks[0].timeout: is not an integer",
            with_hook(timeout=0),
        ),
        (
            "containerEdits.intelRdt.enableCMT: is no longer a field in CDI 1.1.0",
            edits(intelRdt={"enableCMT": True}),
        ),
        ("containerEdits.netDevices[0].name: is missing", edits(netDevices=[{"hostInterfaceName": "a"}])),
        ("containerEdits.env: has 5000 entries", edits(env=["A=b"] * 5000)),
        ("containerEdits.env[0]: is too long", edits(env=["A=" + "b" * (1 << 18)])),
    ],
)
def test_what_is_wrong(said: str, changes: dict[str, Any]) -> None:
    """Each error says where it is and what it is."""
    assert wrong(**changes).startswith(said)


def test_too_large() -> None:
    """A file of more than 16 MiB is not looked into."""
    with pytest.raises(CdiError, match=r"x\.yaml: is larger than 16 MiB"):
        parse(b"#" * ((16 << 20) + 1), "x.yaml")


@pytest.mark.parametrize("name", ["x.json", "x.yaml"])
@pytest.mark.parametrize("opening", ["[", '{"a":', "- ", "? "])
def test_any_depth(name: str, opening: str) -> None:
    """No nesting is too deep for us to refuse it."""
    with pytest.raises(CdiError):
        parse(opening.encode() * 100_000, name)


def test_without_pyyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    """YAML needs a package, which is named; JSON does not."""
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(CdiError) as caught:
        parse(NVIDIA.encode(), "x.yaml")
    assert "PyYAML" in caught.value.hint
    assert parse(AMD.encode(), "x.json").kind == "amd.com/gpu"


def test_the_slow_loader_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML built without libyaml is as good."""
    expected = parse(NVIDIA.encode(), "x.yaml")
    monkeypatch.delattr("yaml.CSafeLoader")
    assert parse(NVIDIA.encode(), "x.yaml") == expected


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.name)
def test_corpus(file: Path) -> None:
    """Files that once were, or could be, trouble: each is refused, and the message names it."""
    with pytest.raises(CdiError) as caught:
        read(str(file))
    assert str(caught.value).startswith(str(file))
    assert len(caught.value.sentence()) < len(str(file)) + 400


def test_the_corpus_is_there() -> None:
    """The test above looks at something."""
    assert len(CORPUS) >= 10


NAMES = sorted({*cdi._SPEC, *cdi._DEVICE, *cdi._EDITS, *cdi._NODE, *cdi._MOUNT, *cdi._HOOK, *cdi._RDT})
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
WORDS = st.sampled_from(["0.3.0", "1.1.0", "nvidia.com/gpu", "0", "A=b", "/a", "c", "rw", "createContainer"])
ANY = st.recursive(
    SCALARS | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6),
    max_leaves=20,
)
SHAPED = st.fixed_dictionaries(
    {
        "cdiVersion": st.sampled_from(cdi._VERSIONS) | SCALARS,
        "kind": st.just("nvidia.com/gpu") | SCALARS,
        "devices": st.lists(st.fixed_dictionaries({"name": WORDS, "containerEdits": ANY}), max_size=3) | ANY,
    },
    optional={"containerEdits": ANY, "annotations": ANY},
)
# What is wrong with these is in a text at most.
TEXT = WORDS | st.text(st.sampled_from("a=/é\0\ud800"), min_size=1, max_size=3)
SOUND = st.fixed_dictionaries(
    {
        "env": st.lists(st.builds("A{}={}".format, TEXT, TEXT), max_size=2),
        "deviceNodes": st.lists(st.fixed_dictionaries({"path": TEXT}), min_size=1, max_size=2),
        "mounts": st.lists(st.fixed_dictionaries({"hostPath": TEXT, "containerPath": TEXT}), max_size=2),
    }
).map(
    lambda edits: {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [{"name": "0", "containerEdits": edits}],
    }
)


def outcome(data: bytes, name: str) -> cdi.Spec | None:
    """The spec or None; any other error than CdiError is a failure of the test."""
    try:
        return parse(data, name)
    except CdiError:
        return None


@given(st.binary(max_size=300), st.sampled_from(["x.json", "x.yaml"]))
def test_any_bytes(data: bytes, name: str) -> None:
    """Whatever a file holds: a spec or a CdiError."""
    outcome(data, name)


@given(st.text(st.sampled_from("{}[]:,-?&*!|>'\"%@`#~ \n\tab01<é\ud800"), max_size=60), st.integers(0, 400))
def test_any_yaml(text: str, at: int) -> None:
    """Whatever stands in the middle of a sound file."""
    outcome((NVIDIA[:at] + text + NVIDIA[at:]).encode("utf-8", "surrogatepass"), "x.yaml")


@given(SOUND | SHAPED | ANY)
def test_any_structure(content: Any) -> None:
    """Any JSON value: a spec or a CdiError; a spec's texts are plain strings that a path can be."""
    spec = outcome(json.dumps(content).encode(), "x.json")
    if spec is not None:
        for each in (spec.edits, *(device.edits for device in spec.devices)):
            texts = (*each.env, *(node.host_path for node in each.nodes), *(m.host_path for m in each.mounts))
            assert all(type(text) is str and text and b"\0" not in os.fsencode(text) for text in texts)


def test_some_are_specs() -> None:
    """The test above looks at something."""
    find(SOUND, lambda content: outcome(json.dumps(content).encode(), "x.json") is not None)


Folders = Callable[[dict[str, str]], tuple[str, str]]


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """Writes files into a static and a dynamic folder."""

    def write(files: dict[str, str]) -> tuple[str, str]:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        return str(tmp_path / "etc"), str(tmp_path / "run")

    return write


def of(kind: str, *names: str, env: str = "A=b") -> str:
    return json.dumps(
        a_spec(kind=kind, devices=[{"name": name, "containerEdits": {"env": [env]}} for name in names])
    )


def test_load(folders: Folders, tmp_path: Path) -> None:
    """*.json and *.yaml by name, folder after folder; nothing else, and no folder within."""
    (tmp_path / "etc/dir.json").mkdir(parents=True)
    where = folders(
        {
            "etc/b.json": of("a.com/b", "one"),
            "etc/a.yaml": NVIDIA,
            "etc/c.txt": "{",
            "run/a.json": of("a.com/a", "x"),
        }
    )
    assert [spec.path for spec in load(where)] == [
        f"{tmp_path}/{name}" for name in ("etc/a.yaml", "etc/b.json", "run/a.json")
    ]


def test_no_folder(tmp_path: Path) -> None:
    """A host without CDI has no specs."""
    assert load([str(tmp_path / "none")]) == ()


def test_the_later_folder_wins(folders: Folders) -> None:
    """Device by device; a file of which nothing is left is not there."""
    where = folders(
        {
            "etc/a.json": of("a.com/a", "one", "two", env="OF=etc"),
            "etc/b.json": of("a.com/b", "one", env="OF=etc"),
            "run/c.json": of("a.com/a", "two", env="OF=run"),
            "run/d.json": of("a.com/b", "one", env="OF=run"),
        }
    )
    found = {(spec.kind, device.name): device.edits.env for spec in load(where) for device in spec.devices}
    assert found == {
        ("a.com/a", "one"): ("OF=etc",),
        ("a.com/a", "two"): ("OF=run",),
        ("a.com/b", "one"): ("OF=run",),
    }
    assert [Path(spec.path).name for spec in load(where)] == ["a.json", "c.json", "d.json"]


def test_one_folder_by_two_names(folders: Folders, tmp_path: Path) -> None:
    """/var/run is a link to /run: a device there is not in two files."""
    _, run = folders({"run/a.json": of("a.com/a", "one")})
    (tmp_path / "var").symlink_to("run")
    assert len(load([str(tmp_path / "var"), run])) == 1


def test_a_device_in_two_files_of_a_folder(folders: Folders) -> None:
    """It is nobody's, as with CDI; the others stay."""
    where = folders({"etc/a.json": of("a.com/a", "one", "two"), "etc/b.json": of("a.com/a", "one")})
    with pytest.raises(CdiError, match=r"b\.json: device 'one' of a\.com/a is also in .*a\.json"):
        load(where)
    told: list[CdiError] = []
    assert [[d.name for d in spec.devices] for spec in load(where, report=told.append)] == [["two"]]
    assert len(told) == 1


def test_a_broken_file(folders: Folders) -> None:
    """It is an error, unless somebody wants to be told: then the others are read all the same."""
    where = folders({"etc/a.json": "{", "etc/b.yaml": NVIDIA, "etc/c.yaml": "x: ["})
    with pytest.raises(CdiError, match=r"a\.json"):
        load(where)
    told: list[CdiError] = []
    assert [spec.kind for spec in load(where, report=told.append)] == ["nvidia.com/gpu"]
    assert [str(error).split(":")[0].rpartition("/")[2] for error in told] == ["a.json", "c.yaml"]


def test_what_is_no_file(tmp_path: Path) -> None:
    """A FIFO is not waited for, and a link that leads nowhere is told."""
    os.mkfifo(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").symlink_to("none")
    told: list[CdiError] = []
    assert load([str(tmp_path)], report=told.append) == ()
    assert ["is not a regular file" in str(told[0]), "it does not exist" in str(told[1])] == [True, True]


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    """What stands in place of the folder is an error, and is told."""
    (tmp_path / "cdi").write_text("")
    with pytest.raises(CdiError, match="cannot read the CDI directory"):
        load([str(tmp_path / "cdi")])
