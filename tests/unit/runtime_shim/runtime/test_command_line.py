"""Command lines of runtimes: any is read, and one is written that the real runtime takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import command_lines as lines
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusnap.runtime_shim.base.errors import UsageError
from gpusnap.runtime_shim.runtime import options
from gpusnap.runtime_shim.runtime.command_line import (
    CheckpointCall,
    Globals,
    RestoreCall,
    parse,
    probe,
    render,
    render_globals,
)
from gpusnap.runtime_shim.runtime.identify import RealRuntime
from gpusnap.runtime_shim.runtime.options import Option, Takes
from gpusnap.runtime_shim.shim.entry import read

Call = CheckpointCall | RestoreCall

CRUN_1_21 = RealRuntime(Path("/usr/bin/crun"), "crun", (1, 21))
CRUN_1_28 = RealRuntime(Path("/usr/bin/crun"), "crun", (1, 28))
RUNC_1_1 = RealRuntime(Path("/usr/sbin/runc"), "runc", (1, 1, 15))
RUNC_1_3 = RealRuntime(Path("/usr/sbin/runc"), "runc", (1, 3, 6))
OTHER = RealRuntime(Path("/usr/bin/youki"), "other", (0, 5))
RUNTIMES = [CRUN_1_21, CRUN_1_28, RUNC_1_1, RUNC_1_3]
names = [runtime.name for runtime in RUNTIMES]

# What each prints for `checkpoint --help` and `restore --help`, so not from our table.
_BOTH = "image-path work-path tcp-established ext-unix-sk shell-job file-locks manage-cgroups-mode"
_CRUN = f"{_BOTH} network-lock"
_RUNC = f"{_BOTH} lazy-pages auto-dedup empty-ns"
_CRUN_RESTORE = f"{_CRUN} bundle detach pid-file console-socket lsm-profile lsm-mount-context"
_RUNC_RESTORE = (
    f"{_RUNC} bundle detach pid-file console-socket lsm-profile lsm-mount-context no-subreaper no-pivot"
)
_RUNC_CHECKPOINT = f"{_RUNC} parent-path pre-dump leave-running status-fd page-server"
_GLOBAL = "root log log-format debug systemd-cgroup"
HELP = {
    (CRUN_1_21, ""): f"{_GLOBAL} log-level cgroup-manager",
    (CRUN_1_28, ""): f"{_GLOBAL} log-level cgroup-manager",
    (RUNC_1_1, ""): f"{_GLOBAL} rootless criu",
    (RUNC_1_3, ""): f"{_GLOBAL} rootless criu",
    (CRUN_1_21, "checkpoint"): f"{_CRUN} parent-path pre-dump leave-running",
    (CRUN_1_28, "checkpoint"): f"{_CRUN} parent-path pre-dump leave-running",
    (CRUN_1_21, "restore"): _CRUN_RESTORE,
    (CRUN_1_28, "restore"): f"{_CRUN_RESTORE} tcp-close",
    (RUNC_1_1, "checkpoint"): _RUNC_CHECKPOINT,
    (RUNC_1_3, "checkpoint"): f"{_RUNC_CHECKPOINT} tcp-skip-in-flight link-remap",
    (RUNC_1_1, "restore"): _RUNC_RESTORE,
    (RUNC_1_3, "restore"): _RUNC_RESTORE,
}
TABLES = {"": options.GLOBAL, "checkpoint": options.CHECKPOINT, "restore": options.RESTORE}


def options_of(call: Call) -> set[str]:
    """Names of the options that a call sets."""
    pairs: list[tuple[object, Sequence[Option]]] = [
        (call, options.CHECKPOINT if isinstance(call, CheckpointCall) else options.RESTORE)
    ]
    sets = {
        o.name for source, known in pairs for o in known if getattr(source, o.field) not in (None, False, ())
    }
    return sets | {o.name for o in options.GLOBAL if getattr(call.globals, o.field) not in (None, False)}


def words(option: Option, value: str, form: int) -> list[str]:
    """One option, written in one of the ways that are taken."""
    dashes = "-" if form % 2 else "--"
    name = option.short if option.short and form % 3 == 0 else option.name
    if option.takes is Takes.NOTHING:
        return [f"{dashes}{name}" + (f"={value}" if form % 5 == 0 else "")]
    return [f"{dashes}{name}={value}"] if form % 5 < 2 else [f"{dashes}{name}", value]


def values(option: Option) -> st.SearchStrategy[str]:
    if option.takes is Takes.NOTHING:
        return st.sampled_from(["true", "1", "T", "false", "0"])
    if option.takes is Takes.NUMBER:
        return st.integers(-1, 10**6).map(str)
    if option.choices:
        return st.sampled_from(option.choices)
    return st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)


def given_options(known: Sequence[Option]) -> st.SearchStrategy[list[list[str]]]:
    one = st.sampled_from(known).flatmap(
        lambda option: st.builds(lambda v, f: words(option, v, f), values(option), st.integers(0, 29))
    )
    return st.lists(one, max_size=12)


@st.composite
def command_lines(draw: st.DrawFn, runtime: RealRuntime | None = None) -> list[str]:
    """Any line, or any that a runtime takes by its --help: options in any order, often, around the ID."""

    def of(command: str) -> Sequence[Option]:
        taken = HELP[runtime, command].split() if runtime else [o.name for o in TABLES[command]]
        return [o for o in TABLES[command] if o.name in taken]

    command = draw(st.sampled_from(["checkpoint", "restore"]))
    identity = draw(st.from_regex(r"[A-Za-z0-9_.+][A-Za-z0-9_.+-]{0,20}", fullmatch=True))
    groups = draw(given_options(of(command)))
    groups.insert(draw(st.integers(0, len(groups))), [identity])
    return [word for group in [*draw(given_options(of(""))), [command], *groups] for word in group]


@given(command_lines())
def test_what_is_rendered_reads_the_same(line: list[str]) -> None:
    call = parse(line)
    rendered = render(call, OTHER)
    assert parse(rendered[1:]) == call
    assert render(parse(rendered[1:]), OTHER) == rendered


@pytest.mark.parametrize("runtime", RUNTIMES, ids=names)
@settings(max_examples=50)
@given(data=st.data())
def test_every_runtime_gets_all_that_it_takes(runtime: RealRuntime, data: st.DataObject) -> None:
    call = parse(data.draw(command_lines(runtime)))
    if runtime == RUNC_1_1 and call.manage_cgroups_mode == "ignore":
        call = dataclasses.replace(call, manage_cgroups_mode="soft")
    line = render(call, runtime)
    assert parse(line[1:]) == call
    assert line[-1] == call.container_id


@pytest.mark.parametrize("runtime", RUNTIMES, ids=names)
@settings(max_examples=50)
@given(line=command_lines())
def test_no_runtime_gets_what_it_does_not_take(runtime: RealRuntime, line: list[str]) -> None:
    call = parse(line)
    command = "checkpoint" if isinstance(call, CheckpointCall) else "restore"
    known = {*HELP[runtime, ""].split(), *HELP[runtime, command].split()}
    refusal = ""
    again = call
    try:
        again = parse(render(call, runtime)[1:])
    except UsageError as error:
        refusal = error.sentence()
    if refusal:
        assert f"{runtime.name} takes no --" in refusal
        assert "; omit it, or " in refusal
    else:
        assert options_of(again) == options_of(call) & known


@pytest.mark.parametrize("command", TABLES)
@pytest.mark.parametrize("runtime", RUNTIMES, ids=names)
def test_the_table_is_what_help_says(runtime: RealRuntime, command: str) -> None:
    taken = {o.name for o in TABLES[command] if o.rule(runtime.kind).takes(runtime.version)}
    assert taken == set(HELP[runtime, command].split())


def test_every_option_has_its_field() -> None:
    for call, known in ((CheckpointCall, options.CHECKPOINT), (RestoreCall, options.RESTORE)):
        fields = {field.name for field in dataclasses.fields(call)} - {"container_id", "globals"}
        assert fields == {option.field for option in known}
        assert len(known) == len(fields)
    assert {f.name for f in dataclasses.fields(Globals)} - {"raw"} == {o.field for o in options.GLOBAL}


def expected(args: list[str], runtime: RealRuntime) -> list[str]:
    """The line that came in, less the words that this runtime must not see; the ID stays last."""
    crun = runtime.kind == "crun"
    left = [word for word in args if word not in ("--no-new-keyring", "-no-subreaper")]
    left += [] if crun or "-no-subreaper" not in args else ["--no-subreaper"]
    if "--preserve-fds" in left:
        del left[left.index("--preserve-fds") : left.index("--preserve-fds") + 2]
    if crun and "--no-pivot" in left:
        left.remove("--no-pivot")
    if runtime is not CRUN_1_28 and "--tcp-close" in left:
        left.remove("--tcp-close")  # CRIU's file has it
    return [part for word in left for part in (word.split("=", 1) if word.startswith("--") else [word])]


REFUSED = {
    ("containerd checkpoint --empty-ns", CRUN_1_21): "set runtime in",
    ("containerd checkpoint --empty-ns", CRUN_1_28): "set runtime in",
}
ENGINES = {name: line for name, line in lines.OURS.items() if name.startswith(("podman", "con", "cri"))}


@pytest.mark.parametrize("runtime", RUNTIMES, ids=names)
@pytest.mark.parametrize("name", ENGINES)
def test_what_engines_send(name: str, runtime: RealRuntime) -> None:
    call = parse(ENGINES[name])
    if (name, runtime) in REFUSED:
        with pytest.raises(UsageError) as caught:
            render(call, runtime)
        assert REFUSED[name, runtime] in caught.value.hint
        return
    line = render(call, runtime)
    assert line[0] == str(runtime.path)
    assert line[-1] == lines.ID
    # Duplicates are merged and the order is ours; runtimes do not care about it among options.
    assert set(line[1:]) == set(expected(ENGINES[name], runtime))
    assert parse(line[1:]).container_id == lines.ID


def test_containerd_restore_in_full() -> None:
    call = parse(lines.CONTAINERD_RESTORE)
    assert isinstance(call, RestoreCall)
    assert call.no_subreaper
    assert call.no_pivot
    assert call.globals == Globals(
        root="/run/containerd/runc/k8s.io",
        log=f"{lines.SHIM}/log.json",
        log_format="json",
        systemd_cgroup=True,
    )
    assert call.globals.raw == tuple(lines.CONTAINERD_RESTORE[:7])
    assert render(call, CRUN_1_21)[8:] == [
        *("restore", "--bundle", lines.SHIM, "--detach", "--pid-file", f"{lines.SHIM}/init.pid"),
        *("--console-socket", "/tmp/pty1/pty.sock", "--image-path", "/run/ckpt/img"),
        *("--work-path", f"{lines.SHIM}/work", lines.ID),
    ]


def test_fields_are_the_truth() -> None:
    call = parse(["--log", "/a", "checkpoint", "--leave-running", "x"])
    assert isinstance(call, CheckpointCall)
    shared = dataclasses.replace(call.globals, log="/b")
    changed = dataclasses.replace(call, leave_running=False, globals=shared)
    assert render(changed, RUNC_1_3)[1:] == ["--log", "/b", "checkpoint", "x"]
    assert render_globals(shared, RUNC_1_3) == ["/usr/sbin/runc", "--log", "/b"]


def test_values_are_words_of_their_own() -> None:
    call = parse(["checkpoint", "--network-lock=nftables", "--manage-cgroups-mode=soft", "x"])
    assert render(call, CRUN_1_21)[2:] == [
        *("--manage-cgroups-mode", "soft", "--network-lock", "nftables", "x"),
    ]


def test_an_id_that_looks_like_an_option() -> None:
    call = parse(["checkpoint", "--", "-x"])
    assert call.container_id == "-x"
    assert render(call, OTHER)[-2:] == ["--", "-x"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("checkpoint", "checkpoint was given no container ID"),
        ("restore --detach", "restore was given no container ID"),
        ("restore --", "restore was given no container ID"),
        ("checkpoint x y", "takes one container ID but was given 'x' 'y'"),
        ("checkpoint --shiny x", "checkpoint has no option --shiny"),
        ("checkpoint --detach x", "checkpoint has no option --detach"),
        ("restore --leave-running x", "restore has no option --leave-running"),
        ("restore --leave x", "restore has no option --leave"),
        ("restore -db x", "restore has no option -db"),
        ("restore --shiny=7 x", "restore has no option --shiny;"),
        ("--shiny checkpoint x", "gpusnap-runtime has no option --shiny"),
        ("checkpoint x --image-path", "option --image-path requires an argument"),
        ("checkpoint --leave-running=yes x", "--leave-running is 'yes'; it must be true or false"),
        ("checkpoint --status-fd three x", "--status-fd is 'three'; it must be a whole number"),
        ("checkpoint --status-fd ٣ x", "it must be a whole number"),
        ("restore --preserve-fds= x", "--preserve-fds is ''; it must be a whole number"),
        ("restore --manage-cgroups-mode all x", "it must be one of soft, full, strict, ignore"),
        ("--cgroup-manager none restore x", "it must be one of cgroupfs, systemd, disabled"),
        ("state x", "'state' is neither checkpoint nor restore"),
        ("", "'' is neither checkpoint nor restore"),
    ],
)
def test_lines_that_are_refused(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(line.split())
    assert message in caught.value.sentence()


@pytest.mark.parametrize(
    ("line", "runtime", "message"),
    [
        ("restore --preserve-fds 2 x", RUNC_1_3, "runc 1.3.6 takes no --preserve-fds 2 for restore"),
        ("checkpoint --manage-cgroups-mode ignore x", RUNC_1_1, "(added in runc 1.2)"),
        ("checkpoint --network-lock skip x", RUNC_1_3, 'add "network-lock skip" to criu.options'),
        ("--cgroup-manager disabled restore x", RUNC_1_3, "runc 1.3.6 takes no --cgroup-manager disabled;"),
        ("--criu /opt/criu restore x", CRUN_1_28, "crun 1.28 takes no --criu /opt/criu;"),
    ],
)
def test_what_a_runtime_cannot_do_is_refused(line: str, runtime: RealRuntime, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        render(parse(line.split()), runtime)
    assert message in caught.value.sentence()


def test_what_crius_file_says_is_left_out() -> None:
    """Options about TCP that a runtime does not take reach CRIU by its configuration file."""
    assert render(parse(["restore", "--tcp-close", "x"]), RUNC_1_3)[1:] == ["restore", "x"]
    assert render(parse(["restore", "--tcp-close", "x"]), CRUN_1_21)[1:] == ["restore", "x"]
    assert render(parse(["checkpoint", "--tcp-skip-in-flight", "x"]), RUNC_1_1)[1:] == ["checkpoint", "x"]


def test_idle_values_ask_for_nothing() -> None:
    assert render(parse(["checkpoint", "--status-fd", "-1", "x"]), CRUN_1_21)[1:] == ["checkpoint", "x"]
    assert render(parse(["restore", "--preserve-fds", "0", "x"]), RUNC_1_3)[1:] == ["restore", "x"]


def test_a_runtime_without_a_version_counts_as_new() -> None:
    unknown = RealRuntime(Path("/usr/bin/crun"), "crun", ())
    assert "--tcp-close" in render(parse(["restore", "--tcp-close", "x"]), unknown)


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = parse(["checkpoint", "x"])
    restore = parse(["restore", "-b", "b", "x"])
    assert isinstance(checkpoint, CheckpointCall)
    assert isinstance(restore, RestoreCall)
    assert (checkpoint.images(), checkpoint.work()) == (tmp_path / "checkpoint", None)
    assert restore.bundle_dir() == tmp_path / "b"
    assert restore.images("runc") == tmp_path / "checkpoint"
    assert restore.images("crun") == tmp_path / "b" / "checkpoint"
    given_paths = dataclasses.replace(restore, image_path="i", work_path="/w")
    assert given_paths.images("runc") == given_paths.images("crun") == tmp_path / "b" / "i"
    assert given_paths.work() == Path("/w")
    assert dataclasses.replace(checkpoint, work_path="w").work() == tmp_path / "w"


def test_a_current_directory_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """containerd has its runtime work in the bundle, and removes that with the pod: absolute paths count."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    call = RestoreCall(container_id="c", bundle="/b", image_path="/i", work_path="/w")
    assert (call.bundle_dir(), call.images(), call.work()) == (Path("/b"), Path("/i"), Path("/w"))
    assert CheckpointCall(container_id="c", image_path="/i").images() == Path("/i")


@pytest.mark.parametrize(
    ("line", "probed"),
    [
        ("checkpoint --help", "checkpoint --help"),
        ("--root /r checkpoint -h", "--root /r checkpoint -h"),
        ("restore -?", "restore -?"),
        ("restore --lsm-mount-context", "restore --lsm-mount-context"),
        # crun, which takes options before the ID only, would checkpoint the container.
        ("checkpoint x --help", "checkpoint --help"),
        ("checkpoint --leave-running x --image-path", "checkpoint --image-path"),
        ("checkpoint --image-path --help x", None),
        ("checkpoint -- --help", None),
        ("checkpoint x", None),
        ("checkpoint --shiny --work-path=/w x", None),
        ("restore --network-lock", None),
    ],
)
def test_probe(line: str, probed: str | None) -> None:
    args = line.split()
    assert probe(args, read(args)[1]) == (probed.split() if probed is not None else None)
