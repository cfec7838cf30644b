"""ls, inspect, diff, verify, rm, gc and tag, on real small stores."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoints import ANNOTATIONS, CHUNK, START, blob_path, damage, keep, noise
from criu_images import CORE, INVENTORY
from fake_podman import ID, FakePodman
from fake_registry import FakeRegistry, Say
from fakes import POISON, a_manifest
from kept_checkpoints import an_archive, keep_pages, leave_export
from kept_checkpoints import keep as keep_archive
from outgoing import outgoing
from stopped_container import make_stopped

from gpusnap.checkpoints import migrations
from gpusnap.cli import exit_codes
from gpusnap.cli import main as cli
from gpusnap.cli.commands.stores import upkeep
from gpusnap.oci.base.errors import binary_size
from gpusnap.oci.chunks import artifact
from gpusnap.oci.layout.documents import Descriptor, Manifest
from gpusnap.oci.registry import copy as transfer
from gpusnap.oci.store.store import Store
from gpusnap.operations.restoring import in_podman
from gpusnap.runtime_shim import state_files
from gpusnap.runtime_shim.records import manifest_json
from gpusnap.runtime_shim.records.manifest import GpuProcess
from gpusnap.runtime_shim.settings import Settings
from gpusnap.runtime_shim.settings import Store as StoreSettings
from gpusnap.runtime_shim.settings import load as settings_load
from gpusnap.runtime_shim.settings import load_only as settings_load_only
from gpusnap.runtime_shim.snapshot.records import origin
from gpusnap.runtime_shim.snapshot.suspended_containers import spilled

IMAGES = {"checkpoint/inventory.img": INVENTORY}
Run = Callable[..., tuple[int, str, str]]
ADDRESS = f"{START:x}"


@dataclass(frozen=True, slots=True)
class Kept:
    """A store, what is in it, and how a command line names it."""

    store: Store
    first: Descriptor
    second: Descriptor
    pages: Descriptor
    plain: Descriptor

    @property
    def word(self) -> str:
        """The store."""
        return f"oci:{self.store.path}"

    def of(self, name: str) -> str:
        """Something in it."""
        return f"{self.word}:{name}"


@pytest.fixture
def gpusnap(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Run a command line on a host whose store is store/ in tmp_path; exit code, stdout, stderr."""
    mine = Settings(store=StoreSettings(path=str(tmp_path / "store")))
    monkeypatch.setattr("gpusnap.runtime_shim.settings.load", lambda: mine)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "dumb")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gpusnap", *arguments])
        code = cli.main()
        captured = capsys.readouterr()
        assert not [words for words in POISON if words in captured.err.lower()]
        return code, captured.out, captured.err

    return run


def json_of(gpusnap: Run, *line: str) -> Any:
    """What a command line that succeeds prints with --json."""
    code, out, err = gpusnap(*line, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """What `kept` copies: nearly all tests have it, and it takes longer to make than most of them."""
    store = Store(tmp_path_factory.mktemp("original") / "store")
    base, changed = noise(16, 1), noise(16, 1)
    changed[CHUNK : 2 * CHUNK] = noise(1, 2)
    later = replace(a_manifest(), processes=(replace(a_manifest().processes[0], command=("sleep", "601")),))
    records = {"config.dump": b"{}", "checkpoint/inventory.img": INVENTORY, "checkpoint": None}
    first = keep(
        store,
        base,
        noise(2, 3),
        names=("w:1",),
        images={"pages-1.img": noise(1, 4)},
        records={**records, "checkpoint/core-1.img": CORE},
        rootfs={"etc/motd": b"hello", "etc/link": "motd"},
    )
    second = keep(
        store,
        changed,
        names=("w:2", "registry.example:5000/team/w:v2"),
        images={"pages-1.img": noise(1, 4)},
        records={**records, "config.dump": b"[]"},
        rootfs={"etc/motd": b"hullo", "etc/link": "issue"},
        record=later,
        annotations={**ANNOTATIONS, "org.opencontainers.image.created": "2026-01-03T03:04:05Z"},
    )
    pages = keep(store, noise(3, 5), annotations={"org.opencontainers.image.created": "2026-01-04T00:00:00Z"})
    plain = keep(store, names=("plain",), records=records, gpu=False, annotations={})
    return Kept(store, first, second, pages, plain)


@pytest.fixture
def kept(original: Kept, tmp_path: Path) -> Kept:
    """Two checkpoints of one container, the pages of a third, and one without a GPU."""
    store = Store(tmp_path / "store")
    shutil.copytree(original.store.path, store.path, symlinks=True, copy_function=shutil.copy)
    return replace(original, store=store)


# ls


def test_ls(gpusnap: Run, kept: Kept) -> None:
    """A row for each name, by age, whole though no terminal is there; and the total."""
    code, out, err = gpusnap("ls")
    assert (code, err) == (0, "")
    title, *rows, total = out.splitlines()
    titles = ["name", "created", "container", "GPUs", "driver", "memory", "size", "own", "digest"]
    assert title.split() == titles
    assert [row.split("  ")[0] for row in rows] == [
        "plain",
        "w:1",
        "registry.example:5000/team/w:v2",
        "w:2",
        "(no name) (pages only)",
    ]
    assert all(root.digest[7:19] in row for root, row in zip((kept.plain, kept.first), rows, strict=False))
    assert re.match(r"w:1 +[0-9]+ (day|week|month|year)s ago  ", rows[1])
    assert "560.35.03" in rows[1]
    assert "3.0 MiB" in rows[1]
    assert total.startswith("4 checkpoints, ")
    assert total.endswith(f", in {kept.store.path}")
    assert gpusnap("ls", kept.word) == (0, out, "")


def test_ls_json(gpusnap: Run, kept: Kept) -> None:
    """Sizes are those of the blobs, and what is its own goes with a checkpoint that is removed."""
    found = json_of(gpusnap, "ls")
    assert {*found} == {"store", "checkpoints", "blobs", "size"}
    rows = {row["digest"]: row for row in found["checkpoints"]}
    first = rows[kept.first.digest]
    assert {key: first[key] for key in ("names", "kind", "container", "gpus", "memory", "processes")} == {
        "names": ["w:1"],
        "kind": "checkpoint",
        "container": "w",
        "gpus": "1 NVIDIA H100 80GB HBM3",
        "memory": 3 << 20,
        "processes": 1,
    }
    assert first["created"] == "2026-01-02T03:04:05Z"
    assert rows[kept.second.digest]["names"] == ["registry.example:5000/team/w:v2", "w:2"]
    assert rows[kept.pages.digest]["kind"] == "pages"
    on_disk = [each.stat().st_size for each in Path(kept.store.path, "blobs/sha256").iterdir()]
    assert (found["blobs"], found["size"]) == (len(on_disk), sum(on_disk))
    removed = json_of(gpusnap, "rm", "w:1", "--gc")
    (collected,) = removed["collected"]
    assert collected["size"] == first["own"]
    assert 3 * CHUNK < first["own"] < first["size"]


@pytest.mark.parametrize("width", [80, 100, 140])
def test_ls_fits_a_terminal(gpusnap: Run, kept: Kept, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """No line is wider, and digests are whole."""
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = gpusnap("ls")
    assert max(len(line.rstrip()) for line in out.splitlines()[:-1]) <= width
    for root in (kept.first, kept.second, kept.pages, kept.plain):
        assert root.digest[7:19] in out


@pytest.mark.parametrize("width", [80, 200])
def test_ls_of_long_names(gpusnap: Run, kept: Kept, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """A name is never cut or broken: where there is no room beside it, it has a line of its own."""
    name = "registry.example:5000/a-team/that-has/a-very-long-name-of-its-own/server:20261122-155512"
    gpusnap("tag", "w:1", name)
    monkeypatch.setenv("COLUMNS", str(width))
    lines = gpusnap("ls")[1].splitlines()
    (at,) = (number for number, line in enumerate(lines) if name in line)
    if width == 80:
        assert lines[at] == name
        assert lines[at + 1].startswith("  ")
        assert "560.35.03" in lines[at + 1]
        assert max(len(line) for line in lines[:-1] if line != name) <= width
    else:
        assert "560.35.03" in lines[at]


def test_ls_filters(gpusnap: Run, kept: Kept) -> None:
    """What fits is listed, and how many there are altogether."""
    code, out, _ = gpusnap("ls", "--filter", "name=w")
    assert code == 0
    assert [line.split("  ")[0] for line in out.splitlines()[1:-1]] == ["w:1", "w:2"]
    assert out.splitlines()[-1].startswith("2 of 4 checkpoints, ")
    assert gpusnap("ls", "w")[1] == out
    (row,) = json_of(gpusnap, "ls", "-f", "name=w:2")["checkpoints"]
    assert (row["names"], row["digest"]) == (["w:2"], kept.second.digest)
    assert gpusnap("ls", "none")[1].splitlines() == [out.splitlines()[-1].replace("2 of 4", "0 of 4")]
    for options in ((), ("--quiet",), ("--json",)):
        code, _, err = gpusnap("ls", "v", *options)
        assert (code, len(err.splitlines())) == (0, 1)
        assert err.startswith("gpusnap: note: nothing in ")
        assert "has the name or digest 'v'" in err
    assert "did you mean w:2 or w:1?" in gpusnap("ls", "w:4")[2]
    code, _, err = gpusnap("ls", "--filter", "nam=w")
    assert code == exit_codes.USAGE
    assert "the keys are name, container, before, since, dangling, kind" in err


def test_ls_forms(gpusnap: Run, kept: Kept) -> None:
    """Digests for a command line, each once; and fields."""
    digests = gpusnap("ls", "-q")[1].split()
    assert sorted(digests) == sorted(
        each.digest for each in (kept.first, kept.second, kept.pages, kept.plain)
    )
    assert gpusnap("ls", "-q", "w:1")[1] == f"{kept.first.digest}\n"
    assert gpusnap("ls", "--format", "{{.Name}} {{ .Driver }}", "w:1")[1] == "w:1 560.35.03\n"
    table = gpusnap("ls", "--format", "table {{.Name}}\\t{{.Container}}", "w")[1]
    assert table == "NAME  CONTAINER\nw:1   w\nw:2   w\n"
    assert json.loads(gpusnap("ls", "--format", "json")[1]) == json_of(gpusnap, "ls")
    for form, said in (
        ("{{.Nam}}", "did you mean {{.Name}}?"),
        ("{{range}}", "the fields are Name"),
        ("x", "has no field"),
    ):
        code, out, err = gpusnap("ls", "--format", form)
        assert (code, out) == (exit_codes.USAGE, "")
        assert said in err
    assert gpusnap("ls", "-q", "--json")[0] == exit_codes.USAGE


def test_ls_of_a_registry(gpusnap: Run, kept: Kept, tmp_path: Path) -> None:
    """The tags that are checkpoints, from all pages; of many only the last ones by name."""
    with FakeRegistry(tmp_path / "registry") as registry:
        where = f"http://{registry.host}/team/w"
        for tag, name in (("a", "w:1"), ("b", "w:2"), ("c", "w:2")):
            assert gpusnap("push", name, f"{where}:{tag}")[0] == 0
        kind = "application/vnd.oci.image.index.v1+json"
        registry.manifests["team/w", "other"] = (kind, b'{"schemaVersion": 2, "manifests": []}')
        registry.page = 2
        found = json_of(gpusnap, "ls", where)
        name = f"{registry.host}/team/w"
        assert (found["repository"], found["tags"], found["lookedAt"]) == (name, 4, 4)
        rows = {row["digest"]: row for row in found["checkpoints"]}
        assert rows.keys() == {kept.first.digest, kept.second.digest}
        assert rows[kept.first.digest]["names"] == [f"{name}:a"]
        assert rows[kept.second.digest]["names"] == [f"{name}:b", f"{name}:c"]
        assert rows[kept.first.digest]["driver"] == "560.35.03"
        code, out, _ = gpusnap("ls", where, "--limit", "2")
        assert code == 0
        assert f"{name}:c" in out
        assert f"{name}:b" not in out
        assert out.splitlines()[-2:] == [
            f"1 checkpoint in {name}, which has 4 tags",
            "only the last 2 tags by name were inspected; see --limit",
        ]
        assert len(registry.asked("GET", "/tags/list")) == 4
        code, _, err = gpusnap("ls", f"http://{registry.host}/none")
        assert code == exit_codes.NOT_FOUND
        assert f"the tags of {registry.host}/none cannot be listed: not found" in err
        registry.rule("GET", "/tags/list", Say(405))
        code, _, err = gpusnap("ls", where)
        assert code == exit_codes.FAILED
        assert f"the tags of {name} cannot be listed: status 405" in err
        assert "gpusnap inspect" in err


def test_ls_with_broken_settings(
    gpusnap: Run, kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that it does not need are told, and nothing else is changed; its own has to be right."""
    right = gpusnap("ls", "-q")[1]
    path = tmp_path / "gpusnap.toml"
    monkeypatch.setattr("gpusnap.runtime_shim.settings.load", partial(settings_load, str(path)))
    monkeypatch.setattr(
        "gpusnap.runtime_shim.settings.load_only", partial(settings_load_only, path=str(path))
    )
    path.write_text(f"runtme = 'crun'\n[store]\npath = '{kept.store.path}'\n")
    code, out, err = gpusnap("ls", "-q")
    assert (code, out) == (0, right)
    meant = "did you mean runtime? See docs/settings.md for all settings"
    assert err == f"warning: unknown setting runtme in {path}; {meant} [GPS-111]\n"
    assert gpusnap("ls", "-q", "w:1")[:2] == (0, f"{kept.first.digest}\n")
    path.write_text(f"[store]\npth = '{kept.store.path}'\n")
    code, out, err = gpusnap("ls")
    assert (code, out) == (exit_codes.FAILED, "")
    assert "did you mean store.path?" in err


def test_ls_of_nothing(gpusnap: Run, tmp_path: Path) -> None:
    """A host where nothing was kept yet, and a store that is empty, are no errors; no store is one."""
    path = tmp_path / "store"
    assert gpusnap("ls") == (0, f"no checkpoints in {path}\n", "")
    Store(path).create()
    assert gpusnap("ls") == (0, f"no checkpoints in {path}\n", "")
    assert json_of(gpusnap, "ls") == {"store": str(path), "checkpoints": [], "blobs": 0, "size": 0}
    code, out, err = gpusnap("ls", f"oci:{tmp_path}/none")
    assert (code, out) == (exit_codes.NOT_FOUND, "")
    assert err == (
        f"gpusnap: there is no store {tmp_path}/none: there is no such directory; gpusnap checkpoint --to "
        f"oci:{tmp_path}/none CONTAINER makes one\n"
    )
    code, _, err = gpusnap("ls", f"oci:{tmp_path}")
    assert code == exit_codes.NOT_FOUND
    assert f"{tmp_path} is not a store" in err


@pytest.mark.parametrize(
    ("command", "word"),
    [
        *(("gc", word) for word in ("w:1", "/var/lib", "oci:", "oci:/tmp:w")),
        *(("ls", word) for word in ("/var/lib", "oci:", "oci:/tmp:w", "registry.example/w:v1")),
    ],
)
def test_what_is_no_store(gpusnap: Run, kept: Kept, command: str, word: str) -> None:
    """Exit code 2, and how a store is named."""
    code, out, err = gpusnap(command, word)
    assert (code, out) == (exit_codes.USAGE, "")
    assert "a store is named oci:DIR" in err


def test_ls_of_a_damaged_checkpoint(gpusnap: Run, kept: Kept) -> None:
    """The others are listed all the same, and a sentence says what is wrong with it."""
    damage(blob_path(kept.store, kept.first.digest))
    code, out, _ = gpusnap("ls")
    assert code == 0
    assert "w:1 (damaged)" in out
    assert f"{kept.first.digest[7:19]} is damaged: the blob {kept.first.digest} does not match" in out
    row = next(row for row in json_of(gpusnap, "ls")["checkpoints"] if row["names"] == ["w:1"])
    assert (row["kind"], row["size"], row["own"]) == ("damaged", 0, 0)
    assert kept.first.digest in row["fault"]


def test_ls_of_hostile_text(gpusnap: Run, tmp_path: Path) -> None:
    """What a manifest from elsewhere says is shown as text: no markup, nothing that a terminal obeys."""
    notes = {
        "org.criu.checkpoint.container.name": "[red]\x1b[2J",
        "io.gpusnap.gpus": "\u202e[/bold]\r9",
        "io.gpusnap.memory": "9" * 400,
        "io.gpusnap.processes": "²",
        "org.opencontainers.image.created": "[link=x]\n\n\x07",
    }
    keep(
        Store(tmp_path / "store"),
        noise(1, 1),
        names=("w",),
        records=IMAGES,
        annotations=notes,
    )
    fields = "{{.Container}}|{{.Created}}|{{.CreatedSince}}|{{.GPUs}}"
    for line in (
        ("ls",),
        ("inspect", "w"),
        ("ls", "--format", fields),
        ("ls", "--format", f"table {fields}"),
    ):
        code, out, _ = gpusnap(*line)
        assert code == 0
        assert not set(out) & {"\x1b", "\r", "\x07", "\u202e"}
        assert "[red]" in out
    assert len(gpusnap("ls", "--format", fields)[1].splitlines()) == 1
    for line in (("history", "w"), ("prune", "--keep-last", "1")):
        code, out, _ = gpusnap(*line)
        assert code == 0
        assert not set(out) & {"\x1b", "\r", "\x07", "\u202e"}
        assert "[link=x]" in out


def test_an_image_of_another_tool(gpusnap: Run, kept: Kept) -> None:
    """It is listed, by its name, and is none of gpusnap's business otherwise."""
    with kept.store.stage() as staging:
        config = staging.layout.add_blob(b"{}", media_type="application/vnd.oci.image.config.v1+json")
        layer = staging.layout.add_blob(b"layer", media_type="application/vnd.oci.image.layer.v1.tar")
        root = staging.layout.add_manifest(Manifest(config, (layer,)))
        staging.commit(root, names=("docker.io/library/debian:13",))
    assert "docker.io/library/debian:13 (not gpusnap's)" in gpusnap("ls")[1]
    row = next(row for row in json_of(gpusnap, "ls")["checkpoints"] if row["digest"] == root.digest)
    assert (row["kind"], row["size"]) == ("other", root.size + 7)
    assert json_of(gpusnap, "verify", kept.of("docker.io/library/debian:13"))[0]["damaged"] == []
    _, _, err = gpusnap("inspect", kept.of("docker.io/library/debian:13"))
    assert f"{root.digest} is not a gpusnap checkpoint" in err
    assert "shared with" in gpusnap("inspect", "w:1")[1]


# inspect


def test_inspect(gpusnap: Run, kept: Kept) -> None:
    """Where it is, what is in chunks by process and region, and what others share with it."""
    code, out, err = gpusnap("inspect", "w:1")
    assert (code, err) == (0, "")
    lines = [line.rstrip() for line in out.splitlines()]
    assert lines[0].startswith(f"w:1 in {kept.store.path}, ")
    assert lines[1] == kept.first.digest
    assert "driver 580.159.04 (CUDA 13.0), CRIU 4.1.1, crun 1.21, Linux 6.18.0 x86_64" in lines
    assert f"1 sleep  {ADDRESS}     64.0 KiB   0 B      16  64.0 KiB" in lines
    assert "CRIU     pages-1.img       4.0 KiB   0 B       1   4.0 KiB" in lines
    assert (
        "76.0 KiB in 19 chunks: 0 B zero, 0 B repeated; 19 blobs (0 zstd, 0 in planes, 19 plain) of 76.0 "
        "KiB, 1.0 to 1" in lines
    )
    (shared,) = [line for line in lines if line.endswith(kept.second.digest[7:19])]
    assert shared.startswith("registry.example:5000/team/w:v2, w:2  64.0 KiB")


def test_inspect_json(gpusnap: Run, kept: Kept) -> None:
    """The manifest, as of an archive, and what is to say of the artifact."""
    found = json_of(gpusnap, "inspect", "w:1")
    record = manifest_json.decode(json.dumps(found).encode(), "stdout")
    assert [region.start for region in record.processes[0].regions] == [START, START + (1 << 24)]
    stored = found["artifact"]
    assert stored["digest"] == kept.first.digest
    assert stored["names"] == ["w:1"]
    assert stored["where"] == kept.store.path
    assert stored["chunks"] == {"blobs": 19, "size": 19 * CHUNK}
    assert stored["annotations"] == ANNOTATIONS
    assert {*stored["records"]} == {*stored["rootfs"]} == {"digest", "size"}
    (shared,) = (each for each in stored["shared"] if each["digest"] == kept.second.digest)
    assert shared["size"] == 16 * CHUNK
    assert shared["share"] == round(16 * CHUNK / stored["size"], 6)
    assert found["statistics"]["chunks"] == 19


def test_inspect_by_digest(gpusnap: Run, kept: Kept) -> None:
    """Six digits are enough; of another store by oci:DIR; too few and others are not found."""
    digits = kept.second.digest[7:13]
    assert json_of(gpusnap, "inspect", digits)["artifact"]["digest"] == kept.second.digest
    assert json_of(gpusnap, "inspect", kept.of(digits))["artifact"]["digest"] == kept.second.digest
    code, _, err = gpusnap("inspect", "w:3")
    assert code == exit_codes.NOT_FOUND
    assert "has the name or digest 'w:3' (did you mean w:2 or w:1?); gpusnap ls" in err


def test_inspect_of_odd_ones(gpusnap: Run, kept: Kept) -> None:
    """A checkpoint without GPU state, and one of pages only, say so."""
    code, out, _ = gpusnap("inspect", "plain")
    assert code == 0
    assert "a container without GPU state" in out
    assert {*json_of(gpusnap, "inspect", "plain")} == {"artifact"}
    code, out, _ = gpusnap("inspect", kept.pages.digest)
    assert "records: none; this is the memory of a checkpoint in a Podman archive" in out
    code, _, err = gpusnap("plan", "plain")
    assert code == exit_codes.FAILED
    assert "plain is the checkpoint of a container without GPU state" in err


def test_inspect_of_a_damaged_manifest(gpusnap: Run, kept: Kept) -> None:
    """Exit code 4; the blob is named, and so is what finds more."""
    damage(blob_path(kept.store, config(kept.store, kept.first)))
    code, out, err = gpusnap("inspect", "w:1")
    assert (code, out) == (exit_codes.DAMAGED, "")
    assert config(kept.store, kept.first, check=False) in err
    assert "gpusnap verify lists all damage" in err


def config(store: Store, root: Descriptor, *, check: bool = True) -> str:
    """The digest of an artifact's config."""
    return artifact.read(root, store.read).config.digest


# diff


def test_diff(gpusnap: Run, kept: Kept) -> None:
    """Memory, processes and files."""
    code, out, err = gpusnap("diff", "w:1", "w:2")
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert f"A: w:1 ({kept.first.digest[7:19]}) 2026-01-02T03:04:05Z" in lines
    assert f"1 {ADDRESS} 60.0 KiB 4.0 KiB 0 B 0 B" in lines
    assert f"1 {START + (1 << 24):x} 0 B 0 B 8.0 KiB 0 B" in lines
    assert "all 3 64.0 KiB 4.0 KiB 8.0 KiB 0 B" in lines
    assert "B has 4.0 KiB in 1 blob that A does not have" in lines
    assert lines.index("1 A sleep 600") + 1 == lines.index("B sleep 601")
    assert "config.dump changed 2 B 2 B" in lines
    assert f"checkpoint/core-1.img only A {len(CORE)} B" in lines
    assert "etc/link changed 0 B 0 B" in lines


def test_diff_json(gpusnap: Run, kept: Kept) -> None:
    """All of it, with sizes in bytes."""
    found = json_of(gpusnap, "diff", "w:1", "w:2")
    assert {*found} == {"a", "b", "chunks", "processes", "gpus", "files"}
    assert found["a"] == {"what": "w:1", "digest": kept.first.digest, "created": "2026-01-02T03:04:05Z"}
    chunks = found["chunks"]
    total = {key: chunks[key] // CHUNK for key in ("same", "changed", "onlyA", "onlyB")}
    assert total == {"same": 16, "changed": 1, "onlyA": 2, "onlyB": 0}
    assert chunks["newInB"] == {"blobs": 1, "size": CHUNK}
    assert chunks["parts"][0] == {
        "process": 1,
        "name": ADDRESS,
        "same": 15 * CHUNK,
        "changed": CHUNK,
        "onlyA": 0,
        "onlyB": 0,
    }
    assert found["processes"]["changed"] == [{"pid": 1, "a": ["sleep", "600"], "b": ["sleep", "601"]}]
    assert [each["name"] for each in found["files"]["rootfs"]["changed"]] == ["etc/link", "etc/motd"]
    assert [each["name"] for each in found["files"]["records"]["onlyA"]] == ["checkpoint/core-1.img"]


def test_diff_of_the_same(gpusnap: Run, kept: Kept) -> None:
    """Nothing differs, and that is said."""
    code, out, _ = gpusnap("diff", "w:2", kept.second.digest)
    assert code == 0
    assert "B has nothing that A does not have" in out
    assert "GPU processes: 1, the same in both" in out
    assert "records: 3 files, the same in both" in out
    found = json_of(gpusnap, "diff", "w:1", "plain")
    assert found["chunks"]["onlyA"] == 19 * CHUNK
    assert [process["pid"] for process in found["processes"]["onlyA"]] == [1]


# verify


def test_verify(gpusnap: Run, kept: Kept) -> None:
    """Everything is read; --all reads each blob once, whoever has it."""
    code, out, err = gpusnap("verify", "w:1", "plain")
    assert (code, err) == (0, "")
    assert [line.partition(": ")[0] for line in out.splitlines()] == ["w:1", "plain"]
    assert out.count(": no damage\n") == 2
    (first,) = json_of(gpusnap, "verify", "w:1")
    whole = artifact.read(kept.first, kept.store.read)
    blobs = (*whole.documents, *whole.blobs())
    assert (first["blobs"], first["size"]) == (len(blobs), sum(each.size for each in blobs))
    assert first["digest"] == kept.first.digest
    assert (first["read"], first["damaged"]) == (True, [])
    (everything,) = json_of(gpusnap, "verify", "--all")
    listed = json_of(gpusnap, "ls")
    assert (everything["blobs"], everything["size"]) == (listed["blobs"], listed["size"])


@pytest.mark.parametrize("kind", ["flipped", "cut short", "gone"])
@pytest.mark.parametrize("line", [("w:1",), ("--all",)])
def test_verify_finds_every_damage(gpusnap: Run, kept: Kept, kind: str, line: tuple[str, ...]) -> None:
    """Each blob that is wrong is named, with what it belongs to, and the exit code is 4."""
    whole = artifact.read(kept.first, kept.store.read)
    assert whole.records is not None
    assert whole.rootfs is not None
    hit = {
        whole.records.digest: "the records",
        whole.rootfs.digest: "the rootfs diff",
        whole.chunks[0].digest: f"the region {ADDRESS} of process 1 (sleep), at 0 B",
        whole.chunks[-1].digest: "CRIU's image pages-1.img, at 0 B",
    }
    for digest in hit:
        path = blob_path(kept.store, digest)
        if kind == "gone":
            path.unlink()
        elif kind == "flipped":
            damage(path)
        else:
            path.write_bytes(path.read_bytes()[:-1])
    said = {"flipped": "does not match", "cut short": "truncated: has ", "gone": "missing"}[kind]
    code, out, err = gpusnap("verify", *line)
    assert code == exit_codes.DAMAGED
    for digest, belongs_to in hit.items():
        assert f"{digest}: {said}" in out
        assert belongs_to in out
    assert err.count("\n") == 1
    assert err.startswith("gpusnap: 4 damaged in ")
    code, out, _ = gpusnap("verify", *line, "--json")
    (found,) = json.loads(out)
    assert code == exit_codes.DAMAGED
    assert {each["digest"] for each in found["damaged"]} == {*hit}
    # The chunks of both: with --all it says of which checkpoint.
    chunk = next(each for each in found["damaged"] if each["digest"] == whole.chunks[0].digest)
    assert chunk["mediaType"] == whole.chunks[0].media_type
    assert len(chunk["belongsTo"]) == (2 if line == ("--all",) else 1)


def test_verify_of_broken_manifests(gpusnap: Run, kept: Kept) -> None:
    """What nothing says what it is of is named by its kind."""
    damage(blob_path(kept.store, config(kept.store, kept.first)))
    chunk = artifact.read(kept.first, kept.store.read).chunks[0]
    damage(blob_path(kept.store, chunk.digest))
    _, out, _ = gpusnap("verify", "w:1")
    assert "gpusnap's manifest" in out
    assert f"a chunk of 1:{ADDRESS}" in out
    damage(blob_path(kept.store, kept.second.digest))
    _, out, _ = gpusnap("verify", "w:2")
    assert "the list of the checkpoint's parts" in out


def test_verify_goes_on(gpusnap: Run, kept: Kept) -> None:
    """One that is not there does not keep the others from being checked."""
    code, out, err = gpusnap("verify", "none", "w:1")
    assert code == exit_codes.NOT_FOUND
    assert "w:1: " in out
    assert "'none'" in err


@pytest.mark.parametrize("line", [(), ("--all", "w:1")])
def test_verify_of_what(gpusnap: Run, kept: Kept, line: tuple[str, ...]) -> None:
    """Something, or all, but not both."""
    code, _, err = gpusnap("verify", *line)
    assert code == exit_codes.USAGE
    assert ("--all checks a whole store" if line else "give at least one WHAT, or --all") in err


def test_verify_of_an_empty_store(gpusnap: Run, tmp_path: Path) -> None:
    """Nothing is kept there, and nothing is wrong."""
    Store(tmp_path / "store").create()
    code, out, _ = gpusnap("verify", "--all")
    assert code == 0
    assert f"{tmp_path}/store" in out


@pytest.mark.parametrize("columns", ["20", "60"])
def test_a_narrow_terminal(gpusnap: Run, kept: Kept, monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    """It breaks lines itself: tables are never folded to less than 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    _, wide, _ = gpusnap("ls")
    monkeypatch.setenv("COLUMNS", columns)
    assert gpusnap("ls")[1] == wide


# rm, gc, tag


def test_rm(gpusnap: Run, kept: Kept) -> None:
    """A name goes, and only that; by its digest all names go. The blobs wait for gc."""
    before = len(list(Path(kept.store.path, "blobs/sha256").iterdir()))
    code, out, err = gpusnap("rm", "w:2")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"removed w:2, {kept.second.digest[7:19]}, from {kept.store.path}",
        f"{kept.second.digest[7:19]} stays, as registry.example:5000/team/w:v2",
    ]
    assert len(list(Path(kept.store.path, "blobs/sha256").iterdir())) == before
    assert json_of(gpusnap, "inspect", kept.second.digest)["artifact"]["names"]
    found = json_of(gpusnap, "rm", kept.second.digest)
    assert found["removed"] == [
        {
            "what": kept.second.digest,
            "store": kept.store.path,
            "digest": kept.second.digest,
            "names": ["registry.example:5000/team/w:v2"],
            "left": [],
        }
    ]
    assert found["collected"] is None
    assert gpusnap("inspect", kept.second.digest)[0] == exit_codes.NOT_FOUND


def test_rm_of_a_name_without_a_tag(gpusnap: Run, kept: Kept) -> None:
    """Of several none goes, and all are named; the only one does; --all takes all of that name."""
    before = kept.store.entries()
    code, out, err = gpusnap("rm", "w")
    assert (code, out) == (exit_codes.USAGE, "")
    assert err == (
        f"gpusnap: w matches 2 checkpoints in {kept.store.path}: w:1, w:2; name the one to remove, or "
        "remove them all with gpusnap rm --all w\n"
    )
    assert gpusnap("rm", "w:latest")[0] == exit_codes.USAGE
    assert kept.store.entries() == before
    gpusnap("tag", "w", "w")
    assert [each["names"] for each in json_of(gpusnap, "rm", "w")["removed"]] == [["w"]]
    gpusnap("tag", "w:1", "w")
    removed = json_of(gpusnap, "rm", "--all", "w")["removed"]
    assert [each["names"] for each in removed] == [["w"], ["w:1"], ["w:2"]]
    assert gpusnap("rm", "--all", "w")[0] == exit_codes.NOT_FOUND
    # The only one.
    assert json_of(gpusnap, "rm", "registry.example:5000/team/w")["removed"][0]["names"] == [
        "registry.example:5000/team/w:v2"
    ]


def test_hints_on_another_store(gpusnap: Run, kept: Kept, tmp_path: Path) -> None:
    """They name that store: the same command without it would remove the checkpoints of this host's."""
    other = f"oci:{tmp_path}/other"
    for tag in ("1", "2"):
        assert gpusnap("copy", f"w:{tag}", f"{other}:w:{tag}")[0] == 0
    assert f"gpusnap rm --all {other}:w\n" in gpusnap("rm", f"{other}:w")[2]
    said = f"gpusnap gc {other} frees the space that "
    assert f"{said}it used\n" in gpusnap("rm", f"{other}:w:1")[1]
    assert f"gpusnap ls {other} lists the checkpoints" in gpusnap("history", f"{other}:none")[2]
    assert "gpusnap gc frees the space that it used\n" in gpusnap("rm", "w:1")[1]


def test_a_name_without_a_tag(gpusnap: Run, kept: Kept) -> None:
    """The newest, wherever a checkpoint is named."""
    for word in ("w", "w:latest", kept.of("w")):
        assert json_of(gpusnap, "inspect", word)["artifact"]["digest"] == kept.second.digest
        assert json_of(gpusnap, "diff", "w:1", word)["b"]["digest"] == kept.second.digest
        assert json_of(gpusnap, "verify", word)[0]["digest"] == kept.second.digest
        assert json_of(gpusnap, "tag", word, "x")["digest"] == kept.second.digest


def test_a_file_and_a_name(gpusnap: Run, kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of that name in the working directory is not taken in its place, nor the other way round."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w").write_text("a program")
    code, _, err = gpusnap("inspect", "w")
    assert code == exit_codes.USAGE
    assert err == (
        f"gpusnap: w is ambiguous: it may be the file ./w, or w:2 in {kept.store.path}; write ./w or "
        f"oci:{kept.store.path}:w [GPS-102]\n"
    )
    assert json_of(gpusnap, "inspect", kept.of("w"))["artifact"]["digest"] == kept.second.digest
    assert "./w" in gpusnap("inspect", "./w")[2]


def test_rm_goes_on(gpusnap: Run, kept: Kept) -> None:
    """What can be removed is, and what cannot is told."""
    code, out, err = gpusnap("rm", "none", "w:1", "nothing")
    assert code == exit_codes.NOT_FOUND
    assert "removed w:1" in out
    assert "gpusnap gc frees the space that it used" in out
    assert [line.count("nothing in") for line in err.splitlines()] == [1, 1]


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_rm_of_a_name_that_moves(
    gpusnap: Run, kept: Kept, monkeypatch: pytest.MonkeyPatch, force: tuple[str, ...]
) -> None:
    """It names another checkpoint by the time that the lock is held: that one stays."""
    real = Store.remove

    def late(store: Store, *line: Any) -> tuple[str, ...]:
        kept.store.tag(kept.plain.digest, "w:1")
        kept.store.tag(kept.plain.digest, "w:3")
        return real(store, *line)

    monkeypatch.setattr(Store, "remove", late)
    code, out, err = gpusnap("rm", "--gc", *force, "w:1")
    assert (code, "removed w:1" in out) == (exit_codes.FAILED, False)
    assert err == (
        f"gpusnap: w:1 is not removed, because another command has just changed what it names in "
        f"{kept.store.path}, or the other names of that. Now it is {kept.plain.digest} "
        "(plain, w:1, w:3); remove it again if that may go [GPS-703]\n"
    )
    assert {kept.first.digest, kept.plain.digest} <= {each.descriptor.digest for each in kept.store.entries()}


def test_rm_of_a_last_name(gpusnap: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a container needs had two names, and each of two commands removes one of them."""
    store = Store(tmp_path / "store")
    make_stopped(tmp_path, monkeypatch)
    needed = keep_pages(store)
    for name in ("v:1", "v:2"):
        store.tag(needed, name)
    real = Store.remove

    def late(store: Store, *line: Any) -> tuple[str, ...]:
        real(store, "v:2")
        return real(store, *line)

    monkeypatch.setattr(Store, "remove", late)
    code, _, err = gpusnap("rm", "v:1")
    assert code == exit_codes.FAILED
    assert "v:1 is not removed, because another command has just changed" in err
    assert [each.name for each in store.entries()] == ["v:1"]


def test_rm_of_what_has_just_gone(gpusnap: Run, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another command has removed it before it is looked at."""
    real = in_podman.check_removal

    def late(store: Store, root: Descriptor) -> None:
        store.remove(root.digest)
        real(store, root)

    monkeypatch.setattr(upkeep, "check_removal", late)
    code, _, err = gpusnap("rm", "w:1")
    assert (code, "has the name or digest 'w:1'" in err) == (exit_codes.NOT_FOUND, True)


@pytest.mark.parametrize("word", ["oci:{}", "./w.tar", "w 1"])
@pytest.mark.parametrize("command", ["rm", "tag"])
def test_what_is_not_in_a_store(gpusnap: Run, kept: Kept, command: str, word: str) -> None:
    """Exit code 2: a whole store, a file, and what cannot be a name."""
    line = (command, word.format(kept.store.path), *(("x",) if command == "tag" else ()))
    code, out, err = gpusnap(*line)
    assert (code, out) == (exit_codes.USAGE, "")
    assert err.startswith("gpusnap: ")
    assert len(kept.store.entries()) == 5


def test_gc(gpusnap: Run, kept: Kept) -> None:
    """--dry-run tells what would go, and then that goes."""
    gpusnap("rm", "w:1")
    would = json_of(gpusnap, "gc", "--dry-run")
    assert would["dryRun"]
    assert would["blobs"] > 2
    _, out, _ = gpusnap("gc", "--dry-run")
    assert out.startswith(f"would remove {would['blobs']} blobs, {binary_size(would['size'])}, from ")
    done = json_of(gpusnap, "gc", kept.word)
    assert done == {**would, "dryRun": False}
    assert json_of(gpusnap, "gc")["blobs"] == 0
    assert json_of(gpusnap, "verify", "--all")[0]["damaged"] == []


def test_gc_before_the_first_checkpoint(gpusnap: Run, tmp_path: Path) -> None:
    """This host's store need not exist; one that the user names must."""
    store = tmp_path / "store"
    assert gpusnap("gc") == (0, f"nothing to remove: {store} has no checkpoint yet\n", "")
    assert json_of(gpusnap, "gc")["blobs"] == 0
    assert not store.exists()
    (tmp_path / "other").mkdir()
    for word in (f"oci:{store}", f"oci:{tmp_path / 'other'}"):
        assert gpusnap("gc", word)[0] == exit_codes.NOT_FOUND


def test_gc_of_what_killed_commands_left(gpusnap: Run, kept: Kept) -> None:
    """It says how many."""
    for count, what in ((1, "1 killed command"), (2, "2 killed commands")):
        for _ in range(count):
            kept.store.stage().close(leave=True)
        assert f"\nwould remove what {what} left unfinished\n" in gpusnap("gc", "--dry-run")[1]
        assert f"\nremoved what {what} left unfinished\n" in gpusnap("gc")[1]


def test_gc_tells_of_memory_without_a_name(gpusnap: Run, kept: Kept) -> None:
    """It stays, for Podman may have the rest of its checkpoint; how it is freed is said."""
    _, out, _ = gpusnap("gc")
    (said,) = [line for line in out.splitlines() if "without a name" in line]
    own = next(row["own"] for row in json_of(gpusnap, "ls")["checkpoints"] if row["kind"] == "pages")
    assert said == (
        f"{binary_size(own)} of memory without a name is in the store, from a checkpoint that failed or "
        "whose records are in Podman or an archive. List it: gpusnap ls --filter kind=pages. If nothing "
        "needs it: gpusnap rm --gc DIGEST"
    )
    gpusnap("rm", "--gc", kept.pages.digest)
    _, out, _ = gpusnap("gc")
    assert "without a name" not in out


def test_memory_that_a_stopped_container_needs(
    gpusnap: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gc has the command that continues it, and rm does not remove the last copy without --force."""
    store = Store(tmp_path / "store")
    make_stopped(tmp_path, monkeypatch)
    older, needed = keep_pages(store, salt=7), keep_pages(store)
    _, out, _ = gpusnap("gc")
    assert "w needs memory without a name; to continue w: podman container restore w\n" in out
    command = "podman container restore w"
    assert json_of(gpusnap, "gc")["neededBy"] == [{"container": ID, "name": "w", "command": command}]
    assert " of memory without a name is in the store" in out
    assert gpusnap("rm", older)[0] == 0
    _, out, _ = gpusnap("gc")
    assert " of memory without a name is in the store" not in out
    gpusnap("tag", needed, "v:1")
    assert gpusnap("tag", needed, "v:2")[0] == 0
    assert gpusnap("rm", "v:1")[0] == 0
    for wanted in (needed, "v:2"):
        code, out, err = gpusnap("rm", "--gc", wanted)
        assert (code, "removed v" in out) == (exit_codes.FAILED, False)
        assert err.startswith(
            f"gpusnap: the stopped container w needs {needed}, which is its only memory in "
        )
        assert "; podman container restore w continues it; gpusnap rm --force removes " in err
        assert err.endswith("[GPS-706]\n")
    assert [each.name for each in store.entries()] == ["v:2"]
    assert gpusnap("rm", "--force", needed)[0] == 0
    assert store.entries() == ()


@pytest.mark.parametrize("at", ["sends its memory", "interrupted"])
def test_a_checkpoint_of_a_container_that_is_migrated(
    gpusnap: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """It may be all that is left of the container: rm does not remove it without --force."""
    (tmp_path / "state").mkdir()
    monkeypatch.setattr(migrations, "FOLDER", str(tmp_path / "state" / "migrations"))
    store = Store(tmp_path / "store")
    digest = keep_archive(store, an_archive(tmp_path), ["w:1"])
    leaving = outgoing(
        container=ID,
        store=store.path,
        checkpoint="w:1",
        digest=digest if at == "interrupted" else "",
        since="2026-02-03T04:05:06+00:00",
    )
    leaving.write()
    if at != "interrupted":
        monkeypatch.setattr(migrations.OutgoingMigration, "at_work", True)
    said = "w may run on gpu2" if at == "interrupted" else "w is being migrated to gpu2"
    assert gpusnap("tag", "w:1", "w:2")[0] == 0
    assert gpusnap("rm", "w:2")[0] == 0
    for wanted in ("w:1", digest):
        code, out, err = gpusnap("rm", "--gc", wanted)
        assert (code, "removed w" in out) == (exit_codes.FAILED, False)
        assert err.startswith(f"gpusnap: {said}")
        assert "; gpusnap rm --force removes the checkpoint for good [GPS-823]" in err
    assert [each.name for each in store.entries()] == ["w:1"]
    assert gpusnap("rm", "--force", "w:1")[0] == 0
    assert store.entries() == ()


def test_memory_that_an_export_needs(gpusnap: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Podman has no container any more (--rm): gc has the command of the export, and rm refuses."""
    store = Store(tmp_path / "store")
    FakePodman(tmp_path / "podman", monkeypatch)
    archive = leave_export(store, tmp_path / "exported")
    needed, command = keep_pages(store), f"podman container restore --import {archive}"
    _, out, _ = gpusnap("gc")
    assert f"k needs memory without a name; to continue k: {command}\n" in out
    assert " of memory without a name is in the store" not in out
    assert json_of(gpusnap, "gc")["neededBy"] == [{"container": ID, "name": "k", "command": command}]
    code, out, err = gpusnap("rm", "--gc", needed)
    assert (code, out) == (exit_codes.FAILED, "")
    assert err.startswith(
        f"gpusnap: the export of k, {archive}, needs {needed}, which is its only memory in {store.path}; "
    )
    assert f"; {command} continues it; " in err
    assert err.endswith("[GPS-706]\n")
    assert [each.descriptor.digest for each in store.entries()] == [needed]
    assert gpusnap("rm", "--force", needed)[0] == 0
    assert json_of(gpusnap, "gc")["neededBy"] == []


def test_an_export_that_cannot_be_read(gpusnap: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may need all memory of the store: rm removes none, and gc says so."""
    store = Store(tmp_path / "store")
    FakePodman(tmp_path / "podman", monkeypatch)
    archive = Path(leave_export(store, tmp_path / "exported"))
    archive.write_bytes(archive.read_bytes()[:700])
    pages = keep_pages(store)
    code, _, err = gpusnap("rm", pages)
    assert code == exit_codes.FAILED
    assert f"cannot determine whether a stopped container needs {pages}: what Podman exported" in err
    assert f"cannot be examined: {archive} is not a checkpoint archive, or is cut short" in err
    assert "; gpusnap recover names the export; if it is of no use, remove that" in err
    code, out, err = gpusnap("gc", "--json")
    said = "cannot determine which memory without a name containers need: what Podman exported"
    assert (code, json.loads(out)["neededBy"], said in err) == (0, None, True)
    assert [each.descriptor.digest for each in store.entries()] == [pages]


def test_memory_that_is_there_twice(gpusnap: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rm removes one of both: a restore finds every chunk in the other."""
    store = Store(tmp_path / "store")
    make_stopped(tmp_path, monkeypatch)
    pages = keep_pages(store)
    whole = tmp_path / "whole"
    whole.mkdir()
    keep_archive(store, an_archive(whole), ["w:1"])
    assert gpusnap("rm", pages)[0] == 0


def test_rm_while_podman_does_not_answer(
    gpusnap: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that a container may need stays, and that is an error; gc goes on."""
    store = Store(tmp_path / "store")
    podman = make_stopped(tmp_path, monkeypatch)
    (podman.folder / "podman").write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    monkeypatch.setattr(in_podman, "_DESCRIBING", 0.1)
    pages = keep_pages(store)
    code, _, err = gpusnap("rm", pages)
    assert code == exit_codes.FAILED
    assert f"cannot determine whether a stopped container needs {pages}: Podman did not respond" in err
    code, out, _ = gpusnap("gc")
    assert code == 0
    said = "cannot determine which memory without a name containers need: Podman did not respond"
    assert said in out
    code, out, err = gpusnap("gc", "--json")
    assert (code, json.loads(out)["neededBy"], said in err) == (0, None, True)
    assert len(store.entries()) == 1


def test_gc_of_a_damaged_store(gpusnap: Run, kept: Kept) -> None:
    """Nothing is removed, and the sentence says of which checkpoint it cannot be told."""
    blob_path(kept.store, kept.first.digest).unlink()
    code, out, err = gpusnap("gc")
    assert (code, out) == (exit_codes.FAILED, "")
    assert "gc removed nothing" in err
    assert kept.first.digest in err


def test_gc_spares(gpusnap: Run, kept: Kept) -> None:
    """What a killed checkpoint needs is left, and named."""
    staging = kept.store.stage("left")
    staging.mark_precious("the checkpoint of container c0ffee")
    staging.close()
    code, out, _ = gpusnap("gc")
    assert code == 0
    assert f"left {staging.path}: the checkpoint of container c0ffee" in out


@pytest.mark.parametrize(
    ("host", "boot", "said"),
    [
        pytest.param(
            "elsewhere",
            "another",
            "memory of the suspended container c0ffee of another host, elsewhere: gpusnap resume or gpusnap "
            "recover removes it there; if that host or the container is gone, nobody needs it: remove",
            id="another host",
        ),
        pytest.param(
            os.uname().nodename,
            state_files.boot(),
            "memory of the suspended container c0ffee, which another gpusnap on this host suspended that has "
            "a /run of its own, for example in a container: gpusnap resume or gpusnap recover removes it "
            "there; if that is gone, nobody needs it: remove",
            id="another /run",
        ),
        pytest.param(
            "",
            "",
            "memory of the container c0ffee, which an earlier version of gpusnap suspended, on this host or "
            "on another one that uses this store; if gpusnap ps shows it nowhere, nobody needs it: remove",
            id="an earlier version",
        ),
    ],
)
def test_gc_and_spilled_memory_of_others(gpusnap: Run, kept: Kept, host: str, boot: str, said: str) -> None:
    """Whose it is, and what can be done: no command here removes it."""
    staging = kept.store.stage("left")
    mark = f"Suspended container's GPU memory: c0ffee@b on {host} (machine 0123, boot {boot}, records 1:1)"
    staging.mark_precious(mark if host else "GPU memory of the suspended container c0ffee@b")
    staging.close()
    _, out, _ = gpusnap("gc")
    assert f"left {staging.path}: {said} {staging.path}" in out


def test_gc_and_spilled_memory_of_this_host(
    gpusnap: Run, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own commands remove it."""
    staging = kept.store.stage("left")
    monkeypatch.setattr(origin, "_identify_records", lambda: "1:1")
    staging.mark_precious(spilled.make_mark("c0ffee@b"))
    staging.close()
    said = (
        "memory of the suspended container c0ffee of this host: gpusnap resume or gpusnap recover removes it"
    )
    assert f"left {staging.path}: {said}\n" in gpusnap("gc")[1]


def test_tag(gpusnap: Run, kept: Kept) -> None:
    """A further name; one that moves says where it was."""
    assert gpusnap("tag", "w:1", "prod") == (0, f"prod names {kept.first.digest[7:19]}\n", "")
    found = json_of(gpusnap, "tag", "w:2", "prod")
    assert found == {
        "store": kept.store.path,
        "digest": kept.second.digest,
        "name": "prod",
        "movedFrom": kept.first.digest,
    }
    assert json_of(gpusnap, "tag", "w:2", "prod")["movedFrom"] == ""
    assert json_of(gpusnap, "inspect", "w:1")["artifact"]["names"] == ["w:1"]
    code, _, err = gpusnap("tag", "w:1", "sha256:ab")
    assert code == exit_codes.USAGE
    assert "is not a valid name" in err
    code, _, err = gpusnap("tag", "w:1", "oci:/other:w")
    assert code == exit_codes.USAGE
    assert "gpusnap copy w:1 oci:/other:w copies it" in err


def test_names_that_are_empty(gpusnap: Run, kept: Kept) -> None:
    """Such as those of variables that are not set."""
    for line in (("history", ""), ("history", f"oci:{kept.store.path}"), ("prune", "", "--keep-last", "1")):
        code, out, err = gpusnap(*line)
        assert (code, out) == (exit_codes.USAGE, "")
        assert ("no container is named" if line[0] == "history" else "a container is empty") in err


# Elsewhere


@pytest.fixture
def registry(tmp_path: Path, kept: Kept) -> Iterator[FakeRegistry]:
    """A registry that has the first checkpoint as team/app:v1."""
    with FakeRegistry(tmp_path / "registry") as found:
        transfer.push(kept.first, kept.store.layout, found.repository(), tag="v1")
        found.seen.clear()
        yield found


def test_inspect_in_a_registry(gpusnap: Run, kept: Kept, registry: FakeRegistry) -> None:
    """Manifest and config are read, and no chunk."""
    word = f"{registry.host}/team/app:v1"
    found = json_of(gpusnap, "inspect", word, "--plain-http")
    assert found["artifact"]["digest"] == kept.first.digest
    assert found["artifact"]["where"] == f"{registry.host}/team/app"
    assert found["artifact"]["shared"] == []
    assert len(registry.asked("GET", "/blobs/")) == 1
    assert json_of(gpusnap, "inspect", f"http://{word}") == found
    assert gpusnap("inspect", f"http://{registry.host}/team/app:v2")[0] == exit_codes.NOT_FOUND


def test_diff_with_a_registry(gpusnap: Run, kept: Kept, registry: FakeRegistry) -> None:
    """Of that one the records are read as well."""
    found = json_of(gpusnap, "diff", "w:2", f"http://{registry.host}/team/app:v1")
    assert found["chunks"]["changed"] == CHUNK
    assert [each["name"] for each in found["files"]["records"]["onlyB"]] == ["checkpoint/core-1.img"]
    assert len(registry.asked("GET", "/blobs/")) == 3


def test_verify_in_a_registry(gpusnap: Run, kept: Kept, registry: FakeRegistry) -> None:
    """It is asked for each blob; with --deep each is read."""
    word = f"http://{registry.host}/team/app:v1"
    (found,) = json_of(gpusnap, "verify", word)
    assert (found["read"], found["damaged"]) == (False, [])
    assert registry.asked("GET", "/blobs/") == []
    assert "present; contents not read (see --deep)" in gpusnap("verify", word)[1]
    (deep,) = json_of(gpusnap, "verify", word, "--deep")
    assert deep == {**found, "read": True}
    chunks = artifact.read(kept.first, kept.store.read).chunks
    damage(registry.folder / "blobs" / chunks[0].digest.removeprefix("sha256:"))
    registry.members["team/app"].discard(chunks[1].digest.removeprefix("sha256:"))
    code, out, _ = gpusnap("verify", word, "--deep")
    assert code == exit_codes.DAMAGED
    assert f"{chunks[1].digest}: missing\n  the region {ADDRESS} of process 1 (sleep), at 4.0 KiB" in out
    assert f"{chunks[0].digest}: " in out
    assert "2 damaged" in out
    (found,) = json.loads(gpusnap("verify", word, "--json")[1])
    assert [each["digest"] for each in found["damaged"]] == [chunks[1].digest]


def test_many_processes(gpusnap: Run, tmp_path: Path) -> None:
    """Tables that would go on for ever end, and say how to see the rest."""
    regions = [noise(1, at) for at in range(30)]
    crowd = tuple(GpuProcess(pid, "worker", ("worker",), ()) for pid in range(2, 40))
    record = replace(a_manifest(), processes=(*a_manifest().processes, *crowd))
    keep(
        Store(tmp_path / "store"),
        *regions,
        names=("w",),
        records=IMAGES,
        record=record,
    )
    _, out, _ = gpusnap("inspect", "w")
    assert "and 10 smaller ones of 40.0 KiB together (see --json)" in out


@pytest.mark.parametrize("line", [("lies",), ("--all",), ("registry", "--deep")])
def test_verify_of_a_lie(gpusnap: Run, kept: Kept, tmp_path: Path, line: tuple[str, ...]) -> None:
    """A compressed chunk that does not hold what the config says is damage, though each blob is right."""
    keep(
        kept.store,
        bytearray(b"text" * CHUNK),
        names=("true",),
        records=IMAGES,
    )
    true = artifact.read(kept.store.find("true").descriptor, kept.store.read)
    text = kept.store.layout.read_blob(true.config).decode()
    record = manifest_json.decode(text.encode(), "a test")
    chunk = next(
        c for p in record.processes for r in p.regions for c in r.table.chunks if c.encoding == "zstd"
    )
    fake = "ab" * 32
    with kept.store.stage() as staging:
        lie = text.replace(f'"{chunk.plain[7:]}"', f'"{fake}"')
        config = staging.layout.add_blob(lie.encode(), media_type=artifact.CONFIG)
        root = artifact.write(staging.layout, replace(true, config=config))
        staging.commit(root, names=["lies"])
    assert gpusnap("verify", "true")[0] == 0
    with FakeRegistry(tmp_path / "registry") as registry:
        transfer.push(root, kept.store.layout, registry.repository(), tag="v1")
        words = [f"http://{registry.host}/team/app:v1" if word == "registry" else word for word in line]
        code, out, _ = gpusnap("verify", *words)
    assert code == exit_codes.DAMAGED
    assert f"{chunk.blob}: does not contain the expected chunk sha256:{fake} of {chunk.size} bytes" in out


def test_verify_of_annotations_that_are_no_texts(gpusnap: Run, kept: Kept) -> None:
    """A restore refuses such a manifest, though every digest is right; so does verify."""
    document = json.loads(kept.store.read(kept.first))
    changed = json.dumps({**document, "annotations": {"org.opencontainers.image.created": -1}})
    root = kept.store.layout.add_blob(changed.encode(), media_type=kept.first.media_type)
    path = Path(kept.store.path, "index.json")
    index = json.loads(path.read_text())
    named = {**root.to_json(), "annotations": {"org.opencontainers.image.ref.name": "odd"}}
    path.write_text(json.dumps({**index, "manifests": [*index["manifests"], named]}))
    code, out, _ = gpusnap("verify", "odd")
    assert (code, root.digest in out) == (exit_codes.DAMAGED, True)
    assert "are not strings" in out
