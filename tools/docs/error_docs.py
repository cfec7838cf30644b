"""docs/errors.md, from the source: `make docs` writes it.

Each message that `error_messages` finds stands there: below the code that it is given, with what
gpusnap.error_codes has of that code; or at the end, where it says by itself what to do. `uncured` names those
that do neither, `unknown` codes that are used and not described, `unused` those that are described and not
used: tests keep all three empty.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpusnap.base.user_errors import failure
from gpusnap.error_codes import CODES, GROUPS
from gpusnap.error_codes.entry import ErrorCode
from gpusnap.oci.base import errors
from gpusnap.runtime_shim.gpu.api.errors import GpuError
from gpusnap.runtime_shim.gpu.nvidia.result_codes import CUDA_RESULTS, NVML_RESULTS
from tools.docs import error_messages
from tools.docs.error_messages import INHERITED, Message, Messages
from tools.docs.error_templates import bare
from tools.docs.error_texts import INTRODUCTION, PARTS, REASONS, SAYS_ALL

__all__ = ["code_of", "main", "markdown", "uncured", "unknown", "unused"]

ROOT = Path(__file__).parents[2]
_HEAD = "Made by `make docs` from the source, gpusnap/error_codes and tools/docs/error_texts.py; edit those."
_WITHOUT = "Messages without a code"
_TYPED = ("UsageError", "Interrupted", "Cancelled")
"""What was typed, or a signal: the message says all there is to say."""
_BRACKET = re.compile(r"<(?!https://)")
_REASON = re.compile(r"<(reason|error|message|why|reworded)>[^<>]{0,2}$")
"""A message that ends with an underlying error."""


def markdown(found: Messages | None = None) -> str:
    """docs/errors.md."""
    found = found or error_messages.read(ROOT)
    return "\n".join(_markdown(found.messages)) + "\n"


def code_of(message: Message) -> str:
    """Below which code the message stands; empty where it has none."""
    return message.code or PARTS.get(message.kind, "")


def uncured(found: Messages | None = None) -> tuple[str, ...]:
    """A sentence for each message that says nothing of what to do: it names the message, and the remedy."""
    found = found or error_messages.read(ROOT)
    return tuple(
        f"{each.module} says {each.template!r} ({each.kind}) and not what to do: give it a hint there, or a "
        f"code of gpusnap/error_codes"
        for each in found.messages
        if not (code_of(each) or _hints(each) or _explains_itself(each))
    )


def unknown(found: Messages | None = None) -> tuple[str, ...]:
    """The codes that messages have and gpusnap.error_codes does not."""
    found = found or error_messages.read(ROOT)
    return tuple(sorted({code_of(each) for each in found.messages} - {"", INHERITED, *CODES}))


def unused(found: Messages | None = None) -> tuple[str, ...]:
    """The codes of gpusnap.error_codes, and the texts of SAYS_ALL, that no message has."""
    found = found or error_messages.read(ROOT)
    codes = {each.code for each in found.messages} | {each.code for each in _driver_kinds()}
    said = {bare(each.template) for each in found.messages}
    return (*(code for code in CODES if code not in codes), *(t for t in SAYS_ALL if bare(t) not in said))


def _hints(message: Message) -> tuple[str, ...]:
    """What follows the message after a semicolon: given where it is made, or by gpusnap.base.user_errors."""
    kind = getattr(errors, message.kind, None)
    general = failure(kind("")).hint if isinstance(kind, type) and issubclass(kind, errors.OciError) else ""
    return message.hints or ((general,) if general else ())


def _explains_itself(message: Message) -> bool:
    return (
        message.kind in _TYPED
        or _REASON.search(message.template) is not None
        or bare(message.template) in {bare(each) for each in SAYS_ALL}
    )


# Markdown


def _markdown(messages: Sequence[Message]) -> Iterator[str]:
    yield from ("# Errors", "", f"<!-- {_HEAD} -->", "", INTRODUCTION.strip(), "")
    yield from ("| | | codes |", "|---|---|---:|")
    for digit, title in GROUPS.items():
        yield f"| GPS-{digit}… | [{title}](#{_anchor(title)}) | {len(_of_group(digit))} |"
    yield f"| | [{_WITHOUT}](#{_anchor(_WITHOUT)}) | |"
    for digit, title in GROUPS.items():
        yield from ("", f"## {title}")
        for code in _of_group(digit):
            yield from _section(code, [each for each in messages if code_of(each) == code.code])
    yield from _without(messages)
    yield from ("", "## Reasons", "")
    yield "A message that ends with one of these reports a kernel error for the file or call that it names."
    yield from ("", "| reason | what to do |", "|---|---|")
    yield from (f"| `{words}` | {cure} |" for words, cure in REASONS.items())


def _section(code: ErrorCode, messages: Sequence[Message]) -> Iterator[str]:
    yield from ("", f"### {code.code} {code.name}", "", _linked(code.cause), "")
    yield from (f"**What to do**: {_linked(code.cure)}", "", "The messages:", "")
    rows = [*_answers(code.code)]
    for each in messages:
        rows.append(f"- {'… ' if each.kind in (*PARTS, 'Sharing') else ''}{_quoted(each.template)}")
    yield from dict.fromkeys(rows)


def _without(messages: Sequence[Message]) -> Iterator[str]:
    yield from ("", f"## {_WITHOUT}", "", "These add words to another error, and have its code, if any:", "")
    yield from _sorted(f"- {_quoted(each.template)}" for each in messages if each.code == INHERITED)
    messages = [each for each in messages if not code_of(each)]
    yield from ("", "These say what to do, after a semicolon:", "")
    hinted = [each for each in messages if _hints(each)]
    yield from _sorted(
        f"- {_quoted(each.template)}; {_plain('; or: '.join(_hints(each)))}" for each in hinted
    )
    yield from ("", "These end with the underlying error; see [the reasons](#reasons) below:", "")
    rest = [each for each in messages if not _hints(each)]
    reasons = [each for each in rest if _REASON.search(each.template)]
    yield from _sorted(f"- {_quoted(each.template)}" for each in reasons)
    yield from ("", "These are about a command line, a signal, or say all there is to say:", "")
    yield from _sorted(f"- {_quoted(each.template)}" for each in rest if each not in reasons)


def _sorted(rows: Iterator[str]) -> list[str]:
    return sorted(set(rows), key=lambda row: (re.sub("<[^>]*>|[^a-z ]", "", row.lower()).split(), row))


def _of_group(digit: str) -> list[ErrorCode]:
    return [each for each in CODES.values() if each.code.startswith(f"GPS-{digit}")]


def _answers(code: str) -> Iterator[str]:
    """The message that is put together from a number of the driver's, with the driver's words for it."""
    for kind in _driver_kinds():
        if kind.code == code:
            names = [
                name
                for table in (CUDA_RESULTS, NVML_RESULTS)
                for name, known in table.values()
                if known is kind
            ]
            shown = ", ".join(f"`{each}`" for each in dict.fromkeys(names))
            because = kind.because
            yield f"- `the GPU driver could not …: {because}`, `NVML could not …: {because}` ({shown})"


def _driver_kinds() -> list[type[GpuError]]:
    found = {kind for table in (CUDA_RESULTS, NVML_RESULTS) for _, kind in table.values()}
    return sorted(found, key=lambda each: each.__name__)


def _anchor(title: str) -> str:
    """The anchor that a heading has on GitHub."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _linked(text: str) -> str:
    """With links to the pages that are named, as this one is beside them."""
    return re.sub(r"docs/([\w-]+\.md)(#[\w-]+)?", _link, _plain(text))


def _link(found: re.Match[str]) -> str:
    name, anchor = found[1], found[2] or ""
    return f"[{anchor[1:] if name == 'errors.md' else name}]({'' if name == 'errors.md' else name}{anchor})"


def _quoted(template: str) -> str:
    """As Markdown's code, also where there are backquotes in it."""
    return f"`` {template} ``" if "`" in template else f"`{template}`"


def _plain(text: str) -> str:
    """With angle brackets as text, but for those within backquotes and around addresses."""
    parts = text.split("`")
    return "`".join(part if at % 2 else _BRACKET.sub("&lt;", part) for at, part in enumerate(parts))


def _told(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr)


def main() -> int:
    """Write the file; 1, and a sentence for each, where messages say nothing of what to do."""
    found = error_messages.read(ROOT)
    if missing := uncured(found):
        _told(missing)
        return 1
    path = ROOT / "docs" / "errors.md"
    path.write_text(markdown(found), "utf-8")
    _told([str(path)])
    return 0
