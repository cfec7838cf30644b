"""gpusnap-hook: what each stage does, and that no container can fail of it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import DEADLINE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpusnap import hooks
from gpusnap.hooks import main as hook_main
from gpusnap.hooks import record, record_directories
from gpusnap.hooks.documents import HookError
from gpusnap.hooks.main import main
from gpusnap.oci.base import files

ROOT = Path(__file__).parents[3]
ID = "c0ffee" * 10
DRIVER = "/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04"
OPTIONS = ["ro", "nosuid", "nodev", "rbind", "rprivate"]
Hook = Callable[..., tuple[bytes, str]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the records."""
    path = tmp_path / "run" / "gpusnap" / "containers"
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(hooks, "RECORDS", str(path))
    return path


@pytest.fixture
def hook(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Hook:
    """Run a hook on what is on its stdin: its stdout and stderr. The exit code is always 0."""

    def run(data: bytes, *words: str) -> tuple[bytes, str]:
        (tmp_path / "stdin").write_bytes(data)
        with open(tmp_path / "stdin", "rb") as source, open(tmp_path / "stdout", "wb") as target:
            assert main([*words], source=source.fileno(), target=target.fileno()) == 0
        return (tmp_path / "stdout").read_bytes(), capfd.readouterr().err

    return run


@pytest.mark.parametrize("name", ["config", "precreate"])
def test_a_module_is_missing(name: str) -> None:
    """As in an upgrade of gpusnap: the container starts as if there were no hook."""
    code = (
        f"import sys; sys.modules['gpusnap.hooks.{name}'] = None\n"
        "from gpusnap.hooks.main import main; sys.exit(main())"
    )
    data = json.dumps(configuration())
    line = [sys.executable, "-c", code, "precreate"]
    done = subprocess.run(line, input=data, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, data)
    assert done.stderr == f"gpusnap-hook: import of gpusnap.hooks.{name} halted; None in sys.modules\n"


def configuration(*mounts: Any, devices: Any = ("/dev/nvidia0",), **more: Any) -> dict[str, Any]:
    """A container's, as Podman writes it after CDI's edits."""
    entries = [{"path": path, "type": "c", "major": 195, "minor": at} for at, path in enumerate(devices)]
    return {"ociVersion": "1.2.0", "linux": {"devices": entries}, "mounts": [*mounts], **more}


def mount(source: str = DRIVER, options: Any = OPTIONS, **more: Any) -> dict[str, Any]:
    return {"destination": source, "source": source, "options": options, **more}


def as_json(document: Any) -> bytes:
    return json.dumps(document).encode()


def changed(hook: Hook, config: dict[str, Any], *options: str) -> Any:
    """What precreate makes of a configuration; that it changes something."""
    out, err = hook(as_json(config), "precreate", *options)
    assert err == ""
    assert json.loads(out) != config
    return json.loads(out)


def test_bind_mounts_get_their_type(hook: Hook) -> None:
    """As crun 1.21 needs it; a type that is there, and other mounts, stay."""
    config = configuration(
        mount(),
        {"destination": "/proc", "type": "proc"},
        mount("/a", ["bind"], type="none"),
        {"destination": "/b"},
    )
    expected = configuration(*config["mounts"])
    expected["mounts"][0] = {**mount(), "type": "bind"}
    assert changed(hook, config) == expected


@pytest.mark.parametrize(
    ("source", "options", "expected"),
    [
        (DRIVER, ["rbind"], ["rbind", "rprivate"]),
        (DRIVER, None, ["rprivate"]),
        ("/run/nvidia-persistenced/socket", ["bind", "ro"], ["bind", "ro", "rprivate"]),
        ("/lib/firmware/nvidia/580.159.04/gsp_ga10x.bin", ["bind"], ["bind", "rprivate"]),
        ("/usr/bin/nvidia-smi", ["bind"], ["bind", "rprivate"]),
        ("/usr/local/nvidia/lib64/libcuda.so.580.159.04", ["bind"], ["bind", "rprivate"]),
        (DRIVER, ["rbind", "rslave"], ["rbind", "rslave"]),
        (DRIVER, ["bind", "private"], ["bind", "private"]),
        ("/data/nvidia", ["rbind"], ["rbind"]),
    ],
)
def test_propagation_of_the_drivers_files(hook: Hook, source: str, options: Any, expected: Any) -> None:
    """They become rprivate where they say nothing; the user's own mounts stay as he wants them."""
    config = configuration(mount(source, options, type="bind"), mount("/x", ["bind"]))
    assert changed(hook, config)["mounts"][0]["options"] == expected


def test_links_are_followed(hook: Hook, tmp_path: Path) -> None:
    """Those of bind mounts, unless the link itself is to be mounted or leads nowhere."""
    (tmp_path / "file").touch()
    links = [str(tmp_path / name) for name in ("one", "two", "three", "four")]
    for link, target in zip(links, ["file", "file", "nothing", "four"], strict=True):
        os.symlink(target, link)
    mounts = [mount(link, ["bind"], type="bind") for link in links]
    mounts[1]["options"].append("copy-symlink")
    sources = [each["source"] for each in changed(hook, configuration(*mounts))["mounts"]]
    assert sources == [str(tmp_path / "file"), *links[1:]]


def test_criu_annotation(hook: Hook) -> None:
    """Only with its option, only for a GPU's container, and never over one that is there."""
    name = "org.criu.config"
    config = configuration(annotations={"z": "1", "a": "2"})
    assert hook(as_json(config), "precreate") == (as_json(config), "")
    found = changed(hook, config, "--criu-config", "/etc/c.conf")["annotations"]
    assert list(found.items()) == [("z", "1"), ("a", "2"), (name, "/etc/c.conf")]
    assert changed(hook, configuration(), "--criu-config=/c")["annotations"] == {name: "/c"}
    for config in (configuration(annotations={name: ""}), configuration(devices=())):
        assert hook(as_json(config), "precreate", "--criu-config", "/c") == (as_json(config), "")


def test_everything_else_survives(hook: Hook) -> None:
    """Unknown fields, the order of names, numbers, and characters that JSON escapes."""
    mounts = b'{"options":["bind"],"new":[1.5e3,-0.0,18446744073709551615],"destination":"\\ud800","z":{}}'
    data = (
        b'{"z":null,"mounts":[%b],"a":"\\u2028\xc3\xa9\\u0000","linux":{"devices":[{"path":"/dev/kfd"}]}}'
        % mounts
    )
    out, _ = hook(data, "precreate")
    expected = json.loads(data)
    expected["mounts"][0]["type"] = "bind"
    assert json.loads(out) == expected
    assert list(json.loads(out)) == ["z", "mounts", "a", "linux"]
    assert b"18446744073709551615" in out


@pytest.mark.parametrize(
    "config",
    [
        configuration(mount("/a", ["bind"]), devices=()),
        configuration(mount("/nvidia", ["bind"]), devices=("/dev/null", "/dev/dri/renderD128")),
        configuration({**mount(), "type": "bind"}),
        {"annotations": {"nvidia": "kfd"}, "mounts": 7, "linux": []},
    ],
)
def test_nothing_to_do(hook: Hook, config: Any) -> None:
    """Without a GPU, or where all is well, the bytes are the same and there is nothing to say."""
    data = json.dumps(config, indent=3).encode()
    assert hook(data, "precreate") == (data, "")


@pytest.mark.parametrize(
    "found",
    [
        configuration(devices=("/dev/nvidiactl",)),
        configuration(devices=("/dev/dri/renderD128", "/dev/kfd")),
        configuration({"destination": "/dev/nvidia0", "source": "/dev/nvidia0", "type": "bind"}, devices=()),
        configuration({**mount(), "type": "bind"}, devices=()),
    ],
)
def test_containers_with_a_gpu(hook: Hook, found: Any) -> None:
    """By a node in devices or in mounts, of NVIDIA or AMD, or by the driver's library."""
    found["mounts"].append(mount("/a", ["bind"]))
    assert changed(hook, found)["mounts"][-1]["type"] == "bind"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nvidia",
        b'{"nvidia":',
        b'["nvidia"]',
        b"\xff nvidia",
        b'{"linux":{"devices":[{"path":"/dev/nvidia0"}]},"mounts":[{"destination":1e999}]}',
        b'{"linux":{"devices":[{"path":"/dev/nvidia0"}]},"mounts":[{"destination":NaN}]}',
        b'{"linux":{"devices":[{"path":"/dev/nvidia0"}]},"mounts":[],"mounts":[{}]}',
        as_json(configuration({"options": ["bind"]})),
        as_json(configuration(mount(options=[7]))),
        as_json(configuration(annotations={"a": 1})),
        b'{"nvidia":' + b"[" * 99999,
        b'{"nvidia":' + b"9" * 9999 + b"}",
    ],
)
def test_broken_configurations_pass_as_they_came(hook: Hook, data: bytes) -> None:
    """Byte for byte, and with at most one line; the runtime has the last word on them."""
    out, err = hook(data, "precreate")
    assert out == data
    assert len(err.splitlines()) == (1 if b"nvidia" in data else 0)
    assert all(line.startswith("gpusnap-hook: ") for line in err.splitlines())


def test_a_huge_configuration_passes(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    """One beyond the bound is not kept in memory, and not cut."""
    monkeypatch.setattr(hook_main, "_CONFIG_LIMIT", 1 << 20)
    data = b"nvidia" * (1 << 19)
    out, err = hook(data, "precreate")
    assert out == data
    assert err == "gpusnap-hook: the configuration is larger than 1 MiB\n"


@pytest.mark.parametrize(
    "options", [["--criu-config"], ["--criu-config", "a"], ["--criu-config=/a", "b"], ["x"]]
)
def test_wrong_options_of_precreate(hook: Hook, options: list[str]) -> None:
    """They are told, and the configuration passes."""
    data = as_json(configuration(mount()))
    out, err = hook(data, "precreate", *options)
    assert out == data
    assert "is not --criu-config with an absolute path" in err


@pytest.mark.parametrize("stage", ["precreate", "createRuntime", "poststop"])
def test_time_limit(stage: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """A hook whose stdin does not end gives up; precreate passes on what came until then, and the rest."""
    monkeypatch.setattr(hook_main, "SECONDS", 0.05)
    source, feed = os.pipe()
    drain, target = os.pipe()
    os.write(feed, b"nvidia")
    seen: list[bytes] = []

    def slow_feeder() -> None:
        seen.append(os.read(drain, 99))
        os.write(feed, b"rest")
        os.close(feed)

    thread = threading.Thread(target=slow_feeder)
    thread.start()
    try:
        assert main([stage], source=source, target=target) == 0
        assert capfd.readouterr().err == "gpusnap-hook: gave up after 0.05 s\n"
    finally:
        os.close(target)
        thread.join(DEADLINE)
    assert [*seen, os.read(drain, 99)] == ([b"nvidia", b"rest"] if stage == "precreate" else [b"", b""])
    os.close(source)
    os.close(drain)


def test_time_limit_where_it_is_lost(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python swallows an exception that is raised within an object's __del__: the limit holds anyway."""
    monkeypatch.setattr(hook_main, "SECONDS", 0.05)
    monkeypatch.setattr(hook_main, "_AGAIN", 0.05)
    lost: list[BaseException] = []

    class Waiting:
        """Its end takes longer than the hook may."""

        def __del__(self) -> None:
            time.sleep(0.1)

    def record(_: bytes) -> None:
        del [Waiting()][0]
        threading.Event().wait(DEADLINE)

    monkeypatch.setattr(sys, "unraisablehook", lambda each: lost.append(each.exc_value))
    monkeypatch.setattr("gpusnap.hooks.create_runtime.record_gpus", record)
    with open(os.devnull, "rb") as source:
        assert main(["createRuntime"], source=source.fileno()) == 0
    assert capfd.readouterr().err == "gpusnap-hook: gave up after 0.05 s\n"
    assert len(lost) == 1


def test_nobody_reads(hook: Hook, capfd: pytest.CaptureFixture[str]) -> None:
    """A closed stdout is one line."""
    drain, target = os.pipe()
    os.close(drain)
    with open(os.devnull, "rb") as source:
        assert main(["precreate"], source=source.fileno(), target=target) == 0
        os.close(target)
        assert capfd.readouterr().err == ""
        assert main(["precreate"], source=-1, target=target) == 0
    assert capfd.readouterr().err.count("\n") == 1


class Bundle:
    """A container's bundle."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "bundle"
        self.path.mkdir()

    def state(self, config: Any, **changed: Any) -> bytes:
        (self.path / "config.json").write_text(json.dumps(config))
        state = {"ociVersion": "1.0.2", "id": ID, "status": "created", "pid": 42, "bundle": str(self.path)}
        return as_json(state | changed)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle(tmp_path)


def test_record(hook: Hook, bundle: Bundle, folder: Path) -> None:
    """What was given: nodes, CDI's names, NVIDIA_VISIBLE_DEVICES, the driver's version; for root only."""
    config = configuration(
        mount(),
        devices=("/dev/nvidia0", "/dev/nvidiactl", "/dev/null", "/dev/dri/card0"),
        annotations={
            "cdi.k8s.io/x": "nvidia.com/gpu=0, nvidia.com/gpu=1",
            "cdi.k8s.io/y": "nvidia.com/gpu=0",
        },
        process={"env": ["A=b", "NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=void"]},
    )
    assert hook(bundle.state(config), "createRuntime") == (b"", "")
    found = record.read(ID)
    assert found is not None
    assert found.devices == (record.Node("/dev/nvidia0", 195, 0), record.Node("/dev/nvidiactl", 195, 1))
    assert found.cdi == ("nvidia.com/gpu=0", "nvidia.com/gpu=1")
    assert (found.driver, found.visible, found.pid) == ("580.159.04", "void", 42)
    assert (found.container, found.bundle) == (ID, str(bundle.path))
    for path, mode in ((folder, 0o700), (folder / ID, 0o700), (folder / ID / "gpus.json", 0o600)):
        assert stat.S_IMODE(path.stat().st_mode) == mode
    assert os.listdir(folder / ID) == ["gpus.json"]
    assert hook(bundle.state(config, pid=43), "createRuntime") == (b"", "")
    again = record.read(ID)
    assert again is not None
    assert again.pid == 43


def test_record_of_amd(hook: Hook, bundle: Bundle) -> None:
    """The render nodes come with /dev/kfd."""
    hook(bundle.state(configuration(devices=("/dev/kfd", "/dev/dri/renderD128"))), "createRuntime")
    found = record.read(ID)
    assert found is not None
    assert [node.path for node in found.devices] == ["/dev/dri/renderD128", "/dev/kfd"]
    assert (found.driver, found.visible, found.cdi) == ("", "", ())


def test_no_record_without_a_gpu(hook: Hook, bundle: Bundle, folder: Path) -> None:
    """Nothing is made for an ordinary container, not even the folder."""
    config = configuration(devices=(), process={"env": ["NVIDIA_VISIBLE_DEVICES=all"]}, x="nvidia")
    assert hook(bundle.state(config), "createRuntime") == (b"", "")
    assert not folder.exists()
    assert record.read(ID) is None


BAD_IDS = ["", ".", "..", "../x", "a/b", "/etc", "a\0b", "a\n", "-a", "a" * 256, "ä", 7, None, ["a"]]


@pytest.mark.parametrize("container", BAD_IDS)
@pytest.mark.parametrize("stage", ["createRuntime", "poststop"])
def test_bad_ids(
    hook: Hook, bundle: Bundle, folder: Path, tmp_path: Path, container: Any, stage: str
) -> None:
    """None of them reaches a path, in a hook or in the reading of a record."""
    (folder / "other").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    _, err = hook(bundle.state(configuration(), id=container), stage)
    assert len(err.splitlines()) == 1
    known = {tmp_path / "stdin", tmp_path / "stdout", bundle.path / "config.json"}
    assert set(tmp_path.rglob("*")) - known == set(before)
    if isinstance(container, str):
        with pytest.raises(HookError):
            record.read(container)


def test_links_lead_nowhere(hook: Hook, bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    """A link in the place of a container's folder is neither written through nor emptied."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    folder.mkdir(parents=True)
    (folder / ID).symlink_to(elsewhere)
    for stage in ("createRuntime", "poststop"):
        _, err = hook(bundle.state(configuration()), stage)
        assert len(err.splitlines()) == 1
    assert os.listdir(elsewhere) == ["file"]
    assert (folder / ID).is_symlink()


def test_poststop(hook: Hook, bundle: Bundle, folder: Path, tmp_path: Path) -> None:
    """All that was kept for the container goes, and nothing else; a second time is fine."""
    hook(bundle.state(configuration()), "createRuntime")
    (folder / "other").mkdir()
    (folder / ID / "inner").mkdir()
    (folder / ID / "inner" / "link").symlink_to(tmp_path)
    state = as_json({"ociVersion": "1.2.0", "id": ID, "status": "stopped", "bundle": "/gone"})
    assert hook(state, "poststop") == (b"", "")
    assert os.listdir(folder) == ["other"]
    assert hook(state, "poststop") == (b"", "")


def test_poststop_while_a_record_is_written(
    hook: Hook, bundle: Bundle, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a container and the start of one of the same ID: a file that is gone is none to remove."""
    hook(bundle.state(configuration()), "createRuntime")
    real = os.unlink

    def unlink(name: str, **more: int) -> None:
        real(name, **more)
        real(name, **more)

    monkeypatch.setattr(os, "unlink", unlink)
    record_directories.remove_directory(ID)
    monkeypatch.undo()
    assert not (folder / ID).exists()


def test_a_directory_that_is_removed_while_a_record_is_written(
    hook: Hook, bundle: Bundle, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made again: the record of the new container is not lost."""
    real, removed = files.replace, list[str]()

    def replace(name: str, data: bytes, directory: int, *, sync: bool) -> None:
        if not removed:
            (folder / ID).rmdir()
            removed.append(ID)
        real(name, data, directory, sync=sync)

    monkeypatch.setattr(record, "replace", replace)
    assert hook(bundle.state(configuration()), "createRuntime")[1] == ""
    found = record.read(ID)
    assert found is not None
    assert found.container == ID


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", "x", '{"version": 2}', "FIFO", "OTHER", "LINK", "LARGE"],
)
def test_broken_records(
    hook: Hook, bundle: Bundle, folder: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are an error, and reading one does not hang."""
    hook(bundle.state(configuration()), "createRuntime")
    path = folder / ID / "gpus.json"
    whole = path.read_text()
    path.unlink()
    if text == "FIFO":
        os.mkfifo(path)
    elif text == "LINK":
        (folder / ID / "other").write_text(whole)
        path.symlink_to("other")
    else:
        path.write_text({"OTHER": whole.replace(ID, "c0ffee")}.get(text, whole if text == "LARGE" else text))
        monkeypatch.setattr(record, "_LIMIT", 100 if text == "LARGE" else 9999)
    with pytest.raises(HookError, match=f"{ID[:8]}|gpus.json"):
        record.read(ID)


def test_folder_that_cannot_be_made(hook: Hook, bundle: Bundle, folder: Path) -> None:
    """A record that cannot be kept is one line."""
    folder.parent.write_text("")
    _, err = hook(bundle.state(configuration()), "createRuntime")
    assert err.startswith(f"gpusnap-hook: the record of container {ID} cannot be written: ")


def test_unknown_stage(hook: Hook) -> None:
    """One line, and the container lives."""
    assert hook(b"{}", "poststart")[1].startswith("gpusnap-hook: there is no stage 'poststart'; usage: ")
    assert "takes no options" in hook(b"{}", "poststop", "x")[1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "id": JSON | st.just(ID),
        "bundle": JSON | st.sampled_from(["/", "/proc", "/dev/null"]),
        "mounts": JSON | st.lists(st.fixed_dictionaries({"destination": JSON, "options": JSON}), max_size=3),
        "linux": JSON | st.fixed_dictionaries({"devices": st.lists(st.fixed_dictionaries({"path": JSON}))}),
        "annotations": JSON,
        "nvidia": JSON,
    },
)


@given(
    data=st.binary(max_size=99) | st.binary(max_size=9).map(lambda end: b"nvidia" + end) | FIELDS.map(as_json)
)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_anything_on_stdin(hook: Hook, data: bytes) -> None:
    """Exit code 0, at most a line on stderr; precreate prints the same bytes where there is no GPU."""
    for stage in ("precreate", "createRuntime", "poststop"):
        out, err = hook(data, stage)
        assert len(err.splitlines()) <= 1
        assert out == (data if stage == "precreate" else b"")


@given(config=FIELDS)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_anything_with_a_gpu(hook: Hook, bundle: Bundle, config: dict[str, Any]) -> None:
    """Whatever stands beside a GPU: an error and the same bytes, or nothing but what the mounts lack."""
    config["linux"] = {"devices": [{"path": "/dev/nvidia0", "major": 195, "minor": 0}]}
    data = as_json(config)
    out, err = hook(data, "precreate")
    if err:
        assert out == data
    else:
        assert {**json.loads(out), "mounts": 0} == {**json.loads(data), "mounts": 0}
    assert len(hook(bundle.state(config), "createRuntime")[1].splitlines()) <= 1


HEAVY = ("dataclasses", "jsonschema", "typing", "json", "re", "ctypes", "subprocess", "signal", "pathlib")


def test_the_bundle_is_found_without_a_parser(hook: Hook, bundle: Bundle) -> None:
    """Or with one, where the state is not so plain; a GPU is never missed."""
    tricky = [
        {},
        {"id": "bundle"},
        {"annotations": {"bundle": "/x"}},
        {"annotations": {"a": '"bundle":"/x"'}},
    ]
    for changes in tricky:
        (bundle.path / "config.json").unlink(missing_ok=True)
        state = json.loads(bundle.state(configuration())) | changes
        for data in (json.dumps(state), json.dumps(dict(reversed(state.items())), indent=2)):
            assert hook(data.encode(), "createRuntime") == (b"", "")
            assert record.read(state["id"]) is not None
            hook(data.encode(), "poststop")
            assert record.read(state["id"]) is None


@pytest.mark.parametrize("stage", ["precreate", "createRuntime", "poststop"])
def test_an_ordinary_container_pays_little(stage: str, bundle: Bundle, tmp_path: Path) -> None:
    """Nothing heavy is imported for a container without a GPU."""
    program = (
        "import sys; from gpusnap import hooks; from gpusnap.hooks.main import main;"
        f"hooks.RECORDS = {str(tmp_path)!r} + '/none'; main([{stage!r}]);"
        f"print(*{{*{HEAVY}}} & {{*sys.modules}}, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", program],
        cwd=ROOT,
        input=bundle.state(configuration(devices=())),
        capture_output=True,
        check=True,
    )
    assert done.stderr == b"\n"
