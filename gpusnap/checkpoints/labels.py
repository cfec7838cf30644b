"""Labels of checkpoints: KEY=VALUE, stored as annotations of the artifact's manifest, with our prefix.

image-spec v1.1, annotations.md: keys are in reverse domain notation, values are strings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import UsageError

_PREFIX = "io.gpusnap.label."
_KEY = compile_later(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?", re.ASCII)
_LONGEST = 1024
_MOST = 64


def parse_labels(words: Iterable[str]) -> dict[str, str]:
    """Parse KEY=VALUE words; a KEY alone has an empty value. Raises UsageError."""
    found: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        if not _KEY.fullmatch(key):
            raise UsageError(
                f"{word[:80]!r} is not a valid label: a key consists of up to 63 letters and digits, with "
                ". _ / - between them",
                hint="write it as KEY=VALUE",
            )
        if len(value) > _LONGEST or not value.isprintable():
            raise UsageError(
                f"the value of the label {key} must be printable text of at most {_LONGEST} characters",
                hint="write it as KEY=VALUE",
            )
        if found.setdefault(key, value) != value:
            raise UsageError(f"the label {key} is given twice, with different values", hint="give it once")
    if len(found) > _MOST:
        raise UsageError(f"{len(found)} labels are given, but at most {_MOST} are allowed", hint="give fewer")
    return found


def as_annotations(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels as annotations of a manifest."""
    return {_PREFIX + key: value for key, value in labels.items()}


def is_label(annotation: str) -> bool:
    """Return whether an annotation's key is that of a label."""
    return annotation.startswith(_PREFIX)


def written_labels(labels: Mapping[str, str]) -> str:
    """Return labels as text, in the form in which they are given."""
    return ", ".join(f"{key}={value}" if value else key for key, value in labels.items())


def labels_in(annotations: Mapping[str, str]) -> dict[str, str]:
    """Return the labels among annotations, in order; anybody may have written those."""
    found = {key.removeprefix(_PREFIX): text for key, text in annotations.items() if is_label(key)}
    return dict(sorted(found.items()))
