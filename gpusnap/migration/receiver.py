"""The receiving side of a migration: `gpusnap migrate --server`, which ssh runs for the other host.

It answers requests one by one: check, fetch, plan, restore, confirm; or settle, for an earlier migration. The
restored container belongs to the other side until that confirms it: if the connection breaks before, the
container is removed here, because it will be restored over there.
"""

from __future__ import annotations

import os
import platform
import secrets
import signal
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from gpusnap.base.privileges import require_root
from gpusnap.base.progress import Progress
from gpusnap.base.user_errors import convert_errors, failure
from gpusnap.checkpoints import artifact as kept
from gpusnap.checkpoints import locator
from gpusnap.engines import podman, podman_objects, podman_work
from gpusnap.migration import records
from gpusnap.migration.blobs import Remote
from gpusnap.migration.frames import LONGEST_PATIENCE, VERSION, Channel, LinkLost, error_frame
from gpusnap.oci.base.dataclass import list_fields, replace
from gpusnap.oci.base.errors import NotThere, OciError
from gpusnap.oci.chunks import artifact
from gpusnap.oci.layout.documents import Descriptor
from gpusnap.oci.store.index import check_name
from gpusnap.operations.disk_space import check_copy, free_bytes
from gpusnap.operations.pull import have, open_staging
from gpusnap.operations.restoring import restore as restoring
from gpusnap.operations.restoring.podman_restore import RestoreRequest
from gpusnap.runtime_shim import settings as settings_file
from gpusnap.runtime_shim._version import __version__
from gpusnap.runtime_shim.base.errors import GpusnapError, Refused, make_unforeseen, suggest_room
from gpusnap.runtime_shim.base.units import human
from gpusnap.runtime_shim.gpu import find_drivers
from gpusnap.runtime_shim.gpu.api.driver import Driver
from gpusnap.runtime_shim.gpu.assignment import Plan, plan_assignment
from gpusnap.runtime_shim.records.manifest import GpuRecord
from gpusnap.runtime_shim.snapshot.devices.choose import choose, gpu_request
from gpusnap.runtime_shim.snapshot.records.reservations import read_reserved


def receive(reading: int, writing: int) -> None:
    """Serve one migration over two descriptors. Raises LinkLost if it was not confirmed."""
    channel = Channel(reading, writing, "the other host")
    channel.greet()
    _Receiver(channel).serve()


class _Receiver:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._id = ""
        self._record: records.Record | None = None
        """From the arrival of the first checkpoint until the container is confirmed, or all is undone."""
        self._restoring = False
        self._progress = Progress(shown=False)

    def serve(self) -> None:
        """Answer requests until the container is confirmed, or the other side ends."""
        try:
            with self._channel.keep_alive(lambda: self._progress.mark, self._handle_lost_link):
                while (frame := self._channel.receive()).get("ask") != "end":
                    self._channel.send(self._answer(frame))
        finally:
            self._take_back()
        if frame.get("settled"):
            records.forget(self._id)

    def _handle_lost_link(self) -> None:
        """The other side is gone while Podman restores: stop that."""
        if self._restoring:
            os.kill(os.getpid(), signal.SIGINT)

    def _answer(self, frame: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"ok": self._do(frame)}
        except LinkLost:
            raise
        except GpusnapError as error:
            return error_frame(error)
        except OciError as error:
            return error_frame(failure(error))
        except (KeyError, TypeError, ValueError, OSError) as error:
            return error_frame(make_unforeseen(error))

    def _do(self, frame: Mapping[str, Any]) -> dict[str, Any]:
        match frame.get("ask"):
            case "hello":
                return self._hello(frame)
            case "check":
                return _check(frame, self._channel.patience)
            case "fetch":
                return self._fetch(frame)
            case "plan":
                return _make_plan_frame(_exact_plan(str(frame["digest"]), str(frame["gpuMap"])))
            case "restore":
                return self._restore(frame)
            case "confirm":
                return self._confirm()
            case "settle":
                require_root("migrate")
                return {"state": records.settle(records.check_id(frame["migration"]))}
            case "forget":
                require_root("migrate")
                records.forget(records.check_id(frame["migration"]))
                return {}
        raise GpusnapError(
            f"{str(frame.get('ask'))[:40]!r} is not a request that gpusnap {__version__} supports",
            hint="update gpusnap on both hosts",
            code="GPS-821",
        )

    def _hello(self, frame: Mapping[str, Any]) -> dict[str, Any]:
        require_root("migrate")
        self._id = records.check_id(frame["migration"])
        theirs, ours = _release(str(frame["version"])), _release(__version__)
        if frame["protocol"] != VERSION or theirs > ours:
            raise Refused(
                f"gpusnap {__version__} runs there, but gpusnap {str(frame['version'])[:40]} here",
                hint="update gpusnap on the other host",
                code="GPS-822",
            )
        if frame["machine"] != platform.machine():
            raise Refused(
                f"that host is {platform.machine()}, but this one is {str(frame['machine'])[:40]}",
                hint="migrate to a host of the same architecture",
                code="GPS-822",
            )
        settings_file.load_usable()
        self._channel.patience = _patience(frame["patience"])
        return {"version": __version__, "store": locator.default_store().path}

    def _fetch(self, frame: Mapping[str, Any]) -> dict[str, Any]:
        from gpusnap.oci.registry import copy as transfer

        root = Descriptor.from_json(frame["root"])
        name, container = str(frame["name"]), records.check_id(frame["container"])
        check_name(name)
        store = locator.default_store().create()
        remote = Remote(self._channel, root)
        self._record_coming(str(frame["of"]), container)
        with open_staging(store, f"migrate-{container}", "migration", self._progress) as staging:
            # Blobs in the store were checked when they arrived; a restore compares all of them again.
            there = have(staging, read=False)
            transfer.pull(
                remote,
                root.digest,
                staging.layout,
                have=there,
                wanted=lambda one: one.media_type == artifact.CONFIG,
            )
            found = kept.load(root, staging.layout)
            found.check_podman()
            lacking = staging.layout.list_missing(found.parts)
            check_copy(lacking, store.path, there=store.layout, what="the container's checkpoint")
            self._progress.stage(f"memory of {name}")
            moved = transfer.pull(
                remote, root.digest, staging.layout, have=there, progress=self._progress.show_transfer
            )[1]
            if frame["ahead"]:
                # Also what a killed one left under that name.
                with suppress(NotThere):
                    self._record_ahead(store.find_exactly(name).descriptor.digest)
                self._record_ahead(root.digest)
            self._progress.stage("to disk")
            staging.commit(found.root, names=[name], foreign=found.tables)
        return {"blobs": moved.blobs, "bytes": moved.bytes, "skipped": moved.skipped_bytes}

    def _record_coming(self, name: str, source: str) -> None:
        """Record on disk that a container comes, before anything of it arrives. Raises GpusnapError."""
        if self._record is not None:
            records.advance(self._record)
            return
        record = records.Record(self._id, "coming", name, source=source)
        records.begin(record)
        self._record = record

    def _record_ahead(self, digest: str) -> None:
        """Record on disk that a checkpoint comes ahead, before it is in the store. Raises GpusnapError."""
        assert self._record is not None
        record = replace(self._record, ahead=(*self._record.ahead, digest))
        records.advance(record)
        self._record = record

    def _restore(self, frame: Mapping[str, Any]) -> dict[str, Any]:
        name, digest = str(frame["name"]), str(frame["digest"])
        if self._record is None:
            raise GpusnapError(
                "no checkpoint was received", hint="update gpusnap on both hosts", code="GPS-821"
            )
        place = locator.InStore(locator.default_store(), digest)
        request = RestoreRequest(
            what=place,
            name=str(frame["newName"]),
            gpu_map=str(frame["gpuMap"]),
            ignore_volumes=bool(frame["ignoreVolumes"]),
        )
        before = tuple(sorted(podman.ids()))
        record = replace(self._record, state="restoring", name=request.name or name, before=before)
        records.advance(record)
        self._record = record
        os.environ[records.MARK] = self._id
        self._restoring = True
        try:
            done = restoring.restore(request, self._progress)
        finally:
            self._restoring = False
            del os.environ[records.MARK]
        record = replace(record, state="running", container=done.container)
        self._record = record  # before anything can fail: from here on it is removed by its ID
        self._record = replace(record, created=podman.inspect_container(done.container).created)
        self._record.write()
        return {"container": done.name, "containerId": done.container, "seconds": done.seconds}

    def _confirm(self) -> dict[str, Any]:
        record = self._record
        if record is None or record.state != "running":
            raise GpusnapError(
                "there is no container to confirm", hint="update gpusnap on both hosts", code="GPS-821"
            )
        records.remove_ahead(record.ahead)
        records.confirm(record)
        self._record = None
        return {}

    def _take_back(self) -> None:
        """Remove what came ahead, and a container that was not confirmed. Raises GpusnapError.

        If the confirmation was interrupted, or failed, its record decides, as for everybody who asks.
        """
        if (record := self._record) is None or records.is_confirmed(record.id):
            return
        with podman_work.ignore_signals():
            self._record = None
            if record.state != "coming":
                records.remove_restored(record)
            records.remove_ahead(record.ahead)
            records.end_record(record)


def _patience(value: object) -> float:
    """Return the seconds without progress after which we give up on the other side. Raises ValueError."""
    seconds = float(str(value))
    if not 0 < seconds <= LONGEST_PATIENCE:
        raise ValueError(f"a patience of {seconds} s")
    return seconds


def _check(frame: Mapping[str, Any], patience: float) -> dict[str, Any]:
    """Check whether a container can come: its name, its volumes, the room, its image, the GPUs.

    Changes nothing.

    `patience`: seconds for Podman to pull the image.
    """
    name, image, needs = str(frame["name"]), str(frame["image"]), int(frame["needs"])
    if podman.full_id(name, seconds=60):
        raise Refused(
            f"Podman already has a container {name} there",
            hint="remove it there, or give the new one another name with --name",
            code="GPS-822",
        )
    volumes = {str(each) for each in frame.get("volumes", ())}
    if volumes and (known := sorted(volumes & podman_objects.volumes())):
        names = " ".join(known)
        raise Refused(
            f"Podman there already has the volume{'s' * (len(known) > 1)} {names}, and the files in there "
            "may not fit the container's memory",
            hint=f"run podman volume rm {names} there, and the files come with the container; or give "
            "--ignore-volumes to use them as they are, such as on a file system that both hosts share",
            code="GPS-822",
        )
    store = locator.default_store()
    free = free_bytes(store.path)
    if needs > free:
        raise Refused(
            f"the checkpoint needs up to {human(needs)} in {store.path} there, but only {human(free)} is "
            "free",
            hint=suggest_room(store.path),
            code="GPS-007",
        )
    there = podman.exists("image", image)
    if not there and frame["pull"]:
        try:
            podman.run_query("pull", "--quiet", image, wanted=f"the image {image}", seconds=patience)
        except GpusnapError as error:
            raise Refused(
                f"Podman there does not have the image {image}, and cannot pull it: {error}",
                hint=f"run podman save {image} | ssh HOST podman load; --patience gives it more time",
                code="GPS-822",
            ) from error
        there = True
    gpus = [GpuRecord(**{name: each[name] for name in list_fields(GpuRecord)}) for each in frame["gpus"]]
    found: dict[str, Any] = {"free": free, "image": there, "pairs": []}
    if gpus:
        found |= _make_plan_frame(_rough_plan(gpus, frame))
    return found


def _rough_plan(gpus: list[GpuRecord], frame: Mapping[str, Any]) -> Plan:
    """Plan by what the container uses now."""
    driver = _find_driver(str(frame["vendor"]))
    request = gpu_request(str(frame["gpuMap"]) or None)
    others: Mapping[str, int] = {}
    with suppress(GpusnapError):
        others = read_reserved()
    return plan_assignment(gpus, str(frame["driver"]), driver.host(), request=request, reserved=others)


def _exact_plan(digest: str, gpu_map: str) -> Plan | None:
    """Plan by the manifest of a checkpoint that has arrived; None without GPU state."""
    with convert_errors(), kept.hold_artifact(locator.InStore(locator.default_store(), digest)) as (_, found):
        record = found.record
    if record is None:
        return None
    driver = _find_driver(record.host.vendor)
    settings = settings_file.load()
    return choose(record, driver.host(), gpu_request(gpu_map or None), settings.gpu_map, read_reserved())


def _find_driver(vendor: str) -> Driver:
    driver = next((each for each in find_drivers() if each.vendor == vendor), None)
    if driver is None:
        raise Refused(
            f"that host has no driver for {vendor} GPUs",
            hint="migrate to a host with such GPUs",
            code="GPS-401",
        )
    return driver


def _make_plan_frame(chosen: Plan | None) -> dict[str, Any]:
    if chosen is not None and chosen.refusal:
        raise chosen.make_refusal()
    return {"pairs": [list(pair) for pair in chosen.pairs] if chosen is not None else []}


def _release(version: str) -> tuple[int, ...]:
    """Return major and minor number; empty for another form."""
    parts = version.split(".")[:2]
    return tuple(int(each) for each in parts) if all(each.isdecimal() for each in parts) else ()


def new_id() -> str:
    return secrets.token_hex(16)
