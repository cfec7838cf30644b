"""The stage createRuntime: records the GPUs that a container was given (runtime-spec, config.md).

The runtime runs it on the host when the container's namespaces exist and its program has not started yet.
"""

from __future__ import annotations

import os

from gpusnap.hooks import config as configuration
from gpusnap.hooks.documents import HookError, check_schema, parse, read_file

_CONFIG_LIMIT = 16 << 20


def record_gpus(data: bytes) -> None:
    """Record the GPUs of the container whose state `data` is; see gpusnap.hooks.record. Raises HookError."""
    found = _find_bundle(data)
    if found and not configuration.may_have_gpu(_config(found)):
        return
    state = parse(data, "the container's state")
    bundle = state.get("bundle")
    if not isinstance(bundle, str) or not os.path.isabs(bundle):
        raise HookError("the container's state names no bundle", code="GPS-908")
    config = parse(_config(bundle), "the container's configuration")
    if not configuration.has_gpu(config):
        return
    from gpusnap.hooks import record

    check_schema(state, "state", "the container's state")
    check_schema(config, "config", "the container's configuration")
    record.write(
        record.Record(
            container=state["id"],
            created=record.format_now(),
            pid=int(state.get("pid", 0)),
            bundle=bundle,
            driver=configuration.find_driver_version(config),
            devices=tuple(record.Node(**node) for node in configuration.list_nodes(config)),
            cdi=tuple(configuration.list_cdi_names(config)),
            visible=configuration.find_visible_devices(config),
        )
    )


def _find_bundle(data: bytes) -> str:
    """Return the bundle of a state; empty if that needs a parser, whose import ordinary containers avoid.

    Without a backslash, every quotation mark begins or ends a string. So if "bundle" occurs once, it is the
    member's name.
    """
    _, name, after = data.partition(b'"bundle"')
    if not name or name in after or b"\\" in data:
        return ""
    words = after.split(b'"', 2)
    if len(words) < 3 or words[0].strip() != b":" or not words[1].startswith(b"/"):
        return ""
    return os.fsdecode(words[1])


def _config(bundle: str) -> bytes:
    try:
        return read_file(os.path.join(bundle, "config.json"), _CONFIG_LIMIT)
    except FileNotFoundError:
        raise HookError(f"the bundle {bundle} has no config.json", code="GPS-908") from None
