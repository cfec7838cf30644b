"""Settings: each key taken or refused by name, from the file and from annotations."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fakes import POISON
from hypothesis import given
from hypothesis import strategies as st

from gpusnap.runtime_shim.base.errors import SettingsError
from gpusnap.runtime_shim.setting_keys import TABLE
from gpusnap.runtime_shim.settings import (
    ANNOTATION_PREFIX,
    Criu,
    Nvidia,
    Settings,
    Store,
    apply_annotations,
    load,
    load_only,
)

DOCUMENT = Path(__file__).parents[3] / "docs" / "settings.md"

# Key, TOML, and the value that it becomes.
GOOD: list[tuple[str, str, Any]] = [
    ("runtime", '"runc"', "runc"),
    ("runtime", '"/usr/bin/crun"', "/usr/bin/crun"),
    ("runtime", '""', ""),
    ("gpu-map", '"0=3, 1=GPU-12ab"', (("0", "3"), ("1", "GPU-12ab"))),
    ("gpu-map", '""', ()),
    ("keep-names", "true", True),
    ("hooks", "[]", ()),
    ("hooks", '["update-ldcache"]', ("update-ldcache",)),
    ("memory.pages", '"criu"', "criu"),
    ("memory.chunk-size", '"4M"', 4 << 20),
    ("memory.chunk-size", "4096", 4096),
    ("memory.level", "0", 0),
    ("memory.level", "19", 19),
    ("memory.ceiling", '"2G"', 2 << 30),
    ("memory.threads", "16", 16),
    ("memory.demand-paging", "false", False),
    ("memory.parallel-restore", "false", False),
    ("memory.sync", "false", False),
    ("memory.keep", "false", False),
    ("memory.keep-folder", '"/srv/kept"', "/srv/kept"),
    ("retries", "0", 0),
    ("retries", "100", 100),
    ("nvidia.lock-timeout", "30", 30.0),
    ("nvidia.lock-timeout", "0.001", 0.001),
    ("nvidia.lock-timeout", "86400", 86400.0),
    ("nvidia.allow-nccl", "true", True),
    ("nvidia.driver", '"criu-plugin"', "criu-plugin"),
    ("nvidia.libdir", '"/opt/criu"', "/opt/criu"),
    ("nvidia.cuda-checkpoint", '"/opt/nv/cuda-checkpoint"', "/opt/nv/cuda-checkpoint"),
    ("nvidia.cuda-checkpoint", '""', ""),
    ("amd.libdir", '"/opt/criu"', "/opt/criu"),
    ("amd.skip-checks", '["firmware", "numa"]', ("firmware", "numa")),
    ("amd.buffer", '"64M"', 64 << 20),
    ("criu.link-remap", "false", False),
    ("criu.cut-files", "true", True),
    ("criu.ghost-limit", "0", 0),
    ("criu.ghost-limit", "1048576", 1 << 20),
    ("criu.ghost-limit", '"300M"', 300 << 20),
    ("criu.ghost-limit", '"2GiB"', 2 << 30),
    ("criu.ghost-limit", '"7 k"', 7 << 10),
    ("criu.ghost-limit", '"1t"', 1 << 40),
    ("criu.ghost-limit", '"12"', 12),
    ("criu.timeout", "1", 1),
    ("criu.timeout", "86400", 86400),
    ("criu.skip-in-flight", "false", False),
    ("criu.tcp-close", "false", False),
    ("criu.manage-cgroups", '"ignore"', "ignore"),
    ("criu.manage-cgroups", '""', ""),
    ("criu.libdir", '"/usr/lib/criu"', "/usr/lib/criu"),
    ("criu.action-script", '"/opt/act.sh"', "/opt/act.sh"),
    ("criu.external", '["mnt[/data]:data"]', ("mnt[/data]:data",)),
    ("criu.options", '["tcp-close", "log-file x"]', ("tcp-close", "log-file x")),
    ("criu.options", "[]", ()),
    ("memory.pages", '"store"', "store"),
    ("registry.timeout", "5", 5.0),
    ("registry.minimum-speed", '"4K"', 4096),
    ("registry.minimum-speed", "0", 0),
    ("store.path", '"/srv/checkpoints"', "/srv/checkpoints"),
    ("store.pull-from", "[]", ()),
    ("store.pull-from", '["http://localhost:5000/a/b"]', ("http://localhost:5000/a/b",)),
    ("store.pull-from", '["r.example/a", "r.example/b"]', ("r.example/a", "r.example/b")),
    ("store.read-rate", '"2G"', 2 << 30),
    ("store.read-rate", "0", 0),
    ("metrics.textfile", '"/srv/metrics"', "/srv/metrics"),
    ("suspend.ram", '"64G"', 64 << 30),
    ("suspend.ram", "0", 0),
    ("suspend.over", '"spill"', "spill"),
    ("metrics.journal", "true", True),
]
BAD = [
    ("runtime", "1"),
    ("runtime", '"bin/crun"'),
    ("runtime", '"crun\\n"'),
    ("gpu-map", "3"),
    ("gpu-map", '"0=3,0=4"'),
    ("gpu-map", '"first"'),
    ("keep-names", '"yes"'),
    ("hooks", '"update-ldcache"'),
    ("memory.pages", '"disk"'),
    ("memory.chunk-size", "4095"),
    ("memory.chunk-size", '"2G"'),
    ("memory.level", "20"),
    ("memory.ceiling", '"much"'),
    ("memory.threads", "-1"),
    ("memory.demand-paging", '"userfaultfd"'),
    ("memory.parallel-restore", "4"),
    ("memory.sync", '"later"'),
    ("memory.keep", '"sometimes"'),
    ("memory.keep-folder", '"kept"'),
    ("memory.keep-folder", '""'),
    ("memory.keep-folder", '"/a\\u0000b"'),
    ("retries", "-1"),
    ("retries", "101"),
    ("retries", "1.5"),
    ("retries", "true"),
    ("retries", '"three"'),
    ("nvidia.lock-timeout", "0"),
    ("nvidia.lock-timeout", "-1"),
    ("nvidia.lock-timeout", "nan"),
    ("nvidia.lock-timeout", "inf"),
    ("nvidia.lock-timeout", "true"),
    ("nvidia.lock-timeout", '"soon"'),
    ("nvidia.lock-timeout", "1" + "0" * 400),
    ("nvidia.allow-nccl", "1"),
    ("nvidia.driver", '"cuda"'),
    ("nvidia.libdir", '"opt"'),
    ("nvidia.cuda-checkpoint", '"/opt/nv"'),
    ("nvidia.cuda-checkpoint", '"cuda-checkpoint"'),
    ("amd.libdir", "1"),
    ("amd.skip-checks", '"firmware"'),
    ("amd.skip-checks", '["weather"]'),
    ("amd.buffer", '"much"'),
    ("nvidia.allow-nccl", '"yes"'),
    ("criu.link-remap", "[]"),
    ("criu.cut-files", "1"),
    ("criu.ghost-limit", "-1"),
    ("criu.ghost-limit", "1.5"),
    ("criu.ghost-limit", "true"),
    ("criu.ghost-limit", '"M"'),
    ("criu.ghost-limit", '"3MM"'),
    ("criu.ghost-limit", '"3X"'),
    ("criu.ghost-limit", '"\\u0663"'),
    ("criu.ghost-limit", '"99999999999T"'),
    ("criu.timeout", "0"),
    ("criu.timeout", "86401"),
    ("criu.skip-in-flight", "1"),
    ("criu.tcp-close", '"off"'),
    ("criu.manage-cgroups", '"none"'),
    ("criu.manage-cgroups", "[]"),
    ("criu.libdir", '"lib"'),
    ("criu.action-script", '"/a\\nlibdir /b"'),
    ("criu.action-script", "[]"),
    ("criu.external", '"mnt[/data]:data"'),
    ("criu.options", "[1]"),
    ("criu.options", '["a\\nb"]'),
    ("registry.timeout", "0"),
    ("registry.minimum-speed", '"fast"'),
    ("store.path", '"here"'),
    ("store.pull-from", '"r.example/a"'),
    ("store.pull-from", '["r.example/a:v1"]'),
    ("store.pull-from", '["app"]'),
    ("store.pull-from", '["https://r.example/a"]'),
    ("store.read-rate", '"fast"'),
    ("store.read-rate", "-1"),
    ("metrics.textfile", '"here"'),
    ("suspend.ram", '"much"'),
    ("suspend.ram", "-1"),
    ("suspend.over", '"swap"'),
    ("metrics.journal", '"later"'),
]


def file_with(folder: Path, text: str) -> str:
    path = folder / "gpusnap.toml"
    path.write_text(text, "utf-8")
    return str(path)


def value_of(settings: Settings, key: str) -> Any:
    found: Any = settings
    for name in key.replace("-", "_").split("."):
        found = getattr(found, name)
    return found


def test_the_cases_cover_every_key() -> None:
    """No key goes untested, neither with a good nor with a bad value."""
    assert {key for key, _, _ in GOOD} == set(TABLE)
    assert {key for key, _ in BAD} == set(TABLE)


@pytest.mark.parametrize(("key", "toml", "value"), GOOD)
def test_good_value(tmp_path: Path, key: str, toml: str, value: Any) -> None:
    """A good value arrives, and every other setting keeps its default."""
    settings = load(file_with(tmp_path, f"{key} = {toml}\n"))
    assert value_of(settings, key) == value
    assert type(value_of(settings, key)) is type(value)
    for other in set(TABLE) - {key}:
        assert value_of(settings, other) == value_of(Settings(), other)


@pytest.mark.parametrize(("key", "toml"), BAD)
def test_bad_value(tmp_path: Path, key: str, toml: str) -> None:
    """A bad value is an error that names key and file and says what is wanted."""
    path = file_with(tmp_path, f"{key} = {toml}\n")
    with pytest.raises(SettingsError, match=f"^{re.escape(key)} in {re.escape(path)} is .*it must be "):
        load(path)


@pytest.mark.parametrize(
    ("toml", "named"),
    [
        ("retry = 1", "retry"),
        ("[criu]\ntimeouts = 1", "criu.timeouts"),
        ("[intel]\nlock-timeout = 1", "[intel]"),
        ("[intel]", "[intel]"),
        ("[criu.deep]\ntimeout = 1", "criu.deep.timeout"),
        ("nvidia = 1", "nvidia"),
        ("lock_timeout = 1", "lock_timeout"),
    ],
)
def test_unknown_key(tmp_path: Path, toml: str, named: str) -> None:
    """An unknown key or section is named, and the nearest known one, or else all of them."""
    path = file_with(tmp_path, toml + "\n")
    with pytest.raises(SettingsError) as caught:
        load(path)
    assert str(caught.value) == f"unknown setting {named} in {path}"
    near = re.match("did you mean (.*)[?]", caught.value.hint)
    assert near[1] in TABLE if near else all(key in caught.value.hint for key in TABLE)


@pytest.mark.parametrize("key", sorted(TABLE))
def test_types(tmp_path: Path, key: str) -> None:
    """A value of another type than TOML's for it is an error with the key, the file and what is wanted."""
    good = [toml for name, toml, _ in GOOD if name == key]
    others = ['"3"', "3", "3.5", "true", '"true"', "[]", "[3]", '["x", 3]', "1979-05-27"]
    numbers = [toml for toml in good if not toml.startswith(('"', "["))]
    if not any(toml.startswith('"') for toml in good):
        others += [f'"{toml}"' for toml in numbers]
    kinds = {type(tomllib.loads(f"x = {toml}")["x"]) for toml in good}
    kinds |= {int, float} if isinstance(value_of(Settings(), key), float) else set()
    kinds |= {int, str} if "size" in TABLE[key].check.__name__ else set()
    for toml in others:
        if type(tomllib.loads(f"x = {toml}")["x"]) in kinds and toml not in ("[3]", '["x", 3]'):
            continue
        with pytest.raises(SettingsError, match=f"{re.escape(key)}.* in .*; it must be ") as caught:
            load(file_with(tmp_path, f"{key} = {toml}\n"))
        assert "gpusnap settings" in caught.value.hint


def test_a_number_in_quotes(tmp_path: Path) -> None:
    """The sentence says what is wrong with it."""
    for text, said in (("retries = '3'", ", without quotes"), ("retries = 'x'", "from 0 to 100")):
        with pytest.raises(SettingsError) as caught:
            load(file_with(tmp_path, f"{text}\n"))
        assert str(caught.value).endswith(said)


def test_a_misspelt_key(tmp_path: Path) -> None:
    """What was meant is named, without the list of all."""
    with pytest.raises(SettingsError) as caught:
        load(file_with(tmp_path, 'runtme = "crun"\n'))
    assert caught.value.hint == "did you mean runtime? See docs/settings.md for all settings"


def test_a_misspelt_key_below_a_table(tmp_path: Path) -> None:
    """A key that belongs above the tables, appended to a file that ends with one."""
    with pytest.raises(SettingsError) as caught:
        load(file_with(tmp_path, "[metrics]\njournal = true\nretires = 5\n"))
    assert caught.value.hint.startswith("did you mean retries? It is below [metrics]")


def test_without_a_file(tmp_path: Path) -> None:
    """Without a settings file everything has its default."""
    assert load(str(tmp_path / "none.toml")) == Settings(nvidia=Nvidia(), criu=Criu())


@pytest.mark.parametrize(
    "content", [b"retries =", b"\xff\xfe", b"retries = 1\nretries = 2", b"retries = " + b"9" * 5000]
)
def test_not_toml(tmp_path: Path, content: bytes) -> None:
    """A file that is not TOML is an error that names it."""
    path = tmp_path / "gpusnap.toml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=f"the settings file {re.escape(str(path))} is not TOML"):
        load(str(path))


def test_unreadable_file(tmp_path: Path) -> None:
    """A file that cannot be read is an error, in words that Podman leaves alone."""
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "gpusnap.toml"):
        with pytest.raises(SettingsError, match=r"cannot be read: ") as caught:
            load(str(path))
        assert not [words for words in POISON if words in caught.value.sentence().lower()]


@pytest.mark.parametrize("key", [key for key, entry in TABLE.items() if entry.annotation])
def test_annotation_allowed(key: str) -> None:
    """A container may set what grants nothing on this host; its strings become the setting's type."""
    toml, value = next((toml, value) for name, toml, value in GOOD if name == key)
    before = Settings(retries=7)
    settings = apply_annotations(before, {ANNOTATION_PREFIX + key: toml.strip('"'), "org.other": "x"})
    assert value_of(settings, key) == value
    if key != "retries":
        assert settings.retries == 7


@pytest.mark.parametrize("key", [key for key, entry in TABLE.items() if not entry.annotation])
def test_annotation_forbidden(key: str) -> None:
    """A container may set no program, path or mount; the error says where to set it."""
    with pytest.raises(SettingsError) as caught:
        apply_annotations(Settings(), {ANNOTATION_PREFIX + key: "/x"})
    assert str(caught.value) == f"the annotation io.gpusnap.{key} cannot be set by a container"
    assert key in caught.value.hint


def test_what_grants_something_is_the_hosts() -> None:
    """Programs, paths, mounts and free lines for CRIU are never taken from a container."""
    theirs = {key for key, entry in TABLE.items() if entry.annotation}
    assert not theirs & {"store.path", "store.pull-from", "registry.timeout"}
    assert not theirs & {"runtime", "criu.libdir", "criu.action-script", "criu.external", "criu.options"}


@pytest.mark.parametrize(
    ("toml", "named", "near"),
    [
        ("[stor]\npath = '/x'", "[stor]", "[store]"),
        ("[memory]\nchunk_size = 4096", "memory.chunk_size", "memory.chunk-size"),
        ("level = 3", "level", "memory.level"),
        ("[criu]\nlevel = 3", "criu.level", "memory.level"),
        ("[Registry]\ntimeout = 3", "[Registry]", "[registry]"),
    ],
)
def test_what_was_meant(tmp_path: Path, toml: str, named: str, near: str) -> None:
    """A table, a key with another dash, and a key that belongs to another table."""
    path = file_with(tmp_path, toml + "\n")
    with pytest.raises(SettingsError) as caught:
        load(path)
    assert str(caught.value) == f"unknown setting {named} in {path}"
    assert caught.value.hint == f"did you mean {near}? See docs/settings.md for all settings"


def test_for_one_key(tmp_path: Path) -> None:
    """What is wrong elsewhere is told and left out, unless the key may be meant."""
    bad = "nonsense = 1\nretries = 'x'\n[other]\na = 1\n[store]\npath = '/srv/store'\n"
    found, wrong = load_only("store.path", file_with(tmp_path, bad))
    assert found == Settings(store=Store(path="/srv/store"))
    assert [str(each).split(" in ")[0] for each in wrong] == [
        "unknown setting nonsense",
        "retries",
        "unknown setting [other]",
    ]
    assert load_only("store.path", str(tmp_path / "none")) == (Settings(), ())
    for meant in ("[stor]\npath = '/x'\n", "[store]\npth = '/x'\n", "[store]\npath = 'x'\n", "store = ["):
        with pytest.raises(SettingsError):
            load_only("store.path", file_with(tmp_path, meant))


def test_annotation_unknown() -> None:
    """A misspelt annotation is named."""
    with pytest.raises(SettingsError, match=r"unknown setting io\.gpusnap\.retry in an annotation"):
        apply_annotations(Settings(), {"io.gpusnap.retry": "1"})


@pytest.mark.parametrize(
    ("key", "text"), [("retries", "x"), ("criu.timeout", ""), ("nvidia.allow-nccl", "True")]
)
def test_annotation_bad(key: str, text: str) -> None:
    """A bad value in an annotation is named with its prefix."""
    with pytest.raises(
        SettingsError, match=rf"^io\.gpusnap\.{re.escape(key)} in an annotation is {text!r}; "
    ):
        apply_annotations(Settings(), {ANNOTATION_PREFIX + key: text})


@given(st.dictionaries(st.sampled_from(sorted(TABLE)), st.text(max_size=30), max_size=3))
def test_any_annotation_is_taken_or_refused(values: dict[str, str]) -> None:
    """Whatever a container's annotations hold, the answer is settings or a SettingsError."""
    try:
        settings = apply_annotations(
            Settings(), {ANNOTATION_PREFIX + key: text for key, text in values.items()}
        )
    except SettingsError:
        return
    assert 0 <= settings.criu.ghost_limit < 1 << 62
    assert all("\n" not in str(value_of(settings, key)) for key in TABLE)


@pytest.mark.skipif(not DOCUMENT.exists(), reason="docs/settings.md is not part of this tree")
def test_the_document_lists_every_key() -> None:
    """docs/settings.md has each key with its default and whether an annotation may set it, and no other."""
    rows = re.findall(r"^\| `([\w.-]+)` \| `(.*?)` \| (yes)? ?\|", DOCUMENT.read_text("utf-8"), re.MULTILINE)
    assert [key for key, _, _ in rows] == list(TABLE)
    for key, default, annotation in rows:
        assert bool(annotation) == TABLE[key].annotation, key
        said = load_text(f"{key} = {default}")
        assert value_of(said, key) == value_of(Settings(), key), key


def load_text(text: str) -> Settings:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return load(file_with(Path(folder), text))
