"""Completion of command lines by the shell: click's own, and names in stores and of containers.

bash ends a word at a colon, and names of checkpoints contain colons. So we use our own function, which passes
the line as it is. Nothing here may fail or wait long; if there is no quick answer, there is no completion.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    ShellComplete,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

from gpusnap.oci.base.errors import OciError
from gpusnap.runtime_shim.base.errors import GpusnapError

if TYPE_CHECKING:
    from gpusnap.oci.store.store import Store

SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_GPUSNAP_COMPLETE"
_STORE = "oci:"
_DEADLINE = 3.0
# More are of no use to anybody on a terminal.
_MOST = 500


@add_completion_class
class Bash(BashComplete):
    """bash's completion, for words with colons in them."""

    # What bash has as the current word begins after the last colon (COMP_WORDBREAKS), so replies do, too.
    source_template = r"""%(complete_func)s() {
    local IFS=$'\n' line="${COMP_LINE:0:COMP_POINT}" reply type value last
    last="${line##*[[:space:]]}"
    COMPREPLY=()
    reply=$(env COMP_WORDS="$line" %(complete_var)s=bash_complete "$1")
    for reply in $reply; do
        type="${reply%%,*}" value="${reply#*,}"
        if [[ $type == dir ]]; then
            compopt -o dirnames
        elif [[ $type == file ]]; then
            compopt -o default
        elif [[ $COMP_WORDBREAKS == *:* && $last == *:* ]]; then
            COMPREPLY+=("${value#"${last%%"${last##*:}"}"}")
        else
            COMPREPLY+=("$value")
        fi
    done
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words of the line up to the cursor, and the one that is incomplete."""
        line = os.environ["COMP_WORDS"]
        words = split_arg_string(line)[1:]
        incomplete = words.pop() if words and not line[-1:].isspace() else ""
        return words, incomplete


@click.command()
@click.argument("shell", type=click.Choice(SHELLS), metavar="|".join(SHELLS))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the shell completion script for gpusnap.

    \b
    bash: gpusnap completion bash > /usr/share/bash-completion/completions/gpusnap
    zsh:  gpusnap completion zsh > "${fpath[1]}/_gpusnap"
    fish: gpusnap completion fish > ~/.config/fish/completions/gpusnap.fish

    It completes commands, options, names and digests in stores, and the names of running containers.
    """
    kind = get_completion_class(shell)
    assert kind is not None, shell
    # Not `source` of bash's class: that runs a bash to ask for its version.
    made = kind(ctx.find_root().command, {}, "gpusnap", _VARIABLE)
    click.echo(ShellComplete.source(made), nl=False)


def complete_checkpoint(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a checkpoint: in this host's store, in oci:DIR, or a file."""
    found = complete_stored(ctx, param, incomplete)
    if not incomplete.startswith(_STORE):
        found.append(CompletionItem(incomplete, type="file"))
    return found


def complete_stored(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a name or the digits of a digest in this host's store, or oci:DIR:NAME."""
    from gpusnap.checkpoints.locator import default_store
    from gpusnap.oci.store.store import Store

    if not incomplete.startswith(_STORE):
        with suppress(GpusnapError):
            return _items(_iterate_names(default_store()), incomplete)
        return []
    folder, colon, _ = incomplete.removeprefix(_STORE).partition(":")
    if not colon:
        return _folders(folder)
    return _items((f"{_STORE}{folder}:{name}" for name in _iterate_names(Store(folder))), incomplete)


def complete_store(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """oci:DIR."""
    if incomplete.startswith(_STORE):
        return _folders(incomplete.removeprefix(_STORE))
    return _items([_STORE], incomplete)


def complete_container(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a running container, as Podman has it."""
    from gpusnap.runtime_shim.runtime import child_process

    try:
        done = child_process.run(
            ["podman", "container", "ps", "--format", "{{.Names}}"], env=os.environ, seconds=_DEADLINE
        )
    except GpusnapError:
        return []
    return _items(done.out.split(), incomplete)


def complete_suspended(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a suspended container."""
    from gpusnap.runtime_shim.snapshot.records import suspensions

    with suppress(GpusnapError):
        return _items((each.name for each in suspensions.find()), incomplete)
    return []


def _iterate_names(store: Store) -> Iterator[str]:
    """Yield names, and the first digits of what has none."""
    with suppress(OciError):
        for entry in store.entries():
            yield entry.name or entry.descriptor.digest.partition(":")[2][:12]


def _folders(begin: str) -> list[CompletionItem]:
    """Folders that begin so, each as oci:DIR."""
    folder, name = os.path.split(begin)
    try:
        with os.scandir(folder or ".") as found:
            names = sorted(each.name for each in found if each.name.startswith(name) and each.is_dir())
    except OSError:
        return []
    return _items((_STORE + os.path.join(folder, each) for each in names), "")


def _items(words: Iterable[str], incomplete: str) -> list[CompletionItem]:
    # A line break or the like in a name from somebody's index would be another reply.
    fitting = (word for word in words if word.startswith(incomplete) and word.isprintable())
    return [CompletionItem(word) for word in list(dict.fromkeys(fitting))[:_MOST]]
