"""Make gpusnap's Debian package: `python3 packaging/make_deb.py DIR`.

It needs python3 (3.11), make, a C compiler and dpkg-deb, and neither debhelper nor what gpusnap imports. What
is in the package:

    /usr/bin/gpusnap, gpusnap-hook       Python
    /usr/bin/gpusnap-runtime             the launcher in C
    /usr/libexec/gpusnap/gpusnap-runtime what it falls back to, Python
    /usr/lib/gpusnap/                    the modules, for these alone
    /usr/share                           man pages, completions, documents

No configuration of an engine is among it: `gpusnap install` writes that.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from email.utils import formatdate
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
DEBIAN = CHECKOUT / "packaging/debian"
MODULES = "usr/lib/gpusnap"
ENTRY = "usr/libexec/gpusnap/gpusnap-runtime"
"""As the launcher has it compiled in, unless it is told otherwise."""

# Of the distribution's Python, without what a user's environment or folders say: it runs as root.
_SCRIPT = """\
#!/usr/bin/python3 -I
import sys

sys.path.insert(0, "/{modules}")
from {module} import {function}

sys.exit({function}())
"""

# They ask the command itself as they are loaded, at the first completion in a shell.
_COMPLETIONS = {
    "usr/share/bash-completion/completions/gpusnap": 'eval "$(gpusnap completion bash)"\n',
    "usr/share/zsh/vendor-completions/_gpusnap": (
        '#compdef gpusnap\neval "$(gpusnap completion zsh)"\n_gpusnap_completion "$@"\n'
    ),
    "usr/share/fish/vendor_completions.d/gpusnap.fish": "gpusnap completion fish | source\n",
}

_CHANGELOG = """\
gpusnap ({version}) unstable; urgency=medium

  * See changelog.gz for what is new.

 -- The gpusnap authors <authors@gpusnap.invalid>  {date}
"""


def main(words: list[str]) -> int:
    """Make it in the folder that is named, and print its path."""
    if len(words) != 1:
        print("usage: make_deb.py DIR", file=sys.stderr)
        return 2
    print(make(Path(words[0])))
    return 0


def make(folder: Path) -> Path:
    """Make the package in `folder`; its path. Raises CalledProcessError where a tool fails."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    version = f"{_version()}-1"
    architecture = _said("dpkg", "--print-architecture")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpusnap-deb-") as scratch:
        tree = Path(scratch) / "tree"
        _modules(tree, project["tool"]["setuptools"])
        _commands(tree, project["project"]["scripts"], Path(scratch) / "launcher")
        _documents(tree, version)
        for name, text in _COMPLETIONS.items():
            _write(tree / name, text)
        _control(tree, version, architecture)
        path = folder / f"gpusnap_{version}_{architecture}.deb"
        # Whoever makes it, and whenever: it comes out alike.
        subprocess.run(
            ["dpkg-deb", "--root-owner-group", "-Zxz", "--build", str(tree), str(path)],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "SOURCE_DATE_EPOCH": str(_epoch())},
        )
    return path


def _version() -> str:
    names: dict[str, str] = {}
    exec((CHECKOUT / "gpusnap/runtime_shim/_version.py").read_text(), names)
    return names["__version__"]


def _epoch() -> int:
    given = os.environ.get("SOURCE_DATE_EPOCH")
    return int(given) if given else int((CHECKOUT / "CHANGELOG.md").stat().st_mtime)


def _modules(tree: Path, settings: dict[str, Any]) -> None:
    """The packages that a wheel has, with their data."""
    # Unlike rglob, os.walk can follow the links in gpusnap/.
    walk = os.walk(CHECKOUT / "gpusnap", followlinks=True)
    for source in sorted(Path(folder) for folder, _, files in walk if "__init__.py" in files):
        inner = source.relative_to(CHECKOUT)
        package, target = ".".join(inner.parts), tree / MODULES / inner
        patterns = ["*.py", *settings["package-data"].get(package, [])]
        for path in sorted(each for pattern in patterns for each in source.glob(pattern) if each.is_file()):
            # The launcher, should a build have left it there, is in /usr/bin.
            if path.parent == source:
                _write(target / path.name, path.read_bytes())


def _commands(tree: Path, scripts: dict[str, str], build: Path) -> None:
    for name, reference in scripts.items():
        module, _, function = reference.partition(":")
        text = _SCRIPT.format(modules=MODULES, module=module, function=function)
        _write(tree / (ENTRY if name == "gpusnap-runtime" else f"usr/bin/{name}"), text, 0o755)
    launcher = CHECKOUT / "gpusnap/runtime_shim/launcher"
    subprocess.run(
        ["make", "-s", "-C", str(launcher), f"BUILD={build}", f"PYTHON_ENTRY=/{ENTRY}"], check=True
    )
    _write(tree / "usr/bin/gpusnap-runtime", (build / "gpusnap-runtime").read_bytes(), 0o755)
    loops = Path("gpusnap/oci/chunks/native")
    subprocess.run(["make", "-s", "-C", str(CHECKOUT / loops), f"BUILD={build}"], check=True)
    _write(tree / MODULES / loops / "planes.so", (build / "planes.so").read_bytes())


def _documents(tree: Path, version: str) -> None:
    docs = tree / "usr/share/doc/gpusnap"
    _write(docs / "copyright", (DEBIAN / "copyright").read_bytes())
    _write(docs / "README.md", (CHECKOUT / "README.md").read_bytes())
    for path in sorted((CHECKOUT / "docs").rglob("*")):
        if path.is_file() and path.suffix in (".md", ".svg"):
            _write(docs / "docs" / path.relative_to(CHECKOUT / "docs"), path.read_bytes())
    for path in sorted((CHECKOUT / "examples").rglob("*")):
        if path.is_file():
            place = docs / "examples" / path.relative_to(CHECKOUT / "examples")
            _write(place, path.read_bytes(), 0o755 if path.suffix == ".sh" else 0o644)
    _gzip(docs / "changelog.gz", (CHECKOUT / "CHANGELOG.md").read_bytes())
    text = _CHANGELOG.format(version=version, date=formatdate(_epoch()))
    _gzip(docs / "changelog.Debian.gz", text.encode())
    for page in sorted((CHECKOUT / "docs/man").glob("*.1")):
        _gzip(tree / f"usr/share/man/man1/{page.name}.gz", page.read_bytes())
    _write(tree / "usr/share/lintian/overrides/gpusnap", (DEBIAN / "lintian-overrides").read_bytes())


def _control(tree: Path, version: str, architecture: str) -> None:
    sizes = [path.stat().st_size for path in tree.rglob("*") if path.is_file()]
    values = {
        "VERSION": version,
        "ARCHITECTURE": architecture,
        # In KiB; each file takes whole ones (deb-substvars(5)).
        "SIZE": str(sum(-(-size // 1024) for size in sizes)),
    }
    text = (DEBIAN / "control").read_text()
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    _write(tree / "DEBIAN/control", text)
    sums = subprocess.run(
        "find usr -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum",
        shell=True,
        cwd=tree,
        check=True,
        capture_output=True,
    )
    _write(tree / "DEBIAN/md5sums", sums.stdout)
    for name in ("postinst", "prerm", "postrm"):
        _write(tree / "DEBIAN" / name, (DEBIAN / name).read_bytes(), 0o755)
    for path in (tree, *tree.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)


def _write(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)


def _gzip(path: Path, data: bytes) -> None:
    _write(path, gzip.compress(data, mtime=0))


def _said(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    if shutil.which("dpkg-deb") is None:
        sys.exit("make_deb: there is no dpkg-deb; make the package on Debian or Ubuntu")
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.CalledProcessError as error:
        sys.exit(f"make_deb: {error}")
