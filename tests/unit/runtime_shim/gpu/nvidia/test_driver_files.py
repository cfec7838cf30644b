"""The driver's files: which are its, which stands in for one of another version, and which build it is."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusnap.runtime_shim.gpu.cdi.spec import Device, Edits, Mount, Spec
from gpusnap.runtime_shim.gpu.nvidia.driver_files import (
    DriverFiles,
    File,
    build_id,
    describe_mapped,
    explain_difference,
    find_counterpart,
    find_files,
    is_driver_file,
    loader_cache,
    replace_version,
)

OLD, NEW = "560.35.03", "580.95.05"
LIB = "/usr/lib/x86_64-linux-gnu"
CACHE = Path("/etc/ld.so.cache")

DRIVER = [
    f"{LIB}/libcuda.so.{OLD}",
    f"{LIB}/libcuda.so.1",
    f"{LIB}/libcudadebugger.so.{OLD}",
    f"{LIB}/libnvidia-ml.so.{OLD}",
    f"{LIB}/libnvidia-nvvm70.so.4",
    f"{LIB}/libnvidia-gtk3.so.{OLD}",
    f"{LIB}/libnvidia-egl-gbm.so.1.1.1",
    f"{LIB}/libnvcuvid.so.{OLD}",
    f"{LIB}/libnvoptix.so.{OLD}",
    f"{LIB}/libEGL_nvidia.so.{OLD}",
    f"{LIB}/libGLESv1_CM_nvidia.so.{OLD}",
    f"{LIB}/libGLESv2_nvidia.so.{OLD}",
    f"{LIB}/libGLX_nvidia.so.{OLD}",
    f"{LIB}/vdpau/libvdpau_nvidia.so.{OLD}",
    f"{LIB}/gbm/nvidia-drm_gbm.so",
    f"{LIB}/nvidia/current/libcuda.so.{OLD}",
    "/usr/lib/xorg/modules/drivers/nvidia_drv.so",
    f"/usr/lib/xorg/modules/extensions/libglxserver_nvidia.so.{OLD}",
    f"/lib/x86_64-linux-gnu/libcuda.so.{OLD}",
    f"/usr/lib64/libcuda.so.{OLD}",
    f"/usr/lib/i386-linux-gnu/libcuda.so.{OLD}",
    f"/usr/lib32/libcuda.so.{OLD}",
    f"/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libcuda.so.{OLD}",
    f"/home/kubernetes/bin/nvidia/lib64/libcuda.so.{OLD}",
    f"/lib/firmware/nvidia/{OLD}/gsp_ga10x.bin",
    f"/usr/lib/firmware/updates/6.8.0-45-generic/nvidia/{OLD}/gsp_tu10x.bin",
    f"/lib/firmware/nvidia/{OLD}",
    "/usr/bin/nvidia-smi",
    "/usr/lib/nvidia/current/nvidia-smi",
    "/usr/bin/nvidia-debugdump",
    "/usr/bin/nvidia-persistenced",
    "/usr/bin/nvidia-cuda-mps-control",
    "/usr/bin/nvidia-cuda-mps-server",
    "/usr/bin/nvidia-imex",
    "/usr/bin/nvidia-imex-ctl",
    "/run/nvidia-persistenced/socket",
    "/var/run/nvidia-fabricmanager/socket",
    "/usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
    "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
    "/etc/vulkan/icd.d/nvidia_icd.x86_64.json",
    "/usr/share/vulkan/implicit_layer.d/nvidia_layers.json",
    "/usr/share/nvidia/nvoptix.bin",
    f"/usr/share/nvidia/nvidia-application-profiles-{OLD}-rc",
    "/usr/share/X11/xorg.conf.d/10-nvidia.conf",
    "/proc/driver/nvidia",
    "/proc/driver/nvidia/gpus/0000:65:00.0",
]
OTHER = [
    "",
    "/",
    "/etc/passwd",
    "/etc/nvidia",
    "libcuda.so.1",
    f"{LIB}/libc.so.6",
    f"{LIB}/libcudart.so.12",
    f"{LIB}/libnvidia-container.so.1",
    f"{LIB}/libcuda.so.1/x",
    f"{LIB}/libcuda.so.1.bak",
    f"{LIB}/libcuda.so.1\n",
    f"{LIB}/../../../etc/libcuda.so.1",
    f"{LIB}/./libcuda.so.1",
    f"/{LIB}/libcuda.so.1",
    "/home/me/libcuda.so.1",
    "/tmp/usr/lib/libcuda.so.1",
    "/usr/bin/bash",
    "/usr/bin/nvidia-smi ",
    "/usr/bin/nvidia-container-runtime",
    "/usr/share/nvidia/../../../etc/nvidia.json",
    "/lib/firmware/nvidia/../gsp.bin",
    "/lib/firmware/nvidia/gsp.bin",
    "/lib/firmware/amd/gsp_ga10x.bin",
    "/proc/driver/nvidia/../../sys",
    "/proc/driver/nvidiax",
    "/run/docker.sock",
    "/run/nvidia-persistenced/../docker.sock",
    "/nix/store/x/lib/libcuda.so.1",
    "/usr/lib/xé/libcuda.so.1",
]


@pytest.mark.parametrize("path", DRIVER)
def test_the_drivers(path: str) -> None:
    """What NVIDIA's container tools mount, on the distributions that put it elsewhere too."""
    assert is_driver_file(path)


@pytest.mark.parametrize("path", OTHER)
def test_not_the_drivers(path: str) -> None:
    """No other file, nor one by way of another folder."""
    assert not is_driver_file(path)
    known = DriverFiles(NEW, (a_file(f"{LIB}/libcuda.so.{NEW}"), a_file(path, rank=1)))
    assert find_counterpart(path, OLD, NEW, known) is None


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (f"/a/libcuda.so.{OLD}", f"/a/libcuda.so.{NEW}"),
        (f"/lib/firmware/nvidia/{OLD}/gsp.bin", f"/lib/firmware/nvidia/{NEW}/gsp.bin"),
        (f"/n/{OLD}/profiles-{OLD}-rc", f"/n/{NEW}/profiles-{NEW}-rc"),
        ("/a/x.so.1560.35.034", "/a/x.so.1560.35.034"),
        ("/a/x.so.1560.35.03", "/a/x.so.1560.35.03"),
        ("/a/x.so.560.35.034", "/a/x.so.560.35.034"),
        ("/a/x.so.560.35.03.1", "/a/x.so.560.35.03.1"),
        ("/a/x.so.1.560.35.03", "/a/x.so.1.560.35.03"),
        ("/a/x.so.560x35x03", "/a/x.so.560x35x03"),
        (f"/a/x.so.{OLD}.", f"/a/x.so.{NEW}."),
    ],
)
def test_replace_version(path: str, expected: str) -> None:
    """Only as a whole, in each place."""
    assert replace_version(path, OLD, NEW) == expected


@pytest.mark.parametrize(
    "version", ["", ".", "1", "560", "so", "5.6", "560.35.03/..", "560.35\n", "x" * 9000]
)
def test_what_is_no_version(version: str) -> None:
    """A manifest's version that is none replaces nothing, and is put nowhere."""
    assert replace_version("/lib/libcuda.so.1.560.35.03", version, NEW) == "/lib/libcuda.so.1.560.35.03"
    assert replace_version(f"/lib/libcuda.so.{OLD}", OLD, version) == f"/lib/libcuda.so.{OLD}"


def a_file(path: str, *, real: str = "", bits: int = 64, rank: int = 0) -> File:
    return File(path, real or path, bits, rank)


def test_the_same_file_is_here() -> None:
    """What this host has stays as it is."""
    source = f"{LIB}/libcuda.so.{OLD}"
    known = DriverFiles(NEW, (a_file(f"{LIB}/libcuda.so.{NEW}"), a_file(source)))
    assert find_counterpart(source, OLD, NEW, known) == source


@pytest.mark.parametrize(
    ("source", "here"),
    [
        (f"{LIB}/libcuda.so.{OLD}", f"/usr/lib64/libcuda.so.{NEW}"),
        (f"/lib/firmware/nvidia/{OLD}/gsp_ga10x.bin", f"/usr/lib/firmware/nvidia/{NEW}/gsp_ga10x.bin"),
        ("/usr/bin/nvidia-smi", "/usr/lib/nvidia/current/nvidia-smi"),
        ("/usr/share/glvnd/egl_vendor.d/10_nvidia.json", "/etc/glvnd/egl_vendor.d/10_nvidia.json"),
        (
            f"/usr/share/nvidia/nvidia-application-profiles-{OLD}-rc",
            f"/usr/share/nvidia/nvidia-application-profiles-{NEW}-rc",
        ),
        (f"{LIB}/libnvidia-nvvm70.so.4", "/usr/lib64/libnvidia-nvvm70.so.4"),
        (f"{LIB}/libnvidia-egl-gbm.so.1.1.1", f"{LIB}/libnvidia-egl-gbm.so.1.1.2"),
    ],
)
def test_another_version(source: str, here: str) -> None:
    """A file of the same name, its version aside, in the place where this host has it."""
    noise = tuple(
        a_file(path)
        for path in (
            f"{LIB}/libnvidia-ml.so.{NEW}",
            f"{LIB}/libcuda.so.570.1.1",
            f"/lib/firmware/nvidia/{NEW}/gsp_tu10x.bin",
            "/usr/lib/firmware/nvidia/570.1.1/gsp_ga10x.bin",
            "/usr/share/vulkan/icd.d/10_nvidia.json",
            f"{LIB}/libnvidia-egl-gbm.so.2.0.0",
            f"{LIB}/libnvidia-egl-wayland.so.1.1.2",
            "/usr/bin/nvidia-debugdump",
        )
    )
    assert find_counterpart(source, OLD, NEW, DriverFiles(NEW, noise)) is None
    assert find_counterpart(source, OLD, NEW, DriverFiles(NEW, (*noise, a_file(here, rank=2)))) == here


def test_who_is_asked_first() -> None:
    """The CDI spec, then the loader's cache, then the folders; in one of them, the same folder."""
    listed = [
        a_file(f"/usr/lib64/libcuda.so.{NEW}", rank=2),
        a_file(f"{LIB}/libcuda.so.{NEW}", rank=2),
        a_file(f"/opt/a/libcuda.so.{NEW}", rank=1),
        a_file(f"/opt/b/libcuda.so.{NEW}", rank=0),
    ]
    chosen = []
    while listed:
        chosen.append(find_counterpart(f"{LIB}/libcuda.so.{OLD}", OLD, NEW, DriverFiles(NEW, tuple(listed))))
        listed.remove(next(each for each in listed if each.path == chosen[-1]))
    folders = ["/opt/b", "/opt/a", LIB, "/usr/lib64"]
    assert chosen == [f"{folder}/libcuda.so.{NEW}" for folder in folders]


def test_a_link_is_followed() -> None:
    """What is mounted is the file itself, whichever of its names was asked for."""
    link = a_file(f"{LIB}/libcuda.so.1", real=f"{LIB}/nvidia/current/libcuda.so.{NEW}", rank=1)
    for name in ("libcuda.so.1", f"libcuda.so.{OLD}"):
        assert find_counterpart(f"/usr/lib64/{name}", OLD, NEW, DriverFiles(NEW, (link,))) == link.real


def test_what_another_driver_left() -> None:
    """A libcuda.so.1 that is not of this host's driver's version is not taken: a compatibility package's."""
    compat = a_file("/usr/local/cuda/compat/libcuda.so.1", real="/usr/local/cuda/compat/libcuda.so.590.1.1")
    assert find_counterpart(f"{LIB}/libcuda.so.1", OLD, NEW, DriverFiles(NEW, (compat,))) is None


@pytest.mark.parametrize(
    ("source", "among", "bits"),
    [
        (f"{LIB}/libcuda.so.{OLD}", (), 64),
        (f"/usr/lib64/libcuda.so.{OLD}", (), 64),
        (f"/usr/lib32/libcuda.so.{OLD}", (), 32),
        (f"/usr/lib/i386-linux-gnu/libcuda.so.{OLD}", (), 32),
        (f"/usr/lib/libcuda.so.{OLD}", (), 64),
        (f"/usr/lib/libcuda.so.{OLD}", (f"/usr/lib64/libcuda.so.{OLD}",), 32),
    ],
)
def test_width(source: str, among: tuple[str, ...], bits: int) -> None:
    """A 32-bit library never stands in for a 64-bit one, nor the other way round."""
    both = {each: a_file(f"/opt/{each}/libcuda.so.{NEW}", bits=each) for each in (32, 64)}
    known = DriverFiles(NEW, tuple(both.values()))
    assert find_counterpart(source, OLD, NEW, known, among=among) == both[bits].path
    other = DriverFiles(NEW, (both[96 - bits],))
    assert find_counterpart(source, OLD, NEW, other, among=among) is None


def test_a_folder_that_only_cdi_knows() -> None:
    """Where this host's own CDI spec mounts the very same path of its version, the folder may be any."""
    known = DriverFiles(NEW, (a_file(f"/opt/nv/libcuda.so.{NEW}"),))
    assert find_counterpart(f"/opt/nv/libcuda.so.{OLD}", OLD, NEW, known) == f"/opt/nv/libcuda.so.{NEW}"
    assert find_counterpart(f"/opt/xx/libcuda.so.{OLD}", OLD, NEW, known) is None


def test_two_of_their_own_version() -> None:
    """Of two that fit equally none is guessed."""
    known = DriverFiles(NEW, tuple(a_file(f"{LIB}/libnvidia-egl-gbm.so.1.1.{at}") for at in (2, 3)))
    assert find_counterpart(f"{LIB}/libnvidia-egl-gbm.so.1.1.1", OLD, NEW, known) is None


PARTS = st.sampled_from(
    [
        "..",
        ".",
        "",
        "usr",
        "lib",
        "lib64",
        "bin",
        "etc",
        f"libcuda.so.{OLD}",
        "nvidia-smi",
        "nvidia",
        OLD,
        "\n",
    ]
)


@given(st.lists(PARTS, max_size=7), PARTS, st.text(max_size=9))
def test_nothing_but_the_hosts_files(parts: list[str], old: str, new: str) -> None:
    """Whatever an archive asks for, what comes back is listed by this host."""
    known = DriverFiles(NEW, (a_file(f"{LIB}/libcuda.so.{NEW}"), a_file("/usr/bin/nvidia-smi", bits=0)))
    for version in (old, OLD):
        chosen = find_counterpart("/" + "/".join(parts), version, new, known)
        assert chosen in (None, *(file.real for file in known.files))
        assert find_counterpart("/" + "/".join(parts), version, NEW, known) in (
            None,
            *(f.real for f in known.files),
        )


def test_counterpart_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is pure over what was found."""

    def touched(*_: object, **__: object) -> None:
        raise AssertionError("the file system was looked at")

    for name in ("stat", "open", "listdir", "readlink", "lstat"):
        monkeypatch.setattr(os, name, touched)
    known = DriverFiles(NEW, (a_file(f"/usr/lib64/libcuda.so.{NEW}"),))
    assert find_counterpart(f"{LIB}/libcuda.so.{OLD}", OLD, NEW, known) == f"/usr/lib64/libcuda.so.{NEW}"


# What is found


def an_elf(bits: int = 64, note: bytes = b"", *, kind: int = 3, order: str = "<") -> bytes:
    """An ELF file of one program header, a PT_NOTE with one note."""
    notes = struct.pack(f"{order}III", 4, len(note), kind) + b"GNU\0" + note if note else b""
    start = b"\x7fELF" + bytes([bits // 32, 1 if order == "<" else 2, 1]) + bytes(9)
    if bits == 64:
        start += struct.pack(f"{order}HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0)
        return start + struct.pack(f"{order}IIQQQQQQ", 4, 4, 120, 0, 0, len(notes), len(notes), 4) + notes
    start += struct.pack(f"{order}HHIIIIIHHHHHH", 3, 3, 1, 0, 52, 0, 0, 52, 32, 1, 0, 0, 0)
    return start + struct.pack(f"{order}IIIIIIII", 4, 84, 0, 0, len(notes), len(notes), 4, 4) + notes


def a_cache(entries: list[tuple[str, str]], *, behind_old: bool = False) -> bytes:
    """An ld.so.cache as glibc's ldconfig writes it, alone or behind the format of old."""
    texts, rows = b"", b""
    start = 48 + 24 * len(entries)
    for name, path in entries:
        rows += struct.pack("=iIIIQ", 0x303, start + len(texts), start + len(texts) + len(name) + 1, 0, 0)
        texts += name.encode() + b"\0" + path.encode() + b"\0"
    new = (
        b"glibc-ld.so.cache1.1"
        + struct.pack("=IIIIIII", len(entries), len(texts), 2, 0, 0, 0, 0)
        + rows
        + texts
    )
    return b"ld.so-1.7.0\0" + struct.pack("=I", 1) + bytes(12) + bytes(4) + new if behind_old else new


class Host:
    """A file tree that stands for a host."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def file(self, path: str, content: bytes = b"") -> None:
        (self.root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path[1:]).write_bytes(content)

    def link(self, path: str, target: str) -> None:
        (self.root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path[1:]).symlink_to(target)

    def found(self, *mounts: str, kind: str = "nvidia.com/gpu") -> DriverFiles:
        edits = Edits(mounts=tuple(Mount(path, path, "", ()) for path in mounts))
        spec = Spec("/etc/cdi/x.yaml", "0.5.0", kind, (Device("0", edits),), Edits())
        return find_files([spec], NEW, root=str(self.root))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "host")


def test_found_by_cdi(host: Host) -> None:
    """Mounts of nvidia.com's specs, in any folder, if they are regular files with the names of a driver's."""
    host.file(f"/opt/lib/libcuda.so.{NEW}", an_elf(64))
    host.file(f"/opt/lib32/libcuda.so.{NEW}", an_elf(32))
    host.file("/opt/secret")
    host.link("/opt/nvidia-smi", "secret")
    (host.root / "opt/libnvidia-ml.so.1").mkdir()
    paths = (f"/opt/lib/libcuda.so.{NEW}", f"/opt/lib32/libcuda.so.{NEW}")
    others = (
        "/opt/secret",
        "/opt/nvidia-smi",
        "/opt/libnvidia-ml.so.1",
        "/opt/none/libcuda.so.1",
        "nvidia-smi",
    )
    known = host.found(*paths, *others, f"/opt/../opt/lib/libcuda.so.{NEW}")
    assert [(each.path, each.bits) for each in known.files if each.rank == 0] == [
        (paths[0], 64),
        (paths[1], 32),
    ]
    assert [each for each in host.found(*paths, kind="evil.com/gpu").files if each.rank == 0] == []


def test_found_by_the_loader(host: Host) -> None:
    """The cache's libraries that are the driver's, and the folder that libcuda is in."""
    host.file(f"/odd/libcuda.so.{NEW}", an_elf())
    host.link("/odd/libcuda.so.1", f"libcuda.so.{NEW}")
    host.file(f"/odd/libnvidia-ml.so.{NEW}", an_elf())
    host.file("/odd/libz.so.1", an_elf())
    listed = [
        ("libcuda.so.1", "/odd/libcuda.so.1"),
        ("libz.so.1", "/odd/libz.so.1"),
        ("x", "/none/libcuda.so.1"),
    ]
    host.file("/etc/ld.so.cache", a_cache(listed))
    files = host.found().files
    assert files[0] == File("/odd/libcuda.so.1", f"/odd/libcuda.so.{NEW}", 64, 1)
    assert {each.path for each in files[1:]} == {
        f"/odd/{name}" for name in ("libcuda.so.1", f"libcuda.so.{NEW}", f"libnvidia-ml.so.{NEW}")
    }


def test_found_in_folders(host: Host) -> None:
    """Without CDI and cache: where distributions install it."""
    paths = {
        f"{LIB}/libcuda.so.{NEW}",
        f"{LIB}/vdpau/libvdpau_nvidia.so.{NEW}",
        f"/usr/lib64/libnvidia-ml.so.{NEW}",
        f"/lib/firmware/nvidia/{NEW}/gsp_ga10x.bin",
        "/usr/bin/nvidia-smi",
        "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
    }
    for path in (*paths, "/usr/bin/bash", f"{LIB}/libc.so.6", f"/lib/firmware/nvidia/{OLD}/gsp_ga10x.bin"):
        host.file(path)
    known = host.found()
    assert {each.path for each in known.files} == paths
    assert {each.path for each in known.files} == paths
    firmware = f"/usr/lib/firmware/nvidia/{OLD}/gsp_ga10x.bin"
    assert find_counterpart(firmware, OLD, NEW, known) == f"/lib/firmware/nvidia/{NEW}/gsp_ga10x.bin"


def test_a_link_out_of_the_drivers_names(host: Host) -> None:
    """A driver's name that leads to another file is not taken."""
    host.file("/etc/shadow")
    host.link(f"{LIB}/libcuda.so.{NEW}", "../../../etc/shadow")
    assert host.found().files == ()


def test_this_host() -> None:
    """It runs on a host without any driver, or with one."""
    assert all(os.path.isfile(each.real) for each in find_files((), NEW).files)


# The loader's cache


@pytest.mark.parametrize("behind_old", [False, True])
def test_loader_cache(behind_old: bool) -> None:
    """Both layouts that glibc has written."""
    entries = [("libcuda.so.1", "/usr/lib/libcuda.so.1"), ("libz.so.1", "/usr/lib/libz.so.1")]
    assert loader_cache(a_cache(entries, behind_old=behind_old)) == tuple(entries)


@pytest.mark.skipif(not CACHE.exists() or not shutil.which("ldconfig"), reason="needs glibc's ldconfig")
def test_this_hosts_loader_cache() -> None:
    """What ldconfig -p prints of it."""
    lines = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout.splitlines()
    printed = [line.split(" => ") for line in lines if " => " in line]
    expected = [(name.split()[0], path) for name, path in printed]
    assert list(loader_cache(CACHE.read_bytes())) == expected


CACHES = [
    a_cache([("libcuda.so.1", f"/usr/lib/libcuda.so.{at}") for at in range(9)], behind_old=b)
    for b in (False, True)
]


@given(st.sampled_from(CACHES), st.data())
def test_a_broken_loader_cache(cache: bytes, data: st.DataObject) -> None:
    """Cut short, or with any bytes changed: entries with absolute paths, or none."""
    broken = bytearray(cache[: data.draw(st.integers(0, len(cache)))])
    changes = st.lists(st.tuples(st.integers(0, max(len(broken) - 1, 0)), st.integers(0, 255)), max_size=8)
    for at, value in data.draw(changes) if broken else []:
        broken[at] = value
    entries = loader_cache(bytes(broken))
    assert all(name and path.startswith("/") for name, path in entries)
    assert len(entries) <= len(broken) // 24


@given(st.binary(max_size=200))
def test_no_loader_cache(data: bytes) -> None:
    """Any other file is one without entries."""
    assert loader_cache(data) == ()


# Builds


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("order", ["<", ">"])
def test_build_id(tmp_path: Path, bits: int, order: str) -> None:
    """Of ELF files of both classes and both byte orders."""
    (tmp_path / "a").write_bytes(an_elf(bits, bytes(range(20)), order=order))
    assert build_id(str(tmp_path / "a")) == bytes(range(20)).hex()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x7fELF",
        bytes(4096),
        an_elf(),
        an_elf(note=b"x", kind=1),
        an_elf(note=bytes(513)),
        an_elf(note=b"xyz")[:-1],
    ],
)
def test_no_build_id(tmp_path: Path, content: bytes) -> None:
    """What has none, or one that CRIU does not take."""
    (tmp_path / "a").write_bytes(content)
    assert build_id(str(tmp_path / "a")) == ""


@pytest.mark.skipif(not CACHE.exists() or not shutil.which("readelf"), reason="needs readelf")
def test_build_ids_of_this_host() -> None:
    """Those of the libraries that this process has mapped are what readelf says."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = sorted({line.split(None, 5)[5] for line in lines if ".so" in line and "(deleted)" not in line})
    assert paths
    for path in paths:
        done = subprocess.run(["readelf", "-n", path], capture_output=True, text=True, check=True)
        expected = [line.split()[-1] for line in done.stdout.splitlines() if "Build ID:" in line]
        assert build_id(path) == (expected or [""])[0]


@given(
    st.sampled_from([an_elf(bits, b"0123456789abcdef", order=o) for bits in (32, 64) for o in "<>"]),
    st.data(),
)
def test_a_broken_elf(tmp_path_factory: pytest.TempPathFactory, elf: bytes, data: st.DataObject) -> None:
    """Any bytes changed: some build-id or none, and no error."""
    broken = bytearray(elf)
    for at, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(elf) - 1), st.integers(0, 255)), max_size=8)
    ):
        broken[at] = value
    path = tmp_path_factory.getbasetemp() / "elf"
    path.write_bytes(broken[: data.draw(st.integers(0, len(broken)))])
    assert len(build_id(str(path))) <= 1024


def test_the_same_build(tmp_path: Path) -> None:
    """A file as it was passes, with what is not known of it left out."""
    path = tmp_path / "libcuda.so.1"
    path.write_bytes(an_elf(note=b"one build"))
    known = describe_mapped("/usr/lib/libcuda.so.1", str(path))
    assert (known.path, known.size) == ("/usr/lib/libcuda.so.1", path.stat().st_size)
    assert explain_difference(str(path), known.size, known.build_id, mode=known.mode) == ""
    assert explain_difference(str(path), known.size, "") == ""


def test_another_build(tmp_path: Path) -> None:
    """Each thing that CRIU checks is a reason, and is told with both values."""
    path = tmp_path / "libcuda.so.1"
    path.write_bytes(an_elf(note=b"one build"))
    path.chmod(0o644)
    known = describe_mapped(str(path))
    assert f"has {known.size} bytes here but had 7 at" in explain_difference(str(path), 7, known.build_id)
    other = explain_difference(str(path), known.size, "00ff")
    assert f"another build ({b'one build'.hex()}) than at the checkpoint (00ff)" in other
    assert "the mode 100644 here but had 100755" in explain_difference(
        str(path), known.size, "", mode=0o100755
    )
    path.write_bytes(bytes(known.size))
    assert (
        explain_difference(str(path), known.size, known.build_id) == ""
    )  # CRIU has no build-id to compare then


def test_no_file_to_compare(tmp_path: Path) -> None:
    """What is not there, or is no file, cannot be the same; a FIFO is not waited for."""
    assert "it does not exist" in explain_difference(str(tmp_path / "none"), 1, "")
    os.mkfifo(tmp_path / "fifo")
    assert "is not a regular file" in explain_difference(str(tmp_path / "fifo"), 0, "")
