"""Damaged and malicious checkpoints: each is refused with an error message, or restored correctly.

    make native; tests/host/host enter --env GPUSNAP_TESTHOST=1 [--bind DIR:/keep] --
        /opt/gpusnap/bin/python -B /src/bench/fuzz.py [--rounds 500] [--seed 1] [--only TEXT] [--keep /keep]

Half of the rounds are hand-written cases (fuzz_cases.py), spread over all of them; the others are random.
Each checkpoint goes to `gpusnap verify` and to a restore, by Podman or by `gpusnap restore`. A refusal is an
error message on stderr within the deadline, without a traceback. A restored container continues with every
byte of GPU memory right. A restore refuses what verify refuses, and the reverse. The exception is content
without digests, which is CRIU's images and the engine's files in an archive ("unseen"): such damage may be
restored, and the container may then end or compute wrong results; --strict counts that as a failure.
Afterwards no process, mount, container or file is left, and nothing outside was written.
"""

from __future__ import annotations

import itertools
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from faulthost import (
    COMMAND,
    Bad,
    Done,
    Report,
    State,
    checked_message,
    parser,
    plain,
    prepare,
    remove_all,
    run_limited,
    settings,
    start,
    wait_for,
)
from fuzz_cases import at_random, by_hand
from mutations import CANARY, Base, Case
from mutations_store import NAME_IN_STORE
from support import good, podman, run

NAME = "fuzzed"
_TICK = re.compile(r"tick=(\d+) (ok|BAD)")


def base(folder: Path) -> Base:
    """One container's checkpoint, as an archive and in a store."""
    container = start(NAME, "--touch", "1")
    good(container.checkpoint(folder / "base.tar", "--compress", "none", "--leave-running"))
    store = f"oci:{folder}/store:{NAME_IN_STORE}"
    good(run(COMMAND, "checkpoint", NAME, "--to", store, "--leave-running"))
    container.remove()
    (folder / "unpacked").mkdir()
    good(run("tar", "-C", folder / "unpacked", "-xpf", folder / "base.tar"))
    return Base(folder / "base.tar", folder / "unpacked", folder / "store")


def since(moment: int) -> list[str]:
    """Return what each tick found that was logged after a moment, in nanoseconds since 1970."""
    log = podman("logs", "--since", f"{moment // 10**9}.{moment % 10**9:09}", NAME).out
    return [found for _, found in _TICK.findall(log)]


def goes_on() -> str:
    """Return how a restored container goes on: "right", "wrong", "ended", or "stands" if it does not."""
    # Of the log that came with it the last tick may be cut off.
    before = int(podman("inspect", "--format", "{{.State.StartedAt.UnixNano}}", NAME).out.strip() or 0)

    def over() -> str:
        found = since(before)
        if "BAD" in found:
            return "wrong"
        if len(found) > 3:
            return "right"
        running = podman("inspect", "--format", "{{.State.Running}}", NAME).out.strip() == "true"
        return "" if running else "ended"

    how: str = wait_for(over, seconds=30)
    return how or "stands"


def try_restore(locator: str, by_podman: bool) -> tuple[str, str]:
    """Return the error of a restore, or "" and how the container went on."""
    if by_podman and not locator.startswith("oci:"):
        line = ["podman", "--runtime", "gpusnap-runtime", "container", "restore", "--import", locator]
    else:
        line = [COMMAND, "restore", locator]
    done = run_limited(line)
    return (checked_message(done) or "refused", "") if done.code else ("", "restored")


def round_of(
    case: Case, folder: Path, *, by_podman: bool, strict: bool, report: Report, before: State
) -> None:
    """Run one case, from making it to removing it. Raises Bad."""
    locator = case.make(folder)
    verify = run_limited([COMMAND, "verify", locator])
    verdict = _verdict(verify)
    said, how = try_restore(locator, by_podman and case.podman)
    if how:
        how = goes_on()
    remove_all()
    left = [*before.left(), *(str(path) for path in CANARY.iterdir())]
    if left:
        raise Bad(
            f"left behind by {'podman' if by_podman else 'gpusnap'} restore ({said or how}): {left[:10]}"
        )
    outcome = _outcome(case, verdict, said, how, strict=strict)
    report.note(f"{case.name} | {outcome} | {verdict[:300]} | {said[:300]}")
    report.counts[outcome] += 1
    if said:
        report.said[plain(said)] += 1


def _verdict(verify: Done) -> str:
    """Return verify's error; "" if it accepts."""
    if verify.code == 0:
        return ""
    if verify.code not in (1, 3, 4):
        raise Bad(f"verify ended with {verify.code}: {verify.err[-2000:]}")
    if verify.code == 4 and verify.out.strip() and "Traceback" not in verify.err:
        return " / ".join(verify.out.strip().splitlines()[-3:])
    return checked_message(verify)


def _outcome(case: Case, verdict: str, said: str, how: str, *, strict: bool) -> str:
    """Return the result of the round. Raises Bad if it is not allowed."""
    if verdict and said:
        return "refused"
    if not verdict and how == "right":
        return "restored"
    if verdict and how == "right":
        return "restored right, which verify refuses"
    if case.unseen and not strict:
        return f"{'only verify refuses' if verdict else 'unseen'}, {'refused' if said else how}"
    raise Bad(f"verify: {verdict or 'right'}; the restore: {said or how}")


def choose(whole: Base, rounds: int, only: str | None) -> list[Case]:
    """Return hand-written cases, as many of each group, and as many random ones."""
    groups = by_hand(whole)
    print({group: len(cases) for group, cases in groups.items()}, flush=True)
    if only:
        return [case for cases in groups.values() for case in cases if only in case.name]
    for cases in groups.values():
        random.shuffle(cases)
    rows = itertools.zip_longest(*groups.values())
    chosen = [case for row in rows for case in row if case is not None][: rounds // 2]
    chosen += [at_random(whole, random.randrange(1 << 30)) for _ in range(rounds - len(chosen))]
    random.shuffle(chosen)
    return chosen


def main() -> int:
    """Make the base, and run the rounds."""
    given = parser(__doc__ or "", 500)
    given.add_argument("--only", help="cases by hand with this in their names, all of them")
    given.add_argument("--runtime", default="crun")
    given.add_argument(
        "--strict", action="store_true", help="damage in what has no digest may not pass either"
    )
    options = given.parse_args()
    report = prepare("fuzz", options)
    settings(options.runtime)
    CANARY.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="fuzz-") as name:
        whole = base(Path(name))
        remove_all()
        chosen = choose(whole, options.rounds, options.only)
        before, slowest = State.now(), 0.0
        for number, case in enumerate(chosen):
            if report.over(options.seconds):
                break
            folder = Path(name, "round")
            folder.mkdir()
            report.counts["rounds"] += 1
            begun = time.monotonic()
            try:
                by_podman = number % 2 == 0
                round_of(
                    case, folder, by_podman=by_podman, strict=options.strict, report=report, before=before
                )
            except (Bad, AssertionError, OSError) as error:
                report.failed(case.name, error, *folder.iterdir())
                remove_all()
                for path in CANARY.iterdir():
                    path.unlink()
                before = State.now()
            shutil.rmtree(folder)
            slowest = max(slowest, time.monotonic() - begun)
    report.counts["slowest round, seconds"] = round(slowest)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
