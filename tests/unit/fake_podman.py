"""A Podman that writes down what it is asked, and does what files in its folder say."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpusnap.operations.checkpointing import places

__all__ = ["ID", "FakePodman"]

ID = "ab" * 32

_SCRIPT = """\
#!/bin/sh
F={folder}
echo "$*" >>$F/calls
case "$1 $2" in
"container inspect")
    [ -e $F/inspect.json ] || {{ echo 'Error: no such container "w"' >&2; exit 125; }}
    cat $F/inspect.json
    exit;;
--runtime*) cat $F/path; exit;;
"ps --filter") cat $F/users; exit;;
"ps "*) cat $F/ids; exit;;
"pod exists") [ ! -e $F/broken ] || {{ cat $F/broken >&2; exit 125; }}
    grep -qx "$3" $F/pods; exit;;
"pod inspect") echo infra; exit;;
"exec "*)
    [ ! -e $F/exec.sh ] || . $F/exec.sh
    exit;;
"volume ls") case "$3" in --filter) cat $F/made;; *) cat $F/volumes;; esac; exit;;
"volume inspect") cat "$F/volume-$4.json"; exit;;
"volume exists") grep -qx "$3" $F/volumes; exit;;
"volume create") mkdir "$F/files-$6"; echo "$6" >>$F/volumes; echo "$6"
    printf '%s\t%s\n' "$6" "$F/files-$6" >>$F/made; exit;;
"volume import") cp "$5" "$F/filled-$4"; cp "$5" "$F/files-$4/a"; exit;;
"volume rm") sed -i "/^$3$/d" $F/volumes; sed -i "/^$3\t/d" $F/made; rm -rf "$F/files-$3"; exit;;
"rm "*) rm $F/inspect.json; exit;;
esac
env >$F/env
[ ! -e $F/first.sh ] || . $F/first.sh
[ ! -e $F/error ] || {{ cat $F/error >&2; exit 125; }}
case "$1 $2" in
"container checkpoint")
    cp $F/archive "$4"
    mkdir -p $F/checkpoint
    : >$F/checkpoint/inventory.img
    case "$*" in *--leave-running*) ;; *)
        sed -i s/running/exited/ $F/inspect.json
        ! grep -q '"AutoRemove": true' $F/inspect.json || rm $F/inspect.json;;
    esac;;
"container restore")
    case "$*" in *--import*) cp "$4" $F/imported;; esac
    sed -i s/exited/running/ $F/inspect.json;;
esac
echo {id}
"""


class FakePodman:
    """`podman` in PATH; `archive` is what it exports, `imported` what it was given."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder.mkdir()
        self.folder = folder
        for name in ("ids", "users", "volumes", "made", "pods"):
            (folder / name).touch()
        program = folder / "podman"
        program.write_text(_SCRIPT.format(folder=folder, id=ID))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setattr(
            places, "FOLDER", str(folder / "in-progress")
        )  # a checkpoint with it writes there

    def has(
        self,
        *,
        runtime: str = "gpusnap-runtime",
        status: str = "running",
        name: str = "w",
        init: int = 0,
        auto_remove: bool = False,
        upper: str = "",
        checkpointed: bool = False,
        volumes: Mapping[str, str] | None = None,
        **more: object,
    ) -> None:
        """There is such a container."""
        found = {
            "Id": ID,
            "Name": name,
            "OCIRuntime": runtime,
            "State": {"Status": status, "Pid": init, "Checkpointed": checkpointed},
            "StaticDir": str(self.folder),
            "HostConfig": {"AutoRemove": auto_remove},
            "GraphDriver": {"Data": {"UpperDir": upper}},
            "Mounts": [
                {"Type": "bind", "Source": "/srv", "Destination": "/srv"},
                *({"Type": "volume", "Name": n, "Source": at} for n, at in (volumes or {}).items()),
            ],
        }
        (self.folder / "inspect.json").write_text(json.dumps([{**found, **more}]))

    def ends(self, *images: str) -> str:
        """A script in which the container ends, with these files in its last checkpoint."""
        made = "".join(f"mkdir -p $(dirname $F/checkpoint/{n}); : >$F/checkpoint/{n}\n" for n in images)
        return f"sed -i s/running/exited/ $F/inspect.json\n{made}"

    def exports(self, archive: str | os.PathLike[str]) -> None:
        """A checkpoint of it is that archive."""
        shutil.copy(archive, self.folder / "archive")

    def fails(self, text: str) -> None:
        """A checkpoint or a restore ends with that on stderr."""
        (self.folder / "error").write_text(text)

    def first(self, script: str) -> None:
        """That runs before any of it."""
        (self.folder / "first.sh").write_text(script)

    @property
    def imported(self) -> Path:
        return self.folder / "imported"

    def calls(self) -> list[str]:
        """The command lines, but for those that only ask."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        asked = (
            "container inspect ",
            "ps ",
            "--runtime ",
            "volume ls ",
            "volume inspect ",
            "volume exists ",
            "pod ",
        )
        return [line for line in lines if not line.startswith(asked)]

    def environment(self) -> dict[str, str]:
        """Of the last checkpoint or restore."""
        lines = (self.folder / "env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def has_volumes(self, *names: str, users: str = "") -> None:
        """These volumes are there, and running containers that have one of them."""
        (self.folder / "volumes").write_text("".join(f"{name}\n" for name in names))
        (self.folder / "users").write_text(users)

    def describes_volume(self, name: str, created: str, **labels: str) -> None:
        """That is what it says of a volume."""
        told = [{"Name": name, "CreatedAt": created, "Labels": labels}]
        (self.folder / f"volume-{name}.json").write_text(json.dumps(told))

    def has_made(self, name: str, *files: str) -> Path:
        """gpusnap has made this volume, and it has these files; the directory that they are in."""
        folder = self.folder / f"files-{name}"
        folder.mkdir()
        for each in files:
            (folder / each).touch()
        with open(self.folder / "made", "a") as made:
            made.write(f"{name}\t{folder}\n")
        return folder

    def filled(self, name: str) -> bytes:
        """The tar that was unpacked into a volume."""
        return (self.folder / f"filled-{name}").read_bytes()

    def has_pods(self, *names: str) -> None:
        (self.folder / "pods").write_text("".join(f"{name}\n" for name in names))

    def volumes(self) -> list[str]:
        return (self.folder / "volumes").read_text().split()

    def lists(self, *ids: str) -> None:
        """These containers are there."""
        (self.folder / "ids").write_text("\n".join(ids))

    def status(self) -> str:
        found = json.loads((self.folder / "inspect.json").read_text())
        return str(found[0]["State"]["Status"])
