"""All cases of the fuzzer: damaged and malicious checkpoints, hand-written and random.

A case makes its checkpoint in a directory, and says whether its damage cannot be detected: in an archive, the
content of CRIU's images and of the engine's files has no digest (docs/format.md).
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

from mutations import (
    FILES,
    INDEX,
    MANIFEST,
    MAY_BE_UNSEEN,
    Base,
    Case,
    at_path,
    json_cases,
    repack,
    rows,
    text_at,
    with_manifest,
    written,
)
from mutations_store import in_store, store_cases
from mutations_tar import compressed_cases, tar_cases

__all__ = ["at_random", "by_hand"]

# Podman opens these, and waits for ever if one is a FIFO; gpusnap restore refuses a FIFO first.
_DUMPS = ("config.dump", "spec.dump")


def by_hand(base: Base) -> dict[str, list[Case]]:
    """Return all hand-written cases, grouped by the damaged part."""
    found: dict[str, list[Case]] = {"images": [], "other files": []}
    for image in base.images():
        for name, edit in FILES.items():
            made = repack(base, at_path(f"checkpoint/{image}", edit))
            found["images"].append(Case(f"{image} {name}", made, name in MAY_BE_UNSEEN))
    blobs = sorted(path.name for path in (base.unpacked / "checkpoint/gpusnap/blobs/sha256").iterdir())
    others = [INDEX, "checkpoint/gpusnap/oci-layout", MANIFEST, "config.dump", "spec.dump"]
    for path in [*(f"checkpoint/gpusnap/blobs/sha256/{name}" for name in blobs[:2]), *others]:
        for name, edit in FILES.items():
            made = repack(base, at_path(path, edit))
            case = Case(f"{Path(path).name[:12]} {name}", made, path in _DUMPS)
            case = replace(case, podman=path not in _DUMPS or name != "a FIFO")
            found["other files"].append(case)
    record = json.loads((base.unpacked / MANIFEST).read_text())
    found["manifest"] = [
        Case(f"manifest: {name}", repack(base, with_manifest(text, named=True)), True)
        for name, text in (*json_cases(record), *rows(record))
    ]
    text = json.dumps(record) + " "
    unnamed = repack(base, with_manifest(text, named=False))
    found["manifest"].append(Case("manifest: not the named one", unnamed))
    for file, group in (
        (INDEX, "index"),
        ("config.dump", "engine's files"),
        ("spec.dump", "engine's files"),
    ):
        for name, text in json_cases(json.loads((base.unpacked / file).read_text())):
            made = repack(base, text_at(file, text))
            found.setdefault(group, []).append(Case(f"{Path(file).name}: {name}", made, True))
    found["tar"], found["compressed"] = [*tar_cases(base)], [*compressed_cases(base)]
    found["store, its files"], found["store, its JSON"] = [], []
    for case in store_cases(base):
        found["store, its JSON" if ": " in case.name[7:] else "store, its files"].append(case)
    return found


# At random


def at_random(base: Base, number: int) -> Case:
    """Return an archive or a store with some bits flipped, or with pieces removed or copied elsewhere."""
    chance = random.Random(number)
    how = chance.choice(["flips", "cut", "out", "over", "in"])
    if chance.random() < 0.3:
        path = chance.choice(sorted((base.store / "blobs/sha256").iterdir()))

        def edit(store: Path) -> None:
            target = store / "blobs/sha256" / path.name
            target.chmod(0o600)
            target.write_bytes(_mangled(target.read_bytes(), how, random.Random(number)))

        return Case(f"random {number}: store, {how}", in_store(base, edit))
    data = _mangled(base.tar.read_bytes(), how, chance)
    return Case(f"random {number}: tar, {how}", written(partial(bytes, data)), True)


def _mangled(data: bytes, how: str, chance: random.Random) -> bytes:
    made = bytearray(data)
    if not made:
        return b"x"
    start = chance.randrange(len(made))
    length = min(chance.choice([1, 7, 512, 5120, 100_000]), len(made) - start)
    other = chance.randrange(len(made))
    if how == "flips":
        for _ in range(chance.choice([1, 1, 2, 8, 100])):
            made[chance.randrange(len(made))] ^= 1 << chance.randrange(8)
    elif how == "cut":
        del made[start:]
    elif how == "out":
        del made[start : start + length]
    elif how == "over":
        made[start : start + length] = made[other : other + length]
    else:
        made[start:start] = made[other : other + length]
    return bytes(made)
