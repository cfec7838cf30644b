"""What the commands print with --json. Sizes are bytes, and names are written as in the manifest."""

from __future__ import annotations

import json
import re
from typing import Any

import click

from gpusnap.oci.base.dataclass import asdict


def print_json(value: object) -> None:
    """Print what json can encode, on several lines."""
    click.echo(json.dumps(value, indent=1))


def document(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass for JSON, named as in the manifest ("onlyA" for only_a)."""
    named: dict[str, Any] = _rename_fields(asdict(record))
    return named


def _rename_fields(value: Any) -> Any:
    if isinstance(value, dict):
        # The keys of labels are somebody's own.
        return {
            re.sub("_(.)", lambda m: m[1].upper(), key): each if key == "labels" else _rename_fields(each)
            for key, each in value.items()
        }
    return [_rename_fields(each) for each in value] if isinstance(value, list | tuple) else value
