"""gpusnap prune, on real small stores: what goes, what never does, and what is said of it."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from checkpoints import ANNOTATIONS, blob_path, keep
from oci_checkpoints import begin, end, stagings
from outgoing import outgoing

from gpusnap import retention
from gpusnap.checkpoints import migrations
from gpusnap.checkpoints.labels import as_annotations
from gpusnap.checkpoints.names import dated_name
from gpusnap.oci.base.errors import DiskFull
from gpusnap.oci.layout.documents import Descriptor, Manifest, empty_descriptor
from gpusnap.oci.layout.layout import Layout
from gpusnap.oci.store.index import Catalog
from gpusnap.oci.store.store import Store
from gpusnap.retention.prune import prune
from gpusnap.retention.rules import Rules

Run = Callable[..., tuple[int, str, str]]
LAST = Rules(last=1)
TIME = "202601%02d"
"""What is behind the colon of a name, as a date."""


@pytest.fixture(autouse=True)
def store(host_store: Store) -> Store:
    """This host's."""
    return host_store.create()


def made(
    store: Store,
    container: str,
    day: int,
    *names: str,
    labels: dict[str, str] | None = None,
    created: str = "",
) -> str:
    """Have a checkpoint of a container in a store, of a day of January; its digest."""
    notes = {
        **ANNOTATIONS,
        "org.criu.checkpoint.container.name": container,
        "org.opencontainers.image.created": created or f"2026-01-{day:02}T12:00:00Z",
        **as_annotations(labels or {}),
    }
    records: dict[str, bytes | str | None] = {"config.dump": f"{container} {day}".encode()}
    return keep(store, names=names, records=records, gpu=False, annotations=notes).digest


def break_it(store: Store, digest: str, how: str) -> str:
    """Have a checkpoint lack its records, or the end of them, or its manifest; the digest of that."""
    manifest = json.loads(blob_path(store, digest).read_bytes())
    broken = digest if how == "manifest" else str(manifest["layers"][0]["digest"])
    path = blob_path(store, broken)
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    return broken


def names(store: Store) -> set[str]:
    return {entry.name for entry in store.entries()}


def test_by_container(store: Store) -> None:
    """Each has its own last ones; the names that `gpusnap checkpoint` gives go with the checkpoints."""
    for container in ("a", "b"):
        for day in (1, 2, 3):
            made(store, container, day, f"{container}:{TIME % day}")
    verdicts = prune(store, Rules(last=2))
    assert names(store) == {"a:20260102", "a:20260103", "b:20260102", "b:20260103"}
    assert [(each.names, each.reasons) for each in verdicts if each.container == "a"] == [
        (("a:20260101",), ()),
        (("a:20260102",), ("last",)),
        (("a:20260103",), ("last",)),
    ]
    assert all(each.reasons for each in prune(store, Rules(last=2)))


def test_a_dry_run(store: Store) -> None:
    """It says the same, and changes nothing."""
    for day in (1, 2, 3):
        made(store, "a", day, f"a:{TIME % day}")
    said = prune(store, LAST, dry_run=True)
    assert names(store) == {"a:20260101", "a:20260102", "a:20260103"}
    assert prune(store, LAST) == said
    assert names(store) == {"a:20260103"}


def test_containers_whose_name_no_store_takes(store: Store) -> None:
    """What `gpusnap checkpoint` called them is theirs, and not another container's."""
    containers = ("my_app", "my__app", "my-app", "my--app", "app_", "app", "a..b", "a.b")
    for container in containers:
        for day in (1, 2, 3):
            made(store, container, day, dated_name(container, "c" * 64, datetime(2026, 1, day, tzinfo=UTC)))
    assert len({name.partition(":")[0] for name in names(store)}) == len(containers)
    for container in containers:
        found = prune(store, LAST, [container])
        assert [each.reasons for each in found] == [(), (), ("last",)]
    assert len(names(store)) == len(containers)


def test_names_that_somebody_gave(store: Store) -> None:
    """They keep a checkpoint, and it does not count; where the pattern fits them, it does."""
    made(store, "a", 1, "a:20260101", "best")
    made(store, "a", 2, "a:20260102", "registry.example/a:v2")
    made(store, "a", 3, "a:20260103")
    made(store, "a", 4, "a")
    verdicts = prune(store, LAST)
    assert names(store) == {"a:20260101", "best", "a:20260102", "registry.example/a:v2", "a"}
    assert verdicts[0].reasons == ("has the name best",)
    prune(store, LAST, ["a", "registry.example/*"])
    assert names(store) == {"a:20260101", "best", "a"}
    prune(store, LAST, ["a", "bes?"])
    assert names(store) == {"a"}


@pytest.mark.parametrize("tag", ["golden", "v1", "1", "latest", "20261399", "2026"])
def test_tags_that_are_no_time(store: Store, tag: str) -> None:
    """Somebody gave them: they keep a checkpoint, also against a pattern of containers."""
    made(store, "app", 1, f"app:{TIME % 1}", f"app:{tag}")
    for day in (2, 3):
        made(store, "app", day, f"app:{TIME % day}")
    verdicts = prune(store, LAST, ["ap*"])
    assert verdicts[0].reasons == (f"has the name app:{tag}",)
    assert names(store) == {f"app:{TIME % 1}", f"app:{tag}", f"app:{TIME % 3}"}
    prune(store, LAST, ["app:*"])
    assert names(store) == {f"app:{TIME % 3}"}


@pytest.mark.parametrize("tag", ["2026-01-01", "20260101-0930", "20260101-093000", "2026-01-01T09.30.00Z"])
def test_tags_that_are_times(store: Store, tag: str) -> None:
    """Those of `gpusnap checkpoint` and of a script with date(1) go with their checkpoints."""
    made(store, "app", 1, f"app:{tag}")
    made(store, "app", 2, f"app:{TIME % 2}")
    prune(store, LAST)
    assert names(store) == {f"app:{TIME % 2}"}


def test_only_the_containers_that_were_named(store: Store) -> None:
    for container in ("web-1", "web-2", "other"):
        for day in (1, 2):
            made(store, container, day, f"{container}:{TIME % day}")
    prune(store, LAST, ["web-1"])
    assert names(store) == {
        "web-1:20260102",
        "web-2:20260101",
        "web-2:20260102",
        "other:20260101",
        "other:20260102",
    }
    prune(store, LAST, ["web-*"])
    assert names(store) == {"web-1:20260102", "web-2:20260102", "other:20260101", "other:20260102"}


def test_without_names(store: Store) -> None:
    """They are of their container all the same."""
    for day in (1, 2, 3):
        made(store, "a", day)
    prune(store, LAST, ["a"])
    assert len(store.entries()) == 1


def test_what_is_no_whole_checkpoint(store: Store) -> None:
    """Pages whose records Podman has, and what has no age are left."""
    pages = keep(store, bytearray(b"x" * 5000), annotations=ANNOTATIONS).digest
    ageless = made(store, "a", 1, "a:20260101", created="yesterday")
    made(store, "a", 3, "a:20260103")
    made(store, "a", 4, "a:20260104")
    verdicts = prune(store, LAST)
    assert names(store) == {"", "a:20260101", "a:20260104"}
    assert {entry.descriptor.digest for entry in store.entries()} >= {pages, ageless}
    assert [each.reasons for each in verdicts] == [("age unknown",), (), ("last",)]


@pytest.mark.parametrize("how", ["missing", "truncated", "manifest"])
def test_the_newest_is_not_whole(store: Store, how: str) -> None:
    """It counts for no rule, whose number is of whole ones, and it is left."""
    digests = [made(store, "a", day, f"a:{TIME % day}") for day in (1, 2, 3)]
    broken = break_it(store, digests[2], how)
    for dry_run in (True, False):
        found = {each.digest: each for each in prune(store, LAST, ["a*"], dry_run=dry_run)}
        assert [found[digest].reasons for digest in digests] == [(), ("last",), ("not whole",)]
        assert [bool(found[digest].fault) for digest in digests] == [False, False, True]
        assert broken in found[digests[2]].fault
        assert found[digests[2]].container == "a"
    assert names(store) == {f"a:{TIME % 2}", f"a:{TIME % 3}"}


@pytest.mark.parametrize("how", ["missing", "truncated", "manifest"])
def test_none_is_whole(store: Store, how: str) -> None:
    """All are left."""
    for digest in [made(store, "a", day, f"a:{TIME % day}") for day in (1, 2)]:
        break_it(store, digest, how)
    assert [each.reasons for each in prune(store, LAST)] == [("not whole",)] * 2
    assert names(store) == {f"a:{TIME % 1}", f"a:{TIME % 2}"}


def test_some_are_whole(store: Store) -> None:
    """Of each container by itself; the period of time begins at the newest whole one."""
    a = [made(store, "a", day, f"a:{TIME % day}") for day in (1, 2, 3, 4, 5)]
    b = [made(store, "b", day, f"b:{TIME % day}") for day in (1, 2)]
    break_it(store, a[1], "missing")
    break_it(store, a[4], "truncated")
    store.tag(break_it(store, b[1], "manifest"), "best")
    found = {each.digest: each.reasons for each in prune(store, Rules(last=1, within=timedelta(days=1)))}
    assert [found[digest] for digest in a] == [
        (),
        ("not whole",),
        ("within",),
        ("last", "within"),
        ("not whole",),
    ]
    assert [found[digest] for digest in b] == [("last", "within"), ("not whole", "has the name best")]


def test_removed_while_the_store_was_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has gone, blobs and all, is nothing to be told of."""
    digests = [made(store, "a", day, f"a:{TIME % day}") for day in (1, 2, 3)]
    real = Layout.list_missing

    def late(self: Layout, wanted: Iterable[Descriptor]) -> list[Descriptor]:
        monkeypatch.undo()
        store.remove(digests[2])
        store.collect()
        return real(self, wanted)

    monkeypatch.setattr(Layout, "list_missing", late)
    assert [(each.digest, each.reasons) for each in prune(store, LAST)] == [
        (digests[0], ()),
        (digests[1], ("last",)),
    ]


def test_what_is_said_of_one_that_is_not_whole(store: Store, gpusnap: Run) -> None:
    """Its name, what is missing and what to do, also where gc then refuses to go on."""
    digests = [made(store, "a", day, f"a:{TIME % day}") for day in (1, 2, 3)]
    broken = break_it(store, digests[2], "missing")
    words = ("prune", "--keep-last", "1")
    note = (
        "gpusnap: note: the checkpoint a:20260103 is damaged, so no rule applies to it and it is kept: "
        f"the blob {broken} is missing; gpusnap verify a:20260103 shows the damage, and "
        "gpusnap rm a:20260103 removes it [GPS-601]\n"
    )
    code, out, err = gpusnap(*words, "--dry-run", "--json")
    assert (code, err) == (0, note)
    found = json.loads(out)["checkpoints"]
    assert [each["fault"] for each in found] == ["", "", f"the blob {broken} is missing"]
    code, out, err = gpusnap(*words, "--dry-run")
    assert (code, err) == (0, note)
    assert [line.split()[6:] for line in out.splitlines()[1:4]] == [["go"], ["last"], ["not", "whole"]]
    code, out, err = gpusnap(*words, "--gc")
    assert (code, err.startswith(note)) == (1, True)
    assert "GPS-705" in err
    assert "1 of 3 checkpoints removed" in out
    assert names(store) == {f"a:{TIME % 2}", f"a:{TIME % 3}"}


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("part", ["manifest", "blob"])
def test_one_that_cannot_be_read(
    store: Store, gpusnap: Run, monkeypatch: pytest.MonkeyPatch, number: int, part: str
) -> None:
    """It is kept, and is not said to be damaged: nobody shall remove it."""
    digests = [made(store, "a", day, f"a:{TIME % day}") for day in (1, 2, 3)]
    unread = digests[2]
    if part == "blob":
        unread = store.layout.read_manifest(store.find(unread).descriptor).layers[0].digest
    name, real_open, real_stat = unread.removeprefix("sha256:"), os.open, os.stat

    def fail_open(path: str, *words: Any, **more: Any) -> int:
        if path == name:
            raise OSError(number, os.strerror(number))
        return real_open(path, *words, **more)

    def fail_stat(path: str, *words: Any, **more: Any) -> os.stat_result:
        if path == name:
            raise OSError(number, os.strerror(number))
        return real_stat(path, *words, **more)

    monkeypatch.setattr(os, "open", fail_open)
    monkeypatch.setattr(os, "stat", fail_stat)
    code, out, err = gpusnap("prune", "--keep-last", "1")
    assert code == 0
    assert "1 of 3 checkpoints removed" in out
    assert err.startswith("gpusnap: note: the checkpoint a:20260103 cannot be read now: the blob ")
    assert "so no rule applies to it and it is kept; run gpusnap prune again when it can be read" in err
    assert "not readable" in out
    assert "damage" not in out + err
    if part == "manifest":
        for command in ("ls",), ("history", "a"):
            _, out, err = gpusnap(*command)
            assert "damage" not in out + err
            if command == ("ls",):
                assert "a:20260103 (not readable)" in out
    assert names(store) == {f"a:{TIME % 2}", f"a:{TIME % 3}"}


def test_blobs_that_several_checkpoints_have(store: Store) -> None:
    """One that is missing is missing in each of them."""
    shared = bytearray(b"x" * 5000)
    notes = {**ANNOTATIONS, "org.criu.checkpoint.container.name": "a"}
    digests = [
        keep(
            store,
            shared,
            names=[f"a:{TIME % day}"],
            records={"config.dump": str(day).encode()},
            annotations={**notes, "org.opencontainers.image.created": f"2026-01-{day:02}T12:00:00Z"},
        ).digest
        for day in (1, 2)
    ]
    manifest = json.loads(blob_path(store, digests[0]).read_bytes())
    for layer in manifest["layers"][1:]:
        blob_path(store, layer["digest"]).unlink()
    assert [each.reasons for each in prune(store, LAST)] == [("not whole",)] * 2


@pytest.mark.parametrize("created", ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59"])
def test_a_time_beyond_all_years(store: Store, created: str) -> None:
    """It is of the year 10000 or 0 in UTC: the checkpoint stays, and the others are decided on."""
    for day in (1, 2):
        made(store, "a", day, f"a:{TIME % day}")
    made(store, "a", 3, "a:20260103", created=created)
    prune(store, Rules(daily=1))
    assert names(store) == {"a:20260102", "a:20260103"}


def test_a_clock_that_was_wrong(store: Store) -> None:
    """What is dated in the future stays, and takes the place of none of the others, but for an hour."""
    now = datetime.now(UTC)
    for day in (1, 2):
        made(store, "a", day, f"a:{TIME % day}")
    made(store, "a", 3, "a:20260103", created="2999-01-01T00:00:00Z")
    made(store, "a", 4, "a:20260104", created=(now + timedelta(hours=2)).isoformat())
    found = prune(store, Rules(last=1, within=timedelta(hours=12)))
    assert names(store) == {"a:20260102", "a:20260103", "a:20260104"}
    assert [each.reasons for each in found[-2:]] == [("dated in the future",)] * 2
    made(store, "a", 5, "a:20260105", created=(now + timedelta(minutes=50)).isoformat())
    prune(store, LAST)
    assert names(store) == {"a:20260103", "a:20260104", "a:20260105"}


def test_within_of_a_clock_that_is_ahead(store: Store) -> None:
    """The last minutes are those before now: a host whose clock is ahead shares the store."""
    now = datetime.now(UTC)
    ages = (3000, 600, 60, -3000)  # seconds
    for day, age in enumerate(ages, 1):
        created = now - timedelta(seconds=age)
        made(store, "a", day, f"a:{TIME % day}", created=created.isoformat())
    found = prune(store, Rules(within=timedelta(minutes=30)))
    assert [each.reasons for each in found] == [(), ("within",), ("within",), ("within",)]


@pytest.mark.parametrize("back", [timedelta(minutes=50), timedelta(days=20000)])
def test_a_clock_that_goes_back(store: Store, back: timedelta) -> None:
    """What was made since then has earlier dates: the last one stays, and the one before it goes."""
    now = datetime.now(UTC)
    for day in (1, 2):
        made(store, "a", day, f"a:{TIME % day}", created=(now + timedelta(minutes=40 + day)).isoformat())
    made(store, "b", 1, f"b:{TIME % 1}")
    for day in (3, 4):
        created = now + timedelta(minutes=40 + day) - back
        digest = made(store, "a", day, f"a:{TIME % day}", created=created.isoformat())
        store.tag(f"a:{TIME % 2}", "best")
        store.remove("best")
        found = {each.digest: each.reasons for each in prune(store, LAST, ["a"])}
        assert found[digest] == ("added last",)
        assert names(store) == {f"a:{TIME % 2}", f"a:{TIME % day}", f"b:{TIME % 1}"}


def test_what_is_in_use(store: Store) -> None:
    """A hold keeps it, also in what a dry run says; afterwards it goes."""
    first = made(store, "a", 1, "a:20260101")
    made(store, "a", 2, "a:20260102")
    for dry_run in (True, False):
        with store.hold(first):
            assert prune(store, LAST, dry_run=dry_run)[0].reasons == ("in use",)
        assert names(store) == {"a:20260101", "a:20260102"}
    # A reader that was killed holds nothing.
    assert end(begin(lambda: store.hold(first).__enter__())) == 0
    assert prune(store, LAST)[0].reasons == ()
    assert names(store) == {"a:20260102"}
    assert [*Path(store.path, "holds").iterdir()] == []


def test_many(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is written once for many: one by one, a thousand took half a minute."""
    digests = [made(store, "a", day, f"a:2026010{day}") for day in range(1, 7)]
    real, written = Catalog.write, list[set[str]]()

    def write(catalog: Catalog) -> None:
        real(catalog)
        written.append(names(store))

    monkeypatch.setattr(Catalog, "write", write)
    monkeypatch.setattr(retention.prune, "_AT_ONCE", 3)
    with store.hold(digests[1]):
        found = prune(store, LAST)
    assert [each.reasons for each in found] == [(), ("in use",), (), (), (), ("last",)]
    kept = {"a:20260102", "a:20260106"}
    assert written == [{"a:20260104", "a:20260105"} | kept, kept]
    assert [*Path(store.path, "holds").iterdir()] == []


def test_a_name_that_comes_meanwhile(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was given after the store was read, and keeps the checkpoint."""
    first = made(store, "a", 1, "a:20260101")
    made(store, "a", 2, "a:20260102")
    real = Store.remove_unused

    def late(self: Store, wanted: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
        self.tag(first, "best")
        return real(self, wanted)

    monkeypatch.setattr(Store, "remove_unused", late)
    assert prune(store, LAST)[0].reasons == ("in use",)
    assert store.find("best").descriptor.digest == first


def test_a_hold_that_comes_meanwhile(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """While something is taken out of the index nobody gets a hold of it, and then it is not there."""
    first = made(store, "a", 1, "a:20260101")
    made(store, "a", 2, "a:20260102")
    reader = -1

    def write(catalog: Catalog) -> None:
        nonlocal reader
        reader = begin(lambda: store.hold(first).__enter__())
        monkeypatch.undo()
        catalog.write()

    monkeypatch.setattr(Catalog, "write", write)
    assert prune(store, LAST)[0].reasons == ()
    assert end(reader) == 1
    assert names(store) == {"a:20260102"}


def test_referrers_go_with_it(store: Store) -> None:
    """Signatures of what stays stay."""
    digests = [made(store, "a", day, f"a:{TIME % day}") for day in (1, 2)]
    signatures = []
    for digest in digests:
        to = store.find(digest).descriptor
        with store.stage() as staging:
            config = staging.layout.add_blob(b"{}", media_type=empty_descriptor().media_type)
            layer = staging.layout.add_blob(digest.encode(), media_type="application/x-signature")
            subject = Descriptor(to.media_type, digest, to.size)
            root = staging.layout.add_manifest(Manifest(config, (layer,), "application/x-signature", subject))
            staging.commit(root)
            signatures.append(root.digest)
    prune(store, LAST)
    assert {entry.descriptor.digest for entry in store.entries()} == {digests[1], signatures[1]}


def test_the_command(store: Store, gpusnap: Run) -> None:
    """A line for each with its reasons, a total, and what frees the room; with --gc it is free."""
    for day in (1, 2, 3):
        made(store, "a", day, f"a:{TIME % day}", labels={"step": f"{day}00"})
    code, out, err = gpusnap("prune", "--keep-last", "1", "--keep-label", "step=100", "--dry-run")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["container", "created", "name", "digest", "because"]
    assert [line.split()[0:2] + line.split()[3:4] for line in lines[1:4]] == [
        ["a", "2026-01-01", "a:20260101"],
        ["a", "2026-01-02", "a:20260102"],
        ["a", "2026-01-03", "a:20260103"],
    ]
    assert lines[1].split("kept")[1].split() == ["label", "step=100"]
    assert "would go" in lines[2]
    assert lines[3].split()[-2:] == ["kept", "last"]
    assert re.fullmatch(
        rf"1 of 3 checkpoints would be removed from {store.path}; \d+ B are used by it alone", lines[4]
    )
    assert names(store) == {"a:20260101", "a:20260102", "a:20260103"}
    before = len([*Path(store.path, "blobs/sha256").iterdir()])
    code, out, err = gpusnap("prune", f"oci:{store.path}", "a", "--keep-last", "1", "--gc", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert {*found} == {"store", "dryRun", "checkpoints", "collected"}
    assert [each["reasons"] for each in found["checkpoints"]] == [[], [], ["last"]]
    assert found["collected"]["blobs"] == before - len([*Path(store.path, "blobs/sha256").iterdir()]) > 0
    assert stagings(store) == []
    code, out, err = gpusnap("prune", "--keep-last", "1", "gone")
    assert (code, out, err) == (
        0,
        f"no checkpoint in {store.path} belongs to gone; gpusnap ls lists them\n",
        "",
    )


def test_what_a_full_disk_still_takes(store: Store, gpusnap: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the index does not fit, --gc first frees what killed writers left."""
    for day in (1, 2):
        made(store, "a", day, f"a:{TIME % day}")
    staging = store.stage()
    Path(staging.path, "left").write_bytes(bytes(5000))
    staging.close(leave=True)
    real = Catalog.write

    def write(catalog: Catalog) -> None:
        if stagings(store):
            raise DiskFull(f"the file system of {store.path} is full: the index did not fit")
        real(catalog)

    monkeypatch.setattr(Catalog, "write", write)
    code, _, err = gpusnap("prune", "--keep-last", "1")
    assert (code, "is full: the index did not fit" in err) == (1, True)
    code, out, err = gpusnap("prune", "--keep-last", "1", "--gc")
    assert (code, err) == (0, "")
    assert "1 of 2 checkpoints removed" in out
    assert (names(store), stagings(store)) == ({f"a:{TIME % 2}"}, [])


def test_the_gc_of_another_store(tmp_path: Path, gpusnap: Run) -> None:
    """The line on what frees the space names the store."""
    other = Store(tmp_path / "other").create()
    for day in (1, 2):
        made(other, "a", day, f"a:{TIME % day}")
    out = gpusnap("prune", f"oci:{other.path}", "--keep-last", "1")[1]
    assert f"gpusnap gc oci:{other.path} frees the space that they use\n" in out


def test_gc_without_a_checkpoint(store: Store, gpusnap: Run) -> None:
    """Before the first one of a container there may be what killed writers left, too."""
    staging = store.stage()
    staging.close(leave=True)
    code, out, err = gpusnap("prune", "a", "--keep-last", "1", "--gc", "--dry-run")
    assert (code, err, len(stagings(store))) == (0, "", 1)
    code, out, err = gpusnap("prune", "a", "--keep-last", "1", "--gc")
    assert (code, err, stagings(store)) == (0, "", [])
    assert out.startswith(f"no checkpoint in {store.path} belongs to a; gpusnap ls lists them\n")


def test_the_tense_of_the_total(store: Store, gpusnap: Run) -> None:
    """What would go is used; what has gone was."""
    for day in (1, 2, 3):
        made(store, "a", day, f"a:{TIME % day}")
    would = gpusnap("prune", "--keep-last", "1", "--dry-run")[1].splitlines()[-1]
    assert re.fullmatch(
        rf"2 of 3 .* would be removed from {store.path}; [\d.]+ \w+ are used by them alone", would
    )
    done = next(line for line in gpusnap("prune", "--keep-last", "1")[1].splitlines() if "2 of 3" in line)
    assert done == would.replace("would be removed", "removed").replace("are used", "were used")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "no rule says which checkpoints to keep, so nothing is removed"),
        (("--keep-last", "0"), "0 is not in the range"),
        (("--keep-within", "7"), "is not a duration"),
        (("oci:nowhere", "--keep-last", "1"), "there is no store nowhere"),
        (("a", "oci:nowhere", "--keep-last", "1"), "oci:nowhere is a store, which only the first word can"),
        (("--keep-label", ""), "'' is not a valid label"),
        (("--keep-label", "=best"), "'=best' is not a valid label"),
    ],
)
def test_wrong_lines(store: Store, gpusnap: Run, words: tuple[str, ...], said: str) -> None:
    """Nothing is removed."""
    made(store, "a", 1, "a:20260101")
    made(store, "a", 2, "a:20260102")
    code, out, err = gpusnap("prune", *words)
    assert (code != 0, out) == (True, "")
    assert said in err
    assert names(store) == {"a:20260101", "a:20260102"}


def test_no_store_yet(tmp_path: Path, gpusnap: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that has made no checkpoint has none to remove: a timer must not fail for that."""
    from gpusnap.runtime_shim import settings as settings_file

    found = settings_file.Settings(store=settings_file.Store(path=str(tmp_path / "none")))
    monkeypatch.setattr(settings_file, "load", lambda: found)
    code, out, err = gpusnap("prune", "--keep-last", "1")
    assert (code, out, err) == (0, f"no checkpoint in {tmp_path}/none\n", "")


def test_a_migration_that_has_not_ended(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint may be all that there is of the container: no rule removes it."""
    monkeypatch.setattr(migrations, "FOLDER", str(tmp_path / "migrations"))
    digests = [made(store, "a", day, f"a:{TIME % day}") for day in (1, 2, 3)]
    leaving = outgoing(
        container="1" * 64,
        name="a",
        there="a",
        store=store.path,
        checkpoint="a:20260101",
        digest=digests[0],
    )
    leaving.write()
    verdicts = prune(store, Rules(last=1))
    assert [each.reasons for each in verdicts] == [("may run on gpu2",), (), ("last",)]
    assert names(store) == {"a:20260101", "a:20260103"}
