"""The picture of the demo in README.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.docs.demo_picture import Line, PictureError, draw, record, select_lines

ROOT = Path(__file__).parents[3]
PICTURE = ROOT / "docs" / "demo.svg"
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
TOLD = [
    "gpusnap: checkpoint a container that uses a GPU, remove it, and restore it.",
    f"{BOLD}1. Make an image{PLAIN}",
    "$ podman import /var/lib/gpusnap-demo/image.tar",
    "",
    f"{BOLD}2. Start it. It fills",
    f"   every word{PLAIN}",
    "$ podman --runtime /home/me/gpusnap-runtime run --detach \\",
    "      --name gpusnap-demo",
    "  09:53:27.737  pid=1 tick=1 ok gpu=GPU-5067b0de-0000-4000-8000-000000000000 sum=0080073e92e78e16",
    *(f"{BOLD}{step}. Step{PLAIN}" for step in (3, 4, 5)),
    "$ podman container restore --import /var/lib/gpusnap-demo/checkpoint.tar.zst",
    f"{BOLD}6. Check{PLAIN}",
    "",
    f"{BOLD}7. What gpusnap did{PLAIN}",
    "Linux 6.18-of-this-machine",
    "A running container with 64 MiB in GPU memory became a file",
    "7.9 s in all",
]


def told(*left_out: str) -> list[Line]:
    """A recording with a line each half second."""
    return [Line(number / 2, text) for number, text in enumerate(TOLD) if text not in left_out]


def shown(svg: str) -> list[str]:
    """The lines of a picture, from its text elements in order of their places."""
    rows: dict[float, str] = {}
    for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        if (y := each.get("y")) and each.get("clip-path"):
            rows[float(y)] = rows.get(float(y), "") + (each.text or "").replace("\xa0", " ")
    return [text.rstrip("\n") for _, text in sorted(rows.items())]


def test_what_is_shown() -> None:
    """Steps 2 to 6 and the summary, the time since step 1 at the left; what is left out is a row of dots."""
    lines = shown(draw(select_lines(told()), title="demo"))
    assert [line.strip() for line in lines[:4]] == ["$ make demo", "…", "", "1.5 s 2. Start it. It fills"]
    assert [line.strip() for line in lines[-4:-2]] == ["…", ""]
    assert lines[-1] == "  8.5 s 7.9 s in all"
    text = "\n".join(lines)
    assert "Make an image" not in text
    assert "of-this-machine" not in text


def test_paths_and_ids_are_shortened() -> None:
    """No folder of a machine, and of an ID so much that it can be told from another."""
    text = "\n".join(shown(draw(select_lines(told()), title="demo")))
    assert "$ podman --runtime gpusnap-runtime run" in text
    assert "--import checkpoint.tar.zst" in text
    assert "gpu=GPU-5067b0de… sum=…92e78e16" in text


def test_titles_are_bold() -> None:
    """As in the terminal, a title of two lines in both."""
    found = {text.plain: "bold" in str(text.style) for _, text in select_lines(told())}
    assert found["2. Start it. It fills"]
    assert found["   every word"]
    assert not found["7.9 s in all"]


def test_the_same_lines_give_the_same_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the terminal that it is drawn in."""
    first = draw(select_lines(told()), title="demo")
    for name, value in (("COLUMNS", "40"), ("TERM", "dumb"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    assert draw(select_lines(told()), title="demo") == first


def test_a_demo_that_has_changed() -> None:
    """A step or the summary that is missing, and a line that would be cut off, make no picture."""
    for missing in (f"{BOLD}4. Step{PLAIN}", TOLD[-2]):
        with pytest.raises(PictureError, match="other steps than before"):
            select_lines(told(missing))
    with pytest.raises(PictureError, match="too wide"):
        draw(select_lines([*told(), Line(9.0, "x" * 93)]), title="demo")


def test_recording() -> None:
    """A command has a terminal, its lines come in order; one that fails or hangs makes no picture."""
    program = "import sys; print(sys.stdout.isatty()); print('end'); sys.exit(int(sys.argv[1]))"
    lines = list(record([sys.executable, "-c", program, "0"], cwd=ROOT, deadline_s=60))
    assert [line.text for line in lines] == ["True", "end"]
    assert 0 < lines[0].seconds <= lines[1].seconds
    with pytest.raises(PictureError, match=r"failed \(3\)"):
        list(record([sys.executable, "-c", program, "3"], cwd=ROOT, deadline_s=60))
    with pytest.raises(PictureError, match="did not end within"):
        list(record(["sleep", "600"], cwd=ROOT, deadline_s=0.1))


def test_the_picture_in_the_readme() -> None:
    """It shows the demo's steps as they are named now; small, complete in itself, and of no machine."""
    svg = PICTURE.read_text("utf-8")
    assert len(svg) < 60_000
    assert "docs/demo.svg" in (ROOT / "README.md").read_text("utf-8")
    assert not re.search(r"url\((?!#)|@import|(?<!xmlns=\")https?:", svg)
    lines = "\n".join(shown(svg))
    assert not re.search(r"/(root|home|work|tmp|var|usr)/|[0-9a-f]{12}|-fc-", lines)
    titles = re.findall(r'title\("(\d\. [^"]*)"\)', (ROOT / "demo" / "story.py").read_text("utf-8"))
    assert len(titles) == 6
    for title in titles[1:-1]:
        assert title in lines
