"""The bundle's config.json before a restore."""

from __future__ import annotations

import copy
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from gpusnap.runtime_shim.base.errors import ContainerError
from gpusnap.runtime_shim.gpu.api.device_nodes import Change
from gpusnap.runtime_shim.gpu.api.driver import Node
from gpusnap.runtime_shim.runtime import loopback
from gpusnap.runtime_shim.runtime.bundle import Edits, drop_hook, prepare


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return tmp_path


def write(bundle: Path, *mounts: Any) -> dict[str, Any]:
    config: dict[str, Any] = {"ociVersion": "1.2.0", "mounts": list(mounts)}
    (bundle / "config.json").write_text(json.dumps(config))
    (bundle / "config.json").chmod(0o640)
    return config


def read(bundle: Path) -> Any:
    return json.loads((bundle / "config.json").read_text())["mounts"]


def test_bind_mount_gets_its_type(bundle: Path) -> None:
    """As CDI's mounts need it for crun 1.21; other mounts stay as they are."""
    proc = {"destination": "/proc", "type": "proc", "source": "proc"}
    odd = {"destination": "/odd"}
    config = write(bundle, proc, odd, {"destination": "/a", "source": "/etc", "options": ["ro", "rbind"]})
    prepare(str(bundle), config)
    assert read(bundle)[:2] == [proc, odd]
    assert read(bundle)[2]["type"] == "bind"
    assert stat.S_IMODE((bundle / "config.json").stat().st_mode) == 0o640


def test_link_is_followed(bundle: Path) -> None:
    """A source that is a symbolic link becomes what it points to; a relative one is the runtime's matter."""
    (bundle / "lib.so.1.2").touch()
    os.symlink("lib.so.1.2", bundle / "lib.so.1")
    linked = {"destination": "/l", "type": "bind", "source": str(bundle / "lib.so.1"), "options": ["bind"]}
    relative = {"destination": "/r", "type": "bind", "source": "lib.so.1", "options": ["bind"]}
    prepare(str(bundle), write(bundle, linked, relative))
    assert read(bundle)[0]["source"] == str(bundle / "lib.so.1.2")
    assert read(bundle)[1] == relative


def test_undo(bundle: Path) -> None:
    """What prepare returns puts the very same file back."""
    config = write(bundle, {"destination": "/a", "source": "/etc", "options": ["bind"]})
    before = (bundle / "config.json").read_bytes()
    undo = prepare(str(bundle), config)
    assert (bundle / "config.json").read_bytes() != before
    undo()
    assert (bundle / "config.json").read_bytes() == before
    assert os.listdir(bundle) == ["config.json"]


@pytest.mark.parametrize("mounts", [[], ["text"], [{"options": "rbind"}], [{"destination": "/a"}]])
def test_nothing_to_mend(bundle: Path, mounts: list[Any]) -> None:
    """A file that needs nothing is not written."""
    before = os.stat(bundle / "config.json") if write(bundle, *mounts) else None
    prepare(
        str(bundle), {"mounts": [m for m in mounts if not isinstance(m, dict) or m.get("options") is None]}
    )
    assert before is not None
    assert os.stat(bundle / "config.json").st_ino == before.st_ino


@pytest.mark.parametrize("there", [True, False])
def test_the_notify_socket_of_another_id(bundle: Path, there: bool) -> None:
    """The directory of the container itself is mounted, if there is one."""
    theirs, own = "/storage/of-another/userdata/notify", str(bundle / "notify")
    if there:
        os.mkdir(own)
    prepare(
        str(bundle),
        write(
            bundle,
            {"destination": "/run/notify", "type": "bind", "source": theirs, "options": ["bind"]},
            {"destination": "/run/other", "type": "bind", "source": theirs, "options": ["bind"]},
            {"destination": "/run/notify", "type": "bind", "source": "/srv/notify", "options": ["bind"]},
        ),
    )
    found = json.loads((bundle / "config.json").read_text())["mounts"]
    assert [each["source"] for each in found] == [own if there else theirs, theirs, "/srv/notify"]


def test_bundle_that_cannot_be_written(bundle: Path) -> None:
    """One sentence that names the file."""
    config = write(bundle, {"destination": "/a", "source": "/etc", "options": ["bind"]})
    (bundle / "config.json").unlink()
    with pytest.raises(ContainerError, match=r"config\.json cannot be prepared"):
        prepare(str(bundle), config)


ZERO, THREE = Node("/dev/nvidia0", 195, 0), Node("/dev/nvidia3", 195, 3)
UVM, UVM_HERE = Node("/dev/nvidia-uvm", 511, 0), Node("/dev/nvidia-uvm", 240, 0)


def device(node: Node, **more: Any) -> dict[str, Any]:
    return {"path": node.path, "type": "c", "major": node.major, "minor": node.minor, "fileMode": 438, **more}


def rule(major: int | None, minor: int | None, *, allow: bool = True) -> dict[str, Any]:
    found = {"allow": allow, "type": "c", "major": major, "minor": minor, "access": "rwm"}
    return {key: value for key, value in found.items() if value is not None}


def given_devices(
    bundle: Path, devices: list[Any], rules: list[Any], edits: Edits
) -> tuple[list[Any], list[Any]]:
    """linux.devices and its rules after the edits."""
    config = {"linux": {"devices": devices, "resources": {"devices": rules}}}
    (bundle / "config.json").write_text(json.dumps(config))
    prepare(str(bundle), config, edits)
    found = json.loads((bundle / "config.json").read_text())["linux"]
    return found["devices"], found["resources"]["devices"]


def test_devices_and_rules_become_the_targets(bundle: Path) -> None:
    """Path and numbers change, mode and owner stay; the old GPU's rule is the new one's, in its place."""
    edits = Edits((Change(ZERO, (THREE,)), Change(UVM, (UVM_HERE,))))
    fuse = Node("/dev/fuse", 10, 229)
    every = {"allow": False, "access": "rwm"}
    devices, rules = given_devices(
        bundle,
        [device(fuse), device(ZERO, uid=7), device(UVM)],
        [every, rule(10, 229), rule(195, 0), rule(511, 0), rule(511, None), rule(195, 255)],
        edits,
    )
    assert devices == [device(fuse), device(THREE, uid=7), device(UVM_HERE)]
    assert rules == [every, rule(10, 229), rule(195, 3), rule(240, 0), rule(240, None), rule(195, 255)]


def test_a_kept_name_is_listed_beside_the_new_one(bundle: Path) -> None:
    """Both names, one rule each time: they are one device."""
    kept = Node("/dev/nvidia0", 195, 3)
    devices, rules = given_devices(
        bundle, [device(ZERO)], [rule(195, 0)], Edits((Change(ZERO, (kept, THREE)),))
    )
    assert devices == [device(kept), device(THREE)]
    assert rules == [rule(195, 3)]
    devices, rules = given_devices(bundle, devices, rules, Edits((Change(kept, ()),)))
    assert devices == [device(THREE)]
    assert rules == [rule(195, 3)]


def test_a_gpu_outside_the_plan_is_given_nowhere(bundle: Path) -> None:
    """What config.json says of another GPU of this host is left out, a disk of its number is not."""
    disk = {"path": "/dev/x", "type": "b", "major": 195, "minor": 0}
    devices, rules = given_devices(
        bundle,
        [device(THREE), device(Node("/dev/harmless", 195, 0)), disk],
        [rule(195, 0), rule(195, 3), {**rule(195, 0), "type": "b"}],
        Edits(strange=(ZERO,)),
    )
    assert devices == [device(THREE), disk]
    assert rules == [rule(195, 3), {**rule(195, 0), "type": "b"}]


def test_rules_that_podman_update_has_left_out(bundle: Path) -> None:
    """Each device has one again, after its remap; one that is there stays as it is, read only or not."""
    every, fuse = {"allow": False, "access": "rwm"}, Node("/dev/fuse", 10, 229)
    read_only = rule(10, 229) | {"access": "r"}
    odd = {"path": "/dev/x", "type": "p"}
    devices, rules = given_devices(
        bundle,
        [device(ZERO), device(UVM), device(fuse), odd],
        [every, read_only],
        Edits((Change(ZERO, (THREE,)),), strange=(ZERO,)),
    )
    assert devices == [device(THREE), device(UVM), device(fuse), odd]
    assert rules == [every, read_only, rule(195, 3), rule(511, 0)]


def test_sources_are_this_hosts(bundle: Path) -> None:
    """A bind mount takes its source from the edits; its destination stays, and so do other mounts."""
    library = {"destination": "/lib/libcuda.so.1.2", "source": "/lib/libcuda.so.1.2", "options": ["rbind"]}
    tmpfs = {"destination": "/tmp", "type": "tmpfs", "source": "/lib/libcuda.so.1.2"}
    config = write(bundle, library, tmpfs)
    prepare(str(bundle), config, Edits(sources={"/lib/libcuda.so.1.2": "/usr/lib/libcuda.so.1.3"}))
    assert read(bundle) == [library | {"type": "bind", "source": "/usr/lib/libcuda.so.1.3"}, tmpfs]


@pytest.mark.parametrize(
    "linux", [{}, {"devices": None}, {"resources": {"devices": "all"}}, {"devices": [7]}]
)
def test_odd_configurations_are_left_alone(bundle: Path, linux: Any) -> None:
    """Whatever is no list of devices is the runtime's to judge."""
    config = {"linux": linux}
    (bundle / "config.json").write_text(json.dumps(config))
    prepare(str(bundle), config, Edits((Change(ZERO, (THREE,)),)))
    assert json.loads((bundle / "config.json").read_text()) == {"linux": linux}


def test_our_own_hook_that_is_not_here(bundle: Path) -> None:
    """runc would run it at the restore and fail; one that is here, and everybody else's, stay."""
    here = {"path": str(bundle / "gpusnap-hook"), "args": ["gpusnap-hook", "createRuntime"]}
    (bundle / "gpusnap-hook").touch()
    gone, other = {"path": "/opt/gone/gpusnap-hook"}, {"path": "/opt/gone/other-hook"}
    config = {"hooks": {"createRuntime": [gone, here, other], "poststop": [gone], "odd": None}}
    (bundle / "config.json").write_text(json.dumps(config))
    prepare(str(bundle), config)
    hooks = json.loads((bundle / "config.json").read_text())["hooks"]
    assert hooks == {"createRuntime": [here, other], "poststop": [], "odd": None}


@pytest.mark.parametrize("before", [None, {}, {"createRuntime": [{"path": "/bin/a"}], "poststop": []}])
def test_a_hook_is_the_last_of_its_stage(bundle: Path, before: dict[str, Any] | None) -> None:
    config = write(bundle) | ({"hooks": copy.deepcopy(before)} if before is not None else {})
    undo = prepare(str(bundle), config, Edits(hook={"path": "/bin/b"}))
    hooks = json.loads((bundle / "config.json").read_text())["hooks"]
    assert hooks["createRuntime"] == [*(before or {}).get("createRuntime", []), {"path": "/bin/b"}]
    assert {name for name in hooks if name != "createRuntime"} == {*(before or {})} - {"createRuntime"}
    undo()
    assert "hooks" not in json.loads((bundle / "config.json").read_text())


def test_the_hook_of_a_restore_does_not_stay(bundle: Path) -> None:
    """It is taken out afterwards, and one that a killed restore has left is not kept."""
    mine, other = loopback.hook("runc", {"linux": {"namespaces": [{"type": "network"}]}}), {"path": "/bin/a"}
    config = write(bundle) | {"hooks": {"createRuntime": [other, mine]}}
    prepare(str(bundle), config, Edits(hook=mine))
    assert config["hooks"]["createRuntime"] == [other, mine]
    told: list[bytes] = []
    drop_hook(str(bundle), config, noted=lambda _, after: told.append(after))
    assert (bundle / "config.json").read_bytes() == told[0]
    assert json.loads(told[0])["hooks"]["createRuntime"] == [other]
    drop_hook(str(bundle), config, noted=lambda _, after: told.append(after))
    assert len(told) == 1  # nothing to take out
