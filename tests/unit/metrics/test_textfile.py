"""The textfile: what is counted stays, whoever writes, and node_exporter can read it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from oci_checkpoints import begin, end

from gpusnap.metrics.textfile import METRICS, NAME, update_values

EXAMPLES = Path(__file__).parents[3] / "examples" / "monitoring"


def text(folder: Path) -> str:
    return (folder / NAME).read_text()


def test_counts_and_values(tmp_path: Path) -> None:
    """Counters go up from what the file has, gauges are what was said last; labels are escaped."""
    for value in (1, 2):
        with update_values(str(tmp_path)) as values:
            values.add("gpusnap_checkpoints_total", container="w")
            values.add("gpusnap_checkpoint_written_bytes_total", 1 << 40, container="w")
            values.set("gpusnap_checkpoint_pause_seconds", value, container='a"\\\n}, b="x')
    assert text(tmp_path).splitlines() == [
        "# HELP gpusnap_checkpoints_total Checkpoints made by gpusnap.",
        "# TYPE gpusnap_checkpoints_total counter",
        'gpusnap_checkpoints_total{container="w"} 2',
        "# HELP gpusnap_checkpoint_written_bytes_total Bytes added on disk by checkpoints.",
        "# TYPE gpusnap_checkpoint_written_bytes_total counter",
        f'gpusnap_checkpoint_written_bytes_total{{container="w"}} {2 << 40}',
        "# HELP gpusnap_checkpoint_pause_seconds How long the last checkpoint stopped the processes.",
        "# TYPE gpusnap_checkpoint_pause_seconds gauge",
        'gpusnap_checkpoint_pause_seconds{container="a\\"\\\\\\n}, b=\\"x"} 2',
    ]
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o644
    assert sorted(each.name for each in tmp_path.iterdir()) == [".gpusnap.prom.lock", NAME]


def test_several_writers(tmp_path: Path) -> None:
    """None loses what another has counted."""

    def work() -> None:
        for _ in range(20):
            with update_values(str(tmp_path)) as values:
                values.add("gpusnap_restores_total", container="w")

    children = [begin(work) for _ in range(4)]
    assert [end(child) for child in children] == [0] * 4
    assert 'gpusnap_restores_total{container="w"} 80\n' in text(tmp_path)


def test_a_writer_that_fails(tmp_path: Path) -> None:
    """The file stays as it was."""
    with update_values(str(tmp_path)) as values:
        values.add("gpusnap_restores_total", container="w")
    before = text(tmp_path)

    def fail() -> None:
        with update_values(str(tmp_path)) as values:
            values.add("gpusnap_restores_total", container="w")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert text(tmp_path) == before


def test_a_file_that_is_broken(tmp_path: Path) -> None:
    """What can be read of it counts; another's metrics do not, and a link is not followed."""
    (tmp_path / NAME).write_text('gpusnap_restores_total{container="w"} 7\nhalf a li\nother_total{a="b"} 1\n')
    with update_values(str(tmp_path)) as values:
        values.add("gpusnap_restores_total", container="w")
    assert 'gpusnap_restores_total{container="w"} 8\n' in text(tmp_path)
    assert "other_total" not in text(tmp_path)


@pytest.mark.parametrize("value", [0.00005, 1e-9, 1e17, 0.5])
def test_values_with_an_exponent(tmp_path: Path, value: float) -> None:
    """What this writes the next writer reads."""
    for first in (True, False):
        with update_values(str(tmp_path)) as values:
            values.add("gpusnap_checkpoints_total", container="w")
            if first:
                values.set("gpusnap_checkpoint_pause_seconds", value, container="w")
    assert f'gpusnap_checkpoint_pause_seconds{{container="w"}} {value:.15g}\n' in text(tmp_path)


def test_containers_that_are_gone(tmp_path: Path) -> None:
    """The last 256 stay."""
    with update_values(str(tmp_path)) as values:
        for number in range(300):
            values.add("gpusnap_checkpoints_total", container=f"job-{number}")
            values.set("gpusnap_last_checkpoint_timestamp_seconds", number + 1, container=f"job-{number}")
        values.add("gpusnap_failures_total", operation="restore", code="GPS-001")
    found = text(tmp_path)
    assert found.count("gpusnap_checkpoints_total{") == 256
    assert '{container="job-43"}' not in found
    assert '{container="job-44"}' in found
    assert 'code="GPS-001"' in found


def test_the_examples() -> None:
    """Valid JSON and YAML, whose metrics exist, and all that exist are shown."""
    board = (EXAMPLES / "dashboard.json").read_text()
    rules = (EXAMPLES / "alerts.yaml").read_text()
    panels = json.loads(board)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    alerts = [rule for group in yaml.safe_load(rules)["groups"] for rule in group["rules"]]
    assert all({"alert", "expr", "annotations"} <= rule.keys() for rule in alerts)
    used = set(re.findall(r"gpusnap_\w+", " ".join([*expressions, *(rule["expr"] for rule in alerts)])))
    unused = {"gpusnap_last_failure_timestamp_seconds", "gpusnap_last_restore_timestamp_seconds"}
    assert used == METRICS.keys() - unused
    docs = (EXAMPLES.parents[1] / "docs/tasks/monitor.md").read_text()
    assert set(re.findall(r"`(gpusnap_\w+)`", docs)) == METRICS.keys()
