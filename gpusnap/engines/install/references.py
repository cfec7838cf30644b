"""Lines of the engines' configuration that name gpusnap-runtime, for `gpusnap uninstall`.

An engine whose default runtime does not exist starts no container at all, and CRI-O does not even start.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from gpusnap.engines.install import containerd as install_containerd
from gpusnap.engines.install import crio as install_crio
from gpusnap.engines.install import podman as install_podman
from gpusnap.engines.install.files import join_root
from gpusnap.oci.base.dataclass import dataclass
from gpusnap.oci.base.patterns import compile_later
from gpusnap.runtime_shim.base.errors import GpusnapError, advise, reason

# The handler as the default of containerd or CRI-O, and Podman's.
_DEFAULT = compile_later(
    r"""\bdefault_runtime(?:_name)?["']?\s*=\s*["']gpusnap["']|\bruntime["']?\s*=\s*["']gpusnap-runtime["']"""
)
_LARGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """A line that names it."""

    path: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.number}: {self.text[:120]}"


def lines(root: str, programs: Collection[str], gone: Collection[str]) -> list[Line]:
    """Return such lines in the files that Podman, containerd and CRI-O read, except the files in `gone`.

    They name one of the programs by its path, or make gpusnap-runtime the default. Raises GpusnapError if a
    file cannot be read.
    """
    paths = "|".join(re.escape(each) for each in programs)
    names = re.compile(
        rf"(?<![\w./-])(?:{paths})(?![\w./-])|{_DEFAULT.pattern}" if paths else _DEFAULT.pattern
    )
    files = (*install_podman.files(root), *install_containerd.files(root), *install_crio.files(root))
    read = (path for path in dict.fromkeys(files) if path not in gone)
    return [line for path in read for line in _in_file(root, path) if names.search(line.text)]


def _in_file(root: str, path: str) -> Iterator[Line]:
    """Yield such lines of a file, without comments."""
    try:
        with open(join_root(root, path), encoding="utf-8", errors="replace") as file:
            text = file.read(_LARGEST)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return
    except OSError as error:
        raise GpusnapError(
            f"{join_root(root, path)} cannot be read: {reason(error)}",
            hint=advise(error) or "run it as root",
            code="GPS-005",
        ) from error
    for number, line in enumerate(text.splitlines(), 1):
        if not line.lstrip().startswith("#"):
            yield Line(path, number, line.strip())
