"""docs/demo.svg: a run of the demo as a picture of the terminal, with the time of each step.

    make demo-picture, or python -m tools.docs.demo_picture [--output FILE]

Runs the demo as `make demo` does, in a terminal of its own, and notes when each line came. The picture has
the demo's steps 2 to 6 and its summary, line by line; paths and IDs are shortened (SHORTENED).
"""

from __future__ import annotations

import argparse
import io
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

__all__ = ["Line", "PictureError", "draw", "record", "select_lines"]

CHECKOUT = Path(__file__).resolve().parents[2]
PICTURE = CHECKOUT / "docs" / "demo.svg"
DEADLINE_S = 1200.0
"""The demo's set-up takes some minutes the first time."""
ENDING_S = 200.0
"""How long a demo that is told to stop may take: it lets the command under way finish."""
WIDTH = 100
"""Columns of the picture: those of the demo, and eight for the time."""

# What is different on each machine, or reads like a secret, and says nothing.
SHORTENED = (
    (re.compile(r"/\S*/(gpusnap-runtime|checkpoint\.tar\.zst)\b"), r"\1"),
    (re.compile(r"\b(GPU-[0-9a-f]{8})(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), r"\1…"),
    (re.compile(r"\bsum=[0-9a-f]{8}([0-9a-f]{8})\b"), r"sum=…\1"),
)
_STEP = re.compile(r"(\d)\. \S")
_FIRST, _LAST = 2, 6
_SUMMARY = "A running container with "

_TIME = Style(color="#8b949e")
_STYLES = (
    (re.compile(r"^\$ .*|^ {6}(?! ).*"), Style(color="#7ee787")),  # a command, and what is left of it
    (
        re.compile(r"\btook [\d.]+ s|… [\d.]+ s …|none missing, every word right in each"),
        Style(color="#ffd866"),
    ),
    (re.compile(r"\bin use on that GPU: .*"), Style(color="#79c0ff")),
)
# GitHub's dark page is #0d1117, its light one white: this window is seen on both.
_THEME = TerminalTheme((22, 27, 34), (230, 237, 243), [(230, 237, 243)] * 8)
_ASPECT = 0.602  # DejaVu Sans Mono's and Menlo's; `textLength` holds other fonts to it
# rich's own format loads a font from the network, which GitHub does not allow in a picture.
_FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="t">
<title id="t">The demo in a terminal: a GPU container is checkpointed, removed and restored</title>
<!-- Written by `make demo-picture`. -->
<style>.{unique_id}-matrix{{font-family:ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",\
"Liberation Mono",Consolas,monospace;font-size:{char_height}px;line-height:{line_height}px}}
.{unique_id}-title{{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif;\
font-size:18px}}
{styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">
{matrix}
</g></g></svg>
"""


class PictureError(Exception):
    """The picture cannot be made: one sentence, what happened and what to do next."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line that the demo wrote, with the terminal's codes for bold."""

    seconds: float
    """Since the demo was started."""
    text: str


def main() -> int:
    """Run the demo and write its picture; 1 if either fails."""
    parser = argparse.ArgumentParser(description="Write docs/demo.svg, a picture of a run of the demo.")
    parser.add_argument("--output", type=Path, default=PICTURE, help="where to write it (docs/demo.svg)")
    output: Path = parser.parse_args().output
    try:
        lines = list(record([sys.executable, "demo/demo.py"], cwd=CHECKOUT))
        output.write_text(draw(select_lines(lines), title=_name(lines)), "utf-8")
    except PictureError as error:
        print(f"demo_picture: {error}", file=sys.stderr)
        return 1
    return 0


def record(argv: Sequence[str], *, cwd: Path, deadline_s: float = DEADLINE_S) -> Iterator[Line]:
    """Run a command with a terminal as its output, and show and yield its lines as they come.

    Raises PictureError if it fails, or does not end before the deadline.
    """
    begin = time.monotonic()
    terminal, end = os.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    child = subprocess.Popen(argv, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=end, stderr=end)
    os.close(end)
    rest = b""
    try:
        while data := _read(terminal, begin + deadline_s):
            *whole, rest = (rest + data).split(b"\n")
            for each in whole:
                line = Line(time.monotonic() - begin, each.decode("utf-8", "replace").rstrip("\r"))
                print(line.text, flush=True)
                yield line
        if code := child.wait(max(0.0, begin + deadline_s - time.monotonic())):
            raise PictureError(
                f"the demo failed ({code}), and its last lines say why; no picture was written"
            )
    except (TimeoutError, subprocess.TimeoutExpired):
        raise PictureError(
            f"the demo did not end within {deadline_s:.0f} s and was stopped; run `make demo` and see why"
        ) from None
    finally:
        _end(child)
        os.close(terminal)


def _read(terminal: int, deadline: float) -> bytes:
    """What is written to the terminal; nothing once its other end is closed. Raises TimeoutError."""
    if not select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
        raise TimeoutError
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # EIO, pty(7): nobody has the other end open
        return b""


def _end(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM, at which the demo removes what it made, and SIGKILL if that takes too long."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def select_lines(lines: Iterable[Line]) -> list[tuple[float | None, Text]]:
    """What the picture shows of the demo, shortened, and the seconds since step 1 where they change.

    Raises PictureError if the demo did not tell what is expected.
    """
    decoder, step, start, last = AnsiDecoder(), 0, 0.0, -1.0
    found: list[tuple[float | None, Text]] = []
    seen: set[int] = set()
    summary = False
    for line in lines:
        text = _shorten(decoder.decode_line(line.text))
        if (title := _STEP.match(text.plain)) and int(title[1]) == step + 1:
            step = int(title[1])
            start = line.seconds if step == 1 else start
            seen.add(step)
            if step == _FIRST:
                found += [(None, Text("…", _TIME)), (None, Text())]
            elif step == _LAST + 1:  # before the blank line that the demo wrote already
                found.insert(-1, (None, Text("…", _TIME)))
        summary = summary or text.plain.startswith(_SUMMARY)
        if summary or _FIRST <= step <= _LAST:
            passed = round(line.seconds - start, 1)
            is_new = passed != last and bool(text.plain)
            found.append((passed if is_new else None, text))
            last = passed if is_new else last
    if not summary or not seen.issuperset(range(1, _LAST + 1)):
        raise PictureError("the demo has other steps than before; change tools/docs/demo_picture.py")
    return found


def _shorten(text: Text) -> Text:
    """The text with its style, and without what differs from machine to machine."""
    plain = text.plain
    for pattern, by in SHORTENED:
        plain = pattern.sub(by, plain)
    bold = any(Style.parse(str(span.style)).bold for span in text.spans)
    shown = Text(plain, "bold" if bold else "")
    for pattern, style in _STYLES:
        for match in pattern.finditer(plain):
            shown.stylize(style, *match.span())
    return shown


def _name(lines: Sequence[Line]) -> str:
    software = any("softgpu, a GPU in software" in line.text for line in lines)
    return f"make demo, on {'a GPU in software' if software else 'an NVIDIA GPU'}"


def draw(lines: Iterable[tuple[float | None, Text]], *, title: str) -> str:
    """An SVG of a terminal with these lines. The same lines give the same picture, on every machine.

    Raises PictureError if a line is wider than the picture.
    """
    console = Console(
        record=True,
        file=io.StringIO(),
        width=WIDTH,
        force_terminal=True,
        color_system="truecolor",
        _environ={},
    )
    prompt = Text("$ make demo", Style(color="#7ee787"))
    for seconds, text in [(None, prompt), *lines]:
        passed = f"{seconds:5.1f} s " if seconds is not None else " " * 8
        shown = Text.assemble((passed, _TIME), text)
        if shown.cell_len > WIDTH:
            raise PictureError(f"a line of the demo is too wide for the picture: {text.plain}")
        console.print(shown, no_wrap=True, highlight=False)
    svg = console.export_svg(
        title=title, theme=_THEME, code_format=_FORMAT, font_aspect_ratio=_ASPECT, unique_id="demo"
    )
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


if __name__ == "__main__":
    sys.exit(main())
