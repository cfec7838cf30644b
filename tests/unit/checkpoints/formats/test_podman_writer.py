"""The configuration of a container, as Podman imports it."""

from __future__ import annotations

import json

import pytest

from gpusnap.checkpoints.formats.podman_writer import has_notify_socket, make_importable


def test_a_container_of_quadlet() -> None:
    """Podman refuses one with --cgroups=split that has a parent, which it gave it itself."""
    config = {"name": "w", "cgroupsMode": "split", "cgroupParent": "/libpod_parent", "id": "1"}
    found = json.loads(make_importable(json.dumps(config).encode()))
    assert found == {"name": "w", "cgroupsMode": "split", "id": "1"}


@pytest.mark.parametrize(
    ("config", "there"),
    [
        (b'{"sdnotifyMode": "container", "sdnotifySocket": "/run/systemd/notify"}', True),
        (b'{"sdnotifyMode": "container", "sdnotifySocket": ""}', False),
        (b'{"sdnotifyMode": "conmon", "sdnotifySocket": "/run/systemd/notify"}', False),
        (b'{"sdnotifyMode": "container"}', False),
        (b"[]", False),
        (b"no JSON", False),
    ],
)
def test_a_container_that_notifies(config: bytes, there: bool) -> None:
    """conmon makes a socket in a directory of the container, which an import does not make."""
    assert has_notify_socket(config) is there


@pytest.mark.parametrize(
    "config",
    [
        b'{"cgroupsMode": "enabled", "cgroupParent": "/libpod_parent"}',
        b'{"cgroupParent":  "/libpod_parent"}',
        b'{"cgroupsMode":  "split"}',
        b"[]",
        b"no JSON",
        b"",
    ],
)
def test_any_other(config: bytes) -> None:
    """Every byte stays."""
    assert make_importable(config) is config
