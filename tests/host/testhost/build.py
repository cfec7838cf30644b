"""Make a tree."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from . import kernel, namespaces, packages, recipe
from .cache import STAGING, Cache
from .enter import Wish, enter
from .recipe import Suite
from .report import HostError, say
from .rootfs import Bind

LOG = "build.log"
LOG_TAIL_LINES = 15
APT_CONFIG = """\
Acquire::Check-Valid-Until "false";
Acquire::Languages "none";
APT::Install-Recommends "false";
"""
DPKG_CONFIG = """\
path-exclude=/usr/share/doc/*
path-exclude=/usr/share/locale/*
path-exclude=/usr/share/man/*
"""
# No daemon is started in a chroot; see invoke-rc.d(8).
POLICY = "#!/bin/sh\nexit 101\n"


def ensure_tree(cache: Cache, suite: Suite) -> tuple[Path, int]:
    """The tree of this recipe and suite, built if it is not there, and a descriptor that keeps it."""
    if os.uname().machine != recipe.ARCHITECTURE:
        raise HostError(f"the test host is for {recipe.ARCHITECTURE} only, not for {os.uname().machine}")
    digest = recipe.digest(suite)
    with cache.locked():
        if not cache.tree(digest).is_dir():
            cache.clear_wrecks()
            _build(cache, suite, digest)
            cache.prune(keep=[recipe.digest(each) for each in recipe.SUITES.values()])
        return cache.tree(digest), cache.use(digest)


def _build(cache: Cache, suite: Suite, digest: str) -> None:
    packages.ensure()
    start = time.monotonic()
    tree = cache.top / (STAGING + secrets.token_hex(4))
    tree.mkdir()
    builder = Builder(tree, cache, suite)
    say(f"building the Debian {suite.name} tree {cache.tree(digest)} (a minute or two, once)")
    try:
        for step in (
            builder.bootstrap, builder.install_packages, builder.install_newer, builder.install_wheels,
            builder.configure, builder.make_images,
        ):  # fmt: skip
            step()
    except BaseException:
        shutil.rmtree(tree)
        raise
    tree.rename(cache.tree(digest))
    say(f"built in {time.monotonic() - start:.0f} s")


class Builder:
    """The steps that fill the empty directory `tree`."""

    def __init__(self, tree: Path, cache: Cache, suite: Suite) -> None:
        self.tree = tree
        self.suite = suite
        self.cache = cache
        self.log = cache.top / LOG
        self.log.write_bytes(b"")
        self.env = {"PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin", "LANG": "C.UTF-8"}
        self.env |= {"DEBIAN_FRONTEND": "noninteractive", "HOME": "/root"} | packages.proxies()

    def bootstrap(self) -> None:
        mirror = packages.mirror(self.suite.name)
        say(f"debootstrap {self.suite.name} from {mirror}")
        include = "--include=ca-certificates"
        self._run(["debootstrap", "--variant=minbase", include, self.suite.name, str(self.tree), mirror])

    def install_packages(self) -> None:
        say(f"installing {len(self.suite.packages)} packages and what they need")
        self._write("etc/apt/apt.conf.d/90gpusnap", APT_CONFIG)
        self._write("etc/dpkg/dpkg.cfg.d/90gpusnap", DPKG_CONFIG)
        self._write("usr/sbin/policy-rc.d", POLICY, mode=0o755)
        for name in ("resolv.conf", "hosts"):
            shutil.copy(f"/etc/{name}", self.tree / "etc" / name)
        self._chroot(["apt-get", "-q", "update"])
        self._chroot(["apt-get", "-q", "install", "-y", *self.suite.packages])
        self._chroot(["apt-get", "clean"])

    def install_newer(self) -> None:
        """The next releases of what the product has to work with, beside those of the suite."""
        if not self.suite.newer:
            return
        say(f"adding {', '.join(recipe.NEWER_COMMANDS)} of {recipe.NEWER_SUITE} under {recipe.NEWER}")
        script = shutil.copy(recipe.FILES / "install-newer", self.tree / "tmp")
        words = [recipe.NEWER_SUITE, recipe.NEWER, *recipe.NEWER_PACKAGES, "--", *recipe.NEWER_COMMANDS]
        try:
            self._chroot([f"/tmp/{Path(script).name}", *words])
        except HostError as error:
            # That suite moves, and a day may come when its packages no longer run on this one.
            say(f"going on without the newer releases: {error}")
            shutil.rmtree(self.tree / recipe.NEWER.lstrip("/"), ignore_errors=True)

    def install_wheels(self) -> None:
        python = (self.tree / "usr/bin/python3").readlink().name.removeprefix("python")
        say(f"fetching wheels for the tree's Python {python} with this machine's pip")
        with self._scratch("wheels") as wheels, self._scratch("venv") as venv:
            self._run([sys.executable, "-m", "venv", str(venv)])
            platforms = [word for platform in recipe.WHEEL_PLATFORMS for word in ("--platform", platform)]
            # pip's configuration may be in the environment.
            download = [f"{venv}/bin/pip", "download", "--only-binary=:all:", "--implementation", "cp"]
            download += ["--python-version", python, *platforms, "--dest", str(wheels)]
            wanted = [word for path in self.suite.requirements for word in ("--requirement", str(path))]
            self._run([*download, *wanted], env=dict(os.environ))
            # Debian's pycriu must be seen, hence the system's site packages.
            self._chroot(["python3", "-m", "venv", "--system-site-packages", recipe.VENV])
            install = [f"{recipe.VENV}/bin/pip", "install", "--no-index", "--find-links", f"/{wheels.name}"]
            for path in self.suite.requirements:
                shutil.copy(path, wheels)
                install += ["--requirement", f"/{wheels.name}/{path.name}"]
            self._chroot(install)
        site = f"{recipe.VENV}/lib/python{python}/site-packages"
        self._write(f"{site}/gpusnap-source.pth".lstrip("/"), "/src\n")

    def configure(self) -> None:
        shutil.copytree(recipe.FILES / "etc", self.tree / "etc", dirs_exist_ok=True)
        self._write("etc/hosts", "127.0.0.1 localhost testhost\n::1 localhost testhost\n")
        (self.tree / "etc/resolv.conf").unlink()
        (self.tree / "src").mkdir()

    def make_images(self) -> None:
        say("making the container image localhost/base")
        out = self.tree / recipe.IMAGE_STORE.lstrip("/")
        out.parent.mkdir()
        archive = Path(recipe.IMAGE_ARCHIVE).name
        argv = ["/src/tests/host/files/make-images", f"/out/{out.name}", f"/out/{archive}"]
        wish = Wish(argv, binds=(Bind(str(out.parent), "/out", read_only=False),))
        if enter(self.cache, self.tree, recipe.CHECKOUT, wish):
            raise HostError("making the images failed", "Its messages stand above")

    def _chroot(self, argv: list[str]) -> None:
        self._run(["chroot", str(self.tree), *argv])

    def _run(self, argv: list[str], *, env: dict[str, str] | None = None) -> None:
        """Run `argv`, its output to the log; it dies with this process, and its mounts with it."""

        def setup() -> None:
            kernel.unshare(kernel.CLONE_NEWNS)
            kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
            kernel.mount("proc", "/proc", "proc")
            if (self.tree / "proc").is_dir():
                kernel.mount("proc", f"{self.tree}/proc", "proc")
            log = os.open(self.log, os.O_WRONLY | os.O_APPEND)
            null = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((null, 0), (log, 1), (log, 2)):
                os.dup2(source, target)

        code = namespaces.run(argv, setup=setup, env=env or self.env)
        if code:
            lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
            print(*lines, sep="\n", file=sys.stderr)
            how = "was interrupted" if code > 128 else f"failed with exit code {code}"
            raise HostError(f"{' '.join(argv[:6])} … {how}", f"The whole output is in {self.log}")

    @contextlib.contextmanager
    def _scratch(self, name: str) -> Iterator[Path]:
        """A directory in the tree for as long as the block runs."""
        path = self.tree / f"build-{name}"
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path)

    def _write(self, name: str, text: str, *, mode: int = 0o644) -> None:
        path = self.tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
